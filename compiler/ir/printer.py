"""Graphs as StableHLO text, in generic form: for Shardy, for export, and so that XLA can check any
stage.

Loops become `stablehlo.while` with a compare of the induction carry; shardings become `sdy`
attributes on the function and `sdy.sharding_constraint` ops elsewhere. Collectives are printed
only with local types, with replica groups that follow from the mesh, for one program per replica.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import numpy as np

from shardwright.collectives.ops import ReplicaGroups, axis_strides
from shardwright.compiler.diagnostics import CompileError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.combinations import ELEMENTWISE_OF
from shardwright.compiler.ir.facts import combination, needed_whole
from shardwright.compiler.ir.ops import AxisIndexAttrs, ConstantAttrs
from shardwright.compiler.ir.ops.gather import watched
from shardwright.compiler.ir.ops.host import DEVICE, HOST
from shardwright.compiler.ir.ops.reduce import identity
from shardwright.compiler.ir.printer_ops import (
    CHLO_OPS,
    MEANT,
    ROUNDING_FORMATS,
    STAND_INS,
    attributes_of,
    dense_array,
    dense_constant,
    direction,
    integer,
    moved_to,
)
from shardwright.compiler.ir.spelling import spelled
from shardwright.compiler.ir.traits import TRAFFIC
from shardwright.compiler.ir.types import Graph, Op, TensorType, Value, tensor_type


class Spec(Protocol):
    """What the printer needs of a sharding: per dim the mesh axes, major to minor."""

    @property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        """Mesh axes per tensor dim."""


Attributes = Sequence[str]
MANUAL_REGION = "shardwright.manual_region"
"""The target of a call of code of one rank."""


def to_stablehlo(
    graph: Graph,
    *,
    mesh: Mapping[str, int] | None = None,
    specs: Mapping[Value, Spec] | None = None,
    ids: bool = False,
    locs: bool = False,
    placed: Collection[Value] = (),
) -> str:
    """The module text of `graph`, its function called `main`.

    `mesh` maps axes to sizes, major to minor; `specs` needs it. With `ids` every op carries
    `shardwright.id`, its ordinal in `Graph.walk()`; with `locs` it carries `loc("op:<ordinal>")`.
    The caller lays out the values in `placed`, about which nothing else is asked.
    Raises: CompileError SW_EXPORT for collectives with global types or without a mesh.
    """
    written = spelled(graph, STAND_INS if ids else ())
    return _Printer(mesh or {}, specs or {}, ids, locs, placed).module(written)


class _Printer:
    """Lines and value names of one module."""

    def __init__(
        self,
        mesh: Mapping[str, int],
        specs: Mapping[Value, Spec],
        ids: bool,
        locs: bool,
        placed: Collection[Value],
    ) -> None:
        self.mesh = mesh
        self.specs = specs
        self.placed = placed
        self.ids = ids
        self.locs = locs
        self.lines: list[str] = []
        self.names: dict[Value, str] = {}
        self.count = 0
        self.ordinal = -1
        self.depth = 0

    def module(self, graph: Graph) -> str:
        """The whole text."""
        self.emit("module @shardwright {")
        self.depth += 1
        if self.mesh:
            axes = ", ".join(f'"{name}"={size}' for name, size in self.mesh.items())
            self.emit(f"sdy.mesh @mesh = <[{axes}]>")
        self.function(graph)
        self.depth -= 1
        self.emit("}")
        return "\n".join(self.lines) + "\n"

    def function(self, graph: Graph) -> None:
        """`func.func @main` with shardings on arguments and results."""
        arguments = [f"{self.bind(v)}: {v.type}{self.function_sharding(v)}" for v in graph.inputs]
        results = [f"{v.type}{self.function_sharding(v)}" for v in graph.outputs]
        signature = f"({', '.join(arguments)}) -> ({', '.join(results)})"
        self.emit(f"func.func public @main{signature} {{")
        self.depth += 1
        for op in graph.ops:
            self.op(op)
        outputs = ", ".join(self.names[v] for v in graph.outputs)
        types = ", ".join(str(v.type) for v in graph.outputs)
        self.emit(f"func.return {outputs} : {types}" if outputs else "func.return")
        self.depth -= 1
        self.emit("}")

    def emit(self, line: str) -> None:
        """Add a line at the current depth."""
        self.lines.append("  " * self.depth + line)

    def fresh(self) -> str:
        """A value name that is used nowhere else in the module."""
        self.count += 1
        return f"%{self.count - 1}"

    def bind(self, value: Value) -> str:
        """Give `value` a name."""
        self.names[value] = self.fresh()
        return self.names[value]

    def sharding(self, dims: Sequence[Sequence[str]], open_dims: Sequence[int] = ()) -> str:
        """The body of a sharding attribute; open dims may be sharded further."""
        entries = []
        for d, axes in enumerate(dims):
            names = [f'"{a}"' for a in axes] + ["?"] * (d in open_dims)
            entries.append(f"{{{', '.join(names)}}}")
        return f"<@mesh, [{', '.join(entries)}]>"

    def function_sharding(self, value: Value) -> str:
        """The sharding attribute of an argument or result, empty when there is none."""
        body = self.asked(value)
        return f" {{sdy.sharding = #sdy.sharding{body}}}" if body else ""

    def asked(self, value: Value) -> str:
        """The body of the sharding that a value has to have, empty when there is none."""
        spec = self.specs.get(value)
        return "" if spec is None else self.sharding(spec.dims, getattr(spec, "open_dims", ()))

    def constrain(self, value: Value) -> None:
        """Insert the constraint of a value that has a spec, and use its result from here on."""
        if body := self.asked(value):
            self.constrained(value, body)

    def constrained(self, value: Value, body: str, where: str = "") -> None:
        """Use `value` with the sharding `body` from here on."""
        name, entries = self.names[value], [f"sharding = #sdy.sharding{body}"]
        self.names[value] = self.alike(
            "sdy.sharding_constraint", value.type, [name], entries, where
        )

    def keep_whole(self, op: Op, values: Sequence[Value]) -> None:
        """Ask for every element of the dims of `values` on which `op` needs neighbours."""
        whole = needed_whole(op) if self.mesh else ()
        for value in dict.fromkeys(values) if whole else ():
            rank = value.type.rank
            body = self.sharding([()] * rank, [d for d in range(rank) if d not in whole])
            self.constrained(value, body, f' loc("op:{self.ordinal}")' if self.locs else "")

    def line(
        self,
        name: str,
        operands: Sequence[str],
        types: Sequence[TensorType],
        result: TensorType,
        attributes: Attributes = (),
        where: str = "",
    ) -> str:
        """A single-result op that is not one of ours; its result name."""
        target = self.fresh()
        signature = f"({', '.join(map(str, types))}) -> {result}"
        shown = f" {{{', '.join(attributes)}}}" if attributes else ""
        self.emit(f'{target} = "{name}"({", ".join(operands)}){shown} : {signature}{where}')
        return target

    def alike(
        self,
        name: str,
        type: TensorType,
        operands: Sequence[str] = (),
        attributes: Attributes = (),
        where: str = "",
    ) -> str:
        """A line whose operands and result have one type."""
        return self.line(name, operands, [type] * len(operands), type, attributes, where)

    def compare(self, order: str, type: TensorType, pair: Sequence[str], kind: str = "") -> str:
        """A comparison of two values of one type."""
        pred = tensor_type(type.shape, DType.PRED)
        return self.line("stablehlo.compare", pair, [type, type], pred, direction(order, kind))

    def op(self, op: Op) -> None:
        """One op of the graph, whatever lines it takes."""
        self.ordinal += 1
        names = {v: self.names[v] for v in op.operands}
        self.keep_whole(op, op.operands)
        special = _SPECIAL.get(op.name)
        if special is not None:
            special(self, op)
        elif self.ids and op.name in STAND_INS:  # ordinals say that Shardy reads it
            self.statement(op, STAND_INS[op.name], [f'{MEANT} = "{op.name}"'])
        elif op.name in CHLO_OPS:
            self.statement(op, f"chlo.{op.name}")
        else:
            self.statement(op, f"stablehlo.{op.name}")
        self.names |= names
        self.keep_whole(op, [v for v in op.results if v not in self.placed])
        for value in op.results:
            self.constrain(value)

    def statement(
        self,
        op: Op,
        name: str,
        attributes: Attributes | None = None,
        regions: Sequence[Callable[[], None]] = (),
        extra: Sequence[tuple[str, TensorType]] = (),
    ) -> None:
        """`op` itself under `name`: results, operands (then `extra` ones), regions, attributes (its
        own unless given).
        """
        if attributes is None:
            attributes = attributes_of(op)
        ordinal = self.ordinal
        own = op.operands if watched(op) is None else op.operands[:-1]  # StableHLO watches nothing
        operands = [(self.names[v], v.type) for v in own] + list(extra)
        entries = [*attributes, *([f"shardwright.id = {integer(ordinal)}"] if self.ids else [])]
        head = f'"{name}"({", ".join(n for n, _ in operands)})'
        target = self.targets(op)
        if regions:
            self.emit(f"{target}{head} ({{")
            self.regions(regions)
            head, target = "}" + ")", ""
        shown = f" {{{', '.join(entries)}}}" if entries else ""
        results = ", ".join(str(v.type) for v in op.results)
        signature = f"({', '.join(str(t) for _, t in operands)}) -> ({results})"
        where = f' loc("op:{ordinal}")' if self.locs else ""
        self.emit(f"{target}{head}{shown} : {signature}{where}")

    def targets(self, op: Op) -> str:
        """Name the results of `op`: the text before its name."""
        if not op.results:
            return ""
        base = self.fresh()
        if len(op.results) == 1:
            self.names[op.result] = base
            return f"{base} = "
        for i, value in enumerate(op.results):
            self.names[value] = f"{base}#{i}"
        return f"{base}:{len(op.results)} = "

    def regions(self, bodies: Sequence[Callable[[], None]]) -> None:
        """The regions of an op, each written by its function."""
        for i, body in enumerate(bodies):
            if i:
                self.emit("}, {")
            self.depth += 1
            body()
            self.depth -= 1

    def block(self, arguments: Sequence[tuple[str, TensorType]]) -> None:
        """The head of a region's only block."""
        self.emit(f"^bb0({', '.join(f'{name}: {t}' for name, t in arguments)}):")

    def leave(self, names: Sequence[str], types: Sequence[TensorType]) -> None:
        """The terminator of a region."""
        signature = f"({', '.join(map(str, types))}) -> ()"
        self.emit(f'"stablehlo.return"({", ".join(names)}) : {signature}')

    def constant(self, value: object, type: TensorType) -> str:
        """A scalar or splat constant of our own making."""
        data = type.dtype.numpy.type(value).tobytes()
        entry = f"value = {dense_constant(ConstantAttrs(data, type))}"
        return self.alike("stablehlo.constant", type, attributes=[entry])

    def selector(self, order: str, scalar: TensorType) -> Callable[[], None]:
        """A region that compares two scalars."""

        def body() -> None:
            pair = [self.fresh(), self.fresh()]
            self.block([(name, scalar) for name in pair])
            self.leave([self.compare(order, scalar, pair)], [tensor_type((), DType.PRED)])

        return body

    def combiner(self, kind: str, scalar: TensorType) -> Callable[[], None]:
        """A region that combines two scalars; `replace` returns the second."""

        def body() -> None:
            pair = [self.fresh(), self.fresh()]
            self.block([(name, scalar) for name in pair])
            out = pair[1]
            if kind != "replace":
                out = self.alike(f"stablehlo.{ELEMENTWISE_OF[kind]}", scalar, pair)
            self.leave([out], [scalar])

        return body


