"""Capacity and instruction limits of `compile`, each refused at its stage with the split users act
on."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.diagnostics import CapacityError
from shardwright.compiler.driver import generate_function
from shardwright.compiler.dtypes import DType
from shardwright.compiler.fusion.logical_core import LogicalCore
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.linking import budget
from shardwright.compiler.lower.write_out import Lowered
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.options import CompileOptions
from tests.support.model_files import compile_line, meta_of, write_model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


ROWS_OF_PRODUCT = """
func.func public @main(%a: tensor<{n}x1xf32>, %b: tensor<1x{n}xf32>, %i: tensor<3xi32>)
    -> tensor<3x{n}xf32> {{
  %d = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
      : (tensor<{n}x1xf32>, tensor<1x{n}xf32>) -> tensor<{n}x{n}xf32> loc("big.py":7:1)
  %r = "stablehlo.gather"(%d, %i) {{dimension_numbers = #stablehlo.gather<offset_dims = [1],
      collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>,
      slice_sizes = array<i64: 1, {n}>}}
      : (tensor<{n}x{n}xf32>, tensor<3xi32>) -> tensor<3x{n}xf32> loc("big.py":8:1)
  return %r : tensor<3x{n}xf32>
}}
"""


def test_one_operator_over_hbm_is_evrf009_at_the_users_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "m.mlir").write_text(ROWS_OF_PRODUCT.format(n=66000))
    assert compile_line("shardwright compile m.mlir --target trn1 -O1") == 70
    err = " ".join(capsys.readouterr().err.split())
    assert "[NCC_EVRF009] operator" in err and "location: big.py:7" in err
    assert "requires 16.23 GiB of HBM" in err and "limit is 15.85 GiB per core" in err
    (folder / "m.mlir").write_text(ROWS_OF_PRODUCT.format(n=60000))
    assert compile_line("shardwright compile m.mlir --target trn1 -O1") == 0


def test_values_that_stay_on_the_chip_cost_no_hbm(folder: Path) -> None:
    """Attention scores of 17 GiB that `flash` never stores."""
    shape = jax.ShapeDtypeStruct((8, 32, 4096, 64), jnp.bfloat16)

    def attention(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32)
        return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores).astype(v.dtype), v)

    text = jax.jit(attention).lower(shape, shape, shape).as_text()
    (folder / "m.mlir").write_text(text)
    assert compile_line("shardwright compile m.mlir --target trn1 -O1") == 0


def test_intermediates_over_hbm_are_exsp001(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = "\n".join(
        f"%d{k} = stablehlo.dot_general %a, %b{k}, contracting_dims = [1] x [0]"
        ": (tensor<16384x1xf32>, tensor<1x16384xf32>) -> tensor<16384x16384xf32>"
        for k in range(18)
    )
    arguments = ", ".join(f"%b{k}: tensor<1x16384xf32>" for k in range(18))
    # All products are alive until the last matmul has run: they are multiplied backwards.
    chain = "\n".join(
        f"%s{k} = stablehlo.dot_general %s{k + 1 if k < 17 else 'x'}, %d{k}, contracting_dims ="
        " [1] x [0] : (tensor<16384x16384xf32>, tensor<16384x16384xf32>)"
        " -> tensor<16384x16384xf32>"
        for k in reversed(range(18))
    ).replace("%sx", "%d17")
    zero = "%z = stablehlo.constant dense<0.0> : tensor<f32>"
    total = (
        "%r = stablehlo.reduce(%s0 init: %z) applies stablehlo.add across dimensions = [0, 1]"
        " : (tensor<16384x16384xf32>, tensor<f32>) -> tensor<f32>"
    )
    head = f"func.func public @main(%a: tensor<16384x1xf32>, {arguments}) -> tensor<f32> {{"
    text = "\n".join((head, layers, chain, zero, total, "return %r : tensor<f32>", "}"))
    (folder / "m.mlir").write_text(text)
    code = compile_line("shardwright compile m.mlir --target trn1 -O1")
    err = capsys.readouterr().err
    assert code == 70 and "[NCC_EXSP001] activation tensors alone" in err, err


def test_inputs_and_outputs_over_hbm_are_eoom002_with_the_split(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    n = 4 * 10**9
    (folder / "m.mlir").write_text(
        f"func.func public @main(%a: tensor<{n}xf32>) -> tensor<{n}xf32> {{\n"
        f"  %r = stablehlo.add %a, %a : tensor<{n}xf32>\n  return %r : tensor<{n}xf32>\n}}\n"
    )
    assert compile_line("shardwright compile m.mlir --target trn1") == 70
    err = " ".join(capsys.readouterr().err.split())
    assert "[NCC_EOOM002] inputs and outputs alone: peak HBM usage is 29.80 GiB" in err
    for part in ("model constants", "I/O tensors 29.80 GiB", "intermediate tensors", "scratchpad"):
        assert part in err
    # The same on a logical core of two physical ones: 24 GB, still too small; half of it fits.
    assert compile_line("shardwright compile m.mlir --target trn2") == 70


def test_stages_add_up_categories() -> None:
    b = Builder()
    x = b.input((1024, 1024), DType.F32)
    graph = b.finish(b.dot(x, x, dtype=DType.F32))
    budget.check_io_memory(graph, 8 * 2**20)
    budget.check_io_memory(graph, 4 * 2**20, aliases=[(0, 0)])
    with pytest.raises(CapacityError, match="NCC_EOOM002"):
        budget.check_io_memory(graph, 8 * 2**20 - 1)
    budget.check_activations(60, 40, 100)
    with pytest.raises(CapacityError, match="NCC_EXSP001"):
        budget.check_activations(61, 40, 100)


def test_a_zone_that_no_file_states_does_not_fit() -> None:
    """Attention over a million positions with scores in memory: too large, and not damaged."""
    lowered = Lowered(
        tensors=[],
        inputs=(),
        outputs=(),
        parameters=(),
        num_registers=0,
        kernels=[],
        collectives=[],
        scratch_bytes=2**49,
    )
    core = LogicalCore(load_target("trn1n.32xlarge"), CompileOptions())
    wanted = r"NCC_EXSP001.*scratchpad 524288\.00 GiB"
    with pytest.raises(CapacityError, match=wanted):
        generate_function(lowered, core)
    assert generate_function(replace(lowered, scratch_bytes=2**48), core).scratch_bytes == 2**48


def test_the_sum_of_all_categories_is_eoom001(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    w = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    x = np.zeros((8, 64), np.float32)
    write_model(folder / "m.hlo.pb", lambda x: (jnp.tanh(x @ w).sum(), jnp.sort(x, 0)), [x])
    assert compile_line("shardwright compile m.hlo.pb --target trn1") == 0
    memory = meta_of(folder / "file.neff")["memory_bytes"]
    assert (memory["constants"], memory["io"]) == (64 * 64 * 4, 2 * 8 * 64 * 4 + 4)
    need = sum(memory.values())
    capsys.readouterr()
    monkeypatch.setattr("shardwright.compiler.machine.target.Target.limit_bytes", need - 1)
    assert compile_line("shardwright compile m.hlo.pb --target trn1") == 70
    err = capsys.readouterr().err
    assert "[NCC_EOOM001] program m:" in err and "model constants 16384 bytes" in err
    monkeypatch.setattr("shardwright.compiler.machine.target.Target.limit_bytes", need)
    assert compile_line("shardwright compile m.hlo.pb --target trn1") == 0


def test_too_many_instructions_is_cured_by_o1(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.zeros((1024, 1024), np.float32)
    write_model(folder / "m.hlo.pb", lambda x: jnp.tanh(x @ x.T) @ x, [x])
    line = "shardwright compile m.hlo.pb --target trn1"
    assert compile_line(f"{line} --instruction-limit 300") == 70
    err = capsys.readouterr().err
    text = r"\[NCC_EBVF030\] too many instructions after unroll for function sg0000 \((.+)\): the"
    assert re.search(text + " module requires", " ".join(err.split()))
    assert compile_line(f"{line} --instruction-limit 300 -O1") == 0
    assert compile_line(f"{line} --instruction-limit 100") == 70
    assert "[NCC_EVRF007]" in capsys.readouterr().err
    assert compile_line(line) == 0


def test_one_operator_over_its_own_limit_is_extp004_at_the_users_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "OPERATOR_LIMIT", 150)
    x = np.zeros((1024, 1024), np.float32)
    write_model(folder / "m.mlir", lambda x: jnp.tanh(x @ x.T), [x])
    assert compile_line("shardwright compile m.mlir --target trn1") == 70
    err = " ".join(capsys.readouterr().err.split())
    text = r"\[NCC_EXTP004\] too many instructions after unroll for function sg0000 \((.+)\): oper"
    assert re.search(text, err)
    assert f"location: {Path(__file__)}" in err
    assert compile_line("shardwright compile m.mlir --target trn1 -O1") == 0


def test_the_worked_example_of_scratchpad_pages() -> None:
    """512 MB + 1 GB and 100 MB + 1.5 GB, as the runtime's memory page counts them."""
    mb, gb = 2**20, 2**30
    first = [(0, 512 * mb), (512 * mb, gb)]
    second = [(0, 100 * mb), (100 * mb, 3 * gb // 2)]
    assert budget.scratchpad_pages([first, second], 512 * mb) == (2 * gb, 5 * gb // 2)
    assert budget.scratchpad_pages([first, second], 2 * gb) == (2 * gb, 0)


def test_a_page_size_says_what_the_scratchpad_takes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def squared(x: Any) -> Any:
        """A loop whose carry is no output, so it lives in the arena."""
        return jax.lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c @ x), x).sum()

    write_model(folder / "m.hlo.pb", squared, [np.zeros((64, 64), np.float32)])
    line = "shardwright compile m.hlo.pb --target trn1 --hbm-scratchpad-page-size"
    assert compile_line(f"{line} 512") == 0
    pages = meta_of(folder / "file.neff")["scratchpad_pages"]
    assert pages == {"page_bytes": 2**29, "shared_bytes": 2**29, "private_bytes": 0}
