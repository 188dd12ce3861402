"""Models of transformers at tiny width, as their users train them: the class with its loss, what a
batch has, and what of its configuration is no size of `SIZES` (tests/corpus/torch_programs.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shardwright.compiler.frontend.pytorch.exporting import export
from shardwright.compiler.frontend.pytorch.interpreter import (
    Values,
    checked,
    evaluate,
)
from shardwright.compiler.frontend.pytorch.training import Training, loss_module
from shardwright.compiler.frontend.pytorch.types import array_of
from tests.corpus.torch_programs import (
    IMAGE,
    PIXELS,
    RNG,
    TEXT,
    TIME,
    VOCAB,
    Inputs,
    N,
    Source,
    floats,
    shrunk,
    text_and_image,
    tokens,
)

LABELS = 2
"""Classes of images, words and sounds."""


def _classes(inputs: Inputs, *shape: int, count: int = LABELS) -> Inputs:
    """Inputs with classes as labels."""
    return lambda: {**inputs(), "labels": RNG.integers(0, count, shape)}


def _heard() -> dict[str, np.ndarray]:
    return {**floats(input_features=(N, 16, 40)), "labels": RNG.integers(5, VOCAB, (N, TIME))}


def _spoken() -> dict[str, np.ndarray]:
    return {**floats(input_values=(N, 1600)), "labels": RNG.integers(1, VOCAB, (N, 2))}


def _masked() -> dict[str, np.ndarray]:
    """Text of two lengths, padded."""
    mask = np.ones((N, TIME), np.int64)
    mask[1, TIME - 3 :] = 0
    ids = RNG.integers(5, VOCAB, (N, TIME))
    return {"input_ids": ids, "attention_mask": mask, "labels": np.where(mask, ids, -100)}


def _pairs() -> dict[str, np.ndarray]:
    return {**text_and_image(), "return_loss": True}


LM: Inputs = _classes(TEXT, N, TIME, count=VOCAB)
IMAGES: Inputs = _classes(IMAGE, N)
_heard_raw: Inputs = partial(floats, input_values=(N, 1600))
_CONVOLVED = {
    "conv_dim": [16, 16],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 8],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 2,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
}
_LARGE: Inputs = partial(floats, pixel_values=(4, 3, 96, 96))
_STAGES = {"depths": [1, 1], "hidden_sizes": [8, 16], "num_stages": 2}

MODELS: dict[str, Source] = {
    "gpt2": Source("GPT2LMHeadModel", LM, {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "llama": Source("LlamaForCausalLM", _masked),
    "qwen2": Source("Qwen2ForCausalLM", LM),
    "qwen3": Source("Qwen3ForCausalLM", LM),
    "mistral": Source("MistralForCausalLM", LM),
    "mixtral": Source("MixtralForCausalLM", LM, {"num_local_experts": 4}),
    "qwen3_moe": Source("Qwen3MoeForCausalLM", LM),
    "gemma2": Source("Gemma2ForCausalLM", LM),
    "gemma3_text": Source("Gemma3ForCausalLM", LM),
    "phi": Source("PhiForCausalLM", LM),
    "phi3": Source("Phi3ForCausalLM", LM),
    "falcon": Source("FalconForCausalLM", LM),
    "bloom": Source("BloomForCausalLM", LM, {"n_layer": 2, "n_head": 4}),
    "opt": Source("OPTForCausalLM", LM, {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt_neox": Source("GPTNeoXForCausalLM", LM),
    "gpt_neo": Source(
        "GPTNeoForCausalLM",
        LM,
        {
            "attention_types": [[["global", "local"], 1]],
            "attention_layers": ["global", "local"],
            "window_size": 4,
        },
    ),
    "gptj": Source(
        "GPTJForCausalLM", LM, {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}
    ),
    "t5": Source(
        "T5ForConditionalGeneration", LM, {"d_kv": 8, "d_ff": 48, "decoder_start_token_id": 0}
    ),
    "bart": Source("BartForConditionalGeneration", LM),
    "bert": Source("BertForMaskedLM", _masked),
    "roberta": Source("RobertaForMaskedLM", LM),
    "distilbert": Source(
        "DistilBertForMaskedLM", LM, {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
    ),
    "albert": Source("AlbertForMaskedLM", LM),
    "electra": Source("ElectraForMaskedLM", LM),
    "deberta": Source("DebertaForMaskedLM", LM, {"relative_attention": True}),
    "deberta-v2": Source("DebertaV2ForMaskedLM", LM, {"relative_attention": True}),
    "vit": Source("ViTForImageClassification", IMAGES),
    "deit": Source("DeiTForImageClassification", IMAGES),
    "beit": Source("BeitForImageClassification", IMAGES, {"use_relative_position_bias": True}),
    "dinov2": Source("Dinov2ForImageClassification", IMAGES),
    "swin": Source(
        "SwinForImageClassification",
        IMAGES,
        {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2, "patch_size": 4},
    ),
    "convnext": Source("ConvNextForImageClassification", IMAGES, _STAGES),
    "resnet": Source("ResNetForImageClassification", IMAGES, {**_STAGES, "embedding_size": 8}),
    "mobilenet_v2": Source("MobileNetV2ForImageClassification", _classes(_LARGE, 4)),
    "segformer": Source(
        "SegformerForSemanticSegmentation",
        _classes(IMAGE, N, PIXELS, PIXELS),
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "hidden_sizes": [8, 16],
            "num_attention_heads": [1, 2],
            "sr_ratios": [2, 1],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
        },
    ),
    "clip": Source("CLIPModel", _pairs),
    "siglip": Source("SiglipModel", _pairs, {"text_config": {"projection_size": 32}}),
    "whisper": Source(
        "WhisperForConditionalGeneration",
        _heard,
        {
            "num_mel_bins": 16,
            "max_source_positions": 20,
            "max_target_positions": 16,
            "decoder_start_token_id": 1,
        },
    ),
    "wav2vec2": Source(
        "Wav2Vec2ForCTC",
        _spoken,
        _CONVOLVED,
    ),
    "hubert": Source("HubertForSequenceClassification", _classes(_heard_raw, N), _CONVOLVED),
    "mamba": Source("MambaForCausalLM", LM, {"state_size": 4, "time_step_rank": 4}),
    "xlnet": Source(
        "XLNetLMHeadModel", LM, {"d_inner": 48, "d_head": 8, "n_layer": 2, "n_head": 4}
    ),
    "perceiver": Source(
        "PerceiverForMaskedLM",
        _classes(partial(tokens, input_ids=(N, 64)), N, 64, count=VOCAB),
        {"num_latents": 4, "d_latents": 16, "num_self_attends_per_block": 1},
    ),
}
"""By model type; listed before any of them was run (the first commit of this file; hubert came
later, for the parts of wav2vec2 that are not its loss)."""
REFUSED = {
    "wav2vec2": "its CTC loss takes the labels that are no padding, a number that depends on values"
}
IN_EVALUATION = {
    "mobilenet_v2": "its statistics of tiny batches amplify rounding: the gradients of torch itself"
    " in fp32 are one percent from those in fp64",
}


def model(name: str) -> tuple[Any, dict[str, Any]]:
    """(a module in training mode without dropout, its batch) of a model type."""
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    source = MODELS[name]
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        class_ = getattr(transformers, source.name)
        kind = CONFIG_MAPPING[name]
        sizes = {**_undropped(shrunk(kind().to_dict(), source.sizes)), "use_cache": False}
        module = class_(kind(**sizes)).train(name not in IN_EVALUATION)
    batch = {
        key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for key, value in source.inputs().items()
    }
    return module, batch


@dataclass(frozen=True, slots=True)
class Held:
    """How far a model is from torch: its loss by itself, its gradients by the largest element of
    all of them; and how much was compared."""

    loss: float
    gradients: float
    parameters: int
    nodes: int


def held(name: str) -> Held:
    """A model's loss and gradients by our road against torch's. Raises UsageError where it is
    refused."""
    import jax
    import torch

    module, batch = model(name)
    whole = loss_module(Training(module=module, batch=batch))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = checked(export(whole, (batch,), {}, name))
    first = {id(tensor): name for name, tensor in whole.named_parameters()}
    names = {n: first[id(t)] for n, t in whole.named_parameters(remove_duplicate=False)}
    buffers = {n: array_of(t) for n, t in whole.named_buffers(remove_duplicate=False)}
    leaves = [array_of(leaf) for leaf in batch.values() if isinstance(leaf, torch.Tensor)]
    given = {n: array_of(p) for n, p in whole.named_parameters()}

    def loss_of(params: Any) -> Any:
        tied = {name: params[own] for name, own in names.items()}
        return evaluate(exported, Values(tied, buffers, leaves, jax.random.key(0)))[0][0]

    loss, gradients = jax.jit(jax.value_and_grad(loss_of))(given)
    wanted = whole(batch)
    wanted.backward()
    own = {
        n: np.zeros(p.shape) if p.grad is None else array_of(p.grad)
        for n, p in whole.named_parameters()
        if p.requires_grad
    }
    largest = max(float(np.max(np.abs(g), initial=0)) for g in own.values())
    apart = max(float(np.max(np.abs(own[n] - gradients[n]), initial=0)) for n in own)
    assert np.isfinite(largest) and largest > 0, "torch has a gradient"
    of_loss = abs(float(loss) / float(wanted) - 1)
    return Held(of_loss, apart / largest, len(own), len(exported.graph.graph.nodes))


def _undropped(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without dropout, in its parts too."""
    return {
        key: _undropped(value)
        if key.endswith("_config") and isinstance(value, dict)
        else type(value)(0)
        if "drop" in key and isinstance(value, int | float)
        else value
        for key, value in config.items()
    }
