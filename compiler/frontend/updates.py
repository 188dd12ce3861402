"""One step of an optimizer over a part of the parameters of a function that returns a loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Updated:
    """After a step: all parameters, the optimizer's state, the loss, and what else the function
    returned."""

    params: dict[str, Any]
    opt_state: Any
    loss: Any
    beside: Any


def trained_of(params: Mapping[str, Any], trained: Collection[str]) -> dict[str, Any]:
    """The parameters that are trained, whose state an optimizer keeps."""
    return {name: leaf for name, leaf in params.items() if name in trained}


def updated(
    loss_of: Callable[[Mapping[str, Any]], tuple[Any, Any]],
    params: Mapping[str, Any],
    trained: Collection[str],
    transformation: Any,
    opt_state: Any,
) -> Updated:
    """A step of an optax transformation; `loss_of` all parameters is (the loss, something else)."""
    import jax

    own = trained_of(params, trained)
    frozen = {name: leaf for name, leaf in params.items() if name not in own}
    of_own = jax.value_and_grad(lambda own: loss_of({**frozen, **own}), has_aux=True)
    (loss, beside), gradients = of_own(own)
    new, opt_state = applied(own, gradients, transformation, opt_state)
    return Updated({**frozen, **new}, opt_state, loss, beside)


def applied(
    own: dict[str, Any], gradients: Mapping[str, Any], transformation: Any, opt_state: Any
) -> tuple[dict[str, Any], Any]:
    """Parameters and the optimizer's state after a step with known gradients."""
    import optax

    updates, opt_state = transformation.update(gradients, opt_state, own)
    return optax.apply_updates(own, updates), opt_state
