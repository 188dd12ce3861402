"""Optimizers of torch.optim: parameters, state and rates of ten steps are torch's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.capture import capture
from shardwright.compiler.frontend.pytorch.optimizers import transformation
from shardwright.compiler.frontend.pytorch.update_rules import RULES
from shardwright.compiler.frontend.task import TrainTask

torch = pytest.importorskip("torch", exc_type=ImportError)

SHAPES = {"bias": (7,), "layer.weight": (8, 12), "kernel": (3, 4, 5)}
STEPS = 10
BOUND = 1e-6


def grid(**options: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Every combination of options."""
    for values in itertools.product(*options.values()):
        yield dict(zip(options, values, strict=True))


DECAY = {"weight_decay": (0.0, 0.1), "maximize": (False, True)}
GRID: Mapping[str, list[dict[str, Any]]] = {
    "SGD": [
        {"lr": 0.05, **options}
        for options in grid(
            momentum=(0.0, 0.9), dampening=(0.0, 0.3), nesterov=(False, True), **DECAY
        )
        if not options["nesterov"] or (options["momentum"] and not options["dampening"])
    ],
    "Adam": [*grid(amsgrad=(False, True), **DECAY), {"betas": (0.0, 0.5), "eps": 1e-3}],
    "AdamW": [*grid(amsgrad=(False, True), lr=(1e-2,), **DECAY), {"lr": torch.tensor(0.02)}],
    "Adafactor": [
        *grid(lr=(1e-2,), **DECAY),
        *grid(lr=(0.5,), eps=((1e-3, 1e-2), (None, 1.0)), d=(1.5,), beta2_decay=(-0.5,)),
    ],
    "Adagrad": [*grid(lr_decay=(0.0, 0.1), initial_accumulator_value=(0.0, 0.3), **DECAY)],
    "RMSprop": [*grid(centered=(False, True), momentum=(0.0, 0.8), **DECAY)],
    "Adadelta": [*grid(rho=(0.9, 0.5), **DECAY)],
    "Adamax": [*grid(**DECAY)],
    "NAdam": [*grid(decoupled_weight_decay=(False, True), momentum_decay=(4e-3, 0.5), **DECAY)],
    "RAdam": [
        *grid(decoupled_weight_decay=(False, True), lr=(1e-2,), **DECAY),
        *grid(betas=((0.8, 0.9), (0.9, 0.95)), lr=(1e-2,)),  # steps on both sides of the series
    ],
}
CELLS = [(name, options) for name, rows in GRID.items() for options in rows]


def parameters(
    shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: Any = torch.float32, scale: float = 1.0
) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    values = {name: scale * rng.normal(size=shape) for name, shape in shapes.items()}
    return {name: torch.nn.Parameter(torch.tensor(v).to(dtype)) for name, v in values.items()}


def grouped(named: Mapping[str, Any], **others: Any) -> list[dict[str, Any]]:
    """Two parameter groups, of which the second has options of its own."""
    first, *rest = named.values()
    return [{"params": rest}, {"params": [first], **others}]


def array(tensor: Any) -> jax.Array:
    dtype = {torch.bfloat16: jnp.bfloat16}.get(tensor.dtype, jnp.float32)
    return jnp.asarray(tensor.detach().float().numpy().copy(), dtype)


def jitted(tx: optax.GradientTransformation) -> Callable[..., Any]:
    @jax.jit
    def step(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step


def distance(found: Any, wanted: Any) -> float:
    """The greatest difference, of the greatest element."""
    a, b = np.asarray(found, np.float64), wanted.detach().double().numpy()
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))


