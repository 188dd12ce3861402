"""What is kept of functions is what they and their machine come to, whoever else was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardwright.compiler.isa.decode import decode_function
from shardwright.compiler.isa.encode import encode_function
from shardwright.compiler.machine.target import Target, load_target
from shardwright.sim_cluster.profiles import PROFILES, under_profile
from shardwright.sim_cluster.timing import memo
from shardwright.sim_cluster.timing.macro import evaluated
from shardwright.sim_cluster.timing.memo import FunctionMemo
from tests.support.compiled import TARGET, graph_of, link

MACHINE = load_target(TARGET)

COLUMNS = (64, 96, 128)


@pytest.fixture(scope="module")
def functions() -> list[Mapping[str, Any]]:
    """The sections of functions that differ in one size."""
    import jax
    import jax.numpy as jnp

    def product(x: jax.Array, a: jax.Array) -> jax.Array:
        return jnp.tanh(x @ a)

    graphs = (graph_of(product, np.zeros((32, 48)), np.zeros((48, n))) for n in COLUMNS)
    return [encode_function(link(graph).functions[0]) for graph in graphs]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_answers_are_those_of_functions_read_and_timed_alone(
    functions: list[Mapping[str, Any]], most: int
) -> None:
    """In an order in which some were dropped since."""
    known = FunctionMemo(most)
    machines = [under_profile(MACHINE, name) for name in PROFILES]
    held = [known.decode(sections) for sections in functions]
    for turn in range(12):
        number, machine = turn * 5 % 3, machines[turn % len(machines)]
        found = known.decode(functions[number]) if turn % 2 else held[number]
        alone = decode_function(functions[number])
        assert found == alone
        assert known.evaluate(found, machine) == evaluated(alone, machine)


def test_each_is_timed_once_per_machine(
    functions: list[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Target] = []
    monkeypatch.setattr(memo, "evaluated", lambda _, target: asked.append(target))
    known, other = FunctionMemo(), replace(MACHINE, lnc=2)
    for machine in (MACHINE, other, replace(MACHINE)):
        function = known.decode({**functions[0]})
        assert known.decode({**functions[1]}) is not function
        known.evaluate(function, machine)
    assert asked == [MACHINE, other]


def test_only_the_newest_machines_are_kept(
    functions: list[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep may ask about one function on any number of them."""
    asked: list[Target] = []
    monkeypatch.setattr(memo, "evaluated", lambda _, target: asked.append(target))
    known = FunctionMemo()
    function = known.decode(functions[0])
    machines = [replace(MACHINE, efa_devices=n) for n in range(memo.MOST_MACHINES + 1)]
    for machine in (*machines, *reversed(machines)):
        known.evaluate(function, machine)
    assert asked == [*machines, machines[0]]


def test_one_changed_value_is_another_function(functions: list[Mapping[str, Any]]) -> None:
    known, sections = FunctionMemo(), functions[0]
    first = known.decode(sections)
    code = np.array(sections["affines"])
    code[-1] += 1
    assert known.decode({**sections, "affines": code}) is not first
    assert known.decode(sections) is first
