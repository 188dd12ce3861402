"""XLA's own partitioner on eight CPU devices: the collectives it makes of a recipe, and the values
it computes.

XLA gets the recipe's annotated module (its constraints are the "gather" option), without the
shardings of loop carries, which XLA drops or renumbers; everything after the annotation is XLA's
work.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec
from jaxlib import _jax

from shardwright.sharding.partition.mesh import Mesh
from shardwright.sharding.partition.shardy import annotated_text
from shardwright.sharding.partition.spec import ShardingSpec
from shardwright.sharding.strategies import INPUT, Recipe
from tests.support.partitioned import coordinates

_LINE = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.+?) (all-gather|all-reduce|all-to-all)\(")


class XlaStep:
    """A recipe compiled by XLA for the cores of `mesh`."""

    def __init__(self, recipe: Recipe, mesh: Mesh) -> None:
        loops = {i for i, op in enumerate(recipe.graph.walk()) if op.name == "loop"}
        self.specs = {key: spec for key, spec in recipe.specs.items() if key[0] not in loops}
        self.recipe = recipe
        shape = tuple(mesh.sizes.values())
        devices = np.array(jax.devices("cpu")[: mesh.num_cores])
        self.mesh = JaxMesh(devices.reshape(shape), mesh.names)
        self.program = _compile(annotated_text(recipe.graph, mesh, self.specs), devices)

    def collectives(self) -> Counter[tuple[str, int, bool]]:
        """(kind, elements, in a loop) of every operand of every collective; combined ones apart."""
        found: Counter[tuple[str, int, bool]] = Counter()
        entry = False
        for line in self.program.hlo_modules()[0].to_string().splitlines():
            if line.endswith("{") and not line.startswith(" "):
                entry = line.startswith("ENTRY")
            match = _LINE.match(line)
            if match:
                for dims in re.findall(r"\w+\[([\d,]*)\]", match.group(1)):
                    elements = int(np.prod([int(d) for d in dims.split(",") if d], dtype=int))
                    found[(match.group(2), elements, not entry)] += 1
        return found

    def run(self, inputs: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Per output, what each core holds."""
        placed = [
            jax.device_put(array, self._sharding(self.specs[(INPUT, i)]))
            for i, array in enumerate(inputs)
        ]
        results = self.program.execute_sharded(placed).disassemble_into_single_device_arrays()
        return [[np.asarray(part) for part in parts] for parts in results]

    def _sharding(self, spec: ShardingSpec) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*(axes or None for axes in spec.dims)))


def _compile(text: str, devices: np.ndarray) -> Any:
    """An SPMD executable of one partition per device."""
    with mlir.make_ir_context():
        code = io.BytesIO()
        ir.Module.parse(text).operation.write_bytecode(code)
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, len(devices)
    build = options.executable_build_options
    build.num_partitions = len(devices)
    build.use_spmd_partitioning = build.use_shardy_partitioner = True
    # A program runs once. LLVM's own optimizations, which come after all of XLA's, take minutes of
    # a step with experts on some processors.
    build.debug_options.xla_backend_optimization_level = 0
    build.debug_options.xla_llvm_disable_expensive_passes = True
    ids = np.array([[d.id for d in devices]])
    options.device_assignment = xla_client.DeviceAssignment.create(ids)
    client = devices[0].client
    return client.compile_and_load(code.getvalue(), _jax.DeviceList(tuple(devices)), options)


def join(
    parts: list[np.ndarray], spec: ShardingSpec, shape: tuple[int, ...], mesh: Mesh
) -> np.ndarray:
    """The array whose shards by rank are `parts`."""
    whole = np.zeros(shape, parts[0].dtype)
    for rank, part in enumerate(parts):
        at = coordinates(mesh, rank)
        index = []
        for size, axes in zip(part.shape, spec.dims, strict=True):
            position = 0
            for axis in axes:
                position = position * mesh.sizes[axis] + at[axis]
            index.append(slice(position * size, (position + 1) * size))
        whole[tuple(index)] = part
    return whole
