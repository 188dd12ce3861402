"""The mesh: named axes over the logical NeuronCores, in one fixed order, major to minor.

Ranks are row-major over the axes. `parse_mesh` reads what users write (`dp_shard=32,tp=8`, or a
table of a job file), fills the one axis left to us, and refuses a product that is not the number of
cores of the target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.compiler.diagnostics import ShardingError, did_you_mean

AXES = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
SHARD_AXIS = "dp_shard"  # the one state is spread over first
CONTEXT_AXIS = "cp"  # the sequence is split over
DATA_AXES = ("dp_replicate", "dp_shard", "ep")
"""Samples lie over these; `ep` is the inner part of what users call `dp_shard`."""
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axis names and sizes, major to minor. Build with `make_mesh` or `parse_mesh`.

    `origins` names, per axis, the one it was cut from; empty when nothing was cut.
    """

    axes: tuple[tuple[str, int], ...]
    origins: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """Size per axis, in mesh order."""
        return dict(self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names in mesh order."""
        return tuple(name for name, _ in self.axes)

    @property
    def num_cores(self) -> int:
        """Product of all axes."""
        return math.prod(size for _, size in self.axes)

    def size(self, axes: Sequence[str]) -> int:
        """Product of the sizes of `axes`; axes the mesh does not have count as 1."""
        sizes = self.sizes
        return math.prod(sizes.get(axis, 1) for axis in axes)

    def order(self, axes: Sequence[str]) -> tuple[str, ...]:
        """`axes` without those the mesh lacks, in mesh order."""
        return tuple(name for name in self.names if name in axes)

    def without(self, axis: str) -> Mesh:
        """The mesh of the ranks that share a coordinate along `axis`; of one rank, a data axis."""
        axes = tuple(pair for pair in self.axes if pair[0] != axis)
        return Mesh(axes) if axes else ONE_CORE

    def with_major(self, axis: str, size: int) -> Mesh:
        """The mesh with one more axis, major to all others."""
        origins = (axis, *self.origins) if self.origins else ()
        return Mesh(((axis, size), *self.axes), origins)

    def refined(self, axis: str, atoms: Sequence[int]) -> Mesh:
        """The same ranks with `axis` cut into smaller axes, major first: `tp_0`, `tp_1`.

        Cutting into one atom changes nothing. The product of `atoms` is the size of `axis`.
        """
        assert math.prod(atoms) == self.sizes[axis]
        if len(atoms) < 2:
            return self
        cut = list(zip(self._free_names(axis, len(atoms)), atoms, strict=True))
        axes = [pair for old in self.axes for pair in (cut if old[0] == axis else [old])]
        parts = {name for name, _ in cut}
        origins = (self.origin(axis if name in parts else name) for name, _ in axes)
        return Mesh(tuple(axes), tuple(origins))

    def _free_names(self, axis: str, count: int) -> list[str]:
        """Names for the atoms of `axis` that no other axis has."""
        link = "_"
        while {f"{axis}{link}{i}" for i in range(count)} & {*self.names}:
            link += "_"
        return [f"{axis}{link}{i}" for i in range(count)]

    def origin(self, axis: str) -> str:
        """The axis that `axis` was cut from; itself when it was not."""
        return self.origins[self.names.index(axis)] if self.origins else axis

    def atoms(self, axis: str) -> tuple[str, ...]:
        """The axes `axis` was cut into; itself when it was not."""
        return tuple(name for name in self.names if self.origin(name) == axis)

    def shown(self, axes: Sequence[str]) -> str:
        """`axes` as the user named them: atoms under their whole axis, with the part they take."""
        shown = []
        for name in dict.fromkeys(map(self.origin, axes)):
            atoms = self.atoms(name)
            part, whole = self.size([a for a in atoms if a in axes]), self.size(atoms)
            shown.append(name if part == whole else f"{name}({part} of {whole})")
        return "+".join(shown)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes) or "one core"


ONE_CORE = Mesh(((SHARD_AXIS, 1),))
"""What a mesh without axes stands for: the partitioner takes none."""


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """A mesh of the given axes, ordered. Raises ShardingError for an unknown axis or a size below
    1.
    """
    for name, size in sizes.items():
        if name not in AXES:
            raise ShardingError(
                "SW_MESH_AXIS",
                f"mesh requires axes of {', '.join(AXES)}, got {name}",
                hint=did_you_mean(name, AXES, "rename the axis"),
            )
        if size < 1:
            raise ShardingError(
                "SW_MESH_SIZE", f"mesh.{name} requires a size of at least 1, got {size}"
            )
    return Mesh(tuple((name, sizes[name]) for name in AXES if name in sizes))


def parse_mesh(
    given: str | Mapping[str, int | str],
    cores: int,
    auto: str = "dp_shard",
    per_instance: int = 0,
) -> Mesh:
    """The mesh of `given` over exactly `cores` cores.

    One axis may be "auto" and takes what the others leave; with no axis at all, `auto` takes every
    core. `ep` does not multiply: it is the inner part of `dp_shard`. With the cores of an instance,
    of which there may be several, a refusal says how many would do.
    Raises ShardingError with the printed product when the axes do not fill the cores.
    """
    table = _parse_text(given) if isinstance(given, str) else dict(given)
    experts = _size("ep", table.pop("ep", 1))
    free = [name for name, size in table.items() if size == AUTO] or ([auto] if not table else [])
    if len(free) > 1:
        raise ShardingError(
            "SW_MESH_AUTO", f"mesh requires at most one auto axis, got {', '.join(free)}"
        )
    sizes = {name: _size(name, size) for name, size in table.items() if size != AUTO}
    known = make_mesh(sizes)
    if free:
        sizes[free[0]] = _remainder(known, free[0], cores, per_instance)
    mesh = make_mesh(sizes)
    check_product(mesh, cores, per_instance)
    return _with_experts(mesh, experts)


def _with_experts(mesh: Mesh, experts: int) -> Mesh:
    """The mesh with `ep` taken out of `dp_shard`, as its inner part."""
    ranks = mesh.sizes.get("dp_shard", 1)
    if experts < 1 or ranks % experts:
        raise ShardingError(
            "SW_MESH_EXPERTS",
            f"mesh.ep requires a divisor of dp_shard={ranks}, got {experts}",
            hint="experts lie over the cores that share samples: raise dp_shard or lower ep",
        )
    if experts == 1:
        return mesh
    return make_mesh({**mesh.sizes, "dp_shard": ranks // experts, "ep": experts})


def _parse_text(text: str) -> dict[str, int | str]:
    """`a=1,b=2` as a table."""
    table: dict[str, int | str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, size = (p.strip() for p in part.partition("="))
        if not equals or name in table:
            raise ShardingError(
                "SW_MESH_TEXT", f"mesh requires axis=size once per axis, got {text!r}"
            )
        table[name] = size
    return table


def _size(name: str, size: int | str) -> int:
    """The size as an integer."""
    try:
        return int(size)
    except ValueError:
        raise ShardingError(
            "SW_MESH_SIZE", f"mesh.{name} requires a whole number or auto, got {size!r}"
        ) from None


def _remainder(known: Mesh, axis: str, cores: int, per_instance: int) -> int:
    """What `known` leaves of `cores` for `axis`."""
    if cores % known.num_cores:
        raise ShardingError(
            "SW_MESH_PRODUCT",
            f"mesh {known} with {axis}=auto requires a divisor of {cores} cores, "
            f"got {known.num_cores}",
            hint=_instances(math.lcm(known.num_cores, per_instance), per_instance)
            + f"choose axes whose product divides {cores}",
        )
    return cores // known.num_cores


def _instances(cores: int, per_instance: int) -> str:
    """With how many instances there are so many cores, for a hint; empty where there are not."""
    if not per_instance or cores % per_instance:
        return ""
    return f"--instances {cores // per_instance} has {cores} cores; or "


def check_product(mesh: Mesh, cores: int, per_instance: int = 0) -> None:
    """Refuse a mesh that is not exactly the target. Raises ShardingError."""
    if mesh.num_cores == cores:
        return
    product = " * ".join(str(size) for _, size in mesh.axes)
    raise ShardingError(
        "SW_MESH_PRODUCT",
        f"mesh {mesh} needs {product} = {mesh.num_cores} cores, target has {cores}",
        hint=_instances(mesh.num_cores, per_instance)
        + f"choose sizes whose product is {cores}, or set one axis to auto",
    )
