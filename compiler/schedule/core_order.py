"""Order between the two physical cores of a logical NeuronCore: which kernels wait for the other
core.

Cores share HBM only. A kernel starts when the other core has finished every earlier kernel of its
own that stores what this one touches, or touches what this one stores; halves of the same rows in a
row of kernels never wait. L0 checks the result with a race detector that knows nothing of this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwright.compiler.isa.kernel import STORES, KernelProgram, Node, Tensor, View, tensor_of
from shardwright.compiler.isa.program import Kernel
from shardwright.compiler.schedule.reach import bytes_of, reach


@dataclass(frozen=True, slots=True)
class _Use:
    """Bytes low..high-1 of a memory."""

    memory: int
    low: int
    high: int
    stores: bool


def order_cores(subgraphs: Sequence[Sequence[Kernel]], tensors: Sequence[Tensor]) -> None:
    """Set `Kernel.after` in every subgraph."""
    if len(subgraphs) == 1:
        return
    uses = [_uses(subgraph, tensors) for subgraph in subgraphs]
    for mine, (subgraph, others) in enumerate(zip(subgraphs, reversed(uses), strict=True)):
        for at, kernel in enumerate(subgraph):
            kernel.after = _finished(uses[mine][at], others[:at])


def _finished(uses: Sequence[_Use], earlier: Sequence[Sequence[_Use]]) -> int:
    """How many of the other core's `earlier` kernels must have finished."""
    for number in range(len(earlier), 0, -1):
        if any(_clash(a, b) for a in uses for b in earlier[number - 1]):
            return number
    return 0


def _clash(a: _Use, b: _Use) -> bool:
    shared = a.memory == b.memory and a.low < b.high and b.low < a.high
    return shared and (a.stores or b.stores)


def _uses(kernels: Sequence[Kernel], tensors: Sequence[Tensor]) -> list[list[_Use]]:
    """What each kernel touches. A collective touches its source and target from start to wait."""
    starts: dict[int, KernelProgram] = {}
    found = []
    for program in (kernel.program for kernel in kernels):
        if program.kind == "collective_start":
            starts[program.attrs["collective"]] = program
        elif program.kind == "collective_wait":
            program = starts[program.attrs["collective"]]
        found.append(list(_touched(program, tensors)))
    return found


def _touched(program: KernelProgram, tensors: Sequence[Tensor]) -> Iterator[_Use]:
    for node in program.nodes:
        if "view" in node.attrs:
            yield _of_node(node, program.iter_dims, tensors)
    if program.kind == "register_load":
        yield _whole(tensors, program.attrs["view"].tensor, stores=False)
    for name in ("source", "target"):
        if name in program.attrs:
            yield _whole(tensors, tensor_of(program.attrs[name]), stores=name == "target")


def _of_node(node: Node, iter_dims: Sequence[int], tensors: Sequence[Tensor]) -> _Use:
    view: View = node.attrs["view"]
    stores = node.op in STORES
    if view.offset.terms or node.op.endswith("_indexed") or "bounds" in node.attrs:
        return _whole(tensors, view.tensor, stores)
    ends = reach(view.offset.const, zip(view.strides, iter_dims, strict=True))
    return _Use(*bytes_of(tensors, view.tensor, *ends), stores)


def _whole(tensors: Sequence[Tensor], number: int, stores: bool) -> _Use:
    last = math.prod(tensors[number].shape) - 1
    return _Use(*bytes_of(tensors, number, 0, last), stores)
