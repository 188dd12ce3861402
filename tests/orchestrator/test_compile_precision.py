"""Precision flags from the command line to the values of a file: `compile`, then `neff run`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from shardwright.orchestrator.cli import main
from shardwright.sim_cluster.values.result import distance
from tests.support.model_files import compile_line, run_neff, write_model

LEVELS = ("L0", "L1")
SHORT = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp8_e4m3": ml_dtypes.float8_e4m3}
TRIPS = 256


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def product(x: Any, y: Any) -> Any:
    return x @ y


def compiled(
    folder: Path, fn: Callable[..., Any], arguments: list[np.ndarray], flags: str = ""
) -> Path:
    """The file that the command makes of a function."""
    model, output = folder / "m.export", folder / f"f{len(list(folder.iterdir()))}.neff"
    write_model(model, fn, arguments)
    line = f"shardwright compile {model} --target trn1 --output {output} {flags}"
    assert compile_line(f"{line} --logfile {folder / 'log.txt'}") == 0
    return output


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", sorted(SHORT))
def test_auto_cast_types(name: str, level: str, tmp_path: Path) -> None:
    x, y = normal(40, 200), normal(200, 56, seed=1)
    flags = f"--auto-cast matmult --auto-cast-type {name}"
    (got,) = run_neff(compiled(tmp_path, product, [x, y], flags), [x, y], level)
    short = [a.astype(SHORT[name]).astype(np.float64) for a in (x, y)]
    assert distance(got, short[0] @ short[1]) < 1e-6
    assert distance(got, x.astype(np.float64) @ y) > 1e-4, "the cast has to be visible"


def mixed(x: Any, y: Any) -> Any:
    """A product between elementwise operations."""
    return (x * 0.7 @ y) / 3


@pytest.mark.matrix
def test_the_types_of_casts_are_ranked_by_their_errors(tmp_path: Path) -> None:
    """None before tf32, fp16 and bf16; products alone before everything. The elements of a third of
    the rows are below the normal numbers of fp16, which is all that tells it from tf32."""
    x, y = normal(12, 40), normal(40, 8, seed=1) * np.float32(0.1)
    x[::3] *= 2.0**-14
    exact = (x.astype(np.float64) * 0.7 @ y) / 3

    def error(flags: str) -> float:
        (got,) = run_neff(compiled(tmp_path, mixed, [x, y], flags), [x, y])
        return distance(got[::3], exact[::3]) + distance(got, exact)

    types = ("tf32", "fp16", "bf16")
    products = [error(f"--auto-cast matmult --auto-cast-type {name}") for name in types]
    everything = [error(f"--auto-cast all --auto-cast-type {name}") for name in types]
    assert error("--auto-cast none") < products[0] < products[1] < products[2]
    assert everything[0] <= everything[1] < everything[2]
    assert all(a < b for a, b in zip(products, everything, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_out_of_range_of_fp16_becomes_infinite(level: str, tmp_path: Path) -> None:
    x = np.array([[1, 65504, 65519, 65520, -7e4, 3e38]], np.float32)  # 65504 is the largest
    half = np.full_like(x, 0.5)
    flags = "--auto-cast all --auto-cast-type fp16"
    (got,) = run_neff(compiled(tmp_path, jnp.multiply, [x, half], flags), [x, half], level)
    np.testing.assert_array_equal(got, [[0.5, 32752, 32752, np.inf, -np.inf, np.inf]])
    (plain,) = run_neff(compiled(tmp_path, jnp.multiply, [x, half]), [x, half], level)
    np.testing.assert_array_equal(plain, x / 2)


@pytest.mark.parametrize("level", LEVELS)
def test_auto_cast_all_rounds_elementwise_results(level: str, tmp_path: Path) -> None:
    x = normal(64, 32)
    (got,) = run_neff(compiled(tmp_path, lambda x: 1 / x, [x], "--auto-cast all"), [x], level)
    short = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(got, (1 / short).astype(ml_dtypes.bfloat16).astype(np.float32))


def ratios(x: Any, y: Any) -> Any:
    """Two quotients in bf16, one made of the other."""
    short = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
    return (short[0] / short[1] / short[0]).astype(jnp.float32)


@pytest.mark.parametrize("level", LEVELS)
def test_mixed_precision_accumulation_is_the_default_and_can_be_switched_off(
    level: str, tmp_path: Path
) -> None:
    x, y = normal(128, 64), normal(128, 64, seed=1)
    exact = 1 / y.astype(np.float64)  # x cancels; the rounding of y stays on chip too
    errors = []
    for flags in (
        "",
        "--enable-mixed-precision-accumulation",
        "--disable-mixed-precision-accumulation",
    ):
        (got,) = run_neff(compiled(tmp_path, ratios, [x, y], flags), [x, y], level)
        errors.append(distance(got, exact))
    assert errors[0] == errors[1] < 1e-6, "nothing is rounded on chip"
    assert errors[2] > 1e-3


def test_saturation_prevents_the_nan_of_a_transpose(tmp_path: Path) -> None:
    x, y = normal(128, 128), np.abs(normal(128, 64, seed=1)) + 0.5
    x[3, 5] = np.inf
    plain = run_neff(compiled(tmp_path, product, [x, y]), [x, y], "L0")
    assert np.isnan(plain[0]).any()
    file = compiled(tmp_path, product, [x, y], "--enable-saturate-infinity")
    for level in LEVELS:
        (safe,) = run_neff(file, [x, y], level)
        assert not np.isnan(safe).any()


def halves(x: Any) -> Any:
    """The documented anchor, shortened: 1024 + 0.5 in fp16, again and again."""

    def body(total: Any, _: Any) -> Any:
        return total + jnp.float16(0.5), None

    return jax.lax.scan(body, x, None, length=TRIPS)[0]


@pytest.mark.parametrize("name", ["XLA_USE_BF16", "XLA_DOWNCAST_BF16"])
def test_stochastic_rounding_by_the_variables_of_torch_xla(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They switch it on, unless the runtime's own variable says no."""
    start = np.full((1, 128), 1024, np.float16)
    file = compiled(tmp_path, halves, [start])
    monkeypatch.setenv(name, "1")
    assert run_neff(file, [start])[0].astype(np.float64).mean() > 1024 + TRIPS / 4
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "0")
    assert (run_neff(file, [start])[0] == 1024).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [("NEURON_FAIL_ON_NAN", "1"), ("NEURON_RT_NUMERICAL_ERRORS_VERBOSITY", "critical")],
)
def test_a_run_fails_for_a_nan_where_that_is_asked_for(
    name: str,
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    x = np.array([[4.0, -1.0, 0.0, np.inf]], np.float32)
    file = compiled(tmp_path, jnp.sqrt, [x])
    np.savez(tmp_path / "in.npz", arg0=x)
    run = ["neff", "run", str(file), "--inputs", str(tmp_path / "in.npz")]
    run += ["--outputs", str(tmp_path / "out.npz")]
    assert main(run) == 0
    monkeypatch.setenv(name, value)
    assert main(run) == 72
    said = " ".join(capsys.readouterr().err.split())
    assert "error[SW_SIM_NAN]" in said and "got 1 NaN of 4 elements" in said
    assert "NRT_EXEC_COMPLETED_WITH_NUM_ERR (1003)" in said
    np.savez(tmp_path / "in.npz", arg0=np.abs(x))
    assert main(run) == 0


def test_stochastic_rounding_by_the_runtime_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = np.full((1, 128), 1024, np.float16)
    file = compiled(tmp_path, halves, [start])
    assert (run_neff(file, [start])[0] == 1024).all()
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1")
    sums = run_neff(file, [start])[0].astype(np.float64)
    # TRIPS draws of 0 or 1 with probability 1/2: deviation 8 per lane, 0.7 of the mean of 128.
    assert abs(sums.mean() - (1024 + TRIPS / 2)) < 4 and sums.std() < 16
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_SEED", "7")
    assert (run_neff(file, [start])[0] != sums).any()
