"""A model for a machine of neuron-cc: what runs on its cores, what stays on the host, in one file.

Operators are placed and shared out (`compiler/serial`); every piece for a core is compiled as a
program of its own, by the same road as any. A model that is one program remains one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.ir.build import subgraph
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.machine.target import NEURON_CC, Target
from shardwright.compiler.neff.manifest import MAX_CORE_FILES
from shardwright.compiler.serial.pieces import Serial, serial_of, whole_parts
from shardwright.compiler.serial.placement import (
    OperatorRow,
    check_types,
    host_findings,
    host_reasons,
    operator_rows,
)
from shardwright.compiler.surface.resolve import Resolved
from shardwright.orchestrator.compile.compile_log import CompileLog
from shardwright.orchestrator.compile.io_config import chosen_outputs

_WEIGHTS_PER_HINT = 2e7
_CORES_PER_HINT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A model on a machine of neuron-cc: its graph and the names of its outputs, as `--io-config`
    chooses them, its pieces, and the table of its operators."""

    graph: Graph
    outputs: Sequence[str]
    serial: Serial
    rows: Sequence[OperatorRow]


def placed(
    graph: Graph, names: tuple[Sequence[str], Sequence[str]], resolved: Resolved, log: CompileLog
) -> Placed | None:
    """Where the operators of a model run, told to the user; None for a machine whose compiler puts
    all of them on one core.

    Raises: CompileError for types and operators that the compiler does not take, UsageError for
    more cores than the machine or the model has, and for what `--io-config` says otherwise.
    """
    command = resolved.command
    target, cores = command.target, command.pipeline_cores
    if target.core.compiler != NEURON_CC:
        return None
    _check_cores(cores, target)
    inputs, outputs = names
    chosen = chosen_outputs(graph, inputs, outputs, command.io_config)
    made = dict(zip(outputs, graph.outputs, strict=True))
    graph = subgraph(graph.inputs, graph.ops, (made[name] for name in chosen), graph.name)
    check_types(graph, target)
    reasons = whole_parts(graph, host_reasons(graph), command.minimum_segment_size)
    rows = operator_rows(graph, reasons)
    for finding in host_findings(reasons):
        log.say("warning", finding.render())
    for line in table_of(rows):
        log.say("info", line)
    serial = serial_of(graph, (inputs, chosen), reasons.keys(), cores, target)
    _tell(serial, target, log)
    return Placed(graph=graph, outputs=chosen, serial=serial, rows=rows)


def _check_cores(cores: int, target: Target) -> None:
    if not 0 < cores <= min(target.cores, MAX_CORE_FILES):
        raise UsageError(
            "SW_USAGE",
            f"--neuroncore-pipeline-cores on {target.name} requires 1 to {target.cores}, got"
            f" {cores}",
            hint="a pipeline has the cores of one instance: --target inf1.6xlarge has 16,"
            " inf1.24xlarge has 64",
        )


def table_of(rows: Sequence[OperatorRow], where: str = "on NeuronCores") -> list[str]:
    """The table of operators as lines: type, instances, whether cores run them, and the share."""
    total, on_cores = sum(row.instances for row in rows), sum(row.on_cores for row in rows)
    width = max((len(row.name) for row in rows), default=8)
    lines = [f"{'operator':{width}}  instances  supported"]
    for row in rows:
        answer = "yes" if row.is_supported else f"{row.on_cores} of them, the rest {row.why}"
        answer = f"no: {row.why}" if not row.on_cores else answer
        lines.append(f"{row.name:{width}}  {row.instances:9}  {answer}")
    share = 100 * on_cores / max(1, total)
    return [*lines, f"{on_cores} of {total} operators {where} ({share:.1f} %)"]


def _tell(serial: Serial, target: Target, log: CompileLog) -> None:
    """Every piece, and whether the weights of a core stay on chip."""
    limits = target.core.limits
    room = limits.partitions * limits.sbuf_bytes
    for piece in serial.pieces:
        place = "the host" if piece.is_on_host else f"core {piece.core}"
        log.say("info", f"{piece.name} on {place}: {len(piece.graph.ops)} operators")
    weights = [0] * serial.cores
    for piece in serial.pieces:
        if not piece.is_on_host:
            weights[piece.core] += piece.weight_bytes
    fits = sum(size <= room for size in weights)
    log.say(
        "info",
        f"weights: {max(weights)} bytes on the fullest core; those of {fits} of"
        f" {serial.cores} cores fit on chip ({room} bytes, {limits.sbuf_bytes} per partition)",
    )
    advised = _CORES_PER_HINT * round(sum(weights) / 4 / _WEIGHTS_PER_HINT)
    if advised:
        log.say(
            "info", f"documented rule for pipelines: 4 x round(weights / 2e7) = {advised} cores"
        )
