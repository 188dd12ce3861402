"""`run --compile-only`: bundles of one job or many from one service, a summary, an exit code."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from shardwright.compiler.neff.bundle import load_bundle
from shardwright.orchestrator.cli import main
from tests.support.small_job import JOB, SIZES, bundle_bytes

# Same units as JOB, another job; units that are too many instructions; more than the memory.
TWIN = JOB.replace("[run]", "[run]\nseed = 7")
TOO_LONG = JOB + "[compiler]\ninstruction_limit = 10\n"
TOO_LARGE = JOB.replace('config = "config.json"', 'preset = "llama2-70b"')


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    return tmp_path


def compiled(folder: Path, jobs: dict[str, str], *words: str) -> int:
    for name, text in jobs.items():
        (folder / name).write_text(text)
    return main(["run", *jobs, "--compile-only", *words])


@pytest.mark.matrix
def test_jobs_share_a_service_and_fail_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = {"a.toml": JOB, "twin.toml": TWIN, "long.toml": TOO_LONG, "large.toml": TOO_LARGE}
    assert compiled(folder, jobs, "--json") == 70  # of the first that failed
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads((folder / "out" / "compile.json").read_text())
    rows = {row["job"]: row for row in told["jobs"]}
    assert [rows[name]["exit_code"] for name in jobs] == [0, 0, 70, 71]
    assert rows["a.toml"]["units"] == rows["twin.toml"]["units"]
    assert rows["large.toml"]["error"]["code"] == "SW_CAPACITY"
    assert not rows["long.toml"]["bundle"]
    bundles = [folder / "out" / name / "bundle" for name in ("a", "twin")]
    assert bundle_bytes(bundles[0]) == bundle_bytes(bundles[1])
    bundle = load_bundle(bundles[0], "trn1.2xlarge")
    sizes = rows["a.toml"]["programs"]
    assert set(sizes) == set(bundle.programs) and min(sizes.values()) > 0

    lines = (folder / "out" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    started = Counter(e["key"] for e in events if e["event"] == "unit.started")
    assert set(started.values()) == {1}, "each unit once, however many jobs have it"
    assert told["units"]["compiled"] == told["units"]["total"] == len(started)

    assert compiled(folder, {"a.toml": JOB}, "--out", "alone") == 0
    screen = capsys.readouterr().out
    total = rows["a.toml"]["units"]["total"]
    assert f"{total} distinct units: {total} cached, 0 compiled, 0 failed" in screen
    assert bundle_bytes(folder / "alone" / "bundle") == bundle_bytes(bundles[0])


@pytest.mark.parametrize(
    ("jobs", "words", "told"),
    [
        ({"a.toml": JOB, "b.toml": JOB.replace("inline", "process")}, [], "run.executor"),
        ({"a.toml": JOB, "b.toml": JOB + '[cache]\ndir = "/tmp/x"\n'}, [], "[cache]"),
        ({"a.toml": JOB, "x/a.toml": JOB}, [], "a place for every job"),
    ],
)
def test_jobs_that_cannot_share_are_refused(
    jobs: dict[str, str],
    words: list[str],
    told: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "x").mkdir()
    assert compiled(folder, jobs, *words) == 2
    err = capsys.readouterr().err
    assert ("SW_USAGE" in err and told in err and "b.toml" in err) or "x/a.toml" in err


def test_several_jobs_run_only_compile(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("run", "submit"):
        assert main([verb, "a.toml", "b.toml"]) == 2
        assert "--compile-only" in capsys.readouterr().err
