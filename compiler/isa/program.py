"""Tile programs: rolled loops of engine instructions, and the function that holds them.

The instruction set itself (legality, cost, which engine) is data in `instructions.py`; this file
holds the structure that code generation builds, the container stores in columns (`encode.py`), L0
executes and the evaluator times.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine, KernelProgram, Tensor

TRANSFERS = ("host_store", "host_load")
"""Kinds of `CollectiveCall` that go over the host's link."""
NO_PLACE = -1
"""The offset of an arena buffer that no call reads or writes: it has no bytes."""


class Engine(enum.Enum):
    """An in-order instruction queue of one NeuronCore."""

    __hash__ = object.__hash__  # members are single objects; Enum hashes their names in Python

    TENSOR = "tensor"
    VECTOR = "vector"
    SCALAR = "scalar"
    GPSIMD = "gpsimd"
    SYNC = "sync"
    DMA_IN = "dma_in"  # HBM -> SBUF, and HBM -> HBM
    DMA_OUT = "dma_out"  # SBUF -> HBM


class Space(enum.Enum):
    """Where a buffer lives."""

    __hash__ = object.__hash__

    HBM = "hbm"
    SBUF = "sbuf"
    PSUM = "psum"


@dataclass(slots=True)
class Tile:
    """An on-chip buffer of a kernel: `partitions` x `elements` per slot, at byte `address` of
    every partition.

    `slots > 1` rotates: iteration `i` of the loop whose counter is register `loop` uses slot `i %
    slots`. A tile is only touched inside the body of that loop (`loop == -1`: anywhere in the
    kernel, one slot).
    """

    name: str
    space: Space
    partitions: int
    elements: int
    dtype: DType
    slots: int = 1
    loop: int = -1
    address: int = -1

    @property
    def slot_bytes(self) -> int:
        """Bytes per partition of one slot."""
        return self.elements * self.dtype.bytes


@dataclass(frozen=True, slots=True)
class AccessPattern:
    """Which elements an instruction touches.

    HBM: `buffer` is a tensor number; address = offset + sum(index * stride) elements over `dims`.
    SBUF, PSUM: `buffer` is a tile number of the kernel; `dims[0]` is (1, number of partitions)
    starting at partition
    `start`; the other dims are (stride, size) in elements inside the partition, at element
    `offset` of the slot. Stride 0 reads one element repeatedly (never legal for a destination). At
    most four dims after the first.
    """

    space: Space
    buffer: int
    offset: Affine
    dims: tuple[tuple[int, int], ...]
    start: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dims."""
        return tuple(size for _, size in self.dims)


def extent(dims: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Lowest and highest element offset that (stride, size) dims touch."""
    reach = [stride * (size - 1) for stride, size in dims]
    return sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach)


