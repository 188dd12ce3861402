"""Re-rolling: unrolled layers become loops over stacks, and every value stays what it was."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.ir.verify import verify
from shardwright.compiler.options import DEFAULTS
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.rewriting.driver import run
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.partition.shardy import answer_request
from shardwright.sharding.prepare.reroll import Rerolled, emit, reroll
from shardwright.sharding.prepare.reroll.names import stack_name
from shardwright.sharding.prepare.reroll.packs import Packer, RefusedError
from shardwright.sim_cluster.values.layout import stacked
from shardwright.sim_cluster.values.result import distance
from tests.models import flax_decoder, unrolled_layers
from tests.support.reference_ranks import ReferenceRanks
from tests.support.road import captured_graph, worst
from tests.support.step_plans import build_plan
from tests.support.strategy_cells import distribution, random_inputs

Slots = Sequence[Slot]


def stacks_of(slots: Slots) -> dict[str, tuple[str, ...]]:
    return {slot.name: slot.leaves for slot in slots if slot.leaves}


def check_values(graph: Graph, inputs: Slots, outputs: Slots, rolled: Rerolled) -> None:
    """The rolled step gives every leaf what the step gives it."""
    verify(rolled.graph)
    values = random_inputs(graph, tuple(inputs))
    given = dict(zip((s.name for s in inputs), values, strict=True))
    wanted = dict(zip((s.name for s in outputs), evaluate(graph, values), strict=True))
    given = stacked(given, stacks_of(rolled.inputs))
    wanted = stacked(wanted, stacks_of(rolled.outputs))
    found = evaluate(rolled.graph, [given[slot.name] for slot in rolled.inputs])
    assert {slot.name for slot in rolled.outputs} == wanted.keys()
    for slot, value in zip(rolled.outputs, found, strict=True):
        assert distance(value, wanted[slot.name]) <= 1e-6, slot.name


def rolled_task(task: TrainTask, samples: int = 2) -> Rerolled:
    """A task's step, rolled, its values checked."""
    graph, inputs, outputs = captured_graph(task, samples)
    rolled = reroll(graph, inputs, outputs)
    check_values(graph, inputs, outputs, rolled)
    return rolled


def trips(graph: Graph) -> list[int]:
    """Trips of the loops that contract something."""
    loops = (op for op in graph.ops if op.name == "loop")
    return [
        op.attrs.trip for op in loops if any(o.name == "dot_general" for o in op.regions[0].walk())
    ]


layers = unrolled_layers.train_task
MODELS: dict[str, tuple[Callable[[], TrainTask], list[int]]] = {
    "norm last": (lambda: layers(["post"] * 3), [3, 3]),
    "dropout": (lambda: layers(["dropout"] * 3), [3, 3]),
    "every second has experts": (lambda: layers(["pre", "experts"] * 3), [3, 3]),
    "lamb": (lambda: layers(["pre"] * 3, optax.lamb(1e-3)), [3, 3]),
    "a rate for each layer": (lambda: layers(["pre"] * 3, unrolled_layers.by_layer()), [3, 3]),
}
LONG_MODELS: dict[str, tuple[Callable[[], TrainTask], list[int]]] = {
    "recomputed": (lambda: layers(["pre"] * 3, remat=True), [3, 3]),
    "adafactor": (lambda: layers(["pre"] * 3, optax.adafactor(1e-3)), [3, 3]),
    "lion": (lambda: layers(["pre"] * 3, optax.lion(1e-3)), [3, 3]),
    "muon": (lambda: layers(["pre"] * 3, optax.contrib.muon(1e-3)), [3, 3, 5]),
    "one differs": (lambda: layers(["pre"] * 7, inners=(24,) * 3 + (40,) + (24,) * 3), [3] * 4),
    "leaves in another order": (
        lambda: flax_decoder.train_task(num_layers=12, width=8, num_heads=2, seq_len=4),
        [12, 12],
    ),
}


