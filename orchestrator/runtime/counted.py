"""What a program has the engines do, counted over its calls: instructions, arithmetic, bytes.

Loops count as often as they run. FLOPs are those of products on the tensor engine (two per multiply
and add) and, apart, of transposes, which it does as products with an identity.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardwright.compiler.isa.program import (
    Call,
    Function,
    Instr,
    Loop,
    Program,
    Repeat,
    Space,
)


@dataclass(slots=True)
class Counted:
    """Of one core: `instructions` by (engine, opcode), DMA transfers and bytes by direction."""

    instructions: Counter[tuple[str, str]] = field(default_factory=Counter)
    matmul_flops: int = 0
    transpose_flops: int = 0
    hbm_read_bytes: int = 0
    hbm_write_bytes: int = 0
    dma_transfers: int = 0

    def of_engine(self, engine: str) -> int:
        """Instructions of an engine."""
        return sum(n for (name, _), n in self.instructions.items() if name == engine)

    def of_opcode(self, opcode: str) -> int:
        """Instructions with an opcode."""
        return sum(n for (_, name), n in self.instructions.items() if name == opcode)

    def add(self, instr: Instr, times: int, function: Function) -> None:
        """Count an instruction that runs so often."""
        self.instructions[instr.engine.value, instr.opcode] += times
        if instr.opcode == "matmul" and instr.dst is not None:
            contraction = instr.srcs[0].shape[0]
            self.matmul_flops += 2 * contraction * math.prod(instr.dst.shape) * times
        elif instr.opcode == "transpose" and instr.dst is not None:
            self.transpose_flops += 2 * instr.srcs[0].shape[0] * math.prod(instr.dst.shape) * times
        elif instr.opcode.startswith("dma") and instr.dst is not None:
            elements = times * math.prod(instr.dst.shape)
            tensors, source, target = function.tensors, instr.srcs[0], instr.dst
            self.dma_transfers += times
            if source.space is Space.HBM:
                self.hbm_read_bytes += elements * tensors[source.buffer].dtype.bytes
            if target.space is Space.HBM:
                self.hbm_write_bytes += elements * tensors[target.buffer].dtype.bytes


def count(program: Program) -> Counted:
    """Everything that one execution does on one core."""
    found = Counted()
    for call, times in _calls(program.steps):
        function = program.functions[call.function]
        kernels = [*function.kernels, *(function.partner or ())]
        for kernel in kernels:
            for instr, inner in _instructions(kernel.body):
                found.add(instr, times * inner, function)
    return found


def count_kernels(function: Function) -> list[Counted]:
    """The same of every kernel of one call."""
    rows = []
    for kernel in function.kernels:
        rows.append(found := Counted())
        for instr, times in _instructions(kernel.body):
            found.add(instr, times, function)
    return rows


def _calls(steps: Sequence[Call | Repeat], times: int = 1) -> Iterator[tuple[Call, int]]:
    for step in steps:
        if isinstance(step, Repeat):
            yield from _calls(step.steps, times * step.trip)
        else:
            yield step, times


def _instructions(body: Sequence[Instr | Loop], times: int = 1) -> Iterator[tuple[Instr, int]]:
    for item in body:
        if isinstance(item, Loop):
            yield from _instructions(item.body, times * item.trip)
        else:
            yield item, times
