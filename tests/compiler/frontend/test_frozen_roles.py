"""What a step does not train: found by what comes back, in any spelling, and as it is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.capture import Captured, capture
from shardwright.compiler.frontend.module_task import module_task
from shardwright.compiler.frontend.reference import initial_state, reference_step, task_batches
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.frontend.task import TrainTask
from tests.models import lora_steps


def roles(captured: Captured) -> dict[str, str]:
    return {info.name: info.role for info in captured.inputs}


def of_role(captured: Captured, role: str) -> set[str]:
    return {name for name, own in roles(captured).items() if own == role}


@pytest.mark.parametrize("form", lora_steps.FORMS)
def test_what_comes_back_as_it_went_in_is_frozen(form: str) -> None:
    captured = capture(lora_steps.FORMS[form](), 4)
    frozen, trained = of_role(captured, "frozen"), of_role(captured, "parameter")
    assert {name.rpartition("base/")[2] for name in frozen} == {
        *("embed", "out", "layers/up", "layers/down")
    }
    assert {name[-len("up/a") :].lstrip("/") for name in trained} >= {"up/a", "up/b"}
    assert len(trained) == 4 and not frozen & trained
    graph = import_module(captured.artifact)
    numbers = {info.name: n for n, info in enumerate(captured.inputs)}
    for name in frozen:
        number = numbers[name]
        assert graph.outputs[number] is graph.inputs[number], name


@pytest.mark.parametrize("form", lora_steps.FORMS)
def test_a_frozen_leaf_stays_as_it_is_in_the_users_own_step(form: str) -> None:
    """The result that is left out of the step is the argument, to the bit."""
    task = lora_steps.FORMS[form]()
    state = initial_state(task, 0)
    after = reference_step(task, state, next(task_batches(task, 0, 4)))
    frozen = of_role(capture(task, 4), "frozen")
    assert len(frozen) == 4
    for name in frozen:
        np.testing.assert_array_equal(after[name], state[name])


def test_codes_and_scales_are_frozen() -> None:
    found = roles(capture(lora_steps.separate("int8"), 4))
    assert found["base/layers/up/codes"] == found["base/layers/up/scale"] == "frozen"


Does = tuple[bool, bool]
"""Whether the loss reads a leaf, and whether the step changes it."""


def any_step(leaves: list[Does], given: dict[str, str]) -> TrainTask:
    """A step over some weights `w<n>`, of which it does as is said."""

    def loss_of(state: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        read = [state[f"w{n}"] for n, (is_read, _) in enumerate(leaves) if is_read]
        return jnp.mean(sum((jnp.tanh(batch @ w) for w in read), start=jnp.zeros((1, 1))))

    def step(state: dict[str, jax.Array], batch: jax.Array) -> Any:
        after = dict(state)
        for n, (_, is_changed) in enumerate(leaves):
            if is_changed:
                after[f"w{n}"] = 0.9 * state[f"w{n}"]
        return after, loss_of(state, batch)

    def init(key: jax.Array) -> tuple[dict[str, jax.Array]]:
        keys = jax.random.split(key, len(leaves))
        return ({f"w{n}": jax.random.normal(k, (3, 2)) for n, k in enumerate(keys)},)

    return TrainTask(
        step=step,
        init=init,
        batch=lambda n: jax.ShapeDtypeStruct((n, 3), jnp.float32),
        state_names=("all",),
        roles=given,
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=5))
def test_a_role_follows_from_what_a_step_does(leaves: list[Does]) -> None:
    trains = (True, True) in leaves
    expected = {
        (True, True): "parameter",
        (True, False): "frozen" if trains else "parameter",  # a step that evaluates
        (False, True): "optimizer",
        (False, False): "optimizer",
    }
    task = any_step(leaves, {})
    if not any(is_read for is_read, _ in leaves):
        with pytest.raises(UsageError, match="SW_TASK_PARAMETERS"):
            capture(task, 4)
        return
    found = roles(capture(task, 4))
    assert [found[f"all/w{n}"] for n in range(len(leaves))] == [expected[does] for does in leaves]


def test_roles_say_it_otherwise() -> None:
    leaves = [(True, True), (True, False), (False, False)]
    found = roles(capture(any_step(leaves, {"all/w1": "parameter", "all/w2": "frozen"}), 4))
    assert [found[f"all/w{n}"] for n in range(3)] == ["parameter", "parameter", "frozen"]


@pytest.mark.parametrize(("role", "told"), [("frozen", "frozen"), ("buffer", "a buffer")])
def test_what_changes_cannot_be_frozen(role: str, told: str) -> None:
    task = any_step([(True, True), (True, True)], {"all/w1": role})
    with pytest.raises(UsageError) as caught:
        capture(task, 4)
    assert caught.value.code == "SW_TASK_ROLE"
    assert str(caught.value.diagnostic.message).startswith(f"all/w1 is {told} by the roles")


def test_zeros_that_are_computed_leave_nothing_frozen() -> None:
    """Only zeros of the step's own text are an update of nothing."""

    def step(state: dict[str, jax.Array], batch: jax.Array) -> Any:
        loss = jnp.mean((batch @ state["a"]) ** 2) + jnp.mean((batch @ state["b"]) ** 2)
        after = {"a": state["a"] * 0.9, "b": state["b"] + 0 * batch[0, 0]}
        return after, loss

    task = dataclasses.replace(any_step([(True, True)], {}), step=step)
    shapes = {"a": jax.ShapeDtypeStruct((3, 2), jnp.float32)}
    task = dataclasses.replace(task, init=None, state=({**shapes, "b": shapes["a"]},))
    assert roles(capture(task, 4))["all/b"] == "parameter"


def test_a_lowered_step_says_the_same(tmp_path: Path) -> None:
    task = lora_steps.separate()
    state = jax.eval_shape(task.init, jax.random.key(0))
    text = jax.jit(task.step, keep_unused=True).lower(*state, task.batch(4)).as_text()
    path = tmp_path / "step.mlir"
    path.write_text(text)
    found = module_task(path).captured(4)
    wanted = capture(task, 4)
    assert [i.role for i in found.inputs] == [i.role for i in wanted.inputs]
    assert "frozen" in {i.role for i in found.inputs}
