"""A user's machine: a JSON file over a known one; what is wrong with it is said at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.isa.limits import limits_for
from shardwright.compiler.machine.custom_target import RULES
from shardwright.compiler.machine.target import load_target, target_names
from shardwright.compiler.surface.resolve import find_target
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.config.config import load
from shardwright.orchestrator.config.layout import layout_of
from shardwright.orchestrator.road.build import build
from shardwright.orchestrator.road.stages import Stages
from shardwright.orchestrator.road.timing import time_programs
from shardwright.orchestrator.road.units import unit_service
from tests.support.small_job import write_job

HALF = {"chips_per_instance": 8, "shape": [2, 4], "efa_gbps": 800, "efa_devices": 8}


def write(path: Path, data: Any) -> str:
    file = path / "machine.json"
    file.write_text(json.dumps(data))
    return str(file)


def test_facts_that_differ_and_those_of_the_base(tmp_path: Path) -> None:
    facts = HALF | {"efa_hop_us": {"value": 12, "source": "measured here"}}
    machine = load_target(write(tmp_path, {"base": "trn1n.32xlarge", "facts": facts}))
    base = load_target("trn1n.32xlarge")
    assert (machine.chips, machine.shape, machine.cores) == (8, (2, 4), 16)
    assert machine.efa_bytes_per_s == 100e9 and machine.collectives.efa_hop_ps == 12_000_000
    assert machine.link_bytes_per_s == base.link_bytes_per_s and machine.core == base.core
    assert machine.digest != base.digest
    assert find_target(machine.name) is machine
    assert limits_for(machine.name) == limits_for("trn1n.32xlarge")


def test_every_fact_of_the_data_files_is_known_or_fixed() -> None:
    """What may not be given is what the instruction set fixes."""
    files = Path(__file__).resolve().parents[2] / "compiler" / "machine" / "targets"
    facts = {key for f in files.glob("*.json") for key in json.loads(f.read_text())["facts"]}
    fixed = {key for key in facts - set(RULES)}
    assert set(RULES) <= facts
    prefixes = ("sbuf_", "psum_", "access_", "tensor_", "dma_descriptor_", "dma_partitions")
    names = {"dma_engines", "compute_latency_cycles", "wide_stride_factor"}
    names |= {"compiler", "refused_types", "refused_io_types"}
    assert all(key.startswith(prefixes) or key in names for key in fixed), fixed
    for name in target_names():
        data = json.loads((files / f"{name}.json").read_text())
        core = json.loads((files / f"{data['neuroncore']}.json").read_text())
        for key, fact in (core["facts"] | data["facts"]).items():
            rule = RULES.get(key)
            absent = (key, fact["value"]) == ("gpsimd_clock_ghz", 0)
            assert rule is None or absent or rule.holds(fact["value"]), (name, key)


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        ([], ["requires an object, got list"]),
        ({"facts": {}}, ["base requires one of inf1", "got None"]),
        ({"base": "trn9"}, ["got 'trn9'"]),
        ({"base": "trn1n.32xlarge", "fact": {}}, ["unknown key 'fact'"]),
        ({"base": "trn1n.32xlarge", "facts": 3}, ["facts requires an object"]),
        ({"base": "trn1n.32xlarge", "facts": {"efa_gbs": 1}}, ["did you mean efa_gbps"]),
        (
            {"base": "trn1n.32xlarge", "facts": {"shape": "4x4", "kangaring": 1, "efa_hop_us": -1}},
            ["shape requires a list", "kangaring requires true or false", "efa_hop_us requires"],
        ),
        ({"base": "trn1n.32xlarge", "facts": {"shape": [2, 4]}}, ["product of chips", "16"]),
        (
            {"base": "trn1.32xlarge", "facts": {"hbm_gib_per_chip": 1e308}},
            ["at most", "got 1e+308"],
        ),
        ({"base": "trn1.32xlarge", "facts": {"efa_gbps": float("inf")}}, ["at most", "got inf"]),
        (
            {"base": "trn1n.32xlarge", "facts": {"topology": "ring", "efa_devices": 0}},
            ["a ring requires one side", "both efa_devices and efa_gbps"],
        ),
        ({"base": "trn1n.32xlarge", "facts": {"allowed_lnc": [3]}}, ["one of 1, 2"]),
        (
            {"base": "trn1n.32xlarge", "facts": {"topology": "switch", "shape": [3, 16]}},
            ["domains that divide each other", "got [3, 16]"],
        ),
        (
            {
                "base": "trn1n.32xlarge",
                "facts": {"neuronlink_gb_per_s_per_link_per_direction": [96]},
            },
            ["one number per side or domain of shape (2)"],
        ),
    ],
)
def test_what_is_wrong_is_said_at_once(data: Any, texts: list[str], tmp_path: Path) -> None:
    file = write(tmp_path, data)
    with pytest.raises(UsageError) as caught:
        load_target(file)
    diagnostic = caught.value.diagnostic
    assert diagnostic.code == "SW_TARGET" and str(diagnostic.loc).startswith(file)
    assert all(text in diagnostic.message for text in texts), diagnostic.message


def test_files_that_are_not_there_or_not_json(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    for file, words in (
        (bad, "requires JSON"),
        (tmp_path / "none.json", "cannot be read: No such"),
    ):
        with pytest.raises(UsageError, match=words) as caught:
            load_target(str(file))
        assert caught.value.code == "SW_TARGET"


def test_files_of_any_editor_are_read(tmp_path: Path) -> None:
    """Some write a byte order mark in front."""
    file = tmp_path / "machine.json"
    file.write_text('{"base": "trn1n.32xlarge"}', encoding="utf-8-sig")
    assert load_target(str(file)).cores == load_target("trn1n.32xlarge").cores


def test_jobs_and_collectives_run_on_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"chips_per_instance": 2, "shape": [1, 2], "neuronlink_wire_us": 0.5}
    file = write(tmp_path, {"base": "trn1n.32xlarge", "facts": facts})
    assert main(["nccom", "allg", "-r", "8", "-N", "2", "-b", "1mb", "--target", file]) == 0
    assert "hier" in capsys.readouterr().out
    settings = {"target": file, "collectives": "mesh_max_bytes=0"}
    job = load(write_job(tmp_path, cluster=settings), [])
    with unit_service(job, None) as service:
        built = build(job, service, Stages())
        assert built.layout.mesh.sizes == {"dp_shard": 4}
        timings = time_programs(built, built.programs, service)
    assert timings.chosen.breakdown_ps["collective_dp_shard"] > 0
    uses = timings.chosen.collectives
    assert {(use.cost.algorithm, "mesh_max_bytes 0" in use.cost.why) for use in uses} == {
        ("ring", True)
    }
    with pytest.raises(UsageError, match=r"cluster\.collectives requires one of mesh_max_bytes"):
        layout_of(load(None, ["cluster.collectives=ring_min=4"]))
