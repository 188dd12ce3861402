"""The ranks a partitioned module is written for: its replica groups as axes of one mesh.

XLA's partitioner and torch-xla write groups as lists of ranks, or as axes of a mesh of their own.
What a list says is in `process_groups.py`; here it is read as digits of the rank's number, and the
ranks become a mesh with one axis per digit that some group uses, so that the rest of the compiler
keeps naming axes. Groups that are no such digits, or leave ranks out, are refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import ImportRuleError, Loc
from shardwright.compiler.frontend.locations import LocationReader
from shardwright.compiler.frontend.mlir import all_ops
from shardwright.compiler.frontend.rules.process_groups import (
    CODE,
    GROUPED,
    ONE,
    PERMUTE,
    Grid,
    MeshAxes,
    Meshes,
    Mode,
    check_ids,
    collective_name,
    ids_of,
    mode_of,
    process_groups,
    shown,
)
from shardwright.compiler.frontend.rules.registry import RefusedError, refuse

Axes = tuple[str, ...]
MANUAL = "sdy.manual_computation"
"""A region for one rank in a module of whole values."""
PARTITION_ID, REPLICA_ID = RANK_IDS = "stablehlo.partition_id", "stablehlo.replica_id"
DECLARED = {"replicas": "mhlo.num_replicas", "partitions": "mhlo.num_partitions"}
"""The attributes of a module that say its grid."""
UNPARTITIONED = "give the unpartitioned module, and the mesh and strategy beside it"


@dataclass(frozen=True, slots=True)
class RankMesh:
    """The ranks of a module, row-major over `axes` (none where collectives are not taken); `meshes`
    are those its groups name, `grid` its replicas and partitions, one of each unless `is_known`.
    """

    axes: MeshAxes = ()
    meshes: Meshes = field(default_factory=dict)
    grid: Grid = ONE
    is_known: bool = False

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return math.prod(size for _, size in self.axes)

    @property
    def names(self) -> Axes:
        """The axes by name."""
        return tuple(name for name, _ in self.axes)

    def size(self, axes: Sequence[str]) -> int:
        """Ranks of a group over `axes`."""
        return math.prod(size for name, size in self.axes if name in axes)

    def groups(self, op: Any) -> np.ndarray | None:
        """The groups of a collective, [groups, ranks per group], in group order; None for all ranks
        of a module that does not say how many. Refuses unequal groups.
        """
        if not self.is_known and ids_of(op, self.meshes) is None:
            return None
        return process_groups(op, self.grid, self.meshes)

    def moves(self, op: Any) -> list[tuple[int, int]]:
        """(source, target) of every move of a permute."""
        found = process_groups(op, self.grid, self.meshes)
        return [(int(source), int(target)) for source, target in found]

    def numbered(self, name: str) -> Axes:
        """The axes whose ranks the op `name` (partition_id or replica_id) numbers; none where
        there is one. Refuses a whole step that runs on several.
        """
        partitions = self.grid.partitions
        count = partitions if name == PARTITION_ID else self.grid.replicas
        if count > 1 and not self.axes:
            short = name.partition(".")[2]
            refuse("NCC_EVRF001", f"{short} requires one rank, got {count}", UNPARTITIONED)
        ends = (1, partitions) if name == PARTITION_ID else (partitions, self.count)
        return tuple(self._between(*ends))

    def runs(self, groups: np.ndarray) -> list[Axes]:
        """The axes of `groups`, major to minor, cut where they leave the order of the mesh."""
        runs: list[Axes] = []
        for stride, size in reversed(digits(groups)):
            for name in self._between(stride, stride * size):
                if runs and self.names.index(runs[-1][-1]) < self.names.index(name):
                    runs[-1] += (name,)
                else:
                    runs.append((name,))
        if self.size([name for run in runs for name in run]) != groups.shape[1]:
            mesh = ", ".join(f"{name}={size}" for name, size in self.axes)
            refuse(
                CODE,
                f"replica groups require whole axes of the mesh {mesh}, got {shown(groups)}",
                "split the axis of the mesh in two",
            )
        return runs

    def _between(self, low: int, high: int) -> list[str]:
        """The axes whose strides lie in [low, high)."""
        found, stride = [], self.count
        for name, size in self.axes:
            stride //= size
            if low <= stride < high:
                found.append(name)
        return found


def read_ranks(module: Any, locations: LocationReader) -> RankMesh:
    """The ranks of `module`, the program of one of them; its context must be entered.

    Raises: ImportRuleError SW_REPLICA_GROUPS at the collective whose groups cannot be.
    """
    ops, meshes = _rank_ops(module), module_meshes(module)
    if not ops or any(op.name == MANUAL for op in all_ops(module)):
        return whole(module, locations)
    with_ids = [(op, locations.read(op.location)) for op in ops if op.name not in RANK_IDS]
    declared = declared_grid(module, locations)
    grid = declared or _least_grid(with_ids, meshes, {op.name for op in ops})
    cuts = {1, grid.count} | ({grid.partitions} if len(with_ids) < len(ops) else set())
    for op, loc in with_ids:
        with _at(loc):
            check_ids(op, grid, meshes)
            if op.name != PERMUTE:
                cuts |= _cuts(op, process_groups(op, grid, meshes))
    axes = _axes(sorted(cuts), with_ids[0][1] if with_ids else None)
    return RankMesh(axes, meshes, grid, grid.count > 1 or declared is not None)


def whole(module: Any, locations: LocationReader) -> RankMesh:
    """The ranks of a module that is a whole step: no axes, collectives of one rank only.

    Raises: ImportRuleError, as `declared_grid`.
    """
    declared = declared_grid(module, locations)
    return RankMesh((), module_meshes(module), declared or ONE, declared is not None)


def declared_grid(module: Any, locations: LocationReader) -> Grid | None:
    """The replicas and partitions that a module says it has; None when it says neither.

    Raises: ImportRuleError SW_REPLICA_GROUPS for what is no count.
    """
    attributes = module.operation.attributes
    counts = {
        name: _count(module, key, attributes[key], locations)
        for name, key in DECLARED.items()
        if key in attributes
    }
    return Grid(**counts) if counts else None


def _count(module: Any, key: str, attribute: Any, locations: LocationReader) -> int:
    from jaxlib.mlir import ir

    value = int(attribute.value) if isinstance(attribute, ir.IntegerAttr) else 0
    if value < 1:
        raise ImportRuleError(
            CODE,
            f"{key} requires an integer of at least 1, got {attribute}",
            _place(module, locations),
            "declare how many replicas and partitions the program runs on, or neither",
        )
    return value


def _place(module: Any, locations: LocationReader) -> Loc:
    """Where a module is; JAX locates only what is in it."""
    own = locations.read(module.operation.location)
    inner = (locations.read(view.operation.location) for view in module.body.operations)
    return own if own.file else next((loc for loc in inner if loc.file), own)


def _least_grid(ops: Sequence[tuple[Any, Loc]], meshes: Meshes, names: Collection[str]) -> Grid:
    """The smallest grid that has every id, of a module that does not declare one. Ranks that only
    global ids count are partitions, unless the module asks for its replica alone.
    """
    counts = dict.fromkeys(Mode, 1)
    for op, loc in ops:
        with _at(loc):
            mode = mode_of(op)
            ids = ids_of(op, meshes)
        if ids is not None:
            counts[mode] = max(counts[mode], 1 + int(ids.max(initial=0)))
    replicas = max(counts[Mode.CROSS_REPLICA], counts[Mode.CROSS_REPLICA_AND_PARTITION])
    grid = Grid(replicas, counts[Mode.CROSS_PARTITION])
    times = -(-counts[Mode.FLATTENED_ID] // grid.count)
    if grid.count == 1 and REPLICA_ID in names and PARTITION_ID not in names:
        return Grid(times, 1)
    return Grid(grid.replicas, grid.partitions * times)


@contextmanager
def _at(loc: Loc) -> Iterator[None]:
    """Gives what is refused inside its location."""
    try:
        yield
    except RefusedError as error:
        raise error.at(loc) from error


def module_meshes(module: Any) -> Meshes:
    """The meshes of a module by name."""
    from jaxlib.mlir.dialects import sdy

    found = {}
    for view in module.body.operations:
        if view.operation.name == "sdy.mesh":
            mesh = sdy.MeshAttr(view.operation.attributes["mesh"])
            axes = [sdy.MeshAxisAttr(axis) for axis in mesh.axes]
            name = view.operation.attributes["sym_name"].value
            sizes = tuple((axis.name, int(axis.size)) for axis in axes)
            found[name] = sizes, tuple(int(n) for n in mesh.device_ids)
    return found


def digits(groups: np.ndarray) -> list[tuple[int, int]]:
    """(stride, size) of every digit of the rank that a group runs through, minor first.

    Refuses groups that are no such digits.
    """
    offsets = groups[0] - groups[0, 0]
    found, block = [], 1
    while block < len(offsets):
        stride = int(offsets[block])
        heads = offsets[::block]
        size = next((m for m, head in enumerate(heads) if head != m * stride), len(heads))
        found.append((stride, size))
        block *= size
    wanted = np.zeros(1, np.int64)
    for stride, size in found:
        wanted = (np.arange(size)[:, None] * stride + wanted).reshape(-1)
    regular = len(wanted) == len(offsets) and (groups - groups[:, :1] == wanted).all()
    if not regular or any(stride < 1 for stride, _ in found):
        refuse(
            CODE,
            "replica groups require ranks at regular distances, the same in every group, got"
            f" {shown(groups)}",
            "order the ranks of a group as a mesh does",
        )
    return found


def _cuts(op: Any, groups: np.ndarray) -> set[int]:
    """Where the axes of an op's groups begin and end. A sum is the same in any order."""
    found = digits(ordered(groups) if op.name == "stablehlo.all_reduce" else groups)
    return {end for stride, size in found for end in (stride, stride * size)}


def _axes(ends: Sequence[int], loc: Loc | None) -> MeshAxes:
    """The mesh of the digits between neighbouring ends, major to minor."""
    sizes = []
    for low, high in itertools.pairwise(ends):
        if high % low:
            raise ImportRuleError(
                CODE,
                "replica groups of one module require digits of one mesh, got strides"
                f" {low} and {high}",
                loc,
                "partition over a mesh whose axes divide each other",
            )
        sizes.append(high // low)
    names = ["rank"] if len(sizes) == 1 else [f"rank_{n}" for n in range(len(sizes))]
    return tuple(zip(names, reversed(sizes), strict=True))


def _rank_ops(module: Any) -> list[Any]:
    """Collectives, and ops that ask for the rank."""
    wanted = (*GROUPED, *RANK_IDS, PERMUTE)
    return [op for op in all_ops(module) if collective_name(op) in wanted]


def ordered(groups: np.ndarray) -> np.ndarray:
    """Groups with their ranks in ascending order."""
    return np.sort(groups, axis=1)
