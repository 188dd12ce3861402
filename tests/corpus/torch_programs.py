"""Programs of `programs.toml` that PyTorch has: modules of transformers and torchvision at tiny
width as functions of JAX, and what torch itself computes of them.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np

from shardwright.compiler.frontend.pytorch.exporting import export
from shardwright.compiler.frontend.pytorch.interpreter import Values, checked, evaluate
from shardwright.compiler.frontend.pytorch.types import array_of

N, TIME, VOCAB, PIXELS = 2, 8, 61, 32
RNG = np.random.default_rng(17)
Inputs = Callable[[], dict[str, np.ndarray]]


@dataclass(frozen=True, slots=True)
class Source:
    """A module by its library: a model type and a class of transformers, or a function of
    torchvision; `sizes` beside those of `SIZES`, parts of a configuration by its name.
    """

    name: str
    inputs: Inputs
    sizes: Mapping[str, Any] = field(default_factory=dict)


SIZES = {
    "vocab_size": VOCAB,
    "input_vocab_size": VOCAB,
    "output_vocab_size": VOCAB,
    "hidden_size": 32,
    "d_model": 32,
    "embedding_size": 16,
    "intermediate_size": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_num_experts": 4,
    "sliding_window": 4,
    "image_size": PIXELS,
    "patch_size": 8,
    "projection_dim": 16,
    "project_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""What a part of a configuration is set to where it has such a key."""


