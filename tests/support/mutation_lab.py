"""A compiled step in the laboratory: recorded on core 0, replayed with one instruction damaged, and
judged by value, by time, or by a refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.decode import decode_function
from shardwright.compiler.isa.encode import encode_function
from shardwright.compiler.isa.limits import walk
from shardwright.compiler.isa.program import Function, Instr, Loop, Program
from shardwright.compiler.machine.target import Target
from shardwright.compiler.neff.bundle import Bundle
from shardwright.compiler.timing.evaluate import function_segments
from shardwright.sim_cluster.instructions.engines import DECODERS
from shardwright.sim_cluster.values.functions import L0, CollectiveRequest, FunctionCode
from shardwright.sim_cluster.values.memory import CoreMemory
from shardwright.sim_cluster.values.programs import ProgramCode
from shardwright.sim_cluster.values.rank_host import RankHost

Views = tuple[np.ndarray, ...]
Place = tuple[int, int, int]  # function, kernel, instruction in program order
# Every execution of an instruction: the destination before, the sources, the registers.
Seen = list[tuple[np.ndarray, Views, dict[int, int]]]


@dataclass
class Recording:
    """One run of a program on core 0: memory before, data sent and received, buffers after."""

    memory: CoreMemory
    exchanges: list[tuple[bytes, np.ndarray]] = field(default_factory=list)
    after: dict[str, bytes] = field(default_factory=dict)


class RecordingHost(RankHost):
    """Every core at L0; keeps the last run of every program on core 0."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle.programs, bundle.manifest, level=L0)
        self.recordings: dict[str, Recording] = {}
        self.current = Recording(self.cores[0])

    def begin(self, stage: int, program: str, *rest: Any) -> None:
        """Memory is recorded as the program finds it: with its own micro-batch."""
        super().begin(stage, program, *rest)
        self.current = self.recordings[program] = Recording(self.cores[0].copy_named())

    def _run(self, now: Any) -> list[CollectiveRequest | None]:
        requests = super()._run(now)
        first, exchanges = requests[0], self.current.exchanges
        if first is None:
            named = self.cores[0].named
            self.current.after = {n: named[n].tobytes() for n in self.programs[now.program].outputs}
        else:
            sent, deliver = first.source.tobytes(), first.deliver

            def keep(result: np.ndarray) -> None:
                exchanges.append((sent, result.copy()))
                deliver(result)

            first.deliver = keep
        return requests


def replay(code: ProgramCode, recording: Recording) -> str:
    """What differs from the recording when core 0 runs `code`: empty when nothing."""
    memory, count = recording.memory.copy_named(), 0
    for request in code.run(memory):
        if count == len(recording.exchanges):
            return "one more collective"
        sent, result = recording.exchanges[count]
        if request.source.tobytes() != sent:
            return f"data sent by collective {count}"
        request.deliver(result)
        count += 1
    if count < len(recording.exchanges):
        return "a collective is missing"
    changed = [n for n, data in recording.after.items() if memory.named[n].tobytes() != data]
    return f"buffers {changed}" if changed else ""


@contextmanager
def decoders(change: Callable[[Instr, Any], Any]):
    """Within the block every decoded instruction goes through `change(instruction, execute)`."""
    originals = dict(DECODERS)

    def wrapped(opcode: str) -> Any:
        return lambda instr, dst, srcs: change(instr, originals[opcode](instr, dst, srcs))

    DECODERS.update({opcode: wrapped(opcode) for opcode in originals})
    try:
        yield
    finally:
        DECODERS.update(originals)


def operands_seen(program: Program, recordings: Sequence[Recording]) -> dict[Place, Seen]:
    """The operands of every execution of every instruction; the replays must equal the runs."""
    places = {
        id(instr): (f, k, n)
        for f, function in enumerate(program.functions)
        for k, kernel in enumerate(function.kernels)
        for n, instr in enumerate(walk(kernel.body))
    }
    seen: dict[Place, Seen] = {place: [] for place in places.values()}

    def spy(instr: Instr, execute: Any) -> Any:
        found = seen[places[id(instr)]]

        def run(out: Any, views: Views, registers: Mapping[int, int]) -> None:
            found.append((out.copy(), tuple(v.copy() for v in views), dict(registers)))
            execute(out, views, registers)

        return run

    with decoders(spy):
        code = ProgramCode(program, L0)
    for recording in recordings:
        assert replay(code, recording) == "", "the replay is not the run"
    return seen


