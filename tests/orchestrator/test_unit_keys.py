"""Keys of units: every part is in them, what answers do not depend on is not.

A part that a key lacks shows nowhere else: the cache gives the answer to another question, and
every value, time and report made of it is sound. So each part is changed here alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from shardwright.compiler.diagnostics import Loc
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.isa.program import Program, ProgramBuffer
from shardwright.compiler.lower.function import Signature
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.neff.schedule import Transfer
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.outline.unit import Unit
from shardwright.orchestrator.service import units
from shardwright.orchestrator.service.executor import WorkUnit
from shardwright.orchestrator.service.units import (
    PACKAGES,
    compile_payload,
    digest,
    key_parts,
    parts_digest,
    source_digest,
)
from shardwright.sharding.partition import partitioner
from shardwright.sim_cluster.profiles import Profile
from shardwright.sim_cluster.timing.contention import Packets
from shardwright.sim_cluster.timing.faults import Faults
from shardwright.sim_cluster.timing.step_time import Step
from shardwright.sim_cluster.timing.timing_unit import encode_question, question_parts
from tests.support.changed import changes, other

TRN1N = "trn1n.32xlarge"
FUNCTION = b"a function without locations"
SOURCES = MappingProxyType(
    {
        "partition": {"sharding", "compiler", "collectives"},
        "compile": {"compiler", "collectives"},
        "time": {"sim_cluster", "compiler", "collectives"},
    }
)
"""The package of a unit's code, and those that it may import (tests/test_layers.py)."""


