"""Every row of the harness in every element type: equal to XLA, computed in fewer bits with a
warning, or refused with a code.

A row stands for its op, with its kind, direction or target type; its numbers are put into another
type, and so is what its attributes say of them. docs/op-types.md is the table of what comes of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.printer import to_stablehlo
from shardwright.compiler.ir.types import TensorType, tensor_type
from shardwright.compiler.isa.program import Program
from shardwright.compiler.passes.integers import downcasts
from tests.harnesses.agreement import Arrays, assert_same
from tests.harnesses.all_cases import CASES
from tests.harnesses.case import OpCase, build_graph, case_inputs
from tests.harnesses.elementwise import COUNTS
from tests.support import xla
from tests.support.compiled import levels_of, link

TYPES = tuple(d for d in DType if d is not DType.TF32)
"""TF32 is a way to multiply, no type of a program."""
WIDE = (DType.I64, DType.U64)
EQUAL, NONE = "=", ""
SHAPES = ((1,), (1, 1), (13,))
RESHAPED = (DType.I32, DType.F32)
"""Types whose rows come in other shapes too: what a shape does is the same in each width."""
EXPONENTS = "below:64"
"""XLA:CPU looks at six bits of an exponent (docs/numerics.md, "Powers of integers")."""


def rows_of(op: str) -> list[OpCase]:
    """One row per kind of `op`: the first of each whose tensors have elements."""
    found: dict[tuple[str, ...], OpCase] = {}
    for case in CASES:
        if case.op == op and not any(0 in shape for shape, _ in case.operands):
            found.setdefault(kind_of(case), case)
    return list(found.values())


def kind_of(case: OpCase) -> tuple[str, ...]:
    """What tells rows of an op apart: kind, direction, target type."""
    names = ("kind", "direction", *(("dtype",) if OPS[case.op].elementwise else ()))
    found = (getattr(case.attrs, name, None) for name in names)
    return tuple(x.value if isinstance(x, DType) else x for x in found if x is not None)


def numbers_of(case: OpCase) -> DType:
    """The type of a row's numbers: of its first operand that holds no truth values."""
    types = [d for _, d in case.operands]
    made = getattr(case.attrs, "type", None)
    types += [made.dtype] if isinstance(made, TensorType) else []
    return next((d for d in types if d is not DType.PRED), DType.PRED)


def retyped(case: OpCase, dtype: DType) -> OpCase:
    """The row with its numbers in `dtype`."""
    old = numbers_of(case)
    operands = tuple((shape, dtype if d is old else d) for shape, d in case.operands)
    kinds = case.values or ("",) * len(operands)
    values = tuple(
        _values(case, k, kind, dtype) if d is old else kind
        for k, (kind, (_, d)) in enumerate(zip(kinds, case.operands, strict=True))
    )
    rtol = float(ml_dtypes.finfo(dtype.numpy).eps) if dtype.is_narrow else _bound(case, dtype)
    attrs = case.attrs if case.op in ("convert", "bitcast_convert") else _retyped(case, old, dtype)
    return dataclasses.replace(case, operands=operands, attrs=attrs, values=values, rtol=rtol)


def _bound(case: OpCase, dtype: DType) -> float:
    """The bound of the op's rows in a type; none are exact."""
    found = (c.rtol for c in CASES if c.op == case.op and numbers_of(c) is dtype)
    return max(found, default=0.0)


def _values(case: OpCase, operand: int, kind: str, dtype: DType) -> str:
    """The kind of values of an operand in another type: integers have all their bits, unless what
    is computed of them would leave what the machine is exact in."""
    if dtype.is_float:
        return "" if kind == "bits" else kind
    if kind.startswith(("below", "around")):
        return kind
    if case.op == "power" and operand == 1:
        return EXPONENTS
    sums = case.op in ("dot_general", "convolution") or getattr(case.attrs, "kind", "") == "add"
    return "" if dtype in WIDE or (sums and dtype.bytes > 1) else "bits"


