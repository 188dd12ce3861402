"""Single-instruction mutations of compiled programs, and what becomes of a mutant.

A value mutation (immediate, op, swap) is only made where the changed instruction would write other
bits from the operands the unchanged one saw; an address mutation only along a dim whose elements
differ. So no mutant is a no-op by construction, and none is taken out after the fact. Waits and
signals need no such rule: a region must leave its semaphores as it found them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from compiler.diagnostics import DiagnosticError
from compiler.dtypes import DType
from compiler.evaluate import function_segments
from compiler.isa.encode import decode_function, encode_function
from compiler.isa.instructions import INSTRUCTIONS
from compiler.isa.limits import walk
from compiler.isa.program import (
    AccessPattern,
    Engine,
    Function,
    Instr,
    Loop,
    Program,
    Region,
    Space,
)
from compiler.neff.bundle import Bundle
from compiler.target import Target
from sim_cluster.engines import DECODERS
from sim_cluster.functions import L0, CollectiveRequest, FunctionCode
from sim_cluster.memory import CoreMemory
from sim_cluster.programs import ProgramCode
from sim_cluster.run_values import ValueRun

Views = tuple[np.ndarray, ...]
Seen = list[tuple[np.ndarray, Views, dict[int, int]]]  # destination before, sources, registers


@dataclass
class Recording:
    """One run of a program on core 0: memory before, data sent and received, buffers after."""

    memory: CoreMemory
    exchanges: list[tuple[bytes, np.ndarray]] = field(default_factory=list)
    after: dict[str, bytes] = field(default_factory=dict)


class RecordingRun(ValueRun):
    """A value run at L0 that keeps the last run of every program on core 0."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle.programs, bundle.manifest, check_l0=False, level=L0)
        self.recordings: dict[str, Recording] = {}
        self.current = Recording(self.cores[0])

    def run_program(self, name: str) -> None:
        self.current = self.recordings[name] = Recording(self.cores[0].copy_named())
        super().run_program(name)
        named = self.cores[0].named
        self.current.after = {n: named[n].tobytes() for n in self.programs[name].outputs}

    def _advance(self, running: Sequence[Any]) -> list[CollectiveRequest | None]:
        requests = super()._advance(running)
        first, exchanges = requests[0], self.current.exchanges
        if first is not None:
            sent, deliver = first.source.tobytes(), first.deliver

            def keep(result: np.ndarray) -> None:
                exchanges.append((sent, result.copy()))
                deliver(result)

            first.deliver = keep
        return requests


def operands_seen(program: Program, recording: Recording) -> dict[tuple[int, int, int], Seen]:
    """Operands of every execution of every instruction, by (function, region, instruction)."""
    place = {
        id(instr): (f, r, n)
        for f, function in enumerate(program.functions)
        for r, region in enumerate(function.regions)
        for n, instr in enumerate(walk(region.body))
    }
    seen: dict[tuple[int, int, int], Seen] = {where: [] for where in place.values()}
    originals = dict(DECODERS)

    def spy(opcode: str) -> Any:
        def decode(instr: Instr, dst: DType, srcs: tuple[DType, ...]) -> Any:
            kernel, found = originals[opcode](instr, dst, srcs), seen[place[id(instr)]]

            def run(out: Any, views: Views, registers: Mapping[int, int]) -> None:
                found.append((out.copy(), tuple(v.copy() for v in views), dict(registers)))
                kernel(out, views, registers)

            return run

        return decode

    DECODERS.update({opcode: spy(opcode) for opcode in originals})
    try:
        assert replay(ProgramCode(program, L0), recording) == "", "the replay is not the run"
    finally:
        DECODERS.update(originals)
    return seen


def replay(code: ProgramCode, recording: Recording) -> str:
    """What differs from the recording when core 0 runs `code`: empty when nothing."""
    memory, count = recording.memory.copy_named(), 0
    for request in code.run(memory):
        if count == len(recording.exchanges):
            return "one more collective"
        sent, result = recording.exchanges[count]
        if request.source.tobytes() != sent:
            return f"sent data of collective {count}"
        request.deliver(result)
        count += 1
    if count < len(recording.exchanges):
        return "a collective is missing"
    changed = [n for n, data in recording.after.items() if memory.named[n].tobytes() != data]
    return f"buffers {changed}" if changed else ""


