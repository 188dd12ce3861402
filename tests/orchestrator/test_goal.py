"""The buyer's question against arithmetic that stands here: days, dollars, what is left or missing,
what would have to change, and which of several points is best."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.machine.target import Fact, load_target
from shardwright.orchestrator.changes.change import changed
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.config import config
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.config.layout import asked_batch, layout_of
from shardwright.orchestrator.config.purchase import GoalConfig, PriceConfig
from shardwright.orchestrator.report import compare, sections
from shardwright.orchestrator.report.cost import (
    basis_text,
    cost_section,
    list_text,
    missing_text,
    price_of,
)
from shardwright.orchestrator.report.goal import (
    answer,
    doubts,
    goal_rows,
    goal_texts,
    limits_text,
    needs_text,
    rests_on,
    shortfall,
)
from shardwright.orchestrator.report.page.page import report_page
from shardwright.orchestrator.report.shape import check_report
from shardwright.orchestrator.report.text import large_usd_text, long_text
from shardwright.orchestrator.report.tried import FITS, REFUSED, TOO_LARGE
from shardwright.orchestrator.road import plan_cache
from shardwright.orchestrator.service import executor
from shardwright.orchestrator.whatif import buyer, scale
from shardwright.orchestrator.whatif.rows import Row
from shardwright.sharding.settings import StrategySettings
from tests.support.small_job import write_job

TRN1, TRN1N, TRN2 = "trn1.32xlarge", "trn1n.32xlarge", "trn2.48xlarge"


def close(number: float) -> Any:
    return pytest.approx(number, rel=1e-12)


def pace(**figures: Any) -> dict[str, Any]:
    """A step of 1,000 tokens in 2 s, of which half are lost, on 4 instances for $90 an hour."""
    own: dict[str, Any] = {"tokens_per_step": 1000, "step_s": 2.0, "goodput": 0.5, "instances": 4}
    return own | {"usd_per_hour": 90.0, "fits": True} | figures


def asked(deadline: float = 0.0, budget: float = 0.0, tokens: int = 1_000_000) -> GoalConfig:
    return GoalConfig(tokens=tokens, deadline=deadline, budget=budget)


# The answer


def test_days_and_dollars() -> None:
    """1,000 steps of 2 s at a goodput of a half are 4,000 s, a part of 4000 / 86400 of a day, and
    4000 / 3600 hours of $90 are $100."""
    found = answer(asked(), **pace())
    assert (found["steps"], found["days"], found["usd"]) == (
        1000,
        close(4000 / 86_400),
        close(100.0),
    )
    assert (found["deadline_s"], found["slack_days"], found["slack_usd"]) == (None, None, None)
    assert (found["met"], found["needs"]) == (None, None)


def test_a_part_of_a_step_is_a_step() -> None:
    assert answer(asked(tokens=1001), **pace())["steps"] == 2


def test_a_goal_that_is_met() -> None:
    """Of 5,000 s 1,000 are left, of $150 50."""
    found = answer(asked(5000.0, 150.0), **pace())
    assert (found["slack_days"], found["slack_usd"]) == (close(1000 / 86_400), close(50.0))
    assert (found["met"], found["needs"]) == (True, None)
    assert shortfall(found) == close(0.8)


def test_what_a_missed_deadline_needs() -> None:
    """4,000 s for 3,000: 4/3 of the speed; 4 x 4/3 instances are 5.33, so 6; 750 of 1,000 steps."""
    found = answer(asked(3000.0, 150.0), **pace())
    assert found["slack_days"] == close(-1000 / 86_400)
    assert found["met"] is False and found["needs"] is not None
    assert (found["needs"]["speedup"], found["needs"]["instances"]) == (close(4 / 3), 6)
    assert (found["needs"]["usd_per_instance_hour"], found["needs"]["tokens"]) == (None, 750_000)


def test_what_a_missed_budget_needs() -> None:
    """$100 for $80: 5/4 of the speed, or $22.50 x 4/5 an instance hour; 800 of 1,000 steps. More
    instances at the same efficiency cost the same."""
    found = answer(asked(5000.0, 80.0), **pace())
    assert found["met"] is False and found["needs"] is not None
    assert (found["needs"]["speedup"], found["needs"]["instances"]) == (close(1.25), None)
    assert (found["needs"]["usd_per_instance_hour"], found["needs"]["tokens"]) == (
        close(18.0),
        800_000,
    )


def test_what_a_goal_missed_in_both_needs() -> None:
    """4,000 s for 2,000 are the larger factor: twice the speed, 8 instances at $18 an hour."""
    needs = answer(asked(2000.0, 80.0), **pace())["needs"]
    assert needs is not None
    assert (needs["speedup"], needs["instances"]) == (close(2.0), 8)
    assert (needs["usd_per_instance_hour"], needs["tokens"]) == (close(18.0), 500_000)


def test_a_budget_is_not_judged_without_a_price() -> None:
    found = answer(asked(5000.0, 150.0), **pace(usd_per_hour=None))
    assert (found["usd"], found["slack_usd"], found["met"]) == (None, None, None)
    assert answer(asked(5000.0), **pace(usd_per_hour=None))["met"] is True
    assert answer(asked(3000.0, 150.0), **pace(usd_per_hour=None))["met"] is False


def test_what_does_not_fit_or_never_gets_on_meets_nothing() -> None:
    assert answer(asked(5000.0), **pace(fits=False))["met"] is False
    for goodput in (0.0, 1e-200):
        never = answer(asked(5000.0), **pace(goodput=goodput))
        assert (never["days"], never["usd"], never["met"], never["needs"]) == (
            None,
            None,
            False,
            None,
        )
    assert goal_rows(never)[0] == ("time", "-", "1.39 hours", "-")


POSITIVE = st.floats(1e-3, 1e6)


@settings(deadline=None)
@given(
    st.integers(1, 10**12),
    *(POSITIVE,) * 3,
    st.floats(0.01, 1.0),
    st.integers(1, 4096),
    st.integers(1, 10**7),
)
def test_days_times_the_price_of_a_day_are_the_dollars(
    tokens: int, deadline: float, budget: float, price: float, goodput: float, n: int, step: int
) -> None:
    """And signs say what the sentences say."""
    one: dict[str, Any] = dict(
        tokens_per_step=step,
        step_s=3.0,
        goodput=goodput,
        instances=n,
        usd_per_hour=price,
        fits=True,
    )
    found = answer(GoalConfig(tokens=tokens, deadline=deadline, budget=budget), **one)
    assert found["days"] and found["usd"] and found["slack_days"] is not None
    assert found["usd"] == close(found["days"] * 24 * price)
    assert found["slack_usd"] is not None
    assert found["met"] is (found["slack_days"] >= 0 and found["slack_usd"] >= 0)
    told, needs = goal_texts(found, "token", "on demand")
    assert told.startswith("met: " if found["met"] else "not met: ")
    assert ("before the deadline" in told) is (found["slack_days"] >= 0)
    assert ("below the budget" in told) is (found["slack_usd"] >= 0)
    assert bool(needs) is (not found["met"])
    if found["needs"]:
        faster = answer(
            GoalConfig(tokens=tokens, deadline=deadline, budget=budget),
            **one | {"step_s": 3.0 / found["needs"]["speedup"] * (1 - 1e-9)},
        )
        assert faster["met"]
        if found["needs"]["tokens"]:
            less = replace(
                GoalConfig(deadline=deadline, budget=budget), tokens=found["needs"]["tokens"]
            )
            assert shortfall(answer(less, **one)) <= 1 + 1e-9


# What is said


def told(goal: GoalConfig, **figures: Any) -> tuple[str, str]:
    return goal_texts(answer(goal, **pace(**figures)), "token", "on demand")


TOOK = "1 M tokens in 1.11 hours at a goodput of 50.0 % for $100 on demand"


@pytest.mark.parametrize(
    ("codes", "slow", "expected"),
    [
        ((), 1.0, ""),
        (("NCC_EXTP004",), 1.0, "neuronx-cc would refuse this step, NCC_EXTP004"),
        ((), 1.26, "at the slow end of the band it takes 1.4 hours"),
        (
            ("NCC_EXTP004",),
            2.0,
            "neuronx-cc would refuse this step, NCC_EXTP004; at the slow end of the band it takes"
            " 2.22 hours",
        ),
    ],
)
def test_what_speaks_against_a_goal_that_is_met(
    codes: tuple[str, ...], slow: float, expected: str
) -> None:
    """4,000 s of a deadline of 5,000: met up to 1.25 times the step's time."""
    found = answer(asked(5000.0), **pace())
    report = {
        "goal": found,
        "timing": {"step_time_s": 2.0, "band_s": [1.0, 2.0 * slow]},
        "findings": [{"code": code} for code in codes],
    }
    assert doubts(report) == expected
    said = goal_texts(found, "token", "on demand", doubts(report))[0]
    assert said.endswith(f"; but {expected}" if expected else "before the deadline")


