"""A module, its loss and its optimizer as a training step.

What people hand over is what a training script has at hand: the module, a batch of its loader, a
loss, an optimizer with its schedule. The step is that of the script's loop: forward, loss,
gradients, update; buffers that the module changes (running statistics) are state beside the
parameters, and random numbers are drawn with a fresh key per step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.generator import MACHINE
from shardwright.compiler.frontend.pytorch.distribution import Recompute
from shardwright.compiler.frontend.pytorch.exporting import (
    BUFFER,
    PARAMETER,
    Exported,
    export,
)
from shardwright.compiler.frontend.pytorch.interpreter import (
    Values,
    checked,
    evaluate,
)
from shardwright.compiler.frontend.pytorch.optimizers import described, transformation
from shardwright.compiler.frontend.pytorch.places import WRAPPED
from shardwright.compiler.frontend.pytorch.types import array_of, numpy_type
from shardwright.compiler.frontend.task import BATCH, TrainTask
from shardwright.compiler.frontend.train_step import repeated
from shardwright.compiler.frontend.updates import trained_of, updated

if TYPE_CHECKING:
    import torch

TARGET = "target"
"""The leaf of a batch that a loss compares outputs with."""
STATE = PARAMS, BUFFERS, OPTIMIZER = "params", "buffers", "opt_state"
KEY = "dropout_key"
"""Parts of the state of a step, and the key that a module which draws random numbers takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a training script has: `module`, a `batch` as its loader yields it, and, unless the
    module returns its loss (as those of transformers do), a `loss`.

    A batch is a mapping (the module is called with its items as keywords), a tensor, or a sequence
    of what the module takes; a loss of (output, target) takes the last of it. A loss whose first
    argument is called `model` or `module` is given the module and the whole batch.
    `optimizer` is one of torch's over the module's parameters, or a description of one
    (`optimizers.described`), AdamW where nothing is said; `scheduler` one of torch's schedules.
    `recomputed` are paths of modules whose activations the backward pass computes again.
    """

    module: torch.nn.Module
    batch: Any
    loss: Callable[..., Any] | None = None
    optimizer: Any = None
    scheduler: Any = None
    recomputed: Mapping[str, Recompute] = field(default_factory=dict)
    name: str = ""


_WHOLE = ("model", "module", "net")
"""What the first argument of a loss is called that calls the module itself."""


def loss_module(training: Training) -> torch.nn.Module:
    """A module that is called with a batch's leaves in order and returns the loss."""
    import torch

    loss, takes_module = training.loss, _takes_module(training.loss)

    class Loss(torch.nn.Module):  # type: ignore[misc]  # which torch has no types for here
        def __init__(self) -> None:
            super().__init__()
            self.module = training.module

        def forward(self, batch: Any) -> Any:
            if takes_module:
                assert loss is not None
                return _scalar(loss(self.module, batch))
            inputs, target = _split(batch, loss is not None)
            is_named = isinstance(inputs, Mapping)
            output = self.module(**inputs) if is_named else self.module(*inputs)
            return _scalar(_own_loss(output) if loss is None else loss(output, target))

    assert WRAPPED in vars(Loss())["_modules"]
    return Loss()


def _takes_module(loss: Callable[..., Any] | None) -> bool:
    """Whether a loss calls the module itself."""
    try:
        names = list(inspect.signature(loss).parameters) if loss is not None else []
    except (TypeError, ValueError):
        return False
    return bool(names) and names[0] in _WHOLE


def _split(batch: Any, has_target: bool) -> tuple[Any, Any]:
    """(what the module takes, the target) of a batch."""
    if isinstance(batch, Mapping):
        if not has_target:
            return batch, None
        name = TARGET if TARGET in batch else "labels"
        return {key: value for key, value in batch.items() if key != name}, batch[name]
    parts = tuple(batch) if isinstance(batch, list | tuple) else (batch,)
    return (parts[:-1], parts[-1]) if has_target else (parts, None)


