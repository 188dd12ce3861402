"""Optimizers of torch.optim as optax transformations with equal values.

`transformation` reads an optimizer's own parameter groups, `described` a dictionary such as
`{"name": "AdamW", "lr": 3e-4}`; what a class does to a tensor is a row of `update_rules.py`, and
learning rates are functions of the step count (`schedules.py`), so that one compiled step serves
all steps. Params, gradients and updates are a flat dict by parameter name. The state is

    {"step": count, "exp_avg": {name: array}, "exp_avg_sq": {name: array}, ...}

with torch's names of state, each array named as its weight and, Adafactor's aside, of its shape:
so `roles.py` finds optimizer state, and shardings follow the weight's. What no group has, or needs
no gradient, is returned as it came, which is what makes it frozen; so does a parameter without a
gradient in a step, which torch leaves alone too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardwright.compiler.diagnostics import UsageError, did_you_mean
from shardwright.compiler.frontend.pytorch.schedules import (
    TABULATED_STEPS,
    Schedule,
    described_schedule,
    schedules_of,
)
from shardwright.compiler.frontend.pytorch.update_rules import (
    EPS_OF_TYPE,
    RULES,
    WITHOUT_EFFECT,
    Options,
    Rule,
)

if TYPE_CHECKING:
    import jax
    import optax
    import torch

    Arrays = Mapping[str, jax.Array]

STEP = "step"
_CODE = "SW_TORCH_OPTIMIZER"
_NORM_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm that it divides by
_SUPPORTED = f"supported are {', '.join(RULES)} of torch.optim"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipping:
    """What the training loop does to gradients before the optimizer's step, 0: nothing.

    `norm` is the most that the norm of all gradients may be (`clip_grad_norm_`), `value` the
    greatest size of an element (`clip_grad_value_`); the norm is that of `names`, the parameters
    that have gradients, None: all.
    """

    norm: float = 0.0
    value: float = 0.0
    names: Collection[str] | None = None

    def __call__(self, gradients: Arrays) -> Arrays:
        """Gradients within the bounds, without those that are None."""
        import jax.numpy as jnp

        found = {name: g for name, g in gradients.items() if g is not None}
        if self.value:
            found = {name: jnp.clip(g, -self.value, self.value) for name, g in found.items()}
        if not self.norm:
            return found
        found = {name: g.astype(jnp.float32) for name, g in found.items()}
        counted = [g for name, g in found.items() if self.names is None or name in self.names]
        norm = jnp.sqrt(sum((jnp.sum(g * g) for g in counted), jnp.zeros((), jnp.float32)))
        scale = jnp.minimum(1, self.norm / (norm + _NORM_EPS))
        return {name: g * scale for name, g in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parameters that one rule updates with the same options; `names` of None are all that there
    are. `schedules` say options that change from step to step."""

    rule: Rule
    options: Options
    names: frozenset[str] | None = None
    schedules: Mapping[str, Schedule] = field(default_factory=dict)

    def at(self, step: jax.Array) -> dict[str, Any]:
        """The options in the step behind `step` others."""
        values = {name: schedule(step) for name, schedule in self.schedules.items()}
        beta1 = values.pop("beta1", None)
        betas = {} if beta1 is None else {"betas": (beta1, self.options["betas"][1])}
        return {**self.options, **values, **betas}


