"""Random numbers of a task by another generator than the one its code takes for granted.

JAX's usual one, Threefry, is dozens of integer operations per number, which the machine's GpSimd
engine does one after the other; `rbg` is one instruction of the machine's generator.
"""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from typing import Any

from shardwright.compiler.frontend.task import TrainTask


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
