"""Charts of characters, and numbers as these texts show them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Tensor
from shardwright.compiler.machine.target import PS_PER_US

WIDTH = 64
"""Columns of a chart (our choice): a line with it fits a wide terminal."""
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def bytes_text(num_bytes: int) -> str:
    """Bytes in binary units."""
    for size, unit in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


def type_text(shape: Sequence[int], dtype: DType) -> str:
    """Element type and sizes."""
    return f"{dtype.value}[{'x'.join(map(str, shape)) or 'scalar'}]"


def tensor_text(tensor: Tensor) -> str:
    """What a tensor is for, and its type."""
    return f"{tensor.kind} {type_text(tensor.shape, tensor.dtype)}"


def us_text(ps: int) -> str:
    """Simulated time in microseconds."""
    return f"{ps / PS_PER_US:.3f} us"


def span_chart(first: int, last: int, count: int, width: int = WIDTH) -> str:
    """A bar over positions first..last of `count`; several positions may share a column."""
    columns = min(count, width)
    low, high = first * columns // max(count, 1), last * columns // max(count, 1)
    return "." * low + "#" * (high - low + 1) + "." * (columns - high - 1)


def time_chart(begin_ps: int, end_ps: int, whole_ps: int, busy: float, width: int = WIDTH) -> str:
    """A bar from begin to end of a time; `=` where an engine is busy for less than half of it."""
    low = begin_ps * width // max(whole_ps, 1)
    high = max(low + 1, -(-end_ps * width // max(whole_ps, 1)))
    return "." * low + ("#" if busy >= 0.5 else "=") * (high - low) + "." * (width - high)


def share_bar(part: int, whole: int, width: int = WIDTH) -> str:
    """A bar as long as the part is of the whole."""
    return "#" * round(width * part / max(whole, 1))


def table(rows: Sequence[Sequence[object]], right: Sequence[int] = ()) -> Iterator[str]:
    """Rows with columns side by side; columns in `right` are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
    for row in cells:
        parts = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        yield "  ".join(parts).rstrip()
