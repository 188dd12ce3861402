"""Random bits: counters through the Threefry cipher, spelled in 32-bit integer ops, or through the
machine's generator.

State word 0 is the key, word 1 the counter; later words pass through. THREE_FRY gives the bits XLA
gives: pair i of 32-bit results is the cipher of counter + i. DEFAULT and `rng`, which every backend
defines for itself, are the machine's generator, one instruction per word: it counts elements, and
its key is made of the whole state. On the device only the low half of a 64-bit seed counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.rules.bits import (
    UNSIGNED,
    binary,
    bitcast,
    constant,
    convert,
    splat,
    together,
)
from shardwright.compiler.frontend.rules.registry import imports, refuse
from shardwright.compiler.ir.ops import (
    BroadcastInDimAttrs,
    CompareAttrs,
    ConcatenateAttrs,
    IotaAttrs,
    ReshapeAttrs,
    SliceAttrs,
)
from shardwright.compiler.ir.types import Value, tensor_type

if TYPE_CHECKING:
    from shardwright.compiler.frontend.importer import Site

# Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC11), Threefry-2x32.
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
ROUNDS = 5  # groups of four
Shape = tuple[int, ...]
Pair = tuple[Value, Value]


@imports("stablehlo.rng_bit_generator")
def rng_bit_generator(site: Site) -> Sequence[Value]:
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
    make = _bits if "THREE_FRY" in algorithm else _machine_bits
    bits, used = make(site, words, result.shape, result.dtype)
    return _advanced(site, words, used), bits


def _machine_bits(site: Site, words: Value, shape: Shape, dtype: DType) -> tuple[Value, int]:
    """Bits of `shape` from the machine's generator, and how far the counter went."""
    state = [_word(site, words, row, half, ()) for row in (0, 1) for half in (0, 1)]
    key = state[0]
    for word in state[1:]:
        key = _generated(site, word, key)
    counter = _positions(site, constant(site, 0, tensor_type(shape, DType.U32)))
    used = math.prod(shape)
    if dtype.bytes < 8:
        return convert(site, _stream(site, counter, key, 0), dtype), used
    pair = tuple(_stream(site, counter, key, n) for n in (0, 1))
    value = together(site, _joined(site, (pair[0], pair[1]), len(shape)), DType.U64)
    return bitcast(site, value, dtype), used


def _generated(site: Site, counter: Value, key: Value) -> Value:
    """The word of the machine's generator with `key` at `counter`, element by element."""
    return site.emit("random_bits", (counter, key)).result


def _stream(site: Site, counter: Value, key: Value, number: int) -> Value:
    """Words at `counter` of the stream `number` of a scalar key."""
    own = _generated(site, splat(site, number, key), key)
    return _generated(site, counter, broadcast(site, own, counter.type.shape))


def _words(site: Site, state: Value) -> Value:
    """The 32-bit words of a state, [n, 2], low first."""
    known = site.importer.words.get(state)
    if known is not None:
        return bitcast(site, known, DType.U32)
    high = binary(site, "shift_right_logical", state, 32)
    column = ReshapeAttrs((*state.type.shape, 1))
    halves = [
        site.emit("reshape", (convert(site, half, DType.U32),), column).result
        for half in (state, high)
    ]
    return site.emit("concatenate", halves, ConcatenateAttrs(1)).result


def _word(site: Site, words: Value, row: int, half: int, shape: Shape) -> Value:
    """One word as a splat of `shape`. In a line, words that are put together in front of the
    generator are found again (`passes/simplify.py`).
    """
    line = site.emit("reshape", (words,), ReshapeAttrs((words.type.num_elements,))).result
    place = 2 * row + half
    part = site.emit("slice", (line,), SliceAttrs((place,), (place + 1,), (1,)))
    return broadcast(site, site.emit("reshape", part.results, ReshapeAttrs(())).result, shape)


def broadcast(site: Site, scalar: Value, shape: Shape) -> Value:
    """A scalar as a splat."""
    if not shape:
        return scalar
    return site.emit("broadcast_in_dim", (scalar,), BroadcastInDimAttrs((), shape)).result


