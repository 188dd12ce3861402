"""Draws of rounding: how far they go, what they leave alone, and what makes much of them."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.sampled import Casts, sample
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.support.rounding import EXACT, allowed, unit_roundoff
from shardwright.sim_cluster.values.kernels import _BUILDERS

NUMBERS = np.random.default_rng(1).standard_normal(4096).astype(np.float32)


def doubled(op: str) -> Graph:
    b = Builder()
    x = b.input(NUMBERS.shape)
    return b.finish(getattr(b, op)(x, x))


def effects(graph: Graph, *inputs: np.ndarray, casts: Casts | None = None) -> np.ndarray:
    """Of every element of the first output, how far a draw moves it."""
    exact = evaluate(graph, inputs)[0].astype(np.float64)
    moved: np.ndarray = np.abs(sample(graph, inputs, 0, casts)[0].astype(np.float64) - exact)
    return moved


def test_an_operation_moves_by_its_rounding() -> None:
    """2^-24 is half of the distance from 1 to the next number of fp32: three halves of it at most,
    and what rounding the moved number adds."""
    moved = effects(doubled("multiply"), NUMBERS) / NUMBERS**2
    assert 0 < moved.max() <= 2.5 * 2**-24
    assert (moved > 0).mean() > 0.2


def test_a_draw_is_the_same_for_the_same_seed() -> None:
    graph = doubled("add")
    first, again, other = (sample(graph, [NUMBERS], seed)[0] for seed in (3, 3, 4))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def reduced(kind: str, shape: tuple[int, ...]) -> Graph:
    b = Builder()
    return b.finish(b.reduce(b.input(shape), kind, (0,)))


def test_a_sum_moves_by_a_part_of_its_terms_when_they_cancel() -> None:
    """4096 terms of 1 and -1 leave nothing; any order of them may leave 4096 roundings of ones."""
    terms = np.tile([1.0, -1.0], 2048).astype(np.float32).reshape(4096, 1)
    moved = effects(reduced("add", terms.shape), terms)
    assert 2**-24 < moved[0] <= 1.5 * 4096 * 2**-24


@pytest.mark.parametrize(
    ("given", "wanted", "moves"),
    [
        (DType.I32, DType.F32, [False, False, True]),
        (DType.I32, DType.BF16, [False, True, True]),
        (DType.PRED, DType.F32, [False, False, False]),
    ],
    ids=lambda value: str(getattr(value, "value", "")),
)
def test_integers_that_a_float_type_has_stay(
    given: DType, wanted: DType, moves: list[bool]
) -> None:
    """A class of samples that has been a float is the same class again; only the last of 3, 2^24
    and 2^24 + 3 is none of fp32, and above 2^8 bf16 rounds."""
    b = Builder()
    graph = b.finish(b.convert(b.input((3, 500), given), wanted))
    numbers = np.repeat(np.array([[3], [2**24], [2**24 + 3]], given.numpy), 500, axis=1)
    (kept,), (found,) = evaluate(graph, [numbers]), sample(graph, [numbers], 0)
    assert list((found != kept).any(axis=1)) == moves


@pytest.mark.parametrize("kind", ["max", "min"])
def test_the_largest_element_is_one_of_them(kind: str) -> None:
    assert not effects(reduced(kind, NUMBERS.shape), NUMBERS).any()


def test_a_product_of_short_operands_moves_by_their_rounding() -> None:
    """bf16 keeps 8 bits: operands move by 2^-8 at most, sums of random products by as much."""
    x = NUMBERS.reshape(64, 64)
    b = Builder()
    graph = b.finish(b.dot(b.input((64, 64)), b.input((64, 64))))
    casts = Casts(DType.BF16, frozenset(("dot_general",)))
    whole, short = effects(graph, x, x), effects(graph, x, x, casts=casts)
    size = np.linalg.norm(x @ x)
    assert np.linalg.norm(whole) / size < 64 * 2**-24
    assert 2**-10 < np.linalg.norm(short) / size < 2**-7


def test_results_are_short_where_the_compiler_makes_them_so() -> None:
    casts = Casts(DType.BF16, frozenset(("multiply",)), frozenset(("multiply",)))
    (found,) = sample(doubled("multiply"), [NUMBERS], 0, casts)
    assert not (found.view(np.uint32) & 0xFFFF).any()


@pytest.mark.parametrize("dtype", [d for d in DType if d.is_float], ids=lambda d: d.value)
def test_the_largest_error_of_a_rounding(dtype: DType) -> None:
    """Half of what lies between one and its next number, as the type itself has them."""
    one, place = np.ones((), dtype.numpy), 1
    if dtype is DType.TF32:  # held as fp32, without its last 13 bits
        place = 1 << 13
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.bytes]
    following = (one.view(bits) + bits(place)).view(dtype.numpy)
    assert unit_roundoff(dtype) == (float(following) - 1.0) / 2


def test_exact_operations_are_named_as_graphs_and_kernels_name_them() -> None:
    assert OPS.keys() | _BUILDERS.keys() >= EXACT


def test_a_bound_is_what_is_allowed_unless_rounding_does_more() -> None:
    assert (allowed(1e-5, 0.0), allowed(1e-5, 2e-6), allowed(1e-5, 1e-5)) == (1e-5, 1e-5, 4e-5)
