"""What a linked program holds in HBM besides named buffers, call by call: values between functions,
and the scratch zone of the call.

Everything follows from the program alone: liveness runs backwards over its calls, loops to a fixed
point, and knows nothing of the planner that placed the buffers. So it serves both to show where
memory goes and to judge the plan (`bound_bytes`: no plan of the same calls needs less).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwright.compiler.diagnostics import UNKNOWN_LOC, Loc
from shardwright.compiler.isa.program import Call, Function, Program, Region, Repeat, calls_of
from shardwright.compiler.isa.region import Tensor, tensor_of
from shardwright.compiler.lower.write_out import tensor_spans
from shardwright.compiler.schedule import hbm


@dataclass(frozen=True, slots=True)
class Resident:
    """A tensor in memory: what made it, its bytes, and whether a gather filled it."""

    name: str
    num_bytes: int
    gathered: bool
    loc: Loc = UNKNOWN_LOC


@dataclass(frozen=True, slots=True)
class CallMoment:
    """One call, loop bodies once: bytes of values between functions while it runs, and the most its
    function holds in its scratch zone; what gathers filled in either. `repeats` is how often the
    call runs.
    """

    function: str
    repeats: int
    arena_bytes: int
    scratch_bytes: int
    gathered_bytes: int

    @property
    def live_bytes(self) -> int:
        """Both."""
        return self.arena_bytes + self.scratch_bytes


@dataclass(frozen=True, slots=True)
class _Placed:
    """A call at its position, with how often it runs and the buffers in use while it does."""

    call: Call
    repeats: int
    live: frozenset[int]


class Residency:
    """Memory of one program over time."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.scratch = [scratch_peak(f) for f in program.functions]
        self.gathered = [gathered_tensors(f) for f in program.functions]
        self.arena = {i for i, b in enumerate(program.buffers) if b.kind == "arena"}
        self.calls = tuple(self._placed())
        self.gathered_buffers = frozenset(self._gathered_buffers())
        self.moments = tuple(self._moment(call) for call in self.calls)

    @cached_property
    def bound_bytes(self) -> int:
        """The largest sum of aligned arena buffers in use at one call, and its scratch zone."""
        return max(map(self._reserved, self.calls), default=0)

    def _reserved(self, placed: _Placed) -> int:
        zone = self.program.functions[placed.call.function].scratch_bytes
        return hbm.aligned(zone) + sum(hbm.aligned(self.buffer_bytes(b)) for b in placed.live)

    @cached_property
    def peak(self) -> int:
        """The call with the most live bytes."""
        return max(range(len(self.moments)), key=lambda i: self.moments[i].live_bytes, default=-1)

    def at_peak(self) -> list[Resident]:
        """The tensors in memory at the peak."""
        if self.peak < 0:
            return []
        placed = self.calls[self.peak]
        makers = self._makers()
        held = [
            self._resident(*makers[buffer], self.buffer_bytes(buffer))
            for buffer in sorted(placed.live)
        ]
        number = placed.call.function
        tensors = self.program.functions[number].tensors
        return held + [
            self._resident(number, tensor, tensor_bytes(tensors[tensor]))
            for tensor in self.scratch[number].tensors
        ]

    def _placed(self) -> Iterator[_Placed]:
        """The calls. Nothing is in a buffer before the step of the program that first names it:
        what a loop fills bit by bit need not be filled before."""
        named: set[int] = set()
        before = []
        for step in self.program.steps:
            before.append(frozenset(named))
            for call in calls_of((step,)):
                named |= {*call.inputs, *call.outputs}
        found: list[_Placed] = []
        live: frozenset[int] = frozenset()
        for step, known in zip(self.program.steps[::-1], before[::-1], strict=True):
            live, placed = self._sweep((step,), live, 1)
            live &= known
            found += placed[::-1]
        yield from reversed(found)

    def _sweep(
        self, steps: Sequence[Call | Repeat], after: frozenset[int], repeats: int
    ) -> tuple[frozenset[int], list[_Placed]]:
        """(arena buffers needed before `steps`, the calls) when `after` is needed behind them."""
        placed: list[_Placed] = []
        live = after
        for step in reversed(steps):
            if isinstance(step, Call):
                touched = self.arena & {*step.inputs, *step.outputs}
                placed.append(_Placed(step, repeats, live | touched))
                live = (live - {*step.outputs}) | (self.arena & {*step.inputs})
                continue
            start = live
            while True:  # what an iteration needs, the one before it leaves behind
                before, inner = self._sweep(step.steps, start, repeats * step.trip)
                if before <= start:
                    break
                start = start | before
            placed += reversed(inner)
            live = before | live
        return live, placed[::-1]

    def _moment(self, placed: _Placed) -> CallMoment:
        number = placed.call.function
        function, scratch = self.program.functions[number], self.scratch[number]
        arena = sum(self.buffer_bytes(b) for b in placed.live)
        gathered = sum(self.buffer_bytes(b) for b in placed.live & self.gathered_buffers) + sum(
            tensor_bytes(function.tensors[t]) for t in scratch.tensors if t in self.gathered[number]
        )
        return CallMoment(function.name, placed.repeats, arena, scratch.num_bytes, gathered)

    def _gathered_buffers(self) -> Iterator[int]:
        """Arena buffers that a gather is the first to fill."""
        seen: set[int] = set()
        for placed in self.calls:
            number = placed.call.function
            for place, buffer in enumerate(placed.call.outputs):
                outputs, gathered = self.program.functions[number].outputs, self.gathered[number]
                if buffer not in seen and gathered and outputs[place] in gathered:
                    yield buffer
                seen.add(buffer)

    def buffer_bytes(self, number: int) -> int:
        """Size of a buffer of the program."""
        buffer = self.program.buffers[number]
        return math.prod(buffer.shape) * buffer.dtype.bytes

    def _makers(self) -> dict[int, tuple[int, int]]:
        """Per arena buffer the number of the function that first writes it, and the tensor it is
        there."""
        makers: dict[int, tuple[int, int]] = {}
        for placed in self.calls:
            number = placed.call.function
            outputs = self.program.functions[number].outputs
            for buffer, tensor in zip(placed.call.outputs, outputs, strict=True):
                makers.setdefault(buffer, (number, tensor))
        return makers

    def _resident(self, number: int, tensor: int, size: int) -> Resident:
        function, locations = self.program.functions[number], self.program.locations
        return _described(function, tensor, size, tensor in self.gathered[number], locations)


