"""What the optimizers of torch.optim do to one tensor, as functions of JAX.

Each rule is the formula of torch's documentation, with torch's names of options and of state, so
that `optimizer.state_dict()` and the state here are the same arrays. A rule computes in fp32
whatever the types of tensor and state are, and its state is rounded once, where it is stored: so
do torch's fused kernels. `optimizers.py` applies the rules to all tensors of a module.

optax's own have torch's values in fp32 for half of these classes. Its Adam is off by 7e-6 where a
parameter starts at zero, since `1 - beta2**count` is a difference of numbers near one, its RAdam by
1e-4 for the like; NAdam, AMSGrad and Adafactor are other formulas there, dampened momentum is none;
and in bf16 all of them round a decay of 0.999 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax import Array

    Arrays = dict[str, Array]

Options = Mapping[str, Any]
"""Options of a parameter group by torch's names: numbers, or traced scalars where a schedule says
them (`lr`, `momentum`, the first of `betas`)."""


EPS_OF_TYPE = "eps_of_type"
"""Among the options that an update has: eps of the type that the tensor is stored in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One class of torch.optim.

    `options` are what it takes, with torch's defaults. `init(options, param)` is the state of a
    tensor before the first step, by torch's names. `update(options, count, param, gradient, state)`
    is what is added to the tensor in step `count`, which counts from 1 and is a scalar of fp32, and
    the state after it; everything is fp32. `dims` is how many dims a tensor has to have, None for
    any number. `words` are the values of options that are words.
    """

    options: Options
    init: Callable[[Options, Array], Arrays]
    update: Callable[[Options, Array, Array, Array, Arrays], tuple[Array, Arrays]]
    dims: int | None = None
    words: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)


def _zeros(*names: str) -> Callable[[Options, Array], Arrays]:
    """State that begins with zeros, of the shape and type of the tensor."""

    def init(o: Options, param: Array) -> Arrays:
        import jax.numpy as jnp

        return {name: jnp.zeros_like(param) for name in names}

    return init


def _lerp(old: Array, new: Array, weight: Any) -> Array:
    """The moving average as torch's `lerp` has it."""
    return old + weight * (new - old)


def _bias_correction(beta: Any, count: Array) -> Array:
    """`1 - beta**count`, to the last digits in fp32 for a `beta` near one too."""
    import jax.numpy as jnp

    if isinstance(beta, float | int):
        return -jnp.expm1(count * math.log(beta)) if beta > 0 else jnp.ones_like(count)
    return -jnp.expm1(count * jnp.log(beta))


def _with_decay(o: Options, param: Array, gradient: Array) -> Array:
    """The gradient with that of the L2 penalty, unless the decay is decoupled."""
    if not o["weight_decay"] or o.get("decoupled_weight_decay"):
        return gradient
    return gradient + o["weight_decay"] * param


def _decayed(o: Options, param: Array, update: Array) -> Array:
    """The update with what decoupled decay takes away: torch scales the parameter first."""
    if not o["weight_decay"] or not o.get("decoupled_weight_decay", True):
        return update
    return update - o["lr"] * o["weight_decay"] * param


def _is_off(option: Any) -> bool:
    """Whether an option is the number zero; what a schedule says is not."""
    return isinstance(option, float | int) and option == 0


def _sgd_init(o: Options, param: Array) -> Arrays:
    return {} if _is_off(o["momentum"]) else _zeros("momentum_buffer")(o, param)


def _sgd(o: Options, count: Array, param: Array, gradient: Array, state: Arrays) -> Any:
    """The first gradient enters the buffer without dampening."""
    import jax.numpy as jnp

    gradient = _with_decay(o, param, gradient)
    if _is_off(o["momentum"]):
        return -o["lr"] * gradient, {}
    buffer = o["momentum"] * state["momentum_buffer"] + (1 - o["dampening"]) * gradient
    if o["dampening"]:
        buffer = jnp.where(count == 1, gradient, buffer)
    ahead = gradient + o["momentum"] * buffer if o["nesterov"] else buffer
    return -o["lr"] * ahead, {"momentum_buffer": buffer}


def _adam_init(o: Options, param: Array) -> Arrays:
    names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if o["amsgrad"] else ()))
    return _zeros(*names)(o, param)


