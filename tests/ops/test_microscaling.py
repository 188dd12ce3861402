"""`QuantizeMX` and the block-scaled dot on a simulated trn3 core, against the definition of MX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shardwright.compiler.diagnostics import ImportRuleError
from shardwright.compiler.frontend.detect import import_file
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.types import Graph
from tests.support.compiled import run_levels
from tests.support.error_triggers import Trigger, mx_quantize, scaled_dot
from tests.support.model_files import compile_line

TARGET = "trn3-gen2-ultraserver"
FORMATS = {
    "float8_e5m2": (ml_dtypes.float8_e5m2, 15),
    "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, 8),
}
NAMES = {np.dtype(ml_dtypes.bfloat16): "bf16", np.dtype(np.float16): "f16"}
RNG = np.random.default_rng(3)


def quantized(x: np.ndarray, dtype: str, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """(packed U32 elements, E8M0 scales), block by block as the standard says it in words."""
    narrow, largest = FORMATS[dtype]
    rows = np.moveaxis(x.astype(np.float32), dim, -1)
    data, scales = np.zeros(rows.shape, narrow), []
    for at in range(0, rows.shape[-1], 32):
        block = rows[..., at : at + 32]
        size = np.abs(block).max(axis=-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            exponent = np.floor(np.log2(size)) - largest + 1  # one more than OCP's sample
        scale = np.clip(np.nan_to_num(exponent, neginf=-127), -127, 127)
        lost = ~np.isfinite(size)
        factor = np.where(lost, np.nan, 2.0**scale)
        data[..., at : at + 32] = (block / factor[..., None]).astype(np.float32).astype(narrow)
        scales.append(np.where(lost, 255, scale + 127).astype(np.uint8))
    data, scale = (np.moveaxis(a, -1, dim) for a in (data, np.stack(scales, -1)))
    packed = np.ascontiguousarray(np.moveaxis(data, dim, -1)).view(np.uint32)
    return np.ascontiguousarray(np.moveaxis(packed, -1, dim)), scale


def elements(packed: np.ndarray, scale: np.ndarray, dtype: str, dim: int) -> np.ndarray:
    """What packed elements and their scales stand for, in float64."""
    rows = np.ascontiguousarray(np.moveaxis(packed, dim, -1)).view(FORMATS[dtype][0])
    factor = np.repeat(2.0 ** (np.moveaxis(scale, dim, -1).astype(float) - 127), 32, axis=-1)
    return np.moveaxis(rows.astype(float) * factor[..., : rows.shape[-1]], -1, dim)


def tensor(shape: tuple[int, ...], dtype: str) -> str:
    return f"tensor<{'x'.join(map(str, shape))}x{dtype}>"


def quantize_module(x: np.ndarray, dtype: str, dim: int) -> Graph:
    config = json.dumps({"dtype": dtype, "dim": dim}).replace('"', "\\22")
    packed, scale = quantized(x, dtype, dim)
    given, results = tensor(x.shape, NAMES[x.dtype]), tensor(packed.shape, "ui32")
    results += ", " + tensor(scale.shape, "ui8")
    return import_module(f"""
    func.func @main(%x: {given}) -> ({results}) {{
      %q:2 = "stablehlo.custom_call"(%x) {{call_target_name = "QuantizeMX", backend_config =
        "{config}"}} : ({given}) -> ({results})
      return %q#0, %q#1 : {results}
    }}""")


def values(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Normal values of very different sizes, with whole blocks of zeros."""
    x = RNG.normal(size=shape) * 2.0 ** RNG.integers(-9, 9, (shape[0], *[1] * (len(shape) - 1)))
    x[0, ..., :32] = 0
    return x.astype(dtype)


