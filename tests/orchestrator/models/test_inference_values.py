"""Prefill and decode of every family: what compiled programs give on simulated cores is what the
full forward pass of plain JAX gives on the same tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.reference import batch_leaves, initial_state, task_batches
from shardwright.compiler.frontend.task import Mode
from shardwright.orchestrator.models import decoder, generation, leaves
from shardwright.orchestrator.models.architecture import Architecture
from shardwright.orchestrator.models.family_rows import FAMILIES
from shardwright.orchestrator.models.family_table import architecture_of
from shardwright.orchestrator.models.generation import Serving
from shardwright.orchestrator.models.layers import EXACT, How, Params
from shardwright.sharding.settings import StrategySettings
from shardwright.sim_cluster.values.run_values import ValueRun
from tests.support.cells import long_in_matrix
from tests.support.small_job import build_on, bundle_of
from tests.support.tiny_configs import of_bytes, tiny

BOUND = 1e-5
STEPS = 3
CONTEXT = 20  # above the positions that frequencies of phi3 and gpt_oss are stretched from
SEQUENCES = 4
MESHES: dict[str, dict[str, int]] = {
    "one core": {"tp": 1},
    "tp": {"tp": 2},
    "dp": {"dp_replicate": 2},
    "both": {"dp_shard": 2, "tp": 4},
}
TP8 = {"tp of 8": {"tp": 8}}
ENCODERS = ("bert", "t5", "vit")
CELLS = [(f, mesh) for f in FAMILIES if f not in ENCODERS for mesh in MESHES]
QUICK = [("mistral", "one core"), ("llama", "tp")]
MATRIX = [("qwen2", "both")]
REST = [cell for cell in CELLS if cell not in (*QUICK, *MATRIX)]


EVEN, UNEVEN = 256, 257  # tokens; the second is padded to 260 on tp = 4, to 264 on tp = 8
UNEVEN_CELLS = [(f, mesh) for f in ("gpt2", "qwen2") for mesh in ("both", "tp of 8")]


def model_of(family: str, vocab: int = EVEN) -> Architecture:
    return architecture_of(of_bytes(family, vocab)[0])


@cache
def full_logits(family: str, length: int, vocab: int = EVEN) -> object:
    """The forward pass of training, jitted, on sequences of a length."""
    model = model_of(family, vocab)
    return jax.jit(lambda params, tokens: decoder.logits(model, params, tokens, How(EXACT)))


def apart(given: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(given - wanted) / np.linalg.norm(wanted))


def run_of(task: object, mesh: str, folder: Path) -> ValueRun:
    """The compiled step on the cores of a mesh, with its first state."""
    axes = (MESHES | TP8)[mesh]
    ways = axes.get("dp_replicate", 1) * axes.get("dp_shard", 1)
    settings = StrategySettings(name="fsdp" if "dp_shard" in axes else "generic")
    road = build_on(
        task, axes, num_microbatches=1, micro_batch=SEQUENCES // ways, settings=settings
    )
    bundle = bundle_of(road, folder)
    run = ValueRun(bundle.programs, bundle.manifest)
    run.load(initial_state(task, 0))
    return run


def params_of(model: Architecture) -> Params:
    return jax.jit(lambda key: leaves.init_params(model, key))(jax.random.key(0))


@pytest.mark.parametrize("mode", [Mode.PREFILL, Mode.DECODE])
@pytest.mark.parametrize("family", ENCODERS)
def test_what_has_an_encoder_has_no_cache(family: str, mode: Mode) -> None:
    serving = Serving(mode=mode, sequences=SEQUENCES, context=CONTEXT, name=family)
    with pytest.raises(UsageError, match=f"got {family}, which has an encoder") as error:
        generation.serving_task(architecture_of(tiny(family)), serving)
    assert error.value.code == "SW_MODE"


@pytest.mark.parametrize(("family", "mesh"), long_in_matrix(CELLS, MATRIX, REST))
def test_decoded_tokens_are_those_of_the_full_forward_pass(
    family: str, mesh: str, tmp_path: Path
) -> None:
    """Several steps behind a prefill: greedy tokens are equal, and logits within the bound."""
    decodes_as_the_full_pass(family, EVEN, mesh, tmp_path)


@pytest.mark.parametrize(
    ("family", "mesh"), long_in_matrix(UNEVEN_CELLS, rest=UNEVEN_CELLS[1:], long=())
)
def test_a_vocabulary_that_tp_does_not_divide_is_padded_and_split(
    family: str, mesh: str, tmp_path: Path
) -> None:
    """Logits are those of the tokens there are, and none of the padding is ever the best."""
    run = decodes_as_the_full_pass(family, UNEVEN, mesh, tmp_path / "decode")
    cores = 4 if mesh == "both" else 8
    share = -(-UNEVEN // cores)
    buffers = run.manifest.buffers
    assert share in buffers["params/embed"].local_shape
    (logits,) = [b for b in buffers.values() if b.leaf == "metrics/logits"]
    assert logits.local_shape[-1] == share and logits.global_shape[-1] == UNEVEN
    prefills_as_the_full_pass(family, UNEVEN, mesh, tmp_path / "prefill")


def decodes_as_the_full_pass(family: str, vocab: int, mesh: str, folder: Path) -> ValueRun:
    """Hold a decode step of three tokens to the training model; the run."""
    model = model_of(family, vocab)
    serving = Serving(mode=Mode.DECODE, sequences=SEQUENCES, context=CONTEXT)
    task = generation.serving_task(model, serving)
    run = run_of(task, mesh, folder)
    sequence = [np.asarray(generation.prompts(model, serving, jax.random.key(0)))]
    start, made = sequence[0].shape[1], []
    for _ in range(STEPS):
        sequence.append(run.gather(["cache/token"])["cache/token"][:, None])
        made.append(run.step({})["metrics/logits"])
    tokens = np.concatenate(sequence, axis=1)
    wanted = np.asarray(full_logits(family, tokens.shape[1], vocab)(params_of(model), tokens))
    assert tokens.shape == (SEQUENCES, start + STEPS) and len(made) == STEPS
    for number, logits in enumerate(made):
        assert apart(logits, wanted[:, start + number]) <= BOUND, number
    best = wanted[:, start - 1 :].argmax(axis=-1)
    np.testing.assert_array_equal(tokens[:, start:], best[:, :STEPS])
    held = run.gather(["cache/token", "cache/position"])
    np.testing.assert_array_equal(held["cache/token"], best[:, STEPS])
    assert held["cache/position"] == start + STEPS
    return run


@pytest.mark.parametrize(("family", "mesh"), long_in_matrix(CELLS, MATRIX, REST))
def test_a_prefill_is_the_full_forward_pass(family: str, mesh: str, tmp_path: Path) -> None:
    """The logits of the last positions, and the cache that a decode step goes on with."""
    prefills_as_the_full_pass(family, EVEN, mesh, tmp_path)


def prefills_as_the_full_pass(family: str, vocab: int, mesh: str, folder: Path) -> None:
    """Hold a prefill to the training model."""
    model = model_of(family, vocab)
    serving = Serving(mode=Mode.PREFILL, sequences=SEQUENCES, context=CONTEXT)
    task = generation.serving_task(model, serving)
    run = run_of(task, mesh, folder)
    batch = next(task_batches(task, 0, SEQUENCES))
    logits = run.step(batch_leaves(batch))["metrics/logits"]
    params, tokens = params_of(model), batch["tokens"]
    wanted = np.asarray(full_logits(family, CONTEXT, vocab)(params, tokens))[:, -1]
    assert apart(logits, wanted) <= BOUND
    held, _ = jax.jit(lambda p, t: generation.prefill(model, CONTEXT, p, t, How(EXACT)))(
        params, tokens
    )
    kept = dict(batch_leaves({"cache": held}))
    names = [name.removeprefix("batch/") for name in kept]
    found = run.gather(names)
    assert names
    for name in names:
        want = kept[f"batch/{name}"]
        if want.dtype == np.int32:
            np.testing.assert_array_equal(found[name], want)
        else:
            assert apart(found[name], want) <= BOUND, name
