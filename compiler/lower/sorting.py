"""`sort` before lowering: selections of the first few, or a network of compare-and-exchange.

Keys become 32-bit integers in ascending order, whatever the element type and direction. The first
few elements of a sort (top_k) are found one at a time by reductions. Everything else goes through
Batcher's bitonic network, each stage of which is an elementwise op over two strided views: the
number of stages grows with the square of log n, for any n and any dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.facts import counted_dim
from shardwright.compiler.ir.ops import (
    BitcastConvertAttrs,
    BroadcastInDimAttrs,
    CompareAttrs,
    ConcatenateAttrs,
    ConvertAttrs,
    IotaAttrs,
    PadAttrs,
    ReduceAttrs,
    ReshapeAttrs,
    SliceAttrs,
    TransposeAttrs,
)
from shardwright.compiler.ir.types import Op, Value, tensor_type
from shardwright.compiler.lower.level import IndexedLevel

MAX_ROUNDS = 8  # elements up to which selecting one after the other is taken (our choice)
_LAST = 2**31 - 1  # no key comes after this one
_SIGN = 31


def sort(level: IndexedLevel, op: Op) -> Sequence[Value] | None:
    """The results of `op` from ops that can be lowered."""
    if op.operands[0].type.shape[op.attrs.dim] == 1:
        return [level.now(v) for v in op.operands]
    sorter = _Sorter(level, op)
    few = sorter.few_wanted()
    return sorter.select(few) if few else sorter.network()


@dataclass(slots=True)
class _Sorter:
    """One sort: rows of length n, the sorted dim last."""

    level: IndexedLevel
    op: Op

    @property
    def n(self) -> int:
        """Elements of a row."""
        return self.op.operands[0].type.shape[int(self.op.attrs.dim)]

    @property
    def rows(self) -> int:
        """Rows that are sorted independently."""
        return self.op.operands[0].type.num_elements // self.n

    # building

    def _add(self, name: str, *operands: Value, attrs: object = None) -> Value:
        return self.level.add(name, *operands, attrs=attrs, like=self.op)

    def _full(self, like: Value, value: float, dtype: DType | None = None) -> Value:
        return self.level.full(like.type.shape, value, dtype or like.type.dtype, self.op)

    def _compare(self, a: Value, b: Value, direction: str) -> Value:
        return self._add("compare", a, b, attrs=CompareAttrs(direction))

    def _to_rows(self, value: Value) -> Value:
        """`value` as [rows, n]."""
        order = [d for d in range(value.type.rank) if d != self.op.attrs.dim]
        turned = self._add("transpose", value, attrs=TransposeAttrs((*order, self.op.attrs.dim)))
        return self._add("reshape", turned, attrs=ReshapeAttrs((self.rows, self.n)))

    def _from_rows(self, value: Value) -> Value:
        """[rows, m] in the dims of the operands, m elements along the sorted one."""
        dim, shape = self.op.attrs.dim, list(self.op.operands[0].type.shape)
        del shape[dim]
        moved = ReshapeAttrs((*shape, value.type.shape[1]))
        value = self._add("reshape", value, attrs=moved)
        back = [*range(dim), len(shape), *range(dim, len(shape))]
        return self._add("transpose", value, attrs=TransposeAttrs(tuple(back)))

    # keys

    def _key(self, operand: int, direction: str, order: str) -> Value:
        """[rows, n] i32 that ascend as the operand is to be sorted."""
        value = self._to_rows(self.op.operands[operand])
        dtype = value.type.dtype
        if dtype.is_float:
            key = self._float_key(value, order)
        elif dtype is DType.U32:
            bits = self._add("bitcast_convert", value, attrs=BitcastConvertAttrs(DType.I32))
            key = self._add("xor", bits, self._full(bits, -(2**31)))
        else:
            key = self._add("convert", value, attrs=ConvertAttrs(DType.I32))
        return self._add("not", key) if direction == "GT" else key

    def _float_key(self, value: Value, order: str) -> Value:
        """The bits, with the magnitude bits of negative numbers turned over."""
        value = self._add("convert", value, attrs=ConvertAttrs(DType.F32))
        if order == "numeric":
            zero, nan = self._full(value, 0.0), self._full(value, math.nan)
            is_zero = self._compare(value, zero, "EQ")
            is_nan = self._compare(value, value, "NE")
            value = self._add("select", is_zero, zero, value)
            value = self._add("select", is_nan, nan, value)
        bits = self._add("bitcast_convert", value, attrs=BitcastConvertAttrs(DType.I32))
        return self._flip(bits)

    def _flip(self, bits: Value) -> Value:
        """x with the bits below the sign turned over where x is negative; its own inverse."""
        sign = self._add("shift_right_arithmetic", bits, self._full(bits, _SIGN))
        mask = self._add("and", sign, self._full(bits, _LAST))
        return self._add("xor", bits, mask)

    def _is_invertible(self, operand: int) -> bool:
        """Whether the elements of an operand can be had back from a key."""
        dtype = self.op.operands[operand].type.dtype
        return any(
            k == operand and (not dtype.is_float or (dtype is DType.F32 and order == "total"))
            for k, _, order in self.op.attrs.keys
        )

    def _from_key(self, key: Value, operand: int) -> Value:
        dtype = self.op.operands[operand].type.dtype
        direction = next(d for k, d, _ in self.op.attrs.keys if k == operand)
        if direction == "GT":
            key = self._add("not", key)
        if dtype.is_float:
            key = self._flip(key)
        elif dtype is DType.U32:
            key = self._add("xor", key, self._full(key, -(2**31)))
        if dtype.is_float or dtype is DType.U32:
            return self._add("bitcast_convert", key, attrs=BitcastConvertAttrs(dtype))
        return self._add("convert", key, attrs=ConvertAttrs(dtype))

    def _is_count(self, value: Value) -> bool:
        """Whether an operand counts positions along the sorted dim."""
        return bool(counted_dim(self.level.made.get(value)) == self.op.attrs.dim)

    # the first few

    def few_wanted(self) -> int:
        """How many leading elements are read, when these are few and can be selected, else 0."""
        results = self.op.results
        read = [self._readers(v) or v in self.level.outputs for v in results]
        had_back = all(
            self._is_invertible(i) or self._is_count(v) or not is_read
            for i, (v, is_read) in enumerate(zip(self.op.operands, read, strict=True))
        )
        whole = any(v in self.level.outputs for v in results)
        if len(self.op.attrs.keys) > 1 or not had_back or whole:
            return 0
        ends = [self._read_of(u) for v in results for u in self._readers(v)]
        return max(ends, default=1) if all(0 < e <= MAX_ROUNDS for e in ends) else 0

    def _readers(self, value: Value) -> Sequence[Op]:
        return self.level.users.get(value, ())

    def _read_of(self, user: Op) -> int:
        """Elements along the sorted dim up to the last one that `user` slices; 0 if it does not."""
        dim, shape = self.op.attrs.dim, self.op.operands[0].type.shape
        if user.name != "slice":
            return 0
        cuts = zip(user.attrs.start, user.attrs.limit, shape, strict=True)
        whole = all(d == dim or (0, size) == (a, b) for d, (a, b, size) in enumerate(cuts))
        return int(user.attrs.limit[dim]) if whole else 0

    def select(self, count: int) -> Sequence[Value]:
        """`count` times: the smallest key that is not taken, and its first position."""
        (key,) = self.op.attrs.keys
        keys = self._key(*key)
        place = self._add("iota", attrs=IotaAttrs(1, keys.type))
        last = self._full(keys, _LAST)
        taken: Value | None = None
        best: list[Value] = []
        where: list[Value] = []
        for _ in range(count):
            left = keys if taken is None else self._add("select", taken, last, keys)
            best.append(self._least(left))
            hit = self._compare(left, self._spread(best[-1]), "EQ")
            if taken is not None:
                hit = self._add("and", hit, self._add("not", taken))
            where.append(self._least(self._add("select", hit, place, last)))
            now = self._compare(place, self._spread(where[-1]), "EQ")
            taken = now if taken is None else self._add("or", taken, now)
        for i, result in enumerate(self.op.results):
            for user in self._readers(result):
                chosen = self._chosen(i, key[0], best, where)
                self.level.replaced[user.result] = self._add("slice", chosen, attrs=user.attrs)
        return self.op.results  # nobody reads them any more

    def _least(self, value: Value) -> Value:
        return self._add("reduce", value, attrs=ReduceAttrs("min", (1,)))

    def _spread(self, value: Value) -> Value:
        attrs = BroadcastInDimAttrs((0,), (self.rows, self.n))
        return self._add("broadcast_in_dim", value, attrs=attrs)

    def _chosen(self, i: int, key: int, best: list[Value], where: list[Value]) -> Value:
        """Operand `i` at the chosen places."""
        columns = [
            self._add("reshape", v, attrs=ReshapeAttrs((self.rows, 1)))
            for v in (best if i == key else where)
        ]
        joined = columns[0]
        if len(columns) > 1:
            joined = self._add("concatenate", *columns, attrs=ConcatenateAttrs(1))
        dtype = self.op.operands[i].type.dtype
        if i == key:
            joined = self._from_key(joined, i)
        elif dtype is not DType.I32:
            joined = self._add("convert", joined, attrs=ConvertAttrs(dtype))
        return self._from_rows(joined)

    def _padded(self, value: Value, length: int, filler: float) -> Value:
        """[rows, m] -> [rows, length]."""
        more = length - value.type.shape[1]
        if not more:
            return value
        scalar = self.level.full((), filler, value.type.dtype, self.op)
        return self._add("pad", value, scalar, attrs=PadAttrs((0, 0), (0, more), (0, 0)))

    # everything

    def network(self) -> list[Value]:
        """All elements by a bitonic network; positions break ties, so that the sort is stable."""
        length = 1 << (self.n - 1).bit_length()
        keys = [self._padded(self._key(*key), length, _LAST) for key in self.op.attrs.keys]
        carried = [
            i
            for i, v in enumerate(self.op.operands)
            if not (self._is_invertible(i) or self._is_count(v))
        ]
        counted = carried or any(self._is_count(v) for v in self.op.operands)
        values = list(keys)
        if counted or length != self.n:
            kind = tensor_type((self.rows, length), DType.I32)
            values.append(self._add("iota", attrs=IotaAttrs(1, kind)))
        ordered = len(values)
        values += [self._padded(self._to_rows(self.op.operands[i]), length, 0) for i in carried]
        values = self._exchange_all(_Grid.of(self.rows, length), values, ordered)
        return [self._sorted(i, values, carried, ordered) for i in range(len(self.op.operands))]

    def _exchange_all(self, grid: _Grid, values: list[Value], ordered: int) -> list[Value]:
        """All stages on [rows, length] values, the first `ordered` of which are compared."""
        split = ReshapeAttrs((grid.rows, grid.high, grid.low))
        turned = TransposeAttrs((2, 1, 0))
        values = [self._add("reshape", v, attrs=split) for v in values]
        values = [self._add("transpose", v, attrs=turned) for v in values]
        low_first = True
        for size, distance in grid.stages():
            if low_first != (distance < grid.low):
                low_first = not low_first
                swapped = TransposeAttrs((1, 0, 2))
                values = [self._add("transpose", v, attrs=swapped) for v in values]
            values = self._stage(values, ordered, grid.stage(size, distance))
        if not low_first:
            values = [self._add("transpose", v, attrs=TransposeAttrs((1, 0, 2))) for v in values]
        values = [self._add("transpose", v, attrs=turned) for v in values]
        flat = ReshapeAttrs((grid.rows, grid.length))
        return [self._add("reshape", v, attrs=flat) for v in values]

    def _sorted(self, i: int, values: list[Value], carried: list[int], ordered: int) -> Value:
        """The sorted operand `i` among the outputs of the network."""
        operand = self.op.operands[i]
        if self._is_count(operand):
            value = self._add(
                "convert", values[ordered - 1], attrs=ConvertAttrs(operand.type.dtype)
            )
        elif i in carried:
            value = values[ordered + carried.index(i)]
        else:
            at = [k for k, _, _ in self.op.attrs.keys].index(i)
            value = self._from_key(values[at], i)
        if value.type.shape[1] != self.n:
            attrs = SliceAttrs((0, 0), (self.rows, self.n), (1, 1))
            value = self._add("slice", value, attrs=attrs)
        return self._from_rows(value)

    def _stage(self, values: list[Value], ordered: int, stage: _Stage) -> list[Value]:
        """Exchange partners that are in the wrong order."""
        shape = stage.shape
        lows: list[Value] = []
        highs: list[Value] = []
        for value in values:
            split = self._add("reshape", value, attrs=ReshapeAttrs(shape))
            for half, into in enumerate((lows, highs)):
                start = tuple(half if d == _PAIR else 0 for d in range(len(shape)))
                limit = tuple(half + 1 if d == _PAIR else n for d, n in enumerate(shape))
                attrs = SliceAttrs(start, limit, (1,) * len(shape))
                into.append(self._add("slice", split, attrs=attrs))
        swap = self._is_less(highs[:ordered], lows[:ordered])
        if stage.counted >= 0:
            kind = tensor_type(lows[0].type.shape, DType.I32)
            number = self._add("iota", attrs=IotaAttrs(stage.counted, kind))
            number = self._add("shift_right_logical", number, self._full(number, stage.shift))
            bit = self._add("and", number, self._full(number, 1))
            swap = self._add("xor", swap, self._compare(bit, self._full(bit, 1), "EQ"))
        back = ReshapeAttrs(values[0].type.shape)
        return [self._exchanged(swap, *pair, back) for pair in zip(lows, highs, strict=True)]

    def _exchanged(self, swap: Value, low: Value, high: Value, back: ReshapeAttrs) -> Value:
        first = self._add("select", swap, high, low)
        second = self._add("select", swap, low, high)
        joined = self._add("concatenate", first, second, attrs=ConcatenateAttrs(_PAIR))
        return self._add("reshape", joined, attrs=back)

    def _is_less(self, left: list[Value], right: list[Value]) -> Value:
        """left < right, the first value weighing most."""
        less = self._compare(left[-1], right[-1], "LT")
        for a, b in zip(left[-2::-1], right[-2::-1], strict=True):
            both = self._add("and", self._compare(a, b, "EQ"), less)
            less = self._add("or", self._compare(a, b, "LT"), both)
        return less


_PAIR = 1  # the dim of a stage that tells partners apart


@dataclass(frozen=True, slots=True)
class _Grid:
    """Positions of a row as high * low, kept in memory with the rows innermost.

    Partners at small distances differ in the low part, others in the high part. Whichever it is
    comes first in memory, so that the rest makes runs that a transfer moves at once.
    """

    rows: int
    high: int
    low: int

    @classmethod
    def of(cls, rows: int, length: int) -> _Grid:
        """Many rows make runs alone; of few rows, positions are cut in the middle."""
        bits = length.bit_length() - 1
        low = length if rows >= _MANY_ROWS else 1 << -(-bits // 2)
        return cls(rows, length // low, low)

    @property
    def length(self) -> int:
        """Positions of a row, a power of two."""
        return self.high * self.low

    def stages(self) -> Iterator[tuple[int, int]]:
        """(size of the runs that are merged, distance of partners) in order."""
        for size in (2 << s for s in range(self.length.bit_length() - 1)):
            distance = size // 2
            while distance:
                yield size, distance
                distance //= 2

    def stage(self, size: int, distance: int) -> _Stage:
        """The partners `distance` apart while runs of `size` are merged."""
        run = size // self.low  # in positions of the high part
        if distance >= self.low:
            return self._cut(self.high, self.low, run, distance // self.low)
        if size < self.low or run == self.high:
            return self._cut(self.low, self.high, size, distance)
        stage = self._cut(self.low, self.high, self.low, distance)
        return replace(stage, counted=3, shift=run.bit_length() - 1)

    def _cut(self, length: int, other: int, size: int, distance: int) -> _Stage:
        """A stage within the part of the positions that comes first in memory."""
        shape = (length // (2 * distance), 2, distance, other, self.rows)
        counted = 0 if size < length else -1
        return _Stage(shape, counted, (size // (2 * distance)).bit_length() - 1)


@dataclass(frozen=True, slots=True)
class _Stage:
    """Dims of a stage, partners told apart by dim `_PAIR`. Runs end up descending where bit `shift`
    of the position along dim `counted` is set; nowhere when that is -1.
    """

    shape: tuple[int, ...]
    counted: int
    shift: int


_MANY_ROWS = 64  # 256 bytes per run of 4-byte elements (our choice)
