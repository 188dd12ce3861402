"""The models of the library transformers as a reference: the same weights, their logits, loss and
gradients, under our names of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from shardwright.orchestrator.models import decoder
from shardwright.orchestrator.models.architecture import Architecture, stacked

Arrays = Mapping[str, np.ndarray]
_SPREAD = 0.1


class Reference:
    """One model of transformers with random weights, in fp32 and without dropout."""

    def __init__(self, config: Mapping[str, Any], seed: int = 0) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        given = dict(config)
        self.family = given.pop("model_type")
        made = AutoConfig.for_model(self.family, **given)
        made._attn_implementation = "eager"
        self.torch = torch
        self.model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
        self.model.train()
        rng = np.random.default_rng(seed)
        one = self.family.startswith("gemma")  # whose norms add it themselves
        with torch.no_grad():
            for name, leaf in self.model.named_parameters():
                drawn = _SPREAD * rng.standard_normal(tuple(leaf.shape))
                drawn += name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight")) and not one
                leaf.copy_(torch.tensor(drawn, dtype=torch.float32))

    def count(self) -> int:
        """Elements of all parameters."""
        return sum(leaf.numel() for leaf in self.model.parameters())

    def params(self, model: Architecture) -> dict[str, Any]:
        """Its weights as our parameters."""
        return ours(self.family, model, {n: _array(p) for n, p in self.model.named_parameters()})

    def run(
        self, model: Architecture, tokens: np.ndarray, targets: np.ndarray
    ) -> tuple[np.ndarray, float, dict[str, Any]]:
        """Logits, mean cross entropy, and its gradient under our names."""
        torch = self.torch
        logits = self.model(torch.tensor(tokens, dtype=torch.long)).logits
        flat = logits.reshape(-1, logits.shape[-1])
        loss = torch.nn.functional.cross_entropy(flat, torch.tensor(targets.reshape(-1)).long())
        loss.backward()
        grads = {n: _array(p.grad) for n, p in self.model.named_parameters()}
        return _array(logits), float(loss.detach()), ours(self.family, model, grads)


def _array(tensor: Any) -> np.ndarray:
    return np.asarray(tensor.detach().numpy(), np.float32)


def ours(family: str, model: Architecture, theirs: Arrays) -> dict[str, Any]:
    """Arrays under the library's names -> the same under ours."""
    left = dict(theirs)
    of_layer = _LAYERS.get(family, _decoder_layer)
    start = {"gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers"}.get(family, "model.layers")
    layers = []
    for number in range(len(model.layers)):
        prefix = f"{start}.{number}."
        own = {n[len(prefix) :]: left.pop(n) for n in list(left) if n.startswith(prefix)}
        layers.append(of_layer(own, model))
    tree: dict[str, Any] = {}
    for name, leaf in left.items():
        key, kind = _OUTER[
            name.removeprefix("model.").removesuffix(".weight").removesuffix(".bias")
        ]
        key += "_bias" if name.endswith(".bias") else ""
        tree[key] = leaf.T if kind == "matrix" else leaf
    stack = stacked(model.layers)
    begin, size = len(stack.first), len(stack.period)
    end = begin + size * stack.times
    period = [
        jax.tree.map(lambda *leaves: np.stack(leaves), *layers[begin + i : end : size])
        for i in range(size)
    ]
    tree["layers"] = period[0] if size == 1 else _numbered(period)
    for name, part in (("first", layers[:begin]), ("last", layers[end:])):
        if part:
            tree[name] = _numbered(part)
    assert jax.tree.map(np.shape, tree) == decoder.shapes(model)
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
}
_NAMES = {
    **{f"self_attn.{x}_proj": x for x in "qkvo"},
    **{f"mlp.{x}_proj": f"_{x}" for x in ("gate", "up", "down")},
}
_NORMS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
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


_LAYERS: dict[str, Callable[..., dict[str, np.ndarray]]] = {
    "gpt2": _gpt2_layer,
    "gpt_neox": _neox_layer,
}
