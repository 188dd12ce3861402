"""What a linked program holds in HBM besides named buffers, call by call: values between functions,
and the scratch zone of the call.

Everything follows from the program alone: liveness runs backwards over its calls, loops to a fixed
point, and knows nothing of the planner that placed the buffers. So it serves both to show where
memory goes and to hold the plan against (`bound_bytes`: no plan of the same calls needs less).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwright.compiler.diagnostics import UNKNOWN_LOC, Loc
from shardwright.compiler.isa.kernel import STORES, KernelProgram, tensor_of
from shardwright.compiler.isa.program import Call, Function, Program, Repeat, calls_of
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
        self.makers = self._makers()
        self.gathered_buffers = frozenset(
            buffer
            for buffer, (made, tensor) in self.makers.items()
            if tensor in self.gathered[made]
        )
        self.moments = tuple(self._moment(call) for call in self.calls)

    @cached_property
    def bound_bytes(self) -> int:
        """The largest sum of aligned arena buffers in use at one call, and its scratch zone."""
        return max(map(self._reserved, self.calls), default=0)

    def _reserved(self, placed: _Placed) -> int:
        zone = self.program.functions[placed.call.function].scratch_bytes
        return hbm.aligned(zone) + sum(
            hbm.aligned(self.program.buffers[b].num_bytes) for b in placed.live
        )

    @cached_property
    def peak(self) -> int:
        """The call with the most live bytes."""
        return max(range(len(self.moments)), key=lambda i: self.moments[i].live_bytes, default=-1)

    def at_peak(self) -> list[Resident]:
        """The tensors in memory at the peak."""
        if self.peak < 0:
            return []
        placed, number = self.calls[self.peak], self.calls[self.peak].call.function
        buffers, tensors = self.program.buffers, self.program.functions[number].tensors
        held = [(*self.makers[b], buffers[b].num_bytes) for b in sorted(placed.live)]
        held += [(number, t, tensors[t].num_bytes) for t in self.scratch[number].tensors]
        return [self._resident(*one) for one in held]

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
        arena = self._bytes(placed.live)
        gathered = self._bytes(placed.live & self.gathered_buffers) + sum(
            function.tensors[t].num_bytes for t in scratch.tensors if t in self.gathered[number]
        )
        return CallMoment(function.name, placed.repeats, arena, scratch.num_bytes, gathered)

    def _bytes(self, buffers: Collection[int]) -> int:
        """Bytes of buffers of the program."""
        return sum(self.program.buffers[number].num_bytes for number in buffers)

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
        """A tensor of function `number` by the last kernel that writes it."""
        function, locations = self.program.functions[number], self.program.locations
        kernels = (kernel.program for kernel in reversed(function.kernels))
        made = next((k for k in kernels if tensor in _written(k)), None)
        type = function.tensors[tensor]
        shown = f"{type.dtype.value}[{','.join(map(str, type.shape))}]"
        if made is None:
            return Resident(f"{function.name}: {shown}", size, False)
        known = 0 <= made.loc < len(locations)
        loc = Loc(*locations[made.loc]) if known else UNKNOWN_LOC
        name = f"{function.name}: {made.name} {shown}"
        return Resident(name, size, tensor in self.gathered[number], loc)


@dataclass(frozen=True, slots=True)
class ScratchPeak:
    """The kernel of a function that holds most scratch, and the tensors it holds."""

    num_bytes: int = 0
    tensors: tuple[int, ...] = ()


def scratch_peak(function: Function) -> ScratchPeak:
    """The busiest kernel of a function's scratch zone."""
    spans = tensor_spans([kernel.program for kernel in function.kernels])
    scratch = {i: s for i, s in spans.items() if function.tensors[i].kind == "scratch"}
    best = ScratchPeak()
    for at in {first for first, _ in scratch.values()}:  # live bytes only rise where one begins
        live = tuple(i for i, (first, last) in scratch.items() if first <= at <= last)
        size = sum(function.tensors[i].num_bytes for i in live)
        if size > best.num_bytes:
            best = ScratchPeak(size, live)
    return best


def gathered_tensors(function: Function) -> frozenset[int]:
    """Tensors of a function that an all_gather is the last to write."""
    last: dict[int, bool] = {}
    for program in (kernel.program for kernel in function.kernels):
        gathers = False
        if program.kind == "collective_start":
            gathers = function.collectives[program.attrs["collective"]].kind == "all_gather"
        last |= dict.fromkeys(_written(program), gathers)
    return frozenset(tensor for tensor, gathered in last.items() if gathered)


def _written(program: KernelProgram) -> list[int]:
    """Tensors that a kernel stores to, or starts a collective to fill."""
    if program.kind == "collective_start":
        return [tensor_of(program.attrs["target"])]
    return [node.attrs["view"].tensor for node in program.nodes if node.op in STORES]
