"""What leaves PSUM: the sum, scale or activation behind a product rather than the product."""

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
from shardwright.compiler.driver import compile_unit
from shardwright.compiler.isa.limits import limits_for, walk
from shardwright.compiler.isa.program import Engine, Instr, Kernel, Space
from shardwright.compiler.lower.function import Signature
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.outline.unit import Unit
from shardwright.orchestrator.models.kernels import product_graph
from tests.support import l0, l1

LIMITS = limits_for(TARGET)


def product(sizes: tuple[int, int, int], dtype=F32, rounded: bool = False) -> tuple[Maker, int]:
    """x @ w with the iter dims (m, n, k); `rounded` to bf16, as bf16 products of JAX are."""
    m = Maker(sizes, "product")
    x, w = m.load((2, 0), dtype), m.load((2, 1), dtype)
    return m, m.contract(x, w, (2,), BF16 if rounded else F32)


def from_psum(kernel: Kernel) -> list[Instr]:
    """Vector's and Scalar's instructions that read PSUM."""
    engines = (Engine.VECTOR, Engine.SCALAR)
    return [
        i
        for i in walk(kernel.body)
        if i.engine in engines and any(p.space is Space.PSUM for p in i.srcs)
    ]


def plans(m: Maker) -> list[ContractPlan]:
    """The cheapest plan of every orientation and form."""
    domain = normalise(m.program())
    (number,) = (n for n, v in enumerate(domain.values) if v.op == "contract")
    room = Room(LIMITS, Rates(load_target(TARGET).core), m.tensors, LIMITS.sbuf_bytes // 2)
    found = plan_contraction(domain, number, tuple(domain.roots), room)
    ranked = sorted(found, key=lambda p: -p.cost)
    return list({(p.stationary.number, p.staged, p.held, p.sums > 1): p for p in ranked}.values())


@pytest.mark.parametrize("iter_dim", [0, 1])
@pytest.mark.parametrize("rounded", [False, True])
def test_chains_behind_a_product_keep_their_values_in_every_plan(
    iter_dim: int, rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias along either dim of the result, a residual of its own, an activation; and the sum
    itself is stored.
    """
    m, y = product((300, 1100, 260), BF16, rounded)
    kind = BF16 if rounded else F32
    y = m.node("add", y, m.load((iter_dim,), kind))
    z = m.node("gelu_apprx_tanh", m.node("multiply", y, m.const(1.5, kind)))
    z = m.node("add", z, m.load((0, 1), kind))
    m.store(z, (0, 1))
    m.store(m.node("convert", y, dtype=BF16), (0, 1))
    want = arrays(m.tensors, 0)
    l1.run_kernel(m.program(), want, {})
    chosen, ran = plans(m), 0
    for plan in chosen:
        monkeypatch.setattr(contraction, "plan_contraction", lambda *_, plan=plan: [plan])
        try:
            kernel = m.kernel()
        except CapacityError:  # of PSUM: the planner's estimate was low
            continue
        got = arrays(m.tensors, 0)
        l0.run_kernel(kernel, got, {})
        for made, wanted in zip(got[-2:], want[-2:], strict=True):
            # Sums in another order round differently to bf16 here and there; products that are not
            # rounded at all would be 1e-3 away.
            bound = 1e-6 if made.dtype == np.float32 else 3e-4
            assert distance(made, wanted) <= bound, plan
        ran += 1
    assert ran >= len(chosen) * 3 // 4


@pytest.mark.parametrize("op", ["add", "subtract", "multiply", "maximum"])
def test_a_row_of_columns_meets_the_product_in_psum(op: str) -> None:
    m, y = product((1024, 2048, 512), BF16)
    y = m.node(op, y, m.load((1,), BF16))
    m.store(m.node("gelu_apprx_tanh", y, dtype=BF16), (0, 1))
    kernel = check(m, bound=3e-4)
    assert {(i.opcode, i.attrs.get("op")) for i in from_psum(kernel)} == {("tensor_tensor", op)}


def test_a_bias_of_rows_rides_on_the_activation() -> None:
    """One instruction of Scalar takes the product, adds one number per partition and applies the
    function.
    """
    m, y = product((1024, 2048, 512), BF16)
    y = m.node("add", y, m.load((0,), F32))
    m.store(m.node("gelu_apprx_tanh", y, dtype=BF16), (0, 1))
    kernel = check(m, bound=3e-4)
    found = from_psum(kernel)
    assert {(i.engine, i.opcode) for i in found} == {(Engine.SCALAR, "activation")}
    assert all(i.attrs["bias"] is None and len(i.srcs) == 2 for i in found)
    assert not [i for i in walk(kernel.body) if i.engine is Engine.VECTOR]


def test_a_product_that_is_read_twice_is_copied_once() -> None:
    """Vector reads one of two tensors from PSUM, not both."""
    m, y = product((256, 1024, 256), BF16)
    m.store(m.node("multiply", y, y), (0, 1))
    kernel = check(m, bound=1e-5)
    for instr in walk(kernel.body):
        assert sum(p.space is Space.PSUM for p in instr.srcs) < 2


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_with_bias_and_gelu_is_one_kernel(dtype: str, transposed: bool) -> None:
    graph = product_graph(
        1024, 512, 2048, dtype, gelu="function", bias="added", transposed=transposed
    )
    function = compile_unit(Unit("kernel", graph, Signature()), TARGET, CompileOptions())
    assert [k.program.kind for k in function.kernels] == ["compute"]
