"""Philox, the generator that XLA's bridge gives TensorFlow on a CPU, written out.

The machine's compiler takes no `rng_bit_generator` of Philox; written out it is additions,
products and exclusive ors. Source: Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as
1, 2, 3 (SC11), Philox-4x32-10; how a state is key and counter, and results lie, as XLA does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def philox(state: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """(state behind them, words of 32 bits) of a state of three words of 64: a key, and a counter,
    whose low word is first. Four results have a count."""
    import jax.numpy as jnp
    from jax import lax

    words = lax.reshape(lax.bitcast_convert_type(state, jnp.uint32), (6,))  # low first
    every = [lax.reshape(lax.slice(words, (n,), (n + 1,)), ()) for n in range(6)]
    blocks = -(-math.prod(shape) // 4)
    start = [lax.broadcast(word, (blocks,)) for word in every[2:]]
    key = lax.broadcast(every[0], (blocks,)), lax.broadcast(every[1], (blocks,))
    rows = _cipher(_advanced(start, lax.iota(jnp.uint32, blocks)), key)
    lines = lax.concatenate([lax.reshape(row, (blocks, 1)) for row in rows], 1)
    flat = lax.slice(lax.reshape(lines, (4 * blocks,)), (0,), (math.prod(shape),))
    after = [*every[:2], *_advanced(every[2:], lax.full((), blocks, jnp.uint32))]
    whole = lax.concatenate([lax.reshape(word, (1,)) for word in after], 0)
    state = lax.bitcast_convert_type(lax.reshape(whole, (3, 2)), jnp.uint64)
    return state, lax.reshape(flat, shape)


def written_out(state: Any, shape: tuple[int, ...]) -> str:
    """`philox` of a state of a type as a StableHLO module. To be called with 64-bit types."""
    import jax

    return str(jax.jit(lambda words: philox(words, shape)).lower(state).compiler_ir("stablehlo"))


def _advanced(counter: Sequence[Any], by: Any) -> list[Any]:
    """A counter of 128 bits, and some more."""
    from jax import lax

    found, carry = list[Any](), by
    for word in counter:
        found.append(lax.add(word, carry))
        carry = lax.convert_element_type(lax.lt(found[-1], carry), carry.dtype)
    return found


def _cipher(x: Sequence[Any], key: tuple[Any, Any]) -> Sequence[Any]:
    from jax import lax

    low, high = key
    for _ in range(ROUNDS):
        first, second = _product(x[0], MULTIPLIERS[0]), _product(x[2], MULTIPLIERS[1])
        mixed = [
            lax.bitwise_xor(lax.bitwise_xor(product, word), of_key)
            for product, word, of_key in ((second[1], x[1], low), (first[1], x[3], high))
        ]
        x = mixed[0], second[0], mixed[1], first[0]
        low, high = (
            lax.add(word, lax.full_like(word, step))
            for word, step in zip((low, high), WEYL, strict=True)
        )
    return x


def _product(word: Any, by: int) -> tuple[Any, Any]:
    """(low, high) word of a product, which `passes/words.py` takes apart."""
    import jax.numpy as jnp
    from jax import lax

    wide = lax.convert_element_type(word, jnp.uint64)
    whole = lax.mul(wide, lax.full_like(wide, by))
    high = lax.shift_right_logical(whole, lax.full_like(whole, 32))
    return lax.convert_element_type(whole, jnp.uint32), lax.convert_element_type(high, jnp.uint32)