EXTP = {"code": "NCC_EXTP004"}


def missed(goal: GoalConfig, slow: float, *findings: Any, **figures: Any) -> dict[str, Any]:
    return {
        "goal": answer(goal, **pace(**figures)),
        "timing": {"step_time_s": 1.0, "band_s": [1.0, slow]},
        "findings": list(findings),
        "job": {"cluster": {"instances": 4}},
    }


@pytest.mark.parametrize(
    ("goal", "slow", "expected"),
    [
        (asked(3000.0), 1.0, ""),
        (
            asked(3000.0),
            3.0,  # 4,000 s x 3 / 3,000 s x 4 instances
            "at the slow end of the band it takes 3.33 hours, and 16 instances to be in time",
        ),
        (asked(0.0, 80.0), 3.0, "at the slow end of the band it takes 3.33 hours"),
        (
            asked(5000.0, 80.0),  # in time but for the slow end: 2.4 x 4
            3.0,
            "at the slow end of the band it takes 3.33 hours, and 10 instances to be in time",
        ),
    ],
)
def test_the_slow_end_of_a_goal_that_is_missed(
    goal: GoalConfig, slow: float, expected: str
) -> None:
    assert doubts(missed(goal, slow)) == expected


def test_what_adds_to_a_goal_that_is_missed_is_no_but() -> None:
    found = answer(asked(3000.0), **pace(fits=False))
    assert goal_texts(found, "token", "on demand", "so")[0] == (
        f"not met: {TOOK}; 16.7 minutes after the deadline; and the step does not fit the memory;"
        " and so"
    )
    found = answer(asked(3000.0), **pace())
    said = goal_texts(found, "token", "on demand", "neuronx-cc would refuse")[0]
    assert said.endswith("after the deadline; and neuronx-cc would refuse")


