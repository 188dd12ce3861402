"""Which cells of a parametrised test run where: `make test`, `make matrix`, `make exhaustive`."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

Cell = TypeVar("Cell", bound=Hashable)
Setting = TypeVar("Setting", bound=tuple[Hashable, ...])


def long_in_matrix(
    cells: Iterable[Hashable], long: Collection[Hashable], rest: Collection[Hashable] = ()
) -> list[Any]:
    """`cells` as parameters, those in `long` behind the marker `matrix`, those in `rest` behind
    `exhaustive`; a tuple is several values.

    Raises:
        AssertionError: `long` or `rest` name what is no cell, or both name one.
    """
    cells = list(cells)
    marks = dict.fromkeys(long, pytest.mark.matrix) | dict.fromkeys(rest, pytest.mark.exhaustive)
    assert set(marks) <= set(cells), sorted(map(str, set(marks) - set(cells)))
    assert not set(long) & set(rest), sorted(map(str, set(long) & set(rest)))
    return [
        pytest.param(
            *(cell if isinstance(cell, tuple) else (cell,)),
            marks=(marks[cell],) if cell in marks else (),
        )
        for cell in cells
    ]


def diagonals(cells: Sequence[Cell], every: int, quick: Collection[Cell] = ()) -> list[Any]:
    """`cells` as parameters: `quick` unmarked, one of `every` others behind `matrix` with each
    value of each setting beside one of `every` values of the others, the rest behind `exhaustive`.
    Of cells that are one value each, one of `every`.
    """
    held = on_diagonals(cells, every) if isinstance(cells[0], tuple) else cells[::every]
    long = [cell for cell in held if cell not in quick]
    return long_in_matrix(cells, long, [c for c in cells if c not in held and c not in quick])


def on_diagonals(cells: Sequence[Setting], every: int) -> list[Setting]:
    """The cells whose values' places, added up, are a multiple of `every`: a sum that moves with
    each setting. And the first cell of each value that no such cell has."""
    places = [
        {value: at for at, value in enumerate(dict.fromkeys(column))}
        for column in zip(*cells, strict=True)
    ]
    chosen = [
        sum(place[v] for place, v in zip(places, cell, strict=True)) % every == 0 for cell in cells
    ]
    met = {
        place for cell, held in zip(cells, chosen, strict=True) if held for place in enumerate(cell)
    }
    for at, cell in enumerate(cells):
        if not {*enumerate(cell)} <= met:
            chosen[at] = True
            met |= {*enumerate(cell)}
    return [cell for cell, held in zip(cells, chosen, strict=True) if held]
