"""L0: a kernel instruction by instruction, over the tiles' real addresses, with every check the
simulator knows.

Instructions run in program order, which is one legal interleaving of the queues when the tokens are
right; tokens that are missing, and accesses that the tokens do not order, are errors. A kernel is
decoded once into closures and can then run any number of times; state that outlives a kernel is in
HBM only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NoReturn, final

import numpy as np

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import AccessPattern, Engine, Instr, Kernel, Loop, Space
from shardwright.sim_cluster.instructions.checks import check_instruction, check_tiles
from shardwright.sim_cluster.instructions.engines import DECODERS, overwrites
from shardwright.sim_cluster.instructions.operands import HbmOperand, HbmTensors, TileOperand
from shardwright.sim_cluster.instructions.past import HbmWatch, Past
from shardwright.sim_cluster.instructions.races import (
    ENGINES,
    NUMBER,
    Clock,
    History,
    Key,
    strides_overlap,
)
from shardwright.sim_cluster.instructions.tiles import OnChip, Slot, make_slots

Step = Callable[[], None]
_FAILURES = (SimulationError, ValueError, TypeError, IndexError, KeyError, OverflowError)
ACCUMULATING = ("matmul", "tensor_reduce")
_PRUNE_AT = 512  # records of one HBM history before the ones everybody has passed are dropped


@final
@dataclass(slots=True)
class _LoopCode:
    """A decoded loop; `fresh` are the tiles that get a new slot per iteration."""

    register: int
    trip: int
    body: list[Step | _LoopCode]
    fresh: list[list[Slot]]


@final
@dataclass(slots=True)
class _Call:
    """The tensors of the call that runs. Steps know it and not their KernelCode, which knows them:
    a cycle would keep the memory of a core until the garbage collector comes by."""

    tensors: HbmTensors


class KernelCode:
    """A decoded kernel, bound to the on-chip memory of one core."""

    def __init__(self, kernel: Kernel, dtypes: Sequence[DType], chip: OnChip) -> None:
        self.kernel, self.dtypes, self.chip = kernel, dtypes, chip
        self.registers: dict[int, int] = {}
        self.clocks: list[Clock] = []
        self.passed: list[Clock] = []  # what is known behind each border
        self.between = HbmWatch()
        self.queues: list[deque[tuple[int, ...]]] = []
        self.call = _Call(HbmTensors(()))
        self.hbm_reads: dict[int, set[Engine]] = {}
        self.hbm_writes: dict[int, set[Engine]] = {}
        self.num_instructions = 0
        self.executed = 0
        with _Context(kernel):
            check_tiles(kernel.tiles, chip.limits)
        self.slots = make_slots(kernel)
        self.body = self._decode(kernel.body)

    def run(
        self, tensors: HbmTensors, registers: Mapping[int, int], past: Past | None = None
    ) -> None:
        """Execute on bound tensors, after the kernels in `past`. Registers of the caller are read,
        never changed."""
        past = past or Past()
        self.registers.clear()
        self.registers.update(registers)
        self.call.tensors = tensors
        tensors.histories = self._histories(tensors)
        self._reset()
        self._enter(past, tensors)
        begun = sum(clock[e] for e, clock in enumerate(self.clocks))
        with np.errstate(all="ignore"):
            self._run(self.body)
        self.executed += sum(clock[e] for e, clock in enumerate(self.clocks)) - begun
        self._check_tokens()
        past.leave(chain.from_iterable(self.slots), self.between, self.clocks)

    def _enter(self, past: Past, tensors: HbmTensors) -> None:
        """Start the queues where they are, or from a barrier."""
        if self.kernel.borders is None:
            past.pass_barrier()
        self.passed[:] = past.passed(self.kernel.borders or ())
        self.clocks[:] = [list(clock) for clock in past.clocks]
        self.between.bases = {
            n: tensors.arrays[n].ctypes.data for n in self.hbm_reads.keys() | self.hbm_writes.keys()
        }
        tensors.between = self.between
        past.enter(chain.from_iterable(self.slots), self.between)

    def _check_tokens(self) -> None:
        """A kernel runs again in the next call: it must leave its semaphores as it found them."""
        for semaphore, (queue, count) in enumerate(
            zip(self.queues, self.kernel.tokens, strict=True)
        ):
            if len(queue) != count:
                raise SimulationError(
                    "SW_L0_TOKENS",
                    f"kernel {self.kernel.program.name} must leave semaphore {semaphore} with"
                    f" {count} tokens, it leaves {len(queue)}",
                )

    def _reset(self) -> None:
        """Poison the tiles and set the semaphores."""
        none = (0,) * len(ENGINES)
        self.queues[:] = [deque([none] * count) for count in self.kernel.tokens]
        for tile in self.kernel.tiles:
            self.chip.poison(tile)
        for group in self.slots:
            for slot in group:
                slot.reset()

    def _run(self, body: list[Step | _LoopCode]) -> None:
        for item in body:
            if type(item) is not _LoopCode:
                item()
                continue
            for i in range(item.trip):
                self.registers[item.register] = i
                for slots in item.fresh:
                    slots[i % len(slots)].renew()
                self._run(item.body)

    def _decode(self, body: Sequence[Instr | Loop]) -> list[Step | _LoopCode]:
        decoded: list[Step | _LoopCode] = []
        for item in body:
            if isinstance(item, Loop):
                fresh = [g for g in self.slots if g and g[0].tile.loop == item.register]
                decoded.append(_LoopCode(item.register, item.trip, self._decode(item.body), fresh))
            else:
                context = _Context(self.kernel, self.num_instructions, item)
                with context:
                    decoded.append(self._step(item, context))
                self.num_instructions += 1
        return decoded

    def _step(self, instr: Instr, context: _Context) -> Step:
        """One instruction as a closure: tokens, operands with their checks, arithmetic, tokens."""
        check_instruction(instr, self.kernel.tiles, self.chip.limits)
        take, give = self._tokens(instr)
        engine, clocks = NUMBER[instr.engine], self.clocks
        work = self._work(instr)

        def step() -> None:
            clock = clocks[engine]
            try:
                take(clock)
                clock[engine] += 1
                work(clock, clock[engine])
            except _FAILURES as error:
                context.fail(error)
            give(clock)

        return step

    def _tokens(self, instr: Instr) -> tuple[Callable[[Clock], None], Callable[[Clock], None]]:
        """Functions that take the instruction's waits and give its signals."""
        waits, signals, queues = instr.waits, instr.signals, self.queues
        borders, passed = instr.borders, self.passed
        self._check_numbers("semaphore", (*waits, *signals), len(self.kernel.tokens))
        self._check_numbers("border", borders, len(self.kernel.borders or ()))

        def take(clock: Clock) -> None:
            for border in borders:
                clock[:] = map(max, clock, passed[border])
            for semaphore in waits:
                if not queues[semaphore]:
                    raise SimulationError(
                        "SW_L0_DEADLOCK",
                        f"waits for semaphore {semaphore}, which nothing earlier in program order"
                        " signals",
                    )
                clock[:] = map(max, clock, queues[semaphore].popleft())

        def give(clock: Clock) -> None:
            for semaphore in signals:
                queues[semaphore].append(tuple(clock))

        return take, give

    def _check_numbers(self, what: str, numbers: Iterable[int], count: int) -> None:
        for number in numbers:
            if not 0 <= number < count:
                raise SimulationError("SW_L0_OPERANDS", f"the kernel has no {what} {number}")

    def _work(self, instr: Instr) -> Callable[[Clock, int], None]:
        """Operand checks and arithmetic of one instruction."""
        if instr.dst is None:
            return lambda clock, time: None
        execute = DECODERS[instr.opcode](
            instr, self._dtype(instr.dst), tuple(self._dtype(s) for s in instr.srcs)
        )
        registers = self.registers
        sources = [self._reader(instr, n) for n in range(len(instr.srcs))]
        write, mark = self._writer(instr)
        if instr.row_sum is not None:
            sources.append(self._tile_operand(instr, instr.row_sum).write)  # behind the sources

        def work(clock: Clock, time: int) -> None:
            views = tuple([read(clock, time) for read in sources])
            execute(write(clock, time), views, registers)
            if mark is not None:
                mark(views)

        return work

    def _dtype(self, pattern: AccessPattern) -> DType:
        if pattern.space is not Space.HBM:
            return self.kernel.tiles[pattern.buffer].dtype
        if not 0 <= pattern.buffer < len(self.dtypes):
            raise SimulationError("SW_L0_OPERANDS", f"the function has no tensor {pattern.buffer}")
        return self.dtypes[pattern.buffer]

    def _reader(self, instr: Instr, number: int) -> Callable[[Clock, int], np.ndarray]:
        pattern, call = instr.srcs[number], self.call
        if pattern.space is not Space.HBM:
            return self._tile_operand(instr, pattern).read
        indexed = instr.opcode == "dma_gather" and number == 0
        operand = self._hbm_operand(instr, pattern, indexed)
        self.hbm_reads.setdefault(pattern.buffer, set()).add(instr.engine)
        return lambda clock, time: operand.read(call.tensors, clock, time)

    def _writer(
        self, instr: Instr
    ) -> tuple[Callable[[Clock, int], np.ndarray], Callable[[tuple[np.ndarray, ...]], None] | None]:
        """(function that gives the destination view, function that records what was written)."""
        pattern = instr.dst
        assert pattern is not None
        if pattern.space is not Space.HBM:
            tile = self._tile_operand(instr, pattern)
            if instr.opcode not in ACCUMULATING:
                return tile.write, None
            zero, registers = overwrites(instr.attrs.get("zero_when", ())), self.registers
            return lambda clock, time: tile.write(clock, time, not zero(registers)), None
        scatter, call = instr.opcode == "dma_scatter", self.call
        operand = self._hbm_operand(instr, pattern, indexed=scatter)
        self.hbm_writes.setdefault(pattern.buffer, set()).add(instr.engine)
        return (
            lambda clock, time: operand.write(call.tensors, clock, time),
            lambda views: operand.mark(call.tensors, views[1].reshape(-1) if scatter else None),
        )

    def _tile_operand(self, instr: Instr, pattern: AccessPattern) -> TileOperand:
        return TileOperand(instr, pattern, self.slots[pattern.buffer], self.chip, self.registers)

    def _hbm_operand(self, instr: Instr, pattern: AccessPattern, indexed: bool) -> HbmOperand:
        dims = pattern.dims
        if indexed:
            dims = ((instr.attrs["row_stride"], instr.attrs["rows"]), *dims[1:])
        return HbmOperand(instr, pattern, dims, self._dtype(pattern).bytes, self.registers)

    def _histories(self, tensors: HbmTensors) -> list[History | None]:
        """One history per group of tensors that share memory, where a race is possible at all."""
        touched = sorted(
            self.hbm_reads.keys() | self.hbm_writes.keys(), key=lambda n: _span(tensors, n)
        )
        histories: list[History | None] = [None] * len(tensors.arrays)
        for group in _overlapping(tensors, touched):
            engines = set().union(
                *(self.hbm_reads.get(n, set()) | self.hbm_writes.get(n, set()) for n in group)
            )
            if len(engines) > 1 and any(n in self.hbm_writes for n in group):
                history = _HbmHistory(self.clocks, [NUMBER[e] for e in engines])
                for n in group:
                    histories[n] = history
        return histories


