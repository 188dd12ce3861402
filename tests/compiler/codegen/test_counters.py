"""Random bits by position: one count over all dims, whatever they are sums of."""

from __future__ import annotations

from math import prod

import pytest

from shardwright.compiler.codegen.normalise import normalise
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.isa.limits import walk
from tests.compiler.codegen.kernel_harness import Maker, check

U32 = DType.U32
SIZES = (3, 5, 70)


def position(m: Maker, sizes: tuple[int, ...], start: int | None) -> int:
    """Row-major positions, of which the rows begin behind a loaded number of them."""
    parts = []
    for iter_dim, _ in enumerate(sizes):
        count = m.node(
            "iota", iter_dims=(iter_dim,), dtype=U32, atom=iter_dim, start=Affine(), step=1
        )
        if iter_dim == 0 and start is not None:
            count = m.node("add", count, start, dtype=U32)
        inner = prod(sizes[iter_dim + 1 :])
        parts.append(m.node("multiply", count, m.const(inner, U32), dtype=U32))
    total = parts[0]
    for part in parts[1:]:
        total = m.node("add", total, part, dtype=U32)
    return total


@pytest.mark.parametrize("loaded", [False, True])
def test_a_sum_of_counts_is_one_count(loaded: bool) -> None:
    m = Maker(SIZES, "bits")
    start = m.load((), dtype=U32) if loaded else None
    bits = m.node("random_bits", position(m, SIZES, start), m.const(7, U32), dtype=U32)
    m.store(bits, (0, 1, 2))
    domain = normalise(m.kernel().program)
    (iter_dim,) = domain.sizes
    assert domain.sizes[iter_dim] == prod(SIZES), "every value walks the dims as one index"
    assert sum(i.opcode == "iota" for i in walk(m.kernel().body)) == 1
    check(m)


def test_a_counter_of_data_stays() -> None:
    m = Maker(SIZES, "bits")
    start = m.load((0, 1, 2), dtype=U32)
    bits = m.node("random_bits", position(m, SIZES, start), m.const(7, U32), dtype=U32)
    m.store(bits, (0, 1, 2))
    check(m)
