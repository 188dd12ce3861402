"""The models of the library transformers as a reference: the same weights, their logits, loss and
gradients, under our names of parameters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from shardwright.orchestrator.models import leaves
from shardwright.orchestrator.models.architecture import Architecture, Layer, stacked

Arrays = Mapping[str, np.ndarray]
_SPREAD = 0.1


def written(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as the library saves it, with every key."""
    from transformers import AutoConfig

    found: dict[str, Any] = json.loads(
        AutoConfig.for_model(**config).to_json_string(use_diff=False)
    )
    return found


class Reference:
    """One model of transformers with random weights, in fp32 and without dropout."""

    def __init__(self, config: Mapping[str, Any], seed: int = 0) -> None:
        import torch
        import transformers

        given = dict(config)
        if given["model_type"] == "gemma3":
            given = {"model_type": "gemma3_text", **given["text_config"]}
        self.family = given.pop("model_type")
        made = transformers.AutoConfig.for_model(self.family, **given)
        made._attn_implementation = "eager"
        self.torch = torch
        kind = getattr(transformers, _CLASSES.get(self.family, "AutoModelForCausalLM"))
        self.model = kind.from_config(made, dtype=torch.float32)
        self.model.train()
        rng = np.random.default_rng(seed)
        one = self.family.startswith("gemma")  # whose norms add it themselves
        with torch.no_grad():
            for name, leaf in self._arrays():
                drawn = _SPREAD * rng.standard_normal(tuple(leaf.shape))
                drawn += bool(_SCALE.search(name)) and not one
                leaf.copy_(torch.tensor(drawn, dtype=torch.float32))

    def _arrays(self) -> Iterator[tuple[str, Any]]:
        """Its parameters, and what it does not train."""
        yield from self.model.named_parameters()
        for name, leaf in self.model.named_buffers():
            if name.endswith(_UNTRAINED):
                yield name, leaf

    def count(self) -> int:
        """Elements of all parameters."""
        return sum(leaf.numel() for leaf in self.model.parameters())

    def params(self, model: Architecture) -> dict[str, Any]:
        """Its weights as our parameters."""
        return ours(self.family, model, {name: _array(leaf) for name, leaf in self._arrays()})

    def run(
        self, model: Architecture, read: np.ndarray, targets: np.ndarray, sources: np.ndarray | None
    ) -> tuple[np.ndarray, float, dict[str, Any]]:
        """Logits, mean cross entropy, and its gradient under our names."""
        torch = self.torch
        given: dict[str, Any]
        if model.patches:
            size = round((model.patches.count * model.patches.pixels / 3) ** 0.5)
            given = {"pixel_values": torch.tensor(whole(read, size))}
        else:
            given = {"input_ids": torch.tensor(read, dtype=torch.long)}
        if sources is not None:
            given = {
                "input_ids": torch.tensor(sources, dtype=torch.long),
                "decoder_input_ids": given["input_ids"],
            }
        logits = self.model(**given).logits
        flat = logits.reshape(-1, logits.shape[-1])
        loss = torch.nn.functional.cross_entropy(flat, torch.tensor(targets.reshape(-1)).long())
        loss.backward()
        grads = {
            name: np.zeros(leaf.shape, np.float32) if leaf.grad is None else _array(leaf.grad)
            for name, leaf in self._arrays()
        }
        return _array(logits), float(loss.detach()), ours(self.family, model, grads)


_CLASSES = {
    "bert": "AutoModelForMaskedLM",
    "t5": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
}
_SCALE = re.compile(r"([nN]orm|ln_[12]|layernorm_(before|after))\.weight$")
_UNTRAINED = "e_score_correction_bias"


def whole(patches: np.ndarray, size: int) -> np.ndarray:
    """Images [B, 3, size, size] of patches [B, count, pixels], whose pixels are rows, columns and
    then colours."""
    side = round((patches.shape[-1] / 3) ** 0.5)
    count = size // side
    split = patches.reshape(-1, count, count, side, side, 3)
    return split.transpose(0, 5, 1, 3, 2, 4).reshape(-1, 3, size, size)


