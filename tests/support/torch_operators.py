"""torch's own table of operators with sample inputs (`op_db` of `torch.testing`), each exported and
interpreted as a user's module is, and held to torch: values, and gradients of random cotangents.
"""

from __future__ import annotations

import sys
import types
import unittest
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from itertools import islice
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.frontend.pytorch.exporting import Exported, export, operators
from shardwright.compiler.frontend.pytorch.interpreter import Values, evaluate
from shardwright.compiler.frontend.pytorch.operators.registry import row_name
from shardwright.compiler.frontend.pytorch.types import array_of

SAMPLES = 3
"""Of an entry, spread over all that it has."""
MOST_SAMPLES = 400  # of an entry that are looked at
BOUND = 2e-5
"""Of the largest value of a result (at most of 1), and of each value."""
LEAST = 5e-6
"""What is rounding in any case: of inputs of about 1."""


class Kind(StrEnum):
    """What came of a sample: equal to torch (a drawn one in shape and type), refused with a code,
    or neither."""

    EQUAL = "equal"
    REFUSED = "refused"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a sample, the rows that its graph has, and why it is no other outcome."""

    kind: Kind
    rows: frozenset[str] = field(default_factory=frozenset)
    why: str = ""


@cache
def entries() -> Mapping[str, Any]:
    """torch's entries by name and variant, `std.unbiased`."""
    stand_in_for_expecttest()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db

    named = {e.name + (f".{e.variant_test_name}" if e.variant_test_name else ""): e for e in op_db}
    assert len(named) == len(op_db)
    return named


def stand_in_for_expecttest() -> None:
    """torch's test files import a package for golden texts that nothing here needs."""
    try:
        import expecttest  # noqa: F401
    except ImportError:
        module = types.ModuleType("expecttest")
        module.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = module


