"""A Hugging Face `config.json`: what is read, what is refused, and what rotary scaling does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.ir.printer import to_stablehlo
from shardwright.orchestrator.config.model import compute_type, resolve_task
from shardwright.orchestrator.config.model_file import read_config
from shardwright.orchestrator.models import config_task, rope
from shardwright.orchestrator.models.family_table import architecture_of
from tests.support.plans import job_of
from tests.support.road import captured_graph
from tests.support.small_job import SIZES

LLAMA_31: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "positive integer hidden_size, got null"),
        ({"hidden_size": "64"}, 'positive integer hidden_size, got "64"'),
        ({"vocab_size": True}, "positive integer vocab_size, got true"),
        ({"num_key_value_heads": 0}, "positive integer num_key_value_heads, got 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads to divide"),
        ({"rms_norm_eps": "small"}, 'positive number rms_norm_eps, got "small"'),
        ({"rope_scaling": {"factor": 8.0, "type": "dynamic"}}, 'of rope_scaling, got "dynamic"'),
        ({"rope_scaling": {"rope_type": "linear"}}, "requires factor of rope_scaling"),
        ({"rope_scaling": 8}, "rope_scaling as an object, got 8"),
        ({"rope_scaling": LLAMA_31 | {"low_freq_factor": 4.0}}, "low_freq_factor below"),
        ({"hidden_act": "gelu"}, 'hidden_act = "silu" or "swish", got "gelu"'),
        ({"model_type": "mamba"}, 'model_type = "llama" or "mistral" or .*, got "mamba"'),
        ({"sliding_window": 4}, "got sliding_window"),
    ],
)
def test_configs_it_cannot_build_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        config_task.train_task(SIZES | change, seq_len=8)


def test_every_missing_size_is_named_with_the_key_it_may_be() -> None:
    given = {k: v for k, v in SIZES.items() if k not in ("hidden_size", "vocab_size")}
    with pytest.raises(UsageError, match="hidden_size, vocab_size, got nothing, nothing") as caught:
        architecture_of(given | {"hiden_size": 64})
    assert caught.value.diagnostic.hint == "is hiden_size meant to be hidden_size?"


def test_windows_that_no_sequence_is_longer_than_are_full_attention() -> None:
    graphs = {}
    for window in (None, 8, 4):
        config = SIZES | {"model_type": "mistral", "sliding_window": window}
        graph, _, _ = captured_graph(config_task.train_task(config, seq_len=8), 2)
        graphs[window] = to_stablehlo(graph)
    assert graphs[None] == graphs[8] != graphs[4]


def turned(config: dict[str, Any], length: int) -> rope.Tables:
    """The tables of a config's rotary positions."""
    part = architecture_of(config).layers[0].attention.rope
    assert part is not None
    return rope.tables(part, length)


def published_rates(theta: float, head_dim: int, scaling: dict[str, Any]) -> np.ndarray:
    """Llama 3.1's rotary frequencies one by one, as meta-llama's `apply_scaling` has them."""
    rates = []
    for i in range(0, head_dim, 2):
        rate = theta ** (-i / head_dim)
        wavelength = 2 * math.pi / rate
        longest, shortest = (
            scaling["original_max_position_embeddings"] / scaling[f"{name}_freq_factor"]
            for name in ("low", "high")
        )
        if wavelength > longest:
            rate /= scaling["factor"]
        elif wavelength >= shortest:
            smooth = scaling["original_max_position_embeddings"] / wavelength
            smooth = (smooth - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            rate = (1 - smooth) * rate / scaling["factor"] + smooth * rate
        rates.append(rate)
    return np.array(rates)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rotary_scaling_of_llama_31(key: str) -> None:
    change: dict[str, Any] = {"head_dim": 128, "rope_theta": 500000.0, key: LLAMA_31}
    if key == "rope_parameters":  # as transformers 5 writes it
        change = {"head_dim": 128, key: LLAMA_31 | {"rope_theta": 500000.0}}
    cos, sin = turned(SIZES | change, 2)
    expected = published_rates(500000.0, 128, LLAMA_31)
    np.testing.assert_allclose(jnp.arctan2(sin[1], cos[1]), expected, rtol=1e-5)
    plain, _ = turned(SIZES | {"head_dim": 128}, 2)
    assert not np.allclose(cos[1], plain[1])


def test_linear_scaling_stretches_positions() -> None:
    scaled, _ = turned(SIZES | {"rope_scaling": {"type": "linear", "factor": 2}}, 5)
    plain, _ = turned(SIZES, 5)
    np.testing.assert_allclose(scaled[4], plain[2], rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "computed"),
    [
        ({}, "float32"),
        ({"torch_dtype": "float32"}, "float32"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "bfloat16"),
    ],
)
def test_a_step_computes_in_the_type_of_its_config(
    tmp_path: Path, given: dict[str, str], computed: str
) -> None:
    job = job_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SIZES | given))
    assert compute_type(job) == computed
    assert compute_type(job_of(tmp_path, sets=("model.dtype=float32",))) == "float32"


def test_errors_name_the_file_and_models_are_called_after_it(tmp_path: Path) -> None:
    folder = tmp_path / "Llama-3.1-8B"
    folder.mkdir()
    for path, name in ((folder / "config.json", "Llama-3.1-8B"), (folder / "odd.json", "odd")):
        path.write_text(json.dumps(SIZES))
        place = str(path.relative_to(tmp_path))
        job = job_of(tmp_path, sets=(f"model.config={place}", "model.seq_len=8"))
        assert resolve_task(job).name == name
        path.write_text(json.dumps(SIZES | {"model_type": "mamba"}))
        with pytest.raises(UsageError) as caught:
            resolve_task(job)
        assert str(caught.value.loc) == str(path)


def test_files_of_any_editor_are_read(tmp_path: Path) -> None:
    """Some write a byte order mark in front."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SIZES), encoding="utf-8-sig")
    assert read_config(path) == SIZES


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 8192}, 8192),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "default"}}, 4096),
    ],
)
def test_positions_of_pretraining_are_the_usual_length(
    changes: dict[str, Any], length: int
) -> None:
    assert config_task.train_task(SIZES | changes, seq_len=0).tokens_per_sample == length


WIDE = {"max_position_embeddings": 32768, "sliding_window": 2048}


@pytest.mark.parametrize(
    ("changes", "example"),
    [
        ({"max_position_embeddings": 8193}, 4096),
        ({**WIDE, "model_type": "mistral"}, 2048),
        ({"max_position_embeddings": 131072, "rope_scaling": LLAMA_31}, 8192),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 2}}, 2048),
    ],
)
def test_positions_that_inference_may_reach_are_no_length(
    changes: dict[str, Any], example: int
) -> None:
    """The length is asked for, with one that is taken."""
    with pytest.raises(UsageError, match=r"SW_SEQ_LEN.*requires --seq-len") as caught:
        config_task.train_task(SIZES | changes, seq_len=0)
    assert f"positions{' by rope' * ('rope_scaling' in changes)}" in str(caught.value)
    assert caught.value.diagnostic.hint.endswith(f"plan --seq-len {example}")
    assert config_task.train_task(SIZES | changes, seq_len=example).tokens_per_sample == example