# Sources


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two packages that hold files of every kind, in place of our own."""
    for name in ("first/code.py", "first/deep/data.json", "first/deep/fit.toml", "second/code.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"content of {name}")
    monkeypatch.setattr(units, "package_folder", lambda package: tmp_path / package)
    return tmp_path


def sources(*packages: str) -> str:
    return source_digest.__wrapped__(packages or ("first", "second"))


def moved(name: str, to: str) -> Callable[[Path], object]:
    return lambda tree: (tree / name).rename(tree / to)


def written(name: str) -> Callable[[Path], object]:
    return lambda tree: (tree / name).write_text("another content")


def test_the_digest_of_sources_is_of_names_and_contents(tree: Path) -> None:
    """Sha256 of `name 0 content`, each behind its length, in the order of names."""
    state = hashlib.sha256()
    for name in ("first/code.py", "first/deep/data.json", "first/deep/fit.toml"):
        row = f"{name}\0content of {name}".encode()
        state.update(len(row).to_bytes(8, "little") + row)
    assert sources("first") == state.hexdigest()
    assert sources("first") != sources("second")


@pytest.mark.parametrize(
    "change",
    [
        written("first/code.py"),
        written("first/deep/data.json"),
        written("first/deep/fit.toml"),
        written("second/code.py"),
        written("second/new.py"),
        moved("first/code.py", "first/other.py"),
        moved("first/code.py", "first/deep/code.py"),
        moved("first/code.py", "second/moved.py"),
        lambda tree: (tree / "first/deep/fit.toml").unlink(),
    ],
)
def test_every_source_and_data_file_is_in_the_digest(
    tree: Path, change: Callable[[Path], object]
) -> None:
    before = sources()
    change(tree)
    assert sources() != before


@pytest.mark.parametrize("name", ["first/notes.md", "first/code.pyc", "first/py.typed"])
def test_what_nothing_reads_is_not_in_the_digest(tree: Path, name: str) -> None:
    before = sources()
    written(name)(tree)
    assert sources() == before


def test_where_packages_lie_is_not_in_the_digest(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sources()
    tree.rename(tree.with_name("elsewhere"))
    folder = tree.with_name("elsewhere")
    monkeypatch.setattr(units, "package_folder", lambda package: folder / package)
    assert sources() == before


def test_our_data_files_are_of_kinds_that_are_digested() -> None:
    """But for templates and style sheets of pages, which no unit and no plan reads."""
    folders = [units.package_folder(package) for package in PACKAGES]
    files = (f for folder in folders for f in folder.rglob("*") if f.is_file())
    kinds = {f.suffix for f in files if "__pycache__" not in f.parts and f.name != "py.typed"}
    assert kinds == {".py", ".json", ".toml", ".html", ".css"}


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("kind", SOURCES)
def test_a_unit_depends_on_the_sources_it_runs_and_no_others(
    kind: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "_PAYLOAD_PARTS", {})
    before, edited = key_parts(kind, b"payload"), {(package,): "edited"}
    monkeypatch.setattr(
        units, "source_digest", lambda names: edited.get(names) or source_digest(names)
    )
    now = key_parts(kind, b"payload")
    assert (parts_digest(kind, now) != parts_digest(kind, before)) == (package in SOURCES[kind])


def test_every_kind_of_unit_has_a_function_and_sources() -> None:
    assert set(units.KINDS) == set(SOURCES) == set(units._SOURCES)


# Digests


def test_lengths_and_names_and_kinds_are_in_a_key() -> None:
    assert digest([b"ab", b"c"]) != digest([b"a", b"bc"])
    parts = {"one": "1", "two": "2"}
    key = parts_digest("compile", parts)
    assert key == parts_digest("compile", dict(reversed(parts.items())))
    assert key != parts_digest("time", parts)
    assert key != parts_digest("compile", {"one": "2", "two": "1"})
    assert key != parts_digest("compile", {"two": "2"})
    assert key != parts_digest("compile", {"one": "1", "second": "2"})


# Compile units


def compile_key(
    function: bytes = FUNCTION, target: str = TRN1N, options: CompileOptions | None = None
) -> str:
    payload = compile_payload(function, target, options or CompileOptions())
    return WorkUnit.of("compile", "a name", payload, target).key


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(CompileOptions)])
def test_every_option_is_in_the_key_of_a_unit(name: str) -> None:
    changed = replace(CompileOptions(), **{name: other(getattr(CompileOptions(), name))})
    assert compile_key(options=changed) != compile_key()
    assert CompileOptions.unpacked(changed.packed()) == changed


def test_function_and_machine_are_in_the_key_of_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    key = compile_key()
    assert compile_key(FUNCTION[1:]) != key
    assert compile_key(target="trn1.32xlarge") != key
    renamed = replace(load_target("trn1.32xlarge"), digest=load_target(TRN1N).digest)
    edited = replace(load_target(TRN1N), digest="edited")
    monkeypatch.setattr(units, "load_target", lambda _: renamed)
    assert compile_key(target="trn1.32xlarge") != key, "the name alone"
    monkeypatch.setattr(units, "load_target", lambda _: edited)
    assert compile_key() != key, "the table alone"


def test_what_a_unit_is_called_is_not_in_its_key() -> None:
    payload = compile_payload(FUNCTION, TRN1N, CompileOptions())
    first = WorkUnit.of("compile", "layer", payload, TRN1N)
    assert first.key == WorkUnit.of("compile", "layer#2", payload, TRN1N).key
    assert dict(first.parts) == key_parts("compile", payload, TRN1N)


SIGNATURE = Signature(parameters=((0, 0, 3),), aliases=((0, 1),))


def unit(signature: Signature = SIGNATURE, loc: Loc | None = None, name: str = "layer") -> Unit:
    b = Builder(loc=loc or Loc("model.py", 7, "step"))
    x, y = b.input((), DType.I32), b.input((), DType.I32)
    return Unit(name, b.finish(b.add(x, y)), signature)


def test_a_function_is_keyed_by_graph_and_signature() -> None:
    key = unit().key
    assert unit(name="head").key == unit(loc=Loc("other.py", 9, "loss")).key == key
    assert unit(replace(SIGNATURE, parameters=((1, 0, 3),))).key != key
    assert unit(replace(SIGNATURE, parameters=((0, 0, 4),))).key != key
    assert unit(replace(SIGNATURE, aliases=())).key != key
    b = Builder()
    x, y = b.input((), DType.I32), b.input((), DType.I32)
    assert Unit("layer", b.finish(b.multiply(x, y)), SIGNATURE).key != key


# Partition units


def test_a_partition_is_keyed_by_request_and_partitioner(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(payload: bytes) -> str:
        return WorkUnit.of("partition", "a name", payload).key

    first = key(b"request")
    assert key(b"another") != first
    monkeypatch.setattr(partitioner, "partitioner_version", lambda: "0.0.1")
    assert key(b"request") != first


# Time units

PROFILE = Profile(name="nominal", streaming=0.9, stall_recovery=0.5)
PROGRAM = Program(
    "step", TRN1N, [], [ProgramBuffer("x", (8,), DType.F32, "named")], ("x",), (), (), 0
)
TRANSFER = Transfer(
    sent="x", received="y", source=0, target=1, writer="step", reader="step", num_bytes=32
)
STEP = Step(
    programs={"step": PROGRAM},
    schedules=(((("step",), 1),),),
    mesh={"tp": 2},
    target=load_target(TRN1N),
    instances=1,
    transfers=(TRANSFER,),
)


def time_key(step: Step = STEP, profile: str = "nominal", **asked: Any) -> str:
    return WorkUnit.of("time", "step", encode_question(step, profile, **asked)).key


STEPS_OWN: Mapping[str, Any] = MappingProxyType(
    {
        "programs": {"step": replace(PROGRAM, arena_bytes=64)},
        "schedules": (((("step",), 2),),),
        "transfers": (replace(TRANSFER, num_bytes=64),),
    }
)


STEPS = [pytest.param(step, id=name) for name, step in changes(STEP, STEPS_OWN)]


@pytest.mark.parametrize("step", STEPS)
def test_every_figure_of_a_step_is_in_the_key_of_its_time(step: Step) -> None:
    assert time_key(step) != time_key()


@pytest.mark.parametrize(
    "step",
    [
        replace(STEP, programs={"step": replace(PROGRAM, name="another")}),
        replace(STEP, programs={"another": PROGRAM}),
        replace(STEP, packets=Packets(stream_bytes=(512, 64))),
        replace(STEP, faults=Faults(slow_cores={3: 1.5})),
        replace(STEP, faults=Faults(slow_cores={4: 1.5})),
        replace(STEP, faults=Faults(links={0: {(0, 1): 0.5}})),
        replace(STEP, faults=Faults(links={0: {(0, 2): 0.5}})),
    ],
)
def test_programs_packets_and_faults_are_in_the_key_of_a_time(step: Step) -> None:
    assert time_key(step) != time_key()


def test_profile_credit_and_trace_are_in_the_key_of_a_time() -> None:
    keys = [
        time_key(),
        time_key(profile="peak"),
        time_key(traced=True),
        time_key(credit=PROFILE),
        *(time_key(credit=changed) for _, changed in changes(PROFILE)),
    ]
    assert len(set(keys)) == len(keys) == 8


def test_places_in_the_users_files_are_not_in_the_key_of_a_time() -> None:
    placed = replace(PROGRAM, locations=(("model.py", 7, "step"),), metadata={"graph": "mine"})
    assert time_key(replace(STEP, programs={"step": placed})) == time_key()


def test_what_is_long_is_a_part_by_its_digest() -> None:
    """And what is short by its text, which `cache explain` shows."""
    parts = question_parts(encode_question(STEP, "nominal", PROFILE))
    assert parts["profile"] == "nominal" and parts["instances"] == "1"
    assert parts["mesh"] == "{'tp': 2}" and parts["traced"] == "False"
    assert len(parts["program step"]) == len(parts["target"]) == 64
    for length, is_told in ((80, True), (81, False)):  # {'aa..a': 2}, 7 more than the name
        mesh = {"a" * (length - 7): 2}
        told = question_parts(encode_question(replace(STEP, mesh=mesh), "nominal"))["mesh"]
        assert len(str(mesh)) == length and (told == str(mesh)) is is_told
    wide = replace(STEP, mesh={"axis" * 15: 2, "another": 3})
    told = question_parts(encode_question(wide, "nominal"))["mesh"]
    assert len(told) == 64 and told != str(wide.mesh)