@dataclass(frozen=True)
class Mutation:
    """One change of one instruction (or loop) of one region."""

    kind: str
    program: str
    function: int
    region: int
    at: int  # instruction or loop, in program order
    what: str
    apply: Callable[[Any], None]

    def __str__(self) -> str:
        return f"{self.kind} {self.program}/f{self.function}/r{self.region}/{self.at}: {self.what}"


@dataclass(frozen=True)
class Verdict:
    """How a mutant shows: `value`, `time`, `refused` (with the code), or `survives`."""

    how: str
    detail: str = ""


class Lab:
    """A compiled step, its recorded run, and everything that can be mutated in it."""

    def __init__(self, run: RecordingRun, target: Target) -> None:
        self.programs, self.recordings, self.target = run.programs, run.recordings, target
        self.codes = {name: ProgramCode(p, L0) for name, p in self.programs.items()}
        self.times: dict[tuple[str, int], Any] = {}

    def mutations(self) -> dict[str, list[Mutation]]:
        """Every mutation by kind, in program order."""
        found: dict[str, list[Mutation]] = {}
        for name, program in self.programs.items():
            seen = operands_seen(program, self.recordings[name])
            for f, function in enumerate(program.functions):
                for r, region in enumerate(function.regions):
                    for kind, at, what, apply in _of_region(function, region, seen, (f, r)):
                        mutation = Mutation(kind, name, f, r, at, what, apply)
                        found.setdefault(kind, []).append(mutation)
        return found

    def verdict(self, mutation: Mutation) -> Verdict:
        """Decode the mutant from its columns, run it against the recording, and time it.

        Only diagnosed errors count as refusals; anything else is a bug and propagates.
        """
        original = self.programs[mutation.program].functions[mutation.function]
        try:
            mutant = decode_function(encode_function(_mutated(original, mutation)))
            base = self.codes[mutation.program]
            code = copy.copy(base)
            chip = base.functions[0].chip
            code.functions = list(base.functions)
            code.functions[mutation.function] = FunctionCode(mutant, L0, chip)
            changed = replay(code, self.recordings[mutation.program])
        except DiagnosticError as error:
            return Verdict("refused", error.code)
        if changed:
            return Verdict("value", changed)
        if function_segments(mutant, self.target) != self._time(mutation, original):
            return Verdict("time")
        return Verdict("survives")

    def _time(self, mutation: Mutation, original: Function) -> Any:
        key = (mutation.program, mutation.function)
        if key not in self.times:
            self.times[key] = function_segments(original, self.target)
        return self.times[key]


def _mutated(function: Function, mutation: Mutation) -> Function:
    regions = list(function.regions)
    region = regions[mutation.region] = copy.deepcopy(regions[mutation.region])
    items = _loops(region.body) if mutation.kind == "loop trip" else list(walk(region.body))
    mutation.apply(items[mutation.at])
    return replace(function, regions=regions)


def _loops(body: Sequence[Instr | Loop]) -> list[Loop]:
    return [x for item in body if isinstance(item, Loop) for x in (item, *_loops(item.body))]


Found = tuple[str, int, str, Callable[[Any], None]]


def _of_region(
    function: Function, region: Region, seen: Mapping[Any, Seen], where: tuple[int, int]
) -> Iterator[Found]:
    trips = {loop.register: loop.trip for loop in _loops(region.body)}
    for at, loop in enumerate(_loops(region.body)):
        for trip in (loop.trip - 1, loop.trip + 1):
            yield "loop trip", at, f"{loop.trip} -> {trip}", _set(trip=trip)
    for at, instr in enumerate(walk(region.body)):
        dtypes = [_dtype(p, function, region) for p in _operands(instr)]
        one = _One(instr, dtypes, seen[(*where, at)], trips)
        for kind, what, apply in one.mutations():
            yield kind, at, f"{instr.opcode} on {instr.engine.value}: {what}", apply


def _operands(instr: Instr) -> list[AccessPattern]:
    return [p for p in (instr.dst, *instr.srcs) if p is not None]


def _dtype(pattern: AccessPattern, function: Function, region: Region) -> DType:
    if pattern.space is Space.HBM:
        return function.tensors[pattern.buffer].dtype
    return region.tiles[pattern.buffer].dtype


def _set(**fields: Any) -> Callable[[Any], None]:
    def apply(item: Any) -> None:
        for name, value in fields.items():
            setattr(item, name, value)

    return apply


