"""Registry of what instructions do to values, and the rules all engines share.

A file per engine registers one decoder per opcode with `@executes`. A decoder looks at one
instruction and the element types of its operands once and returns an executor that works on array
views; `sim_cluster/instructions/l0.py` finds those views.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import Engine, Instr
from shardwright.sim_cluster.values import elementwise as ew
from shardwright.sim_cluster.values.rounding import narrow

Registers = Mapping[int, int]
Views = tuple[np.ndarray, ...]
Executor = Callable[[Any, Views, Registers], None]  # destination view, source views, registers


Decoder = Callable[[Instr, DType, tuple[DType, ...]], Executor]
"""Turns one instruction, given the types of its destination and sources, into an executor; a
wrong shape raises SimulationError."""
DECODERS: dict[str, Decoder] = {}


def executes(opcode: str) -> Callable[[Decoder], Decoder]:
    """Register the decorated decoder for `opcode`. Raises ValueError on a second one."""

    def register(decoder: Decoder) -> Decoder:
        if opcode in DECODERS:
            raise ValueError(f"instruction {opcode} has two decoders")
        DECODERS[opcode] = decoder
        return decoder

    return register


def require(condition: bool, code: str, message: str) -> None:
    """Raise SimulationError `code` unless `condition`."""
    if not condition:
        raise SimulationError(code, message)


def overwrites(zero_when: tuple[int, ...] | None) -> Callable[[Registers], bool]:
    """Whether an accumulating instruction overwrites its destination, from the registers of this
    iteration."""
    if zero_when is None:
        return lambda registers: False
    if not zero_when:
        return lambda registers: True
    if len(zero_when) == 1:
        (only,) = zero_when
        return lambda registers: registers[only] == 0
    return lambda registers: all(registers[r] == 0 for r in zero_when)


def compute_type(engine: Engine, srcs: tuple[DType, ...]) -> DType:
    """The type an engine computes in: fp32, or the integer type itself on GpSimd and for i1."""
    if any(s.is_float for s in srcs):
        return DType.F32
    exact = engine is Engine.GPSIMD or all(s is DType.PRED for s in srcs)
    return widest(srcs) if exact else DType.F32


def widest(srcs: tuple[DType, ...]) -> DType:
    """The largest of integer types."""
    return max(srcs, key=lambda s: (s is not DType.PRED, s.bytes))


def reader(source: DType, compute: DType) -> Callable[[np.ndarray], np.ndarray]:
    """Function from a view of `source` elements to an array in the storage of `compute`."""
    wanted = ew.storage(compute)
    if source.numpy == wanted:
        return lambda view: view
    return lambda view: view.astype(wanted)


def writer(target: DType, compute: DType) -> Callable[[np.ndarray, np.ndarray], None]:
    """Function (destination view, value) that rounds into `target`; integers saturate from
    floats."""
    if compute.is_float and target is DType.PRED:
        return lambda view, value: np.not_equal(value, 0, out=view)
    if compute.is_float and target.is_integer:
        return lambda view, value: np.copyto(view, ew.saturate(np.rint(value), target))
    if target.is_narrow and target is not compute:
        return lambda view, value: np.copyto(view, narrow(value, target))
    return lambda view, value: np.copyto(view, value, casting="unsafe")


def same_shape(instr: Instr, *sources: int) -> None:
    """Require that the named sources have the shape of the destination."""
    assert instr.dst is not None
    for number in sources:
        given, wanted = instr.srcs[number].shape, instr.dst.shape
        require(
            given == wanted,
            "SW_L0_SHAPE",
            f"{instr.opcode} requires source {number} of shape {list(wanted)}, got {list(given)}",
        )


def per_partition(instr: Instr, number: int) -> tuple[int, ...]:
    """Shape in which source `number` ([P, 1]) broadcasts against the destination."""
    assert instr.dst is not None
    given, wanted = instr.srcs[number].shape, (instr.dst.shape[0], 1)
    require(
        given[0] == wanted[0] and int(np.prod(given)) == given[0],
        "SW_L0_SHAPE",
        f"{instr.opcode} requires source {number} of shape {list(wanted)}, got {list(given)}",
    )
    return (given[0],) + (1,) * (len(instr.dst.shape) - 1)


def scalar_operand(
    instr: Instr, srcs: tuple[DType, ...], used: int, given: Any, compute: DType
) -> tuple[Callable[[Views], np.ndarray], int]:
    """A function that gives an immediate, or, where `given` is None, one value per partition of
    source `used`; and how many sources are used then."""
    if given is not None:
        value = np.asarray(given).astype(ew.storage(compute))
        return lambda views: value, used
    shape, read = per_partition(instr, used), reader(srcs[used], compute)
    return lambda views: read(views[used]).reshape(shape), used + 1
