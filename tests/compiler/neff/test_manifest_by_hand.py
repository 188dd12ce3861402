"""What a manifest and the bindings of cores say of a step of two stages, field by field."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.compiler.diagnostics import LoadError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import Function, Program
from shardwright.compiler.neff import bundle
from shardwright.compiler.neff.bundle import (
    core_binding,
    load_bundle,
    program_bytes,
    read_program,
    write_bundle,
)
from shardwright.compiler.neff.format import FEATURE_SUBGRAPHS
from shardwright.compiler.neff.manifest import CoreBinding, Manifest, NamedBuffer
from shardwright.compiler.neff.reader import Container
from shardwright.compiler.neff.schedule import LeafPart, Transfer

SHA, OTHER = "0123456789abcdef" * 4, "f" * 64
WEIGHT = NamedBuffer(
    name="w0",
    role="param",
    dtype=DType.BF16,
    local_shape=(3, 5),
    global_shape=(6, 5),
    axes=(("dp", "tp"), ()),
    initial="zeros",
    offset_bytes=64,
    part=LeafPart("w", 1, 7),
    stages=(1,),
    slots=(4,),
)
TOKENS = replace(
    WEIGHT, name="x", role="batch", dtype=DType.I32, part=None, stages=(), slots=(), local_shape=()
)
MANIFEST = Manifest(
    name="step",
    target="trn1n.32xlarge",
    instances=3,
    lnc=2,
    mesh={"pp": 2, "dp": 3, "tp": 4},
    buffers={"w0": WEIGHT, "x": TOKENS},
    programs={"a": SHA, "b": OTHER},
    schedules=(((("a",), 3),), ((("a", "b"), 1), (("b",), 2))),
    num_microbatches=5,
    named_bytes=1_000,
    arena_bytes=2_000,
    compiler_version="1.2",
    transfers=(
        Transfer(
            sent="s",
            received="r",
            source=0,
            target=1,
            writer="a",
            reader="b",
            num_bytes=9,
            once=True,
        ),
    ),
    stacks={"w": ("w.0", "w.1")},
    metadata={"note": 1},
)


def test_buffers() -> None:
    """3 * 5 elements of 2 bytes; a scalar of 4."""
    assert (WEIGHT.num_bytes, TOKENS.num_bytes) == (30, 4)
    assert [WEIGHT.on(stage) for stage in (0, 1)] == [False, True]
    assert TOKENS.on(0) and TOKENS.on(7)
    assert (WEIGHT.slots_on(1), TOKENS.slots_on(0)) == (4, 1)
    assert replace(WEIGHT, stages=(1, 3), slots=(4, 6)).slots_on(3) == 6
    assert (WEIGHT.leaf, TOKENS.leaf) == ("w", "x")


def test_ranks_of_stages() -> None:
    """24 cores, 12 per stage."""
    assert MANIFEST.num_cores == 24
    assert (MANIFEST.ranks(0), MANIFEST.ranks(1)) == (range(12), range(12, 24))
    assert [MANIFEST.stage(rank) for rank in (0, 11, 12, 23)] == [0, 0, 1, 1]
    assert MANIFEST.stage_mesh == {"dp": 3, "tp": 4}
    alone = replace(MANIFEST, schedules=MANIFEST.schedules[:1])
    assert alone.stage_mesh == MANIFEST.mesh and alone.stage(23) == 0
    assert MANIFEST.programs_on(0) == {"a": SHA}
    assert MANIFEST.programs_on(1) == {"a": SHA, "b": OTHER}
    assert MANIFEST.user_leaves(WEIGHT) == ("w.0", "w.1")
    assert MANIFEST.user_leaves(TOKENS) == ("x",)


def test_it_reads_back() -> None:
    assert Manifest.from_meta(MANIFEST.to_meta(), "m") == MANIFEST
    without = {k: v for k, v in MANIFEST.to_meta().items() if k != "stacks"}
    assert Manifest.from_meta(without, "m") == replace(MANIFEST, stacks={})
    zeros = replace(MANIFEST, named_bytes=0, arena_bytes=0, mesh={"dp": 1, "tp": 2**24})
    assert Manifest.from_meta(zeros.to_meta(), "m") == zeros


WRONG: list[tuple[str, Any]] = [
    ("name", 1),
    ("target", None),
    ("instances", "3"),
    ("instances", -1),
    ("instances", True),
    ("lnc", 1.0),
    ("lnc", -1),
    ("programs", [["a", SHA]]),
    ("programs", {"a": SHA[:-1]}),
    ("programs", {"a": f"../{SHA[3:]}"}),
    ("programs", {"a": SHA.upper()}),
    ("programs", {"a": 3}),
    ("programs", {3: SHA}),
    ("num_microbatches", None),
    ("named_bytes", -5),
    ("arena_bytes", "much"),
    ("compiler_version", 2),
    ("metadata", "text"),
    ("mesh", [["dp", 0]]),
    ("mesh", [["dp", -2]]),
    ("mesh", [["dp", 2**24 + 1]]),
    ("mesh", [["dp", 2.0]]),
    ("mesh", [[3, 2]]),
    ("mesh", [["dp"]]),
    ("transfers", [["s", "r", 0, 1, "a", "b", 9]]),
    ("schedules", 3),
    ("buffers", [[]]),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_field_of_another_kind_is_refused(field: str, value: Any) -> None:
    meta = MANIFEST.to_meta() | {field: value}
    with pytest.raises(LoadError) as refused:
        Manifest.from_meta(meta, "m")
    assert refused.value.code == "SW_NEFF_CONTENT" and "m: manifest: " in str(refused.value)


@pytest.mark.parametrize("field", [k for k in MANIFEST.to_meta() if k != "stacks"])
def test_a_field_that_is_missing_is_refused(field: str) -> None:
    meta = {k: v for k, v in MANIFEST.to_meta().items() if k != field}
    with pytest.raises(LoadError, match=field):
        Manifest.from_meta(meta, "m")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *[(0, 1), (1, 1), (2, "f33"), (3, [-1]), (3, [1.5]), (4, ["a"]), (5, [[1]]), (6, 0)],
        *[(7, -1), (7, True), (8, [1, 0, 0]), (8, ["w", -1, 0]), (8, ["w", 0, "0"])],
        *[(9, [-1]), (10, ["4"])],
    ],
)
def test_a_buffer_of_another_kind_is_refused(place: int, value: Any) -> None:
    row = list(MANIFEST.to_meta()["buffers"][0])
    row[place] = value
    with pytest.raises(LoadError, match="manifest"):
        Manifest.from_meta(MANIFEST.to_meta() | {"buffers": [row]}, "m")


def test_the_binding_of_a_core() -> None:
    """Rank 18 of 2 x 3 x 4 is 1 * 12 + 1 * 4 + 2."""
    found = core_binding(MANIFEST, OTHER, 18)
    assert found == CoreBinding(
        rank=18,
        coordinates={"pp": 1, "dp": 1, "tp": 2},
        programs={"a": SHA, "b": OTHER},
        target="trn1n.32xlarge",
        manifest_sha256=OTHER,
    )
    assert list(found.coordinates) == ["pp", "dp", "tp"]
    assert core_binding(MANIFEST, OTHER, 7).programs == {"a": SHA}
    assert CoreBinding.from_meta(found.to_meta(), "c") == found
    for field in found.to_meta():
        rest = {k: v for k, v in found.to_meta().items() if k != field}
        with pytest.raises(LoadError, match=f"c: core binding: .*{field}"):
            CoreBinding.from_meta(rest, "c")


def empty(name: str) -> Program:
    """A program without functions."""
    return Program(name, "trn1n.32xlarge", [], [], (), (), (), 0)


PROGRAMS = {"a": empty("a"), "b": empty("b")}


@pytest.mark.parametrize(("most", "files"), [(24, 24), (23, 0)])
def test_a_bundle_is_read_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, files: int
) -> None:
    """Up to `most` cores in files of their own, more in one."""
    monkeypatch.setattr(bundle, "MAX_CORE_FILES", most)
    stale = [tmp_path / name for name in ("programs/old.neff", "cores/core-00024.neff")]
    stale.append(tmp_path / ("cores.neff" if files else "cores/core-00003.neff"))
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    kept = tmp_path / "programs" / "note.txt"
    kept.write_text("mine")
    written = write_bundle(tmp_path, MANIFEST, PROGRAMS, {"graph": "g"})
    assert len(list(tmp_path.glob("cores/core-*.neff"))) == files
    assert (tmp_path / "cores.neff").exists() == (not files)
    assert len(list(tmp_path.glob("programs/*.neff"))) == 2 and kept.exists()
    found = load_bundle(tmp_path, "trn1n.32xlarge")
    assert found.manifest == written and found.programs == PROGRAMS and found.path == tmp_path
    assert written.programs.keys() == {"a", "b"} and SHA not in written.programs.values()
    with pytest.raises(LoadError, match=r"for trn2 is required, got one for trn1n\.32xlarge"):
        load_bundle(tmp_path, "trn2")
    first = tmp_path / "programs" / f"{written.programs['a']}.neff"
    first.write_bytes(program_bytes(PROGRAMS["b"], {"graph": "g"}))
    with pytest.raises(LoadError, match="program a is not the one the manifest names"):
        load_bundle(tmp_path)


def test_cores_of_another_bundle_are_refused(tmp_path: Path) -> None:
    for name, manifest in (("one", MANIFEST), ("two", replace(MANIFEST, instances=4))):
        write_bundle(tmp_path / name, manifest, PROGRAMS, {})
    core = "cores/core-00005.neff"
    (tmp_path / "one" / core).write_bytes((tmp_path / "two" / core).read_bytes())
    with pytest.raises(LoadError, match="core 5 is bound to another manifest"):
        load_bundle(tmp_path / "one")


def test_a_file_of_all_cores_has_as_many_as_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 cores of 3 instances; 16 of 2 would be bound to another manifest, and are too few."""
    monkeypatch.setattr(bundle, "MAX_CORE_FILES", 0)
    for name, mesh in (("one", MANIFEST.mesh), ("two", {"pp": 2, "dp": 2, "tp": 4})):
        write_bundle(tmp_path / name, replace(MANIFEST, mesh=mesh), PROGRAMS, {})
    (tmp_path / "one" / "cores.neff").write_bytes((tmp_path / "two" / "cores.neff").read_bytes())
    with pytest.raises(LoadError, match="24 cores are required, got 16"):
        load_bundle(tmp_path / "one")


