"""Where instructions and tiles go: the kernel under construction, its loops, and access patterns
over iter dims.

A `Scope` is a place in the loop nest: a body to append to, and for every iter dim a `Box` (origin
and extent) that says which part of the iteration domain the code there works on. A `Held` value is
a tile with an element stride per iter dim, so that reading it anywhere is one rule: stride 0 for
iter dims it does not span.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.compiler.codegen.domain import AccessMap, PerDim, Split, Tensors
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine, root_of
from shardwright.compiler.isa.limits import walk
from shardwright.compiler.isa.program import AccessPattern, Engine, Instr, Loop, Space, Tile
from shardwright.compiler.machine.target import Limits

Code = list[Instr | Loop]
Dims = tuple[tuple[int, int], ...]
ZeroWhen = tuple[int, ...] | None
"""Registers that are all 0 where a sum begins; None where it has begun before."""
NO_DIM = -1  # where a split has no major part
PSUM_WORD = 4  # PSUM holds fp32 (documented: hardware.json psum_output_dtypes)


@dataclass(frozen=True, slots=True)
class Box:
    """The part of an iter dim some code works on: `extent` points from `origin`."""

    origin: Affine
    extent: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an iter dim that one body of code covers: `trip` blocks of `extent` from `start`.

    `shorter` lists iter dims (the minor part of a split) that are shorter in this piece.
    """

    start: int
    extent: int
    trip: int = 1
    shorter: tuple[tuple[int, int], ...] = ()


