"""`model.generator`: what draws random numbers of a user's own step."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.generator import drawn_by
from shardwright.compiler.frontend.state import state_tree
from shardwright.compiler.frontend.step_form import with_keys
from shardwright.orchestrator.config.config import JobConfig, load
from shardwright.orchestrator.config.model import resolve_task
from tests.models import dropout_decoder
from tests.support.road import captured_graph

ENTRY = "model.entry=tests.models.dropout_decoder:train_task"


def test_a_step_draws_with_the_generator_that_is_asked_for() -> None:
    """A key of Threefry is two words, one of rbg four; its bits are one operator."""
    task = dropout_decoder.train_task()
    names = {
        generator: {op.name for op in captured_graph(one, 2)[0].walk()}
        for generator, one in (("threefry2x32", task), ("rbg", drawn_by(task, "rbg")))
    }
    assert "random_bits" not in names["threefry2x32"] and "random_bits" in names["rbg"]
    words = [state_tree(one).arrays[-1].shape for one in (task, drawn_by(task, "rbg"))]
    assert words == [(2,), (4,)]


def test_fresh_keys_are_of_the_generator_too() -> None:
    """Keys that a step takes and does not return, which are made outside of its code."""
    task = replace(dropout_decoder.train_task(), generator="rbg")
    (key,) = with_keys(task, ["dropout_key"]).init(jax.random.key(0))[-1:]
    assert str(jax.random.key_impl(key)) == "rbg"
    assert drawn_by(task, "unsafe_rbg").generator == "unsafe_rbg"


def test_first_states_differ_by_the_key_and_not_by_the_call() -> None:
    init = drawn_by(dropout_decoder.train_task(), "rbg").init
    assert init is not None
    first, again, other = (init(jax.random.key(seed))[2].tolist() for seed in (0, 0, 1))
    assert first == again != other


def test_the_setting_reaches_the_task() -> None:
    asked = load(None, [ENTRY, "model.generator=rbg"])
    assert state_tree(resolve_task(asked)).arrays[-1].shape == (4,)
    assert state_tree(resolve_task(load(None, [ENTRY]))).arrays[-1].shape == (2,)


def test_steps_of_ours_and_lowered_ones_have_no_generator_to_choose() -> None:
    for model in ("preset=llama2-7b", "hlo=step.mlir"):
        with pytest.raises(UsageError) as found:
            resolve_task(load(None, [f"model.{model}", "model.generator=rbg"]))
        assert found.value.code == "SW_MODEL_SETTING" and model.partition("=")[2] in str(
            found.value
        )
    assert JobConfig().model.generator == "auto"
