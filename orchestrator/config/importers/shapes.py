"""What the facts of any project come to: the model of some sizes, and the instances that hold some
ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.config.config import MOST_INSTANCES
from shardwright.orchestrator.config.importers.table import Reading
from shardwright.orchestrator.models.presets import PRESETS, SIZED

LLAMA = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocab": "vocab_size",
    "positions": "max_position_embeddings",
    "head_dim": "head_dim",
    "rope_theta": "rope_theta",
    "eps": "rms_norm_eps",
    "is_tied": "tie_word_embeddings",
}
"""Facts about a Llama -> keys of its `config.json`."""


_GPT = {
    "layers": "n_layer",
    "hidden": "n_embd",
    "ffn": "n_inner",
    "heads": "n_head",
    "vocab": "vocab_size",
    "positions": "n_positions",
    "eps": "layer_norm_epsilon",
}
"""Facts about a GPT -> keys of its `config.json`."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A model type whose sizes are facts: what it has beyond a Llama, and its keys for facts."""

    has: frozenset[str] = frozenset()
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA)
    plain: Mapping[str, Any] = field(default_factory=dict)
    """Keys with a value of their own."""


_OF_EXPERTS = LLAMA | {"chosen": "num_experts_per_tok"}
_ALL_EXPERTS = {fact: key for fact, key in _OF_EXPERTS.items() if fact != "ffn"}
"""Without dense layers."""
KINDS: Mapping[str, Kind] = {
    "llama": Kind(),
    "mistral": Kind(frozenset({"window"}), LLAMA | {"window": "sliding_window"}),
    "qwen2": Kind(frozenset({"has_qkv_bias"})),
    "qwen3": Kind(frozenset({"has_head_norms"})),
    "mixtral": Kind(
        frozenset({"experts"}),
        _ALL_EXPERTS | {"experts": "num_local_experts", "expert_ffn": "intermediate_size"},
    ),
    "qwen3_moe": Kind(
        frozenset({"experts", "has_head_norms"}),
        _OF_EXPERTS | {"experts": "num_experts", "expert_ffn": "moe_intermediate_size"},
        {"norm_topk_prob": True},
    ),
}
"""Types with rotary positions, RMSNorm and a gated MLP, by what else they have."""
_PARTS = {
    "window": "windows of attention",
    "has_qkv_bias": "biases of queries, keys and values",
    "has_head_norms": "norms of queries and keys",
    "experts": "experts",
}
"""What a type may have, in words."""
_SHAPE = (
    *("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim"),
    *("experts", "chosen", "expert_ffn"),
)
"""Facts that tell models apart; the vocabulary is often the tokenizer's to know."""


def model_tables(
    reading: Reading, family: str, sizes: Mapping[str, Any], padded: int = 0
) -> dict[str, Any]:
    """The keys of `[model]` for a model of these sizes, of the family `llama` (the type of `KINDS`
    that has what it has) or `gpt`: a preset that has them, else its `config.json` as text.

    Where a vocabulary is `padded` so that `mesh.tp` divides it, the model is a preset without that
    if `mesh.tp` divides the preset's own; otherwise it has the padded one; both are said. Raises
    UsageError where the vocabulary is nowhere, and for parts that no type has together."""
    known = {name: value for name, value in sizes.items() if value is not None}
    kind = "gpt2" if family == "gpt" else _kind_of(reading, known)
    row = Kind(names=_GPT) if kind == "gpt2" else KINDS[kind]
    known = {name: value for name, value in known.items() if name in row.names}
    if "vocab" not in known and padded:
        known["vocab"] = padded
    if preset := _preset_of(reading, kind, known):
        own = _published(kind)[preset]["vocab"]
        there = padded or known.get("vocab", own)
        if kind == "gpt2" or there == own or own % reading.get("mesh.tp", 1) == 0:
            reading.assumed.append(_about_preset(preset, known, own, there))
            return {"preset": preset}
    needed = ("layers", "hidden", "expert_ffn" if known.get("experts") else "ffn", "heads")
    missing = [name for name in needed if name not in known]
    if missing:
        raise reading.refuse(
            "layers",
            f"sizes of a preset, or besides {', '.join(missing)}",
            ", ".join(f"{name} {value}" for name, value in known.items()) or "none",
            "give the model: --model config.json",
        )
    if "vocab" not in known:
        raise reading.refuse(
            "vocab",
            "a size of the vocabulary where no preset has the other sizes",
            "none: the tokenizer has it",
            "give the size in the file, or the model: --model config.json",
        )
    if padded and padded != known["vocab"]:
        reading.assumed.append(f"the vocabulary of {known['vocab']:,} is padded to {padded:,}")
        known["vocab"] = padded
    length = reading.get("model.seq_len", 1)
    known["positions"] = max(known.get("positions", length), length)
    config = {row.names[fact]: value for fact, value in known.items()}
    return {"config": json.dumps({"model_type": kind, **row.plain, **config})}


def _kind_of(reading: Reading, known: Mapping[str, Any]) -> str:
    """The type that has all that a model has beyond a Llama. Raises UsageError for none."""
    has = {part for part in _PARTS if known.get(part)}
    for kind, row in KINDS.items():
        if row.has == has:
            return kind
    told = " and ".join(text for part, text in _PARTS.items() if part in has)
    raise reading.refuse(
        min(has),
        f"parts that a model type has together ({', '.join(KINDS)})",
        told,
        "give the model: --model config.json, or an entry of your own (docs/own-step.md)",
    )