def check_model(make: Callable[[], TrainTask], wanted: list[int]) -> None:
    rolled = rolled_task(make())
    assert trips(rolled.graph) == wanted, rolled.notes
    for stack, leaves in stacks_of(rolled.inputs).items():
        assert len({leaf.rpartition("/")[2] for leaf in leaves}) == 1, (stack, leaves)


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_a_model_become_loops(name: str) -> None:
    check_model(*MODELS[name])


@pytest.mark.matrix
@pytest.mark.parametrize("name", LONG_MODELS)
def test_layers_of_more_models_become_loops(name: str) -> None:
    check_model(*LONG_MODELS[name])


def test_two_layers_stay_as_they_are() -> None:
    graph, inputs, outputs = captured_graph(layers(["pre"] * 2), 2)
    rolled = reroll(graph, inputs, outputs)
    assert rolled.graph is graph
    assert rolled.inputs == inputs


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (("p/b_0/k", "p/b_1/k", "p/b_2/k"), "p/b_{0..2}/k"),
        (("p/0/k", "p/2/k", "p/4/k"), "p/{0,2..4}/k"),
        (("p/b_9/k", "p/b_8/k", "p/b_7/k"), "p/b_{9,8..7}/k"),
        (("p/x/k", "p/y/k", "p/z/k"), "p/{x,y,z}/k"),
        (("p/b{x}_0/k", "p/b{x}_1/k", "p/b{x}_2/k"), "p/b{x}_{0..2}/k"),
        (("p/l_08/k", "p/l_09/k", "p/l_10/k"), "p/l_{08..10}/k"),
        (("p/l_0/k", "p/l_01/k", "p/l_2/k"), "p/l_{0,01,2}/k"),
        (("p/1a2/k", "p/1b2/k", "p/2"), "{p/1a2/k,p/1b2/k,p/2}"),
    ],
)
def test_stacks_are_named_by_what_differs(names: tuple[str, ...], wanted: str) -> None:
    assert stack_name(names) == wanted


SIZE = 4
STEPS = ("dot", "scale", "shift", "tanh", "mask", "own constant", "first")
"""What a layer may do to its input; `first` reads the input of the model again."""


def chain(bodies: Sequence[Sequence[str]], order: Sequence[int]) -> tuple[Graph, Slots, Slots]:
    """A step whose layer `i` does `bodies[i]`, a walk back over what layers saved, and an update.

    Leaves are inputs in the given order of layers.
    """
    b = Builder()
    weights: dict[int, dict[str, Value]] = {i: {} for i in order}
    inputs = []
    for i in order:
        for name in ("dot", "scale", "shift"):
            shape = (SIZE, SIZE) if name == "dot" else (SIZE,)
            weights[i][name] = b.input(shape)
            inputs.append(Slot(f"params/{i}/{name}", "parameter"))
    x = first = b.input((2, SIZE))
    inputs.append(Slot("batch/x", "batch", 0))
    mask = b.multiply(first, first)
    saved = []
    for i, body in enumerate(bodies):
        saved.append(x)
        for step in body:
            x = _stepped(b, step, x, weights[i], (first, mask, 0.1 * i))
    loss, grads, dx = b.reduce(x, "add", (0, 1)), {}, x
    for i in reversed(range(len(bodies))):
        grads[i] = b.dot(saved[i], dx, contract=((0,), (0,)))
        dx = b.add(b.dot(dx, weights[i]["dot"]), saved[i])
        dx = b.op("tanh", dx) if "tanh" in bodies[i] else dx
    results, outputs = [], []
    for i in order:
        for name, weight in weights[i].items():
            step = grads[i] if name == "dot" else b.multiply(weight, weight)
            results.append(b.add(weight, step))
            outputs.append(Slot(f"params/{i}/{name}", "parameter"))
    outputs.append(Slot("metrics/loss", "metric"))
    return b.finish(*results, loss), inputs, outputs


