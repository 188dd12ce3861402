"""What no core runs: callbacks into Python, kernels of Pallas, 64-bit floats. Left out with a
warning, or refused at the line of the user.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental import pallas as pl

from shardwright.compiler.diagnostics import CompileError, ImportRuleError
from shardwright.compiler.frontend.capture import capture
from shardwright.compiler.frontend.reference import run_reference
from shardwright.compiler.frontend.stablehlo import import_module, import_partition
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.passes.doubles import check_doubles
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.rewriting.driver import run
from tests.models.state_forms import FORMS

HERE = str(Path(__file__).parent)
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def with_extra(extra: Callable[[Any, Any], Any]) -> TrainTask:
    """The step on a nest of dicts, its loss plus what `extra` makes of state and batch."""
    task = FORMS["plain_nest"]()

    def step(state: Any, batch: Any) -> Any:
        state, loss = task.step(state, batch)
        return state, loss + extra(state, batch)

    return dataclasses.replace(task, step=step)


def line_of(function: Callable[..., Any], text: str) -> str:
    lines, start = inspect.getsourcelines(function)
    return f"test_host_code.py:{start + next(n for n, row in enumerate(lines) if text in row)}"


def _prints(state: Any, batch: Any) -> Any:
    jax.debug.print("moments {m}", m=state["moments"][0].mu["inner"]["w"].sum())

    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda value: None, state["mean"]["inner"]["w"])
        return x

    def body(i: int, x: jax.Array) -> jax.Array:
        jax.debug.print("{}", state["moments"][0].nu["inner"]["w"][0, i])
        return x

    return 0.0 * jax.lax.fori_loop(0, 2, body, inner(batch["x"][0, 0]))


def test_prints_are_left_out_with_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    task = with_extra(_prints)
    captured, silent = capture(task, 4, HERE), capture(FORMS["plain_nest"](), 4, HERE)
    (warning,) = captured.findings
    assert (warning.code, warning.severity) == ("SW_CALLBACK_DROPPED", "warning")
    assert warning.message.startswith("3 callbacks into Python") and "are left out" in str(warning)
    assert str(warning.loc) == line_of(_prints, "moments {m}")
    assert [i.role for i in captured.inputs] == [i.role for i in silent.inputs]
    assert "callback" not in str(import_module(captured.artifact, base_dir=HERE))
    kept = run_reference(task, steps=1, global_batch=4).losses
    assert kept == pytest.approx(
        run_reference(FORMS["plain_nest"](), steps=1, global_batch=4).losses
    )
    assert "moments" not in capfd.readouterr().out


def test_a_file_is_told_of_them_too() -> None:
    artifact = capture(with_extra(_prints), 4, HERE).artifact
    assert [f.code for f in import_partition(artifact)[1].findings] == ["SW_CALLBACK_DROPPED"]


def _pure(state: Any, batch: Any) -> Any:
    return jax.pure_callback(np.float32, SCALAR, batch["x"][0, 0])


def _effectful(state: Any, batch: Any) -> Any:
    return io_callback(np.float32, SCALAR, batch["x"][0, 0])


def _ordered(state: Any, batch: Any) -> Any:
    jax.debug.print("{}", batch["x"][0, 0], ordered=True)
    return 0.0


@pytest.mark.parametrize(
    ("extra", "code", "cure", "at"),
    [
        (_pure, "NCC_EHCA005", "compute it with jax.numpy", "jax.pure_callback"),
        (_effectful, "NCC_EHCA005", "give it in the batch", "io_callback"),
        (_ordered, "NCC_EVRF001", "leave ordered=True out", ""),
    ],
)
def test_what_a_step_waits_for_is_refused(
    extra: Callable[[Any, Any], Any], code: str, cure: str, at: str
) -> None:
    with pytest.raises(ImportRuleError) as caught:
        import_module(capture(with_extra(extra), 4, HERE).artifact, base_dir=HERE)
    found = caught.value.diagnostic
    assert found.code == code and cure in found.hint
    assert not at or str(found.loc) == line_of(extra, at)


def _double(source: Any, target: Any) -> None:
    target[...] = source[...] * 2


def kernel(interpret: bool) -> Callable[[Any, Any], Any]:
    def extra(state: Any, batch: Any) -> Any:
        shape = jax.ShapeDtypeStruct(batch["x"].shape, jnp.float32)
        call = jax.jit(pl.pallas_call(_double, out_shape=shape, interpret=interpret))
        return jnp.sum(jax.lax.stop_gradient(call(batch["x"])))

    return extra


def test_a_kernel_of_pallas_is_refused_unless_it_is_interpreted() -> None:
    with pytest.raises(ImportRuleError) as caught:
        capture(with_extra(kernel(False)), 4, HERE)
    found = caught.value.diagnostic
    assert found.code == "SW_PALLAS" and "interpret=True" in found.hint
    assert str(found.loc) == line_of(kernel, "call(batch")
    import_module(capture(with_extra(kernel(True)), 4, HERE).artifact)


def _wide(state: Any, batch: Any) -> Any:
    return jnp.mean(batch["x"] * jnp.linspace(0.0, 1.0, batch["x"].shape[1])).astype(jnp.float32)


def test_a_double_is_refused_where_it_is_made() -> None:
    task = dataclasses.replace(
        FORMS["plain_nest"](),
        init=lambda key: ({"w": jnp.ones((), jnp.float32)},),
        step=lambda state, batch: (state, state["w"] * _wide(state, batch)),
    )
    with jax.enable_x64(True), pytest.raises(CompileError) as caught:
        graph = import_module(capture(task, 4, HERE).artifact, base_dir=HERE)
        check_doubles(run(graph, step_passes()))
    found = caught.value.diagnostic
    assert found.code == "NCC_ESPP004" and "jax_enable_x64" in found.hint
    assert str(found.loc) == line_of(_wide, "linspace")