@dataclass(frozen=True, slots=True)
class ScratchPeak:
    """The region of a function that holds most scratch, and the tensors it holds."""

    num_bytes: int = 0
    tensors: tuple[int, ...] = ()


def scratch_peak(function: Function) -> ScratchPeak:
    """The busiest region of a function's scratch zone."""
    spans = tensor_spans([region.program for region in function.regions])
    scratch = {i: s for i, s in spans.items() if function.tensors[i].kind == "scratch"}
    best = ScratchPeak()
    for at in {first for first, _ in scratch.values()}:  # live bytes only rise where one begins
        live = tuple(i for i, (first, last) in scratch.items() if first <= at <= last)
        size = sum(tensor_bytes(function.tensors[i]) for i in live)
        if size > best.num_bytes:
            best = ScratchPeak(size, live)
    return best


def constant_bytes(program: Program) -> int:
    """Constants that the functions of a program read from HBM, as they lie in its file."""
    tensors = (t for function in program.functions for t in function.tensors)
    return sum(len(t.data) for t in tensors if t.kind == "constant")


def tensor_bytes(tensor: Tensor) -> int:
    """Size of a tensor."""
    return math.prod(tensor.shape) * tensor.dtype.bytes


def gathered_tensors(function: Function) -> frozenset[int]:
    """Tensors of a function that an all_gather is the last to write."""
    last: dict[int, bool] = {}
    for region in function.regions:
        program = region.program
        if program.kind == "collective_start":
            call = function.collectives[program.attrs["collective"]]
            last[tensor_of(program.attrs["target"])] = call.kind == "all_gather"
        for node in program.nodes:
            if node.op.startswith("store"):
                last[node.attrs["view"].tensor] = False
    return frozenset(tensor for tensor, gathered in last.items() if gathered)


def _described(
    function: Function,
    number: int,
    size: int,
    gathered: bool,
    locations: Sequence[tuple[str, int, str]],
) -> Resident:
    """A tensor by the last region that writes it."""
    made = next((r for r in reversed(function.regions) if _writes(function, r, number)), None)
    tensor = function.tensors[number]
    shape = ",".join(map(str, tensor.shape))
    shown = f"{tensor.dtype.value}[{shape}]"
    if made is None:
        return Resident(f"{function.name}: {shown}", size, False)
    ordinal = made.program.loc
    loc = Loc(*locations[ordinal]) if 0 <= ordinal < len(locations) else UNKNOWN_LOC
    return Resident(f"{function.name}: {made.program.name} {shown}", size, gathered, loc)


def _writes(function: Function, region: Region, number: int) -> bool:
    """True when a region stores to a tensor, or starts the collective that fills it."""
    program = region.program
    if program.kind == "collective_start":
        return tensor_of(program.attrs["target"]) == number
    return any(n.op.startswith("store") and n.attrs["view"].tensor == number for n in program.nodes)