def _scalar(op: Op) -> TensorType:
    """The type of one element of the result."""
    return tensor_type((), op.result.type.dtype)


def _print_empty(p: _Printer, op: Op) -> None:
    """Zeros, which nobody reads."""
    p.names[op.result] = p.constant(0, op.result.type)


def _print_move(p: _Printer, op: Op) -> None:
    p.statement(op, "stablehlo.custom_call")


def _print_store(p: _Printer, op: Op) -> None:
    """What goes to the host, then where it is put."""
    update = op.operands[1]
    p.names[update] = p.alike(
        "stablehlo.custom_call", update.type, [p.names[update]], moved_to(HOST)
    )
    p.statement(op, "stablehlo.dynamic_update_slice")


def _print_load(p: _Printer, op: Op) -> None:
    """What is on the host, then that it comes from there."""
    part = op.result.type
    names, types = [p.names[v] for v in op.operands], [v.type for v in op.operands]
    name = p.line("stablehlo.dynamic_slice", names, types, part, attributes_of(op))
    p.names[op.result] = p.alike("stablehlo.custom_call", part, [name], moved_to(DEVICE))


def _print_constraint(p: _Printer, op: Op) -> None:
    if not p.mesh:
        raise CompileError(
            "SW_EXPORT", "printing a sharding_constraint requires a mesh, got none", op.loc
        )
    body = p.sharding(op.attrs.spec, op.attrs.open_dims)
    p.statement(op, "sdy.sharding_constraint", [f"sharding = #sdy.sharding{body}"])


