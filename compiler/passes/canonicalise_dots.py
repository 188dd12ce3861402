"""Contractions in the order their transposed result is read.

The gradient of a weight is a contraction followed by a transpose that brings its rows and columns
back: written as it stands, every element of a row lands in another row, one descriptor each. A
contraction gives its transpose for free when its operands change places, so that the innermost dim
of what is read is the innermost dim of what is written. What the swap leaves of the transpose (a
batch dim that moves, never the innermost one) stays; the old contraction is left to `dce`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from shardwright.compiler.ir.build import fresh
from shardwright.compiler.ir.facts import pairing, permutation
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import DotGeneralAttrs, TransposeAttrs
from shardwright.compiler.ir.rewrite import replaced
from shardwright.compiler.ir.types import Graph, Op, Value

_CARRYING = frozenset(("convert",))  # may stand between the contraction and its transpose


def canonicalise_dots(graph: Graph) -> Graph:
    """`graph` with contractions swapped where only a transpose that wants it reads them."""
    producers = graph.producers()
    uses = Counter(v for op in graph.ops for v in op.operands) + Counter(graph.outputs)
    return replaced(graph, lambda op, _: _canonicalised(op, producers, uses), canonicalise_dots)


def _canonicalised(op: Op, producers: Mapping[Value, Op], uses: Mapping[Value, int]) -> list[Op]:
    """The ops that make the result of a transpose from a swapped contraction, if it wants one."""
    order = permutation(op)
    chain = _from_contraction(op.operands[0], producers, uses) if order else []
    if not order or not chain or not _wants_swap(chain[0], order):
        return []
    made = [_swapped(chain[0])]
    made += [fresh(c, made[-1].results) for c in chain[1:]]
    places = _new_places(chain[0])
    left = tuple(places[d] for d in order)
    if left != tuple(range(len(left))):
        made.append(make_op("transpose", made[-1].results, TransposeAttrs(left), loc=op.loc))
    return made


def _from_contraction(
    value: Value, producers: Mapping[Value, Op], uses: Mapping[Value, int]
) -> list[Op]:
    """The ops from a contraction to `value` when nothing else reads them, else nothing."""
    chain: list[Op] = []
    while uses[value] == 1 and (op := producers.get(value)) is not None:
        chain.insert(0, op)
        if pairing(op) is not None:
            return chain
        if op.name not in _CARRYING:
            break
        value = op.operands[0]
    return []


def _dims(dot: Op) -> tuple[range, range, range]:
    """Result dims of a contraction: batch, free dims of lhs, free dims of rhs."""
    lhs, rhs = dot.attrs.free_dims(*(v.type.rank for v in dot.operands))
    batch = len(dot.attrs.lhs_batch)
    split = batch + len(lhs)
    return range(batch), range(batch, split), range(split, split + len(rhs))


def _wants_swap(dot: Op, permutation: tuple[int, ...]) -> bool:
    """True when the innermost dim that is read is the last of lhs, and rhs has one to give way."""
    _, lhs, rhs = _dims(dot)
    return bool(lhs) and bool(rhs) and permutation[-1] == lhs[-1]


def _swapped(dot: Op) -> Op:
    """The same contraction with its operands in the other order."""
    a = dot.attrs
    attrs = DotGeneralAttrs(a.rhs_batch, a.lhs_batch, a.rhs_contract, a.lhs_contract, a.dtype)
    return make_op("dot_general", dot.operands[::-1], attrs, loc=dot.loc)


def _new_places(dot: Op) -> dict[int, int]:
    """Where each result dim of `dot` is in the result of the swapped contraction."""
    batch, lhs, rhs = _dims(dot)
    return {old: new for new, old in enumerate((*batch, *rhs, *lhs))}
