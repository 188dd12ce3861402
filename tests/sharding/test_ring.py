"""Attention over a split sequence as loops around a ring, in every spelling: equal to the gathered
form, with nothing gathered.

A function of queries, keys and values is imported as the code of one core: its queries are the
core's own, keys and values are gathered in front of it, and their gradients scattered behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.frontend.capture import artifact_of
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.reference import steps
from shardwright.compiler.ir.types import Graph, Op
from shardwright.compiler.ir.verify import verify
from shardwright.compiler.options import DEFAULTS
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.rewriting.driver import run
from shardwright.orchestrator.models import config_task
from shardwright.sharding.cut.ring import Rings
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.shardy import answer_request
from shardwright.sharding.settings import StrategySettings
from shardwright.sim_cluster.values.result import distance
from tests.support.building import Builder
from tests.support.reference_ranks import run_collective
from tests.support.road import captured_graph
from tests.support.step_plans import build_plan

RANKS, BATCH, T, HEADS, WIDTH = 4, 2, 16, 2, 8
OWN = T // RANKS
AXES = ("cp",)


def scores(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(WIDTH)


def plain(rank: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores(q, k)), v)


def causal(rank: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Blocks in front of a rank's own have no score at all in some rows."""
    ahead = (rank * OWN + jnp.arange(OWN))[:, None] < jnp.arange(T)[None]
    masked = jnp.where(ahead, -jnp.inf, scores(q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(masked), v)


def without_maximum(rank: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    e = jnp.exp(scores(q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", e, v) / e.sum(-1).transpose(0, 2, 1)[..., None]


def in_powers_of_two(rank: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    s = scores(q, k) * np.log2(np.e)
    e = jnp.exp2(s - s.max(-1, keepdims=True))
    return jnp.einsum("bhqk,bkhd->bqhd", e / e.sum(-1, keepdims=True), v)


def through_logarithms(rank: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(jax.nn.log_softmax(scores(q, k))), v)


def turned(rank: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Keys before queries, reciprocal sums, a bias by distance, a cap on the scores."""
    s = 5 * jnp.tanh(jnp.einsum("bkhd,bqhd->bkqh", k, q) / 5)
    s = s - 0.1 * jnp.abs(jnp.arange(T)[:, None] - rank * OWN - jnp.arange(OWN))[None, :, :, None]
    e = jnp.exp(s + -s.max(1)[:, None])
    return jnp.einsum("bkqh,bkhd->bqhd", e * (1 / e.sum(1))[:, None], v)


def stored(rank: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The probabilities are a result too: put together block by block."""
    p = jax.nn.softmax(scores(q, k))
    return jnp.concatenate([jnp.einsum("bhqk,bkhd->bqhd", p, v).ravel(), jnp.sort(p).ravel()])


SPELLINGS = {
    "plain": plain,
    "causal": causal,
    "without a maximum": without_maximum,
    "powers of two": in_powers_of_two,
    "log softmax": through_logarithms,
    "turned": turned,
    "stored": stored,
}
Attention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def with_gradients(attention: Attention, dtype: jnp.dtype) -> Callable[..., tuple[jax.Array, ...]]:
    """The result, and the gradients of a weighted sum of it."""

    def step(rank: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(lambda *x: attention(rank, *(t.astype(dtype) for t in x)), q, k, v)
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return (out.astype(jnp.float32), *pull(weights.astype(out.dtype)))

    return step


def per_core(attention: Attention, dtype: jnp.dtype = jnp.float32) -> Graph:
    """The code of one core; inputs are its position and its blocks of queries, keys, values."""
    own, whole = (jax.ShapeDtypeStruct((BATCH, n, HEADS, WIDTH), jnp.float32) for n in (OWN, T))
    rank = jax.ShapeDtypeStruct((), jnp.int32)
    step = with_gradients(attention, dtype)
    body = run(
        import_module(artifact_of(jax.jit(step, keep_unused=True).trace(rank, own, whole, whole))),
        step_passes(DEFAULTS, save_rows=True),
    )
    b = Builder()
    blocks = [b.input(v.type.shape, v.type.dtype) for v in body.inputs[:2]]
    blocks += [b.input(own.shape) for _ in "kv"]
    gathered = [b.all_gather(x, 1, AXES, RANKS) for x in blocks[2:]]
    now = dict(zip(body.inputs, [*blocks[:2], *gathered], strict=True))
    for op in body.ops:
        new = make_op(op.name, [now[v] for v in op.operands], op.attrs, op.regions, op.loc)
        now.update(zip(op.results, b.append(new), strict=True))
    out, dq, dk, dv = (now[v] for v in body.outputs)
    return verify(b.finish(out, dq, *(b.reduce_scatter(d, 1, AXES, RANKS) for d in (dk, dv))))


def ringed(graph: Graph) -> tuple[Graph, Rings]:
    rings = Rings("cp", {*graph.inputs})
    return verify(rings.level(graph)), rings


def on_ranks(graph: Graph, seed: int = 0) -> list[list[np.ndarray]]:
    """The outputs of every rank."""
    rng = np.random.default_rng(seed)
    shape = graph.inputs[1].type.shape
    given = [
        [np.int32(r), *(rng.normal(size=shape).astype(np.float32) for _ in "qkv")]
        for r in range(RANKS)
    ]
    runs = [steps(graph, inputs) for inputs in given]
    sent: Sequence = [None] * RANKS
    while True:
        asked, ended = [], []
        for one, answer in zip(runs, sent, strict=True):
            try:
                asked.append(one.send(answer))
            except StopIteration as stop:
                ended.append(stop.value)
        if ended:
            return ended
        op: Op = asked[0][0]
        if op.name == "axis_index":
            sent = [(np.int32(r),) for r in range(RANKS)]
        else:
            sent = [(x,) for x in run_collective(op, [args[0] for _, args in asked])]


def kinds(graph: Graph) -> Counter:
    return Counter(op.name for op in graph.walk())


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_ring_equals_the_gathered_form(name: str) -> None:
    graph = per_core(SPELLINGS[name])
    ring, rings = ringed(graph)
    assert kinds(graph)["all_gather"] == 2
    assert not rings.findings and not kinds(ring)["all_gather"]
    assert not kinds(ring)["reduce_scatter"], "gradients travel with their blocks"
    for mine, whole in zip(on_ranks(ring), on_ranks(graph), strict=True):
        assert all(np.isfinite(x).all() for x in whole)
        assert max(distance(a, b) for a, b in zip(mine, whole, strict=True)) <= 1e-5


@pytest.mark.parametrize("name", ["plain", "causal", "without a maximum"])
def test_forward_and_backward_go_around_once_each(name: str) -> None:
    """Maximum, sum and weighted values in one loop; what the gradient sums over keys is the output
    times the gradient that came in, and needs no loop of its own.
    """
    ring, rings = ringed(per_core(SPELLINGS[name]))
    loops = [op.regions[0] for op in ring.ops if op.name == "loop"]
    assert rings.loops == len(loops) == 2
    assert [kinds(body)["collective_permute"] for body in loops] == [2, 4]


@pytest.mark.parametrize("name", ["causal", "turned"])
def test_a_loop_reads_what_is_in_memory_and_looks_at_it_inside(name: str) -> None:
    """A transposed or repeated copy would be stored, and read in short runs."""
    ring, _ = ringed(per_core(SPELLINGS[name]))
    made = ring.producers()
    read = {v for op in ring.ops if op.name == "loop" for v in op.operands}
    views = {"broadcast_in_dim", "reshape", "transpose"}
    assert not [v for v in read if v in made and made[v].name in views]


@pytest.mark.parametrize(("context", "held"), [("ring", False), ("gather", True)])
def test_a_plan_says_how_attention_sees_the_sequence(context: str, held: bool) -> None:
    config = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 32,
        "head_dim": 8,
    }
    task = config_task.train_task(config, seq_len=16, dtype="f32", remat="full")
    graph, inputs, outputs = captured_graph(task, 4)
    plan = build_plan(
        graph,
        inputs,
        outputs,
        make_mesh({"dp_shard": 2, "cp": 2}),
        unit=answer_request,
        settings=StrategySettings(context=context),
    )
    rows = {(r.program, r.kind): r.count for r in plan.traffic if r.axes == ("cp",)}
    said = plan.reasons["context"]
    assert said.startswith(context)
    assert held or said == (
        "ring attention (strategy.context): 3 ring passes, in each of which the 2 blocks of keys"
        " and values go around all ranks of cp; a core holds 2 blocks at a time"
    )
    layers, blocks = 2, 2
    passed = layers * 2 * (blocks - 1)
    ring = {
        ("forward", "collective_permute"): passed,
        ("backward", "collective_permute"): 2 * passed + layers * 2 * blocks,
    }
    gathered = {
        ("forward", "all_gather"): layers * 2,
        ("backward", "all_gather"): layers * 2,
        ("backward", "reduce_scatter"): layers * 2,
    }
    assert rows == (gathered if held else ring)


def test_sums_of_narrow_values_are_carried_wide() -> None:
    """No further from fp32 than the gathered form in bf16."""
    exact = on_ranks(per_core(causal))
    graph = per_core(causal, jnp.bfloat16)
    errors = [
        max(
            distance(a, b)
            for x, y in zip(on_ranks(g), exact, strict=True)
            for a, b in zip(x, y, strict=True)
        )
        for g in (ringed(graph)[0], graph)
    ]
    assert errors[0] <= max(1e-2, errors[1])