def held(
    named: Mapping[str, Any],
    optimizers: Sequence[Any],
    tx: optax.GradientTransformation,
    schedulers: Sequence[Any] = (),
    clip: Callable[[], Any] = lambda: None,
    bound: float = BOUND,
    scale: float = 1.0,
) -> Any:
    """Ten steps of both, with equal parameters behind each, and equal state behind the last."""
    params = {name: array(p) for name, p in named.items()}
    state, step, rng = tx.init(params), jitted(tx), np.random.default_rng(1)
    for _ in range(STEPS):
        for p in named.values():
            if p.requires_grad:
                p.grad = torch.tensor(scale * rng.normal(size=tuple(p.shape))).to(p.dtype)
        gradients = {n: array(p if p.grad is None else p.grad) for n, p in named.items()}
        clip()
        for each in (*optimizers, *schedulers):
            each.step()
        params, state = step(params, state, gradients)
        for name, p in named.items():
            assert distance(params[name], p) <= bound, name
    compared = 0
    for name, p in named.items():
        for slot, value in next((o.state[p] for o in optimizers if p in o.state), {}).items():
            if slot != "step" and value is not None:
                assert distance(state[slot][name], value) <= 4 * bound, (slot, name)
                compared += 1
    assert compared == sum(len(arrays) for slot, arrays in state.items() if slot != "step")
    return params, state


def test_every_rule_is_in_the_grid() -> None:
    assert set(GRID) | {"Muon"} == set(RULES)


@pytest.mark.parametrize("name", RULES)
def test_options_and_defaults_are_those_of_torch(name: str) -> None:
    made = getattr(torch.optim, name, None)
    if made is None:
        pytest.skip(f"this torch has no {name}")
    defaults = made([torch.nn.Parameter(torch.zeros(2, 2))]).defaults
    ours = {o: v for o, v in RULES[name].options.items() if o in defaults}
    assert ours == {o: defaults[o] for o in ours}
    assert set(RULES[name].options) - set(ours) <= {"decoupled_weight_decay"}  # before torch 2.7


@pytest.mark.parametrize(("name", "options"), CELLS)
def test_ten_steps(name: str, options: dict[str, Any]) -> None:
    named = parameters()
    made = getattr(torch.optim, name)(grouped(named, lr=0.03, weight_decay=0.2), **options)
    held(named, [made], transformation(made, named.items()))


@pytest.mark.parametrize("name", GRID)
def test_the_first_step_of_a_parameter_that_is_zero(name: str) -> None:
    """What is added is right in each element: optax's adam is off by 7e-6 here."""
    named = parameters(scale=0.0)
    made = getattr(torch.optim, name)(named.values(), lr=0.01)
    tx = transformation(made, named.items())
    rng = np.random.default_rng(2)
    params = {n: array(p) for n, p in named.items()}
    gradients = {n: rng.normal(size=tuple(p.shape)).astype(np.float32) for n, p in named.items()}
    for n, p in named.items():
        p.grad = torch.tensor(gradients[n])
    made.step()
    updates, _ = tx.update(gradients, tx.init(params), params)
    for n, p in named.items():
        np.testing.assert_allclose(updates[n], p.detach().numpy(), rtol=BOUND, err_msg=n)


@pytest.mark.parametrize("eps", [(None, 1e-3), (1e-2, 1e-3)])
def test_adafactor_where_the_estimate_is_below_its_least(eps: tuple[float | None, float]) -> None:
    named = parameters()
    made = torch.optim.Adafactor(named.values(), lr=0.05, eps=eps)
    least = torch.finfo(torch.float32).eps if eps[0] is None else eps[0]
    held(named, [made], transformation(made, named.items()), scale=0.3 * least)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(["SGD", "Adam", "AdamW"]),
    lr=st.floats(1e-5, 0.1),
    decay=st.floats(0, 0.2),
    betas=st.tuples(st.floats(0, 0.99), st.floats(0.5, 0.9999)),
    eps=st.floats(1e-10, 1e-2),
)
def test_any_options(
    name: str, lr: float, decay: float, betas: tuple[float, float], eps: float
) -> None:
    named = parameters({"a": (3, 5), "b": (4,)})
    own = {"momentum": betas[0]} if name == "SGD" else {"betas": betas, "eps": eps}
    made = getattr(torch.optim, name)(named.values(), lr=lr, weight_decay=decay, **own)
    held(named, [made], transformation(made, named.items()))


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_bfloat16_is_rounded_where_fused_kernels_round(name: str) -> None:
    named = parameters(dtype=torch.bfloat16)
    made = getattr(torch.optim, name)(named.values(), lr=1e-2, weight_decay=0.1, fused=True)
    _, state = held(named, [made], transformation(made, named.items()), bound=0.0)
    assert state["exp_avg"]["bias"].dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adafactor", "RMSprop"])
