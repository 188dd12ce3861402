"""A training step of TensorFlow: the user's own, or a model with a loss by name and the job's
optimizer.

A step of the user's assigns variables: they are the state, what each is follows from what the loss
depends on. Of a model the child takes gradients, with TensorFlow's own tape. Either is a program
of a fixed number of samples, traced when a number is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import ImportRuleError, Loc, UsageError
from shardwright.compiler.frontend.graphs.training import drawn, of_file
from shardwright.compiler.frontend.graphs.types import Array, narrowed
from shardwright.compiler.frontend.isolated import Reader
from shardwright.compiler.frontend.module_task import reaching
from shardwright.compiler.frontend.roles import Use, roles_of
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.frontend.tensorflow.asking import Asked, Tracer
from shardwright.compiler.frontend.tensorflow.program import (
    GRADIENT,
    LOSS,
    RESULT,
    UPDATE,
    Port,
    Program,
)
from shardwright.compiler.frontend.tensorflow.start import split_name
from shardwright.compiler.frontend.train_step import repeated, tokens_of
from shardwright.compiler.frontend.updates import applied
from shardwright.compiler.surface.releases import Profile

PARAMS, BUFFERS, OPTIMIZER = "params", "buffers", "opt_state"
_PART = {"parameter": PARAMS, "frozen": PARAMS}
"""Role of a variable -> the part of the state that it is in; others are the optimizer's."""
_PROBED = 1  # samples that a model is looked at with, where it says no number


@dataclass(frozen=True)
class _Source:
    """Programs of one function, by their number of samples."""

    asked: Asked
    tracer: Tracer
    programs: dict[tuple[int, bool], Program] = field(default_factory=dict)

    def program(self, samples: int, values: bool = False) -> Program:
        """The program of so many samples, 0 as many as it says itself; with values of variables
        where they are asked for.

        Raises: as `Tracer.traced`; UsageError SW_BATCH where it is one of another number.
        """
        known = self.programs.get((samples, True)) or self.programs.get((samples, values))
        if known is not None:
            return known
        a = self.asked
        asked = Asked(
            model=a.model, sizes=a.sizes, samples=samples, training=True, loss=a.loss, values=values
        )
        found = Program.read(self.tracer.traced(asked))
        if samples and found.samples not in (0, samples):
            raise UsageError(
                "SW_BATCH",
                f"{found.name} is a function of {found.samples} samples, which requires"
                f" strategy.micro_batch x data-parallel ranks = {found.samples}, got {samples}",
                hint="leave the first dim of its inputs open, or set --micro-batch",
            )
        self.programs[samples, values] = found
        self.programs[found.samples, values] = found
        return found


@dataclass(frozen=True)
class _Step:
    """A training step as a function of arrays. `first` is its program as it was looked at, whose
    number of samples is `samples`, 0 where any is."""

    source: _Source
    first: Program
    samples: int
    path: str

    @cached_property
    def leaves(self) -> dict[str, str]:
        """Name of a variable -> its name in the state, which is a path."""
        found: dict[str, str] = {}
        for port in self.first.variables:
            parts = [p for p in port.name.replace("\\", "/").split("/") if p.strip(".")]
            leaf = "/".join(parts) or "variable"
            found[port.name] = f"{leaf}_{len(found)}" if leaf in found.values() else leaf
        return found

    @cached_property
    def values(self) -> dict[str, Array]:
        """First values of the variables."""
        program = self.source.program(self.first.samples, values=True)
        return {name: narrowed(array) for name, array in program.values.items()}

    def program(self, batch: Mapping[str, Any]) -> Program:
        """The program of as many samples as a batch has."""
        names = [p.name for p in self.first.inputs if p.shape[:1] == (self.first.samples,)]
        return self.source.program(batch[names[0]].shape[0] if names else 0)

    def batch(self, samples: int) -> dict[str, Any]:
        """Inputs of so many samples, without values. Raises UsageError."""
        program = self.source.program(samples)
        return {port.name: port.computed for port in program.inputs}

    def batches(self, seed: int, samples: int, data: str | None) -> Iterator[dict[str, Array]]:
        """Batches of what `data` names, else of the user's example again and again, else random
        numbers."""
        rng, shapes = np.random.default_rng(seed), self.batch(samples)
        if data and data.endswith(".npz"):
            yield from of_file(Path(data), shapes, samples)
        example = self.source.program(self.first.samples, values=True).example
        if set(shapes) <= set(example):
            own = {name: narrowed(example[name]) for name in shapes}
            yield from repeated(own, samples, 0)
        most = {port.name: port.classes or 2 for port in self.first.inputs}
        while True:
            yield {name: drawn(rng, leaf, most[name]) for name, leaf in sorted(shapes.items())}

    def shapes(self, ports: list[Port]) -> dict[str, Any]:
        """Variables without values, by their names in the state."""
        return {self.leaves[port.name]: port.computed for port in ports}

    def arrays(self, ports: list[Port]) -> dict[str, Any]:
        """First values of variables, by their names in the state."""
        import jax

        values = self.values
        return {self.leaves[p.name]: jax.numpy.asarray(values[p.name]) for p in ports}

    def task(self, **rest: Any) -> TrainTask:
        """With what is alike of both kinds."""
        probed = {port.name: port.computed for port in self.first.inputs}
        return TrainTask(
            batch=self.batch,
            batches=self.batches,
            samples=self.samples,
            tokens_per_sample=tokens_of(probed, 0),
            name=self.first.name,
            **rest,
        )