BINARY = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "power")
COMPARE = ("EQ", "NE", "LT", "LE", "GT", "GE")
REDUCE = ("add", "maximum", "minimum", "multiply")
FUNCS = ("identity", "exponential", "sqrt", "rsqrt", "log", "tanh", "sine", "cosine", "logistic")
UNARY = ("negate", "abs", "sign", "floor", "ceil", "reciprocal", "not", "is_finite")
OP_ATTRS = ("op", "op0", "op1", "func")
IMMEDIATES = ("scalar0", "scalar1", "scale", "bias", "value")


@dataclass
class _One:
    """The mutations of one instruction."""

    instr: Instr
    dtypes: list[DType]
    seen: Seen
    trips: Mapping[int, int]

    def mutations(self) -> Iterator[tuple[str, str, Callable[[Any], None]]]:
        instr = self.instr
        yield from self.tokens()
        if instr.dst is None:
            return
        yield from self.immediates()
        yield from self.ops()
        yield from self.swaps()
        yield from self.addresses()
        yield from self.shorter()
        for engine in Engine:
            if engine is not instr.engine:
                yield "engine", engine.value, _set(engine=engine)
        for opcode in INSTRUCTIONS:
            if {opcode, instr.opcode} != {"tensor_copy", "bitcast_copy"} and opcode != instr.opcode:
                yield "opcode", opcode, _set(opcode=opcode)
        yield from self.overwriting()

    def tokens(self) -> Iterator[tuple[str, str, Callable[[Any], None]]]:
        for name, kind in (("waits", "drop wait"), ("signals", "drop signal")):
            numbers = getattr(self.instr, name)
            for n, semaphore in enumerate(numbers):
                rest = numbers[:n] + numbers[n + 1 :]
                yield kind, f"semaphore {semaphore}", _set(**{name: rest})

    def immediates(self) -> Iterator[tuple[str, str, Callable[[Any], None]]]:
        for name in IMMEDIATES:
            given = self.instr.attrs.get(name)
            if given is None:
                continue
            for value in _other_numbers(given):
                yield from self.attr("immediate", name, value)
        if self.instr.opcode == "iota":
            start = self.instr.attrs["start"]
            yield from self.attr("immediate", "start", start + 1)

    def ops(self) -> Iterator[tuple[str, str, Callable[[Any], None]]]:
        for name in OP_ATTRS:
            given = self.instr.attrs.get(name)
            for family in (BINARY, COMPARE, REDUCE, FUNCS, UNARY):
                if given in family and self.fits(family, name):
                    for other in family:
                        if other != given:
                            yield from self.attr("op", name, other)

    def fits(self, family: Sequence[str], name: str) -> bool:
        """The families that the opcode takes."""
        by_opcode = {"tensor_reduce": REDUCE, "activation": FUNCS, "tensor_unary": UNARY}
        wanted = by_opcode.get(self.instr.opcode)
        return family is wanted if wanted else family in (BINARY, COMPARE)

    def swaps(self) -> Iterator[tuple[str, str, Callable[[Any], None]]]:
        srcs = self.instr.srcs
        for a in range(len(srcs)):
            for b in range(a + 1, len(srcs)):
                order = list(range(len(srcs)))
                order[a], order[b] = b, a
                if self.differs(replace_(self.instr, srcs=tuple(srcs[n] for n in order)), order):
                    new = tuple(srcs[n] for n in order)
                    yield "swap sources", f"{a} and {b}", _set(srcs=new)

    def attr(
        self, kind: str, name: str, value: Any
    ) -> Iterator[tuple[str, str, Callable[[Any], None]]]:
        attrs = dict(self.instr.attrs) | {name: value}
        if self.differs(replace_(self.instr, attrs=attrs)):
            yield kind, f"{name} {self.instr.attrs[name]} -> {value}", _set(attrs=attrs)

    def differs(self, changed: Instr, order: Sequence[int] = ()) -> bool:
        """Whether the changed instruction writes other bits from the operands that were seen, or
        is no instruction at all.
        """
        dst, *srcs = self.dtypes
        order = order or range(len(srcs))
        try:
            old = DECODERS[self.instr.opcode](self.instr, dst, tuple(srcs))
            new = DECODERS[changed.opcode](changed, dst, tuple(srcs[n] for n in order))
        except DiagnosticError:
            return True
        with np.errstate(all="ignore"):
            return any(
                self.result(old, out, views, registers)
                != self.result(new, out, tuple(views[n] for n in order), registers)
                for out, views, registers in self.seen
            )

    def result(self, kernel: Any, out: np.ndarray, views: Views, registers: Any) -> bytes:
        target = out.copy()
        try:
            kernel(target, views, registers)
        except DiagnosticError as error:
            return error.code.encode()
        return target.tobytes()

    def addresses(self) -> Iterator[tuple[str, str, Callable[[Any], None]]]:
        operands = [(-1, self.instr.dst), *enumerate(self.instr.srcs)]
        for number, pattern in operands:
            assert pattern is not None
            for d, (stride, size) in enumerate(pattern.dims):
                if size > 1:
                    shorter = _dim(pattern, d, stride, size - 1)
                    yield self.address("size", number, pattern, shorter)
                if size > 1 and self.varies(number, d):
                    if d or pattern.space is Space.HBM:
                        moved = replace(pattern, offset=pattern.offset + stride)
                        yield self.address("offset", number, pattern, moved)
                    yield self.address("stride", number, pattern, _dim(pattern, d, 0, size))
            if pattern.space is not Space.HBM and self.varies(number, 0):
                for start in (pattern.start + 1, pattern.start + 32):
                    yield self.address("start", number, pattern, replace(pattern, start=start))

    def shorter(self) -> Iterator[tuple[str, str, Callable[[Any], None]]]:
        """All operands together one element shorter in one dim: legal, but not the whole work."""
        dst, srcs = self.pattern(-1), self.instr.srcs
        if any(s.shape != dst.shape for s in srcs):
            return
        for d, (_, size) in enumerate(dst.dims):
            if size > 1:
                less = [_dim(p, d, p.dims[d][0], size - 1) for p in (dst, *srcs)]
                yield "shorter", f"dim {d} of {dst}", _set(dst=less[0], srcs=tuple(less[1:]))

    def address(
        self, kind: str, number: int, old: AccessPattern, new: AccessPattern
    ) -> tuple[str, str, Callable[[Any], None]]:
        srcs = self.instr.srcs
        what = f"{'destination' if number < 0 else f'source {number}'} {old} -> {new}"
        if number < 0:
            return kind, what, _set(dst=new)
        return kind, what, _set(srcs=(*srcs[:number], new, *srcs[number + 1 :]))

    def varies(self, number: int, d: int) -> bool:
        """Whether neighbours along a dim differ in some execution; for a destination, in what the
        instruction wrote.
        """
        for out, views, registers in self.seen:
            array = views[number] if number >= 0 else self.written(out, views, registers)
            if array.ndim != len(self.pattern(number).dims):
                return True  # the window of an indexed transfer
            moved = np.moveaxis(array, d, 0)
            if moved[1:].tobytes() != moved[:-1].tobytes():
                return True
        return False

    def written(self, out: np.ndarray, views: Views, registers: Any) -> np.ndarray:
        dst, *srcs = self.dtypes
        target = out.copy()
        with np.errstate(all="ignore"):
            DECODERS[self.instr.opcode](self.instr, dst, tuple(srcs))(target, views, registers)
        return target

    def pattern(self, number: int) -> AccessPattern:
        pattern = self.instr.dst if number < 0 else self.instr.srcs[number]
        assert pattern is not None
        return pattern

    def overwriting(self) -> Iterator[tuple[str, str, Callable[[Any], None]]]:
        """Always overwrite becomes always add; a condition that turns false becomes always."""
        if "zero_when" not in self.instr.attrs:
            return
        given = self.instr.attrs["zero_when"]
        runs = given is not None and any(self.trips.get(r, 2) > 1 for r in given)
        other = () if given is None or runs else None
        attrs = dict(self.instr.attrs) | {"zero_when": other}
        yield "zero_when", f"{given} -> {other}", _set(attrs=attrs)


def replace_(instr: Instr, **fields: Any) -> Instr:
    return replace(instr, **fields)


def _dim(pattern: AccessPattern, d: int, stride: int, size: int) -> AccessPattern:
    dims = (*pattern.dims[:d], (stride, size), *pattern.dims[d + 1 :])
    return replace(pattern, dims=dims)


def _other_numbers(value: Any) -> list[Any]:
    if isinstance(value, bool | np.bool_):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1, -value]
    return [value * 1.5 if np.isfinite(value) and value else 0.75, 1.0 - value]
