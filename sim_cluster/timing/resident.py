"""Programs whose weights stay on chip from one run to the next: what loads them takes no time.

Source: the NeuronCore Pipeline page, weights of a core are kept in its on-chip memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.compiler.isa.instructions import DMA
from shardwright.compiler.isa.kernel import Tensor, root_of
from shardwright.compiler.isa.program import Function, Instr, Loop, Program, Space
from shardwright.compiler.machine.target import Target


def weight_bytes(program: Program) -> int:
    """Bytes of the constants that a program holds."""
    tensors = (t for function in program.functions for t in function.tensors)
    return sum(len(t.data) for t in tensors if t.kind == "constant")


def room_on_chip(target: Target) -> int:
    """Bytes of SBUF of a core, which hold its weights besides what it works on."""
    limits = target.core.limits
    return limits.partitions * limits.sbuf_bytes


def with_resident_weights(program: Program) -> Program:
    """`program` for timing alone: loads of constants only pass on their tokens."""
    return replace(program, functions=[_resident(function) for function in program.functions])


def _resident(function: Function) -> Function:
    kernels = [
        replace(kernel, body=_without_loads(kernel.body, function.tensors))
        for kernel in function.kernels
    ]
    return replace(function, kernels=kernels)


def _without_loads(body: Sequence[Instr | Loop], tensors: Sequence[Tensor]) -> list[Instr | Loop]:
    return [
        replace(item, body=_without_loads(item.body, tensors))
        if isinstance(item, Loop)
        else _passed_on(item)
        if _loads_constant(item, tensors)
        else item
        for item in body
    ]


def _loads_constant(instr: Instr, tensors: Sequence[Tensor]) -> bool:
    if instr.engine not in DMA or instr.dst is None or instr.dst.space is Space.HBM:
        return False
    sources = [p.buffer for p in instr.srcs if p.space is Space.HBM]
    return bool(sources) and all(
        tensors[root_of(tensors, number)].kind == "constant" for number in sources
    )


def _passed_on(instr: Instr) -> Instr:
    """An instruction that takes and gives the same tokens."""
    return Instr(
        "wait",
        instr.engine,
        None,
        waits=instr.waits,
        signals=instr.signals,
        borders=instr.borders,
    )
