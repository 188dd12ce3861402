"""The screen of `plan`: its size on any terminal, bars that sum, and what is on it."""

from __future__ import annotations

import copy
import io
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shardwright.orchestrator import cli
from shardwright.orchestrator.report import bars
from shardwright.orchestrator.report.bottleneck import kind_shares
from shardwright.orchestrator.report.page.page import report_page
from shardwright.orchestrator.report.plan_screen import LINES, plan_screen, screen_lines
from shardwright.orchestrator.report.shape import check_report
from shardwright.orchestrator.report.text import count_text, share_text
from shardwright.orchestrator.report.tried import effect_text
from shardwright.orchestrator.whatif import advised
from tests.support.cells import long_in_matrix
from tests.support.plans import report_of

JOBS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "hsdp, two streams": {
        "mesh": {"dp_replicate": 4, "dp_shard": 4, "tp": 2},
        "strategy": {"cc_streams": 2},
    },
    "pipeline": {
        "layers": 4,
        "mesh": {"pp": 4, "dp_shard": 4, "tp": 2},
        "strategy": {"name": "llm-training", "global_batch": 8},
    },
    "slow core": {"faults": {"slow_cores": "5:1.3"}},
    "logical cores": {"cluster": {"target": "trn2.48xlarge"}},
}


@pytest.fixture(scope="module", params=long_in_matrix(JOBS, ("logical cores",)))
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    return report_of(tmp_path_factory.mktemp("screen"), **JOBS[request.param])


def texts(report: dict[str, Any], width: int = 80, room: int = 0) -> list[str]:
    return [line.plain for line in screen_lines(report, width, room)]


def cells(line: str) -> int:
    return len(re.sub(f"[^{''.join(bars.FILLS)}]", "", line))


def test_a_report_is_what_reports_are_held_to(report: dict[str, Any]) -> None:
    check_report(json.loads(json.dumps(report)))


def test_one_screen_that_answers(report: dict[str, Any]) -> None:
    lines = texts(report, room=LINES)
    assert len(lines) <= LINES and max(map(len, lines)) <= 80
    titles = [line[: line.find(" ")] for line in lines]
    for title in ("job", "memory", "time", "rates", "cost", "limited", "confidence"):
        assert title in titles, title
    shown = " ".join(" ".join(lines).split())
    priced = report["cost"]["usd_per_hour"] is not None
    dollars = "per million tokens" if priced else "no on-demand price is published"
    assert "fits: " in shown and "MFU" in shown and dollars in shown
    assert report["timing"]["confidence"] in shown and "bf16 peak" in shown


def test_bars_sum(report: dict[str, Any]) -> None:
    """The breakdown fills its bar, and its percents are those of its parts; the memory bar is the
    part of the limit that is used."""
    lines = texts(report)
    at = next(n for n, line in enumerate(lines) if line.startswith("time"))
    assert cells(lines[at + 1]) == 80 - 11
    legend: list[str] = []
    for line in lines[at + 2 :]:
        if not line.startswith(" "):
            break
        legend += re.findall(r"([\d.]+) %", line)
    total, parts = report["timing"]["step_time_ps"], report["timing"]["breakdown_ps"].values()
    shares = [f"{100 * ps / total:.1f}" for ps in parts if ps >= 5e-4 * total]
    assert sorted(legend) == sorted(shares) and sum(parts) == total
    at = next(n for n, line in enumerate(lines) if line.startswith("memory"))
    used = report["memory"]["peak_bytes"] / report["memory"]["limit_bytes"]
    assert abs(cells(lines[at + 1]) - used * 69) <= 1
    assert lines[at + 1].count(bars.EMPTY) == 69 - cells(lines[at + 1])


def test_the_bottleneck_is_the_largest_share(report: dict[str, Any]) -> None:
    found = report["bottleneck"]
    shares = kind_shares(report)
    assert found["share"] == shares[found["kind"]] == max(shares.values())
    assert math.isclose(sum(shares.values()), 1.0)
    assert found["text"][:20] in " ".join(texts(report))