def _print_reduction(p: _Printer, op: Op) -> None:
    """One that starts from its identity, whole or in windows."""
    kind, scalar = op.attrs.kind, _scalar(op)
    start = p.constant(identity(kind, scalar.dtype)[()], scalar)
    body = p.combiner(kind, scalar)
    p.statement(op, f"stablehlo.{op.name}", regions=[body], extra=[(start, scalar)])


def _print_select_and_scatter(p: _Printer, op: Op) -> None:
    scalar = _scalar(op)
    extra = [(p.constant(0, scalar), scalar)]
    bodies = [p.selector(op.attrs.select, scalar), p.combiner("add", scalar)]
    p.statement(op, "stablehlo.select_and_scatter", regions=bodies, extra=extra)


def _print_scatter(p: _Printer, op: Op) -> None:
    body = p.combiner(op.attrs.kind, _scalar(op))
    p.statement(op, "stablehlo.scatter", regions=[body])


def _print_sort(p: _Printer, op: Op) -> None:
    pred = tensor_type((), DType.PRED)

    def cleaned(name: str, type: TensorType) -> str:
        """All zeros equal, all NaNs equal."""
        zero, nan = p.constant(0, type), p.constant(np.nan, type)
        types = [pred, type, type]
        test = p.compare("EQ", type, [name, zero], "FLOAT")
        inner = p.line("stablehlo.select", [test, zero, name], types, type)
        test = p.compare("NE", type, [name, name], "FLOAT")
        return p.line("stablehlo.select", [test, nan, inner], types, type)

    def body() -> None:
        elements = [(p.fresh(), tensor_type((), v.type.dtype)) for v in op.operands for _ in "ab"]
        p.block(elements)
        less = ""
        for operand, less_than, order in reversed(op.attrs.keys):
            (left, type), (right, _) = elements[2 * operand : 2 * operand + 2]
            kind = "TOTALORDER" if type.dtype.is_float else ""
            if kind and order == "numeric":
                left, right = cleaned(left, type), cleaned(right, type)
            first = p.compare(less_than, type, [left, right], kind)
            if less:
                equal = p.compare("EQ", type, [left, right], kind)
                rest = p.alike("stablehlo.and", pred, [equal, less])
                first = p.alike("stablehlo.or", pred, [first, rest])
            less = first
        p.leave([less], [pred])

    p.statement(op, "stablehlo.sort", regions=[body])


