"""A training step of a model: its graph, a loss over its results, and an optimizer.

Initializers of floating-point numbers are parameters; running statistics, scales and numbers of 8
bits stay as they are. What a graph says of training is obeyed nowhere else: dropout is nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import Loc, UsageError, did_you_mean
from shardwright.compiler.frontend.graphs.errors import damaged
from shardwright.compiler.frontend.graphs.graph import Value
from shardwright.compiler.frontend.graphs.program import Program
from shardwright.compiler.frontend.graphs.sizes import Sizes
from shardwright.compiler.frontend.graphs.table import Training
from shardwright.compiler.frontend.graphs.types import Array, computed_type
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.frontend.train_step import tokens_of
from shardwright.compiler.frontend.updates import trained_of, updated

TARGET = "target"
"""The leaf of a batch that a loss compares the first result with."""
STATE = PARAMS, BUFFERS, _ = "params", "buffers", "opt_state"


def _cross_entropy(scores: Any, target: Any) -> Any:
    """Of target classes [...], by scores [..., C]."""
    import jax
    import jax.numpy as jnp

    logs = jax.nn.log_softmax(scores.astype(jnp.float32), -1)
    return -jnp.mean(jnp.take_along_axis(logs, target[..., None], -1, mode="clip"))


def _mse(result: Any, target: Any) -> Any:
    """The mean of squared differences."""
    import jax.numpy as jnp

    return jnp.mean(jnp.square(result.astype(jnp.float32) - target))


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss by name: what it makes of (a result, the target), and the target of a result of a
    shape: its shape and type."""

    function: Callable[[Any, Any], Any]
    target: Callable[[tuple[int, ...]], tuple[tuple[int, ...], Any]]


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(_cross_entropy, lambda shape: (shape[:-1], np.int32)),
    "mse": Loss(_mse, lambda shape: (shape, np.float32)),
}


