"""Plots on the terminal: ticks are round and even, and points lie in the cells of their
values."""

from __future__ import annotations

import itertools
import math
import random
import re

import pytest

from shardwright.orchestrator.report.screen import loss_plot
from shardwright.orchestrator.terminal.text_plots import (
    Axis,
    decade_axis,
    dots,
    even_axis,
    lines,
    value_axis,
)

ROUND = re.compile(r"(?:[125]|25)0*")


def rows_of(drawn: str) -> list[tuple[str, str]]:
    """Label and cells of every row."""
    found = (re.fullmatch(r" *(\S*?)[│┤](.*)│", line) for line in drawn.splitlines())
    return [(match[1], match[2]) for match in found if match]


def ticks_along(drawn: str) -> list[int]:
    """Columns of the ticks, from the frame on."""
    (line,) = (line for line in drawn.splitlines() if "└" in line)
    start = line.index("└") + 1
    return [n - start for n, cell in enumerate(line) if cell == "┬"]


@pytest.mark.parametrize("seed", range(40))
def test_ticks_are_round_even_and_around_all_values(seed: int) -> None:
    dice = random.Random(seed)
    scale = 10.0 ** dice.randint(-6, 9)
    values = [dice.uniform(-1, 1) * scale for _ in range(dice.randint(1, 9))]
    values = [abs(value) for value in values] if seed % 2 else values
    axis = even_axis(values, (2, 4, 8))
    steps = [b - a for a, b in itertools.pairwise(axis.ticks)]
    assert axis.steps in (2, 4, 8) and axis.ticks[0] <= min(values) <= max(values) <= axis.ticks[-1]
    assert max(steps) - min(steps) <= 1e-9 * max(map(abs, axis.ticks))
    mantissa = f"{steps[0]:.6e}".partition("e")[0].replace(".", "")
    assert ROUND.fullmatch(mantissa), steps
    assert all(math.isclose(tick / steps[0], round(tick / steps[0]), abs_tol=1e-6)
               for tick in axis.ticks)  # fmt: skip


@pytest.mark.parametrize(
    ("values", "counts", "labels"),
    [
        ([5.5795, 5.4782], (2, 4), ["5.45", "5.50", "5.55", "5.60", "5.65"]),
        ([1, 20], (2, 3, 4), ["0", "5", "10", "15", "20"]),
        ([0.752, 0.897], (2, 3, 4, 5, 6), ["0.750", "0.775", "0.800", "0.825", "0.850", "0.875",
                                           "0.900"]),
        ([0.0, 0.0], (2,), ["0", "1", "2"]),
        ([0.1, 0.4], (3,), ["0.1", "0.2", "0.3", "0.4"]),
        ([60_000, 155_000], (5,), ["60,000", "80,000", "100,000", "120,000", "140,000", "160,000"]),
        ([2.5], (2,), ["2.4", "2.6", "2.8"]),
        ([1e-9, 3e-9], (2,), ["1e-09", "2e-09", "3e-09"]),
    ],
)  # fmt: skip
def test_labels_have_as_many_decimals_as_all_need(
    values: list[float], counts: tuple[int, ...], labels: list[str]
) -> None:
    assert even_axis(values, counts).labels == labels


def test_a_few_even_values_are_the_ticks_themselves() -> None:
    assert value_axis([1, 2, 3, 2], is_log=False) == Axis([1, 2, 3])
    assert value_axis([1, 2, 4, 8], is_log=True) == Axis([1, 2, 4, 8], is_log=True)
    assert value_axis([1, 2, 4], is_log=False) is None and value_axis([1.5, 2.5], False) is None
    assert value_axis([1, 2, 6], is_log=True) is None and value_axis([3], False) is None
    assert value_axis(range(1, 11), is_log=False) is None


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([2, 4396], [1, 10, 100, 1000, 10000]),
        ([1, 10], [1, 10, 100]),
        ([3, 20_000], [1, 1000, 10**6]),
        ([5], [1, 10, 100]),
    ],
)
def test_logarithmic_ticks_are_powers_of_ten(values: list[float], ticks: list[float]) -> None:
    assert decade_axis(values, (2, 4, 8)).ticks == pytest.approx(ticks)


def test_points_lie_in_the_cells_of_their_values() -> None:
    xs, ys = [154_223, 124_810, 87_189, 73_065], [13.5, 3.18, 2.53, 1.2]
    drawn = str(dots({"fits": (xs, ys), "best": ([154_223], [13.5])}, "tokens/s", "GiB"))
    rows = rows_of(drawn)
    assert [label for label, _ in rows] == ["16", "14", "12", "10", "8", "6", "4", "2", "0"]
    columns = len(rows[0][1])
    along = ticks_along(drawn)
    assert along == [n * (columns - 1) // 5 for n in range(6)]
    found = [(x, 8 - row) for row, (_, cells) in enumerate(rows) for x, cell in enumerate(cells)
             if cell in "•x"]  # fmt: skip
    wanted = [(round((x - 60_000) / 100_000 * (columns - 1)), round(y / 2))
              for x, y in zip(xs, ys, strict=True)]  # fmt: skip
    assert sorted(found) == sorted(wanted)


def test_rows_and_columns_of_ticks_are_even_on_logarithmic_axes() -> None:
    sizes = [8 * 4**n for n in range(14)]
    series = {"low": (sizes, sizes), "time": (sizes, [2 * size for size in sizes])}
    drawn = str(lines(series, "bytes", "us", 100, 21, log="xy"))
    labelled = [n for n, (label, _) in enumerate(rows_of(drawn)) if label]
    assert len({b - a for a, b in itertools.pairwise(labelled)}) == 1
    assert len({b - a for a, b in itertools.pairwise(ticks_along(drawn))}) == 1
    instances = [1, 2, 4, 8, 16]
    drawn = str(lines({"a": (instances, instances)}, "instances", "USD", log="x"))
    assert len(ticks_along(drawn)) == 5
    assert len({b - a for a, b in itertools.pairwise(ticks_along(drawn))}) == 1


def test_the_curve_of_losses() -> None:
    drawn = str(loss_plot([5.58, 5.53, 5.48]))
    assert [label for label, _ in rows_of(drawn)] == ["5.65", "5.60", "5.55", "5.50", "5.45"]
    assert re.search(r"^ +1 +2 +3 *$", drawn, re.MULTILINE)
    assert max(map(len, drawn.splitlines())) <= 76


def test_what_is_no_number_is_not_drawn() -> None:
    drawn = str(loss_plot([5.5, math.nan, 5.4, math.inf]))
    assert rows_of(drawn)[0][0] == rows_of(str(lines({"": ([1, 3], [5.5, 5.4])}, "", "")))[0][0]
    assert str(loss_plot([math.nan, math.inf])) == "loss: no number to draw"
