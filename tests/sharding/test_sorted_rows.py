"""Rows of all samples sorted as one list: sorted per sample where nothing depends on their order,
left alone where something does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.diagnostics import Diagnostic
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.passes.ranges import integer_ranges
from shardwright.compiler.rewriting.driver import run
from shardwright.sharding.linearity.labels import merge_dim
from shardwright.sharding.prepare.sorted_rows import sorted_per_sample
from shardwright.sharding.prepare.sorted_rows.proof import is_row_sort
from tests.support.road import worst
from tests.support.staged_runs import step_errors
from tests.support.strategy_cells import distribution, grouped

SAMPLES, LENGTH, WIDTH, WIDE, EXPERTS, CHOSEN = 4, 3, 5, 7, 6, 2
Leaf = Mapping[str, jax.Array]
Experts = Callable[[Leaf, jax.Array], jax.Array]


def routed(z: Leaf, rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Weights [N, K], flat choices, the order that sorts them, and the sorted rows."""
    best, chosen = jax.lax.top_k(jax.nn.softmax(rows @ z["router"]), CHOSEN)
    expert = chosen.reshape(-1)
    order = jnp.argsort(expert)
    return best, expert, order, rows[order // CHOSEN]


def added(z: Leaf, rows: jax.Array) -> jax.Array:
    """Group sizes by bincount, rows added back."""
    best, expert, order, taken = routed(z, rows)
    sizes = jnp.bincount(expert, length=EXPERTS)
    wide = jnp.tanh(jax.lax.ragged_dot(taken, z["up"], sizes))
    given = jax.lax.ragged_dot(wide, z["down"], sizes) * best.reshape(-1)[order][:, None]
    return jnp.zeros_like(rows).at[order // CHOSEN].add(given)


def placed(z: Leaf, rows: jax.Array) -> jax.Array:
    """Group sizes by one-hot sums, rows looked up at their places."""
    best, expert, order, taken = routed(z, rows)
    sizes = jax.nn.one_hot(expert, EXPERTS, dtype=jnp.int32).sum(0)
    wide = jnp.tanh(jax.lax.ragged_dot(taken, z["up"], sizes))
    given = jnp.take(jax.lax.ragged_dot(wide, z["down"], sizes), jnp.argsort(order), axis=0)
    return jnp.einsum("tkd,tk->td", given.reshape(*best.shape, -1), best)


def multiplied(z: Leaf, rows: jax.Array) -> jax.Array:
    """Products with one-hot rows of the sorted choices."""
    best, expert, order, taken = routed(z, rows)
    mine = jax.nn.one_hot(expert[order], EXPERTS)
    wide = jnp.tanh(jnp.einsum("nd,ne,edf->nf", taken, mine, z["up"]))
    given = jnp.einsum("nf,ne,efd->nd", wide, mine, z["down"]) * best.reshape(-1)[order][:, None]
    return jnp.zeros_like(rows).at[order // CHOSEN].add(given)


def segments(expert: jax.Array, dtype: jnp.dtype = jnp.int32) -> jax.Array:
    """Which places of the sorted list are of which expert, [N, E], by sums of what is chosen."""
    ends = jnp.cumsum(jax.nn.one_hot(expert, EXPERTS, dtype=jnp.int32).sum(0))
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
    place = jnp.arange(expert.size, dtype=ends.dtype)[:, None]
    return ((place >= starts) & (place < ends)).astype(dtype)


def early(z: Leaf, rows: jax.Array) -> jax.Array:
    """Masks of segments stand in front of the sort."""
    best, chosen = jax.lax.top_k(jax.nn.softmax(rows @ z["router"]), CHOSEN)
    mine = segments(chosen.reshape(-1), jnp.float32)
    order = jnp.argsort(chosen.reshape(-1))
    wide = jnp.tanh(jnp.einsum("nd,ne,edf->nf", rows[order // CHOSEN], mine, z["up"]))
    given = jnp.einsum("nf,ne,efd->nd", wide, mine, z["down"]) * best.reshape(-1)[order][:, None]
    return jnp.zeros_like(rows).at[order // CHOSEN].add(given)


def gone(z: Leaf, rows: jax.Array) -> jax.Array:
    """Only the first rows of the whole list are kept."""
    best, _, order, taken = routed(z, rows)
    kept = taken * (jnp.arange(taken.shape[0]) < 9)[:, None]
    return jnp.zeros_like(rows).at[order // CHOSEN].add(kept) * best[:, :1]


def summed(z: Leaf, rows: jax.Array) -> jax.Array:
    """Every row sees the rows in front of it."""
    _, _, order, taken = routed(z, rows)
    return jnp.zeros_like(rows).at[order // CHOSEN].add(jnp.cumsum(taken, axis=0))


def written(z: Leaf, rows: jax.Array) -> jax.Array:
    """One place of the list is overwritten."""
    _, _, order, taken = routed(z, rows)
    return jnp.zeros_like(rows).at[order // CHOSEN].add(taken.at[3].set(0.0))


def first(z: Leaf, rows: jax.Array) -> jax.Array:
    """The sorted rows themselves."""
    return routed(z, rows)[3][: rows.shape[0]]


def wrong(z: Leaf, rows: jax.Array) -> jax.Array:
    """Groups that are not those of the choices: sizes of another list."""
    _, expert, order, taken = routed(z, rows)
    sizes = jnp.bincount(EXPERTS - 1 - expert, length=EXPERTS)
    wide = jax.lax.ragged_dot(jax.lax.ragged_dot(taken, z["up"], sizes), z["down"], sizes)
    return jnp.zeros_like(rows).at[order // CHOSEN].add(wide)


def last(z: Leaf, rows: jax.Array) -> jax.Array:
    """Of all rows of a token the one written last stays."""
    _, _, order, taken = routed(z, rows)
    return jnp.zeros_like(rows).at[order // CHOSEN].set(taken * z["router"][:, 0])


def still(z: Leaf, rows: jax.Array) -> jax.Array:
    """Rows that keep their place weigh more."""
    best, _, order, taken = routed(z, rows)
    place = jnp.argsort(order)
    weight = jnp.where(place == jnp.arange(place.size, dtype=place.dtype), 1.0, 0.25)
    given = jnp.take(taken, place, axis=0) * weight[:, None]
    return jnp.einsum("tkd,tk->td", given.reshape(*best.shape, -1), best)


def moved(z: Leaf, rows: jax.Array) -> jax.Array:
    """Rows weigh how far they moved."""
    best, _, order, _ = routed(z, rows)
    place = jnp.argsort(order)
    far = jnp.abs(place - jnp.arange(place.size, dtype=place.dtype)).astype(rows.dtype)
    return jnp.einsum("td,tk->td", rows, far.reshape(best.shape))


def later(z: Leaf, rows: jax.Array) -> jax.Array:
    """Rows are looked up at the later one of their place and what came to theirs."""
    best, _, order, taken = routed(z, rows)
    given = jnp.take(taken, jnp.maximum(jnp.argsort(order), order), axis=0)
    return jnp.einsum("tkd,tk->td", given.reshape(*best.shape, -1), best)


def mirrored(z: Leaf, rows: jax.Array) -> jax.Array:
    """Rows are looked up as far in front of their token as their place is behind it."""
    best, _, order, taken = routed(z, rows)
    place = jnp.argsort(order)
    other = 2 * jnp.arange(place.size, dtype=place.dtype) - place
    given = jnp.take(taken, other, axis=0, mode="clip")
    return jnp.einsum("tkd,tk->td", given.reshape(*best.shape, -1), best)


def turned(z: Leaf, rows: jax.Array) -> jax.Array:
    """Rows are looked up at the place of another token, turned so that it looks like their own."""
    best, _, order, taken = routed(z, rows)
    wide = (SAMPLES, order.size // SAMPLES)
    place = jax.lax.broadcast_in_dim(jnp.argsort(order).reshape(wide), wide[::-1], (1, 0))
    back = jax.lax.rem(place, wide[1]) * wide[0] + jax.lax.div(place, wide[1])
    given = jnp.take(taken, back.reshape(-1), axis=0)
    return jnp.einsum("tkd,tk->td", given.reshape(*best.shape, -1), best)


def ringed(z: Leaf, rows: jax.Array) -> jax.Array:
    """What is sorted needs the masks of its own segments."""
    chosen = jax.lax.top_k(jax.nn.softmax(rows @ z["router"]), CHOSEN)[1].reshape(-1)
    share = segments(chosen, jnp.float32).sum(0)[chosen]
    count = jnp.arange(chosen.size, dtype=jnp.int32)
    _, order, weight = jax.lax.sort((chosen, count, share), num_keys=1)
    return jnp.zeros_like(rows).at[order // CHOSEN].add(rows[order // CHOSEN] * weight[:, None])


def counted(dtype: jnp.dtype) -> Experts:
    """Group sizes are counted in a type that wraps or rounds when there are many rows."""

    def experts(z: Leaf, rows: jax.Array) -> jax.Array:
        best, expert, order, taken = routed(z, rows)
        sizes = jnp.sum(jax.nn.one_hot(expert, EXPERTS, dtype=dtype), 0, dtype=dtype)
        wide = jax.lax.ragged_dot(taken, z["up"], sizes.astype(jnp.int32))
        given = jax.lax.ragged_dot(jnp.tanh(wide), z["down"], sizes.astype(jnp.int32))
        given = given * best.reshape(-1)[order][:, None]
        return jnp.zeros_like(rows).at[order // CHOSEN].add(given)

    return experts


def graph_of(experts: Experts, length: int = LENGTH) -> Graph:
    """Loss and gradients of a step on flattened samples; the samples are input 0."""

    def loss(z: Leaf, x: jax.Array) -> jax.Array:
        rows = x.reshape(-1, WIDTH)
        return jnp.sum(jnp.sin(rows + experts(z, rows)) ** 2)

    def step(x: jax.Array, z: Leaf) -> object:
        return jax.value_and_grad(loss, argnums=(0, 1))(z, x)

    sizes = {
        "router": (WIDTH, EXPERTS),
        "up": (EXPERTS, WIDTH, WIDE),
        "down": (EXPERTS, WIDE, WIDTH),
    }
    leaves = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in sizes.items()}
    x = jax.ShapeDtypeStruct((SAMPLES, length, WIDTH), jnp.float32)
    lowered = jax.jit(step, keep_unused=True).lower(x, leaves)
    return run(import_module(lowered.as_text(debug_info=True)), step_passes())


def inputs_of(graph: Graph) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.standard_normal(v.type.shape).astype(np.float32) for v in graph.inputs]


def rewritten(graph: Graph, *, by_expert: bool = False) -> tuple[Graph, tuple[Diagnostic, ...]]:
    return sorted_per_sample(graph, {graph.inputs[0]: 0}, by_expert=by_expert)


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("experts", [added, placed, multiplied, early])
def test_lists_are_sorted_per_sample(experts: Experts, by_expert: bool) -> None:
    graph = graph_of(experts)
    found, notes = rewritten(graph, by_expert=by_expert)
    assert any(map(is_row_sort, graph.walk())) and not any(map(is_row_sort, found.walk()))
    assert {(note.code, note.severity) for note in notes} == {("SW_ROWS_SORTED", "note")}
    arrays = inputs_of(graph)
    for got, want in zip(evaluate(found, arrays), evaluate(graph, arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


PLACED = [still, moved, later, mirrored, turned]


@pytest.mark.parametrize("experts", [gone, summed, written, first, wrong, last, ringed, *PLACED])
def test_lists_whose_order_matters_are_left_alone(experts: Experts) -> None:
    """All of these would give other values when sorted per sample."""
    graph = graph_of(experts)
    found, notes = rewritten(graph)
    assert any(map(is_row_sort, found.walk()))
    assert {(note.code, note.severity) for note in notes} == {("SW_ROWS_SORTED", "warning")}
    assert all(note.loc is not None and note.loc.line for note in notes)
    arrays = inputs_of(graph)
    for got, want in zip(evaluate(found, arrays), evaluate(graph, arrays), strict=True):
        np.testing.assert_array_equal(got, want)


def falling(z: Leaf, rows: jax.Array) -> jax.Array:
    """From the greatest key down."""
    keys = (rows @ z["router"]).argmax(1).astype(jnp.int32)
    return rows[jnp.argsort(keys, descending=True)]


def twofold(z: Leaf, rows: jax.Array) -> jax.Array:
    """By two keys."""
    keys = (rows @ z["router"]).argmax(1).astype(jnp.int32)
    count = jnp.arange(keys.size, dtype=jnp.int32)
    return rows[jax.lax.sort((keys, -keys, count), num_keys=2)[2]]


def crossed(z: Leaf, rows: jax.Array) -> jax.Array:
    """The first rows of all samples stand in front of all second rows."""
    wide = rows.reshape(SAMPLES, -1, WIDTH).transpose(1, 0, 2).reshape(-1, WIDTH)
    return added(z, wide).reshape(-1, SAMPLES, WIDTH).transpose(1, 0, 2).reshape(rows.shape)


def cut(z: Leaf, rows: jax.Array) -> jax.Array:
    """The last row is not sorted."""
    return jnp.concatenate([added(z, rows[:-1]), rows[-1:]])


def few(z: Leaf, rows: jax.Array) -> jax.Array:
    """One key for every sample."""
    wide = rows.reshape(SAMPLES, -1)
    return wide[jnp.argsort(wide.argmax(1))].reshape(rows.shape)


def alone(z: Leaf, rows: jax.Array) -> jax.Array:
    """Sorts within each sample, in the first one, and how much the batch has of every feature."""
    wide = rows.reshape(SAMPLES, -1, WIDTH)
    order = jnp.argsort((rows @ z["router"]).argmax(1).reshape(SAMPLES, -1), axis=1)
    given = jnp.take_along_axis(wide, order[..., None], 1).reshape(rows.shape)
    return given * jnp.argsort(rows.sum(0)) * jnp.sort(jax.lax.stop_gradient(wide[0, 0]))


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        (falling, "not followed"),
        (twofold, "one integer key"),
        (crossed, "not followed"),
        (cut, "not followed"),
        (few, "several of each"),
        (alone, None),
    ],
)
def test_sorts_over_samples_that_stay_are_found(experts: Experts, reason: str | None) -> None:
    graph = graph_of(experts)
    found, notes = rewritten(graph)
    assert sum(op.name == "sort" for op in found.walk()) > 0
    if reason is None:
        assert not notes
    else:
        assert {note.severity for note in notes} == {"warning"}
        assert all(reason in note.message for note in notes)


@pytest.mark.parametrize("shape", [(), (9,)])
def test_batch_inputs_with_other_numbers_of_samples(shape: tuple[int, ...]) -> None:
    """A scalar has no samples; with two numbers of samples a list is not cut."""

    def step(x: jax.Array, scale: jax.Array, router: jax.Array) -> jax.Array:
        rows = x.reshape(-1, WIDTH)
        order = jnp.argsort((rows @ router).argmax(1))
        return jnp.zeros_like(rows).at[order].add(jnp.sin(rows[order])) * scale.sum()

    shapes = (SAMPLES, LENGTH, WIDTH), shape, (WIDTH, EXPERTS)
    leaves = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    text = jax.jit(step).lower(*leaves).as_text(debug_info=True)
    graph = run(import_module(text), step_passes())
    found, notes = sorted_per_sample(graph, {graph.inputs[0]: 0, graph.inputs[1]: 0})
    assert any(map(is_row_sort, found.walk())) == bool(shape)
    assert [note.severity for note in notes] == ["warning" if shape else "note"]


@pytest.mark.parametrize(("dtype", "length"), [(jnp.int8, 15), (jnp.bfloat16, 32)])
def test_counts_are_offsets_while_their_type_holds_them(dtype: jnp.dtype, length: int) -> None:
    """One more token per sample, and the rows are more than the type counts exactly."""
    for more, severity in ((0, "note"), (1, "warning")):
        found, notes = rewritten(graph_of(counted(dtype), length + more))
        assert [note.severity for note in notes] == [severity]
        assert any(map(is_row_sort, found.walk())) == bool(more)


@pytest.mark.parametrize("axes", [{"dp_shard": 4}, {"dp_shard": 2, "ep": 2}])
def test_a_step_with_one_list_is_cut_at_its_gradients(axes: dict[str, int]) -> None:
    """Two micro-batches with one sample on each core."""
    leaf, error = worst(step_errors(grouped, distribution("fsdp", **axes), 2, 1))
    assert error <= 1e-5, leaf


def test_experts_become_a_batch_of_products() -> None:
    graph, _ = rewritten(graph_of(added))
    found, _ = rewritten(graph_of(added), by_expert=True)

    def batched(whole: Graph) -> int:
        return sum(op.name == "dot_general" and bool(op.attrs.lhs_batch) for op in whole.walk())

    assert batched(graph) == 2, "gradients of the weights"
    assert batched(found) == 6, "and two products each way"


def test_sorts_keep_the_ranges_of_their_operands() -> None:
    graph = graph_of(added)
    ranges = integer_ranges(graph)
    (sort,) = (op for op in graph.walk() if is_row_sort(op))
    assert [ranges[v] for v in sort.results] == [
        (0, EXPERTS - 1),
        (0, SAMPLES * LENGTH * CHOSEN - 1),
    ]


def test_factors_of_a_dim_are_refined() -> None:
    """Samples stay apart when one operand counts tokens and choices, another rows."""
    samples = (4, True)
    coarse, fine = (samples, (32, False)), (samples, (16, False), (2, False))
    assert merge_dim(coarse, fine) == merge_dim(fine, coarse) == fine
    assert merge_dim(((2, True), (3, False)), ((3, True), (2, False))) == ((6, True),)


FACTORED = st.lists(st.tuples(st.sampled_from((1, 2, 3)), st.booleans()), min_size=1, max_size=4)


@settings(deadline=None, max_examples=200)
@given(st.lists(FACTORED, min_size=2, max_size=3))
def test_merging_a_dim_again_and_again_settles(dims: list) -> None:
    """Labels of loops are joined until nothing changes, whatever order they come in."""
    rest = [36 * 36 * 4 // np.prod([n for n, _ in dim], dtype=int) for dim in dims]
    whole = 36 * 36 * 4
    fitting = [(*dim, (int(n), False)) for dim, n in zip(dims, rest, strict=True)]
    fitting = [dim for dim in fitting if np.prod([n for n, _ in dim]) == whole]
    carry = fitting[0] if fitting else ()
    for _ in range(40):
        before = carry
        for dim in fitting:
            carry = merge_dim(carry, dim)
        if carry == before:
            return
    assert not fitting, "no label settles"
