"""Indices that are known when compiling must lie inside what they index.

An index tensor made of counts and constants (positions against a table that is too short) is
evaluated here, on global shapes, and refused with the user's line. Indices that are data are
counted when the program runs (`sim_cluster/values/regions.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardwright.compiler.diagnostics import CompileError
from shardwright.compiler.ir.analysis import known_elements
from shardwright.compiler.ir.facts import counted_dim
from shardwright.compiler.ir.types import Graph, Op, Value

_CODES = {"gather": "NCC_EVRF056", "scatter": "NCC_EVRF031"}
_CONSTANT = "NCC_ESMP002"


def check_indices(graph: Graph) -> None:
    """Raises CompileError for a gather or scatter whose known indices leave the operand.

    A scatter with constant indices drops what lies outside, as its definition says.
    """
    made, counted = graph.producers(), _counted(graph)
    for op in graph.ops:
        for region in op.regions:
            check_indices(region)
        if op.name in _CODES:
            _check(op, made, op.operands[1] in counted)


def _check(op: Op, made: dict[Value, Op], counted: bool) -> None:
    values = known_elements(made, op.operands[1])
    if values is None or not values.size or (op.name == "scatter" and not counted):
        return
    for dim, entries, room in _entries(op, values):
        low, high = int(entries.min()), int(entries.max())
        if low < 0 or high > room:
            code = _CODES[op.name] if counted else _CONSTANT
            wrong = low if low < 0 else high
            raise CompileError(
                code,
                f"{op.name} requires indices of dim {dim} from 0 to {room}, got {wrong}",
                op.loc,
                "match the sizes (often: positions and the embedding table)",
            )


def _entries(op: Op, values: np.ndarray) -> Iterator[tuple[int, np.ndarray, int]]:
    """(operand dim, its entries of all index vectors, the largest legal one)."""
    a, shape = op.attrs, op.operands[0].type.shape
    if op.name == "gather":
        dims, sizes = a.start_index_map, a.slice_sizes
    else:
        dims, sizes = a.scatter_dims_to_operand_dims, _window_sizes(op)
    if a.index_vector_dim == values.ndim:
        values = values[..., None]
    for k, d in enumerate(dims):
        yield d, np.take(values, k, axis=a.index_vector_dim).astype(np.int64), shape[d] - sizes[d]


def _window_sizes(op: Op) -> list[int]:
    """Window size of a scatter per operand dim."""
    a, update = op.attrs, op.operands[2].type.shape
    gone = a.inserted_window_dims + a.input_batching_dims
    walked = iter(a.update_window_dims)
    return [1 if d in gone else update[next(walked)] for d in range(op.operands[0].type.rank)]


def _counted(graph: Graph) -> set[Value]:
    """Values of a level that a count of more than one position goes into."""
    found: set[Value] = set()
    for op in graph.ops:
        dim = counted_dim(op)
        counts = dim is not None and op.result.type.shape[dim] > 1
        if counts or not found.isdisjoint(op.operands):
            found.update(op.results)
    return found
