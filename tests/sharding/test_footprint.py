"""Memory of a core: exact arguments, liveness through loops, and the error when it does not fit."""

from __future__ import annotations

import dataclasses

import pytest

from shardwright.compiler.diagnostics import CapacityError, Loc
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.types import Graph, Value, tensor_type
from shardwright.compiler.program import BufferInfo, StepPlan, StepProgram
from shardwright.sharding.memory.advice import Asked, advice, advice_text
from shardwright.sharding.memory.footprint import CATEGORIES, OF_SOME, check_limit, footprint
from shardwright.sharding.memory.places import buffer_places
from tests.support.building import Builder

SIZE = 64  # f32 elements of every tensor below
BYTES = SIZE * 4


def buffer(name: str, role: str, value: Value) -> BufferInfo:
    return BufferInfo(
        name=name,
        role=role,
        local_type=value.type,
        global_type=value.type,
        axes=((),) * value.type.rank,
    )


def plan_of(
    graph: Graph, roles: list[tuple[str, str]], name: str = "backward", count: int = 1
) -> StepPlan:
    """One program; `roles` name and classify its inputs, then its outputs."""
    values = (*graph.inputs, *graph.outputs)
    buffers = {n: buffer(n, role, v) for (n, role), v in zip(roles, values, strict=True)}
    names = [n for n, _ in roles]
    first = len(graph.inputs)
    program = StepProgram(
        name=name, graph=graph, inputs=tuple(names[:first]), outputs=tuple(names[first:])
    )
    return StepPlan(
        mesh={"dp_shard": 4},
        buffers=buffers,
        programs=(program,),
        schedules=((((name,), count),),),
        num_microbatches=count,
    )


def sines(b: Builder, x: Value, count: int) -> list[Value]:
    """Values that reach memory: each has two readers."""
    return [b.op("sine", x) for _ in range(count)]


def test_arguments_are_exact_and_batches_count_every_micro_batch() -> None:
    b = Builder()
    w = b.input((SIZE,))
    b.input((SIZE,), DType.BF16)
    b.input((SIZE,), DType.I32)
    out = b.add(w, w)
    roles = [("w", "parameter"), ("m", "optimizer"), ("x", "batch"), ("g", "gradient")]
    memory = footprint(plan_of(b.finish(out), roles, count=3))
    assert memory.argument_bytes == {
        "parameters": BYTES,
        "optimizer": BYTES // 2,
        "gradients": BYTES,
        "activations": 0,
        "gathered": 0,
        "scratch": 0,
        "other": 3 * BYTES,
    }
    assert memory.arena_bytes == {"backward": 0}
    assert memory.peak_bytes == sum(memory.categories.values())
    assert [*memory.categories] == [c for c in CATEGORIES if c not in OF_SOME]


def test_the_arena_is_the_peak_of_live_values() -> None:
    b = Builder()
    x = b.input((SIZE,))
    a, c = sines(b, x, 2)
    d = b.multiply(a, c)  # read twice: reaches memory, a and c die here
    first = b.reduce(d, "add", (0,))
    second = b.reduce(d, "max", (0,))
    graph = b.finish(b.add(first, second), b.multiply(a, a))
    memory = footprint(plan_of(graph, [("x", "batch"), ("s", "metric"), ("r", "residual")]))
    # c is fused into d; a and d live together, and with them the first two scalars
    assert memory.arena_bytes["backward"] == 2 * BYTES + 4 + 4
    named = sum(memory.argument_bytes.values())
    one, two = BYTES, 2 * BYTES
    live = [one, one, two, two + 4, two + 8, one + 8, one]
    assert [m.live_bytes - named for m in memory.timeline] == live


def test_gathered_values_are_their_own_category() -> None:
    b = Builder()
    w, x = b.input((SIZE,)), b.input((4 * SIZE,))
    whole = b.all_gather(w, 0, ("dp_shard",), 4)
    graph = b.finish(b.reduce(b.multiply(whole, x), "add", (0,)))
    roles = [("w", "parameter"), ("x", "batch"), ("s", "metric")]
    memory = footprint(plan_of(graph, roles))
    assert memory.categories["gathered"] == 4 * BYTES
    assert memory.held[0].num_bytes == 4 * BYTES


@pytest.mark.parametrize("name", ["update", "update.1"])
def test_what_an_update_holds_is_scratch_on_every_stage(name: str) -> None:
    b = Builder()
    a, c = sines(b, b.input((SIZE,)), 2)
    graph = b.finish(b.reduce(b.multiply(a, c), "add", (0,)), b.multiply(a, a))
    roles = [("x", "gradient"), ("s", "metric"), ("r", "parameter")]
    memory = footprint(plan_of(graph, roles, name=name))
    assert memory.categories["scratch"] == BYTES and not memory.categories["activations"]


