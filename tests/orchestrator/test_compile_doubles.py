"""A module with 64-bit floats: the documented code, whatever it does with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
