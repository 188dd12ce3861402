"""A module, its loss and its optimizer as a training step.

What people hand over is what a training script has at hand: the module, a batch of its loader, a
loss, an optimizer with its schedule. The step is that of the script's loop: forward, loss,
gradients, update; buffers that the module changes (running statistics) are state beside the
parameters, and random numbers are drawn with a fresh key per step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.pytorch.exporting import (
    BUFFER,
    PARAMETER,
    Exported,
    export,
)
from shardwright.compiler.frontend.pytorch.interpreter import (
    Values,
    evaluate,
    missing,
    unsupported,
)
from shardwright.compiler.frontend.pytorch.places import WRAPPED
from shardwright.compiler.frontend.pytorch.types import array_of, numpy_type
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.frontend.train_step import repeated

if TYPE_CHECKING:
    import torch

TARGET = "target"
"""The leaf of a batch that a loss compares outputs with."""
PARAMS, BUFFERS, OPTIMIZER, KEY = "params", "buffers", "opt_state", "dropout_key"
"""Parts of the state of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a training script has: `module`, a `batch` as its loader yields it, and, unless the
    module returns its loss (as those of transformers do), a `loss`.

    A batch is a mapping (the module is called with its items as keywords), a tensor, or a sequence
    of what the module takes; a loss of (output, target) takes the last of it. A loss whose first
    argument is called `model` or `module` is given the module and the whole batch.
    `optimizer` is one of torch's over the module's parameters, `scheduler` one of its schedules.
    """

    module: torch.nn.Module
    batch: Any
    loss: Callable[..., Any] | None = None
    optimizer: Any = None
    scheduler: Any = None
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


@dataclass(frozen=True)
class _Step:
    """A training step of a module, as a function of arrays."""

    training: Training
    transformation: Any

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
            found = export(self.module, (batch,), {}, self.training.name)
            without = missing(found)
            if without:
                raise unsupported(without)
            renamed = tuple(
                (kind, self.names[name] if kind in (PARAMETER, BUFFER) else name)
                for kind, name in found.arguments
            )
            results = tuple(self.names[name] if name else name for name in found.results)
            self.graphs[samples] = Exported(
                found.graph, renamed, results, found.constants, found.structure
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

        params, buffers = (
            {name: jax.numpy.asarray(array_of(tensor)) for name, tensor in tensors.items()}
            for tensors in self.tensors()
        )
        return params, buffers, self.transformation.init(params)

    def shapes(self) -> tuple[Any, ...]:
        """The state without values."""
        import jax

        params, buffers = (
            {name: _shape(tensor) for name, tensor in tensors.items()} for tensors in self.tensors()
        )
        return params, buffers, jax.eval_shape(self.transformation.init, params)

    def step(self, params: Any, buffers: Any, opt_state: Any, batch: Any, dropout_key: Any) -> Any:
        """(params, buffers, opt_state, metrics) after one step."""
        import jax
        import optax

        exported = self.exported(self.leaves.count(batch))
        inputs = self.leaves.ordered(batch)

        def loss_of(params: Any) -> tuple[Any, Any]:
            values = Values({**params, **frozen}, buffers, inputs, dropout_key)
            (loss,), changed = evaluate(exported, values)
            return loss, changed

        trained = self.trained
        frozen = {name: leaf for name, leaf in params.items() if name not in trained}
        own = {name: leaf for name, leaf in params.items() if name in trained}
        (loss, changed), gradients = jax.value_and_grad(loss_of, has_aux=True)(own)
        gradients |= {name: jax.numpy.zeros_like(leaf) for name, leaf in frozen.items()}
        updates, opt_state = self.transformation.update(gradients, opt_state, params)
        updated = optax.apply_updates(params, updates)
        return {**updated, **frozen}, {**buffers, **changed}, opt_state, {"loss": loss}

    @cached_property
    def trained(self) -> frozenset[str]:
        """Parameters that have a gradient."""
        params, _ = self.tensors()
        return frozenset(name for name, tensor in params.items() if tensor.requires_grad)

    def roles(self) -> dict[str, str]:
        """Buffers that a step changes are kept as an optimizer's state is, others are frozen."""
        _, buffers = self.tensors()
        changed = set(self.exported(self.leaves.samples).results)
        return {
            f"{BUFFERS}/{name}": "optimizer" if name in changed else "frozen" for name in buffers
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
        return cls(tensors, structure, others)

    @property
    def samples(self) -> int:
        """How many samples the example has."""
        return self.count(self.tensors)

    def count(self, batch: Mapping[str, Any]) -> int:
        """How many samples a batch has, the size of dim 0 of its first leaf."""
        return int(next(iter(batch[name] for name in self.tensors)).shape[0])

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


def train_task(training: Training, transformation: Any) -> TrainTask:
    """The task of a training script with an optax transformation for its optimizer.

    Raises UsageError for what cannot be traced, at the user's line.
    """
    training.module.train()
    step = _Step(training, transformation)
    leaves = step.leaves

    def batches(seed: int, samples: int, data: str | None) -> Iterator[Any]:
        return repeated(leaves.values(), samples, 0)

    shape = next(iter(leaves.tensors.values())).shape
    return TrainTask(
        step=step.step,
        init=step.init,
        state=step.shapes(),
        batch=leaves.shapes,
        batches=batches,
        state_names=(PARAMS, BUFFERS, OPTIMIZER),
        roles=step.roles(),
        samples=leaves.samples,
        tokens_per_sample=int(shape[1]) if len(shape) == 2 else 1,
        name=training.name or type(training.module).__name__,
    )