def _retyped(case: OpCase, old: DType, dtype: DType) -> Any:
    """Attributes that speak of the type of the numbers, in another one."""
    if case.attrs is None:
        return None
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(case.attrs):
        value = getattr(case.attrs, field.name)
        if value is old:
            changed[field.name] = dtype
        elif isinstance(value, TensorType) and value.dtype is old:
            changed[field.name] = tensor_type(value.shape, dtype)
            if field.name == "type" and hasattr(case.attrs, "data"):
                array = np.frombuffer(case.attrs.data, old.numpy)
                if not dtype.is_float:
                    array = np.nan_to_num(array, nan=3, posinf=5, neginf=7)
                changed["data"] = array.astype(dtype.numpy).tobytes()
    return dataclasses.replace(case.attrs, **changed)


def variants(case: OpCase, dtype: DType) -> Iterator[OpCase]:
    """The row, and where shapes are free the same with one element and with a prime number."""
    yield case
    shapes = {shape for shape, _ in case.operands}
    if OPS[case.op].elementwise and len(shapes) == 1 and dtype in RESHAPED:
        for shape in SHAPES:
            operands = tuple((shape, d) for _, d in case.operands)
            yield dataclasses.replace(case, operands=operands)


def outcome(case: OpCase, dtype: DType) -> str:
    """EQUAL, the code of the warning or of the refusal, or NONE where StableHLO has no such op.

    Raises AssertionError where the values are not those of XLA without a word.
    """
    found = {_outcome(v) for v in variants(retyped(case, dtype), dtype)}
    assert len(found) == 1, f"{case.id} {dtype.value}: {found}"
    return found.pop()


def _outcome(case: OpCase) -> str:
    try:
        text = to_stablehlo(build_graph(case))
    except ValueError:
        return NONE
    try:
        program = xla.load(text)
    except Exception as error:
        assert "error:" in str(error) or "INTERNAL" in str(error), str(error)
        return NONE
    try:
        graph = import_module(text)
        warned = [finding.code for finding in downcasts(graph)]
        compiled = link(graph)
    except DiagnosticError as error:
        return error.code
    inputs = case_inputs(case)
    wanted = _wanted(case, program, inputs)
    if "SW_INT64" not in warned or case.op not in COUNTS:
        _check(case, compiled, inputs, wanted, "SW_INT64" in warned)
    return warned[0] if warned else EQUAL


def _wanted(case: OpCase, program: Any, inputs: Arrays) -> list[np.ndarray]:
    """What XLA gives. Of short floats it rounds every intermediate result, other than the engines
    (docs/numerics.md): what it computes in fp32, rounded once, stands for them."""
    short = numbers_of(case)
    if not short.is_narrow or case.op in ("convert", "bitcast_convert"):
        return list(program(inputs))
    wide = retyped(case, DType.F32)
    given = [
        a.astype(np.float32) if d is short else a
        for a, (_, d) in zip(inputs, case.operands, strict=True)
    ]
    results = xla.run(to_stablehlo(build_graph(wide)), given)
    types = [v.type.dtype.numpy for v in build_graph(case).outputs]
    with np.errstate(over="ignore"):
        return [r.astype(t) for r, t in zip(results, types, strict=True)]


def _check(
    case: OpCase, program: Program, inputs: Arrays, wanted: Sequence[np.ndarray], cut: bool
) -> None:
    """Hold both levels against `wanted`; of values that were `cut`, those that fit 32 bits."""
    for level, have in zip(("L0", "L1"), levels_of(program, inputs), strict=True):
        pairs = [
            (h, np.where(_fits(w), w, h) if cut else w) for h, w in zip(have, wanted, strict=True)
        ]
        assert_same(case, level, inputs, [h for h, _ in pairs], [w for _, w in pairs])


def _fits(array: np.ndarray) -> np.ndarray:
    if array.dtype not in (np.int64, np.uint64):
        return np.ones(array.shape, bool)
    info = np.iinfo(np.int32 if array.dtype == np.int64 else np.uint32)
    return np.asarray((array >= info.min) & (array <= info.max))
