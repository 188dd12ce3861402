"""Which memory code and kernels touch: from the first byte to the last, whatever lies between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwright.compiler.isa.kernel import Tensor, root_of
from shardwright.compiler.isa.program import AccessPattern, Instr

SCRATCH = -1  # the memory of all scratch tensors; others are named by their root


def patterns_of(instr: Instr) -> list[tuple[AccessPattern, bool]]:
    """The patterns of an instruction, and whether it writes them."""
    return [*((pattern, False) for pattern in instr.srcs), *((p, True) for p in instr.dsts)]


def reach(first: int, steps: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The lowest and the highest of `first` and what is any number of steps away; `steps` are
    (distance, places) of dims or loops.
    """
    low = high = first
    for distance, places in steps:
        end = distance * (places - 1)
        low, high = low + min(0, end), high + max(0, end)
    return low, high


def bytes_of(tensors: Sequence[Tensor], number: int, low: int, high: int) -> tuple[int, int, int]:
    """(memory, first byte, end byte) of elements low..high of a tensor."""
    tensor = tensors[number]
    is_scratch = tensor.kind == "scratch"
    start = max(tensor.offset_bytes, 0) if is_scratch else 0
    memory = SCRATCH if is_scratch else root_of(tensors, number)
    return memory, start + low * tensor.dtype.bytes, start + (high + 1) * tensor.dtype.bytes
