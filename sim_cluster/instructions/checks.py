"""Static legality of tiles and instructions, as errors: the tables and rules are
`compiler/isa/limits.py`.

Checks that depend on loop counters (bounds, PSUM banks) are made by the operands when they first
see an address.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.isa.attributes import OPTIONAL_ATTRIBUTES
from shardwright.compiler.isa.instructions import DMA, INSTRUCTIONS, TOKENS_ONLY, InstrDef
from shardwright.compiler.isa.limits import check_instr, issuers_of, start_is_legal
from shardwright.compiler.isa.program import AccessPattern, Instr, Space, Tile
from shardwright.compiler.machine.target import Limits
from shardwright.sim_cluster.instructions.engines.registry import require


def check_instruction(instr: Instr, tiles: Sequence[Tile], limits: Limits) -> None:
    """Raise SimulationError for an instruction the machine would not accept."""
    definition = INSTRUCTIONS.get(instr.opcode)
    if definition is None:
        raise SimulationError("SW_L0_OPCODE", f"no instruction is called {instr.opcode}")
    issuers = issuers_of(definition, limits)
    require(
        instr.engine.value in issuers,
        "SW_L0_ENGINE",
        f"{instr.opcode} requires one of {issuers}, got {instr.engine.value}",
    )
    require(
        (instr.dst is None) == (instr.opcode in TOKENS_ONLY),
        "SW_L0_OPERANDS",
        f"{instr.opcode} has {'no' if instr.dst is None else 'a'} destination",
    )
    _check_attrs(instr, definition)
    for pattern in (*instr.srcs, *instr.dsts):
        if pattern.space is not Space.HBM:
            _check_tile_pattern(instr, pattern, tiles)
    findings = check_instr(instr, tiles, limits)
    require(not findings, "SW_L0_ILLEGAL", "; ".join(findings))


def _check_attrs(instr: Instr, definition: InstrDef) -> None:
    """Attributes the instruction does not have, or lacks."""
    given, known = set(instr.attrs), set(definition.attrs)
    lacking = known - given - OPTIONAL_ATTRIBUTES
    require(
        not given - known and not lacking,
        "SW_L0_OPERANDS",
        f"{instr.opcode} takes the attributes {sorted(known)}, got {sorted(given)}",
    )


def _check_tile_pattern(instr: Instr, pattern: AccessPattern, tiles: Sequence[Tile]) -> None:
    buffer, space, start, dims = pattern.buffer, pattern.space, pattern.start, pattern.dims
    require(0 <= buffer < len(tiles), "SW_L0_OPERANDS", f"the kernel has no tile {buffer}")
    tile, count = tiles[buffer], dims[0][1]
    require(
        tile.space is space and dims[0][0] == 1,
        "SW_L0_OPERANDS",
        f"pattern {dims} in {space.value} does not fit tile {tile.name} in {tile.space.value}",
    )
    require(
        start >= 0 and start + count <= tile.partitions,
        "SW_L0_BOUNDS",
        f"partitions {start}..{start + count} lie outside tile {tile.name} of {tile.partitions}",
    )
    require(
        instr.engine in DMA or start_is_legal(start, count),
        "SW_L0_PARTITION_START",
        f"{count} partitions cannot start at {start}: up to 32 start at a multiple of 32,"
        " up to 64 at 0 or 64, more at 0",
    )


def check_tiles(tiles: Sequence[Tile], limits: Limits) -> None:
    """Raise SW_L0_TILE_SPACE for a tile that does not fit its memory."""
    sizes = {Space.SBUF: limits.sbuf_bytes, Space.PSUM: limits.psum_bytes}
    for tile in tiles:
        where = f"tile {tile.name} ({tile.space.value})"
        require(tile.space in sizes, "SW_L0_TILE_SPACE", f"{where} requires SBUF or PSUM")
        limit, end = sizes[tile.space], tile.address + tile.slots * tile.slot_bytes
        require(
            tile.address >= 0 and end <= limit and tile.slots >= 1,
            "SW_L0_TILE_SPACE",
            f"{where} requires bytes 0..{limit} of a partition, got {tile.address}..{end}",
        )
        require(
            0 < tile.partitions <= limits.partitions,
            "SW_L0_TILE_SPACE",
            f"{where} requires 1..{limits.partitions} partitions, got {tile.partitions}",
        )
        require(
            tile.address % tile.dtype.bytes == 0,
            "SW_L0_TILE_SPACE",
            f"{where} requires an address divisible by {tile.dtype.bytes}, got {tile.address}",
        )


def check_bank(first_byte: int, end_byte: int, limits: Limits) -> None:
    """A Tensor result must lie in one PSUM bank."""
    bank = limits.psum_bank_bytes
    require(
        first_byte // bank == (end_byte - 1) // bank,
        "SW_L0_PSUM_BANK",
        f"bytes {first_byte}..{end_byte} of PSUM cross a bank boundary ({bank} bytes per bank)",
    )