@dataclass(frozen=True)
class _Step:
    """A training step of a model, as a function of arrays."""

    program: Program
    sizes: Sizes
    loss: str
    transformation: Any
    name: str

    @cached_property
    def leaves(self) -> dict[str, str]:
        """Name of a weight in the file -> its name in the state, which is a path."""
        found: dict[str, str] = {}
        for name in self.program.weights:
            parts = [part for part in name.replace("\\", "/").split("/") if part.strip(".")]
            leaf = "/".join(parts) or "weight"
            found[name] = f"{leaf}_{len(found)}" if leaf in found.values() else leaf
        return found

    def weights(self, names: Iterable[str]) -> dict[str, Array]:
        """Values of some weights, by their names in the state."""
        arrays = self.program.weights
        return {self.leaves[name]: arrays[name] for name in arrays if name in names}

    @cached_property
    def params(self) -> dict[str, Array]:
        """Values of the weights that are trained."""
        return self.weights(self.program.trained)

    @cached_property
    def buffers(self) -> dict[str, Array]:
        """Values of the others."""
        return self.weights(set(self.program.weights) - self.program.trained)

    @property
    def inputs(self) -> Sequence[Value]:
        """Inputs of the graph, without labels."""
        return self.program.given

    def samples(self) -> int:
        """How many samples the graph is of; 0 where it takes any number."""
        firsts = {value.shape[0] for value in self.inputs if value.shape}
        sizes = {self.sizes.given.get(dim, (dim,))[0] for dim in firsts if isinstance(dim, str)}
        whole = {self.sizes.given[v.name][0] for v in self.inputs if v.name in self.sizes.given}
        fixed = {size for size in firsts | sizes | whole if isinstance(size, int)}
        return fixed.pop() if len(fixed) == 1 else 0

    def input_shapes(self, samples: int) -> dict[str, Any]:
        """Inputs of so many samples, without values. Raises UsageError."""
        own = self.samples()
        if own not in (0, samples):
            raise UsageError(
                "SW_BATCH",
                f"{self.name} is a graph of {own} samples, which requires strategy.micro_batch x"
                f" data-parallel ranks = {own}, got {samples}",
                hint="set --micro-batch, or export it with an open first dim",
            )
        firsts = {v.shape[0] for v in self.inputs if v.shape and isinstance(v.shape[0], str)}
        return self.program.inputs(self.sizes.but(samples, *filter(None, firsts)))

    @property
    def is_own(self) -> bool:
        """Whether nodes of the graph say what it is trained for."""
        return not self.loss and self.program.has_loss

    def said(self, samples: int) -> Training:
        """What nodes of the graph say of a step of so many samples: labels, without values, and
        the names of weights that change beside the parameters."""
        import jax

        said = Training()
        weights = {name: _shape(array) for name, array in self.program.weights.items()}
        shapes = self.input_shapes(samples)
        jax.eval_shape(lambda w, i: self.program(w, i, said), weights, shapes)
        return said

    def first_result(self, samples: int) -> Any:
        """The result that a loss is of, without values. Raises UsageError where there is none."""
        import jax

        shapes = self.input_shapes(samples)
        weights = {name: _shape(array) for name, array in self.program.weights.items()}
        found = jax.eval_shape(lambda w, i: self.program(w, i), weights, shapes)
        name = self.program.results[0] if self.loss in LOSSES else self.loss
        scalars = [n for n, r in found.items() if not r.shape and r.dtype.kind not in "biu"]
        is_fit = name in scalars or (self.loss in LOSSES and found[name].ndim > 0)
        if is_fit:
            return found[name]
        shown = ", ".join(f"{n} {r.dtype}{list(r.shape)}" for n, r in found.items())
        raise UsageError(
            "SW_MODEL_LOSS",
            f"a training step of {self.name} requires a loss, {', '.join(LOSSES)} of its first"
            f" result or a result that is one number, got {self.loss or 'none'} and {shown}",
            hint=did_you_mean(
                self.loss,
                (*LOSSES, *scalars),
                "--set model.loss=cross_entropy trains it; `shardwright compile` takes it as it is",
            ),
        )

    def batch(self, samples: int) -> dict[str, Any]:
        """Inputs and target of so many samples, without values."""
        import jax

        found = self.input_shapes(samples)
        if self.is_own:
            rows = self.said(samples).labels.items()
            found |= {name: jax.ShapeDtypeStruct(row.shape, row.dtype) for name, row in rows}
        if self.loss in LOSSES:
            shape, dtype = LOSSES[self.loss].target(self.first_result(samples).shape)
            found[TARGET] = jax.ShapeDtypeStruct(shape, dtype)
        return found

    def init(self, _: Any) -> tuple[Any, ...]:
        """The weights of the file, and the optimizer's first state."""
        import jax

        params, buffers = (
            {name: jax.numpy.asarray(array) for name, array in arrays.items()}
            for arrays in (self.params, self.buffers)
        )
        return params, buffers, self.transformation.init(trained_of(params, params))

    def state(self) -> tuple[Any, ...]:
        """The state without values."""
        import jax

        params, buffers = (
            {name: _shape(array) for name, array in arrays.items()}
            for arrays in (self.params, self.buffers)
        )
        return params, buffers, jax.eval_shape(self.transformation.init, params)

    def step(self, params: Any, buffers: Any, opt_state: Any, batch: Any) -> Any:
        """(params, buffers, opt_state, metrics) after one step."""
        inputs = {name: leaf for name, leaf in batch.items() if name != TARGET}

        def loss_of(params: Mapping[str, Any]) -> tuple[Any, Any]:
            state = {**params, **buffers}
            weights = {name: state[leaf] for name, leaf in self.leaves.items()}
            said = Training()
            found = self.program(weights, inputs, said)
            changed = {self.leaves[name]: value for name, value in said.changed.items()}
            if self.is_own:
                samples = next(iter(inputs.values())).shape[0]
                return sum(said.losses) / samples, changed
            if self.loss not in LOSSES:
                return found[self.loss], changed
            first = found[self.program.results[0]]
            return LOSSES[self.loss].function(first, batch[TARGET]), changed

        new = updated(loss_of, params, set(params), self.transformation, opt_state)
        return new.params, {**buffers, **new.beside}, new.opt_state, {"loss": new.loss}

    def batches(self, seed: int, samples: int, data: str | None) -> Iterator[dict[str, Array]]:
        """Batches of what `data` names, an `.npz` file with an array for each leaf, from its first
        sample on and again; numbers of a random generator where it names none."""
        rng = np.random.default_rng(seed)
        shapes = self.batch(samples)
        if data and data.endswith(".npz"):
            yield from of_file(Path(data), shapes, samples)
        most = self._most()
        while True:
            yield {name: drawn(rng, leaf, most.get(name)) for name, leaf in sorted(shapes.items())}

    def _most(self) -> dict[str, int]:
        """How many different whole numbers an input or a target may be: as many as a table has
        rows that it is an index of, or as there are classes."""
        graph, found = self.program.model.graph, dict[str, int]()
        for node in graph.nodes:
            row = None if node.domain else self.program.model.find(node)
            if row is None or row.picks is None:
                continue
            indices, table = (node.inputs[place] for place in row.picks)
            if table in graph.constants:
                axis = int(node.attributes.get("axis", 0))
                found[indices] = graph.constants[table].shape[axis]
        if self.is_own:
            rows = self.said(self.samples() or 1).labels.items()
            found |= {name: row.classes for name, row in rows if row.classes}
        if self.loss == "cross_entropy":
            found[TARGET] = self.first_result(self.samples() or 1).shape[-1]
        return found