def _moments(o: Options, gradient: Array, state: Arrays) -> Arrays:
    """The moving averages of gradients and of their squares."""
    beta1, beta2 = o["betas"]
    mean = _lerp(state["exp_avg"], gradient, 1 - beta1)
    square = beta2 * state["exp_avg_sq"] + (1 - beta2) * gradient * gradient
    return {"exp_avg": mean, "exp_avg_sq": square}


def _adam(o: Options, count: Array, param: Array, gradient: Array, state: Arrays) -> Any:
    """AMSGrad has the greatest second moment before its bias is corrected; eps is outside of the
    root."""
    import jax.numpy as jnp

    beta1, beta2 = o["betas"]
    new = _moments(o, _with_decay(o, param, gradient), state)
    square = new["exp_avg_sq"]
    if o["amsgrad"]:
        square = new["max_exp_avg_sq"] = jnp.maximum(state["max_exp_avg_sq"], square)
    root = jnp.sqrt(square) / jnp.sqrt(_bias_correction(beta2, count)) + o["eps"]
    rate = o["lr"] / _bias_correction(beta1, count)
    return _decayed(o, param, -rate * new["exp_avg"] / root), new


def _nadam_init(o: Options, param: Array) -> Arrays:
    import jax.numpy as jnp

    return {
        **_zeros("exp_avg", "exp_avg_sq")(o, param),
        "mu_product": jnp.ones((), jnp.float32),
    }


def _nadam(o: Options, count: Array, param: Array, gradient: Array, state: Arrays) -> Any:
    """The share of momentum grows over the steps (`momentum_decay`)."""
    import jax.numpy as jnp

    beta1, beta2 = o["betas"]
    decay = o["momentum_decay"] * math.log(0.96)
    mu = beta1 * (1 - 0.5 * jnp.exp(decay * count))
    mu_next = beta1 * (1 - 0.5 * jnp.exp(decay * (count + 1)))
    gradient = _with_decay(o, param, gradient)
    new = _moments(o, gradient, state)
    new["mu_product"] = product = state["mu_product"] * mu
    root = jnp.sqrt(new["exp_avg_sq"] / _bias_correction(beta2, count)) + o["eps"]
    of_gradient = (1 - mu) / (1 - product)
    of_mean = mu_next / (1 - product * mu_next)
    ahead = of_gradient * gradient + of_mean * new["exp_avg"]
    return _decayed(o, param, -o["lr"] * ahead / root), new


def _radam(o: Options, count: Array, param: Array, gradient: Array, state: Arrays) -> Any:
    """Up to a length of five the average is not rectified, and the step is the mean's."""
    import jax.numpy as jnp

    beta1, beta2 = o["betas"]
    new = _moments(o, _with_decay(o, param, gradient), state)
    mean = new["exp_avg"] / _bias_correction(beta1, count)
    longest = 2 / (1 - beta2) - 1
    length = _average_length(beta2, count)
    safe = jnp.maximum(length, 5)
    rect = jnp.sqrt((safe - 4) * (safe - 2) * (longest / ((longest - 4) * (longest - 2))) / safe)
    root = jnp.sqrt(new["exp_avg_sq"]) + o["eps"]
    adaptive = jnp.sqrt(_bias_correction(beta2, count)) / root
    update = -o["lr"] * mean * jnp.where(length > 5, rect * adaptive, 1)
    return _decayed(o, param, update), new


def _average_length(beta2: float, count: Array) -> Array:
    """RAdam's `rho_t = rho_inf - 2 t beta2^t / (1 - beta2^t)`, `rho_inf = 2 / (1 - beta2) - 1`.

    It is a difference of numbers near 2,000, so for few steps fp32 has four of its digits. With
    `x = -log(beta2)` and `y = x t` the second term is `2/x y / (exp(y) - 1)`, and
    `y / (exp(y) - 1) = 1 - y/2 + y^2/12 - y^4/720 + ...`, of which the large numbers cancel ahead.
    """
    import jax.numpy as jnp

    longest, x = 2 / (1 - beta2) - 1, -math.log(beta2)
    y = jnp.minimum(x * count, 1)
    series = (1 / 12, -1 / 720, 1 / 30240, -1 / 1209600, 5 / 239500800)  # Bernoulli numbers / n!
    rest = sum((c * y ** (2 * n + 2) for n, c in enumerate(series)), jnp.zeros_like(y))
    few = (longest - 2 / x) + count - 2 / x * rest
    many = longest - 2 * count * jnp.exp(-x * count) / -jnp.expm1(-x * count)
    return jnp.where(x * count < 1, few, many)


