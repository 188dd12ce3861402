"""What is asked of a model that is saved with its NEFF files."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.surface.resolve import Resolved, resolve
from shardwright.orchestrator.compile.compile_flags import flags_alone, of_environment, split_words

SEGMENT = 2
"""documented for torch-neuron: `minimum_segment_size` 2 (its compilation API)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How a model is saved. `minimum_segment_size` is the fewest nodes of a compiled part,
    `no_fuse_ops` are nodes that stay on the CPU, by their names or their operators'; where
    `extract_weights`, weights are no constants of the NEFF files but stay in the model; where
    `beside`, NEFF files lie beside it; `signature` is which of a SavedModel.
    `input_shape` has sizes of open dims, as `compile` takes them, `compiler_args` are flags of
    `compile`; `compiler_workdir` keeps what is made on the way. `analyze` only says what would
    become of it: nothing is compiled or written."""

    target: str = ""
    input_shape: str = ""
    minimum_segment_size: int = SEGMENT
    no_fuse_ops: Collection[str] = ()
    extract_weights: bool = False
    beside: bool = False
    signature: str = ""
    analyze: bool = False
    compiler_args: Sequence[str] | str = ()
    compiler_workdir: Path | str = ""

    def __post_init__(self) -> None:
        if self.minimum_segment_size < 1:
            raise UsageError(
                "SW_USAGE",
                f"minimum_segment_size requires at least 1, got {self.minimum_segment_size}",
            )

    @property
    def resolved(self) -> Resolved:
        """What the flags mean. Raises UsageError, as for a target that is missing."""
        given = self.compiler_args
        words = split_words(given, "compiler_args") if isinstance(given, str) else list(given)
        own = ["--target", self.target] if self.target else []
        return resolve([*of_environment(os.environ), *flags_alone([*words, *own], "save")])
