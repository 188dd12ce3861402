"""The modules of `tests/corpus/modules.py`: values of the reference and of the compiled kernels are
XLA's, or what they are refused for is said with a documented code.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jaxlib import _jax, xla_client

from shardwright.compiler.diagnostics import ImportRuleError
from shardwright.compiler.frontend.hlo import hlo_to_stablehlo
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import TensorType
from tests.corpus.modules import MODULES
from tests.support.compiled import levels_of, link

TAKEN = [name for name, module in MODULES.items() if not module.refused]
OURS = {
    "rng_bit_generator of 64 bits",  # DEFAULT leaves to the platform what is drawn
    "a convolution with dynamic padding known",  # which XLA itself does not take
}
BOUNDS = {"fp8 with a scale": 0.125}
"""Relative, where it is not 2e-5: of conversions there and back, kernels and XLA may leave both."""


def module_of(name: str) -> bytes | str:
    text = MODULES[name].text
    return hlo_to_stablehlo(text) if text.startswith("HloModule") else text


def given(type: TensorType, rng: np.random.Generator) -> np.ndarray:
    """Numbers of a type: indices within the smallest table, floats that are no small integers."""
    kind = type.dtype.numpy
    if type.dtype.is_float:
        return rng.normal(size=type.shape).astype(kind)
    top = 2 if type.dtype.value == "i1" else 4
    return rng.integers(0, top, type.shape).astype(kind)


def of_xla(source: bytes | str, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """What XLA makes of a module on one CPU."""
    device = jax.devices("cpu")[0]
    devices = _jax.DeviceList((device,))
    code = source.encode() if isinstance(source, str) else source
    program = device.client.compile_and_load(code, devices, xla_client.CompileOptions())
    placed = [jax.device_put(x, device) for x in inputs]
    results: Any = program.execute_sharded(placed).disassemble_into_single_device_arrays()
    return [np.asarray(part) for (part,) in results]


def test_there_are_thirty() -> None:
    assert len(MODULES) == 30


@pytest.mark.parametrize("name", TAKEN)
def test_values(name: str) -> None:
    source = module_of(name)
    graph = import_module(source)
    rng = np.random.default_rng(3)
    inputs = [given(value.type, rng) for value in graph.inputs]
    (compiled,) = levels_of(link(graph), inputs, ("L1",))
    wanted = evaluate(graph, inputs) if name in OURS else of_xla(source, inputs)
    for outputs in (evaluate(graph, inputs), compiled):
        for have, want in zip(outputs, wanted, strict=True):
            assert have.dtype == want.dtype and have.shape == want.shape
            have, want = (np.asarray(x, np.float64) for x in (have, want))
            np.testing.assert_allclose(have, want, rtol=BOUNDS.get(name, 2e-5), atol=1e-5)


@pytest.mark.parametrize("name", [n for n, module in MODULES.items() if module.refused])
def test_refusals(name: str) -> None:
    with pytest.raises(ImportRuleError) as caught:
        import_module(module_of(name))
    found = caught.value.diagnostic
    assert MODULES[name].refused in found.message and found.code.startswith("NCC_")
    assert found.loc is not None and found.loc.line
