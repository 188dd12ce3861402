"""The single-instruction mutations of a compiled step, chosen so that none is a no-op.

The rules, all decided on the unchanged program:

- A mutation of a value (immediate, op, swap, address of a source) is made only where the changed
  instruction would write other values in at least half of its elements, from operands that the
  unchanged one saw in a recorded run. Half, and not one: enlarging a mask over elements that are
  zero anyway changes nothing.
- An iota becomes the constant of its middle; only differences of two ramps are ever used, so a
  shift of one may say the same.
- Widths of a memset and of partitions on compute engines are left alone: they cover a whole tile,
  whatever of it is read.
- In a kernel with a scatter only DMA and Tensor instructions change values: rows that are written
  twice carry equal values, so moving duplicates away is a precaution no value shows.
- Dropped tokens need no rule: a kernel must leave its semaphores as it found them.
- An instruction whose whole result nobody reads (`Lab.is_live`) has nothing to mutate in values;
  the test counts these and bounds their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.instructions import INSTRUCTIONS
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.isa.limits import walk
from shardwright.compiler.isa.program import AccessPattern, Engine, Function, Instr, Kernel, Space
from shardwright.sim_cluster.instructions.engines import DECODERS
from tests.support.mutation_lab import Lab, Mutation, Seen, Views, dtype_of, loops, operands_seen

Change = tuple[str, str, Callable[[Any], None]]

# Kinds that change what is written; the others change order, place or time.
VALUE_KINDS = ("immediate", "op", "swap sources", "offset", "stride", "shorter")
BINARY = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "power")
COMPARE = ("EQ", "NE", "LT", "LE", "GT", "GE")
REDUCE = ("add", "maximum", "minimum", "multiply")
FUNCS = ("identity", "exponential", "sqrt", "rsqrt", "log", "tanh", "sine", "cosine", "logistic")
UNARY = ("negate", "abs", "sign", "floor", "ceil", "reciprocal")
FAMILIES = {
    "tensor_tensor": (BINARY, COMPARE),
    "tensor_scalar": (BINARY, COMPARE),
    "tensor_reduce": (REDUCE,),
    "activation": (FUNCS,),
    "tensor_unary": (UNARY,),
    "affine_select": (COMPARE,),
}
OP_ATTRS = ("op", "op0", "op1", "func", "direction")
IMMEDIATES = ("scalar0", "scalar1", "scale", "bias", "value", "fill")
COPIES = {"tensor_copy", "bitcast_copy"}  # the same thing when the types are equal
MOVERS = (Engine.DMA_IN, Engine.DMA_OUT, Engine.TENSOR)


def all_mutations(lab: Lab) -> dict[str, list[Mutation]]:
    """Every mutation of a step by kind, in program order."""
    found: dict[str, list[Mutation]] = {}
    for name, program in lab.programs.items():
        seen = operands_seen(program, lab.recordings[name])
        for f, function in enumerate(program.functions):
            for k, kernel in enumerate(function.kernels):
                for at, (kind, what, apply) in _of_kernel(function, kernel, seen, (f, k)):
                    mutation = Mutation(kind, name, (f, k, at), what, apply)
                    found.setdefault(kind, []).append(mutation)
    return found


def _of_kernel(
    function: Function, kernel: Kernel, seen: Mapping[Any, Seen], where: tuple[int, int]
) -> Iterator[tuple[int, Change]]:
    for at, loop in enumerate(loops(kernel.body)):
        for trip in (loop.trip - 1, loop.trip + 1):
            yield at, ("loop trip", f"{loop.trip} -> {trip}", _set(trip=trip))
    trips = {loop.register: loop.trip for loop in loops(kernel.body)}
    scatters = any(i.opcode == "dma_scatter" for i in walk(kernel.body))
    for at, instr in enumerate(walk(kernel.body)):
        dtypes = [dtype_of(p, function, kernel) for p in _operands(instr)]
        site = _Site(instr, dtypes, seen[(*where, at)], trips)
        for kind, what, apply in site.changes():
            if kind in VALUE_KINDS and scatters and instr.engine not in MOVERS:
                continue
            yield at, (kind, f"{instr.opcode} on {instr.engine.value}: {what}", apply)


def _operands(instr: Instr) -> list[AccessPattern]:
    return [p for p in (instr.dst, *instr.srcs) if p is not None]


def _set(**fields: Any) -> Callable[[Any], None]:
    def apply(item: Any) -> None:
        for name, value in fields.items():
            setattr(item, name, value)

    return apply


@dataclass
class _Site:
    """One instruction: element types of destination and sources, and what it saw."""

    instr: Instr
    dtypes: list[DType]
    seen: Seen
    trips: Mapping[int, int]

    def changes(self) -> Iterator[Change]:
        yield from self.tokens()
        if self.instr.dst is None:
            return
        yield from self.immediates()
        yield from self.ops()
        yield from self.swaps()
        yield from self.addresses()
        yield from self.shorter()
        yield from self.issue()
        yield from self.overwriting()

    def tokens(self) -> Iterator[Change]:
        for name, kind in (("waits", "drop wait"), ("signals", "drop signal")):
            numbers = getattr(self.instr, name)
            for n, semaphore in enumerate(numbers):
                rest = numbers[:n] + numbers[n + 1 :]
                yield kind, f"semaphore {semaphore}", _set(**{name: rest})

    def immediates(self) -> Iterator[Change]:
        for name in IMMEDIATES:
            given = self.instr.attrs.get(name)
            if given is not None:
                yield from self.attrs("immediate", {name: _other_number(given)})
        if self.instr.opcode == "iota":
            yield from self.attrs("immediate", self.middle())

    def middle(self) -> dict[str, Any]:
        """Attributes that make an iota the constant of its middle."""
        attrs = self.instr.attrs
        sizes = self.pattern(-1).shape
        steps = (attrs["partition_step"], *attrs["steps"])
        middle = sum(step * (size // 2) for step, size in zip(steps, sizes, strict=True))
        start: Affine = attrs["start"] + middle
        return {"start": start, "partition_step": 0, "steps": (0,) * len(attrs["steps"])}

    def ops(self) -> Iterator[Change]:
        for name in OP_ATTRS:
            given = self.instr.attrs.get(name)
            for family in FAMILIES.get(self.instr.opcode, ()):
                for other in family:
                    if given in family and other != given:
                        yield from self.attrs("op", {name: other})

    def attrs(self, kind: str, new: Mapping[str, Any]) -> Iterator[Change]:
        attrs = dict(self.instr.attrs) | dict(new)
        if self.differs(replace(self.instr, attrs=attrs)):
            old = {name: self.instr.attrs[name] for name in new}
            yield kind, f"{old} -> {dict(new)}", _set(attrs=attrs)

    def swaps(self) -> Iterator[Change]:
        srcs = self.instr.srcs
        for a in range(len(srcs)):
            for b in range(a + 1, len(srcs)):
                order = list(range(len(srcs)))
                order[a], order[b] = b, a
                new = tuple(srcs[n] for n in order)
                if self.differs(replace(self.instr, srcs=new), order):
                    yield "swap sources", f"{a} and {b}", _set(srcs=new)

    def addresses(self) -> Iterator[Change]:
        for number, pattern in ((-1, self.pattern(-1)), *enumerate(self.instr.srcs)):
            for d, (stride, size) in enumerate(pattern.dims):
                if size == 1:
                    continue
                if self.instr.opcode != "memset":
                    yield self.operand("size", number, _dim(pattern, d, stride, size - 1))
                hbm = pattern.space is Space.HBM
                if (d or hbm) and stride and self.moves(number, d, _shifted):
                    moved = replace(pattern, offset=pattern.offset + stride)
                    yield self.operand("offset", number, moved)
                if stride and self.moves(number, d, _repeated):
                    yield self.operand("stride", number, _dim(pattern, d, 0, size))
            if pattern.space is not Space.HBM and self.moves(number, 0, _repeated):
                for start in (pattern.start + 1, pattern.start + 32):
                    yield self.operand("start", number, replace(pattern, start=start))

    def operand(self, kind: str, number: int, new: AccessPattern) -> Change:
        srcs = self.instr.srcs
        what = f"{'destination' if number < 0 else f'source {number}'} is now {new}"
        if number < 0:
            return kind, what, _set(dst=new)
        return kind, what, _set(srcs=(*srcs[:number], new, *srcs[number + 1 :]))

    def moves(self, number: int, d: int, move: Callable[[np.ndarray, int], np.ndarray]) -> bool:
        """Whether reading source `number` moved along dim `d` changes what is written; for the
        destination, whether neighbours differ.
        """
        for out, views, registers in self.seen:
            old = self.result(self.instr, out, views, registers)
            if number < 0:
                new: Any = move(old, d) if old.ndim > d else None
            elif views[number].ndim == len(self.instr.srcs[number].dims):
                moved = (*views[:number], move(views[number], d), *views[number + 1 :])
                new = self.result(self.instr, out, moved, registers)
            else:
                return True
            if _half(old, new):
                return True
        return False

    def shorter(self) -> Iterator[Change]:
        """All operands together one element shorter in one dim: legal, but not the whole work."""
        dst, srcs = self.pattern(-1), self.instr.srcs
        is_dma = self.instr.engine in (Engine.DMA_IN, Engine.DMA_OUT)
        if self.instr.opcode == "memset" or any(s.shape != dst.shape for s in srcs):
            return
        for d, (_, size) in enumerate(dst.dims):
            if size > 1 and (d or is_dma):
                less = [_dim(p, d, p.dims[d][0], size - 1) for p in (dst, *srcs)]
                yield "shorter", f"dim {d}", _set(dst=less[0], srcs=tuple(less[1:]))

    def issue(self) -> Iterator[Change]:
        """Another engine that has the instruction, another instruction of the engine."""
        engine, opcode = self.instr.engine, self.instr.opcode
        for other in INSTRUCTIONS[opcode].engines:
            if other is not engine:
                yield "engine", other.value, _set(engine=other)
        for name, definition in INSTRUCTIONS.items():
            if engine in definition.engines and name != opcode and {name, opcode} != COPIES:
                yield "opcode", name, _set(opcode=name)

    def overwriting(self) -> Iterator[Change]:
        """Always overwrite becomes always add; a condition that turns false becomes always."""
        if "zero_when" not in self.instr.attrs:
            return
        given = self.instr.attrs["zero_when"]
        turns = given is not None and any(self.trips.get(r, 2) > 1 for r in given)
        other = () if given is None or turns else None
        attrs = dict(self.instr.attrs) | {"zero_when": other}
        yield "zero_when", f"{given} -> {other}", _set(attrs=attrs)

    def differs(self, changed: Instr, order: Sequence[int] = ()) -> bool:
        """Whether the changed instruction writes other values in half of the elements."""
        order = order or range(len(self.instr.srcs))
        return any(
            _half(
                self.result(self.instr, out, views, registers),
                self.result(changed, out, self.ordered(views, order), registers, order),
            )
            for out, views, registers in self.seen
        )

    def ordered(self, views: Views, order: Sequence[int]) -> Views:
        """The sources in another order; a second destination lies behind them."""
        return (*(views[n] for n in order), *views[len(self.instr.srcs) :])

    def result(
        self,
        instr: Instr,
        out: np.ndarray,
        views: Views,
        registers: Mapping[int, int],
        order: Sequence[int] = (),
    ) -> Any:
        """What an instruction writes; None when it is none."""
        dst, *srcs = self.dtypes
        target = out.copy()
        try:
            with np.errstate(all="ignore"):
                execute = DECODERS[instr.opcode](
                    instr, dst, tuple(srcs[n] for n in order or range(len(srcs)))
                )
                execute(target, views, registers)
        except DiagnosticError:
            return None
        return target

    def pattern(self, number: int) -> AccessPattern:
        pattern = self.instr.dst if number < 0 else self.instr.srcs[number]
        assert pattern is not None
        return pattern


def _half(old: np.ndarray, new: Any) -> bool:
    """Whether at least half of the elements have other values; the sign of a zero is none."""
    if new is None:
        return True
    both_nan = (old != old) & (new != new)
    return 2 * int(((old != new) & ~both_nan).sum()) >= old.size


def _shifted(array: np.ndarray, d: int) -> np.ndarray:
    """Read from the next element on; nothing is assumed of what follows the last."""
    return np.concatenate([np.delete(array, 0, d), np.take(array, [-1], d)], d)


def _repeated(array: np.ndarray, d: int) -> np.ndarray:
    return np.broadcast_to(np.take(array, [0], d), array.shape)


def _dim(pattern: AccessPattern, d: int, stride: int, size: int) -> AccessPattern:
    dims = (*pattern.dims[:d], (stride, size), *pattern.dims[d + 1 :])
    return replace(pattern, dims=dims)


def _other_number(value: Any) -> Any:
    """Far from the given one: the other sign for what is large."""
    if isinstance(value, bool | np.bool_):
        return not value
    return 1 - value if np.isfinite(value) else 0.75
