"""Outlined programs as compile units, and what became of those: what jobs and graphs of scripts
have in common, so that one batch can hold the units of several of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shardwright.compiler.options import CompileOptions
from shardwright.compiler.outline import Outlined
from shardwright.orchestrator.service.executor import WorkUnit
from shardwright.orchestrator.service.service import Settled
from shardwright.orchestrator.service.unit_errors import UnitFailedError
from shardwright.orchestrator.service.units import compile_payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Outlined programs and one unit per distinct function, in the same order."""

    outlined: Outlined
    units: tuple[WorkUnit, ...]
    target: str

    def compiled(self, settled: Settled) -> list[bytes]:
        """Packed functions, in the order of `outlined.functions`. Raises the DiagnosticError of the
        first function that was refused, at the user's line, and UnitDefectError for what nobody
        meant to raise."""
        from shardwright.compiler.driver import located

        try:
            results = settled.results_of(self.units)
        except UnitFailedError as failed:
            at = next(n for n, unit in enumerate(self.units) if unit.key == failed.unit.key)
            raise located(failed.error, self.outlined.functions[at].graph) from failed
        return [results[unit.key] for unit in self.units]


def parts_of(outlined: Outlined, target: str, options: CompileOptions) -> Parts:
    """The compile units of outlined programs, named as people tell functions apart."""
    units = []
    names = Counter[str]()
    for function in outlined.functions:
        names[function.name] += 1
        name = f"{function.name}#{names[function.name]}"
        payload = compile_payload(function.payload, target, options)
        units.append(WorkUnit.of("compile", name, payload, target))
    return Parts(outlined=outlined, units=tuple(units), target=target)
