"""Kernels: what a nest of instructions computes, as array arithmetic over one index space.

A kernel has a list of iter dims (independent indices with a size) and a list of nodes in
topological order. Every value of the kernel spans a subset of the iter dims. A view places a tensor
in that space: an element offset, affine in registers, and one element stride per iter dim (0 where
the iter dim does not move the address). Code generation turns a kernel into tiles
(`compiler/codegen`); L1 execution runs it as whole arrays with one NumPy axis per iter dim
(`sim_cluster/values/kernels.py`): absent iter dims have size 1, so broadcasting needs no rule. Both
start from this one description, and tests hold them equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.compiler.dtypes import DType

STORES = ("store", "store_indexed")
"""Nodes that have no value, and write a tensor."""


@dataclass(frozen=True, slots=True)
class Affine:
    """`const + sum(coefficient * register)`; registers are loop counters, loaded scalars or
    function parameters."""

    const: int = 0
    # (register, coefficient), sorted by register, no zero coefficient
    terms: tuple[tuple[int, int], ...] = ()

    def value(self, registers: Mapping[int, int]) -> int:
        """The number this stands for. Raises KeyError for a register that has no value yet."""
        return self.const + sum(c * registers[r] for r, c in self.terms)

    def __add__(self, other: Affine | int) -> Affine:
        if isinstance(other, int):
            return Affine(self.const + other, self.terms) if other else self
        if not other.terms:
            return self + other.const
        if not self.terms:
            return other + self.const
        merged = dict(self.terms)
        for register, c in other.terms:
            merged[register] = merged.get(register, 0) + c
        return Affine(
            self.const + other.const, tuple(sorted((r, c) for r, c in merged.items() if c))
        )

    def __mul__(self, factor: int) -> Affine:
        if factor == 1:
            return self
        return Affine(
            self.const * factor, tuple((r, c * factor) for r, c in self.terms if c * factor)
        )


@dataclass(frozen=True, slots=True)
class Tensor:
    """An HBM tensor of a function: dense row-major, addressed in elements from its own start.

    kind: `input` and `output` are bound by the caller; `constant` holds `data`; `scratch` lives in
    the function's scratch zone at `offset_bytes` (set by the allocator). An output with `alias >=
    0` shares the memory of that input tensor (donation): the compiler guarantees that the input is
    dead before the first write.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    kind: str
    alias: int = -1
    offset_bytes: int = -1
    data: bytes = b""

    @property
    def num_bytes(self) -> int:
        """Bytes of all its elements; `data` of a constant may be one of them."""
        return math.prod(self.shape) * self.dtype.bytes


@dataclass(frozen=True, slots=True)
class View:
    """A strided window of tensor number `tensor`: element offset and one element stride per iter
    dim of the kernel."""

    tensor: int
    offset: Affine
    strides: tuple[int, ...]


def root_of(tensors: Sequence[Tensor], number: int) -> int:
    """The tensor whose memory tensor `number` uses."""
    alias = tensors[number].alias
    return number if alias in (-1, number) else root_of(tensors, alias)


def tensor_of(operand: int | View) -> int:
    """The tensor of an operand of a collective: all of it, or a dense run from a view's offset."""
    return operand.tensor if isinstance(operand, View) else operand


@dataclass(frozen=True, slots=True)
class Bound:
    """A coordinate of a view that may leave memory: `offset + sum(index * stride)` over iter dims.

    Where it is not in 0..size-1 the element reads as 0. `unit` is the step of the address in
    elements per step of the coordinate.
    """

    offset: int
    size: int
    unit: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """One value (or store) of a kernel.

    Written as `op (inputs), attrs: meaning`.

    load (), view[, bounds]: the elements of the view; with `bounds` (of the windows of a
        convolution) those inside all of them, and 0 elsewhere.
    load_indexed (index[, inside]), view, stride, rows, mode[, replicated]: the view shifted by
        index * stride elements per point; `rows` legal rows; mode "clamp" (the index) or "fill"
        (out of range reads 0). Points where `inside` is false count as out of bounds, once over the
        mesh axes `replicated`; neither has another effect.
    constant (), value: a splat.
    iota (), atom, start: Affine, step[, low, high]: start + step * position along it, known
        to stay in low .. high.
    register (), value: Affine[, low, high]: a register as data, a splat, known to stay there.
    Elementwise names of the graph IR (a[, b[, c]]): add subtract multiply divide maximum minimum
        power remainder and or xor shift_left shift_right_logical shift_right_arithmetic not negate
        abs sign sqrt rsqrt exponential exponential_minus_one log log_plus_one logistic tanh sine
        cosine erf atan gelu gelu_dx gelu_apprx_tanh silu silu_dx floor ceil round_nearest_even
        is_finite select(pred, on_true, on_false) clamp(min, x, max) random_bits(counter, key).
    compare (a, b), direction: EQ NE LT LE GT GE.
    convert (a,), bitcast_convert (a,): to the dtype of the node; a bitcast keeps the width.
    reduce (a,), kind: add max min and or xor multiply, over: iter dims: spans the others of a.
    contract (lhs, rhs), over: iter dims: sum over `over` of lhs * rhs, accumulated in fp32.
    store (a,), view: no value; writes the view, rounding to the tensor's type.
    store_indexed (a, index[, inside]), view, stride, rows, kind, unique, order[, replicated]: no
        value; combines a with the rows picked by index; out-of-range rows are dropped. They count
        as out of bounds, or the points where `inside` is false where there is one, as of a load.
        kind: add multiply max min replace.
        `unique` promises that no row is picked twice; else updates of a row are applied in the
        order of the iter dims `order`, which lists the index's iter dims from major to minor.
    """

    op: str
    inputs: tuple[int, ...]
    iter_dims: tuple[int, ...]  # sorted iter dim numbers the value spans
    dtype: DType
    attrs: Mapping[str, Any] = field(default_factory=dict)


def access_by_index(node: Node) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """What an access by index reads (data to store, the index), and the node that tells which of
    its points lie inside, if it has one; None for other nodes."""
    if "rows" not in node.attrs:
        return None
    read = 1 + (node.op in STORES)
    return node.inputs[:read], node.inputs[read:]


@dataclass(frozen=True, slots=True)
class KernelProgram:
    """The meaning of one kernel.

    kind `compute`: iter dims and nodes as above. kind `register_load`: attrs {register, view}: an
    integer scalar becomes a register (clamped to attrs `low`, `high`; with `replicated`, what that
    moves is an index out of bounds, once over these mesh axes). kind `collective_start`:
    attrs {collective, source, target, ...} where
    `collective` indexes the function's `CollectiveCall` table. kind `collective_wait`: attrs
    {collective}. kind `idle`: nothing; a physical core has no part in what the other one does.
    """

    kind: str
    name: str
    iter_dims: tuple[int, ...] = ()  # sizes
    nodes: tuple[Node, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    loc: int = -1  # ordinal into the location table added at link time
