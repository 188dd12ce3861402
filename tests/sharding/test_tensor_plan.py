"""A plan of the user's own for tensor parallelism: followed where it can be, compared with what the
strategy finds by itself, the same values."""

from __future__ import annotations

import pytest

from shardwright.compiler.diagnostics import ShardingError
from shardwright.sharding.plan import Plan
from shardwright.sharding.strategies.tensor_plan import plan_text, rows_of
from tests.support.road import worst
from tests.support.staged_runs import plan_of, step_errors
from tests.support.strategy_cells import Distribution, deep_gqa, distribution, gqa

ATTENTION = "layers.wq:1, layers.wk:1, layers.wv:1, layers.wo:0"
MLP = "layers.w_gate:1, layers.w_up:1, layers.w_down:0"
ENDS = "embed:0, lm_head:1"
BOUND = 1e-5


def of(text: str) -> Distribution:
    return distribution("fsdp", dp_shard=2, tp=2, tensor_plan=text)


def split(plan: Plan) -> set[str]:
    """Weights that lie over tp."""
    return {
        name.removeprefix("params/")
        for name, why in plan.reasons.items()
        if name.startswith("params/") and "tp" in why.split("]")[0]
    }


def told(plan: Plan, severity: str = "note") -> list[str]:
    found = [f for f in plan.findings if f.code == "SW_TENSOR_PLAN" and f.severity == severity]
    return [f.message for f in found]


def test_the_plan_that_the_strategy_finds_by_itself() -> None:
    plan, alone = plan_of(gqa, of(f"{ATTENTION}, {MLP}, {ENDS}"), 1), plan_of(gqa, of(""), 1)
    assert plan.reasons == alone.reasons and plan.traffic == alone.traffic
    (text,) = told(plan)
    assert text.startswith("9 of 9 weights of the plan lie over tp as it says")
    assert text.endswith("the strategy finds the same by itself") and not told(alone)


def test_what_a_plan_leaves_out_stays_whole() -> None:
    plan = plan_of(gqa, of(ATTENTION), 1)
    assert split(plan) == {"layers/wq", "layers/wk", "layers/wv", "layers/wo"}
    (text,) = told(plan)
    assert "4 of 4" in text and "by itself it would split embed" in text
    leaf, error = worst(step_errors(gqa, of(ATTENTION), 1))
    assert error <= BOUND, leaf


def test_what_shares_an_index_follows() -> None:
    plan = plan_of(gqa, of("layers.w_up:1"), 1)
    assert split(plan) == {"layers/w_up", "layers/w_gate", "layers/w_down"}
    assert "params/layers/w_down" in told(plan)[0] and "lie so too" in told(plan)[0]


@pytest.mark.matrix
def test_stages_have_the_plan_of_their_layers() -> None:
    """Five layers on five stages: a stack of one layer has the dims of a layer too."""
    for pp in (2, 5):
        how = distribution("fsdp", pp=pp, tp=2, dp_shard=2, tensor_plan=f"{ATTENTION}, {MLP}")
        plan = plan_of(deep_gqa, how, pp)
        (text,) = told(plan)
        assert text.startswith(f"{7 * pp} of {7 * pp} weights of the plan") and "embed" in text
        leaf, error = worst(step_errors(deep_gqa, how, pp))
        assert error <= BOUND, leaf


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("layers.wq:0", "layers/wq: dim 0 is the hidden dim"),
        ("embed:1", "embed: dim 1 is the hidden dim"),
    ],
)
def test_what_cannot_be_split_is_said(text: str, why: str) -> None:
    plan = plan_of(gqa, of(f"{MLP}, {text}"), 1)
    assert split(plan) == {"layers/w_up", "layers/w_gate", "layers/w_down"}
    (warning,) = told(plan, "warning")
    assert why in warning and "3 of 4" in told(plan)[0]


@pytest.mark.parametrize(
    ("text", "required"),
    [
        ("layers.wx:0", "weights of the step, got layers.wx"),
        ("layers.wq:2", "a dim of params/layers/wq"),
        ("layers.wq", "weight:dim, got 'layers.wq'"),
        ("layers.wq:-1", "weight:dim"),
    ],
)
def test_plans_of_other_weights_are_refused(text: str, required: str) -> None:
    with pytest.raises(ShardingError, match=r"strategy\.tensor_plan requires") as caught:
        plan_of(gqa, of(text), 1)
    assert caught.value.code == "SW_TENSOR_PLAN" and required in str(caught.value)


def test_plans_are_text() -> None:
    rows = (("layers.*.wq.weight", 0), ("layers.*.wo.weight", 1))
    assert rows_of(plan_text(rows)) == rows
    assert rows_of(" a : 1 ,") == (("a", 1),)
