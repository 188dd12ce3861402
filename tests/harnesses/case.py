"""Rows of the op harness: one op on given operand types, with the kind of values each operand
gets.

The rows are data for every kind of op test: reference against XLA, lowered tiles against the
reference, sharded against unsharded. A row's values follow from its own content, so a failure
repeats.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.types import Graph, TensorType, Value, tensor_type

EXACT = 0.0
FLOAT_ULPS = 4e-6
BF16_ULP = 2.0**-7

Operand = tuple[tuple[int, ...], DType]


@dataclass(frozen=True)
class OpCase:
    """One row. `values` names a generator per operand ("" is the default of its type).

    `rtol` bounds |ours - theirs| / (|theirs| + scale), scale being the typical result; 0 asks for
    equal values, NaN included.
    """

    op: str
    operands: tuple[Operand, ...]
    attrs: Any = None
    values: tuple[str, ...] = ()
    rtol: float = EXACT
    note: str = ""

    @property
    def types(self) -> tuple[TensorType, ...]:
        """Operand types."""
        return tuple(tensor_type(shape, dtype) for shape, dtype in self.operands)

    @property
    def id(self) -> str:
        """A readable test id."""
        shapes = "-".join("x".join(map(str, s)) + d.value for s, d in self.operands)
        return f"{self.op}-{shapes}-{self.note}".rstrip("-")


def build_graph(case: OpCase) -> Graph:
    """The graph whose inputs are the operands, and whose outputs are the results, of one op."""
    inputs = tuple(Value(t) for t in case.types)
    op = make_op(case.op, inputs, case.attrs)
    return Graph(inputs, (op,), op.results)


def case_inputs(case: OpCase) -> list[np.ndarray]:
    """Operand values, always the same for the same row."""
    rng = np.random.default_rng(zlib.crc32(repr(case).encode()))
    kinds = case.values or ("",) * len(case.operands)
    pairs = zip(case.types, kinds, strict=True)
    return [make_values(rng, t, kind) for t, kind in pairs]


def make_values(rng: np.random.Generator, type: TensorType, kind: str) -> np.ndarray:
    """Values of one operand: normal, positive, unit, bits, special, nonzero, below:N, zeros."""
    name, _, bound = kind.partition(":")
    if not name:
        name = "normal" if type.dtype.is_float else "small"
    values: Any = _GENERATORS[name](rng, type, int(bound or 0))
    return np.asarray(values).astype(type.dtype.numpy).reshape(type.shape)


def _bits(rng: np.random.Generator, type: TensorType, _: int) -> np.ndarray:
    """Any bit pattern, the interesting ones first."""
    data = np.frombuffer(rng.bytes(max(type.num_bytes, 1)), np.uint8)
    if type.dtype is DType.PRED:
        return data & 1
    values = data[: type.num_bytes].view(type.dtype.numpy).copy()
    info = np.iinfo(type.dtype.numpy)
    edges = [info.min, info.max, 0, 1, info.max - 1]
    values[: len(edges)] = edges[: values.size]
    return values


def _special(rng: np.random.Generator, type: TensorType, _: int) -> np.ndarray:
    edges = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, 3e9, -3e9])
    return rng.permutation(np.resize(edges, type.num_elements))


def _small(rng: np.random.Generator, type: TensorType, _: int) -> np.ndarray:
    low = -9 if type.dtype.value.startswith("i") else 0
    if type.dtype is DType.PRED:
        return rng.integers(0, 2, type.num_elements)
    return rng.integers(low, 10, type.num_elements)


def _nonzero(rng: np.random.Generator, type: TensorType, _: int) -> np.ndarray:
    sign = rng.choice([-1, 1], type.num_elements)
    return sign * rng.uniform(0.5, 4.0, type.num_elements)


_GENERATORS: dict[str, Any] = {
    "normal": lambda rng, t, _: rng.normal(0.0, 1.5, t.num_elements),
    "positive": lambda rng, t, _: rng.uniform(0.05, 5.0, t.num_elements),
    "unit": lambda rng, t, _: rng.uniform(-0.9, 3.0, t.num_elements),
    "nonzero": _nonzero,
    "small": _small,
    "bits": _bits,
    "special": _special,
    "below": lambda rng, t, n: rng.integers(0, n, t.num_elements),
    "around": lambda rng, t, n: rng.integers(-2, n + 2, t.num_elements),
    "zeros": lambda rng, t, _: np.zeros(t.num_elements),
}
