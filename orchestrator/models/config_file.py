"""Values of a Hugging Face `config.json`, checked: sizes, plain values, and rotary positions.

What a model here does not build is refused and named, never left out of the answer. Both
spellings of the library are read: `rope_scaling` beside `rope_theta`, and `rope_parameters`
(transformers 5) with both in it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from shardwright.compiler.diagnostics import UsageError, did_you_mean, nearest

Config = Mapping[str, Any]

MOST_SIZE = 2**31 - 1
"""What indices of the machine reach."""
OWN_MODEL = 'describe the model in JAX and use [model] entry = "module:function"'


def sizes(config: Config, required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, int]:
    """Positive integers of the config; optional ones may be missing or null.

    Raises UsageError that names every key at fault, and what it may be spelled like.
    """
    wanted = [*required, *(key for key in optional if config.get(key) is not None)]
    wrong = [key for key in wanted if not _is_size(config.get(key))]
    if wrong:
        required = f"{_positive(wrong)}{_bound(config, wrong)}"
        given = ", ".join(json.dumps(config[k]) if k in config else "nothing" for k in wrong)
        hint = _near(config, wrong) or "take them from the model's own config.json"
        raise refused(required, given, hint)
    return {key: config[key] for key in wanted}


def refused(required: str, given: str, hint: str = "") -> UsageError:
    """The refusal of a config that has `given` where something else is required."""
    message = f"config requires {required}, got {given}"
    return UsageError("SW_MODEL_CONFIG", message, hint=hint)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value <= MOST_SIZE


def _positive(keys: list[str]) -> str:
    kind = "a positive integer" if len(keys) == 1 else "positive integers"
    return f"{kind} {', '.join(keys)}"


def _bound(config: Config, keys: list[str]) -> str:
    """What is required besides, where a number is too large."""
    is_large = any(type(config.get(key)) is int and config[key] > MOST_SIZE for key in keys)
    return f" of at most {MOST_SIZE}" if is_large else ""


def _near(config: Config, keys: list[str]) -> str:
    """Keys of the config that are like a missing size, and are sizes."""
    sized = [key for key, value in config.items() if _is_size(value)]
    pairs = ((key, nearest(key, sized)) for key in keys if key not in config)
    return "; ".join(f"is {near[0]} meant to be {key}?" for key, near in pairs if near)


def numbers(config: Config, keys: Iterable[str]) -> dict[str, float]:
    """Positive numbers of the config that are there. Raises UsageError for anything else."""
    found = {key: config[key] for key in keys if config.get(key) is not None}
    for key, value in found.items():
        if not _is_number(value):
            raise refused(f"a positive number {key}", json.dumps(value))
    return {key: float(value) for key, value in found.items()}


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= sys.float_info.max


def refuse_features(config: Config, plain: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises UsageError for a key whose value is not among the plain ones."""
    for key, values in plain.items():
        if key in config and config[key] not in values:
            wanted = " or ".join(json.dumps(value) for value in values)
            given = json.dumps(config[key])
            raise refused(f"{key} = {wanted}", given, _meant(config[key], values))


def _meant(value: object, values: tuple[Any, ...]) -> str:
    """What to do about a value that is none of those: a name may be a slip of the hand, or the name
    of what is not built here."""
    names = [name for name in values if isinstance(name, str)]
    near = did_you_mean(value, names) if isinstance(value, str) else ""
    return f"{near} Else {OWN_MODEL}" if near else OWN_MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are scaled beyond the positions of pre-training: all by `factor`, or
    (Llama 3.1, with `positions` > 0) those of wavelengths above `positions / low`, with a ramp from
    `positions / high` on. Source: transformers, `modeling_rope_utils.py`.
    """

    factor: float
    low: float = 1.0
    high: float = 1.0
    positions: int = 0


_RAMP = ("low_freq_factor", "high_freq_factor")


def rope(config: Config) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of the config, where given.

    Raises UsageError for scaling that is neither linear nor Llama 3's.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise refused("rope_scaling as an object", json.dumps(parameters))
    found: dict[str, Any] = {**numbers({**config, **parameters}, ("rope_theta",))}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return found
    if kind not in ("linear", "llama3"):
        required = "rope_type default, linear or llama3 of rope_scaling"
        raise refused(required, json.dumps(kind), OWN_MODEL)
    return found | {"rope_scaling": _scaling(parameters, kind)}


def _scaling(parameters: Config, kind: str) -> RopeScaling:
    keys = ("factor", *_RAMP) if kind == "llama3" else ("factor",)
    given = numbers(parameters, keys)
    missing = [key for key in keys if key not in given]
    if missing:
        raise refused(f"{', '.join(missing)} of rope_scaling", "nothing")
    if kind == "linear":
        return RopeScaling(factor=given["factor"])
    low, high = (given[key] for key in _RAMP)
    if low >= high:
        raise refused("low_freq_factor below high_freq_factor", f"{low:g} and {high:g}")
    (positions,) = sizes(parameters, ["original_max_position_embeddings"]).values()
    return RopeScaling(factor=given["factor"], low=low, high=high, positions=positions)


MOST_PRETRAINED = 8192
"""Positions up to which a config's maximum is what samples of its training have. Llama 2 and 3 are
trained at all of their 4,096 and 8,192 from the start; more comes in a late stage of few tokens
(Grattafiori et al. 2024, section 3.4.2), or with another base or a scaling of rotary positions,
which cost no parameters."""
_EXAMPLE_LENGTH = 4096


class Stretched(Protocol):
    """Any scaling of rotary positions."""

    @property
    def positions(self) -> int:
        """Those of pre-training, or 0 where it does not say."""


def usual_length(most: int, scaling: Stretched | None, window: int) -> int:
    """Tokens of a training sample of a config of `most` positions, where nothing says how many;
    `window` is how far a token looks back, or 0.

    Raises UsageError where the positions are those that inference may reach: more than models are
    pre-trained at from the start, or stretched by scaling.
    """
    if most <= MOST_PRETRAINED and scaling is None:
        return most
    before = scaling.positions if scaling else 0
    scaled = " by rope_scaling" if scaling else ""
    raise UsageError(
        "SW_SEQ_LEN",
        f"a config of up to {most:,} positions{scaled} requires --seq-len (model.seq_len), got"
        " none: they say how far inference may reach, not how long a training sample is",
        hint="say how many tokens a sample has, for example: plan --seq-len"
        f" {min(most, before or window or _EXAMPLE_LENGTH)}",
    )


def without_experts(name: str) -> UsageError:
    """The refusal of a capacity of experts that a model does not have."""
    return UsageError(
        "SW_MODEL_SETTING",
        f"model.capacity_factor requires a model with experts, got {name}",
        hint="leave the setting out",
    )
