"""Cutting a kernel in two: both halves together are the whole, in values and in code, and what
would not be is not cut."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from shardwright.compiler.codegen import generate
from shardwright.compiler.codegen.cores import Cut, cuts
from shardwright.compiler.isa.kernel import Affine, Bound, Tensor, View
from tests.compiler.codegen.kernel_harness import (
    F32,
    I32,
    TARGET,
    Maker,
    arrays,
    distance,
)
from tests.support import l0, l1


def matmul() -> Maker:
    m = Maker((70, 36, 24), "matmul")
    m.store(m.contract(m.load((0, 2)), m.load((2, 1)), (2,)), (0, 1))
    return m


def softmax() -> Maker:
    m = Maker((41, 30), "softmax")
    x = m.load((0, 1))
    e = m.node("exponential", m.node("subtract", x, m.reduce(x, (1,), "max")))
    m.store(m.node("divide", e, m.reduce(e, (1,))), (0, 1))
    return m


def transposed() -> Maker:
    m = Maker((33, 65), "transposed")
    m.store(m.load((0, 1)), (1, 0))
    return m


def counted() -> Maker:
    m = Maker((9, 20), "counted")
    number = m.node("iota", iter_dims=(1,), dtype=I32, atom=1, start=Affine(3), step=2)
    m.store(m.node("add", number, m.load((0, 1), I32)), (0, 1))
    return m


def accumulated() -> Maker:
    m = Maker((24, 32, 16), "accumulated")
    kept = m.load((0, 1))
    product = m.contract(m.load((0, 2)), m.load((2, 1)), (2,))
    out = m.tensor((0, 1), kind="output", alias=0)
    m.store(m.node("add", kept, product), (0, 1), tensor=out)
    return m


def gathered() -> Maker:
    m = Maker((12, 16), "gathered")
    m.load((0, 1))
    table = Tensor("table", (50, 16), F32, "input")
    m.tensors.append(table)
    row = m.load((0,), I32)
    view = View(1, Affine(), (0, 1))
    picked = m.node(
        "load_indexed",
        row,
        iter_dims=(0, 1),
        dtype=table.dtype,
        view=view,
        stride=16,
        rows=50,
        mode="clamp",
    )
    m.store(m.node("add", picked, 0), (0, 1))
    return m


def windowed() -> Maker:
    """A convolution with a zero border: y[i, o] = sum of x[i + w - 1, c] * k[w, c, o]."""
    m = Maker((21, 8, 3, 4), "windowed")
    m.tensors.append(Tensor("x", (21, 4), F32, "input"))
    view, bound = View(0, Affine(-4), (4, 0, 4, 1)), Bound(-1, 21, 4, (1, 0, 1, 0))
    x = m.node("load", iter_dims=(0, 2, 3), dtype=F32, view=view, bounds=(bound,))
    m.store(m.contract(x, m.load((2, 3, 1)), (2, 3)), (0, 1))
    return m


def two_sizes() -> Maker:
    """A second store that does not move along the first iter dim: only one half has it."""
    m = Maker((18, 26), "two sizes")
    x, y = m.load((0, 1)), m.load((1,))
    m.store(m.node("add", x, y), (0, 1))
    m.store(m.node("negate", y), (1,))
    return m


CASES: dict[str, tuple[Callable[[], Maker], int]] = {
    "matmul": (matmul, 2),
    "softmax": (softmax, 1),
    "transposed": (transposed, 2),
    "counted": (counted, 2),
    "accumulated": (accumulated, 2),
    "gathered": (gathered, 2),
    "windowed": (windowed, 2),
    "two sizes": (two_sizes, 2),
}


def values_of(m: Maker, cut: Cut, code: bool, turned: bool) -> list[np.ndarray]:
    """The tensors after a cut kernel, as whole arrays or as instructions, halves in any order."""
    tensors = [*m.tensors, *cut.scratch]
    got = arrays(tensors, 0)
    halves = cut.halves[::-1] if turned else cut.halves
    for part in (*halves, *([cut.joined] if cut.joined else ())):
        if code:
            l0.run_kernel(generate(part, tensors, TARGET, 0).kernel, got, {})
        else:
            l1.run_kernel(part, got, {})
    return got[: len(m.tensors)]


@pytest.mark.parametrize("name", CASES)
def test_both_halves_are_the_whole_in_any_order(name: str) -> None:
    make, count = CASES[name]
    m = make()
    want = arrays(m.tensors, 0)
    l1.run_kernel(m.program(), want, {})
    found = list(cuts(m.program(), m.tensors))
    assert len(found) == count
    for cut in found:
        first, second = cut.halves
        assert abs(sum(first.iter_dims) - sum(second.iter_dims)) <= 1
        for turned, code in product((False, True), repeat=2):
            for got, wanted in zip(values_of(m, cut, code, turned), want, strict=True):
                assert distance(got, wanted) <= 1e-6


def test_the_longest_iter_dim_comes_first_and_odd_ones_give_the_first_half_one_more() -> None:
    m = transposed()
    (first, second), (third, fourth) = (cut.halves for cut in cuts(m.program(), m.tensors))
    assert (first.iter_dims, second.iter_dims) == ((33, 33), (33, 32))
    assert (third.iter_dims, fourth.iter_dims) == ((17, 65), (16, 65))


def test_a_store_that_does_not_move_is_in_one_half_only() -> None:
    m = two_sizes()
    stores = [
        sorted(sum(n.op == "store" for n in half.nodes) for half in cut.halves)
        for cut in cuts(m.program(), m.tensors)
    ]
    assert stores == [[2, 2], [1, 2]]


def sizes(m: Maker) -> list[tuple[int, ...]]:
    """The sizes of the first half of every cut."""
    return [cut.halves[0].iter_dims for cut in cuts(m.program(), m.tensors)]


def scattered(unique: bool) -> Maker:
    m = Maker((12, 16), "scattered")
    update, row = m.load((0, 1)), m.load((0,), I32)
    m.tensors.append(Tensor("table", (50, 16), m.nodes[update].dtype, "output"))
    attrs = {"stride": 16, "rows": 50, "kind": "add", "unique": unique, "order": (0,)}
    view = View(2, Affine(), (0, 1))
    m.node("store_indexed", update, row, iter_dims=(0, 1), view=view, **attrs)
    return m


def test_rows_picked_by_index_are_cut_along_the_index_only_when_no_row_is_picked_twice() -> None:
    assert sizes(scattered(False)) == [(12, 8)]
    m = scattered(True)
    rows = np.random.default_rng(0).permutation(50)[:12].astype(np.int32)
    want = arrays(m.tensors, 0, {1: rows})
    l1.run_kernel(m.program(), want, {})
    assert sizes(m) == [(6, 16), (12, 8)]
    for cut in cuts(m.program(), m.tensors):
        got = arrays(m.tensors, 0, {1: rows})
        for half in cut.halves[::-1]:
            l1.run_kernel(half, got, {})
        assert np.array_equal(got[2], want[2], equal_nan=True)


def shifted() -> Maker:
    """In place: x[i] = x[i + 1]; the halves meet at the border."""
    m = Maker((16, 8), "shifted")
    m.tensors.append(Tensor("x", (17, 8), I32, "input"))
    read = m.node("load", iter_dims=(0, 1), dtype=I32, view=View(0, Affine(8), (8, 1)))
    m.tensors.append(Tensor("y", (17, 8), I32, "output", 0))
    m.node("store", read, iter_dims=(0, 1), view=View(1, Affine(), (8, 1)))
    return m


def test_halves_that_would_meet_are_not_cut() -> None:
    assert sizes(shifted()) == [(16, 4)]


def channels() -> Maker:
    """A window whose points have channels that are not summed: they are loaded whole."""
    m = Maker((21, 3, 4), "channels")
    m.tensors.append(Tensor("x", (21, 4), F32, "input"))
    view, bound = View(0, Affine(-4), (4, 4, 1)), Bound(-1, 21, 4, (1, 1, 0))
    x = m.node("load", iter_dims=(0, 1, 2), dtype=F32, view=view, bounds=(bound,))
    m.store(m.contract(x, m.load((1, 2)), (1,)), (0, 2))
    return m


def test_points_of_a_window_are_not_cut() -> None:
    assert sizes(channels()) == [(11, 3, 4)]


def total() -> Maker:
    """One number, from sums that follow each other."""
    m = Maker((16, 24), "total")
    x = m.load((0, 1))
    m.store(m.node("sqrt", m.reduce(m.node("multiply", x, x), (0, 1))), ())
    return m


def norm_gradient() -> Maker:
    """A sum per row that rows go on with, and a sum over rows that is added to what was there."""
    m = Maker((40, 32), "norm gradient")
    x, g, w = m.load((0, 1)), m.load((0, 1)), m.load((1,))
    scale = m.node("rsqrt", m.reduce(m.node("multiply", x, x), (1,)))
    y = m.node("multiply", x, scale)
    m.store(m.node("multiply", y, w), (0, 1))
    gathered_ = m.node("add", m.load((1,)), m.reduce(m.node("multiply", y, g), (0,)))
    out = m.tensor((1,), kind="output", alias=4)
    m.store(gathered_, (1,), tensor=out)
    return m


def largest() -> Maker:
    m = Maker((30, 8), "largest")
    m.store(m.reduce(m.load((0, 1)), (0,), "max"), (1,))
    m.store(m.reduce(m.load((0, 1)), (1,), "min"), (0,))
    return m


def product_of_rows() -> Maker:
    """A contraction over everything its operands share."""
    m = Maker((64, 48), "product of rows")
    a, b = m.load((0, 1)), m.load((0, 1))
    m.store(m.contract(a, b, (0, 1)), ())
    return m


@pytest.mark.parametrize(
    ("make", "count"), [(total, 2), (norm_gradient, 1), (largest, 2), (product_of_rows, 2)]
)
def test_each_core_sums_its_half_where_nothing_else_can_be_cut(
    make: Callable[[], Maker], count: int
) -> None:
    m = make()
    want = arrays(m.tensors, 0)
    l1.run_kernel(m.program(), want, {})
    found = list(cuts(m.program(), m.tensors))
    assert len(found) == count
    for cut in found:
        assert cut.joined is not None
        assert all(tensor.shape[0] == 2 for tensor in cut.scratch)
        for turned, code in product((False, True), repeat=2):
            for got, wanted in zip(values_of(m, cut, code, turned), want, strict=True):
                assert distance(got, wanted) <= 1e-5


def test_what_goes_on_along_the_summed_iter_dim_is_not_cut() -> None:
    """A softmax over all it has: every core would need the sum of both before it goes on."""
    m = Maker((64,), "softmax of one row")
    e = m.node("exponential", m.load((0,)))
    m.store(m.node("divide", e, m.reduce(e, (0,))), (0,))
    assert not list(cuts(m.program(), m.tensors))


def test_memory_that_is_read_again_behind_the_sums_stays_as_it_was() -> None:
    """The second store needs what the first one overwrites."""
    m = Maker((16,), "in place")
    x = m.load((0,))
    kept = m.load(())
    out = m.tensor((), kind="output", alias=1)
    m.store(m.node("negate", kept), (), tensor=out)
    m.store(m.node("add", m.reduce(x, (0,)), kept), ())
    assert not list(cuts(m.program(), m.tensors))


def test_the_cut_that_shares_most_work_comes_first() -> None:
    """Rows are few, but both halves of the columns would load all of them for themselves; of equal
    work the longer iter dim comes first.
    """
    wide, tall = Maker((40, 8, 300), "wide"), Maker((8, 40, 300), "tall")
    for m in (wide, tall):
        m.store(m.contract(m.load((0, 2)), m.load((2, 1)), (2,)), (0, 1))
        first, second = cuts(m.program(), m.tensors)
        longest = m.program().iter_dims.index(40)
        assert first.halves[0].iter_dims[longest] == 20
        assert second.halves[0].iter_dims[longest] == 40
    shared = Maker((64, 8, 16), "shared")
    exponential = shared.node("exponential", shared.load((1, 2)))
    shared.store(shared.node("add", shared.load((0, 1, 2)), exponential), (0, 1, 2))
    sizes = [cut.halves[0].iter_dims for cut in cuts(shared.program(), shared.tensors)]
    assert sizes == [(64, 8, 8), (64, 4, 16), (32, 8, 16)]
