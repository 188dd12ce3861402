"""Indices out of bounds, met while a program runs.

A gather reads the nearest row for such an index and the run goes on, as on the machine (status
1006 of the Neuron runtime, "out of bounds"; source: aws-neuron-sdk, runtime return codes). What was
met is kept per line of the user's code; a strict watch ends the run at the first.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from shardwright.compiler.diagnostics import Diagnostic, Loc, SimulationError
from shardwright.compiler.isa.kernel import KernelProgram
from shardwright.compiler.isa.program import Program

Outside = Callable[[KernelProgram, int], None]
"""Called with a kernel and the number of indices of it that lie outside."""

CODE = "SW_SIM_INDEX"


class IndexWatch:
    """Counts by kernel name and location, over all programs and cores of a run."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.counts: dict[tuple[str, Loc | None], int] = {}
        self._lock = Lock()  # cores run on several host threads

    def of(self, program: Program) -> Outside:
        """What the kernels of `program` report to."""

        def note(kernel: KernelProgram, count: int) -> None:
            known = 0 <= kernel.loc < len(program.locations)
            loc = Loc(*program.locations[kernel.loc]) if known else None
            if self.strict:
                message = f"{kernel.name} requires indices inside of its operand, got {count} not"
                raise SimulationError(CODE, message, loc, "fix the indices, or run without strict")
            with self._lock:
                self.counts[(kernel.name, loc)] = self.counts.get((kernel.name, loc), 0) + count

        return note

    @property
    def findings(self) -> list[Diagnostic]:
        """One warning per line that met any."""
        return [
            Diagnostic(
                CODE,
                f"{name}: {count} indices lie out of bounds, read as the nearest row",
                loc,
                "strict indices end the run at the first one",
                severity="warning",
            )
            for (name, loc), count in self.counts.items()
        ]
