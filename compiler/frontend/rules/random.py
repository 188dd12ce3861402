"""Random bits: counters through the Threefry cipher, spelled in 32-bit integer ops, or through the
machine's generator.

State word 0 is the key, word 1 the counter; later words pass through. THREE_FRY gives the bits XLA
gives: pair i of 32-bit results is the cipher of counter + i. DEFAULT and `rng`, which every backend
defines for itself, are the machine's generator, one instruction per word: it counts elements, and
its key is made of the whole state. On the device only the low half of a 64-bit seed counts.
"""

from __future__ import annotations

import math

from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.rules.bits import UNSIGNED, together
from shardwright.compiler.frontend.rules.registry import Maker, Site, Values, imports, refuse
from shardwright.compiler.ir.types import Value

# Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC11), Threefry-2x32.
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
ROUNDS = 5  # groups of four
Shape = tuple[int, ...]
Pair = tuple[Value, Value]


@imports("stablehlo.rng_bit_generator")
def rng_bit_generator(site: Site) -> Values:
    """New state, and bits of the result's type."""
    algorithm = str(site.op.attributes["rng_algorithm"])
    if "PHILOX" in algorithm:
        hint = "use the default generator (JAX: the rbg or threefry2x32 implementation)"
        refuse("NCC_EVRF006", "rng_bit_generator requires DEFAULT or THREE_FRY, got PHILOX", hint)
    (state,) = site.operands
    if state.type.dtype is not DType.U64 or state.type.rank != 1 or state.type.shape[0] < 2:
        refuse("NCC_EVRF064", f"rng_bit_generator requires two or more ui64, got {state.type}")
    words = _words(site, state)
    result = site.result_type(1)
    if result.dtype not in UNSIGNED.values():
        found = result.dtype.value
        refuse("NCC_EVRF064", f"rng_bit_generator requires an unsigned result, got {found}")
    draw = _bits if "THREE_FRY" in algorithm else _machine_bits
    bits, used = draw(site, words, result.shape, result.dtype)
    return _advanced(site, words, used), bits


def _machine_bits(site: Site, words: Value, shape: Shape, dtype: DType) -> tuple[Value, int]:
    """Bits of `shape` from the machine's generator, and how far the counter went."""
    make = site.make
    state = [_word(make, words, row, half, ()) for row in (0, 1) for half in (0, 1)]
    key = state[0]
    for word in state[1:]:
        key = make.op("random_bits", word, key)
    counter = _positions(make, make.full(shape, 0, DType.U32))
    used = math.prod(shape)
    if dtype.bytes < 8:
        return make.convert(_stream(make, counter, key, 0), dtype), used
    pair = _stream(make, counter, key, 0), _stream(make, counter, key, 1)
    value = together(site, _joined(make, pair, len(shape)), DType.U64)
    return make.bitcast(value, dtype), used


def _stream(make: Maker, counter: Value, key: Value, number: int) -> Value:
    """Words of the machine's generator at `counter`, of the stream `number` of a scalar key."""
    own = make.op("random_bits", make.splat(number, key.type), key)
    return make.op("random_bits", counter, _splat_of(make, own, counter.type.shape))


def _words(site: Site, state: Value) -> Value:
    """The 32-bit words of a state, [n, 2], low first."""
    make, known = site.make, site.importer.words.get(state)
    if known is not None:
        return make.bitcast(known, DType.U32)
    high = make.with_number("shift_right_logical", state, 32)
    halves = [
        make.reshape(make.convert(half, DType.U32), (*state.type.shape, 1))
        for half in (state, high)
    ]
    return make.concatenate(halves, 1)


def _word(make: Maker, words: Value, row: int, half: int, shape: Shape) -> Value:
    """One word as a splat of `shape`. In a line, words that are put together in front of the
    generator are found again (`passes/simplify.py`).
    """
    line, place = make.reshape(words, (words.type.num_elements,)), 2 * row + half
    return _splat_of(make, make.reshape(make.slice(line, (place,), (place + 1,)), ()), shape)


def _splat_of(make: Maker, scalar: Value, shape: Shape) -> Value:
    """A scalar as a splat."""
    return make.broadcast(scalar, shape) if shape else scalar


