"""Two cores of a chip with one collective, from compiled code through the cluster loop, against
every instruction as an event of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import KernelProgram
from shardwright.compiler.isa.program import CollectiveCall, Function, Kernel
from shardwright.compiler.machine.target import Target, load_target
from shardwright.sim_cluster.timing.actors import ClassResult, CollectiveDuration
from shardwright.sim_cluster.timing.classes import refine
from shardwright.sim_cluster.timing.contention import Demand
from shardwright.sim_cluster.timing.faults import Health
from shardwright.sim_cluster.timing.macro import Start, Stretch, function_macros
from shardwright.sim_cluster.timing.run_timing import ClusterLoop
from tests.support.compiled import graph_of, link
from tests.support.instruction_cluster import Collective, Core, InstructionCluster, with_barriers

CALL = CollectiveCall("all_gather", ("dp",), DType.F32, (1, 8, 4))
MESH = {"dp": 2}


@cache
def compiled() -> Function:
    """A product, a softmax, and a product: code that waits for engines, and code that does not."""
    import jax
    import jax.numpy as jnp

    def step(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        y = jax.nn.softmax(jnp.tanh(x @ a), axis=-1) @ b
        z = (y - y.mean(0)) * jax.lax.rsqrt(1 + (y * y).sum(0))
        return z.T @ (z @ (z.T @ z))

    shapes = ((192, 256), (256, 384), (384, 128))
    program = link(graph_of(step, *(np.zeros(shape, np.float32) for shape in shapes)))
    (function,) = program.functions
    return with_barriers(function)


def event(kind: str) -> Kernel:
    return Kernel(KernelProgram(f"collective_{kind}", kind, attrs={"collective": 0}))


def with_collective(start: int, wait: int) -> Function:
    """The compiled code with a collective that starts before one kernel and is awaited before
    another; counted from the end where negative."""
    found = compiled()
    assert all(k.program.kind == "compute" for k in found.kernels)
    kernels = list(found.kernels)
    last = len(kernels)
    kernels.insert(wait if wait >= 0 else last + 1 + wait, event("wait"))
    kernels.insert(start, event("start"))
    return replace(found, kernels=kernels, collectives=[CALL])


def machine() -> Target:
    """A trn1 whose kernels are as long as their instructions say: nothing of a stall is filled by
    neighbours."""
    target = load_target("trn1.32xlarge")
    return replace(target, core=replace(target.core, stall_recovery=0.0))


def looped(
    function: Function, cost: CollectiveDuration, slow: Sequence[int]
) -> tuple[list[ClassResult], list[Stretch]]:
    """What the cluster loop says of every core, and the stretches of the function."""
    target = machine()
    classes = refine(MESH, [("dp",)], list(slow), [0, 0])
    macros = function_macros(function, target)
    health = Health(slow={c: float(slow[classes.representative(c)]) for c in range(classes.count)})
    loop = ClusterLoop(
        classes,
        [macros] * classes.count,
        lambda call, _: cost,
        health,
        bank_cores=target.cores_per_bank,
    )
    results = loop.run()
    assert any(isinstance(op, Start) for op in macros)
    stretches = [op for op in macros if isinstance(op, Stretch)]
    return [results[c] for c in classes.of_rank], stretches


def by_instruction(function: Function, cost: CollectiveDuration, slow: Sequence[int]) -> list[Core]:
    collective = Collective(Fraction(cost.demand.dma), cost.duration_ps)
    return InstructionCluster(function, machine(), [collective], list(slow)).run()


def cost_of(duration_ps: int, dma: float) -> CollectiveDuration:
    return CollectiveDuration(duration_ps, Demand(dma), "ring", "", 128, 2)


@pytest.mark.parametrize("slow", [(1, 1), (1, 2)])
@pytest.mark.parametrize("longer", [0.2, 3.0])
def test_a_collective_that_moves_nothing(slow: tuple[int, int], longer: float) -> None:
    """Exact: when each core starts, waits and ends, with collectives shorter and longer than the
    code beside them, and a core that is late."""
    function = with_collective(1, -1)
    assert [k.program.kind for k in function.kernels].index("collective_wait") >= 3
    alone, stretches = looped(function, cost_of(1, 0.0), (1, 1))
    # HBM is nowhere what code waits for here: shares of it cannot blur the comparison.
    assert all(s.bank_ps == s.full_ps for s in stretches)
    cost = cost_of(round(alone[0].end_ps * longer), 0.0)
    found, _ = looped(function, cost, slow)
    expected = by_instruction(function, cost, slow)
    assert [r.end_ps for r in found] == [core.end_ps for core in expected]


@pytest.mark.parametrize("slow", [(1, 1), (2, 2)])
def test_a_collective_that_takes_half_of_the_engines_from_all_of_the_code(
    slow: tuple[int, int],
) -> None:
    """Exact: the code of both cores beside a collective that outlasts it."""
    function = with_collective(0, 99)
    alone, _ = looped(function, cost_of(1, 0.0), slow)
    cost = cost_of(10 * alone[0].end_ps, 0.5)
    found, _ = looped(function, cost, slow)
    expected = by_instruction(function, cost, slow)
    assert [r.end_ps for r in found] == [core.end_ps for core in expected]
    code = [r.ran[-1].end_ps for r in found]
    assert code == [core.code_end_ps for core in expected]
    assert code[0] > 1.1 * alone[0].end_ps


@pytest.mark.parametrize("part", [0.25, 0.5, 0.75])
def test_a_collective_that_ends_beside_code(part: float) -> None:
    """The loop knows what a function loses on average, not which instructions meet a collective:
    what it charges is at most the engine time that was taken, and near what is really lost."""
    function = with_collective(0, 99)
    alone, _ = looped(function, cost_of(1, 0.0), (1, 1))
    cost = cost_of(round(part * alone[0].end_ps), 0.5)
    found, _ = looped(function, cost, (1, 1))
    expected = by_instruction(function, cost, (1, 1))
    lost, really = (r.end_ps - alone[0].end_ps for r in (found[0], expected[0]))
    taken = 0.5 * cost.duration_ps
    assert 0 < lost <= taken
    assert 0 < really <= taken
    assert abs(lost - really) <= 0.4 * taken
    assert found[0].end_ps == pytest.approx(float(expected[0].end_ps), rel=0.05)
