"""What an op is: one `OpDef` per name, filled by the `@op` decorator of the files in `ops/`.

`infer` is the type rule, `flops` the useful arithmetic, `reference` the meaning in NumPy.
Everything else that knows ops (importer, localizer, lowering) keeps its own table keyed by the
same name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import UNKNOWN_LOC, Loc
from shardwright.compiler.ir.types import Graph, Op, TensorType, Value

Infer = Callable[[Sequence[TensorType], Any, Sequence[Graph]], tuple[TensorType, ...]]
Flops = Callable[[Op], int]
Reference = Callable[[Op, Sequence[np.ndarray]], tuple[np.ndarray, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpDef:
    """The definition of one op name.

    `attrs` is the frozen dataclass its ops carry (None when it has no attributes). `infer` raises
    ValueError in the form "X requires Y, got Z". `pure` is False for ops that must not be merged
    with equal ones (collectives, barriers); a dead op of any kind may go, because all ranks run
    the same program.
    """

    name: str
    attrs: type | None
    infer: Infer
    flops: Flops
    reference: Reference
    elementwise: bool = False
    pure: bool = True


OPS: dict[str, OpDef] = {}


def define(opdef: OpDef) -> OpDef:
    """Register `opdef`; infinities and NaN are values to its reference, which never warns of them.

    Raises ValueError on a second definition of the name.
    """
    if opdef.name in OPS:
        raise ValueError(f"op {opdef.name} is defined twice")
    silent = np.errstate(all="ignore")(opdef.reference)
    OPS[opdef.name] = defined = replace(opdef, reference=silent)
    return defined


def make_op(
    name: str,
    operands: Sequence[Value],
    attrs: Any = None,
    regions: Sequence[Graph] = (),
    loc: Loc = UNKNOWN_LOC,
) -> Op:
    """A new op with inferred result types and fresh result values.

    Raises: KeyError for an unknown name, ValueError for operands its type rule refuses.
    """
    types = OPS[name].infer([v.type for v in operands], attrs, regions)
    return Op(name, tuple(operands), tuple(Value(t) for t in types), attrs, tuple(regions), loc)
