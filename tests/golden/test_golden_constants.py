"""Every figure of every machine, moved by a tenth, moves a golden row of that machine, or a reason
is here why it cannot. The constants of formulas are `python -m tests.mutants --constants`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from shardwright.compiler.machine.target import (
    Target,
    altered,
    facts_of,
    load_target,
    logical,
    target_names,
)
from tests.golden.files import differences, golden
from tests.golden.machines import stages
from tests.golden.record import Record
from tests.mutants.operators import other_numbers


@cache
def of_machine(name: str) -> Record:
    return dict(stages(logical(load_target(name))))


@pytest.mark.parametrize("name", target_names())
def test_a_machine_comes_to_what_its_golden_file_says(
    name: str, request: pytest.FixtureRequest
) -> None:
    golden(f"machines/{name}", of_machine(name), request)


def why_nothing_moves(target: Target, fact: str) -> str:
    """Why a figure of a machine has no part in any answer about it."""
    if fact in ("efa_hop_us", "flat_ring_min_bytes") and not target.efa_devices:
        return "one instance has no others beside it"
    if fact == "neuronlink_wire_us" and target.chips == 1:
        return "one chip has no links"
    if fact == "shape" and target.topology in ("line", "ring", "none"):
        return "its chips are counted by chips_per_instance"
    if fact == "program_start_us" and not target.trains:
        return "no steps of it are among the rows"
    return ""


def moved(value: Any) -> Iterator[Any]:
    """A figure a tenth more, a small whole number one more; a list with each of its own moved. A
    tenth of nothing is nothing."""
    if isinstance(value, list):
        for at, item in enumerate(value):
            yield from ([*value[:at], other, *value[at + 1 :]] for other in moved(item))
    elif isinstance(value, int | float) and not isinstance(value, bool) and value:
        yield next(other_numbers(value))


def machines() -> list[Any]:
    """The largest, which share their cores with smaller ones, in the matrix."""
    long = pytest.mark.matrix
    names = target_names()
    return [pytest.param(n, marks=long) if "ultra" in n else pytest.param(n) for n in names]


@pytest.mark.parametrize("name", machines())
def test_every_figure_moves_a_row_or_has_a_reason(name: str) -> None:
    target = logical(load_target(name))
    for fact, known in facts_of(target).items():
        for value in moved(known.value):
            why = why_nothing_moves(target, fact)
            assert _moves(target, fact, value) == (not why), (fact, value, why)


def _moves(target: Target, fact: str, value: Any) -> bool:
    """Whether a row differs, or there is no such machine."""
    known = of_machine(target.name)
    try:
        other = altered(target, {fact: value})
        return any(differences({name: known[name]}, {name: rows}) for name, rows in stages(other))
    except ValueError:
        return True
