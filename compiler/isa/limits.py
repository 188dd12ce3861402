"""What a NeuronCore refuses: instructions and tiles against its limits, facts of its data file.

Code generation verifies every kernel it emits with `check_kernel`; the simulator's L0 calls
`check_instr` on what it loads, so both sides refuse the same things. What an instruction costs is
in `costs.py`; what it means is in `instructions.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.instructions import DMA, INSTRUCTIONS, InstrDef
from shardwright.compiler.isa.program import (
    AccessPattern,
    Engine,
    Instr,
    Kernel,
    Loop,
    Space,
    Tile,
    extent,
)
from shardwright.compiler.machine.target import Limits, load_target

# An access of up to this many partitions may start at a multiple of itself (source: documented,
# nki/guides/architecture/trainium_inferentia2_arch.rst, start partitions).
_START_STEPS = (32, 64)


def limits_for(machine: str | Limits) -> Limits:
    """Limits of a machine by name, or of its file. Raises UsageError NCC_EARG001 for an unknown
    one."""
    return machine if isinstance(machine, Limits) else load_target(machine).core.limits


def check_kernel(kernel: Kernel, limits: Limits) -> list[str]:
    """Everything in `kernel` the machine would refuse, as readable findings."""
    found = list(_check_tiles(kernel.tiles, limits))
    for instr in walk(kernel.body):
        found += check_instr(instr, kernel.tiles, limits)
    if len(kernel.tokens) > limits.semaphores:
        found.append(f"requires at most {limits.semaphores} semaphores, got {len(kernel.tokens)}")
    return [f"{kernel.program.name}: {text}" for text in found]


def walk(body: Sequence[Instr | Loop]) -> Iterator[Instr]:
    """The instructions of a body in program order, each once."""
    for item in body:
        if isinstance(item, Loop):
            yield from walk(item.body)
        else:
            yield item


def _check_tiles(tiles: Sequence[Tile], limits: Limits) -> Iterator[str]:
    sizes = {Space.SBUF: limits.sbuf_bytes, Space.PSUM: limits.psum_bytes}
    for tile in tiles:
        end = tile.address + tile.slots * tile.slot_bytes
        if tile.address < 0 or end > sizes[tile.space]:
            yield (
                f"tile {tile.name} requires bytes 0..{sizes[tile.space]}, got {tile.address}..{end}"
            )
        if not 0 < tile.partitions <= limits.partitions:
            yield (
                f"tile {tile.name} requires 1..{limits.partitions} partitions,"
                f" got {tile.partitions}"
            )


def check_instr(instr: Instr, tiles: Sequence[Tile], limits: Limits) -> list[str]:
    """What is illegal about one instruction, whatever the values of registers; empty when nothing
    is."""
    definition = INSTRUCTIONS.get(instr.opcode)
    if definition is None:
        return [f"unknown instruction {instr.opcode}"]
    found = []
    if instr.engine.value not in issuers_of(definition, limits):
        found.append(f"{instr.opcode} cannot be issued by {instr.engine.value}")
    if instr.row_sum is not None and instr.opcode != "activation_reduce":
        found.append(f"{instr.opcode} has one destination")
    if len(instr.srcs) not in definition.sources:
        found.append(f"{instr.opcode} requires {definition.sources} sources, got {len(instr.srcs)}")
    for patterns, write in ((instr.srcs, False), (instr.dsts, True)):
        for pattern in patterns:
            found += _check_pattern(pattern, write, instr, tiles, limits)
    if not found and instr.opcode in _RULES:
        found += _RULES[instr.opcode](instr, tiles, limits)
    return [f"{instr.opcode}: {text}" for text in found]


def issuers_of(definition: InstrDef, limits: Limits) -> list[str]:
    """The engines of a core that issue an instruction: those the instruction set names, or who
    stands in for them.
    """
    return [limits.issuer(engine.value) for engine in definition.engines]


def _check_pattern(
    pattern: AccessPattern, write: bool, instr: Instr, tiles: Sequence[Tile], limits: Limits
) -> Iterator[str]:
    free = pattern.dims[1:]
    if len(free) > limits.free_dims:
        yield f"requires at most {limits.free_dims} free dims, got {len(free)}"
    if any(size < 1 for _, size in pattern.dims):
        yield f"requires positive sizes, got {pattern.shape}"
    # The rows of a scatter are placed by its index; the step between them means nothing.
    moving = free if instr.opcode == "dma_scatter" else pattern.dims
    if write and any(stride == 0 and size > 1 for stride, size in moving):
        yield f"a destination requires strides other than 0, got {pattern.dims}"
    if pattern.space is Space.HBM:
        if instr.engine not in DMA:
            yield f"{instr.engine.value} cannot touch HBM"
        return
    yield from _check_on_chip(pattern, instr, tiles[pattern.buffer], limits)


def _check_on_chip(
    pattern: AccessPattern, instr: Instr, tile: Tile, limits: Limits
) -> Iterator[str]:
    is_dma = instr.engine in DMA
    count, elements = pattern.dims[0][1], math.prod(pattern.shape[1:])
    if pattern.start + count > tile.partitions:
        yield f"tile {tile.name} has {tile.partitions} partitions, got {pattern.start}+{count}"
    if not is_dma and not start_is_legal(pattern.start, count):
        yield f"{count} partitions cannot start at {pattern.start}"
    if not pattern.offset.terms and not _inside(pattern, tile):
        yield f"leaves tile {tile.name} of {tile.elements} elements: {pattern}"
    free_max = limits.free_elements_psum if tile.space is Space.PSUM else limits.free_elements_sbuf
    if not is_dma and elements > free_max:
        yield f"requires at most {free_max} elements per partition, got {elements}"
    if not is_dma and any(
        size > limits.dim_size_max or abs(stride) > limits.dim_stride_max
        for stride, size in pattern.dims[1:]
    ):
        yield f"a size or stride leaves its 16-bit field: {pattern.dims}"
    if tile.space is Space.PSUM and (instr.engine is Engine.GPSIMD or is_dma):
        yield f"{instr.engine.value} cannot touch PSUM"


def start_is_legal(start: int, count: int) -> bool:
    """The partition start rule: up to 32 partitions start at 0/32/64/96, up to 64 at 0/64, more at
    0."""
    for step in _START_STEPS:
        if count <= step:
            return start % step == 0
    return start == 0


def _inside(pattern: AccessPattern, tile: Tile) -> bool:
    (low, high), first = extent(pattern.dims[1:]), pattern.offset.const
    return first + low >= 0 and first + high < tile.elements


def _check_matmul(instr: Instr, tiles: Sequence[Tile], limits: Limits) -> Iterator[str]:
    assert instr.dst is not None
    stationary, moving = instr.srcs
    k, m, n = stationary.shape[0], math.prod(stationary.shape[1:]), math.prod(moving.shape[1:])
    if k > limits.contraction_max or m > limits.stationary_max or n > limits.moving_max:
        most = f"{limits.contraction_max}, {limits.stationary_max}, {limits.moving_max}"
        yield f"requires K, M, N up to {most}, got {k}, {m}, {n}"
    types = {tiles[p.buffer].dtype for p in instr.srcs}
    if any(not t.is_float for t in types) or (DType.F32 in types and len(types) > 1):
        yield f"requires float operands, fp32 only with fp32, got {[t.value for t in types]}"
    if any(tiles[p.buffer].space is not Space.SBUF for p in instr.srcs):
        yield "requires operands in SBUF"
    yield from _check_accumulator(instr.dst, tiles, limits)


def _check_transpose(instr: Instr, tiles: Sequence[Tile], limits: Limits) -> Iterator[str]:
    assert instr.dst is not None
    (source,) = instr.srcs
    p, f = source.shape[0], math.prod(source.shape[1:])
    if max(p, f) > limits.transpose_max:
        yield f"requires up to {limits.transpose_max} rows and columns, got {p} x {f}"
    if tiles[source.buffer].space is not Space.SBUF:
        yield "requires its source in SBUF"
    yield from _check_accumulator(instr.dst, tiles, limits)


def _check_accumulator(
    pattern: AccessPattern, tiles: Sequence[Tile], limits: Limits
) -> Iterator[str]:
    """A result of the tensor engine is fp32 in PSUM and stays inside one bank."""
    tile, bank = tiles[pattern.buffer], limits.psum_bank_bytes
    if tile.space is not Space.PSUM or tile.dtype is not DType.F32:
        yield f"requires a fp32 destination in PSUM, got {tile.name}"
        return
    span = sum(stride * (size - 1) for stride, size in pattern.dims[1:]) * 4
    first = tile.address + pattern.offset.const * 4
    steps = [c * 4 for _, c in pattern.offset.terms] + ([tile.slot_bytes] if tile.slots > 1 else [])
    # With every rotation and register step a whole number of banks, the constant part decides.
    if any(step % bank for step in steps) or first % bank + span + 4 > bank:
        yield f"the result leaves its PSUM bank of {bank} bytes: {pattern}"


def _check_row_sum(instr: Instr, tiles: Sequence[Tile], limits: Limits) -> Iterator[str]:
    """One fp32 number for each partition of the destination."""
    assert instr.dst is not None
    if instr.row_sum is None:
        yield "requires a second destination for the sums of rows"
        return
    rows, given = instr.dst.shape[0], instr.row_sum.shape
    if given[0] != rows or math.prod(given) != rows:
        yield f"requires sums of shape {[rows, 1]}, got {list(given)}"
    if tiles[instr.row_sum.buffer].dtype is not DType.F32:
        yield f"requires sums in fp32, got {tiles[instr.row_sum.buffer].dtype.value}"


_RULES = {
    "matmul": _check_matmul,
    "transpose": _check_transpose,
    "activation_reduce": _check_row_sum,
}