@dataclass(frozen=True)
class Mutation:
    """One change of one instruction (or loop) of one kernel."""

    kind: str
    program: str
    place: Place
    what: str
    apply: Callable[[Any], None]

    def __str__(self) -> str:
        f, k, n = self.place
        return f"{self.kind} at {self.program}/f{f}/k{k}/{n}: {self.what}"


@dataclass(frozen=True)
class Verdict:
    """How a mutant shows: `value`, `time`, `refused` (with the code), or `survives`."""

    how: str
    detail: str = ""


class Lab:
    """A compiled step with the recordings of several runs."""

    def __init__(self, bundle: Bundle, runs: Sequence[RecordingHost], target: Target) -> None:
        self.programs, self.target = bundle.programs, target
        self.recordings = {n: [run.recordings[n] for run in runs] for n in bundle.programs}
        self.codes = {name: ProgramCode(p, L0) for name, p in self.programs.items()}
        self._times: dict[tuple[str, int], Any] = {}

    def verdict(self, mutation: Mutation) -> Verdict:
        """Take the mutant through its columns, run it against the recordings, and time it.

        Only diagnosed errors count as refusals; anything else is a bug and propagates.
        """
        original = self.programs[mutation.program].functions[mutation.place[0]]
        try:
            mutant = decode_function(encode_function(_mutated(original, mutation)))
        except ValueError:
            return Verdict("refused", "SW_NEFF_CONTENT")  # which is what the reader makes of it
        try:
            changed = self._replayed(mutation, mutant)
        except DiagnosticError as error:
            return Verdict("refused", error.code)
        if changed:
            return Verdict("value", changed)
        if function_segments(mutant, self.target) != self._time(mutation, original):
            return Verdict("time")
        return Verdict("survives")

    def is_live(self, program: str, place: Place) -> bool:
        """Whether anything observable depends on what an instruction writes: it is damaged as a
        whole, on every execution.
        """
        f, k, n = place
        function = self.programs[program].functions[f]
        damaged = list(walk(function.kernels[k].body))[n]

        def damage(instr: Instr, execute: Any) -> Any:
            if instr is not damaged:
                return execute

            def run(out: Any, views: Views, registers: Mapping[int, int]) -> None:
                execute(out, views, registers)
                out[...] = other_values(out)

            return run

        mutation = Mutation("damage", program, place, "", lambda instr: None)
        try:
            with decoders(damage):
                return bool(self._replayed(mutation, function))
        except DiagnosticError:
            return True

    def _replayed(self, mutation: Mutation, function: Function) -> str:
        base = self.codes[mutation.program]
        code = copy.copy(base)
        code.functions = list(base.functions)
        code.functions[mutation.place[0]] = FunctionCode(function, L0, base.functions[0].chip)
        for recording in self.recordings[mutation.program]:
            if changed := replay(code, recording):
                return changed
        return ""

    def _time(self, mutation: Mutation, original: Function) -> Any:
        key = (mutation.program, mutation.place[0])
        if key not in self._times:
            self._times[key] = function_segments(original, self.target)
        return self._times[key]


def other_values(array: np.ndarray) -> np.ndarray:
    """An array that differs in every element."""
    if array.dtype == np.bool_:
        return ~array
    if np.issubdtype(array.dtype, np.integer):
        return array + 1
    return np.where(np.isfinite(array), 3 - array, 1).astype(array.dtype)


def _mutated(function: Function, mutation: Mutation) -> Function:
    _, k, n = mutation.place
    kernels = list(function.kernels)
    kernel = kernels[k] = copy.deepcopy(kernels[k])
    items = loops(kernel.body) if mutation.kind == "loop trip" else list(walk(kernel.body))
    mutation.apply(items[n])
    return replace(function, kernels=kernels)


def loops(body: Sequence[Instr | Loop]) -> list[Loop]:
    """The loops of a body in program order, inner ones too."""
    return [x for item in body if isinstance(item, Loop) for x in (item, *loops(item.body))]


def dtype_of(pattern: Any, function: Function, kernel: Any) -> DType:
    """Element type behind an access pattern."""
    if pattern.space.value == "hbm":
        return function.tensors[pattern.buffer].dtype
    dtype: DType = kernel.tiles[pattern.buffer].dtype
    return dtype
