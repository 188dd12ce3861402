"""Single walks of the compiler over ladders: every value is asked once, in the right order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shardwright.compiler.attention.recogniser import find_attention
from shardwright.compiler.codegen.domain import Domain
from shardwright.compiler.codegen.normalise import normalise
from shardwright.compiler.codegen.rows.bounds import reference
from shardwright.compiler.codegen.rows.interval_analysis import exact
from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.rules.trip_count import known_scalar
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.passes.remat import rematerialise
from shardwright.compiler.support.walks import answered, reached
from tests.compiler.codegen.kernel_harness import I32, PRED, U32, Maker
from tests.support.ladders import check_grows, unary

START = Affine()


def attention(b: Builder, x: Value) -> tuple[Value, Value, Value]:
    """Scores of rows against each other, their exponentials, and the mixed rows."""
    scores = b.dot(x, b.transpose(x, (1, 0)))
    p = b.op("exponential", scores)
    return scores, p, b.dot(p, x)


def test_what_is_reached_holds_its_start_and_ends_in_circles() -> None:
    after = {1: (2, 3), 2: (4,), 3: (4, 1), 4: (), 5: (1,)}
    assert reached((1,), after.__getitem__) == {1, 2, 3, 4}
    assert reached((4, 5), after.__getitem__) == {1, 2, 3, 4, 5}


def test_everything_is_asked_once_in_the_order_of_a_recursion() -> None:
    asked: list[int] = []

    def answer(n: int) -> int:
        asked.append(n)
        return n and sum(found[m] for m in reads(n))

    def reads(n: int) -> tuple[int, ...]:
        return (n - 1, n - 2, n - 1) if n > 1 else ()

    found: dict[int, int] = {1: 1}
    answered(3000, found, reads, answer)
    assert asked == [0, *range(2, 3001)]
    assert found[5] == 2 * found[4] + found[3]


def repeated(rungs: int) -> Graph:
    """Scores that are read again far away; their rows have a ladder of readers."""
    b = Builder()
    x = b.input((64, 4))
    last = rows = b.op("tanh", x)
    for _ in range(rungs):
        last = unary(b, last)
    scores, p, mixed = attention(b, rows)
    down = b.broadcast(b.reduce(mixed, "add", (1,)), scores.type.shape, (0,))
    again = b.dot(b.multiply(b.multiply(p, scores), down), rows)
    return b.finish(again, last)


def test_who_reads_a_leaf_far_away_is_found_in_one_walk() -> None:
    check_grows(lambda n: partial(rematerialise, repeated(n)))


def rows_in_a_component(rungs: int) -> Graph:
    """Probabilities times what a ladder makes of a row that is broadcast along the keys."""
    b = Builder()
    x = b.input((16, 4))
    scores, p, _ = attention(b, x)
    total = b.reduce(p, "add", (1,))
    row = b.broadcast(total, scores.type.shape, (0,))
    for _ in range(rungs):
        row = unary(b, row)
    return b.finish(b.dot(b.multiply(p, row), x))


def test_rows_and_probabilities_of_attention_are_told_in_one_walk() -> None:
    check_grows(lambda n: partial(find_attention, rows_in_a_component(n)))


def test_a_number_is_known_in_one_walk() -> None:
    def made(rungs: int) -> Callable[[], object]:
        b = Builder()
        x = b.constant(1, DType.I32)
        for _ in range(rungs):
            x = b.op("subtract", b.add(x, x), x)
        scalars = {v: op for op in b.ops for v in op.results}
        return partial(known_scalar, scalars, x)

    check_grows(made)


def test_a_reducer_that_is_no_argmax_is_refused_soon() -> None:
    """What it is made of is looked at as deep as an argmax is."""

    def made(rungs: int) -> Callable[[], object]:
        return partial(refused, reducer(rungs))

    def refused(text: str) -> None:
        try:
            import_module(text)
        except ValueError:
            return
        raise AssertionError("a reducer without a meaning was read")

    check_grows(made, 30)


def reducer(rungs: int) -> str:
    """A module that reduces two operands by a ladder of their elements."""
    kinds = "(tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>"
    body = "\n".join(f"%{i + 1} = stablehlo.select %p, %{i}, %{i} : {kinds}" for i in range(rungs))
    scalars, arrays = "tensor<f32>, tensor<i32>", "tensor<8xf32>, tensor<8xi32>"
    return f"""