def _adamax(o: Options, count: Array, param: Array, gradient: Array, state: Arrays) -> Any:
    """The second moment is the greatest gradient, to which eps is added."""
    import jax.numpy as jnp

    beta1, beta2 = o["betas"]
    gradient = _with_decay(o, param, gradient)
    mean = _lerp(state["exp_avg"], gradient, 1 - beta1)
    most = jnp.maximum(beta2 * state["exp_inf"], jnp.abs(gradient) + o["eps"])
    rate = o["lr"] / _bias_correction(beta1, count)
    return -rate * mean / most, {"exp_avg": mean, "exp_inf": most}


def _adagrad_init(o: Options, param: Array) -> Arrays:
    import jax.numpy as jnp

    return {"sum": jnp.full_like(param, o["initial_accumulator_value"])}


def _adagrad(o: Options, count: Array, param: Array, gradient: Array, state: Arrays) -> Any:
    import jax.numpy as jnp

    gradient = _with_decay(o, param, gradient)
    total = state["sum"] + gradient * gradient
    rate = o["lr"] / (1 + (count - 1) * o["lr_decay"])
    return -rate * gradient / (jnp.sqrt(total) + o["eps"]), {"sum": total}


def _rmsprop_init(o: Options, param: Array) -> Arrays:
    names = ("square_avg", *(("grad_avg",) if o["centered"] else ()))
    momentum = () if _is_off(o["momentum"]) else ("momentum_buffer",)
    return _zeros(*names, *momentum)(o, param)


def _rmsprop(o: Options, count: Array, param: Array, gradient: Array, state: Arrays) -> Any:
    """The rate scales the buffer of momentum as it leaves it; eps is outside of the root."""
    import jax.numpy as jnp

    gradient, alpha = _with_decay(o, param, gradient), o["alpha"]
    square = alpha * state["square_avg"] + (1 - alpha) * gradient * gradient
    new = {"square_avg": square}
    if o["centered"]:
        new["grad_avg"] = _lerp(state["grad_avg"], gradient, 1 - alpha)
        square = square - new["grad_avg"] * new["grad_avg"]
    ahead = gradient / (jnp.sqrt(square) + o["eps"])
    if not _is_off(o["momentum"]):
        ahead = new["momentum_buffer"] = o["momentum"] * state["momentum_buffer"] + ahead
    return -o["lr"] * ahead, new


def _adadelta(o: Options, count: Array, param: Array, gradient: Array, state: Arrays) -> Any:
    import jax.numpy as jnp

    gradient, rho, eps = _with_decay(o, param, gradient), o["rho"], o["eps"]
    square = rho * state["square_avg"] + (1 - rho) * gradient * gradient
    delta = jnp.sqrt(state["acc_delta"] + eps) / jnp.sqrt(square + eps) * gradient
    deltas = rho * state["acc_delta"] + (1 - rho) * delta * delta
    return -o["lr"] * delta, {"square_avg": square, "acc_delta": deltas}


def _adafactor_init(o: Options, param: Array) -> Arrays:
    import jax.numpy as jnp

    if param.ndim < 2:
        return _zeros("variance")(o, param)
    *outer, rows, cols = param.shape
    return {
        "row_var": jnp.zeros((*outer, rows, 1), param.dtype),
        "col_var": jnp.zeros((*outer, 1, cols), param.dtype),
    }


def _adafactor(o: Options, count: Array, param: Array, gradient: Array, state: Arrays) -> Any:
    """`lr` is the most of the relative step, `eps[0]` stands at the estimate and not at the squares
    (torch's note on where it differs from the paper, and so from optax's).
    """
    import jax.numpy as jnp

    def rms(x: Array) -> Array:
        return jnp.sqrt(jnp.mean(x * x))

    least, smallest_scale = o["eps"]
    least = o[EPS_OF_TYPE] if least is None else least
    square, weight = gradient * gradient, count ** o["beta2_decay"]
    if param.ndim < 2:
        new = {"variance": _lerp(state["variance"], square, weight)}
        estimate = new["variance"]
    else:
        row = _lerp(state["row_var"], jnp.mean(square, -1, keepdims=True), weight)
        col = _lerp(state["col_var"], jnp.mean(square, -2, keepdims=True), weight)
        estimate = row * col / jnp.maximum(jnp.mean(row, -2, keepdims=True), least)
        new = {"row_var": row, "col_var": col}
    update = gradient / jnp.sqrt(jnp.maximum(estimate, least * least))
    rate = jnp.minimum(o["lr"], 1 / jnp.sqrt(count)) * jnp.maximum(smallest_scale, rms(param))
    update = -rate * update / jnp.maximum(1, rms(update) / o["d"])
    return _decayed(o, param, update), new