def _print_loop(p: _Printer, op: Op) -> None:
    region = op.regions[0]
    counter = region.inputs[op.attrs.induction].type

    def condition() -> None:
        names = [(p.fresh(), v.type) for v in region.inputs]
        p.block(names)
        pair = [names[op.attrs.induction][0], p.constant(op.attrs.trip, counter)]
        p.leave([p.compare("LT", counter, pair)], [tensor_type((), DType.PRED)])

    def body() -> None:
        p.block([(p.bind(v), v.type) for v in region.inputs])
        for value in region.inputs:
            p.constrain(value)
        for inner in region.ops:
            p.op(inner)
        p.leave([p.names[v] for v in region.outputs], [v.type for v in region.outputs])

    p.statement(op, "stablehlo.while", regions=[condition, body])


def _replica_groups(p: _Printer, op: Op) -> ReplicaGroups:
    """The groups of a collective with local types. Raises CompileError for global types."""
    axes, size = op.attrs.axes, op.attrs.group_size
    real = math.prod(p.mesh.get(a, 0) for a in axes)
    if real != size:
        raise CompileError(
            "SW_EXPORT",
            f"printing {op.name} requires local types over a mesh with a group of {size} along "
            f"{', '.join(axes)}, got {dict(p.mesh)}",
            op.loc,
            "print the localized graph, and give its mesh",
        )
    return ReplicaGroups.from_axes(p.mesh, axes)


def _groups(p: _Printer, op: Op) -> str:
    """The replica groups of a collective."""
    groups, size = _replica_groups(p, op).groups, op.attrs.group_size
    return f"replica_groups = dense<{[list(g) for g in groups]}> : tensor<{len(groups)}x{size}xi64>"


