"""The store: identity, damage is a miss, a bad disk costs the entry only, one computation per
key."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.diagnostics import CompileError, UsageError
from orchestrator import executor as executor_module
from orchestrator.cache import Cache, default_directory
from orchestrator.executor import InlineExecutor, WorkUnit
from orchestrator.service import UnitService
from orchestrator.unit_errors import UnitFailedError

KEY = "ab" * 32


def test_an_entry_comes_back(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert cache.get("compile", KEY) is None
    cache.put("compile", KEY, b"payload")
    assert cache.get("compile", KEY) == b"payload"


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_entry_is_set_aside_and_missed(tmp_path: Path, damage: str) -> None:
    cache = Cache(tmp_path)
    cache.put("compile", KEY, b"payload" * 10)
    path = cache.path("compile", KEY)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes({"flip": bytes(data), "cut": bytes(data[:20]), "empty": b""}[damage])
    assert cache.get("compile", KEY) is None
    assert cache.warnings and path.with_suffix(".corrupt").exists()
    cache.put("compile", KEY, b"again")
    assert cache.get("compile", KEY) == b"again"


def test_a_disk_that_refuses_costs_the_entry_not_the_job(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    cache = Cache(blocked)
    cache.put("compile", KEY, b"payload")
    release = cache.claim("compile", KEY)
    assert release is not None and cache.get("compile", KEY) is None
    release()
    assert len(cache.warnings) == 2


def test_one_claim_at_a_time(tmp_path: Path) -> None:
    first = Cache(tmp_path).claim("compile", KEY)
    assert first is not None
    assert Cache(tmp_path).claim("compile", KEY) is None
    assert Cache(tmp_path).claim("partition", KEY) is not None
    first()
    assert Cache(tmp_path).claim("compile", KEY) is not None


def test_the_directory_follows_config_then_the_neuron_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", "file:///var/cache/neuron")
    assert default_directory("") == Path("/var/cache/neuron")
    assert default_directory("/mine") == Path("/mine")
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", "s3://bucket/cache")
    with pytest.raises(UsageError, match="SW_CACHE_URL"):
        default_directory("")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Replace the unit functions by one that records its payloads and fails on b"bad"."""
    seen: list[bytes] = []

    def run(_: str, payload: bytes) -> bytes:
        seen.append(payload)
        if payload == b"bad":
            raise CompileError("SW_TEST", "refused")
        return payload[::-1]

    monkeypatch.setattr(executor_module, "run_unit", run)
    return seen


def unit(payload: bytes) -> WorkUnit:
    return WorkUnit("compile", payload.hex().ljust(64, "0"), "u", payload)


def test_equal_units_run_once_and_a_second_service_runs_none(
    tmp_path: Path, counted: list[bytes]
) -> None:
    units = [unit(b"a1"), unit(b"b2"), unit(b"a1")]
    with UnitService(InlineExecutor, Cache(tmp_path)) as service:
        first = service.run(units)
        assert [row.cache for row in service.rows] == ["miss", "miss"]
    assert sorted(counted) == [b"a1", b"b2"]
    with UnitService(InlineExecutor, Cache(tmp_path)) as service:
        assert service.run(units) == first
        assert [row.cache for row in service.rows] == ["hit", "hit"]
    assert len(counted) == 2


def test_a_failing_unit_raises_after_the_others_are_stored(
    tmp_path: Path, counted: list[bytes]
) -> None:
    with UnitService(InlineExecutor, Cache(tmp_path)) as service:
        with pytest.raises(UnitFailedError) as caught:
            service.run([unit(b"a1"), unit(b"bad"), unit(b"z9")])
        assert (caught.value.unit, caught.value.error.code) == (unit(b"bad"), "SW_TEST")
        assert service.run([unit(b"a1"), unit(b"z9")]) is not None
    assert sorted(counted) == [b"a1", b"bad", b"z9"]
    assert Cache(tmp_path).get("compile", unit(b"bad").key) is None
