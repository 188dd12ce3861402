"""What a job that keeps residuals in host memory says: report and screen, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.compiler.diagnostics import CapacityError, UsageError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.types import tensor_type
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.program import BufferInfo, StepPlan
from shardwright.orchestrator.report import sections
from shardwright.orchestrator.report.shape import check_report
from shardwright.orchestrator.road.offload import check_offload, host_section, instance_bytes
from shardwright.sharding.settings import REMATS, StrategySettings
from tests.support.plans import report_of

TRN1 = load_target("trn1.32xlarge")
GIB = 2**30


def step_of(gib: int, stages: int, cores: int, slots: tuple[int, ...] = ()) -> StepPlan:
    """A step that keeps one buffer of so many GiB on the host, for every core of every stage."""
    kept = tensor_type((gib, GIB), DType.U8)
    info = BufferInfo(
        name="residual/0",
        role="residual",
        local_type=kept,
        global_type=kept,
        axes=((), ()),
        stages=tuple(range(stages)) if slots else (),
        slots=slots,
        memory="host",
    )
    mesh = {"pp": stages, "dp_shard": cores // stages}
    schedules = (((("forward",), 1),),) * stages
    return StepPlan(mesh=mesh, buffers={info.name: info}, programs=(), schedules=schedules)


def test_cores_of_an_instance_share_its_memory() -> None:
    """32 cores of an instance of trn1 keep 32 times as much as one; of a mesh of 2, 2 do."""
    assert instance_bytes(step_of(3, 1, 64), 32) == 32 * 3 * GIB
    assert instance_bytes(step_of(3, 1, 2), 32) == 2 * 3 * GIB
    found = host_section(step_of(3, 1, 64), TRN1)
    assert found == {
        "host": {"per_core_bytes": 3 * GIB, "bytes": 96 * GIB, "limit_bytes": 512 * GIB}
    }


def test_the_fullest_instance_counts() -> None:
    """Two stages of 32 cores on an instance each: the first holds two micro-batches, the second
    one."""
    assert instance_bytes(step_of(1, 2, 64, slots=(2, 1)), 32) == 64 * GIB
    assert instance_bytes(step_of(1, 2, 32, slots=(2, 1)), 32) == 16 * (2 + 1) * GIB


def test_more_than_an_instance_has_is_refused() -> None:
    check_offload(step_of(16, 1, 32), TRN1)  # 512 GiB of 512
    with pytest.raises(CapacityError, match=r"544\.000 GiB per instance .* has 512 GiB") as raised:
        check_offload(step_of(17, 1, 32), TRN1)
    assert raised.value.code == "SW_CAPACITY"


@pytest.mark.parametrize("name", ["inf2.48xlarge", "trn3-gen1-ultraserver"])
def test_a_machine_without_a_known_link_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"known host link .* got {name} with 0 GB/s") as raised:
        check_offload(step_of(1, 1, 2), load_target(name))
    assert raised.value.code == "SW_OFFLOAD"


def test_a_machine_without_known_memory_is_refused() -> None:
    with pytest.raises(UsageError, match="0 GiB"):
        check_offload(step_of(1, 1, 2), replace(TRN1, host_memory_bytes=0))


def test_a_file_of_the_machine_answers(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    facts = {"host_link_gb_per_s": 12, "host_memory_gib": 64}
    file.write_text(json.dumps({"base": "inf2.48xlarge", "facts": facts}))
    target = load_target(str(file))
    assert (target.host_link_bytes_per_s, target.host_memory_bytes) == (12e9, 64 * GIB)
    check_offload(step_of(1, 1, 2), target)


def test_nothing_is_asked_of_a_machine_where_nothing_is_kept() -> None:
    step = replace(step_of(1, 1, 2), buffers={})
    check_offload(step, load_target("inf2.48xlarge"))
    assert host_section(step, TRN1) == {}


@pytest.mark.matrix
def test_the_report_counts_hosts_beside_hbm(tmp_path: Path) -> None:
    kept, offloaded = (
        report_of(tmp_path, 3, (f"strategy.remat={remat}",)) for remat in ("selective", "offload")
    )
    check_report(offloaded)
    host = offloaded["memory"]["host"]
    assert "host" not in kept["memory"]
    assert host["bytes"] == 32 * host["per_core_bytes"] and host["limit_bytes"] == 512 * GIB
    held = [r["memory"]["argument_bytes"]["activations"] for r in (kept, offloaded)]
    assert held[0] - held[1] == host["per_core_bytes"]
    rows = [row for row in offloaded["collectives"] if row["axis"] == "host"]
    assert {row["kind"] for row in rows} == {"host_store", "host_load"}
    assert all(row["stream"] is None and row["algorithm"] == "host link" for row in rows)
    stored = [
        sum(r["bytes"] * r["count"] for r in rows if r["kind"] == k)
        for k in ("host_store", "host_load")
    ]
    assert stored == [host["per_core_bytes"]] * 2
    assert not [s for s in offloaded["streams"]["streams"] if "host" in str(s["collectives"])]
    assumed = [{a["name"] for a in r["limits"]["assumed"]} for r in (kept, offloaded)]
    assert "host_link_gb_per_s" in assumed[1] - assumed[0]
    shown = " ".join(str(line) for line in sections.laid(sections.memory(offloaded), 120))
    assert "of 512.00 GiB host memory per instance" in shown
    assert "host memory" not in " ".join(
        str(line) for line in sections.laid(sections.memory(kept), 120)
    )


def test_auto_leaves_the_host_alone() -> None:
    assert REMATS == ("none", "selective", "full")
    words = StrategySettings.__dataclass_fields__["remat"].metadata["choices"]
    assert set(words) == {*REMATS, "auto", "offload"}
