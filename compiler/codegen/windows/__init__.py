"""Contractions of windows that may leave their operand (convolutions): rows are loaded once with
their halo, and taps are shifted views of what is on chip.

`form.py` reads the structure off the bounded coordinates, `lines.py` loads lines of memory. Windows
with summed channels are transposed so that channels lie on the partitions (`product.py`, with
`steps.py` and `filters.py`); a filter gradient sums over lines on the partitions (`gradient.py`).
"""

from shardwright.compiler.codegen.windows.plan import has_windows, window_candidates

__all__ = ["has_windows", "window_candidates"]