def _array(tensor: Any) -> np.ndarray:
    return np.asarray(tensor.detach().numpy(), np.float32)


def ours(family: str, model: Architecture, theirs: Arrays) -> dict[str, Any]:
    """Arrays under the library's names -> the same under ours."""
    left, tree = dict(theirs), {}
    start, of_layer = _LAYERS.get(family, ("model.layers", _decoder_layer))
    if model.encoder:
        tree["encoder"] = _stack(left, "encoder.block", of_layer, model, model.encoder)
        tree["encoder"]["final_norm"] = left.pop("encoder.final_layer_norm.weight")
    tree |= _stack(left, start, of_layer, model, model.layers)
    for name, leaf in left.items():
        stem = name.removeprefix("model.").removesuffix(".weight").removesuffix(".bias")
        key, kind = _OUTER[stem]
        if name.endswith(".bias"):
            key = f"b{key[1:]}" if key.startswith("w_") or key == "b_head" else f"{key}_bias"
        made = leaf.T if kind == "matrix" and leaf.ndim == 2 else leaf
        if kind == "pixels" and leaf.ndim == 4:
            made = leaf.transpose(2, 3, 1, 0).reshape(-1, len(leaf))
        tree["b_head" if key == "lm_head_bias" else key] = made[0] if kind == "first" else made
    expected = jax.tree.map(lambda leaf: leaf.shape, leaves.leaves(model))
    assert jax.tree.map(np.shape, tree) == expected
    return tree


def _stack(
    left: dict[str, np.ndarray],
    start: str,
    of_layer: Callable[..., dict[str, np.ndarray]],
    model: Architecture,
    parts: tuple[Layer, ...],
) -> dict[str, Any]:
    """A stack of layers, taken out of what is left."""
    layers, tree = [], {}
    for number in range(len(parts)):
        prefix = f"{start}.{number}."
        own = {n[len(prefix) :]: left.pop(n) for n in list(left) if n.startswith(prefix)}
        shared = own.pop("layer.0.SelfAttention.relative_attention_bias.weight", None)
        if shared is not None:
            tree["relative"] = shared
        layers.append(of_layer(own, model))
    stack = stacked(parts)
    begin, size = len(stack.first), len(stack.period)
    end = begin + size * stack.times
    period = [
        jax.tree.map(lambda *found: np.stack(found), *layers[begin + i : end : size])
        for i in range(size)
    ]
    tree["layers"] = period[0] if size == 1 else _numbered(period)
    for name, part in (("first", layers[:begin]), ("last", layers[end:])):
        if part:
            tree[name] = _numbered(part)
    return tree


def _numbered(parts: list[Any]) -> dict[str, Any]:
    return {str(i): part for i, part in enumerate(parts)}


_OUTER = {
    "embed_tokens": ("embed", ""),
    "norm": ("final_norm", ""),
    "lm_head": ("lm_head", "matrix"),
    "transformer.wte": ("embed", ""),
    "transformer.wpe": ("positions", ""),
    "transformer.ln_f": ("final_norm", ""),
    "gpt_neox.embed_in": ("embed", ""),
    "gpt_neox.final_layer_norm": ("final_norm", ""),
    "embed_out": ("lm_head", "matrix"),
    "shared": ("embed", ""),
    "decoder.final_layer_norm": ("final_norm", ""),
    "bert.embeddings.word_embeddings": ("embed", ""),
    "bert.embeddings.position_embeddings": ("positions", ""),
    "bert.embeddings.token_type_embeddings": ("segments", ""),
    "bert.embeddings.LayerNorm": ("embed_norm", ""),
    "cls.predictions": ("b_head", ""),
    "cls.predictions.transform.dense": ("w_transform", "matrix"),
    "cls.predictions.transform.LayerNorm": ("transform_norm", ""),
    "vit.embeddings.cls_token": ("token", "first"),
    "vit.embeddings.position_embeddings": ("positions", "first"),
    "vit.embeddings.patch_embeddings.projection": ("w_patches", "pixels"),
    "vit.layernorm": ("final_norm", ""),
    "classifier": ("lm_head", "matrix"),
}
_NAMES = {
    **{f"self_attn.{x}_proj": x for x in "qkvo"},
    **{f"mlp.{x}_proj": f"_{x}" for x in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{x}_proj": f"_shared_{x}" for x in ("gate", "up", "down")},
    "self_attn.q_a_proj": "_q_down",
    "self_attn.q_b_proj": "q",
    "self_attn.kv_a_proj_with_mqa": "_kv_down",
    "self_attn.kv_b_proj": "_kv",
}
_NORMS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "self_attn.q_a_layernorm": "q_norm",
    "self_attn.kv_a_layernorm": "kv_norm",
    "post_attention_layernorm": "mlp_norm",
}
_SANDWICH = _NORMS | {
    "post_attention_layernorm": "attended_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "fed_norm",
}


