"""Schedulers of torch.optim.lr_scheduler as functions of the step count.

A schedule is a traced function of the count in the optimizer's state, so that one compiled step
serves all steps, and it needs no number of steps. Two ways lead to one:

- a row: the closed form of a class, or of a function that `transformers` gives to LambdaLR. A
  scheduler that multiplies the rate is a *factor* of the count, and chained ones are a product; the
  others say the rate itself, and momentum where they cycle it.
- a table: every other scheduler, a user's class or lambda, is stepped in a copy, and what it does
  is a constant that the count indexes. The last row holds for all steps behind it.

Rows are preferred: a table is right for as many steps as it has, 4 bytes per step and group are
constants of every program, and stepping the copy takes 4 us each. What waits for a metric
(ReduceLROnPlateau) is no function of the count and is refused.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from shardwright.compiler.diagnostics import UsageError, did_you_mean

if TYPE_CHECKING:
    import jax
    import torch

Schedule = Callable[["jax.Array"], "jax.Array"]
"""An option of a parameter group in the step behind so many others."""
Schedules = dict[str, Schedule]
"""By option: `lr`, and `momentum` or `beta1`."""
TABULATED_STEPS = 2048
"""Rows of a table where nobody says how many: 8 KiB per group (our choice)."""
_CODE = "SW_TORCH_SCHEDULER"
_REQUIRED = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A class of scheduler that multiplies the first rate by `of(scheduler)`, a function of the
    count. `options` are what its constructor takes, with torch's defaults, and what it keeps."""

    options: Mapping[str, Any]
    of: Callable[[Any], Schedule]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """A class of scheduler that says the rate itself: `of(scheduler, group number)` is None where
    it has a function of the user's that has no row. `options` as of `Factor`, None where it keeps
    others than it takes."""

    of: Callable[[Any, int], Schedules | None]
    options: Mapping[str, Any] | None = None