def _own_loss(output: Any) -> Any:
    """The loss that a module returns: in a field or under a key, first in a tuple, or alone."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is not None:
        return found
    return output[0] if isinstance(output, tuple | list) else output


def _scalar(loss: Any) -> Any:
    """A loss that is one number. Raises UsageError for another."""
    import torch

    if isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.is_floating_point():
        return loss
    given = type(loss).__name__
    if isinstance(loss, torch.Tensor):
        given = f"{str(loss.dtype).removeprefix('torch.')}{list(loss.shape)}"
    raise UsageError(
        "SW_TORCH_LOSS",
        f"a training step requires a loss that is one floating-point number, got {given}",
        hint="give a loss: Training(module=..., batch=..., loss=torch.nn.functional.cross_entropy),"
        " or take its mean",
    )


_NO_LOSS = (
    "no loss was given, so the module is called with all of the batch and returns its loss: return"
    " one beside the module where the batch has a target"
)


@dataclass(frozen=True)
class _Step:
    """A training step of a module, as a function of arrays."""

    training: Training
    real: Callable[[], Training] | None = None
    """Makes the same with values, where `training` has none."""

    @cached_property
    def transformation(self) -> Any:
        """The optimizer, as optax has it."""
        return transformation_of(self.training)

    @cached_property
    def module(self) -> torch.nn.Module:
        """The module that returns the loss."""
        return loss_module(self.training)

    @cached_property
    def leaves(self) -> Leaves:
        """The leaves of the example."""
        return Leaves.of(self.training.batch)

    @cached_property
    def names(self) -> Mapping[str, str]:
        """Name of a parameter or buffer in the graph -> its name in the user's module. One that
        stands in several places has the first of its names."""
        first: dict[int, str] = {}
        found = {}
        every = (self.module.named_parameters, self.module.named_buffers)
        for tensors in every:
            for name, tensor in tensors(remove_duplicate=False):
                own = name.removeprefix(f"{WRAPPED}.")
                found[name] = first.setdefault(id(tensor), own)
        return found

    @cached_property
    def graphs(self) -> dict[int, Exported]:
        """Graphs by number of samples."""
        return {}

    def exported(self, samples: int) -> Exported:
        """The graph of a loss over so many samples. Raises UsageError for an operator without a
        row."""
        if samples not in self.graphs:
            batch = self.leaves.batch(samples)
            hint = {"hint": _NO_LOSS} if self.training.loss is None else {}
            found = checked(export(self.module, (batch,), {}, self.training.name, **hint))
            renamed = tuple(
                (kind, self.names[name] if kind in (PARAMETER, BUFFER) else name)
                for kind, name in found.arguments
            )
            results = tuple(self.names[name] if name else name for name in found.results)
            self.graphs[samples] = Exported(
                *(found.graph, renamed, results, found.constants, found.structure),
                self.training.recomputed,
            )
        return self.graphs[samples]

    def tensors(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The module's (parameters, buffers) by name, each once."""
        params, buffers = (
            {self.names[name]: tensor for name, tensor in tensors(remove_duplicate=False)}
            for tensors in (self.module.named_parameters, self.module.named_buffers)
        )
        return params, buffers

    def init(self, _: Any) -> tuple[Any, ...]:
        """The module's own values, and the optimizer's."""
        import jax

        if self.real is not None:
            return _Step(self.real()).init(_)
        params, buffers = (
            {name: jax.numpy.asarray(array_of(tensor)) for name, tensor in tensors.items()}
            for tensors in self.tensors()
        )
        return params, buffers, self.transformation.init(trained_of(params, self.trained))

    def shapes(self) -> tuple[Any, ...]:
        """The state without values."""
        import jax

        params, buffers = (
            {name: _shape(tensor) for name, tensor in tensors.items()} for tensors in self.tensors()
        )
        return (
            params,
            buffers,
            jax.eval_shape(self.transformation.init, trained_of(params, self.trained)),
        )

    def step(
        self, params: Any, buffers: Any, opt_state: Any, batch: Any, dropout_key: Any = None
    ) -> Any:
        """(params, buffers, opt_state, metrics) after one step."""
        exported = self.exported(self.leaves.count(batch))
        inputs = self.leaves.ordered(batch)

        def loss_of(params: Mapping[str, Any]) -> tuple[Any, Any]:
            (loss,), changed = evaluate(exported, Values(params, buffers, inputs, dropout_key))
            return loss, changed

        new = updated(loss_of, params, self.trained, self.transformation, opt_state)
        return new.params, {**buffers, **new.beside}, new.opt_state, {"loss": new.loss}

    @cached_property
    def trained(self) -> frozenset[str]:
        """Parameters that have a gradient: torch's optimizers pass over those that nothing uses."""
        params, _ = self.tensors()
        used = self.exported(self.leaves.samples).used
        return frozenset(n for n, tensor in params.items() if tensor.requires_grad and n in used)

    @cached_property
    def draws(self) -> bool:
        """Whether the module draws random numbers."""
        import jax

        leaves = self.leaves
        params, buffers = (
            {name: _shape(tensor) for name, tensor in tensors.items()} for tensors in self.tensors()
        )
        exported = self.exported(leaves.samples)

        def without_key(params: Any, buffers: Any, batch: Any) -> Any:
            return evaluate(exported, Values(params, buffers, leaves.ordered(batch)))

        try:
            jax.eval_shape(without_key, params, buffers, leaves.shapes(leaves.samples))
        except UsageError as error:
            if error.code != "SW_TORCH_RANDOM":
                raise
            return True
        return False

    def roles(self) -> dict[str, str]:
        """Buffers that a step changes are kept as an optimizer's state is."""
        _, buffers = self.tensors()
        changed = set(self.exported(self.leaves.samples).results)
        return {
            f"{BUFFERS}/{name}": "optimizer" if name in changed else "buffer" for name in buffers
        }


def _shape(tensor: Any) -> Any:
    import jax

    return jax.ShapeDtypeStruct(tuple(tensor.shape), numpy_type(tensor.dtype))


