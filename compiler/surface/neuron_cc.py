"""neuron-cc's `--fast-math` and `--fp32-cast` as compile options.

`--fast-math` is a list of words: `all` or `none`, one cast, one relayout; a word of its own beats
what `all` or `none` stand for, and `--fp32-cast` beats the cast of both. Source: the command
reference of neuron-cc; the ladder from fast to exact is that of its mixed-precision note (all,
fp32-cast-matmult, no-fast-relayout with it, none).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardwright.compiler.diagnostics import UsageError, did_you_mean

CAST_PREFIX = "fp32-cast-"
CASTS = {
    "all": ("all", "bf16", "bf16"),
    "all-fp16": ("all", "fp16", "fp16"),
    "matmult": ("matmult", "bf16", "fp16"),
    "matmult-bf16": ("matmult", "bf16", "bf16"),
    "matmult-fp16": ("matmult", "fp16", "fp16"),
}
"""Cast -> which fp32 operations it rounds, to which type, and the type of fast transposes."""
FAST, EXACT = "fast-relayout", "no-fast-relayout"
_WHOLE = {"all": ("all", FAST), "none": ("matmult-bf16", EXACT)}
_WORDS_OF_CASTS = tuple(f"{CAST_PREFIX}{name}" for name in CASTS)
WORDS = (*_WHOLE, *_WORDS_OF_CASTS, FAST, EXACT)
"""What `--fast-math` takes."""
DEFAULT = "all"


def cast_options(fast_math: str, fp32_cast: str = "") -> dict[str, str]:
    """`auto_cast`, `auto_cast_type` and `relayout` of `CompileOptions`; `fp32_cast` is a key of
    `CASTS`, or empty.

    Raises UsageError (SW_USAGE) for an unknown word, and for two of a kind.
    """
    words = [word for word in re.split(r"[,\s]+", fast_math.lower()) if word]
    unknown = [word for word in words if word not in WORDS]
    if unknown or not words:
        given = unknown[0] if unknown else fast_math
        raise UsageError(
            "SW_USAGE",
            f"--fast-math requires words of {', '.join(WORDS)}, got {given!r}",
            hint=did_you_mean(given, WORDS),
        )
    whole = _one_of(words, tuple(_WHOLE)) or DEFAULT
    cast, relayout = _WHOLE[whole]
    cast = fp32_cast or _one_of(words, _WORDS_OF_CASTS).removeprefix(CAST_PREFIX) or cast
    relayout = _one_of(words, (FAST, EXACT)) or relayout
    computed, dtype, moved = CASTS[cast]
    return {
        "auto_cast": computed,
        "auto_cast_type": dtype,
        "relayout": moved if relayout == FAST else "exact",
    }


def _one_of(words: Sequence[str], kind: Sequence[str]) -> str:
    """The word of a kind, empty where there is none. Raises UsageError for two."""
    found = list(dict.fromkeys(word for word in words if word in kind))
    if len(found) > 1:
        raise UsageError(
            "SW_USAGE",
            f"--fast-math requires one of {', '.join(kind)}, got {' and '.join(found)}",
            hint=f"keep {found[0]} or {found[1]}",
        )
    return found[0] if found else ""