def _stepped(
    b: Builder, step: str, x: Value, weights: dict[str, Value], given: tuple[Value, Value, float]
) -> Value:
    match step:
        case "dot":
            return b.dot(x, weights["dot"])
        case "scale":
            return b.multiply(x, b.broadcast(weights["scale"], (2, SIZE), (1,)))
        case "shift":
            return b.add(x, b.broadcast(weights["shift"], (2, SIZE), (1,)))
        case "tanh":
            return b.op("tanh", x)
        case "mask":
            return b.add(x, given[1])
        case "own constant":
            return b.add(x, b.constant(np.full((2, SIZE), given[2])))
    return b.add(x, given[0])


bodies = st.lists(st.sampled_from(STEPS), min_size=1, max_size=6)


def test_depth_does_not_change_the_size_of_the_graph() -> None:
    few, many = (reroll(*chain([["dot", "scale", "shift"]] * n, range(n))) for n in (3, 40))
    assert len(few.graph.ops) == len(many.graph.ops)
    names = [slot.name.replace("{0..2}", "{0..39}") for slot in few.inputs]
    assert names == [slot.name for slot in many.inputs]


def test_a_layer_in_the_middle_that_differs_parts_the_loops() -> None:
    bodies = [["dot", "tanh", "scale"]] * 8
    bodies[4] = ["dot", "shift"]
    graph, inputs, outputs = chain(bodies, range(8))
    rolled = reroll(graph, inputs, outputs)
    check_values(graph, inputs, outputs, rolled)
    assert trips(rolled.graph) == [4, 3, 3, 4]
    assert "params/{0..3}/scale" in stacks_of(rolled.inputs)


def test_layers_whose_updates_differ_stay_and_say_why() -> None:
    graph, inputs, outputs = chain([["dot", "tanh"]] * 4, range(4))
    results = [*graph.outputs]
    results[3] = graph.ops[0].operands[1]  # the second layer's weight comes back as the first's
    graph = Graph(graph.inputs, graph.ops, tuple(results), graph.name)
    rolled = reroll(graph, inputs, outputs)
    assert rolled.graph is graph
    assert rolled.notes[-1].startswith("and all stays as it was: ")


@settings(deadline=None, max_examples=40)
@given(bodies, st.integers(3, 6), st.data())
def test_chains_of_equal_layers_are_rolled(
    body: list[str], count: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(count)))
    graph, inputs, outputs = chain([["dot", *body]] * count, order)
    rolled = reroll(graph, inputs, outputs)
    check_values(graph, inputs, outputs, rolled)
    assert trips(rolled.graph) == [count, count], rolled.notes


@settings(deadline=None, max_examples=60)
@given(st.lists(bodies, min_size=1, max_size=2), st.integers(3, 6), bodies, st.data())
def test_a_foreign_layer_never_changes_a_value(
    kinds: list[list[str]], count: int, foreign: list[str], data: st.DataObject
) -> None:
    layers = [["dot", *kind] for _ in range(count) for kind in kinds]
    layers[data.draw(st.integers(0, len(layers) - 1))] = foreign
    graph, inputs, outputs = chain(layers, range(len(layers)))
    check_values(graph, inputs, outputs, reroll(graph, inputs, outputs))


SHIFTS = {"early_all_gather_shift": 1, "late_reduce_scatter_shift": 1}
DISTRIBUTIONS = {
    "fsdp kept": ("fsdp", {"reshard_after_forward": False, "dp_shard": 2}),
    "tp zero-1": ("llm-training", {"dp_shard": 2, "tp": 2}),
    "shifts": (
        "fsdp",
        {"early_all_gather_shift": 1, "late_reduce_scatter_shift": 1, "dp_shard": 2},
    ),
    "stages": ("llm-training", {"pp": 2}),
}


