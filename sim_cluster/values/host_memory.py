"""Memory of the host that simulates: a run that would take more than there is, is refused before it
takes any."""

from __future__ import annotations

import math
import resource
from collections.abc import Sequence

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.isa.kernel import STORES, KernelProgram, Node

_SMALL = 2**28
"""Less than this is taken without asking what there is."""
_ITEM = 4
_GIB = 2**30


def available_bytes() -> int:
    """What this process may still take: of the host's memory, and below its own limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    free = _figure("/proc/meminfo", "MemAvailable")
    if limit == resource.RLIM_INFINITY:
        return free
    return min(free, max(0, limit - _figure("/proc/self/status", "VmSize")))


def _figure(path: str, name: str) -> int:
    """Bytes of a row of one of Linux's tables; no limit where there is none."""
    try:
        with open(path) as file:
            row = next(line for line in file if line.startswith(f"{name}:"))
    except (OSError, StopIteration):
        return 2**63
    return int(row.split()[1]) * 1024


def require_memory(num_bytes: int, what: str) -> None:
    """Raises SimulationError SW_SIM_MEMORY when there is less than `num_bytes`."""
    if num_bytes > _SMALL and num_bytes > (there := available_bytes()):
        raise SimulationError(
            "SW_SIM_MEMORY",
            f"{what} requires {num_bytes / _GIB:.2f} GiB of the host's memory, {there / _GIB:.2f}"
            " GiB are available",
            hint="run it on a host with more memory, or a smaller batch",
        )


def kernel_bytes(program: KernelProgram) -> int:
    """The largest array that a kernel makes as whole-array arithmetic."""
    return max((_array_bytes(node, program) for node in program.nodes), default=0)


def _array_bytes(node: Node, program: KernelProgram) -> int:
    if (not node.inputs or node.op in STORES) and "bounds" not in node.attrs:
        return 0  # its array takes no memory of its own, or only that of a tensor
    inputs = [program.nodes[i].iter_dims for i in node.inputs]
    joint = {a for iter_dims in inputs for a in iter_dims}
    arrays: list[Sequence[int]] = [node.iter_dims]
    arrays += inputs if node.op == "contract" else [sorted(joint)]
    return _ITEM * max(math.prod(program.iter_dims[a] for a in iter_dims) for iter_dims in arrays)
