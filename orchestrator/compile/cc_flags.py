"""NEURON_CC_FLAGS for jobs: the flags of the compiler's command become keys of the job.

The variable is read through the flag table (`compiler/surface/flags.py`); the job file, `--set` and
flags of the job beat it. Flags that steer the compile command alone mean nothing to a job,
and `--cache_dir` is read where the cache is found (`cache/location.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.compiler.diagnostics import Diagnostic, UsageError
from shardwright.compiler.machine.target import NEURONX_CC
from shardwright.compiler.options import DEFAULTS, CompileOptions
from shardwright.compiler.surface.resolve import (
    Settings,
    find_target,
    foreign_notices,
    settings_of,
)
from shardwright.orchestrator.compile.compile_flags import ENVIRONMENT, of_environment

_KEYS = {
    "target": ("cluster", "target"),
    "lnc": ("cluster", "lnc"),
    "hypothetical": ("cluster", "hypothetical"),
    "strategy": ("strategy", "name"),
    "no_cache": ("cache", "fresh"),
}
"""Field of a flag -> the job's key with the same meaning."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What the variable says: tables of a job, and warnings for the user."""

    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notices: tuple[Diagnostic, ...] = ()


def job_tables(environment: Mapping[str, str]) -> Environment:
    """The variable as tables of a job. Raises: UsageError naming the variable for a flag or value
    that is not understood."""
    try:
        flags = of_environment(environment)
        settings = settings_of(flags)
        foreign = foreign_notices(settings.effective, NEURONX_CC)
        tables = _tables(settings)
    except UsageError as error:
        d = error.diagnostic
        message = d.message if ENVIRONMENT in d.message else f"{ENVIRONMENT}: {d.message}"
        raise UsageError(d.code, message, d.loc, d.hint) from error
    told = (*settings.notices, *foreign)
    warnings = tuple(n for n in told if n.severity == "warning")
    return Environment(tables, warnings)


def _tables(settings: Settings) -> dict[str, dict[str, Any]]:
    """Options that differ from the defaults, and the flags that are keys of other tables."""
    options = settings.options
    tables: dict[str, dict[str, Any]] = {
        "compiler": {
            name: getattr(options, name)
            for name in CompileOptions.__dataclass_fields__
            if name not in _KEYS and getattr(options, name) != getattr(DEFAULTS, name)
        }
    }
    for name, (table, key) in _KEYS.items():
        if name in settings.given:
            value = settings.given[name]
            value = find_target(value).name if name == "target" else value
            tables.setdefault(table, {})[key] = value
    return tables
