"""`--explain` of the lines of the screen: the figures are those of the line, and what they are said
to be made of comes to them."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest

from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.report import sections
from shardwright.orchestrator.report.explain_lines import _LINES, explain
from shardwright.orchestrator.report.explanations import EXPLANATIONS, help_text
from shardwright.orchestrator.report.plan_screen import screen_lines, whats_next
from shardwright.orchestrator.report.text import count_text, rate_text, seconds_text, usd_text
from tests.support.plans import report_of

TITLES = {"limited by": "limited", "no gain": "next", "warning": "warnings", "note": "warnings"}
TITLES |= {"gains <1 %": "next", "error": "warnings", "pipeline": "time", "streams": "collective"}
"""Titles of lines that are explained under another word."""
TOLD_IN_FULL = {"answered", "stored", "roles", "cores", "faults"}
"""Lines that have no more to say."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return report_of(tmp_path_factory.mktemp("lines"), mesh={"dp_shard": 4, "tp": 8})


def rows(report: dict[str, Any], line: str) -> dict[str, tuple[str, str]]:
    found = explain(JobConfig(), report, line)["rows"]
    return {row["name"]: (row["value"], row["how"]) for row in found}


def test_every_line_of_the_screen_has_an_explanation(report: dict[str, Any]) -> None:
    titles = {line.plain[:11].strip() for line in screen_lines(report, 80)[1:]} - {""}
    titles |= {"next", "no gain", "gains <1 %", "warning", "note", "error"}
    assert {TITLES.get(title, title) for title in titles} - TOLD_IN_FULL <= set(EXPLANATIONS)
    assert set(_LINES) <= set(EXPLANATIONS) and all(word in help_text() for word in _LINES)


@pytest.mark.parametrize(
    ("line", "section"),
    [("job", sections.job), ("rates", sections.rates), ("cost", sections.cost),
     ("goodput", sections.goodput), ("placed", sections.placement)],
)  # fmt: skip
def test_figures_are_those_of_the_line(report: dict[str, Any], line: str, section: Any) -> None:
    shown = " ".join(" ".join(text.plain for text in sections.laid(section(report), 80)).split())
    for name, (value, how) in rows(report, line).items():
        assert how, name
        if name != "order of axes":  # which the line has no room for
            assert value in shown, (name, value, shown)


def test_rates_come_to_what_they_are_made_of(report: dict[str, Any]) -> None:
    timing, found = report["timing"], rows(report, "rates")
    counted = re.match(r"([\d,]+) samples x ([\d,]+) tokens", found["tokens/s"][1])
    assert counted is not None
    samples, tokens = counted.groups()
    made = int(samples.replace(",", "")) * int(tokens.replace(",", "")) / timing["step_time_s"]
    assert found["tokens/s"][0] == f"{made:,.0f}"
    counts, per = timing["flops"], timing["step_time_s"] * timing["peak_flops_per_s"]
    for name, what in (("MFU", "model"), ("causal", "causal"), ("HFU", "executed")):
        assert found[name][0] == rate_text(counts[what] / per, digits=2)
        assert found[name][1].startswith(f"{count_text(counts[what])}FLOP ")
    assert found["peak"][1].startswith(f"{report['cores']} cores x ")


def test_cost_comes_to_what_it_is_made_of(report: dict[str, Any]) -> None:
    cost, batch, found = report["cost"], report["batch"], rows(report, "cost")
    count = batch["global_batch"] * batch["tokens_per_sample"]
    step = cost["usd_per_hour"] * report["timing"]["step_time_s"] / 3600
    assert found["per step"][0] == usd_text(step)
    assert found["per million tokens"][0] == usd_text(step / count * 1e6)
    assert f" {count:,} tokens of a step" in found["per million tokens"][1]
    assert found["per hour"][1].endswith("at $24.78, on demand, us-east-1, 2025-11-30")
    without = report | {"cost": dict.fromkeys(cost)}
    assert list(rows(without, "cost")) == ["cost"]


def test_the_goal_and_what_decides(report: dict[str, Any]) -> None:
    assert list(rows(report, "goal")) == ["none"]
    goal = {"tokens": 10**9, "deadline_s": 864e3, "budget_usd": None, "steps": 100, "goodput": 0.5}
    goal |= {"days": 12.5, "usd": 9.0, "slack_days": -2.5, "slack_usd": None, "needs": None}
    found = rows(report | {"goal": goal}, "goal")
    assert found["steps"][0] == "100" and found["steps"][1].endswith(" / 50.00 %")
    assert found["time"] == ("12.5 days", "limit 10 days, left -2.5 days")
    assert found["money"][1] == "limit -, left -, on demand"
    memory = report["memory"] | {"fits": False}
    assert "does not fit" in rows(report | {"memory": memory}, "verdict")


def test_the_batch_of_the_job(report: dict[str, Any]) -> None:
    found = rows(report, "job")
    micro, ways, count = map(int, re.findall(r"\d+", found["samples of a step"][1]))
    assert micro * ways * count == report["batch"]["global_batch"] == 4
    assert found["cores"][1].startswith("mesh dp_shard 4 x tp 8; 1 x trn1n.32xlarge of 32 cores")
    assert found["tokens of a sample"][1] == report["resolved"]["model.seq_len"]["why"]
    said = copy.deepcopy(report)
    del said["resolved"]["model.seq_len"]
    assert rows(said, "job")["tokens of a sample"][1] == "model.seq_len of the job"


