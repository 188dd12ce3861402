"""Sets of ops by what they are, from what `OpDef` declares: no pass keeps a list of its own.

A set that leaves ops of a kind out, or takes others in, says so where it is used.
"""

from __future__ import annotations

from shardwright.compiler.ir.opdef import OPS, Kind


def of(*kinds: Kind, combines: bool | None = None) -> frozenset[str]:
    """Names of the ops of `kinds`; with `combines`, of those alone that do or do not."""
    return frozenset(
        name for name, op in OPS.items() if op.kind in kinds and combines in (None, op.combines)
    )


CASTS = of(Kind.CAST)
CONTRACTIONS = of(Kind.CONTRACTION)
"""Ops that multiply and add over an index: the tensor engine's."""
IDENTITIES = of(Kind.IDENTITY)
INDEXED = of(Kind.INDEXED)
LITERALS = of(Kind.LITERAL)
PARTS = of(Kind.PART)
REDUCTIONS = of(Kind.REDUCTION)
VIEWS = of(Kind.VIEW)
RESHAPING = of(Kind.IDENTITY, Kind.VIEW)
"""All elements of the operand, under the same or other indices."""
ALIASING = of(Kind.IDENTITY, Kind.VIEW, Kind.PART)
"""Elements of the operand, which may be read where they lie."""
MOVES = of(Kind.VIEW, Kind.PART, Kind.JOIN)
"""Every element of the result is one of an operand, or padding, and attributes say which."""
IN_ORDER = of(Kind.PART, Kind.JOIN, Kind.UPDATE, Kind.WINDOW, Kind.SORT)
"""Dims of operands and results correspond by position, whatever is taken along them."""
CHEAP = MOVES | of(Kind.ELEMENTWISE, Kind.CAST, Kind.IDENTITY, Kind.LITERAL)
"""One pass over the elements at most: others may repeat it."""
UPDATES = of(Kind.UPDATE)
WRITES = UPDATES | of(Kind.INDEXED, combines=True)
"""The first operand with some of its elements replaced, or combined with others."""
TRAFFIC = of(Kind.COLLECTIVE)
REDUCTIONS_OF_RANKS = of(Kind.COLLECTIVE, combines=True)
"""What adds up, or combines in another way, over ranks."""
