"""Kernels on the physical cores of a logical NeuronCore: who computes what, and how long it takes.

With one physical core this is the `Autotuner` and nothing else. With two, every kernel is cut along
the iter dim whose halves are fastest, timed by the first tiling of each; a kernel that cannot be
cut, or gains nothing, stays on core 0 while core 1 is idle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice

from shardwright.compiler.codegen.cores import cuts
from shardwright.compiler.codegen.generate import Recipe
from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.fusion.autotuner import Autotuner, meaning
from shardwright.compiler.ir.facts import sent_bytes
from shardwright.compiler.ir.types import Op
from shardwright.compiler.isa.kernel import KernelProgram, Tensor
from shardwright.compiler.isa.program import Kernel
from shardwright.compiler.machine.network import expected_ps
from shardwright.compiler.machine.target import Target, logical
from shardwright.compiler.options import CompileOptions

MAX_CUTS = 3  # cuts of a kernel that are timed, those that share most work first (our choice)
_EVEN = 1.98  # gain behind which no other cut is timed: two cores give about 2 (our choice)

Pair = tuple[KernelProgram, ...]  # what each physical core computes


@dataclass(frozen=True, slots=True)
class Way:
    """A kernel as pairs one after the other, with scratch tensors numbered behind those of the
    function.
    """

    pairs: tuple[Pair, ...]
    scratch: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Coded:
    """Code of a kernel."""

    pairs: tuple[tuple[Kernel, ...], ...]  # one kernel per physical core, one after the other
    scratch: tuple[Tensor, ...]  # behind the function's own tensors
    next_register: int  # the first number left free
    notes: tuple[str, ...]  # what is special about the tilings
    recipes: tuple[tuple[Recipe | None, ...], ...]  # how each part was tiled


class LogicalCore:
    """Codes and simulated times of kernels on a logical core of `options.lnc` physical ones; a
    `lower.cost_oracle.CostOracle`.
    """

    def __init__(self, target: Target, options: CompileOptions) -> None:
        self.target, self.options = target, options
        self.limit_bytes = target.limit_bytes  # HBM that a step may use
        self._autotuner = Autotuner(target, options)
        there = logical(target, options.lnc, hypothetical=True)
        self._flight_ps = cache(partial(expected_ps, there))
        self._ways: dict[Hashable, int] = {}  # which of `_offered` a kernel takes

    def __call__(self, program: KernelProgram, tensors: Sequence[Tensor]) -> int:
        """Time of a kernel. Raises CompileError or CapacityError when there is no code for it."""
        return _time(self._autotuner, self.way(program, tensors), tensors)

    def searched(self, program: KernelProgram, tensors: Sequence[Tensor]) -> int:
        """Time of the code that a kernel will run. Raises as a call does."""
        return _time(self._autotuner.searched, self.way(program, tensors), tensors)

    def collective_ps(self, op: Op) -> int:
        """How long a collective is expected to be in flight, as if its groups were side by side;
        nothing without `latency_hiding`.
        """
        if not self.options.latency_hiding:
            return 0
        item, attrs = op.result.type.dtype.bytes, op.attrs
        group, pairs = getattr(attrs, "group_size", 1), getattr(attrs, "pairs", ())
        return self._flight_ps(op.name, sent_bytes(op), item, group, pairs)

    def generate(
        self, program: KernelProgram, tensors: Sequence[Tensor], first_register: int
    ) -> Coded:
        """Code for a kernel. Raises CompileError, CapacityError."""
        way = self.way(program, tensors)
        known = [*tensors, *way.scratch]
        pairs = [
            [self._autotuner.generate(part, known, first_register) for part in pair]
            for pair in way.pairs
        ]
        every = [code for pair in pairs for code in pair]
        return Coded(
            pairs=tuple(tuple(code.kernel for code in pair) for pair in pairs),
            scratch=way.scratch,
            next_register=max(first_register, *(code.next_register for code in every)),
            notes=tuple(dict.fromkeys(note for code in every for note in code.notes)),
            recipes=tuple(tuple(code.recipe for code in pair) for pair in pairs),
        )

    def way(self, program: KernelProgram, tensors: Sequence[Tensor]) -> Way:
        """What each physical core computes of a kernel."""
        if self.options.lnc == 1:
            return Way(((program,),))
        if program.kind != "compute":
            # Both cores follow one control flow, so both load registers.
            other = program if program.kind == "register_load" else idle(program)
            return Way(((program, other),))
        key = meaning(program, tensors)
        if key not in self._ways:
            self._ways[key] = self._chosen(program, tensors)
        return next(islice(_offered(program, tensors), self._ways[key], None))

    def _chosen(self, program: KernelProgram, tensors: Sequence[Tensor]) -> int:
        """Which way is the fastest; the whole on a tie, else the first. Ways behind one that shares
        the work evenly are not looked at.
        """
        times: list[float] = []
        for way in _offered(program, tensors):
            times.append(self._first_fit_ps(way, tensors))
            if math.isfinite(times[0]) and times[-1] * _EVEN <= times[0]:
                break
        return times.index(min(times))

    def _first_fit_ps(self, way: Way, tensors: Sequence[Tensor]) -> float:
        try:
            return _time(self._autotuner.first_fit_ps, way, tensors)
        except DiagnosticError:
            return math.inf


def _offered(program: KernelProgram, tensors: Sequence[Tensor]) -> Iterator[Way]:
    """The whole kernel on core 0, then its cuts."""
    yield Way(((program, idle(program)),))
    for cut in islice(cuts(program, tensors), MAX_CUTS):
        behind = () if cut.joined is None else ((cut.joined, idle(cut.joined)),)
        yield Way((cut.halves, *behind), cut.scratch)


def idle(program: KernelProgram) -> KernelProgram:
    """What a core does that has no part in a kernel."""
    return KernelProgram("idle", program.name, loc=program.loc)


def _time(
    clock: Callable[[KernelProgram, Sequence[Tensor]], int], way: Way, tensors: Sequence[Tensor]
) -> int:
    """One pair after the other; of a pair the slower core counts."""
    known = [*tensors, *way.scratch]
    return sum(
        max(clock(part, known) for part in pair if part.kind != "idle") for pair in way.pairs
    )
