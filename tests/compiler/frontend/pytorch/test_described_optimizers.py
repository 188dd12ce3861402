"""Optimizers that a dictionary describes, without torch: parameters after ten steps are torch's, as
tests/fixtures/torch_optimizers.json has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.capture import capture
from shardwright.compiler.frontend.pytorch.optimizers import described
from shardwright.compiler.frontend.pytorch.update_rules import RULES
from shardwright.compiler.frontend.task import TrainTask
from tests.fixtures.torch_optimizers import CASES, FILE, SHAPES, STEPS, values

ROWS = json.loads(FILE.read_text())


def test_the_file_has_every_case_and_rule() -> None:
    assert [row["case"] for row in ROWS] == list(CASES)
    assert {case["name"] for case in CASES} | {"Muon"} == set(RULES)  # its sums differ by machine


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["case"]["name"])
def test_ten_steps(row: Mapping[str, Any]) -> None:
    tx = described(row["case"])
    params = {name: jnp.asarray(value) for name, value in values(0).items()}
    state = tx.init(params)
    for step in range(1, STEPS + 1):
        updates, state = tx.update(values(step), state, params)
        params = optax.apply_updates(params, updates)
    for name, shape in SHAPES.items():
        wanted = np.reshape(row["after"][name], shape)
        assert np.abs(params[name] - wanted).max() <= 1e-6 * np.abs(wanted).max(), name
        assert not np.allclose(wanted, values(0)[name], atol=1e-3)


def test_names_are_read_in_any_case_and_the_norm_is_bounded() -> None:
    params = {"a": jnp.zeros(2), "b": jnp.zeros(3)}
    tx = described({"name": "sgd", "lr": 1.0, "fused": True}, clip_norm=0.5)
    gradients = {"a": jnp.asarray([3.0, 0.0]), "b": jnp.asarray([0.0, 4.0, 0.0])}
    updates, _ = tx.update(gradients, tx.init(params), params)
    norm = np.sqrt(sum(float(jnp.sum(update**2)) for update in updates.values()))
    assert norm == pytest.approx(0.5, rel=1e-6)
    assert float(updates["b"][1]) == pytest.approx(-0.4, rel=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_parameters_meet_in_sums_alone(name: str) -> None:
    """A pipeline adds up what its stages have; what is put side by side it would have to move."""
    tx = described({"name": name}, clip_norm=1.0)
    params = {"a": jnp.ones((2, 3)), "b": jnp.ones((4, 2))}
    program = str(jax.make_jaxpr(tx.update)(params, tx.init(params), params))
    assert "reduce_sum" in program and "concatenate" not in program


@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_state_is_optimizer_state_and_named_as_its_weight(name: str) -> None:
    tx = described({"name": name})

    def init(key: jax.Array) -> Any:
        params = {"fc.weight": jnp.ones((8, 4)), "fc.bias": jnp.ones(4)}
        return params, tx.init(params)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        def loss_of(p: Any) -> jax.Array:
            return jnp.mean((batch @ p["fc.weight"] + p["fc.bias"]) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss}

    def batch(samples: int) -> Any:
        return jax.ShapeDtypeStruct((samples, 8), jnp.float32)

    inputs = capture(TrainTask(step=step, init=init, batch=batch), 4).inputs
    state = [info for info in inputs if info.name.startswith("opt_state/")]
    assert {info.role for info in state} == {"optimizer"}
    assert {i.name for i in inputs if i.role == "parameter"} == {
        "params/fc.weight",
        "params/fc.bias",
    }
    moments = {i.name.split("/")[1]: i.shape for i in state if i.name.endswith("/fc.weight")}
    wanted = {
        "AdamW": {"exp_avg": (8, 4), "exp_avg_sq": (8, 4)},
        "Adafactor": {"row_var": (8, 1), "col_var": (1, 4)},
    }
    assert moments == wanted[name]


@pytest.mark.parametrize(
    ("description", "code", "words"),
    [
        ({"lr": 0.1}, "OPTIMIZER", "requires name to be one of SGD, Adam, AdamW"),
        ({"name": "AdamV"}, "OPTIMIZER", "did you mean Adam"),
        ({"name": "Lion"}, "OPTIMIZER", "got 'Lion'"),
        ({"name": "AdamW", "momentum": 0.9}, "OPTIMIZER", "got momentum"),
        ({"name": "AdamW", "weight_decy": 0.9}, "OPTIMIZER", "did you mean weight_decay"),
        ({"name": "AdamW", "betas": 0.9}, "OPTIMIZER", "betas to be 2 numbers from 0 to below 1"),
        ({"name": "AdamW", "betas": [0.9, 1]}, "OPTIMIZER", "got [0.9, 1]"),
        ({"name": "AdamW", "amsgrad": 1}, "OPTIMIZER", "amsgrad to be true or false, got 1"),
        ({"name": "AdamW", "lr": -1}, "OPTIMIZER", "lr to be a number that is not negative"),
        ({"name": "AdamW", "lr": "1e-3"}, "OPTIMIZER", "got '1e-3'"),
        ({"name": "Muon", "adjust_lr_fn": "none"}, "OPTIMIZER", "None or original or match_rms"),
        ({"name": "SGD", "nesterov": True}, "OPTIMIZER", "momentum above 0 and dampening of 0"),
        ({"name": "SGD", "schedule": {"name": "Cosine"}}, "SCHEDULER", "did you mean Cosine"),
        ({"name": "SGD", "schedule": {"name": "StepLR"}}, "SCHEDULER", "say step_size"),
        (
            {"name": "SGD", "schedule": {"name": "ExponentialLR", "gama": 0.9}},
            "SCHEDULER",
            "did you mean gamma",
        ),
    ],
)
def test_what_is_not_understood_is_refused(
    description: dict[str, Any], code: str, words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        described(description)
    assert caught.value.code == f"SW_TORCH_{code}" and words in str(caught.value)


def test_a_parameter_that_a_rule_has_no_update_of_is_refused() -> None:
    with pytest.raises(UsageError, match=r"2 dims, got bias of \(3,\)"):
        described({"name": "Muon"}).init({"weight": jnp.ones((2, 3)), "bias": jnp.ones(3)})
