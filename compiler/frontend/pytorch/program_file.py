"""An exported program as StableHLO: a function of its parameters, buffers and inputs, or, where it
is a training graph, a training step.

A training graph is a joint one (forward and backward, of torch.export's own), or a forward one
whose result is one loss. Arguments and results have the program's names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.capture import Lowered, function_artifact
from shardwright.compiler.frontend.pytorch.archive import read_program, refused
from shardwright.compiler.frontend.pytorch.exporting import (
    BUFFER,
    CHANGED,
    CONSTANT,
    EFFECTS,
    LITERAL,
    PARAMETER,
    Exported,
    decomposed,
)
from shardwright.compiler.frontend.pytorch.interpreter import (
    Values,
    checked,
    evaluate,
)
from shardwright.compiler.frontend.pytorch.optimizers import described
from shardwright.compiler.frontend.pytorch.splitting import Traced
from shardwright.compiler.frontend.pytorch.training import USUAL
from shardwright.compiler.frontend.pytorch.types import array_of, numpy_type

if TYPE_CHECKING:
    import torch

LOSS, GRADIENT = "LOSS_OUTPUT", "GRADIENT_TO_PARAMETER"
"""Kinds of results of a joint graph."""


def lowered_file(data: bytes, as_step: bool = False) -> Lowered:
    """The program of a file; `as_step` the training step of a training graph.

    Raises: ImportRuleError, UsageError as `read_program`; SW_TORCH_OPERATOR for operators without
    a row; SW_TORCH_LOSS where a step is asked of what is no training graph.
    """
    found = read_program(data)
    try:
        traced = Traced(decomposed(found))
    except Exception as error:
        raise refused(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    program = _Program(traced)
    return program.step() if as_step else program.function()


@dataclass(frozen=True)
class _Program:
    """A program on its way to StableHLO."""

    traced: Traced

    def __post_init__(self) -> None:
        checked(self.exported)

    @property
    def exported(self) -> Exported:
        """Its graph."""
        return self.traced.exported

    @cached_property
    def kinds(self) -> list[str]:
        """What each of its own results is, as torch calls it."""
        kinds = (spec.kind.name for spec in self.traced.program.graph_signature.output_specs)
        return [kind for kind in kinds if kind not in (CHANGED, *EFFECTS)]

    def _saved(self, *kinds: str) -> dict[str, Any]:
        """Tensors that are saved with a module, of some kinds, each once, by name."""
        state = self.traced.program.state_dict
        aliases = self.names
        rows = ((name, aliases[name]) for kind, name in self.exported.arguments if kind in kinds)
        return {own: state[own] for name, own in rows if own in state}

    @cached_property
    def names(self) -> dict[str, str]:
        """Name of a tensor that is there before a call -> the first name of the same tensor."""
        titles, weights = self.traced.titles, self.traced.weights
        return {name: titles[weights.get(node, node)] for node, name in titles.items()}

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Tensors that are part of the program: those that its code made, and buffers that are not
        saved. Raises ImportRuleError for one with more elements than bytes."""
        program = self.traced.program
        found = {}
        for kind, name in self.exported.arguments:
            if kind in (PARAMETER, BUFFER, CONSTANT) and name not in program.state_dict:
                tensor = program.constants[name]
                if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
                    raise refused(f"constant {name} of {list(tensor.shape)}, which are not there")
                found[name] = array_of(tensor)
        return found

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """The inputs of a call by name, without values. One that is called as a parameter is gets
        another name."""
        specs = self.traced.program.graph_signature.input_specs
        placeholders = [n for n in self.traced.nodes.values() if n.op == "placeholder"]
        taken = set(self._saved(PARAMETER, BUFFER))
        found = {}
        for node, spec, (kind, _) in zip(placeholders, specs, self.exported.arguments, strict=True):
            if spec.kind.name == "USER_INPUT" and kind != LITERAL:
                name = node.name
                while name in taken:
                    name += "_"
                taken.add(name)
                found[name] = _shape(node.meta["val"])
        return found

    def results(self, saved: Mapping[str, Any], inputs: Sequence[Any]) -> tuple[Any, Any]:
        """(own results, buffers that change) of a call."""
        from jax import numpy as jnp

        given = {**saved, **{name: jnp.asarray(array) for name, array in self.constants.items()}}
        every = {name: given[own] for name, own in self.names.items() if own in given}
        return evaluate(self.exported, Values(every, every, inputs))

    def function(self) -> Lowered:
        """The program as it is: (saved tensors, inputs) -> (results, buffers that change)."""
        saved = {name: _shape(tensor) for name, tensor in self._saved(PARAMETER, BUFFER).items()}
        own = self._result_names()

        def call(tensors: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
            found, changed = self.results(dict(zip(saved, tensors, strict=True)), inputs)
            kept = [each for each, name in zip(found, own, strict=True) if name]
            return [*kept, *changed.values()]

        changed = [f"next/{name}" for name in self.exported.results if name]
        artifact = function_artifact(call, list(saved.values()), list(self.inputs.values()))
        results = [*filter(None, own), *changed]
        return Lowered(artifact, (*saved, *self.inputs), tuple(results))

    def _result_names(self) -> list[str]:
        """Names of its own results; "" of constants."""
        specs = self.traced.program.graph_signature.output_specs
        keys = iter(_keys(self.traced.program))
        found = []
        for spec in specs:
            kind = spec.kind.name
            if kind in (CHANGED, *EFFECTS):
                continue
            name = next(keys) if kind == "USER_OUTPUT" else ""
            if kind == GRADIENT:
                name = f"grad/{spec.target}"
            elif kind == LOSS:
                name = "loss"
            found.append("" if hasattr(spec.arg, "value") else name)
        return found

    def step(self) -> Lowered:
        """A training step: (parameters, buffers, state of the optimizer, inputs) -> (the same, the
        loss). Gradients are those of a joint graph, else of the loss. Raises UsageError where
        there is none."""
        import jax
        import optax

        from shardwright.compiler.frontend.leaves import named_leaves

        optimizer = described(USUAL)
        params = {name: _shape(tensor) for name, tensor in self._saved(PARAMETER).items()}
        buffers = {name: _shape(tensor) for name, tensor in self._saved(BUFFER).items()}
        state = jax.eval_shape(optimizer.init, params)
        self._check_loss()

        def step(params: Any, buffers: Any, state: Any, inputs: Any) -> Any:
            loss, changed, gradients = self._gradients(params, buffers, inputs)
            updates, state = optimizer.update(gradients, state, params)
            own = {name: changed.get(name, leaf) for name, leaf in buffers.items()}
            return optax.apply_updates(params, updates), own, state, loss

        inputs = list(self.inputs.values())
        artifact = function_artifact(step, params, buffers, state, inputs)
        parts = (("params", params), ("buffers", buffers), ("opt_state", state))
        names = [name for prefix, part in parts for name, _ in named_leaves(prefix, part)]
        return Lowered(artifact, (*names, *self.inputs), (*names, "loss"))

    def _gradients(self, params: Any, buffers: Any, inputs: Any) -> tuple[Any, Any, Any]:
        """(loss, buffers that change, gradients by parameter)."""
        import jax

        if LOSS in self.kinds:
            found, changed = self.results({**params, **buffers}, inputs)
            specs = self.traced.program.graph_signature.output_specs
            own = [spec for spec in specs if spec.kind.name not in (CHANGED, *EFFECTS)]
            given = {
                spec.target: each
                for spec, each in zip(own, found, strict=True)
                if spec.kind.name == GRADIENT
            }
            zeros = {name: jax.numpy.zeros_like(leaf) for name, leaf in params.items()}
            return found[self.kinds.index(LOSS)], changed, {**zeros, **given}

        def loss_of(params: Any) -> tuple[Any, Any]:
            found, changed = self.results({**params, **buffers}, inputs)
            return found[self.kinds.index("USER_OUTPUT")], changed

        (loss, changed), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        return loss, changed, gradients

    def _check_loss(self) -> None:
        """Raise UsageError where no result is a loss."""
        specs = self.traced.program.graph_signature.output_specs
        kinds = [LOSS] if LOSS in self.kinds else ["USER_OUTPUT"]
        first = next((spec for spec in specs if spec.kind.name in kinds), None)
        node = self.traced.nodes.get(getattr(first.arg, "name", "")) if first else None
        value = node.meta["val"] if node is not None else None
        if value is None or value.ndim or not value.is_floating_point():
            raise UsageError(
                "SW_TORCH_LOSS",
                "a training step of a program requires a loss, one floating-point number, as its"
                f" first result, got {value if value is None else list(value.shape)}",
                hint="export a module whose forward returns the loss, or the joint graph;"
                " `shardwright compile` takes any program",
            )


def _keys(program: torch.export.ExportedProgram) -> list[str]:
    """Names of what a module returns: keys of a mapping, `out0`, ... of others."""
    from torch.utils import _pytree

    spec = program.call_spec.out_spec
    count = spec.num_leaves
    paths, _ = _pytree.tree_flatten_with_path(_pytree.tree_unflatten(list(range(count)), spec))
    names = []
    for place, (path, _) in enumerate(paths):
        keys = [str(getattr(key, "key", "")) for key in path]
        named = [key for key in keys if key]
        names.append("_".join([*named, *([str(place)] if len(named) < len(keys) else [])]))
    return [name if name and not name[0].isdigit() else f"out{n}" for n, name in enumerate(names)]


def _shape(tensor: Any) -> Any:
    import jax

    return jax.ShapeDtypeStruct(tuple(tensor.shape), np.dtype(numpy_type(tensor.dtype)))
