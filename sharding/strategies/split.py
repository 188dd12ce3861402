"""How one mesh axis is shared out inside a family whose smallest member is smaller than the axis.

Two key-value heads cannot fill a tensor axis of eight. The axis is then cut into atoms: the first
two go to the key-value heads, the other four to the query heads of one group, and what has no such
part is replicated over them. `spread` decides it for all families at once, so that every family
uses the same atoms.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shardwright.sharding.indices.indices import Class, IndexClasses


@dataclass(frozen=True, slots=True)
class Split:
    """Cores per atom, major first, and how many leading atoms or which atoms each class takes."""

    atoms: tuple[int, ...]
    classes: Mapping[Class, tuple[int, ...]]


def rooms(classes: IndexClasses, families: Collection[Class], ways: int) -> dict[Class, int]:
    """Per family, into how many equal parts of at most `ways` all its members can be cut."""
    members = _members(classes, families)
    return {f: math.gcd(ways, *(_size(c) for c in own)) for f, own in members.items()}


def spread(
    classes: IndexClasses,
    families: Collection[Class],
    ways: int,
    price: Mapping[Class, int],
    broken: Collection[Class],
) -> Split:
    """Atoms of an axis of `ways` cores, and the atoms (by number) of every class in `families`.

    `broken` families end at ops that cut them, so that they take no atoms that others left.
    """
    room = rooms(classes, families, ways)
    atoms = _atoms(ways, room.values())
    taken: dict[Class, tuple[int, ...]] = {}
    for family, own in _members(classes, families).items():
        lead = _leading(atoms, room[family])
        rest = tuple(range(len(lead), len(atoms)))
        minors = _minors(
            classes, own, math.prod(atoms[i] for i in rest), price, broken, price.get(family, 0)
        )
        taken |= dict.fromkeys(minors, rest)
        for member in own:
            taken[member] = lead + (rest if _holds(classes, member, minors) else ())
    return Split(atoms, {c: numbers for c, numbers in taken.items() if numbers})


def _size(member: Class) -> int:
    """Elements along a class."""
    value, dim = member
    return value.type.shape[dim]


def _members(classes: IndexClasses, families: Collection[Class]) -> dict[Class, list[Class]]:
    """The classes of each family, without those of size 1."""
    found: dict[Class, list[Class]] = {family: [] for family in families}
    for member in classes.all():
        family = classes.family(member)
        if family in found and _size(member) > 1:
            found[family].append(member)
    return found


def _atoms(ways: int, rooms: Collection[int]) -> tuple[int, ...]:
    """Factors of `ways` such that every room is the product of some leading ones, where rooms
    divide each other; a room that fits in no chain takes fewer.
    """
    atoms: list[int] = []
    done = 1
    for room in sorted({*rooms, ways}):
        if room % done == 0 and ways % room == 0 and room > done:
            atoms.append(room // done)
            done = room
    return tuple(atoms)


def _leading(atoms: tuple[int, ...], room: int) -> tuple[int, ...]:
    """As many leading atoms as `room` holds."""
    taken, product = 0, 1
    while taken < len(atoms) and room % (product * atoms[taken]) == 0:
        product *= atoms[taken]
        taken += 1
    return tuple(range(taken))


def _minors(
    classes: IndexClasses,
    own: Collection[Class],
    rest: int,
    price: Mapping[Class, int],
    broken: Collection[Class],
    limit: int,
) -> set[Class]:
    """The parts next to the major part of a product that take the atoms left over.

    Families no dearer than `limit` whose every member divides and that no op cuts; two that meet in
    one value would shard it twice, so that the cheaper one wins.
    """
    if rest == 1:
        return set()
    beside: dict[Class, set[Class]] = {}
    for member in own:
        for part in classes.parts.get(member, ())[1:2]:
            beside.setdefault(classes.family(part), set()).add(part)
    taken: set[Class] = set()
    for family in sorted(beside, key=lambda f: price.get(f, 0)):
        divides = all(_size(part) % rest == 0 for part in beside[family])
        cheap = price.get(family, 0) <= limit and family not in broken
        if divides and cheap and not classes.meeting(family) & taken:
            taken.add(family)
    return {part for family in taken for part in beside[family]}


def _holds(classes: IndexClasses, member: Class, minors: Collection[Class]) -> bool:
    """True when a class is a product whose parts, from the front, reach one of `minors`."""
    parts = classes.parts.get(member, ())
    if not parts:
        return False
    return any(p in minors for p in parts[1:2]) or _holds(classes, parts[0], minors)
