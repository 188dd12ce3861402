"""Rules for what kernels and instructions hold: element types, affine offsets, views, bounds."""

from __future__ import annotations

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine, Bound, View
from shardwright.compiler.support.schema import COUNT, WHOLE, WHOLES, Rule, row, several


def _made_of(kind: type, what: str, **rules: Rule) -> Rule:
    """An object of a class whose fields follow their rules."""
    return Rule(
        what,
        lambda v: isinstance(v, kind) and all(r.holds(getattr(v, n)) for n, r in rules.items()),
    )


DTYPE = Rule("an element type", lambda v: isinstance(v, DType))
_PAIRS = several(row(COUNT, WHOLE))
AFFINE = _made_of(Affine, "a number plus multiples of registers", const=WHOLE, terms=_PAIRS)
VIEW = _made_of(View, "a view of a tensor", tensor=COUNT, offset=AFFINE, strides=WHOLES)
BOUND = _made_of(
    Bound, "a bounded coordinate", offset=WHOLE, size=COUNT, unit=WHOLE, strides=WHOLES
)
