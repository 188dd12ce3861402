"""Random numbers of JAX on the simulated core: the same bits, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.diagnostics import ImportRuleError
from shardwright.compiler.driver import compile_unit
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.printer import to_stablehlo
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.lower.function import Signature
from shardwright.compiler.machine.target import load_target, logical
from shardwright.compiler.options import DEFAULTS
from shardwright.compiler.outline.unit import Unit
from shardwright.compiler.timing.evaluate import function_segments
from tests.support import xla
from tests.support.compiled import graph_of, run_levels

KEY = np.array([0, 7], np.uint32)
SHAPE = (5, 37)
R = jax.random
WORDS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "split": lambda k: R.split(k, 3),
    "fold_in": lambda k: R.fold_in(k, 5),
    "bits": lambda k: R.bits(k, SHAPE),
    "bits_8": lambda k: R.bits(k, (5, 6), jnp.uint8),
    "bits_16": lambda k: R.bits(k, (7,), jnp.uint16),
    "uniform": lambda k: R.uniform(k, SHAPE),
    "uniform_bf16": lambda k: R.uniform(k, (5, 6), jnp.bfloat16),
    "bernoulli": lambda k: R.bernoulli(k, 0.3, SHAPE),
    "randint": lambda k: R.randint(k, SHAPE, -3, 1000),
    "rademacher": lambda k: R.rademacher(k, (9,)),
    "choice": lambda k: R.choice(k, 10, (5,)),
    "dropout": lambda k: jnp.where(R.bernoulli(k, 0.9, (4, 8)), 1 / 0.9, 0.0),
}
NUMBERS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "normal": lambda k: R.normal(k, SHAPE),
    "truncated_normal": lambda k: R.truncated_normal(k, -2, 2, SHAPE),
    "gumbel": lambda k: R.gumbel(k, SHAPE),
    "exponential": lambda k: R.exponential(k, (9,)),
    "laplace": lambda k: R.laplace(k, (9,)),
    "cauchy": lambda k: R.cauchy(k, (9,)),
}


@pytest.mark.parametrize("name", WORDS)
def test_bits_are_those_of_jax(name: str) -> None:
    want = np.asarray(jax.jit(WORDS[name])(KEY))
    for (have,) in run_levels(graph_of(WORDS[name], KEY), [KEY]):
        assert have.dtype == want.dtype
        np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("name", NUMBERS)
def test_distributions_round_like_jax(name: str) -> None:
    want = np.asarray(jax.jit(NUMBERS[name])(KEY))
    for (have,) in run_levels(graph_of(NUMBERS[name], KEY), [KEY]):
        np.testing.assert_allclose(have, want, rtol=4e-6, atol=1e-6)


def test_a_constant_key_needs_no_input() -> None:
    def fn() -> jax.Array:
        return R.bits(R.wrap_key_data(jnp.array([3, 4], jnp.uint32), impl="threefry2x32"), SHAPE)

    want = np.asarray(jax.jit(fn)())
    for (have,) in run_levels(graph_of(fn), []):
        np.testing.assert_array_equal(have, want)


GENERATOR = """
module @m {{
  func.func public @main(%s: tensor<{1}xui64>) -> (tensor<{1}xui64>, tensor<{2}>) {{
    %a, %b = stablehlo.rng_bit_generator %s, algorithm = {0}
      : (tensor<{1}xui64>) -> (tensor<{1}xui64>, tensor<{2}>)
    return %a, %b : tensor<{1}xui64>, tensor<{2}>
  }}
}}"""
WIDE_SEED = np.array([0x0123456789ABCDEF, 0xFFFFFFFE], np.uint64)
SEED = np.array([77, 3], np.uint64)


@pytest.mark.parametrize("dtype", ["ui8", "ui16", "ui32", "ui64"])
@pytest.mark.parametrize("shape", ["6x", "5x3x", "3x4x", "3x5x7x", "7x5x3x", "1x3x", ""])
def test_generator_gives_the_bits_of_xla(dtype: str, shape: str) -> None:
    text = GENERATOR.format("THREE_FRY", 2, shape + dtype)
    graph = import_module(text)
    for seed in (SEED, WIDE_SEED):
        for have, want in zip(evaluate(graph, [seed]), xla.run(text, [seed]), strict=True):
            assert have.dtype == want.dtype
            np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("result", ["5x3xui32", "3x4xui8"])
def test_generator_on_the_core_honours_seeds_of_32_bits(result: str) -> None:
    text = GENERATOR.format("THREE_FRY", 2, result)
    wanted = xla.run(text, [SEED])
    for found in run_levels(import_module(text), [SEED]):
        for have, want in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("result", ["5x3xui32", "3x4xui8", "300x70xui16"])
def test_the_machine_generator_is_the_same_on_all_levels_and_for_xla(result: str) -> None:
    graph = import_module(GENERATOR.format("DEFAULT", 2, result))
    wanted = evaluate(graph, [SEED])
    assert not any(np.array_equal(wanted[1], other) for other in _neighbours(graph))
    for found in (*run_levels(graph, [SEED]), xla.run(to_stablehlo(graph), [SEED])):
        for have, want in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(have, want)


def _neighbours(graph: Graph) -> list[np.ndarray]:
    """Bits of seeds of one bit more, in every word."""
    seeds = [SEED + np.array(step, np.uint64) for step in ((1, 0), (0, 1 << 20))]
    return [evaluate(graph, [seed])[1] for seed in seeds]


def test_the_next_state_gives_other_bits() -> None:
    graph = import_module(GENERATOR.format("DEFAULT", 2, "1000xui32"))
    state, first = evaluate(graph, [SEED])
    both = np.concatenate([first, evaluate(graph, [state])[1]])
    assert len(np.unique(both)) == 2000
    share = np.unpackbits(both.view(np.uint8)).mean()
    assert abs(share - 0.5) < 4 * 0.5 / 64000**0.5


def test_the_machine_generator_costs_one_vector_instruction() -> None:
    """Not the hundred of a cipher, and not on GpSimd: v2 has the generator on Vector alone."""
    target = logical(load_target("trn1.32xlarge"), 1)
    busy: dict[str, dict[str, int]] = {}
    for algorithm in ("DEFAULT", "THREE_FRY"):
        text = GENERATOR.format(algorithm, 2, "128x4096xui32")
        graph = import_module(text)
        unit = Unit("bits", Graph(graph.inputs, graph.ops, graph.outputs[1:]), Signature())
        made = compile_unit(unit, target.name, DEFAULTS)
        busy[algorithm] = {}
        for segment in function_segments(made, target):
            for engine, ps in segment.busy_ps.items():
                busy[algorithm][engine] = busy[algorithm].get(engine, 0) + ps
    words_ps = 4096 / target.core.clock_hz["vector"] * 1e12
    assert words_ps <= busy["DEFAULT"]["vector"] < 1.2 * words_ps
    assert busy["THREE_FRY"]["gpsimd"] > 10 * busy["DEFAULT"]["gpsimd"]


def test_a_longer_state_keeps_its_tail() -> None:
    graph = import_module(GENERATOR.format("DEFAULT", 3, "4xui32"))
    state, bits = evaluate(graph, [np.array([77, 3, 9], np.uint64)])
    np.testing.assert_array_equal(state, [77, 7, 9])
    (_, shorter) = evaluate(import_module(GENERATOR.format("DEFAULT", 2, "4xui32")), [SEED])
    np.testing.assert_array_equal(bits, shorter)


def test_keys_of_words_stay_whole_on_the_core() -> None:
    def fn(key: jax.Array) -> jax.Array:
        return R.bits(R.wrap_key_data(key, impl="rbg"), SHAPE)

    key = np.array([1, 2, 3, 4], np.uint32)
    graph = graph_of(fn, key)
    (want,) = evaluate(graph, [key])
    (other,) = evaluate(graph, [key + np.array([0, 1, 0, 0], np.uint32)])
    assert (want != other).mean() > 0.9  # the high word of the seed counts
    for (have,) in run_levels(graph, [key]):
        np.testing.assert_array_equal(have, want)


def test_other_algorithms_are_refused() -> None:
    with pytest.raises(ImportRuleError) as caught:
        import_module(GENERATOR.format("PHILOX", 2, "4xui32"))
    assert caught.value.code == "NCC_EVRF006"


RNG = """
func.func @main(%a: tensor<f32>, %b: tensor<f32>) -> (tensor<40x50xf32>, tensor<40x50xf32>) {{
  %s = stablehlo.constant dense<[40, 50]> : tensor<2xi64>
  %x = stablehlo.rng %a, %b, %s, distribution = {0}
    : (tensor<f32>, tensor<f32>, tensor<2xi64>) -> tensor<40x50xf32>
  %y = stablehlo.rng %a, %b, %s, distribution = {0}
    : (tensor<f32>, tensor<f32>, tensor<2xi64>) -> tensor<40x50xf32>
  return %x, %y : tensor<40x50xf32>, tensor<40x50xf32>
}}"""


@pytest.mark.parametrize(
    ("distribution", "mean", "deviation"), [("UNIFORM", 3.0, 4 / 12**0.5), ("NORMAL", 1.0, 5.0)]
)
def test_rng_has_the_moments_it_is_asked_for(
    distribution: str, mean: float, deviation: float
) -> None:
    arguments = [np.float32(1), np.float32(5)]
    graph = import_module(RNG.format(distribution))
    first, second = evaluate(graph, arguments)
    for sample in (first, second):
        assert abs(sample.mean() - mean) < 4 * deviation / 2000**0.5
        assert abs(sample.std() / deviation - 1) < 0.06
    assert (first != second).mean() > 0.99
    if distribution == "UNIFORM":
        assert first.min() >= 1 and first.max() < 5
    for found in run_levels(graph, arguments):
        for have, want in zip(found, (first, second), strict=True):
            np.testing.assert_allclose(have, want, rtol=4e-6, atol=1e-5)
