"""The unsharded reference run: the user's step under `jax.jit` on the CPU, the only place where jax
computes.

States are given and returned as dicts from path name (as in `capture.py`) to NumPy array, so that a
simulated run starts from the same values and compares leaf by leaf. Call it in a child process when
memory matters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.capture import ArgInfo
from shardwright.compiler.frontend.leaves import named_leaves
from shardwright.compiler.frontend.single import single_device
from shardwright.compiler.frontend.state import array_step, split_state, state_tree
from shardwright.compiler.frontend.step_form import normal
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.frontend.user_code import called

Leaves = dict[str, np.ndarray]

_ALONE = "`--set run.compare=false` runs the sharded step without the unsharded one"


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """Loss of every step, the states after the steps asked for (0: the first state), and the
    metrics of the first step by path."""

    losses: tuple[float, ...]
    states: Mapping[int, Leaves]
    metrics: Leaves


def initial_state(task: TrainTask, seed: int) -> Leaves:
    """The first state by path name. Raises UsageError for a timing-only task."""
    task = normal(task)
    return _state_leaves(task, _first_state(task, seed))


def state_sizes(task: TrainTask) -> dict[str, int]:
    """Bytes of the leaves of the state by path name, in order; nothing is computed."""
    task = normal(task)
    parts = zip(task.state_names, state_tree(task).arrays, strict=True)
    leaves = (leaf for prefix, part in parts for leaf in named_leaves(prefix, part))
    return {name: leaf.size * leaf.dtype.itemsize for name, leaf in leaves}


def initial_leaves(task: TrainTask, seed: int, names: Collection[str]) -> Leaves:
    """Some leaves of the first state; the others are not computed. XLA compiles them apart from
    the rest, so the last bit may be another than in `initial_state`. Raises as that does."""
    import jax

    task = normal(task)
    every, init = list(state_sizes(task)), _init(task)

    def some(key: Any) -> dict[str, Any]:
        leaves = zip(every, jax.tree.leaves(init(key)), strict=True)
        return {name: leaf for name, leaf in leaves if name in names}

    with jax.default_device(_cpu()):
        found = jax.jit(some)(jax.random.key(seed))
    return {name: np.asarray(leaf) for name, leaf in found.items()}


def batch_leaves(batch: Any) -> Leaves:
    """A batch by path name."""
    return _leaves("batch", batch)


def _leaves(prefix: str, tree: Any) -> Leaves:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(prefix, tree)}


def reference_step(task: TrainTask, state: Mapping[str, np.ndarray], batch: Any) -> Leaves:
    """The state and the metrics after one step from `state` on `batch`, by path name."""
    task = normal(task)
    *new_state, metrics = _jitted(task)(*_unflatten(task, state), batch)
    return _state_leaves(task, new_state) | _leaves("metrics", metrics)


def losses_of_parts(
    task: TrainTask,
    state: Mapping[str, np.ndarray],
    batch: Any,
    arguments: Sequence[ArgInfo],
    count: int,
) -> list[float]:
    """The losses of `count` equal parts of a batch, each by one step from the same state;
    `arguments` are those of the captured step."""
    import jax

    leaves, tree = jax.tree.flatten(batch)
    dims = [a.batch_dim for a in arguments if a.role == "batch"]
    pieces = [
        [leaf] * count if dim is None else np.split(np.asarray(leaf), count, dim)
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    parts = (tree.unflatten(taken) for taken in zip(*pieces, strict=True))
    return [float(reference_step(task, state, part)["metrics/loss"]) for part in parts]


def run_reference(
    task: TrainTask,
    *,
    steps: int,
    global_batch: int,
    seed: int = 0,
    batches: Iterator[Any] | None = None,
    data: str | None = None,
    keep: Collection[int] = (),
    begun: Callable[[Leaves], None] | None = None,
    start: Leaves | None = None,
) -> ReferenceRun:
    """Run `steps` steps on `batches` (default: the task's own, from `seed` and `data`), from the
    state that `seed` draws, or from `start`.

    `keep` names the steps after which the state is stored; 0 is the state before the first, which
    `begun` is told.
    Raises: UsageError for a timing-only task, one without batches when none are given, and one that
    XLA's CPU cannot run, such as a custom call of the vendor.
    """
    task = normal(task)
    if batches is None:
        batches = task_batches(task, seed, global_batch, data)
    with called("init of the task"):
        state = list(_first_state(task, seed) if start is None else _unflatten(task, start))
    step = _jitted(task)
    states = {0: _state_leaves(task, state)} if 0 in keep else {}
    if begun is not None:
        begun(_state_leaves(task, state))
    losses, first = [], Leaves()
    for number in range(1, steps + 1):
        batch = next(batches)
        with called("step of the task, unsharded on XLA's CPU,", hint=_ALONE):
            *state, metrics = step(*state, batch)
        losses.append(task.mode.number(np.asarray(metrics[task.mode.result])))
        if number == 1:
            first = _leaves("metrics", metrics)
        if number in keep:
            states[number] = _state_leaves(task, state)
    return ReferenceRun(tuple(losses), states, first)


def task_batches(
    task: TrainTask, seed: int, global_batch: int, data: str | None = None
) -> Iterator[Any]:
    """The task's batches. Raises UsageError when it has none."""
    if task.batches is None:
        raise UsageError(
            "SW_TASK_BATCHES",
            f"a value run of {task.name} requires TrainTask.batches, got none",
            hint="give batches=fn(seed, global_batch, data) -> iterator of NumPy pytrees",
        )
    return _called_batches(task.batches, seed, global_batch, data)


def _called_batches(
    make: Callable[[int, int, str | None], Iterator[Any]], *arguments: Any
) -> Iterator[Any]:
    """What the user's function gives, as long as it is asked."""
    with called("batches of the task"):
        made = iter(make(*arguments))
    while True:
        with called("batches of the task", hint="a run takes one batch per step"):
            batch = next(made)
        yield batch


def _first_state(task: TrainTask, seed: int) -> tuple[Any, ...]:
    """The state `init` draws for `seed`, on the CPU."""
    import jax

    init = _init(task)
    with jax.default_device(_cpu()):
        state: tuple[Any, ...] = jax.jit(init)(jax.random.key(seed))
    return state


def _init(task: TrainTask) -> Callable[[Any], tuple[Any, ...]]:
    """The task's init with a result of arrays."""
    if task.init is None:
        raise UsageError(
            "SW_TASK_INIT",
            f"a value run of {task.name} requires TrainTask.init, got none",
            hint="without init a job is timing-only: use `shardwright plan`",
        )
    init = task.init
    return lambda key: split_state(task, init(key)).arrays


def _jitted(task: TrainTask) -> Any:
    """The compiled step, on the CPU."""
    import jax

    step = array_step(task, state_tree(task))
    return single_device(jax.jit(step, keep_unused=True), _cpu())


def _cpu() -> Any:
    """The first CPU device."""
    import jax

    return jax.local_devices(backend="cpu")[0]


def _state_leaves(task: TrainTask, state: Sequence[Any]) -> Leaves:
    """A state by path name."""
    parts = zip(task.state_names, state, strict=True)
    return {name: leaf for prefix, part in parts for name, leaf in _leaves(prefix, part).items()}


def _unflatten(task: TrainTask, leaves: Mapping[str, np.ndarray]) -> tuple[Any, ...]:
    """The state pytrees whose leaves are `leaves`. Raises UsageError for a missing leaf."""
    import jax

    parts = []
    for prefix, part in zip(task.state_names, state_tree(task).arrays, strict=True):
        names = [name for name, _ in named_leaves(prefix, part)]
        missing = [name for name in names if name not in leaves]
        if missing:
            raise UsageError(
                "SW_STATE", f"the state requires leaf {missing[0]}, got {list(leaves)}"
            )
        parts.append(jax.tree.structure(part).unflatten(leaves[name] for name in names))
    return tuple(parts)
