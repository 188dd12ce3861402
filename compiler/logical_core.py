"""Regions on the physical cores of a logical NeuronCore: who computes what, and how long it takes.

With one physical core this is the judge of `trial.py` and nothing else. With two, every region is
cut along the atom whose halves are fastest, judged by the first tiling of each; a region that
cannot be cut, or gains nothing, stays on core 0 while core 1 is idle.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from compiler.codegen.cores import cuts
from compiler.codegen.generate import Generated
from compiler.diagnostics import DiagnosticError
from compiler.isa.region import RegionProgram, Tensor
from compiler.options import CompileOptions
from compiler.target import Target
from compiler.trial import Trial, meaning

MAX_CUTS = 3  # cuts of a region that are timed, those along its longest atoms (our choice)
_PAIRED = ("register_load",)  # both cores follow one control flow, so both load registers

Parts = tuple[RegionProgram, ...]


class LogicalCore:
    """Codes and simulated times of regions on a logical core of `options.lnc` physical ones; a
    `lower.accept.Judge`.
    """

    def __init__(self, target: Target, options: CompileOptions) -> None:
        self.target, self.options = target, options
        self._trial = Trial(target, options)
        self._sketch = Trial(target, replace(options, optlevel=1))
        self._ways: dict[Hashable, int] = {}  # which of `_offered` a region takes

    def __call__(self, program: RegionProgram, tensors: Sequence[Tensor]) -> int:
        """Time of a region. Raises CompileError or CapacityError when there is no code for it."""
        return _slowest(self._trial, self.parts(program, tensors), tensors)

    def generate(
        self, program: RegionProgram, tensors: Sequence[Tensor], first_register: int
    ) -> tuple[Generated, ...]:
        """Code per physical core. Raises CompileError, CapacityError."""
        return tuple(
            self._trial.generate(part, tensors, first_register)
            for part in self.parts(program, tensors)
        )

    def parts(self, program: RegionProgram, tensors: Sequence[Tensor]) -> Parts:
        """What each physical core computes of a region."""
        if self.options.lnc == 1:
            return (program,)
        if program.kind != "compute":
            return program, program if program.kind in _PAIRED else idle(program)
        key = meaning(program, tensors)
        if key not in self._ways:
            times = [self._sketched(parts, tensors) for parts in _offered(program, tensors)]
            self._ways[key] = times.index(min(times))
        return next(islice(_offered(program, tensors), self._ways[key], None))

    def _sketched(self, parts: Parts, tensors: Sequence[Tensor]) -> float:
        try:
            return _slowest(self._sketch, parts, tensors)
        except DiagnosticError:
            return float("inf")


def _offered(program: RegionProgram, tensors: Sequence[Tensor]) -> Iterator[Parts]:
    """The whole region on core 0, then its cuts."""
    yield program, idle(program)
    yield from islice(cuts(program, tensors), MAX_CUTS)


def idle(program: RegionProgram) -> RegionProgram:
    """What a core does that has no part in a region."""
    return RegionProgram("idle", program.name, loc=program.loc)


def _slowest(trial: Trial, parts: Parts, tensors: Sequence[Tensor]) -> int:
    return max(trial(part, tensors) for part in parts if part.kind != "idle")
