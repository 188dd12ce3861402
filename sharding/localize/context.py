"""The state of one localisation: which local value stands for which global one, and how ops are
emitted.

An op whose meaning stays is told by its factors (`by_factors`). Others have a rule, a function
`(Localizer, op) -> local results` registered by op name with `@localizes`. The driver checks that
every result has exactly the type its spec promises, so a wrong rule or a wrong spec is refused,
never run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from shardwright.compiler.diagnostics import UNKNOWN_LOC, ShardingError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.analysis import known_elements
from shardwright.compiler.ir.factors import FactorKind, Place
from shardwright.compiler.ir.facts import factors_of, resized
from shardwright.compiler.ir.opdef import OPS, Kind, make_op
from shardwright.compiler.ir.ops import (
    AxisIndexAttrs,
    BroadcastInDimAttrs,
    ConstantAttrs,
    ConvertAttrs,
    DynamicSliceAttrs,
)
from shardwright.compiler.ir.rewrite import with_ops
from shardwright.compiler.ir.types import Graph, Op, TensorType, Value, tensor_type
from shardwright.compiler.support.tables import entering
from shardwright.sharding.partition.mesh import Mesh
from shardwright.sharding.partition.spec import ShardingSpec

Dims = tuple[tuple[str, ...], ...]
Rule = Callable[["Localizer", Op], Sequence[Value]]
RULES: dict[str, Rule] = {}


localizes = entering(RULES, "localization rule")


class Localizer:
    """Builds local regions; `env` maps the global values of the region at hand to local ones."""

    __slots__ = (
        *("_dims", "_indices", "_local_types", "_made", "_ways"),
        *("env", "loc", "mesh", "ops", "specs"),
    )

    def __init__(self, mesh: Mesh, specs: Mapping[Value, ShardingSpec]) -> None:
        self.mesh = mesh
        self.specs = specs
        self.env: dict[Value, Value] = {}
        self.ops: list[Op] = []
        self.loc = UNKNOWN_LOC
        self._indices: dict[tuple[str, ...], Value] = {}
        self._made: dict[Value, Op] = {}
        self._ways = mesh.sizes
        self._dims: dict[ShardingSpec, Dims] = {}
        self._local_types: dict[tuple[TensorType, ShardingSpec], TensorType] = {}

    def region(self, graph: Graph) -> Graph:
        """The local form of `graph`; afterwards `env` holds its values."""
        self.env, self.ops, self._indices, self._made = {}, [], {}, graph.producers()
        self.loc = UNKNOWN_LOC
        inputs = tuple(Value(self.local_type(v)) for v in graph.inputs)
        self.env.update(zip(graph.inputs, inputs, strict=True))
        for op in graph.ops:
            self._localize(op)
        return with_ops(graph, self.ops, tuple(self.env[v] for v in graph.outputs), inputs)

    def nested(self, graph: Graph) -> Graph:
        """The local form of a region of an op; the state of the region at hand comes back."""
        saved = self.env, self.ops, self._indices, self._made, self.loc
        try:
            return self.region(graph)
        finally:
            self.env, self.ops, self._indices, self._made, self.loc = saved

    def _localize(self, op: Op) -> None:
        """Run the rule of `op` and bind its results."""
        self.loc = op.loc
        rule = RULES.get(op.name, by_factors)
        for value, local in zip(op.results, rule(self, op), strict=True):
            expected = self.local_type(value)
            if local.type != expected:
                raise self.error(
                    "SW_LOCALIZE_TYPE",
                    f"{op.name} of {value.type} under {self.specs[value]} requires {expected} "
                    f"per core, got {local.type}",
                )
            self.env[value] = local

    def error(self, code: str, message: str, hint: str = "") -> ShardingError:
        """A refusal at the op being localized."""
        return ShardingError(code, message, self.loc, hint)

    def dims(self, value: Value) -> Dims:
        """Axes per dim of `value`, without axes of size 1."""
        spec = self.specs[value]
        known = self._dims.get(spec)
        if known is None:
            kept = ([a for a in axes if self._ways[a] > 1] for axes in spec.dims)
            known = self._dims[spec] = tuple(map(tuple, kept))
        return known

    def local_type(self, value: Value) -> TensorType:
        """The per-core type. Raises ShardingError when an axis product does not divide."""
        spec = self.specs.get(value)
        if spec is None:
            raise self.error("SW_LOCALIZE_SPEC", f"{value.type} requires a sharding spec, got none")
        key = (value.type, spec)
        known = self._local_types.get(key)
        if known is None:
            known = self._local_types[key] = self._divide(value.type, spec)
        return known

    def _divide(self, type: TensorType, spec: ShardingSpec) -> TensorType:
        """`type` divided by `spec`."""
        unknown = [a for a in spec.axes if a not in self._ways]
        if unknown or len(spec.dims) != type.rank:
            raise self.error(
                "SW_LOCALIZE_SPEC",
                f"{type} requires a spec of {type.rank} dims over the axes of {self.mesh}, "
                f"got {spec}",
            )
        try:
            return tensor_type(spec.local_shape(type.shape, self._ways), type.dtype)
        except ValueError as error:
            raise self.error(
                "SW_LOCALIZE_DIVIDE",
                f"{type} under {spec} on mesh {self.mesh}: {error}",
                "choose a mesh whose axes divide the dim, or another size",
            ) from error

    def is_known(self, value: Value) -> bool:
        """Whether a global value is known here: made of counts and constants."""
        return known_elements(self._made, value) is not None

    def operands(self, op: Op) -> tuple[Value, ...]:
        """The local operands of `op`."""
        return tuple([self.env[v] for v in op.operands])

    def emit(
        self, name: str, operands: Sequence[Value], attrs: Any = None, regions: Sequence[Graph] = ()
    ) -> tuple[Value, ...]:
        """Append an op at the location of the op being localized."""
        try:
            op = make_op(name, operands, attrs, regions, self.loc)
        except ValueError as error:
            raise self.error("SW_LOCALIZE_TYPE", f"per-core {error}") from error
        self.ops.append(op)
        return op.results

    def value(self, name: str, operands: Sequence[Value], attrs: Any = None) -> Value:
        """Append an op with one result and return it."""
        (result,) = self.emit(name, operands, attrs)
        return result

    def keep(self, op: Op, attrs: Any = None) -> tuple[Value, ...]:
        """Append `op` with local operands and sizes; with `attrs` when given."""
        if attrs is None:
            attrs = resized(op, self.local_type(op.results[0]).shape)
        return self.emit(op.name, self.operands(op), attrs)

    def splat(self, number: float, type: TensorType) -> Value:
        """A constant tensor of one repeated element."""
        return self.value("constant", (), ConstantAttrs.full(number, type))

    def broadcast(self, value: Value, shape: tuple[int, ...], dims: tuple[int, ...] = ()) -> Value:
        """`value` repeated to `shape`; its dim i becomes dim `dims[i]`."""
        return self.value("broadcast_in_dim", (value,), BroadcastInDimAttrs(dims, shape))

    def coordinate(self, axes: tuple[str, ...]) -> Value:
        """This rank's row-major position over `axes`, an i32 scalar, once per region."""
        known = self._indices.get(axes)
        if known is None:
            known = self._indices[axes] = self.value("axis_index", (), AxisIndexAttrs(axes))
        return known

    def offset(self, axes: tuple[str, ...], local_size: int, dtype: DType = DType.I32) -> Value:
        """Global index of this rank's first element along a dim sharded by `axes`, a scalar of
        `dtype`.
        """
        scalar = tensor_type((), DType.I32)
        start = self.value("multiply", (self.coordinate(axes), self.splat(local_size, scalar)))
        return start if dtype is DType.I32 else self.value("convert", (start,), ConvertAttrs(dtype))

    def take_shard(self, whole: Value, dims: Dims, local: TensorType) -> Value:
        """This rank's shard of a tensor every rank holds whole along the sharded `dims`."""
        zero = self.splat(0, tensor_type((), DType.I32))
        starts = [
            self.offset(axes, size) if axes else zero
            for axes, size in zip(dims, local.shape, strict=True)
        ]
        return self.value("dynamic_slice", (whole, *starts), DynamicSliceAttrs(local.shape))


