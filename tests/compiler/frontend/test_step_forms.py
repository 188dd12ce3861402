"""Steps in the shapes people write them: what arguments and results are taken for, what is told
about it, and what is refused.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardwright import train_step
from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.capture import capture
from shardwright.compiler.frontend.entry import load_task
from shardwright.compiler.frontend.reference import initial_state, run_reference, task_batches
from shardwright.compiler.frontend.task import TrainTask
from tests.models.people_steps import STEPS, WIDTH

SAID = {
    "dict_state": ("the loss is result train/loss",),
    "dataclass_key": ("rng is a fresh key per step",),
    "two_arrays": ("the batch is x, y", "the loss is result 2"),
    "frozen_backbone": ("backbone is not returned: it stays as it is",),
    "carry": ("the loss is result mse_loss",),
    "in_place": ("model is changed in place", "optimizer is changed in place"),
    "rate_argument": ("rate is not returned: it stays as it is",),
    "two_players": ("rng is a fresh key per step", "the loss is result g_loss"),
    "haiku_state": ("rng is a fresh key per step",),
}
WEIGHTS = {
    "loss_first": {
        f"state/params/layers_{n}/{leaf}" for n in (0, 2) for leaf in ("bias", "kernel")
    },
    "in_place": {
        f"model/{layer}/{leaf}/value" for layer in ("inner", "outer") for leaf in ("bias", "kernel")
    },
    "frozen_backbone": {"head/b", "head/w"},
    "two_players": {f"{part}/{leaf}" for part in ("gen", "disc") for leaf in ("w1", "w2")},
    "carry": {"carry/0/w1", "carry/0/w2"},
}


@pytest.mark.parametrize("name", sorted({*SAID, *WEIGHTS}))
def test_what_is_found_is_told(name: str) -> None:
    captured = capture(STEPS[name]().task(), 8)
    assert captured.told == SAID.get(name, ())
    found = {info.name for info in captured.inputs if info.role == "parameter"}
    assert found == WEIGHTS.get(name, found) and found
    assert [info.name for info in captured.inputs if info.role == "batch"] == ["batch/x", "batch/y"]
    assert "metrics/loss" in [info.name for info in captured.outputs]


def by_hand(name: str, steps: int) -> list[float]:
    """Losses of the step in the loop of a training script, on the same state and batches."""
    step, task = STEPS[name](), STEPS[name]().task()
    batches = itertools.islice(task_batches(task, 0, 8), steps)
    losses = []
    if name == "two_arrays":
        params, opt_state, *_ = step.settings.example()
        for batch in batches:
            params, opt_state, loss, _ = step(params, opt_state, batch["x"], batch["y"])
            losses.append(float(loss))
    else:
        assert name == "in_place"
        model, optimizer, _ = step.settings.example()
        losses = [float(step(model, optimizer, batch)) for batch in batches]
    return losses


@pytest.mark.parametrize("name", ["two_arrays", "in_place"])
def test_losses_are_those_of_the_loop_of_a_script(name: str) -> None:
    losses = run_reference(STEPS[name]().task(), steps=3, global_batch=8).losses
    assert losses == pytest.approx(by_hand(name, 3), rel=1e-5)


def test_a_key_that_is_not_returned_is_another_in_every_step() -> None:
    task = STEPS["dataclass_key"]().task()
    run = run_reference(task, steps=2, global_batch=8, keep=(0, 1, 2))
    keys = [run.states[n]["rng"].tolist() for n in range(3)]
    assert len(set(map(tuple, keys))) == 3
    assert keys[1] == jax.random.split(jnp.asarray(keys[0], jnp.uint32))[1].tolist()


def test_what_is_not_returned_stays() -> None:
    captured = capture(STEPS["frozen_backbone"]().task(), 8)
    frozen = {info.name for info in captured.inputs if info.role == "frozen"}
    assert frozen == {"backbone/w1", "backbone/w2"}
    run = run_reference(STEPS["frozen_backbone"]().task(), steps=1, global_batch=8, keep=(0, 1))
    before, after = run.states[0], run.states[1]
    assert (before["backbone/w1"] == after["backbone/w1"]).all()
    assert (before["head/w"] != after["head/w"]).any()


CHAIN = optax.sgd(0.1, momentum=0.9)
X = np.ones((8, WIDTH), np.float32)
STATE = {"w": jnp.ones((WIDTH, WIDTH))}
ARGUMENTS = (STATE, CHAIN.init(STATE), {"x": X})


def plain(params: Any, opt_state: Any, batch: Any) -> Any:
    def loss_of(params: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ params["w"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = CHAIN.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


def found(step: Callable[..., Any], *args: Any, samples: int = 8, **settings: Any) -> Any:
    return capture(train_step(step, **settings).task((args, {})), samples)


def reordered(params: Any, opt_state: Any, batch: Any) -> Any:
    params, opt_state, loss = plain(params, opt_state, batch)
    return loss, {"size": params["w"].sum()}, (opt_state, params)


def test_results_are_found_in_any_order() -> None:
    captured, usual = found(reordered, *ARGUMENTS), found(plain, *ARGUMENTS)
    assert [o.name for o in captured.outputs] == [
        *(i.name for i in captured.inputs if i.role != "batch"),
        *("metrics/loss", "metrics/size"),
    ]
    assert captured.inputs == usual.inputs and captured.told == ("the loss is result 0",)


def with_average(params: Any, mean: Any, opt_state: Any, batch: Any) -> Any:
    params, opt_state, loss = plain(params, opt_state, batch)
    return params, optax.incremental_update(params, mean, 0.5), opt_state, loss


def test_parts_alike_are_taken_in_order() -> None:
    task = train_step(with_average).task(((STATE, *ARGUMENTS[:1], *ARGUMENTS[1:]), {}))
    roles = {i.name: i.role for i in capture(task, 8).inputs}
    assert (roles["params/w"], roles["mean/w"]) == ("parameter", "optimizer")


def with_flags(params: Any, opt_state: Any, batch: Any, train: bool = True, *, seed: int) -> Any:
    assert train is False and seed == 3
    return plain(params, opt_state, batch)


def test_what_is_no_array_is_a_constant() -> None:
    call = (ARGUMENTS[:2], {"batch": ARGUMENTS[2], "train": False, "seed": 3})
    captured = capture(train_step(with_flags).task(call), 8)
    assert captured.told == ("train is a constant", "seed is a constant")


def masked(params: Any, opt_state: Any, inner: Any, weight: jax.Array, mask: jax.Array) -> Any:
    return plain(params, opt_state, {"x": inner["x"] * weight * mask})


def test_samples_are_told_from_what_all_of_them_share() -> None:
    shared, own = np.ones((1, WIDTH), np.float32), np.ones((8, 1), np.float32)
    captured = found(masked, *ARGUMENTS, shared, own, samples=4)
    assert captured.told == (
        "the batch is inner, mask",
        "weight is not returned: it stays as it is",
    )
    assert [i.shape for i in captured.inputs if i.role == "batch"] == [(4, WIDTH), (4, 1)]


def test_abstract_arguments_are_for_timing_only() -> None:
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), ARGUMENTS)
    task = train_step(plain).task((shapes, {}))
    assert capture(task, 16).inputs == found(plain, *ARGUMENTS, samples=16).inputs
    with pytest.raises(UsageError, match=r"requires TrainTask\.init"):
        initial_state(task, 0)


def test_without_batches_a_run_repeats_the_samples_of_the_example() -> None:
    x = np.arange(3 * WIDTH, dtype=np.float32).reshape(3, WIDTH)
    task = train_step(plain).task(((*ARGUMENTS[:2], {"x": x}), {}))
    first, second = itertools.islice(task_batches(task, 0, 4), 2)
    assert first["x"][:, 0].tolist() == [0, 16, 32, 0]
    assert second["x"][:, 0].tolist() == [16, 32, 0, 16]


def direct(**changes: Any) -> TrainTask:
    """A task whose step takes x, y and a key."""

    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> Any:
        noisy = x + y * jax.random.normal(key, x.shape)
        return plain(params, opt_state, {"x": noisy})

    shape = jax.ShapeDtypeStruct
    fields: dict[str, Any] = {
        "step": step,
        "init": lambda key: ARGUMENTS[:2],
        "batch": lambda n: (shape((n, WIDTH), jnp.float32), shape((n, 1), jnp.float32)),
    }
    return TrainTask(**(fields | changes))


def test_a_task_may_have_such_a_step_too() -> None:
    captured = capture(direct(), 4)
    assert captured.told == ("the batch is x, y", "key is a fresh key per step")
    assert [(i.name, i.role) for i in captured.inputs[-3:]] == [
        ("key", "rng"),
        ("batch/0", "batch"),
        ("batch/1", "batch"),
    ]
    said = direct(arguments=("params", "opt_state", "batch/x", "batch/y", "noise"))
    assert "noise" in [i.name for i in capture(said, 4).inputs]


def _returns_no_loss(params: Any, opt_state: Any, batch: Any) -> Any:
    return plain(params, opt_state, batch)[:2]


def _returns_two_scalars(params: Any, opt_state: Any, batch: Any) -> Any:
    *state, loss = plain(params, opt_state, batch)
    return *state, loss, loss * 2


def _returns_half(params: Any, opt_state: Any, batch: Any) -> Any:
    params, *rest = plain(params, opt_state, batch)
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), *rest


def _returns_no_state(params: Any, opt_state: Any, batch: Any) -> Any:
    return plain(params, opt_state, batch)[2]


def _returns_a_rate(params: Any, opt_state: Any, batch: Any, rate: jax.Array) -> Any:
    return *plain(params, opt_state, batch), rate * 0.9


def _has_its_samples(params: Any, opt_state: Any, batch: Any) -> Any:
    return plain(params, opt_state, {"x": batch["x"].reshape(8, 2, -1).sum(1).repeat(2, 1)})


def _is_of_one_device(params: Any, opt_state: Any, batch: Any) -> Any:
    *state, loss = plain(params, opt_state, batch)
    return *state, jax.lax.pmean(loss, "batch")


def _calls_pmap(params: Any, opt_state: Any, batch: Any) -> Any:
    params, opt_state, loss = plain(params, opt_state, batch)
    return params, opt_state, jax.pmap(jnp.sin)(loss[None])[0]


@pytest.mark.parametrize(
    ("step", "extra", "settings", "code", "words"),
    [
        (_returns_no_loss, (), {}, "SW_TASK_RESULT", "one scalar `loss`"),
        (_returns_two_scalars, (), {}, "SW_TASK_RESULT", 'got 2, 3\n.*loss="2"'),
        (_returns_two_scalars, (), {"loss": "4"}, "SW_TASK_RESULT", "scalar 4 .* got 2, 3"),
        (_returns_half, (), {}, "SW_TASK_RESULT", r"params/w back as f32\[16, 16\], got .*bf16"),
        (_returns_no_state, (), {}, "SW_TASK_RESULT", r"its new state .* got one result f32\[\]"),
        (_returns_a_rate, (np.float32(1),), {}, "SW_TASK_RESULT", "the next rate, got 2, 3"),
        (plain, (), {"results": ("params", "loss")}, "SW_TASK_RESULT", "2 results .* of 3"),
        (_has_its_samples, (), {}, "SW_BATCH", "a step of 8 samples, .* got 16"),
        (_is_of_one_device, (), {}, "SW_PMAP", "unbound axis name: batch"),
        (_calls_pmap, (), {}, "SW_PMAP", "a function under jax.pmap"),
        (jax.pmap(plain), (), {}, "SW_PMAP", "plain under jax.pmap"),
        (plain, (1,), {}, "SW_STEP_EXAMPLE", "too many positional arguments"),
        (plain, (), {"arguments": {"batc": "batch"}}, "SW_TASK_ROLE", "got batc\n.*mean batch"),
        (plain, (), {"arguments": {"batch": "bath"}}, "SW_TASK_ROLE", "batch: 'bath'"),
        (plain, (), {"arguments": {"batch": "state"}}, "SW_TASK_BATCH", "argument that is batch"),
    ],
)  # fmt: skip
def test_what_is_not_clear_is_asked(
    step: Any, extra: Any, settings: dict[str, Any], code: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        found(step, *ARGUMENTS, *extra, samples=16, **settings)
    assert caught.value.code == code
    assert "bath" in words or Path(__file__).name in str(caught.value.loc)


def test_a_decorated_step_is_the_step() -> None:
    step = train_step(jax.jit(plain), loss="2")
    assert step.__name__ == "plain" and step.lower(*ARGUMENTS).as_text().startswith("module")
    again = copy.copy(step)
    assert float(again(*ARGUMENTS)[2]) == float(plain(*ARGUMENTS)[2]) == WIDTH**2
    assert again.settings is step.settings


def test_a_rate_that_is_named_comes_back() -> None:
    given = ("params", "opt_state", "loss", "rate")
    task = train_step(_returns_a_rate, results=given).task(((*ARGUMENTS, np.float32(0.5)), {}))
    assert float(run_reference(task, steps=1, global_batch=8, keep=(1,)).states[1]["rate"]) == (
        pytest.approx(0.45)
    )


MODULE = """
import functools
import jax
import jax.numpy as jnp
from shardwright import train_step

