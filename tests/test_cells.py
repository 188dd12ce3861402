"""Cells of matrices are all somewhere, and what is run of them by CI has every value."""

from __future__ import annotations

import itertools

import pytest

from tests.support.cells import diagonals, long_in_matrix, on_diagonals

CELLS = tuple(itertools.product("abcde", range(4), (True, False)))


def test_every_value_of_every_setting_is_on_a_diagonal() -> None:
    for every in (2, 3, 5):
        held = on_diagonals(CELLS, every)
        assert len(held) <= len(CELLS) / every + 2
        for column in range(3):
            assert {c[column] for c in held} == {c[column] for c in CELLS}


def test_a_value_that_no_diagonal_meets_has_its_first_cell() -> None:
    assert on_diagonals([("a", 0), ("a", 1), ("b", 0)], 4) == [("a", 0), ("a", 1), ("b", 0)]


def test_each_cell_is_in_one_place() -> None:
    given = diagonals(CELLS, 3, quick=CELLS[:1])
    assert [param.values for param in given] == list(CELLS)
    names = [[mark.name for mark in param.marks] for param in given]
    assert names[0] == []
    assert all(name in (["matrix"], ["exhaustive"]) for name in names[1:])


def test_cells_of_one_setting_are_counted_off() -> None:
    names = [[mark.name for mark in param.marks] for param in diagonals("abcdef", 3, quick="b")]
    assert names == [["matrix"], [], ["exhaustive"], ["matrix"], ["exhaustive"], ["exhaustive"]]


def test_what_is_no_cell_is_refused() -> None:
    with pytest.raises(AssertionError):
        long_in_matrix([1, 2], [3])
    with pytest.raises(AssertionError):
        long_in_matrix([1, 2], [1], [1])
