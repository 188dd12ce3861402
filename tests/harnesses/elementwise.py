"""Harness rows of the elementwise ops."""

from __future__ import annotations

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops import BitcastConvertAttrs, CompareAttrs, ConvertAttrs
from shardwright.compiler.ir.ops.elementwise import DIRECTIONS
from tests.harnesses.case import BF16_ULP, EXACT, FLOAT_ULPS, OpCase, Operand

F32, BF16, F16 = DType.F32, DType.BF16, DType.F16
I32, U32, PRED = DType.I32, DType.U32, DType.PRED
SHAPE = (9, 37)


def _row(
    op: str,
    arity: int,
    dtype: DType,
    values: tuple[str, ...] = (),
    rtol: float = EXACT,
    note: str = "",
) -> OpCase:
    return OpCase(op, ((SHAPE, dtype),) * arity, None, values, rtol, note)


ARITHMETIC = ("add", "subtract", "multiply", "divide", "maximum", "minimum")
EXACT_UNARY = (
    "negate",
    "abs",
    "sign",
    "floor",
    "ceil",
    "round_nearest_even",
    "round_nearest_afz",
)
INTEGERS = (DType.I8, DType.U8, DType.I16, DType.U16, I32, U32)
ROUNDED_UNARY = {
    "sqrt": "positive",
    "rsqrt": "positive",
    "exponential": "normal",
    "exponential_minus_one": "normal",
    "log": "positive",
    "log_plus_one": "unit",
    "logistic": "normal",
    "tanh": "normal",
    "sine": "normal",
    "cosine": "normal",
    "cbrt": "normal",
    "tan": "normal",
    "erf": "normal",
    "erfc": "normal",
    "gelu": "normal",
    "gelu_apprx_tanh": "normal",
    "gelu_dx": "normal",
    "silu": "normal",
    "silu_dx": "normal",
    "atan": "normal",
}
COUNTS = ("popcnt", "count_leading_zeros")
SHIFTS = ("shift_left", "shift_right_logical", "shift_right_arithmetic")


def _arithmetic() -> list[OpCase]:
    rows = [_row(op, 2, d) for op in ARITHMETIC for d in (F32, BF16)]
    rows += [_row(op, 2, d, ("bits", "bits")) for op in ARITHMETIC for d in (I32, U32)]
    rows += [_row("divide", 2, I32, note="zeros"), _row("remainder", 2, I32, note="zeros")]
    rows += [_row("remainder", 2, d, ("bits", "bits")) for d in (I32, U32)]
    rows += [_row("random_bits", 2, U32, ("bits", "bits"))]
    rows += [_row("remainder", 2, F32, ("normal", "nonzero")), _row("power", 2, I32)]
    rows += [_row("power", 2, F32, ("positive", "normal"), FLOAT_ULPS)]
    rows += [_row("atan2", 2, d, (), tol) for d, tol in ((F32, FLOAT_ULPS), (BF16, BF16_ULP))]
    rows += [_row("power", 2, BF16, ("positive", "normal"), BF16_ULP)]
    return [*rows, _row("maximum", 2, PRED), _row("minimum", 2, PRED)]


def _unary() -> list[OpCase]:
    rows = [_row(op, 1, d) for op in EXACT_UNARY for d in (F32, BF16)]
    rows += [_row(op, 1, I32, ("bits",)) for op in ("negate", "abs", "sign")]
    for op, kind in ROUNDED_UNARY.items():
        rows += [_row(op, 1, F32, (kind,), FLOAT_ULPS), _row(op, 1, BF16, (kind,), BF16_ULP)]
    return [*rows, _row("is_finite", 1, F32), _row("is_finite", 1, BF16)]


def _logic() -> list[OpCase]:
    both = ("bits", "bits")
    rows = [_row(op, 2, d, both) for op in ("and", "or", "xor") for d in (I32, U32, PRED)]
    rows += [_row("not", 1, d, ("bits",)) for d in (I32, PRED)]
    rows += [_row(op, 2, d, ("bits", "below:31")) for op in SHIFTS for d in (I32, U32)]
    rows += [_row(op, 1, d, ("bits",)) for op in COUNTS for d in INTEGERS]
    return rows + [_row(op, 2, I32, both, note="too_far") for op in SHIFTS]


def _compare() -> list[OpCase]:
    rows = []
    for direction in DIRECTIONS:
        attrs = CompareAttrs(direction)
        rows += [
            OpCase("compare", ((SHAPE, d),) * 2, attrs, note=direction)
            for d in (F32, BF16, I32, U32)
        ]
    return rows


def _convert() -> list[OpCase]:
    rows = []
    for source, target in (
        (F32, BF16),
        (BF16, F32),
        (F32, I32),
        (F32, U32),
        (I32, F32),
        (U32, F32),
        (I32, BF16),
        (I32, DType.I8),
        (I32, U32),
        (PRED, F32),
        (PRED, I32),
        (F32, PRED),
        (I32, PRED),
        (F32, F16),
        (F16, F32),
        (BF16, F16),
        (F16, I32),
        (F32, DType.F8E4M3),
        (F32, DType.F8E5M2),
        (BF16, DType.F8E5M2),
        (DType.F8E5M2, F32),
        (DType.F8E4M3, BF16),
        (F32, DType.I8),
        (BF16, DType.U8),
    ):
        attrs, note = ConvertAttrs(target), f"to_{target.value}"
        rows.append(OpCase("convert", ((SHAPE, source),), attrs, note=note))
    for source, target in ((F32, I32), (I32, F32), (U32, F32), (BF16, DType.U16)):
        attrs, note = BitcastConvertAttrs(target), f"to_{target.value}"
        rows.append(OpCase("bitcast_convert", ((SHAPE, source),), attrs, note=note))
    return rows


def _select() -> list[OpCase]:
    scalar: Operand = ((), PRED)
    rows = [OpCase("select", ((SHAPE, PRED), (SHAPE, d), (SHAPE, d))) for d in (F32, BF16, I32)]
    rows.append(OpCase("select", (scalar, (SHAPE, F32), (SHAPE, F32)), note="scalar"))
    for bound in ((), SHAPE):
        rows += [OpCase("clamp", ((bound, d), (SHAPE, d), (bound, d))) for d in (F32, BF16, I32)]
    return rows


CASES: tuple[OpCase, ...] = (
    *_arithmetic(),
    *_unary(),
    *_logic(),
    *_compare(),
    *_convert(),
    *_select(),
    OpCase("add", (((), F32), ((), F32)), note="scalar"),
    OpCase("add", (((0, 3), F32), ((0, 3), F32)), note="empty"),
)
