"""The 41 operators that torch-neuronx lists (pytorch-neuron-supported-operators.rst).

As the list writes them: with the underscore of what is done in place, and with those that autograd
made before training was captured as a forward graph and differentiated.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from shardwright.compiler.frontend.pytorch.operators import ATEN

ROWS = (
    *("_softmax", "_unsafe_view", "add", "addcdiv_", "addcmul", "addmm", "bernoulli_", "bmm"),
    *("constant_pad_nd", "div", "embedding", "empty", "expand", "fill_", "index_select"),
    *("_log_softmax", "lt", "mm", "mul", "neg", "permute", "relu", "rsub", "select", "slice"),
    *("sqrt", "sum", "t", "tanh", "transpose", "unsqueeze", "view"),
)
MADE = {
    "_s_where": "where.self",  # its name until torch 1.11
    "_softmax_backward_data": "sum.dim_IntList",
    "_log_softmax_backward_data": "sum.dim_IntList",
    "embedding_dense_backward": "index_put.default",
    "native_batch_norm": "_native_batch_norm_legit_functional.default",
    "native_batch_norm_backward": "rsqrt.default",
    "tanh_backward": "mul.Tensor",
    "threshold_backward": "where.self",
    "zero_": "full.default",
}
"""Those without a row, and a row of what torch makes of them."""


def test_every_listed_operator_has_a_row_or_is_made_of_such() -> None:
    have = {name.partition(".")[0] for name in ATEN}
    assert len({*ROWS, *MADE}) == 41
    assert [name for name in ROWS if name.rstrip("_") not in have] == []
    assert [name for name in MADE.values() if name not in ATEN] == []


def _calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """One call of each."""
    import torch

    aten = torch.ops.aten
    torch.manual_seed(0)
    x, y, z = torch.randn(4, 6), torch.randn(4, 6), torch.rand(4, 6) + 1
    cube, table, ids = torch.randn(2, 6, 3), torch.randn(9, 5), torch.tensor([3, 0, 3, 8])
    image, ones, zeros = torch.randn(2, 3, 4, 4), torch.ones(3), torch.zeros(3)
    likely = torch.softmax(x, 1)
    mean, rstd = image.mean((0, 2, 3)), image.var((0, 2, 3), unbiased=False).add(1e-5).rsqrt()
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "_s_where": (torch.where, (x > 0, x, y)),
        "_softmax": (aten._softmax, (x, 1, False)),
        "_softmax_backward_data": (
            lambda g, s: aten._softmax_backward_data(g, s, 1, torch.float32),
            (y, likely),
        ),
        "_unsafe_view": (aten._unsafe_view, (x, [6, 4])),
        "add": (aten.add, (x, y)),
        "addcdiv_": (lambda x, y, z: x.clone().addcdiv_(y, z, value=0.5), (x, y, z)),
        "addcmul": (lambda x, y, z: aten.addcmul(x, y, z, value=0.5), (x, y, z)),
        "addmm": (aten.addmm, (y[:, :5], x, cube[0].repeat(1, 2)[:, :5])),
        "bernoulli_": (lambda x: x.clone().bernoulli_(0.5), (x,)),
        "bmm": (aten.bmm, (cube, cube.transpose(1, 2))),
        "constant_pad_nd": (aten.constant_pad_nd, (x, [1, 2, 0, 3], 0.5)),
        "div": (aten.div, (x, z)),
        "embedding": (aten.embedding, (table, ids)),
        "embedding_dense_backward": (
            lambda g, ids: aten.embedding_dense_backward(g, ids, 9, -1, False),
            (torch.randn(4, 5), ids),
        ),
        "empty": (lambda x: torch.empty(4, 6).copy_(x), (x,)),
        "expand": (aten.expand, (x[:1], [4, 6])),
        "fill_": (lambda x: x.clone().fill_(2.0), (x,)),
        "index_select": (aten.index_select, (table, 0, ids)),
        "_log_softmax": (aten._log_softmax, (x, 1, False)),
        "_log_softmax_backward_data": (
            lambda g, s: aten._log_softmax_backward_data(g, s, 1, torch.float32),
            (y, likely.log()),
        ),
        "lt": (aten.lt, (x, y)),
        "mm": (aten.mm, (x, y.t())),
        "mul": (aten.mul, (x, y)),
        "native_batch_norm": (
            lambda i, w, b: aten.native_batch_norm(
                i, w, b, torch.zeros(3), torch.ones(3), True, 0.1, 1e-5
            ),
            (image, ones, zeros),
        ),
        "native_batch_norm_backward": (
            lambda g, i, w, m, r: aten.native_batch_norm_backward(
                g, i, w, torch.zeros(3), torch.ones(3), m, r, True, 1e-5, [True, True, True]
            ),
            (torch.randn(2, 3, 4, 4), image, ones, mean, rstd),
        ),
        "neg": (aten.neg, (x,)),
        "permute": (aten.permute, (cube, [2, 0, 1])),
        "relu": (aten.relu, (x,)),
        "rsub": (aten.rsub, (x, y)),
        "select": (aten.select, (x, 1, 2)),
        "slice": (aten.slice, (x, 1, 1, 5, 2)),
        "sqrt": (aten.sqrt, (z,)),
        "sum": (aten.sum, (x,)),
        "t": (aten.t, (x,)),
        "tanh": (aten.tanh, (x,)),
        "tanh_backward": (aten.tanh_backward, (y, torch.tanh(x))),
        "threshold_backward": (lambda g, x: aten.threshold_backward(g, x, 0), (y, x)),
        "transpose": (aten.transpose, (cube, 0, 2)),
        "unsqueeze": (aten.unsqueeze, (x, 1)),
        "view": (aten.view, (x, [2, 12])),
        "zero_": (lambda x: x.clone().zero_() + x, (x,)),
    }
    return calls


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
@pytest.mark.parametrize("name", [*ROWS, *MADE])
def test_a_listed_operator_is_that_of_torch(name: str) -> None:
    from tests.support.torch_operators import Kind, outcome

    function, args = _calls()[name]
    found = outcome(function, args, {}, is_drawn=name == "bernoulli_")
    assert found.kind is Kind.EQUAL, found
