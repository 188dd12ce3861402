"""Views that lie side by side in memory move as one: halves of a head, parts of a packed row.

Two loads (or stores) whose views differ only in their offset, by exactly the run of their innermost
iter dim, together make runs of twice the length, and short runs are what a DMA is slow at. They
become one load of a value that spans one more iter dim, the coalesced one, and each old value is a
`part` of it; stored values become parts of a `join`, computed straight into its tile. Neither has
code. Numbers per row (`top_k`, statistics) stored side by side are runs of one element.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.codegen.domain import (
    CODELESS,
    PARTS,
    Domain,
    Numbers,
    Rewriting,
    Tensors,
    Value,
)

# Runs of this many bytes reach 0.81 of the DMA rate (hardware.json
# efficiency_by_bytes_per_partition); longer ones are left as they are.
_RUN_BYTES = 2048
_GONE = -1  # number of stores that a coalesced one took over
# Values that do not make a tile of their own where they are computed.
_NO_TILE = (*CODELESS, *PARTS, "load", "load_indexed")


@dataclass(frozen=True, slots=True)
class _Group:
    """Loads or stores by rising offset; each starts `step` elements behind the one before."""

    members: Numbers
    step: int


def coalesce(domain: Domain, roots: Iterable[int], tensors: Tensors) -> tuple[Domain, list[int]]:
    """`domain` with adjacent views of what `roots` need coalesced, and the roots' new numbers."""
    roots = list(roots)
    groups = _groups(domain, domain.slice(roots), tensors)
    return _Coalescer(domain, groups).of(roots) if groups else (domain, roots)


def _groups(domain: Domain, wanted: Iterable[int], tensors: Tensors) -> list[_Group]:
    alike: dict[object, list[int]] = {}
    for n in wanted:
        value, access = domain[n], domain[n].map
        if value.op in ("load", "store") and access is not None:
            strides, terms = frozenset(access.strides.items()), access.offset.terms
            key = (value.op, access.tensor, strides, terms, value.dtype, value.iter_dims)
            alike.setdefault(key, []).append(n)
    found = [_adjacent(domain, members, tensors) for members in alike.values() if len(members) > 1]
    return [group for group in found if group is not None]


def _adjacent(domain: Domain, members: list[int], tensors: Tensors) -> _Group | None:
    """The members as a group, when they continue each other's runs and the runs are short."""
    access = domain[members[0]].access
    # Without an iter dim along the run it is one element: numbers per row, side by side.
    steps = [domain.sizes[a] for a, stride in access.strides.items() if stride == 1] or [1]
    if steps[0] * tensors[access.tensor].dtype.bytes >= _RUN_BYTES:
        return None
    offsets = {domain[n].access.offset.const: n for n in members}
    first = min(offsets)
    if {first + i * steps[0] for i in range(len(members))} != set(offsets):
        return None
    group = _Group(tuple(offsets[o] for o in sorted(offsets)), steps[0])
    return group if _can_coalesce(domain, group) else None


def _can_coalesce(domain: Domain, group: _Group) -> bool:
    """Loads always; stores when every stored value is computed for that place alone."""
    stores = [domain[n] for n in group.members if domain[n].op == "store"]
    sources = [domain[s.inputs[0]] for s in stores]
    numbers = {s.inputs[0] for s in stores}
    users = domain.users()
    return len(numbers) == len(stores) and all(
        v.op not in _NO_TILE
        and v.iter_dims == s.iter_dims
        and v.dtype is sources[0].dtype
        and sum(domain[u].op == "store" for u in users[s.inputs[0]]) == 1
        for s, v in zip(stores, sources, strict=True)
    )


class _Coalescer(Rewriting):
    """Coalesced iter dims are shared by groups of the same length."""

    def __init__(self, domain: Domain, groups: Sequence[_Group]) -> None:
        super().__init__(domain)
        self.group = {n: group for group in groups for n in group.members}
        first = max(domain.sizes, default=-1) + 1
        lengths = sorted({len(g.members) for g in groups})
        self.coalesced = {length: first + i for i, length in enumerate(lengths)}
        self.loads: dict[Numbers, int] = {}

    def of(self, roots: Sequence[int]) -> tuple[Domain, list[int]]:
        """The new domain, and the numbers of `roots` in it."""
        sizes = self.old.sizes | {a: length for length, a in self.coalesced.items()}
        coalesced = self.old.coalesced | set(self.coalesced.values())
        domain = replace(self.run(), sizes=sizes, coalesced=coalesced)
        return domain, sorted({self.number[n] for n in roots} - {_GONE})

    def made(self, n: int, value: Value) -> int:
        """The value, its part of a coalesced load, or for a group's last store a coalesced one."""
        group = self.group.get(n)
        if group is None:
            return self.add(value)
        if value.op == "load":
            return self._part(group, value, group.members.index(n))
        return self._join(group) if n == max(group.members) else _GONE

    def _wide(self, group: _Group, inputs: Numbers) -> Value:
        """The load or store of all members at once."""
        value = self.old.values[group.members[0]]
        iter_dim = self.coalesced[len(group.members)]
        access = replace(value.access, strides={**value.access.strides, iter_dim: group.step})
        return replace(value, inputs=inputs, iter_dims=value.iter_dims | {iter_dim}, map=access)

    def _part(self, group: _Group, value: Value, index: int) -> int:
        if group.members not in self.loads:
            self.loads[group.members] = self.add(self._wide(group, ()))
        attrs: Mapping[str, int] = {"iter_dim": self.coalesced[len(group.members)], "index": index}
        inputs = (self.loads[group.members],)
        return self.add(Value("part", inputs, value.iter_dims, value.dtype, attrs=attrs))

    def _join(self, group: _Group) -> int:
        parts = tuple(self.number[self.old.values[n].inputs[0]] for n in group.members)
        iter_dim = self.coalesced[len(group.members)]
        like = self.values[parts[0]]
        attrs = {"iter_dim": iter_dim}
        join = self.add(Value("join", parts, like.iter_dims | {iter_dim}, like.dtype, attrs=attrs))
        return self.add(self._wide(group, (join,)))
