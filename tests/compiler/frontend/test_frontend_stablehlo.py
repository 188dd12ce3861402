"""The importer on small modules: loops, reductions, constants, calls, hooks, and what it refuses
with which words.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from shardwright.compiler.diagnostics import ImportRuleError
from shardwright.compiler.frontend.capture import artifact_of
from shardwright.compiler.frontend.context import make_context, parse_module
from shardwright.compiler.frontend.hlo import hlo_to_stablehlo
from shardwright.compiler.frontend.importer import ImportHooks
from shardwright.compiler.frontend.rules import RULES, imports
from shardwright.compiler.frontend.rules.registry import Site
from shardwright.compiler.frontend.stablehlo import import_module, import_parsed
from shardwright.compiler.ir.ops import AllGatherAttrs
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.ir.verify import verify


def of_function(function: Callable[..., Any], *args: Any) -> Graph:
    """Import a JAX function traced on the shapes of `args`."""
    traced = jax.jit(function, keep_unused=True).trace(*args)
    return verify(import_module(artifact_of(traced)))


def check(function: Callable[..., Any], *args: np.ndarray, tolerance: float = 1e-6) -> Graph:
    """The imported function equals jax.jit of it; returns the graph."""
    graph = of_function(function, *args)
    expected = jax.tree.leaves(jax.jit(function)(*args))
    for ours, theirs in zip(evaluate(graph, args), expected, strict=True):
        want = np.asarray(theirs)
        assert ours.dtype == want.dtype
        np.testing.assert_allclose(
            ours.astype(np.float64), want.astype(np.float64), rtol=tolerance, atol=tolerance
        )
    return graph


def while_text(start: int, step: int, bound: int, direction: str, type: str = "i32") -> str:
    """A loop that adds 1 to an accumulator; the bound is outside of the loop."""
    return textwrap.dedent(f"""
        func.func public @main(%x: tensor<{type}>) -> (tensor<{type}>, tensor<{type}>) {{
          %start = stablehlo.constant dense<{start}> : tensor<{type}>
          %step = stablehlo.constant dense<{step}> : tensor<{type}>
          %bound = stablehlo.constant dense<{bound}> : tensor<{type}>
          %one = stablehlo.constant dense<1> : tensor<{type}>
          %r:2 = stablehlo.while(%i = %start, %acc = %x) : tensor<{type}>, tensor<{type}>
            cond {{
              %c = stablehlo.compare {direction}, %i, %bound
                : (tensor<{type}>, tensor<{type}>) -> tensor<i1>
              stablehlo.return %c : tensor<i1>
            }} do {{
              %scaled = stablehlo.multiply %i, %one : tensor<{type}>
              %more = stablehlo.add %acc, %scaled : tensor<{type}>
              %next = stablehlo.add %step, %i : tensor<{type}>
              stablehlo.return %next, %more : tensor<{type}>, tensor<{type}>
            }}
          return %r#0, %r#1 : tensor<{type}>, tensor<{type}>
        }}""")


def python_while(start: int, step: int, bound: int, direction: str) -> tuple[int, int, int]:
    """(trips, last counter, sum of counters) by running it."""
    test = {
        "LT": int.__lt__,
        "LE": int.__le__,
        "GT": int.__gt__,
        "GE": int.__ge__,
        "NE": int.__ne__,
        "EQ": int.__eq__,
    }[direction]
    trips, total = 0, 0
    while test(start, bound):
        total, start, trips = total + start, start + step, trips + 1
    return trips, start, total


@pytest.mark.parametrize(
    ("start", "step", "bound", "direction"),
    [
        (0, 1, 7, "LT"),
        (3, 1, 7, "LT"),
        (0, 3, 7, "LT"),
        (2, 2, 8, "LE"),
        (7, -1, 0, "GT"),
        (7, -2, -1, "GE"),
        (1, 3, 13, "NE"),
        (9, -3, 0, "NE"),
        (5, 1, 5, "EQ"),
        (4, 1, 5, "EQ"),
        (7, 1, 7, "LT"),
        (-4, 5, 100, "LE"),
    ],
)
def test_trip_counts_and_counters(start: int, step: int, bound: int, direction: str) -> None:
    graph = verify(import_module(while_text(start, step, bound, direction)))
    (loop,) = [op for op in graph.ops if op.name == "loop"]
    trips, last, total = python_while(start, step, bound, direction)
    assert loop.attrs.trip == trips
    counter, accumulated = evaluate(graph, [np.int32(10)[()].reshape(())])
    assert (int(counter), int(accumulated)) == (last, 10 + total)
    assert [int(v) for v in _counts(graph)] == list(range(trips))


def _counts(graph: Graph) -> list[np.ndarray]:
    """What the induction carry of the only loop is, per iteration."""
    (loop,) = [op for op in graph.ops if op.name == "loop"]
    env: dict[Value, np.ndarray] = {}
    for op in graph.ops:
        if op is loop:
            break
        if op.name == "constant":
            env[op.result] = op.attrs.array()
    carries = [env.get(v, np.int32(0).reshape(())) for v in loop.operands]
    seen = []
    for _ in range(loop.attrs.trip):
        seen.append(carries[loop.attrs.induction])
        carries = evaluate(loop.regions[0], carries)
    return seen


@pytest.mark.parametrize(
    ("start", "step", "bound", "direction"), [(0, -1, 7, "LT"), (0, 2, 7, "NE"), (0, 0, 1, "LT")]
)
def test_endless_loops_are_refused(start: int, step: int, bound: int, direction: str) -> None:
    with pytest.raises(ImportRuleError, match="counter that reaches its bound"):
        import_module(while_text(start, step, bound, direction))


def test_a_counter_that_wraps_is_refused() -> None:
    with pytest.raises(ImportRuleError, match="counter within"):
        import_module(while_text(0, 100, 127, "LE", "i8"))


def test_nested_scans_reverse_scans_and_fori() -> None:
    def nested(x: jax.Array) -> Any:
        def outer(carry: jax.Array, row: jax.Array) -> Any:
            total, _ = jax.lax.scan(lambda c, v: (c * 0.5 + v, None), carry, row)
            return total, total

        last, trail = jax.lax.scan(outer, jnp.float32(1), x, reverse=True)
        return last, trail, jax.lax.fori_loop(2, 6, lambda i, c: c + x[i % 3, 0] * i, last)

    graph = check(nested, np.arange(12, dtype=np.float32).reshape(3, 4))
    trips = [op.attrs.trip for op in graph.walk() if op.name == "loop"]
    assert trips == [3, 4, 4]


def test_a_bound_passed_to_a_function_is_found() -> None:
    """The loop is in a function of its own and its bound is an argument of the call."""
    text = """
        func.func public @main(%x: tensor<f32>) -> tensor<f32> {
          %n = stablehlo.constant dense<5> : tensor<i32>
          %r = call @grow(%x, %n) : (tensor<f32>, tensor<i32>) -> tensor<f32>
          %s = call @grow(%r, %n) : (tensor<f32>, tensor<i32>) -> tensor<f32>
          return %s : tensor<f32>
        }
        func.func private @grow(%x: tensor<f32>, %n: tensor<i32>) -> tensor<f32> {
          %i = stablehlo.constant dense<0> : tensor<i32>
          %r:3 = stablehlo.while(%k = %i, %limit = %n, %v = %x)
              : tensor<i32>, tensor<i32>, tensor<f32>
            cond {
              %c = stablehlo.compare GT, %limit, %k : (tensor<i32>, tensor<i32>) -> tensor<i1>
              stablehlo.return %c : tensor<i1>
            } do {
              %one = stablehlo.constant dense<1> : tensor<i32>
              %next = stablehlo.add %k, %one : tensor<i32>
              %w = stablehlo.add %v, %x : tensor<f32>
              stablehlo.return %next, %limit, %w : tensor<i32>, tensor<i32>, tensor<f32>
            }
          return %r#2 : tensor<f32>
        }"""
    graph = verify(import_module(text))
    assert [op.attrs.trip for op in graph.ops if op.name == "loop"] == [5, 5]
    (result,) = evaluate(graph, [np.float32(1).reshape(())])
    assert float(result) == 36.0  # x -> 6x, twice


def test_captured_values_become_carries_and_splats_are_repeated() -> None:
    text = """
        func.func public @main(%x: tensor<4xf32>, %w: tensor<4xf32>) -> tensor<4xf32> {
          %i = stablehlo.constant dense<0> : tensor<i32>
          %half = stablehlo.constant dense<0.5> : tensor<4xf32>
          %r:2 = stablehlo.while(%k = %i, %v = %x) : tensor<i32>, tensor<4xf32>
            cond {
              %n = stablehlo.constant dense<2> : tensor<i32>
              %c = stablehlo.compare LT, %k, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
              stablehlo.return %c : tensor<i1>
            } do {
              %one = stablehlo.constant dense<1> : tensor<i32>
              %next = stablehlo.add %k, %one : tensor<i32>
              %a = stablehlo.multiply %v, %half : tensor<4xf32>
              %b = stablehlo.add %a, %w : tensor<4xf32>
              stablehlo.return %next, %b : tensor<i32>, tensor<4xf32>
            }
          return %r#1 : tensor<4xf32>
        }"""
    graph = verify(import_module(text))
    (loop,) = [op for op in graph.ops if op.name == "loop"]
    assert len(loop.operands) == 3  # counter, v, and the captured w
    assert loop.operands[2] is graph.inputs[1]
    assert loop.regions[0].outputs[2] is loop.regions[0].inputs[2]
    x, w = np.arange(4, dtype=np.float32), np.full(4, 3, np.float32)
    (result,) = evaluate(graph, [x, w])
    np.testing.assert_array_equal(result, (x * 0.5 + w) * 0.5 + w)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, ml_dtypes.bfloat16])
def test_reductions(dtype: Any) -> None:
    x = np.random.default_rng(0).integers(-4, 5, (3, 4, 5)).astype(dtype)
    graph = check(lambda a: (a.sum(1), a.max(0), a.min((0, 2)), a.prod(2)), x)
    assert [op.attrs.kind for op in graph.ops if op.name == "reduce"] == [
        "add",
        "max",
        "min",
        "multiply",
    ]


def test_reductions_of_booleans() -> None:
    x = np.random.default_rng(0).random((4, 5)) > 0.3
    graph = check(lambda a: (a.any(0), a.all(1)), x)
    assert [op.attrs.kind for op in graph.ops if op.name == "reduce"] == ["or", "and"]


def test_an_init_that_is_not_the_identity_is_applied() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    check(lambda a: jax.lax.reduce(a, jnp.float32(10), jax.lax.add, (1,)), x)
    check(lambda a: jnp.max(a, axis=0, initial=2.5), x)
    check(lambda a: jax.lax.reduce(a, a[0, 1], jax.lax.max, (0, 1)), x)


def test_independent_reduces_are_split() -> None:
    def both(a: jax.Array, b: jax.Array) -> Any:
        def body(x: Any, y: Any) -> Any:
            return x[0] + y[0], jnp.maximum(x[1], y[1])

        return jax.lax.reduce((a, b), (jnp.float32(0), jnp.float32(-jnp.inf)), body, (1,))

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    graph = check(both, x, -x)
    assert [op.attrs.kind for op in graph.ops if op.name == "reduce"] == ["add", "max"]


def test_gather_scatter_and_slices() -> None:
    table = np.random.default_rng(0).random((7, 5)).astype(np.float32)
    ids = np.array([[0, 3, -1], [6, 6, 2]], np.int32)

    def use(t: jax.Array, i: jax.Array) -> Any:
        picked = t[i]
        summed = jnp.zeros_like(t).at[i].add(picked * 2)
        placed = t.at[jnp.array([1, 4])].set(0.5)
        along = jnp.take_along_axis(t[:6].reshape(2, 3, 5), i[..., None], axis=-1)
        return picked, summed, placed, along, jax.lax.dynamic_slice(t, (i[0, 1], 1), (2, 3))

    graph = check(use, table, ids)
    assert {op.attrs.kind for op in graph.ops if op.name == "scatter"} == {"add", "replace"}


@pytest.mark.parametrize(
    "values",
    [
        np.array([1.5, -2.5], ml_dtypes.bfloat16),
        np.array([True, False, True]),
        np.array([1, 2**32 - 1], np.uint32),
        np.array([-3, 5], np.int8),
        np.array([0.1, np.inf], np.float16),
        np.zeros((0, 3), np.float32),
        np.full((3, 2), -np.inf, np.float32),
        np.full((3,), 2**31 + 1, np.uint32),
        np.full((2,), True),
        np.full((4,), 0.1, ml_dtypes.bfloat16),
        np.array([np.inf, -np.inf, np.nan, 0.1], ml_dtypes.bfloat16),
        np.linspace(-3, 3, 300).astype(ml_dtypes.bfloat16).reshape(3, 100),
    ],
)
def test_constants_keep_their_bits(values: np.ndarray) -> None:
    graph = of_function(lambda: jnp.asarray(values))
    (result,) = evaluate(graph, [])
    assert result.dtype == values.dtype
    assert result.shape == values.shape
    assert result.tobytes() == values.tobytes()
    constants = [op for op in graph.ops if op.name == "constant"]
    if values.size and np.all(values == values.reshape(-1)[0]):
        assert all(op.attrs.is_splat for op in constants)


def test_erf_gelu_and_other_chlo_functions() -> None:
    x = np.linspace(-3, 3, 41, dtype=np.float32)
    check(lambda a: (jax.nn.gelu(a, approximate=False), jax.nn.gelu(a), jnp.square(a)), x)


def test_convert_compare_select_and_shifts() -> None:
    x = np.linspace(-3, 3, 12, dtype=np.float32)

    def use(a: jax.Array) -> Any:
        n = a.astype(jnp.int32)
        bits = jax.lax.bitcast_convert_type(a, jnp.uint32)
        return jnp.where(a < n, a, -a), (bits >> 3) ^ (bits << 2), jnp.clip(a, -1, 1), a[::-1]

    check(use, x)


def test_reduce_precision() -> None:
    x = np.linspace(-3, 3, 12, dtype=np.float32)
    graph = check(lambda a: jax.lax.reduce_precision(a, 8, 7), x)
    assert [op.name for op in graph.ops] == ["convert", "convert"]
    assert not of_function(lambda a: jax.lax.reduce_precision(a, 8, 23), x).ops


def test_preferred_element_type() -> None:
    a = np.ones((3, 4), ml_dtypes.bfloat16)
    graph = of_function(lambda x: jnp.dot(x, x.T, preferred_element_type=jnp.float32), a)
    (dot,) = [op for op in graph.ops if op.name == "dot_general"]
    assert dot.result.type.dtype.value == "f32"


def test_a_function_called_twice_is_inlined_twice() -> None:
    inner = jax.jit(lambda a: jnp.sin(a) * 2)
    x = np.linspace(0, 1, 3, dtype=np.float32)
    graph = check(lambda a: inner(inner(a)), x)
    assert [op.name for op in graph.ops].count("sine") == 2
    _all_values_are_distinct(graph)


def _all_values_are_distinct(graph: Graph) -> None:
    values = [v for op in graph.walk() for v in op.results]
    assert len(values) == len(set(values))


def refused(function: Callable[..., Any], *args: Any) -> tuple[ImportRuleError, int]:
    """The error of importing `function`, and the line it must name: the one marked HERE."""
    with pytest.raises(ImportRuleError) as caught:
        of_function(function, *args)
    lines, first = inspect.getsourcelines(function)
    (here,) = [first + i for i, line in enumerate(lines) if "# HERE" in line]
    return caught.value, here


def _solve(x: jax.Array) -> jax.Array:
    y = x[:, None] * 2
    return jax.lax.linalg.triangular_solve(y * x, y, left_side=True)  # HERE


def _product_and_sum(x: jax.Array) -> Any:
    return jax.lax.reduce(  # HERE
        (x, x), (1.0, 0.0), lambda a, b: (a[0] * b[0], a[1] + b[0]), (0,)
    )


def _top_k_of_integers(x: jax.Array) -> Any:
    return jax.lax.top_k(x.astype(jnp.int32), 2)  # HERE


def _callback(x: jax.Array) -> jax.Array:
    return jax.pure_callback(np.sin, x, x)  # HERE


def _until(x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda v: v.sum() < 9, lambda v: v * 2, x)  # HERE


def _complex(x: jax.Array) -> jax.Array:
    return jnp.abs(jax.lax.complex(x, x))  # HERE


def _scatter_apply(x: jax.Array) -> jax.Array:
    return x.at[jnp.array([0, 0])].apply(jnp.sin)  # HERE


_triangular = jax.lax.linalg.triangular_solve


def _in_a_scan(x: jax.Array) -> jax.Array:
    def body(carry: jax.Array, row: jax.Array) -> Any:
        return _triangular(carry[:, None] * carry, carry[None])[0] + row, None  # HERE

    return jax.lax.scan(body, x, jnp.ones((3, 4)))[0]


@pytest.mark.parametrize(
    ("function", "code", "words"),
    [
        (_solve, "NCC_EHCA005", "custom call"),
        (_product_and_sum, "NCC_ISPP027", "reduce requires one operand, got 2"),
        (_top_k_of_integers, "NCC_EVRF013", "top_k requires float elements, got i32"),
        (_callback, "NCC_EHCA005", "callback into Python"),
        (_until, "NCC_EVRF001", "while requires"),
        (_complex, "NCC_EVRF004", "complex<f32>"),
        (_scatter_apply, "NCC_EVRF001", "maximum, got stablehlo.sine"),
        (_in_a_scan, "NCC_EHCA005", "custom call"),
    ],
)
def test_refusals_name_code_file_line_and_way_out(function: Any, code: str, words: str) -> None:
    error, line = refused(function, np.ones(4, np.float32))
    assert error.code == code
    assert words in error.diagnostic.message
    assert error.loc is not None
    assert error.loc.file.endswith("test_frontend_stablehlo.py")
    assert error.loc.line == line
    assert error.diagnostic.hint or code == "NCC_EVRF004"


IDENTITY = "func.func @main(%x: {0}) -> {0} {{ return %x : {0} }}"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (IDENTITY.format("tensor<?xf32>"), "NCC_EMOD025"),
        (IDENTITY.format("tensor<2xf4E2M1FN>"), "NCC_ESPP004"),
        (IDENTITY.format("tensor<2xf8E4M3B11FNUZ>"), "NCC_EVRF005"),
        (IDENTITY.format("tensor<2xcomplex<f32>>"), "NCC_EVRF004"),
        (IDENTITY.format("!stablehlo.token"), "NCC_EVRF001"),
        ("this is not MLIR", "SW_STABLEHLO_PARSE"),
        (b"neither is this", "SW_STABLEHLO_PARSE"),
        ("func.func private @inner() { return }", "SW_STABLEHLO_ENTRY"),
    ],
)
def test_modules_that_are_refused(text: str | bytes, code: str) -> None:
    with pytest.raises(ImportRuleError) as caught:
        import_module(text)
    assert caught.value.code == code


def test_user_constraints_stay() -> None:
    text = """
        sdy.mesh @mesh = <["x"=2, "y"=4]>
        func.func public @main(%a: tensor<4x8xf32>) -> tensor<4x8xf32> {
          %0 = sdy.sharding_constraint %a <@mesh, [{"x"}, {"y", ?}]> : tensor<4x8xf32>
          return %0 : tensor<4x8xf32>
        }"""
    (op,) = import_module(text).ops
    assert op.name == "sharding_constraint"
    assert (op.attrs.spec, op.attrs.open_dims) == ((("x",), ("y",)), (1,))
    with pytest.raises(ImportRuleError, match="whole mesh axes"):
        import_module(text.replace('"y", ?', '"y":(1)2'))


def test_a_second_rule_for_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stablehlo\.add has two import rules"):
        imports("stablehlo.add")(lambda site: site.operands)
    assert RULES["stablehlo.add"] is not None


def test_extra_rules_and_hooks_see_every_value() -> None:
    text = """
        sdy.mesh @mesh = <["x"=2]>
        func.func public @main(%a: tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>})
            -> tensor<4xf32> {
          %0 = call @twice(%a) : (tensor<4xf32>) -> tensor<4xf32>
          %i = stablehlo.constant dense<0> : tensor<i32>
          %r:2 = stablehlo.while(%k = %i, %v = %0) : tensor<i32>, tensor<4xf32>
            attributes {sdy.sharding = #sdy.sharding_per_value<[<@mesh, []>, <@mesh, [{"x"}]>]>}
            cond {
              %n = stablehlo.constant dense<2> : tensor<i32>
              %c = stablehlo.compare LT, %k, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
              stablehlo.return %c : tensor<i1>
            } do {
              %one = stablehlo.constant dense<1> : tensor<i32>
              %next = stablehlo.add %k, %one : tensor<i32>
              %w = sdy.all_gather [{"x"}] %v out_sharding=<@mesh, [{}]> : tensor<4xf32>
              stablehlo.return %next, %w : tensor<i32>, tensor<4xf32>
            }
          return %r#1 : tensor<4xf32>
        }
        func.func private @twice(%a: tensor<4xf32>) -> tensor<4xf32> {
          %0 = stablehlo.add %a, %a : tensor<4xf32>
          return %0 : tensor<4xf32>
        }"""
    named: dict[Value, str] = {}
    blocks: list[tuple[str, int]] = []

    def on_op(op: Any, values: Any) -> None:
        named.update(dict.fromkeys(values, op.name))

    def on_block(owner: Any, values: Any) -> None:
        blocks.append((owner.name, len(values)))
        named.update((value, f"argument of {owner.name}") for value in values if value not in named)

    def all_gather(site: Site) -> Any:
        return site.emit("all_gather", site.operands, AllGatherAttrs(0, ("x",))).results

    with make_context():
        graph = import_parsed(
            parse_module(text),
            extra_rules={"sdy.all_gather": all_gather},
            hooks=ImportHooks(on_op=on_op, on_block=on_block),
        )
    verify(graph)
    assert blocks == [("func.func", 1), ("func.func", 1), ("stablehlo.while", 2)]
    assert all(value in named for op in graph.walk() for value in op.results)
    (loop,) = [op for op in graph.ops if op.name == "loop"]
    assert [named[v] for v in loop.regions[0].inputs] == ["argument of stablehlo.while"] * 2
    assert "sdy.all_gather" in named.values()


def test_hlo_text_and_proto() -> None:
    text = """HloModule step.1
%sum (x.1: f32[], y.2: f32[]) -> f32[] {
  %x.1 = f32[] parameter(0)
  %y.2 = f32[] parameter(1)
  ROOT %add.3 = f32[] add(f32[] %x.1, f32[] %y.2)
}
ENTRY %main (p0: f32[3,4], p1: f32[4,2]) -> (f32[3,2], f32[]) {
  %p0 = f32[3,4]{1,0} parameter(0)
  %p1 = f32[4,2]{1,0} parameter(1)
  %dot.3 = f32[3,2]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0},
    metadata={op_name="mm" source_file="train.py" source_line=12}
  %zero = f32[] constant(0)
  %total = f32[] reduce(%dot.3, %zero), dimensions={0,1}, to_apply=%sum
  ROOT %out = (f32[3,2]{1,0}, f32[]) tuple(%dot.3, %total)
}"""
    from jaxlib import _hlo

    proto = _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    a, b = np.arange(12, dtype=np.float32).reshape(3, 4), np.ones((4, 2), np.float32)
    for source in (text, text.encode(), proto):
        graph = verify(import_module(hlo_to_stablehlo(source)))
        product, total = evaluate(graph, [a, b])
        np.testing.assert_array_equal(product, a @ b)
        assert float(total) == (a @ b).sum()
        (dot,) = [op for op in graph.ops if op.name == "dot_general"]
        assert (dot.loc.file, dot.loc.line) == ("train.py", 12)


def test_hlo_custom_calls_are_refused_by_name() -> None:
    text = """HloModule m
ENTRY %main (p0: f32[3]) -> f32[3] {
  %p0 = f32[3]{0} parameter(0)
  ROOT %cc = f32[3]{0} custom-call(%p0), custom_call_target="AwsNeuronDropoutMaskV1",
    metadata={op_name="gelu" source_file="net.py" source_line=7}
}"""
    with pytest.raises(ImportRuleError) as caught:
        import_module(hlo_to_stablehlo(text))
    assert caught.value.code == "NCC_EHCA005"
    assert "AwsNeuronDropoutMaskV1" in str(caught.value)
    assert str(caught.value.loc) == "net.py:7"


def test_hlo_that_is_damaged_is_refused() -> None:
    for source in ("HloModule broken {", b"\x00\x01 not a proto"):
        with pytest.raises(ImportRuleError) as caught:
            import_module(hlo_to_stablehlo(source))
        assert caught.value.code == "SW_HLO_PARSE"