def loop_graph(with_stack: bool) -> Graph:
    """A loop that needs two tensors inside, and carries x, weights it only reads, and a stack."""
    b = Builder()
    x, w = b.input((SIZE,)), b.input((8, SIZE))
    stack = b.full((8, SIZE), 0.0)

    def body(inner: Builder, i: Value, carries: tuple[Value, ...]) -> tuple[Value, ...]:
        h, w, stack = carries
        zero = inner.constant(0, DType.I32)
        a, c = sines(inner, h, 2)
        both = inner.add(inner.multiply(a, c), inner.op("maximum", a, c))
        if with_stack:
            row = inner.reshape(both, (1, SIZE))
            stack = inner.dynamic_update_slice(stack, row, [i, zero])
        return both, w, stack

    h, _, stack = b.loop(8, [x, w, stack], body)
    return b.finish(b.reduce(h, "add", (0,)), b.reduce(stack, "add", (0, 1)))


def test_loops_hold_their_carries_once_and_their_body_once() -> None:
    roles = [("x", "batch"), ("w", "parameter"), ("a", "metric"), ("b", "metric")]
    # carries: h, counter and stack (w is only read); body: a, c and the next h and counter
    memory = footprint(plan_of(loop_graph(True), roles))
    carries = BYTES + 8 * BYTES + 4
    assert memory.arena_bytes["backward"] == carries + 3 * BYTES
    without = footprint(plan_of(loop_graph(False), roles))
    assert without.arena_bytes["backward"] < memory.arena_bytes["backward"]


def test_bodies_of_loops_appear_once_with_their_trips() -> None:
    roles = [("x", "batch"), ("w", "parameter"), ("a", "metric"), ("b", "metric")]
    memory = footprint(plan_of(loop_graph(True), roles))
    inside = [m for m in memory.timeline if m.repeats == 8]
    assert {"sine", "add", "dynamic_update_slice"} <= {m.what for m in inside}
    assert max(m.live_bytes for m in memory.timeline) == memory.peak_bytes
    assert sum(h.num_bytes for h in memory.held) == memory.peak_bytes


def test_what_does_not_fit_says_why_and_what_to_do() -> None:
    roles = [("x", "batch"), ("w", "parameter"), ("a", "metric"), ("b", "metric")]
    plan = plan_of(loop_graph(True), roles)
    memory = footprint(plan)
    check_limit(memory, memory.peak_bytes, "")
    limit = memory.peak_bytes - 1
    with pytest.raises(CapacityError) as caught:
        check_limit(memory, limit, advice_text(memory, plan, Asked(zero=0), limit))
    error = caught.value
    assert error.exit_code == 71
    weight = "w tensor<8x64xf32> (parameters)"
    for text in (f"{memory.peak_bytes} bytes", f"{memory.peak_bytes - 1} bytes", weight):
        assert text in str(error)
    assert "explain memory" in error.diagnostic.hint


def sharded(name: str, role: str, axes: tuple[tuple[str, ...], ...], rows: int) -> BufferInfo:
    """A buffer of `rows` local rows of 16 floats."""
    ways = 4 if axes[0] else 1
    local, whole = (tensor_type((n, 16), DType.F32) for n in (rows, rows * ways))
    return BufferInfo(name=name, role=role, local_type=local, global_type=whole, axes=axes)


def test_advice_counts_the_bytes_of_each_change() -> None:
    b = Builder()
    graph = b.finish(b.reduce(b.input((SIZE,)), "add", (0,)))
    plan = plan_of(graph, [("x", "batch"), ("s", "metric")])
    split, whole = (("dp_shard",), ()), ((), ())
    buffers = [
        sharded("w", "parameter", split, 6),
        sharded("odd", "parameter", split, 3),
        sharded("m", "optimizer", whole, 8),
        sharded("kept", "gathered", whole, 5),
    ]
    plan = dataclasses.replace(plan, buffers={**plan.buffers, **{i.name: i for i in buffers}})
    wide = "--set mesh.dp_shard=8 --set cluster.instances=2"
    asked = Asked(zero=0, wider=wide)
    found = {a.change: a.saves_bytes for a in advice(footprint(plan), plan, asked)}
    assert found[f"shard over twice the cores, {wide}"] == 6 * 16 * 4 // 2
    alone = {a.change for a in advice(footprint(plan), plan, Asked(zero=0))}
    assert alone == found.keys() - {f"shard over twice the cores, {wide}"}
    assert found["spread the optimizer state, strategy.zero = 1"] == 8 * 16 * 4 * 3 // 4
    assert found["gather weights again, strategy.reshard_after_forward = true"] == 5 * 16 * 4
    spread = {a.change for a in advice(footprint(plan), plan, Asked(zero=3, wider=wide))}
    assert spread == found.keys() - {"spread the optimizer state, strategy.zero = 1"}


