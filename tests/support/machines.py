"""Machines of tests: files that say how one differs from a known one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def machine_file(folder: Path, base: str = "trn1n.32xlarge", **facts: Any) -> str:
    """The path of a machine that differs from `base` in `facts` (docs/network.md)."""
    path = folder / "machine.json"
    path.write_text(json.dumps({"base": base, "facts": facts}))
    return str(path)