def schedules_of(
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Any,
    begun: int,
    interval: int,
    steps: int,
) -> list[list[Schedules]]:
    """Per optimizer, what its schedulers do to each of its parameter groups. They step in order,
    once every `interval` steps of the optimizers, whose count is at `begun`; `steps` of them are
    tabulated at most.

    Raises: UsageError SW_TORCH_SCHEDULER.
    """
    several = tuple(schedulers) if isinstance(schedulers, Sequence) else (schedulers,)
    several = () if schedulers is None else several
    for scheduler in several:
        _check(optimizers, scheduler)

    def counted(schedule: Schedule) -> Schedule:
        every = max(1, interval)
        return lambda step: schedule((step - begun) // every if every > 1 else step - begun)

    found = []
    for optimizer in optimizers:
        rows = _of_groups(optimizer, [s for s in several if s.optimizer is optimizer], steps)
        found.append([{option: counted(f) for option, f in row.items()} for row in rows])
    return found


def _of_groups(
    optimizer: torch.optim.Optimizer, schedulers: Sequence[Any], steps: int
) -> list[Schedules]:
    """What the schedulers of one optimizer do to its groups, by their own count."""
    if not schedulers:
        return [{} for _ in optimizer.param_groups]
    closed = [_chained(schedulers, number) for number in range(len(optimizer.param_groups))]
    found = [row for row in closed if row is not None]
    return found if len(found) == len(closed) else _tabulated(optimizer, schedulers, steps)


def described_schedule(description: Mapping[str, Any], rate: float) -> Schedule:
    """The schedule of a rate by a dictionary: `name` of a class, and its options.

    Raises: UsageError SW_TORCH_SCHEDULER.
    """
    given = dict(description)
    rows: dict[str, Factor | Rates] = {n: r for n, r in _ROWS.items() if r.options is not None}
    name = str(given.pop("name", ""))
    row = rows.get(name)
    if row is None:
        raise UsageError(
            _CODE,
            f"a schedule requires name to be one of {', '.join(rows)}, got {name!r}",
            hint=did_you_mean(name, rows),
        )
    assert row.options is not None
    options = {**row.options, **given}
    unknown = next((key for key in given if key not in row.options), None)
    absent = next((key for key, value in options.items() if value is _REQUIRED), None)
    if unknown or absent:
        raise UsageError(
            _CODE,
            f"{name} requires options among {', '.join(row.options)},"
            + (f" got {unknown}" if unknown else f" and {absent} is not given"),
            hint=did_you_mean(unknown, row.options) if unknown else f"say {absent}",
        )
    found = _of_one(SimpleNamespace(**options, base_lrs=[rate]), 0, row)
    assert found is not None
    return found["lr"]


def _check(optimizers: Sequence[torch.optim.Optimizer], scheduler: Any) -> None:
    """Raises UsageError for what is no scheduler of these, or depends on a metric."""
    name = type(scheduler).__name__
    if not hasattr(scheduler, "step") or not hasattr(scheduler, "optimizer"):
        raise UsageError(
            _CODE,
            f"a scheduler requires a class of torch.optim.lr_scheduler, got {name}",
            hint="give the scheduler itself; rates that the loop sets have no schedule here",
        )
    if "metrics" in inspect.signature(scheduler.step).parameters:
        raise UsageError(
            _CODE,
            f"a schedule requires a rate that depends on the number of the step, got {name}, which"
            " waits for a metric",
            hint="leave it out: the rate stays, and changes neither time nor memory",
        )
    if not any(scheduler.optimizer is optimizer for optimizer in optimizers):
        raise UsageError(
            _CODE,
            f"{name} requires the optimizer that is given with it, got that of another one",
            hint="make the scheduler of the same optimizer",
        )


def _chained(schedulers: Sequence[Any], number: int) -> Schedules | None:
    """Schedulers that step one behind another, for a group; None without a closed form."""
    if len(schedulers) == 1:
        return _of_scheduler(schedulers[0], number)
    rows = [_row_of(scheduler) for scheduler in schedulers]
    factors = [
        _from(scheduler, row.of(scheduler))
        for scheduler, row in zip(schedulers, rows, strict=True)
        if isinstance(row, Factor)
    ]
    if len(factors) < len(rows):
        return None
    rate = float(schedulers[0].base_lrs[number])
    return {"lr": lambda step: rate * math.prod(factor(step) for factor in factors)}


def _from(scheduler: Any, schedule: Schedule) -> Schedule:
    """A function of the scheduler's own count, from where that is now."""
    begun = scheduler.last_epoch
    return lambda step: schedule(step + begun)


def _of_scheduler(scheduler: Any, number: int) -> Schedules | None:
    """One scheduler for a group; None without a closed form."""
    row = _row_of(scheduler)
    name = type(scheduler).__name__
    if row is None and _is_of_torch(scheduler) and name == "ChainedScheduler":
        return _chained(scheduler._schedulers, number)  # private, in every release
    if row is None and _is_of_torch(scheduler) and name == "SequentialLR":
        return _sequential(scheduler, number)
    found = None if row is None else _of_one(scheduler, number, row)
    return found and {name: _from(scheduler, schedule) for name, schedule in found.items()}


def _of_one(scheduler: Any, number: int, row: Factor | Rates) -> Schedules | None:
    """What a row says of a scheduler's group by its own count."""
    if isinstance(row, Rates):
        return row.of(scheduler, number)
    rate, factor = float(scheduler.base_lrs[number]), row.of(scheduler)
    return {"lr": lambda step: rate * factor(step)}


def _sequential(scheduler: Any, number: int) -> Schedules | None:
    """SequentialLR: each scheduler counts from its milestone."""
    import jax.numpy as jnp

    parts = []
    for each in scheduler._schedulers:  # private, in every release; the milestones too
        row = _row_of(each)
        found = None if row is None else _of_one(each, number, row)
        if found is None or list(found) != ["lr"]:
            return None
        parts.append(found["lr"])
    starts = (0, *scheduler._milestones)

    def rate(step: jax.Array) -> jax.Array:
        value = parts[0](step)
        for start, part in zip(starts[1:], parts[1:], strict=True):
            value = jnp.where(step >= start, part(jnp.maximum(step - start, 0)), value)
        return value

    return {"lr": _from(scheduler, rate)}


def _is_of_torch(scheduler: Any) -> bool:
    """Whether a scheduler is just of its class: a user's may override any part of one."""
    return type(scheduler).__module__ == "torch.optim.lr_scheduler"


def _row_of(scheduler: Any) -> Factor | Rates | None:
    return _ROWS.get(type(scheduler).__name__) if _is_of_torch(scheduler) else None


def _tabulated(
    optimizer: torch.optim.Optimizer, schedulers: Sequence[Any], steps: int
) -> list[Schedules]:
    """What copies of the schedulers do to a copy of the groups, over so many steps of theirs, or up
    to where one says that it is over."""
    import numpy as np

    stand_in = copy.copy(optimizer)
    stand_in.param_groups = [{**g, "params": []} for g in optimizer.param_groups]
    copies = [_copied(scheduler, stand_in) for scheduler in schedulers]
    rows = [[_values(group) for group in stand_in.param_groups]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the copy of the optimizer takes no step
        for _ in range(steps - 1):
            try:
                for scheduler in copies:
                    scheduler.step()
            except (ValueError, LookupError):  # OneCycleLR behind its last step; a list of rates
                break
            rows.append([_values(group) for group in stand_in.param_groups])

    def schedules(number: int) -> Schedules:
        names = rows[0][number]
        columns = {n: np.asarray([row[number][n] for row in rows], np.float32) for n in names}
        return {n: _lookup(c) for n, c in columns.items() if n == "lr" or np.ptp(c)}

    return [schedules(number) for number in range(len(stand_in.param_groups))]


def _copied(scheduler: Any, optimizer: Any) -> Any:
    """A scheduler that steps without those that it was copied from."""
    made = copy.copy(scheduler)
    made.optimizer = optimizer
    inner = getattr(scheduler, "_schedulers", None)
    if inner is not None:
        made._schedulers = [_copied(each, optimizer) for each in inner]
    return made


def _values(group: Mapping[str, Any]) -> dict[str, float]:
    """What schedulers change of a group."""
    betas = {"beta1": float(group["betas"][0])} if "betas" in group else {}
    momentum = {"momentum": float(group["momentum"])} if "momentum" in group else {}
    return {"lr": float(group["lr"]), **betas, **momentum}


def _lookup(values: Any) -> Schedule:
    import jax.numpy as jnp

    return lambda step: jnp.asarray(values)[jnp.clip(step, 0, len(values) - 1)]


def _power(base: float, exponent: Any) -> jax.Array:
    """`base**exponent`, without the rounding of the base in fp32 that many factors would add up."""
    import jax.numpy as jnp

    if base <= 0:
        return jnp.where(exponent == 0, 1.0, 0.0)
    return jnp.exp(exponent * math.log(base))


def _step_lr(s: Any) -> Schedule:
    return lambda step: _power(s.gamma, step // s.step_size)


def _multi_step_lr(s: Any) -> Schedule:
    import jax.numpy as jnp

    counted = s.milestones.elements() if hasattr(s.milestones, "elements") else s.milestones
    milestones = jnp.asarray(sorted(counted), jnp.int32)
    return lambda step: _power(s.gamma, jnp.sum(step >= milestones))


def _constant_lr(s: Any) -> Schedule:
    import jax.numpy as jnp

    return lambda step: jnp.where(step < s.total_iters, s.factor, 1.0)


def _linear_lr(s: Any) -> Schedule:
    grown = s.end_factor - s.start_factor
    return lambda step: s.start_factor + grown * _share(step, s.total_iters)


def _exponential_lr(s: Any) -> Schedule:
    return lambda step: _power(s.gamma, step)


def _polynomial_lr(s: Any) -> Schedule:
    return lambda step: (1 - _share(step, s.total_iters)) ** s.power


def _share(step: Any, total: float) -> Any:
    """How much of `total` steps is over, at most all."""
    import jax.numpy as jnp

    return jnp.minimum(step, total) / total


def _cosine(share: Any) -> jax.Array:
    """Half a wave from 1 to 0."""
    import jax.numpy as jnp

    return (1 + jnp.cos(math.pi * share)) / 2


def _cosine_annealing(s: Any, number: int) -> Schedules:
    rate = float(s.base_lrs[number])
    height = rate - s.eta_min
    return {"lr": lambda step: s.eta_min + height * _cosine(step % (2 * s.T_max) / s.T_max)}


def _warm_restarts(s: Any, number: int) -> Schedules:
    """The cycle that a step is in is found among the first steps of all: they grow by powers."""
    import jax.numpy as jnp

    height = float(s.base_lrs[number]) - s.eta_min
    starts, length = [0], s.T_0
    while s.T_mult > 1 and starts[-1] + length < _MOST_STEPS:
        starts.append(starts[-1] + length)
        length *= s.T_mult

    def rate(step: jax.Array) -> jax.Array:
        if s.T_mult == 1:
            return s.eta_min + height * _cosine(step % s.T_0 / s.T_0)
        begun, long = jnp.zeros((), jnp.int32), jnp.asarray(s.T_0, jnp.int32)
        for n, start in enumerate(starts):
            begun = jnp.where(step >= start, start, begun)
            long = jnp.where(step >= start, s.T_0 * s.T_mult**n, long)
        return s.eta_min + height * _cosine((step - begun) / long)

    return {"lr": rate}


_MOST_STEPS = 2**31 // 2  # no count of int32 gets there


def _one_cycle(s: Any, number: int) -> Schedules:
    """Phases between rates that the scheduler has left in the group."""
    import jax.numpy as jnp

    group = s.optimizer.param_groups[number]
    # private, in every release; the way of annealing was a method in some
    linear = s._anneal_func(0.0, 1.0, 0.25) == 0.25

    def between(kind: str) -> Schedule:
        def value(step: jax.Array) -> jax.Array:
            start, found = 0.0, jnp.asarray(group[s._schedule_phases[0][f"start_{kind}"]])
            for phase in s._schedule_phases:
                low, high = group[phase[f"start_{kind}"]], group[phase[f"end_{kind}"]]
                share = jnp.clip((step - start) / (phase["end_step"] - start), 0, 1)
                left = 1 - share if linear else _cosine(share)
                found = jnp.where(step > start, high + (low - high) * left, found)
                start = phase["end_step"]
            return found

        return value

    momentum = "beta1" if s.cycle_momentum and s.use_beta1 else "momentum"
    cycled = {momentum: between("momentum")} if s.cycle_momentum else {}
    return {"lr": between("lr"), **cycled}


def _cyclic(s: Any, number: int) -> Schedules | None:
    """A triangle of rates, and of momentum against it, whose height falls by cycle or by step."""
    import jax.numpy as jnp

    if s.mode not in _HEIGHTS or s._scale_fn_custom is not None:  # private, from 2.0 on
        return None

    def between(low: float, high: float) -> Schedule:
        def value(step: jax.Array) -> jax.Array:
            cycle = jnp.floor(step / s.total_size)
            x = step / s.total_size - cycle
            rise = jnp.where(x <= s.step_ratio, x / s.step_ratio, (1 - x) / (1 - s.step_ratio))
            return low + (high - low) * rise * _HEIGHTS[s.mode](s, cycle, step)

        return value

    found = {"lr": between(float(s.base_lrs[number]), float(s.max_lrs[number]))}
    if s.cycle_momentum:
        momentum = "beta1" if s.use_beta1 else "momentum"
        found[momentum] = between(s.max_momentums[number], s.base_momentums[number])
    return found


_HEIGHTS: Mapping[str, Callable[[Any, Any, Any], Any]] = {
    "triangular": lambda s, cycle, step: 1.0,
    "triangular2": lambda s, cycle, step: _power(0.5, cycle),
    "exp_range": lambda s, cycle, step: _power(s.gamma, step),
}


def _lambda_lr(s: Any, number: int) -> Schedules | None:
    """A function that `transformers` made, with what it was made with."""
    rate, function = float(s.base_lrs[number]), s.lr_lambdas[number]
    inner = getattr(function, "func", function)
    made = _LAMBDAS.get(getattr(inner, "__name__", ""))
    if getattr(inner, "__module__", "") != "transformers.optimization" or made is None:
        return None
    if getattr(function, "args", ()):
        return None
    factor = made(SimpleNamespace(**getattr(function, "keywords", {})))
    return {"lr": lambda step: rate * factor(step)}


def _warmed(o: Any, behind: Callable[[Any, Any], Any]) -> Schedule:
    """A line from 0 to 1 over the steps of warm-up, and then a function of the count and of the
    share of the other steps that is over."""
    import jax.numpy as jnp

    warm = o.num_warmup_steps
    rest = max(1, getattr(o, "num_training_steps", warm + 1) - warm)

    def factor(step: jax.Array) -> jax.Array:
        later = behind(step, jnp.maximum(step - warm, 0) / rest)
        return jnp.where(step < warm, step / max(1, warm), later)

    return factor


def _polynomial_behind(o: Any, share: Any) -> Any:
    import jax.numpy as jnp

    least = o.lr_end / o.lr_init
    return least + (1 - least) * (1 - jnp.minimum(share, 1)) ** o.power


def _restarts_behind(o: Any, share: Any) -> Any:
    import jax.numpy as jnp

    return jnp.where(share >= 1, 0.0, _cosine(o.num_cycles * share % 1.0))


def _cosine_behind(o: Any, share: Any) -> Any:
    least = getattr(o, "min_lr_rate", 0.0)
    return _cosine(2 * o.num_cycles * share) * (1 - least) + least


def _line_behind(o: Any, share: Any) -> Any:
    import jax.numpy as jnp

    return jnp.maximum(0, 1 - share)


def _root_behind(o: Any, step: Any) -> Any:
    import jax.numpy as jnp

    later = jnp.maximum(step - o.num_warmup_steps, 0)
    return 1 / jnp.sqrt((later + o.timescale) / o.timescale)


def _ones(o: Any) -> Schedule:
    import jax.numpy as jnp

    return lambda step: jnp.ones((), jnp.float32)


def _by_share(behind: Callable[[Any, Any], Any]) -> Callable[[Any], Schedule]:
    return lambda o: _warmed(o, lambda step, share: behind(o, share))


_LAMBDAS: Mapping[str, Callable[[Any], Schedule]] = {
    "_get_constant_lambda": _ones,
    "_get_constant_schedule_with_warmup_lr_lambda": _by_share(lambda o, share: 1.0),
    "_get_linear_schedule_with_warmup_lr_lambda": _by_share(_line_behind),
    "_get_cosine_schedule_with_warmup_lr_lambda": _by_share(_cosine_behind),
    "_get_cosine_with_hard_restarts_schedule_with_warmup_lr_lambda": _by_share(_restarts_behind),
    "_get_polynomial_decay_schedule_with_warmup_lr_lambda": _by_share(_polynomial_behind),
    "_get_inverse_sqrt_schedule_lr_lambda": lambda o: _warmed(
        o, lambda step, share: _root_behind(o, step)
    ),
}
"""Functions of `transformers.optimization` by name, which are private there and in every release
since 4.27; another one is tabulated."""

_ROWS: Mapping[str, Factor | Rates] = {
    "StepLR": Factor(options={"step_size": _REQUIRED, "gamma": 0.1}, of=_step_lr),
    "MultiStepLR": Factor(options={"milestones": _REQUIRED, "gamma": 0.1}, of=_multi_step_lr),
    "ConstantLR": Factor(options={"factor": 1 / 3, "total_iters": 5}, of=_constant_lr),
    "LinearLR": Factor(
        options={"start_factor": 1 / 3, "end_factor": 1.0, "total_iters": 5}, of=_linear_lr
    ),
    "ExponentialLR": Factor(options={"gamma": _REQUIRED}, of=_exponential_lr),
    "PolynomialLR": Factor(options={"total_iters": 5, "power": 1.0}, of=_polynomial_lr),
    "CosineAnnealingLR": Rates(options={"T_max": _REQUIRED, "eta_min": 0.0}, of=_cosine_annealing),
    "CosineAnnealingWarmRestarts": Rates(
        options={"T_0": _REQUIRED, "T_mult": 1, "eta_min": 0.0}, of=_warm_restarts
    ),
    "OneCycleLR": Rates(of=_one_cycle),
    "CyclicLR": Rates(of=_cyclic),
    "LambdaLR": Rates(of=_lambda_lr),
}
"""Closed forms by class of torch.optim.lr_scheduler; `_of_scheduler` puts several together."""