def pieces(size: int, extent: int, split: Split | None = None) -> list[Piece]:
    """Full blocks, then a shorter block, then the tail of a split."""
    found = [Piece(0, extent, size // extent)] if size >= extent else []
    if size % extent:
        found.append(Piece(size - size % extent, size % extent))
    if split is not None and split.tail:
        found.append(Piece(size, 1, 1, ((split.minor, split.tail),)))
    return found


def cut(size: int, extent: int) -> list[tuple[int, int]]:
    """(first, extent) of the parts of `size`, one by one."""
    return [(first, min(extent, size - first)) for first in range(0, size, extent)]


@dataclass(frozen=True, slots=True)
class Held:
    """A value on chip: tile number, offset in its slot, stride per spanned iter dim (elements)."""

    tile: int
    strides: PerDim
    offset: Affine = field(default_factory=Affine)

    def at(self, index: Mapping[int, Affine]) -> Held:
        """The part of it at some position; iter dims it does not span move nothing."""
        offset = self.offset
        for iter_dim, place in index.items():
            if stride := self.strides.get(iter_dim, 0):
                offset = offset + place * stride
        return Held(self.tile, self.strides, offset)


class Builder:
    """A kernel under construction: tiles, code, registers, and what is made once before it."""

    def __init__(self, limits: Limits, tensors: Tensors, first_register: int) -> None:
        self.limits = limits
        self.tensors = tensors
        self.tiles: list[Tile] = []
        self.prefix: Code = []
        self.body: Code = []
        self.next_register = first_register
        self.slots = 2  # of tiles that rotate with a loop: one is filled while the other is read
        self.loads_apart = False  # tiles that a DMA fills take over no other, and none takes over
        self.loaded: set[int] = set()  # those tiles
        self.takes_over = False  # whether one of them did
        self.once: set[object] = set()  # marks of what was already made in `prefix`
        self._splats: dict[tuple[object, ...], Held] = {}

    def new_register(self) -> int:
        """A register no other loop uses."""
        self.next_register += 1
        return self.next_register - 1

    def scope(self, extents: PerDim) -> Scope:
        """The place behind all code so far, at the first points of all iter dims."""
        boxes = {a: Box(Affine(), extent) for a, extent in extents.items() if a != NO_DIM}
        return Scope(self, self.body, boxes)

    def code(self) -> tuple[list[Tile], Code]:
        """Tiles and code made so far, as copies: later steps edit them in place. Work for engines
        that the core has not goes to those that stand in for them.
        """
        code = _copied([*self.prefix, *self.body])
        issuers = {engine: Engine(self.limits.issuer(engine.value)) for engine in Engine}
        if any(engine is not issuer for engine, issuer in issuers.items()):
            for instr in walk(code):
                instr.engine = issuers[instr.engine]
        return [*map(replace, self.tiles)], code

    def is_alike(self, other: Builder) -> bool:
        """Whether both have made the same code so far."""
        mine, theirs = (
            (b.next_register, b.takes_over, b.tiles, b.prefix, b.body) for b in (self, other)
        )
        return mine == theirs

    def root(self, tensor: int) -> int:
        """The tensor whose memory `tensor` uses."""
        return root_of(self.tensors, tensor)

    def add_tile(self, tile: Tile) -> int:
        """Number of a new tile."""
        self.tiles.append(tile)
        return len(self.tiles) - 1

    def dtype(self, held: Held) -> DType:
        """Element type of a value on chip."""
        return self.tiles[held.tile].dtype

    def filled(self, value: Any, dtype: DType, elements: int = 1, part: str = "") -> Held:
        """A tile full of `value` (number or, for a register as data, `Affine`), made once per
        kernel.

        `part` keeps equal tiles apart that should not share memory.
        """
        key = (str(value), dtype, elements, part)
        if key not in self._splats:
            rows, name = self.limits.partitions, f"fill{len(self._splats)}"
            tile = self.add_tile(Tile(name, Space.SBUF, rows, elements, dtype))
            dst = AccessPattern(Space.SBUF, tile, Affine(), ((1, rows), (1, elements)))
            self.prefix.append(_fill(value, dst, dtype))
            self._splats[key] = Held(tile, {})
        return self._splats[key]


def _copied(body: Sequence[Instr | Loop]) -> Code:
    return [
        Loop(i.register, i.trip, _copied(i.body)) if isinstance(i, Loop) else i.copy() for i in body
    ]


def _fill(value: Any, dst: AccessPattern, dtype: DType) -> Instr:
    if isinstance(value, Affine):
        attrs = {"start": value, "partition_step": 0, "steps": (0,)}
        return Instr("iota", Engine.GPSIMD, dst, (), attrs)
    engine = Engine.GPSIMD if dtype.is_integer else Engine.VECTOR
    return Instr("memset", engine, dst, (), {"value": value})


class Scope:
    """A place in a loop nest; `register` and `trip` are of the innermost loop (-1, 1 outside)."""

    def __init__(
        self,
        builder: Builder,
        body: Code,
        boxes: Mapping[int, Box],
        register: int = -1,
        trip: int = 1,
    ) -> None:
        self.builder = builder
        self.body = body
        self.boxes = dict(boxes)
        self.register = register
        self.trip = trip
        self.sizes: dict[int, int] = {}  # iter dims that are shorter here (the tail of a split)
        self.first: dict[int, ZeroWhen] = {}  # see `enter`
        self.lane = 0  # of straight code whose lanes run side by side, each with tiles of its own
        self._free: dict[tuple[object, ...], list[int]] = {}

    def straight(self, boxes: Mapping[int, Box]) -> Scope:
        """The same place with other boxes."""
        scope = Scope(self.builder, self.body, {**self.boxes, **boxes}, self.register, self.trip)
        scope._free, scope.sizes, scope.first = self._free, self.sizes, self.first
        scope.lane = self.lane
        return scope

    def beside(self, body: Code, lane: int) -> Scope:
        """Code in `body`, a loop of this place or itself, with tiles that only its lane takes."""
        scope = self.straight({})
        scope.body, scope.lane = body, lane
        return scope

    def loop(self, trip: int) -> Scope:
        """The body of a new loop of `trip` iterations, appended here, with these boxes."""
        register = self.builder.new_register()
        loop = Loop(register, trip, [])
        self.body.append(loop)
        scope = Scope(self.builder, loop.body, self.boxes, register, trip)
        scope.sizes, scope.first = self.sizes, self.first
        return scope

    def repeat(self, piece: Piece) -> tuple[Scope, Affine]:
        """(the code for one piece, a loop when it repeats; where the piece is)."""
        if piece.trip == 1:
            return self.straight({}), Affine(piece.start)
        inner = self.loop(piece.trip)
        return inner, Affine(piece.start, ((inner.register, piece.extent),))

    def counted(self, count: int) -> tuple[Scope, Affine]:
        """(body, index) of a loop of `count` iterations; this place when there is one."""
        return self.repeat(Piece(0, 1, count))

    def enter(self, iter_dim: int, piece: Piece) -> Scope:
        """The code for one piece of an iter dim: a loop when it repeats.

        `first` of the result tells accumulations over the iter dim how to start: the registers that
        are 0 in the first iteration, or None when an earlier piece has already been added.
        """
        scope, at = self.repeat(piece)
        scope.boxes[iter_dim] = Box(at, piece.extent)
        scope.first = {**self.first, iter_dim: _registers(at) if piece.start == 0 else None}
        scope.sizes = {**self.sizes, **dict(piece.shorter)}
        for short, size in piece.shorter:
            scope.boxes[short] = Box(Affine(), min(size, scope.boxes[short].extent))
        return scope

    def nested(self, sizes: PerDim, extents: Mapping[int | None, int] | PerDim) -> list[Scope]:
        """The code for all pieces of the iter dims of `extents`, the first one outermost."""
        places = [self]
        for iter_dim, extent in extents.items():
            if iter_dim is not None:
                parts = pieces(sizes[iter_dim], extent)
                places = [place.enter(iter_dim, part) for place in places for part in parts]
        return places

    def within(self, iter_dim: int, piece: Piece, begins: bool) -> Scope:
        """One piece of this scope's box of an iter dim; sums over it begin there if it `begins`."""
        begun, scope = self.first.get(iter_dim, ()), self.enter(iter_dim, piece)
        at = scope.boxes[iter_dim].origin
        scope.boxes[iter_dim] = Box(self.boxes[iter_dim].origin + at, piece.extent)
        first = (*begun, *_registers(at)) if begins and begun is not None else None
        scope.first = {**scope.first, iter_dim: first}
        return scope

    def zero_when(self, iter_dims: Iterable[int]) -> ZeroWhen:
        """When a sum over `iter_dims` overwrites here: `zero_when` of instructions."""
        registers: tuple[int, ...] = ()
        for iter_dim in sorted(iter_dims):
            start = self.first.get(iter_dim, ())
            if start is None:
                return None
            registers += start
        return registers

    def extent(self, iter_dim: int | None) -> int:
        """Points of `iter_dim` this code works on; 1 for no iter dim (None or -1)."""
        return 1 if iter_dim in (None, NO_DIM) else self.boxes[iter_dim].extent

    def box(self, iter_dim: int | None) -> Box:
        """What this code works on of `iter_dim`; one point for no iter dim."""
        return Box(Affine(), 1) if iter_dim is None else self.boxes[iter_dim]

    def origins(self, iter_dims: Iterable[int]) -> dict[int, Affine]:
        """Where this code begins along `iter_dims`."""
        return {a: self.boxes[a].origin for a in iter_dims if a != NO_DIM}

    def tile(
        self,
        name: str,
        partitions: int,
        elements: int,
        dtype: DType,
        slots: int = 0,
        loaded: bool = False,
    ) -> Held:
        """An SBUF tile that lives in one iteration here; a released one of the same form is taken
        first, the one that was released longest ago: what it held is read or stored by now. One
        that is `loaded` waits for the last reader of what it takes over.
        """
        slots = 1 if self.lane else min(self.trip, slots or self.builder.slots)
        key = (self.lane, partitions, elements, dtype, slots)
        if self._free.get(key) and not (loaded and self.builder.loads_apart):
            number = self._free[key].pop(0)
            self.builder.takes_over |= loaded or number in self.builder.loaded
        else:
            tile = Tile(name, Space.SBUF, partitions, elements, dtype, slots, self.register)
            number = self.builder.add_tile(tile)
        if loaded:
            self.builder.loaded.add(number)
        return Held(number, {})

    def spanning(
        self,
        axes: Sequence[int],
        name: str,
        partitions: int,
        dtype: DType,
        slots: int = 0,
        loaded: bool = False,
    ) -> Held:
        """The same with an element at every point of `axes` (major to minor) of this scope."""
        elements = self.elements(axes)
        return self.hold(self.tile(name, partitions, elements, dtype, slots, loaded), axes)

    def psum(self, name: str, banks: int = 1, slots: int = 2) -> Held:
        """An fp32 PSUM tile of whole banks."""
        limits = self.builder.limits
        elements = banks * limits.psum_bank_bytes // PSUM_WORD
        slots = min(self.trip, slots)
        tile = Tile(name, Space.PSUM, limits.partitions, elements, DType.F32, slots, self.register)
        return Held(self.builder.add_tile(tile), {})

    def release(self, held: Held) -> None:
        """Give back the tile of a value that nobody reads any more."""
        tile = self.builder.tiles[held.tile]
        if self.builder.loads_apart and held.tile in self.builder.loaded:
            return
        if tile.space is Space.SBUF and tile.loop == self.register:
            key = (self.lane, tile.partitions, tile.elements, tile.dtype, tile.slots)
            self._free.setdefault(key, []).append(held.tile)

    def add(
        self,
        opcode: str,
        engine: Engine,
        dst: AccessPattern,
        srcs: Sequence[AccessPattern] = (),
        **attrs: Any,
    ) -> None:
        """Append one instruction."""
        self.body.append(Instr(opcode, engine, dst, tuple(srcs), attrs))

    def load(self, dst: AccessPattern, src: AccessPattern) -> None:
        """A DMA on the queues that fill tiles."""
        self.add("dma", Engine.DMA_IN, dst, (src,))

    def store(self, dst: AccessPattern, src: AccessPattern) -> None:
        """A DMA on the queues that empty tiles."""
        self.add("dma", Engine.DMA_OUT, dst, (src,))

    def copy(self, engine: Engine, dst: AccessPattern, src: AccessPattern) -> None:
        """A copy on chip, to the element type of its destination."""
        self.add("tensor_copy", engine, dst, (src,))

    def transpose(self, dst: AccessPattern, src: AccessPattern) -> None:
        """A block [partitions, elements] to PSUM as [elements, partitions]."""
        self.add("transpose", Engine.TENSOR, dst, (src,))

    def matmul(
        self, dst: AccessPattern, srcs: Sequence[AccessPattern], zero_when: ZeroWhen
    ) -> None:
        """[k, rows]^T x [k, columns] into PSUM, over what is there if `zero_when` are all 0."""
        self.add("matmul", Engine.TENSOR, dst, srcs, zero_when=zero_when)

    def add_up(self, dst: AccessPattern, src: AccessPattern, zero_when: ZeroWhen) -> None:
        """Sums over the last dim of `src`, added to `dst` unless registers `zero_when` are 0."""
        attrs = {"op": "add", "num_reduced": 1, "zero_when": zero_when}
        self.add("tensor_reduce", Engine.VECTOR, dst, (src,), **attrs)

    def fill(self, dst: AccessPattern, value: float) -> None:
        """A number everywhere in `dst`."""
        self.add("memset", Engine.VECTOR, dst, (), value=value)

    # patterns

    def hold(self, tile: Held, axes: Iterable[int]) -> Held:
        """A value laid out densely over `axes` (major to minor) at the extents of this scope."""
        strides, step = {}, 1
        for iter_dim in reversed(list(axes)):
            strides[iter_dim] = step
            step *= self.extent(iter_dim)
        return Held(tile.tile, strides)

    def elements(self, axes: Iterable[int]) -> int:
        """Product of the extents of `axes`."""
        return math.prod(self.extent(a) for a in axes)

    def patterns(self, rows: int, axes: Sequence[int], *values: Held) -> list[AccessPattern]:
        """Patterns of equal shape over `rows` partitions and `axes`, dims merged where possible."""
        merged = merge_dims(
            [self.extent(a) for a in axes], [[v.strides.get(a, 0) for a in axes] for v in values]
        )
        return [self.on_chip(v, rows, dims) for v, dims in zip(values, merged, strict=True)]

    def on_chip(
        self, value: Held, rows: int, dims: Dims, offset: Affine | int = 0
    ) -> AccessPattern:
        """Pattern of a value with explicit free dims."""
        space = self.builder.tiles[value.tile].space
        return AccessPattern(space, value.tile, value.offset + offset, ((1, rows), *dims))

    def flat(
        self, value: Held, rows: int, elements: int, offset: Affine | int = 0
    ) -> AccessPattern:
        """Pattern of neighbouring elements of a value on each of `rows` partitions."""
        return self.on_chip(value, rows, ((1, elements),), offset)

    def transfer(
        self, access: AccessMap, held: Held, rows: int, partition: int | None, axes: Sequence[int]
    ) -> tuple[AccessPattern, AccessPattern]:
        """(HBM pattern, on-chip pattern) of equal shape for a DMA of a view."""
        axes = sorted(axes, key=lambda a: -abs(access.stride(a)))  # runs of HBM innermost
        sizes = [self.extent(a) for a in axes]
        hbm, chip = merge_dims(
            sizes, [[access.stride(a) for a in axes], [held.strides.get(a, 0) for a in axes]]
        )
        first = (access.stride(partition), rows)
        return self.hbm(access, (first, *hbm)), self.on_chip(held, rows, chip)

    def hbm(self, access: AccessMap, dims: Dims) -> AccessPattern:
        """HBM pattern at the origin of this scope's boxes."""
        return AccessPattern(Space.HBM, access.tensor, self.address(access), dims)

    def address(self, access: AccessMap) -> Affine:
        """Where an access map starts here."""
        return self.address_of(access.offset, access, access.strides)

    def address_of(self, start: Affine, access: AccessMap, iter_dims: Iterable[int]) -> Affine:
        """`start` moved along `iter_dims` of an access map to the origins of this scope's boxes."""
        for iter_dim in iter_dims:
            start = start + self.boxes[iter_dim].origin * access.stride(iter_dim)
        return start


def by_numbers(*steps: tuple[str, Any], reverse: bool = False) -> dict[str, Any]:
    """Attributes of `tensor_scalar`: one or two (operator, number), where a number of None is a
    further operand with one element per partition; the first takes its number first if `reverse`.
    """
    (op0, scalar0), (op1, scalar1) = [*steps, (None, None)][:2]
    first = {"op0": op0, "scalar0": scalar0, "reverse0": reverse}
    return first | {"op1": op1, "scalar1": scalar1, "reverse1": False}


def _registers(at: Affine) -> tuple[int, ...]:
    return tuple(register for register, _ in at.terms)


def divided(value: Affine, by: int) -> Affine:
    """`value / by` for values that are multiples of it."""
    return Affine(value.const // by, tuple((r, c // by) for r, c in value.terms))


def merge_dims(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> list[Dims]:
    """Dims (stride, size) per operand, none of size 1, merged where all operands allow it."""
    kept: list[tuple[int, tuple[int, ...]]] = []
    for size, steps in zip(sizes, zip(*strides, strict=True), strict=True):
        if size == 1:
            continue
        if kept and all(a == b * size for a, b in zip(kept[-1][1], steps, strict=True)):
            kept[-1] = (kept[-1][0] * size, steps)
        else:
            kept.append((size, steps))
    if not kept:
        kept = [(1, (1,) * len(strides))]
    return [tuple((steps[i], size) for size, steps in kept) for i in range(len(strides))]


def blocks_within(
    scope: Scope, iter_dims: Sequence[tuple[int, int]], here: Mapping[int, Affine]
) -> Iterator[tuple[Scope, dict[int, Affine]]]:
    """Loops over blocks of the boxes of `scope`: (body, position per iter dim in its box)."""
    if not iter_dims:
        yield scope, dict(here)
        return
    (iter_dim, block), rest = iter_dims[0], iter_dims[1:]
    base = scope.boxes[iter_dim]
    for piece in pieces(base.extent, min(block, base.extent)):
        inner, index = scope.repeat(piece)
        inner.boxes[iter_dim] = Box(base.origin + index, piece.extent)
        yield from blocks_within(inner, rest, {**here, iter_dim: index})
