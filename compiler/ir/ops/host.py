"""Values in the memory of the host: the placement a front end reads, and the transfers that the cut
step makes of it.

`move_to` is what a module says. `host_store` and `host_load` are the transfers: they mean what
`dynamic_update_slice` and `dynamic_slice` mean, and their operand 0 is on the host. `host_empty` is
room on the host; nobody reads what is in it first. `sharding/cut/host.py` makes transfers of moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from shardwright.compiler.ir.factors import one_by_one
from shardwright.compiler.ir.opdef import FIRST, Kind
from shardwright.compiler.ir.ops.rules import define, mismatch
from shardwright.compiler.ir.ops.shape import (
    infer_dynamic_slice,
    infer_dynamic_update,
    sliced_at,
    updated_at,
)
from shardwright.compiler.ir.types import TensorType

HOST, DEVICE = "host", "device"
EMPTY, STORE, LOAD = "host_empty", "host_store", "host_load"
TRANSFERS = (STORE, LOAD)


@dataclass(frozen=True, slots=True)
class MoveToAttrs:
    """The memory a value is in from here on: `host` or `device` (HBM)."""

    memory: str


@dataclass(frozen=True, slots=True)
class HostLoadAttrs:
    """The size of the window that is fetched, per dim."""

    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostEmptyAttrs:
    """The type of the room."""

    type: TensorType


def _infer_move(attrs: MoveToAttrs, operand: TensorType) -> TensorType:
    if attrs.memory not in (HOST, DEVICE):
        raise mismatch(f"memory {HOST} or {DEVICE}", attrs.memory)
    return operand


_define = partial(define, kind=Kind.TRANSFER, pure=False)
_define(
    "move_to",
    attrs=MoveToAttrs,
    rule=_infer_move,
    meaning=lambda op, x: x,
    passes=FIRST,
    factors=one_by_one,
)
_define(
    EMPTY,
    attrs=HostEmptyAttrs,
    rule=lambda attrs: attrs.type,
    meaning=lambda op: np.zeros(op.result.type.shape, op.result.type.dtype.numpy),
)
_define(STORE, attrs=None, rule=infer_dynamic_update, meaning=updated_at)
_define(LOAD, attrs=HostLoadAttrs, rule=infer_dynamic_slice, meaning=sliced_at)
