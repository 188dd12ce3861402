"""Models that the real compiler refuses with a documented code, through the command: the code, the
user's line, and what to do."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from shardwright.compiler.diagnostics import CompileError, Loc
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.ops import AllReduceAttrs, ReduceScatterAttrs
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.passes.integers import check_integers
from tests.support.model_files import compile_line, run_neff, write_model

SOLVE = """
func.func @main(%a: tensor<4x4xf32>, %b: tensor<4x2xf32>) -> tensor<4x2xf32> {
  %0 = "stablehlo.triangular_solve"(%a, %b) {left_side = true, lower = true,
    unit_diagonal = false, transpose_a = #stablehlo<transpose NO_TRANSPOSE>}
    : (tensor<4x4xf32>, tensor<4x2xf32>) -> tensor<4x2xf32> loc("solver.py":12:3)
  return %0 : tensor<4x2xf32>
}
"""
UNEQUAL = """
func.func @main(%a: tensor<4x5xf32>) -> tensor<4x4xf32> {
  %0 = stablehlo.dot_general %a, %a, contracting_dims = [1] x [0]
    : (tensor<4x5xf32>, tensor<4x5xf32>) -> tensor<4x4xf32> loc("layer.py":3:4)
  return %0 : tensor<4x4xf32>
}
"""


POWER = """
func.func @main(%a: tensor<4xi64>, %b: tensor<4xi64>) -> tensor<4xi64> {
  %0 = stablehlo.power %a, %b : tensor<4xi64> loc("count.py":5:1)
  return %0 : tensor<4xi64>
}
"""
CALL = """
func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.custom_call @NAME(%a) : (tensor<4xf32>) -> tensor<4xf32> loc("layer.py":9:1)
  return %0 : tensor<4xf32>
}
"""
TYPED = """
func.func @main(%a: tensor<4xTYPE>) -> tensor<4xTYPE> {
  %0 = stablehlo.add %a, %a : tensor<4xTYPE>
  return %0 : tensor<4xTYPE>
}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(capsys: pytest.CaptureFixture[str], name: str) -> str:
    """What the command prints when it refuses the model file `name`."""
    capsys.readouterr()
    assert compile_line(f"neuronx-cc compile {name} --target trn1") == 70
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("text", "code", "place", "named"),
    [
        (SOLVE, "NCC_EUOC002", "solver.py:12", "operator triangular_solve is not supported"),
        (UNEQUAL, "NCC_EVRF064", "layer.py:3", "contracting dimension sizes must match"),
        (UNEQUAL.replace("loc(", "// "), "NCC_EVRF064", "", "sizes must match"),
        (CALL.replace("NAME", "AwsNeuronGelo"), "NCC_EVRF015", "layer.py:9", "AwsNeuronGelo"),
        (CALL.replace("NAME", "cublas"), "NCC_EHCA005", "layer.py:9", "custom call cublas"),
        (TYPED.replace("TYPE", "f8E3M4"), "NCC_ESPP047", "", "got f8E3M4"),
        (TYPED.replace("TYPE", "f8E5M2FNUZ"), "NCC_EVRF005", "", "got f8E5M2FNUZ"),
        (TYPED.replace("TYPE", "f4E2M1FN"), "NCC_ESPP004", "", "got f4E2M1FN"),
        (TYPED.replace("TYPE", "complex<f32>"), "NCC_EVRF004", "", "complex"),
    ],
)
def test_stablehlo_text(
    text: str, code: str, place: str, named: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "m.mlir").write_text(text)
    err = refusal(capsys, "m.mlir")
    assert f"[{code}]" in err and named in err
    assert f"Error location: {place or 'm.mlir:'}" in err


