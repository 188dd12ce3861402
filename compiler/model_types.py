"""What a model type switches on, by name. Each entry is described in docs/compile.md; lowering
(`lower/accept.py`) and code generation (`codegen/search.py`) read this table and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelType:
    """Choices that suit a family of models.

    `keep_scores`: by how much a reduction fusion may be slower than its parts, because the memory
    is worth more in training. `wide_norms`: loop fusions fill more of an SBUF partition, so
    that a normalisation over positions and channels is one kernel. `searched`: kinds of nests
    (contraction, loop, windows) that are searched at -O2 as they are at -O3.
    """

    keep_scores: float = 0.0
    wide_norms: bool = False
    searched: frozenset[str] = frozenset()


MODEL_TYPES = {
    "generic": ModelType(),
    "transformer": ModelType(keep_scores=0.1, searched=frozenset(("contraction",))),
    "unet-inference": ModelType(wide_norms=True, searched=frozenset(("loop", "windows"))),
}
