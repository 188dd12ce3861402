"""Random valid StableHLO modules with a bound on what rounding may change.

`random_module` draws everything from one `random.Random`, which may be seeded or hypothesis' own.
Most values hold small whole numbers, so that every operator on them is exact in every type and a
result is right only when it is equal; smooth operators add values whose absolute error is tracked
with first-order bounds. Sizes are small or prime; some cross the 128 partitions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

SIZES = (1, 1, 2, 3, 4, 5, 7, 13, 31)
LONG_SIZES = (64, 127, 128, 131, 257, 512, 521)
MAX_ELEMENTS = 20_000
FLOATS, INTS, BOOL = ("f32", "bf16", "f16"), ("i32", "i8", "ui8", "ui32", "i16"), "i1"
ULP = {"f32": 2.0**-23, "bf16": 2.0**-8, "f16": 2.0**-10}
LARGEST = {"f32": 2**20, "bf16": 128, "f16": 1024}
"""Whole numbers up to here, and a sum of two of them, are exact in the type."""
ENGINE_ERROR = 2.0**-20
"""Relative error of one function of the scalar engine, of XLA's, or of a sum in another order."""
_NUMBERS = {"add": 0, "multiply": 1, "or": 0, "and": 1}
_INFINITIES = {  # by their bits
    "f32": ("0x7F800000", "0xFF800000"),
    "bf16": ("0x7F80", "0xFF80"),
    "f16": ("0x7C00", "0xFC00"),
}
NUMPY = {
    "f32": np.float32,
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "i32": np.int32,
    "i16": np.int16,
    "i8": np.int8,
    "ui8": np.uint8,
    "ui32": np.uint32,
    "i1": np.bool_,
}


@dataclass(frozen=True, slots=True)
class Var:
    """A value of the module; `bound` is its largest magnitude (floats), `error` how far another
    order of rounding may move it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bound: float = 0.0
    error: float = 0.0

    @property
    def type(self) -> str:
        return type_text(self.shape, self.dtype)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS


Growth = Callable[["Grower"], Var | None]


@dataclass(frozen=True, slots=True)
class Module:
    """The text, its inputs, and the error each output may have."""

    text: str
    inputs: list[np.ndarray]
    outputs: tuple[Var, ...]


def type_text(shape: Sequence[int], dtype: str) -> str:
    return "tensor<" + "x".join([*map(str, shape), dtype]) + ">"


def ints(values: Sequence[int]) -> str:
    """An `array<i64: ...>` attribute."""
    return f"array<i64: {', '.join(map(str, values))}>" if values else "array<i64>"


class Writer:
    """Lines of the module, with fresh names."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.lines: list[str] = []
        self._names = 0

    def name(self) -> str:
        self._names += 1
        return f"%v{self._names}"

    def emit(
        self,
        op: str,
        operands: Sequence[Var],
        shape: Sequence[int],
        dtype: str,
        attributes: str = "",
        region: str = "",
        bound: float = 0.0,
        error: float = 0.0,
    ) -> Var:
        """One op with one result, in the generic form."""
        result = Var(self.name(), dtype, tuple(shape), bound, error)
        names, types = ", ".join(v.name for v in operands), ", ".join(v.type for v in operands)
        extra = (f" <{{{attributes}}}>" if attributes else "") + (f" ({region})" if region else "")
        self.lines.append(
            f'{result.name} = "stablehlo.{op}"({names}){extra} : ({types}) -> {result.type}'
        )
        return result

    def like(self, op: str, operands: Sequence[Var], bound: float, error: float) -> Var:
        """An elementwise op on operands of one type."""
        x = operands[0]
        if error and x.is_float:
            error += ULP[x.dtype] * bound
        return self.emit(op, operands, x.shape, x.dtype, bound=bound, error=error)

    def constant(self, value: float, shape: Sequence[int], dtype: str) -> Var:
        if dtype in FLOATS:
            text = f"{float(value)!r}" if math.isfinite(value) else _INFINITIES[dtype][value < 0]
        else:
            text = ("true" if value else "false") if dtype == BOOL else str(int(value))
        attribute = f"value = dense<{text}> : {type_text(shape, dtype)}"
        return self.emit("constant", (), shape, dtype, attribute, bound=abs(value))

    def identity(self, op: str, dtype: str) -> Var:
        """What a fold by `op` starts from; other starts are left to the implementation."""
        if op in _NUMBERS:
            return self.constant(_NUMBERS[op], (), dtype)
        lowest = op == "maximum"
        if dtype in FLOATS:
            return self.constant(float("-inf") if lowest else float("inf"), (), dtype)
        info = np.iinfo(NUMPY[dtype])
        return self.constant(info.min if lowest else info.max, (), dtype)

    def combiner(self, op: str, dtype: str) -> str:
        """A region that applies `op` to two scalars."""
        a, b, c = (self.name() for _ in range(3))
        t = type_text((), dtype)
        return (
            f'{{ ^bb0({a}: {t}, {b}: {t}): {c} = "stablehlo.{op}"({a}, {b}) : ({t}, {t}) -> {t}'
            f' "stablehlo.return"({c}) : ({t}) -> () }}'
        )

    def clamped(self, x: Var, limit: float) -> Var:
        """x held in [-limit, limit]; the bound of sums and products stays small that way."""
        low, high = (self.constant(v, (), x.dtype) for v in (-limit, limit))
        bound = min(limit, x.bound)
        return self.emit("clamp", (low, x, high), x.shape, x.dtype, bound=bound, error=x.error)

    def at_most(self, x: Var, limit: float) -> Var:
        return x if x.bound <= limit else self.clamped(x, limit)

    def settled(self, x: Var) -> Var:
        """x clamped when the next operator might not be exact any more."""
        return self.at_most(x, 8.0 if x.error else LARGEST[x.dtype] / 16) if x.is_float else x


