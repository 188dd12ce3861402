"""Copies that lie crosswise in memory are transposed on chip: same values, long runs."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.isa.limits import walk
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.timing.evaluate import function_segments
from tests.support.compiled import TARGET, link, run_levels

CASES = {
    "square": ((200, 300), (1, 0)),
    "several blocks": ((2100, 1200), (1, 0)),
    "channels last": ((2, 64, 13, 29), (0, 2, 3, 1)),
    "channels first": ((2, 13, 24, 48), (0, 3, 1, 2)),
    "odd channels": ((3, 33, 31, 17), (0, 2, 3, 1)),
    "heads": ((4, 96, 3, 64), (0, 2, 3, 1)),
}


@pytest.mark.parametrize("dtype", (DType.F32, DType.BF16), ids=lambda d: d.value)
@pytest.mark.parametrize("name", CASES)
def test_transposed_copies(name: str, dtype: DType) -> None:
    shape, order = CASES[name]
    b = Builder()
    graph = b.finish(b.transpose(b.input(shape, dtype), order))
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype.numpy)
    for (made,) in run_levels(graph, [x]):
        np.testing.assert_array_equal(made, x.transpose(order))


def test_infinities_are_saturated_in_front_of_transposed_copies() -> None:
    """A transposed infinity spoils its row (docs/numerics.md); an option prevents it."""
    b = Builder()
    graph = b.finish(b.transpose(b.input((256, 256)), (1, 0)))
    x = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    x[3, 5] = np.inf
    ((made,),) = run_levels(graph, [x], ("L0",))
    assert np.isnan(made[5]).any()
    ((made,),) = run_levels(graph, [x], ("L0",), CompileOptions(saturate_infinity=True))
    want = np.where(np.isinf(x), np.finfo(np.float32).max, x)
    np.testing.assert_array_equal(made, want.T)


@pytest.mark.parametrize("shape", ((1024, 1024), (8, 64, 56, 56)))
def test_transposed_copies_move_long_runs(shape: tuple[int, ...]) -> None:
    """Within three times of the time a plain copy in and out takes."""
    order = (0, 2, 3, 1) if len(shape) == 4 else (1, 0)
    b = Builder()
    program = link(b.finish(b.transpose(b.input(shape, DType.BF16), order)))
    (function,) = program.functions
    target = load_target(TARGET)
    (segment,) = function_segments(function, target)
    rate = target.core.dma_engines * target.core.dma_engine_bytes_per_s
    assert segment.duration_ps < 3 * segment.hbm_bytes / rate * 1e12
    assert any(i.opcode == "transpose" for k in function.kernels for i in walk(k.body))
