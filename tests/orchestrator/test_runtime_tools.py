"""neuron-ls, neuron-top, neuron-monitor, neuron-profile, and names that were withdrawn."""

from __future__ import annotations

import json
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.machine.target import load_target, logical
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.neff.neff_files import open_program
from shardwright.orchestrator.runtime.commands import WITHDRAWN
from shardwright.orchestrator.runtime.counted import count
from shardwright.orchestrator.runtime.machine import Execution, Loading, Machine
from shardwright.orchestrator.runtime.neuron_ls import devices, drawn, linked
from shardwright.orchestrator.runtime.profile import advice
from tests.support.model_files import compile_line, write_model

TRN2 = logical(load_target("trn2.48xlarge"))
DEVICE = (
    *("neuron_device", "bdf", "cpu_affinity", "numa_node", "connected_to", "nc_count"),
    *("logical_neuroncore_config", "memory_size", "neuroncore_ids", "neuron_processes"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWRIGHT_MACHINE", str(tmp_path / "machine"))
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_devices_have_the_keys_and_the_memory_of_the_guide(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The guide's example: 96 GB, four logical cores, a torus of 4 x 4."""
    rows = json.loads(shown(capsys, "neuron-ls", "--target", "trn2", "--json-output"))
    assert len(rows) == 16 and tuple(rows[0]) == DEVICE
    assert (rows[0]["memory_size"], rows[0]["nc_count"]) == (103079215104, 4)
    assert (rows[5]["neuroncore_ids"], rows[5]["connected_to"]) == ([20, 21, 22, 23], [1, 4, 6, 9])
    assert rows[0]["connected_to"] == [1, 3, 4, 12]  # around both sides
    small = json.loads(shown(capsys, "neuron-ls", "--target", "trn2", "--lnc", "1", "-j"))
    assert small[15]["neuroncore_ids"] == list(range(120, 128))
    text = shown(capsys, "neuron-ls", "--target", "trn2", "-w", "-t")
    assert "instance-type: trn2.48xlarge" in text and "96 GB" in text and "~ [0]  -- [1]" in text


def test_links_of_other_topologies() -> None:
    assert linked(load_target("inf1.xlarge"), 0) == []
    ring = load_target("inf2.48xlarge")
    assert all(chip in linked(ring, other) for chip in range(12) for other in linked(ring, chip))
    assert drawn(TRN2).count("\n") == 3


def test_processes_are_those_that_hold_cores(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "4-5")
    monkeypatch.setenv("NEURON_PROCESS_TAG", "mine")
    machine = Machine(TRN2)
    memory = {"tensors": 7, "model code": 5, "shared scratchpad": 3, "DMA rings": 2}
    with machine.held(Loading(model="m", uuid="u", ranks=2, memory=memory)):
        (row,) = (r for r in devices(TRN2, machine.holders()) if r["neuron_processes"])
        assert row["neuron_device"] == 1 and len(row["neuron_processes"]) == 1
        done = Execution(
            ended_s=time.time(),
            pid=row["neuron_processes"][0]["pid"],
            cores=(4, 5),
            model="m",
            status=0,
            latency_s=0.5,
            flops=10**12,
        )
        machine.note(done)
        found = json.loads(
            shown(capsys, "neuron-monitor", "--target", "trn2", "--count", "1", "--period", "10")
        )
        assert "2 of 64 cores held" in shown(capsys, "neuron-top", "--target", "trn2")
    (runtime,) = found["neuron_runtime_data"]
    assert (runtime["neuron_runtime_tag"], runtime["error"]) == ("mine", "")
    kinds = runtime["report"]
    core = kinds["neuroncore_counters"]["neuroncores_in_use"]["4"]
    assert core["neuroncore_utilization"] == pytest.approx(5.0)
    assert core["flops"] == pytest.approx(10**11)
    assert kinds["execution_stats"]["execution_summary"]["completed"] == 1
    assert kinds["execution_stats"]["latency_stats"]["device_latency"]["p50"] == 0.5
    used = kinds["memory_used"]["neuron_runtime_used_bytes"]
    assert used["neuron_device"] == 2 * 17
    assert used["usage_breakdown"]["neuroncore_memory_usage"]["5"] == {
        "constants": 0,
        "model_code": 5,
        "model_shared_scratchpad": 3,
        "runtime_memory": 2,
        "tensors": 7,
    }
    (model,) = kinds["memory_used"]["loaded_models"]
    assert model["name"] == "m" and set(model["subgraphs"]) == {"sg_00", "sg_01"}
    hardware = found["neuron_hardware_info"]
    assert (hardware["neuron_device_count"], hardware["logical_neuroncore_config"]) == (16, 2)
    assert set(found) == {
        *("neuron_runtime_data", "system_data", "instance_info", "neuron_hardware_info"),
    }


def test_a_profile_has_the_fields_of_the_explorer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """tanh(x @ w): 2 * 256 * 512 * 128 FLOPs; x, w and the result cross HBM once."""
    shapes = [np.zeros((256, 512), np.float32), np.zeros((512, 128), np.float32)]
    write_model(folder / "m.mlir", lambda x, w: jnp.tanh(x @ w), shapes)
    assert compile_line("neuronx-cc compile m.mlir --target trn1 --output m.neff") == 0
    capsys.readouterr()
    assert main(["neuron-profile", "capture", "-n", "m.neff", "-s", "p.ntff"]) == 0
    seen = ("neuron-explorer", "view", "-n", "m.neff", "-s", "p.ntff", "--output-format")
    capsys.readouterr()
    ((_, summary),) = json.loads(shown(capsys, *seen, "summary-json")).items()
    assert summary["model_flops"] == 2 * 256 * 512 * 128
    io = 4 * (256 * 512 + 512 * 128 + 256 * 128)
    assert summary["hbm_read_bytes"] + summary["hbm_write_bytes"] >= io
    assert summary["hbm_write_bytes"] == 4 * 256 * 128
    assert summary["inputs_outputs_weights_size_bytes"] == io
    assert 0 < summary["mfu_estimated_percent"] < summary["hfu_estimated_percent"] < 1
    busy = summary["tensor_engine_active_time"]
    assert 0 < busy <= summary["total_active_time"] < summary["total_time"]
    assert summary["tensor_engine_active_time_percent"] == busy / summary["total_time"]
    rows = json.loads(shown(capsys, *seen, "json"))
    assert set(rows["instruction"][0]) == {
        *("timestamp", "duration", "label", "hlo_name", "opcode", "operands"),
    }
    assert rows["summary"] == [summary] and rows["is_simulation"]
    assert json.loads(shown(capsys, *seen, "perfetto"))["traceEvents"]
    assert "total_time" in shown(capsys, *seen, "summary-text")
    done = count(open_program(folder / "m.neff").program)
    assert done.of_opcode("matmul") == summary["matmul_instruction_count"]
    Path("other.neff").write_bytes(Path("m.neff").read_bytes() + b" ")
    assert main(["neuron-profile", "view", "-n", "other.neff", "-s", "p.ntff"]) == 72
    Path("none.ntff").write_text("{}")
    assert main(["neuron-profile", "view", "-s", "none.ntff"]) == 72
    assert "SW_PROFILE" in capsys.readouterr().err


def test_advice_follows_the_rules_of_the_summary_page() -> None:
    good = {"mfu_estimated_percent": 0.6, "transpose_flops": 1.0, "hardware_flops": 20.0}
    assert not list(advice(good))
    assert len(list(advice({**good, "transpose_flops": 3.0}))) == 1
    assert len(list(advice({**good, "mfu_estimated_percent": 0.4}))) == 1


@pytest.mark.parametrize("name", [*WITHDRAWN, "neuron-profile analyze"])
def test_what_was_withdrawn_is_refused_by_name(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["withdrawn", name] if name in WITHDRAWN else name.split()
    assert main([*words, "--any", "flag"]) == 2
    told = capsys.readouterr().err
    assert f"SW_WITHDRAWN]: a tool of today is required, got {name}" in told and "help:" in told
