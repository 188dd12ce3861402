"""`shardwright check-model FILES`: which operators of model files are supported, counted by type.

Nothing is compiled, and no size has to be known: what a file has is counted as it stands there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.counting import Counted, counted
from shardwright.compiler.support.files import read_regular
from shardwright.compiler.surface.resolve import find_target
from shardwright.orchestrator.compile.serial_file import table_of
from shardwright.orchestrator.terminal import terminal
from shardwright.orchestrator.terminal.terminal import say

_MOST_BYTES = 2**32
"""Our choice: what is larger is no model file."""


def run(files: Sequence[Path], target: str, as_json: bool) -> int:
    """Print the table of each file. Raises UsageError for a file that cannot be read,
    ImportRuleError for one that is no model."""
    compiler = find_target(target).core.compiler
    found = {str(path): counted(_read(path), str(path), compiler) for path in files}
    if as_json:
        terminal.say_json({name: as_dict(one) for name, one in found.items()})
        return 0
    for name, one in found.items():
        say("\n".join([f"{name}: {one.form}", *table_of(one.rows, f"supported by {compiler}")]))
    return 0


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, _MOST_BYTES)
    except OSError as error:
        raise UsageError("SW_USAGE", f"cannot read {path}: {error.strerror or error}") from error


def as_dict(one: Counted, is_full: bool = True) -> dict[str, Any]:
    """Counts of a file, and its operators; only those that are not supported unless it is full."""
    rows = [row for row in one.rows if is_full or not row.is_supported]
    return {
        "form": one.form,
        "operators": one.total,
        "supported": one.supported,
        "unsupported": one.total - one.supported,
        "by_type": [
            {
                "operator": row.name,
                "instances": row.instances,
                "supported": row.is_supported,
                "why": row.why,
            }
            for row in rows
        ],
    }
