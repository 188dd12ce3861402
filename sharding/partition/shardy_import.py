"""Shardy's output back into our IR: rules for its collectives, a spec for every value, and our own
locations.

Works on the importer's hooks and on the text of attributes, so that it needs no jaxlib of its own.
Parts of an axis become axes of their own. What the partitioner left unresolved is refused, never
guessed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwright.compiler.diagnostics import UNKNOWN_LOC, Loc, ShardingError
from shardwright.compiler.frontend.importer import ImportHooks
from shardwright.compiler.frontend.mlir import call_target, text_of
from shardwright.compiler.frontend.rules import RULES
from shardwright.compiler.frontend.rules.registry import Rule, refuse
from shardwright.compiler.ir.facts import combination, lookup, resized_dim, stored
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.ops import (
    AllReduceAttrs,
    AllToAllAttrs,
    CollectivePermuteAttrs,
    ManualRegionAttrs,
    ReduceScatterAttrs,
)
from shardwright.compiler.ir.printer import MANUAL_REGION
from shardwright.compiler.ir.rewrite import with_ops
from shardwright.compiler.ir.traits import CONTRACTIONS, REDUCTIONS, REDUCTIONS_OF_RANKS
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.sharding.partition.mesh import Mesh
from shardwright.sharding.partition.partitioned import PartitionedGraph, Slot
from shardwright.sharding.partition.permutes import permute_pairs, shard_pairs
from shardwright.sharding.partition.spec import ShardingSpec, num_shared, replicated

if TYPE_CHECKING:
    from shardwright.compiler.frontend.rules.registry import Site

Axes = tuple[str, ...]
SHUFFLE = "shardwright.shuffle"
"""The attribute of a gather that only puts slices in another order: [dim, *places]."""
UNRESOLVED = (
    "sdy.manual_computation",
    "sdy.propagation_barrier",
    "sdy.replicated_to_unreduced",
    "sdy.reshard",
    "sdy.sharded_to_unreduced",
    "sdy.sharding_constraint",
)
_AXIS = re.compile(r'"([^"]+)"(?::\((\d+)\)(\d+))?')
_SUB_AXIS = re.compile(r'"([^"]+)":\((\d+)\)(\d+)')
_SHARDING = re.compile(r"<@\w+, \[(.*?)\](?:, replicated=\{[^}]*\})?(?:, unreduced=\{([^}]*)\})?>")


class ShardyReader:
    """Collects specs while the importer runs, then completes and checks the graph."""

    def __init__(self, mesh: Mesh, origins: Sequence[Loc], text: str) -> None:
        """`mesh` is the one the module was partitioned over, `text` the module."""
        self.mesh, self._atoms_of = mesh_of_atoms(mesh, text)
        self.origins = origins
        self.specs: dict[Value, ShardingSpec] = {}
        self.constants: dict[object, dict[ShardingSpec, None]] = {}
        self._parsed: dict[str, tuple[ShardingSpec, ...]] = {}

    def rules(self) -> Mapping[str, Rule]:
        """Import rules for the ops of the partitioner."""
        table: dict[str, Rule] = {
            "sdy.constant": self._constant,
            "sdy.all_gather": self._per_dim("gathering_axes", "all_gather", grow=False),
            "sdy.all_slice": self._per_dim("slicing_axes", "all_slice"),
            "sdy.reduce_scatter": self._per_dim("reduce_scatter_axes", "reduce_scatter"),
            "sdy.all_reduce": self._all_reduce,
            "sdy.all_to_all": self._all_to_all,
            "sdy.collective_permute": self._collective_permute,
            "stablehlo.custom_call": self._custom_call,
            "stablehlo.gather": self._gather,
        }
        return table | dict.fromkeys(UNRESOLVED, _unresolved)

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
            found = _SHARDING.findall(text)
            self._parsed[text] = tuple(
                ShardingSpec(self._axis_lists(dims), self._axes(unreduced))
                for dims, unreduced in found
            )
        return self._parsed[text]

    def _per_dim(self, key: str, name: str, *, grow: bool = True) -> Rule:
        """A rule that emits one op `name` per dim of a list of axes per dim."""

        def rule(site: Site) -> Sequence[Value]:
            (value,) = site.operands
            moving = self._axis_lists(str(site.op.attributes[key]))
            return [self._move(site, value, moving, name, grow=grow)]

        return rule

    def _move(
        self, site: Site, value: Value, moving: Sequence[Axes], name: str, *, grow: bool
    ) -> Value:
        """`value` after ops `name` have added axes to the minor end of each dim, or removed them.

        Axes that are not in mesh order move one run after the other, so that shards keep theirs.
        """
        spec, attrs = self.specs[value], OPS[name].attrs
        assert attrs is not None
        for dim, axes in enumerate(moving):
            runs = self._runs(axes)
            for run in runs if grow else reversed(runs):
                value = site.emit(name, (value,), attrs(dim, run)).result
                moved = _moved(spec.dims[dim], run, grow=grow)
                spec = self.specs[value] = spec.with_dim(dim, moved)
        return value

    def _runs(self, axes: Axes) -> list[Axes]:
        """`axes` cut where they leave the order of the mesh."""
        names, runs = self.mesh.names, list[Axes]()
        for axis in axes:
            if runs and names.index(runs[-1][-1]) < names.index(axis):
                runs[-1] += (axis,)
            else:
                runs.append((axis,))
        return runs

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
        axes = self.mesh.order(self._axes(str(site.op.attributes["reduction_axes"])))
        return site.emit("all_reduce", site.operands, AllReduceAttrs(axes)).results

    def _all_to_all(self, site: Site) -> Sequence[Value]:
        """One all_to_all per parameter (axes: source dim -> target dim)."""
        text = str(site.op.attributes["params"])
        (value,) = site.operands
        for axes_text, source, target in re.findall(r"\{([^}]*)\}:\s*(\d+)\s*->\s*(\d+)", text):
            axes, spec = self._axes(axes_text), self.specs[value]
            after = spec.with_dim(int(source), _moved(spec.dims[int(source)], axes, grow=False))
            after = after.with_dim(int(target), _moved(spec.dims[int(target)], axes, grow=True))
            if len(self._runs(axes)) > 1:
                value = self._relaid(site, value, after)
                continue
            attrs = AllToAllAttrs(int(target), int(source), axes)
            value = site.emit("all_to_all", (value,), attrs).result
            self.specs[value] = after
        return [value]

    def _collective_permute(self, site: Site) -> Sequence[Value]:
        """Shards change places; which ranks send to which follows from the two layouts."""
        (value,) = site.operands
        (after,) = self._parse(str(site.op.attributes["out_sharding"]))
        axes, pairs = permute_pairs(self.mesh, self.specs[value], after)
        return site.emit(
            "collective_permute", (value,), CollectivePermuteAttrs(axes, pairs)
        ).results

    def _gather(self, site: Site) -> Sequence[Value]:
        """A gather; one that puts the slices of a split dim in another order sends shards, or works
        on the whole dim where parts of shards move.
        """
        order = _entry(site.op.attributes, SHUFFLE)
        if order is None:
            return RULES["stablehlo.gather"](site)
        dim, *places = order
        value = site.operands[0]
        spec = self.specs[value]
        axes = spec.dims[dim]
        if not axes:
            return RULES["stablehlo.gather"](site)
        pairs = shard_pairs(self.mesh, axes, places)
        if pairs is not None:
            attrs = CollectivePermuteAttrs(self.mesh.order(axes), pairs)
            return site.emit("collective_permute", (value,), attrs).results
        value = self._relaid(site, value, spec.with_dim(dim, ()))
        site.operands = (value, *site.operands[1:])
        (value,) = RULES["stablehlo.gather"](site)
        self.specs[value] = spec.with_dim(dim, ())
        return [self._relaid(site, value, spec)]

    def _custom_call(self, site: Site) -> Sequence[Value]:
        """Code of one rank, by its number; any other call is that of a model."""
        if call_target(site.op) != MANUAL_REGION:
            return RULES["stablehlo.custom_call"](site)
        laid_out = self._parse(str(_entry(site.op.attributes, "sdy.sharding")))
        specs = tuple(spec.dims for spec in laid_out)
        number = int(text_of(site.op, "backend_config"))
        attrs = ManualRegionAttrs(number, tuple(site.result_types()), specs)
        return site.emit("manual_region", site.operands, attrs).results

    def _relaid(self, site: Site, value: Value, after: ShardingSpec) -> Value:
        """`value` laid out as `after`: what both layouts share at the major end of a dim stays."""
        pairs = list(zip(self.specs[value].dims, after.dims, strict=True))
        kept = [num_shared(*pair) for pair in pairs]
        gone = [old[n:] for (old, _), n in zip(pairs, kept, strict=True)]
        come = [new[n:] for (_, new), n in zip(pairs, kept, strict=True)]
        value = self._move(site, value, gone, "all_gather", grow=False)
        return self._move(site, value, come, "all_slice", grow=True)

    def _axis_lists(self, text: str) -> tuple[Axes, ...]:
        """Per dim the axes named in `{"a"}, {}, {"b", "c":(1)2}`."""
        return tuple(self._axes(entry) for entry in re.findall(r"\{([^{}]*)\}", text))

    def _axes(self, text: str) -> Axes:
        """The axes named in `text`, as axes of the mesh."""
        return tuple(a for named in _AXIS.findall(text) for a in self._atoms(*named))

    def _atoms(self, axis: str, before: str, size: str) -> Axes:
        """The atoms of an axis, or of its part of `size` cores with `before` major to it."""
        atoms = self._atoms_of[axis]
        if not size:
            return atoms
        done, taken = 1, []
        for atom in atoms:
            if int(before) <= done < int(before) * int(size):
                taken.append(atom)
            done *= self.mesh.sizes[atom]
        return tuple(taken)

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
            attrs = _named_reduction(op, made, loc) if op.name in REDUCTIONS_OF_RANKS else op.attrs
            regions = tuple(self._rebuild(r) for r in op.regions)
            new = Op(op.name, op.operands, op.results, attrs, regions, loc)
            made.update(dict.fromkeys(op.results, new))
            ops.append(new)
        return with_ops(graph, ops)

    def _origin(self, loc: Loc) -> Loc:
        """The location of the op of the graph that was printed under this name."""
        found = re.match(r"op:(\d+)", loc.scope)
        return self.origins[int(found.group(1))] if found else UNKNOWN_LOC

    def _complete(self, graph: Graph) -> None:
        """Specs of what the importer made: captured carries, repeated constants, helpers."""
        users = graph.uses()
        for op in graph.ops:
            if op.regions:
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
        layouts = list(self.constants.get(held, ())) if (held := stored(op)) is not None else []
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


def mesh_of_atoms(mesh: Mesh, text: str) -> tuple[Mesh, dict[str, Axes]]:
    """`mesh` with every axis cut where the module in `text` uses parts of it, and the new axes of
    each old one.

    Raises ShardingError for parts that do not nest.
    """
    ends: dict[str, set[int]] = {}
    for axis, before, size in set(_SUB_AXIS.findall(text)):
        ends.setdefault(axis, set()).update((int(before), int(before) * int(size)))
    atoms: dict[str, Axes] = {axis: (axis,) for axis in mesh.names}
    for axis, found in ends.items():
        known = mesh.names
        mesh = mesh.refined(axis, _atoms_between(axis, found | {1, mesh.sizes[axis]}))
        atoms[axis] = tuple(name for name in mesh.names if name not in known) or (axis,)
    return mesh, atoms


def _atoms_between(axis: str, ends: set[int]) -> list[int]:
    """The factors of an axis between places where a part of it begins or ends."""
    places = sorted(ends)
    for low, high in itertools.pairwise(places):
        if high % low:
            raise ShardingError(
                "SW_PARTITIONER_SUB_AXIS",
                f"parts of axis {axis} require sizes that divide each other, got {low} and {high}",
                hint="shard another dim, or give the axis a size that divides the dim",
            )
    return [high // low for low, high in itertools.pairwise(places)]


def _moved(axes: tuple[str, ...], moved: tuple[str, ...], grow: bool) -> tuple[str, ...]:
    """`axes` of a dim after `moved` were added at, or removed from, its minor end."""
    if grow:
        return axes + moved
    assert axes[len(axes) - len(moved) :] == moved, f"{moved} are not the minor axes of {axes}"
    return axes[: len(axes) - len(moved)]


def _unresolved(site: Site) -> Sequence[Value]:
    """An op that should not be left after the pipeline."""
    refuse("SW_PARTITIONER_UNRESOLVED", f"partitioning left {site.name} unresolved")


def _named_reduction(op: Op, made: Mapping[Value, Op], loc: Loc) -> Any:
    """Attributes with the reduction that makes the operand partial; the partitioner does not say
    it.
    """
    source = made.get(op.operands[0])
    while source is not None and source.name in REDUCTIONS_OF_RANKS:
        source = made.get(source.operands[0])
    kind = _partial_kind(source)
    if kind is None:
        name = source.name if source is not None else "an argument"
        raise ShardingError(
            "SW_PARTITIONER_REDUCTION",
            f"{op.name} over {'+'.join(op.attrs.axes)} requires partial results that a "
            f"reduction completes, got those of {name}",
            loc,
            hint="scatter with add; reduce with one operand",
        )
    dim = resized_dim(op)
    if dim is None:
        return AllReduceAttrs(op.attrs.axes, kind)
    return ReduceScatterAttrs(dim, op.attrs.axes, kind)


def _partial_kind(source: Op | None) -> str | None:
    """How partial results of `source` are completed; None when no reduction does it. A core looks
    up, and adds, the rows it holds, and zeros else (`localize/rules/gather.py`).
    """
    if source is None:
        return None
    kind = combination(source)
    if lookup(source) is not None:
        return "add" if kind in ("", "add") else None
    return kind if source.name in CONTRACTIONS | REDUCTIONS else None
