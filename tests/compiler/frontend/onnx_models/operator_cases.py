"""Nodes that are computed by our rows and by ONNX's own reference: for every operator several
shapes, special values, and the forms that its attributes have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

F = np.float32
I64 = np.int64


@dataclass(frozen=True, slots=True)
class Case:
    """A node: operands are arrays, None where they are left out; `results` is how many."""

    operator: str
    operands: tuple[Any, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    opset: int = 21
    results: int = 1
    most: float = 2e-6
    """How far results may be apart, relative to the largest of them."""

    def __str__(self) -> str:
        shapes = ",".join("-" if a is None else str(list(a.shape)) for a in self.operands)
        said = ",".join(f"{k}={v}" for k, v in self.attributes.items() if not hasattr(v, "graph"))
        return f"{self.operator}-{self.opset}-{shapes}-{said}"[:120]


def words(text: str) -> list[str]:
    return text.split()


def normal(*shape: int, seed: int = 0, dtype: Any = F) -> Any:
    return np.random.default_rng(seed + sum(shape)).normal(size=shape).astype(dtype)


def whole(*shape: int, low: int = -9, high: int = 10, dtype: Any = I64) -> Any:
    return np.random.default_rng(sum(shape)).integers(low, high, shape).astype(dtype)


def ints(*values: int) -> Any:
    return np.asarray(values, I64)


SPECIAL = np.asarray([0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, np.inf, -np.inf, np.nan], F)
FINITE = SPECIAL[:9]
SHAPES = ((), (5,), (2, 3, 4))


def unary() -> Iterator[Case]:
    everywhere = words("Abs Ceil Floor IsInf IsNaN Neg Relu Round Sign Identity")
    everywhere += words("Exp Sigmoid Tanh Erf Softsign LeakyRelu Sin Cos")
    for name in everywhere:
        shapes = SHAPES[1:] if name == "Softsign" else SHAPES  # whose reference takes no scalar
        values = FINITE if name in ("Sin", "Cos", "Softsign") else SPECIAL
        yield Case(name, (values,))
        yield from (Case(name, (normal(*shape),)) for shape in shapes)
    for name in words("Atan Asinh Cosh Sinh Tan Celu Elu Selu Gelu HardSigmoid HardSwish Mish"):
        yield Case(name, (FINITE,))
        yield from (Case(name, (normal(*shape),)) for shape in SHAPES)
    for name in words("Shrink Softplus ThresholdedRelu"):
        yield Case(name, (FINITE,))
        yield from (Case(name, (normal(*shape),)) for shape in SHAPES)
    for name in words("Acos Asin Atanh"):
        yield from (Case(name, (np.tanh(normal(*shape)),)) for shape in SHAPES)
    for name in words("Log Sqrt Reciprocal"):
        yield Case(name, (np.abs(normal(2, 3)),))
        yield Case(name, (np.asarray([0.0, 1.0, np.inf, 4.0], F),))
    yield Case("Acosh", (1 + np.abs(normal(2, 3)),))
    yield Case("Not", (whole(3, 4) > 0,))
    yield Case("BitwiseNot", (whole(3, 4, dtype=np.int32),))
    yield Case("IsInf", (SPECIAL,), {"detect_negative": 0})
    yield Case("IsInf", (SPECIAL,), {"detect_positive": 0})
    yield Case("LeakyRelu", (FINITE,), {"alpha": 0.3})
    yield Case("Celu", (FINITE,), {"alpha": 2.0})
    yield Case("Elu", (FINITE,), {"alpha": 0.5})
    yield Case("Selu", (FINITE,), {"alpha": 2.0, "gamma": 3.0})
    yield Case("HardSigmoid", (FINITE,), {"alpha": 0.4, "beta": 0.1})
    yield Case("ThresholdedRelu", (FINITE,), {"alpha": 0.7})
    yield Case("Shrink", (FINITE,), {"lambd": 0.7, "bias": 0.2})
    yield Case("Gelu", (normal(4, 5),), {"approximate": "tanh"})
    for dtype in (np.float16, ml_dtypes.bfloat16):
        yield Case("Relu", (normal(4, 5, dtype=dtype),))
        yield Case("Abs", (normal(4, 5, dtype=dtype),))
    yield Case("Abs", (whole(4, 5, dtype=np.int32),))
    yield Case("Neg", (whole(4, 5),))


def binary() -> Iterator[Case]:
    a, b = normal(2, 3, 4), normal(3, 1, seed=1)
    for name in words("Add Sub Mul Div Max Min Sum Mean"):
        yield Case(name, (a, b))
        yield Case(name, (a, a * 2))
        if name != "Mean":
            yield Case(name, (normal(), b))
    for name in words("Add Sub Mul Max Min"):
        yield Case(name, (whole(3, 4), whole(4)))
        yield Case(name, (whole(3, 4, dtype=np.int32), whole(3, 1, dtype=np.int32)))
        yield Case(name, (SPECIAL, SPECIAL[::-1].copy()))
    yield Case("Max", (a, b, a - 1))
    yield Case("Sum", (a, b, a - 1))
    yield Case("Mean", (a, b, a - 1))
    yield Case("Div", (whole(3, 4, low=0), whole(4, low=1)))
    yield Case("Div", (FINITE, np.zeros(9, F)))
    for name in words("Equal Greater GreaterOrEqual Less LessOrEqual"):
        yield Case(name, (whole(3, 4), whole(4)))
        yield Case(name, (SPECIAL, SPECIAL[::-1].copy()))
        yield Case(name, (a, np.round(b)))
    for name in words("And Or Xor"):
        yield Case(name, (whole(3, 4) > 0, whole(4) > 0))
    for name in words("BitwiseAnd BitwiseOr BitwiseXor"):
        yield Case(name, (whole(3, 4, dtype=np.int32), whole(4, dtype=np.int32)))
        yield Case(name, (whole(3, 4, low=0, dtype=np.uint8), whole(4, low=0, dtype=np.uint8)))
    for way in ("LEFT", "RIGHT"):
        numbers = (
            whole(3, 4, low=0, high=200, dtype=np.uint8),
            whole(4, low=0, high=7, dtype=np.uint8),
        )
        yield Case("BitShift", numbers, {"direction": way})
    yield Case("Mod", (whole(3, 4), whole(4, low=1)))
    yield Case("Mod", (whole(3, 4), whole(4, low=1)), {"fmod": 1})
    yield Case("Mod", (a, np.abs(b) + 1), {"fmod": 1})
    for power in (2.0, 3.0, 0.5, -1.0, 0.0, 1.7):
        yield Case("Pow", (np.abs(a) + 0.1, np.asarray(power, F)))
    yield Case("Pow", (np.abs(a) + 0.1, np.asarray(2, I64)))
    yield Case("Pow", (np.abs(a) + 0.1, b))
    yield Case("Pow", (whole(3, 4, dtype=np.int32), np.asarray([2], np.int32)))
    yield Case("PRelu", (a, np.abs(b)))
    yield Case("PRelu", (SPECIAL, np.asarray([0.3], F)))
    yield Case("Where", (whole(3, 1) > 0, a, b))
    yield Case("Where", (whole(3, 4) > 0, whole(3, 4), whole(4)))
    for bounds in ((-0.5, 0.5), (None, 0.5), (-0.5, None), (None, None)):
        low, high = (None if x is None else np.asarray(x, F) for x in bounds)
        yield Case("Clip", (a, low, high))
    yield Case("Clip", (a,), {"min": -0.5, "max": 0.5}, opset=10)
    yield Case("Dropout", (a,), opset=13)
    yield Case("Dropout", (a, np.asarray(0.5, F), np.asarray(False)), opset=21)


def types() -> Iterator[Case]:
    numbers = [
        (1, F),
        (6, np.int32),
        (7, I64),
        (9, np.bool_),
        (2, np.uint8),
        (10, np.float16),
        (16, 0),
    ]
    values = np.asarray([0.0, 1.0, -3.7, 2.5, 100.25], F)
    for to, _ in numbers:
        yield Case("Cast", (values if to != 2 else np.abs(values),), {"to": to})
        yield Case("Cast", (whole(5, low=0),), {"to": to})
    yield Case("Cast", (values * 100,), {"to": 17})
    yield Case("Cast", (values * 1000,), {"to": 19})
    yield Case("CastLike", (values, np.zeros(1, np.int32)))
    yield Case("CastLike", (whole(5), np.zeros(1, np.float16)))


def shapes() -> Iterator[Case]:
    x = normal(2, 3, 4)
    yield Case("Shape", (x,))
    yield Case("Shape", (x,), {"start": 1})
    yield Case("Shape", (x,), {"start": -2, "end": -1})
    yield Case("Size", (x,))
    yield from (
        Case("Reshape", (x, ints(*to))) for to in ((6, 4), (-1, 2), (0, -1), (24,), (1, 0, 4, -1))
    )
    yield Case("Reshape", (np.zeros((0, 3), F), ints(3, 0)), {"allowzero": 1})
    yield from (Case("Flatten", (x,), {"axis": axis}) for axis in (0, 1, 2, 3, -1))
    yield from (
        Case("Transpose", (x,), perm) for perm in ({}, {"perm": [1, 0, 2]}, {"perm": [2, 0, 1]})
    )
    thin = normal(1, 3, 1)
    yield Case("Squeeze", (thin,))
    yield Case("Squeeze", (thin, ints(0)))
    yield Case("Squeeze", (thin, ints(-1, 0)))
    yield Case("Squeeze", (thin,), {"axes": [0]}, opset=11)
    yield Case("Unsqueeze", (x, ints(0)))
    yield Case("Unsqueeze", (x, ints(-1, 1)))
    yield Case("Unsqueeze", (x,), {"axes": [0, 4]}, opset=11)
    yield Case("Concat", (x, x * 2), {"axis": 1})
    yield Case("Concat", (x, normal(2, 3, 1), x), {"axis": -1})
    yield Case("Concat", (whole(3), whole(2)), {"axis": 0})
    yield Case("Split", (normal(7, 2), ints(2, 5)), {"axis": 0}, results=2)
    yield Case("Split", (normal(7, 2),), {"axis": 0, "num_outputs": 3}, results=3)
    yield Case("Split", (normal(2, 6),), {"axis": -1}, opset=13, results=3)
    yield Case("Split", (normal(2, 6),), {"axis": 1, "split": [2, 4]}, opset=11, results=2)
    big = 2**63 - 1
    cuts = [
        ((1,), (3,), (2,), None),
        ((0, 0), (2, big), (0, 2), (1, 2)),
        ((-1,), (-big,), (2,), (-1,)),
        ((-2,), (big,), (1,), (1,)),
        ((3,), (0,), (-1,), (-2,)),
        ((5,), (9,), (1,), None),
    ]
    for starts, ends, axes, steps in cuts:
        rest = (ints(*axes), None if steps is None else ints(*steps))
        yield Case("Slice", (x, ints(*starts), ints(*ends), *rest))
    yield Case("Slice", (x, ints(0, 1), ints(1, 3)))
    yield Case("Slice", (x,), {"starts": [1], "ends": [3], "axes": [2]}, opset=9)
    yield from (
        Case("Expand", (normal(3, 1), ints(*to))) for to in ((3, 4), (2, 3, 5), (1, 1), (3,))
    )
    yield Case("Tile", (normal(2, 3), ints(2, 1)))
    yield Case("Tile", (normal(2, 3), ints(1, 3)))
    for mode in ("constant", "reflect", "edge"):
        yield Case("Pad", (normal(3, 4), ints(0, 1, 1, 2)), {"mode": mode})
    yield Case("Pad", (normal(3, 4), ints(0, 1, 1, 2)), {"mode": "wrap"})
    yield Case("Pad", (normal(3, 4), ints(1, 2), np.asarray(0.5, F), ints(-1)))
    yield Case("Pad", (normal(3, 4),), {"pads": [0, 1, 0, 1], "value": 2.0}, opset=10)
    yield Case("CenterCropPad", (normal(5, 4), ints(3, 7)))
    yield Case("CenterCropPad", (normal(5, 4, 3), ints(3)), {"axes": [1]})
    for upper in (0, 1):
        yield Case("Trilu", (normal(4, 5),), {"upper": upper})
        yield Case("Trilu", (normal(2, 4, 4), np.asarray(1, I64)), {"upper": upper})
        yield Case("Trilu", (normal(4, 4), np.asarray(-1, I64)), {"upper": upper})
    for mode in ("DCR", "CRD"):
        yield Case("DepthToSpace", (normal(1, 8, 2, 3),), {"blocksize": 2, "mode": mode})
    yield Case("SpaceToDepth", (normal(1, 2, 4, 6),), {"blocksize": 2})
    yield Case("ConstantOfShape", (ints(2, 3),))
    yield Case("ConstantOfShape", (ints(2, 3),), {"value": np.asarray([7], I64)})
    yield Case("Constant", (), {"value": normal(2, 3)})
    yield Case("Constant", (), {"value_ints": [1, 2, 3]})
    yield Case("Constant", (), {"value_float": 2.5})
    for start, limit, step in ((0, 5, 1), (10, 3, -2), (2, 2, 1)):
        yield Case("Range", tuple(np.asarray(n, I64) for n in (start, limit, step)))
    yield Case("Range", tuple(np.asarray(n, F) for n in (0.5, 3.0, 0.5)))
    yield Case("EyeLike", (normal(3, 4),))
    yield Case("EyeLike", (normal(3, 4),), {"k": 1, "dtype": 6})
    for name in ("HannWindow", "HammingWindow", "BlackmanWindow"):
        yield Case(name, (np.asarray(10, I64),))
        yield Case(name, (np.asarray(7, I64),), {"periodic": 0})


def indexed() -> Iterator[Case]:
    x = normal(3, 4, 5)
    yield Case("Gather", (x, ints(0, 2, -1)))
    yield Case("Gather", (x, np.asarray([[0, 1], [3, -4]], I64)), {"axis": 1})
    yield Case("Gather", (x, np.asarray(1, I64)), {"axis": 2})
    yield Case("Gather", (ints(4, 5, 6), np.asarray(-1, I64)))
    yield Case("GatherElements", (x, whole(2, 4, 5, low=-3, high=3)), {"axis": 0})
    yield Case("GatherElements", (x, whole(3, 4, 2, low=0, high=5)), {"axis": 2})
    yield Case("GatherND", (x, np.asarray([[0, 1], [2, 3]], I64)))
    yield Case("GatherND", (x, np.asarray([[[0, 1, -1]]], I64)))
    yield Case("GatherND", (x, np.asarray([[1], [0], [3]], I64)), {"batch_dims": 1})
    rows = np.asarray([[0, 2, 1], [1, 0, 2]], I64)
    yield Case("ScatterElements", (normal(3, 3), rows, normal(2, 3)), {"axis": 0})
    yield Case("ScatterElements", (normal(3, 3), rows, normal(2, 3)), {"axis": 1})
    twice = np.asarray([[0, 0, 1], [1, -1, 2]], I64)
    for how in ("add", "mul", "max", "min"):
        yield Case(
            "ScatterElements", (normal(3, 3), twice, normal(2, 3)), {"axis": 1, "reduction": how}
        )
        places = np.asarray([[0, 1], [2, 2], [0, 1]], I64)
        yield Case("ScatterND", (normal(3, 3), places, normal(3)), {"reduction": how})
    yield Case("ScatterND", (x, np.asarray([[2], [0]], I64), normal(2, 4, 5)))
    values = np.asarray([0.5, 2.0], F)
    yield Case("OneHot", (ints(0, 2, -1), np.asarray(3, I64), values))
    yield Case("OneHot", (whole(2, 3, low=0, high=4), np.asarray(4, I64), values), {"axis": 1})
    for largest in (0, 1):
        yield Case("TopK", (x, ints(2)), {"largest": largest}, results=2)
        yield Case("TopK", (x, ints(3)), {"largest": largest, "axis": 1}, results=2)
    yield Case("TopK", (x,), {"k": 2, "axis": 0}, opset=9, results=2)
    yield Case("NonZero", (whole(3, 4, low=0, high=2),))
    yield Case("Compress", (x, np.asarray([True, False, True])), {"axis": 0})
    yield Case("Compress", (normal(2, 3), np.asarray([False, True, True, False, True])))
    tied = np.asarray([[1, 3, 3], [2, 2, 0]], F)
    for name in ("ArgMax", "ArgMin"):
        yield Case(name, (x,), {"axis": 1})
        yield Case(name, (x,), {"axis": -1, "keepdims": 0})
        yield Case(name, (tied,), {"axis": 1, "select_last_index": 1})
    for flags in ({}, {"exclusive": 1}, {"reverse": 1}, {"exclusive": 1, "reverse": 1}):
        yield Case("CumSum", (x, np.asarray(1, I64)), flags)
    yield Case("ReverseSequence", (normal(4, 3), ints(2, 4, 1)), {"time_axis": 0, "batch_axis": 1})
    yield Case("ReverseSequence", (normal(3, 4), ints(2, 4, 1)), {"time_axis": 1, "batch_axis": 0})


def reductions() -> Iterator[Case]:
    x = normal(2, 3, 4)
    names = words("L1 L2 LogSumExp Max Mean Min Prod Sum SumSquare")
    for name in names:
        yield Case(f"Reduce{name}", (x,))
        yield Case(f"Reduce{name}", (x, ints(1)))
        yield Case(f"Reduce{name}", (x, ints(-1, 0)), {"keepdims": 0})
        yield Case(f"Reduce{name}", (x,), {"noop_with_empty_axes": 1})
        attributes = {} if name == "Sum" else {"axes": [1]}
        yield Case(
            f"Reduce{name}", (x,), {**attributes, "keepdims": 0}, opset=11 if name == "Sum" else 13
        )
    yield Case("ReduceSum", (x,), {"axes": [0, 2]}, opset=11)
    yield Case("ReduceLogSum", (np.abs(x), ints(1)))
    yield Case("ReduceLogSum", (np.abs(x),), {"axes": [2]}, opset=13)
    yield Case("ReduceMax", (whole(3, 4, dtype=np.int32), ints(0)))
    yield Case("ReduceSum", (whole(3, 4), ints(1)))
    yield Case("ReduceMax", (SPECIAL[:11],))
    yield Case("ReduceSum", (np.zeros((2, 0, 3), F), ints(1)))
    for name in ("Softmax", "LogSoftmax", "Hardmax"):
        yield Case(name, (x,))
        yield Case(name, (x * 10,), {"axis": 1})
        yield Case(name, (x,), {"axis": 0})
        yield Case(name, (x.reshape(6, 4),), {"axis": 1}, opset=11)


def products() -> Iterator[Case]:
    for a, b in (
        ((2, 3), (3, 4)),
        ((5, 2, 3), (3, 4)),
        ((3,), (3, 4)),
        ((2, 1, 2, 3), (4, 3, 2)),
        ((3,), (3,)),
    ):
        yield Case("MatMul", (normal(*a), normal(*b, seed=1)))
    a, b = normal(2, 3), normal(3, 4, seed=1)
    yield Case("Gemm", (a, b))
    yield Case("Gemm", (a, b, normal(4)), {"alpha": 0.5, "beta": 2.0})
    yield Case("Gemm", (a.T.copy(), b.T.copy(), normal(2, 1)), {"transA": 1, "transB": 1})
    yield Case("Einsum", (a, b), {"equation": "ij,jk->ik"})
    yield Case("Einsum", (normal(2, 3, 4), normal(2, 4, 5)), {"equation": "bij, bjk -> bik"})
    yield Case("Einsum", (normal(4, 4),), {"equation": "ii"})
    x, y = (
        whole(2, 3, low=0, high=255, dtype=np.uint8),
        whole(3, 4, low=-128, high=127, dtype=np.int8),
    )
    yield Case("MatMulInteger", (x, y))
    yield Case("MatMulInteger", (x, y, np.asarray(7, np.uint8), np.asarray(-3, np.int8)))
    scales = [np.asarray(s, F) for s in (0.02, 0.05, 0.1)]
    yield Case(
        "QLinearMatMul",
        (
            x,
            scales[0],
            np.asarray(113, np.uint8),
            y.astype(np.uint8),
            scales[1],
            np.asarray(120, np.uint8),
            scales[2],
            np.asarray(118, np.uint8),
        ),
    )


def quantized() -> Iterator[Case]:
    x, scale = normal(3, 4) * 10, np.asarray(0.25, F)
    for dtype in (np.uint8, np.int8, np.int16, np.uint16):
        zero = np.asarray(3, dtype)
        yield Case("QuantizeLinear", (x, scale, zero))
        stored = whole(3, 4, low=0, high=100, dtype=dtype)
        yield Case("DequantizeLinear", (stored, scale, zero))
    yield Case("QuantizeLinear", (x * 1e4, scale, np.asarray(3, np.uint8)))
    yield Case("QuantizeLinear", (x, scale))
    by = np.asarray([0.1, 0.2, 0.5, 1.0], F)
    yield Case("QuantizeLinear", (x, by, np.asarray([1, 2, 3, 4], np.uint8)), {"axis": 1})
    yield Case("QuantizeLinear", (x, by[:3], np.asarray([1, 2, 3], np.int8)), {"axis": 0})
    yield Case("QuantizeLinear", (x, scale, np.asarray(0, ml_dtypes.float8_e4m3fn)))
    stored = whole(3, 4, low=-100, high=100, dtype=np.int8)
    yield Case("DequantizeLinear", (stored, by, np.asarray([1, 2, 3, 4], np.int8)), {"axis": 1})
    yield Case("DequantizeLinear", (stored, by[:3]), {"axis": 0})
    yield Case("DequantizeLinear", (whole(3, 4, dtype=np.int32), scale))
    blocks = np.abs(normal(3, 2)) + 0.1
    yield Case("DequantizeLinear", (stored, blocks), {"axis": 1, "block_size": 2})
    yield Case("DynamicQuantizeLinear", (x,), results=3)
    yield Case("DynamicQuantizeLinear", (np.abs(x),), results=3)


def windows() -> Iterator[Case]:
    x, w = normal(2, 4, 7, 6), normal(5, 4, 3, 3, seed=1)
    forms: list[dict[str, Any]] = [
        {},
        {"strides": [2, 2]},
        {"pads": [1, 0, 2, 1]},
        {"dilations": [2, 1]},
        {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
        {"auto_pad": "SAME_LOWER"},
        {"auto_pad": "VALID"},
    ]
    for form in forms:
        yield Case("Conv", (x, w), {**form, "kernel_shape": [3, 3]}, most=5e-6)
        pool = {**form, "kernel_shape": [3, 2]}
        if "dilations" not in form:
            yield Case("LpPool", (x,), pool, most=5e-6)
        if "pads" not in form:
            yield Case("MaxPool", (x,), pool)
        yield Case("AveragePool", (x,), pool)
    yield Case("Conv", (x, w, normal(5)), {"strides": [1, 2]}, most=5e-6)
    yield Case("Conv", (x, normal(6, 2, 3, 3), normal(6)), {"group": 2}, most=5e-6)
    yield Case("Conv", (normal(2, 3, 9), normal(4, 3, 3)), {"pads": [1, 1]}, most=5e-6)
    yield Case("Conv", (normal(1, 2, 4, 4, 4), normal(3, 2, 2, 2, 2)), most=5e-6)
    padded = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}
    yield Case("AveragePool", (x,), {**padded, "count_include_pad": 1})
    yield Case("AveragePool", (x,), {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1})
    yield Case("MaxPool", (x,), {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1})
    yield Case("MaxPool", (normal(1, 2, 9),), {"kernel_shape": [2], "strides": [2]})
    yield Case("MaxPool", (x,), padded)
    yield Case("GlobalAveragePool", (x,))
    yield Case("GlobalAveragePool", (normal(2, 3, 5),))
    yield Case("GlobalMaxPool", (x,))
    v = normal(4, 3, 3, 3, seed=2)
    forms = [
        {},
        {"strides": [2, 2]},
        {"pads": [1, 0, 1, 1]},
        {"strides": [2, 3], "output_padding": [1, 1]},
        {"dilations": [2, 2]},
        {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
        {"strides": [2, 2], "output_shape": [15, 13]},
    ]
    for form in forms:
        yield Case("ConvTranspose", (x, v), form, most=5e-6)
    yield Case("ConvTranspose", (x, v, normal(3)), most=5e-6)
    yield Case("ConvTranspose", (x, normal(4, 1, 3, 3)), {"group": 4}, most=5e-6)
    stored, kernel = (
        whole(1, 2, 5, 5, low=0, high=255, dtype=np.uint8),
        whole(3, 2, 3, 3, low=0, dtype=np.uint8),
    )
    yield Case("ConvInteger", (stored, kernel))
    yield Case("ConvInteger", (stored, kernel, np.asarray(5, np.uint8)), {"pads": [1, 1, 1, 1]})
    one = [np.asarray(n, np.uint8) for n in (100, 3, 110)]
    scales = [np.asarray(n, F) for n in (0.02, 0.3, 0.7)]
    form = (stored, scales[0], one[0], kernel, scales[1], one[1], scales[2], one[2])
    yield Case("QLinearConv", form)
    yield Case("QLinearConv", (*form, whole(3, low=-50, high=50, dtype=np.int32)))


def normalised() -> Iterator[Case]:
    x = normal(2, 4, 3, 5)
    scale, bias, mean = normal(4), normal(4, seed=1), normal(4, seed=2)
    variance = np.abs(normal(4, seed=3)) + 0.5
    yield Case("BatchNormalization", (x, scale, bias, mean, variance))
    yield Case(
        "BatchNormalization", (x[:, :, 0, 0].copy(), scale, bias, mean, variance), {"epsilon": 0.1}
    )
    yield Case(
        "BatchNormalization",
        (x, scale, bias, mean, variance),
        {"training_mode": 1, "momentum": 0.7},
        results=3,
    )
    yield Case("InstanceNormalization", (x, scale, bias))
    yield Case("InstanceNormalization", (normal(2, 4, 6), scale, bias), {"epsilon": 0.01})
    yield Case("LayerNormalization", (x, normal(5), normal(5, seed=1)))
    yield Case("LayerNormalization", (x, normal(3, 5)), {"axis": 2})
    yield Case("LayerNormalization", (x, normal(5), normal(5, seed=1)), results=3)
    yield Case("GroupNormalization", (x, scale, bias), {"num_groups": 2}, opset=21)
    yield Case(
        "GroupNormalization", (x, scale[:2].copy(), bias[:2].copy()), {"num_groups": 2}, opset=18
    )
    yield Case("LpNormalization", (x,))
    yield Case("LpNormalization", (x,), {"p": 2, "axis": 1})
    yield Case("LpNormalization", (np.abs(x),), {"p": 1, "axis": 1})
    yield Case("MeanVarianceNormalization", (x,))
    many = normal(4, 4, 3, 5)  # the reference takes as many channels as there are samples
    yield Case("LRN", (many,), {"size": 3})
    yield Case("LRN", (many,), {"size": 2, "alpha": 0.1, "beta": 0.5, "bias": 2.0})
    logits, target = normal(3, 5), whole(3, low=0, high=5)
    for how in ("none", "mean", "sum"):
        yield Case("SoftmaxCrossEntropyLoss", (logits, target), {"reduction": how})
        yield Case("NegativeLogLikelihoodLoss", (logits, target), {"reduction": how})
    weight = np.abs(normal(5))
    yield Case("SoftmaxCrossEntropyLoss", (logits, target, weight), results=2)
    yield Case("SoftmaxCrossEntropyLoss", (logits, ints(1, 2, 4)), {"ignore_index": 2})
    yield Case("NegativeLogLikelihoodLoss", (normal(3, 5, 2), whole(3, 2, low=0, high=5), weight))


def recurrent() -> Iterator[Case]:
    steps, batch, size, hidden = 4, 2, 3, 5
    for name, gates in (("RNN", 1), ("GRU", 3), ("LSTM", 4)):
        for directions, way in ((1, "forward"), (1, "reverse"), (2, "bidirectional")):
            x = normal(steps, batch, size)
            w = normal(directions, gates * hidden, size, seed=1) * 0.5
            r = normal(directions, gates * hidden, hidden, seed=2) * 0.5
            b = normal(directions, 2 * gates * hidden, seed=3) * 0.5
            results = 3 if name == "LSTM" else 2
            said = {"hidden_size": hidden, "direction": way}
            yield Case(name, (x, w, r), said, results=results, most=5e-6)
            yield Case(name, (x, w, r, b), said, results=results, most=5e-6)
            h = normal(directions, batch, hidden, seed=4)
            more = (h, h * 0.5) if name == "LSTM" else (h,)
            yield Case(name, (x, w, r, b, None, *more), said, results=results, most=5e-6)
    one = (normal(4, 2, 3), normal(1, 15, 3), normal(1, 15, 5), normal(1, 30))
    yield Case("GRU", one, {"hidden_size": 5, "linear_before_reset": 1}, results=2, most=5e-6)
    four = (normal(4, 2, 3), normal(1, 20, 3), normal(1, 20, 5), normal(1, 40))
    rest = (None, normal(1, 2, 5), normal(1, 2, 5), normal(1, 15))
    yield Case("LSTM", (*four, *rest), {"hidden_size": 5}, results=3, most=5e-6)


def resized() -> Iterator[Case]:
    x = normal(1, 2, 4, 5)
    scales = np.asarray([1, 1, 2, 1.5], F)
    down = np.asarray([1, 1, 0.6, 0.6], F)
    places = words("half_pixel align_corners asymmetric pytorch_half_pixel half_pixel_symmetric")
    for mode in ("nearest", "linear", "cubic"):
        for place in places:
            # The reference takes fractions of an element for the ends of a dim.
            for by in (
                ([*scales[:3].tolist(), 2.0],) if place == "align_corners" else (scales, down)
            ):
                form = {"mode": mode, "coordinate_transformation_mode": place}
                yield Case("Resize", (x, None, np.asarray(by, F)), form, most=2e-5)
        yield Case("Resize", (x, None, None, ints(1, 2, 7, 3)), {"mode": mode}, most=2e-5)
    for nearest in ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil"):
        yield Case("Resize", (x, None, scales), {"nearest_mode": nearest})
    yield Case("Resize", (x, None, None, ints(7, 3)), {"mode": "linear", "axes": [2, 3]}, most=2e-5)
    yield Case(
        "Resize",
        (x, None, None, ints(8, 12)),
        {"axes": [2, 3], "keep_aspect_ratio_policy": "not_larger"},
    )
    yield Case("Resize", (x, None, down), {"mode": "cubic", "exclude_outside": 1}, most=2e-5)
    yield Case("Resize", (x, None, scales), {"mode": "cubic", "cubic_coeff_a": -0.5}, most=2e-5)
    grid = np.tanh(normal(1, 3, 4, 2)) * 1.3
    for mode in ("linear", "nearest"):
        for edge in ("zeros", "border"):
            for ends in (0, 1):
                form = {"mode": mode, "padding_mode": edge, "align_corners": ends}
                yield Case("GridSample", (x, grid), form, most=1e-5)


def alike() -> Iterator[tuple[Case, Case]]:
    """Nodes that the reference does not compute, and others that are the same."""
    x, scales = normal(1, 2, 4, 5), np.asarray([1, 1, 2, 1.5], F)
    whole_scales = np.asarray([1, 1, 2, 2], F)
    old = {
        "mode": "nearest",
        "coordinate_transformation_mode": "asymmetric",
        "nearest_mode": "floor",
    }
    linear = {**old, "mode": "linear"}
    yield (
        Case("Resize", (x, scales), {"mode": "nearest"}, 10),
        Case("Resize", (x, None, scales), old),
    )
    yield (
        Case("Resize", (x, scales), {"mode": "linear"}, 10),
        Case("Resize", (x, None, scales), linear),
    )
    yield (
        Case("Upsample", (x, scales), {"mode": "nearest"}, 9),
        Case("Resize", (x, None, scales), old),
    )
    given = {"mode": "nearest", "scales": [1.0, 1.0, 2.0, 2.0]}
    yield Case("Upsample", (x,), given, 7), Case("Resize", (x, None, whole_scales), old)
    rows = np.asarray([[0, 2, 1], [1, 0, 2]], I64)
    put = (normal(3, 3), rows, normal(2, 3))
    yield Case("Scatter", put, {"axis": 0}, 10), Case("ScatterElements", put, {"axis": 0})
    for p in (1, 2, 3):
        window = {"p": p, "kernel_shape": [4, 5]}
        yield Case("GlobalLpPool", (x,), {"p": p}), Case("LpPool", (x,), window, most=5e-6)
        norm = np.sum(np.abs(x) ** p, -1, keepdims=True) ** (1 / p)
        if p < 3:
            yield Case("LpNormalization", (x,), {"p": p}), Case("Div", (x, norm.astype(F)))
    yield Case("Mean", (normal(), x)), Case("Mean", (x, normal()))
    yield Case("Softsign", (normal(),)), Case("Div", (normal(), 1 + np.abs(normal())))


def cases() -> list[Case]:
    """Every case but those of operators that hold graphs (`test_onnx_reference.py` has them)."""
    kinds = (unary, binary, types, shapes, indexed, reductions, products, quantized, windows)
    return [case for kind in (*kinds, normalised, recurrent, resized) for case in kind()]
