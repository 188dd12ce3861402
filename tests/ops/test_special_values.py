"""Special values reach every row, naive formulas fail on them, and what may differ does differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.printer import to_stablehlo
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Value
from shardwright.compiler.lower import expand
from shardwright.compiler.lower.level import Site
from shardwright.compiler.options import CompileOptions
from tests.harnesses import agreement
from tests.harnesses.agreement import DEVIATIONS, Deviation, assert_same, assert_same_as_xla
from tests.harnesses.all_cases import CASES
from tests.harnesses.case import OpCase, build_graph, case_inputs
from tests.harnesses.elementwise import SHAPE
from tests.harnesses.special import (
    CONTRACTIONS,
    LEFT_OUT,
    MUST,
    accumulation,
    named_values,
    special_inputs,
)
from tests.support import xla
from tests.support.compiled import run_levels

PAGE = Path(__file__).parents[2] / "docs/numerics.md"
F16, F32 = DType.F16, DType.F32
EVERY_ROUNDING = CompileOptions(mixed_precision_accumulation=False)


def _holds(array: np.ndarray, value: float) -> bool:
    """Whether an element is `value`, zeros by their sign and NaN by being one."""
    wide, wanted = array.astype(np.float64), np.array(value).astype(array.dtype).astype(np.float64)
    same = (wide == wanted) & (np.signbit(wide) == np.signbit(wanted))
    return bool((same | (np.isnan(wide) & np.isnan(wanted))).any())


def _may_lack(case: OpCase, operand: int) -> set[str]:
    """The special values that a row cannot take, with the reasons in `special.py`."""
    lacking = set(LEFT_OUT.get(accumulation(case), ((), ""))[0])
    lacking |= {"largest"} if case.op in CONTRACTIONS else set()
    return lacking | ({"nan"} if (case.op, operand) == ("select_and_scatter", 0) else set())


def test_every_operand_of_floats_carries_special_values() -> None:
    """All of them where there is room; a bound of clamp that is a scalar keeps its value."""
    carried = 0
    for case in CASES:
        given = special_inputs(case)
        for k, array in enumerate(given or ()):
            type = case.types[k]
            room = min(len(named_values(type.dtype)) if type.dtype.is_float else 0, 10)
            if not room or array.size < room or (case.op == "clamp" and not array.shape):
                continue
            values, lacking = named_values(type.dtype), _may_lack(case, k)
            missing = [n for n in MUST if n not in lacking and not _holds(array, values[n])]
            assert not missing, (case.id, k)
            carried += 1
    assert carried > 250


def test_pairs_of_special_values_meet() -> None:
    """0 * inf, inf - inf, max(-0, 0) and the rest: every pair of two operands."""
    for case in (c for c in CASES if OPS[c.op].elementwise and len(c.operands) == 2):
        given = special_inputs(case)
        if given is None or not case.types[0].shape:
            continue
        bits = [a.astype(np.float32).view(np.int32).reshape(-1) for a in given]
        met = set(zip(*bits, strict=True))
        assert met >= {(a, b) for a in bits[0] for b in bits[1]}, case.id


def _exps(b: Site, x: Value) -> tuple[Value, Value]:
    return b.op("exponential", x), b.op("exponential", b.op("negate", x))


def _naive_sinh(b: Site, x: Value) -> Value:
    return b.op("multiply", b.op("subtract", *_exps(b, x)), 0.5)


def _sinh_of_squares(b: Site, x: Value) -> Value:
    """(e^2x - 1) / (2 e^x): NaN at 100."""
    up, _ = _exps(b, x)
    square = b.op("subtract", b.op("multiply", up, up), 1.0)
    return b.op("divide", square, b.op("multiply", up, 2.0))


def _naive_tanh(b: Site, x: Value) -> Value:
    up, down = _exps(b, x)
    return b.op("divide", b.op("subtract", up, down), b.op("add", up, down))


def _naive_logistic(b: Site, x: Value) -> Value:
    up, _ = _exps(b, x)
    return b.op("divide", up, b.op("add", up, 1.0))


def _naive_log1p(b: Site, x: Value) -> Value:
    return b.op("log", b.op("add", x, 1.0))


def _naive_expm1(b: Site, x: Value) -> Value:
    return b.op("subtract", _exps(b, x)[0], 1.0)


def _naive_atan2(b: Site, y: Value, x: Value) -> Value:
    angle = b.op("atan", b.op("divide", y, x))
    other = b.op("add", angle, expand.with_sign(b, b.splat(math.pi, y), y))
    return b.op("select", b.compare(x, 0.0, "LT"), other, angle)


NAIVE: dict[str, tuple[str, Callable[..., Value], str]] = {
    "difference of exponentials": ("sinh", _naive_sinh, "89.0"),
    "exponential of the double": ("sinh", _sinh_of_squares, "nan"),
    "quotient of exponentials": ("tanh", _naive_tanh, "nan"),
    "e / (1 + e)": ("logistic", _naive_logistic, "nan"),
    "log of a sum": ("log_plus_one", _naive_log1p, "1e-"),
    "exponential less 1": ("exponential_minus_one", _naive_expm1, "1e-"),
    "arctangent of the quotient": ("atan2", _naive_atan2, "nan"),
}
"""Op, formula, and what the failure shows among the operands or results."""


@pytest.mark.parametrize("formula", NAIVE)
def test_a_naive_formula_fails_a_row(formula: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sinh` is added as docs/extending.md adds `cosh`; the others replace what is there."""
    name, rule, shown = NAIVE[formula]
    reference = np.errstate(all="ignore")(lambda op, args: (np.sinh(args[0]),))
    monkeypatch.setitem(OPS, "sinh", replace(OPS["tan"], name="sinh", reference=reference))
    monkeypatch.setitem(expand._RULES, name, expand.in_fp32(rule))
    case = OpCase(name, ((SHAPE, F32),) * (2 if name == "atan2" else 1), rtol=4e-6)
    given = special_inputs(case)
    assert given is not None
    graph = build_graph(case)
    (found,) = run_levels(graph, given, ("L1",))
    with pytest.raises(AssertionError, match="differ") as caught:
        assert_same(case, "L1", given, found, evaluate(graph, given))
    assert shown in str(caught.value)


