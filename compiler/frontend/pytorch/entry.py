"""What a user's function that makes a module returns, as a training task.

The function is called without values (`FakeTensorMode`): a model of any size is planned in little
memory. Where its code needs values, and where a run starts, it is called as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.compiler.diagnostics import UsageError, did_you_mean
from shardwright.compiler.frontend.pytorch.distributed import Undistributed
from shardwright.compiler.frontend.pytorch.recomputing import layers_of
from shardwright.compiler.frontend.pytorch.training import Training, train_task
from shardwright.compiler.frontend.pytorch.transformers import example_batch
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.frontend.user_code import called, location

if TYPE_CHECKING:
    import torch

OF_TRAINING = {"model": "module", "net": "module", "loss_fn": "loss", "criterion": "loss"}
"""What training scripts call things -> the field of `Training`; its own names are taken as well."""


def makes_module(result: Any) -> bool:
    """Whether an entry returned a module of PyTorch, or one with what trains it."""
    if isinstance(result, Training):
        return True
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    parts = result.values() if isinstance(result, Mapping) else result
    parts = parts if isinstance(result, tuple | list | Mapping) else (result,)
    return any(isinstance(part, torch.nn.Module) for part in parts)


@dataclass(frozen=True, slots=True)
class Entry:
    """A function of the user's that makes a module: `what` messages call it, its folder, the
    settings of the job that it takes and those that are obeyed for it."""

    what: str
    function: Callable[..., Any]
    folder: str
    taken: Mapping[str, Any]
    others: Mapping[str, Any]


def made(what: str, function: Callable[..., Any], folder: Path, taken: Mapping[str, Any]) -> Any:
    """What a function makes: a module whose tensors have shapes and no values, where its code does
    without them. Raises UsageError at the user's line."""
    # Not public, and what torch.export itself traces with.
    from torch._subclasses.fake_tensor import FakeTensorMode

    with suppress(Exception):  # what else is wrong shows when it is called as it is
        with FakeTensorMode(allow_non_fake_inputs=True), seeded():
            found = function(**taken)
        if makes_module(found):
            return found
    with called(what, str(folder)), seeded():
        return function(**taken)


@contextmanager
def seeded() -> Iterator[None]:
    """Random numbers from fixed seeds inside, and outside as before: code that is called again has
    to make the same module, where it says no seed itself."""
    import random

    import numpy as np
    import torch

    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(SEED)
        random.seed(SEED)
        np.random.seed(SEED)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


SEED = 0  # our choice


def module_task(entry: Entry, result: Any) -> TrainTask:
    """The task of an entry that returned a module.

    Raises: UsageError where something that training needs is missing.
    """
    training = _with_batch(entry, training_of(result))
    said = entry.function.recording if isinstance(entry.function, Undistributed) else None
    remat = str(entry.others.get("remat", ""))
    again = layers_of(training.module, remat) if remat else {}
    if said is not None and not remat:
        again = said.recomputed(training.module)
    training = replace(training, recomputed={**again, **training.recomputed})

    def real() -> Training:
        with called(entry.what, entry.folder), seeded():
            return _with_batch(entry, training_of(entry.function(**entry.taken)))

    task = train_task(training, real if is_fake(training.module) else None)
    if said is None or not said.terms():
        return task
    note = f"its own distribution ({said.terms()[0]}) is what --from pytorch reads"
    return replace(task, notes=(*task.notes, note))


def _with_batch(entry: Entry, training: Training) -> Training:
    """With an example batch: its own, or one that is made up. Raises UsageError without."""
    batch = training.batch
    if batch is None:
        batch = example_batch(training.module, int(entry.others.get("seq_len", 0)))
    if batch is not None:
        return replace(training, batch=batch)
    raise UsageError(
        "SW_TORCH_BATCH",
        f"a training step of {type(training.module).__name__} requires a batch to show it by, got"
        " none",
        location(entry.function),
        "return it beside the module, as the loader yields it: return model, batch",
    )


def training_of(result: Any) -> Training:
    """What training needs of what a function returned: by name in a mapping, else by type. Of a
    loader it is the first batch. Raises UsageError for what is not understood."""
    import torch

    training = Training(**_named(result))
    batch = training.batch
    if batch is not None and not isinstance(batch, torch.Tensor | Mapping | tuple | list):
        batch = next(iter(batch))
    return replace(training, batch=batch, name=training.name or type(training.module).__name__)


SETTINGS = ("seq_len", "remat")
"""Settings of a job that are obeyed for an entry that does not take them."""
_FIELDS = tuple(field.name for field in fields(Training))


def _named(result: Any) -> dict[str, Any]:
    """The fields of `Training` in what an entry returned. Raises UsageError for what is none."""
    if isinstance(result, Training):
        return {name: getattr(result, name) for name in _FIELDS}
    if isinstance(result, Mapping):
        found = {OF_TRAINING.get(str(key), str(key)): part for key, part in result.items()}
        unknown = sorted(set(found) - set(_FIELDS))
        if unknown:
            raise UsageError(
                "SW_TORCH_ENTRY",
                f"an entry that returns a mapping requires keys of {', '.join(_FIELDS)}, got"
                f" {', '.join(unknown)}",
                hint=did_you_mean(unknown[0], (*_FIELDS, *OF_TRAINING)),
            )
        return {"batch": None, **found}
    named: dict[str, Any] = {"batch": None}
    for part in result if isinstance(result, tuple | list) else (result,):
        name = _field_of(part, named)
        if named.get(name) is not None:
            raise UsageError(
                "SW_TORCH_ENTRY",
                f"an entry requires one {name} among what it returns, got two:"
                f" {type(named[name]).__name__} and {type(part).__name__}",
                hint="return a mapping: {'module': ..., 'batch': ...}",
            )
        named[name] = part
    return named


def _field_of(part: Any, found: Mapping[str, Any]) -> str:
    """Which field of `Training` something is, by its type; the first module is the model."""
    import torch

    if isinstance(part, torch.nn.Module):
        return "loss" if "module" in found else "module"
    if isinstance(part, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(part, torch.optim.lr_scheduler.LRScheduler):
        return "scheduler"
    is_batch = isinstance(part, torch.Tensor | Mapping | tuple | list)
    return "loss" if callable(part) and not is_batch else "batch"


def is_fake(module: torch.nn.Module) -> bool:
    """Whether a module was made without values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return any(isinstance(tensor, FakeTensor) for tensor in module.state_dict().values())
