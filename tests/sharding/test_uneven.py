"""Sizes that the mesh does not divide: padded without changing a value, or refused with advice."""

from __future__ import annotations

import functools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.diagnostics import ShardingError
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.ir.verify import verify
from shardwright.compiler.options import DEFAULTS
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.rewriting.driver import run
from shardwright.sharding.indices.indices import IndexClasses
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.partition.shardy import answer_request
from shardwright.sharding.plan import Plan
from shardwright.sharding.prepare.padding import pad_indices
from shardwright.sharding.settings import StrategySettings
from shardwright.sharding.strategies.registry import padded_step
from tests.support.road import captured_graph, leaf_error, run_and_compare, worst
from tests.support.step_plans import build_plan
from tests.support.strategy_cells import odd_llama, random_inputs

TP4 = {"dp_shard": 2, "tp": 4}


@functools.cache
def captured(**sizes: int) -> tuple[Graph, tuple[Slot, ...], tuple[Slot, ...]]:
    graph, inputs, outputs = captured_graph(odd_llama(**sizes), 8)
    return run(graph, step_passes(DEFAULTS)), inputs, outputs


def plan(mesh: dict[str, int], settings: StrategySettings, **sizes: int) -> Plan:
    graph, inputs, outputs = captured(**sizes)
    how = {"settings": settings, "unit": answer_request}
    return build_plan(graph, inputs, outputs, make_mesh(mesh), **how)


CASES = {
    "tp": StrategySettings(name="llm-training", sequence_parallel=False, zero=0),
    "tp sp zero-1": StrategySettings(name="llm-training"),
    "fsdp tp": StrategySettings(name="fsdp"),
}


STAGES = {"pp": 2, "tp": 4}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("tp", TP4),
        ("fsdp tp", TP4),
        pytest.param("tp sp zero-1", TP4, marks=pytest.mark.matrix),
        pytest.param("tp", STAGES, marks=pytest.mark.matrix),
    ],
)
def test_padded_steps_equal_the_unsharded_ones(name: str, mesh: dict[str, int]) -> None:
    """Six heads, 258 tokens and 90 columns on four cores: loss, state and clipping."""
    made = plan(mesh, CASES[name])
    buffers = made.step.buffers
    assert buffers["params/lm_head"].global_type.shape == (48, 258)
    assert buffers["params/lm_head"].local_type.shape[1] == 65
    queries = [b for n, b in buffers.items() if n.startswith("params/layers/wq")]
    assert {b.local_type.shape[2] for b in queries} == {16}, "two of eight heads"
    errors, _ = run_and_compare(made.step, odd_llama())
    leaf, error = worst(errors)
    assert error <= 1e-5, leaf
    (note,) = [f for f in made.findings if f.code == "SW_TENSOR_PADDED"]
    assert "params/embed tensor<258x48xf32> to tensor<260x48xf32>" in note.message
    assert not [f for f in made.findings if f.severity != "note"]


@pytest.mark.matrix
def test_a_vocabulary_like_gpts_on_eight_cores() -> None:
    """257 tokens on tp = 8, as 50257: only the vocabulary grows."""
    sizes = {"heads": 8, "kv_heads": 8, "vocab": 257, "inner": 96}
    made = plan({"tp": 8}, CASES["tp"], **sizes)
    assert made.step.buffers["params/lm_head"].local_type.shape == (48, 33)
    errors, _ = run_and_compare(made.step, odd_llama(**sizes))
    assert worst(errors)[1] <= 1e-5
    grown = [n for n, b in made.step.buffers.items() if b.local_type.shape[-1:] == (33,)]
    assert "opt_state/1/0/mu/lm_head" in grown and "params/layers/wq" not in grown


