"""Thresholds and switches of the choice of a collective's algorithm, as users give them.

`[cluster] collectives = "mesh_max_bytes=2mb,kangaring=false"` in a job, `--set` of `nccom`. They
replace the values of the machine's data files for one run and change no compiled byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from shardwright.collectives.costs import MESHES, THRESHOLDS
from shardwright.compiler.diagnostics import UsageError, did_you_mean
from shardwright.orchestrator.config.arguments import comma_words

SETTINGS = (*THRESHOLDS, "mesh", "kangaring", "inter_recursive", "inter_mesh_max_instances")
UNITS = {"": 1, "b": 1, "k": 2**10, "kb": 2**10, "m": 2**20, "mb": 2**20, "g": 2**30, "gb": 2**30}


def job_settings(text: str) -> dict[str, Any]:
    """Those of a job, comma-separated. Raises UsageError as `settings`."""
    return settings(comma_words(text), "cluster.collectives")


def settings(words: Sequence[str], key: str) -> dict[str, Any]:
    """Fields of `CollectiveCosts` from `name=value`, as the user gave them under `key`. Raises
    UsageError for unknown ones and values out of range."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in SETTINGS:
            known = ", ".join(SETTINGS)
            raise UsageError(
                "SW_USAGE",
                f"{key} requires one of {known} and =value, got {word!r}",
                hint=did_you_mean(name, SETTINGS),
            )
        found[name] = _setting(name, value, f"{key} {name}")
    return found


def _setting(name: str, value: str, key: str) -> Any:
    if name == "mesh":
        if value in MESHES:
            return value
        required = f"{' or '.join(MESHES)}, got {value}"
    elif name in ("kangaring", "inter_recursive"):
        if value in ("true", "false"):
            return value == "true"
        required = f"true or false, got {value!r}"
    elif name == "inter_mesh_max_instances":
        if re.fullmatch(r"[0-9]{1,9}", value):
            return int(value)
        required = f"a whole number, got {value!r}"
    else:
        return 0 if value == "0" else parse_bytes(value, key)
    raise UsageError("SW_USAGE", f"{key} requires {required}")


def parse_bytes(text: str, flag: str) -> int:
    """Bytes of `8`, `64kb`, `1MB`, `2g`; units are powers of 1024, as in the tool. Raises
    UsageError for anything else."""
    match = re.fullmatch(r"([0-9]{1,15})\s*([a-z]*)", text.strip().lower())
    if not match or match[2] not in UNITS or int(match[1]) < 1:
        raise UsageError(
            "SW_USAGE", f"{flag} requires a size such as 8, 64kb, 1mb or 1gb, got {text!r}"
        )
    return int(match[1]) * UNITS[match[2]]
