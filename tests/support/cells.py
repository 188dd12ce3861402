"""Cells of a parametrised test that plain `make test` leaves to `make matrix`."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from typing import Any

import pytest


def long_in_matrix(cells: Iterable[Hashable], long: Collection[Hashable]) -> list[Any]:
    """`cells` as parameters, those in `long` behind the marker `matrix`; a tuple is several values.

    Raises:
        AssertionError: `long` names what is no cell.
    """
    cells = list(cells)
    assert set(long) <= set(cells), sorted(map(str, set(long) - set(cells)))
    marks = [(pytest.mark.matrix,) if cell in long else () for cell in cells]
    return [
        pytest.param(*(cell if isinstance(cell, tuple) else (cell,)), marks=mark)
        for cell, mark in zip(cells, marks, strict=True)
    ]
