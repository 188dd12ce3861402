"""Adjacent views move as one transfer: longer runs, the same values."""

from __future__ import annotations

import pytest

from shardwright.compiler.codegen.coalesce import coalesce
from shardwright.compiler.codegen.normalise import normalise
from shardwright.compiler.codegen.rows.algebra import defer_scaling
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine, Tensor, View
from shardwright.compiler.isa.limits import walk
from shardwright.compiler.isa.program import Kernel, Space
from tests.compiler.codegen.kernel_harness import BF16, F32, I32, Maker, check


def half_view(m: Maker, tensor: int, half: int) -> View:
    """Half `half` of rows [t, head, 2 * d]."""
    _, heads, d = m.iter_dims
    return View(tensor, Affine(half * d), (heads * 2 * d, 2 * d, 1))


def rotary(t: int, heads: int, d: int, dtype: DType = BF16, gap: int = 0) -> Maker:
    """Halves of each head turned by an angle per (t, d); `gap` moves the second half away."""
    m = Maker((t, heads, d), "rotary")
    shape = (t, heads, 2 * d + gap)
    for name, kind in (("x", "input"), ("y", "output")):
        m.tensors.append(Tensor(name, shape, dtype, kind))
    halves = []
    for half in (0, 1):
        view = half_view(m, 0, half)
        if gap and half:
            view = View(0, Affine(t * heads * 2 * d), view.strides)
        halves.append(m.node("load", iter_dims=(0, 1, 2), dtype=dtype, view=view))
    cos, sin = m.load((0, 2)), m.load((0, 2))
    a, b = halves
    first = m.node("subtract", m.node("multiply", a, cos), m.node("multiply", b, sin))
    second = m.node("add", m.node("multiply", b, cos), m.node("multiply", a, sin))
    for half, value in enumerate((first, second)):
        m.node("store", value, iter_dims=(0, 1, 2), dtype=dtype, view=half_view(m, 1, half))
    return m


def runs(kernel: Kernel, tensor: int) -> set[int]:
    """Innermost contiguous elements of the transfers of a tensor."""
    found = set()
    for instr in walk(kernel.body):
        for p in (instr.dst, *instr.srcs):
            if p is not None and p.space is Space.HBM and p.buffer == tensor:
                found.add(p.dims[-1][1] if p.dims[-1][0] == 1 else 1)
    return found


@pytest.mark.parametrize(
    "sizes", [(300, 4, 64), (128, 8, 64), (1000, 3, 20), (7, 1, 5), (130, 64, 32)]
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_halves_of_heads(sizes: tuple[int, int, int], dtype: DType) -> None:
    m = rotary(*sizes, dtype)
    kernel = check(m, 1e-2 if dtype is BF16 else 1e-6)
    assert min(runs(kernel, 0)) >= 2 * sizes[2] and min(runs(kernel, 1)) >= 2 * sizes[2]


def test_views_apart_stay_apart() -> None:
    m = rotary(40, 2, 16, F32, gap=5)
    domain = normalise(m.program())
    joined, roots = coalesce(domain, domain.roots, m.tensors)
    assert sum(v.op == "part" for v in joined.values) == 0
    assert len(roots) == 1  # both halves of the result still lie side by side


def test_long_runs_are_left_alone() -> None:
    m = rotary(40, 2, 1024, F32)
    domain = normalise(m.program())
    assert coalesce(domain, domain.roots, m.tensors) == (domain, domain.roots)


def test_a_value_stored_twice_is_not_part_of_a_join() -> None:
    """Its tile belongs to one place."""
    m = rotary(64, 2, 16, F32)
    stored = m.nodes[-1].inputs[0]
    m.store(stored, (0, 1, 2))
    domain = normalise(m.program())
    joined, _ = coalesce(domain, domain.roots, m.tensors)
    assert not any(v.op == "join" for v in joined.values)
    check(m)


def test_parts_that_are_reduced() -> None:
    """Sums over parts, over the rows of the partitions too, and parts read after a reduction."""
    m = rotary(260, 4, 32, F32)
    a, b = 0, 1
    m.store(m.reduce(m.node("multiply", a, b), (2,)), (0, 1))
    m.store(m.reduce(m.node("add", a, b), (0,)), (1, 2))
    total = m.reduce(m.node("multiply", a, a), (1, 2))
    m.store(m.node("multiply", b, total), (0, 1, 2))
    check(m)


def test_nests_of_a_kernel_are_rewritten_one_at_a_time() -> None:
    """The algebra of reduction fusions looks at its own nest; other contractions stay."""
    m = Maker((64, 32, 16), "two nests")
    x, w, v = m.load((0, 2)), m.load((2, 1)), m.load((2, 1))
    m.store(m.contract(m.node("multiply", x, m.load((0,))), w, over=(2,)), (0, 1))
    m.store(m.contract(m.node("multiply", x, m.load((0,))), v, over=(2,)), (0, 1))
    domain = normalise(m.program())
    for root in domain.roots:
        rewritten, (moved,) = defer_scaling(domain, [root])
        assert rewritten.values[moved].op == "store"
        assert len(rewritten.values) >= len(domain.values)


def statistics(rows: int, d: int, over: int, dtype: DType) -> Maker:
    """Largest, smallest and sum along one dim, side by side."""
    m = Maker((rows, d), "statistics")
    x, kept = m.load((0, 1), dtype), 1 - over
    m.tensors.append(Tensor("y", (m.iter_dims[kept], 3), dtype, "output"))
    for at, kind in enumerate(("max", "min", "add")):
        strides = (3, 0) if kept == 0 else (0, 3)
        view = View(len(m.tensors) - 1, Affine(at), strides)
        m.node("store", m.reduce(x, (over,), kind), iter_dims=(kept,), dtype=dtype, view=view)
    return m


@pytest.mark.parametrize("over", [0, 1])
@pytest.mark.parametrize("dtype", [F32, BF16, I32])
@pytest.mark.parametrize("sizes", [(300, 70), (130, 20000), (9000, 33)])
def test_numbers_of_rows_side_by_side(sizes: tuple[int, int], dtype: DType, over: int) -> None:
    """Made by reductions of one tile, over loops, or over the partitions."""
    m = statistics(*sizes, over, dtype)
    kernel = check(m, 1e-2 if dtype is BF16 else 1e-6)
    assert min(runs(kernel, len(m.tensors) - 1)) >= 3
