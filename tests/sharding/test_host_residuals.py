"""Residuals in host memory: moves become transfers of rows, buffers leave HBM, values stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache, partial

import numpy as np
import pytest

from shardwright.compiler.diagnostics import ShardingError
from shardwright.compiler.driver import compile_graph
from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.ops import HostEmptyAttrs, MoveToAttrs
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph, Value, tensor_type
from shardwright.compiler.program import BufferInfo, StepPlan, StepProgram
from shardwright.orchestrator.models import config_task
from shardwright.sharding.cut.host import on_host
from shardwright.sharding.cut.overlap.assign import Shifts
from shardwright.sharding.cut.overlap.pipelined import shifted
from shardwright.sharding.memory.footprint import footprint, host_bytes
from shardwright.sim_cluster.values.run_single import run_single
from tests.support.road import worst
from tests.support.small_job import SIZES
from tests.support.staged_runs import plan_of, step_errors
from tests.support.strategy_cells import distribution

LAYERS = 4
KEPT = 7  # per layer: what enters it, queries, keys, values, attention's and the MLP's two products


@cache
def task(remat: str) -> TrainTask:
    sizes = SIZES | {"num_hidden_layers": LAYERS}
    return config_task.train_task(sizes, seq_len=8, remat=remat)


def step_of(remat: str, **settings: int) -> StepPlan:
    return plan_of(partial(task, remat), distribution("fsdp", dp_shard=2, **settings), 2).step


def transfers(graph: Graph) -> Counter[str]:
    return Counter(op.name for op in graph.walk() if op.name.startswith("host_"))


def test_what_selective_keeps_waits_on_the_host() -> None:
    offloaded, kept = step_of("offload"), step_of("selective")
    on = {name: b for name, b in offloaded.buffers.items() if b.memory == "host"}
    assert len(on) == KEPT and {b.role for b in on.values()} == {"residual"}
    assert all(b.local_type.shape[0] == LAYERS for b in on.values())
    stacks = [b for b in kept.buffers.values() if b.local_type.shape[:1] == (LAYERS,)]
    stacked = sum(b.local_type.num_bytes for b in stacks if b.role == "residual")
    assert host_bytes(offloaded, 0) == sum(b.local_type.num_bytes for b in on.values()) == stacked
    named = [footprint(step).argument_bytes["activations"] for step in (offloaded, kept)]
    assert named[1] - named[0] == stacked


def test_layers_store_late_and_load_early() -> None:
    """The last layer stores behind the loop, the first loads in front of it."""
    step = step_of("offload")
    forward, backward = (p.graph for p in step.programs[:2])
    assert transfers(forward)["host_store"] == 2 * KEPT
    assert transfers(backward)["host_load"] == 2 * KEPT
    for graph, name, outside in ((forward, "host_store", -1), (backward, "host_load", 0)):
        loops = [n for n, op in enumerate(graph.ops) if op.name == "loop"]
        alone = [n for n, op in enumerate(graph.ops) if op.name == name]
        assert len(alone) == KEPT
        assert all(n > loops[-1] if outside else n < loops[0] for n in alone)


@pytest.mark.parametrize(
    "settings", [{}, {"layers_per_group": 2}, {"early_all_gather_shift": 1}], ids=str
)
def test_values_are_those_of_the_unsharded_step(settings: dict[str, int]) -> None:
    how = distribution("fsdp", dp_shard=2, **settings)
    leaf, error = worst(step_errors(partial(task, "offload"), how, 2))
    assert error <= 1e-5, leaf


def a_step(build: Builder, program: Graph, role: str = "residual") -> StepPlan:
    """One program that leaves one value."""
    type = program.outputs[0].type
    info = BufferInfo(name="r", role=role, local_type=type, global_type=type, axes=((),))
    given = BufferInfo(name="x", role="batch", local_type=type, global_type=type, axes=((),))
    one = StepProgram(name="forward", graph=program, inputs=("x",), outputs=("r",))
    return StepPlan(
        mesh={}, buffers={"x": given, "r": info}, programs=(one,), schedules=(((("forward",), 1),),)
    )


def test_a_whole_value_is_stored_where_it_leaves() -> None:
    build = Builder()
    x = build.input((8,), DType.F32)
    moved = build.op("move_to", x, attrs=MoveToAttrs("host"))
    step = on_host(a_step(build, build.finish(moved)))
    assert step.buffers["r"].memory == "host" and step.buffers["x"].memory == "device"
    assert transfers(step.programs[0].graph) == {"host_empty": 1, "host_store": 1}


def test_code_on_the_host_is_refused() -> None:
    build = Builder()
    moved = build.op("move_to", build.input((8,), DType.F32), attrs=MoveToAttrs("host"))
    with pytest.raises(ShardingError, match="negate requires its operands on the device"):
        on_host(a_step(build, build.finish(build.op("negate", moved))))


def test_what_a_step_returns_is_not_on_the_host() -> None:
    build = Builder()
    moved = build.op("move_to", build.input((8,), DType.F32), attrs=MoveToAttrs("host"))
    with pytest.raises(ShardingError, match=r"what forward keeps for backward, got r .metric."):
        on_host(a_step(build, build.finish(moved), role="metric"))


def test_a_row_of_another_form_of_a_stack_is_refused() -> None:
    build = Builder()
    zero = build.constant(0, DType.I32)
    stack = build.op("move_to", build.input((8,), DType.F32), attrs=MoveToAttrs("host"))
    row = build.dynamic_slice(build.reshape(stack, (2, 4)), [zero, zero], (1, 4))
    back = build.op("move_to", row, attrs=MoveToAttrs("device"))
    with pytest.raises(ShardingError, match="as it was written, got one behind reshape"):
        on_host(a_step(build, build.finish(back)))


def test_there_and_back_is_nothing() -> None:
    build = Builder()
    x = build.input((8,), DType.F32)
    there = build.op("move_to", x, attrs=MoveToAttrs("host"))
    back = build.op("move_to", there, attrs=MoveToAttrs("device"))
    step = on_host(a_step(build, build.finish(build.op("negate", back))))
    assert [op.name for op in step.programs[0].graph.ops] == ["negate"]
    assert np.all([b.memory == "device" for b in step.buffers.values()])


def test_what_waits_for_its_transfer_is_not_overwritten() -> None:
    """A carry that is stored a turn later moves to the memory in which the last one is to be made:
    nothing else is made there before it has left."""
    build = Builder()
    first = build.op("negate", build.input((8,)))
    room = build.op("host_empty", attrs=HostEmptyAttrs(tensor_type((4, 8), DType.F32)))

    def layer(body: Builder, counter: Value, carries: Sequence[Value]) -> list[Value]:
        x, stack = carries
        zero = body.constant(0, DType.I32)
        kept = body.op("host_store", stack, body.reshape(x, (1, 8)), counter, zero)
        return [body.add(x, x), kept]

    last, stack = build.loop(4, [first, room], layer)
    graph = build.finish(last, stack)
    moved = shifted(graph, Shifts())
    assert [op.name for op in moved.ops].count("loop") == 2
    step = StepProgram(name="forward", graph=moved, inputs=("x",), outputs=("last", "kept"))
    given = np.arange(8, dtype=np.float32)
    found = run_single(compile_graph(step, "trn1n.32xlarge"), {"x": given})
    for name, wanted in zip(("last", "kept"), evaluate(graph, [given]), strict=True):
        np.testing.assert_array_equal(found[name], wanted)