@pytest.mark.parametrize(
    ("findings", "fits", "expected"),
    [
        ((), True, ""),
        ((EXTP,), True, "; each rests on this step, which neuronx-cc would refuse"),
        ((), False, "; each rests on this step, which does not fit the memory"),
        (
            (EXTP,),
            False,
            "; each rests on this step, which does not fit the memory and which neuronx-cc would"
            " refuse",
        ),
    ],
)
def test_what_a_goal_needs_names_the_step_that_cannot_be_run(
    findings: Any, fits: bool, expected: str
) -> None:
    report = missed(asked(3000.0), 1.0, *findings, fits=fits)
    needs = goal_texts(report["goal"], "token", "on demand", "", rests_on(report))[1]
    assert needs.endswith(f"at most 750 k tokens{expected}")
    assert goal_texts(report["goal"] | {"needs": None}, "token", "", "", "so")[1] == ""


def test_sentences() -> None:
    assert told(asked()) == (TOOK, "")
    assert told(asked(5000.0, 150.0)) == (
        f"met: {TOOK}; 16.7 minutes before the deadline, $50.00 below the budget",
        "",
    )
    assert told(asked(3000.0)) == (
        f"not met: {TOOK}; 16.7 minutes after the deadline",
        "1.34 times the speed on these instances, or 6 instances at this efficiency, or at most"
        " 750 k tokens",
    )
    assert told(asked(2000.0, 80.0)) == (
        f"not met: {TOOK}; 33.3 minutes after the deadline, $20.00 above the budget",
        "2.00 times the speed on these instances, or 8 instances at this efficiency and at most"
        " $18.00 per instance hour, or at most 500 k tokens",
    )
    assert told(asked(5000.0, 150.0), usd_per_hour=None)[0] == (
        "open: 1 M tokens in 1.11 hours at a goodput of 50.0 %; 16.7 minutes before the deadline,"
        " no price to hold against the budget"
    )
    assert told(asked(5000.0), fits=False)[0] == (
        f"not met: {TOOK}; 16.7 minutes before the deadline; but the step does not fit the memory"
    )
    assert told(asked(5000.0), goodput=0.0) == (
        "not met: failures leave no time for steps, 1 M tokens are never reached",
        "",
    )
    assert limits_text(asked(2_592_000.0, 2e6)) == ("1 M tokens within 30 days for at most $2 M")
    assert limits_text(asked()) == "1 M tokens"


