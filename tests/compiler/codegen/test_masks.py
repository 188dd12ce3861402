"""Masks by position: one `affine_select` of GpSimd and no predicate, where all readers allow it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwright.compiler.codegen import generate
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.isa.limits import walk
from tests.compiler.codegen.kernel_harness import F32, I32, PRED, TARGET, Maker, check
from tests.support.compiled import graph_of, link

DIRECTIONS = ("EQ", "NE", "LT", "LE", "GT", "GE")


def position(m: Maker, iter_dim: int, start: int = 0, step: int = 1) -> int:
    return m.node(
        "iota", iter_dims=(iter_dim,), dtype=I32, atom=iter_dim, start=Affine(start), step=step
    )


def predicate(m: Maker, direction: str = "GE", shift: int = 0, step: int = 1) -> int:
    """step * row + shift against the column."""
    row = m.node("add", position(m, 0, step=step), m.const(shift, I32))
    return m.node("compare", row, position(m, 1), dtype=PRED, direction=direction)


def opcodes(m: Maker) -> set[str]:
    return {i.opcode for i in walk(m.kernel().body)}


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 200), st.integers(1, 70)),
    direction=st.sampled_from(DIRECTIONS),
    shift=st.integers(-40, 40),
    step=st.sampled_from((-1, 1, 2)),
    fill=st.sampled_from((0.0, -1e9, float("-inf"))),
    swapped=st.booleans(),
)
def test_one_instruction_means_a_comparison_and_a_select(
    sizes: tuple[int, int], direction: str, shift: int, step: int, fill: float, swapped: bool
) -> None:
    m = Maker(sizes, "masked")
    x, other = m.load((0, 1)), m.const(fill)
    branches = (other, x) if swapped else (x, other)
    m.store(m.node("select", predicate(m, direction, shift, step), *branches, dtype=F32), (0, 1))
    check(m)
    assert min(sizes) == 1 or ("affine_select" in opcodes(m) and "select" not in opcodes(m))


MOST = 2**31 - 1
ENDS = st.builds(
    lambda end, by: end + by if end < 0 else end - by,
    st.sampled_from((-MOST - 1, MOST)),
    st.integers(0, 120),
)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.tuples(st.integers(60, 130), st.integers(30, 70)),
    direction=st.sampled_from(DIRECTIONS),
    op=st.sampled_from(("add", "subtract")),
    shift=st.one_of(ENDS, st.integers(-40, 40)),
    limit=st.one_of(ENDS, st.integers(-40, 40)),
)
@example(sizes=(100, 60), direction="LT", op="add", shift=MOST - 100, limit=0)
@example(sizes=(100, 60), direction="GE", op="subtract", shift=100 - MOST, limit=MOST - 50)
def test_sums_that_wrap(
    sizes: tuple[int, int], direction: str, op: str, shift: int, limit: int
) -> None:
    """row + column and a number near the ends of 32 bits, against another one."""
    m = Maker(sizes, "wraps")
    both = m.node("add", position(m, 0), position(m, 1))
    moved = m.node(op, both, m.const(shift, I32))
    keep = m.node("compare", moved, m.const(limit, I32), dtype=PRED, direction=direction)
    m.store(m.node("select", keep, m.load((0, 1)), m.const(0.0), dtype=F32), (0, 1))
    check(m)


@pytest.mark.parametrize(("known", "expected"), [((0, 900), True), ((0, MOST), False), ((), False)])
def test_a_register_needs_a_range(known: tuple[int, int], expected: bool) -> None:
    """An offset that a loop counts moves a mask where the sum cannot wrap."""
    m = Maker((130, 40), "moved")
    told = dict(zip(("low", "high"), known, strict=False))
    offset = m.node("register", iter_dims=(), dtype=I32, value=Affine(0, ((0, 1),)), **told)
    row = m.node("add", position(m, 0), offset)
    keep = m.node("compare", row, position(m, 1), dtype=PRED, direction="GE")
    m.store(m.node("select", keep, m.load((0, 1)), m.const(0.0), dtype=F32), (0, 1))
    kernel = generate(m.program(), m.tensors, TARGET, 1).kernel
    assert ("affine_select" in {i.opcode for i in walk(kernel.body)}) is expected


def test_readers_share_a_mask_without_a_tile() -> None:
    """Forward and backward of a masked score read one comparison."""
    m = Maker((130, 40), "shared")
    mask = predicate(m)
    for fill in (-1e9, 0.0):
        picked = m.node("select", mask, m.load((0, 1)), m.const(fill), dtype=F32)
        m.store(m.node("exponential", picked), (0, 1))
    check(m)
    assert not {"iota", "select"} & opcodes(m)


@pytest.mark.parametrize("reader", ["two tensors", "two masks", "as a number"])
def test_other_readers_get_the_predicate_itself(reader: str) -> None:
    m = Maker((130, 40), "others")
    mask, x = predicate(m), m.load((0, 1))
    if reader == "two masks":
        mask = m.node("and", mask, predicate(m, "LE", 9), dtype=PRED)
    if reader == "as a number":
        made = m.node("multiply", x, m.node("convert", mask, dtype=F32))
    else:
        other = m.load((0, 1)) if reader == "two tensors" else m.const(0.0)
        made = m.node("select", mask, x, other, dtype=F32)
    m.store(made, (0, 1))
    check(m)
    assert "affine_select" not in opcodes(m)


def test_blocks_of_a_loop_keep_the_instruction() -> None:
    """The range of a loop's counter reaches the mask, whose sums then surely do not wrap."""

    def attend(q, k):
        def block(carry, t):
            scores = jax.lax.dynamic_slice(q, (t * 128, 0), (128, 32)) @ k.T
            row = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0) + t * 128
            column = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            return carry, jnp.where(row >= column, jnp.exp(scores), 0.0)

        return jax.lax.scan(block, 0, jnp.arange(4, dtype=jnp.int32))[1]

    program = link(graph_of(attend, *(np.zeros((512, 32), np.float32),) * 2))
    kernels = [k for f in program.functions for s in f.subgraphs for k in s]
    assert any(i.opcode == "affine_select" for k in kernels for i in walk(k.body))
