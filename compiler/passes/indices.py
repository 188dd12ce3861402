"""Indices that are known when compiling must lie inside what they index.

An index tensor made of counts and constants (positions against a table that is too short) is
evaluated here, on global shapes, and refused with the user's line. Indices that are data are
counted when the program runs (`sim_cluster/values/index_tests.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.compiler.diagnostics import CompileError, Diagnostic
from shardwright.compiler.ir.analysis import known_elements
from shardwright.compiler.ir.facts import counted_dim, lookup
from shardwright.compiler.ir.ops.gather import window_sizes
from shardwright.compiler.ir.types import Graph, Op, Value

_CONSTANT = "NCC_ESMP002"


@dataclass(frozen=True, slots=True)
class _Indexed:
    """How an op indexes: the operand dims of an index vector, the sizes of its windows there, the
    vendor's code for counts that leave the operand, and whether constants may.
    """

    dims: Sequence[int]
    sizes: Sequence[int]
    code: str
    drops: bool


def check_indices(graph: Graph) -> None:
    """Raises CompileError for a gather or scatter whose known indices leave the operand.

    A scatter with constant indices drops what lies outside, as its definition says.
    """
    made, counted = graph.producers(), _counted(graph)
    for op in graph.ops:
        for region in op.regions:
            check_indices(region)
        rule = _RULES.get(op.name)
        if rule is not None:
            _check(op, rule(op), made, op.operands[1] in counted)


def crosswise_windows(graph: Graph) -> list[Diagnostic]:
    """A warning at the first gather or scatter whose windows are no runs of memory: neuronx-cc is
    known to end at such (source: its release notes of 04/2024, known issues).
    """
    found = [op for op in graph.walk() if lookup(op) is not None and not _is_run(op)]
    if not found:
        return []
    first, more = found[0], f", and {len(found) - 1} more" if len(found) > 1 else ""
    window = "x".join(map(str, window_sizes(first)))
    message = (
        f"{first.name} moves windows of {window} out of {first.operands[0].type}, which are no runs"
        f" of memory{more}; neuronx-cc may refuse it: IndirectLoad/Save requires contiguous"
        " indirect access per partition"
    )
    advice = "index leading dims, so that a window has all of the dims behind them"
    return [Diagnostic("SW_INDIRECT_ACCESS", message, first.loc, advice, severity="warning")]


def _is_run(op: Op) -> bool:
    """Whether a window of a gather or scatter lies in one piece, row-major."""
    sizes, shape = window_sizes(op), op.operands[0].type.shape
    outer = next((d for d, size in enumerate(sizes) if size > 1), len(sizes))
    return sizes[outer + 1 :] == shape[outer + 1 :]


def _check(op: Op, indexed: _Indexed, made: dict[Value, Op], counted: bool) -> None:
    values = known_elements(made, op.operands[1])
    if values is None or not values.size or (indexed.drops and not counted):
        return
    vector, shape = op.attrs.index_vector_dim, op.operands[0].type.shape
    if vector == values.ndim:
        values = values[..., None]
    for k, dim in enumerate(indexed.dims):
        entries = np.take(values, k, axis=vector).astype(np.int64)
        room = shape[dim] - indexed.sizes[dim]
        low, high = int(entries.min()), int(entries.max())
        if low < 0 or high > room:
            raise CompileError(
                indexed.code if counted else _CONSTANT,
                f"{op.name} requires indices of dim {dim} from 0 to {room}, got"
                f" {low if low < 0 else high}",
                op.loc,
                "match the sizes (often: positions and the embedding table)",
            )


def _gather(op: Op) -> _Indexed:
    return _Indexed(op.attrs.start_index_map, op.attrs.slice_sizes, "NCC_EVRF056", drops=False)


def _scatter(op: Op) -> _Indexed:
    dims = op.attrs.scatter_dims_to_operand_dims
    return _Indexed(dims, window_sizes(op), "NCC_EVRF031", drops=True)


_RULES = {"gather": _gather, "scatter": _scatter}


def _counted(graph: Graph) -> set[Value]:
    """Values of a level that a count of more than one position goes into."""
    found: set[Value] = set()
    for op in graph.ops:
        dim = counted_dim(op)
        counts = dim is not None and op.result.type.shape[dim] > 1
        if counts or not found.isdisjoint(op.operands):
            found.update(op.results)
    return found
