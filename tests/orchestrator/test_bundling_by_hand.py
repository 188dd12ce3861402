"""Where named buffers of a step lie in HBM, and what a fresh plan does with its parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.types import tensor_type
from shardwright.compiler.program import BufferInfo
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.road import bundling, plan_cache
from shardwright.orchestrator.road.stages import Stages
from shardwright.orchestrator.service.units import source_digest


def info(name: str, elements: int, *stages: int, slots: tuple[int, ...] = ()) -> BufferInfo:
    """A buffer of bf16."""
    kind = tensor_type((elements,), DType.BF16)
    return BufferInfo(
        name=name,
        role="parameter",
        local_type=kind,
        global_type=tensor_type((2 * elements,), DType.BF16),
        axes=(("dp",),),
        initial="zeros",
        stages=stages,
        slots=slots,
    )


def test_buffers_lie_one_after_the_other_on_256_bytes() -> None:
    """128 bf16 are 256 bytes, 129 are 258 and take 512."""
    infos = {i.name: i for i in (info("a", 128), info("b", 129), info("c", 1), info("d", 1))}
    placed, end = bundling._placed(infos, 1)
    assert {n: b.offset_bytes for n, b in placed.items()} == {"a": 0, "b": 256, "c": 768, "d": 1024}
    assert end == 1280
    b = placed["b"]
    assert (b.name, b.role, b.dtype, b.initial) == ("b", "parameter", DType.BF16, "zeros")
    assert (b.local_shape, b.global_shape, b.axes) == ((129,), (258,), (("dp",),))
    assert (b.part, b.stages, b.slots) == (None, (), ())


def test_stages_have_places_of_their_own_and_common_ones() -> None:
    """On stage 1 `y` holds two micro-batches of 256 bytes; `z` is on both, behind the longer."""
    infos = {
        i.name: i
        for i in (
            info("x", 1, 0),
            info("y", 100, 1, slots=(2,)),
            info("z", 1, 0, 1, slots=(1, 3)),
            info("w", 1, 0),
        )
    }
    placed, end = bundling._placed(infos, 2)
    assert {n: b.offset_bytes for n, b in placed.items()} == {"x": 0, "y": 0, "z": 512, "w": 768}
    assert end == 512 + 3 * 256  # of stage 1


def test_the_version_of_the_compiler_is_its_release_and_its_sources(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise bundling.metadata.PackageNotFoundError(name)

    sources = source_digest(("compiler", "collectives"))[:12]
    monkeypatch.setattr(bundling.metadata, "version", lambda name: {"shardwright": "7.8"}[name])
    assert bundling.compiler_version() == f"7.8+{sources}"
    monkeypatch.setattr(bundling.metadata, "version", missing)
    assert bundling.compiler_version() == f"source+{sources}"


@pytest.mark.parametrize("wanted", [True, False])
def test_a_fresh_plan_writes_the_trace_that_is_wanted(
    wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    built = SimpleNamespace(programs={"p": 1})
    reads = SimpleNamespace(reads=lambda job: {"file": "digest"})

    @contextlib.contextmanager
    def service(job: JobConfig, progress: Any, executor: Any) -> Iterator[str]:
        asked.append((job, progress, executor))
        yield "service"

    def timed(*given: Any) -> Any:
        asked.append(given)
        return SimpleNamespace(trace=b"trace")

    monkeypatch.setattr("shardwright.orchestrator.road.build.build", lambda *given: built)
    monkeypatch.setattr("shardwright.orchestrator.road.units.unit_service", service)
    monkeypatch.setattr("shardwright.orchestrator.road.timing.time_programs", timed)
    monkeypatch.setattr(
        "shardwright.orchestrator.report.report.base_report", lambda *given: {"given": given[3:]}
    )
    job, path, executor = JobConfig(), tmp_path / "out" / "trace.json", object()
    shared: Any = plan_cache.Shared(lambda: executor, reads)
    asked_of = plan_cache._Asked(path if wanted else None, None, shared, None, inside=False)
    stages = Stages(traces=reads)
    report = plan_cache._fresh(job, asked_of, stages)
    assert path.exists() is wanted and (not wanted or path.read_bytes() == b"trace")
    given, nothing = report["given"]
    assert nothing == {} and given is stages and "time" in stages.seconds
    assert asked == [(job, None, shared.executor), (built, {"p": 1}, "service", wanted)]
