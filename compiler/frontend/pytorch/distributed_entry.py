"""What a function of a user's that makes a module says about its distribution."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.entry import call_entry
from shardwright.compiler.frontend.pytorch.distributed import reading
from shardwright.compiler.frontend.pytorch.distribution import Distribution


def from_function(entry: str, folder: Path, world_size: int, asked_by: str) -> Distribution:
    """What `module:function` of a folder does to the model that it returns, alone or among others.

    It is called without values first (`FakeTensorMode`), so that a model of any size is read in
    little memory. Raises UsageError (SW_ENTRY) for a function that returns no module, and as
    `reading`.
    """
    # Not public, and what torch.export itself traces with.
    from torch._subclasses.fake_tensor import FakeTensorMode

    for mode in (FakeTensorMode(allow_non_fake_inputs=True), nullcontext()):
        with reading(world_size, str(folder)) as recording:
            try:
                with mode:
                    made = call_entry(entry, folder, asked_by)
            except UsageError as error:
                if error.code == "SW_TASK_RAISED" and not isinstance(mode, nullcontext):
                    continue
                raise
            said = recording.distribution(_module_of(made, entry, asked_by))
            return replace(said, samples=_samples_of(made))
    raise AssertionError("the second call returns or raises")


def _samples_of(made: Any) -> int:
    """The samples of the batch among what a function returned, 0 without one."""
    from shardwright.compiler.frontend.pytorch.entry import makes_module, training_of
    from shardwright.compiler.frontend.pytorch.training import Leaves

    training = training_of(made) if makes_module(made) else None
    return Leaves.of(training.batch).samples if training and training.batch is not None else 0


def _module_of(made: Any, entry: str, asked_by: str) -> Any:
    """The module among what a function returned. Raises UsageError (SW_ENTRY)."""
    import torch

    parts = made.values() if isinstance(made, Mapping) else made
    parts = parts if isinstance(made, Mapping | tuple | list) else (getattr(made, "module", made),)
    for part in (made, *parts):
        if isinstance(part, torch.nn.Module):
            return part
    raise UsageError(
        "SW_ENTRY",
        f"{asked_by} {entry} requires a function that returns the module it has distributed, got"
        f" {type(made).__name__}",
        hint="end it with: return model",
    )