def _pairs(p: _Printer, op: Op) -> str:
    """The ranks of a permute, group by group."""
    groups = _replica_groups(p, op).groups
    pairs = [[g[s], g[t]] for g in groups for s, t in op.attrs.pairs]
    return f"source_target_pairs = dense<{pairs}> : tensor<{len(pairs)}x2xi64>"


def _print_collective(p: _Printer, op: Op) -> None:
    attrs = op.attrs
    if getattr(attrs, "parts", ()):
        raise CompileError(
            "SW_EXPORT",
            f"printing {op.name} requires one tensor, got a bucket of {len(attrs.parts)}",
            op.loc,
            "print the graph without bucket_mb",
        )
    groups = (_pairs if hasattr(attrs, "pairs") else _groups)(p, op)
    kind = combination(op)
    regions = [p.combiner(kind, _scalar(op))] if kind else []
    p.statement(op, f"stablehlo.{op.name}", [groups, *attributes_of(op)], regions)


def _position(p: _Printer, axes: Sequence[str]) -> str:
    """Lines that compute this replica's row-major position over `axes`, as an i32 scalar."""
    scalar = tensor_type((), DType.I32)
    rank_type = tensor_type((), DType.U32)

    def binary(name: str, *pair: str) -> str:
        return p.alike(f"stablehlo.{name}", scalar, pair)

    rank = p.line("stablehlo.replica_id", [], [], rank_type)
    rank = p.line("stablehlo.convert", [rank], [rank_type], scalar)
    strides, position = axis_strides(p.mesh), p.constant(0, scalar)
    for axis in axes:
        size = p.constant(p.mesh[axis], scalar)
        along = binary("divide", rank, p.constant(strides[axis], scalar))
        along = binary("remainder", along, size)
        position = binary("add", binary("multiply", position, size), along)
    return position


def _print_axis_index(p: _Printer, op: Op) -> None:
    assert isinstance(op.attrs, AxisIndexAttrs)
    missing = [a for a in op.attrs.axes if a not in p.mesh]
    if missing:
        raise CompileError(
            "SW_EXPORT", f"printing axis_index requires mesh axes {missing}, got none", op.loc
        )
    position = _position(p, op.attrs.axes)
    zero = p.constant(0, op.result.type)
    p.statement(op, "stablehlo.add", extra=[(position, op.result.type), (zero, op.result.type)])


def _print_manual_region(p: _Printer, op: Op) -> None:
    """A call that is told by its number: what is inside does not concern who lays values out."""
    entries = [f'call_target_name = "{MANUAL_REGION}"', f'backend_config = "{op.attrs.number}"']
    p.statement(op, "stablehlo.custom_call", entries)


def _print_all_slice(p: _Printer, op: Op) -> None:
    _groups(p, op)
    scalar, shape = tensor_type((), DType.I32), op.result.type.shape
    size, zero = p.constant(shape[op.attrs.dim], scalar), p.constant(0, scalar)
    position = _position(p, op.attrs.axes)
    start = p.alike("stablehlo.multiply", scalar, [position, size])
    starts = [(start if d == op.attrs.dim else zero, scalar) for d in range(len(shape))]
    entries = [f"slice_sizes = {dense_array(shape)}"]
    p.statement(op, "stablehlo.dynamic_slice", entries, extra=starts)


def _print_convert(p: _Printer, op: Op) -> None:
    """A conversion; a rounding that may not be left out is one on the bits first."""
    (source,) = op.operands
    if op.attrs.rounds:
        formats = [f"{k} = {v} : i32" for k, v in ROUNDING_FORMATS[op.attrs.dtype].items()]
        name = p.names[source]
        p.names[source] = p.alike("stablehlo.reduce_precision", source.type, [name], formats)
    p.statement(op, "stablehlo.convert")


_SPECIAL: dict[str, Callable[[_Printer, Op], None]] = {
    **dict.fromkeys(TRAFFIC, _print_collective),
    "all_slice": _print_all_slice,
    "axis_index": _print_axis_index,
    "convert": _print_convert,
    "host_empty": _print_empty,
    "host_load": _print_load,
    "host_store": _print_store,
    "loop": _print_loop,
    "manual_region": _print_manual_region,
    "move_to": _print_move,
    "reduce": _print_reduction,
    "reduce_window": _print_reduction,
    "scatter": _print_scatter,
    "select_and_scatter": _print_select_and_scatter,
    "sharding_constraint": _print_constraint,
    "sort": _print_sort,
}
