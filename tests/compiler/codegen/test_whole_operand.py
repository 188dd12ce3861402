"""Stationary operands of odd lengths, fetched without the cuts at their tails: runs and values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kernel_harness import BF16, F32, Maker, check
from test_row_blocks import gradient, runs_of, weighted_values

from shardwright.compiler.codegen.whole_operand import Lines

MAKERS = {"natural": weighted_values, "direct": gradient}


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("form", MAKERS)
def test_scores_of_197_positions_are_fetched_whole(form: str, dtype) -> None:
    """Several rows to a partition; a direct operand in fp32 is not worth being transposed twice."""
    m = MAKERS[form](4, 197, 197, 64, dtype)
    kernel = check(m, bound=1e-2 if dtype is BF16 else 1e-6)
    plain = form == "direct" and dtype is F32
    assert max(runs_of(kernel, 0)) == (197 if plain else 4 * 197)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(("rows", "keys"), [(130, 129), (257, 40), (5, 300), (131, 128)])
def test_any_lengths(make: Callable[..., Maker], heads: int, rows: int, keys: int) -> None:
    check(make(heads, rows, keys, 16, F32), bound=1e-6)


@pytest.mark.parametrize("count", [1, 3, 128, 197, 512, 2364])
def test_blocks_take_every_row_once(count: int) -> None:
    lines = Lines(memory=0, packed=0, count=count, pitch=7, each=4)
    taken = [first + i for first, parts, each in lines.blocks() for i in range(parts * each)]
    assert taken == list(range(count))
    assert all(parts <= 128 and each in (1, 4) for _, parts, each in lines.blocks())
