"""Contractions: every orientation, batches, epilogues and odd sizes; generated code in L0 equals
L1.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.codegen import generate
from shardwright.compiler.codegen.contract_plan import even_tile
from shardwright.compiler.diagnostics import CompileError
from shardwright.compiler.isa.limits import walk
from shardwright.compiler.isa.program import Instr, Kernel, Loop
from tests.compiler.codegen.kernel_harness import (
    BF16,
    F32,
    I32,
    TARGET,
    Maker,
    arrays,
    check,
    count,
)


def matmul(
    m: int, n: int, k: int, dtype=F32, transposed=(0, 0, 0), batch: int = 0, out=None
) -> Maker:
    """out[m, n] = a[m, k] @ b[k, n]; `turn` stores a, b, out transposed."""
    made = Maker((m, n, k, batch) if batch else (m, n, k), "matmul")
    lead = (3,) if batch else ()
    a = made.load((*lead, *((2, 0) if transposed[0] else (0, 2))), dtype)
    b = made.load((*lead, *((1, 2) if transposed[1] else (2, 1))), dtype)
    made.store(made.contract(a, b, (2,), out), (*lead, *((1, 0) if transposed[2] else (0, 1))))
    return made


LAYOUTS = list(itertools.product((0, 1), repeat=3))


@pytest.mark.parametrize("transposed", LAYOUTS)
def test_all_layouts(transposed: tuple[int, int, int]) -> None:
    check(matmul(200, 131, 520, transposed=transposed), 1e-6)


@pytest.mark.parametrize("transposed", LAYOUTS)
def test_all_layouts_in_bf16(transposed: tuple[int, int, int]) -> None:
    check(matmul(67, 520, 200, BF16, transposed, batch=2), 1e-2)


SIZES = [
    (13, 67, 131),
    (1, 131, 200),
    (131, 1, 200),
    (1, 1, 300),
    (1030, 520, 13),
    (128, 512, 128),
    (520, 1030, 1030),
]


@pytest.mark.parametrize("size", SIZES)
def test_odd_sizes(size: tuple[int, int, int]) -> None:
    check(matmul(*size), 1e-6)


def test_attention_scores_and_values() -> None:
    """[b, t, h, d] layouts: scores contract d (innermost in both), values contract the keys."""
    b, h, t, s, d = 2, 3, 131, 67, 13
    m = Maker((b, h, t, s, d), "scores")
    q, k = m.load((0, 2, 1, 4)), m.load((0, 3, 1, 4))
    scaled = m.node("multiply", m.contract(q, k, (4,)), m.const(0.125))
    m.store(scaled, (0, 1, 2, 3))
    check(m, 1e-6)
    m = Maker((b, h, t, s, d), "values")
    p, v = m.load((0, 1, 2, 3)), m.load((0, 3, 1, 4))
    m.store(m.contract(p, v, (3,)), (0, 2, 1, 4))
    check(m, 1e-6)


def test_projection_with_split_heads() -> None:
    """[t, k] @ [k, h, d] stored as [h, t, d], and the weight gradient, which contracts two."""
    t, k, h, d = 200, 131, 5, 32
    m = Maker((t, k, h, d), "project")
    m.store(m.contract(m.load((0, 1)), m.load((1, 2, 3)), (1,)), (2, 0, 3))
    check(m, 1e-6)
    m = Maker((t, k, h, d), "project_back")
    m.store(m.contract(m.load((2, 0, 3)), m.load((1, 2, 3)), (2, 3)), (0, 1))
    check(m, 1e-6)
    m = Maker((3, 67, 131, 40), "weight_gradient")
    m.store(m.contract(m.load((0, 1, 2)), m.load((0, 1, 3)), (0, 1)), (2, 3))
    check(m, 1e-6)


def test_epilogue_and_prologue() -> None:
    """Bias, residual and activation after the product; a scaled, converted operand before it; two
    stores.
    """
    m = Maker((200, 131, 67), "fused")
    x = m.node("multiply", m.load((0, 2)), m.load((0,)))
    w = m.node("convert", m.load((2, 1), BF16), dtype=F32)
    c = m.contract(x, w, (2,))
    y = m.node("add", c, m.load((1,)))
    y = m.node("add", m.node("multiply", y, m.node("logistic", y)), m.load((0, 1)))
    m.store(y, (0, 1))
    m.store(m.node("convert", c, dtype=BF16), (0, 1))
    check(m, 1e-2)


def test_bf16_product_kept_in_fp32() -> None:
    check(matmul(131, 200, 520, BF16, out=F32), 1e-6)


def test_mixed_operand_types() -> None:
    m = Maker((67, 131, 200), "mixed")
    m.store(m.contract(m.load((0, 2), BF16), m.load((2, 1)), (2,), F32), (0, 1))
    check(m, 1e-6)


def test_two_contractions_in_one_kernel_get_a_nest_each() -> None:
    m = Maker((131, 67, 40), "two")
    x = m.load((0, 2))
    for _ in range(2):
        m.store(m.contract(x, m.load((2, 1)), (2,)), (0, 1))
    check(m, 1e-6)


def test_contraction_beyond_sbuf_streams_both_operands() -> None:
    """k so long that not even one stationary tile of all k fits beside the packed tiles."""
    m = matmul(128, 128, 25003)
    kernel = check(m, 1e-6)
    recipe = generate(m.program(), m.tensors, TARGET, 0).recipe
    assert recipe and count(kernel) < 30 * recipe.unroll  # a loop, unrolled by that
    assert sum(t.name == "stationary" for t in kernel.tiles) > 1


def test_code_size_does_not_grow_with_the_matrix() -> None:
    small = matmul(1024, 1024, 1024, BF16).kernel()
    large = matmul(4096, 28672, 8192, BF16).kernel()
    assert count(large) <= count(small) + 8 <= 40


def test_accumulating_in_place_works_and_overwriting_an_operand_is_refused() -> None:
    m = Maker((300, 131, 67), "accumulate")
    old = m.load((0, 1))
    total = m.node("add", old, m.contract(m.load((0, 2)), m.load((2, 1)), (2,)))
    m.store(total, (0, 1), tensor=m.tensor((0, 1), F32, "output", alias=0))
    check(m, 1e-6)
    m = Maker((67, 131, 67), "overwrite")
    product = m.contract(m.load((0, 2)), m.load((2, 1)), (2,))
    m.store(product, (0, 1), tensor=m.tensor((0, 1), F32, "output", alias=1))
    with pytest.raises(CompileError, match="SW_CODEGEN_IN_PLACE"):
        m.kernel()


def test_integer_contraction_is_refused() -> None:
    with pytest.raises(CompileError, match="SW_CODEGEN_CONTRACT_TYPE"):
        matmul(4, 4, 4, I32).kernel()


def test_reduction_after_a_contraction() -> None:
    """It is a reduction fusion: the reduction runs over the columns of a product."""
    m = Maker((4, 5, 6), "reduced")
    m.store(m.reduce(m.contract(m.load((0, 2)), m.load((2, 1)), (2,)), (1,)), (0,))
    check(m, 1e-6)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_random_contractions(data: st.DataObject) -> None:
    """Up to two iter dims of each role, any layout of all three tensors."""
    roles = {r: data.draw(st.integers(0, 2), label=r) for r in ("batch", "m", "n", "k")}
    roles["k"] = max(1, roles["k"])
    sizes: list[int] = []
    groups: dict[str, list[int]] = {}
    for role, number in roles.items():
        groups[role] = list(range(len(sizes), len(sizes) + number))
        choice = (2, 3) if role == "batch" else (1, 2, 13, 67, 131)[: 6 - number]
        sizes += [data.draw(st.sampled_from(choice)) for _ in range(number)]
    made = Maker(tuple(sizes), "random")
    dtype = data.draw(st.sampled_from((F32, BF16)))

    def order(*names: str) -> tuple[int, ...]:
        return tuple(data.draw(st.permutations([a for n in names for a in groups[n]])))

    a, b = made.load(order("batch", "m", "k"), dtype), made.load(order("batch", "n", "k"), dtype)
    made.store(made.contract(a, b, tuple(groups["k"]), F32), order("batch", "m", "n"))
    # Positive data: a sum that cancels has no accurate digits to compare.
    inputs = {n: np.abs(x) for n, x in enumerate(arrays(made.tensors, 0)[:2])}
    check(made, 1e-6, inputs)


@given(st.integers(1, 5000))
def test_even_tile_covers(size: int) -> None:
    tile = even_tile(size, 128)
    assert 1 <= tile <= 128
    assert -(-size // tile) <= max(1, -(-size // 128)) * 1.25 + 1


def loaded_elements(kernel: Kernel, tensor: int) -> int:
    """Elements of `tensor` that DMAs bring in, loops counted."""

    def visit(body: list[Instr | Loop], times: int) -> int:
        total = 0
        for item in body:
            if isinstance(item, Loop):
                total += visit(item.body, times * item.trip)
            elif item.opcode == "dma" and item.srcs[0].buffer == tensor:
                total += times * math.prod(item.srcs[0].shape)
        return total

    return visit(kernel.body, 1)


def test_heads_that_fit_in_one_tile_are_packed_together() -> None:
    """A weight gradient of heads: its rows are (head, width) and the other operand spans neither,
    so it is loaded once per block of heads, not once per head.
    """
    m = Maker((8, 128, 1024, 384), "by_head")
    a, b = m.load((0, 3, 1), BF16), m.load((3, 2), BF16)
    m.store(m.contract(a, b, over=(3,)), (0, 1, 2))
    kernel = check(m, 1e-2)
    assert loaded_elements(kernel, 1) <= 2 * 1024 * 384


def test_heads_that_are_summed_come_in_chunks() -> None:
    """An output projection: k is (head, width). With several heads at a time, transfers are large
    and sums stay in PSUM.
    """
    m = Maker((256, 512, 6, 64), "project")
    a, b = m.load((2, 0, 3), BF16), m.load((2, 3, 1), BF16)
    m.store(m.contract(a, b, over=(2, 3)), (0, 1))
    kernel = check(m, 1e-2)
    largest = max(math.prod(i.dst.shape) for i in walk(kernel.body) if i.opcode == "dma" and i.dst)
    assert largest >= 2 * 64 * 256
