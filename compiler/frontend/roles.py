"""What every leaf of a step's state is: a parameter, optimizer state, a key of random numbers, or,
of inference, a part of the cache.

Said by the task's `roles`, else by the usual names of the state's parts, else found by use: the
loss depends on parameters and keys, and not on moments, averages, statistics and counters.
`capture.py` asks for functions, `module_task.py` for lowered steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shardwright.compiler.diagnostics import UsageError

if TYPE_CHECKING:
    from shardwright.compiler.dtypes import DType

ROLES = ("parameter", "optimizer", "cache", "batch", "metric", "rng")
MOST_NAMED = 4  # leaves that a refusal lists (our choice)
_OF_PART = {"rng": "rng", "key": "rng"}
"""Names of a whole part of the state; deeper, `key` is a weight of attention."""
_OF_FIELD = {"params": "parameter", "opt_state": "optimizer", "batch_stats": "optimizer"}
"""Names of a part, or of a field of one: those of Flax's TrainState and of optax's examples."""


def role_of(path: str, given: Mapping[str, str], dtype: DType, is_used: bool) -> str:
    """The role of the state leaf at `path`: the longest entry of `given` above it, else its part's
    or field's name, else its use; `is_used` says that the loss depends on it.
    """
    parts = path.split("/")
    for end in range(len(parts), 0, -1):
        role = given.get("/".join(parts[:end]))
        if role is not None:
            return role
    if parts[0] in _OF_PART:
        return _OF_PART[parts[0]]
    named = (_OF_FIELD[part] for part in parts[:2] if part in _OF_FIELD)
    return next(named, None) or role_by_use(dtype, is_used)


def role_by_use(dtype: DType, is_used: bool) -> str:
    """The role of a leaf of state that nothing names. The loss depends on parameters, which may be
    quantized to 8 bits, and on the keys and counters of random numbers.
    """
    from shardwright.compiler.dtypes import DType  # NumPy, which a stored answer goes without

    if not is_used or dtype is DType.PRED:
        return "optimizer"
    return "parameter" if dtype.is_float or dtype is DType.I8 else "rng"


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