def test_what_would_suffice_is_rounded_to_the_side_that_does() -> None:
    """100 / 74.07 is 1.35007, 22.50 x 74.07 / 100 is 16.66575, and of 740.7 steps 740 are whole; of
    1,239,567 tokens 1.23 M are not more."""
    assert told(asked(0.0, 74.07))[1] == (
        "1.36 times the speed on these instances, or at most $16.66 per instance hour, or at most"
        " 740 k tokens"
    )
    exact = told(asked(3200.0))[1]  # 4,000 / 3,200 is 1.25, and 4 x 1.25 are 5
    assert exact.startswith("1.25 times the speed on these instances, or 5 instances at")
    needs = {"speedup": 2.0, "instances": 8, "usd_per_instance_hour": None, "tokens": 1_239_567}
    assert needs_text(needs, "token").endswith("or at most 1.23 M tokens")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 seconds"),
        (1.0, "1 second"),
        (90.0, "1.5 minutes"),
        (3600.0, "1 hour"),
        (86_399.0, "1 day"),
        (2_592_000.0, "30 days"),
        (1234 * 86_400.0, "1,234 days"),
    ],
)
def test_long_times(seconds: float, text: str) -> None:
    assert long_text(seconds) == text


@pytest.mark.parametrize(
    ("usd", "text"),
    [(0, "$0"), (9.5, "$9.50"), (784_900, "$785 K"), (999_600, "$1 M"), (1.214e6, "$1.21 M")],
)
def test_dollars_of_a_training(usd: float, text: str) -> None:
    assert large_usd_text(usd) == text


def test_rows_of_the_page() -> None:
    assert goal_rows(answer(asked(3000.0, 150.0), **pace())) == [
        ("time", "1.11 hours", "50 minutes", "-16.7 minutes"),
        ("money", "$100", "$150", "$50.00"),
    ]
    assert goal_rows(answer(asked(), **pace(usd_per_hour=None))) == [
        ("time", "1.11 hours", "-", "-"),
        ("money", "-", "-", "-"),
    ]


# Prices


def test_cost_of_hour_step_and_tokens() -> None:
    """Two instances at 21 USD: 42 per hour; a step of 0.02 s is 42 x 0.02 / 3600; a million tokens
    are 1e6 / 336 steps."""
    found = cost_section(price_of(load_target(TRN1), TRN1, own(21.0)), 2, 0.02, 336)
    assert found["usd_per_hour"] == close(42.0)
    assert found["usd_per_step"] == close(0.84 / 3600) == close(2.3333333333333333e-4)
    assert found["usd_per_1e6_tokens"] == close(0.84 / 3600 * 1e6 / 336) == close(25 / 36)


def own(usd: float, kind: str = "auto", machine: str = TRN1) -> PriceConfig:
    return PriceConfig(kind=kind, usd_per_hour=((machine, usd),))


BLOCK = PriceConfig(kind="capacity-block")


@pytest.mark.parametrize(
    ("machine", "price", "usd", "text"),
    [
        (TRN1, PriceConfig(), 21.5, "on demand, us-east-1, 2025-11-30"),
        (TRN1, BLOCK, 9.532, "in a Capacity Block, region not stated, 2026-10-08"),
        (TRN1, own(9.0), 9.0, "at your own price"),
        (TRN1, own(9.0, "capacity-block"), 9.0, "at your own price, in a Capacity Block"),
        (TRN2, BLOCK, 35.7608, "in a Capacity Block, region not stated, 2026-10-08"),
    ],
)
def test_kinds_of_price(machine: str, price: PriceConfig, usd: float, text: str) -> None:
    found = price_of(load_target(machine), machine, price)
    assert found["usd_per_hour"] == usd
    assert list_text(found) == text
    assert basis_text(found) == text.partition(", us")[0].partition(", region")[0]


