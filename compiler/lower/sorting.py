"""`sort` before lowering: selections of the first few, or a network of compare-and-exchange.

Keys become 32-bit integers (64-bit ones where the machine computes those) in ascending order,
whatever the element type and direction. The first
few elements of a sort (top_k) are found one at a time by reductions. Everything else goes through
Batcher's bitonic network, each stage of which is an elementwise op over two strided views: the
number of stages grows with the square of log n, for any n and any dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.facts import counted_dim
from shardwright.compiler.ir.ops import SliceAttrs
from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.lower.level import Site

MAX_ROUNDS = 8  # elements up to which selecting one after the other is taken (our choice)
_LAST = 2**31 - 1  # no key comes after this one
_SIGN = 31
_SIGNED = {DType.U32: DType.I32, DType.U64: DType.I64}


def _last(dtype: DType) -> int:
    """No key of a type comes after this one."""
    return int(np.iinfo(dtype.numpy).max)


def _lowest(dtype: DType) -> int:
    return int(np.iinfo(dtype.numpy).min)


def sort(b: Site, op: Op) -> Sequence[Value]:
    """The results of `op` from ops that can be lowered."""
    if op.operands[0].type.shape[op.attrs.dim] == 1:
        return op.operands
    sorter = _Sorter(b, op)
    few = sorter.few_wanted()
    return sorter.select(few) if few else sorter.network()


@dataclass(slots=True)
class _Sorter:
    """One sort: rows of length n, the sorted dim last."""

    b: Site
    op: Op

    @property
    def n(self) -> int:
        """Elements of a row."""
        return self.op.operands[0].type.shape[int(self.op.attrs.dim)]

    @property
    def rows(self) -> int:
        """Rows that are sorted independently."""
        return self.op.operands[0].type.num_elements // self.n

    def _to_rows(self, value: Value) -> Value:
        """`value` as [rows, n]."""
        order = [d for d in range(value.type.rank) if d != self.op.attrs.dim]
        transposed = self.b.transpose(value, (*order, self.op.attrs.dim))
        return self.b.reshape(transposed, (self.rows, self.n))

    def _from_rows(self, value: Value) -> Value:
        """[rows, m] in the dims of the operands, m elements along the sorted one."""
        dim, shape = self.op.attrs.dim, list(self.op.operands[0].type.shape)
        del shape[dim]
        value = self.b.reshape(value, (*shape, value.type.shape[1]))
        return self.b.transpose(value, (*range(dim), len(shape), *range(dim, len(shape))))

    # keys

    def _key(self, operand: int, direction: str, order: str) -> Value:
        """[rows, n] i32 (i64 of 64-bit integers) that ascend as the operand is to be sorted."""
        b, value = self.b, self._to_rows(self.op.operands[operand])
        if value.type.dtype.is_float:
            key = self._float_key(value, order)
        elif value.type.dtype in _SIGNED:
            signed = _SIGNED[value.type.dtype]
            key = b.op("xor", b.bits(value, signed), _lowest(signed))
        elif value.type.dtype is DType.I64:
            key = value
        else:
            key = b.convert(value, DType.I32)
        return b.op("not", key) if direction == "GT" else key

    def _float_key(self, value: Value, order: str) -> Value:
        """The bits, with the magnitude bits of negative numbers turned over."""
        b, value = self.b, self.b.convert(value, DType.F32)
        if order == "numeric":
            zero, nan = b.splat(0.0, value), b.splat(math.nan, value)
            is_zero, is_nan = b.compare(value, zero, "EQ"), b.compare(value, value, "NE")
            value = b.op("select", is_nan, nan, b.op("select", is_zero, zero, value))
        return self._flip(b.bits(value))

    def _flip(self, bits: Value) -> Value:
        """x with the bits below the sign turned over where x is negative; its own inverse."""
        sign = self.b.op("shift_right_arithmetic", bits, _SIGN)
        return self.b.op("xor", bits, self.b.op("and", sign, _LAST))

    def _is_invertible(self, operand: int) -> bool:
        """Whether the elements of an operand can be had back from a key."""
        dtype = self.op.operands[operand].type.dtype
        return any(
            k == operand and (not dtype.is_float or (dtype is DType.F32 and order == "total"))
            for k, _, order in self.op.attrs.keys
        )

    def _from_key(self, key: Value, operand: int) -> Value:
        b, dtype = self.b, self.op.operands[operand].type.dtype
        direction = next(d for k, d, _ in self.op.attrs.keys if k == operand)
        if direction == "GT":
            key = b.op("not", key)
        if dtype.is_float:
            return b.bits(self._flip(key), dtype)
        if dtype in _SIGNED:
            return b.bits(b.op("xor", key, _lowest(key.type.dtype)), dtype)
        return b.convert(key, dtype)

    def _is_count(self, value: Value) -> bool:
        """Whether an operand counts positions along the sorted dim."""
        return bool(counted_dim(self.b.level.made.get(value)) == self.op.attrs.dim)

    # the first few

    def few_wanted(self) -> int:
        """How many leading elements are read, when these are few and can be selected, else 0."""
        results, outputs = self.op.results, self.b.level.outputs
        had_back = all(
            self._is_invertible(i) or self._is_count(v) or not self._readers(result)
            for i, (v, result) in enumerate(zip(self.op.operands, results, strict=True))
        )
        if len(self.op.attrs.keys) > 1 or not had_back or not outputs.isdisjoint(results):
            return 0
        ends = [self._read_of(u) for v in results for u in self._readers(v)]
        return max(ends, default=1) if all(0 < e <= MAX_ROUNDS for e in ends) else 0

    def _readers(self, value: Value) -> Sequence[Op]:
        return self.b.level.users.get(value, ())

    def _read_of(self, user: Op) -> int:
        """Elements along the sorted dim up to the last one that `user` slices; 0 if it does not."""
        dim, shape = self.op.attrs.dim, self.op.operands[0].type.shape
        if not isinstance(user.attrs, SliceAttrs):
            return 0
        cuts = zip(user.attrs.start, user.attrs.limit, shape, strict=True)
        whole = all(d == dim or (0, size) == (a, b) for d, (a, b, size) in enumerate(cuts))
        return user.attrs.limit[dim] if whole else 0

    def select(self, count: int) -> Sequence[Value]:
        """`count` times: the smallest key that is not taken, and its first position."""
        b, (key,) = self.b, self.op.attrs.keys
        keys = self._key(*key)
        place = b.iota(keys.type.shape, 1)
        last = b.splat(_last(keys.type.dtype), keys)
        nowhere = last if last.type == place.type else b.splat(_LAST, place)
        taken: Value | None = None
        best: list[Value] = []
        where: list[Value] = []
        for _ in range(count):
            left = keys if taken is None else b.op("select", taken, last, keys)
            best.append(b.reduce(left, "min", (1,)))
            hit = b.compare(left, self._spread(best[-1]), "EQ")
            if taken is not None:
                hit = b.op("and", hit, b.op("not", taken))
            where.append(b.reduce(b.op("select", hit, place, nowhere), "min", (1,)))
            now = b.compare(place, self._spread(where[-1]), "EQ")
            taken = now if taken is None else b.op("or", taken, now)
        for i, result in enumerate(self.op.results):
            for user in self._readers(result):
                chosen = self._chosen(i, best if i == key[0] else where, i == key[0])
                b.level.replaced[user.result] = b.op("slice", chosen, attrs=user.attrs)
        return self.op.results  # nobody reads them any more

    def _spread(self, value: Value) -> Value:
        return self.b.broadcast(value, (self.rows, self.n), (0,))

    def _chosen(self, i: int, found: list[Value], is_key: bool) -> Value:
        """Operand `i` at the chosen places, from its keys or the places themselves."""
        columns = [self.b.reshape(v, (self.rows, 1)) for v in found]
        joined = self.b.concatenate(columns, 1) if len(columns) > 1 else columns[0]
        if is_key:
            return self._from_rows(self._from_key(joined, i))
        return self._from_rows(self.b.as_type(joined, self.op.operands[i].type.dtype))

    def _padded(self, value: Value, length: int, filler: float) -> Value:
        """[rows, m] -> [rows, length]."""
        return self.b.padded(value, filler, (0, 0), (0, length - value.type.shape[1]))

    # everything

    def network(self) -> list[Value]:
        """All elements by a bitonic network; positions break ties, so that the sort is stable."""
        length = 1 << (self.n - 1).bit_length()
        keys = [self._key(*key) for key in self.op.attrs.keys]
        keys = [self._padded(key, length, _last(key.type.dtype)) for key in keys]
        operands = list(enumerate(self.op.operands))
        counts = [i for i, v in operands if self._is_count(v)]
        carried = [i for i, _ in operands if not (self._is_invertible(i) or i in counts)]
        values = list(keys)
        if carried or counts or length != self.n:
            values.append(self.b.iota((self.rows, length), 1))
        ordered = len(values)
        values += [self._padded(self._to_rows(self.op.operands[i]), length, 0) for i in carried]
        values = self._exchange_all(_Grid.of(self.rows, length), values, ordered)
        return [self._sorted(i, values, carried, ordered) for i in range(len(self.op.operands))]

    def _sorted(self, i: int, values: list[Value], carried: list[int], ordered: int) -> Value:
        """The sorted operand `i` among the outputs of the network."""
        operand = self.op.operands[i]
        if self._is_count(operand):
            value = self.b.convert(values[ordered - 1], operand.type.dtype)
        elif i in carried:
            value = values[ordered + carried.index(i)]
        else:
            at = [k for k, _, _ in self.op.attrs.keys].index(i)
            value = self._from_key(values[at], i)
        if value.type.shape[1] != self.n:
            value = self.b.slice(value, (0, 0), (self.rows, self.n))
        return self._from_rows(value)

    def _exchange_all(self, grid: _Grid, values: list[Value], ordered: int) -> list[Value]:
        """All stages on [rows, length] values, the first `ordered` of which are compared."""
        b = self.b
        values = [b.reshape(v, (grid.rows, grid.high, grid.low)) for v in values]
        values = [b.transpose(v, (2, 1, 0)) for v in values]
        low_first = True
        for size, distance in grid.stages():
            if low_first != (distance < grid.low):
                low_first = not low_first
                values = [b.transpose(v, (1, 0, 2)) for v in values]
            values = self._stage(values, ordered, grid.stage(size, distance))
        if not low_first:
            values = [b.transpose(v, (1, 0, 2)) for v in values]
        values = [b.transpose(v, (2, 1, 0)) for v in values]
        return [b.reshape(v, (grid.rows, grid.length)) for v in values]

    def _stage(self, values: list[Value], ordered: int, stage: _Stage) -> list[Value]:
        """Exchange partners that are in the wrong order."""
        b, dims = self.b, range(len(stage.shape))
        lows: list[Value] = []
        highs: list[Value] = []
        for value in values:
            split = b.reshape(value, stage.shape)
            for half, into in enumerate((lows, highs)):
                start = [half if d == _PAIR else 0 for d in dims]
                limit = [half + 1 if d == _PAIR else n for d, n in enumerate(stage.shape)]
                into.append(b.slice(split, start, limit))
        swap = self._is_less(highs[:ordered], lows[:ordered])
        if stage.counted >= 0:
            number = b.iota(lows[0].type.shape, stage.counted)
            bit = b.op("and", b.op("shift_right_logical", number, stage.shift), 1)
            swap = b.op("xor", swap, b.compare(bit, 1, "EQ"))
        pairs = zip(lows, highs, strict=True)
        return [b.reshape(self._exchanged(swap, *pair), values[0].type.shape) for pair in pairs]

    def _exchanged(self, swap: Value, low: Value, high: Value) -> Value:
        first = self.b.op("select", swap, high, low)
        return self.b.concatenate((first, self.b.op("select", swap, low, high)), _PAIR)

    def _is_less(self, left: list[Value], right: list[Value]) -> Value:
        """left < right, the first value weighing most."""
        b, less = self.b, self.b.compare(left[-1], right[-1], "LT")
        for x, y in zip(left[-2::-1], right[-2::-1], strict=True):
            both = b.op("and", b.compare(x, y, "EQ"), less)
            less = b.op("or", b.compare(x, y, "LT"), both)
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
