"""Who takes part in a collective of a module: the process groups of the StableHLO specification.

A module runs on a grid of replicas and partitions; whether the ids in an op's replica groups, or
source-target pairs, are those of replicas, of partitions or of ranks is said by its channel id and
`use_global_device_ids`. This is the one place that knows; the mesh is made of it in `ranks.py`.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.compiler.frontend.mlir import call_target
from shardwright.compiler.frontend.rules.registry import refuse

MeshAxes = tuple[tuple[str, int], ...]
Meshes = Mapping[str, tuple[MeshAxes, tuple[int, ...]]]
"""Per mesh of a module its axes, major to minor, and its ranks where they are not in order."""
CODE = "SW_REPLICA_GROUPS"
PERMUTE = "stablehlo.collective_permute"
FLATTENING = ("stablehlo.all_gather", "stablehlo.all_reduce", "stablehlo.reduce_scatter")
"""Ops that have `use_global_device_ids`."""
RAGGED = "ragged_all_to_all"
"""An exchange of rows in runs of any length. StableHLO has no op for it: a custom call, with groups
and channel in its `backend_config`."""
GROUPED = (
    *FLATTENING,
    "stablehlo.all_to_all",
    "stablehlo.collective_broadcast",
    "mhlo.all_to_all",
    RAGGED,
)


def collective_name(op: Any) -> str:
    """The name of an op; of the custom call that is a collective, its target."""
    return RAGGED if call_target(op) == RAGGED else str(op.name)


def _said(op: Any) -> Any:
    """The attributes that say who takes part in a collective."""
    is_call = collective_name(op) == RAGGED and "backend_config" in op.attributes
    return op.attributes["backend_config"] if is_call else op.attributes


class Mode(enum.Enum):
    """How the processes of a collective are grouped by the ids it names.

    Source: StableHLO specification, "Grouping of processes" (documented).
    """

    CROSS_REPLICA = "cross_replica"
    CROSS_PARTITION = "cross_partition"
    CROSS_REPLICA_AND_PARTITION = "cross_replica_and_partition"
    FLATTENED_ID = "flattened_id"

    @property
    def counted(self) -> str:
        """What the ids are ids of."""
        names = {Mode.CROSS_PARTITION: "partitions", Mode.FLATTENED_ID: "ranks"}
        return names.get(self, "replicas")


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks of a module: rank = replica * `partitions` + partition."""

    replicas: int = 1
    partitions: int = 1

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return self.replicas * self.partitions

    def ids(self, mode: Mode) -> int:
        """How many ids of `mode` there are."""
        counts = {Mode.CROSS_PARTITION: self.partitions, Mode.FLATTENED_ID: self.count}
        return counts.get(mode, self.replicas)

    def ranks(self, mode: Mode, ids: np.ndarray) -> np.ndarray:
        """Process groups of ids, as ranks.

        Across replicas and partitions, a group's ranks are in order of replica, then partition:
        what XLA executes (the specification's formula has partitions outside; the two differ where
        there is more than one of both, in all_gather and reduce_scatter).

        Shapes: ids [groups, ids per group] -> [process groups, ranks per group].
        """
        match mode:
            case Mode.CROSS_REPLICA:
                beside = np.arange(self.partitions)[:, None]
                return _joined(ids[:, None, :] * self.partitions + beside)
            case Mode.CROSS_PARTITION:
                beside = np.arange(self.replicas)[:, None] * self.partitions
                return _joined(ids[:, None, :] + beside)
            case Mode.CROSS_REPLICA_AND_PARTITION:
                whole = ids[:, :, None] * self.partitions + np.arange(self.partitions)
                return whole.reshape(len(ids), -1)
        return ids


ONE = Grid()


def _joined(groups: np.ndarray) -> np.ndarray:
    return groups.reshape(-1, groups.shape[-1])


def mode_of(op: Any) -> Mode:
    """The mode of a collective. Refuses global ids without a channel."""
    is_flat = op.name in FLATTENING and "use_global_device_ids" in op.attributes
    if _channel(op) <= 0:
        if is_flat:
            refuse(
                CODE,
                "use_global_device_ids requires a channel id above 0, got none",
                "give the op a channel_handle, or drop use_global_device_ids",
            )
        return Mode.CROSS_REPLICA
    if op.name not in FLATTENING:
        return Mode.CROSS_PARTITION
    return Mode.FLATTENED_ID if is_flat else Mode.CROSS_REPLICA_AND_PARTITION