def test_an_hlo_proto_whose_shapes_disagree_is_evrf064(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.zeros((4, 5), np.float32)
    model = write_model(folder / "m.hlo.pb", lambda x, y: -(x @ y), [x, np.zeros((5, 6), "f")])
    data = model.read_bytes()
    result = bytes([0x1A, 2, 4, 6])  # packed dims [4, 6] of a shape
    assert result in data
    model.write_bytes(data.replace(result, bytes([0x1A, 2, 4, 7]), 1))
    assert "[NCC_EVRF064]" in refusal(capsys, "m.hlo.pb")


OPTIMIZED = """HloModule m
f {
  p = f32[4,3] parameter(0)
  ROOT n = f32[4,3] negate(p)
}
ENTRY e {
  x = f32[4,3] parameter(0)
  ROOT r = f32[4,3] fusion(x), kind=kLoop, calls=f
}
"""


def test_what_another_optimizer_made_is_refused_with_what_to_give(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "m.hlo").write_text(OPTIMIZED)
    err = refusal(capsys, "m.hlo")
    assert "[NCC_EVRF001]" in err and "mhlo.fusion" in err
    assert "the one before it" in err


def test_a_dynamic_dimension_is_emod025_with_instruction_and_shape(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (batch,) = export.symbolic_shape("batch")
    shape = jax.ShapeDtypeStruct((batch, 4), jnp.float32)
    (folder / "m.export").write_bytes(export.export(jax.jit(jnp.tanh))(shape).serialize())
    err = refusal(capsys, "m.export")
    assert "[NCC_EMOD025]" in err and "tensor<?x4xf32>" in err and "pad or bucket" in err


@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_arithmetic_shifts_of_short_integers_are_evrf022(
    dtype: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.array([-64, 32, 5], dtype)
    write_model(folder / "m.mlir", lambda x: x >> 2, [x])
    err = refusal(capsys, "m.mlir")
    assert "[NCC_EVRF022]" in err and f"location: {Path(__file__)}" in err
    write_model(folder / "m.mlir", lambda x: x.astype("int32") >> 2, [x])
    assert compile_line("neuronx-cc compile m.mlir --target trn1") == 0
    np.testing.assert_array_equal(run_neff(folder / "file.neff", [x])[0], [-16, 8, 1])


TUPLES = """HloModule m
ENTRY e {
  x = f32[4,3] parameter(0)
  t = (f32[4,3], f32[4,3]) tuple(x, x)
  g = f32[4,3] get-tuple-element(t), index=1
  n = f32[4,3] negate(g)
  b = f32[2,4,3] broadcast(n), dimensions={1,2}
  ROOT r = ((f32[4,3], f32[4,3]), f32[2,4,3]) tuple(t, b)
}
"""


def test_tuples_of_hlo_become_separate_outputs(folder: Path) -> None:
    (folder / "m.hlo").write_text(TUPLES)
    assert compile_line("neuronx-cc compile m.hlo --target trn1") == 0
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    first, second, broadcast = run_neff(folder / "file.neff", [x])
    np.testing.assert_array_equal(first, x)
    np.testing.assert_array_equal(second, x)
    np.testing.assert_array_equal(broadcast, np.stack([-x, -x]))


def test_the_old_broadcast_operator_adds_dims_in_front(folder: Path) -> None:
    (folder / "m.mlir").write_text(
        "func.func @main(%a: tensor<3xf32>) -> tensor<2x3xf32> {\n"
        '  %0 = "stablehlo.broadcast"(%a) {broadcast_sizes = array<i64: 2>}'
        " : (tensor<3xf32>) -> tensor<2x3xf32>\n  return %0 : tensor<2x3xf32>\n}\n"
    )
    assert compile_line("neuronx-cc compile m.mlir --target trn1") == 0
    x = np.array([1, 2, 3], np.float32)
    np.testing.assert_array_equal(run_neff(folder / "file.neff", [x])[0], [x, x])


def test_a_64_bit_power_is_evrf062_unless_permitted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "m.mlir").write_text(POWER)
    line = "neuronx-cc compile m.mlir --target trn1 --implicit-integer-downcast"
    assert compile_line(f"{line} dot,scatter") == 70
    err = " ".join(capsys.readouterr().err.split())
    assert "[NCC_EVRF062]" in err and "Error location: count.py:5" in err
    assert compile_line(f"{line} pow") == 0
    base, exponent = np.array([2, -3, 5, 0], np.int64), np.array([10, 3, 0, 4], np.int64)
    found = run_neff(folder / "file.neff", [base, exponent])[0]
    np.testing.assert_array_equal(found, base**exponent)


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_integer_reductions_over_cores_need_permission(kind: str) -> None:
    code = {"all_reduce": "NCC_EVRF061", "reduce_scatter": "NCC_EVRF063"}[kind]
    b = Builder(loc=Loc("sum.py", 4, ""))
    x = b.input((8, 3), DType.I32)
    over = {"axes": ("dp",), "reduction": "add", "group_size": 2}
    attrs = AllReduceAttrs(**over) if kind == "all_reduce" else ReduceScatterAttrs(dim=0, **over)
    graph = b.finish(b.op(kind, x, attrs=attrs))
    check_integers(graph, CompileOptions(implicit_integer_downcast=kind), "v2")
    with pytest.raises(CompileError, match=f"sum.py:4: error.{code}"):
        check_integers(graph, CompileOptions(implicit_integer_downcast="none"), "v2")
