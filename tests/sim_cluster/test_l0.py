"""L0 against L1 on hand-written kernels with real semaphores, and what moves through the
interpreter.
"""

from __future__ import annotations

import numpy as np
import pytest
from l0_cases import matmul_kernel, norm_kernel

from shardwright.compiler.dtypes import DType
from shardwright.sim_cluster.values.result import distance
from tests.support import l0, l1


def rand(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("m", "n", "k"), [(128, 512, 128), (256, 1024, 512), (32, 64, 64)])
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_matmul_equals_l1(m: int, n: int, k: int, dtype: DType) -> None:
    a, b = rand(k * m).astype(dtype.numpy), rand(k * n, seed=1).astype(dtype.numpy)
    kernel = matmul_kernel(m, n, k, dtype)
    outs = [np.full(m * n, np.nan, np.float32) for _ in range(2)]
    l0.run_kernel(kernel, [a, b, outs[0]], {})
    l1.run_kernel(kernel.program, [a, b, outs[1]], {})
    want = a.astype(np.float64).reshape(k, m).T @ b.astype(np.float64).reshape(k, n)
    for out in outs:
        assert distance(out, want) <= 1e-6
    assert np.linalg.norm(outs[0] - outs[1]) <= 1e-6 * np.linalg.norm(outs[1])


def test_norm_equals_l1() -> None:
    x, w = rand(512 * 96), rand(96, seed=1)
    kernel = norm_kernel(512, 96)
    outs = [np.full(512 * 96, np.nan, np.float32) for _ in range(2)]
    l0.run_kernel(kernel, [x, w, outs[0]], {})
    l1.run_kernel(kernel.program, [x, w, outs[1]], {})
    np.testing.assert_allclose(outs[0], outs[1], rtol=2e-6)
    assert np.isfinite(outs[0]).all()