def _bits(site: Site, words: Value, shape: Shape, dtype: DType) -> tuple[Value, int]:
    """Bits of `shape` from the cipher, and how far the counter went."""
    make = site.make
    if dtype.bytes == 8:
        joined = _joined(make, _ciphers(make, words, shape), len(shape))
        return make.bitcast(together(site, joined, DType.U64), dtype), math.prod(shape)
    whole = shape or (1,)
    dim = next((d for d, n in enumerate(whole) if n % 2 == 0), whole.index(max(whole)))
    half = tuple(-(-n // 2) if d == dim else n for d, n in enumerate(whole))
    joined = _joined(make, _ciphers(make, words, half), dim + 1)
    padded = tuple(2 * n if d == dim else n for d, n in enumerate(half))
    value = make.reshape(joined, padded)
    if padded != whole:
        value = make.first(value, dim, whole[dim])
    if not shape:
        value = make.reshape(value, ())
    return make.convert(value, dtype), math.prod(half)


def _joined(make: Maker, pair: Pair, dim: int) -> Value:
    """Both halves side by side in a new dim of two at `dim`."""
    shape = pair[0].type.shape
    parts = [make.reshape(v, (*shape[:dim], 1, *shape[dim:])) for v in pair]
    return make.concatenate(parts, dim)


def _ciphers(make: Maker, words: Value, shape: Shape) -> Pair:
    """The cipher of counter, counter + 1, ... in row-major order."""
    key = _word(make, words, 0, 0, shape), _word(make, words, 0, 1, shape)
    counter = _word(make, words, 1, 0, shape), _word(make, words, 1, 1, shape)
    return threefry(make, key, _added(make, counter, _positions(make, counter[0])))


def _positions(make: Maker, like: Value) -> Value:
    """Row-major positions in the shape of `like`, u32."""
    shape, total = like.type.shape, make.splat(0, like.type)
    for dim in range(len(shape)):
        count = make.iota(shape, dim, DType.U32)
        step = make.with_number("multiply", count, math.prod(shape[dim + 1 :]))
        total = make.add(total, step)
    return total


def _added(make: Maker, number: Pair, step: Value) -> Pair:
    """A 64-bit number plus 32 bits."""
    low = make.add(number[0], step)
    carry = make.compare(low, step, "LT")
    return low, make.add(number[1], make.convert(carry, DType.U32))


def threefry(make: Maker, key: Pair, block: Pair) -> Pair:
    """Threefry-2x32 with 20 rounds of u32 tensors of one shape."""
    keys = (*key, make.with_number("xor", make.op("xor", *key), PARITY))
    a, b = make.add(block[0], keys[0]), make.add(block[1], keys[1])
    for group in range(ROUNDS):
        for rotation in ROTATIONS[group % 2]:
            a = make.add(a, b)
            left = make.with_number("shift_left", b, rotation)
            right = make.with_number("shift_right_logical", b, 32 - rotation)
            b = make.op("xor", a, make.op("or", left, right))
        a = make.add(a, keys[(group + 1) % 3])
        b = make.add(b, keys[(group + 2) % 3])
        b = make.with_number("add", b, group + 1)
    return a, b


def _advanced(site: Site, words: Value, used: int) -> Value:
    """The state with its counter moved on."""
    make = site.make
    number = _word(make, words, 1, 0, (1, 1)), _word(make, words, 1, 1, (1, 1))
    step = make.splat(used & 0xFFFFFFFF, number[0].type)
    row = make.concatenate(_added(make, number, step), 1)
    ends = ((0, 1), (2, words.type.shape[0]))
    rows = [make.slice(words, (i, 0), (j, 2)) for i, j in ends if i < j]
    rows.insert(1, row)
    return together(site, make.concatenate(rows, 0), DType.U64)


@imports("stablehlo.rng")
def rng(site: Site) -> Values:
    """Numbers between two scalars, or a mean and a deviation: the k-th generator of a module has
    the key k and counts from 0, so every run gives the same numbers.
    """
    result = site.result_type()
    if not result.dtype.is_float:
        refuse("NCC_EVRF001", f"rng requires a float result, got {result}", "convert the result")
    site.importer.generators += 1
    make = site.make
    key = make.full((), site.importer.generators, DType.U32)
    counter = _positions(make, make.full(result.shape, 0, DType.U32))
    words = _stream(make, counter, key, 0), _stream(make, counter, key, 1)
    first, second = (
        _splat_of(make, make.convert(v, DType.F32), result.shape) for v in site.operands[:2]
    )
    if "NORMAL" in str(site.op.attributes["rng_distribution"]):
        return (make.convert(_around(make, words, first, second), result.dtype),)
    width = make.op("subtract", second, first)
    scaled = make.multiply(_unit(make, words[0]), width)
    return (make.convert(make.add(first, scaled), result.dtype),)


def _unit(make: Maker, word: Value) -> Value:
    """The upper 23 bits as a fp32 number in [0, 1)."""
    mantissa = make.with_number("shift_right_logical", word, 9)
    number = make.bitcast(make.with_number("or", mantissa, 0x3F800000), DType.F32)
    return make.with_number("subtract", number, 1.0)


def _around(make: Maker, words: Pair, mean: Value, deviation: Value) -> Value:
    """Box and Muller: a radius from one word, an angle from the other."""
    above_zero = make.with_number("add", make.op("negate", _unit(make, words[0])), 1.0)
    radius = make.op("sqrt", make.with_number("multiply", make.op("log", above_zero), -2.0))
    angle = make.with_number("multiply", _unit(make, words[1]), 2 * math.pi)
    value = make.multiply(radius, make.op("cosine", angle))
    return make.add(make.multiply(value, deviation), mean)
