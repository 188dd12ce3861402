"""`shardwright cache`: what a person is shown, and what is removed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from shardwright.orchestrator.cache import About, Cache
from shardwright.orchestrator.cli import main
from tests.support.small_job import bundle_bytes, write_job

CLAIMED = f"{7:064x}"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """Four entries: three compiled ones of different ages, one partition."""
    made = Cache(tmp_path / "cache")
    for number, kind in enumerate(("compile", "compile", "compile", "partition")):
        made.put(kind, f"{number:064x}", bytes(1000), About(f"unit#{number}", {"part": "x"}))
        then = time.time() - 3600 * number
        os.utime(made.path(kind, f"{number:064x}"), (then, then))
    made.tally.count("compile", hit=True)
    made.tally.count("compile", hit=False)
    made.tally.count("compile", hit=False)
    made.tally.save()
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    return made


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(["cache", *words]) == code
    return capsys.readouterr().out


def data(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    return json.loads(told(capsys, *words, "--json", code=code))


def test_ls_has_the_last_used_first(cache: Cache, capsys: pytest.CaptureFixture[str]) -> None:
    rows = data(capsys, "ls")["entries"]
    assert [row["name"] for row in rows] == [f"unit#{n}" for n in range(4)]
    assert all(row["bytes"] > 1000 for row in rows)
    assert [r["kind"] for r in data(capsys, "ls", "--kind", "partition")["entries"]] == [
        "partition"
    ]
    text = told(capsys, "ls", "--limit", "2")
    assert "unit#1" in text and "unit#2" not in text and "4 entries" in text and "2 shown" in text
    assert "NEURON_COMPILE_CACHE_URL" in text
    assert all(len(line) <= 80 for line in text.splitlines()[:-1])


def test_names_of_entries_command_no_terminal(
    cache: Cache, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.put("compile", "e" * 64, b"x", About("[bold]\x1b]0;owned\x07\nname[/]"))
    text = told(capsys, "ls")
    assert "\x1b" not in text and "\x07" not in text and "[bold]?]0;owned??name[/]" in text


def test_stats_adds_up_kinds(cache: Cache, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["kind"]: row for row in data(capsys, "stats")["kinds"]}
    assert (rows["compile"]["entries"], rows["partition"]["entries"]) == (3, 1)
    assert (rows["compile"]["hits"], rows["compile"]["misses"]) == (1, 2)
    assert "33%" in told(capsys, "stats")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"compile hits": "many"}', bytes(10**6)])
def test_damaged_counts_are_none(
    cache: Cache, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    (cache.local.directory / "tally.json").write_bytes(content)
    assert all(row["hits"] == 0 for row in data(capsys, "stats")["kinds"])


def test_verify_finds_and_repairs(cache: Cache, capsys: pytest.CaptureFixture[str]) -> None:
    assert data(capsys, "verify")["faults"] == []
    damaged = cache.path("compile", f"{1:064x}")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    aside = cache.path("compile", f"{2:064x}")
    aside.with_suffix(".corrupt").write_bytes(b"old")
    left = damaged.with_name(f".{damaged.name}.{'a' * 32}")
    left.write_bytes(b"x")
    os.utime(left, (0, 0))
    used = damaged.stat().st_mtime
    assert len(data(capsys, "verify", code=1)["faults"]) == 3
    assert damaged.stat().st_mtime == used and "--repair" in told(capsys, "verify", code=1)
    assert [f["removed"] for f in data(capsys, "verify", "--repair")["faults"]] == [True] * 3
    assert data(capsys, "verify")["faults"] == []
    assert aside.exists() and not damaged.exists() and not left.exists()


def test_clean_by_age_and_kind_leaves_what_a_job_works_on(
    cache: Cache, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data(capsys, "clean", "--older-than", "90m", "--dry-run")["entries"] == 2
    release = cache.claim("compile", f"{2:064x}")
    assert release is not None
    done = data(capsys, "clean", "--older-than", "90m")
    assert (done["entries"], done["in_use"]) == (1, 1)
    release()
    assert data(capsys, "clean", "--kind", "compile")["entries"] == 3
    cache.put("plan", "f" * 64, b"x")
    assert "removed 1 entries" in told(capsys, "clean", "--all")
    assert data(capsys, "ls")["entries"] == []


@pytest.mark.parametrize("words", [(), ("--older-than", "soon"), ("--older-than", "30")])
def test_clean_wants_to_know_what(cache: Cache, words: tuple[str, ...]) -> None:
    assert main(["cache", "clean", *words]) == 2


def test_clear_locks(cache: Cache, capsys: pytest.CaptureFixture[str]) -> None:
    release = cache.claim("compile", CLAIMED)
    other = cache.claim("compile", f"{8:064x}")
    assert release is not None and other is not None
    other()
    assert data(capsys, "clear-locks") | {"place": ""} == {"place": "", "cleared": 1, "held": 1}
    assert Cache(cache.local.directory).claim("compile", CLAIMED) is None
    release()


def test_shared_wants_a_shared_cache(cache: Cache, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "ls", "--shared"]) == 2
    assert "s3://" in capsys.readouterr().err


@pytest.mark.matrix
def test_explain_names_the_part_of_the_key_that_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = str(write_job(tmp_path, cache={"dir": str(tmp_path / "cache")}))

    def explained(*words: str) -> dict[str, list[dict[str, Any]]]:
        capsys.readouterr()
        assert main(["cache", "explain", job, "--json", *words]) == 0
        rows = json.loads(capsys.readouterr().out)["units"]
        kinds = {row["kind"] for row in rows}
        return {kind: [row for row in rows if row["kind"] == kind] for kind in kinds}

    first = explained()
    assert set(first) == {"plan", "partition", "compile"}
    assert {row["cache"] for rows in first.values() for row in rows} == {"miss"}
    folder = tmp_path / "cache"
    assert not [name for name in bundle_bytes(folder) if not name.endswith(".lock")]
    blocked = folder / "plan"
    folder.mkdir(exist_ok=True)
    blocked.write_text("no folder")
    capsys.readouterr()
    assert main(["plan", job, "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    told = [finding["message"] for finding in findings if finding["code"] == "SW_CACHE"]
    assert len(told) == 1 and told[0].startswith(f"the cache at {folder} cannot be written")
    blocked.unlink()
    assert main(["plan", job]) == 0
    before = bundle_bytes(folder)
    same = explained()
    for kind in ("plan", "partition", "compile"):
        assert {row["cache"] for row in same[kind]} == {"hit"}
    assert main(["cache", "explain", job, "--set", "compiler.optlevel=1"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "compiler.optlevel 1, not 2" in text
    assert f"1 of {len(same['compile']) + 2} in the cache" in text
    assert text.count("option optlevel 1, not 2") == len(same["compile"])
    assert bundle_bytes(folder) == before