def transformation(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    parameters: Iterable[tuple[str, torch.Tensor]],
    schedulers: Any = None,
    *,
    clip_norm: float = 0.0,
    clip_value: float = 0.0,
    scheduler_interval: int = 1,
    steps: int = TABULATED_STEPS,
) -> optax.GradientTransformation:
    """An optax transformation of {parameter name: array} that does what `optimizer.step()` and then
    `scheduler.step()` do.

    `optimizer` may be several that share the parameters out (Muon for matrices, AdamW for others).
    `parameters` are `module.named_parameters()`. `schedulers` is one of torch.optim.lr_scheduler or
    several, which step in this order every `scheduler_interval` steps of the optimizer; `steps` is
    how many steps are tabulated of one without a closed form. `clip_norm` and `clip_value` stand
    for `clip_grad_norm_(module.parameters(), ...)` and `clip_grad_value_`. An optimizer that has
    taken steps goes on from its state.

    Values in fp32 are torch's to 1e-6 of the largest element of a parameter, by rounding alone.
    Muon multiplies matrices in bf16, whose sums differ by machine: 1e-2 of an update. In bf16 they
    are those of torch's fused Adam, which rounds a stored tensor once; its loops round every
    operation.
    Raises: UsageError SW_TORCH_OPTIMIZER, SW_TORCH_SCHEDULER for what has no row.
    """
    named = dict(parameters)
    several = tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
    names = {id(parameter): name for name, parameter in named.items()}
    rules = [_rule_of(each) for each in several]
    taken = _state_of(several, named)
    begun = taken.steps if taken else 0
    scheduled = schedules_of(several, schedulers, begun, scheduler_interval, steps)
    groups = [
        Group(
            rule=rule,
            options=_options_of(each, group, rule),
            names=_names_of(each, number, group, names),
            schedules=schedule,
        )
        for each, rule, its in zip(several, rules, scheduled, strict=True)
        for number, (group, schedule) in enumerate(zip(each.param_groups, its, strict=True))
    ]
    trained = frozenset(name for name, p in named.items() if p.requires_grad)
    clipping = Clipping(norm=clip_norm, value=clip_value, names=trained)
    return _transformation(groups, clipping, taken)


def described(
    description: Mapping[str, Any], *, clip_norm: float = 0.0, clip_value: float = 0.0
) -> optax.GradientTransformation:
    """The same of a dictionary, without torch: the `name` of a class, in any case, options by
    torch's names, and under `schedule` the same of a scheduler, as in `{"name": "AdamW", "lr":
    3e-4, "schedule": {"name": "CosineAnnealingLR", "T_max": 1000}}`. All parameters are trained.

    Raises: UsageError SW_TORCH_OPTIMIZER, SW_TORCH_SCHEDULER.
    """
    given = dict(description)
    name, schedule = str(given.pop("name", "")), given.pop("schedule", None)
    rule = {known.lower(): rule for known, rule in RULES.items()}.get(name.lower())
    if rule is None:
        raise UsageError(
            _CODE,
            f"an optimizer requires name to be one of {', '.join(RULES)}, got {name!r}",
            hint=did_you_mean(name, RULES),
        )
    given = {key: value for key, value in given.items() if key not in WITHOUT_EFFECT}
    for key, value in given.items():
        _check_option(name, rule, key, value)
    options = {**rule.options, **given}
    _check_nesterov(name, options)
    schedules = {"lr": described_schedule(schedule, options["lr"])} if schedule else {}
    group = Group(rule=rule, options=options, schedules=schedules)
    return _transformation([group], Clipping(norm=clip_norm, value=clip_value), None)


@dataclass(frozen=True, slots=True)
class _Taken:
    """Steps that an optimizer has taken, and its state behind them: {state: {name: array}}."""

    steps: int
    arrays: Mapping[str, Mapping[str, Any]]