SPECIAL = np.array([[np.inf, 1], [np.nan, 2], [-np.inf, 3], [1e-40, 0], [3.3e38, 1], [-0.0, 0]])
CASES = [
    (values((6, 128), ml_dtypes.bfloat16), -1),
    (values((64, 12), np.float16), -2),
    (values((3, 40, 36), ml_dtypes.bfloat16), 1),
    (values((3, 5, 36), np.float16), 2),
    (np.repeat(SPECIAL, 16, axis=1).astype(ml_dtypes.bfloat16), 1),
    (np.array([1.75, 448, 1e-3, 0.9375] * 8, np.float16), 0),
]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[pytest.mark.matrix] * (n in (1, 2))) for n in range(len(CASES))],
)
def test_quantized_as_the_standard_says(number: int, dtype: str) -> None:
    x, dim = CASES[number]
    wanted = quantized(x, dtype, dim)
    for data, scale in run_levels(quantize_module(x, dtype, dim), [x], target=TARGET):
        np.testing.assert_array_equal(scale, wanted[1])
        with np.errstate(invalid="ignore"):
            have, want = (elements(p, s, dtype, dim) for p, s in ((data, scale), wanted))
        finite = np.isfinite(want)
        np.testing.assert_array_equal(have[finite], want[finite])
        assert not np.isfinite(have[~finite]).any()


def dot_module(lhs: Any, rhs: Any, result: str, config: str) -> Graph:
    shapes = [tensor(lhs[0].shape, "ui32"), tensor(rhs[0].shape, "ui32")]
    shapes += [tensor(lhs[1].shape, "ui8"), tensor(rhs[1].shape, "ui8")]
    arguments = ", ".join(f"%a{i}: {t}" for i, t in enumerate(shapes))
    return import_module(f"""
    func.func @main({arguments}) -> {result} {{
      %y = "stablehlo.custom_call"(%a0, %a1, %a2, %a3) {{call_target_name =
        "__op$block_scaled_dot", backend_config = "{config}"}} : ({", ".join(shapes)}) -> {result}
      return %y : {result}
    }}""")


@pytest.mark.parametrize(
    ("shapes", "dims", "batch", "subscripts", "out"),
    [
        (((16, 128), (24, 128)), (1, 1), [], "mk,nk->mn", "f32"),
        (((96, 16), (96, 24)), (0, 0), [], "km,kn->mn", "bf16"),
        (((2, 8, 64), (2, 64, 12)), (2, 1), [0], "bmk,bkn->bmn", "f32"),
    ],
)
@pytest.mark.parametrize("dtype", FORMATS)
def test_product_of_what_packed_elements_stand_for(
    shapes: Any, dims: tuple[int, int], batch: list[int], subscripts: str, out: str, dtype: str
) -> None:
    sides = [
        quantized(values(shape, ml_dtypes.bfloat16), dtype, dim)
        for shape, dim in zip(shapes, dims, strict=True)
    ]
    given = {
        "lhs_batch_dimensions": batch,
        "rhs_batch_dimensions": batch,
        "lhs_contracting_dimensions": [dims[0]],
        "rhs_contracting_dimensions": [dims[1]],
        "element_dtype": dtype,
    }
    config = json.dumps({"scaled_dot_backend_config": given}).replace('"', "\\22")
    wide = [elements(*side, dtype, dim) for side, dim in zip(sides, dims, strict=True)]
    want = np.einsum(subscripts, *wide)
    graph = dot_module(*sides, tensor(want.shape, out), config)
    arguments = [sides[0][0], sides[1][0], sides[0][1], sides[1][1]]
    for (have,) in run_levels(graph, arguments, target=TARGET):
        error = np.linalg.norm(have.astype(float) - want) / np.linalg.norm(want)
        assert error < (1e-6 if out == "f32" else 3e-3)


