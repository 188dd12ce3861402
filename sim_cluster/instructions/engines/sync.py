"""Instructions that only move tokens; the interpreter does the counting."""

from __future__ import annotations

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import Instr
from shardwright.sim_cluster.instructions.engines.registry import Kernel, Registers, Views, executes


def _nothing(out: np.ndarray | None, views: Views, registers: Registers) -> None:
    """No effect on values."""


@executes("wait")
def wait(instr: Instr, dst: DType, srcs: tuple[DType, ...]) -> Kernel:
    """Takes tokens."""
    return _nothing


@executes("signal")
def signal(instr: Instr, dst: DType, srcs: tuple[DType, ...]) -> Kernel:
    """Gives tokens."""
    return _nothing
