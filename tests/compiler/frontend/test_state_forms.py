"""States as libraries have them: what their leaves are taken for, what comes back, what is
refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.capture import capture
from shardwright.compiler.frontend.reference import (
    initial_leaves,
    initial_state,
    reference_step,
    run_reference,
    state_sizes,
)
from shardwright.compiler.frontend.task import TrainTask
from tests.models.state_forms import FORMS, WIDTH

WEIGHTS = {
    "train_state": {
        f"state/params/layers_{n}/{leaf}" for n in (0, 2) for leaf in ("bias", "kernel")
    },
    "nnx_split": {
        f"state/0/{leaf}/value"
        for leaf in (
            *("inner/bias", "inner/kernel", "norm/bias", "norm/scale", "outer/bias"),
            "outer/kernel",
        )
    },
    "equinox_module": {
        f"model/layers/0/layers/{n}/{leaf}" for n in (0, 1) for leaf in ("bias", "weight")
    },
    "plain_nest": {"all/net/inner/w", "all/net/outer/w"},
}
KEYS = {
    "nnx_split": {"state/0/dropout/rngs/count/value", "state/0/dropout/rngs/key/value"},
    "equinox_module": {"prng"},
}


@pytest.mark.parametrize("form", WEIGHTS)
def test_weights_and_keys_are_found(form: str) -> None:
    roles = {info.name: info.role for info in capture(FORMS[form](), 4).inputs}
    assert {name for name, role in roles.items() if role == "parameter"} == WEIGHTS[form]
    assert {name for name, role in roles.items() if role == "rng"} == KEYS.get(form, set())
    assert set(roles.values()) >= {"parameter", "optimizer", "batch"}


@pytest.mark.parametrize("form", FORMS)
def test_a_run_keeps_every_array(form: str) -> None:
    task = FORMS[form]()
    run = run_reference(task, steps=1, global_batch=4, keep=(0, 1))
    assert list(run.states[0]) == [i.name for i in capture(task, 4).inputs if i.role != "batch"]
    assert state_sizes(task) == {name: leaf.nbytes for name, leaf in run.states[0].items()}
    moved = [n for n in run.states[1] if (run.states[0][n] != run.states[1][n]).any()]
    assert set(WEIGHTS.get(form, ())) <= set(moved)


def test_a_step_in_parts_is_the_whole_step() -> None:
    task = FORMS["equinox_module"]()
    assert task.batches is not None
    batch, state = next(task.batches(0, 4, None)), initial_state(task, 0)
    assert set(initial_leaves(task, 0, ["prng"])) == {"prng"}
    after = reference_step(task, state, batch)
    run = run_reference(task, steps=1, global_batch=4, keep=(1,))
    assert after["metrics/loss"] == np.float32(run.losses[0])
    for name, leaf in run.states[1].items():
        np.testing.assert_array_equal(after[name], leaf, err_msg=name)


def test_a_key_is_its_data() -> None:
    found = {info.name: info for info in capture(FORMS["equinox_module"](), 4).inputs}
    assert (found["prng"].shape, found["prng"].dtype) == ((2,), DType.U32)
    assert initial_state(FORMS["equinox_module"](), 3)["prng"].shape == (2,)


def test_keys_of_another_generator_come_back_as_they_were() -> None:
    def init(key: jax.Array) -> Any:
        return {"w": jnp.ones(WIDTH)}, jax.random.key(7, impl="rbg")

    def step(params: Any, key: jax.Array, batch: Any) -> Any:
        key, own = jax.random.split(key)
        noise = jax.random.normal(own, (WIDTH,))
        return params, key, jnp.mean((batch["x"] * params["w"] + noise) ** 2)

    changes: dict[str, Any] = {"init": init, "step": step, "state_names": ("params", "noise")}
    task = dataclasses.replace(FORMS["plain_nest"](), **changes)
    given = {info.name: info for info in capture(task, 4).inputs}
    assert (given["noise"].shape, given["noise"].role) == ((4,), "rng")
    assert len(run_reference(task, steps=2, global_batch=4).losses) == 2
    abstract = jax.eval_shape(init, jax.random.key(0))
    shapes = dataclasses.replace(task, init=None, state=abstract)
    assert capture(shapes, 4).inputs == capture(task, 4).inputs


def _nest(step: Callable[..., Any] | None = None, **state: Any) -> TrainTask:
    """A step whose one part of state is `state`."""

    def same(state: Any, batch: Any) -> Any:
        return state, jnp.mean(batch["x"])

    task = FORMS["plain_nest"]()
    return dataclasses.replace(task, init=lambda key: (state,), step=step or same)


def test_a_step_without_a_parameter_is_refused() -> None:
    with pytest.raises(UsageError, match=r"all/scale \(optimizer\)") as caught:
        capture(_nest(scale=jnp.ones(3), seen=jnp.zeros(3)), 4)
    assert caught.value.code == "SW_TASK_PARAMETERS"
    assert caught.value.diagnostic.hint == (
        'say what is one: TrainTask(roles={"all/scale": "parameter"}), by path or start of a path'
    )
    told = dataclasses.replace(_nest(scale=jnp.ones(3)), roles={"all": "parameter"})
    assert capture(told, 4).inputs[0].role == "parameter"
    with pytest.raises(UsageError, match="got no leaf at all"):
        capture(_nest(), 4)


def test_use_tells_keys_masks_and_quantized_weights_apart() -> None:
    def step(state: Any, batch: Any) -> Any:
        weight = state["q"].astype(jnp.float32) * state["scale"] * state["mask"]
        key = jax.random.fold_in(jax.random.wrap_key_data(state["seed"]), state["count"])
        noise = jax.random.normal(key, (WIDTH,))
        loss = jnp.mean((batch["x"] * weight + noise) ** 2)
        return {**state, "count": state["count"] + 1}, loss

    state = {
        "q": jnp.ones(WIDTH, jnp.int8),
        "scale": jnp.ones(WIDTH),
        "mask": jnp.ones(WIDTH, bool),
        "seed": jnp.zeros(2, jnp.uint32),
        "count": jnp.zeros((), jnp.int32),
        "unread": jnp.ones(WIDTH),
    }
    roles = {i.name.partition("/")[2]: i.role for i in capture(_nest(step, **state), 4).inputs}
    assert {name: roles[name] for name in state} == {
        "q": "parameter",
        "scale": "parameter",
        "mask": "optimizer",
        "seed": "rng",
        "count": "rng",
        "unread": "optimizer",
    }


def test_what_is_no_array_comes_back_as_it_was() -> None:
    def step(state: Any, batch: Any) -> Any:
        loss = jnp.mean(state["act"](batch["x"] * state["w"]))
        return {**state, "act": jax.nn.relu}, loss

    with pytest.raises(UsageError, match="all/act, which is no array, back as it was") as caught:
        capture(_nest(step, w=jnp.ones(WIDTH), act=jax.nn.gelu), 4)
    assert caught.value.code == "SW_TASK_RESULT"


def test_one_state_that_is_no_tuple_is_told_how_to_be_one() -> None:
    task = dataclasses.replace(FORMS["plain_nest"](), init=lambda key: {"w": jnp.ones(3)})
    with pytest.raises(UsageError, match=r"tuple of 1 \(all\), got dict") as caught:
        capture(task, 4)
    assert '("state",) for (state,)' in caught.value.diagnostic.hint


def test_what_has_no_elements_is_no_state_and_no_metric() -> None:
    def step(state: Any, batch: Any) -> Any:
        loss = jnp.mean(batch["x"] * state["w"]) + state["pad"].sum()
        return {"w": state["w"] * 2, "pad": state["pad"] * 2}, {"loss": loss, "seen": state["pad"]}

    task = _nest(step, w=jnp.ones(WIDTH), pad=jnp.ones((0, 4), jnp.bfloat16))
    captured = capture(task, 4)
    assert [i.name for i in captured.inputs] == ["all/w", "batch/x", "batch/y"]
    assert [i.name for i in captured.outputs] == ["all/w", "metrics/loss"]
    assert set(run_reference(task, steps=2, global_batch=4, keep=(2,)).states[2]) == {"all/w"}
