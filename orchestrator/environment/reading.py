"""Values of the variables that `variables.py` lists: read, checked, and put below a job.

Whatever is said nearer beats the environment: flags, `--set`, the job file. Every value that a
command takes from it is told with the key that it sets, and so is one that something nearer beat.
Raises UsageError (SW_ENVIRONMENT) for values that are not what a row requires.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.compiler.diagnostics import Diagnostic, UsageError
from shardwright.orchestrator.environment.variables import VARIABLES, Form, Reader, Variable

CODE = "SW_ENVIRONMENT"
PAGE = "docs/environment.md"
_SWITCHES = {"0": False, "false": False, "1": True, "true": True}
_PROCESSES, _INDEX = "NEURON_PJRT_PROCESSES_NUM_DEVICES", "NEURON_PJRT_PROCESS_INDEX"
DEBUG_FOLDER = "framework-debug"
_PLATFORM = "NEURON_PLATFORM_TARGET_OVERRIDE"
"""Read with the flags, which beat it (`orchestrator/compile/compile_flags.py`)."""


@dataclass(frozen=True, slots=True)
class Said:
    """A variable that is set: the name it was set by, its text, and what that comes to."""

    row: Variable
    name: str
    text: str
    value: Any

    @property
    def of_job(self) -> Any:
        """What it sets its key to."""
        if self.row.name == _PROCESSES:
            return len(self.value)
        if self.row.form is Form.WHOLES:
            return ",".join(map(str, self.value))
        return self.row.means.get(self.value, self.value)

    def told(self, text: str, severity: str = "note") -> Diagnostic:
        """A notice about it."""
        return Diagnostic(CODE, f"{self.name}={self.text} {text}", severity=severity)


def said(name: str, environment: Mapping[str, str] | None = None) -> Said | None:
    """The variable, read and checked; None where it is not set, or empty. Two of its names may not
    say different things. Raises UsageError."""
    environment = os.environ if environment is None else environment
    row = VARIABLES[name]
    found = [(n, text) for n in row.names if (text := environment.get(n, "").strip())]
    if len({text for _, text in found}) > 1:
        both = " and ".join(f"{n}={text}" for n, text in found)
        raise UsageError(CODE, f"one value of {name} is required, got {both}", hint="unset one")
    return Said(row, *found[0], _read(row, *found[0])) if found else None


def value(name: str, otherwise: Any, environment: Mapping[str, str] | None = None) -> Any:
    """What a variable comes to, `otherwise` where it is not set. Raises UsageError."""
    found = said(name, environment)
    return otherwise if found is None else found.value


def debug_folder(environment: Mapping[str, str] | None = None) -> str:
    """Where NEURON_FRAMEWORK_DEBUG has every stage written; empty where it does not."""
    return DEBUG_FOLDER if value("NEURON_FRAMEWORK_DEBUG", False, environment) else ""


def check(reader: Reader, environment: Mapping[str, str] | None = None) -> list[Said]:
    """Everything set that a reader reads, in the order of the table. Raises UsageError for the
    first that is not what it has to be."""
    rows = [row for row in VARIABLES.values() if row.reader is reader]
    return [one for row in rows if (one := said(row.name, environment)) is not None]


def _read(row: Variable, name: str, text: str) -> Any:
    found = _READ[row.form](text, row)
    if found is None:
        raise UsageError(
            CODE,
            f"{name} requires {row.required}, got {text!r}",
            hint=f"unset it, or give what it takes ({PAGE})",
        )
    return found


def _switch(text: str, row: Variable) -> bool | None:
    return _SWITCHES.get(text.lower())


def _whole(text: str, row: Variable) -> int | None:
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        return None
    number = int(text)
    return number if row.least <= number <= row.most and not number % row.step else None


def _number(text: str, row: Variable) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and row.least <= number <= row.most else None


def _word(text: str, row: Variable) -> str | None:
    return next((word for word in row.words if word.lower() == text.lower()), None)


def _text(text: str, row: Variable) -> str:
    return text


def _wholes(text: str, row: Variable) -> tuple[int, ...] | None:
    found = [_whole(word.strip(), row) for word in text.split(",")]
    numbers = tuple(number for number in found if number is not None)
    return numbers if len(numbers) == len(found) else None


def _cores(text: str, row: Variable) -> range | None:
    """One core, or an inclusive range."""
    first, dash, last = text.partition("-")
    ends = _whole(first.strip(), row), _whole(last.strip() if dash else first.strip(), row)
    low, high = ends
    return None if low is None or high is None or high < low else range(low, high + 1)


def _address(text: str, row: Variable) -> str | None:
    host, _, port = text.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65536
    return text if host and is_port else None


_READ = {
    Form.SWITCH: _switch,
    Form.WHOLE: _whole,
    Form.NUMBER: _number,
    Form.WORD: _word,
    Form.TEXT: _text,
    Form.WHOLES: _wholes,
    Form.CORES: _cores,
    Form.ADDRESS: _address,
}


def of_jobs(environment: Mapping[str, str]) -> list[Said]:
    """What the environment says about a job, in the order of the table. Raises UsageError, also for
    a process beyond those that there are."""
    rows = [r for r in VARIABLES.values() if (r.reader is Reader.JOB or r.key)]
    found = [one for r in rows if r.name != _PLATFORM and (one := said(r.name, environment))]
    _check_processes({one.row.name: one for one in found})
    return found


def _check_processes(found: Mapping[str, Said]) -> None:
    """Refuse a process that is none of those that there are."""
    index, processes = found.get(_INDEX), found.get(_PROCESSES)
    if index is None or processes is None or index.value < len(processes.value):
        return
    raise UsageError(
        CODE,
        f"{_INDEX} requires a number below {len(processes.value)}, the processes of"
        f" {_PROCESSES}={processes.text}, got {index.value}",
        hint="processes are numbered from 0",
    )


def tables(
    found: Iterable[Said], below: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Tables of a job: those of the compiler's flags with what variables say. Raises UsageError
    where a flag of NEURON_CC_FLAGS and a variable differ about one key."""
    made = {name: dict(keys) for name, keys in below.items()}
    for one in found:
        if not one.row.key:
            continue
        table, _, key = one.row.key.partition(".")
        before = made.setdefault(table, {}).setdefault(key, one.of_job)
        if str(before) != str(one.of_job):
            raise UsageError(
                CODE,
                f"one value of {one.row.key} is required, got {before} of NEURON_CC_FLAGS and"
                f" {one.of_job} of {one.name}",
                hint="set one of the two, or make them equal",
            )
    return made


def notices(found: Iterable[Said], given: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """What became of variables: the key each sets, or that something nearer says otherwise. `given`
    are the keys of the resolved job."""
    for one in found:
        row = one.row
        if not row.key:
            yield one.told(f"from the environment: {row.text}")
        elif str(given[row.key]) == str(one.of_job):
            yield one.told(f"from the environment: {row.key} = {_shown(one.of_job)}")
        else:
            text = f"has no effect: the job says {row.key} = {_shown(given[row.key])}"
            yield one.told(text, "warning")


def unused(environment: Mapping[str, str]) -> Iterator[Diagnostic]:
    """Variables that are known, set, and without effect."""
    for row in VARIABLES.values():
        if row.reader is Reader.NOBODY and (one := said(row.name, environment)) is not None:
            yield one.told(f"is {row.text}")


def _shown(of_job: Any) -> str:
    return str(of_job).lower() if isinstance(of_job, bool) else str(of_job)