@dataclass(frozen=True)
class _Own(_Step):
    """A step of the user's, which assigns its variables."""

    @cached_property
    def loss(self) -> Port:
        """The result that is its loss. Raises UsageError where there is none."""
        numbers = [
            p for p in self.first.of(RESULT) if not p.shape and p.computed.dtype.kind not in "biu"
        ]
        named = [port for port in numbers if port.name.rpartition("/")[2] == "loss"]
        if numbers:
            return (named or numbers)[0]
        results = self.first.of(RESULT)
        shown = ", ".join(f"{p.name} {p.dtype}{list(p.shape)}" for p in results) or "nothing"
        raise UsageError(
            "SW_TF_LOSS",
            f"a training step requires a loss among its results, one number, got {shown}",
            Loc(self.path),
            "return it: return loss, or a mapping with a key loss",
        )

    @cached_property
    def roles(self) -> dict[str, str]:
        """What the variables are, by name."""
        with Reader() as reader:
            graph, _ = reader.read(self.first.written(), str(Path(self.path).parent), Profile())
        order = [(port.kind, port.name) for port in self.first.results]
        before = reaching(graph, graph.outputs[order.index((RESULT, self.loss.name))])
        assigned = {port.name for port in self.first.of(UPDATE)}
        given, leaves = dict[str, str](), []
        for port, value in zip(self.first.variables, graph.inputs, strict=False):
            use = Use(is_read=value in before, is_kept=port.name not in assigned)
            if use.is_read and use.is_kept and not value.type.dtype.is_float:
                given[port.name] = "buffer"  # a table of whole numbers, no key of random ones
            leaves.append((port.name, value.type.dtype, use))
        found = roles_of([(f"state/{n}", d, u) for n, d, u in leaves], _below("state", given))
        return dict(zip((name for name, _, _ in leaves), found, strict=True))

    def part(self, *parts: str) -> list[Port]:
        """Variables of parts of the state."""
        known = {
            n: _PART.get(r, BUFFERS if r == "buffer" else OPTIMIZER) for n, r in self.roles.items()
        }
        return [port for port in self.first.variables if known[port.name] in parts]

    def step(self, *parts: Any) -> Any:
        """(parts of the state, metrics) after one step."""
        *state, batch = parts
        variables = {name: leaf for part in state for name, leaf in part.items()}
        given = {name: variables[leaf] for name, leaf in self.leaves.items()}
        found = self.program(batch)({**given, **batch})
        new = {self.leaves[name]: value for (kind, name), value in found.items() if kind == UPDATE}
        metrics = {name: value for (kind, name), value in found.items() if kind == RESULT}
        loss = metrics.pop(self.loss.name)
        after = ({name: new.get(name, leaf) for name, leaf in part.items()} for part in state)
        return *after, {"loss": loss, **metrics}

    def made(self) -> TrainTask:
        """The task."""
        names = [name for name in (PARAMS, BUFFERS, OPTIMIZER) if self.part(name)]
        roles = {
            f"{name}/{self.leaves[p.name]}": self.roles[p.name]
            for name in names
            for p in self.part(name)
        }
        return self.task(
            step=self.step,
            init=lambda _: tuple(self.arrays(self.part(name)) for name in names),
            state=tuple(self.shapes(self.part(name)) for name in names),
            state_names=tuple(names),
            roles=roles,
        )


