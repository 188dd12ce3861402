"""Tensor, sequence, context and expert parallelism against XLA's own partitioner on eight devices.

XLA gets the recipe's annotated module. Values are always equal. Where XLA runs the same algorithm
the difference of every collective is known, size by size, with its reason; elsewhere what the
algorithms share is exact and the rest is bounded: never more than XLA moves.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

import tests.support.xla_spmd as xla_spmd
from shardwright.compiler.ir.traits import TRAFFIC
from shardwright.compiler.ir.types import Graph, Op
from shardwright.sharding.localize import localize
from shardwright.sharding.strategies import OUTPUT, Recipe
from shardwright.sharding.strategies.registry import recipe_of
from tests.sharding.test_strategy_matrix import captured, partitioned, unsharded
from tests.support.road import leaf_error
from tests.support.strategy_cells import Distribution, distribution, random_inputs

LAYERS = 2
TOKENS = 8 * 16  # samples and positions of a step
SUM, GATHER, EXCHANGE = "sum", "gather", "exchange"
KINDS = {
    "all-reduce": SUM,
    "all_reduce": SUM,
    "reduce_scatter": SUM,  # XLA:CPU reduces and slices
    "all-gather": GATHER,
    "all_gather": GATHER,
    "all-to-all": EXCHANGE,
    "all_to_all": EXCHANGE,
}
Sizes = Counter[tuple[str, int]]
"""Collectives of a step by kind and elements per core (of a reduced tensor before the slice)."""


@dataclass(frozen=True)
class Case:
    """A model and a distribution; `more` is what XLA has beyond ours, by kind and elements, or
    `most` how many times our elements it moves in sums and gathers.
    """

    model: str
    how: Distribution
    more: Mapping[tuple[str, int], int] = field(default_factory=dict)
    most: float = 1.0


def residual(model: str, samples: int, share: int = 1) -> int:
    """Elements of the values between layers on one core."""
    return TOKENS * {"gqa": 64, "tied gpt": 32}[model] // samples // share


EXACT = {
    # The gradients of what queries, keys and values read are three sums of parts; we add them
    # before one all_reduce (gate and up projection: one of two). A tied table's two likewise.
    "tp, tied": Case(
        "tied gpt",
        distribution("llm-training", sp=False, zero=0, dp_shard=2, tp=4),
        {(SUM, residual("tied gpt", 2)): 2 * LAYERS, (SUM, 64 * 32 // 4): 1},
    ),
    "tp": Case(
        "gqa",
        distribution("llm-training", sp=False, zero=0, dp_shard=4, tp=2),
        {(SUM, residual("gqa", 4)): (2 + 1) * LAYERS},
    ),
    "cp": Case("gqa", distribution("generic", context="gather", cp=8)),
}
BOUNDED = {
    # Sequence parallel: XLA sums the gradients of norms over data and tensor axes one after the
    # other, and brings the table of tokens whole where the lookup is split.
    "tp sp": Case("gqa", distribution("llm-training", zero=0, dp_shard=4, tp=2), most=1.25),
    # Routing: XLA gathers one-hot rows to count places of tokens; we sum over the cores.
    "ep": Case("moe", distribution("generic", ep=8), most=3.2),
    # As without fsdp; and XLA exchanges the table of tokens between data and tensor axes.
    "fsdp tp": Case("gqa", distribution("fsdp", sp=False, dp_shard=4, tp=2), most=1.15),
    "fsdp tp sp": Case("gqa", distribution("fsdp", dp_shard=4, tp=2), most=1.15),
}
CASES = EXACT | BOUNDED
SLOW = ("tp", "tp, tied", "cp", "tp sp", "fsdp tp")
NAMES = [pytest.param(n, marks=[pytest.mark.matrix] if n in SLOW else []) for n in CASES]


def recipe(case: Case) -> Recipe:
    graph, inputs, outputs = captured(case.model)
    return recipe_of(graph, inputs, outputs, case.how.mesh, case.how.settings)


@functools.cache
def theirs(name: str) -> xla_spmd.XlaStep:
    made = recipe(CASES[name])
    return xla_spmd.XlaStep(made, made.mesh)


def their_sizes(name: str) -> Sizes:
    found: Sizes = Counter()
    for (kind, elements, in_loop), count in theirs(name).collectives().items():
        if elements > 1:
            found[KINDS[kind], elements] += count * (LAYERS if in_loop else 1)
    return found


def our_sizes(name: str) -> Sizes:
    case = CASES[name]
    found: Sizes = Counter()
    _add(localize(partitioned(case.model, case.how)).graph, 1, found)
    return found


def _add(graph: Graph, times: int, found: Sizes) -> None:
    for op in graph.ops:
        for region in op.regions:
            _add(region, times * op.attrs.trip, found)
        if op.name in TRAFFIC and _moved(op) > 1:
            found[KINDS[op.name], _moved(op)] += times


def _moved(op: Op) -> int:
    """Elements of the larger side."""
    return max(v.type.num_elements for v in (*op.operands, *op.results))


def elements(sizes: Sizes, kind: str) -> int:
    return sum(count * n for (k, n), count in sizes.items() if k == kind)


@pytest.mark.parametrize("name", NAMES)
def test_values_are_xlas(name: str) -> None:
    """The shards XLA computes, put together, are the unsharded step; so are ours (matrix)."""
    case, step = CASES[name], theirs(name)
    graph, inputs, outputs = captured(case.model)
    shards = step.run(random_inputs(graph, inputs))
    for i, (slot, parts) in enumerate(zip(outputs, shards, strict=True)):
        spec, shape = step.recipe.specs[OUTPUT, i], graph.outputs[i].type.shape
        whole = xla_spmd.join(parts, spec, shape, step.recipe.mesh)
        assert leaf_error(whole, unsharded(case.model)[i]) <= 1e-5, slot.name


@pytest.mark.parametrize("name", [p for p in NAMES if p.values[0] in EXACT])
def test_the_same_algorithm_moves_the_same(name: str) -> None:
    ours, more = our_sizes(name), Counter(CASES[name].more)
    assert ours + more == their_sizes(name)


@pytest.mark.parametrize("name", [p for p in NAMES if p.values[0] in BOUNDED])
def test_nothing_moves_more_than_under_xla(name: str) -> None:
    ours, xla = our_sizes(name), their_sizes(name)
    for kind in (SUM, GATHER):
        assert elements(ours, kind) <= elements(xla, kind)
    mine, other = (sum(elements(sizes, k) for k in (SUM, GATHER)) for sizes in (ours, xla))
    assert other <= CASES[name].most * mine


def test_rows_sent_to_experts_are_xlas() -> None:
    """XLA sends each row in pieces; all of them together are ours."""
    ours, xla = our_sizes("ep"), their_sizes("ep")
    assert elements(ours, EXCHANGE) == elements(xla, EXCHANGE) > 0
    assert elements(ours, GATHER) == 0


def test_weights_gathered_by_fsdp_under_tensor_parallelism_are_xlas() -> None:
    """Only a rank's part of a weight is gathered; XLA gathers one more norm weight."""
    ours, xla = our_sizes("fsdp tp sp"), their_sizes("fsdp tp sp")
    layer = {key: n for key, n in ours.items() if key[0] == GATHER and key[1] != 64}
    assert all(xla[key] - n in (0, 1) for key, n in layer.items())
