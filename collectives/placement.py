"""Where the ranks of a mesh lie: mesh axes on the cores of a chip, the torus of an instance, and
instances.

A placement only permutes ranks: groups, values and programs do not change, but which chips and
links a group uses does. Axes are laid out from the innermost outwards. `linear` numbers cores in
order. `torus` uses that rows and columns of 2 and 4 chips are hypercubes: steps along every axis
are bits of one Gray code, so the chips of a group are neighbours and close a ring, whichever axis
it is and whatever lies inside of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.collectives.groups.cycles import chip_cycles
from shardwright.collectives.ops import LINEAR, TORUS, CollectiveError, ReplicaGroups, axis_strides
from shardwright.collectives.topology import IntArray, Topology


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """`slots[rank]` is the core, as `topology` numbers them, that a rank of the mesh runs on."""

    kind: str  # linear also where there is no torus that the axes divide into
    order: tuple[str, ...]  # axes from the outermost to the innermost
    slots: IntArray
    topology: Topology
    why: str

    def groups(self, mesh: Mapping[str, int], axes: Sequence[str]) -> ReplicaGroups:
        """The groups over `axes` as cores, in group order."""
        groups = np.asarray(ReplicaGroups.from_axes(mesh, axes).groups)
        return ReplicaGroups(tuple(map(tuple, self.slots[groups].tolist())))


def place_mesh(name: str, mesh: Mapping[str, int], topology: Topology) -> Placement:
    """The placement called `name`: `torus`, `linear`, or either with an order of axes from the
    outermost to the innermost: `tp,dp_shard`, `linear:tp,dp_shard`.

    Raises CollectiveError for an order that does not name every axis of the mesh once.
    """
    kind, given = read_placement(name)
    order = given or tuple(mesh)
    wanted = sorted(axis for axis, size in mesh.items() if size > 1 or axis in order)
    if kind not in (TORUS, LINEAR) or sorted(order) != wanted:
        raise CollectiveError(
            f"a placement requires {TORUS}, {LINEAR}, or the axes {', '.join(wanted)} in some"
            f" order, got {name!r}"
        )
    laid_out = {axis: mesh[axis] for axis in order}
    coordinates = _coordinates(mesh, laid_out)
    inside = _inside(laid_out, topology) if kind == TORUS else None
    if inside is not None:
        slots = _gray_slots(coordinates, inside, topology)
        why = "steps along an axis are steps between neighbouring chips"
        return Placement(TORUS, order, slots, topology, why)
    why = "cores in the order of their numbers"
    if kind == TORUS:
        why += f": {_why_linear(topology)}"
    strides = axis_strides(laid_out)
    slots = sum((coordinates[a] * strides[a] for a in order), np.zeros(1, np.int64))
    return Placement(LINEAR, order, slots, topology, why)


def read_placement(name: str) -> tuple[str, tuple[str, ...]]:
    """(kind, axes from the outermost to the innermost) of a name; no axes mean those of the
    mesh."""
    kind, colon, rest = name.partition(":")
    if not colon:
        kind, rest = (name, "") if name in (TORUS, LINEAR) else (TORUS, name)
    return kind.strip(), tuple(part.strip() for part in rest.split(",") if part.strip())


def with_atoms(name: str, atoms: Callable[[str], Sequence[str]]) -> str:
    """`name` for a mesh some axes of which were cut into `atoms`."""
    kind, order = read_placement(name)
    if not order:
        return name
    return f"{kind}:{','.join(atom for axis in order for atom in atoms(axis))}"


def _coordinates(mesh: Mapping[str, int], order: Mapping[str, int]) -> dict[str, IntArray]:
    """The coordinate of every rank along each axis."""
    strides, ranks = axis_strides(mesh), np.arange(math.prod(mesh.values()))
    return {axis: ranks // strides[axis] % mesh[axis] for axis in order}


def _inside(order: Mapping[str, int], topology: Topology) -> dict[str, int] | None:
    """How much of each axis lies inside an instance; None when that is no power of two, or the
    torus has a side that is not 1, 2 or 4."""
    if not _is_hypercube(topology):
        return None
    room, found = topology.ranks_per_instance, dict.fromkeys(order, 1)
    for axis in reversed(list(order)):
        found[axis] = math.gcd(order[axis], room)
        if not _is_power(found[axis]) or (found[axis] < room and found[axis] < order[axis]):
            return None
        room //= found[axis]
    return found


def _is_hypercube(topology: Topology) -> bool:
    """Whether the cores of an instance are the corners of one."""
    return _is_power(topology.ranks_per_chip) and set(topology.shape) <= {1, 2, 4}


_NO_TORUS = {
    "ring": "the chips of an instance form a ring, no torus",
    "line": "the chips of an instance form a line, no torus",
    "switch": "the chips of an instance are behind switches, no torus",
}
"""Machines by the name of their topology."""


def _why_linear(topology: Topology) -> str:
    """Why axes are not laid out on the torus: the machine has none of that kind, or they do not
    divide into what it has."""
    if _is_hypercube(topology):
        what = "the torus" if topology.name == "torus" else "the chips of an instance"
        return f"the axes do not divide into {what}"
    sides = " x ".join(map(str, topology.shape))
    odd = f"a torus of {sides} chips of {topology.ranks_per_chip} cores is no hypercube"
    return _NO_TORUS.get(topology.name, odd)


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


def _gray_slots(
    coordinates: Mapping[str, IntArray], inside: Mapping[str, int], topology: Topology
) -> IntArray:
    """The inner part of each coordinate as Gray code: one bit per step. The bits of all axes are
    the core's address in the hypercube of the instance; the outer parts number the instance."""
    address = instance = np.zeros(1, np.int64)
    width = 0
    for axis in reversed(list(inside)):
        inner = coordinates[axis] % inside[axis]
        address = address + (_gray(inner) << width)
        width += inside[axis].bit_length() - 1
    for axis in inside:
        outer = coordinates[axis] // inside[axis]
        instance = instance * (int(outer.max()) + 1) + outer
    core, rest = address % topology.ranks_per_chip, address // topology.ranks_per_chip
    chip, stride = np.zeros(1, np.int64), 1
    for side in reversed(topology.shape):
        chip, rest, stride = chip + stride * _gray(rest % side), rest // side, stride * side
    local = chip * topology.ranks_per_chip + core
    return instance * topology.ranks_per_instance + local


