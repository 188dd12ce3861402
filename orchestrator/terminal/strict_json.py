"""JSON as RFC 8259 has it: what diverged (not a number, infinity) is null, for other readers refuse
the names that Python writes for it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def dumps(value: Any, indent: int | None = None) -> str:
    """The text of plain data."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