def test_bfloat16_is_within_its_rounding_of_loops(name: str) -> None:
    named = parameters(dtype=torch.bfloat16)
    made = getattr(torch.optim, name)(named.values(), lr=1e-3)
    held(named, [made], transformation(made, named.items()), bound=2**-7)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("scale", [None, "match_rms_adamw"])
def test_muon_beside_another_optimizer(scale: str | None) -> None:
    """Two optimizers that share the parameters out; Muon's matrices are multiplied in bf16."""
    named = parameters({"tall": (12, 8), "wide": (8, 12), "bias": (7,)})
    matrices = [p for p in named.values() if p.ndim == 2]
    made = [
        torch.optim.Muon(matrices, lr=1e-2, adjust_lr_fn=scale),
        torch.optim.AdamW([named["bias"]], lr=1e-2),
    ]
    schedulers = [torch.optim.lr_scheduler.StepLR(made[0], 2, 0.9)]
    tx = transformation(made, named.items(), schedulers)
    params, state = held(named, made, tx, schedulers, bound=5e-3)
    assert set(state["momentum_buffer"]) == {"tall", "wide"}
    assert set(state["exp_avg"]) == {"bias"} and distance(params["bias"], named["bias"]) < BOUND


@pytest.mark.parametrize("bound", [0.5, 100.0])
def test_the_norm_of_gradients_is_bounded_as_by_the_loop(bound: float) -> None:
    """Gradients of parameters that no group has are part of the norm; frozen ones have none."""
    named = parameters({**SHAPES, "in no group": (5,), "frozen": (3,)})
    named["frozen"].requires_grad_(False)
    own = [named[name] for name in SHAPES] + [named["frozen"]]
    made = torch.optim.SGD(own, lr=0.1, momentum=0.9)
    tx = transformation(made, named.items(), clip_norm=bound)
    held(
        named,
        [made],
        tx,
        clip=lambda: torch.nn.utils.clip_grad_norm_(named.values(), bound),
    )


def test_elements_of_gradients_are_bounded_as_by_the_loop() -> None:
    named = parameters()
    made = torch.optim.Adagrad(named.values(), lr=0.1)
    tx = transformation(made, named.items(), clip_value=0.4)
    held(named, [made], tx, clip=lambda: torch.nn.utils.clip_grad_value_(named.values(), 0.4))


def test_a_parameter_without_a_gradient_stays_as_it_was() -> None:
    named = parameters()
    made = torch.optim.AdamW(named.values(), lr=0.1)
    tx = transformation(made, named.items())
    params = {name: array(p) for name, p in named.items()}
    state = tx.init(params)
    gradients = {"kernel": params["kernel"], "bias": None}
    updates, after = tx.update(gradients, state, params)
    assert not np.any(updates["bias"]) and not np.any(updates["layer.weight"])
    assert after["exp_avg"]["bias"] is state["exp_avg"]["bias"]
    assert np.all(np.asarray(updates["kernel"])) and np.all(np.asarray(after["exp_avg"]["kernel"]))


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "Adafactor", "SGD"])
def test_an_optimizer_that_has_taken_steps_goes_on(name: str) -> None:
    named = parameters()
    options = {"momentum": 0.9, "dampening": 0.3} if name == "SGD" else {}
    made = getattr(torch.optim, name)(named.values(), lr=0.02, **options)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(made, 30)]
    for _ in range(4):
        for p in named.values():
            p.grad = torch.ones_like(p)
        made.step()
        schedulers[0].step()
    tx = transformation(made, named.items(), schedulers)
    _, state = held(named, [made], tx, schedulers)
    assert int(state["step"]) == (STEPS + 1 if name == "SGD" else STEPS + 4)  # SGD counts none


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("SGD", {"momentum_buffer"}),
        ("AdamW", {"exp_avg", "exp_avg_sq"}),
        ("NAdam", {"exp_avg", "exp_avg_sq", "mu_product"}),
        ("Adafactor", {"row_var", "col_var"}),
    ],
)
def test_roles_of_a_step(name: str, slots: set[str]) -> None:
    """State is optimizer state, and what needs no gradient, or is in no group, is frozen."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 6, bias=False))
    module[0].bias.requires_grad_(False)
    options = {"momentum": 0.9} if name == "SGD" else {}
    made = getattr(torch.optim, name)(module[0].parameters(), **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
    tx = transformation(made, module.named_parameters(), scheduler, clip_norm=1.0)

    def init(key: jax.Array) -> Any:
        params = {n: array(p) for n, p in module.named_parameters()}
        return params, tx.init(params)

    def loss_of(params: Any, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ params["0.weight"].T + params["0.bias"])
        return jnp.mean((hidden @ params["1.weight"].T) ** 2)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss}

    def batch(samples: int) -> Any:
        return jax.ShapeDtypeStruct((samples, 8), jnp.float32)

    inputs = {i.name: i for i in capture(TrainTask(step=step, init=init, batch=batch), 4).inputs}
    roles = {name: info.role for name, info in inputs.items()}
    frozen = {"params/0.bias": "frozen", "params/1.weight": "frozen"}
    state = {f"opt_state/{slot}/0.weight": "optimizer" for slot in slots}
    others = {"params/0.weight": "parameter", "opt_state/step": "optimizer", "batch": "batch"}
    assert roles == frozen | state | others
    if name in ("SGD", "AdamW"):
        assert {inputs[leaf].shape for leaf in state} == {inputs["params/0.weight"].shape}


def refusal(make: Callable[[], Any]) -> str:
    with pytest.raises(UsageError) as caught:
        make()
    assert caught.value.code == "SW_TORCH_OPTIMIZER"
    return str(caught.value)


class OwnStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class OwnDefaults(torch.optim.AdamW):
    """Its step is AdamW's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05, weight_decay=0.3)