def _differs(case: OpCase, what: str) -> bool:
    """Whether a row fails as long as its deviation is not allowed."""
    given = special_inputs(case)
    assert given is not None
    graph = build_graph(case)
    level = "L1" if "L1" in what else "L0"
    try:
        if "L0" not in what:
            assert_same_as_xla(case, given, xla.run(to_stablehlo(graph), given))
        if "L0" in what or what == "zero sign":
            (found,) = run_levels(graph, given, (level,))
            assert_same(case, level, given, found, evaluate(graph, given))
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("deviation", DEVIATIONS, ids=lambda d: d.name)
def test_a_deviation_is_there_and_on_the_page(
    deviation: Deviation, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert deviation.name.lower() in PAGE.read_text().lower()
    others = tuple(d for d in DEVIATIONS if d is not deviation)
    monkeypatch.setattr(agreement, "DEVIATIONS", others)
    rows = (c for c in CASES if deviation.where(c) and special_inputs(c) is not None)
    assert any(_differs(case, deviation.what) for case in rows)


def test_subnormals_stay_here_and_are_zeros_in_xla() -> None:
    case = OpCase("multiply", (((2,), F32), ((2,), F32)))
    half = np.float32(2.0**-127)
    given = [np.array([2.0**-126, half], np.float32), np.array([0.5, 1], np.float32)]
    graph = build_graph(case)
    for (found,) in (evaluate(graph, given), *run_levels(graph, given)):
        assert found.tolist() == [half, half]
    assert xla.run(to_stablehlo(graph), given)[0].tolist() == [0, 0]


def test_a_window_with_a_nan_passes_nothing_back() -> None:
    """XLA gives the source to the largest element behind the NaN."""
    case = next(c for c in CASES if c.op == "select_and_scatter" and c.attrs.select == "GE"
                and c.attrs.strides == c.attrs.sizes)  # fmt: skip
    graph, (operand, source) = build_graph(case), case_inputs(case)
    operand[0, :2, :2, 0] = [[1, np.nan], [2, 3]]
    source[0, 0, 0, 0] = 7
    (theirs,) = xla.run(to_stablehlo(graph), [operand, source])
    assert theirs[0, :2, :2, 0].tolist() == [[0, 0], [0, 7]]
    theirs = theirs.copy()
    theirs[0, :2, :2, 0] = 0
    for (found,) in (evaluate(graph, [operand, source]), *run_levels(graph, [operand, source])):
        np.testing.assert_allclose(found, theirs, rtol=case.rtol)


def test_fp16_overflows_where_it_is_stored_and_not_on_chip() -> None:
    b = Builder()
    x = b.input((4,), F16)
    doubled = b.op("multiply", x, b.full((4,), 2, F16))
    halved = b.op("multiply", doubled, b.full((4,), 0.5, F16))
    graph = b.finish(halved)
    given = [np.array([1, 40000, -65504, np.inf], np.float16)]
    assert evaluate(graph, given)[0].tolist() == [1, np.inf, -np.inf, np.inf]
    for (found,) in run_levels(graph, given):
        assert found.tolist() == [1, 40000, -65504, np.inf]
    for (found,) in run_levels(graph, given, options=EVERY_ROUNDING):
        assert found.tolist() == [1, np.inf, -np.inf, np.inf]
