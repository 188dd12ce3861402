"""Results with several neighbouring rows on a partition: runs and values."""

from __future__ import annotations

import pytest
from kernel_harness import BF16, F32, TARGET, Maker, arrays, check, distance
from test_row_blocks import RATES, cost, projection, runs_of, scores

from shardwright.compiler.codegen import contraction
from shardwright.compiler.codegen.contract_plan import ContractPlan
from shardwright.compiler.codegen.contract_tiling import plan_contraction
from shardwright.compiler.codegen.normalise import normalise
from shardwright.compiler.codegen.planning import Room
from shardwright.compiler.diagnostics import CapacityError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.limits import limits_for
from tests.support import l0, l1


def by_head(heads: int, rows: int, keys: int, width: int, dtype: DType = BF16) -> Maker:
    """out[b, h, t, s] = sum over e of q[b, h, t, e] * k[b, h, s, e]."""
    m = Maker((2, heads, rows, keys, width), "scores")
    q, k = m.load((0, 1, 2, 4), dtype), m.load((0, 1, 3, 4), dtype)
    m.store(m.contract(q, k, (4,)), (0, 1, 2, 3))
    return m


def plans(m: Maker) -> list[ContractPlan]:
    """Those with several rows on a partition, the cheapest first."""
    domain = normalise(m.program())
    (number,) = (n for n, v in enumerate(domain.values) if v.op == "contract")
    room = Room(limits_for(TARGET), RATES, m.tensors, limits_for(TARGET).sbuf_bytes // 2)
    found = plan_contraction(domain, number, tuple(domain.roots), room)
    return sorted((plan for plan in found if plan.beside), key=cost)


def test_rows_of_512_scores_are_stored_four_to_a_partition() -> None:
    kernel = check(by_head(4, 512, 512, 64), bound=1e-2)
    assert runs_of(kernel, 2) == {4 * 512}


def test_rows_of_197_scores_are_too_and_what_is_left_over_lies_alone() -> None:
    m, _ = scores(12, 197, 197, 64)
    kernel = check(m, bound=1e-2)
    assert runs_of(kernel, 2) == {4 * 197, 197}
    # Heads lie side by side in memory, and are fetched together.
    assert runs_of(kernel, 0) == {12 * 64}


def test_long_rows_stay_one_to_a_partition() -> None:
    assert not plans(by_head(2, 128, 1024, 64))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("size", [(3, 197, 197, 64), (2, 130, 61, 16), (2, 512, 128, 64)])
def test_every_plan_keeps_the_values(
    size: tuple[int, ...], dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is resident, held or grouped; with rows left over only where all are fetched."""
    m, product = scores(*size, dtype)
    m.store(m.node("multiply", product, product), (0, 2, 1, 3))
    want = arrays(m.tensors, 0)
    l1.run_kernel(m.program(), want, {})
    chosen = {}
    for plan in plans(m):
        each = plan.extents[plan.beside[0]]
        assert plan.whole or size[1] % each == 0
        chosen.setdefault((each, bool(plan.group), plan.resident, plan.held), plan)
    ran = 0
    for plan in chosen.values():
        monkeypatch.setattr(contraction, "plan_contraction", lambda *_, plan=plan: [plan])
        try:
            kernel = m.kernel()
        except CapacityError:
            continue
        got = arrays(m.tensors, 0)
        l0.run_kernel(kernel, got, {})
        assert distance(got[-1], want[-1]) <= (1e-2 if dtype is BF16 else 1e-6), plan
        assert distance(got[-2], want[-2]) <= (1e-2 if dtype is BF16 else 1e-6), plan
        ran += 1
    assert ran >= 4


def test_rows_left_over_with_k_counted_by_another_index() -> None:
    """Heads count tiles of k: such an operand is not fetched whole, so no row is left over."""
    m = projection(3, 67, 48, 131)
    assert all(67 % plan.extents[plan.beside[0]] == 0 for plan in plans(m))
    check(m, bound=1e-2)