def test_hfu_is_never_below_mfu(report: dict[str, Any]) -> None:
    timing = report["timing"]
    assert 0 < timing["mfu_causal"] < timing["mfu"] <= timing["hfu"]
    counts = timing["flops"]
    per_flop = timing["step_time_s"] * timing["peak_flops_per_s"]
    assert math.isclose(timing["hfu"] * per_flop, counts["executed"])
    assert counts["causal"] < counts["model"] <= counts["captured"]
    assert timing["attention"] == "causal"


@pytest.mark.parametrize("width", [60, 79, 80, 100, 200])
def test_any_width(report: dict[str, Any], width: int) -> None:
    assert max(map(len, texts(report, width))) <= width


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return report_of(tmp_path_factory.mktemp("plain"))


def test_nothing_breaks_the_screen(plain: dict[str, Any]) -> None:
    """Names with markup, long texts, many axes, many findings, long changes."""
    report = copy.deepcopy(plain)
    report["graph"]["name"] = "[red]my/[model]" * 12
    report["mesh"] = {f"axis_with_a_long_name_{n}": 1024 for n in range(6)}
    report["graph"]["params"] = 10**15
    finding = {
        "code": "SW_X",
        "severity": "warning",
        "message": "[/] word " * 90,
        "hint": "do " * 90,
    }
    report["findings"] = [finding] * 7 + [finding | {"severity": "error", "code": "SW_FIRST"}]
    row = {"change": "strategy.x=1 " * 30, "status": "refused", "helps": False, "code": "SW_Y"}
    row["message"] = "no " * 99
    report["whatif"] = {"tried": [row, row], "left": ["mesh.tp=2 " * 30] * 2}
    report["timing"]["confidence_why"] = "because " * 60
    lines = texts(report, room=LINES)
    assert max(map(len, lines)) <= 80
    assert "SW_FIRST" not in "\n".join(lines) and "SW_FIRST" in "\n".join(texts(report))
    assert "SW_Y" in "\n".join(lines)