@dataclass(frozen=True)
class _OfLoss(_Step):
    """A model with a loss by name, whose gradients TensorFlow takes."""

    transformation: Any

    @property
    def trained(self) -> list[Port]:
        """Variables that have a gradient."""
        names = {port.name for port in self.first.of(GRADIENT)}
        return [port for port in self.first.variables if port.name in names]

    @property
    def others(self) -> list[Port]:
        """The other variables: statistics that the model keeps, and keys that it draws with."""
        names = {port.name for port in self.trained}
        return [port for port in self.first.variables if port.name not in names]

    def step(self, params: Any, buffers: Any, opt_state: Any, batch: Any) -> Any:
        """(params, buffers, opt_state, metrics) after one step."""
        variables = {**params, **buffers}
        given = {name: variables[leaf] for name, leaf in self.leaves.items()}
        found = self.program(batch)({**given, **batch})
        gradients, new = (
            {self.leaves[name]: value for (k, name), value in found.items() if k == kind}
            for kind in (GRADIENT, UPDATE)
        )
        params, opt_state = applied(params, gradients, self.transformation, opt_state)
        buffers = {name: new.get(name, leaf) for name, leaf in buffers.items()}
        return params, buffers, opt_state, {"loss": found[LOSS, "loss"]}

    def init(self, _: Any) -> Any:
        """The first state."""
        params = self.arrays(self.trained)
        return params, self.arrays(self.others), self.transformation.init(params)

    def made(self) -> TrainTask:
        """The task."""
        import jax

        params = self.shapes(self.trained)
        assigned = {port.name for port in self.first.of(UPDATE)}
        roles = {
            f"{BUFFERS}/{self.leaves[port.name]}": _role(port, port.name in assigned)
            for port in self.others
        }
        state = params, self.shapes(self.others), jax.eval_shape(self.transformation.init, params)
        return self.task(
            step=self.step,
            init=self.init,
            state=state,
            state_names=(PARAMS, BUFFERS, OPTIMIZER),
            roles=roles,
        )


def _role(port: Port, is_assigned: bool) -> str:
    """What a variable is that has no gradient."""
    is_float = port.computed.dtype.kind not in "biu"
    if not is_assigned:
        return "frozen" if is_float else "buffer"
    return "optimizer" if is_float else "rng"


def _below(part: str, names: Mapping[str, str]) -> dict[str, str]:
    return {f"{part}/{name}": value for name, value in names.items()}


def train_task(
    model: str, loss: str, transformation: Any, sizes: str, tracer: Tracer | None = None
) -> TrainTask:
    """The task of a path (`start.split_name`): a step of the user's, or a model for a loss by name
    and an optax transformation. `tracer` is asked for its programs, a child that loads TensorFlow
    where there is none.

    Raises: as `Tracer.traced`; UsageError for a loss or sizes that do not fit.
    """
    source = _Source(Asked(model=model, sizes=sizes, loss=loss), tracer or Tracer())
    path, _ = split_name(model)
    try:
        first, samples = source.program(0), 0
        samples = first.samples
    except ImportRuleError as error:
        if error.code != "NCC_EMOD025":
            raise
        first, samples = source.program(_PROBED), 0
    if first.of(LOSS):
        return _OfLoss(source, first, samples, path, transformation).made()
    if not first.of(UPDATE):
        given = "no loss" if not loss else f"the loss {loss} of a step"
        raise UsageError(
            "SW_TF_LOSS",
            f"a training step of {first.name} requires a loss, or a function that assigns"
            f" variables, got {given}",
            Loc(path),
            "--set model.loss=cross_entropy trains it; `shardwright compile` takes it as it is",
        )
    return _Own(source, first, samples, path).made()