@pytest.mark.parametrize(
    ("machine", "price", "text"),
    [
        (
            TRN2,
            PriceConfig(),
            "no on-demand price is published for trn2.48xlarge; its Capacity Block price is:"
            " --price-kind capacity-block",
        ),
        (
            TRN1N,
            BLOCK,
            "no Capacity Block price is published for trn1n.32xlarge; its on-demand price is:"
            " --price-kind on-demand",
        ),
        (
            "trn3-gen1-ultraserver",
            PriceConfig(),
            "no on-demand price is published for trn3-gen1-ultraserver; give your own with --price",
        ),
        (TRN1N, own(9.0), "no price of your own is given for trn1n.32xlarge"),
    ],
)
def test_a_machine_without_a_price_of_that_kind_has_no_dollars(
    machine: str, price: PriceConfig, text: str
) -> None:
    """No other kind stands in for it."""
    found = price_of(load_target(machine), machine, price)
    assert found["usd_per_hour"] is None and missing_text(found) == text
    cost = cost_section(found, 2, 1.0, 1)
    assert cost == {"usd_per_hour": None, "usd_per_step": None, "usd_per_1e6_tokens": None}


def test_every_published_price_has_a_day_a_status_and_a_source() -> None:
    for name in (TRN1, TRN1N, TRN2, "trn2-ultraserver", "inf2.48xlarge", "inf1.xlarge"):
        for fact in load_target(name).prices.values():
            assert isinstance(fact, Fact) and fact.source and fact.date
            assert fact.status in ("documented", "inferred")


def test_a_report_from_before_prices_had_kinds() -> None:
    cost = {"usd_per_hour": 2.0, "usd_per_step": 1.0, "usd_per_1e6_tokens": 3.0}
    old = {"cost": cost, "batch": {"tokens_per_sample": 2}}
    (line,) = sections.laid(sections.cost(old), 200)
    assert line.plain == (
        "cost       $1.00 per step, $3.00 per million tokens, at a price whose kind the report does"
        " not say ($2.00 per hour)"
    )


def test_dollars_of_two_kinds_of_price_are_not_compared() -> None:
    row = {"name": "usd_per_step", "a": 1.0, "b": 2.0}
    assert compare.change(row) == "+100.0 %"
    assert compare.change(row | compare.OTHER_PRICE) == "other kind of price"
    first = {"price": {"kind": "on-demand", "given": False}}
    assert compare._basis(first) != compare._basis({"price": {"kind": "own", "given": True}})
    assert compare._basis(first) == compare._basis({"price": {**first["price"], "machine": "x"}})


# Jobs


def test_a_goal_by_file_set_and_flag(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        '[goal]\ntokens = "1T"\ndeadline = "30d"\n[price.usd_per_hour]\n"trn1.32xlarge" = 9\n'
    )
    job = config.load(path, ["goal.budget=2M", "price.kind=capacity-block"], {"goal.tokens": "2B"})
    assert job.goal == GoalConfig(tokens=2 * 10**9, deadline=2_592_000.0, budget=2e6)
    assert job.price == own(9.0, "capacity-block")
    assert job.as_dict()["price"] == {"kind": "capacity-block", "usd_per_hour": {TRN1: 9.0}}


