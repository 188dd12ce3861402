"""Every key of a config is read, without effect, or refused by its name."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.models import config_task, leaves
from shardwright.orchestrator.models.architecture import Stack, stacked
from shardwright.orchestrator.models.config_fields import NO_EFFECT
from shardwright.orchestrator.models.family_rows import FAMILIES
from shardwright.orchestrator.models.family_table import architecture_of, read
from tests.support.tiny_configs import tiny


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_no_part_reads_is_refused_by_name(family: str) -> None:
    with pytest.raises(UsageError, match=r"SW_MODEL_CONFIG.*got alibi, layer_norms") as caught:
        architecture_of(tiny(family, alibi=True, layer_norms=2))
    assert "leave out" in caught.value.diagnostic.hint


def test_a_slip_of_the_hand_is_named() -> None:
    given = tiny("qwen3", rope_thetta=1e6)
    del given["rope_theta"]
    with pytest.raises(UsageError) as caught:
        architecture_of(given)
    assert "is rope_thetta meant to be rope_theta?" in caught.value.diagnostic.hint


def test_a_key_that_is_there_is_no_slip() -> None:
    """Neither what is spelled right nor what is no size is said to be meant for another."""
    given = tiny("gemma2", sliding_window=8, sliding_windows=8)
    with pytest.raises(UsageError) as caught:
        architecture_of(given)
    assert "meant to be sliding_window?" not in caught.value.diagnostic.hint
    without = {key: value for key, value in tiny("llama").items() if key != "hidden_size"}
    with pytest.raises(UsageError) as caught:
        architecture_of(without | {"hidden_act": "silu"})
    assert "hidden_act" not in caught.value.diagnostic.hint


@pytest.mark.parametrize(
    ("family", "key", "read", "value"),
    [
        ("gemma2", "sliding_window_size", "sliding_window", 8),
        ("gpt_oss", "experts_per_token", "num_experts_per_tok", 2),
    ],
)
def test_what_is_said_twice_is_said_alike(family: str, key: str, read: str, value: int) -> None:
    """As published configs of these families do."""
    given = tiny(family, **{read: value})
    assert architecture_of(given | {key: value}) == architecture_of(given)
    with pytest.raises(UsageError, match=f"requires {key} and {read} to be equal"):
        architecture_of(given | {key: value + 1})


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_without_effect_change_nothing(family: str) -> None:
    plain = architecture_of(tiny(family))
    known = {*NO_EFFECT, *FAMILIES[family].without_effect}
    others = dict.fromkeys(known - tiny(family).keys(), "anything")
    others.pop("original_max_position_embeddings", None)  # which scaling of positions reads
    assert architecture_of(tiny(family) | others) == plain


def test_no_key_that_is_read_is_said_to_have_no_effect() -> None:
    for family, row in FAMILIES.items():
        _, fields = read(tiny(family))
        assert not {*NO_EFFECT, *row.without_effect} & fields.read.keys(), family


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gpt2", {"attn_pdrop": 0.2}, "equal embd_pdrop, attn_pdrop, resid_pdrop, got 0, 0.2"),
        ("gpt2", {"n_embd": None}, "positive integer n_embd, got null"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types of 4 layers"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok of at most 4, got 5"),
        ("mixtral", {"output_router_logits": True}, "output_router_logits = false, got true"),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "short_factor of rope_scaling with 2"),
        ("qwen3_moe", {"mlp_only_layers": ["a"]}, "mlp_only_layers as a list of layers"),
        ("gpt_oss", {"rope_scaling": {"rope_type": "dynamic"}}, 'got "dynamic"'),
        ("gpt_oss", {"rope_scaling": {"rope_type": "yarn", "base": 1}}, "yarn has, got base"),
        ("granite", {"attention_dropout": 1}, "from 0 to less than 1, got 1"),
        ("llama", {"mlp_bias": "yes"}, 'mlp_bias = false or true, got "yes"'),
        ("deepseek_v3", {"n_group": 3}, "n_group that divides 8 experts.*got 3 and 2"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads of 4.*got 2"),
        ("deepseek_v3", {"topk_method": "greedy"}, 'topk_method = "noaux_tc", got "greedy"'),
        ("gemma3", {"audio_config": {}}, "got audio_config"),
        ("gemma3", {"text_config": None}, "text_config as an object, got null"),
        ("gemma3", {"text_config": {"model_type": "gemma2"}}, 'model_type = "gemma3_text"'),
        ("bert", {"is_decoder": True}, "is_decoder = false, got true"),
        ("bert", {"position_embedding_type": "relative_key"}, 'got "relative_key"'),
        ("t5", {"feed_forward_proj": "gated-swish"}, 'or "gated-gelu".*got "gated-swish"'),
        ("t5", {"is_encoder_decoder": False}, "is_encoder_decoder = true, got false"),
        ("vit", {"patch_size": 5}, "image_size as a multiple of patch_size 5, got 12"),
    ],
)
def test_what_is_not_built_is_refused(family: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        architecture_of(tiny(family) | changes)
    assert caught.value.diagnostic.code == "SW_MODEL_CONFIG"


def test_layers_are_written_out_as_seldom_as_possible() -> None:
    a, b = architecture_of(tiny("gemma2")).layers[:2]
    assert a != b
    assert stacked((a,) * 5) == Stack((), (a,), 5, ())
    assert stacked((a, b) * 3) == Stack((), (a, b), 3, ())
    assert stacked((b, *(a,) * 4)) == Stack((b,), (a,), 4, ())
    assert stacked((a, a, b, a, a, b, a)) == Stack((), (a, a, b), 2, (a,))


def test_attention_alone_is_dropped_where_only_that_is_said() -> None:
    """As Granite 3 is published: its logits change with the mask, its embeddings do not."""
    task = config_task.train_task(tiny("granite", attention_dropout=0.5), seq_len=8)
    assert task.state_names == ("params", "opt_state", "rng")
    model = architecture_of(tiny("granite", attention_dropout=0.5))
    assert model.dropout == 0.5 and not model.drops_states
    assert architecture_of(tiny("gpt_neox")).drops_states


@pytest.mark.parametrize("family", FAMILIES)
def test_fresh_norms_scale_by_one(family: str) -> None:
    model = architecture_of(tiny(family))
    params = leaves.init_params(model, jax.random.key(0))
    expected = 0.0 if model.norm.kind == "rms1" else 1.0
    name = "final_norm" if model.final_norm else "embed_norm"
    np.testing.assert_array_equal(params[name], np.full(model.hidden, expected))
    untrained = sum(
        leaf.size
        for path, leaf in jax.tree.leaves_with_path(params)
        if path[-1].key == "router_shift"
    )
    arrays = jax.tree.leaves(params)
    assert sum(leaf.size for leaf in arrays) - untrained == leaves.count_params(model)