def test_a_class_that_inherits_its_step() -> None:
    named = parameters()
    made = OwnDefaults(named.values())
    held(named, [made], transformation(made, named.items()))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.LBFGS, "LBFGS whose step computes the loss again"),
        (torch.optim.SparseAdam, "got SparseAdam of torch"),
        (torch.optim.Rprop, "got Rprop of torch"),
        (OwnStep, "got OwnStep of"),
    ],
)
def test_a_class_without_a_row_is_refused(make: Any, words: str) -> None:
    named = parameters()
    told = refusal(lambda: transformation(make(named.values(), lr=0.1), named.items()))
    assert words in told and "supported are SGD, Adam, AdamW, Adafactor" in told


def test_an_adafactor_of_another_library_is_refused() -> None:
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    named = parameters()
    told = refusal(lambda: transformation(transformers.Adafactor(named.values()), named.items()))
    assert "got Adafactor of transformers" in told


def test_an_option_that_is_not_known_has_to_be_off() -> None:
    named = parameters()
    made = torch.optim.SGD(named.values(), lr=0.1)
    made.defaults["lookahead"] = made.param_groups[0]["lookahead"] = False
    held(named, [made], transformation(made, named.items()))
    made.param_groups[0]["lookahead"] = True
    assert "lookahead=True" in refusal(lambda: transformation(made, named.items()))


def test_options_of_how_it_is_computed_have_no_effect() -> None:
    named = parameters()
    made = torch.optim.AdamW(named.values(), foreach=True)
    held(named, [made], transformation(made, named.items()))


def test_parameters_that_are_not_the_modules_are_refused() -> None:
    named, others = parameters(), parameters()
    made = torch.optim.SGD(others.values(), lr=0.1)
    told = refusal(lambda: transformation(made, named.items()))
    assert "group 0, requires parameters of the module, got one of shape (7,)" in told


def test_complex_parameters_are_refused() -> None:
    named = {"phase": torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))}
    made = torch.optim.SGD(named.values(), lr=0.1)
    assert "got phase of type torch.complex64" in refusal(
        lambda: transformation(made, named.items())
    )


def test_parameters_with_other_numbers_of_steps_are_refused() -> None:
    named = parameters()
    first, second, _ = named.values()
    made = torch.optim.Adam([first, second])
    first.grad = torch.ones_like(first)
    made.step()
    second.grad = torch.ones_like(second)
    made.step()
    assert "as many steps, got 1, 2" in refusal(lambda: transformation(made, named.items()))
