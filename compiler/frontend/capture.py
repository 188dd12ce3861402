"""Capture a training step: trace and lower it on abstract values into a StableHLO portable
artifact.

No device is touched and no parameter is allocated, so a 70B step costs what its text costs. The
result names every argument and result by its pytree path and gives it a role; `stablehlo.py`
imports the artifact.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from shardwright.compiler.diagnostics import Diagnostic, ImportRuleError, UsageError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend import manual_regions
from shardwright.compiler.frontend.callbacks import dropped_callbacks
from shardwright.compiler.frontend.context import legalize_chlo, serialize_portable
from shardwright.compiler.frontend.leaves import named_leaves
from shardwright.compiler.frontend.locations import LocationReader
from shardwright.compiler.frontend.programs import (
    check_groups,
    check_kernels,
    check_nested,
    check_pmap,
    is_returned,
    kept_arguments,
    manual_parts,
    used_arguments,
)
from shardwright.compiler.frontend.roles import UNCHANGED_ROLES, Use, check_parameters, roles_of
from shardwright.compiler.frontend.state import array_step, state_tree
from shardwright.compiler.frontend.step_form import normal
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.frontend.user_code import anew, called

_DTYPE_NAMES = ", ".join(d.value for d in DType)


@dataclass(frozen=True, slots=True)
class ArgInfo:
    """An argument or result of the captured step; `batch_dim` is the dim of samples of a batch or a
    cache."""

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
    output) that are the same state before and after. `told` is how the step was found to be called
    and to answer, where that is not as usual.
    """

    artifact: bytes
    inputs: tuple[ArgInfo, ...]
    outputs: tuple[ArgInfo, ...]
    aliases: tuple[tuple[int, int], ...]
    batch_size: int
    name: str = "step"
    findings: tuple[Diagnostic, ...] = ()
    told: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lowered:
    """A function as a portable StableHLO artifact, with names of its arguments and results."""

    artifact: bytes
    arguments: tuple[str, ...]
    results: tuple[str, ...]


def capture(task: TrainTask, batch_size: int, base_dir: str | None = None) -> Captured:
    """Trace `task.step` on `batch_size` samples and lower it for the CPU platform.

    Raises: UsageError when the step does not return its state unchanged in structure, names and
    types, or no loss, and, with their line (relative to `base_dir`), when functions of the task
    raise.
    """
    import jax

    if task.captured is not None:
        return task.captured(batch_size)
    task = normal(task)
    with _users_line("init", base_dir):
        tree = state_tree(task)
    with _users_line("batch", base_dir):
        batch = task.batch(batch_size)
    before, samples = _state_leaves(task, tree.arrays), _batch_infos(task, batch, batch_size)
    said: list[str] = []
    jitted = jax.jit(array_step(task, tree, said), keep_unused=True)
    traced = _traced(task, jitted, tree.arrays, batch_size, base_dir)
    *new_state, metrics = traced.out_info
    after = _state_leaves(task, new_state)
    measured = [_info(name, "metric", leaf) for name, leaf in named_leaves("metrics", metrics)]
    _check_state(before, after)
    loss = len(after) + [info.name for info in measured].index(f"metrics/{task.mode.result}")
    uses = _uses(traced.jaxpr, len(before), loss)
    roles = _roles(task, before, tree.keys, uses)
    unchanged = [n for n, role in enumerate(roles) if role in UNCHANGED_ROLES]
    if not all(is_returned(traced.jaxpr, n) for n in unchanged):
        kept = jax.jit(array_step(task, tree, kept=unchanged), keep_unused=True)
        traced = _traced(task, kept, tree.arrays, batch_size, base_dir)
    state = [
        replace(info, role=role, batch_dim=task.cache_dims.get(info.name))
        for info, role in zip(before, roles, strict=True)
    ]
    aliases = tuple((n, n) for n in range(len(state)))
    check_pmap(traced.jaxpr, base_dir)
    check_kernels(traced.jaxpr, base_dir)
    check_groups(traced.jaxpr, base_dir)
    check_nested(traced.jaxpr, base_dir)
    with _users_line("step", base_dir):  # parts of which jax may refuse to lower
        module = _lowered(traced)
    with module.context:
        dropped = dropped_callbacks(module, LocationReader(base_dir))
    findings = (*task.findings, *dropped, *manual_parts(traced.jaxpr, base_dir))
    inputs, outputs = (*state, *samples), (*state, *measured)
    artifact = _portable(module)
    told = tuple(said)
    return Captured(artifact, inputs, outputs, aliases, batch_size, task.name, findings, told)