def test_a_ring_is_advice_where_keys_and_values_are_gathered() -> None:
    """Of 8 blocks two are held: 6/8 of 4096 bytes, of which 3072 are live at the peak."""
    b = Builder()
    graph = b.finish(b.reduce(b.input((SIZE,)), "add", (0,)))
    plan = plan_of(graph, [("x", "batch"), ("s", "metric")])
    plan = dataclasses.replace(plan, mesh={"cp": 8})
    memory = footprint(plan)
    live = {**memory.categories, "gathered": 3072}
    memory = dataclasses.replace(memory, categories=live, peak_bytes=sum(live.values()))
    ring = "send keys and values around, strategy.context = ring"
    for gathered, saved in ((4096, 3072 * 6 // 8), (1024, 768)):
        found = advice(memory, plan, Asked(zero=3, context_bytes=gathered))
        assert {a.change: a.saves_bytes for a in found}[ring] == saved
    assert ring not in {a.change for a in advice(memory, plan, Asked(zero=3))}


EXPLAINED = "`plan --explain memory` estimates each change"


def test_advice_says_where_no_change_is_enough_alone() -> None:
    b = Builder()
    graph = b.finish(b.reduce(b.input((SIZE,)), "add", (0,)))
    plan = plan_of(graph, [("x", "batch"), ("s", "metric")])
    kept = sharded("kept", "gathered", ((), ()), 1000)
    plan = dataclasses.replace(plan, buffers={**plan.buffers, "kept": kept})
    memory = footprint(plan)
    (change,) = advice(memory, plan, Asked(zero=0))
    enough = advice_text(memory, plan, Asked(zero=0), memory.peak_bytes - change.saves_bytes)
    less = advice_text(memory, plan, Asked(zero=0), memory.peak_bytes - change.saves_bytes - 1)
    assert less == enough.replace("; `plan", "; not enough alone; `plan") != enough
    split = sharded("w", "parameter", (("dp_shard",), ()), 1000)
    plan = dataclasses.replace(plan, buffers={**plan.buffers, "w": split})
    two = advice_text(footprint(plan), plan, Asked(zero=1, wider="--set a=b"), 0)
    assert two.endswith(
        "GiB); none of them is enough alone; `plan --explain memory` estimates each change"
    )


def test_what_saves_less_than_a_tenth_of_what_is_missing_is_no_advice() -> None:
    b = Builder()
    graph = b.finish(b.reduce(b.input((SIZE,)), "add", (0,)))
    plan = plan_of(graph, [("x", "batch"), ("s", "metric")])
    kept = {n: sharded(n, "gathered", ((), ()), 1000) for n in ("kept", "more")}
    split = sharded("w", "parameter", (("dp_shard",), ()), 1000)
    plan = dataclasses.replace(plan, buffers={**plan.buffers, **kept, "w": split})
    memory, asked = footprint(plan), Asked(zero=0, wider="--set a=b")
    large, small = (a.saves_bytes for a in advice(memory, plan, asked))

    def said(over: int) -> str:
        return advice_text(memory, plan, asked, memory.peak_bytes - over)

    assert "shard over" in said(10 * small) and "gather weights" in said(10 * small)
    assert "shard over" not in said(10 * small + 1) and "gather weights" in said(10 * small + 1)
    assert said(10 * small + 1).endswith(f"GiB); not enough alone; {EXPLAINED}")
    nothing = "no change that is counted here saves a tenth of what is missing"
    assert said(10 * large + 1) == f"{nothing}; `plan --explain memory` estimates others"


@pytest.mark.parametrize("leaves", [4, 40])
def test_the_places_of_all_buffers_are_read_from_one_look_at_each_program(
    leaves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = Builder()
    weights = [b.input((8, 8)) for _ in range(leaves)]
    moved = [b.convert(w, DType.BF16) for w in weights]
    graph = b.finish(*(b.op("tanh", v) for v in moved))
    for line, op in enumerate(op for op in graph.ops if op.name == "tanh"):
        op.loc = Loc("model.py", line + 1)
    looks: list[Graph] = []
    producers = Graph.producers
    monkeypatch.setattr(Graph, "producers", lambda g: (looks.append(g), producers(g))[1])
    roles = [(f"w{i}", "parameter") for i in range(leaves)]
    places = buffer_places(plan_of(graph, [*roles, *((f"y{i}", "metric") for i in range(leaves))]))
    assert len(looks) == 1
    assert [places[f"w{i}"].line for i in range(leaves)] == list(range(1, leaves + 1))
