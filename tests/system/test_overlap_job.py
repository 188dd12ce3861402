"""Streams, packets and buckets of a job as a user meets them: on the screen, in the report, in the
manifest.
"""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.compiler.neff.bundle import Bundle
from shardwright.orchestrator.config import config
from shardwright.orchestrator.report import sections
from shardwright.orchestrator.report.report import base_report
from shardwright.orchestrator.road.build import build
from shardwright.orchestrator.road.job import write_and_load
from shardwright.orchestrator.road.stages import Stages
from shardwright.orchestrator.road.timing import time_programs
from shardwright.orchestrator.road.units import unit_service
from shardwright.sim_cluster.__main__ import main as simulate
from shardwright.sim_cluster.timing.contention import Packets
from tests.support.small_job import write_job

MESH = {"dp_shard": 8, "tp": 4}
STRATEGY = {
    "bucket_mb": 1,
    "cc_streams": 2,
    "collective_packet_bytes": "65536,4096",
    "compute_packet_bytes": 8192,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Bundle]:
    """Report and bundle of the job."""
    folder = tmp_path_factory.mktemp("streams")
    job = config.load(write_job(folder, mesh=MESH, strategy=STRATEGY))
    stages = Stages()
    with unit_service(job, None) as service:
        built = build(job, service, stages)
        bundle = write_and_load(built, folder / "bundle")
        timings = time_programs(built, bundle.programs, service)
        return base_report(built, timings, service, stages, {}), bundle


@pytest.mark.matrix
def test_streams_and_packets_are_shown(made: tuple[dict[str, Any], Bundle]) -> None:
    report, _ = made
    section = report["streams"]
    assert section["compute_packet_bytes"] == 8192
    layers, weights = section["streams"]
    assert (layers["stream"], layers["packet_bytes"]) == (0, 65536)
    assert (weights["stream"], weights["packet_bytes"]) == (1, 4096)
    assert all(" tp" in name and "dp_shard" not in name for name in layers["collectives"])
    assert "all_gather dp_shard" in weights["collectives"]
    rows = report["collectives"]
    for row in section["streams"]:
        own = [r for r in rows if r["stream"] == row["stream"]]
        for key in ("count", "time_ps", "exposed_ps"):
            assert row[key] == sum(r[key] for r in own)
    assert {r["parts"] for r in rows if r["axis"] == "tp"} == {1}
    assert max(r["parts"] for r in rows if r["axis"] == "dp_shard") >= 7
    shown = " ".join(str(line).strip() for line in sections.laid(sections.streams(report), 80))
    assert "DMA packets of compute 8 KiB" in shown
    assert "packets 4 KiB" in shown


def test_a_moved_bundle_keeps_its_packets(
    made: tuple[dict[str, Any], Bundle], capsys: pytest.CaptureFixture[str]
) -> None:
    report, bundle = made
    assert bundle.manifest.metadata["packets"] == Packets(8192, (65536, 4096)).as_dict()
    assert simulate([str(bundle.path), "--time"]) == 0
    shown = capsys.readouterr().out
    assert f"nominal {report['timing']['step_time_s']:.9f} s" in shown
