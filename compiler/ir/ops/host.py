"""Values in the memory of the host: the placement a front end reads, and the transfers that the cut
step makes of it.

`move_to` is what a module says. `host_store` and `host_load` are the transfers: they mean what
`dynamic_update_slice` and `dynamic_slice` mean, and their operand 0 is on the host. `host_empty` is
room on the host; nobody reads what is in it first. `sharding/cut/host.py` makes transfers of moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.compiler.ir.factors import one_by_one
from shardwright.compiler.ir.opdef import OPS, Kind, OpDef, define
from shardwright.compiler.ir.ops.rules import (
    Regions,
    Types,
    check_arity,
    check_attrs,
    mismatch,
    no_flops,
)
from shardwright.compiler.ir.ops.shape import DynamicSliceAttrs
from shardwright.compiler.ir.types import Op, TensorType

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


def _infer_move(types: Types, attrs: Any, regions: Regions) -> tuple[TensorType, ...]:
    check_attrs("move_to", attrs, MoveToAttrs)
    check_arity("move_to", types, 1)
    if attrs.memory not in (HOST, DEVICE):
        raise mismatch("move_to", f"memory {HOST} or {DEVICE}", attrs.memory)
    return (types[0],)


def _infer_empty(types: Types, attrs: Any, regions: Regions) -> tuple[TensorType, ...]:
    check_attrs(EMPTY, attrs, HostEmptyAttrs)
    check_arity(EMPTY, types, 0)
    return (attrs.type,)


def _infer_store(types: Types, attrs: Any, regions: Regions) -> tuple[TensorType, ...]:
    return OPS["dynamic_update_slice"].infer(types, None, regions)


def _infer_load(types: Types, attrs: Any, regions: Regions) -> tuple[TensorType, ...]:
    check_attrs(LOAD, attrs, HostLoadAttrs)
    return OPS["dynamic_slice"].infer(types, DynamicSliceAttrs(attrs.sizes), regions)


def _empty_reference(op: Op, args: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    kind = op.attrs.type
    return (np.zeros(kind.shape, kind.dtype.numpy),)


def _identity(op: Op, args: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    return tuple(args)


define(
    OpDef(
        name="move_to",
        kind=Kind.TRANSFER,
        passes=slice(0, 1),
        attrs=MoveToAttrs,
        infer=_infer_move,
        flops=no_flops,
        reference=_identity,
        factors=one_by_one,
        pure=False,
    )
)
define(
    OpDef(
        name=EMPTY,
        kind=Kind.TRANSFER,
        attrs=HostEmptyAttrs,
        infer=_infer_empty,
        flops=no_flops,
        reference=_empty_reference,
        pure=False,
    )
)
define(
    OpDef(
        name=STORE,
        kind=Kind.TRANSFER,
        attrs=None,
        infer=_infer_store,
        flops=no_flops,
        reference=OPS["dynamic_update_slice"].reference,
        pure=False,
    )
)
define(
    OpDef(
        name=LOAD,
        kind=Kind.TRANSFER,
        attrs=HostLoadAttrs,
        infer=_infer_load,
        flops=no_flops,
        reference=OPS["dynamic_slice"].reference,
        pure=False,
    )
)