def _channel(op: Any) -> int:
    """The channel id of an op; 0 for none."""
    from jaxlib.mlir.dialects import mhlo, stablehlo

    if collective_name(op) == RAGGED:
        said = _said(op)
        return int(said["channel_id"].value) if "channel_id" in said else 0
    if "channel_handle" not in op.attributes:
        return 0
    dialect = mhlo if op.name.startswith("mhlo.") else stablehlo
    return int(dialect.ChannelHandle(op.attributes["channel_handle"]).handle)


def ids_of(op: Any, meshes: Meshes) -> np.ndarray | None:
    """The groups of an op in ids of its mode, [groups, ids per group], None for all in one; of a
    permute (source, target) of every move.

    Refuses groups of unequal size, and axes of a mesh that the module does not have.
    """
    from jaxlib.mlir import ir

    if op.name == PERMUTE:
        return np.array(op.attributes["source_target_pairs"], dtype=np.int64).reshape(-1, 2)
    said = _said(op)
    if "replica_groups" not in said:
        return None
    attribute = said["replica_groups"]
    if not isinstance(attribute, ir.DenseIntElementsAttr):
        return _ids_of_axes(attribute, meshes)
    ids = np.array(attribute, dtype=np.int64)
    if not ids.size:
        return None
    if ids.min() < 0:
        refuse(CODE, f"replica groups require equal sizes, got {shown(ids)}", "pad the groups")
    return ids


def process_groups(op: Any, grid: Grid, meshes: Meshes) -> np.ndarray:
    """What `ids_of` gives, as ranks of `grid`: [process groups, ranks per group].

    The ids are taken as they are; `check_ids` is for who reads the module as a whole.
    """
    mode, ids = mode_of(op), ids_of(op, meshes)
    return grid.ranks(mode, np.arange(grid.ids(mode)).reshape(1, -1) if ids is None else ids)


def check_ids(op: Any, grid: Grid, meshes: Meshes) -> None:
    """Refuse ids that `grid` does not have, and groups without every id of their mode once."""
    mode, ids = mode_of(op), ids_of(op, meshes)
    count = grid.ids(mode)
    if ids is None:
        return
    if op.name == PERMUTE:
        required, is_right = f"{mode.counted} below {count}", int(ids.max(initial=0)) < count
    else:
        required = f"each of {count} {mode.counted} once"
        is_right = ids.size == count and sorted(ids.flat) == list(range(count))
    if not is_right:
        name = collective_name(op).rpartition(".")[2]
        refuse(
            CODE,
            f"{name} ({mode.value}) requires {required}, got {shown(ids)}",
            "ids without a channel_handle are replicas; compile all ranks of one program, and"
            " declare num_replicas and num_partitions",
        )


def _ids_of_axes(attribute: Any, meshes: Meshes) -> np.ndarray:
    """The groups over axes of a mesh, parts of axes included."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    given = stablehlo.ReplicaGroupMeshAxesAttr(attribute)
    name = ir.FlatSymbolRefAttr(given.mesh).value if "@" in str(given.mesh) else ""
    if name not in meshes:
        refuse(CODE, f"replica groups require a mesh of the module, got {attribute}")
    axes, order = meshes[name]
    refs = [(ref.name, *_span(ref, dict(axes))) for ref in map(stablehlo.AxisRefAttr, given.axes)]
    cut: list[tuple[str, int, int]] = []  # axis, what is major to a part of it, size of the part
    for axis, size in axes:
        ends = {1, size}.union(*(ends for name, *ends in refs if name == axis))
        cut += [(axis, low, high // low) for low, high in itertools.pairwise(sorted(ends))]
    inner = [
        n
        for name, low, high in refs
        for n, (axis, before, _) in enumerate(cut)
        if axis == name and low <= before < high
    ]
    outer = [n for n in range(len(cut)) if n not in inner]
    count = math.prod(size for *_, size in cut)
    ranks = np.array(order or range(count)).reshape([size for *_, size in cut])
    width = math.prod(cut[n][2] for n in inner)
    return ranks.transpose(outer + inner).reshape(-1, width)


def _span(ref: Any, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Where the part of an axis that a reference names begins and ends, as products of sizes."""
    from jaxlib.mlir.dialects import stablehlo

    if ref.sub_axis_info is None:
        return 1, sizes.get(ref.name, 1)
    part = stablehlo.SubAxisInfoAttr(ref.sub_axis_info)
    return int(part.pre_size), int(part.pre_size) * int(part.size)


def shown(ids: np.ndarray) -> str:
    """Groups as text, shortened."""
    text = str(ids.tolist())
    return text if len(text) < 120 else text[:117] + "..."