def test_without_padding_weights_stay_whole_and_say_so() -> None:
    settings = StrategySettings(name="llm-training", pad_uneven=False)
    made = plan(TP4, settings, vocab=257)
    assert made.step.buffers["params/lm_head"].local_type.shape == (48, 257)
    found = [f for f in made.findings if f.code == "SW_TENSOR_UNEVEN"]
    (head,) = [f for f in found if "params/lm_head" in f.message]
    assert "split 1 of 4 ways over tp" in head.message and "multiple of 4, got 257" in head.message
    assert "pad it to 260" in head.hint
    (query,) = [f for f in found if "params/layers/wq" in f.message]
    assert "multiple of 32, got 48" in query.message and "pad it to 64" in query.hint
    assert worst(run_and_compare(made.step, odd_llama(vocab=257))[0])[1] <= 1e-5


@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 8, "kv_heads": 2, "vocab": 260, "inner": 92},  # replicated, not padded
        {"heads": 24, "kv_heads": 6, "vocab": 260, "inner": 92},  # groups fill the axis
    ],
)
def test_what_divides_with_parts_of_the_axis_is_not_padded(sizes: dict[str, int]) -> None:
    step = captured(**sizes)
    mesh = make_mesh(TP4)
    assert padded_step(*step, mesh, StrategySettings(name="llm-training"))[0] is step[0]


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ShardingError, match=r"multiple of 3 .*, got 8") as caught:
        plan({"dp_shard": 3, "tp": 4}, CASES["fsdp tp"])
    assert caught.value.code == "SW_BATCH_DIVIDE"
    assert "use 9 samples" in caught.value.diagnostic.hint


def awkward() -> Graph:
    """Columns that are folded, compared, looked up, sorted, joined, reversed and merged."""
    b = Builder()
    x, w = b.input((4, 6)), b.input((6, 10))
    y = b.op("tanh", b.dot(x, w))
    folds = [b.reduce(y, kind, (1,)) for kind in ("add", "max", "min")]
    joined = b.reverse(b.concatenate([y, b.multiply(y, y)], 1), (1,))
    merged = b.reshape(y, (40,))
    square = b.dot(y, y, ((1,), (1,)))
    stacked = b.reshape(b.dot(y, b.transpose(w, (1, 0))), (2, 2, 6))
    return b.finish(*folds, joined, merged, square, stacked, y)


def cropped(have: np.ndarray, want: np.ndarray) -> np.ndarray:
    """A result of a padded step without its padding."""
    return have[tuple(slice(n) for n in want.shape)]


@settings(max_examples=20)
@given(st.integers(11, 17), st.integers(0, 2**31))
def test_what_is_in_the_padding_reaches_no_value(size: int, seed: int) -> None:
    """The padding of the inputs is NaN; what cannot be padded is cut and joined again."""
    graph = awkward()
    indices = IndexClasses(graph)
    column = indices.family((graph.inputs[1], 1))
    grown = pad_indices(graph, {column: Fraction(size, 10)}, indices, {})
    verify(grown)
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((4, 6)), rng.standard_normal((6, 10))
    plain = [x.astype(np.float32), w.astype(np.float32)]
    padded = np.full((6, size), np.nan, np.float32)
    padded[:, :10] = plain[1]
    assert grown.inputs[1].type.shape == (6, size)
    for have, want in zip(evaluate(grown, [plain[0], padded]), evaluate(graph, plain), strict=True):
        np.testing.assert_allclose(cropped(have, want), want, rtol=1e-5, atol=1e-6)


def test_random_inputs_of_a_whole_step_survive_any_padding() -> None:
    """Every leaf of the grown state holds noise behind the user's: no value changes."""
    graph, inputs, outputs = captured()
    grown, _, kept, _ = padded_step(graph, inputs, outputs, make_mesh(TP4), CASES["tp"])
    rng = np.random.default_rng(0)
    plain = random_inputs(graph, inputs)
    noisy = []
    for array, value in zip(plain, grown.inputs, strict=True):
        noise = np.asarray(100 * rng.standard_normal(value.type.shape)).astype(array.dtype)
        noise[tuple(slice(n) for n in array.shape)] = array
        noisy.append(noise)
    with np.errstate(all="ignore"):
        results = evaluate(grown, noisy)
    for slot, have, want in zip(kept, results, evaluate(graph, plain), strict=True):
        assert leaf_error(cropped(have, want), want) <= 1e-6, slot.name
