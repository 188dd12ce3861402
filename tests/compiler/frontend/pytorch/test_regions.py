"""Checkpointed code and autograd functions keep the gradient that they make themselves."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from torch.utils.checkpoint import checkpoint, checkpoint_sequential  # noqa: E402

from shardwright.compiler.frontend.pytorch.exporting import export  # noqa: E402
from shardwright.compiler.frontend.pytorch.interpreter import Values, evaluate  # noqa: E402
from tests.support.torch_operators import Kind, outcome  # noqa: E402


class Scaled(torch.autograd.Function):
    """A gradient that is not that of its forward; one result has none."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, scale: float) -> Any:
        y = x @ weight
        ctx.save_for_backward(x, weight, y)
        ctx.scale = scale
        return y.clamp(-1, 1), y.argmax(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Any, _: Any) -> Any:
        x, weight, y = ctx.saved_tensors
        gradient = gradient * ctx.scale * y
        return gradient @ weight.T, x.T @ gradient, None


class Rounded(torch.autograd.Function):
    """Passes gradients straight through, three times as large."""

    @staticmethod
    def forward(x: Any) -> Any:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 3 * ctx.saved_tensors[0]


def _given() -> tuple[Any, Any]:
    torch.manual_seed(0)
    return torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)


def _block(x: Any, weight: Any, scale: float = 1.0) -> Any:
    return torch.nn.functional.gelu(x @ weight) * scale


def _held(function: Any) -> None:
    found = outcome(function, _given(), {})
    assert found.kind == Kind.EQUAL, found.why


def test_functions() -> None:
    def function(x: Any, weight: Any) -> Any:
        y, place = Scaled.apply(x.sin(), weight, 2.0)
        return (y * place[:, None]).tanh() + Rounded.apply(x), place

    _held(function)


def test_an_argument_that_goes_in_twice() -> None:
    _held(lambda x, weight: Scaled.apply(weight, weight, 0.5)[0] @ x.T)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(use_reentrant: bool) -> None:
    again = partial(checkpoint, use_reentrant=use_reentrant)

    def function(x: Any, weight: Any) -> Any:
        y = again(_block, x, weight)
        y = again(again, _block, y, weight)  # one in another
        return again(lambda a: a @ weight + Rounded.apply(a), y)

    _held(function)


def test_a_checkpoint_with_keywords_and_a_sequence() -> None:
    layers = torch.nn.Sequential(*[torch.nn.GELU() for _ in range(4)])
    _held(lambda x, weight: checkpoint(_block, x, weight, scale=3.0, use_reentrant=False))
    _held(lambda x, _: checkpoint_sequential(layers, 2, x, use_reentrant=False))


def test_a_checkpoint_is_one_of_jax_and_draws_its_masks_once() -> None:
    import jax

    class Dropped(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            drop = partial(torch.nn.functional.dropout, p=0.5)
            return checkpoint(lambda x: drop(x) * x.sin(), x, use_reentrant=False)

    x = _given()[0]
    exported = export(Dropped(), (x,), {})

    def total(x: Any) -> Any:
        return evaluate(exported, Values({}, {}, [x], jax.random.key(1)))[0][0].sum()

    values = x.detach().numpy()
    made = jax.make_jaxpr(jax.grad(total))(values)
    assert "checkpoint" in str(made) or "remat" in str(made)
    gradient = jax.grad(total)(values)
    kept = gradient != 0  # d(2 x sin x) where it is kept
    assert 0 < np.sum(kept) < values.size
    wanted = 2 * (np.sin(values) + values * np.cos(values))
    np.testing.assert_allclose(gradient[kept], wanted[kept], rtol=1e-5)
    assert jax.numpy.isfinite(total(values))


def test_torch_is_left_as_it_was() -> None:
    apply = torch.autograd.Function.__dict__["apply"]
    _held(lambda x, weight: checkpoint(_block, x, weight, use_reentrant=False))
    assert torch.autograd.Function.__dict__["apply"] is apply
    x, weight = _given()
    Rounded.apply(checkpoint(_block, x, weight, use_reentrant=False)).sum().backward()
    assert x.grad is not None
