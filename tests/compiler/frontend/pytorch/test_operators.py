"""ATen's operators against torch: samples of torch's own table, values that are edges, types, and
gradients where JAX's own would differ. Each call is exported and interpreted as a user's module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from tests.support.torch_operators import (  # noqa: E402  # what needs torch
    Kind,
    edge_outcome,
    entries,
    outcome,
    outcomes,
)
from tests.support.torch_operators_page import APART, NOT_HERE, PAGE  # noqa: E402

F = torch.nn.functional
INF, NAN = float("inf"), float("nan")

SAMPLE = (
    *(
        "add",
        "addmm",
        "amax",
        "argmax",
        "cat",
        "clamp",
        "cumsum",
        "diagonal_scatter",
        "div.floor_rounding",
    ),
    *(
        "einsum",
        "gather",
        "index_add",
        "index_put",
        "index_select",
        "kthvalue",
        "linalg.vector_norm",
    ),
    *(
        "logsumexp",
        "masked_scatter",
        "max.reduction_with_dim",
        "roll",
        "nn.functional.avg_pool2d",
    ),
    *(
        "nn.functional.binary_cross_entropy",
        "nn.functional.conv2d",
        "nn.functional.conv_transpose2d",
    ),
    *("nn.functional.cross_entropy", "nn.functional.embedding", "nn.functional.embedding_bag"),
    *("nn.functional.gelu", "nn.functional.grid_sample", "nn.functional.group_norm"),
    *("nn.functional.interpolate.bicubic", "nn.functional.layer_norm", "nn.functional.max_pool2d"),
    *("nn.functional.scaled_dot_product_attention", "pow", "scatter_reduce.amax", "sort", "std"),
    *("take_along_dim", "topk", "unfold", "where"),
)


@pytest.mark.parametrize("name", SAMPLE)
def test_sampled(name: str) -> None:
    assert all(found.kind == Kind.EQUAL for found in outcomes(name, 2)), [
        found.why for found in outcomes(name, 2)
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", entries())
def test_every_entry(name: str) -> None:
    """None is apart from torch that docs/pytorch-operators.md does not say so of."""
    if name.startswith(NOT_HERE):
        pytest.skip("torch itself cannot call it here")
    found = list(outcomes(name))
    apart = [one.why for one in found if one.kind == Kind.WRONG]
    assert bool(apart) <= (name in APART), apart
    assert all(one.why.startswith(("SW_", "NCC_")) for one in found if one.kind == Kind.REFUSED)


@pytest.mark.parametrize("name", ["clamp", "maximum", "nn.functional.hardswish", "sqrt"])
def test_edges(name: str) -> None:
    found = edge_outcome(name)
    assert found.kind == Kind.EQUAL, found.why


def _held(function: Callable[..., Any], *args: Any, bound: float = 2e-5) -> None:
    found = outcome(function, args, {}, bound=bound)
    assert found.kind == Kind.EQUAL, found.why


def _given(*values: float) -> Any:
    return torch.tensor(values, requires_grad=True)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(function, id=name)
        for name, function in {
            "abs": torch.abs,
            "amax": lambda x: x.amax(0),
            "max": torch.max,
            "max.dim": lambda x: x.max(0),
            "cummax": lambda x: x.cummax(0),
            "clamp": lambda x: x.clamp(0, 1),
            "clamp_min": lambda x: x.clamp_min(0),
            "clamp by tensors": lambda x: x.clamp(torch.zeros(5), torch.ones(5)),
            "relu": F.relu,
            "relu6": F.relu6,
            "leaky_relu": F.leaky_relu,
            "hardtanh": F.hardtanh,
            "hardsigmoid": lambda x: F.hardsigmoid(3 * x),
            "hardswish": lambda x: F.hardswish(3 * x),
            "l1_loss": lambda x: F.l1_loss(x, torch.zeros(5)),
            "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, torch.zeros(5)),
            "norm of zeros": lambda x: (x * 0).norm(),
            "norm 3 of zeros": lambda x: (x * 0).norm(3),
            "std of equal ones": lambda x: (x * 0).std(),
            "topk": lambda x: x.topk(2),
            "sort": lambda x: x.sort(descending=True),
            "median": torch.median,
            "max_pool1d": lambda x: F.max_pool1d(x[None], 3, 1, 1),
            "max_pool1d, indices": lambda x: F.max_pool1d(x[None], 3, 1, 1, return_indices=True),
            "max_pool1d, dilated": lambda x: F.max_pool1d(x[None], 2, dilation=2),
            "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x[None], 3),
            "atan2": lambda x: torch.atan2(x, x * 0),
            "prod": torch.prod,
            "cumprod": lambda x: x.cumprod(0),
            "bce": lambda x: F.binary_cross_entropy(x.clamp(0, 1), torch.ones(5)),
            "scatter amax": lambda x: x.scatter_reduce(0, torch.zeros(5).long(), x * 1, "amax"),
        }.items()
    ],
)
def test_gradients_at_ties_bounds_and_zeros(function: Callable[..., Any]) -> None:
    _held(function, _given(0.0, 1.0, 1.0, -1.0, 0.0))


def test_square_root_at_zero_and_branches_that_are_not_taken() -> None:
    _held(torch.sqrt, _given(0.0, 1.0))
    _held(lambda x: torch.where(x > 0, x.log(), x * 2), _given(2.0, 0.0, -1.0))
    _held(lambda x: torch.where(x > 0, x, torch.tensor(NAN)), _given(2.0, INF))
    _held(lambda x: x.masked_fill(x > 1, -INF).softmax(0), _given(2.0, 1.0, 0.0))


def test_attention_of_queries_that_see_nothing() -> None:
    q = torch.randn(1, 2, 3, 4, requires_grad=True)
    mask = torch.tensor([[False, False, False], [True, False, False], [True, True, True]])
    for given in (mask, torch.where(mask, 0.0, -INF)):
        _held(lambda q, given=given: F.scaled_dot_product_attention(q, q, q, given), q)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "int64", "uint8", "bool"])
def test_types(dtype: str) -> None:
    kind = getattr(torch, dtype)
    x = torch.arange(12).reshape(3, 4).to(kind)
    y = torch.tensor([[3], [1], [2]]).to(kind)
    bound = 1e-2 if kind.is_floating_point else 0.0
    _held(lambda x: (x.sum(0), x.amax(1), x.any(0), x.cumsum(1)), x, bound=bound)
    _held(lambda x: (x.float().mean(), x == 3, x.T, x[1:, ::2], x.flip(0)), x, bound=bound)
    _held(lambda x: (x.gather(1, torch.tensor([[0], [3], [2]])), x.sort(dim=1, stable=True)[0]), x)
    if kind is not torch.bool:
        _held(lambda x, y: (x + y, x * 2, x / y, x // y, x % y, x.clamp(1, 5)), x, y, bound=bound)
        _held(lambda x: (x.prod(1), x.max(0), x.argmax(1), x - 1.5, x.pow(2)), x, bound=bound)


def test_shapes_without_elements_or_dims() -> None:
    empty, number = torch.zeros(0, 3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    _held(
        lambda x: (x.sum(0), torch.cat([x, x]), x @ torch.ones(3, 2), x.softmax(1), x[:, :1]), empty
    )
    _held(
        lambda x: (x.sum(0), x.softmax(0), x.max(0), x.sort(), x.cumsum(0), x.std(0, False)), number
    )
    _held(
        lambda x: (x.expand(1, 3), x.transpose(0, 0), x.logsumexp(0), x.flatten(), x.topk(1)),
        number,
    )


def test_views_of_other_layouts() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    _held(lambda x: (x.T.reshape(-1), x.T[1:, ::2].contiguous().view(-1), x.permute(1, 0) * 2), x)
    _held(lambda x: x.as_strided((3, 2), (2, 1), 1), x)
    refused = outcome(lambda x: x.T.as_strided((3, 2), (2, 1)), (x,), {})
    assert refused.kind == Kind.REFUSED and "SW_TORCH_OPERATOR" in refused.why


@pytest.mark.parametrize(
    ("code", "function"),
    [
        ("SW_TORCH_VALUES", lambda x: x[x > 0].sort().values.sum()),
        ("SW_TORCH_VALUES", lambda x: torch.nonzero(x).float() + x.sum()),
        ("SW_TORCH_VALUES", lambda x: x * torch.unique(x.detach()).numel()),
        ("SW_TORCH_VALUES", lambda x: x if x.sum() > 0 else -x),
        ("SW_TORCH_TYPE", lambda x: torch.fft.fft(x).abs()),
        ("SW_TORCH_TYPE", lambda x: torch.view_as_complex(x[:4].reshape(2, 2)).real),
        ("SW_TORCH_OPERATOR", lambda x: torch.linalg.svd(x[:4].reshape(2, 2))),
    ],
)
def test_refused(code: str, function: Callable[..., Any]) -> None:
    found = outcome(function, (_given(1.0, -1.0, 2.0, 0.5),), {})
    assert found.kind == Kind.REFUSED and found.why.startswith(code), found.why


def test_the_page_has_every_entry() -> None:
    page = PAGE.read_text()
    absent = [name for name in entries() if f"| {name} |" not in page]
    assert absent == [name for name in entries() if name.startswith(NOT_HERE)]