@dataclass(slots=True)
class Instr:
    """One engine instruction.

    `waits` and `signals` name counting semaphores of the kernel: every wait takes one token and
    blocks the queue until there is one; every signal adds one token when the instruction has
    finished. `borders` are numbers of the kernel's borders; each blocks the queue until it is
    passed, and takes nothing. `row_sum` is the second destination of `activation_reduce`.
    """

    opcode: str
    engine: Engine
    dst: AccessPattern | None
    srcs: tuple[AccessPattern, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    waits: tuple[int, ...] = ()
    signals: tuple[int, ...] = ()
    borders: tuple[int, ...] = ()
    row_sum: AccessPattern | None = None

    def copy(self) -> Instr:
        """An equal one, for code that is edited in place."""
        tokens = self.waits, self.signals, self.borders
        return Instr(
            self.opcode, self.engine, self.dst, self.srcs, self.attrs, *tokens, self.row_sum
        )

    @property
    def dsts(self) -> tuple[AccessPattern, ...]:
        """What the instruction writes."""
        if self.row_sum is None:
            return () if self.dst is None else (self.dst,)
        return (self.row_sum,) if self.dst is None else (self.dst, self.row_sum)


@dataclass(slots=True)
class Loop:
    """`for register in range(trip)`: all engines run the loop, each the instructions of its own
    queue."""

    register: int
    trip: int
    body: list[Instr | Loop]


class Border(NamedTuple):
    """Passed when `queue` has finished all its instructions of the kernel `back` kernels before
    this one, and of all kernels before that. Every queue has one semaphore that counts kernels."""

    queue: Engine
    back: int


@dataclass(slots=True)
class Kernel:
    """A kernel's meaning and its code; semaphores start at `tokens`.

    A kernel without `borders` starts behind a barrier of all engines. One that has them starts on
    every queue as soon as that queue has come to it; only what names a border waits for it.
    `after` is a semaphore between physical cores: how many kernels of the other subgraph must have
    finished before this one starts. A core that finishes a kernel increments the other's count.
    """

    program: KernelProgram
    tiles: list[Tile] = field(default_factory=list)
    body: list[Instr | Loop] = field(default_factory=list)
    tokens: tuple[int, ...] = ()  # initial count of each semaphore
    after: int = 0
    borders: tuple[Border, ...] | None = None


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One collective of a function: kind and mesh axes are symbolic, so the code is the same on
    every core.

    `elements` is the number of elements of the per-rank source, `dim_outer`/`dim_inner` place the
    gathered or scattered
    dim: the source viewed as [outer, dim, inner] is concatenated (or split) along the middle one
    in group order. A bucket has `parts`: tensors one behind the other in the source, and their
    results in the target, each with a shape of its own.
    `host_store` and `host_load` move a rank's own tensor over the link to the host and have no
    axes: target or source is a row of a host buffer.
    """

    kind: str  # CollectiveKind.value, host_store, host_load
    axes: tuple[str, ...]
    dtype: DType
    source_shape: tuple[int, int, int]  # outer, dim, inner of one rank's source
    reduction: str = ""  # add, max, min; empty when nothing is reduced
    stream: int = 0
    name: str = ""
    pairs: tuple[tuple[int, int], ...] = ()  # group positions (source, target) of a permute
    parts: tuple[tuple[int, int, int], ...] = ()

    @property
    def is_transfer(self) -> bool:
        """Whether it goes over the host's link instead of the network."""
        return self.kind in TRANSFERS

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Outer, dim, inner of each of its parts."""
        return self.parts or (self.source_shape,)

    @property
    def num_elements(self) -> int:
        """What one rank sends."""
        return sum(map(math.prod, self.shapes))

    @property
    def queue(self) -> int | str:
        """What serves it in order: a stream of the collective engine, or a direction of the host's
        link, which has DMA rings of its own."""
        return self.kind if self.is_transfer else self.stream

    @property
    def met(self) -> CollectiveCall:
        """What the ranks of a group agree on: programs of different stages number differently."""
        return replace(self, name="")


@dataclass(slots=True)
class Function:
    """A compiled function: tensors, registers (parameters first), kernels in program order,
    scratch size.

    For a logical NeuronCore of two physical cores there are two subgraphs of equally many kernels
    over the same tensors: `kernels` runs on core 0, `partner` on core 1. A call begins and ends
    with both cores at the same point. Collectives are in the subgraph of core 0.
    """

    name: str
    tensors: list[Tensor]
    inputs: tuple[int, ...]  # tensor numbers, in the order of the graph's inputs
    outputs: tuple[int, ...]
    parameters: tuple[int, ...]  # registers the caller sets (layer loop counters)
    num_registers: int
    kernels: list[Kernel]
    collectives: list[CollectiveCall]
    scratch_bytes: int = 0
    target: str = ""
    partner: list[Kernel] | None = None

    @property
    def subgraphs(self) -> tuple[list[Kernel], ...]:
        """What each physical core runs."""
        return (self.kernels,) if self.partner is None else (self.kernels, self.partner)

    @property
    def has_borders(self) -> bool:
        """Whether any kernel starts without a barrier in front."""
        return any(k.borders is not None for subgraph in self.subgraphs for k in subgraph)

    def num_kernels(self, partner: str) -> int:
        """Compute kernels of core 0 beside which core 1 runs a kernel of kind `partner`: `compute`
        where both have their part, `idle` where core 1 waits."""
        pairs = zip(self.kernels, self.partner or (), strict=False)
        return sum((a.program.kind, b.program.kind) == ("compute", partner) for a, b in pairs)


@dataclass(frozen=True, slots=True)
class ProgramBuffer:
    """Memory of a program: a named buffer of the step (`name` of the step plan) in HBM or in host
    memory, which only transfers reach, or arena space at `offset_bytes`."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    kind: str  # named, host, arena
    offset_bytes: int = NO_PLACE  # arena only; named buffers are placed by the manifest

    @property
    def num_bytes(self) -> int:
        """Bytes of all its elements."""
        return math.prod(self.shape) * self.dtype.bytes


@dataclass(frozen=True, slots=True)
class Call:
    """Run a function: one program buffer per input and output of the function, one affine per
    parameter register; its scratch zone begins at byte `scratch` of the arena."""

    function: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    parameters: tuple[Affine, ...] = ()
    scratch: int = 0


@dataclass(frozen=True, slots=True)
class Repeat:
    """Run `steps` `trip` times with program register `register` counting from 0."""

    register: int
    trip: int
    steps: tuple[Call | Repeat, ...]


def calls_of(steps: Sequence[Call | Repeat]) -> Iterator[Call]:
    """Calls in program order, bodies of loops once."""
    for step in steps:
        if isinstance(step, Repeat):
            yield from calls_of(step.steps)
        else:
            yield step


@dataclass(slots=True)
class Program:
    """A linked program, the content of one NEFF: functions once each, buffers, and the calls in
    order."""

    name: str
    target: str
    functions: list[Function]
    buffers: list[ProgramBuffer]
    inputs: tuple[str, ...]  # named buffers read
    outputs: tuple[str, ...]  # named buffers written
    steps: tuple[Call | Repeat, ...]
    arena_bytes: int  # values between functions, and the scratch zones of calls
    # file, line, scope; kernels point here by ordinal
    locations: tuple[tuple[str, int, str], ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def constant_bytes(self) -> int:
        """Constants that functions read from HBM, as they lie in its file."""
        tensors = (tensor for function in self.functions for tensor in function.tensors)
        return sum(len(tensor.data) for tensor in tensors if tensor.kind == "constant")

    @property
    def scratch_bytes(self) -> int:
        """The largest scratch zone of its functions: a part of the arena while they run."""
        return max((f.scratch_bytes for f in self.functions), default=0)

    @property
    def lnc(self) -> int:
        """Physical cores of the logical NeuronCore it was compiled for."""
        return max((len(f.subgraphs) for f in self.functions), default=1)
