"""A training step that comes as a file: HLO, StableHLO or `jax.export` content, for timing only.

The module is `(*state, *batch) -> (*state, *metrics)`, as a jitted step is lowered. What an
argument is for is read from the module: state is what a result takes the place of (by donation,
else by position and type), parameters are the state that the loss depends on, the other arguments
are the batch, with its samples along dim 0. Names in the file do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.capture import ArgInfo, Captured
from shardwright.compiler.frontend.detect import Asked
from shardwright.compiler.frontend.isolated import Reader
from shardwright.compiler.frontend.roles import Use, check_parameters, roles_of
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.neff.format import MAX_FILE_BYTES
from shardwright.compiler.support.files import read_regular
from shardwright.compiler.surface.releases import Profile


@dataclass(frozen=True, slots=True)
class _Signature:
    """What arguments and results are: `state` maps a result to the argument it replaces."""

    graph: Graph
    state: dict[int, int]
    loss: int

    @property
    def batch(self) -> list[int]:
        """Arguments that are no state."""
        state = set(self.state.values())
        return [n for n in range(len(self.graph.inputs)) if n not in state]


def module_task(path: Path, tokens_per_sample: int = 0) -> TrainTask:
    """The task of a model file; `tokens_per_sample` 0: the second dim of its integer batch.

    Raises: ImportRuleError as `import_file`; UsageError for a file that is no training step of one
    device.
    """
    try:
        data = read_regular(path, MAX_FILE_BYTES)
    except OSError as error:
        raise UsageError(
            "SW_MODEL", f"model.hlo: cannot read {path}: {error.strerror or error}"
        ) from error
    with Reader() as reader:  # XLA may end the process that reads a damaged file
        graph, module = reader.read(data, str(path.parent), Profile(), asked=Asked(as_step=True))
    if module.facts.mesh or module.facts.shardings:
        raise _refused(path, "the step of one device", "one that is or asks to be partitioned")
    signature = _signature(path, graph, module.facts.aliases)
    samples = _samples(path, signature)
    inputs = _inputs(signature)
    outputs = _outputs(signature, inputs)
    check_parameters(path.name, [(i.name, i.role) for i in inputs if i.role != "batch"])
    aliases = tuple((argument, result) for result, argument in signature.state.items())

    text = module.stablehlo
    artifact = text.encode() if isinstance(text, str) else text

    def captured(batch_size: int) -> Captured:
        if batch_size != samples:
            raise UsageError(
                "SW_BATCH",
                f"{path.name} is a step of {samples} samples, which requires strategy.micro_batch x"
                f" data-parallel ranks = {samples}, got {batch_size}",
                hint="set --micro-batch, or a mesh with other data axes",
            )
        return Captured(artifact, inputs, outputs, aliases, samples, path.stem)

    return TrainTask(
        step=_never,
        batch=_never,
        state=(),
        state_names=(),
        captured=captured,
        tokens_per_sample=tokens_per_sample or _tokens(signature),
        name=path.stem,
    )


def _never(*_: Any) -> Any:
    raise AssertionError("a step that is a file is not called")


def _refused(path: Path, required: str, given: str) -> UsageError:
    return UsageError(
        "SW_MODULE_STEP",
        f"model.hlo: {path.name} requires {required}, got {given}",
        hint="lower jax.jit(step).lower(*state, batch) with a scalar loss behind the new state;"
        " `shardwright compile` takes any module",
    )


def _signature(path: Path, graph: Graph, aliases: Sequence[tuple[int, int]]) -> _Signature:
    state = dict(aliases) or _by_position(graph)
    metrics = [n for n in range(len(graph.outputs)) if n not in state]
    losses = [n for n in metrics if _is_loss(graph.outputs[n])]
    if not state or not losses:
        given = f"{len(state)} results that replace an argument and {len(losses)} scalar losses"
        raise _refused(path, "a training step: state in, state and a loss out", given)
    return _Signature(graph, state, losses[0])


def _by_position(graph: Graph) -> dict[int, int]:
    """The longest run of results of the first arguments' types; one is left for the loss."""
    pairs = zip(graph.inputs, graph.outputs[:-1], strict=False)
    same = takewhile(lambda pair: pair[0].type == pair[1].type, pairs)
    return {n: n for n, _ in enumerate(same)}


def _is_loss(value: Value) -> bool:
    return not value.type.shape and value.type.dtype.is_float


def _samples(path: Path, signature: _Signature) -> int:
    types = [signature.graph.inputs[n].type for n in signature.batch]
    counts = {t.shape[0] if t.shape else 0 for t in types}
    if len(counts) != 1 or 0 in counts:
        given = ", ".join(map(str, types)) or "no argument besides the state"
        raise _refused(path, "a batch with its samples along dim 0 of every argument", given)
    return counts.pop()


def _tokens(signature: _Signature) -> int:
    """Tokens of a sample: those of the first argument of the batch that holds some."""
    types = [signature.graph.inputs[n].type for n in signature.batch]
    return next((t.shape[1] for t in types if t.rank == 2 and not t.dtype.is_float), 1)


def _inputs(signature: _Signature) -> tuple[ArgInfo, ...]:
    graph, state = signature.graph, sorted(signature.state.values())
    before = reaching(graph, graph.outputs[signature.loss])
    kept = {n for j, n in signature.state.items() if graph.outputs[j] is graph.inputs[n]}
    uses = {n: Use(is_read=graph.inputs[n] in before, is_kept=n in kept) for n in state}
    leaves = [(f"arg{n}", graph.inputs[n].type.dtype, uses[n]) for n in state]
    roles = dict(zip(state, roles_of(leaves, {}), strict=True))
    infos = []
    for n, value in enumerate(graph.inputs):
        role = roles.get(n, "batch")
        infos.append(_info(f"{_PREFIX[role]}/arg{n}", role, value, None if n in roles else 0))
    return tuple(infos)


_PREFIX = {
    "batch": "batch",
    "parameter": "params",
    "frozen": "frozen",
    "optimizer": "opt_state",
    "rng": "rng",
}


def _outputs(signature: _Signature, inputs: Sequence[ArgInfo]) -> tuple[ArgInfo, ...]:
    infos = []
    for n, value in enumerate(signature.graph.outputs):
        if n in signature.state:
            infos.append(inputs[signature.state[n]])
        else:
            name = "loss" if n == signature.loss else f"out{n}"
            infos.append(_info(f"metrics/{name}", "metric", value))
    return tuple(infos)


def _info(name: str, role: str, value: Value, batch_dim: int | None = None) -> ArgInfo:
    return ArgInfo(name, role, value.type.shape, value.type.dtype, batch_dim)


def reaching(graph: Graph, end: Value) -> set[Value]:
    """Values that `end` depends on; a loop depends on all it is given."""
    found = {end}
    for op in reversed(graph.ops):
        if not found.isdisjoint(op.results):
            found.update(op.operands)
    return found
