"""What a value may be to the batch, and how its dims count samples.

A dim is a row of factors, major to minor, each of which counts samples or does not, so that a
reshape which merges samples and time keeps them apart. Labels of values of one shape merge by the
union of their sample dims.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwright.compiler.ir.types import Value

Factor = tuple[int, bool]  # size, whether it counts samples
FactoredDim = tuple[Factor, ...]  # major to minor


class Kind(enum.Enum):
    """ZERO is known to be all zeros; FREE does not depend on the batch; SAMPLE has sample dims; SUM
    is linear in a sum over samples; MIXED depends on the batch in any other way.
    """

    ZERO = "zero"
    FREE = "free"
    SUM = "sum"
    SAMPLE = "sample"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Label:
    """A kind, and for SAMPLE the factors of every dim."""

    kind: Kind
    dims: tuple[FactoredDim, ...] = ()

    @property
    def on_batch(self) -> bool:
        """True when the value depends on the batch at all."""
        return self.kind not in (Kind.ZERO, Kind.FREE)


ZERO, FREE, SUM, MIXED = (Label(k) for k in (Kind.ZERO, Kind.FREE, Kind.SUM, Kind.MIXED))


def sample(dims: Sequence[FactoredDim]) -> Label:
    """SAMPLE with these dims, or MIXED when none of them counts samples."""
    marked = any(flag for dim in dims for _, flag in dim)
    return Label(Kind.SAMPLE, tuple(dims)) if marked else MIXED


def counts_samples(dim: FactoredDim) -> bool:
    """True when some factor of `dim` counts samples."""
    return any(flag for _, flag in dim)


def dims_of(label: Label, rank_shape: Sequence[int]) -> tuple[FactoredDim, ...]:
    """The factored dims of any label."""
    if label.kind is Kind.SAMPLE:
        return label.dims
    return tuple(((n, False),) for n in rank_shape)


def fit(dims: Sequence[FactoredDim], shape: Sequence[int]) -> list[FactoredDim]:
    """`dims` with dims of another size replaced by one factor."""
    return [
        dim if math.prod(f[0] for f in dim) == n else ((n, counts_samples(dim)),)
        for dim, n in zip(dims, shape, strict=True)
    ]


def merge_dim(a: FactoredDim, b: FactoredDim) -> FactoredDim:
    """The dim of a value computed from both."""
    if a == b or not counts_samples(b):
        return a
    if not counts_samples(a):
        return b
    return _refined(a, b) or ((math.prod(f[0] for f in a), True),)


def _refined(a: FactoredDim, b: FactoredDim) -> FactoredDim:
    """The factors of both, cut wherever either is; none where sizes interleave, and where nothing
    but samples would be left.

    Merging only ever cuts and marks more, up to the one factor that callers make of none, so that
    labels of loops settle. A sample of one element is a mark at a cut.
    """
    parts = [*_parts(a), *_parts(b)]
    marks = {low for low, high, flag in parts if low == high and flag}
    ends = sorted({end for low, high, _ in parts for end in (low, high)})
    if any(high % low for low, high in itertools.pairwise(ends)):
        return ()
    found: list[Factor] = []
    for low, high in itertools.zip_longest(ends, ends[1:]):
        found += [(1, True)] if low in marks else []
        if high is not None:
            flag = any(f for start, end, f in parts if start <= low and high <= end)
            found.append((high // low, flag))
    only = all(flag for _, flag in found)
    return () if only and len(ends) > 1 else tuple(found)


def _parts(dim: FactoredDim) -> Iterator[tuple[int, int, bool]]:
    """(product in front, product with it, flag) of every factor."""
    low = 1
    for size, flag in dim:
        yield low, low * size, flag
        low *= size


def merge(labels: Sequence[Label], shape: Sequence[int]) -> Label:
    """SAMPLE over the union of the sample dims of operands of one shape."""
    dims: tuple[FactoredDim, ...] = tuple(((n, False),) for n in shape)
    for label in labels:
        if label.kind is Kind.SAMPLE and len(label.dims) == len(dims):
            dims = tuple(merge_dim(a, b) for a, b in zip(label.dims, dims, strict=True))
    return sample(dims)


def join(a: Label, b: Label, value: Value) -> Label:
    """What a value is when it may be either."""
    if a == b:
        return a
    kinds = {a.kind, b.kind}
    if Kind.SAMPLE in kinds:
        return merge([a, b], value.type.shape)
    if Kind.MIXED in kinds or kinds == {Kind.FREE, Kind.SUM}:
        return MIXED
    return SUM if Kind.SUM in kinds else FREE


def total(labels: Sequence[Label]) -> Label | None:
    """What sums and zeros add up to; None with any other label among them."""
    kinds = {label.kind for label in labels}
    return (SUM if Kind.SUM in kinds else ZERO) if kinds <= {Kind.SUM, Kind.ZERO} else None


def contracted(kept: Sequence[FactoredDim], added: bool) -> Label:
    """What is left of SAMPLE when some dims are folded."""
    if any(counts_samples(dim) for dim in kept):
        return sample(kept)
    return SUM if added else MIXED
