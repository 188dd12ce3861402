"""What an op is: one `OpDef` per name, made by `ops/rules.py: define`, which the files there call.

`infer` is the type rule, `flops` the useful arithmetic, `reference` the meaning in NumPy, `kind`
and the traits beside it what passes may take for granted (`traits.py` has sets of them). What does
one thing per op (importer, localizer, lowering) keeps its own table keyed by the same name.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import UNKNOWN_LOC, Loc
from shardwright.compiler.ir.factors import Factor, at_their_places, one_by_one
from shardwright.compiler.ir.types import Graph, Op, TensorType, Value

Infer = Callable[[Sequence[TensorType], Any, Sequence[Graph]], tuple[TensorType, ...]]
Flops = Callable[[Op], int]
Resize = Callable[[Op, tuple[int, ...]], Any]
Factors = Callable[[Op], Sequence[Factor]]
Reference = Callable[[Op, Sequence[np.ndarray]], tuple[np.ndarray, ...]]


class Kind(enum.Enum):
    """What an op does with the elements of its operands."""

    ELEMENTWISE = "computes each element from those at its place"
    CAST = "gives each number in another element type"
    IDENTITY = "gives its operands back; others may look at where it stands"
    LITERAL = "makes a tensor that is known when the program is compiled"
    VIEW = "names all elements by other indices, repeating some"
    PART = "takes some elements by their indices, in a regular pattern"
    JOIN = "puts whole tensors together along their dims"
    UPDATE = "writes a tensor over a part of another"
    CONTRACTION = "adds up products over dims of both operands"
    REDUCTION = "combines all elements along dims"
    WINDOW = "combines elements of windows that move along dims"
    INDEXED = "takes or combines elements at indices that are themselves elements"
    SORT = "orders elements along a dim"
    CONTROL = "runs regions"
    COLLECTIVE = "exchanges elements between ranks"
    RANK = "depends on the rank that runs it, without traffic"
    TRANSFER = "moves elements between the memories of a core and its host"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpDef:
    """The definition of one op name.

    `attrs` is the frozen dataclass its ops carry (None when it has no attributes). `infer` raises
    ValueError in the form "X requires Y, got Z". `elementwise` ops have one result, whose elements
    follow from those at their place: all of that kind, casts, and the identity of one value.
    `signs`: the result is the sum of the operands, each times its sign. `combines`: its attributes
    name how elements are combined. `commutes`: its two operands may change places without a change
    of one bit. `passes`: the operands whose elements its results consist of, as they are; operands
    before these choose among them, operands behind say where they are (None: elements are computed;
    what `_PASSES` has for the kind is filled in).
    `linear`: the operands in which it is linear, those of each slice together and the others held
    (what it passes on, unless said; attributes and types may speak against it, `facts.linear_in`).
    `factors`: which dims are one index, and what a part of it is worth (`factors.py`); by position
    for elementwise ops and identities, None for ops that are not asked (control, collectives).
    `resize`: the attributes for a result of another shape, where they hold sizes of it.
    `pure` is False for ops that must not be merged with equal ones (collectives, barriers); a dead
    op of any kind may go, because all ranks run the same program.
    """

    name: str
    kind: Kind
    attrs: type | None
    infer: Infer
    flops: Flops
    reference: Reference
    elementwise: bool = False
    signs: tuple[int, ...] = ()
    combines: bool = False
    commutes: bool = False
    passes: slice | None = None
    linear: tuple[slice, ...] | None = None
    factors: Factors | None = None
    resize: Resize | None = None
    pure: bool = True


LATER = {"later": True}
"""Metadata of attributes that a definition got later, behind all others: where they hold their
default, a serialised graph does not have them, and is what it was before."""
OPS: dict[str, OpDef] = {}
FIRST, SECOND, ALL = slice(0, 1), slice(1, 2), slice(0, None)
"""Operands of an op."""
_PASSES = {
    **dict.fromkeys((Kind.VIEW, Kind.PART), FIRST),
    **dict.fromkeys((Kind.IDENTITY, Kind.JOIN, Kind.SORT), ALL),
    Kind.UPDATE: slice(0, 2),
}
_AT_THEIR_PLACE = (Kind.ELEMENTWISE, Kind.CAST)
_FACTORS: dict[Kind, Factors] = {
    **dict.fromkeys(_AT_THEIR_PLACE, at_their_places),
    Kind.IDENTITY: one_by_one,
}


def register(opdef: OpDef) -> None:
    """Add `opdef`, with what its kind says, to `OPS`. Infinities and NaN are values to its
    reference, which never warns of them.

    Raises ValueError on a second definition of the name.
    """
    if opdef.name in OPS:
        raise ValueError(f"op {opdef.name} is defined twice")
    passes, linear = opdef.passes or _PASSES.get(opdef.kind), opdef.linear
    if linear is None:
        linear = (passes,) if passes and opdef.kind is not Kind.SORT else ()
        linear = (ALL,) if opdef.signs else linear
    OPS[opdef.name] = replace(
        opdef,
        reference=np.errstate(all="ignore")(opdef.reference),
        elementwise=opdef.elementwise or opdef.kind in _AT_THEIR_PLACE,
        passes=passes,
        linear=linear,
        factors=opdef.factors or _FACTORS.get(opdef.kind),
    )


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
