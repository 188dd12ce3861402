"""Shardy's output back into our IR: rules for its collectives, a spec for every value, and our own
locations.

Works on the importer's hooks and on the text of attributes, so that it needs no jaxlib of its own.
What the mesh cannot express (an axis split into sub-axes) and what the partitioner left unresolved
is refused, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compiler.diagnostics import UNKNOWN_LOC, Loc, ShardingError
from compiler.frontend.importer import ImportHooks
from compiler.frontend.rules import RULES
from compiler.frontend.rules.registry import Rule, refuse
from compiler.ir.ops import (
    AllGatherAttrs,
    AllReduceAttrs,
    AllSliceAttrs,
    AllToAllAttrs,
    CollectivePermuteAttrs,
    ReduceScatterAttrs,
)
from compiler.ir.types import Graph, Op, Value
from sharding.mesh import Mesh
from sharding.partitioned import PartitionedGraph, Slot
from sharding.permutes import permute_pairs
from sharding.spec import ShardingSpec, replicated

if TYPE_CHECKING:
    from compiler.frontend.importer import Site

UNRESOLVED = (
    "sdy.manual_computation",
    "sdy.propagation_barrier",
    "sdy.replicated_to_unreduced",
    "sdy.reshard",
    "sdy.sharded_to_unreduced",
    "sdy.sharding_constraint",
)
REDUCES = ("all_reduce", "reduce_scatter")
COMPLETING = ("add", "max", "min", "and", "or")
_SUB_AXIS = re.compile(r'"(\w+)":\((\d+)\)(\d+)')
_SHARDING = re.compile(r"<@\w+, \[(.*?)\](?:, replicated=\{[^}]*\})?(?:, unreduced=\{([^}]*)\})?>")


class ShardyReader:
    """Collects specs while the importer runs, then completes and checks the graph."""

    def __init__(self, mesh: Mesh, origins: Sequence[Loc]) -> None:
        self.mesh = mesh
        self.origins = origins
        self.specs: dict[Value, ShardingSpec] = {}
        self.constants: dict[object, dict[ShardingSpec, None]] = {}
        self._parsed: dict[str, tuple[ShardingSpec, ...]] = {}

    def rules(self) -> Mapping[str, Rule]:
        """Import rules for the ops of the partitioner."""
        table: dict[str, Rule] = {
            "sdy.constant": self._constant,
            "sdy.all_gather": self._per_dim("gathering_axes", _gather_step),
            "sdy.all_slice": self._per_dim("slicing_axes", _slice_step),
            "sdy.reduce_scatter": self._per_dim("reduce_scatter_axes", _scatter_step),
            "sdy.all_reduce": self._all_reduce,
            "sdy.all_to_all": self._all_to_all,
            "sdy.collective_permute": self._collective_permute,
        }
        return table | {name: _unresolved for name in UNRESOLVED}

    def hooks(self) -> ImportHooks:
        """Hooks that record the sharding of every op result and block argument."""
        return ImportHooks(on_op=self._on_op, on_block=self._on_block)

    def _on_op(self, op: Any, values: Sequence[Value]) -> None:
        """Record the results of one op; without an attribute they are replicated."""
        key = "out_sharding" if "out_sharding" in op.attributes else "sdy.sharding"
        self._record(values, _entry(op.attributes, key))

    def _on_block(self, owner: Any, values: Sequence[Value]) -> None:
        """Arguments of the function, or carries of a loop (those follow the loop's results)."""
        if owner.name == "func.func":
            given = _entry(owner.attributes, "arg_attrs")
            for i, value in enumerate(values):
                attribute = None if given is None else _entry(given[i], "sdy.sharding")
                self._record([value], attribute)
        elif owner.name == "stablehlo.while":
            self._record(values, _entry(owner.attributes, "sdy.sharding"))

    def _record(self, values: Sequence[Value], attribute: Any) -> None:
        """Set the specs of `values`."""
        if attribute is None:
            self.specs.update({v: replicated(v.type.rank) for v in values})
            return
        parsed = self._parse(str(attribute))
        self.specs.update(zip(values, parsed, strict=True))

    def _parse(self, text: str) -> tuple[ShardingSpec, ...]:
        """The shardings in the text of an attribute."""
        if text not in self._parsed:
            _refuse_sub_axes(text)
            found = _SHARDING.findall(text)
            self._parsed[text] = tuple(
                ShardingSpec(axis_lists(dims), _axes(unreduced)) for dims, unreduced in found
            )
        return self._parsed[text]

    def _per_dim(self, key: str, step: Callable[[Site, Value, int, tuple[str, ...]], Op]) -> Rule:
        """A rule that emits one op per dim of a list of axes per dim."""

        def rule(site: Site) -> Sequence[Value]:
            text = str(site.op.attributes[key])
            _refuse_sub_axes(text)
            (value,) = site.operands
            spec = self.specs[value]
            for dim, axes in enumerate(axis_lists(text)):
                if axes:
                    value = step(site, value, dim, axes).result
                    spec = self.specs[value] = spec.with_dim(
                        dim, _moved(spec.dims[dim], axes, grow=key != "gathering_axes")
                    )
            return [value]

        return rule

    def _constant(self, site: Site) -> Sequence[Value]:
        """A constant; the importer repeats splats inside of loops, so its layout is remembered by
        content.
        """
        values = RULES["stablehlo.constant"](site)
        self._on_op(site.op, values)
        attrs = site.scope.ops[-1].attrs
        self.constants.setdefault(attrs, {})[self.specs[values[0]]] = None
        return values

    def _all_reduce(self, site: Site) -> Sequence[Value]:
        """One all_reduce over all its axes; what it reduces is named in `finish`."""
        text = str(site.op.attributes["reduction_axes"])
        _refuse_sub_axes(text)
        return site.emit("all_reduce", site.operands, AllReduceAttrs(_axes(text))).results

    def _all_to_all(self, site: Site) -> Sequence[Value]:
        """One all_to_all per parameter (axes: source dim -> target dim)."""
        text = str(site.op.attributes["params"])
        _refuse_sub_axes(text)
        (value,) = site.operands
        spec = self.specs[value]
        for axes_text, source, target in re.findall(r"\{([^}]*)\}:\s*(\d+)\s*->\s*(\d+)", text):
            axes, concat, split = _axes(axes_text), int(source), int(target)
            attrs = AllToAllAttrs(split, concat, axes)
            value = site.emit("all_to_all", (value,), attrs).result
            spec = spec.with_dim(concat, _moved(spec.dims[concat], axes, grow=False))
            spec = spec.with_dim(split, _moved(spec.dims[split], axes, grow=True))
            self.specs[value] = spec
        return [value]

    def _collective_permute(self, site: Site) -> Sequence[Value]:
        """Shards change places; which ranks send to which follows from the two layouts."""
        (value,) = site.operands
        (after,) = self._parse(str(site.op.attributes["out_sharding"]))
        axes, pairs = permute_pairs(self.mesh, self.specs[value], after)
        return site.emit(
            "collective_permute", (value,), CollectivePermuteAttrs(axes, pairs)
        ).results

    def finish(
        self, graph: Graph, inputs: tuple[Slot, ...], outputs: tuple[Slot, ...]
    ) -> PartitionedGraph:
        """The partitioned graph: reductions named, locations ours, no value without a spec."""
        named = self._rebuild(graph)
        self._complete(named)
        return PartitionedGraph(
            graph=named, specs=self.specs, mesh=self.mesh, inputs=inputs, outputs=outputs
        )

    def _rebuild(self, graph: Graph) -> Graph:
        """Same values, ops with our locations and with the reduction each collective stands for."""
        made: dict[Value, Op] = {}
        ops = []
        for op in graph.ops:
            loc = self._origin(op.loc)
            attrs = _named_reduction(op, made, loc) if op.name in REDUCES else op.attrs
            regions = tuple(self._rebuild(r) for r in op.regions)
            new = Op(op.name, op.operands, op.results, attrs, regions, loc)
            made.update(dict.fromkeys(op.results, new))
            ops.append(new)
        return Graph(graph.inputs, tuple(ops), graph.outputs, graph.name)

    def _origin(self, loc: Loc) -> Loc:
        """The location of the op of the graph that was printed under this name."""
        found = re.match(r"op:(\d+)", loc.scope)
        return self.origins[int(found.group(1))] if found else UNKNOWN_LOC

    def _complete(self, graph: Graph) -> None:
        """Specs of what the importer made: captured carries, repeated constants, helpers."""
        users = graph.uses()
        for op in graph.ops:
            if op.name == "loop":
                self._complete_loop(op)
            for value in op.results:
                if value not in self.specs:
                    self.specs[value] = self._implied(op, value, users.get(value, []))

    def _complete_loop(self, op: Op) -> None:
        """A carry has one spec at its four places."""
        body = op.regions[0]
        for operand, inner, result in zip(op.operands, body.inputs, op.results, strict=True):
            spec = self.specs.get(result) or self.specs.get(inner) or self.specs[operand]
            self.specs[inner] = self.specs[result] = spec
        self._complete(body)

    def _implied(self, op: Op, value: Value, users: Sequence[Op]) -> ShardingSpec:
        """The spec of an op the module does not have, or of a splat repeated in a loop."""
        layouts = list(self.constants.get(op.attrs, ())) if op.name == "constant" else []
        if len(layouts) == 1:
            return layouts[0]
        near = [*op.operands, *(v for user in users for v in user.results)]
        shaped = (
            self.specs[v] for v in near if v in self.specs and v.type.shape == value.type.shape
        )
        fitting = (spec for spec in shaped if not layouts or spec in layouts)
        return next(fitting, replicated(value.type.rank))


def _entry(attributes: Any, key: str) -> Any:
    """An entry of an MLIR attribute dictionary (not all have `get`); None when absent."""
    if key in attributes:
        return attributes[key]
    return None


def axis_lists(text: str) -> tuple[tuple[str, ...], ...]:
    """Per dim the axes named in `{"a"}, {}, {"b", "c"}`."""
    return tuple(_axes(entry) for entry in re.findall(r"\{([^{}]*)\}", text))


def _axes(text: str) -> tuple[str, ...]:
    """The quoted names in `text`."""
    return tuple(re.findall(r'"(\w+)"', text))


def _moved(axes: tuple[str, ...], moved: tuple[str, ...], grow: bool) -> tuple[str, ...]:
    """`axes` of a dim after `moved` were added at, or removed from, its minor end."""
    if grow:
        return axes + moved
    assert axes[len(axes) - len(moved) :] == moved, f"{moved} are not the minor axes of {axes}"
    return axes[: len(axes) - len(moved)]


def _gather_step(site: Site, value: Value, dim: int, axes: tuple[str, ...]) -> Op:
    return site.emit("all_gather", (value,), AllGatherAttrs(dim, axes))


def _slice_step(site: Site, value: Value, dim: int, axes: tuple[str, ...]) -> Op:
    return site.emit("all_slice", (value,), AllSliceAttrs(dim, axes))


def _scatter_step(site: Site, value: Value, dim: int, axes: tuple[str, ...]) -> Op:
    return site.emit("reduce_scatter", (value,), ReduceScatterAttrs(dim, axes))


def _unresolved(site: Site) -> Sequence[Value]:
    """An op that should not be left after the pipeline."""
    refuse("SW_PARTITIONER_UNRESOLVED", f"partitioning left {site.name} unresolved")


def _refuse_sub_axes(text: str) -> None:
    """Raise ShardingError when an axis is split."""
    found = _SUB_AXIS.search(text)
    if found:
        axis, before, size = found.groups()
        raise ShardingError(
            "SW_PARTITIONER_SUB_AXIS",
            f"specs require whole mesh axes, the partitioner split {axis} ({before}, {size})",
            hint="shard another dim, or give the axis a size that divides the dim",
        )


def _named_reduction(op: Op, made: Mapping[Value, Op], loc: Loc) -> Any:
    """Attributes with the reduction that makes the operand partial; the partitioner does not say
    it.
    """
    source = made.get(op.operands[0])
    while source is not None and source.name in REDUCES:
        source = made.get(source.operands[0])
    kind = _partial_kind(source, made)
    if kind is None:
        name = source.name if source is not None else "an argument"
        raise ShardingError(
            "SW_PARTITIONER_REDUCTION",
            f"{op.name} over {'+'.join(op.attrs.axes)} requires partial results that a sum, a "
            f"maximum, a minimum or a logical fold completes, got those of {name}",
            loc,
            hint="scatter into zeros and add the result; fold with add, max, min, and, or",
        )
    if op.name == "all_reduce":
        return AllReduceAttrs(op.attrs.axes, kind)
    return ReduceScatterAttrs(op.attrs.dim, op.attrs.axes, kind)


def _partial_kind(source: Op | None, made: Mapping[Value, Op]) -> str | None:
    """How partial results of `source` are completed; None when no reduction does it."""
    match source.name if source is not None else "":
        case "convolution" | "dot_general" | "gather":
            return "add"
        case "reduce":
            assert source is not None
            kind: str = source.attrs.kind
            return kind if kind in COMPLETING else None
        case "scatter":
            assert source is not None
            zeros = _is_zeros(source.operands[0], made)
            return "add" if source.attrs.kind == "add" and zeros else None
    return None


def _is_zeros(value: Value, made: Mapping[Value, Op]) -> bool:
    """True when every element is a constant zero."""
    op = made.get(value)
    while op is not None and op.name in ("broadcast_in_dim", "reshape"):
        op = made.get(op.operands[0])
    return op is not None and op.name == "constant" and not any(op.attrs.data)
