"""What the facts of any project come to: the model of some sizes, and the instances that hold some
ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
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
}
"""Facts about a Llama -> keys of its `config.json`."""
_GPT = {
    "layers": "n_layer",
    "hidden": "n_embd",
    "ffn": "n_inner",
    "heads": "n_head",
    "vocab": "vocab_size",
    "positions": "n_positions",
}
"""Facts about a GPT -> keys of its `config.json`."""
_SHAPE = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim")
"""Facts that tell models apart; the vocabulary is often the tokenizer's to know."""


def model_tables(reading: Reading, family: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `[model]` for a model of these sizes: a preset that has them, else its
    `config.json` as text. Raises UsageError where the vocabulary is nowhere."""
    known = {name: value for name, value in sizes.items() if value is not None}
    if preset := _preset_of(reading, family, known):
        reading.assumed.append(_about_preset(preset, known))
        return {"preset": preset}
    missing = [name for name in _SHAPE[:4] if name not in known]
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
    length = reading.get("model.seq_len", 1)
    known["positions"] = max(known.get("positions", length), length)
    names, kind = (_GPT, "gpt2") if family == "gpt" else (LLAMA, "llama")
    config = {"model_type": kind} | {names[n]: v for n, v in known.items() if n in names}
    return {"config": json.dumps(config)}


def _preset_of(reading: Reading, family: str, known: Mapping[str, Any]) -> str:
    """The preset whose sizes are all those that are known; empty for none. Where few sizes are
    known, the base of rotary positions tells presets apart. Raises UsageError where it does not."""
    told = {fact: known[fact] for fact in _SHAPE if fact in known}
    vocab = {} if family == "gpt" or "vocab" not in known else {"vocab": known["vocab"]}
    base = {"rope_theta": known["rope_theta"]} if "rope_theta" in known else {}
    published = _published(family)
    found = [name for name in published if _agrees(published[name], told | vocab)]
    if len(found) > 1 and base:
        found = [name for name in found if _agrees(published[name], base)]
    if len(found) > 1:
        sizes = ", ".join(f"{name} {value}" for name, value in told.items()) or "no sizes"
        raise reading.refuse(
            "layers",
            f"sizes of one preset, not of {' and '.join(found)}",
            sizes,
            "give the model: --model PRESET or --model config.json",
        )
    return "".join(found)


def _agrees(sizes: Mapping[str, Any], told: Mapping[str, Any]) -> bool:
    """Whether a preset has what is told."""
    return all(sizes.get(fact, value) == value for fact, value in told.items())


def _published(family: str) -> dict[str, dict[str, Any]]:
    """The presets of a family, by the facts of this module."""
    if family == "gpt":
        return {name: dict(sizes) for name, (kind, sizes) in SIZED.items() if kind == "gpt"}
    found = {}
    for name, config in PRESETS.items():
        facts = {fact: config[key] for fact, key in LLAMA.items() if key in config}
        facts["head_dim"] = facts["hidden"] // facts["heads"]
        found[name] = {"rope_theta": LLAMA_BASE} | facts
    return found


LLAMA_BASE = 10000.0
"""Of rotary positions where a config does not say it (transformers, `LlamaConfig`)."""


def _about_preset(preset: str, known: Mapping[str, Any]) -> str:
    vocab = "" if "vocab" in known else ", and its vocabulary, which the file does not say"
    return f"the model is the preset {preset}, which has these sizes{vocab}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """How the ranks of a run are arranged; `shard` and `replicate` are 0 where they take what the
    others leave."""

    pp: int = 1
    cp: int = 1
    tp: int = 1
    shard: int = 1
    replicate: int = 1
    number: int = 0  # of ranks, where the file says so

    @property
    def least(self) -> int:
        """Ranks that there are at least."""
        return self.pp * self.cp * self.tp * max(1, self.shard) * max(1, self.replicate)


def cluster_tables(
    reading: Reading, ranks: Ranks, cores: int, instances: int = 0
) -> dict[str, dict[str, Any]]:
    """Tables of the mesh and the cluster: a rank is a core of an instance with `cores` of them.
    `instances` are those that were asked for. Raises UsageError for a mesh that fills none."""
    inner = ranks.pp * ranks.cp * ranks.tp
    wanted = max(ranks.number, ranks.least)
    if 0 < ranks.number < wanted:
        reading.assumed.append(f"there are the {wanted} ranks of the mesh, not {ranks.number}")
    count = instances or _instances(reading, wanted, inner, cores)
    sizes: dict[str, Any] = {"pp": ranks.pp, "cp": ranks.cp, "tp": ranks.tp}
    sizes |= {"dp_replicate": ranks.replicate, "dp_shard": ranks.shard}
    if ranks.shard and ranks.replicate and ranks.least != count * cores:
        free = "dp_replicate" if ranks.replicate > 1 and ranks.shard == 1 else "dp_shard"
        sizes[free] = 0
        reading.assumed.append(
            f"{free} takes the cores that are left: {count * cores} cores for {wanted} ranks"
        )
    mesh = {axis: size or "auto" for axis, size in sizes.items() if size != 1}
    told = f"{wanted} ranks" if ranks.number else f"at least {wanted}, the file does not say"
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
