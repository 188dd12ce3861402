"""Indices out of bounds, met while a program runs.

A gather reads the nearest row for such an index, a scatter drops its update, and the run goes on;
the Neuron runtime tells of it in the words of `WORDS` and with status 1006 (source: aws-neuron-sdk,
release notes of the runtime library 2.19.5.0 and runtime return codes). What was met is kept per
line of the user's code; a strict watch ends the run at the first.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from threading import Lock

from shardwright.compiler.diagnostics import Diagnostic, Loc, SimulationError
from shardwright.compiler.isa.kernel import KernelProgram
from shardwright.compiler.isa.program import Program

CODE = "SW_SIM_INDEX"
STATUS = 1006
"""NRT_EXEC_OOB of the Neuron runtime."""
WORDS = "failed to run scatter/gather (indirect memory copy), due to out-of-bound access"
"""How the Neuron runtime says it."""


class Access(enum.StrEnum):
    """What picks rows by their numbers."""

    GATHER = "gather"
    SCATTER = "scatter"

    @property
    def outcome(self) -> str:
        """What becomes of indices that lie outside."""
        return "read as the nearest row" if self is Access.GATHER else "their updates dropped"


Outside = Callable[[KernelProgram, Access, int], None]
"""Called with a kernel, what accesses memory there, and how many of its indices lie outside."""


class IndexWatch:
    """Counts by access and location, over all programs and cores of a run. `unchecked` says why
    the machine itself would not tell, where it would not."""

    def __init__(self, strict: bool = False, unchecked: str = "") -> None:
        self.strict, self.unchecked = strict, unchecked
        self.counts: dict[tuple[Access, Loc | None], int] = {}
        self._lock = Lock()  # cores run on several host threads

    def of(self, program: Program) -> Outside:
        """What the kernels of `program` report to."""

        def note(kernel: KernelProgram, access: Access, count: int) -> None:
            known = 0 <= kernel.loc < len(program.locations)
            loc = Loc(*program.locations[kernel.loc]) if known else None
            if self.strict:
                message = (
                    f"{access} requires indices inside of its operand, got {count} outside;"
                    f" {self._said}"
                )
                hint = "fix the indices, or run without strict indices"
                raise SimulationError(CODE, message, loc, hint)
            with self._lock:
                self.counts[access, loc] = self.counts.get((access, loc), 0) + count

        return note

    @property
    def _said(self) -> str:
        """What the machine says of them."""
        return self.unchecked or f"the Neuron runtime says: {WORDS} (status {STATUS})"

    @property
    def findings(self) -> list[Diagnostic]:
        """One warning per access and line that met any."""
        return [
            Diagnostic(
                CODE,
                f"{access}: {_counted(count)} out of bounds, {access.outcome}; {self._said}",
                loc,
                "strict indices end the run at the first one",
                severity="warning",
            )
            for (access, loc), count in self.counts.items()
        ]


def _counted(count: int) -> str:
    return "1 index lies" if count == 1 else f"{count} indices lie"
