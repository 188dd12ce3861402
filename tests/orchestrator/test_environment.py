"""Variables of the environment: what they require, what they set of a job, and what beats them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator import cli
from shardwright.orchestrator.config.config import KEYS, JobConfig
from shardwright.orchestrator.config.job_flags import job_config
from shardwright.orchestrator.environment.reading import check, of_jobs, said
from shardwright.orchestrator.environment.variables import VARIABLES, Form, Reader
from tests.support.environment_page import PAGE, page
from tests.support.model_files import compile_line, write_model

ROOT = Path(__file__).resolve().parents[2]


def job(*words: str) -> JobConfig:
    """The job the command resolves from these words."""
    return job_config(cli._parser().parse_args(["plan", *words]))


def test_the_page_is_that_of_the_table() -> None:
    assert (ROOT / PAGE).read_text() == page(), "run `make docs`"


def test_keys_are_those_of_jobs_and_names_are_told_once() -> None:
    assert {one.key for one in VARIABLES.values() if one.key} <= set(KEYS)
    names = [name for one in VARIABLES.values() for name in one.names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [
        ("NEURON_FSDP", "1", "strategy.dependency_tokens", True),
        ("NEURON_FSDP", "0", "strategy.dependency_tokens", False),
        ("NEURON_NXD_FSDP_CC_MULTISTREAM", "1", "strategy.cc_streams", 2),
        ("NEURON_FSDP_NUM_LAYER_EARLY_AG_SHIFT", "2", "strategy.early_all_gather_shift", 2),
        ("NEURON_FSDP_NUM_LAYER_LATE_RS_SHIFT", "16", "strategy.late_reduce_scatter_shift", 16),
        ("NEURON_RT_DBG_DMA_PACKETIZATION_SIZE", "65536", "strategy.compute_packet_bytes", 65536),
        ("NEURON_RT_DBG_CC_DMA_PACKET_SIZE", "4096", "strategy.collective_packet_bytes", "4096"),
        ("ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB", "50", "strategy.bucket_mb", 50),
        ("BUCKET_CAP_MB", "25", "strategy.bucket_mb", 25),
        ("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", "3", "cluster.inflight_requests", 3),
        ("NEURON_PJRT_PROCESSES_NUM_DEVICES", "64,64,64", "cluster.instances", 3),
        ("NEURON_LOGICAL_NC_CONFIG", "1", "cluster.lnc", 1),
        ("NEURON_FUSE_SOFTMAX", "1", "compiler.attention", "fused"),
        ("NEURON_FUSE_SOFTMAX", "0", "compiler.attention", "unfused"),
        ("VLLM_NEURON_DISABLE_WARMUP_COMPILE", "1", "cache.miss", "refuse"),
    ],
)
def test_a_variable_sets_its_key_and_is_told(
    name: str,
    text: str,
    key: str,
    value: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, text)
    assert job().value(key) == value
    shown = str(value).lower() if isinstance(value, bool) else value
    told = capsys.readouterr().err
    assert f"{name}={text} from the environment: {key} = {shown}\n" in told


def test_what_is_said_nearer_beats_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB", "50")
    path = tmp_path / "job.toml"
    path.write_text("[strategy]\nbucket_mb = 8\n")
    assert job(str(path)).strategy.bucket_mb == 8
    told = capsys.readouterr().err
    assert "warning[SW_ENVIRONMENT]: ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB=50 has no effect" in told
    assert "the job says strategy.bucket_mb = 8" in told
    assert job("--set", "strategy.bucket_mb=9").strategy.bucket_mb == 9
    recipe = job("--recipe", "llama3.1-8b-32n-zero1")  # which lies below, as it does below flags
    assert recipe.strategy.bucket_mb == 50


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("NEURON_FSDP", "yes"),
        ("NEURON_FSDP_NUM_LAYER_EARLY_AG_SHIFT", "17"),
        ("NEURON_FSDP_NUM_LAYER_EARLY_AG_SHIFT", "-1"),
        ("NEURON_RT_DBG_DMA_PACKETIZATION_SIZE", "2048"),
        ("NEURON_RT_DBG_CC_DMA_PACKET_SIZE", "65536,x"),
        ("NEURON_RT_DBG_CC_DMA_PACKET_SIZE", "131072"),
        ("NEURON_RT_ROOT_COMM_ID", "host"),
        ("NEURON_RT_ROOT_COMM_ID", "host:99999"),
        ("NEURON_RT_VISIBLE_CORES", "3-1"),
        ("NEURON_RT_VISIBLE_CORES", "0,1"),
        ("NEURON_RT_EXEC_TIMEOUT", "nan"),
        ("NEURON_SCRATCHPAD_PAGE_SIZE", "600"),
        ("NEURON_SCRATCHPAD_PAGE_SIZE", "4096"),
        ("NEURON_RT_LOG_LEVEL", "LOUD"),
    ],
)
def test_what_is_no_value_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=rf"SW_ENVIRONMENT.*{name} requires .*{text}"):
        said(name, {name: text})


def test_forms_are_read() -> None:
    read = {
        "NEURON_RT_VISIBLE_CORES": ("4-7", range(4, 8)),
        "NEURON_RT_EXEC_TIMEOUT": ("0.5", 0.5),
        "NEURON_RT_LOG_LEVEL": ("info", "INFO"),
        "NEURON_RT_ROOT_COMM_ID": ("10.0.0.1:63423", "10.0.0.1:63423"),
        "NEURON_RT_NUM_CORES": ("2", 2),
    }
    environment = {name: text for name, (text, _) in read.items()}
    for name, (_, value) in read.items():
        found = said(name, environment)
        assert found is not None and found.value == value
    assert {one.row.name for one in check(Reader.RUN, environment)} == set(read) - {
        "NEURON_RT_ROOT_COMM_ID"
    }
    assert said("NEURON_FSDP", {"NEURON_FSDP": " "}) is None
    assert {one.form for one in VARIABLES.values()} == set(Form)


def test_two_places_may_not_say_two_things(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="one value of NEURON_FSDP_CC_MULTISTREAM"):
        said(
            "NEURON_FSDP_CC_MULTISTREAM",
            {"NEURON_FSDP_CC_MULTISTREAM": "1", "NEURON_NXD_FSDP_CC_MULTISTREAM": "0"},
        )
    monkeypatch.setenv("NEURON_CC_FLAGS", "--target=trn2 --lnc 2")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    with pytest.raises(UsageError, match=r"one value of cluster\.lnc is required, got 2"):
        job()
    processes = {"NEURON_PJRT_PROCESSES_NUM_DEVICES": "64,64", "NEURON_PJRT_PROCESS_INDEX": "2"}
    with pytest.raises(UsageError, match="requires a number below 2"):
        of_jobs(processes)
    assert len(of_jobs(processes | {"NEURON_PJRT_PROCESS_INDEX": "1"})) == 2


def test_framework_debug_writes_the_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEURON_FRAMEWORK_DEBUG", "1")
    write_model(tmp_path / "m.hlo.pb", lambda x: x * 2, [np.zeros((4, 6), np.float32)])
    assert compile_line("neuronx-cc compile m.hlo.pb --target trn1 --cache_dir=kept") == 0
    assert (tmp_path / "framework-debug" / "README.txt").is_file()
    args = cli._asked(["plan", "--model", "bert-base"])
    assert args.dump_dir == Path("framework-debug")
    assert cli._asked(["plan", "--dump-dir", "own"]).dump_dir == Path("own")


def test_a_miss_can_be_fatal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "m.hlo.pb", lambda x: x * 3, [np.zeros((4, 6), np.float32)])
    line = "neuronx-cc compile m.hlo.pb --target trn1 --cache_dir=kept"
    monkeypatch.setenv("VLLM_NEURON_DISABLE_WARMUP_COMPILE", "1")
    assert compile_line(line) == 70
    assert "SW_CACHE_MISS" in capsys.readouterr().err
    monkeypatch.delenv("VLLM_NEURON_DISABLE_WARMUP_COMPILE")
    assert compile_line(line) == 0
    monkeypatch.setenv("VLLM_NEURON_DISABLE_WARMUP_COMPILE", "1")
    assert compile_line(line) == 0


def test_old_names_in_a_job_file_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[strategy]\nname = "NEMO"\n[model]\nseq_len = "4Ki"\n')
    found = job(str(path))
    assert (found.strategy.name, found.model.seq_len) == ("llm-training", 4096)
    assert "strategy.name = NEMO is deprecated, it means llm-training" in capsys.readouterr().err
    assert job("--seq-len", "4k").model.seq_len == 4000
