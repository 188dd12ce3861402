"""The structure of a contraction of windows: which index places a window, which walks its taps,
which runs over images and channels.

Memory is [images..., spatial dims..., channels], channels innermost and dense. The innermost
spatial dim is `inner`, the next one `line`: a line of memory holds all positions and channels of
one step of the line dim. Every other spatial dim is in `depths`. With one spatial dim the positions
are the lines if their channels make runs, else a line is all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from shardwright.compiler.codegen.domain import AccessMap, CoordBound, Domain, IterDims, PerDim
from shardwright.compiler.diagnostics import CompileError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine

# Positions with this many bytes of channels are worth a DMA descriptor each (our choice).
_RUN_BYTES = 512
Steps = tuple[tuple[int, int], ...]  # (iter dim, step), smallest step first


@dataclass(frozen=True, slots=True)
class Dim:
    """A spatial dim: coordinate `start + sum(index * step)`, `unit` elements of memory apart, of
    which 0..size-1 exist. `kept` are the iter dims the contraction keeps, `summed` the others.
    """

    start: int
    size: int
    unit: int
    kept: Steps
    summed: Steps


@dataclass(frozen=True, slots=True)
class Form:
    """A contraction `number` of windows (value `windows`) with another operand (value `other`).

    `images` and `channels` are the unbounded iter dims of the windows, major to minor, `pixel` the
    channels in memory; `groups` are channel iter dims that the other operand has too. `columns` are
    the iter dims of the result that only the other operand has.
    """

    domain: Domain
    number: int
    windows: int
    other: int
    access: AccessMap
    weights: AccessMap
    depths: tuple[Dim, ...]
    line: Dim
    inner: Dim
    images: IterDims
    channels: IterDims
    groups: IterDims
    columns: IterDims
    over: frozenset[int]

    @property
    def pixel(self) -> int:
        """Elements of one position: all channels."""
        return self.inner.unit

    @property
    def packed_type(self) -> DType:
        """Element type of operands on chip: the tensor engine takes fp32 with fp32 only."""
        types = [self.domain[n].dtype for n in (self.windows, self.other)]
        return DType.F32 if DType.F32 in types else types[0]

    @property
    def origin(self) -> Affine:
        """Address of coordinate 0 of every dim, of the first image and channel."""
        dims = (*self.depths, self.line, self.inner)
        return self.access.offset + -sum(d.start * d.unit for d in dims)

    @property
    def channel(self) -> int | None:
        """The summed channel iter dim that is innermost."""
        summed = [a for a in self.channels if a in self.over]
        return summed[-1] if summed and self.access.stride(summed[-1]) == 1 else None

    @property
    def transposes_filters(self) -> bool:
        """Whether channels, not columns, are innermost in the other operand."""
        columns = [abs(self.weights.stride(a)) for a in self.columns]
        inner = self.channel is not None and abs(self.weights.stride(self.channel)) == 1
        return inner and bool(columns) and 1 not in columns

    @property
    def sums_channels(self) -> bool:
        """Whether channels are summed, not positions; of a single channel what is fewer."""
        kept = [a for a in self.channels if a not in self.over and a not in self.groups]
        if kept or any(a in self.over for a in self.images):
            return False
        if any(a in self.over for a in (*self.channels, *self.images)) or self.images:
            return True
        dims = (*self.depths, self.line, self.inner)
        taps, positions = (
            self.domain.points(a for d in dims for a, _ in getattr(d, role))
            for role in ("summed", "kept")
        )
        return taps <= positions


def form_of(domain: Domain, number: int) -> Form:
    """The form of contraction `number`. Raises CompileError when it has another one."""
    contract = domain[number]
    left, right = contract.inputs
    if not (domain[left].map and domain[left].access.bounds):
        left, right = right, left
    accesses = [domain[n].map for n in (left, right)]
    if accesses[0] is None or accesses[1] is None or not accesses[0].bounds or accesses[1].bounds:
        raise refused(domain, "operands in memory, one of them windows")
    access, weights = accesses[0], accesses[1]
    dims = sorted((_dim(b, contract.over) for b in access.bounds), key=lambda d: -d.unit)
    inner = dims.pop()
    item = domain[left].dtype.bytes
    if dims:
        line = dims.pop()
    elif inner.unit * item >= _RUN_BYTES:
        line, inner = inner, Dim(0, 1, inner.unit, (), ())
    else:
        line = Dim(0, 1, inner.size * inner.unit, (), ())
    bounded = {a for b in access.bounds for a in b.strides}
    plain = sorted(set(access.strides) - bounded, key=lambda a: (-abs(access.stride(a)), a))
    other = domain[right].iter_dims
    groups = [a for a in plain if a in other and a not in contract.over]
    return Form(
        domain=domain,
        number=number,
        windows=left,
        other=right,
        access=access,
        weights=weights,
        depths=tuple(dims),
        line=line,
        inner=inner,
        images=tuple(a for a in plain if abs(access.stride(a)) >= inner.unit),
        channels=tuple(a for a in plain if abs(access.stride(a)) < inner.unit),
        groups=tuple(groups),
        columns=tuple(sorted(contract.iter_dims - domain[left].iter_dims)),
        over=contract.over,
    )


def _dim(bound: CoordBound, over: Iterable[int]) -> Dim:
    ranked = sorted(bound.strides.items(), key=lambda s: s[1])
    kept = tuple(s for s in ranked if s[0] not in over)
    return Dim(bound.start, bound.size, bound.unit, kept, tuple(s for s in ranked if s[0] in over))


def points(sizes: PerDim, steps: Steps) -> Iterator[tuple[dict[int, int], int]]:
    """(index per iter dim, what the coordinate moves) for every point of `steps`."""
    ranges = [range(sizes[a]) for a, _ in steps]
    for at in product(*ranges):
        moved = sum(i * step for i, (_, step) in zip(at, steps, strict=True))
        yield {a: i for i, (a, _) in zip(at, steps, strict=True)}, moved


def refused(domain: Domain, what: str) -> CompileError:
    """The error for windows this generator has no code for."""
    return CompileError(
        "SW_CODEGEN_WINDOWS",
        f"kernel {domain.name} requires {what}",
        hint="lower the windows to a kernel of their own",
    )