def tokens(**names: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Numbers of tokens that are none of the special ones."""
    return {name: RNG.integers(5, VOCAB, shape) for name, shape in names.items()}


def floats(**names: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: RNG.normal(size=shape).astype(np.float32) for name, shape in names.items()}


HEARD = {"num_mel_bins": 16, "max_source_positions": 20}
TEXT: Inputs = partial(tokens, input_ids=(N, TIME))
IMAGE: Inputs = partial(floats, pixel_values=(N, 3, PIXELS, PIXELS))


def text_and_image() -> dict[str, np.ndarray]:
    return {**TEXT(), **IMAGE()}


def image_in_text(token: int, count: int, **more: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Text with `count` places for features of an image, sound, ... in it."""
    ids = RNG.integers(5, VOCAB, (N, count + TIME))
    ids[:, 2 : 2 + count] = token
    return {"input_ids": ids, **floats(**more)}


def sound() -> dict[str, np.ndarray]:
    return {**floats(input_features=(N, 16, 40)), "input_features_mask": np.ones((N, 40), int)}


def series() -> dict[str, np.ndarray]:
    """Inputs of a forecast: the past with its lags, features of time, and what to forecast."""
    past, ahead = 20, 6
    return {
        **floats(
            past_values=(N, past),
            past_time_features=(N, past, 2),
            future_values=(N, ahead),
            future_time_features=(N, ahead, 2),
        ),
        "past_observed_mask": np.ones((N, past), np.float32),
    }


TRANSFORMERS: dict[str, Source] = {
    "afmoe": Source("AfmoeForCausalLM", TEXT),
    "aimv2": Source("Aimv2Model", text_and_image),
    "aimv2_vision_model": Source("Aimv2VisionModel", IMAGE),
    "albert": Source("AlbertForMaskedLM", TEXT),
    "align": Source(
        "AlignModel",
        text_and_image,
        {
            "projection_dim": 32,
            "vision_config": {
                "kernel_sizes": [3, 3, 5],
                "in_channels": [32, 16, 24],
                "out_channels": [16, 24, 32],
                "strides": [1, 2, 2],
                "num_block_repeats": [1, 1, 2],
                "expand_ratios": [1, 2, 2],
                "hidden_dim": 32,
                "width_coefficient": 1.0,
                "depth_coefficient": 1.0,
            },
        },
    ),
    "altclip": Source("AltCLIPModel", text_and_image),
    "apertus": Source("ApertusForCausalLM", TEXT),
    "arcee": Source("ArceeForCausalLM", TEXT),
    "aria": Source(
        "AriaForConditionalGeneration",
        partial(image_in_text, 3, 4, pixel_values=(N, 3, PIXELS, PIXELS)),
        {"image_token_index": 3, "projector_patch_to_query_dict": {16: 4}},
    ),
    "aria_text": Source("AriaTextForCausalLM", TEXT),
    "audio-spectrogram-transformer": Source(
        "ASTForAudioClassification",
        partial(floats, input_values=(N, 40, 16)),
        {"max_length": 40, "num_mel_bins": 16},
    ),
    "audioflamingo3": Source(
        "AudioFlamingo3ForConditionalGeneration",
        lambda: {**image_in_text(3, 10), **sound()},
        {"audio_config": HEARD, "audio_token_id": 3},
    ),
    "audioflamingo3_encoder": Source("AudioFlamingo3Encoder", sound, HEARD),
    "autoformer": Source(
        "AutoformerModel",
        series,
        {
            "prediction_length": 6,
            "context_length": 16,
            "lags_sequence": [1, 2, 4],
            "num_time_features": 2,
            "label_length": 4,
            "moving_average": 5,
        },
    ),
    "aya_vision": Source(
        "AyaVisionForConditionalGeneration",
        partial(image_in_text, 3, 4, pixel_values=(N, 3, PIXELS, PIXELS)),
        {"image_token_index": 3},
    ),
    "bamba": Source(
        "BambaForCausalLM",
        TEXT,
        {
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 4,
        },
    ),
    "bark": Source("BarkSemanticModel", TEXT),
    "bart": Source("BartForConditionalGeneration", TEXT),
    "beit": Source("BeitForImageClassification", IMAGE, {"use_relative_position_bias": True}),
    "bert": Source("BertForMaskedLM", TEXT),
}
TORCHVISION = {
    "tv_resnet18": "resnet18",
    "tv_mobilenet_v3_small": "mobilenet_v3_small",
    "tv_densenet121": "densenet121",
    "tv_vit_b_16": "vit_b_16",
    "tv_swin_t": "swin_t",
    "tv_efficientnet_b0": "efficientnet_b0",
    "tv_convnext_tiny": "convnext_tiny",
    "tv_squeezenet1_1": "squeezenet1_1",
}
DERIVED = {"layer_types", "stage_names", "out_features", "out_indices", "feature_size"}


def shrunk(given: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of transformers with tiny sizes, those of its parts too; without what is
    made of its sizes."""
    small = {
        key: shrunk(value, sizes.get(key, {})) if key.endswith("_config") else SIZES.get(key, value)
        for key, value in given.items()
        if key not in DERIVED and value is not None
    }
    parts = {key for key in small if key.endswith("_config")}
    return small | {key: value for key, value in sizes.items() if key not in parts}


def transformer(name: str) -> Any:
    """A module of transformers."""
    os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"  # which reads values
    with contextlib.suppress(ImportError):  # transformers imports it
        torchvision()
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    source = TRANSFORMERS[name]
    model = getattr(transformers, source.name)
    kind = CONFIG_MAPPING[name]
    kind = model.config_class if not issubclass(kind, model.config_class) else kind
    config = kind(**shrunk(kind().to_dict(), source.sizes))
    config._attn_implementation = "eager"
    config._experts_implementation = "batched_mm"
    module = model(config)
    for parameter in module.parameters():
        if parameter.ndim > 1 and not parameter.any():  # routers: scores that tie have no order
            torch.nn.init.normal_(parameter, std=0.1)
    return module, source.inputs()


@cache
def torchvision() -> Any:
    """torchvision. Its compiled operators need the torch they were built with; the two that it
    names at import, and that no model here has, are declared where they are missing."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

    return torchvision, library  # whose end would take the declarations back


def vision(name: str) -> Any:
    """A module of torchvision."""
    sizes = {"image_size": PIXELS} if "vit" in name else {}
    module = torchvision()[0].models.get_model(TORCHVISION[name], num_classes=10, **sizes)
    return module, floats(x=(N, 3, PIXELS, PIXELS))


def tensors(result: Any) -> Iterator[Any]:
    """The float tensors of what a module returns."""
    import torch

    if isinstance(result, torch.Tensor):
        if result.is_floating_point():
            yield result
        return
    for part in result.values() if hasattr(result, "values") else result:
        if isinstance(part, torch.Tensor | tuple | list):
            yield from tensors(part)


@dataclass(frozen=True, slots=True)
class TorchProgram:
    """`function(params, rest, inputs)` gives (loss, outputs) and the gradient by `params`; `wanted`
    are the leaves that torch itself makes, in that order."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    wanted: list[np.ndarray]


def program(name: str) -> TorchProgram:
    """One of `TRANSFORMERS` or `TORCHVISION`: the loss is a mean of all outputs under fixed
    weights, since a mean of squares behind a norm has no gradient. An output whose size only data
    know is no result of the function: the loss has it.
    """
    import jax
    import torch

    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, inputs = (vision if name in TORCHVISION else transformer)(name)

    of_data: set[int] = set()

    class Forward(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, **inputs: torch.Tensor) -> Any:
            outputs = list(tensors(self.module(**inputs)))
            flat = torch.cat([out.reshape(-1) for out in outputs])
            places = torch.arange(flat.numel(), dtype=flat.dtype)
            loss = (flat * torch.cos(places)).mean()
            sizes = enumerate(out.shape for out in outputs)
            of_data.update(n for n, shape in sizes if any(not isinstance(m, int) for m in shape))
            return loss, *(out for n, out in enumerate(outputs) if n not in of_data)

    wrapped = Forward().eval()
    given = {key: torch.from_numpy(value) for key, value in inputs.items()}
    exported = checked(export(wrapped, (), given, name))
    loss, *outputs = wrapped(**given)
    loss.backward()
    every = dict(wrapped.named_parameters(remove_duplicate=False))
    first = {id(tensor): key for key, tensor in reversed(every.items())}
    own = {key: first[id(tensor)] for key, tensor in every.items()}
    trained = {key: every[key] for key in dict.fromkeys(own.values()) if every[key].requires_grad}
    rest = {k: array_of(t) for k, t in wrapped.named_buffers(remove_duplicate=False)}
    rest |= {key: array_of(every[key]) for key in own.values() if key not in trained}

    def value(params: Any, rest: Any, inputs: Any) -> Any:
        known = {**params, **rest}
        values = Values({key: known[own[key]] for key in own}, rest, [inputs[key] for key in given])
        (loss, *outputs), _ = evaluate(exported, values)
        return loss, outputs

    grads = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in trained.items()}
    wanted = jax.tree.leaves(
        ((loss, outputs), grads), is_leaf=lambda x: isinstance(x, torch.Tensor)
    )
    return TorchProgram(
        jax.value_and_grad(value, has_aux=True),
        (
            {key: array_of(tensor) for key, tensor in trained.items()},
            rest,
            {key: array_of(tensor) for key, tensor in given.items()},
        ),
        [w.detach().numpy() for w in wanted],
    )
