"""A DeviceMesh without processes: names and sizes, seen by rank 0.

It answers what code that builds a model asks of a mesh (slices by name, sizes, ranks, groups); each
of its dims is some axes of the mesh that was made, so that a slice or a flattened dim knows what it
is made of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.compiler.diagnostics import Loc, UsageError
from shardwright.compiler.frontend.pytorch.distribution import Axis


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """A process group: ranks along some axes."""

    axes: tuple[str, ...]
    ranks: int

    def size(self) -> int:
        """How many ranks."""
        return self.ranks

    def rank(self) -> int:
        """Of this process: the first."""
        return 0


@dataclass(frozen=True, slots=True)
class _Dim:
    """A dim by name, and the axes of the whole mesh that it is made of."""

    name: str
    size: int
    axes: tuple[str, ...]


@dataclass(slots=True, eq=False)
class RecordedMesh:
    """`torch.distributed.device_mesh.DeviceMesh` as far as a model's builder reads it.

    `whole` is the mesh that a slice was taken from, `flat` the dims that were flattened, by name.
    """

    device_type: str
    dims: tuple[_Dim, ...]
    is_named: bool
    loc: Loc
    whole: RecordedMesh | None = None
    flat: dict[str, _Dim] = field(default_factory=dict)
    made: list[RecordedMesh] = field(default_factory=list)
    """All meshes of a reading."""

    @classmethod
    def of(
        cls,
        device_type: str,
        shape: Sequence[int],
        names: Sequence[str] | None,
        loc: Loc,
        made: list[RecordedMesh],
    ) -> RecordedMesh:
        """A mesh of a shape, one more of those that were `made`. Raises UsageError
        (SW_TORCH_MESH)."""
        sizes = [int(size) for size in shape]
        if names is not None and len(names) != len(sizes):
            raise _refused(f"{len(sizes)} names", f"{len(names)}: {', '.join(names)}", loc)
        if names is not None and len(set(names)) != len(names):
            raise _refused("names that differ", ", ".join(names), loc)
        if not sizes or min(sizes) < 1:
            raise _refused("sizes of at least 1", str(tuple(sizes)), loc)
        told = list(names) if names is not None else [f"dim{n}" for n in range(len(sizes))]
        dims = tuple(_Dim(n, s, (n,)) for n, s in zip(told, sizes, strict=True))
        made.append(cls(device_type, dims, names is not None, loc, made=made))
        return made[-1]

    @property
    def root(self) -> RecordedMesh:
        """The mesh that was made."""
        return self if self.whole is None else self.whole.root

    @property
    def base(self) -> tuple[Axis, ...]:
        """The axes of the mesh that was made."""
        return tuple(Axis(name=dim.name, size=dim.size) for dim in self.root.dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the mesh that was made which lie in this one."""
        return tuple(axis for dim in self.dims for axis in dim.axes)

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """As PyTorch has it."""
        return tuple(dim.name for dim in self.dims) if self.is_named else None

    @property
    def ndim(self) -> int:
        """How many dims."""
        return len(self.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dims."""
        return tuple(dim.size for dim in self.dims)

    @property
    def mesh(self) -> Any:
        """Ranks as a tensor of the mesh's shape."""
        import torch

        return torch.arange(self.size()).reshape(self.shape)

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Ranks in all, or along a dim."""
        if mesh_dim is None:
            return math.prod(self.shape)
        return self._dim(mesh_dim).size

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Of rank 0: 0 along every dim."""
        if mesh_dim is not None:
            self._dim(mesh_dim)
        return 0

    def get_rank(self) -> int:
        """0."""
        return 0

    def get_coordinate(self) -> list[int]:
        """Of rank 0."""
        return [0] * self.ndim

    def get_group(self, mesh_dim: int | str | None = None) -> RecordedGroup:
        """The group along a dim, the only one where none is named."""
        dim = self._dim(0 if mesh_dim is None else mesh_dim)
        return RecordedGroup(dim.axes, dim.size)

    def get_all_groups(self) -> list[RecordedGroup]:
        """One per dim."""
        return [RecordedGroup(dim.axes, dim.size) for dim in self.dims]

    def __getitem__(self, names: str | Sequence[str]) -> RecordedMesh:
        """The slice of some dims. Raises UsageError (SW_TORCH_MESH) for a name it does not have."""
        wanted = (names,) if isinstance(names, str) else tuple(names)
        dims = tuple(map(self._dim, wanted))
        return RecordedMesh(self.device_type, dims, True, self.loc, self)

    def _flatten(self, mesh_dim_name: str | None = None, *_: Any, **__: Any) -> RecordedMesh:
        """All dims as one, which the whole mesh knows by its name from then on."""
        name = mesh_dim_name or "_".join(dim.name for dim in self.dims)
        dim = _Dim(name, self.size(), self.axes)
        self.root.flat[name] = dim
        return RecordedMesh(self.device_type, (dim,), True, self.loc, self.root)

    def _unflatten(
        self, dim: int | str, mesh_sizes: Sequence[int], mesh_dim_names: Sequence[str], *_: Any
    ) -> RecordedMesh:
        """A mesh with several dims in place of one: another view of the same ranks."""
        parts = list(zip(mesh_dim_names, mesh_sizes, strict=True))
        old = self._dim(dim)
        rows = [
            row for one in self.dims for row in (parts if one == old else [(one.name, one.size)])
        ]
        sizes = [size for _, size in rows]
        if math.prod(sizes) != self.size():
            raise _refused(f"sizes whose product is {old.size}", str(tuple(mesh_sizes)), self.loc)
        names = [name for name, _ in rows]
        return RecordedMesh.of(self.device_type, sizes, names, self.loc, self.root.made)

    def __enter__(self) -> RecordedMesh:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.mesh)

    def _dim(self, which: int | str) -> _Dim:
        if isinstance(which, int):
            return self.dims[which]
        own = {dim.name: dim for dim in self.dims}
        known = {**self.root.flat, **{dim.name: dim for dim in self.root.dims}, **own}
        if which not in known:
            raise _refused(f"one of {', '.join(known)}", repr(which), self.loc)
        return known[which]


def _refused(required: str, got: str, loc: Loc) -> UsageError:
    return UsageError(
        "SW_TORCH_MESH",
        f"a DeviceMesh requires {required}, got {got}",
        loc,
        'init_device_mesh("cpu", (2, 16), mesh_dim_names=("dp_replicate", "dp_shard"))',
    )