def _transformation(
    groups: Sequence[Group], clipping: Callable[[Arrays], Arrays], taken: _Taken | None
) -> optax.GradientTransformation:
    """The groups as one transformation, which has one step count."""
    import jax.numpy as jnp
    import optax

    def number_of(name: str) -> int | None:
        rows = enumerate(groups)
        return next((n for n, g in rows if g.names is None or name in g.names), None)

    def init(params: Arrays) -> dict[str, Any]:
        state: dict[str, Any] = {STEP: jnp.asarray(taken.steps if taken else 0, jnp.int32)}
        for name, param in params.items():
            number = number_of(name)
            if number is None:
                continue
            group = groups[number]
            _check_dims(group.rule, name, param)
            for slot, first in group.rule.init(group.options, param).items():
                found = taken.arrays.get(slot, {}).get(name) if taken else None
                array = first if found is None else jnp.asarray(found, first.dtype)
                state.setdefault(slot, {})[name] = array
        return state

    def update(gradients: Arrays, state: Mapping[str, Any], params: Any = None) -> Any:
        assert params is not None, "torch's update rules read the parameters"
        step = state[STEP]
        count = (step + 1).astype(jnp.float32)
        options, clipped = [group.at(step) for group in groups], clipping(gradients)
        updates = {}
        after = {slot: dict(arrays) for slot, arrays in state.items() if slot != STEP}
        for name, param in params.items():
            number = number_of(name)
            if number is None or name not in clipped:
                updates[name] = jnp.zeros_like(param)
                continue
            before = {slot: arrays[name] for slot, arrays in after.items() if name in arrays}
            rule = groups[number].rule
            updates[name], new = _updated(
                rule, options[number], count, param, clipped[name], before
            )
            for slot, array in new.items():
                after[slot][name] = array.astype(before[slot].dtype)
        return updates, {STEP: optax.safe_increment(step), **after}

    return optax.GradientTransformation(init, update)


def _check_dims(rule: Rule, name: str, param: Any) -> None:
    """Raises UsageError for a parameter that the rule has no update of."""
    if rule.dims not in (None, param.ndim):
        raise UsageError(
            _CODE,
            f"the optimizer requires parameters of {rule.dims} dims, got {name} of {param.shape}",
            hint="give other parameters to another optimizer",
        )


def _updated(
    rule: Rule, options: Options, count: Any, param: Any, gradient: Any, state: Arrays
) -> tuple[Any, Arrays]:
    """What a rule adds to a tensor, and its state behind that, computed in fp32."""
    import jax.numpy as jnp

    own = {**options, EPS_OF_TYPE: float(jnp.finfo(param.dtype).eps)}
    wide = {slot: array.astype(jnp.float32) for slot, array in state.items()}
    gradient = gradient.astype(jnp.float32)
    gradient = -gradient if options.get("maximize") else gradient
    return rule.update(own, count, param.astype(jnp.float32), gradient, wide)


def _rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """The row of an optimizer's class, or of the class that it has its step from."""
    import torch

    found = type(optimizer)
    for cls in found.__mro__:
        rule = RULES.get(cls.__name__)
        if rule is None or getattr(torch.optim, cls.__name__, None) is not cls:
            continue
        if inspect.unwrap(found.step) is not inspect.unwrap(cls.step):
            break
        return rule
    module = found.__module__.split(".")[0]
    asks = inspect.signature(found.step).parameters.get("closure")
    closure = asks is not None and asks.default is inspect.Parameter.empty
    why = "whose step computes the loss again" if closure else f"of {module}"
    raise UsageError(
        _CODE,
        f"an optimizer requires a class whose update is known, got {found.__name__} {why};"
        f" {_SUPPORTED}, and classes that inherit their step",
        hint="take the nearest of these, or write the step in JAX with an optax transformation"
        " of your own (docs/own-step.md)",
    )


def _options_of(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], rule: Rule
) -> dict[str, Any]:
    """The options of a parameter group as numbers. What older releases of torch do not have is as
    the row says; what a newer one has beside has to be off."""
    name = type(optimizer).__name__
    unknown = [o for o in optimizer.defaults if o not in rule.options and o not in WITHOUT_EFFECT]
    on = next((option for option in unknown if group.get(option)), None)
    if on is not None:
        raise UsageError(
            _CODE,
            f"{name} requires options among {', '.join(rule.options)}, got"
            f" {on}={group[on]!r}, which is not known here",
            hint=f"leave {on} out",
        )
    return {o: _number(group.get(o, default)) for o, default in rule.options.items()}