def test_what_limits_is_the_largest_share(report: dict[str, Any]) -> None:
    found, named = rows(report, "limited"), report["bottleneck"]
    first = next(iter(found))
    assert first == named["kind"]
    assert found[first][0] == seconds_text(named["share"] * report["timing"]["step_time_s"])
    assert "the largest share" in found[first][1]
    assert sum("the largest share" in how for _, how in found.values()) == 1
    memory = report["memory"] | {"fits": False}
    full = report | {"memory": memory, "bottleneck": {"kind": "capacity"}}
    assert set(rows(full, "limited")) == set(memory["categories"])


def test_every_assumed_figure_and_every_finding(report: dict[str, Any]) -> None:
    found = explain(JobConfig(), report, "confidence")["rows"]
    names = [row["name"] for row in found]
    assert names[:2] == [report["timing"]["confidence"], "band"]
    assumed = [figure["name"] for figure in report["limits"]["assumed"]]
    assert names[2:] == [*assumed, *["cannot tell"] * len(report["limits"]["cannot_tell"])]
    one = {"code": "SW_A", "severity": "note", "message": "m [x]", "hint": "h", "loc": None}
    two = one | {"code": "SW_B", "loc": {"file": "a.py", "line": 3, "scope": ""}, "hint": ""}
    told = explain(JobConfig(), report | {"findings": [one, two]}, "warnings")["rows"]
    assert [(row["value"], row["how"]) for row in told] == [
        ("SW_A", "m [x]. h"),
        ("SW_B", "m [x] (a.py:3)"),
    ]
    assert list(rows(report | {"findings": []}, "warnings")) == ["none"]


@pytest.mark.parametrize(("slow", "is_set"), [(1.6, True), (1.5, False), (1.7, False)])
def test_a_slow_end_that_was_set_says_so(report: dict[str, Any], slow: float, is_set: bool) -> None:
    best = {"times": 1.6, "mfu": 0.25, "model": "m", "cores": 1024, "release": "2.18.0", "id": "T9"}
    timing = report["timing"] | {"published": best}
    timing["band_s"] = [timing["step_time_s"], timing["step_time_s"] * slow]
    _, how = rows(report | {"timing": timing}, "confidence")["band"]
    assert how == "the step under all profiles of the machine's rates" + is_set * (
        "; its slow end is set to the step at the best published MFU, 25.0 % (m on 1,024 cores, SDK"
        " 2.18.0, T9)"
    )


def test_changes_that_were_tried(report: dict[str, Any]) -> None:
    row = {"change": "strategy.remat=none", "status": "refused", "helps": False}
    row |= {"code": "SW_X", "message": "no"}
    tried = report | {"whatif": {"tried": [row], "left": ["cluster.instances=2"]}}
    assert sections.laid(whats_next(tried), 80)[0].plain == "no gain    remat=none: SW_X, no"
    found = rows(tried, "next")
    assert found["strategy.remat=none"] == ("no gain", "SW_X, no")
    assert found["cluster.instances=2"][0] == "not tried"
    assert report["bottleneck"]["kind"] in found["why these"][1]
    row |= {"status": "fits", "peak_bytes": 2**30, "step_time_s": 1.0, "same_batch": True}
    row |= {"time_change": -0.004, "cost_change": None}
    assert sections.laid(whats_next(tried), 80)[0].plain == (
        "gains <1 % remat=none: fits, 1.000 s per step (-0.4 %)"
    )
    assert rows(tried, "next")["strategy.remat=none"][0] == "gains <1 %"
    row |= {"time_change": -0.0004, "cost_change": 0.0004, "usd_per_1e6_tokens": 1e-3}
    assert sections.laid(whats_next(tried), 80)[0].plain == (
        "no gain    remat=none: fits, 1.000 s per step (no change), $0.00100/Mtoken (no"
    )
    assert list(rows(report, "next")) == ["nothing"]


def test_options_of_the_compiler_that_are_not_the_usual(report: dict[str, Any]) -> None:
    assert {how for _, how in rows(report, "compiler").values()} == {"the default"}
    other = copy.deepcopy(report)
    other["job"]["compiler"]["optlevel"] = 1
    assert rows(other, "compiler")["optlevel"] == ("1", "not 2")


def test_goodput_that_the_job_says_itself(report: dict[str, Any]) -> None:
    own = copy.deepcopy(report)
    own["job"]["goodput"] |= {"checkpoint_s": 3.0, "checkpoint_interval_s": 60.0}
    found = rows(own, "goodput")
    assert found["saving takes"][1] == "goodput.checkpoint_s of the job"
    assert "goodput.checkpoint_interval_s is 60.000 s" in found["saved every"][1]
    own["job"]["goodput"] |= {"checkpoint_interval_s": 0.0, "checkpoint_interval_steps": 7}
    assert "goodput.checkpoint_interval_steps of the job" in rows(own, "goodput")["saved every"][1]


def test_sections_are_plain_data(report: dict[str, Any]) -> None:
    for line in _LINES:
        section = explain(JobConfig(), report, line)
        assert json.loads(json.dumps(section)) == section and section["rows"]
