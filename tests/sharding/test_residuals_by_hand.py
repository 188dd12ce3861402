"""What backward gets from forward and what it does again: bytes of small values, added up here."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.ops import AllGatherAttrs
from shardwright.compiler.ir.types import Op, Value, tensor_type
from shardwright.sharding.cut.residuals import (
    _Chooser,
    _derivable,
    choose_residuals,
)

DEAR = ("convolution", "dot_general", "loop", "reduce_window", "scatter", "select_and_scatter")
COLLECTIVES = ("all_reduce", "all_to_all", "collective_permute", "reduce_scatter")
MOVES = (
    "broadcast_in_dim",
    "concatenate",
    "constant",
    "dynamic_slice",
    "iota",
    "optimization_barrier",
    "pad",
    "reshape",
    "reverse",
    "slice",
    "transpose",
)


def value(elements: int) -> Value:
    """So many fp32, of 4 bytes each."""
    return Value(tensor_type((elements,), DType.F32))


def chooser(*ops: Op, on_batch: set[Value], **more: object) -> _Chooser:
    fields: dict[str, object] = {"derivable": set(), "regather": True, "needed": set()} | more
    producers = {result: op for op in ops for result in op.results}
    return _Chooser(on_batch=on_batch, producers=producers, **fields)


@pytest.mark.parametrize("name", [*DEAR, *COLLECTIVES])
def test_what_is_dear_is_done_once_whatever_it_depends_on(name: str) -> None:
    """Even what stores a thousand times what it reads."""
    small, large = value(1), value(1000)
    op = Op(name, (small,), (large,))
    assert not chooser(op, on_batch=set()).recompute(op)
    assert not chooser(op, on_batch={small, large}, needed={large}).recompute(op)


@pytest.mark.parametrize("name", [*MOVES, "tanh", "reduce", "gather", "sort"])
def test_what_depends_on_weights_alone_is_done_again(name: str) -> None:
    for regather in (True, False):
        op = Op(name, (value(4),), (value(4),))
        assert chooser(op, on_batch=set(), regather=regather).recompute(op)
    gather = Op("all_gather", (value(4),), (value(8),), AllGatherAttrs(0, ("dp_shard",), 2))
    for regather in (True, False):
        found = chooser(gather, on_batch=set(), regather=regather).recompute(gather)
        assert found is regather


@pytest.mark.parametrize("name", [*MOVES, "tanh", "add"])
def test_what_is_cheap_is_done_again_where_that_stores_less(name: str) -> None:
    """16 bytes read for 20 or 16 of the result; what nobody needs of it saves nothing."""
    for made, again in ((5, True), (4, False), (3, False)):
        read, result = value(4), value(made)
        op = Op(name, (read,), (result,))
        assert chooser(op, on_batch={read, result}, needed={result}).recompute(op) is again
        assert not chooser(op, on_batch={read, result}).recompute(op)


@pytest.mark.parametrize("name", ["reduce", "gather", "sort", "all_gather"])
def test_what_is_neither_cheap_nor_dear_is_stored_where_the_batch_is_in_it(name: str) -> None:
    read, result = value(1), value(100)
    op = Op(name, (read,), (result,))
    assert not chooser(op, on_batch={read, result}, needed={result}).recompute(op)


def test_of_several_results_those_that_are_needed_count() -> None:
    """12 + 12 bytes of 20 that are read are worth it, 12 are not; one result that depends on the
    batch is enough to ask."""
    read, results = value(5), [value(3) for _ in range(3)]
    op = Op("optimization_barrier", (read,), tuple(results))
    on_batch = {read, *results}
    assert chooser(op, on_batch=on_batch, needed=set(results[:2])).recompute(op)
    assert not chooser(op, on_batch=on_batch, needed=set(results[:1])).recompute(op)
    some = {read, results[0]}
    assert not chooser(op, on_batch=some, needed=set(results[:1])).recompute(op)
    assert chooser(op, on_batch={read}, needed=set(results[:1])).recompute(op)


def test_bytes_to_have_a_value() -> None:
    """None of what is needed anyway, follows from weights or from the batch by cheap ops; its own
    where nothing makes it or what does is not cheap; else what it follows from, if that is less."""
    weight, seen, needed, batch = value(1), value(2), value(3), value(4)
    dear, small, large = value(5), value(6), value(50)
    ops = [
        Op("reduce", (batch,), (dear,)),
        Op("negate", (large,), (small,)),
        Op("add", (dear, dear, weight), (large,)),
    ]
    made = chooser(
        *ops,
        on_batch={seen, needed, batch, dear, small, large},
        derivable={seen},
        needed={needed},
    )
    found = [made._bytes_to_have(v, 6) for v in (weight, seen, needed, batch, dear)]
    assert found == [0, 0, 0, 16, 20]
    # large is dear's 20 bytes, once, instead of 200; small the same instead of 24, if two steps
    # back are looked at.
    assert [made._bytes_to_have(large, depth) for depth in (0, 1)] == [200, 20]
    assert [made._bytes_to_have(small, depth) for depth in (0, 1, 2)] == [24, 24, 20]
    both = Op("concatenate", (batch, dear, batch, weight), (value(1),))
    assert made._operand_bytes(both, 6) == 16 + 20


def test_six_cheap_ops_are_looked_back_over() -> None:
    """A chain from one dear byte: with six links it is done again, of seven the last is stored."""
    for links, again in ((5, True), (6, True), (7, False)):
        values = [value(1), *(value(10) for _ in range(links)), value(10)]
        ops = [Op("reduce", (value(1),), (values[0],))]
        ops += [Op("negate", (a,), (b,)) for a, b in pairwise(values)]
        found = chooser(*ops, on_batch=set(values), needed={values[-1]})
        assert found.recompute(ops[-1]) is again, links


def test_what_follows_from_the_batch_by_cheap_ops_alone() -> None:
    """All operands of it must; weights need not."""
    b = Builder()
    x, w = b.input((4,)), b.input((4,))
    mask = b.op("negate", x)
    total = b.broadcast(b.reduce(x, "add", (0,)), (4,))
    masked, scaled, both = b.multiply(mask, w), b.multiply(mask, mask), b.add(mask, total)
    weights = b.reduce(w, "add", (0,))
    spread = b.broadcast(weights, (4,))
    graph = b.finish(masked, scaled, both, spread)
    on_batch = {x, mask, masked, scaled, both, total, graph.ops[1].result}
    found = _derivable(graph, on_batch)
    assert {x, w, mask, masked, scaled, spread} <= found
    assert not {both, total, weights} & found


def test_what_backward_reads_and_does_in_program_order() -> None:
    """Of two products forward makes two values, 16 and 40 bytes, and backward is their difference
    with what follows from the second: both are stored in order, the rest is done again."""
    b = Builder()
    x, w, v = b.input((4, 2)), b.input((2, 1)), b.input((2, 10))
    first, second = b.dot(x, w), b.dot(b.reduce(x, "add", (0,)), v, ((0,), (0,)))
    wide = b.broadcast(first, (4, 10), (0, 1))
    forward = set(b.ops)
    seen = b.add(wide, b.broadcast(second, (4, 10), (1,)))
    target = b.multiply(seen, seen)
    graph = b.finish(target)
    on_batch = {result for op in graph.ops for result in op.results} | {x}
    ops, stored = choose_residuals(graph, forward, [target], on_batch, True)
    assert stored == [first, second]
    made = {op.result: op for op in graph.ops}
    assert {op.result for op in ops} == {wide, seen, target, made[seen].operands[1]}
    assert ops[-1].result is target and ops[-2].result is seen
    assert choose_residuals(graph, forward, [], on_batch, True) == ([], [])
    held = choose_residuals(graph, forward, [first], on_batch, True)
    assert held == ([], [first])
