"""Collectives over pipeline stages start in program order, whatever a stage needs first."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.neff.schedule import STAGE_AXIS
from shardwright.compiler.outline import outline_programs
from shardwright.compiler.passes.dce import dce
from shardwright.compiler.program import StepProgram
from shardwright.sim_cluster.values.result import distance
from tests.support.building import Builder
from tests.support.kernel_reference import lower_function, run_lowered


def joined(b: Builder, value: Value) -> Value:
    return b.all_reduce(value, (STAGE_AXIS,), group_size=2)


def update(norm_reads_gradient: bool) -> Graph:
    """One stage of an update: a gradient of several stages and a norm over all of them, which reads
    that gradient on one stage and something else on the other.
    """
    b = Builder()
    gradient, other, weight = (b.input((8, 6)) for _ in range(3))
    whole = joined(b, gradient)
    read = whole if norm_reads_gradient else other
    norm = joined(b, b.reduce(b.multiply(read, read), "add", (0, 1)))
    return b.finish(b.add(weight, b.multiply(whole, b.broadcast(norm, (8, 6)))))


def collective_sizes(graph: Graph, inputs: tuple[str, ...]) -> list[int]:
    """Elements of the all_reduces of the outlined program, in the order of its calls."""
    step = StepProgram(name="update.0", graph=graph, inputs=inputs, outputs=("new",))
    outlined = outline_programs((step,))
    units = {u.key: u for u in outlined.functions}
    (program,) = outlined.programs
    return [
        op.result.type.num_elements
        for call in program.steps
        for op in units[program.functions[call.function]].graph.ops
        if op.name == "all_reduce"
    ]


def test_a_stage_takes_part_in_what_it_does_not_read() -> None:
    b = Builder()
    gradient, weight = b.input((8, 6)), b.input((8, 6))
    joined(b, gradient)
    b.all_reduce(gradient, ("dp_shard",), group_size=2)  # dead on every rank of its groups
    graph = dce(b.finish(b.add(weight, weight)))
    assert collective_sizes(graph, ("gradient", "weight")) == [48]


@pytest.mark.parametrize("norm_reads_gradient", [True, False])
def test_pieces_of_a_program_keep_the_order(norm_reads_gradient: bool) -> None:
    inputs = ("gradient", "other", "weight")
    assert collective_sizes(update(norm_reads_gradient), inputs) == [48, 1]


def test_a_function_starts_them_in_order_and_does_not_await_one_for_the_next() -> None:
    """The second result is needed first; alone, that one would be started first."""
    b = Builder()
    x, y = b.input((4, 4)), b.input((2, 2))
    late, early = joined(b, x), joined(b, y)
    first = b.dot(early, early, ((1,), (0,)))
    lowered = lower_function(b.finish(first, b.dot(late, late, ((1,), (0,)))))
    assert [c.source_shape[1] for c in lowered.collectives] == [16, 4]
    assert [k.kind for k in lowered.kernels[:2]] == ["collective_start"] * 2


def test_an_update_in_place_does_not_turn_the_order() -> None:
    """The old value is reduced behind the new one, and so must outlive it."""
    b = Builder()
    x, row = b.input((4, 6)), b.input((1, 6))
    old = b.op("tanh", x)
    zero = b.constant(0, DType.I32)
    new = b.dynamic_update_slice(old, row, (zero, zero))
    lowered = lower_function(b.finish(joined(b, new), joined(b, old)))
    given = [np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6), np.ones((1, 6), np.float32)]
    have = run_lowered(lowered, given, collective=lambda call, source: 2 * source)
    want = np.tanh(given[0])
    assert distance(have[1], 2 * want) <= 1e-6
    want[0] = 1
    assert distance(have[0], 2 * want) <= 1e-6