def by_factors(context: Localizer, op: Op) -> Sequence[Value]:
    """Parts of the operands give that part of the results: nothing changes but sizes. A dim that is
    combined leaves partial results; the collective that combines them is in the partitioned graph
    already.
    """
    if OPS[op.name].factors is None:
        raise context.error(
            "SW_LOCALIZE_OP",
            f"{op.name} requires a localization rule, none is registered",
            "keep its operands replicated outside of the step, or report the op",
        )
    check_factors(context, op)
    return context.keep(op)


def check_factors(context: Localizer, op: Op, checked: Collection[Place] = ()) -> None:
    """Refuse an index that is not sharded alike wherever `op` walks it, and a part of a dim that it
    needs whole; `checked` are dims that a rule has looked at itself.
    """
    values = (*op.operands, *op.results)
    dims = [context.dims(v) for v in values]
    sharded = {(n, d) for n, axes in enumerate(dims) for d, each in enumerate(axes) if each}
    sharded.difference_update(checked)
    if not sharded:
        return
    for factor in factors_of(op):
        if factor.kind in _NO_PARTS:
            continue
        (n, d), *others = factor.places
        for m, e in others:
            if dims[m][e] != dims[n][d]:
                what = f"{place_text(op, n, d)} and {place_text(op, m, e)}"
                require_dims(
                    context, op, what, *("+".join(a) or "none" for a in (dims[n][d], dims[m][e]))
                )
        sharded.difference_update(factor.places)
    for n, d in sorted(sharded):
        require_whole(context, op, d, dims[n][d], _WHY[OPS[op.name].kind])