def samples(entry: Any, count: int = SAMPLES) -> list[Any]:
    """So many inputs of an entry in fp32 (or the first type it has), spread over all of them."""
    import torch

    dtypes = entry.dtypes
    dtype = torch.float32 if torch.float32 in dtypes else sorted(dtypes, key=str)[0]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        has_gradient = entry.supports_autograd and dtype.is_floating_point
        made = entry.sample_inputs("cpu", dtype, requires_grad=has_gradient)
        found = list(islice(made, MOST_SAMPLES))
    return [found[n * len(found) // count] for n in range(min(count, len(found)))]


class Called:
    """A function as a module of the tensors in its arguments; what is no tensor stands fixed."""

    def __init__(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        import torch
        from torch.utils import _pytree

        leaves, structure = _pytree.tree_flatten((tuple(args), dict(kwargs)))
        self.places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors = [_leaf(leaves[n]) for n in self.places]
        places = self.places

        class Module(torch.nn.Module):  # type: ignore[misc]  # which torch has no types for here
            def forward(self, *tensors: Any) -> Any:
                given = dict(zip(places, tensors, strict=True))
                every = [given.get(n, leaf) for n, leaf in enumerate(leaves)]
                args, kwargs = _pytree.tree_unflatten(every, structure)
                results = _pytree.tree_leaves(function(*args, **kwargs))
                return tuple(r for r in results if isinstance(r, torch.Tensor))

        self.module = Module()


def _leaf(tensor: Any) -> Any:
    """A tensor without a history."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def names_of(exported: Exported) -> frozenset[str]:
    """The operators of a graph as rows are called."""
    return frozenset(row_name(op) or str(op) for _, op in operators(exported.graph))


def outcome(
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    is_drawn: bool = False,
    bound: float = BOUND,
    has_gradient: bool = True,
    finite_only: bool = False,
) -> Outcome:
    """A call by torch, and by our road from the same tensors; `finite_only` compares gradients
    where torch's are numbers.

    Raises what torch raises where it cannot do the call at all.
    """
    called = Called(function, args, kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        copies = [_leaf(t.clone()) if t.is_contiguous() else _leaf(t) for t in called.tensors]
        wanted = called.module(*copies)
        rows: frozenset[str] = frozenset()
        try:
            exported = export(called.module, called.tensors, {})
            rows = names_of(exported)
            return _compared(
                exported,
                called.tensors,
                copies,
                wanted,
                rows,
                is_drawn,
                bound,
                has_gradient,
                finite_only,
            )
        except DiagnosticError as error:
            return Outcome(
                Kind.REFUSED, rows, f"{error.diagnostic.code}: {error.diagnostic.message}"
            )
        except Exception as error:
            return Outcome(Kind.WRONG, rows, f"{type(error).__name__}: {error}"[:400])


def _compared(
    exported: Exported,
    tensors: Sequence[Any],
    copies: Sequence[Any],
    wanted: Sequence[Any],
    rows: frozenset[str],
    is_drawn: bool,
    bound: float,
    has_gradient: bool,
    finite_only: bool,
) -> Outcome:
    import jax
    import torch

    inputs = [array_of(t) for t in tensors]
    traced = [n for n, t in enumerate(tensors) if t.requires_grad]

    def function(parts: list[Any]) -> list[Any]:
        every = list(inputs)
        for n, part in zip(traced, parts, strict=True):
            every[n] = part
        return evaluate(exported, Values({}, {}, every, jax.random.key(0)))[0]

    outputs = [n for n, w in enumerate(wanted) if w.requires_grad]
    made = np.random.default_rng(0)
    pairs = [(made.normal(size=wanted[n].shape).astype(np.float32), n) for n in outputs]

    def both(parts: list[Any]) -> tuple[list[Any], list[Any]]:
        values = function(parts)
        if not outputs or is_drawn or not has_gradient:
            return values, []
        _, pull = jax.vjp(lambda parts: [function(parts)[n] for n in outputs], parts)
        given = [jax.numpy.asarray(c, values[n].dtype) for c, n in pairs]
        return values, pull(given)[0]

    values, gradients = jax.jit(both)([inputs[n] for n in traced])
    for n, (found, want) in enumerate(zip(values, wanted, strict=True)):
        why = _unlike(np.asarray(found), array_of(want), is_drawn, bound)
        if why:
            return Outcome(Kind.WRONG, rows, f"result {n}: {why}")
    if gradients:
        given = [torch.from_numpy(c).to(wanted[n].dtype) for c, n in pairs]
        torch.autograd.backward([wanted[n] for n in outputs], given)
        why = _gradients_apart(gradients, [copies[n] for n in traced], bound, finite_only)
        return Outcome(Kind.WRONG if why else Kind.EQUAL, rows, why)
    return Outcome(Kind.EQUAL, rows)


def _gradients_apart(
    gradients: Sequence[Any], sources: Sequence[Any], bound: float, finite_only: bool
) -> str:
    """How gradients differ from those of tensors of torch; "" where they do not."""
    import torch

    is_compared: Any = True
    if finite_only:
        is_compared = np.all([np.isfinite(array_of(source)) for source in sources], 0)
    for n, (found, source) in enumerate(zip(gradients, sources, strict=True)):
        zeros = torch.zeros_like(source)
        want = array_of(zeros if source.grad is None else zeros + source.grad)
        found = np.asarray(found)
        if finite_only:
            found = np.where(np.isfinite(want) & is_compared, found, want)
        why = _unlike(found, want, False, bound)
        if why:
            return f"gradient {n}: {why}"
    return ""


def _unlike(found: Any, want: Any, is_drawn: bool, bound: float) -> str:
    """How two arrays differ; "" where they do not."""
    if found.shape != want.shape or found.dtype != want.dtype:
        return f"{found.dtype}{list(found.shape)} for {want.dtype}{list(want.shape)}"
    if is_drawn:
        return ""
    if not np.issubdtype(want.dtype, np.floating) and "float" not in want.dtype.name:
        count = int(np.sum(found != want))
        return (
            f"{count} of {want.size} unequal: {_shown(found, want, found != want)}" if count else ""
        )
    found, want = found.astype(np.float64), want.astype(np.float64)
    finite = want[np.isfinite(want)]
    scale = float(np.max(np.abs(finite))) if finite.size else 0.0
    is_near = np.isclose(
        found, want, rtol=bound, atol=max(bound * min(scale, 1), LEAST), equal_nan=True
    )
    return "" if is_near.all() else _shown(found, want, ~is_near)


def _shown(found: Any, want: Any, unlike: Any) -> str:
    pairs = [f"{f:.6g} for {w:.6g}" for f, w in zip(found[unlike], want[unlike], strict=True)]
    return f"{', '.join(pairs[:3])} ({len(pairs)} of {want.size})"


DRAWN = (
    *("bernoulli", "dropout", "rand", "normal", "uniform", "multinomial", "empty", "rrelu"),
    *("cauchy", "exponential", "geometric", "poisson", "multi_head_attention_forward"),
)
"""Parts of names of entries whose values are random, or not said."""


def is_drawn(name: str) -> bool:
    """Whether an entry's values are random."""
    exact = ("normalize", "poisson_nll", "without_train")
    return any(part in name for part in DRAWN) and not any(part in name for part in exact)


def outcomes(name: str, count: int = SAMPLES) -> Iterator[Outcome]:
    """What comes of an entry's samples."""
    entry = entries()[name]
    for sample in samples(entry, count):
        args = (sample.input, *sample.args)
        has_gradient = entry.supports_autograd
        yield outcome(
            entry.get_op(), args, sample.kwargs, is_drawn(name), has_gradient=has_gradient
        )


EDGES = (
    *(0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, -1.5, 2.0, -2.0, 2.5, 3.0, -3.0, 6.0, 20.0, -20.0),
    *(1e-30, -1e-30, 1e30, -1e30, float("inf"), -float("inf"), float("nan")),
)
"""Zeros, bounds that operators have, ties, and what is no number."""


def edge_outcome(name: str) -> Outcome:
    """What comes of an elementwise entry, or of a reduction, at `EDGES`: of two tensors every pair,
    the other arguments as in its first sample. Gradients are compared where torch's are numbers."""
    import torch

    entry = entries()[name]
    sample = samples(entry, 1)[0]
    edges = torch.tensor(EDGES)
    first, rest = edges, list(sample.args)
    if rest and isinstance(rest[0], torch.Tensor):
        first, rest[0] = (part.flatten() for part in torch.meshgrid(edges, edges, indexing="ij"))
    parts = [p.clone().requires_grad_(entry.supports_autograd) for p in (first, *rest[:1])]
    args = [parts[0], *(parts[1:] if rest and isinstance(rest[0], torch.Tensor) else rest)]
    return outcome(
        entry.get_op(), args, sample.kwargs, has_gradient=entry.supports_autograd, finite_only=True
    )
