"""Contractions with products collected in SBUF, kept operands, and fused elementwise chains."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import BF16, F32, TARGET, Maker, arrays, check, distance

from shardwright.compiler.codegen import contraction
from shardwright.compiler.codegen.contract_plan import ContractPlan
from shardwright.compiler.codegen.contract_tiling import plan_contraction
from shardwright.compiler.codegen.normalise import normalise
from shardwright.compiler.codegen.planning import Rates, Room
from shardwright.compiler.diagnostics import CapacityError
from shardwright.compiler.isa.limits import limits_for, walk
from shardwright.compiler.isa.program import Engine, Space
from shardwright.compiler.machine.target import load_target
from tests.support import l0, l1

LIMITS = limits_for(TARGET)


def heads(
    natural: tuple[bool, bool], dtype=F32, sizes: tuple[int, ...] = (2, 3, 200, 260, 256)
) -> Maker:
    """out[b, g, m, n] = sum over k of a[b, g, m, k] * c[b, n, k]; a natural operand has k inner."""
    m = Maker(sizes, "heads")
    a = m.load((0, 1, 2, 4) if natural[0] else (0, 1, 4, 2), dtype)
    c = m.load((0, 3, 4) if natural[1] else (0, 4, 3), dtype)
    m.store(m.contract(a, c, over=(4,)), (0, 1, 2, 3))
    return m


@pytest.mark.parametrize("natural", [True, False])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_batch_points_that_continue_runs_move_together(natural: bool, dtype) -> None:
    """Heads lie side by side in a row: one transfer brings or takes all of them."""
    m = Maker((2, 4, 128, 96, 64), "heads")
    a = m.load((0, 2, 1, 4), dtype)
    c = m.load((0, 3, 1, 4) if natural else (0, 4, 1, 3), dtype)
    m.store(m.contract(a, c, over=(4,)), (0, 2, 1, 3), dtype)
    kernel = check(m, bound=1e-2 if dtype is BF16 else 1e-6)
    moved = {}
    for i in walk(kernel.body):
        if i.opcode == "dma":
            (hbm,) = (p for p in (i.dst, *i.srcs) if p.space is Space.HBM)
            moved[hbm.buffer] = hbm.dims[-1]
    assert moved == {0: (1, 4 * 64), 1: (1, 4 * (64 if natural else 96)), 2: (1, 4 * 96)}


SIZES = [(2, 5, 128, 96, 64), (1, 13, 67, 33, 48), (3, 7, 300, 600, 96)]
ORDERS = [(0, 2, 1, 3), (0, 1, 2, 3), (0, 2, 3, 1)]
LONG = [(SIZES[-1], order) for order in ORDERS[:-1]]


@pytest.mark.parametrize(
    ("size", "order"),
    [
        pytest.param(size, order, marks=[pytest.mark.matrix] * ((size, order) in LONG))
        for size in SIZES
        for order in ORDERS
    ],
)
def test_groups_of_any_size_keep_the_values(
    size: tuple[int, ...], order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of plan with a group: uneven last groups, several banks of a point and several
    points of a bank, results in any order, an epilogue that spans the group.
    """
    m = Maker(size, "groups")
    a, c = m.load((0, 2, 1, 4), BF16), m.load((0, 3, 1, 4), BF16)
    product = m.contract(a, c, over=(4,), dtype=F32)
    bias = m.load((1, 3), F32)
    m.store(m.node("add", product, bias), order, F32)
    want = arrays(m.tensors, 0)
    l1.run_kernel(m.program(), want, {})
    chosen = kinds([p for p in plans(m) if p.group])
    assert chosen
    for plan in chosen.values():
        monkeypatch.setattr(contraction, "plan_contraction", lambda *_, plan=plan: [plan])
        got = arrays(m.tensors, 0)
        l0.run_kernel(m.kernel(), got, {})
        assert distance(got[-1], want[-1]) <= 1e-6, plan


