"""The ranks a partitioned module is written for: its replica groups as axes of one mesh.

XLA's partitioner and torch-xla write groups as lists of ranks, or as axes of a mesh of their own.
Every list is read as digits of the rank's number; the ranks become a mesh with one axis per digit
that some group uses, so that the rest of the compiler keeps naming axes. Groups that are no such
digits, or leave ranks out, are refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from compiler.diagnostics import ImportRuleError, Loc
from compiler.frontend.locations import LocationReader
from compiler.frontend.rules.registry import RefusedError, refuse

Axes = tuple[str, ...]
MeshAxes = tuple[tuple[str, int], ...]
Meshes = Mapping[str, tuple[MeshAxes, tuple[int, ...]]]
"""Per mesh of a module its axes, major to minor, and its ranks where they are not in order."""
GROUPED = (
    "stablehlo.all_gather",
    "stablehlo.all_reduce",
    "stablehlo.all_to_all",
    "stablehlo.collective_broadcast",
    "stablehlo.reduce_scatter",
    "mhlo.all_to_all",
)
PERMUTE = "stablehlo.collective_permute"
RANK_IDS = ("stablehlo.partition_id", "stablehlo.replica_id")
CODE = "SW_REPLICA_GROUPS"


@dataclass(frozen=True, slots=True)
class RankMesh:
    """The ranks of a module, row-major over `axes`; `meshes` are those its groups name, `numbered`
    the op that gives a rank its number (the other one gives 0).
    """

    axes: MeshAxes = ()
    meshes: Meshes = field(default_factory=dict)
    numbered: str = ""

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

    def groups(self, attribute: Any) -> np.ndarray:
        """Replica groups, [groups, ranks per group], in group order. Refuses unequal groups."""
        found = _groups(attribute, self.meshes)
        return np.arange(self.count).reshape(1, -1) if found is None else found

    def runs(self, groups: np.ndarray) -> list[Axes]:
        """The axes of `groups`, major to minor, cut where they leave the order of the mesh."""
        runs: list[Axes] = []
        for stride, size in reversed(digits(groups)):
            for name in self._between(stride, stride * size):
                if runs and self.names.index(runs[-1][-1]) < self.names.index(name):
                    runs[-1] += (name,)
                else:
                    runs.append((name,))
        return runs

    def _between(self, low: int, high: int) -> list[str]:
        """The axes whose strides lie in [low, high)."""
        found, stride = [], self.count
        for name, size in self.axes:
            stride //= size
            if low <= stride < high:
                found.append(name)
        return found


ALONE = RankMesh()


def read_ranks(module: Any, locations: LocationReader) -> RankMesh:
    """The ranks of `module`, whose context must be entered; `ALONE` without collectives.

    Raises: ImportRuleError SW_REPLICA_GROUPS at the collective whose groups cannot be.
    """
    ops = _rank_ops(module)
    meshes = module_meshes(module)
    declared = _declared(module)
    lists = []
    highest = max((int(pairs_of(op).max(initial=0)) for op in ops if op.name == PERMUTE), default=0)
    for op in ops:
        loc = locations.read(op.location)
        found = _read(op, meshes, loc) if op.name in GROUPED else None
        if found is not None:
            lists.append((found, loc))
            highest = max(highest, int(found.max()))
    cuts, count = {1}, declared or 1 + highest
    for found, loc in lists:
        cuts |= _cuts(found, count, loc)
    where = lists[0][1] if lists else None
    axes = _axes(sorted(cuts | {count}), where) if ops else ()
    return RankMesh(axes, meshes, _numbered(module, ops))


def pairs_of(op: Any) -> np.ndarray:
    """(source, target) of every move of a permute, [moves, 2]."""
    return np.array(op.attributes["source_target_pairs"]).reshape(-1, 2)


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
            f" {_shown(groups)}",
            "order the ranks of a group as a mesh does",
        )
    return found


def _cuts(groups: np.ndarray, count: int, loc: Loc) -> set[int]:
    """Where the axes of a list of groups begin and end."""
    try:
        if sorted(groups.reshape(-1).tolist()) != list(range(count)):
            refuse(
                CODE,
                f"replica groups require each of {count} ranks once, got {_shown(groups)}",
                "compile all partitions of one program, as the partitioner wrote it",
            )
        return {end for stride, size in digits(groups) for end in (stride, stride * size)}
    except RefusedError as error:
        raise ImportRuleError(error.code, str(error), loc, error.hint) from error


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
    from jaxlib.mlir import ir

    found: list[Any] = []

    def visit(op: Any) -> Any:
        if op.name in GROUPED or op.name in RANK_IDS or op.name == PERMUTE:
            found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def _read(op: Any, meshes: Meshes, loc: Loc) -> np.ndarray | None:
    """The groups of an op; None for all ranks. A sum is the same in any order."""
    try:
        groups = _groups(op.attributes["replica_groups"], meshes)
    except RefusedError as error:
        raise ImportRuleError(error.code, str(error), loc, error.hint) from error
    return groups if op.name != "stablehlo.all_reduce" or groups is None else ordered(groups)


def ordered(groups: np.ndarray) -> np.ndarray:
    """Groups with their ranks in ascending order."""
    return np.sort(groups, axis=1)


def _groups(attribute: Any, meshes: Meshes) -> np.ndarray | None:
    """The groups of an attribute, [groups, ranks]; None for all ranks."""
    from jaxlib.mlir import ir

    if not isinstance(attribute, ir.DenseIntElementsAttr):
        return _groups_of_axes(attribute, meshes)
    groups = np.array(attribute, dtype=np.int64)
    if not groups.size:
        return None
    if groups.min() < 0:
        refuse(CODE, f"replica groups require equal sizes, got {_shown(groups)}", "pad the groups")
    return groups


def _groups_of_axes(attribute: Any, meshes: Meshes) -> np.ndarray:
    """The groups over axes of a mesh, parts of axes included."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    given = stablehlo.ReplicaGroupMeshAxesAttr(attribute)
    name = ir.FlatSymbolRefAttr(given.mesh).value if "@" in str(given.mesh) else ""
    if name not in meshes:
        refuse(CODE, f"replica groups require a mesh of the module, got {attribute}")
    axes, order = meshes[name]
    cut: list[tuple[str, int, int]] = []  # axis, what is major to a part of it, size of the part
    for axis, size in axes:
        ends = {1, size}
        for ref in map(stablehlo.AxisRefAttr, given.axes):
            if ref.name == axis and ref.sub_axis_info is not None:
                part = stablehlo.SubAxisInfoAttr(ref.sub_axis_info)
                ends |= {int(part.pre_size), int(part.pre_size) * int(part.size)}
        cut += [(axis, low, high // low) for low, high in itertools.pairwise(sorted(ends))]
    inner = [n for ref in map(stablehlo.AxisRefAttr, given.axes) for n in _parts(cut, ref)]
    outer = [n for n in range(len(cut)) if n not in inner]
    count = math.prod(size for *_, size in cut)
    ranks = np.array(order or range(count)).reshape([size for *_, size in cut])
    width = math.prod(cut[n][2] for n in inner)
    return ranks.transpose(outer + inner).reshape(-1, width)


def _parts(cut: Sequence[tuple[str, int, int]], ref: Any) -> list[int]:
    """The parts of axes that a reference names."""
    from jaxlib.mlir.dialects import stablehlo

    low, high = 1, math.inf
    if ref.sub_axis_info is not None:
        part = stablehlo.SubAxisInfoAttr(ref.sub_axis_info)
        low, high = int(part.pre_size), int(part.pre_size) * int(part.size)
    return [
        n for n, (axis, before, _) in enumerate(cut) if axis == ref.name and low <= before < high
    ]


def _declared(module: Any) -> int:
    """How many ranks the module says it has; 0 when it does not say."""
    counts = _counts(module)
    if len([n for n in counts.values() if n > 1]) > 1:
        raise ImportRuleError(
            CODE,
            "a module requires replicas or partitions, got"
            f" {counts['replica']} and {counts['partition']}",
            hint="partition over all cores: num_replicas 1",
        )
    return max(counts.values()) if max(counts.values()) > 1 else 0


def _counts(module: Any) -> dict[str, int]:
    attributes = module.operation.attributes
    keys = {kind: f"mhlo.num_{kind}s" for kind in ("partition", "replica")}
    return {
        kind: int(attributes[key].value) if key in attributes else 1 for kind, key in keys.items()
    }


def _numbered(module: Any, ops: Sequence[Any]) -> str:
    """The op that numbers ranks: what the module says, else what it asks for."""
    counts = _counts(module)
    asked = {op.name for op in ops} & {*RANK_IDS}
    said = [f"stablehlo.{kind}_id" for kind, count in counts.items() if count > 1]
    if said or len(asked) < 2:
        return next(iter(said or asked), "")
    return RANK_IDS[0] if any("channel_handle" in op.attributes for op in ops) else RANK_IDS[1]


def _shown(groups: np.ndarray) -> str:
    text = str(groups.tolist())
    return text if len(text) < 120 else text[:117] + "..."
