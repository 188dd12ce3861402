"""Buckets: several collectives become one; bits and bytes stay, launches and programs change.

The step without buckets is the oracle on reference ranks, bit by bit, since every part of a bucket
moves as it would alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from shardwright.collectives.ops import CollectiveError, CollectiveKind
from shardwright.collectives.values.buckets import execute_parts
from shardwright.collectives.values.execute import execute
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops import AllReduceAttrs
from shardwright.compiler.ir.types import Graph, Op
from shardwright.compiler.program import StepPlan
from shardwright.sharding.cut.overlap.assign import Shifts
from shardwright.sharding.cut.overlap.buckets import bucketed
from shardwright.sharding.cut.overlap.layers import overlap
from shardwright.sharding.partition.shardy import answer_request
from shardwright.sharding.plan import traffic
from tests.support.building import Builder
from tests.support.cells import long_in_matrix
from tests.support.collective_schedules import flat
from tests.support.staged_runs import state_after
from tests.support.step_plans import build_plan
from tests.support.strategy_cells import DISTRIBUTIONS, EXPERT_DISTRIBUTIONS, model_graph

DP = ("dp_shard",)
LARGE = 1 << 20
CELLS = [
    ("gqa", "fsdp 4"),
    ("gqa", "fsdp tp 8"),
    ("gqa", "hsdp 8"),
    ("gqa", "zero-1 8"),
    ("gqa", "data parallel 4"),
    ("moe", "fsdp ep 8"),
]
IN_OTHERS = tuple(cell for cell in CELLS if cell[1] not in ("hsdp 8", "zero-1 8"))
"""Their collectives are among those of the others."""


@cache
def _step(model: str, name: str) -> StepPlan:
    found = (DISTRIBUTIONS | EXPERT_DISTRIBUTIONS)[name]
    captured = model_graph(model)
    plan = build_plan(
        *captured, found.mesh, settings=found.settings, num_microbatches=2, unit=answer_request
    )
    return plan.step


def _moved(step: StepPlan) -> tuple[Counter[str], Counter[str]]:
    """Collectives over data axes per step, by kind, and the bytes of all by kind."""
    counts, sizes = Counter[str](), Counter[str]()
    for row in traffic(step):
        counts[row.kind] += row.count * ("dp_shard" in row.axes)
        sizes[row.kind] += row.total_bytes
    return counts, sizes


def _buckets(graph: Graph) -> Iterator[Op]:
    return (op for op in graph.walk() if getattr(op.attrs, "parts", ()))


@pytest.mark.parametrize(("model", "name"), long_in_matrix(CELLS, IN_OTHERS))
def test_buckets_change_no_bit_and_no_byte(model: str, name: str) -> None:
    plain = _step(model, name)
    packed = overlap(plain, Shifts(), 1, LARGE)
    captured = model_graph(model)
    assert state_after(packed, captured) == state_after(plain, captured)
    (before, bytes_before), (after, bytes_after) = _moved(plain), _moved(packed)
    assert bytes_after == bytes_before
    assert after.total() < before.total() / 3
    assert any(True for p in packed.programs for _ in _buckets(p.graph))


def test_smaller_buckets_are_more() -> None:
    plain = _step("gqa", "fsdp 4")
    packed = [overlap(plain, Shifts(), 1, size) for size in (1, 4096, 1 << 14, LARGE)]
    counts = [_moved(step)[0].total() for step in packed]
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == len(counts)
    for step, most in zip(packed[1:], (4096, 1 << 14, LARGE), strict=True):
        for op in (op for p in step.programs for op in _buckets(p.graph)):
            assert max(op.operands[0].type.num_bytes, op.result.type.num_bytes) <= most


def test_shifted_buckets() -> None:
    """A loop carries one bucket where it carried every weight."""
    plain, captured = _step("gqa", "hsdp 8"), model_graph("gqa")
    shifted = overlap(plain, Shifts(1, 1), 1, LARGE)
    assert state_after(shifted, captured) == state_after(plain, captured)
    (forward,) = (p.graph for p in shifted.programs if p.name == "forward")
    bodies = [op.regions[0] for op in forward.ops if op.name == "loop"]
    made = bodies[0].producers()
    carried = [made[v].name for v in bodies[0].outputs if v in made]
    assert carried.count("all_gather") == 1


def test_what_waits_for_another_is_not_in_its_bucket() -> None:
    """The second sum needs the first; the third is ready with the first."""
    b = Builder()
    x, y = b.input((4,)), b.input((2, 3))
    first = b.all_reduce(x, DP, group_size=2)
    second = b.all_reduce(b.add(first, x), DP, group_size=2)
    third = b.all_reduce(y, DP, group_size=2)
    graph = bucketed(b.finish(second, third), LARGE)
    sums = [op for op in graph.ops if op.name == "all_reduce"]
    assert [op.attrs.parts for op in sums] == [((1, 4, 1), (1, 6, 1)), ()]


@pytest.mark.parametrize("other", ["axes", "dtype", "reduction", "tensor axes"])
def test_what_differs_shares_no_bucket(other: str) -> None:
    b = Builder()
    axes = ("dp_replicate",) if other == "axes" else ("tp",) if other == "tensor axes" else DP
    first = axes if other == "tensor axes" else DP
    x, y = b.input((4,)), b.input((4,), DType.BF16 if other == "dtype" else DType.F32)
    kind = "max" if other == "reduction" else "add"
    graph = b.finish(
        b.all_reduce(x, first, group_size=2),
        b.all_reduce(y, axes, reduction=kind, group_size=2),
    )
    assert bucketed(graph, LARGE) is graph


def test_a_loop_between_readers_parts_them() -> None:
    """Weights of what follows the layers would only lie in memory while these run."""
    step = overlap(_step("gqa", "fsdp 4"), Shifts(), 1, LARGE)
    (forward,) = (p.graph for p in step.programs if p.name == "forward")
    (loop,) = (i for i, op in enumerate(forward.ops) if op.name == "loop")
    for op in (op for op in forward.ops if op.name == "all_gather"):
        readers = [at for at, user in enumerate(forward.ops) if op.result in user.operands]
        assert all(at < loop for at in readers) or all(at > loop for at in readers)


def test_nothing_to_share_is_said() -> None:
    alone = overlap(_step("gqa", "fsdp 4"), Shifts(), 1, 1)
    notes = [n for n in alone.metadata["findings"] if n.code == "SW_OVERLAP_IDLE"]
    assert ["bucket_mb" in n.message for n in notes] == [True]
    shared = overlap(_step("gqa", "fsdp 4"), Shifts(1, 1), 2, LARGE)
    assert not shared.metadata["findings"]


@pytest.mark.parametrize("knob", ["early_all_gather_shift", "late_reduce_scatter_shift"])
def test_shifts_and_streams_without_collectives_are_said(knob: str) -> None:
    found = DISTRIBUTIONS["data parallel 4"]
    settings = replace(found.settings, cc_streams=4, **{knob: 1})
    captured = model_graph("gqa")
    plan = build_plan(*captured, found.mesh, settings=settings, unit=answer_request)
    said = " ".join(n.message for n in plan.findings if n.code == "SW_OVERLAP_IDLE")
    assert "cc_streams = 4" in said
    assert (knob in said) == (knob == "early_all_gather_shift")  # gradients are reduced in the loop


def _codes(step: StepPlan) -> set[str]:
    return {finding.code for finding in step.metadata["findings"]}


def test_only_state_gives_way_and_only_to_layers() -> None:
    """Tokens mark collectives of weights and gradients where a layer has its own beside them."""
    prioritised = overlap(_step("gqa", "fsdp tp 8"), Shifts(), tokens=True)
    for program in prioritised.programs:
        for op in program.graph.walk():
            if getattr(op.attrs, "low_priority", False):
                assert "dp_shard" in op.attrs.axes
    body = next(op for op in prioritised.programs[0].graph.ops if op.name == "loop").regions[0]
    low = [op.attrs.low_priority for op in body.ops if op.name == "all_gather"]
    assert any(low)
    assert not all(low)
    assert _codes(prioritised) == {"SW_OVERLAP_TOKENS"}, "no layer is ahead of its weights"
    ahead = overlap(_step("gqa", "fsdp tp 8"), Shifts(gather=1), tokens=True)
    assert "SW_OVERLAP_TOKENS" not in _codes(ahead)
    alone = overlap(_step("gqa", "fsdp 4"), Shifts(), tokens=True)
    assert "dependency_tokens" in alone.metadata["findings"][0].message


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce", "reduce_scatter"])
def test_a_bucket_moves_its_parts_as_they_would_alone(kind: str) -> None:
    random = np.random.default_rng(0)
    parts = ((2, 4, 3), (1, 8, 1), (3, 4, 1))
    sources = [random.standard_normal(44).astype(np.float32) for _ in range(4)]
    schedule = flat(CollectiveKind(kind), "ring", [range(4)])
    made = execute_parts(schedule, sources, parts)
    for rank, whole in enumerate(made):
        at, alone = 0, []
        for part in parts:
            size = int(np.prod(part))
            alone.append(execute(schedule, [s[at : at + size] for s in sources], shape=part)[rank])
            at += size
        assert np.concatenate([a.reshape(-1) for a in alone]).tobytes() == whole.tobytes()
    with pytest.raises(CollectiveError, match="44"):
        execute_parts(schedule, sources, (*parts, (1, 4, 1)))


def test_parts_must_fill_the_operand() -> None:
    b = Builder()
    with pytest.raises(ValueError, match="parts"):
        b.op("all_reduce", b.input((4,)), attrs=AllReduceAttrs(DP, "add", 2, ((1, 3, 1),)))