@dataclass(frozen=True, slots=True)
class Leaves:
    """The tensors of an example batch by name, and what stands around them."""

    tensors: Mapping[str, Any]
    structure: Any
    others: Mapping[int, Any]
    """What is no tensor, by its place among the leaves."""

    @classmethod
    def of(cls, batch: Any) -> Leaves:
        """Those of an example. Raises UsageError where it has no tensor."""
        import torch
        from torch.utils import _pytree  # the pytrees of torch.export's own arguments

        found, structure = _pytree.tree_flatten_with_path(batch)
        tensors, others = {}, {}
        for place, (path, leaf) in enumerate(found):
            if isinstance(leaf, torch.Tensor):
                tensors[_leaf_name(path, place)] = leaf
            else:
                others[place] = leaf
        if not tensors or any(not tensor.ndim for tensor in tensors.values()):
            raise UsageError(
                "SW_TORCH_BATCH",
                "a training step requires a batch of tensors with samples along dim 0, got"
                f" {type(batch).__name__}",
                hint="give what a loader yields: a dict, a tensor, or a tuple of tensors",
            )
        counts = {name: int(tensor.shape[0]) for name, tensor in tensors.items()}
        if len(set(counts.values())) > 1:
            raise UsageError(
                "SW_TORCH_BATCH",
                "a training step requires a batch with as many samples along dim 0 of each tensor,"
                f" got {', '.join(f'{count} of {name}' for name, count in counts.items())}",
                hint="give what the loader yields; what has no samples belongs into the module",
            )
        return cls(tensors, structure, others)

    @property
    def samples(self) -> int:
        """How many samples the example has."""
        return self.count(self.tensors)

    def count(self, batch: Mapping[str, Any]) -> int:
        """How many samples a batch has, the size of dim 0 of its first leaf."""
        return int(next(iter(batch[name] for name in self.tensors)).shape[0])

    @property
    def tokens(self) -> int:
        """Tokens of a sample: the positions of the first leaf of whole numbers that has some."""
        lines = (t for t in self.tensors.values() if t.ndim == 2 and not t.is_floating_point())
        return next((int(line.shape[1]) for line in lines), 1)

    def ordered(self, batch: Mapping[str, Any]) -> list[Any]:
        """The leaves of a batch in the order of the example."""
        return [batch[name] for name in self.tensors]

    def batch(self, samples: int) -> Any:
        """The example with so many samples, those of the example again and again."""
        import torch

        rows = torch.arange(samples) % self.samples
        given = iter(self.tensors.values())
        count = len(self.tensors) + len(self.others)
        leaves = [self.others[n] if n in self.others else next(given)[rows] for n in range(count)]
        from torch.utils import _pytree

        return _pytree.tree_unflatten(leaves, self.structure)

    def shapes(self, samples: int) -> dict[str, Any]:
        """The leaves of so many samples without values."""
        import jax

        return {
            name: jax.ShapeDtypeStruct((samples, *t.shape[1:]), numpy_type(t.dtype))
            for name, t in self.tensors.items()
        }

    def values(self) -> dict[str, Any]:
        """The leaves of the example."""
        return {name: array_of(tensor) for name, tensor in self.tensors.items()}


def _leaf_name(path: Sequence[Any], place: int) -> str:
    """The name of a leaf of a batch: its keys, or its place."""
    parts = [str(getattr(p, "key", getattr(p, "idx", getattr(p, "name", place)))) for p in path]
    name = "_".join(parts) or "x"
    return f"x{name}" if name[0].isdigit() else name


USUAL = {"name": "AdamW"}
"""The optimizer of a training script that names none: torch's AdamW as it is without options."""


def transformation_of(training: Training) -> Any:
    """The optimizer of a training script as an optax transformation."""
    given = training.optimizer if training.optimizer is not None else USUAL
    if isinstance(given, Mapping):
        return described(given)
    return transformation(given, training.module.named_parameters(), training.scheduler or ())


def train_task(training: Training, real: Callable[[], Training] | None = None) -> TrainTask:
    """The task of a training script; `real` makes the same again where its module has no values.

    Raises UsageError for what cannot be traced, at the user's line.
    """
    training.module.train()
    step = _Step(training, real)
    leaves = step.leaves
    if not any(p.requires_grad for p in training.module.parameters()):
        raise UsageError(
            "SW_TASK_PARAMETERS",
            f"a training step of {training.name} requires a parameter with requires_grad, got none",
            hint="train a part of it: module.head.requires_grad_(True)",
        )

    def batches(seed: int, samples: int, data: str | None) -> Iterator[Any]:
        own = leaves if real is None else Leaves.of(real().batch)
        return repeated(own.values(), samples, 0)

    return TrainTask(
        step=step.step,
        init=step.init,
        state=step.shapes(),
        batch=leaves.shapes,
        batches=batches,
        state_names=STATE,
        generator=MACHINE,  # as torch leaves it to its device
        arguments=(*STATE, BATCH, *([KEY] if step.draws else [])),
        roles=step.roles(),
        samples=leaves.samples,
        tokens_per_sample=leaves.tokens,
        name=training.name or type(training.module).__name__,
    )
