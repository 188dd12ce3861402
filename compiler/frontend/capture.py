"""Capture a training step: trace and lower it on abstract values into a StableHLO portable
artifact.

No device is touched and no parameter is allocated, so a 70B step costs what its text costs. The
result names every argument and result by its pytree path and gives it a role; `stablehlo.py`
imports the artifact.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from compiler.diagnostics import ImportRuleError, UsageError
from compiler.dtypes import DType
from compiler.frontend.context import legalize_chlo, serialize_portable
from compiler.frontend.task import TrainTask
from compiler.frontend.user_code import called

_DTYPE_NAMES = ", ".join(d.value for d in DType)


@dataclass(frozen=True, slots=True)
class ArgInfo:
    """An argument or result of the captured step: pytree path, role, shape, type, sample dim (batch
    only).
    """

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: DType
    batch_dim: int | None = None


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured step.

    `artifact` is a StableHLO portable artifact with locations and without CHLO. `inputs` and
    `outputs` are in the order of the module's arguments and results. `aliases` pairs (input,
    output) that are the same state before and after.
    """

    artifact: bytes
    inputs: tuple[ArgInfo, ...]
    outputs: tuple[ArgInfo, ...]
    aliases: tuple[tuple[int, int], ...]
    batch_size: int
    name: str = "step"


def capture(task: TrainTask, batch_size: int, base_dir: str | None = None) -> Captured:
    """Trace `task.step` on `batch_size` samples and lower it for the CPU platform.

    Raises: UsageError when the step does not return its state unchanged in structure, names and
    types, or no loss, and, with their line (relative to `base_dir`), when functions of the task
    raise.
    """
    import jax

    if task.captured is not None:
        return task.captured(batch_size)
    with _users_line("init", base_dir):
        state = abstract_state(task)
    with _users_line("batch", base_dir):
        batch = task.batch(batch_size)
    inputs = [*_state_infos(task, state), *_batch_infos(task, batch, batch_size)]
    jitted = jax.jit(_named_step(task), keep_unused=True)
    with _users_line("step", base_dir):
        traced = jitted.trace(*state, batch)
    new_state, metrics = split_results(task, traced.out_info)
    outputs = [*_state_infos(task, new_state), *_metric_infos(task, metrics)]
    aliases = _check_state(task, inputs, outputs)
    with _users_line("step", base_dir):  # parts of which jax may refuse to lower
        artifact = artifact_of(traced)
    return Captured(artifact, tuple(inputs), tuple(outputs), aliases, batch_size, task.name)


def _users_line(what: str, base_dir: str | None) -> AbstractContextManager[None]:
    """Say where in the user's code something was raised, instead of in which of ours."""
    hint = f"{what} is traced by jax: no value of an array is known, shapes and types are"
    return called(f"{what} of the task", base_dir, hint)


def artifact_of(traced: Any) -> bytes:
    """Lower what `jax.jit(f).trace(...)` returned, for the CPU platform, into a portable artifact
    without CHLO.
    """
    module = traced.lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo")
    with module.context:
        legalize_chlo(module)
        stream = io.BytesIO()
        module.operation.write_bytecode(stream)
    return serialize_portable(stream.getvalue())


def abstract_state(task: TrainTask) -> tuple[Any, ...]:
    """The state as `jax.ShapeDtypeStruct` pytrees, one per name of `task.state_names`; allocates
    nothing.
    """
    import jax

    if task.init is not None:
        state = jax.eval_shape(task.init, jax.eval_shape(lambda: jax.random.key(0)))
    else:
        assert task.state is not None
        state = task.state
    if not isinstance(state, tuple) or len(state) != len(task.state_names):
        raise UsageError(
            "SW_TASK_STATE",
            f"init requires a tuple of {len(task.state_names)} ({', '.join(task.state_names)}), "
            f"got {type(state).__name__}",
            hint="return (params, opt_state), or set state_names",
        )
    return tuple(jax.tree.map(_plain_array, part) for part in state)


