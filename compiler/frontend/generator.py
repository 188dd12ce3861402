"""Random numbers of a task by another generator than the one its code takes for granted.

JAX's usual one, Threefry, is dozens of integer operations per number, which the machine's GpSimd
engine does one after the other; `rbg` is one instruction of the machine's generator. XLA on a CPU
draws other numbers for it than the machine. `MACHINE` is the machine's generator as an
implementation of JAX's keys, whose numbers are the same wherever it runs: a step that is compared
with the unsharded one on a CPU has the same masks there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, wraps
from typing import Any

from shardwright.compiler.frontend.task import TrainTask

MACHINE, WORD = "machine", "shardwright.random_bits"
"""The name of the machine's generator, and of the composite that is one of its words."""
_KEY_WORDS = 2


def implementation(generator: str) -> Any:
    """What `jax.random.key` takes for a generator by its name."""
    return _machine() if generator == MACHINE else generator


@cache
def _machine() -> Any:
    """The machine's generator as JAX's keys have one: a key is two words, a number the word of the
    generator at its place in the array (`compiler/ir/ops/elementwise.py` has the function)."""
    import jax
    import jax.numpy as jnp
    from jax.extend import random

    from shardwright.compiler.ir.ops.elementwise import RANDOM_ROUNDS

    def mixed(x: Any) -> Any:
        for shift, factor in RANDOM_ROUNDS:
            x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
        return x ^ (x >> jnp.uint32(16))

    word = jax.lax.composite(lambda counter, key: mixed(mixed(counter) ^ key), WORD)

    def words(key: Any, shape: tuple[int, ...], stream: int = 0) -> Any:
        one = word(key[1], word(jnp.uint32(stream), key[0]))
        places, step = jnp.zeros(shape, jnp.uint32), 1
        for dim in reversed(range(len(shape))):
            count = jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
            places, step = places + count * jnp.uint32(step), step * shape[dim]
        return word(places, jnp.broadcast_to(one, shape))

    def seed(value: Any) -> Any:
        return words(jnp.stack([jnp.uint32(value), jnp.uint32(0)]), (_KEY_WORDS,))

    def split(key: Any, shape: tuple[int, ...]) -> Any:
        return words(key, (*shape, _KEY_WORDS), 1)

    def fold_in(key: Any, data: Any) -> Any:
        own = jnp.stack([key[0], word(jnp.uint32(data), key[1])])
        return words(own, (_KEY_WORDS,), 2)

    def random_bits(key: Any, width: int, shape: tuple[int, ...]) -> Any:
        if width == 64:
            low, high = (words(key, shape, n).astype(jnp.uint64) for n in (0, 3))
            return low | (high << jnp.uint64(32))
        return words(key, shape).astype(f"uint{width}")

    return random.define_prng_impl(
        key_shape=(_KEY_WORDS,),
        seed=seed,
        split=split,
        random_bits=random_bits,
        fold_in=fold_in,
        name=MACHINE,
        tag=MACHINE,
    )


def drawn_by(task: TrainTask, generator: str) -> TrainTask:
    """The task with keys of `generator` (a name of `jax_default_prng_impl`) wherever its code names
    none; the key its `init` is given is one, seeded with what the given key draws. Masks and first
    weights are others, of the same distributions."""
    import jax

    init, step = task.init, task.step

    @wraps(step)
    def stepped(*arguments: Any) -> Any:
        with jax.default_prng_impl(generator):
            return step(*arguments)

    def begun(key: Any) -> Any:
        assert init is not None
        with jax.default_prng_impl(generator):
            return init(jax.random.key(jax.random.bits(key), impl=generator))

    full = task.full_precision and drawn_by(task.full_precision, generator)
    return replace(
        task, step=stepped, init=init and begun, generator=generator, full_precision=full
    )
