"""`shardwright unit FILE`: run one unit of a job again, in this process, to see why it failed."""

from __future__ import annotations

import os
from pathlib import Path

from shardwright.orchestrator.service.executor import attempt
from shardwright.orchestrator.service.unit_errors import UnitDefectError, read_kept
from shardwright.orchestrator.terminal.terminal import one_line, say


def main(file: Path) -> int:
    """Run the unit that a failure kept; returns the exit code. Raises the DiagnosticError of the
    unit, UsageError for a file that holds none, UnitDefectError for what nobody meant to raise."""
    unit = read_kept(file)
    size = len(unit.payload)
    say(one_line(f"{unit.kind} unit {unit.name}, key {unit.key}, {size} bytes"))
    outcome = attempt(unit, f"inline:{os.getpid()}")
    if outcome.error is not None:
        raise outcome.error
    if outcome.defect:
        raise UnitDefectError.of_unit(unit, outcome.defect)
    say(f"done in {outcome.seconds:.2f} s, {len(outcome.result or b'')} bytes")
    return 0
