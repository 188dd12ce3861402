"""An example batch for a model of transformers, from what its class and its config say."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwright.compiler.diagnostics import UsageError

if TYPE_CHECKING:
    import torch

SAMPLES = 8  # of an example; a job's own number are the same again (our choice)
USUAL_POSITIONS = 1024
"""A model of so many positions is trained on all of them (GPT-2, BERT); those of more positions
say how far inference may reach, so that a length has to be said."""
_OF_TOKENS = ("CausalLM", "LMHeadModel", "MaskedLM", "ConditionalGeneration", "PreTraining")
"""Ends of names of classes whose labels are tokens."""
_OF_CLASSES = ("SequenceClassification", "ImageClassification")


def example_batch(module: torch.nn.Module, seq_len: int = 0) -> dict[str, Any] | None:
    """Random inputs and labels of a model of transformers; None for another module.

    Raises: UsageError SW_SEQ_LEN where a number of tokens has to be said.
    """
    import torch

    config, name = getattr(module, "config", None), type(module).__name__
    inputs = getattr(module, "main_input_name", None)
    if config is None or inputs not in ("input_ids", "pixel_values"):
        return None
    draw = torch.Generator().manual_seed(0)
    if inputs == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        size_of = (SAMPLES, config.num_channels, height, width)
        batch: dict[str, Any] = {inputs: torch.randn(size_of, generator=draw)}
    else:
        shape = (SAMPLES, seq_len or _length(config))
        batch = {inputs: torch.randint(0, config.vocab_size, shape, generator=draw)}
    if name.endswith(_OF_TOKENS) and inputs == "input_ids":
        return {**batch, "labels": batch[inputs]}
    if name.endswith(_OF_CLASSES):
        labels = torch.randint(0, config.num_labels, (SAMPLES,), generator=draw)
        return {**batch, "labels": labels}
    return None


def _length(config: Any) -> int:
    """Tokens of a sample of a model that is trained on all of its positions."""
    most = int(getattr(config, "max_position_embeddings", 0) or getattr(config, "n_positions", 0))
    if 0 < most <= USUAL_POSITIONS:
        return most
    raise UsageError(
        "SW_SEQ_LEN",
        f"a model of up to {most:,} positions requires --seq-len (model.seq_len), got none: they"
        " say how far inference may reach, not how long a training sample is",
        hint=f"say how many tokens a sample has, for example: plan --seq-len {min(most, 4096)}",
    )


_CLASS = re.compile(r"(transformers(?:\.[a-z]\w*)+)\.[A-Z]\w*")


def know_classes(text: str) -> None:
    """Tell torch's pytrees of classes of transformers that a structure's text names; nothing where
    transformers is not imported, as a file alone is no reason to."""
    if "transformers" not in sys.modules:
        return
    for module in sorted(set(_CLASS.findall(text))):
        with suppress(ImportError):
            import_module(module)  # which registers them