def plans(m: Maker) -> list[ContractPlan]:
    domain = normalise(m.program())
    (number,) = (n for n, v in enumerate(domain.values) if v.op == "contract")
    machine = load_target(TARGET)
    room = Room(LIMITS, Rates(machine.core), m.tensors, LIMITS.sbuf_bytes // 2)
    return plan_contraction(domain, number, tuple(domain.roots), room)


def kinds(found: list[ContractPlan]) -> dict[tuple[object, ...], ContractPlan]:
    """One plan of every combination of form and kept operands, the cheapest."""
    chosen: dict[tuple[object, ...], ContractPlan] = {}
    for plan in sorted(found, key=lambda p: -p.cost):
        multi = plan.sums > 1
        chosen[(plan.stationary.number, plan.staged, plan.held, plan.resident, multi)] = plan
    return chosen


@pytest.mark.parametrize("natural", [(a, b) for a in (True, False) for b in (True, False)])
def test_every_kind_of_plan_computes_the_product(
    natural: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    m = heads(natural)
    chosen = kinds(plans(m))
    assert {key[1:4] for key in chosen} >= {(True, True, True), (True, False, False)}
    want = arrays(m.tensors, 0)
    l1.run_kernel(m.program(), want, {})
    ran = 0
    for plan in chosen.values():
        monkeypatch.setattr(contraction, "plan_contraction", lambda *_, plan=plan: [plan])
        try:
            kernel = m.kernel()
        except CapacityError:  # PSUM of this plan does not fit: the planner's estimate was low
            continue
        got = arrays(m.tensors, 0)
        l0.run_kernel(kernel, got, {})
        assert distance(got[-1], want[-1]) <= 1e-6, plan
        ran += 1
    assert ran >= len(chosen) * 3 // 4


def test_an_operand_the_row_loops_do_not_move_is_loaded_once_per_batch() -> None:
    """Scores of grouped heads: 2 bytes x 2 x 4096 x 128 of keys, whatever the number of heads."""
    m = heads((True, True), BF16, (2, 8, 4096, 4096, 128))
    kernel = m.kernel()
    trips = {}

    def visit(body, times):
        for item in body:
            if hasattr(item, "trip"):
                visit(item.body, times * item.trip)
            elif item.opcode == "dma" and item.srcs[0].buffer == 1:
                moved = int(np.prod([n for _, n in item.srcs[0].dims])) * times
                trips[item.engine] = trips.get(item.engine, 0) + moved

    visit(kernel.body, 1)
    assert trips == {Engine.DMA_IN: 2 * 4096 * 128}


def softmax(rows: int, width: int) -> Maker:
    m = Maker((rows, width), "softmax")
    x = m.node("convert", m.load((0, 1), BF16), dtype=F32)
    x = m.node("multiply", x, m.const(0.125))
    top = m.reduce(x, (1,), "max")
    e = m.node("exponential", m.node("subtract", x, top))
    y = m.node("divide", e, m.reduce(e, (1,)))
    m.store(m.node("convert", y, dtype=BF16), (0, 1))
    return m


def test_softmax_passes_are_folded_into_activations() -> None:
    """A scaled load, maximum, exp(x - max) and its sum, normalised store: four instructions."""
    kernel = check(softmax(300, 1024), bound=1e-5)
    wide = [
        i
        for i in walk(kernel.body)
        if i.opcode != "dma" and i.dst and max(p.shape[-1] for p in (i.dst, *i.srcs)) == 1024
    ]
    full = [i for i in wide if i.srcs[0].shape[0] == 128]
    assert len(full) == 4, [i.opcode for i in full]
    exps = [i for i in full if i.attrs.get("func") == "exponential"]
    assert len(exps) == 1 and exps[0].attrs["bias"] is None


def test_narrow_loads_stay_narrow() -> None:
    """A DMA that converts moves the longer type: engines read bf16 as it is."""
    kernel = softmax(256, 1024).kernel()
    loads = [i for i in walk(kernel.body) if i.engine is Engine.DMA_IN]
    assert {kernel.tiles[i.dst.buffer].dtype for i in loads} == {BF16}


@pytest.mark.parametrize("op", ["multiply", "add", "subtract", "divide"])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("after", ["exponential", "convert", "add"])
def test_affine_chains_keep_their_values(op: str, swapped: bool, after: str) -> None:
    m = Maker((130, 512), f"{op}-{after}")
    x, row = m.load((0, 1)), m.node("exponential", m.load((0,)))
    y = m.node(op, row, x) if swapped else m.node(op, x, row)
    if after == "convert":
        z = m.node("convert", y, dtype=BF16)
    elif after == "add":
        z = m.node("add", y, m.const(1.5))
    else:
        z = m.node(after, m.node("minimum", y, m.const(3.0)))
    m.store(z, (0, 1))
    m.store(y, (0, 1))
    check(m, bound=1e-2 if after == "convert" else 1e-6)


def divides(kernel) -> list[int]:
    """Elements per partition of every division and inverse."""
    slow = ("divide", "reciprocal")
    ops = [(i, i.attrs.get("op", i.attrs.get("op0"))) for i in walk(kernel.body)]
    return [int(np.prod(i.dst.shape[1:])) for i, op in ops if op in slow and i.dst]


def test_a_quotient_by_sums_of_rows_takes_one_inverse_per_row() -> None:
    """Several short rows to a partition: an inverse per row, a product per element."""
    m = Maker((64, 128, 128), "quotients")
    x = m.load((0, 1, 2))
    m.store(m.node("divide", x, m.reduce(m.node("exponential", x), (2,))), (0, 1, 2))
    found = divides(check(m, bound=1e-6))
    assert found and max(found) <= 4096 * 4 // 128


@pytest.mark.parametrize("op", ["multiply", "add", "subtract"])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_arithmetic_with_a_number_goes_where_less_work_waits(op: str, swapped: bool, dtype) -> None:
    """Beside three products of tensors, which Vector alone has, Scalar takes `x op number`."""
    m = Maker((256, 1024), f"{op}-number")
    x, y = m.load((0, 1), dtype), m.load((0, 1), dtype)
    for other in (x, y, m.load((0, 1), dtype)):
        m.store(m.node("maximum", x, m.node("minimum", y, other)), (0, 1))
    number = m.const(0.75, dtype)
    z = m.node(op, number, x) if swapped else m.node(op, x, number)
    m.store(z, (0, 1))
    kernel = check(m, bound=1e-6)
    scalar = [
        i for i in walk(kernel.body) if i.engine is Engine.SCALAR and i.opcode == "activation"
    ]
    assert scalar