def _bits(site: Site, words: Value, shape: Shape, dtype: DType) -> tuple[Value, int]:
    """Bits of `shape` from the cipher, and how far the counter went."""
    if dtype.bytes == 8:
        low, high = _ciphers(site, words, shape)
        value = together(site, _joined(site, (low, high), len(shape)), DType.U64)
        return bitcast(site, value, dtype), math.prod(shape)
    whole = shape or (1,)
    dim = next((d for d, n in enumerate(whole) if n % 2 == 0), whole.index(max(whole)))
    half = tuple(-(-n // 2) if d == dim else n for d, n in enumerate(whole))
    joined = _joined(site, _ciphers(site, words, half), dim + 1)
    padded = tuple(2 * n if d == dim else n for d, n in enumerate(half))
    value = site.emit("reshape", (joined,), ReshapeAttrs(padded)).result
    if padded != whole:
        cut = SliceAttrs((0,) * len(whole), whole, (1,) * len(whole))
        value = site.emit("slice", (value,), cut).result
    if not shape:
        value = site.emit("reshape", (value,), ReshapeAttrs(())).result
    return convert(site, value, dtype), math.prod(half)


def _joined(site: Site, pair: Pair, dim: int) -> Value:
    """Both halves side by side in a new dim of two at `dim`."""
    shape = pair[0].type.shape
    one = ReshapeAttrs((*shape[:dim], 1, *shape[dim:]))
    parts = [site.emit("reshape", (v,), one).result for v in pair]
    return site.emit("concatenate", parts, ConcatenateAttrs(dim)).result


def _ciphers(site: Site, words: Value, shape: Shape) -> Pair:
    """The cipher of counter, counter + 1, ... in row-major order."""
    key = _word(site, words, 0, 0, shape), _word(site, words, 0, 1, shape)
    counter = _word(site, words, 1, 0, shape), _word(site, words, 1, 1, shape)
    return threefry(site, key, _added(site, counter, _positions(site, counter[0])))


def _positions(site: Site, like: Value) -> Value:
    """Row-major positions in the shape of `like`, u32."""
    shape, total = like.type.shape, splat(site, 0, like)
    for dim in range(len(shape)):
        count = site.emit("iota", (), IotaAttrs(dim, like.type)).result
        step = binary(site, "multiply", count, math.prod(shape[dim + 1 :]))
        total = site.emit("add", (total, step)).result
    return total


def _added(site: Site, number: Pair, step: Value) -> Pair:
    """A 64-bit number plus 32 bits."""
    low = site.emit("add", (number[0], step)).result
    carry = site.emit("compare", (low, step), CompareAttrs("LT")).result
    high = site.emit("add", (number[1], convert(site, carry, DType.U32))).result
    return low, high


def threefry(site: Site, key: Pair, block: Pair) -> Pair:
    """Threefry-2x32 with 20 rounds of u32 tensors of one shape."""
    parity = binary(site, "xor", site.emit("xor", key).result, PARITY)
    keys = (*key, parity)
    a = site.emit("add", (block[0], keys[0])).result
    b = site.emit("add", (block[1], keys[1])).result
    for group in range(ROUNDS):
        for rotation in ROTATIONS[group % 2]:
            a = site.emit("add", (a, b)).result
            left = binary(site, "shift_left", b, rotation)
            right = binary(site, "shift_right_logical", b, 32 - rotation)
            b = site.emit("xor", (a, site.emit("or", (left, right)).result)).result
        a = site.emit("add", (a, keys[(group + 1) % 3])).result
        b = site.emit("add", (b, keys[(group + 2) % 3])).result
        b = binary(site, "add", b, group + 1)
    return a, b


def _advanced(site: Site, words: Value, used: int) -> Value:
    """The state with its counter moved on."""
    number = tuple(_word(site, words, 1, half, (1, 1)) for half in (0, 1))
    step = splat(site, used & 0xFFFFFFFF, number[0])
    counter = _added(site, (number[0], number[1]), step)
    row = site.emit("concatenate", counter, ConcatenateAttrs(1)).result
    count = words.type.shape[0]
    rows = [
        site.emit("slice", (words,), SliceAttrs((i, 0), (j, 2), (1, 1))).result
        for i, j in ((0, 1), (2, count))
        if i < j
    ]
    rows.insert(1, row)
    return together(site, site.emit("concatenate", rows, ConcatenateAttrs(0)).result, DType.U64)


@imports("stablehlo.rng")
def rng(site: Site) -> Sequence[Value]:
    """Numbers between two scalars, or a mean and a deviation: the k-th generator of a module has
    the key k and counts from 0, so every run gives the same numbers.
    """
    result = site.result_type()
    if not result.dtype.is_float:
        refuse("NCC_EVRF001", f"rng requires a float result, got {result}", "convert the result")
    site.importer.generators += 1
    key = constant(site, site.importer.generators, tensor_type((), DType.U32))
    counter = _positions(site, constant(site, 0, tensor_type(result.shape, DType.U32)))
    words = _stream(site, counter, key, 0), _stream(site, counter, key, 1)
    first, second = (
        broadcast(site, convert(site, v, DType.F32), result.shape) for v in site.operands[:2]
    )
    if "NORMAL" in str(site.op.attributes["rng_distribution"]):
        return (convert(site, _around(site, words, first, second), result.dtype),)
    width = site.emit("subtract", (second, first)).result
    scaled = site.emit("multiply", (_unit(site, words[0]), width)).result
    return (convert(site, site.emit("add", (first, scaled)).result, result.dtype),)


def _unit(site: Site, word: Value) -> Value:
    """The upper 23 bits as a fp32 number in [0, 1)."""
    mantissa = binary(site, "shift_right_logical", word, 9)
    number = bitcast(site, binary(site, "or", mantissa, 0x3F800000), DType.F32)
    return binary(site, "subtract", number, 1.0)


def _around(site: Site, words: Pair, mean: Value, deviation: Value) -> Value:
    """Box and Muller: a radius from one word, an angle from the other."""
    above_zero = binary(site, "add", site.emit("negate", (_unit(site, words[0]),)).result, 1.0)
    square = binary(site, "multiply", site.emit("log", (above_zero,)).result, -2.0)
    radius = site.emit("sqrt", (square,)).result
    angle = binary(site, "multiply", _unit(site, words[1]), 2 * math.pi)
    value = site.emit("multiply", (radius, site.emit("cosine", (angle,)).result)).result
    scaled = site.emit("multiply", (value, deviation)).result
    return site.emit("add", (scaled, mean)).result