_NO_PARTS = (FactorKind.LINKED, FactorKind.GROUPED)
"""Factors whose dims an op needs whole, unless a rule of its own takes parts."""

_WHY = {
    Kind.VIEW: "it is merged, split or repeated",
    Kind.PART: "it takes a part",
    Kind.JOIN: "something is put beside it",
    Kind.UPDATE: "a part of it is replaced",
    Kind.CONTRACTION: "windows slide along it",
    Kind.WINDOW: "windows slide along it",
    Kind.SORT: "it is sorted",
}


def place_text(op: Op, number: int, dim: int) -> str:
    """A dim of an operand or result, for people."""
    result = number - len(op.operands)
    which = f"operand {number}" if result < 0 else f"result {result}" if result else "the result"
    return f"dim {dim} of {which}"


def require_dims(context: Localizer, op: Op, what: str, needed: object, given: object) -> None:
    """Refuse operands and results whose axes do not correspond."""
    if needed != given:
        raise context.error(
            "SW_LOCALIZE_AXES",
            f"{op.name} requires {what} sharded alike, got {_show(needed)} and {_show(given)}",
            "this is a partitioning that cannot run without a reshard; report it with the graph",
        )


def require_whole(context: Localizer, op: Op, dim: int, axes: Sequence[str], why: str) -> None:
    """Refuse a sharded dim on which the op needs every element."""
    if axes:
        raise context.error(
            "SW_LOCALIZE_DIM",
            f"{op.name} requires dim {dim} whole on every core ({why}), "
            f"got it sharded over {'+'.join(axes)}",
            "shard another dim of this tensor",
        )


def _show(dims: object) -> str:
    """Axes per dim, readable."""
    if isinstance(dims, tuple):
        return "[" + ", ".join("+".join(d) if isinstance(d, tuple) else str(d) for d in dims) + "]"
    return str(dims)
