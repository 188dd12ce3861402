"""Memory of cores in the columns of the runtime's own report (device memory page)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

GIB = 2**30
_COLUMNS = {
    "Model Code": "model code",
    "Model Constants": "model constants",
    "Tensors": "tensors",
    "Shared Scratchpad": "shared scratchpad",
    "Scratchpad": "scratchpad",
    "Runtime": "runtime",
    "DMA Rings IO": "DMA rings io",
    "DMA Rings Spill": "DMA rings spill",
    "DMA Rings Collectives": "DMA rings collectives",
    "DMA Rings Runtime": "DMA rings",
    "Collectives": "collectives",
    "XT CC": "xt cc",
    "Profiler Buffers": "profiler buffers",
}
"""Column -> our category. Rings of ours are one figure; it stands with the runtime's own."""
COLUMNS: Sequence[str] = ("TOTAL", *_COLUMNS)


def cells(memory: Mapping[str, int]) -> dict[str, int]:
    """Bytes by column. The columns sum to TOTAL."""
    found = {column: memory.get(category, 0) for column, category in _COLUMNS.items()}
    return {"TOTAL": sum(found.values()), **found}


def report(rows: Mapping[str, Mapping[str, int]]) -> str:
    """The table as text, a line per core or model; columns that are 0 everywhere are left out."""
    bytes_of = {name: cells(memory) for name, memory in rows.items()}
    shown = [c for c in COLUMNS if any(row[c] for row in bytes_of.values())]
    lines = [["", *shown]]
    lines += [[name, *(_size(row[c]) for c in shown)] for name, row in bytes_of.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_line(line, widths) for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
    return "  ".join([cells[0].ljust(widths[0]), *padded[1:]]).rstrip()


def _size(number: int) -> str:
    """Bytes as the runtime writes them."""
    for unit, name in ((GIB, "GB"), (2**20, "MB"), (2**10, "KB")):
        if number >= unit:
            return f"{number / unit:.3f}{name}"
    return f"{number}B"