def _traced(
    task: TrainTask, jitted: Any, state: Sequence[Any], batch_size: int, base_dir: str | None
) -> Any:
    """The step traced for so many samples.

    Raises: UsageError at the user's line; SW_BATCH where the step takes no other number of samples
    than its example has.
    """
    try:
        with _users_line("step", base_dir):
            return jitted.trace(*state, task.batch(batch_size))
    except UsageError as error:
        if error.code != "SW_TASK_RAISED":
            raise anew(error) from None
        if task.samples in (0, batch_size):
            raise
        try:
            jitted.trace(*state, task.batch(task.samples))
        except Exception:
            raise error from None
        d = error.diagnostic
        raise UsageError(
            "SW_BATCH",
            f"{task.name} is a step of {task.samples} samples, which requires strategy.micro_batch"
            f" x data-parallel ranks = {task.samples}, got {batch_size}: {d.message}",
            d.loc,
            "take its numbers from the shapes of the batch, or set --micro-batch and the mesh so",
        ) from error


def _users_line(what: str, base_dir: str | None) -> AbstractContextManager[None]:
    """Say where in the user's code something was raised, instead of in which of ours."""
    hint = f"{what} is traced by jax: no value of an array is known, shapes and types are"
    return called(f"{what} of the task", base_dir, hint)


def artifact_of(traced: Any) -> bytes:
    """What `jax.jit(f).trace(...)` returned, lowered for the CPU, as an artifact without CHLO."""
    return _portable(_lowered(traced))


def function_artifact(function: Callable[..., Any], *shapes: Any) -> bytes:
    """`artifact_of` a function of arguments of these shapes, all of which stay arguments."""
    import jax

    return artifact_of(jax.jit(function, keep_unused=True).trace(*shapes))


def _lowered(traced: Any) -> Any:
    """The module of a traced function, `shard_map` as code of whole values. For the CPU jax drops
    in which memory a value is; here it stays, as for other platforms.
    """
    from jax._src.dispatch import device_put_p
    from jax.interpreters import mlir

    rules = ((device_put_p, _placed), *manual_regions.lowering_rules())
    kept = mlir.LoweringParameters(override_lowering_rules=rules)
    lowered = traced.lower(lowering_platforms=("cpu",), _private_parameters=kept)
    return lowered.compiler_ir("stablehlo")


def _placed(context: Any, *values: Any, devices: Sequence[Any], **_: Any) -> list[Any]:
    """The lowering of `jax.device_put`: an annotation where it names a memory."""
    from jax._src import core
    from jax._src.interpreters.mlir import wrap_with_memory_kind

    def placed(value: Any, device: Any, result: Any) -> Any:
        kind = getattr(device, "memory_kind", None)
        kind = core.mem_space_to_kind(device) if isinstance(device, core.MemorySpace) else kind
        if kind is None:
            return value
        return wrap_with_memory_kind(context.module_context, value, kind, result)

    return list(map(placed, values, devices, context.avals_out))


def _portable(module: Any) -> bytes:
    with module.context:
        legalize_chlo(module)
        stream = io.BytesIO()
        module.operation.write_bytecode(stream)
    return serialize_portable(stream.getvalue())


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


def _state_leaves(task: TrainTask, state: Sequence[Any]) -> list[ArgInfo]:
    """Every leaf of the state, in argument order; what it is comes later."""
    return [
        _info(name, "optimizer", leaf)
        for prefix, part in zip(task.state_names, state, strict=True)
        for name, leaf in named_leaves(prefix, part)
    ]


def _uses(program: Any, count: int, loss: int) -> list[Use]:
    """What a closed program does with its first `count` arguments, which its first results take
    the places of; `loss` is the number of that result."""
    rows = zip(used_arguments(program, loss), kept_arguments(program, count), strict=False)
    return [Use(is_read=is_read, is_kept=is_kept) for is_read, is_kept in rows]


def _roles(
    task: TrainTask, state: Sequence[ArgInfo], keys: Collection[str], uses: Sequence[Use]
) -> tuple[str, ...]:
    """What every leaf of the state is. Raises UsageError where none is a parameter."""
    given = dict.fromkeys(keys, "rng") | dict(task.roles)
    rows = zip(state, uses, strict=True)
    roles = roles_of([(info.name, info.dtype, use) for info, use in rows], given)
    check_parameters(task.name, [(i.name, role) for i, role in zip(state, roles, strict=True)])
    return roles


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


def _check_state(before: Sequence[ArgInfo], after: Sequence[ArgInfo]) -> None:
    """Raises UsageError when the step changes names, shapes or types of the state."""
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
