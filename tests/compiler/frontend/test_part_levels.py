"""Which nodes are one part: no circle of parts, and no division with fewer."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import product

import pytest

from shardwright.compiler.frontend.levels import Side, sides, without_small

Operands = Mapping[int, Sequence[int]]


def graph_of(seed: int, size: int) -> tuple[Operands, set[int]]:
    """Operands of each node, all earlier ones, and the nodes that are compiled."""
    draw = random.Random(seed)
    operands = {n: sorted({draw.randrange(n) for _ in range(2)}) if n else [] for n in range(size)}
    return operands, {n for n in range(size) if draw.random() < 0.6}


def has_circle(parts: Mapping[int, object], operands: Operands) -> bool:
    """Whether parts wait for each other."""
    waits: dict[object, set[object]] = {part: set() for part in parts.values()}
    for node, given in operands.items():
        waits[parts[node]] |= {parts[o] for o in given} - {parts[node]}
    while free := [part for part, others in waits.items() if not others]:
        for part in free:
            del waits[part]
        for others in waits.values():
            others.difference_update(free)
    return bool(waits)


def fewest(operands: Operands, compiled: set[int]) -> int:
    """The fewest compiled parts of all divisions without a circle, host nodes each alone."""
    nodes = sorted(compiled)
    for count in range(len(nodes) + 1):
        for chosen in product(range(count), repeat=len(nodes)):
            parts: dict[int, object] = {n: ("host", n) for n in operands}
            parts |= dict(zip(nodes, chosen, strict=True))
            if not has_circle(parts, operands):
                return count
    raise AssertionError("each node alone is a division")


@pytest.mark.parametrize("seed", range(30))
def test_parts_have_no_circle_and_are_the_fewest(seed: int) -> None:
    operands, compiled = graph_of(seed, 8)
    found = sides(list(operands), operands.__getitem__, compiled)
    assert not has_circle(found, operands)
    assert {n for n, (_, is_compiled) in found.items() if is_compiled} == compiled
    parts = {side for side in found.values() if side[1]}
    assert len(parts) == fewest(operands, compiled)


def test_parts_run_in_the_order_of_their_sides() -> None:
    operands, compiled = graph_of(3, 40)
    found = sides(list(operands), operands.__getitem__, compiled)
    assert len(set(found.values())) > 4
    assert all(found[o] <= found[n] for n, given in operands.items() for o in given)


def test_small_parts_stay_on_the_host_and_join_what_is_around_them() -> None:
    operands = {0: [], 1: [0], 2: [1], 3: [2], 4: [3], 5: [4]}
    compiled = {0, 1, 3, 5}
    wanted: dict[int, Side] = {
        0: (0, True),
        1: (0, True),
        **dict.fromkeys((2, 3, 4, 5), (1, False)),
    }
    assert without_small(list(operands), operands.__getitem__, compiled, lambda _: 1, 2) == wanted
    alone = without_small(list(operands), operands.__getitem__, compiled, lambda _: 1, 1)
    assert [side for side in alone.values() if side[1]] == [
        (0, True),
        (0, True),
        (1, True),
        (2, True),
    ]


def test_a_graph_that_is_compiled_as_a_whole_is_however_small() -> None:
    assert without_small([0], lambda _: [], {0}, lambda _: 1, 5) == {0: (0, True)}