class _HbmHistory(History):
    """A history over strided HBM ranges that sheds old records."""

    def __init__(self, clocks: list[Clock], engines: list[int]) -> None:
        super().__init__(strides_overlap)
        self._clocks, self._engines = clocks, engines

    def add(self, key: Key, engine: int, time: int, writes: bool) -> None:
        super().add(key, engine, time, writes)
        if (len(self.reads) + len(self.writes)) % _PRUNE_AT == 0:
            self.forget_before(self._clocks, self._engines)


def _span(tensors: HbmTensors, number: int) -> tuple[int, int]:
    array = tensors.arrays[number]
    return array.ctypes.data, array.ctypes.data + array.nbytes


def _overlapping(tensors: HbmTensors, ordered: Sequence[int]) -> list[list[int]]:
    """Tensors (sorted by address) in groups that share bytes."""
    groups: list[list[int]] = []
    end = -1
    for number in ordered:
        first, last = _span(tensors, number)
        if groups and first < end:
            groups[-1].append(number)
        else:
            groups.append([number])
        end = max(end, last)
    return groups


@dataclass(frozen=True, slots=True)
class _Context:
    """Adds kernel, instruction and engine to errors raised below."""

    kernel: Kernel
    number: int = -1
    instr: Instr | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, _FAILURES):
            self.fail(error)

    def fail(self, error: BaseException) -> NoReturn:
        """Raise `error` again with its place in front."""
        where = f"kernel {self.kernel.program.name}"
        if self.instr is not None:
            where += (
                f", instruction {self.number} ({self.instr.opcode} on {self.instr.engine.value})"
            )
        if isinstance(error, SimulationError):
            raise SimulationError(error.code, f"{where}: {error.diagnostic.message}") from error
        raise SimulationError("SW_L0_EXECUTION", f"{where}: {error!r}") from error
