"""The keys of a `config.json` one by one: each is read, or without effect on a training step, or
refused by its name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from shardwright.compiler.diagnostics import nearest
from shardwright.orchestrator.models import config_file
from shardwright.orchestrator.models.architecture import Activation
from shardwright.orchestrator.models.config_file import Config, RopeScaling, refused
from shardwright.orchestrator.models.rope import LongRope, Rope, Yarn

NO_EFFECT = frozenset(
    (
        *("architectures", "auto_map", "dtype", "model_type", "torch_dtype"),
        *("transformers_version", "name_or_path", "_name_or_path", "_attn_implementation"),
        *("attn_implementation", "chunk_size_feed_forward"),
        "cross_attention_hidden_size",
        "quantization_config",  # how published weights are stored
        # Initialisation, tokens and generation.
        *("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"),
        *("sep_token_id", "decoder_start_token_id", "use_cache", "cache_implementation"),
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "temperature"),
        *("top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
        *("no_repeat_ngram_size", "num_return_sequences", "prefix", "suppress_tokens"),
        *("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
        *("num_beam_groups", "diversity_penalty", "encoder_no_repeat_ngram_size"),
        *("bad_words_ids", "remove_invalid_values", "exponential_decay_length_penalty"),
        # Heads other than that of the language model, and what calls return.
        *("problem_type", "task_specific_params"),
        *("finetuning_task", "tokenizer_class", "return_dict", "output_attentions"),
        *("output_hidden_states", "return_dict_in_generate", "output_scores", "torchscript"),
        *("use_bfloat16", "tf_legacy_loss", "classifier_dropout"),
        "gradient_checkpointing",  # `remat` of the job
    )
)
"""Keys that any config may have and that change no training step."""
LABELS = ("id2label", "label2id", "num_labels")
"""Keys of classes, which only models that tell one read."""


PLAIN: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "is_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
}
"""Keys that any config may have, and the values that are built."""


class Fields:
    """A config that remembers which of its keys were read."""

    def __init__(self, config: Config, names: Mapping[str, str]) -> None:
        self.config = config
        self.names = names
        self.read: dict[str, str] = {}
        """Keys that were looked at, and what they had to be."""

    def key(self, name: str) -> str:
        """How this family spells a key."""
        return self.names.get(name, name)

    def _given(self, name: str, kind: str) -> Any:
        self.read[self.key(name)] = kind
        return self.config.get(self.key(name))

    def size(self, name: str, default: int = 0) -> int:
        """A positive integer; without a default it is required."""
        key, value = self.key(name), self._given(name, "size")
        if value is None and default:
            return default
        return config_file.sizes(self.config, [key])[key]

    def number(self, name: str, default: float) -> float:
        """A positive number, or the default where there is none."""
        key, value = self.key(name), self._given(name, "number")
        return default if value is None else config_file.numbers(self.config, [key])[key]

    def cap(self, name: str, default: float) -> float:
        """A positive number, 0 where the config says null, or the default where it says nothing."""
        return self.number(name, 0.0 if self.key(name) in self.config else default)

    def one_of(self, *names: str) -> str:
        """The first of several spellings that the config has, or the first of all."""
        for name in names:
            self._given(name, "size")
        return next((name for name in names if self.key(name) in self.config), names[0])

    def rank(self, name: str, default: int) -> int:
        """A positive integer, 0 where the config says null, or the default."""
        return self.window(name, default)

    def nested(self, name: str) -> Config:
        """A config inside the config."""
        value = self._given(name, "a config")
        if not isinstance(value, Mapping):
            raise refused(f"{name} as an object", json.dumps(value))
        return value

    def classes(self) -> int:
        """How many classes `id2label` or `num_labels` has; two where neither is there."""
        labels, count = self._given("id2label", "classes"), self._given("num_labels", "size")
        self._given("label2id", "classes")
        if isinstance(labels, Mapping) and labels:
            return len(labels)
        return 2 if count is None else self.size("num_labels")

    def projection(self, name: str, known: Mapping[str, Activation]) -> tuple[bool, Activation]:
        """Whether a feed-forward block is gated, and its activation (T5); `gated-gelu` is of the
        tanh form."""
        built = [*known, *(f"gated-{each}" for each in known)]
        value = self.choice(name, {each: each for each in built}, "relu")
        gate, _, kind = value.rpartition("-")
        exact = known[kind] if value != "gated-gelu" else Activation.GELU_TANH
        return bool(gate), exact

    def share(self, name: str, default: float) -> float:
        """A number from 0 to less than 1."""
        value = self._given(name, "share")
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise refused(f"{self.key(name)} from 0 to less than 1", json.dumps(value))
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        return bool(self.choice(name, {False: False, True: True}, default))

    def choice(self, name: str, known: Mapping[Any, Any], default: Any) -> Any:
        """What one of the known values means; null is the default."""
        value = self._given(name, " or ".join(json.dumps(each) for each in known))
        value = default if value is None else value
        config_file.refuse_features({self.key(name): value}, {self.key(name): tuple(known)})
        return known[value]

    def window(self, name: str, default: int) -> int:
        """A positive integer, 0 where the config says null, or the default."""
        value = self._given(name, "size or null")
        if value is None:
            return 0 if self.key(name) in self.config else default
        return self.size(name)

    def kinds(self, count: int, known: Mapping[str, bool]) -> list[bool] | None:
        """What `layer_types` says of every layer, if it is there."""
        value = self._given("layer_types", f"a list of {' and '.join(known)}")
        if value is None:
            return None
        fits = isinstance(value, list) and len(value) == count
        if not fits or not all(isinstance(v, str) and v in known for v in value):
            required = f"layer_types of {count} layers, each {' or '.join(known)}"
            raise refused(required, json.dumps(value))
        return [known[each] for each in value]

    def plain(self, values: Mapping[str, tuple[Any, ...]]) -> None:
        """Raises UsageError for a key with a value that is not built."""
        for key, built in values.items():
            self.read[key] = " or ".join(json.dumps(each) for each in built)
        config_file.refuse_features(self.config, values)

    def numbered(self, name: str) -> list[int]:
        """A list of numbers of layers, empty where there is none."""
        value = self._given(name, "a list of layers") or []
        if not isinstance(value, list) or not all(type(v) is int and v >= 0 for v in value):
            raise refused(f"{self.key(name)} as a list of layers", json.dumps(value))
        return value

    def same(self, twice: Mapping[str, str]) -> None:
        """Raises UsageError for a key whose value is not that of the key it stands beside."""
        for key, read in twice.items():
            self.read[key] = f"as {read}"
            if key in self.config and self.config[key] != self.config.get(read):
                said = {name: self.config.get(name) for name in (key, read)}
                raise refused(f"{key} and {read} to be equal", json.dumps(said))

    def refuse_others(self, without_effect: Iterable[str]) -> None:
        """Raises UsageError that names every key that was neither read nor has no effect."""
        known = {*self.read, *NO_EFFECT, *without_effect}
        others = sorted(k for k in self.config if k not in known)
        if others:
            free = [key for key in self.read if key not in self.config]
            pairs = ((key, nearest(key, free)) for key in others)
            like = "; ".join(f"is {key} meant to be {near[0]}?" for key, near in pairs if near)
            hint = "leave out what does not change the step, or " + config_file.OWN_MODEL
            hint = f"{hint}; it is built from {', '.join(sorted(self.read))}"
            required = "keys that this model type is built from"
            raise refused(required, ", ".join(others), f"{like}; {hint}" if like else hint)

    def turned(self, name: str, default: float) -> float:
        """The part of a head that is rotated: under a key of its own, or (transformers 5) among the
        rotary parameters."""
        own, nested = self.number(name, default), self.config.get("rope_parameters")
        key = "partial_rotary_factor"
        found = config_file.numbers(nested, [key]) if isinstance(nested, Mapping) else {}
        return own if self.key(name) in self.config else found.get(key, own)

    def rope(self, dim: int, positions: int, theta: float, local: bool = False) -> Rope:
        """Rotary positions of `dim` elements in a model of as many positions; `theta` is the usual
        base; `local`: those of layers with a window, where they have their own."""
        for name in ("rope_scaling", "rope_parameters", "rope_theta"):
            self._given(name, "rotary positions")
        nested = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        if not isinstance(nested, Mapping):
            raise refused("rope_scaling as an object", json.dumps(nested))
        kind = "sliding_attention" if local else "full_attention"
        by_kind = isinstance(nested.get(kind), Mapping)
        given: Config = nested[kind] if by_kind else nested
        if local and not by_kind:
            return Rope(dim=dim, theta=self.number("rope_local_base_freq", 10000.0))
        thetas = (given, "rope_theta"), (self.config, self.key("rope_theta"))
        found = [config_file.numbers(c, [k])[k] for c, k in thetas if c.get(k) is not None]
        return Rope(
            dim=dim,
            theta=found[0] if found else theta,
            scaling=_scaling(given, self.config, dim, positions),
        )


_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
        *("attention_factor", "mscale", "mscale_all_dim"),
    ),
    "longrope": (
        *("factor", "short_factor", "long_factor", "original_max_position_embeddings"),
        "attention_factor",
    ),
}
ROPE_TYPES = tuple(_ROPE_KEYS)
_OF_ANY_ROPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def _scaling(
    given: Config, config: Config, dim: int, positions: int
) -> RopeScaling | Yarn | LongRope | None:
    """The scaling of rotary frequencies. Raises UsageError for one that is not built."""
    kind = given.get("rope_type", given.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # as Phi-3 called it first
    if kind not in _ROPE_KEYS:
        required = f"rope_type {', '.join(ROPE_TYPES)} of rope_scaling"
        raise refused(required, json.dumps(kind), config_file.OWN_MODEL)
    others = sorted(given.keys() - {*_OF_ANY_ROPE, *_ROPE_KEYS[kind]})
    if others:
        raise refused(f"keys of rope_scaling that {kind} has", ", ".join(others))
    if kind in ("default", "linear", "llama3"):
        found = config_file.rope({"rope_scaling": given}).get("rope_scaling")
        return found if isinstance(found, RopeScaling) else None
    key = "original_max_position_embeddings"
    (trained,) = config_file.sizes({key: positions, **config, **given}, [key]).values()
    if kind == "yarn":
        return _yarn(given, trained, positions)
    return _long(given, dim, trained, positions)


def _yarn(given: Config, trained: int, positions: int) -> Yarn:
    keys = ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
    found = config_file.numbers({k: v for k, v in given.items() if v != 0}, keys)
    factor = found.get("factor", positions / trained)

    def stretch(share: float) -> float:
        return 0.1 * share * math.log(factor) + 1 if factor > 1 else 1.0

    of_tables, of_scores = found.get("mscale"), found.get("mscale_all_dim")
    usual = stretch(1.0)
    if of_tables and of_scores:
        usual = stretch(of_tables) / stretch(of_scores)
    return Yarn(
        factor=factor,
        positions=trained,
        fast=found.get("beta_fast", 32.0),
        slow=found.get("beta_slow", 1.0),
        truncate=bool(given.get("truncate", True)),
        attention_factor=found.get("attention_factor", usual),
        score_factor=stretch(of_scores) ** 2 if of_scores else 1.0,
    )


def _long(given: Config, dim: int, trained: int, positions: int) -> LongRope:
    found = config_file.numbers(given, ("factor", "attention_factor"))
    factor = found.get("factor", positions / trained)
    usual = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    short, long = (_factors(given, key, dim // 2) for key in ("short_factor", "long_factor"))
    attention = found.get("attention_factor", usual)
    return LongRope(short=short, long=long, positions=trained, attention_factor=attention)


def _factors(given: Config, key: str, count: int) -> tuple[float, ...]:
    """A list of as many positive numbers."""
    value = given.get(key)
    values = value if isinstance(value, list) and len(value) == count else []
    if not values or not all(isinstance(v, int | float) and v > 0 for v in values):
        raise refused(f"{key} of rope_scaling with {count} positive numbers", json.dumps(value))
    return tuple(float(v) for v in values)