def _decoder_layer(own: dict[str, np.ndarray], model: Architecture) -> dict[str, np.ndarray]:
    """A layer of the Llama line."""
    norms = _SANDWICH if model.layers[0].placement == "sandwich" else _NORMS
    made: dict[str, np.ndarray] = {}
    for name, leaf in own.items():
        stem, _, kind = name.rpartition(".")
        if stem in norms:
            made[norms[stem]] = leaf
        elif stem in _NAMES:
            made[f"{'w' if kind == 'weight' else 'b'}{_NAMES[stem]}"] = leaf.T
        elif name == "self_attn.sinks":
            made["sinks"] = leaf
        elif "experts." in name or "gate." in name or "router." in name:
            made |= _expert_leaf(name, leaf, model)
        else:
            made |= _fused_leaf(name, leaf, model)
    return made


def _fused_leaf(name: str, leaf: np.ndarray, model: Architecture) -> dict[str, np.ndarray]:
    """A matrix of Phi-3 that is several of ours."""
    a = model.layers[0].attention
    if name == "mlp.gate_up_proj.weight":
        return dict(zip(("w_gate", "w_up"), np.split(leaf.T, 2, axis=1), strict=True))
    assert name == "self_attn.qkv_proj.weight", name
    ends = [a.heads * a.head_dim, (a.heads + a.kv_heads) * a.head_dim]
    return dict(zip(("wq", "wk", "wv"), np.split(leaf.T, ends, axis=1), strict=True))


def _expert_leaf(name: str, leaf: np.ndarray, model: Architecture) -> dict[str, np.ndarray]:
    """Routers and experts; those of gpt-oss are [E, in, out] with gate and value interleaved."""
    is_oss = model.layers[-1].feed.bias
    match name.removeprefix("mlp."):
        case "gate.weight" | "router.weight":
            return {"router": leaf.T}
        case "gate.e_score_correction_bias":
            return {"router_shift": leaf}
        case "router.bias":
            return {"router_bias": leaf}
        case "experts.gate_up_proj" if is_oss:
            return {"w_gate": leaf[..., ::2], "w_up": leaf[..., 1::2]}
        case "experts.gate_up_proj":
            parts = np.split(leaf.swapaxes(1, 2), 2, axis=2)
            return dict(zip(("w_gate", "w_up"), parts, strict=True))
        case "experts.gate_up_proj_bias":
            return {"b_gate": leaf[..., ::2], "b_up": leaf[..., 1::2]}
        case "experts.down_proj":
            return {"w_down": leaf if is_oss else leaf.swapaxes(1, 2)}
        case "experts.down_proj_bias":
            return {"b_down": leaf}
    raise AssertionError(name)


def _named(own: Arrays, names: Mapping[str, str], transposed: bool) -> dict[str, np.ndarray]:
    """Norms and projections by a table; biases go by the name of their weight."""
    made = {}
    for name, leaf in own.items():
        stem, _, kind = name.rpartition(".")
        key = names[stem]
        if key.endswith("_norm"):
            made[key + ("_bias" if kind == "bias" else "")] = leaf
        else:
            made[("w" if kind == "weight" else "b") + key] = leaf.T if transposed else leaf
    return made