@functools.cache
def decoder() -> tuple[Graph, tuple[Slot, ...], tuple[Slot, ...]]:
    task = flax_decoder.train_task(num_layers=4, width=16, num_heads=4, seq_len=8, vocab=32)
    return captured_graph(task, 2)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_rolled_step_on_ranks_equals_the_step(name: str) -> None:
    strategy, keys = DISTRIBUTIONS[name]
    how = distribution(strategy, **keys)
    graph, inputs, outputs = decoder()
    rolled = reroll(graph, inputs, outputs)
    plan = build_plan(
        run(rolled.graph, step_passes()),
        rolled.inputs,
        rolled.outputs,
        how.mesh,
        settings=how.settings,
        unit=answer_request,
    )
    assert len(plan.step.stacks) == 36
    assert not [f for f in plan.findings if f.code == "SW_COLLECTIVE_UNEXPECTED"]
    values = random_inputs(graph, inputs)
    given = dict(zip((s.name for s in inputs), values, strict=True))
    wanted = dict(zip((s.name for s in outputs), evaluate(graph, values), strict=True))
    ranks = ReferenceRanks(plan.step, given)
    ranks.run_step([{s.name: given[s.name] for s in inputs if s.role == "batch"}])
    errors = {leaf: distance(ranks.gather(leaf), value) for leaf, value in wanted.items()}
    assert worst(errors)[1] <= 1e-5, worst(errors)


Update = Callable[[Builder, Value, Value, int], Value]


def updated(update: Update, norm: Callable[[Builder, Value], Value]) -> tuple[Graph, Slots, Slots]:
    """A step of four layers and a last one unlike them. Layer `i` becomes `update` of its weight,
    its gradient and `i`; a metric adds what `norm` makes of every gradient.
    """
    b = Builder()
    slots = [Slot(f"params/{name}/w", "parameter") for name in (*range(4), "last")]
    *weights, last = [b.input((SIZE, SIZE)) for _ in slots]
    first = x = b.input((2, SIZE))
    saved = []
    for weight in weights:
        saved.append(x)
        x = b.op("tanh", b.dot(x, weight))
    step = back = b.op("negate", b.dot(x, last))
    gradients = []
    for weight, before in zip(weights[::-1], saved[::-1], strict=True):
        gradients.append(b.dot(before, back, contract=((0,), (0,))))
        back = b.dot(back, weight)
    gradients = [*gradients[::-1], b.dot(x, step, contract=((0,), (0,)))]
    total = functools.reduce(b.add, [b.reduce(norm(b, g), "add", (0, 1)) for g in gradients])
    pairs = zip(weights, gradients, strict=False)
    results = [update(b, w, g, i) for i, (w, g) in enumerate(pairs)]
    graph = b.finish(*results, b.add(last, gradients[-1]), total, b.reduce(first, "add", (0, 1)))
    metrics = (Slot("metrics/norm", "metric"), Slot("metrics/first", "metric"))
    return graph, (*slots, Slot("batch/x", "batch", 0)), (*slots, *metrics)


def plain_norm(b: Builder, value: Value) -> Value:
    return b.multiply(value, value)


def plain_update(b: Builder, weight: Value, gradient: Value, layer: int) -> Value:
    return b.add(weight, gradient)


def check_rolled(graph: Graph, inputs: Slots, outputs: Slots) -> Rerolled:
    rolled = reroll(graph, inputs, outputs)
    assert trips(rolled.graph) == [4, 4], rolled.notes
    check_values(graph, inputs, outputs, rolled)
    return rolled


def diamonds(b: Builder, value: Value, count: int) -> Value:
    """Each joins two ways from the one before."""
    for _ in range(count):
        value = b.op("tanh", b.add(value, b.op("negate", b.op("tanh", value))))
    return value


def test_common_origins_of_terms_are_looked_at_once() -> None:
    """A walk of every way from a term to what it depends on would take 2 ** 60 steps."""
    graph, inputs, outputs = updated(plain_update, lambda b, value: diamonds(b, value, 60))
    rolled = check_rolled(graph, inputs, outputs)
    assert len(rolled.graph.ops) < len(graph.ops) / 2  # once for all layers, once for the last