def test_what_does_not_fit_says_what_is_over(plain: dict[str, Any]) -> None:
    report = copy.deepcopy(plain)
    memory = report["memory"]
    memory |= {"fits": False, "limit_bytes": memory["peak_bytes"] // 4}
    lines = texts(report)
    at = next(n for n, line in enumerate(lines) if line.startswith("memory"))
    assert lines[at].startswith("memory     does not fit, ") and " over: " in lines[at]
    drawn = lines[at + 1][11:]
    assert len(drawn) == 69 and abs(drawn.index(bars.LIMIT) - 17) <= 1


def test_piped_output_has_no_colours_and_the_width_of_a_page(plain, capsys) -> None:
    plan_screen(plain)
    text = capsys.readouterr().out
    assert "\x1b" not in text and text.splitlines() == texts(plain)


@pytest.mark.parametrize("height", [10, 24, 34, 50])
def test_a_terminal_shows_what_it_has_lines_for(
    plain: dict[str, Any], height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one line for the prompt, but never less than 24."""
    report = copy.deepcopy(plain)
    finding = {"code": "SW_X", "severity": "warning", "message": "word " * 40, "hint": ""}
    report["findings"] = [finding | {"message": f"{n} " + "word " * 40} for n in range(9)]
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=height, color_system=None)
    monkeypatch.setattr("shardwright.orchestrator.terminal.terminal.console", lambda **_: console)
    plan_screen(report)
    shown = len(out.getvalue().splitlines())
    assert len(texts(report)) > 50 and shown <= max(LINES, height - 1)
    assert shown > max(LINES, height - 1) - 5, "as much as there is room for"


def test_a_report_of_before_there_was_anything_to_compare_with(plain: dict[str, Any]) -> None:
    older = copy.deepcopy(plain)
    for key in ("mfu_causal", "attention", "flops", "published"):
        del older["timing"][key]
    del older["graph"]["product_types"]
    check_report(older)
    shown = "\n".join(texts(older))
    assert "MFU" in shown and "published" not in shown.replace("published run", "")
    assert "Best published" not in report_page(older)


ROW = {
    "change": "strategy.remat=none",
    "status": "fits",
    "helps": True,
    "peak_bytes": 2**30,
    "global_batch": 64,
    "same_batch": True,
    "step_time_s": 1.42,
    "time_change": -0.12,
    "usd_per_1e6_tokens": 2.06,
    "cost_change": -0.12,
}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "fits, 1.420 s per step (-12 %), $2.06/Mtoken (-12 %)"),
        ({"cost_change": None}, "fits, 1.420 s per step (-12 %)"),
        (
            {"cost_change": None, "unpriced": True},
            "fits, 1.420 s per step (-12 %), no price of this kind",
        ),
        (
            {"same_batch": False, "time_change": -0.5},
            "fits, 1.420 s per step of 64 samples (+100 % tokens/s), $2.06/Mtoken (-12 %)",
        ),
        ({"status": "does not fit"}, "does not fit, 1.00 GiB"),
        ({"status": "refused", "code": "SW_A", "message": "b"}, "SW_A, b"),
    ],
)
def test_effects_in_words(change: dict[str, Any], text: str) -> None:
    assert effect_text(ROW | change, "token") == text
    assert effect_text(ROW | change, "sample") == text.replace("token", "sample")


@given(st.lists(st.floats(0, 1e18), min_size=1, max_size=9), st.integers(0, 200))
def test_parts_are_apportioned_exactly(parts: list[float], whole: int) -> None:
    found = bars.apportioned(parts, whole)
    total = sum(parts)
    assert sum(found) == (whole if total else 0) and min(found) >= 0
    assert not total or all(
        abs(n - part * whole / total) < 1 + 1e-6 for n, part in zip(found, parts, strict=True)
    )


def test_an_answer_takes_as_long_as_one_waits_for_it(
    plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the question on: what no stage counts too. A report of Python's counts its stages."""
    seconds = {"capture": 0.5, "compile": 3.0, "tries": 4.25, "link": 0.1, "time": 1.0}
    report = copy.deepcopy(plain)
    report["provenance"]["stages_s"] = seconds
    assert texts(report)[-1] == "answered   in 8.8 s: tries 4.2, compile 3.0, time 1.0, capture 0.5"
    clock = iter((100.0, 112.5))
    monkeypatch.setattr(cli, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(advised, "with_tries", lambda *_: report)
    assert cli.main(["plan", "--model", "llama2-7b"]) == 0
    assert "answered   in 12.5 s: tries 4.2, compile 3.0" in capsys.readouterr().out
    check_report(json.loads(json.dumps(report)))


def test_counts_have_three_digits_and_a_prefix() -> None:
    texts = {999: "999 ", 999.6: "1 k", 999_400: "999 k", 999_600: "1 M", 12_340: "12.3 k"}
    assert {number: count_text(number) for number in texts} == texts


def test_a_share_that_is_there_is_never_nothing() -> None:
    texts = {0: "0 %", 1e-6: "<0.1 %", 0.0042: "0.4 %", 0.0994: "9.9 %", 0.0996: "10 %", 1: "100 %"}
    assert {share: share_text(share) for share in texts} == texts
    assert [share_text(part, 4, digits=1) for part in (0, 1)] == ["0.0 %", "25.0 %"]
    assert share_text(0, 0) == "0 %"


def test_the_report_is_json(plain: dict[str, Any], tmp_path: Path) -> None:
    assert json.loads(json.dumps(plain)) == plain


@pytest.mark.parametrize("key", ["model.layers", "models.seq_len", "base.x", "model"])
def test_a_report_that_resolves_what_is_no_key_is_refused(report: dict[str, Any], key: str) -> None:
    row = {"value": 1, "why": "of the mesh"}
    check_report({k: v for k, v in report.items() if k != "resolved"})  # of an older release
    with pytest.raises(ValueError, match="resolved requires keys of the job"):
        check_report(report | {"resolved": {key: row}})
    with pytest.raises(ValueError, match="resolved"):
        check_report(report | {"resolved": {"model.seq_len": row | {"value": None}}})
