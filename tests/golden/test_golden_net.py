"""The net itself: a changed byte of a program and a changed picosecond are noticed and named."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.compiler.isa import costs
from shardwright.compiler.isa.program import Program
from shardwright.orchestrator.cache.cache import Cache
from shardwright.orchestrator.road.stages import Traces
from shardwright.orchestrator.road.timing import step_of
from shardwright.orchestrator.service.executor import InlineExecutor
from shardwright.orchestrator.service.service import UnitService
from shardwright.sim_cluster.timing.step_time import time_step
from tests.golden import files
from tests.golden.cells import CELLS
from tests.golden.files import FOLDER, differences, golden, read, report_of, text_of
from tests.golden.record import Cell, Record, record, run_cell

NAME = "cells/manual"


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    (small,) = (c for c in CELLS if f"cells/{c.name}" == NAME)
    cache = Cache(tmp_path_factory.mktemp("cache"))
    with UnitService(InlineExecutor, cache) as service:
        return run_cell(small.job, service, Traces())


@pytest.fixture(scope="module")
def recorded(cell: Cell) -> Record:
    return record(cell)


def test_one_picosecond_of_a_step_is_named(recorded: Record) -> None:
    moved = copy.deepcopy(recorded)
    moved["time"]["nominal"]["step_ps"] += 1
    (found,) = differences(read(NAME), moved)
    assert (found.stage, found.row, found.key) == ("time", "nominal", "step_ps")
    old = recorded["time"]["nominal"]["step_ps"]
    text = report_of(NAME, [found])
    assert f"{NAME}: time: nominal step_ps: {old} -> {old + 1}" in text
    assert "the first in stage time" in text


def test_one_byte_of_a_program_is_named(cell: Cell, recorded: Record) -> None:
    name, program = next(iter(cell.built.programs.items()))
    number = next(n for n, f in enumerate(program.functions) if f.kernels[0].tiles)
    damaged, function = _with_a_tile_moved(program, number), program.functions[number]
    built = dataclasses.replace(cell.built, programs={**cell.built.programs, name: damaged})
    found = differences(recorded, record(dataclasses.replace(cell, built=built)))
    assert {(d.stage, d.row) for d in found} == {
        ("code", name),
        ("code", f"{name}/{function.name}"),
        ("bundle", "manifest"),
    }
    assert "the first in stage code" in report_of(NAME, found)


def _with_a_tile_moved(program: Program, number: int) -> Program:
    """The program with the first tile of a function one byte further."""
    functions = list(program.functions)
    first, *others = functions[number].kernels
    tile, *rest = first.tiles
    moved = dataclasses.replace(tile, address=tile.address + 1)
    kernels = [dataclasses.replace(first, tiles=[moved, *rest]), *others]
    functions[number] = dataclasses.replace(functions[number], kernels=kernels)
    return dataclasses.replace(program, functions=functions)


def test_a_damaged_cost_moves_the_time_and_no_code(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_of(cell.built, cell.built.programs)
    before = time_step(step).step_time_ps
    assert before == read(NAME)["time"]["nominal"]["step_ps"]
    slower = {
        opcode: [
            dataclasses.replace(rule, slope=1.1 * rule.slope, minimum=1.1 * rule.minimum)
            for rule in rules
        ]
        for opcode, rules in costs.OF_OPCODE.items()
    }
    monkeypatch.setattr(costs, "OF_OPCODE", slower)
    assert time_step(step).step_time_ps > before


@pytest.mark.parametrize(
    ("stage", "row", "key"), [("time", "nominal", "step_ps"), ("code", "backward", "sha256")]
)
def test_a_test_of_a_cell_fails_and_names_cell_and_stage(
    recorded: Record, stage: str, row: str, key: str
) -> None:
    moved = copy.deepcopy(recorded)
    old = moved[stage][row][key]
    moved[stage][row][key] = old + 1 if isinstance(old, int) else f"{old[:-1]}-"
    reading: Any = SimpleNamespace(config=SimpleNamespace(getoption=lambda name: False))
    with pytest.raises(pytest.fail.Exception) as failed:
        golden(NAME, moved, reading)
    first, second, *_ = str(failed.value).splitlines()
    assert first == f"golden {NAME}: 1 values differ, the first in stage {stage}"
    assert second.startswith(f"  {NAME}: {stage}: {row} {key}: ")
    golden(NAME, recorded, reading)  # and what is as it was passes


def test_places_in_the_source_are_no_part_of_a_digest(cell: Cell, recorded: Record) -> None:
    placed = cell.built.programs
    assert any(k.program.loc > 0 for p in placed.values() for f in p.functions for k in f.kernels)
    moved = {name: _elsewhere(program) for name, program in placed.items()}
    built = dataclasses.replace(cell.built, programs=moved)
    assert not differences(recorded, record(dataclasses.replace(cell, built=built)))


def _elsewhere(program: Program) -> Program:
    """The program with all of its code at one line of another file."""
    functions = [
        dataclasses.replace(
            function,
            kernels=[
                dataclasses.replace(k, program=dataclasses.replace(k.program, loc=0))
                for k in function.kernels
            ],
        )
        for function in program.functions
    ]
    return dataclasses.replace(program, functions=functions, locations=(("a.py", 1, ""),))


def test_a_lost_row_and_a_new_one_are_named(recorded: Record) -> None:
    other = copy.deepcopy(recorded)
    del other["time"]["peak"]
    other["findings"]["SW_NEW"] = {"severity": "note", "message": "text"}
    rows = [(d.stage, d.row) for d in differences(recorded, other)]
    assert rows == [("time", "peak"), ("findings", "SW_NEW")]


def test_an_update_writes_the_file_and_says_what_moved(
    recorded: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    assert files.update(NAME, recorded) == f"golden {NAME}: new"
    assert files.update(NAME, recorded) == ""
    moved = copy.deepcopy(recorded)
    moved["memory"]["peak"]["peak_bytes"] *= 2
    peak = recorded["memory"]["peak"]["peak_bytes"]
    changed = files.update(NAME, moved)
    assert f"memory: peak peak_bytes: {peak} -> {2 * peak} (+1 of itself)" in changed
    assert files.compare(NAME, moved) == ""


def test_golden_files_are_written_as_they_are_read() -> None:
    for path in sorted(FOLDER.rglob("*.json")):
        text = path.read_text(encoding="utf-8")
        assert text_of(json.loads(text)) == text, path.name
        assert "/tmp" not in text, path.name
        assert not any(ord(letter) > 126 for letter in text), path.name