def _number(value: Any) -> Any:
    """An option without tensors."""
    if isinstance(value, tuple | list):
        return tuple(map(_number, value))
    return value.item() if hasattr(value, "item") else value


def _names_of(
    optimizer: torch.optim.Optimizer,
    number: int,
    group: Mapping[str, Any],
    names: Mapping[int, str],
) -> frozenset[str]:
    """Names of the parameters of a group that have a gradient."""
    found = set()
    for parameter in group["params"]:
        shape, which = tuple(parameter.shape), f"{type(optimizer).__name__}, group {number},"
        if id(parameter) not in names:
            raise UsageError(
                _CODE,
                f"{which} requires parameters of the module, got one of shape {shape} that is none",
                hint="make the optimizer of module.parameters(), after the module is complete",
            )
        name = names[id(parameter)]
        if parameter.is_complex():
            raise UsageError(
                _CODE,
                f"{which} requires real parameters, got {name} of type {parameter.dtype}",
                hint="keep real and imaginary parts apart",
            )
        if parameter.requires_grad:
            found.add(name)
    return frozenset(found)


def _state_of(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, torch.Tensor]
) -> _Taken | None:
    """What optimizers have behind them; None where they have taken no step."""
    rows = [(n, o.state[p]) for o in optimizers for n, p in parameters.items() if p in o.state]
    counts = {int(state[STEP]) for _, state in rows if STEP in state}
    if counts == {0} or not any(state for _, state in rows):
        return None
    if len(counts) > 1:
        raise UsageError(
            _CODE,
            "optimizers require parameters that have all taken as many steps, got"
            f" {', '.join(map(str, sorted(counts)))}",
            hint="begin with a new optimizer",
        )
    arrays: dict[str, dict[str, Any]] = {}
    for name, state in rows:
        for slot, value in state.items():
            if slot != STEP and value is not None:
                # bf16 has no type of NumPy's; fp32 holds its values, and they are narrowed again
                arrays.setdefault(slot, {})[name] = value.detach().cpu().float().numpy().copy()
    return _Taken(max(counts, default=1), arrays)


def _check_option(name: str, rule: Rule, key: str, value: Any) -> None:
    """Raises UsageError for an option of a description that the class does not take so."""
    if key not in rule.options:
        raise UsageError(
            _CODE,
            f"{name} requires options among {', '.join(rule.options)}, got {key}",
            hint=did_you_mean(key, rule.options, "leave it out"),
        )
    default, words = rule.options[key], rule.words.get(key, ())
    fits = value in words if words else _is_like(value, default)
    if not fits or (key == "betas" and max(value) >= 1):
        wanted = " or ".join(map(str, words)) or _form(key, default)
        raise UsageError(
            _CODE,
            f"{name} requires {key} to be {wanted}, got {value!r}",
            hint=f"leave it out for {default}",
        )


def _is_like(value: Any, default: Any) -> bool:
    """Whether an option is of the kind of its default, and no number of the other sign."""
    if isinstance(default, tuple):
        is_list = isinstance(value, tuple | list) and len(value) == len(default)
        return is_list and all(map(_is_like, value, default))
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float | int):
        return isinstance(value, float | int) and (value >= 0 or default < 0)
    return value is None or isinstance(value, float)


def _form(key: str, default: Any) -> str:
    """What `_is_like` asks for."""
    if isinstance(default, tuple):
        return f"{len(default)} numbers" + (" from 0 to below 1" if key == "betas" else "")
    if isinstance(default, bool):
        return "true or false"
    return "a number" + (" that is not negative" if default >= 0 else "")


def _check_nesterov(name: str, options: Options) -> None:
    """As torch.optim.SGD does. Raises UsageError."""
    if options.get("nesterov") and (not options["momentum"] or options.get("dampening")):
        raise UsageError(
            _CODE,
            f"{name} with nesterov requires momentum above 0 and dampening of 0, got"
            f" {options['momentum']} and {options['dampening']}",
        )