def test_a_last_layer_unlike_the_others_under_a_clipped_norm() -> None:
    graph, inputs, outputs = captured_graph(layers(["pre"] * 3 + ["experts"]), 2)
    assert trips(reroll(graph, inputs, outputs).graph) == [3, 3]


def test_chains_of_any_length_are_followed_without_recursion() -> None:
    def norm(b: Builder, value: Value) -> Value:
        return functools.reduce(lambda v, _: b.op("negate", v), range(1500), plain_norm(b, value))

    check_rolled(*updated(plain_update, norm))


@pytest.mark.parametrize(("length", "most"), [(180, 300), (400, 1500)])
def test_long_updates_are_packed_up_to_a_depth(length: int, most: int) -> None:
    """Beyond it the layers have ops of their own, and what these make is copied side by side."""

    def update(b: Builder, weight: Value, gradient: Value, layer: int) -> Value:
        chain = functools.reduce(lambda v, _: b.op("tanh", v), range(length), gradient)
        return b.add(weight, chain)

    rolled = check_rolled(*updated(update, plain_norm))
    assert len(rolled.graph.ops) < most


def between(low: Sequence[float], high: Sequence[float]) -> Update:
    """Weights are kept between bounds, one of all layers or one for each."""

    def update(b: Builder, weight: Value, gradient: Value, layer: int) -> Value:
        bounds = [b.constant(np.float32(ends[layer % len(ends)])) for ends in (low, high)]
        return b.op("clamp", bounds[0], b.add(weight, gradient), bounds[1])

    return update


def between_norms(b: Builder, weight: Value, gradient: Value, layer: int) -> Value:
    norm = b.reduce(b.multiply(gradient, gradient), "add", (0, 1))
    return b.op("clamp", b.op("negate", norm), b.add(weight, gradient), norm)


OWN = (0.1, 0.2, 0.3, 0.4)
CLAMPS = {
    "bounds of all": between([-0.1], [0.1]),
    "bounds of each": between([-one for one in OWN], OWN),
    "one bound of each": between([-0.1], OWN),
    "made bounds": between_norms,
}


@pytest.mark.parametrize("name", CLAMPS)
def test_scalar_bounds_of_updates(name: str) -> None:
    rolled = check_rolled(*updated(CLAMPS[name], plain_norm))
    assert sum(op.name == "clamp" for op in rolled.graph.ops) == 1