def example(key, width=4):
    params = {"w": jax.random.normal(key, (width, width))}
    return params, jnp.ones((8, width))

@train_step(example=example, tokens_per_sample=3)
@functools.partial(jax.jit, donate_argnums=0)
def step(params, x):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
    return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

def make():
    return train_step(step, example=lambda: example(jax.random.key(1)), name="made")

def fixed():
    params, x = example(jax.random.key(0))
    assert float(x.sum()) == 32  # a number of an array
    return params, x

looks = train_step(step, example=fixed)
bare = train_step(step)

def plain(params, x):
    return step(params, x)
"""


def test_a_job_names_a_decorated_step(tmp_path: Path) -> None:
    (tmp_path / "forms.py").write_text(MODULE)
    task = load_task("forms:step", tmp_path, settings={"model.width": 6})
    assert (task.name, task.samples, task.tokens_per_sample) == ("step", 8, 3)
    assert [i.shape for i in capture(task, 4).inputs] == [(6, 6), (4, 6)]
    first, other = (initial_state(task, seed)["params/w"] for seed in (0, 1))
    assert (first != other).any(), "an example of a key is drawn from the seed"
    assert load_task("forms:make", tmp_path).name == "made"
    assert capture(load_task("forms:looks", tmp_path), 16).inputs[1].shape == (16, 4)
    for entry, code, words in (
        ("forms:bare", "SW_STEP_EXAMPLE", "requires arguments to show it by"),
        ("forms:plain", "SW_ENTRY", r"got plain\(params, x\)\n.*decorate it"),
    ):
        with pytest.raises(UsageError, match=words) as caught:
            load_task(entry, tmp_path)
        assert caught.value.code == code and "forms.py" in str(caught.value.loc)
    with pytest.raises(UsageError, match="a function that takes seq_len") as caught:
        load_task("forms:step", tmp_path, settings={"model.seq_len": 8})
    assert caught.value.code == "SW_MODEL_SETTING"