@pytest.mark.parametrize("folder", ["programs", "cores"])
def test_a_folder_that_leads_elsewhere_is_refused(tmp_path: Path, folder: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / folder).symlink_to(tmp_path / "other")
    with pytest.raises(LoadError, match="a folder is required"):
        write_bundle(tmp_path / "out", MANIFEST, PROGRAMS, {})


def test_a_program_says_what_made_it() -> None:
    container = Container(program_bytes(PROGRAMS["a"], {"graph": "g"}), "p", "program")
    assert container.meta == {"name": "a", "target": "trn1n.32xlarge", "lnc": 1, "graph": "g"}
    assert container.header.features == 0


def raising(raised: Exception) -> Any:
    """What raises this, whatever it is asked."""

    def raises(*_: Any) -> None:
        raise raised

    return raises


@pytest.mark.parametrize("error", [KeyError, TypeError, ValueError, RecursionError])
def test_a_program_that_makes_no_sense_is_a_refusal(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal of its own stays what it is."""
    container = Container(program_bytes(PROGRAMS["a"], {}), "p", "program")
    monkeypatch.setattr(bundle, "decode_program", raising(error("odd")))
    with pytest.raises(LoadError, match=f"p: program: {error.__name__}.*odd") as refused:
        read_program(container)
    assert refused.value.code == "SW_NEFF_CONTENT"
    monkeypatch.setattr(bundle, "decode_program", raising(LoadError("SW_NEFF_SIZE", "own")))
    with pytest.raises(LoadError, match="own") as own:
        read_program(container)
    assert own.value.code == "SW_NEFF_SIZE"


@pytest.mark.parametrize("error", [KeyError, TypeError, ValueError, AttributeError])
@pytest.mark.parametrize("read", [Manifest.from_meta, CoreBinding.from_meta])
def test_a_table_that_makes_no_sense_is_a_refusal(read: Any, error: type[Exception]) -> None:
    broken: Any = type("Broken", (dict,), {"__getitem__": raising(error("odd"))})()
    with pytest.raises(LoadError, match=f"m: .*{error.__name__}"):
        read(broken, "m")


def test_programs_of_two_physical_cores_need_a_manifest_of_two(tmp_path: Path) -> None:
    both = Function("f", [], (), (), (), 0, [], [], partner=[])
    programs = {"a": replace(empty("a"), functions=[both]), "b": empty("b")}
    write_bundle(tmp_path / "two", MANIFEST, programs, {})
    assert load_bundle(tmp_path / "two").programs["a"].lnc == 2
    write_bundle(tmp_path / "one", replace(MANIFEST, lnc=1), programs, {})
    with pytest.raises(LoadError, match="program a requires logical NeuronCores of 2"):
        load_bundle(tmp_path / "one")
    container = Container(program_bytes(programs["a"], {}), "p", "program")
    assert container.header.features == FEATURE_SUBGRAPHS and container.meta["lnc"] == 2
