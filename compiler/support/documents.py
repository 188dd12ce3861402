"""Documents that people and other programs write: JSON and TOML, of bounded size and depth.

Whatever a file holds, reading it ends in plain data or in OSError or ValueError, which the caller
puts into words.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwright.compiler.support.files import read_regular

MAX_BYTES = 2**28
"""Our choice: reports of the largest jobs are some tens of megabytes, configurations kilobytes."""


def read_text(path: Path, named_by_user: bool = False) -> str:
    """The text of a file; one that the user named on the command line may be a pipe. Raises OSError
    and ValueError."""
    if not named_by_user or path.is_file():
        return read_regular(path, MAX_BYTES).decode("utf-8-sig")
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes")
    return data.decode("utf-8-sig")


def parse_json(text: str | bytes, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """`parse_constant` gets NaN and the infinities. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=parse_constant)
    except RecursionError:
        raise ValueError("lists or objects lie too deep in each other") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Raises ValueError."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("lists or tables lie too deep in each other") from None
