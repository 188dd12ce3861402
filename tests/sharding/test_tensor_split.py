"""Which indices tensor parallelism splits: classes and families of dims, prices, the cheapest
cover, and how an axis is shared out where heads are fewer than cores.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.types import Graph, Value
from shardwright.sharding.indices.dims import batch_labels
from shardwright.sharding.indices.indices import IndexClasses
from shardwright.sharding.indices.tensor_parallel import broken, cover, prices
from shardwright.sharding.strategies.split import rooms, spread


def feed_forward(layers: int = 1, rows: int = 8) -> tuple[Graph, Value, list[tuple[Value, Value]]]:
    """x (rows, 6) through (6, 10) and (10, 6), some times over."""
    b = Builder()
    x = h = b.input((rows, 6))
    pairs = []
    for _ in range(layers):
        up, down = b.input((6, 10)), b.input((10, 6))
        pairs.append((up, down))
        h = b.add(h, b.dot(b.op("tanh", b.dot(h, up)), down))
    return b.finish(h), x, pairs


def attention(kv_heads: int, group: int, width: int = 8) -> tuple[Graph, Value, dict[str, Value]]:
    """Grouped queries over one sequence: q, k, v, o by projection, as a graph without masks."""
    heads, time, model = kv_heads * group, 5, 12
    b = Builder()
    x = b.input((4, time, model))
    weights = {
        "q": b.input((model, heads * width)),
        "k": b.input((model, kv_heads * width)),
        "v": b.input((model, kv_heads * width)),
        "o": b.input((heads * width, model)),
    }
    q = b.reshape(b.dot(x, weights["q"], ((2,), (0,))), (4, time, kv_heads, group, width))
    k, v = (b.reshape(b.dot(x, weights[n], ((2,), (0,))), (4, time, kv_heads, width)) for n in "kv")
    scores = b.dot(q, k, ((4,), (3,)), ((0, 2), (0, 2)))  # batch, kv head, time, group, source
    mixed = b.dot(scores, v, ((4,), (1,)), ((0, 1), (0, 2)))  # batch, kv head, time, group, width
    rows = b.reshape(b.transpose(mixed, (0, 2, 1, 3, 4)), (4, time, heads * width))
    return b.finish(b.dot(rows, weights["o"], ((2,), (0,)))), x, weights


def test_one_index_in_every_spelling_is_one_class() -> None:
    graph, _, ((up, down),) = feed_forward()
    classes = IndexClasses(graph)
    assert classes.of((up, 1)) == classes.of((down, 0))
    assert classes.of((up, 0)) == classes.of((down, 1)), "the residual joins them"
    assert classes.family((up, 0)) != classes.family((up, 1))


def test_products_know_their_parts() -> None:
    graph, _, weights = attention(kv_heads=2, group=3)
    classes = IndexClasses(graph)
    sizes = {
        name: [c[0].type.shape[c[1]] for c in classes.parts[classes.of((weights[name], dim))]]
        for name, dim in (("q", 1), ("k", 1), ("o", 0))
    }
    assert sizes == {"q": [2, 3, 8], "k": [2, 8], "o": [2, 3, 8]}
    families = {classes.family((weights[n], 1)) for n in "qkv"}
    assert families == {classes.family((weights["o"], 0))}, "they share the key-value heads"


def test_a_price_is_the_bytes_of_partial_sums() -> None:
    graph, x, ((up, down),) = feed_forward()
    classes = IndexClasses(graph)
    price = prices(graph, classes, batch_labels(graph, {x: 0}).dims)
    assert price[classes.family((up, 1))] == 8 * 6 * 4, "the second product sums over it"
    assert price[classes.family((up, 0))] == 8 * 10 * 4, "the first product sums over it"
    assert price[classes.family((down, 0))] == price[classes.family((up, 1))]


def test_what_is_sliced_is_broken() -> None:
    b = Builder()
    x, w = b.input((4, 6)), b.input((6, 9))
    y = b.dot(x, w)
    graph = b.finish(b.slice(y, (0, 0), (4, 3)), b.slice(y, (0, 3), (4, 9)))
    classes = IndexClasses(graph)
    ends = broken(graph, classes)
    assert classes.family((w, 1)) in ends and classes.family((w, 0)) not in ends


@pytest.mark.parametrize("layers", [1, 3, 40])
def test_every_weight_is_covered_once(layers: int) -> None:
    graph, x, pairs = feed_forward(layers)
    classes = IndexClasses(graph)
    price = prices(graph, classes, batch_labels(graph, {x: 0}).dims)
    weights = [w for pair in pairs for w in pair]
    allowed = {f for w in weights for _, f in classes.families(w)}
    chosen = cover(weights, classes, price, allowed)
    assert chosen == {classes.family((up, 1)) for up, _ in pairs}


@st.composite
def chains(draw: st.DrawFn) -> list[int]:
    """Widths of a chain of products."""
    return draw(st.lists(st.integers(2, 9), min_size=2, max_size=6))


@given(chains())
@settings(deadline=None, max_examples=60)
def test_the_cover_is_the_cheapest(widths: list[int]) -> None:
    """Against every subset of families, on chains of products without residuals."""
    b = Builder()
    x = h = b.input((3, widths[0]))
    weights = []
    for rows, columns in itertools.pairwise(widths):
        weights.append(b.input((rows, columns)))
        h = b.dot(h, weights[-1])
    graph = b.finish(h)
    classes = IndexClasses(graph)
    price = prices(graph, classes, batch_labels(graph, {x: 0}).dims)
    allowed = {f for w in weights for _, f in classes.families(w)}

    def fits(subset: tuple[object, ...]) -> bool:
        counts = [sum(f in subset for _, f in classes.families(w)) for w in weights]
        return all(n == 1 for n in counts)

    every = (s for n in range(len(allowed) + 1) for s in itertools.combinations(allowed, n))
    best = min(sum(price[f] for f in s) for s in every if fits(s))
    chosen = cover(weights, classes, price, allowed)
    assert fits(tuple(chosen)) and sum(price[f] for f in chosen) == best


@given(st.integers(2, 9), st.lists(st.tuples(st.integers(2, 9), st.integers(1, 9)), max_size=3))
@settings(deadline=None, max_examples=40)
def test_the_fewest_elements_stay_whole(width: int, layers: list[tuple[int, int]]) -> None:
    """Matrices with low-rank pairs beside them, against every choice that splits none twice."""
    b = Builder()
    x = h = b.input((3, width))
    weights: list[Value] = []
    for columns, rank in layers:
        rows = h.type.shape[1]
        matrix, low, high = (
            b.input(shape) for shape in ((rows, columns), (rows, rank), (rank, columns))
        )
        weights += [matrix, low, high]
        h = b.add(b.dot(h, matrix), b.dot(b.dot(h, low), high))
    graph = b.finish(h)
    classes = IndexClasses(graph)
    price = prices(graph, classes, batch_labels(graph, {x: 0}).dims)
    own = {w: {f for _, f in classes.families(w)} for w in weights}
    allowed = sorted(set().union(*own.values()), key=lambda f: (f[0].type.shape, f[1]))

    def cost(subset: frozenset[object]) -> tuple[int, int]:
        whole = sum(w.type.num_elements for w in weights if not own[w] & subset)
        return whole, sum(price[f] for f in subset)

    every = (
        frozenset(s) for n in range(len(allowed) + 1) for s in itertools.combinations(allowed, n)
    )
    best = min(cost(s) for s in every if all(len(own[w] & s) <= 1 for w in weights))
    chosen = frozenset(cover(weights, classes, price, set(allowed)))
    assert all(len(own[w] & chosen) <= 1 for w in weights)
    assert cost(chosen) == best


@pytest.mark.parametrize(
    ("kv_heads", "group", "ways", "atoms", "wq", "wk"),
    [
        (4, 2, 4, (4,), (0,), (0,)),
        (4, 2, 8, (4, 2), (0, 1), (0,)),
        (2, 4, 8, (2, 4), (0, 1), (0,)),
        (2, 3, 4, (2, 2), (0,), (0,)),
        (8, 1, 4, (4,), (0,), (0,)),
    ],
)
def test_key_value_heads_take_what_they_can_hold(
    kv_heads: int,
    group: int,
    ways: int,
    atoms: tuple[int, ...],
    wq: tuple[int, ...],
    wk: tuple[int, ...],
) -> None:
    """What key-value heads leave of the axis goes to the query heads of a group, if they divide."""
    graph, x, weights = attention(kv_heads, group)
    classes = IndexClasses(graph)
    price = prices(graph, classes, batch_labels(graph, {x: 0}).dims)
    family = classes.family((weights["q"], 1))
    assert rooms(classes, [family], ways)[family] == atoms[0]
    split = spread(classes, [family], ways, price, broken(graph, classes))
    assert split.atoms == atoms
    assert split.classes[classes.of((weights["q"], 1))] == wq
    assert split.classes[classes.of((weights["o"], 0))] == wq
    assert split.classes[classes.of((weights["k"], 1))] == wk