class Grower(Writer):
    """Adds random ops to a pool of values."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.pool: list[Var] = []

    def pick(self, fits: Callable[[Var], bool] = lambda _: True) -> Var | None:
        """A value that fits, recent ones first."""
        found = [v for v in self.pool if fits(v)]
        at = max((self.rng.randrange(len(found)) for _ in range(2)), default=0) if found else 0
        return found[at] if found else None

    def float_value(self, rank: int = 0) -> Var | None:
        return self.pick(lambda v: v.is_float and len(v.shape) >= rank)

    def partner(self, x: Var) -> Var:
        """A value of x's type; x itself at worst."""
        return self.pick(lambda v: v.type == x.type) or x

    def shape(self) -> tuple[int, ...]:
        shape = [self.rng.choice(SIZES) for _ in range(self.rng.randint(1, 4))]
        if self.rng.random() < 0.4:
            shape[self.rng.randrange(len(shape))] = self.rng.choice(LONG_SIZES)
        while math.prod(shape) > MAX_ELEMENTS:
            shape[shape.index(max(shape))] = self.rng.choice(SIZES)
        return tuple(shape)

    def dims(self, x: Var, least: int = 0) -> list[int]:
        """Some dims of x, ascending."""
        count = self.rng.randint(least, len(x.shape))
        return sorted(self.rng.sample(range(len(x.shape)), count))

    def add(self, made: Var | None) -> None:
        if made is not None and 0 < made.size <= MAX_ELEMENTS:
            self.pool.append(self.settled(made))


def random_module(rng: random.Random, growths: Sequence[Growth], steps: int) -> Module:
    """A module of up to `steps` drawn ops over one to four inputs, some of its values outputs."""
    grower = Grower(rng)
    inputs = [_input(grower, k) for k in range(rng.randint(1, 4))]
    grower.pool += [v for v, _ in inputs]
    for _ in range(steps):
        grower.add(rng.choice(growths)(grower))
    count = min(rng.randint(1, 3), len(grower.pool))
    outputs = tuple(
        {v.name: v for v in (grower.pool[-1], *rng.sample(grower.pool, count))}.values()
    )
    return Module(_text(grower, [v for v, _ in inputs], outputs), [a for _, a in inputs], outputs)


def _input(grower: Grower, number: int) -> tuple[Var, np.ndarray]:
    """An argument and its whole numbers."""
    rng = grower.rng
    dtype = rng.choice((*FLOATS, "f32", "f32", "bf16", *INTS, BOOL))
    known = [v.shape for v in grower.pool]
    shape = rng.choice(known) if known and rng.random() < 0.5 else grower.shape()
    low = 0 if dtype == BOOL or dtype.startswith("u") else -8
    values = np.random.default_rng(rng.randrange(2**32)).integers(
        low, 2 if dtype == BOOL else 9, shape
    )
    bound = 8.0 if dtype in FLOATS else 0.0
    return Var(f"%arg{number}", dtype, shape, bound), values.astype(NUMPY[dtype])


def _text(grower: Grower, inputs: Sequence[Var], outputs: Sequence[Var]) -> str:
    arguments = ", ".join(f"{v.name}: {v.type}" for v in inputs)
    types = ", ".join(v.type for v in outputs)
    returned = ", ".join(v.name for v in outputs)
    body = "\n  ".join((*grower.lines, f"return {returned} : {types}"))
    return f"func.func public @main({arguments}) -> ({types}) {{\n  {body}\n}}\n"
