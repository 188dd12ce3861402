"""What every leaf of a step's state is: a parameter, trained or frozen, a buffer, optimizer
state, a key of random numbers, or, of inference, a part of the cache.

Said by the task's `roles`, else by the usual names of the state's parts, else found by use: the
loss depends on parameters and keys, and not on moments, averages, statistics and counters. A
parameter that the step returns as it came is frozen: it has no gradient and no optimizer state.
A buffer, which only `roles` can say, is a table that the model reads and no step changes, as one of
PyTorch with positions or a mask: it is no parameter, and every rank has it whole.
`capture.py` asks for functions, `module_task.py` for lowered steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.compiler.diagnostics import UsageError

if TYPE_CHECKING:
    from shardwright.compiler.dtypes import DType

ROLES = ("parameter", "frozen", "buffer", "optimizer", "cache", "batch", "metric", "rng")
PARAMETER_ROLES = ("parameter", "frozen")
"""What counts as a model's parameters."""
UNCHANGED_ROLES = ("frozen", "buffer")
"""What a step has to return as it came."""
_TOLD = {"frozen": "frozen", "buffer": "a buffer"}
WEIGHT_ROLES = (*PARAMETER_ROLES, "buffer")
"""What the model computes with."""
SAVED_ROLES = ("parameter", "optimizer", "rng")
"""What a step changes, and a checkpoint of the training so has to hold."""
STATE_ROLES = (*WEIGHT_ROLES, "optimizer", "cache", "rng")
MOST_NAMED = 4  # leaves that a refusal lists (our choice)
_OF_PART = {"rng": "rng", "key": "rng"}
"""Names of a whole part of the state; deeper, `key` is a weight of attention."""
_OF_FIELD = {"params": "parameter", "opt_state": "optimizer", "batch_stats": "optimizer"}
"""Names of a part, or of a field of one: those of Flax's TrainState and of optax's examples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What a step does with a leaf of its state: whether the loss depends on it, and whether it is
    returned as it came."""

    is_read: bool
    is_kept: bool


def roles_of(leaves: Sequence[tuple[str, DType, Use]], given: Mapping[str, str]) -> tuple[str, ...]:
    """The roles of the leaves of a state; of a step that trains nothing, which evaluates, no
    parameter is frozen.

    Raises: UsageError SW_TASK_ROLE where one that is said to be frozen, or a buffer, comes back
    changed.
    """
    roles = tuple(role_of(path, given, dtype, use) for path, dtype, use in leaves)
    for (path, _, use), role in zip(leaves, roles, strict=True):
        if role in UNCHANGED_ROLES and not use.is_kept:
            raise UsageError(
                "SW_TASK_ROLE",
                f"{path} is {_TOLD[role]} by the roles of the task, which requires a step that"
                " returns it as it came, got one that changes it",
                hint="return the leaf itself, without an update, or leave the role out",
            )
    if "parameter" in roles:
        return roles
    return tuple("parameter" if role == "frozen" else role for role in roles)


def role_of(path: str, given: Mapping[str, str], dtype: DType, use: Use) -> str:
    """The role of the state leaf at `path`: the longest entry of `given` above it, else its part's
    or field's name, else its use.
    """
    parts = path.split("/")
    for end in range(len(parts), 0, -1):
        role = given.get("/".join(parts[:end]))
        if role is not None:
            return role
    if parts[0] in _OF_PART:
        return _OF_PART[parts[0]]
    named = (_OF_FIELD[part] for part in parts[:2] if part in _OF_FIELD)
    role = next(named, None) or role_by_use(dtype, use)
    return "frozen" if role == "parameter" and use.is_read and use.is_kept else role


def role_by_use(dtype: DType, use: Use) -> str:
    """The role of a leaf of state that nothing names. The loss depends on parameters, which may be
    quantized to 8 bits, and on the keys and counters of random numbers.
    """
    from shardwright.compiler.dtypes import DType  # NumPy, which a stored answer goes without

    if not use.is_read or dtype is DType.PRED:
        return "optimizer"
    if not dtype.is_float and dtype not in (DType.I8, DType.U8):
        return "rng"
    return "frozen" if use.is_kept else "parameter"


def check_parameters(name: str, roles: Sequence[tuple[str, str]]) -> None:
    """Refuse a training step without a parameter; `roles` are (path, role) of its state.

    Raises: UsageError SW_TASK_PARAMETERS.
    """
    if any(role == "parameter" for _, role in roles):
        return
    shown = ", ".join(f"{path} ({role})" for path, role in roles[:MOST_NAMED]) or "no leaf at all"
    more = f" and {len(roles) - MOST_NAMED} more" if len(roles) > MOST_NAMED else ""
    path = roles[0][0] if roles else "params"
    raise UsageError(
        "SW_TASK_PARAMETERS",
        f"{name} requires a state with a parameter, which its loss depends on, got {shown}{more}",
        hint=f'say what is one: TrainTask(roles={{"{path}": "parameter"}}), by path or start of a'
        " path",
    )