def split_results(task: TrainTask, results: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `task.step` returned as (state, metrics); a scalar loss becomes {"loss": ...}. Raises
    UsageError.
    """
    count = len(task.state_names)
    if not isinstance(results, tuple) or len(results) != count + 1:
        raise UsageError(
            "SW_TASK_RESULT",
            f"step requires a result of ({', '.join(task.state_names)}, metrics), got "
            f"{type(results).__name__}"
            + (f" of {len(results)}" if isinstance(results, tuple) else ""),
        )
    metrics = results[count]
    if not isinstance(metrics, dict):
        metrics = {"loss": metrics}
    if "loss" not in metrics or getattr(metrics["loss"], "shape", None) != ():
        raise UsageError(
            "SW_TASK_RESULT", f"step requires a scalar metric `loss`, got metrics {sorted(metrics)}"
        )
    return results[:count], metrics


def named_leaves(prefix: str, tree: Any) -> list[tuple[str, Any]]:
    """Leaves of a pytree with their paths: dict keys, field names and positions joined by '/'."""
    import jax

    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [
        ("/".join(part for part in (prefix, *map(_key_text, path)) if part), leaf)
        for path, leaf in leaves
    ]


def _key_text(key: Any) -> str:
    """One pytree key as a path part."""
    import jax

    return str(jax.tree_util.keystr((key,), simple=True))


def _plain_array(leaf: Any) -> Any:
    """`leaf`, unless it is a typed PRNG key. Raises UsageError for one."""
    import jax

    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise UsageError(
            "SW_TASK_STATE",
            "state requires plain arrays, got a typed PRNG key",
            hint="keep jax.random.key_data(key) in the state and wrap it in the step",
        )
    return leaf


def _named_step(task: TrainTask) -> Any:
    """The task's step in a function called `step`, so that every name stack begins with
    `jit(step)`.
    """

    def step(*args: Any) -> Any:
        return task.step(*args)

    return step


def _info(name: str, role: str, leaf: Any, batch_dim: int | None = None) -> ArgInfo:
    """Describe one leaf. Raises ImportRuleError for an element type the IR does not have."""
    try:
        dtype = DType.from_numpy(leaf.dtype)
    except (KeyError, TypeError) as error:
        raise ImportRuleError(
            "NCC_ESPP004",
            f"{name} requires an element type of {_DTYPE_NAMES}, got {leaf.dtype}",
        ) from error
    return ArgInfo(name, role, tuple(leaf.shape), dtype, batch_dim)


def _state_infos(task: TrainTask, state: Sequence[Any]) -> list[ArgInfo]:
    """Every leaf of the state, in argument order."""
    return [
        _info(name, task.role_of(name), leaf)
        for prefix, part in zip(task.state_names, state, strict=True)
        for name, leaf in named_leaves(prefix, part)
    ]


def _batch_infos(task: TrainTask, batch: Any, batch_size: int) -> list[ArgInfo]:
    """Every leaf of the batch. Raises UsageError when its sample dim is not `batch_size`."""
    dim = task.batch_dim
    infos = [_info(name, "batch", leaf, dim) for name, leaf in named_leaves("batch", batch)]
    for info in infos:
        if len(info.shape) <= dim or info.shape[dim] != batch_size:
            raise UsageError(
                "SW_TASK_BATCH",
                f"{info.name} requires dim {dim} of {batch_size} samples, got shape {info.shape}",
                hint="batch(n) returns n samples; set batch_dim if it is not dim 0",
            )
    return infos


def _metric_infos(task: TrainTask, metrics: dict[str, Any]) -> list[ArgInfo]:
    """Every metric, in result order."""
    return [_info(name, "metric", leaf) for name, leaf in named_leaves("metrics", metrics)]


def _check_state(
    task: TrainTask, inputs: Sequence[ArgInfo], outputs: Sequence[ArgInfo]
) -> tuple[tuple[int, int], ...]:
    """Pairs of state leaves before and after. Raises UsageError when the step changes names, shapes
    or types.
    """
    before = [info for info in inputs if info.role != "batch"]
    after = [info for info in outputs if info.role != "metric"]
    for old, new in zip(before, after, strict=False):
        if old != new:
            raise UsageError(
                "SW_TASK_RESULT",
                f"step requires state {old.name} back as {old.dtype.value}{list(old.shape)}, got "
                f"{new.name} as {new.dtype.value}{list(new.shape)}",
            )
    if len(before) != len(after):
        raise UsageError(
            "SW_TASK_RESULT", f"step requires {len(before)} state leaves back, got {len(after)}"
        )
    return tuple((i, i) for i in range(len(before)))
