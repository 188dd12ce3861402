"""A terse way to construct graphs, for passes and tests.

A `Builder` holds one level: every method appends one op and returns its result. Operands must
already be values of this level. Broadcasting is explicit; only constants are made for you.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import UNKNOWN_LOC, Loc
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import (
    AllSliceAttrs,
    AxisIndexAttrs,
    BroadcastInDimAttrs,
    CollectivePermuteAttrs,
    CompareAttrs,
    ConcatenateAttrs,
    ConstantAttrs,
    ConvertAttrs,
    DotGeneralAttrs,
    DynamicSliceAttrs,
    IotaAttrs,
    LoopAttrs,
    PadAttrs,
    ReduceAttrs,
    ReshapeAttrs,
    ReverseAttrs,
    SliceAttrs,
    TransposeAttrs,
    UnfoldAttrs,
)
from shardwright.compiler.ir.types import Graph, Op, Value, tensor_type

Dims = Sequence[int]


def constant_attrs(array: np.ndarray | float | int | bool, dtype: DType) -> ConstantAttrs:
    """Attributes of a constant; an array of one repeated element becomes a splat."""
    values = np.ascontiguousarray(np.asarray(array).astype(dtype.numpy))
    data = values.tobytes()
    first = data[: dtype.bytes]
    shape = np.shape(array)
    if values.size and data == first * values.size:
        data = first
    return ConstantAttrs(data, tensor_type(shape, dtype))


def subgraph(
    inputs: Iterable[Value], ops: Iterable[Op], outputs: Iterable[Value], name: str = "main"
) -> Graph:
    """What `ops`, in this order, make of `inputs`: a piece of a program as a graph of its own, on
    the same values.
    """
    return Graph(tuple(inputs), tuple(ops), tuple(outputs), name)


def defining(op: Op, results: tuple[Value, ...]) -> Op:
    """`op` with other values for its results."""
    if results is op.results:
        return op
    return Op(op.name, op.operands, results, op.attrs, op.regions, op.loc)


def fresh(op: Op, operands: Iterable[Value], regions: tuple[Graph, ...] | None = None) -> Op:
    """`op` once more on other operands: its results are values of its own."""
    results = tuple([Value(v.type) for v in op.results])
    inside = op.regions if regions is None else regions
    return Op(op.name, tuple(operands), results, op.attrs, inside, op.loc)


def cloned(
    op: Op, now: MutableMapping[Value, Value], regions: tuple[Graph, ...] | None = None
) -> Op:
    """`op` once more on what its operands are `now`, where its results are noted, too."""
    made = fresh(op, [now[v] for v in op.operands], regions)
    now.update(zip(op.results, made.results, strict=True))
    return made


class Builder:
    """One graph level under construction."""

    def __init__(self, name: str = "main", loc: Loc = UNKNOWN_LOC) -> None:
        self.name = name
        self.loc = loc
        self.inputs: list[Value] = []
        self.ops: list[Op] = []

    def input(self, shape: Dims, dtype: DType = DType.F32) -> Value:
        """A new graph input."""
        self.inputs.append(Value(tensor_type(tuple(shape), dtype)))
        return self.inputs[-1]

    def finish(self, *outputs: Value) -> Graph:
        """The graph with these outputs."""
        return Graph(tuple(self.inputs), tuple(self.ops), outputs, self.name)

    def append(self, op: Op) -> tuple[Value, ...]:
        """Add an op made elsewhere."""
        self.ops.append(op)
        return op.results

    def op(self, name: str, *operands: Value, attrs: Any = None) -> Value:
        """Add an op with one result."""
        (result,) = self.append(make_op(name, operands, attrs, loc=self.loc))
        return result

    def constant(self, array: np.ndarray | float | int | bool, dtype: DType = DType.F32) -> Value:
        """A constant with the values of `array`."""
        return self.op("constant", attrs=constant_attrs(array, dtype))

    def full(self, shape: Dims, value: float, dtype: DType = DType.F32) -> Value:
        """A splat constant."""
        return self.op(
            "constant", attrs=ConstantAttrs.full(value, tensor_type(tuple(shape), dtype))
        )

    def iota(self, shape: Dims, dim: int, dtype: DType = DType.I32) -> Value:
        """Counts along `dim`."""
        return self.op("iota", attrs=IotaAttrs(dim, tensor_type(tuple(shape), dtype)))

    def add(self, a: Value, b: Value) -> Value:
        """a + b."""
        return self.op("add", a, b)

    def multiply(self, a: Value, b: Value) -> Value:
        """a * b."""
        return self.op("multiply", a, b)

    def compare(self, a: Value, b: Value, direction: str) -> Value:
        """a < b and the like."""
        return self.op("compare", a, b, attrs=CompareAttrs(direction))

    def convert(self, a: Value, dtype: DType) -> Value:
        """`a` as `dtype`."""
        return self.op("convert", a, attrs=ConvertAttrs(dtype))

    def broadcast(self, a: Value, shape: Dims, dims: Dims = ()) -> Value:
        """`broadcast_in_dim`."""
        return self.op("broadcast_in_dim", a, attrs=BroadcastInDimAttrs(tuple(dims), tuple(shape)))

    def reshape(self, a: Value, shape: Dims) -> Value:
        """`a` in another shape."""
        return self.op("reshape", a, attrs=ReshapeAttrs(tuple(shape)))

    def transpose(self, a: Value, permutation: Dims) -> Value:
        """`a` with dims permuted."""
        return self.op("transpose", a, attrs=TransposeAttrs(tuple(permutation)))

    def slice(self, a: Value, start: Dims, limit: Dims, stride: Dims | None = None) -> Value:
        """A static slice, step 1 unless given."""
        steps = tuple(stride) if stride is not None else (1,) * len(start)
        return self.op("slice", a, attrs=SliceAttrs(tuple(start), tuple(limit), steps))

    def reverse(self, a: Value, dims: Dims) -> Value:
        """`a` with the order of `dims` turned around."""
        return self.op("reverse", a, attrs=ReverseAttrs(tuple(dims)))

    def pad(
        self, a: Value, value: Value, low: Dims, high: Dims, interior: Dims | None = None
    ) -> Value:
        """Scalar `value` around `a` and between its elements."""
        inner = tuple(interior) if interior is not None else (0,) * len(low)
        return self.op("pad", a, value, attrs=PadAttrs(tuple(low), tuple(high), inner))

    def unfold(
        self,
        a: Value,
        dims: Dims,
        *,
        counts: Dims,
        sizes: Dims,
        starts: Dims | None = None,
        strides: Dims | None = None,
        dilations: Dims | None = None,
        padded: bool = False,
    ) -> Value:
        """Windows along `dims`; starts are 0, strides and dilations 1 unless given."""
        ones = (1,) * len(dims)
        begin = tuple(starts) if starts is not None else (0,) * len(dims)
        steps, gaps = (tuple(v) if v is not None else ones for v in (strides, dilations))
        attrs = UnfoldAttrs(tuple(dims), begin, tuple(counts), steps, tuple(sizes), gaps, padded)
        return self.op("unfold", a, attrs=attrs)

    def concatenate(self, values: Sequence[Value], dim: int) -> Value:
        """`values` after each other along `dim`."""
        return self.op("concatenate", *values, attrs=ConcatenateAttrs(dim))

    def dynamic_slice(self, a: Value, starts: Sequence[Value], sizes: Dims) -> Value:
        """A slice of fixed sizes at computed starts."""
        return self.op("dynamic_slice", a, *starts, attrs=DynamicSliceAttrs(tuple(sizes)))

    def dynamic_update_slice(self, a: Value, update: Value, starts: Sequence[Value]) -> Value:
        """`a` with `update` written at computed starts."""
        return self.op("dynamic_update_slice", a, update, *starts)

    def reduce(self, a: Value, kind: str, dims: Dims) -> Value:
        """`a` folded over `dims`."""
        return self.op("reduce", a, attrs=ReduceAttrs(kind, tuple(dims)))

    def dot(
        self,
        lhs: Value,
        rhs: Value,
        contract: tuple[Dims, Dims] = ((1,), (0,)),
        batch: tuple[Dims, Dims] = ((), ()),
        dtype: DType | None = None,
    ) -> Value:
        """`dot_general`; a plain matrix product unless told otherwise."""
        attrs = DotGeneralAttrs(
            lhs_batch=tuple(batch[0]),
            rhs_batch=tuple(batch[1]),
            lhs_contract=tuple(contract[0]),
            rhs_contract=tuple(contract[1]),
            dtype=dtype or lhs.type.dtype,
        )
        return self.op("dot_general", lhs, rhs, attrs=attrs)

    def axis_index(self, axes: Sequence[str]) -> Value:
        """This rank's position over `axes`."""
        return self.op("axis_index", attrs=AxisIndexAttrs(tuple(axes)))

    def all_slice(self, a: Value, dim: int, axes: Sequence[str], group_size: int = 1) -> Value:
        """Keep this rank's slice of `dim`."""
        return self.op("all_slice", a, attrs=AllSliceAttrs(dim, tuple(axes), group_size))

    def collective_permute(
        self, a: Value, pairs: Sequence[tuple[int, int]], axes: Sequence[str], group_size: int = 1
    ) -> Value:
        """Send whole tensors from rank to rank of the group."""
        attrs = CollectivePermuteAttrs(tuple(axes), tuple(pairs), group_size)
        return self.op("collective_permute", a, attrs=attrs)

    def nested(self, name: str) -> Builder:
        """A builder of a region of an op of this level."""
        return Builder(name, self.loc)

    def loop(
        self,
        trip: int,
        carries: Sequence[Value],
        body: Callable[[Any, Value, tuple[Value, ...]], Sequence[Value]],
        dtype: DType = DType.I32,
    ) -> tuple[Value, ...]:
        """A loop of `trip` iterations; `body(builder, index, carries)` returns the next carries.

        The counter is carry 0 and is made here; the results are those of `carries`.
        """
        inner = self.nested("body")
        index = inner.input((), dtype)
        inside = tuple(inner.input(v.type.shape, v.type.dtype) for v in carries)
        outside = body(inner, index, inside)
        following = inner.add(index, inner.constant(1, dtype))
        region = inner.finish(following, *outside)
        start = self.constant(0, dtype)
        attrs = LoopAttrs(trip, 0)
        op = make_op("loop", (start, *carries), attrs, (region,), self.loc)
        return self.append(op)[1:]

    def in_type(self, a: Value, dtype: DType) -> Value:
        """`a` as `dtype`: itself where that is its type."""
        return a if a.type.dtype is dtype else self.convert(a, dtype)
