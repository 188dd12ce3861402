"""Programs in values: the calls of a linked program in order, with loop registers, over one core's
memory.

A `ProgramCode` is shared by all cores that run the program; `run` is a generator that stops at
every collective, so that a driver can keep all ranks in lock step.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.compiler.isa.limits import limits_for
from shardwright.compiler.isa.program import Call, Program, Repeat
from shardwright.compiler.support.rounding import Draws
from shardwright.sim_cluster.instructions.index_watch import IndexWatch
from shardwright.sim_cluster.instructions.tiles import OnChip
from shardwright.sim_cluster.values.functions import L0, L1, Bound, CollectiveRequest, FunctionCode
from shardwright.sim_cluster.values.memory import CoreMemory


class ProgramCode:
    """A program ready to run at level L0 or L1; `watch` is told of indices out of bounds, and at L1
    `draws` move results within their rounding."""

    def __init__(
        self,
        program: Program,
        level: str = L1,
        watch: IndexWatch | None = None,
        draws: Draws | None = None,
    ) -> None:
        self.program, self.level = program, level
        outside = watch.of(program) if watch else None
        chip = OnChip(limits_for(program.target)) if level == L0 else None
        self.functions = [FunctionCode(f, level, chip, outside, draws) for f in program.functions]

    def run(self, memory: CoreMemory) -> Iterator[CollectiveRequest]:
        """Run the whole program on one core's memory, yielding at every collective wait."""
        memory.reserve(self.program.arena_bytes)
        return self._steps(self.program.steps, memory, {})

    @property
    def instructions(self) -> int:
        """Instructions executed so far (L0)."""
        return sum(f.instructions for f in self.functions)

    def _steps(
        self, steps: tuple[Call | Repeat, ...], memory: CoreMemory, registers: dict[int, int]
    ) -> Iterator[CollectiveRequest]:
        for step in steps:
            if isinstance(step, Repeat):
                for i in range(step.trip):
                    registers[step.register] = i
                    yield from self._steps(step.steps, memory, registers)
            else:
                code = self.functions[step.function]
                values = (p.value(registers) for p in step.parameters)
                given = dict(zip(code.function.parameters, values, strict=True))
                yield from self._bound(step, memory).run(given)

    def _bound(self, call: Call, memory: CoreMemory) -> Bound:
        """The call's tensors on this core; they never move, so they are bound once."""
        key = (id(self), id(call), memory.turn)
        bound = memory.bindings.get(key)
        if bound is None:
            code = self.functions[call.function]
            buffers = self.program.buffers
            inputs = [memory.program_buffer(buffers[n]) for n in call.inputs]
            outputs = [memory.program_buffer(buffers[n]) for n in call.outputs]
            zone = memory.arena[call.scratch : call.scratch + code.function.scratch_bytes]
            bound = memory.bindings[key] = code.bind(inputs, outputs, zone, memory.position)
        assert isinstance(bound, Bound)
        return bound