def drawn(rng: np.random.Generator, leaf: Any, most: int | None) -> Array:
    """Random values of a leaf, whole numbers below `most` where it is an index, of any type."""
    is_whole = most is not None or np.dtype(leaf.dtype).kind in "biu"
    drawn = rng.integers(0, most or 2, leaf.shape) if is_whole else rng.normal(size=leaf.shape)
    found: Array = drawn.astype(leaf.dtype)
    return found


def of_file(path: Path, shapes: Mapping[str, Any], samples: int) -> Iterator[dict[str, Array]]:
    """Batches of the samples of a file. Raises UsageError."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in shapes if name in file}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UsageError("SW_DATA", f"run.data requires a file of numpy.savez: {error}") from error
    rows = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
    fits = all(
        name in arrays and rows[name] and arrays[name].shape[1:] == leaf.shape[1:]
        for name, leaf in shapes.items()
    )
    if not fits or len(set(rows.values())) != 1:
        wanted = ", ".join(f"{n} {['n', *leaf.shape[1:]]}" for n, leaf in shapes.items())
        given = ", ".join(f"{n} {list(a.shape)}" for n, a in arrays.items()) or "none of them"
        raise UsageError(
            "SW_DATA",
            f"run.data requires arrays of as many samples {wanted}, got {given}".replace("'", ""),
            hint="numpy.savez(path, **arrays), by the names of the model's inputs, and target",
        )
    count, first = next(iter(rows.values())), 0
    while True:
        at = np.arange(first, first + samples) % count
        yield {
            name: arrays[name][at].astype(computed_type(np.dtype(leaf.dtype)))
            for name, leaf in shapes.items()
        }
        first += samples


def _shape(array: Array) -> Any:
    import jax

    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def train_task(path: Path, data: bytes, loss: str, transformation: Any, sizes: str) -> TrainTask:
    """The task of a model file, its content, for a loss by name and an optax transformation.

    Raises: ImportRuleError as `Program.read`; UsageError for a loss or sizes that do not fit.
    """
    program = Program.read(data, str(path))
    step = _Step(program, Sizes.of(sizes), loss, transformation, path.stem)
    if not step.inputs:
        given = "a graph without inputs, which has no samples"
        raise damaged(given, program.model.form, Loc(str(path)))
    samples = step.samples()
    if not step.is_own:
        step.first_result(samples or 1)
    changed = {step.leaves[name] for name in step.said(samples or 1).changed}
    return TrainTask(
        step=step.step,
        init=step.init,
        state=step.state(),
        batch=step.batch,
        batches=step.batches,
        state_names=STATE,
        roles={f"{BUFFERS}/{name}": "frozen" for name in step.buffers if name not in changed},
        samples=samples,
        tokens_per_sample=tokens_of(step.batch(samples or 1), 0),
        name=path.stem,
    )