@pytest.mark.parametrize("config", ["", "None"])
def test_a_product_without_configuration_takes_the_format_of_its_quantisation(config: str) -> None:
    """Last dims are contracted; the elements are of what `QuantizeMX` in front made."""
    x = values((8, 64), ml_dtypes.bfloat16)
    settings = json.dumps({"dtype": "float8_e5m2", "dim": -1}).replace('"', "\\22")
    graph = import_module(f"""
    func.func @main(%x: tensor<8x64xbf16>) -> tensor<8x8xf32> {{
      %q:2 = "stablehlo.custom_call"(%x) {{call_target_name = "QuantizeMX", backend_config =
        "{settings}"}} : (tensor<8x64xbf16>) -> (tensor<8x16xui32>, tensor<8x2xui8>)
      %y = "stablehlo.custom_call"(%q#0, %q#0, %q#1, %q#1) {{call_target_name =
        "__op$block_scaled_dot", backend_config = "{config}"}} : (tensor<8x16xui32>,
        tensor<8x16xui32>, tensor<8x2xui8>, tensor<8x2xui8>) -> tensor<8x8xf32>
      return %y : tensor<8x8xf32>
    }}""")
    stands_for = elements(*quantized(x, "float8_e5m2", 1), "float8_e5m2", 1)
    for (have,) in run_levels(graph, [x], target=TARGET):
        np.testing.assert_allclose(have, stands_for @ stands_for.T, rtol=1e-5)
    error = np.abs(stands_for - x.astype(float)).max(axis=1) / np.abs(x.astype(float)).max(axis=1)
    assert error.max() <= 2.0**-3  # two bits of mantissa behind the point


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--target trn2 --lnc 1", "[NCC_EVRF051]"),
        ("--target trn3 --experimental-unsafe-fp8e4m3fn-as-fp8e4m3", "[NCC_EVRF051]"),
        ("--target trn3 --compiler-version-profile 2.24.5133", "requires release 2.27.5334"),
        ("--target trn3 --compiler-version-profile 2.27.5334", ""),
    ],
)
def test_machines_and_releases_that_have_it(
    flags: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.mlir").write_text(mx_quantize().text)
    assert compile_line(f"neuronx-cc compile m.mlir {flags}") == (70 if said else 0)
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("trigger", "code"),
    [
        (mx_quantize(', "dtype": ["float8_e5m2"]'), "NCC_EVRF042"),
        (mx_quantize(', "dim": "last"'), "NCC_EVRF038"),
        (mx_quantize(', "block_size": [32]'), "NCC_EVRF039"),
        (mx_quantize(data="4x64xui32"), "NCC_EVRF042"),
        (scaled_dot('{"scaled_dot_backend_config": [1]}'), "NCC_EVRF049"),
        (scaled_dot('"lhs_contracting_dimensions": ["k"]'), "NCC_EVRF049"),
        (scaled_dot('{"scaled_dot_backend_config": {"element_dtype": 8}}'), "NCC_EVRF064"),
        (scaled_dot("{}"), "NCC_EVRF064"),  # packed data of nobody knows which type
        (scaled_dot('"rhs_contracting_dimensions": [0, 1]'), "NCC_EVRF064"),
        (scaled_dot(scales=("4x2xui8", "4x3xui8")), "NCC_EVRF064"),
    ],
)
def test_forms_that_make_no_sense(trigger: Trigger, code: str) -> None:
    with pytest.raises(ImportRuleError) as caught:
        import_module(trigger.text)
    assert caught.value.code == code
    assert caught.value.loc is not None and caught.value.loc.line == 7


def test_an_hlo_call_has_its_results_as_a_tuple() -> None:
    """HLO has calls of several results as tuples, whether they are read one by one or returned."""
    call = 'custom-call(x), custom_call_target="AwsNeuronTopK", backend_config="2"'
    tuple_type = "(f32[6,2], u32[6,2])"
    parts = (
        "a = f32[6,2] get-tuple-element(q), index=0\n b = u32[6,2] get-tuple-element(q), index=1"
    )
    whole = f"ROOT q = {tuple_type} {call}"
    read = f"q = {tuple_type} {call}\n {parts}\n ROOT t = {tuple_type} tuple(a, b)"
    x = RNG.normal(size=(6, 20)).astype(np.float32)
    for body in (whole, read):
        text = f"HloModule m\nENTRY main {{\n x = f32[6,20] parameter(0)\n {body}\n}}\n"
        graph, _ = import_file(text.encode())
        for largest, place in run_levels(graph, [x]):
            np.testing.assert_array_equal(largest, -np.sort(-x, axis=1)[:, :2])
            np.testing.assert_array_equal(np.take_along_axis(x, place.astype(int), 1), largest)
