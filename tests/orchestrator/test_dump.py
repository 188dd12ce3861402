"""`--dump-dir`: every stage in files that people read, and nothing else changes."""

from __future__ import annotations

import errno
import io
import json
import re
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.parse import parse
from shardwright.compiler.ir.serialize import dump
from shardwright.compiler.ir.text import annotated_text, to_text
from shardwright.compiler.ir.types import Graph, Op
from shardwright.compiler.isa import kernel_text
from shardwright.compiler.steps import is_recorded, note, step, within
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.dump import dumping, folder
from shardwright.orchestrator.dump.names import README
from shardwright.orchestrator.terminal import outputs
from tests.support.model_files import compile_line, write_model
from tests.support.small_job import bundle_bytes, write_job

PLAN = ["--set", "cluster.target=trn1.2xlarge", "--mesh", "dp_shard=2", "--json"]
TIMES = ("provenance", "units")  # of a report: what differs from run to run


def files_of(root: Path) -> list[str]:
    """Every file but the index, in order within its folder."""
    found = (p.relative_to(root).as_posix() for p in sorted(root.rglob("*")) if p.is_file())
    return [name for name in found if name != "README.txt"]


def listed(root: Path) -> list[str]:
    """The files that the index lists."""
    index = (root / "README.txt").read_text()
    assert index.startswith(README)
    return re.findall(r"^  (\S+\.(?:txt|mlir))  +\S", index.removeprefix(README), re.MULTILINE)


def report_of(out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out)
    return {key: value for key, value in found.items() if key not in TIMES}


@dataclass(frozen=True)
class Dumped:
    """The dump of a small plan, the graphs it was told by their text, and what was printed without
    and with it."""

    root: Path
    told: dict[str, Graph]
    plain: str
    shown: str


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Dumped:
    place = tmp_path_factory.mktemp("dumped")
    job = write_job(place)
    told: dict[str, Graph] = {}

    def kept(graph: Graph, *more: Any) -> str:
        text = annotated_text(graph, *more)
        told[text] = graph
        return text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "annotated_text", kept)
        plain, shown = io.StringIO(), io.StringIO()
        with redirect_stdout(plain):
            assert main(["plan", str(job), *PLAN]) == 0
        assert not told
        with redirect_stdout(shown):
            assert main(["plan", str(job), *PLAN, "--dump-dir", str(place / "dump")]) == 0
    return Dumped(place / "dump", told, plain.getvalue(), shown.getvalue())


def test_the_road_is_there_in_order_and_the_index_says_what_is_what(
    dumped: Dumped,
) -> None:
    root = dumped.root
    names = files_of(root)
    assert sorted(listed(root)) == sorted(names)
    road = [name.partition("-")[2] for name in names if "/" not in name]
    stages = ("captured.mlir", "roles.txt", "imported.txt", "fold.txt", "recipe.txt")
    later = ("decisions.txt", "shardy_input.mlir", "partitioned.txt", "rewritten.txt")
    wanted = [*stages, *later, "localized.txt", "plan.txt", "memory.txt", "time.txt"]
    assert [name for name in road if name in wanted] == wanted
    numbers = [int(name[:2]) for name in names if "/" not in name]
    assert numbers == sorted(set(numbers))
    for program in ("forward", "backward", "update"):
        own = {n.partition("-")[2] for n in names if n.startswith(f"programs/{program}/")}
        assert {"cut.txt", "memory.txt", "listing.txt"} <= own
    functions = {name.rpartition("/")[0] for name in names if name.startswith("functions/")}
    assert len(functions) > 3
    for function in functions:
        own = [n.partition("-")[2] for n in names if n.rpartition("/")[0] == function]
        ends = ["fusion.txt", "kernels.txt", "tiling.txt", "memory.txt", "overlap.txt"]
        assert own[0] == "function.txt" and own[-6:] == [*ends, "listing.txt"]


def test_every_text_in_it_is_read_back(dumped: Dumped) -> None:
    root, told = dumped.root, dumped.told
    texts = {path: path.read_text() for path in root.rglob("*.txt")}
    graphs = {path: told[text] for path, text in texts.items() if text in told}
    assert len(graphs) > 20
    for path, graph in graphs.items():
        again = parse(texts[path], str(path))
        assert dump(again, with_locs=False) == dump(graph, with_locs=False), path
    kernels = [path for path in texts if path.name.endswith("-kernels.txt")]
    assert kernels
    for path in kernels:
        read = kernel_text.parse(texts[path], str(path))
        said = [line for line in texts[path].splitlines(True) if not line.startswith("//")]
        assert kernel_text.to_text(*read) == "".join(said)


def test_what_a_person_looks_for_can_be_found(dumped: Dumped) -> None:
    root = dumped.root

    def text(pattern: str) -> str:
        return next(iter(sorted(root.glob(pattern)))).read_text()

    tiling = text("functions/forward.loop/*-tiling.txt")
    for word in ("iteration dim 0 of", "SBUF:", "PSUM:", "partitions x elements", "loop r", "-> "):
        assert word in tiling, word
    memory = text("functions/forward.loop/*-memory.txt")
    assert "scratch+" in memory and re.search(r"\.#+\.", memory)
    overlap = text("functions/forward.loop/*-overlap.txt")
    assert "all_gather over dp_shard" in overlap and "beside it" in overlap and "tensor " in overlap
    assert "hidden" in text("*-time.txt") and "peak:" in text("*-memory.txt")
    recipe = text("*-recipe.txt")
    assert re.search(r"^// %in0: constraint \[dp_shard", recipe, re.MULTILINE)


