"""Indexing maps: which independent index every dim of a value walks.

A map has an expression per dim: iter dims from major to minor, none for a dim of size 1.
Iter dims form a union-find: `unify` makes two dims walk the same index and splits the larger iter
dim where sizes divide, so reshapes need no pattern. Maps are made per kernel and per use, never
for a whole graph: through contractions, unrelated indices would merge.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain

from shardwright.compiler.ir.facts import dim_map
from shardwright.compiler.ir.types import Op

IndexExpr = tuple["IterDim", ...]
IndexingMap = tuple[IndexExpr, ...]


class IterDim:
    """An independent index: a root, united with another, or split in (major, minor)."""

    __slots__ = ("parent", "parts", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.parent: IterDim | None = None
        self.parts: tuple[IterDim, IterDim] | None = None

    def split(self, minor_size: int) -> tuple[IterDim, IterDim]:
        """Split a root into (major, minor); `minor_size` must divide."""
        assert self.parent is None and self.parts is None and self.size % minor_size == 0
        self.parts = (IterDim(self.size // minor_size), IterDim(minor_size))
        return self.parts


def fresh(shape: Sequence[int]) -> IndexingMap:
    """New iter dims for every dim of `shape`."""
    return tuple((IterDim(n),) if n != 1 else () for n in shape)


def behind(op: Op, indexing: IndexingMap) -> IndexingMap | None:
    """The map of a view of what has `indexing`: dims along which it repeats get fresh iter dims.
    None for a reshape where sizes do not divide.
    """
    shape, walked = op.result.type.shape, dim_map(op)
    if walked is None:
        return regroup(indexing, shape)
    pairs = zip(walked, shape, strict=True)
    return tuple(fresh((n,))[0] if d is None else indexing[d] for d, n in pairs)


def leaves(expr: Iterable[IterDim]) -> list[IterDim]:
    """The root iter dims `expr` stands for now, major to minor."""
    found: list[IterDim] = []
    for iter_dim in expr:
        root = iter_dim if iter_dim.parent is None else find(iter_dim)
        if root.parts is None:
            found.append(root)
        else:
            found += leaves(root.parts)
    return found


def find(iter_dim: IterDim) -> IterDim:
    """The representative of an iter dim's set, with path compression."""
    root = iter_dim
    while root.parent is not None:
        root = root.parent
    while iter_dim is not root:
        iter_dim.parent, iter_dim = root, iter_dim.parent or root
    return root


def all_leaves(indexing: IndexingMap) -> list[IterDim]:
    """The root iter dims of all dims, in order."""
    return leaves(chain.from_iterable(indexing))


def distinct(indexing: IndexingMap) -> bool:
    """False when two dims walk the same iter dim: independent indices would be merged."""
    iter_dims = all_leaves(indexing)
    return len(set(iter_dims)) == len(iter_dims)


def unify(a: IndexExpr, b: IndexExpr) -> bool:
    """Make expressions of equal size walk the same indices; False when sizes do not divide."""
    if a == b:
        return True
    left, right = leaves(a), leaves(b)
    while left and right:
        x, y = _pop(left), _pop(right)
        if x is y:
            continue
        if x.size == y.size:
            x.parent = y
        elif x.size > y.size:
            if not _unify_minor(x, y, left):
                return False
        elif not _unify_minor(y, x, right):
            return False
    return not left and not right


def _pop(stack: list[IterDim]) -> IterDim:
    """The minor-most leaf; an iter dim that was split meanwhile puts its major parts back."""
    *major, minor = leaves((stack.pop(),))
    stack.extend(major)
    return minor


def _unify_minor(large: IterDim, small: IterDim, stack: list[IterDim]) -> bool:
    """Unite `small` with the minor part of `large`; the major part goes back to the stack."""
    if large.size % small.size:
        return False
    major, minor = large.split(small.size)
    minor.parent = small
    stack.append(major)
    return True


def unify_all(a: IndexingMap, b: IndexingMap) -> bool:
    """`unify` dim by dim."""
    return all(unify(x, y) for x, y in zip(a, b, strict=True))


def regroup(indexing: IndexingMap, shape: Sequence[int]) -> IndexingMap | None:
    """The map of a row-major reshape, splitting iter dims; None when sizes do not divide."""
    made = fresh(shape)
    if not unify(tuple(chain.from_iterable(made)), tuple(chain.from_iterable(indexing))):
        return None
    return tuple(tuple(leaves(expr)) for expr in made)


def extent(iter_dims: Iterable[IterDim]) -> int:
    """Number of points of an index space."""
    return math.prod(a.size for a in iter_dims)
