"""XLA:CPU as an oracle: runs StableHLO text without tracing anything."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jaxlib import _jax


def parse(text: str) -> str:
    """The module, parsed, verified and printed again by MLIR."""
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        module.operation.verify()
        return str(module)


def run(text: str, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The outputs of a module on one device."""
    return load(text)(inputs)


def load(text: str) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]]:
    """A module compiled once, as a function from inputs to outputs on one device."""
    program = _compiled(text, (1, 1))
    return lambda inputs: _outputs(program, [inputs])[0]


def run_ranks(
    text: str, ranks: Sequence[Sequence[np.ndarray]], grid: tuple[int, int] | None = None
) -> list[list[np.ndarray]]:
    """The outputs per rank of one module, `ranks[r]` being r's inputs, on a `grid` of replicas and
    partitions; replicas alone if none is given.
    """
    return _outputs(_compiled(text, grid or (len(ranks), 1)), ranks)


def _compiled(text: str, grid: tuple[int, int]) -> Any:
    with mlir.make_ir_context():
        code = io.BytesIO()
        ir.Module.parse(text).operation.write_bytecode(code)
    devices = jax.devices("cpu")[: grid[0] * grid[1]]
    options = xla_client.CompileOptions()
    # The emitters that users get, unlike in `conftest.py`: the older ones take (-1) ** -3 for 0.
    options.env_option_overrides = [("xla_cpu_use_fusion_emitters", True)]
    build = options.executable_build_options
    options.num_replicas, options.num_partitions = grid
    build.num_replicas, build.num_partitions = grid
    build.use_spmd_partitioning = grid[1] > 1
    ids = np.array([d.id for d in devices]).reshape(grid)
    options.device_assignment = xla_client.DeviceAssignment.create(ids)
    client = devices[0].client
    return client.compile_and_load(code.getvalue(), _jax.DeviceList(tuple(devices)), options)


def _outputs(program: Any, ranks: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
    """What one execution gives, per rank."""
    devices = jax.devices("cpu")[: len(ranks)]
    columns = [_place(arrays, devices) for arrays in zip(*ranks, strict=True)]
    results = program.execute_sharded(columns).disassemble_into_single_device_arrays()
    return [[np.asarray(r[rank]) for r in results] for rank in range(len(ranks))]


def _place(arrays: Sequence[np.ndarray], devices: Sequence[jax.Device]) -> jax.Array:
    """One array per device, bundled as an array that only claims to be replicated."""
    with jax.enable_x64(True):
        parts = [jax.device_put(a, d) for a, d in zip(arrays, devices, strict=True)]
    mesh = jax.sharding.Mesh(np.array(devices), ("rank",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.make_array_from_single_device_arrays(arrays[0].shape, sharding, parts)
