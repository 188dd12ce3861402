"""One small built bundle, and its work units, for the tests that only read them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shardwright.compiler.neff.bundle import Bundle
from shardwright.orchestrator.service.executor import InlineExecutor, WorkUnit
from tests.support.small_job import Road, build_on, bundle_of, small_llama


@pytest.fixture(scope="session")
def small_road() -> Road:
    """The small llama on four cores, fp32, two micro-batches."""
    return build_on(small_llama(), {"dp_shard": 4})


@pytest.fixture(scope="session")
def small_bundle(small_road: Road, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Its bundle. Not to be changed: take `bundle_copy` for that."""
    return bundle_of(small_road, tmp_path_factory.mktemp("bundle") / "bundle")


@pytest.fixture
def bundle_copy(small_bundle: Bundle, tmp_path: Path) -> Path:
    """A copy of the bundle's directory, free to be damaged."""
    return Path(shutil.copytree(small_bundle.path, tmp_path / "bundle"))


@pytest.fixture(scope="session")
def units(tmp_path_factory: pytest.TempPathFactory) -> list[WorkUnit]:
    """The units of the small llama on two cores: one partition, several compile units."""
    found: list[WorkUnit] = []

    class Watching(InlineExecutor):
        def submit(self, unit: WorkUnit) -> None:
            found.append(unit)
            super().submit(unit)

    path = tmp_path_factory.mktemp("units")
    build_on(small_llama(), {"dp_shard": 2}, path / "cache", executor=Watching)
    return found


@pytest.fixture(scope="session")
def compile_units(units: list[WorkUnit]) -> list[WorkUnit]:
    return [unit for unit in units if unit.kind == "compile"]
