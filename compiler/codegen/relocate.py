"""Code of one kernel for another of the same meaning: other tensor numbers, other registers.

A merge is timed by the code of the kernel it would make. When it is accepted the kernel is
generated for good, in a function that by then has other tensors and registers; nothing else of its
code depends on those, so it is renamed instead of being made again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwright.compiler.isa.kernel import Affine, KernelProgram
from shardwright.compiler.isa.program import AccessPattern, Instr, Kernel, Loop, Space

Rename = Callable[[int], int]


def relocated(
    kernel: Kernel,
    program: KernelProgram,
    tensors: Mapping[int, int],
    first_register: int,
    moved_to: int,
) -> Kernel:
    """`kernel` as code of `program`: tensors renamed, registers moved to begin at `moved_to`."""

    def register(number: int) -> int:
        return number - first_register + moved_to if number >= first_register else number

    tiles = [replace(tile, loop=register(tile.loop)) for tile in kernel.tiles]
    body = _body(kernel.body, tensors, register)
    return Kernel(program, tiles, body, kernel.tokens)


def _body(
    body: Sequence[Instr | Loop], tensors: Mapping[int, int], register: Rename
) -> list[Instr | Loop]:
    return [
        Loop(register(item.register), item.trip, _body(item.body, tensors, register))
        if isinstance(item, Loop)
        else _instr(item, tensors, register)
        for item in body
    ]


def _instr(instr: Instr, tensors: Mapping[int, int], register: Rename) -> Instr:
    def affine(value: Affine) -> Affine:
        # Registers of the kernel stay behind those of the function, so the terms stay sorted.
        return Affine(value.const, tuple((register(r), c) for r, c in value.terms))

    def buffer(p: AccessPattern) -> int:
        return tensors[p.buffer] if p.space is Space.HBM else p.buffer

    return renamed(instr, affine, buffer, lambda first: tuple(map(register, first)))


def renamed(
    instr: Instr,
    affine: Callable[[Affine], Affine],
    buffer: Callable[[AccessPattern], int],
    zero_when: Callable[[tuple[int, ...]], tuple[int, ...] | None],
) -> Instr:
    """`instr` with everything replaced that moves with registers, and the buffers of patterns."""

    def moved(value: Affine) -> Affine:
        return affine(value) if value.terms else value

    def pattern(p: AccessPattern) -> AccessPattern:
        return AccessPattern(p.space, buffer(p), moved(p.offset), p.dims, p.start)

    attrs: dict[str, Any] = {
        name: moved(value) if isinstance(value, Affine) else value
        for name, value in instr.attrs.items()
    }
    if attrs.get("zero_when"):
        attrs["zero_when"] = zero_when(attrs["zero_when"])
    dst = pattern(instr.dst) if instr.dst else None
    row_sum = pattern(instr.row_sum) if instr.row_sum else None
    srcs = tuple(map(pattern, instr.srcs))
    tokens = instr.waits, instr.signals, instr.borders
    return Instr(instr.opcode, instr.engine, dst, srcs, attrs, *tokens, row_sum)
