"""Projections that read one input as one matrix: the same values, sharded like separate ones."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.orchestrator.models import blocks, decoder, leaves
from shardwright.orchestrator.models.blocks import Sizes, TaskOptions
from shardwright.orchestrator.models.families import family_task
from shardwright.orchestrator.models.family_table import architecture_of
from shardwright.orchestrator.models.layers import How
from shardwright.sharding.partition.mesh import make_mesh
from tests.support.cells import long_in_matrix
from tests.support.road import fsdp_plan, run_and_compare, worst

SIZES = Sizes(layers=2, hidden=16, heads=4, head_dim=8, ffn=24, vocab=256, positions=8, fused=True)
OPTIONS = TaskOptions(seq_len=8)
LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "head_dim": 8,
}


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_fused_decoder_computes_what_the_separate_one_does(kv_heads: int) -> None:
    plain = architecture_of(LLAMA | {"num_key_value_heads": kv_heads})
    fused = replace(plain, fused=True)
    params = leaves.init_params(plain, jax.random.key(3))
    layers = dict(params["layers"])
    names = ("wq", "wk", "wv") if kv_heads == 4 else ("wk", "wv")
    for name, parts in ("w_qkv" if kv_heads == 4 else "w_kv", names), ("w_gate_up", _GATED):
        layers[name] = jnp.stack([layers.pop(part) for part in parts], axis=2)
    made = leaves.init_params(fused, jax.random.key(3))["layers"]
    assert {n: v.shape for n, v in made.items()} == {n: v.shape for n, v in layers.items()}
    tokens = jnp.arange(16).reshape(2, 8) * 7 % 64
    given = [
        decoder.logits(c, p, tokens, How())
        for c, p in ((plain, params), (fused, params | {"layers": layers}))
    ]
    np.testing.assert_allclose(*given, rtol=1e-5, atol=1e-6)


_GATED = ("w_gate", "w_up")


def test_fused_attention_computes_what_separate_projections_do() -> None:
    plain = replace(SIZES, fused=False)
    layer = {n: v[0] for n, v in blocks.init_layers(plain, jax.random.key(1)).items()}
    stacked = jnp.stack([layer[n] for n in ("wq", "wk", "wv")], axis=1)
    fused = {n: v for n, v in layer.items() if n not in ("wq", "wk", "wv")} | {"w_qkv": stacked}
    x = jax.random.normal(jax.random.key(2), (2, 8, 16))
    given = [blocks.attention(How(), one, x, 4, causal=True) for one in (layer, fused)]
    np.testing.assert_allclose(*given, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", long_in_matrix(["gpt", "llama"], ["llama"]))
def test_tensor_parallel_ranks_split_every_part_of_a_fused_matrix(family: str) -> None:
    task = family_task(family, SIZES, OPTIONS)
    plan = fsdp_plan(task, make_mesh({"tp": 4}), 1, name="llm-training")
    errors, _ = run_and_compare(plan.step, task)
    assert worst(errors)[1] <= 1e-5
    wide = [b for b in plan.step.buffers.values() if b.global_type.shape == (2, 16, 3, 32)]
    assert wide and all(b.local_type.shape == (2, 16, 3, 8) for b in wide)
