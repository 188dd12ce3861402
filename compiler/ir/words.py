"""64-bit integers as pairs of words of 32 bits: the words of what an op gives, of those of its
operands, in ops of 32 bits.

Sums carry, products are made by halves of 16 bits, shifts are by a known number of bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardwright.compiler.diagnostics import Loc
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.facts import chooses, stored
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.ops import BitcastConvertAttrs, ConvertAttrs
from shardwright.compiler.ir.traits import MOVES
from shardwright.compiler.ir.types import Op, Value

Pair = tuple[Value, Value]
"""The low and the high word of a value, both of ui32."""
BITS = 32
"""In a word."""
_HALF = BITS // 2
_SIGNED = (DType.I8, DType.I16, DType.I32, DType.I64)
_LEFT, _RIGHT = "shift_left", "shift_right_logical"


def is_wide(value: Value) -> bool:
    """Whether elements are integers of two words."""
    return value.type.dtype in (DType.I64, DType.U64)


def shifts(op: Op) -> bool:
    """Whether an op shifts bits within its elements; no machine shifts 64 with their sign."""
    return op.name in (_LEFT, _RIGHT)


def shifts_down(op: Op) -> bool:
    """Whether an op makes low bits of high ones."""
    return op.name == _RIGHT


def made_of(op: Op) -> list[Value]:
    """The wide operands whose words those of the result are made of: neither how far bits are
    shifted nor where elements are taken."""
    part = OPS[op.name].passes if _passes_on(op) else None
    if shifts(op):
        part = slice(0, 1)
    return [v for v in op.operands[part or slice(None)] if is_wide(v)]


def has_words(op: Op) -> bool:
    """Whether `Words` makes those of an op with one wide result, of the words of its operands."""
    if isinstance(op.attrs, ConvertAttrs):
        return not op.operand.type.dtype.is_float
    return stored(op) is not None or _passes_on(op) or shifts(op) or op.name in _RULES


def _passes_on(op: Op) -> bool:
    """Whether elements of the result are those of operands, as they are."""
    return op.name in MOVES or chooses(op)


class Words:
    """Pairs that are made so far, and the ops that make them at a place. Nothing is made of words
    that are known to be zero."""

    def __init__(self) -> None:
        self.pairs: dict[Value, Pair] = {}
        self.make = Builder()
        self._zeros: set[Value] = set()

    def begin(self, loc: Loc) -> None:
        """Make the ops from here on at another place."""
        self.make = Builder(loc=loc)

    def of(self, op: Op, shift: int) -> Pair:
        """Both words of a result; `shift` is by how many bits an op shifts, where it does."""
        if (held := stored(op)) is not None:
            whole = held.array().astype(np.uint64)
            return self._known(whole & np.uint64(2**BITS - 1)), self._known(
                whole >> np.uint64(BITS)
            )
        if isinstance(op.attrs, ConvertAttrs):
            return self.pairs[op.operand] if is_wide(op.operand) else self.extended(op.operand)
        if _passes_on(op):
            return self._each(op, 0), self._each(op, 1)
        if shifts(op):
            of_pair = self._right if shifts_down(op) else self._left
            return of_pair(*self.pairs[op.operands[0]], shift)
        return _RULES[op.name](self, *(self.pairs[v] for v in op.operands))

    def extended(self, value: Value) -> Pair:
        """Both words of numbers of up to 32 bits, or of wide ones that fit these."""
        if value.type.dtype in _SIGNED:
            signed = self.make.in_type(value, DType.I32)
            by = self.make.full(value.type.shape, BITS - 1, DType.I32)
            sign = self.make.op("shift_right_arithmetic", signed, by)
            return self.bits(signed, DType.U32), self.bits(sign, DType.U32)
        return self.make.in_type(value, DType.U32), self._zero(value)

    def bits(self, value: Value, dtype: DType) -> Value:
        """The same bits as another type of their size."""
        return self.make.op("bitcast_convert", value, attrs=BitcastConvertAttrs(dtype))

    def _known(self, word: np.ndarray) -> Value:
        made = self.make.constant(word, DType.U32)
        if not word.any():
            self._zeros.add(made)
        return made

    def _each(self, op: Op, n: int) -> Value:
        """An op that passes elements on, of low or of high words."""
        own = made_of(op)
        operands = [self.pairs[v][n] if v in own else v for v in op.operands]
        return self.make.op(op.name, *operands, attrs=op.attrs)

    def _full(self, value: Value, number: int) -> Value:
        return self.make.full(value.type.shape, number, DType.U32)

    def _zero(self, value: Value) -> Value:
        self._zeros.add(made := self._full(value, 0))
        return made

    def _shifted(self, name: str, value: Value, by: int) -> Value:
        """A word shifted by less than its bits."""
        if by == 0 or value in self._zeros:
            return value
        return self.make.op(name, value, self._full(value, by))

    def _both(self, name: str, a: Value, b: Value) -> Value:
        """The sum or the bits of two words: the other one where one is zero."""
        if a in self._zeros or b in self._zeros:
            return b if a in self._zeros else a
        return self.make.op(name, a, b)

    def _times(self, a: Value, b: Value) -> Value:
        """The low word of a product of words."""
        if a in self._zeros or b in self._zeros:
            return self._zero(a)
        return self.make.multiply(a, b)

    def _less(self, a: Value, b: Value) -> Value:
        """1 where the first word is less than the second."""
        if b in self._zeros:
            return self._zero(a)
        return self.make.convert(self.make.compare(a, b, "LT"), DType.U32)

    def _left(self, low: Value, high: Value, by: int) -> Pair:
        if by >= BITS:
            return self._zero(low), self._shifted(_LEFT, low, by - BITS)
        if by == 0:
            return low, high
        over = self._shifted(_RIGHT, low, BITS - by)
        return self._shifted(_LEFT, low, by), self._both("or", self._shifted(_LEFT, high, by), over)

    def _right(self, low: Value, high: Value, by: int) -> Pair:
        if by >= BITS:
            return self._shifted(_RIGHT, high, by - BITS), self._zero(high)
        if by == 0:
            return low, high
        over = self._shifted(_LEFT, high, BITS - by)
        return self._both("or", self._shifted(_RIGHT, low, by), over), self._shifted(
            _RIGHT, high, by
        )

    def add(self, a: Pair, b: Pair) -> Pair:
        """A sum: it carries where it is less than a term."""
        low = self._both("add", a[0], b[0])
        high = self._both("add", a[1], b[1])
        if low in (a[0], b[0]):  # plus zero
            return low, high
        return low, self._both("add", high, self._less(low, a[0]))

    def subtract(self, a: Pair, b: Pair) -> Pair:
        """A difference: it borrows where the first is less than the second."""
        high = self.make.op("subtract", a[1], b[1])
        borrowed = self._less(a[0], b[0])
        return (
            self.make.op("subtract", a[0], b[0]),
            self.make.op("subtract", high, borrowed),
        )

    def multiply(self, a: Pair, b: Pair) -> Pair:
        """A product, by halves of 16 bits, of which no sum on the way leaves 32."""
        x, y = a[0], b[0]
        crossed = self._both("add", self._times(x, b[1]), self._times(a[1], y))
        if x in self._zeros or y in self._zeros:
            return self._zero(x), crossed
        (low, high), (of, above) = self._halves(x), self._halves(y)
        make = self.make
        middle = make.add(make.multiply(high, of), self._halves(make.multiply(low, of))[1])
        rest, top = self._halves(middle)
        other = make.add(make.multiply(low, above), rest)
        upper = make.add(make.multiply(high, above), make.add(top, self._halves(other)[1]))
        return make.multiply(x, y), self._both("add", upper, crossed)

    def _halves(self, word: Value) -> Pair:
        """The low and the high 16 bits."""
        low = self.make.op("and", word, self._full(word, 2**_HALF - 1))
        return low, self._shifted(_RIGHT, word, _HALF)

    def negate(self, a: Pair) -> Pair:
        """Zero less a number."""
        return self.subtract((self._zero(a[0]), self._zero(a[1])), a)


def _word_by_word(name: str) -> Callable[..., Pair]:
    """An op of which bits depend on those at their places."""

    def made(words: Words, *pairs: Pair) -> Pair:
        low, high = (words.make.op(name, *each) for each in zip(*pairs, strict=True))
        return low, high

    return made


_RULES: dict[str, Callable[..., Pair]] = {
    **{name: _word_by_word(name) for name in ("and", "not", "or", "xor")},
    "add": Words.add,
    "multiply": Words.multiply,
    "negate": Words.negate,
    "subtract": Words.subtract,
}