func.func @main(%x: tensor<8xf32>, %y: tensor<8xi32>) -> ({scalars}) {{
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %none = stablehlo.constant dense<0> : tensor<i32>
  %r:2 = "stablehlo.reduce"(%x, %y, %zero, %none) ({{
  ^bb0(%a: tensor<f32>, %i: tensor<i32>, %b: tensor<f32>, %j: tensor<i32>):
    %p = stablehlo.compare GT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %0 = stablehlo.add %a, %b : tensor<f32>
    {body}
    stablehlo.return %{rungs}, %i : {scalars}
  }}) {{dimensions = array<i64: 0>}} : ({arrays}, {scalars}) -> ({scalars})
  return %r#0, %r#1 : {scalars}
}}"""


# Kernels: values by number.


def domain_of(m: Maker, last: int) -> Domain:
    m.store(last, m.nodes[last].iter_dims)
    return normalise(m.program())


def test_counts_of_generators_and_masks_are_told_in_one_walk() -> None:
    """`normalise` turns sums of counts into one, and comparisons of positions into masks."""

    def generator(rungs: int) -> Callable[[], object]:
        m = Maker((8, 8))
        n = m.node("iota", iter_dims=(0,), dtype=U32, atom=0, start=START, step=1)
        for _ in range(rungs):
            n = m.node("add", n, m.node("multiply", n, m.const(3, U32)))
        bits = m.node("random_bits", n, m.const(7, U32), dtype=U32)
        return partial(domain_of, m, bits)

    def mask(rungs: int) -> Callable[[], object]:
        m = Maker((8, 8))
        i, j = (
            m.node("iota", iter_dims=(a,), dtype=I32, atom=a, start=START, step=1) for a in (0, 1)
        )
        for _ in range(rungs):
            i = m.node("subtract", m.node("add", i, i), i)
        keep = m.node("compare", i, j, dtype=PRED, direction="GE")
        return partial(domain_of, m, m.node("select", keep, m.load((0, 1)), m.const(0.0)))

    check_grows(generator)
    check_grows(mask)


def test_what_a_column_refers_to_is_told_in_one_walk() -> None:
    def made(rungs: int) -> Callable[[], object]:
        m = Maker((8, 8))
        top = m.reduce(m.load((0, 1)), (1,), "max")
        n = top
        for _ in range(rungs):
            n = m.node("maximum", n, m.node("convert", n, dtype=DType.F32))
        domain = domain_of(m, n)
        found = next(i for i, v in enumerate(domain.values) if v.op == "reduce")
        last = domain.values[domain.roots[0]].inputs[0]
        return partial(reference, domain, last, {found})

    check_grows(made)


def test_a_predicate_over_all_points_is_made_in_one_walk() -> None:
    def made(rungs: int) -> Callable[[], object]:
        m = Maker((8, 8))
        i, j = (
            m.node("iota", iter_dims=(a,), dtype=I32, atom=a, start=START, step=1) for a in (0, 1)
        )
        holds = m.node("compare", m.node("multiply", i, i), j, dtype=PRED, direction="GE")
        for _ in range(rungs):
            holds = m.node("and", m.node("not", holds), m.node("or", holds, holds))
        domain = domain_of(m, holds)
        last = domain.values[domain.roots[0]].inputs[0]
        return partial(exact, domain, last, {0: (0, 8), 1: (0, 8)}, (0, 1))

    check_grows(made)