def test_a_price_without_a_name_is_for_the_machine_of_the_job() -> None:
    job = config.load(None, ["cluster.target=trn2.48xlarge"], {"price.usd_per_hour": "21.5"})
    assert job.price.usd_per_hour == ((TRN2, 21.5),)
    other = changed(job, {"cluster.target": TRN1}).job
    assert price_of(load_target(TRN1), TRN1, other.price)["usd_per_hour"] is None
    several = config.load(None, ["price.usd_per_hour=trn1.32xlarge=9, trn2.48xlarge=$36"])
    assert several.price.usd_per_hour == ((TRN1, 9.0), (TRN2, 36.0))


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["goal.deadline=30d"], "SW_GOAL", "requires goal.tokens, got none"),
        (["goal.budget=2M"], "SW_GOAL", "requires goal.tokens, got none"),
        (["goal.tokens=1Q"], "SW_USAGE", "goal.tokens requires a whole number of tokens"),
        (["goal.tokens=2000000T"], "SW_USAGE", "goal.tokens requires 0 to"),
        (["goal.tokens=1T", "goal.deadline=30"], "SW_USAGE", "requires a duration with its unit"),
        (["goal.tokens=1T", "goal.budget=free"], "SW_USAGE", "goal.budget requires dollars"),
        (["price.kind=spot"], "SW_USAGE", "one of auto, on-demand, capacity-block"),
        (["price.usd_per_hour=cheap"], "SW_USAGE", "price.usd_per_hour requires dollars per hour"),
        (["price.usd_per_hour=trn1=x"], "SW_USAGE", "requires dollars per hour"),
        (["price.usd_per_hour=trn9=2"], "SW_PRICE", "machines that are known, got trn9"),
    ],
)
def test_what_is_not_understood(words: list[str], code: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        config.load(None, words)
    assert caught.value.code == code and said in str(caught.value)


def test_a_batch_in_tokens_is_a_whole_number_of_samples() -> None:
    """2 x 8 samples of 4,096 tokens are 65,536; 4 million are 61.04 of that, so 61."""
    strategy = StrategySettings(micro_batch=2, global_batch_tokens=4_000_000)
    with pytest.raises(UsageError) as caught:
        asked_batch(strategy, 8, 4096)
    assert caught.value.code == "SW_BATCH"
    assert "4096 tokens per sample x micro_batch 2 x 8 data-parallel ranks = 65536" in str(
        caught.value
    )
    assert caught.value.diagnostic.hint == "use 3997696"
    assert asked_batch(replace(strategy, global_batch_tokens=3_997_696), 8, 4096) == 976
    assert asked_batch(strategy, 8, 0) == 0  # not known yet


def test_a_batch_is_given_in_samples_or_in_tokens() -> None:
    job = config.load(None, ["strategy.global_batch=32", "strategy.global_batch_tokens=4Ki"])
    with pytest.raises(UsageError, match="requires samples or tokens"):
        layout_of(job)
    change = changed(
        config.load(None, ["strategy.global_batch_tokens=4Ki"]), {"strategy.global_batch": 64}
    )
    assert change.text == "strategy.global_batch=64 strategy.global_batch_tokens=0"
    assert layout_of(change.job).global_batch == 64


def test_strong_scaling_keeps_a_batch_in_tokens() -> None:
    """4 Mi tokens of 4,096 are 1,024 samples, on every number of instances."""
    words = ["model.preset=llama2-7b", "strategy.global_batch_tokens=4Mi"]

    def job(keys: Any = None) -> JobConfig:
        return config.load(None, words, changes=keys)

    study = scale.Study(targets=[TRN1], instances=[1, 4], modes=("strong", "weak"))
    points = scale.points(study, job(), job)
    found = [(point.values["mode"], layout_of(point.job).global_batch) for point in points]
    assert found == [("strong", 1024), ("strong", 1024), ("weak", 32), ("weak", 128)]


# Points that are compared


def point(machine: str, n: int, step_s: float, status: str = FITS, **more: Any) -> Row:
    """A step of 10^6 tokens; half of the time is lost."""
    values = {"target": machine, "instances": str(n)}
    figures = {"target": machine, "instances": n, "step_time_s": step_s, "tokens_per_step": 10**6}
    metrics = {} if status == REFUSED else figures | {"goodput": 0.5} | more
    return Row(f"{machine}{n}", values, status, metrics=metrics)


def host(deadline: str = "", budget: str = "", price: str = "auto") -> JobConfig:
    words = ["goal.tokens=1B", f"price.kind={price}"]
    words += [f"goal.deadline={deadline}"] if deadline else []
    words += [f"goal.budget={budget}"] if budget else []
    return config.load(None, words)


def judged(asked_of: JobConfig, *rows: Row) -> dict[str, Any]:
    found = buyer.goal_section([buyer.bought(row, asked_of) for row in rows], asked_of)
    assert found is not None
    return found


SLOW = point(TRN1, 1, 36.0)  # 1,000 steps of 72 s: 20 hours at $21.50 are $430
FAST = point(TRN1, 4, 10.8)  # 6 hours at $86.00 are $516
WIDE = point(TRN1N, 4, 9.0)  # 5 hours at $99.12 are $495.60
UNPRICED = point(TRN2, 1, 7.2)  # 4 hours


def test_every_point_has_days_and_dollars() -> None:
    found = buyer.bought(SLOW, host("1d", "400")).metrics
    assert found["price_kind"] == "on-demand" and found["usd_per_hour"] == 21.5
    assert found["usd_per_1e6_tokens"] == close(21.5 * 36 / 3600)
    assert (found["days"], found["usd"]) == (close(20 / 24), close(430.0))
    assert (found["slack_days"], found["slack_usd"]) == (close(4 / 24), close(-30.0))
    block = buyer.bought(SLOW, host(price="capacity-block")).metrics
    assert block["usd"] == close(190.64) and block["slack_usd"] is None
    none = buyer.bought(UNPRICED, host("1d")).metrics
    assert (none["days"], none["usd"], none["usd_per_hour"]) == (close(4 / 24), None, None)
    assert "days" not in buyer.bought(SLOW, JobConfig()).metrics
    refused = point(TRN1, 9, 1.0, REFUSED)
    assert buyer.bought(refused, host("1d")) is refused


def test_the_cheapest_and_the_fastest_that_meet_a_goal() -> None:
    found = judged(host("8h"), SLOW, FAST, WIDE)
    assert found["cheapest"] == found["fastest"] == dict(WIDE.values)
    assert found["nearest"] is None
    assert found["text"] == [
        "goal: 1 G tokens within 8 hours",
        "cheapest and fastest that meets it: target=trn1n.32xlarge instances=4: 5 hours at a"
        " goodput of 50.0 % for $496 on demand; 3 hours before the deadline",
    ]
    within = judged(host("1d", "500"), SLOW, FAST, WIDE)
    assert (within["cheapest"], within["fastest"]) == (dict(SLOW.values), dict(WIDE.values))
    assert within["text"][1:] == [
        "cheapest that meets it: target=trn1.32xlarge instances=1: 20 hours at a goodput of 50.0 %"
        " for $430 on demand; 4 hours before the deadline, $70.00 below the budget",
        "fastest that meets it: target=trn1n.32xlarge instances=4: 5 hours at a goodput of 50.0 %"
        " for $496 on demand; 19 hours before the deadline, $4.40 below the budget",
    ]


def test_what_is_nearest_and_what_it_lacks() -> None:
    """Within 4 hours for $500: 20 / 4, 6 / 4 and 5 / 4 of the time, so the last."""
    found = judged(host("4h", "500"), SLOW, FAST, WIDE)
    assert (found["cheapest"], found["fastest"]) == (None, None)
    assert found["nearest"] == dict(WIDE.values)
    assert found["text"][1:] == [
        "no point meets it; nearest: target=trn1n.32xlarge instances=4: 5 hours at a goodput of"
        " 50.0 % for $496 on demand; 1 hour after the deadline, $4.40 below the budget; it needs"
        " 1.25 times the speed on these instances, or 5 instances at this efficiency, or at most"
        " 800 M tokens",
    ]


def test_points_without_a_price_are_named_and_not_the_cheapest() -> None:
    """They can be the fastest, where no budget is asked for."""
    found = judged(host("8h"), FAST, UNPRICED)
    assert (found["cheapest"], found["fastest"]) == (dict(FAST.values), dict(UNPRICED.values))
    assert found["text"][-1] == ("1 point has no price of this kind, and so no dollars to compare")
    limited = judged(host("8h", "600"), FAST, UNPRICED)
    assert limited["fastest"] == dict(FAST.values)
    alone = judged(host("8h", "600"), UNPRICED)
    assert alone["text"][1] == "no point can be held to it"


def test_points_that_do_not_fit_or_are_refused_meet_nothing() -> None:
    broken = replace(FAST, code="NCC_EBVF030")
    for row in (replace(FAST, status=TOO_LARGE), point(TRN1, 4, 1.0, REFUSED), broken):
        assert judged(host("8h"), row)["text"][1:] == ["no point fits, so none meets it"]


def test_without_a_limit_all_points_meet_a_goal() -> None:
    found = judged(host(), SLOW, FAST)
    assert (found["cheapest"], found["fastest"]) == (dict(SLOW.values), dict(FAST.values))
    assert buyer.goal_section([SLOW], JobConfig()) is None


def test_prices_of_a_comparison() -> None:
    rows = [buyer.bought(row, JobConfig()) for row in (SLOW, FAST, UNPRICED)]
    assert buyer.prices_text(buyer.prices_section(rows, JobConfig())) == (
        "trn1.32xlarge $21.50 per hour on demand, us-east-1, 2025-11-30; no on-demand price is"
        " published for trn2.48xlarge; its Capacity Block price is: --price-kind capacity-block"
    )
    with pytest.raises(
        UsageError, match=r"compared \(trn1n.32xlarge\), got trn1.32xlarge"
    ) as caught:
        buyer.check_prices(JobConfig(price=own(9.0)), [TRN1N, TRN1N])
    assert caught.value.code == "SW_PRICE"


# The commands


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    """A small job that is planned, on trn1n."""
    folder = tmp_path_factory.mktemp("goal")
    job = config.load(write_job(folder, cache={"dir": str(folder / "cache")}))
    plan_cache.plan(job)
    return job


def test_a_stored_plan_answers_any_goal_at_any_price(
    planned: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is captured or compiled, and the answer is that of a report on its own figures."""
    monkeypatch.setattr(plan_cache, "_fresh", pytest.fail)
    monkeypatch.setattr(executor.InlineExecutor, "submit", pytest.fail)
    plain = plan_cache.plan(planned)
    assert "goal" not in plain
    goal = GoalConfig(tokens=10**9, deadline=1.0, budget=1e6)
    report = plan_cache.plan(replace(planned, goal=goal, price=own(9.0, machine=TRN1N)))
    check_report(json.loads(json.dumps(report)))
    assert report["job"]["goal"] == {"tokens": 10**9, "deadline": 1.0, "budget": 1e6}
    instances = report["job"]["cluster"]["instances"]
    assert report["cost"]["usd_per_hour"] == close(9.0 * instances)
    batch, step_s = report["batch"], report["timing"]["step_time_s"]
    steps = -(-(10**9) // (batch["global_batch"] * batch["tokens_per_sample"]))
    days = steps * step_s / report["goodput"]["goodput"] / 86_400
    assert report["goal"]["days"] == close(days)
    assert report["goal"]["usd"] == close(days * 24 * 9.0 * instances)
    assert report["provenance"]["plan_key"] == plain["provenance"]["plan_key"]
    assert "goal" not in plan_cache.plan(planned)


def test_the_screen_and_the_page_say_it(planned: JobConfig) -> None:
    report = plan_cache.plan(replace(planned, goal=asked(1.0, 1e9, 10**9)))
    found, basis = report["goal"], "on demand"
    wanted, needs = goal_texts(found, "token", basis, doubts(report), rests_on(report))
    assert "and at the slow end of the band it takes" in wanted
    lines = [line.plain for line in sections.laid(sections.goal(report), 400)]
    assert lines == [f"goal       {wanted}", f"it needs   {needs}"]
    page = report_page(report)
    sentence = wanted[:1].upper() + wanted[1:]
    assert sentence in page and needs in page and "on demand, us-east-1, 2025-11-30" in page
    assert "The goal" not in report_page(plan_cache.plan(planned))


def test_one_cannot_sweep_over_goals(
    planned: JobConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", f"{planned.base}/job.toml", "--vary", "deadline=1d,2d"]) == 2
    assert "keys that plans depend on, got goal.deadline" in capsys.readouterr().err


def test_a_sweep_answers_another_goal_from_the_same_rows(
    planned: JobConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", f"{planned.base}/job.toml", "--vary", "remat=full"]
    words += ["--out", str(tmp_path), "--tokens", "1B", "--deadline"]
    assert main([*words, "1s"]) == 0
    first = capsys.readouterr().out
    assert "no point meets it; nearest: remat=full: " in first
    assert main([*words, "9000d", "--price", "trn1n.32xlarge=1.00"]) == 0
    again = capsys.readouterr().out
    assert "prices: trn1n.32xlarge $1.00 per hour at your own price" in again
    assert "cheapest and fastest that meets it: remat=full: " in again
    data = json.loads((tmp_path / "sweep.json").read_text())
    assert data["goal"]["cheapest"] == data["goal"]["fastest"] == {"remat": "full"}
    (only,) = data["points"]
    assert only["metrics"]["usd"] == close(
        only["metrics"]["days"] * 24 * only["metrics"]["usd_per_hour"]
    )
    assert data["prices"][0]["usd_per_hour"] == 1.0


def test_answers_are_plain() -> None:
    found = answer(asked(3000.0, 80.0), **pace())
    assert json.loads(json.dumps(found)) == found
