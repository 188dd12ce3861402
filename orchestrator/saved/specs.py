"""What a saved model takes and returns, and the arrays that it is called with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import UsageError, did_you_mean


@dataclass(frozen=True, slots=True)
class Spec:
    """An input or a result: its type, None where it is no tensor of numbers, and its shape, in
    which a dim that depends on values is -1; None where nothing is known."""

    name: str
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...] | None


def checked(inputs: Sequence[Spec], given: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays by the names of inputs, of their types and shapes. Raises UsageError for others."""
    specs = {spec.name: spec for spec in inputs}
    for name in (*given, *specs):
        if (name in given) != (name in specs):
            got = ", ".join(given) or "none"
            raise _refused(f"inputs {', '.join(specs)}", got, did_you_mean(name, specs))
    return {name: _array(spec, given[name]) for name, spec in specs.items()}


def _array(spec: Spec, value: Any) -> Any:
    """An input as an array of its type and shape. Raises UsageError."""
    array = np.asarray(value)
    if spec.dtype is None:
        return array
    if not hasattr(value, "dtype") and np.can_cast(array.dtype, spec.dtype, "same_kind"):
        array = array.astype(spec.dtype)
    if array.dtype != spec.dtype:
        raise _refused(f"{spec.name} of {spec.dtype}", str(array.dtype))
    wanted = spec.shape
    if wanted is not None and (
        len(wanted) != array.ndim
        or any(m not in (-1, n) for m, n in zip(wanted, array.shape, strict=True))
    ):
        raise _refused(f"{spec.name} of shape {list(wanted)}", str(list(array.shape)))
    return array


def _refused(required: str, given: str, hint: str = "") -> UsageError:
    again = "a NEFF has the shapes that it was compiled for: save the model again for others"
    return UsageError("SW_SAVED_INPUT", f"{required} required, got {given}", hint=hint or again)
