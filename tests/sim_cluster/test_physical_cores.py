"""Two physical cores in one address space: equal values, ordered accesses, and what a damaged order
does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.diagnostics import LoadError, SimulationError
from shardwright.compiler.isa.kernel import KernelProgram
from shardwright.compiler.isa.program import Function, Kernel
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.outline.unit import pack_function, unpack_function
from shardwright.sim_cluster.instructions.physical_cores import CoreWatch, interleaved
from shardwright.sim_cluster.values.result import distance
from tests.support.model_run import CompiledFunction, compile_function, worst_distance

TRN2 = "trn2.48xlarge"


def array(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def block(x: Any, w: Any, u: Any) -> Any:
    """A normalised product and a residual, then products that need all rows."""
    h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
    y = jax.nn.gelu(h @ w) @ u + x
    return y.T @ x, jax.nn.softmax(y, -1)


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("hqd,hkd->hqk", q, k) / 8
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(jnp.where(mask, scores, -1e9), -1), v)


def step(w: Any, x: Any) -> Any:
    """A scanned layer with its gradient and an update: stacks, slices, in-place sums."""

    def loss(w: Any) -> Any:
        def body(h: Any, wi: Any) -> Any:
            return jax.nn.relu(h @ wi), None

        return jnp.mean(jax.lax.scan(body, x, w)[0] ** 2)

    value, gradient = jax.value_and_grad(loss)(w)
    return value, w - 0.1 * gradient


def lookup(table: Any, rows: Any, update: Any) -> Any:
    return table[rows] + update, table.at[rows].add(update)


def filtered(x: Any, k: Any) -> Any:
    return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME")


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "block": (block, (array(600, 256), array(256, 320), array(320, 256))),
    "attention": (attention, (array(2, 256, 32), array(2, 256, 32), array(2, 256, 32))),
    "step": (step, (array(3, 64, 64), array(200, 64))),
    "lookup": (
        lookup,
        (array(60, 512), jnp.asarray(np.arange(40) * 7 % 23, jnp.int32), array(40, 512)),
    ),
    "filtered": (filtered, (array(1, 8, 24, 24), array(16, 8, 3, 3))),
}


@pytest.fixture(scope="module")
def compiled() -> dict[str, CompiledFunction]:
    options = CompileOptions(lnc=2)
    return {name: compile_function(f, args, options, TRN2) for name, (f, args) in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_both_levels_give_the_values_of_jax(
    name: str, compiled: dict[str, CompiledFunction]
) -> None:
    made = compiled[name]
    assert made.program.lnc == 2
    assert any(f.num_kernels("compute") for f in made.program.functions)
    want = made.expected()
    assert worst_distance(made.run("L1"), want) <= 1e-5
    assert worst_distance(made.run("L0"), want) <= 1e-5


def test_packed_functions_keep_their_subgraphs(compiled: dict[str, CompiledFunction]) -> None:
    for function in compiled["step"].program.functions:
        back = unpack_function(pack_function(function))
        assert back.subgraphs == function.subgraphs


def waiting(made: CompiledFunction) -> list[tuple[int, int, int]]:
    """(function, core, kernel) of every wait for the other core."""
    return [
        (f, core, n)
        for f, function in enumerate(made.program.functions)
        for core, kernels in enumerate(function.subgraphs)
        for n, kernel in enumerate(kernels)
        if kernel.after
    ]


# Rows picked by index count as all rows, so `lookup` waits more than it must.
@pytest.mark.parametrize("name", ["step", "filtered"])
def test_every_wait_that_is_left_out_is_found(
    name: str, compiled: dict[str, CompiledFunction]
) -> None:
    made = compiled[name]
    places = waiting(made)
    assert places
    for f, core, n in places:
        damaged = copy.deepcopy(made.program)
        damaged.functions[f].subgraphs[core][n].after = 0
        broken = CompiledFunction(made.fn, made.args, made.graph, damaged)
        with pytest.raises(SimulationError, match=r"SW_L0_RACE.*other|SW_L0_UNINITIALISED"):
            broken.run("L0")


def test_halves_that_overlap_are_a_race(compiled: dict[str, CompiledFunction]) -> None:
    damaged = copy.deepcopy(compiled["attention"].program)
    function: Function = damaged.functions[0]
    assert function.partner is not None
    at = next(n for n, k in enumerate(function.partner) if k.program.kind == "compute")
    function.partner[at] = copy.deepcopy(function.kernels[at])
    made = compiled["attention"]
    with pytest.raises(SimulationError, match=r"SW_L0_RACE.*written"):
        CompiledFunction(made.fn, made.args, made.graph, damaged).run("L0")


def kernel(after: int) -> Kernel:
    return Kernel(KernelProgram("idle", f"after {after}"), after=after)


def test_one_core_runs_ahead_as_far_as_it_may() -> None:
    first, second = [kernel(0), kernel(0), kernel(2)], [kernel(0), kernel(1), kernel(0)]
    assert interleaved((first, second)) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (0, 2)]


def test_cores_that_wait_for_each_other_are_a_deadlock() -> None:
    first, second = [kernel(0), kernel(2)], [kernel(0), kernel(2)]
    with pytest.raises(SimulationError, match=r"SW_L0_DEADLOCK.*core 0 waits for 2.*core 1 waits"):
        interleaved((first, second))
    with pytest.raises(SimulationError, match=r"core 0 waits for 9 .*, which has finished 3$"):
        interleaved(([kernel(0), kernel(9)], [kernel(0), kernel(0), kernel(0)]))


def test_the_watch_knows_what_is_ordered() -> None:
    watch = CoreWatch()
    watch.enter(0, 0)
    watch.touch(0, (100, 1, 10), writes=True)
    watch.enter(1, 0)
    watch.touch(0, (110, 1, 10), writes=True)  # beside it
    watch.enter(1, 1)
    watch.touch(0, (105, 1, 1), writes=False)  # after the first kernel of core 0
    watch.enter(0, 0)
    with pytest.raises(SimulationError, match="SW_L0_RACE"):
        watch.touch(0, (105, 1, 1), writes=True)


def test_a_partner_that_waits_for_what_comes_later_is_refused_by_the_reader(
    compiled: dict[str, CompiledFunction],
) -> None:
    function = copy.deepcopy(compiled["step"].program.functions[0])
    function.kernels[0].after = 1
    with pytest.raises(LoadError, match="kernel 0 waits for 1"):
        unpack_function(pack_function(function))


def test_one_core_and_two_agree(compiled: dict[str, CompiledFunction]) -> None:
    f, args = CASES["block"]
    one = compile_function(f, args, target=TRN2).run("L0")
    two = compiled["block"].run("L0")
    assert all(distance(a, b) <= 1e-6 for a, b in zip(one, two, strict=True))
