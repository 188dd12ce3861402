"""What a form of model files is; importing this loads nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form of model files: `page` of docs lists its operators, `check` says how a user checks a
    file of it, `is_model` whether a file's content is one."""

    name: str
    page: str
    check: str
    is_model: Callable[[bytes], bool]