def _gpt2_layer(own: dict[str, np.ndarray], _: Architecture) -> dict[str, np.ndarray]:
    made: dict[str, np.ndarray] = {}
    for kind in ("weight", "bias"):
        parts = np.split(own.pop(f"attn.c_attn.{kind}"), 3, axis=-1)
        made |= {f"{kind[0]}{x}": part for x, part in zip("qkv", parts, strict=True)}
    names = {"ln_1": "attn_norm", "ln_2": "mlp_norm", "attn.c_proj": "o"}
    names |= {"mlp.c_fc": "_up", "mlp.c_proj": "_down"}
    return made | _named(own, names, transposed=False)


def _neox_layer(own: dict[str, np.ndarray], model: Architecture) -> dict[str, np.ndarray]:
    """Queries, keys and values lie side by side head by head."""
    a, made = model.layers[0].attention, {}
    for kind in ("weight", "bias"):
        fused = own.pop(f"attention.query_key_value.{kind}")
        split = fused.reshape(a.heads, 3, a.head_dim, -1)
        for i, x in enumerate("qkv"):
            part = split[:, i].reshape(a.heads * a.head_dim, -1)
            made[f"{kind[0]}{x}"] = part.T if kind == "weight" else part[:, 0]
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}
    names |= {"attention.dense": "o"}
    names |= {"mlp.dense_h_to_4h": "_up", "mlp.dense_4h_to_h": "_down"}
    return made | _named(own, names, transposed=True)


def _bert_layer(own: dict[str, np.ndarray], _: Architecture) -> dict[str, np.ndarray]:
    names = {f"attention.self.{x}": x[0] for x in ("query", "key", "value")}
    names |= {"attention.output.dense": "o", "attention.output.LayerNorm": "attn_norm"}
    names |= {"intermediate.dense": "_up", "output.dense": "_down", "output.LayerNorm": "mlp_norm"}
    return _named(own, names, transposed=True)


def _vit_layer(own: dict[str, np.ndarray], _: Architecture) -> dict[str, np.ndarray]:
    names = {f"attention.{x}_proj": x for x in "qkvo"} | {"mlp.fc1": "_up", "mlp.fc2": "_down"}
    names |= {"layernorm_before": "attn_norm", "layernorm_after": "mlp_norm"}
    return _named(own, names, transposed=True)


def _t5_layer(own: dict[str, np.ndarray], _: Architecture) -> dict[str, np.ndarray]:
    """Two parts in the encoder, three in the decoder."""
    names = {f"layer.0.SelfAttention.{x}": x for x in "qkvo"}
    crossed = {f"layer.1.EncDecAttention.{x}": x for x in "qkvo"}
    norms = {"layer.0.layer_norm": "attn_norm"}
    last = 2 if any("EncDecAttention" in name for name in own) else 1
    if last == 2:
        norms["layer.1.layer_norm"] = "cross_norm"
    norms[f"layer.{last}.layer_norm"] = "mlp_norm"
    fed = {"wi": "_up", "wi_0": "_gate", "wi_1": "_up", "wo": "_down"}
    names |= {f"layer.{last}.DenseReluDense.{name}": key for name, key in fed.items()}
    across = {n: own.pop(n) for n in list(own) if n.removesuffix(".weight") in crossed}
    made = _named(own, names | norms, transposed=True)
    found = _named(across, crossed, transposed=True)
    return made | {f"cross_{name}": leaf for name, leaf in found.items()}


_LAYERS: dict[str, tuple[str, Callable[..., dict[str, np.ndarray]]]] = {
    "gpt2": ("transformer.h", _gpt2_layer),
    "gpt_neox": ("gpt_neox.layers", _neox_layer),
    "bert": ("bert.encoder.layer", _bert_layer),
    "vit": ("vit.layers", _vit_layer),
    "t5": ("decoder.block", _t5_layer),
}
"""Where the layers of a family are, and how one is read; others are of the Llama line."""
