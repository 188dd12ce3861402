"""A module with 64-bit floats: the documented code, whatever it does with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.passes.doubles import (
    check_doubles,
    doubles_narrowed,
    narrow_doubles,
)
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.rewriting.driver import run
from tests.support.compiled import run_levels
from tests.support.model_files import compile_line

PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda x: jnp.sin(x) + 1,
    "conversion": lambda x: x.astype(jnp.float32) + 1,
    "only returned": lambda x: x,
    "product": lambda x: x @ x.T,
    "sort": lambda x: jnp.sort(x, 0),
    "bits": lambda x: jax.lax.bitcast_convert_type(x, jnp.uint32),
    "precision": lambda x: jax.lax.reduce_precision(x, 8, 7),
    "wide constant": lambda x: (x.astype(jnp.float32) * np.float64(3)).astype(jnp.float32),
    "positions": lambda x: jnp.argmax(x, 0),
    "gathered": lambda x: x[jnp.array([0, 1])],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_doubles_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with jax.enable_x64(True):
        lowered = jax.jit(PROGRAMS[name]).lower(jax.ShapeDtypeStruct((4, 5), np.float64))
    (tmp_path / "m.mlir").write_text(lowered.as_text(debug_info=True))
    assert compile_line("neuronx-cc compile m.mlir --framework XLA --target trn1") == 70
    shown = capsys.readouterr().err
    assert "NCC_ESPP004" in shown and "f64" in shown
    line = "neuronx-cc compile m.mlir --framework XLA --target trn1 --double-precision f32"
    reads_bits = name in ("bits", "precision")
    assert compile_line(line) == (70 if reads_bits else 0)
    assert ("SW_FLOAT64" in capsys.readouterr().err) == (name != "precision")  # at import


def train(w: Any, n: Any, x: Any) -> Any:
    """Float64 weights and batch, constants, positions, a sum that starts from one, a loop."""

    def turn(carry: Any, row: Any) -> Any:
        return carry + jnp.tanh(row @ w).sum(), None

    places = jnp.arange(x.shape[1], dtype=jnp.float64)
    total, _ = jax.lax.scan(turn, np.float64(0.25), x + places)
    return w - 0.1 * total, n + 1, total / n


def test_doubles_as_fp32_are_near_what_they_were() -> None:
    rng = np.random.default_rng(2)
    given = [rng.normal(size=(5, 3)), np.float64(2), rng.normal(size=(4, 5))]
    with jax.enable_x64(True):
        text = jax.jit(train).lower(*given).as_text(debug_info=True)
        wanted = [np.asarray(x) for x in jax.jit(train)(*given)]
    imported, asked = import_module(text), CompileOptions(double_precision="f32")
    (warning,) = doubles_narrowed(imported, asked)
    graph = run(imported, step_passes(asked))
    assert warning.code == "SW_FLOAT64" and "test_compile_doubles.py:" in warning.message
    check_doubles(graph)
    narrow = [np.asarray(x, np.float32) for x in given]
    for outputs in (evaluate(graph, narrow), *run_levels(graph, narrow)):
        for have, want in zip(outputs, wanted, strict=True):
            assert have.dtype == np.float32 and want.dtype == np.float64
            np.testing.assert_allclose(have, want, rtol=1e-5)


def test_numbers_beyond_fp32_stay_finite() -> None:
    with jax.enable_x64(True):
        text = jax.jit(lambda x: jnp.where(x > 0, x, jnp.finfo(x.dtype).min)).lower(np.ones(3))
    graph = narrow_doubles(import_module(text.as_text()))
    (have,) = evaluate(graph, [np.array([1, -1, 2], np.float32)])
    np.testing.assert_array_equal(have, [1, np.finfo(np.float32).min, 2])
