"""Orders of flags: that every job of the list can be laid out, what counts as an inversion, the
page, and one order that is planned, of the small llama."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.flag_orders import (
    DTYPES,
    LENGTHS,
    MEMORY,
    ORDERS,
    PAGE,
    SAMPLES,
    TIME,
    Cell,
    Order,
    asked_of,
    cells,
    compared,
    page,
    planned,
)
from shardwright.orchestrator.config.config import load, words_of
from shardwright.orchestrator.config.layout import layout_of
from shardwright.orchestrator.report.tried import FITS, REFUSED
from shardwright.orchestrator.whatif.rows import Row
from tests.support.small_job import SIZES

UNORDERED = {
    "compiler.model_type": {"unet-inference"},  # of no model here
    "strategy.reduce_dtype": {"float32"},  # more exact, not faster
    "strategy.reduce_gradients": {"auto", "after"},  # as scripts do by calls of their own
    "strategy.remat": {"auto", "offload"},  # the link decides how fast that is
    "strategy.zero": {"auto"},
}
"""Values that no order is about."""
CELL = Cell("a", "float32", 0, "8 tokens", {"model.seq_len": "8"})
REMAT = Order(
    key="strategy.remat",
    purpose="memory for time",
    fastest=("none", "full"),
    smallest=("full", "none"),
)


def row(value: str, metrics: Mapping[str, float]) -> Row:
    status, code = (FITS, "") if metrics else (REFUSED, "SW_TEST")
    return Row(value, REMAT.settings(CELL, value), status, code, metrics=metrics)


def rows(**figures: tuple[float, float]) -> dict[frozenset[tuple[str, str]], Row]:
    """Seconds and GiB by value; without, the value is refused."""
    found = {v: dict(zip((TIME, MEMORY), f, strict=bool(f))) for v, f in figures.items()}
    return {
        frozenset(REMAT.settings(CELL, value).items()): row(value, metrics)
        for value, metrics in found.items()
    }


def test_every_order_is_looked_at_in_every_model_type_and_size_that_it_fits() -> None:
    for order, own in asked_of(ORDERS, cells()):
        assert {cell.model for cell in own} == set(order.models or (*LENGTHS, *SAMPLES))
        assert {cell.dtype for cell in own} == ({order.dtype} if order.dtype else set(DTYPES))
        assert {cell.rank for cell in own} == {0, 1, 2}


def test_every_job_of_the_list_can_be_laid_out() -> None:
    """`load` refuses values that a key has not, `layout_of` a mesh or a batch that does not fill
    the cluster."""
    for order, own in asked_of(ORDERS, cells(), 1):
        for cell in own:
            for value in order.values:
                changed = order.settings(cell, value).items()
                layout_of(load(None, [f"{key}={word}" for key, word in changed]))


@pytest.mark.parametrize("key", sorted({order.key for order in ORDERS}))
def test_a_value_has_its_place_or_none(key: str) -> None:
    named = {value for order in ORDERS if order.key == key for value in order.values}
    assert set(words_of(key)) - named == UNORDERED.get(key, set())


def test_an_inversion_is_told_with_both_figures() -> None:
    found = compared([(REMAT, [CELL])], rows(none=(1.02, 3.0), full=(1.0, 2.0)))
    assert [(one.metric, one.better, one.holds) for one in found] == [
        (TIME, "none", False),
        (MEMORY, "full", True),
    ]
    assert found[0].text == (
        "a float32, 8 tokens: `strategy.remat`: none 1,020.000 ms, full 1,000.000 ms (+2.00%)"
    )


def test_a_thousandth_is_no_inversion() -> None:
    found = compared([(REMAT, [CELL])], rows(none=(1.001, 2.0), full=(1.0, 2.0)))
    assert all(one.holds for one in found)


def test_what_is_refused_is_shown_and_not_compared() -> None:
    asked = [(REMAT, [CELL])]
    found = rows(none=(), full=(1.0, 2.0))
    assert compared(asked, found) == []
    assert "| a | float32 | 8 tokens | SW_TEST | 1,000.000 | SW_TEST | 2.000 |" in page(
        asked, found
    )


def test_the_page_begins_with_what_is_the_wrong_way_round() -> None:
    text = page([(REMAT, [CELL])], rows(none=(1.02, 3.0), full=(1.0, 2.0)))
    assert "\n## 1 of 2 comparisons are the wrong way round\n\n- a float32, 8 tokens: " in text
    assert (
        "| `strategy.remat` | memory for time | time: none <= full; memory: full <= none | 1 of 2 |"
        " +2.00% |" in text
    )


def test_the_page_in_the_docs_has_every_order_and_every_cell() -> None:
    """What it says of them is written by the benchmark alone."""
    text = PAGE.read_text()
    for order, own in asked_of(ORDERS, cells()):
        _, heading, rest = text.partition(f"\n## {order.title}\n\n{order.purpose.capitalize()}.\n")
        table = rest.partition("\n## ")[0]
        assert heading, order.title
        assert all(f"| {c.model} | {c.dtype} | {c.size} |" in table for c in own), order.title


def test_the_small_llama_is_planned_once_and_keeps_its_orders(tmp_path: Path) -> None:
    """A second call answers from the journal."""
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    settings = {
        "model.config": str(tmp_path / "config.json"),
        "model.seq_len": "8",
        "mesh.dp_shard": "2",
        "cluster.target": "trn1.2xlarge",
    }
    order = Order(
        key="strategy.zero", purpose="", smallest=("2", "0"), beside={"strategy.name": "generic"}
    )
    asked = [(order, [Cell("small", "float32", 0, "8 tokens", settings)])]
    host = load(None, [f"cache.dir={tmp_path / 'cache'}", "run.executor=inline"])
    found = planned(asked, host, tmp_path)
    assert [one.holds for one in compared(asked, found)] == [True]
    lines = (tmp_path / "rows.jsonl").read_bytes()
    again = planned(asked, host, tmp_path)
    assert compared(asked, again) == compared(asked, found)
    assert (tmp_path / "rows.jsonl").read_bytes() == lines