def test_an_op_that_no_rule_can_write_leaves_the_step_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rule writes an op whose types are wrong."""

    def wrong(level: Builder, op: Op, *_: object) -> Value:
        return level.append(make_op(op.name, (level.inputs[0],) * 7, op.attrs))[0]

    monkeypatch.setattr(emit, "batched", wrong)
    graph, inputs, outputs = updated(plain_update, plain_norm)
    rolled = reroll(graph, inputs, outputs)
    assert rolled.graph is graph
    assert "cannot work on all layers at once" in rolled.notes[-1]


def test_packs_of_what_is_refused_are_forgotten() -> None:
    b = Builder()
    leaves = [b.input((SIZE, 8)) for _ in range(6)]
    made = [b.op("tanh", b.op("negate", leaf)) for leaf in leaves]
    ends = [b.add(x, y) for x, y in zip(made[:3], (*leaves[3:5], made[5]), strict=True)]
    graph = b.finish(*ends)
    slots = {v: Slot(f"params/{i}/w", "parameter") for i, v in enumerate(leaves)}
    packer = Packer(graph, slots, {}, graph.producers())
    kept = packer.pack(tuple(leaves[3:]))
    with pytest.raises(RefusedError):
        packer.pack(tuple(ends))
    assert packer.packs == {kept.members: kept}
    assert list(packer.member) == leaves[3:]


def test_a_step_that_would_grow_stays_as_it_is() -> None:
    """Layers of one op, whose weights are read one by one elsewhere."""
    b = Builder()
    weights = [b.input((SIZE, SIZE)) for _ in range(4)]
    x = b.input((2, SIZE))
    names = ("tanh", "negate", "exponential", "abs")
    single = [b.op(name, weight) for name, weight in zip(names, weights, strict=True)]
    x = functools.reduce(b.dot, weights, x)
    slots = [Slot(f"params/{i}/w", "parameter") for i in range(4)]
    graph = b.finish(*weights, *single, x)
    metrics = [Slot(f"metrics/{name}", "metric") for name in (*names, "x")]
    rolled = reroll(graph, [*slots, Slot("batch/x", "batch", 0)], [*slots, *metrics])
    assert rolled.graph is graph
    assert "would take the place of" in rolled.notes[-1]


def test_what_layers_share_is_looked_at_once() -> None:
    """A mask that every layer computes anew from the batch, each op in two ways from the one
    before.
    """
    b = Builder()
    weights = [b.input((SIZE, SIZE)) for _ in range(4)]
    first = x = b.input((2, SIZE))
    for weight in weights:
        x = b.op("tanh", b.dot(x, weight))
        x = b.multiply(x, diamonds(b, first, 60))
    slots = [Slot(f"params/{i}/w", "parameter") for i in range(4)]
    graph = b.finish(*weights, b.reduce(x, "add", (0, 1)))
    inputs, outputs = [*slots, Slot("batch/x", "batch", 0)], [*slots, Slot("metrics/x", "metric")]
    rolled = reroll(graph, inputs, outputs)
    assert trips(rolled.graph) == [4], rolled.notes
    check_values(graph, inputs, outputs, rolled)


def _turned_task(layers: int = 4, tables: int = 1) -> TrainTask:
    """Layers that multiply by what follows from a frozen vector, as rotary positions do from the
    frequencies that a module keeps; or from one each."""

    def init(key: jax.Array) -> tuple[dict[str, Any]]:
        params = {f"w{n}": jax.random.normal(k, (8, 8)) for n, k in enumerate(_keys(key, layers))}
        params["enter"] = jnp.ones((4, 8))
        return (params | {f"f{n}": jnp.arange(8.0) for n in range(tables)},)

    def step(params: dict[str, jax.Array], batch: jax.Array) -> Any:
        frozen = {name: leaf for name, leaf in params.items() if name[0] == "f"}

        def loss_of(own: dict[str, jax.Array]) -> jax.Array:
            x = batch @ own["enter"]
            for n in range(layers):
                table = jnp.cos(frozen[f"f{n % tables}"])
                x = jnp.tanh(x @ own[f"w{n}"] * jnp.broadcast_to(table, x.shape))
            return jnp.mean(x)

        own = {name: leaf for name, leaf in params.items() if name not in frozen}
        loss, grads = jax.value_and_grad(loss_of)(own)
        return {n: leaf - grads[n] for n, leaf in own.items()} | frozen, loss

    return TrainTask(
        step=step,
        init=init,
        batch=lambda n: jax.ShapeDtypeStruct((n, 4), jnp.float32),
        state_names=("params",),
        roles={f"params/f{n}": "frozen" for n in range(tables)},
    )


def _keys(key: jax.Array, number: int) -> Sequence[jax.Array]:
    return list(jax.random.split(key, number))


@pytest.mark.parametrize("tables", [1, 4])
def test_frozen_leaves_of_no_layer_are_made_once(tables: int) -> None:
    """What follows from one is computed in front of the first layer alone; one each is a stack."""
    graph, inputs, outputs = captured_graph(_turned_task(tables=tables), 2)
    graph = run(graph, step_passes(DEFAULTS, 2, False))
    rolled = reroll(graph, inputs, outputs)
    assert [op.attrs.trip for op in rolled.graph.ops if op.regions] == [4, 4]
    check_values(graph, inputs, outputs, rolled)
    assert ("params/f0" in {slot.name for slot in rolled.inputs}) == (tables == 1)
