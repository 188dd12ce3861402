"""Groups of operators on cores by hand, words of `--fast-math` by hand, and files of several pieces
that make no sense."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.compiler.diagnostics import LoadError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.neff.reader import Container
from shardwright.compiler.neff.serial import read_serial, serial_bytes
from shardwright.compiler.neff.writer import pack
from shardwright.compiler.serial.groups import SLACK, group_ends
from shardwright.compiler.surface.neuron_cc import cast_options


def ends(costs: list[float], groups: int, crossing: list[float] | None = None) -> list[int]:
    return group_ends(costs, crossing or [0.0] * (len(costs) + 1), groups)


def test_groups_are_as_even_as_neighbours_allow() -> None:
    assert ends([1, 1, 1, 1], 2) == [2, 4]
    assert ends([4, 1, 1, 1, 1], 2) == [1, 5]
    assert ends([1, 1, 1, 1, 4], 2) == [4, 5]
    assert ends([3, 3, 3], 3) == [1, 2, 3]
    assert ends([0, 0, 0, 9], 4) == [1, 2, 3, 4]  # every core has an operator


def test_a_cheaper_place_to_cut_is_taken_within_the_slack() -> None:
    costs = [1.0] * 40
    crossing = [100.0] * 41
    crossing[21] = 1.0  # 21 and 19 operators: within a tenth of 20 each
    assert ends(costs, 2, crossing) == [21, 40]
    crossing[21], crossing[30] = 100.0, 1.0
    assert ends(costs, 2, crossing) != [30, 40]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=12), st.integers(1, 12))
def test_no_other_groups_are_faster_by_more_than_the_slack(costs: list[float], count: int) -> None:
    groups = min(count, len(costs))
    found = ends(costs, groups)
    assert len(found) == groups and found[-1] == len(costs)
    assert all(a < b for a, b in pairwise([0, *found]))
    slowest = max(sum(costs[a:b]) for a, b in pairwise([0, *found]))
    best = [[float("inf")] * (len(costs) + 1) for _ in range(groups + 1)]
    best[0][0] = 0.0
    for group in range(1, groups + 1):
        for end in range(1, len(costs) + 1):
            best[group][end] = min(
                max(best[group - 1][start], sum(costs[start:end])) for start in range(end)
            )
    least = min(best[group][len(costs)] for group in range(1, groups + 1))
    assert slowest <= (1 + SLACK) * least * (1 + 1e-9) + 1e-6


@pytest.mark.parametrize(
    ("fast_math", "fp32_cast", "wanted"),
    [
        ("all", "", ("all", "bf16", "bf16")),
        ("none", "", ("matmult", "bf16", "exact")),
        ("fp32-cast-matmult", "", ("matmult", "bf16", "fp16")),
        ("fp32-cast-matmult no-fast-relayout", "", ("matmult", "bf16", "exact")),
        ("none,fast-relayout", "", ("matmult", "bf16", "bf16")),
        ("none fp32-cast-all-fp16", "", ("all", "fp16", "exact")),
        ("ALL No-Fast-Relayout", "", ("all", "bf16", "exact")),
        ("none", "all", ("all", "bf16", "exact")),
        ("all", "matmult-fp16", ("matmult", "fp16", "fp16")),
        ("fp32-cast-all", "matmult-bf16", ("matmult", "bf16", "bf16")),
    ],
)
def test_words_of_fast_math(fast_math: str, fp32_cast: str, wanted: tuple[str, ...]) -> None:
    found = cast_options(fast_math, fp32_cast)
    assert (found["auto_cast"], found["auto_cast_type"], found["relayout"]) == wanted


def doubled() -> Any:
    """A graph that doubles its input."""
    made = Builder()
    x = made.input((2,), DType.F32)
    return made.finish(made.op("add", x, x))


META: dict[str, Any] = {
    "name": "m",
    "target": "inf1.xlarge",
    "cores": 1,
    "inputs": [["x", "f32", [2]]],
    "outputs": [["out0", "v0"]],
    "pieces": [{"name": "cpu00", "core": -1, "inputs": ["x"], "outputs": ["v0"]}],
}


def changed(**values: Any) -> dict[str, Any]:
    return META | values


def piece(**values: Any) -> list[dict[str, Any]]:
    return [META["pieces"][0] | values]


@pytest.mark.parametrize(
    ("meta", "text"),
    [
        (changed(outputs=[["out0", "v1"]]), "v1, which nothing has made"),
        (changed(pieces=piece(inputs=["y"])), "y, which nothing has made"),
        (changed(inputs=[["x", "f32", [3]]]), "piece cpu00 reads"),
        (changed(inputs=[["x", "f7", [2]]]), "f7"),
        (changed(pieces=piece(core=4)), "section program/cpu00 is missing"),
        (changed(pieces=piece(core=-2)), "a core, or -1 for the host"),
        (changed(pieces=piece(outputs=["v0", "v1"])), "pipeline: "),
        (changed(cores=0), "a number of cores"),
        ({"name": "m"}, "requires target"),
    ],
)
def test_files_that_make_no_sense_are_refused(meta: dict[str, Any], text: str) -> None:
    good = Container(serial_bytes(META, {}, {"cpu00": doubled()}))
    assert read_serial(good).types["v0"].shape == (2,)
    sections = {"graph/cpu00": np.frombuffer(good.read("graph/cpu00"), np.uint8).tobytes()}
    bad = Container(pack("pipeline", meta, sections))
    with pytest.raises(LoadError, match=text):
        read_serial(bad)