def _muon(o: Options, count: Array, param: Array, gradient: Array, state: Arrays) -> Any:
    """The momentum as a matrix with singular values near one, at a rate for its shape."""
    import jax.numpy as jnp

    rows, cols = param.shape
    buffer = _lerp(state["momentum_buffer"], gradient, 1 - o["momentum"])
    ahead = _lerp(gradient, buffer, o["momentum"]) if o["nesterov"] else buffer
    matrix = (ahead.T if rows > cols else ahead).astype(jnp.bfloat16)
    matrix = matrix / jnp.maximum(jnp.linalg.norm(matrix), o["eps"])
    a, b, c = (jnp.bfloat16(coefficient) for coefficient in o["ns_coefficients"])
    for _ in range(o["ns_steps"]):
        gram = matrix @ matrix.T
        matrix = a * matrix + (b * gram + c * (gram @ gram)) @ matrix
    update = (matrix.T if rows > cols else matrix).astype(jnp.float32)
    scale = _MUON_SCALES[o["adjust_lr_fn"] or "original"](rows, cols)
    return _decayed(o, param, -o["lr"] * scale * update), {"momentum_buffer": buffer}


_MUON_SCALES: Mapping[str, Callable[[int, int], float]] = {
    "original": lambda rows, cols: math.sqrt(max(1, rows / cols)),
    "match_rms_adamw": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
}
_ADAM: dict[str, Any] = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
_RATE: dict[str, Any] = dict(lr=1e-2, weight_decay=0.0, maximize=False)
_COUPLED: dict[str, Any] = dict(maximize=False, decoupled_weight_decay=False)
_DECOUPLED: dict[str, Any] = dict(weight_decay=1e-2, maximize=False, decoupled_weight_decay=True)
_MATRICES: dict[str, Any] = dict(ns_coefficients=(3.4445, -4.775, 2.0315), eps=1e-7, ns_steps=5)

RULES: Mapping[str, Rule] = {
    "SGD": Rule(
        options=dict(
            lr=1e-3, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False
        ),
        init=_sgd_init,
        update=_sgd,
    ),
    "Adam": Rule(options=_ADAM | _COUPLED | dict(amsgrad=False), init=_adam_init, update=_adam),
    "AdamW": Rule(options=_ADAM | _DECOUPLED | dict(amsgrad=False), init=_adam_init, update=_adam),
    "Adafactor": Rule(
        options=dict(
            lr=1e-2, beta2_decay=-0.8, eps=(None, 1e-3), d=1.0, weight_decay=0.0, maximize=False
        ),
        init=_adafactor_init,
        update=_adafactor,
    ),
    "Adagrad": Rule(
        options=_RATE | dict(lr_decay=0.0, initial_accumulator_value=0.0, eps=1e-10),
        init=_adagrad_init,
        update=_adagrad,
    ),
    "RMSprop": Rule(
        options=_RATE | dict(alpha=0.99, eps=1e-8, momentum=0.0, centered=False),
        init=_rmsprop_init,
        update=_rmsprop,
    ),
    "Adadelta": Rule(
        options=_RATE | dict(lr=1.0, rho=0.9, eps=1e-6),
        init=_zeros("square_avg", "acc_delta"),
        update=_adadelta,
    ),
    "Adamax": Rule(
        options=_ADAM | dict(lr=2e-3, maximize=False),
        init=_zeros("exp_avg", "exp_inf"),
        update=_adamax,
    ),
    "NAdam": Rule(
        options=_ADAM | _COUPLED | dict(lr=2e-3, momentum_decay=4e-3),
        init=_nadam_init,
        update=_nadam,
    ),
    "RAdam": Rule(options=_ADAM | _COUPLED, init=_zeros("exp_avg", "exp_avg_sq"), update=_radam),
    "Muon": Rule(
        options=_MATRICES
        | dict(lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn=None),
        init=_zeros("momentum_buffer"),
        update=_muon,
        dims=2,
        words={"adjust_lr_fn": (None, *_MUON_SCALES)},
    ),
}
"""Classes of torch.optim by name."""

WITHOUT_EFFECT = ("foreach", "fused", "capturable", "differentiable")
"""Options of torch.optim that say how, and not what, is computed."""
