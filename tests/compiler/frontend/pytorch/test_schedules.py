"""Schedulers of torch.optim.lr_scheduler: rates, and momentum, of thirty steps are torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.pytorch.optimizers import transformation
from shardwright.compiler.frontend.pytorch.schedules import described_schedule, schedules_of

torch = pytest.importorskip("torch", exc_type=ImportError)

from torch.optim import lr_scheduler as lrs  # noqa: E402 (there may be no torch)

STEPS = 30
BOUND = 1e-6
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about order

Make = Callable[[Any], Any]
CLOSED: Mapping[str, Make] = {
    "step": lambda o: lrs.StepLR(o, 4, 0.5),
    "milestones": lambda o: lrs.MultiStepLR(o, [3, 7, 7, 20], 0.3),
    "constant": lambda o: lrs.ConstantLR(o, 0.5, 4),
    "linear": lambda o: lrs.LinearLR(o, 0.1, 0.9, 12),
    "exponential": lambda o: lrs.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lrs.PolynomialLR(o, 20, 2.0),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 8, 1e-4),
    "cosine, longer": lambda o: lrs.CosineAnnealingLR(o, 100),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 7, 1, 1e-4),
    "restarts, growing": lambda o: lrs.CosineAnnealingWarmRestarts(o, 4, 2),
    "one cycle": lambda o: lrs.OneCycleLR(o, [0.1, 0.2], STEPS + 1),
    "one cycle, three phases": lambda o: lrs.OneCycleLR(
        o, 0.1, STEPS + 1, three_phase=True, anneal_strategy="linear", pct_start=0.25
    ),
    "one cycle of rates": lambda o: lrs.OneCycleLR(o, 0.1, 40, cycle_momentum=False),
    "cycles": lambda o: lrs.CyclicLR(o, 1e-3, 0.1, 5, 7),
    "cycles, halved": lambda o: lrs.CyclicLR(o, 1e-3, 0.1, 5, mode="triangular2"),
    "cycles, falling": lambda o: lrs.CyclicLR(
        o, 1e-3, [0.1, 0.2], 5, mode="exp_range", gamma=0.95, cycle_momentum=False
    ),
    "warm-up, then cosine": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=5), lrs.CosineAnnealingLR(o, 20)], [5]
    ),
    "three in turn": lambda o: lrs.SequentialLR(
        o, [lrs.ConstantLR(o, 0.1, 3), lrs.StepLR(o, 2, 0.9), lrs.ExponentialLR(o, 0.9)], [4, 15]
    ),
    "a product": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o, 0.1, 3), lrs.ExponentialLR(o, 0.9)]
    ),
    "two of the loop": lambda o: [lrs.LinearLR(o, 0.1, total_iters=5), lrs.StepLR(o, 6, 0.5)],
}
TABULATED: Mapping[str, Make] = {
    "lambdas": lambda o: lrs.LambdaLR(o, [lambda k: 0.9**k, lambda k: 1 / (1 + k)]),
    "products of a lambda": lambda o: lrs.MultiplicativeLR(o, lambda k: 0.95),
    "cycles of a lambda": lambda o: lrs.CyclicLR(o, 1e-3, 0.1, 5, scale_fn=lambda x: 1 / x),
    "in turn, with a lambda": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=5), lrs.MultiplicativeLR(o, lambda k: 0.95)], [5]
    ),
    "cosine on another": lambda o: lrs.ChainedScheduler(
        [lrs.LinearLR(o, 0.1, total_iters=5), lrs.CosineAnnealingLR(o, 20, 1e-4)]
    ),
    "averaging": lambda o: torch.optim.swa_utils.SWALR(o, 5e-2, 10),
    "a user's class": lambda o: Halved(o),
}
TRANSFORMERS: Mapping[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "constant": ("get_constant_schedule", (), {}),
    "warm-up": ("get_constant_schedule_with_warmup", (6,), {}),
    "line": ("get_linear_schedule_with_warmup", (5, 25), {}),
    "cosine": ("get_cosine_schedule_with_warmup", (5, 25), {}),
    "two waves": ("get_cosine_schedule_with_warmup", (0, 25), {"num_cycles": 2.0}),
    "restarts": ("get_cosine_with_hard_restarts_schedule_with_warmup", (5, 25, 3), {}),
    "polynomial": ("get_polynomial_decay_schedule_with_warmup", (5, 25, 1e-4, 2.0), {}),
    "root": ("get_inverse_sqrt_schedule", (5,), {}),
    "least": ("get_cosine_with_min_lr_schedule_with_warmup", (5, 25), {"min_lr_rate": 0.1}),
}


class Halved(lrs.StepLR):
    """A user's class, which is no StepLR."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, 3)

    def get_lr(self) -> list[float]:
        return [rate / 2 ** (self.last_epoch // 5) for rate in self.base_lrs]


def optimizer(made: Any = torch.optim.Adam, **options: Any) -> Any:
    groups = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
    for parameter in groups:
        parameter.grad = torch.ones_like(parameter)
    return made([{"params": groups[:1]}, {"params": groups[1:], "lr": 3e-2}], lr=1e-2, **options)


def as_list(scheduler: Any) -> Sequence[Any]:
    return scheduler if isinstance(scheduler, list) else [scheduler]


def options_of(group: Mapping[str, Any]) -> dict[str, float]:
    """What schedulers change."""
    beta1 = {"beta1": group["betas"][0]} if "betas" in group else {}
    momentum = {"momentum": group["momentum"]} if "momentum" in group else {}
    return {"lr": float(group["lr"]), **beta1, **momentum}


def held(made: Any, scheduler: Any, steps: int) -> None:
    """Options of each group in thirty steps, within a share of the greatest that there is."""
    (found,) = schedules_of([made], scheduler, 0, 1, steps)
    constant = [options_of(group) for group in made.param_groups]
    wanted = []
    for _ in range(STEPS):
        wanted.append([options_of(group) for group in made.param_groups])
        made.step()
        for each in as_list(scheduler):
            each.step()
    for number, row in enumerate(found):
        assert "lr" in row
        for option, first in constant[number].items():
            torchs = np.array([groups[number][option] for groups in wanted])
            if option not in row:
                assert (torchs == first).all(), option
                continue
            ours = np.array(jax.vmap(row[option])(jnp.arange(STEPS)))
            assert np.abs(ours - torchs).max() <= BOUND * torchs.max(), (number, option)
    assert len({groups[0]["lr"] for groups in wanted}) > 1


@pytest.mark.parametrize("made", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("name", CLOSED)
def test_closed_forms(name: str, made: Any) -> None:
    """They need no table: one of a single row would hold the first rate."""
    own = optimizer(made, **({"momentum": 0.9} if made is torch.optim.SGD else {}))
    held(own, CLOSED[name](own), steps=1)


@pytest.mark.parametrize("name", TABULATED)
def test_tables(name: str) -> None:
    own = optimizer()
    held(own, TABULATED[name](own), steps=STEPS)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_schedules_of_transformers(name: str) -> None:
    made = pytest.importorskip("transformers.optimization", exc_type=ImportError)
    own = optimizer()
    function, arguments, options = TRANSFORMERS[name]
    scheduler = getattr(made, function)(own, *arguments, **options)
    if name == "constant":
        (found,) = schedules_of([own], scheduler, 0, 1, 1)
        assert float(found[1]["lr"](jnp.int32(9))) == pytest.approx(3e-2)
        return
    held(own, scheduler, steps=1)


def test_a_table_holds_its_last_row_and_leaves_the_scheduler_as_it_was() -> None:
    own = optimizer()
    scheduler = lrs.LambdaLR(own, lambda k: 0.9**k)
    ((first, _),) = schedules_of([own], scheduler, 0, 1, 4)
    rates = [float(first["lr"](jnp.int32(n))) for n in (0, 3, 4, 1000)]
    assert rates == pytest.approx([1e-2, 1e-2 * 0.9**3, 1e-2 * 0.9**3, 1e-2 * 0.9**3])
    assert scheduler.last_epoch == 0 and own.param_groups[0]["lr"] == 1e-2


def test_a_table_ends_where_a_scheduler_does() -> None:
    own = optimizer()
    rates = [0.3, 0.2, 0.1]
    ((first, _),) = schedules_of([own], lrs.LambdaLR(own, lambda k: rates[k]), 0, 1, 9)
    found = [float(first["lr"](jnp.int32(n))) for n in range(5)]
    assert found == pytest.approx([3e-3, 2e-3, 1e-3, 1e-3, 1e-3])


def test_without_a_scheduler_there_is_no_schedule() -> None:
    assert schedules_of([optimizer()], None, 0, 1, 9) == [[{}, {}]]


@pytest.mark.parametrize(
    "name", ["warm-up, then cosine", "cycles", "restarts, growing", "a product"]
)
def test_a_scheduler_that_has_stepped_goes_on(name: str) -> None:
    own = optimizer()
    scheduler = CLOSED[name](own)
    for _ in range(7):
        own.step()
        scheduler.step()
    held(own, scheduler, steps=1)


@pytest.mark.parametrize("make", [CLOSED["one cycle"], CLOSED["cosine"], TABULATED["lambdas"]])
def test_one_compiled_step_serves_all(make: Make) -> None:
    """The rate and momentum that a step has are in its count, and in nothing that was traced."""
    own = optimizer()
    scheduler = make(own)
    named = dict(zip("ab", (g["params"][0] for g in own.param_groups), strict=True))
    tx = transformation(own, named.items(), scheduler)
    params = {name: jnp.asarray(p.detach().numpy().copy()) for name, p in named.items()}
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update({n: jnp.ones_like(p) for n, p in params.items()}, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(STEPS):
        params, state = step(params, state)
        own.step()
        scheduler.step()
        for name, p in named.items():
            np.testing.assert_allclose(params[name], p.detach().numpy(), atol=BOUND)
    assert step._cache_size() == 1 and int(state["step"]) == STEPS


def test_a_scheduler_that_steps_by_epoch() -> None:
    own = optimizer()
    scheduler = lrs.ExponentialLR(own, 0.5)
    ((first, _),) = schedules_of([own], scheduler, 0, 3, 1)
    rates = [float(first["lr"](jnp.int32(n))) for n in range(7)]
    assert rates == pytest.approx([1e-2] * 3 + [5e-3] * 3 + [2.5e-3])


def refusal(make: Callable[[], Any]) -> str:
    with pytest.raises(UsageError) as caught:
        make()
    assert caught.value.code == "SW_TORCH_SCHEDULER"
    return str(caught.value)


def test_what_waits_for_a_metric_is_refused() -> None:
    own = optimizer()
    told = refusal(lambda: schedules_of([own], lrs.ReduceLROnPlateau(own), 0, 1, 1))
    assert "got ReduceLROnPlateau, which waits for a metric" in told


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    own, other = optimizer(), optimizer()
    told = refusal(lambda: schedules_of([own], lrs.StepLR(other, 2), 0, 1, 1))
    assert "StepLR requires the optimizer that is given with it" in told


def test_what_is_no_scheduler_is_refused() -> None:
    assert "got function" in refusal(lambda: schedules_of([optimizer()], refusal, 0, 1, 1))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("StepLR", {"step_size": 4}),
        ("MultiStepLR", {"milestones": [3, 9], "gamma": 0.5}),
        ("ConstantLR", {}),
        ("LinearLR", {}),
        ("ExponentialLR", {"gamma": 0.9}),
        ("PolynomialLR", {}),
        ("CosineAnnealingLR", {"T_max": 7}),
        ("CosineAnnealingWarmRestarts", {"T_0": 7}),
    ],
)
def test_described_schedules_have_the_defaults_of_torch(name: str, options: dict[str, Any]) -> None:
    own = optimizer()
    scheduler = getattr(lrs, name)(own, **options)
    rate = described_schedule({"name": name, **options}, 1e-2)
    for step in range(12):
        assert float(rate(jnp.int32(step))) == pytest.approx(own.param_groups[0]["lr"], abs=1e-8)
        own.step()
        scheduler.step()