def _preset_of(reading: Reading, kind: str, known: Mapping[str, Any]) -> str:
    """The preset whose sizes are all those that are known; empty for none. Where few sizes are
    known, the base of rotary positions tells presets apart, and of releases of one size that which
    is as long. Raises UsageError where they do not."""
    told = {fact: known[fact] for fact in _SHAPE if fact in known}
    if kind != "gpt2":
        told["is_tied"] = known.get("is_tied", False)
    vocab = {} if kind == "gpt2" or "vocab" not in known else {"vocab": known["vocab"]}
    base = {"rope_theta": known["rope_theta"]} if "rope_theta" in known else {}
    published = _published(kind)
    found = [name for name in published if _agrees(published[name], told | vocab)]
    if len(found) > 1 and base:
        found = [name for name in found if _agrees(published[name], base)]
    shapes = {tuple(published[name].get(fact) for fact in _SHAPE) for name in found}
    if len(shapes) > 1:
        sizes = ", ".join(f"{name} {known[name]}" for name in _SHAPE if name in known)
        raise reading.refuse(
            "layers",
            f"sizes of one preset, not of {' and '.join(found)}",
            sizes or "no sizes",
            "give the model: --model PRESET or --model config.json",
        )
    length = reading.get("model.seq_len", 1)
    long = [name for name in found if published[name].get("positions", length) >= length]
    return next(iter([*long, *found]), "")


def _agrees(sizes: Mapping[str, Any], told: Mapping[str, Any]) -> bool:
    """Whether a preset has what is told."""
    return all(sizes.get(fact, value) == value for fact, value in told.items())


def _published(kind: str) -> dict[str, dict[str, Any]]:
    """The presets of a model type, by the facts of this module."""
    if kind == "gpt2":
        return {name: dict(sizes) for name, (family, sizes) in SIZED.items() if family == "gpt"}
    found = {}
    for name, config in PRESETS.items():
        if config.get("model_type", "llama") != kind:
            continue
        facts = {fact: config[key] for fact, key in KINDS[kind].names.items() if key in config}
        facts.setdefault("head_dim", facts["hidden"] // facts["heads"])
        found[name] = {"rope_theta": LLAMA_BASE, "is_tied": False} | facts
    return found


LLAMA_BASE = 10000.0
"""Of rotary positions where a config does not say it (transformers, `LlamaConfig`)."""


def _about_preset(preset: str, known: Mapping[str, Any], own: int, there: int) -> str:
    """That a model is a preset with a vocabulary of its `own`, which is another one `there`."""
    vocab = "" if "vocab" in known else ", and its vocabulary, which the file does not say"
    if own != there:
        vocab = f"; its vocabulary is {own:,}, there {there:,}"
    return f"the model is the preset {preset}, which has these sizes{vocab}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """How the ranks of a run are arranged; `shard` and `replicate` are 0 where they take what the
    others leave. Those of `ep` are among the ranks of `shard`."""

    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    shard: int = 1
    replicate: int = 1
    number: int = 0  # of ranks, where the file says so

    @property
    def least(self) -> int:
        """Ranks that there are at least."""
        shard = max(self.shard, self.ep)
        return self.pp * self.cp * self.tp * shard * max(1, self.replicate)

    @property
    def is_said(self) -> bool:
        """Whether the file says how many there are, by a number or by all sizes."""
        return bool(self.number or (self.shard and self.replicate))


def cluster_tables(
    reading: Reading, ranks: Ranks, cores: int, instances: int = 0
) -> dict[str, dict[str, Any]]:
    """Tables of the mesh and the cluster: a rank is a core of an instance with `cores` of them.
    `instances` are those that were asked for. Raises UsageError for a mesh that fills none."""
    inner = ranks.pp * ranks.cp * ranks.tp * ranks.ep
    wanted = max(ranks.number, ranks.least)
    if 0 < ranks.number < wanted:
        reading.assumed.append(f"there are the {wanted} ranks of the mesh, not {ranks.number}")
    count = instances or _instances(reading, wanted, inner, cores)
    sizes: dict[str, Any] = {"pp": ranks.pp, "cp": ranks.cp, "tp": ranks.tp, "ep": ranks.ep}
    shard = max(ranks.shard, ranks.ep) if ranks.shard else 0
    sizes |= {"dp_replicate": ranks.replicate, "dp_shard": shard}
    if shard and ranks.replicate and ranks.least != count * cores:
        free = "dp_replicate" if ranks.replicate > 1 and shard == 1 else "dp_shard"
        sizes[free] = 0
        reading.assumed.append(
            f"{free} takes the cores that are left: {count * cores} cores for {wanted} ranks"
        )
    mesh = {axis: size or "auto" for axis, size in sizes.items() if size != 1}
    told = f"{wanted} ranks" if ranks.is_said else f"at least {wanted}, the file does not say"
    if not instances:
        reading.assumed.append(
            f"a rank is a core: {count} {'instance' if count == 1 else 'instances'} of {cores}"
            f" cores for {told} (--instances)"
        )
    return {"mesh": mesh or {"dp_shard": "auto"}, "cluster": {"instances": count}}


def _instances(reading: Reading, wanted: int, inner: int, cores: int) -> int:
    """The fewest instances with so many cores, that `inner` divides."""
    step = math.lcm(inner, cores) // cores
    count = step * math.ceil(wanted / (step * cores))
    if count > MOST_INSTANCES:
        raise reading.refuse(
            "mesh.tp",
            f"ranks that at most {MOST_INSTANCES} instances hold",
            f"{wanted:,} ranks",
            "correct the sizes of the mesh",
        )
    return count


def one_of(reading: Reading, fact: str, value: Any, known: Mapping[str, Any]) -> UsageError:
    """The refusal of a name that no table has."""
    return reading.refuse(
        fact,
        f"one of {', '.join(known)}",
        str(value),
        "give the model: --model config.json, or an entry of your own",
    )