def test_a_plan_says_the_same_when_its_answer_was_stored(dumped: Dumped) -> None:
    assert report_of(dumped.shown) == report_of(dumped.plain)
    assert files_of(dumped.root), "a stored answer has no stages"
    assert not is_recorded()


@pytest.mark.matrix
def test_run_writes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["run", str(write_job(tmp_path)), *PLAN]
    assert main([*words, "--compile-only", "--out", "plain"]) == 0
    assert main([*words, "--no-compare", "--out", "shown", "--dump-dir", "dump"]) == 0
    plain, shown = (bundle_bytes(tmp_path / name / "bundle") for name in ("plain", "shown"))
    assert plain == shown
    steps = {name[3:].partition(".")[0] for name in files_of(tmp_path / "dump")}
    assert {"captured", "plan", "memory", "time"} <= steps


@pytest.mark.matrix
def test_jobs_that_are_compiled_together_have_a_folder_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = write_job(tmp_path)
    (tmp_path / "twin.toml").write_text(job.read_text())
    words = ["run", str(job), "twin.toml", *PLAN, "--compile-only"]
    assert main([*words, "--out", "plain"]) == 0
    assert main([*words, "--out", "shown", "--dump-dir", "dump"]) == 0
    assert bundle_bytes(tmp_path / "plain" / "job") == bundle_bytes(tmp_path / "shown" / "job")
    one, other = (bundle_bytes(tmp_path / "dump" / name) for name in ("job", "twin"))
    assert one.keys() == other.keys() and "00-captured.mlir" in one
    assert one["README.txt"] == other["README.txt"]


def test_compile_writes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "m.hlo.pb", lambda x: x @ x.T, [np.ones((8, 16), np.float32)])
    line = "shardwright compile m.hlo.pb --target trn1 --output"
    assert compile_line(f"{line} a.neff") == 0
    assert compile_line(f"{line} b.neff --dump-dir dump") == 0
    assert (tmp_path / "a.neff").read_bytes() == (tmp_path / "b.neff").read_bytes()
    names = files_of(tmp_path / "dump")
    assert "00-captured.mlir" in names and any(n.endswith("-tiling.txt") for n in names)
    assert sorted(listed(tmp_path / "dump")) == sorted(names)


def square() -> Graph:
    b = Builder()
    x = b.input((4,))
    return b.finish(b.multiply(x, x))


def test_steps_are_numbered_in_their_part_and_what_changes_nothing_has_no_file(
    tmp_path: Path,
) -> None:
    graph = square()
    with dumping(tmp_path):
        assert step("imported", graph) is graph
        step("fold", graph)
        with within("functions/f(x)", "key"):
            step("function", graph)
        with within("functions/f(x)", "key"):
            step("function", graph)
        with within("functions/f(x)", "other key"):
            note("tiling", lambda: "text\n")
    step("cse", graph)
    assert files_of(tmp_path) == [
        "00-imported.txt",
        "functions/f_x_/00-function.txt",
        "functions/f_x_.2/00-tiling.txt",
    ]
    assert (tmp_path / "00-imported.txt").read_text() == to_text(graph, with_locs=True)
    assert "no change: 01-fold" in (tmp_path / "README.txt").read_text()


def test_a_second_dump_takes_the_place_of_the_first_and_of_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with dumping(tmp_path), within("functions/f", "key"):
        step("function", square())
    with dumping(tmp_path):
        note("plan", lambda: "text\n")
    assert files_of(tmp_path) == ["00-plan.txt", "mine.txt"]
    assert not (tmp_path / "functions" / "f").exists()


def test_a_readme_of_somebody_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "README.txt").write_text("mine\n  00-plan.txt  mine\n")
    (tmp_path / "00-plan.txt").write_text("mine")
    is_dumps = r"whose README\.txt is that of a dump"
    with pytest.raises(ValueError, match=is_dumps), dumping(tmp_path):
        pass
    assert (tmp_path / "00-plan.txt").read_text() == "mine"


def test_a_step_that_is_not_valid_is_named_and_shown(tmp_path: Path) -> None:
    graph = square()
    broken = Graph(graph.inputs, (Op("add", graph.inputs, graph.outputs),), graph.outputs)
    assert step("cse", broken) is broken, "nobody looks"
    with pytest.raises(ValueError, match="SW_IR_INVALID") as caught, dumping(tmp_path):
        step("cse", broken)
    assert caught.value.__notes__ == ["after step cse"]
    assert files_of(tmp_path) == ["00-cse.txt"] and listed(tmp_path) == ["00-cse.txt"]


@pytest.mark.parametrize("verb", ["plan", "run"])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, output={"dir": str(tmp_path / "out")})
    (tmp_path / "file").write_text("")
    assert main([verb, str(job), *PLAN[:-1], "--dump-dir", str(tmp_path / "file")]) == 2
    err = capsys.readouterr().err
    assert "SW_OUTPUT" in err and "--dump-dir" in err


def test_a_disk_that_fills_up_on_the_way_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(outputs, "write_atomic", full)
    with pytest.raises(ValueError, match="--dump-dir requires a place"), dumping(tmp_path):
        step("imported", square())


def test_the_stages_before_a_refusal_are_there(tmp_path: Path) -> None:
    (tmp_path / "m.mlir").write_text(
        "module { func.func @main(%x: tensor<0xf32>) -> tensor<0xf32> {"
        " %0 = stablehlo.add %x, %x : tensor<0xf32> return %0 : tensor<0xf32> } }"
    )
    file, to = tmp_path / "m.mlir", tmp_path / "dump"
    line = f"shardwright compile {file} --target trn1 --dump-dir {to} --logfile {tmp_path}/log"
    assert compile_line(f"{line} --output {tmp_path}/m.neff") == 70
    assert any(name.endswith("-refused.txt") for name in files_of(to))
