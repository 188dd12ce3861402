"""A run that would take more memory than the host has, or than its process may take, is refused
before it takes any."""

from __future__ import annotations

import resource

import numpy as np
import pytest

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine, KernelProgram, Node, Tensor, View
from shardwright.compiler.isa.program import Function, Program, ProgramBuffer
from shardwright.sim_cluster.values import host_memory
from shardwright.sim_cluster.values.functions import FunctionCode
from shardwright.sim_cluster.values.kernels import prepare
from shardwright.sim_cluster.values.run_single import Ranks, run_single

GIB = 2**30
LARGE = 2**34


@pytest.fixture(autouse=True)
def small_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: GIB)


def test_buffers_of_all_ranks_count() -> None:
    buffer = ProgramBuffer("x", (2**26,), DType.F32, "named")
    program = Program("p", "trn1.2xlarge", [], [buffer], ("x",), ("x",), (), 0)
    x = np.broadcast_to(np.float32(1), (2**26,))
    assert run_single(program, {"x": x})["x"][0] == 1
    with pytest.raises(SimulationError, match=r"SW_SIM_MEMORY.* 8 cores requires 2\.00 GiB.*1\.00"):
        run_single(program, {"x": x}, ranks=Ranks({"tp": 8}))


def test_constants_that_store_one_element_count_in_full() -> None:
    splat = Tensor("c", (LARGE,), DType.F32, "constant", data=bytes(4))
    function = Function("f", [splat], (), (), (), 0, [], [])
    with pytest.raises(SimulationError, match=r"SW_SIM_MEMORY.*constants of function f"):
        FunctionCode(function)


def kernel(iter_dims: tuple[int, ...], *nodes: Node) -> KernelProgram:
    return KernelProgram("compute", "r", iter_dims, nodes)


def test_arrays_of_a_kernel_count_where_they_are_made() -> None:
    view = View(0, Affine(), (0, 1))
    load = Node("load", (), (0, 1), DType.F32, {"view": view})
    wide = Node("negate", (0,), (0, 1), DType.F32)
    stored = Node("store", (0,), (1,), DType.F32, {"view": view})
    sizes = (2**20, 2**12)
    assert host_memory.kernel_bytes(kernel(sizes, load, stored)) == 0
    assert host_memory.kernel_bytes(kernel(sizes, load, wide)) == 2**34
    summed = Node("reduce", (0,), (1,), DType.F32, {"kind": "add", "over": (0,)})
    assert host_memory.kernel_bytes(kernel(sizes, load, summed)) == 2**34
    product = Node("contract", (0, 0), (1,), DType.F32, {"over": (0,)})
    assert host_memory.kernel_bytes(kernel(sizes, load, product)) == 2**34
    with pytest.raises(SimulationError, match=r"SW_SIM_MEMORY.*kernel r requires 16\.00 GiB"):
        prepare(kernel(sizes, load, wide), (DType.F32,))


def test_the_limit_of_the_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    free = host_memory.available_bytes()
    assert 0 < free < 2**50
    used = host_memory._figure("/proc/self/status", "VmSize")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (used + GIB, used + GIB))
    assert host_memory.available_bytes() <= GIB
    assert host_memory._figure("/proc/self/nothing", "VmSize") == 2**63
