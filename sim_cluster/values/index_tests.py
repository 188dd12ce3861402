"""Which indices of a kernel lie out of bounds, from what the kernel means: the same at L0, whose
instructions see row numbers alone, and at L1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.compiler.isa.kernel import KernelProgram, Tensor, access_by_index
from shardwright.sim_cluster.instructions.index_watch import Access
from shardwright.sim_cluster.values.kernels import Arrays, Registers, needed_nodes, values_of


@dataclass(frozen=True, slots=True)
class IndexTest:
    """How many indices of one access lie outside: `count(arrays, registers)`. Ranks along the mesh
    axes `replicated` have the same indices. Tests with equal `key` see the same ones."""

    access: Access
    replicated: tuple[str, ...]
    count: Callable[[Arrays, Registers], int]
    key: object


def index_tests(program: KernelProgram, tensors: Sequence[Tensor]) -> list[IndexTest]:
    """The tests of a kernel of a function with `tensors`. Indices that are constants were checked
    when the program was compiled: those that a scatter drops are meant so."""
    dtypes = [tensor.dtype for tensor in tensors]
    found = []
    for node in program.nodes:
        access = access_by_index(node)
        if access is None:
            continue
        (*stored, index), inside = access
        wanted = inside or (index,)
        if not inside and not stored:  # a gather without a test reads rows that are there
            continue
        nodes = [program.nodes[n] for n in needed_nodes(program, wanted)]
        loads = [n for n in nodes if n.op == "load"]
        if all(tensors[n.attrs["view"].tensor].kind == "constant" for n in loads):
            continue
        values = values_of(program, dtypes, wanted)
        dims = frozenset(d for n in loads for d in n.iter_dims)
        count = _false(values) if inside else _strangers(values, node.attrs["rows"], dims)
        sizes = [(d, program.iter_dims[d]) for d in sorted(dims)]
        replicated = tuple(node.attrs.get("replicated", ()))
        kind = Access.SCATTER if stored else Access.GATHER
        found.append(IndexTest(kind, replicated, count, (nodes, sizes)))
    return found


def _false(
    values: Callable[[Arrays, Registers], list[np.ndarray]],
) -> Callable[[Arrays, Registers], int]:
    """How many points are false."""

    def count(arrays: Arrays, registers: Registers) -> int:
        (inside,) = values(arrays, registers)
        return int(inside.size - np.count_nonzero(inside))

    return count


def _strangers(
    values: Callable[[Arrays, Registers], list[np.ndarray]], rows: int, dims: frozenset[int]
) -> Callable[[Arrays, Registers], int]:
    """How many row numbers are none; those of one index, along other axes than `dims`, are one."""

    def count(arrays: Arrays, registers: Registers) -> int:
        (row,) = values(arrays, registers)
        others = tuple(d for d in range(row.ndim) if d not in dims)
        return int(np.count_nonzero(((row < 0) | (row >= rows)).any(axis=others)))

    return count