def _gray(number: IntArray) -> IntArray:
    """The Gray code of a number, 0, 1, 3, 2 in order; up to 3 also the number of a Gray code."""
    return number ^ (number >> 1)


def where(placement: Placement, mesh: Mapping[str, int], axes: Sequence[str]) -> str:
    """Where the first group over `axes` lies, for reports."""
    members, topology = np.asarray(placement.groups(mesh, axes).groups[0]), placement.topology
    instances = np.unique(topology.instance_of(members))
    first = members[topology.instance_of(members) == instances[0]]
    text = _shape(tuple(np.unique(topology.chip_of(first)).tolist()), topology)
    return text if len(instances) == 1 else f"{text} in each of {len(instances)} instances"


def _shape(chips: tuple[int, ...], topology: Topology) -> str:
    """How many chips, and whether steps of their ring are steps between neighbours."""
    if len(chips) == 1:
        return "1 chip"
    near = topology.neighbours()
    cycles = chip_cycles(topology, chips)
    order = cycles[0]
    far = sum(b not in near[a] for a, b in zip(order, (*order[1:], order[0]), strict=True))
    if far:
        return f"{len(chips)} chips apart"
    if len(chips) == 2:
        return "2 neighbours"
    return f"{'2 rings' if len(cycles) > 1 else 'a ring'} through {len(chips)} chips"
