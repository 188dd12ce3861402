"""Who is wired to whom: chips of an instance on a grid of directed links or behind switches,
instances joined by EFA devices.

All instances are alike, so link arrays describe one instance; a global link id is `instance *
num_links + link`. Rates and latencies are plain numbers given by the caller, who knows the machine.
Rings over a topology are in `groups/cycles.py`, what moves over it in `schedule.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from shardwright.collectives.ops import CollectiveError

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """Ranks, chips and directed links of `num_instances` equal instances. Compared by identity.

    Rank r sits on instance `r // ranks_per_instance`, chip `r % ranks_per_instance //
    ranks_per_chip`; chips are numbered row-major over `shape` (documented for trn1: driver v2 and
    the runtime performance page). Ranks of one chip talk through its memory and use no link. A move
    between instances leaves by the EFA device nearest to the source chip and arrives by the one
    nearest to the target chip.

    Shapes: link arrays [num_links]; `routes` [chips, chips, longest route] of link numbers, padded
    with -1; `efa_out` and `efa_in` [chips], -1 without EFA. Chip -1 as the end of a link is a
    switch or the network between instances.
    Units: `bytes_per_s` per direction; `latency_ps` is wire time on top of the hop time in
    `CollectiveCosts`.
    """

    name: str
    shape: tuple[int, ...]
    ranks_per_chip: int
    num_instances: int
    link_source: IntArray
    link_target: IntArray
    bytes_per_s: IntArray
    latency_ps: IntArray
    is_efa: BoolArray
    routes: IntArray
    efa_out: IntArray
    efa_in: IntArray

    @property
    def num_chips(self) -> int:
        """Chips of one instance."""
        return math.prod(self.shape)

    @property
    def num_links(self) -> int:
        """Directed links of one instance, EFA devices included (one per direction)."""
        return len(self.bytes_per_s)

    @property
    def ranks_per_instance(self) -> int:
        """Ranks of one instance."""
        return self.num_chips * self.ranks_per_chip

    @property
    def num_ranks(self) -> int:
        """Ranks of all instances."""
        return self.num_instances * self.ranks_per_instance

    def instance_of(self, ranks: IntArray) -> IntArray:
        """Instance of each rank."""
        return ranks // self.ranks_per_instance

    def chip_of(self, ranks: IntArray) -> IntArray:
        """Chip of each rank inside its instance."""
        return ranks % self.ranks_per_instance // self.ranks_per_chip

    def route(self, sources: IntArray, targets: IntArray) -> IntArray:
        """Global link ids each move crosses, [moves, longest route], padded with -1.

        Raises CollectiveError when a move leaves an instance that has no EFA.
        """
        near, far = self.instance_of(sources), self.instance_of(targets)
        chip_s, chip_t = self.chip_of(sources), self.chip_of(targets)
        links = np.full((len(sources), max(2, self.routes.shape[2])), -1, dtype=np.int64)
        links[:, : self.routes.shape[2]] = self.routes[chip_s, chip_t]
        links = np.where(links >= 0, links + (near * self.num_links)[:, None], -1)
        away = near != far
        if away.any():
            if self.efa_out[0] < 0:
                raise CollectiveError(
                    f"groups across instances require EFA, got {self.name} without EFA devices"
                )
            links[away] = -1
            links[away, 0] = self.efa_out[chip_s[away]] + near[away] * self.num_links
            links[away, 1] = self.efa_in[chip_t[away]] + far[away] * self.num_links
        return links

    def neighbours(self) -> dict[int, tuple[int, ...]]:
        """Chips one link away from each chip, ascending; behind switches all others are."""
        inside = ~self.is_efa
        if (self.link_source[inside] < 0).any():
            everyone = range(self.num_chips)
            return {chip: tuple(c for c in everyone if c != chip) for chip in everyone}
        table: dict[int, list[int]] = {chip: [] for chip in range(self.num_chips)}
        for a, b in zip(self.link_source[inside], self.link_target[inside], strict=True):
            table[int(a)].append(int(b))
        return {chip: tuple(sorted(found)) for chip, found in table.items()}


class Tier(TypedDict, total=False):
    """What every builder takes besides chips and links: instances joined by EFA, and latencies.

    Units: `efa_bytes_per_s` is the sum over the devices of one instance, per direction; latencies
    in picoseconds.
    """

    instances: int
    efa_bytes_per_s: int
    efa_devices: int
    efa_latency_ps: int
    link_latency_ps: int


def torus(
    *sides: int, ranks_per_chip: int, link_bytes_per_s: int | Sequence[int], **tier: Unpack[Tier]
) -> Topology:
    """Instances of chips on a grid, wired to their neighbours along every side, modulo.

    Units: `link_bytes_per_s` per directed link, one number or one per side.
    Raises CollectiveError for sizes that make no machine.
    Source: documented: trn1 and trn2 architecture pages (4x4; the UltraServer has 4x4x4).
    """
    return _build(
        _Fabric("torus", sides, _rates(link_bytes_per_s, sides), True), ranks_per_chip, tier
    )


def ring(
    chips: int, *, ranks_per_chip: int, link_bytes_per_s: int, **tier: Unpack[Tier]
) -> Topology:
    """Instances of `chips` chips in a closed ring; arguments as in `torus`."""
    return _build(_Fabric("ring", (1, chips), (link_bytes_per_s,) * 2, True), ranks_per_chip, tier)


def line(
    chips: int, *, ranks_per_chip: int, link_bytes_per_s: int, **tier: Unpack[Tier]
) -> Topology:
    """Instances of `chips` chips in an open line; arguments as in `torus`."""
    return _build(_Fabric("line", (1, chips), (link_bytes_per_s,) * 2, False), ranks_per_chip, tier)


def unlinked(*, ranks_per_chip: int, **tier: Unpack[Tier]) -> Topology:
    """Instances of one chip without links; EFA arguments as in `torus`."""
    return _build(_Fabric("unlinked", (1, 1), (0, 0), False), ranks_per_chip, tier)


def switched(
    chips: int,
    levels: Sequence[tuple[int, int]],
    *,
    ranks_per_chip: int,
    **tier: Unpack[Tier],
) -> Topology:
    """Instances of `chips` chips behind switches that never block.

    `levels` are (chips of a domain, bytes per second of a chip's port, one direction), from the
    smallest domain to all chips; two chips talk through the ports of the smallest domain they
    share.
    Raises CollectiveError for levels that do not nest or do not reach all chips.
    """
    domains = tuple(int(size) for size, _ in levels)
    nested = all(b % a == 0 for a, b in pairwise(domains))
    if not domains or domains[-1] != chips or not nested:
        raise CollectiveError(
            f"switch levels require domains that divide each other up to all {chips} chips, got"
            f" {list(domains)}"
        )
    fabric = _Fabric("switch", (chips,), tuple(rate for _, rate in levels), False, domains)
    return _build(fabric, ranks_per_chip, tier)


@dataclass(frozen=True, slots=True)
class _Fabric:
    """Chips of an instance and how they are wired: a grid, or domains of switches."""

    name: str
    shape: tuple[int, ...]
    rates: tuple[int, ...]  # per side of the grid, or per level of switches
    wrap: bool
    domains: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Wires:
    """Directed links inside an instance, each end a chip or -1 for a switch, and their routes."""

    ends: list[tuple[int, int]]
    rates: list[int]
    routes: IntArray


def _rates(given: int | Sequence[int], sides: Sequence[int]) -> tuple[int, ...]:
    """One rate per side."""
    rates = (given,) * len(sides) if isinstance(given, int) else tuple(given)
    if len(rates) != len(sides):
        raise CollectiveError(f"a torus of {len(sides)} sides requires as many rates, got {rates}")
    return rates


_ALONE = Tier(instances=1, efa_bytes_per_s=0, efa_devices=0, efa_latency_ps=0, link_latency_ps=0)


def _build(fabric: _Fabric, ranks_per_chip: int, tier: Tier) -> Topology:
    return _built(fabric, ranks_per_chip, **(_ALONE | tier))


@lru_cache(maxsize=64)
def _built(
    fabric: _Fabric,
    ranks_per_chip: int,
    *,
    instances: int,
    efa_bytes_per_s: int,
    efa_devices: int,
    efa_latency_ps: int,
    link_latency_ps: int,
) -> Topology:
    """The one Topology of these numbers: topologies are compared by identity."""
    _check(fabric, ranks_per_chip, instances, efa_devices, efa_bytes_per_s)
    chips = math.prod(fabric.shape)
    wires = _switch_wires(fabric) if fabric.domains else _grid_wires(fabric)
    device_of = np.arange(chips) * efa_devices // chips if efa_devices else np.full(chips, -1)
    first = [int(np.argmax(device_of == d)) for d in range(efa_devices)]
    ends = wires.ends + [(chip, -1) for chip in first] + [(-1, chip) for chip in first]
    inside = len(wires.ends)
    is_efa = np.arange(len(ends)) >= inside
    efa_rate = efa_bytes_per_s // efa_devices if efa_devices else 0
    table = np.array(ends, dtype=np.int64).reshape(-1, 2)
    has = device_of >= 0
    return Topology(
        name=fabric.name,
        shape=fabric.shape,
        ranks_per_chip=ranks_per_chip,
        num_instances=instances,
        link_source=table[:, 0],
        link_target=table[:, 1],
        bytes_per_s=np.array(wires.rates + [efa_rate] * 2 * efa_devices, dtype=np.int64),
        latency_ps=np.where(is_efa, efa_latency_ps, link_latency_ps).astype(np.int64),
        is_efa=is_efa,
        routes=wires.routes,
        efa_out=np.where(has, inside + device_of, -1),
        efa_in=np.where(has, inside + efa_devices + device_of, -1),
    )


def _check(fabric: _Fabric, per_chip: int, instances: int, devices: int, efa: int) -> None:
    sizes = {"chips": min(fabric.shape), "ranks_per_chip": per_chip, "instances": instances}
    if math.prod(fabric.shape) > 1:  # a chip alone has no links, and so no rate
        sizes["link_bytes_per_s"] = min(fabric.rates)
    bad = {k: v for k, v in sizes.items() if v < 1}
    if bad:
        raise CollectiveError(f"a topology requires sizes and rates of at least 1, got {bad}")
    if (devices > 0) != (efa > 0) or devices < 0:
        raise CollectiveError(
            f"EFA requires both devices and bytes per second, got {devices} devices and {efa} B/s"
        )


def _switch_wires(fabric: _Fabric) -> _Wires:
    """A port out and a port in per chip and level; the smallest common domain carries a move."""
    (chips,) = fabric.shape
    ends: list[tuple[int, int]] = []
    for _ in fabric.domains:
        ends += [(chip, -1) for chip in range(chips)] + [(-1, chip) for chip in range(chips)]
    routes = np.full((chips, chips, 2), -1, dtype=np.int64)
    a, b = np.divmod(np.arange(chips * chips), chips)
    for level in reversed(range(len(fabric.domains))):
        near = (a // fabric.domains[level] == b // fabric.domains[level]) & (a != b)
        base = 2 * chips * level
        routes[a[near], b[near]] = np.stack([base + a, base + chips + b], axis=1)[near]
    rates = [rate for rate in fabric.rates for _ in range(2 * chips)]
    return _Wires(ends, rates, routes)


def _grid_wires(fabric: _Fabric) -> _Wires:
    """Links of a grid, each once, in order of source chip and from the last side to the first."""
    found: dict[tuple[int, int], int] = {}
    for chip in range(math.prod(fabric.shape)):
        place = _place(chip, fabric.shape)
        for side in reversed(range(len(fabric.shape))):
            for step in (1, -1):
                moved = place[side] + step
                inside = 0 <= moved < fabric.shape[side]
                other = _chip(_with(place, side, moved % fabric.shape[side]), fabric.shape)
                if (inside or fabric.wrap) and other != chip:
                    found.setdefault((chip, other), fabric.rates[side])
    return _Wires(list(found), list(found.values()), _grid_routes(fabric, list(found)))


def _grid_routes(fabric: _Fabric, pairs: Sequence[tuple[int, int]]) -> IntArray:
    """Links between any two chips: along the last side first (the row), then the others, the
    shorter way round, ties upwards.

    Source: inferred. Routing in the torus is not documented; with ties upwards the mesh all-reduce
    reproduces the published 8-rank trn1 curve from 1 KiB to 1 MiB (docs/network.md).
    """
    number = {pair: i for i, pair in enumerate(pairs)}
    chips = math.prod(fabric.shape)
    table = [[_hops(a, b, fabric) for b in range(chips)] for a in range(chips)]
    longest = max(len(hops) for row in table for hops in row)
    routes = np.full((chips, chips, longest), -1, dtype=np.int64)
    for a in range(chips):
        for b in range(chips):
            for i, hop in enumerate(table[a][b]):
                routes[a, b, i] = number[hop]
    return routes


def _hops(a: int, b: int, fabric: _Fabric) -> list[tuple[int, int]]:
    """Pairs of neighbours on the way from `a` to `b`."""
    place, goal = _place(a, fabric.shape), _place(b, fabric.shape)
    path = [a]
    for side in reversed(range(len(fabric.shape))):
        size = fabric.shape[side]
        for step in _steps(place[side], goal[side], size, fabric.wrap):
            place = _with(place, side, (place[side] + step) % size)
            path.append(_chip(place, fabric.shape))
    return list(pairwise(path))


def _place(chip: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Coordinates of a chip, the last side fastest."""
    return tuple(int(i) for i in np.unravel_index(chip, tuple(shape)))


def _chip(place: Sequence[int], shape: Sequence[int]) -> int:
    return int(np.ravel_multi_index(tuple(place), tuple(shape)))


def _with(place: tuple[int, ...], side: int, value: int) -> tuple[int, ...]:
    return (*place[:side], value, *place[side + 1 :])


def _steps(start: int, end: int, size: int, wrap: bool) -> list[int]:
    """Unit steps along one side."""
    if not wrap:
        return [1 if end > start else -1] * abs(end - start)
    up = (end - start) % size
    return [1] * up if up <= size - up else [-1] * (size - up)
