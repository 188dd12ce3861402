"""Configurations of other projects as jobs: public examples of each, every sentence about them, and
files that are none.

The files in `imported/` have the fields and values of the projects' public examples; their texts
are our own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator import cli
from shardwright.orchestrator.config.config import KEYS, JobConfig
from shardwright.orchestrator.config.importers.facts import FACTS
from shardwright.orchestrator.config.importers.fields import MOST_DEPTH
from shardwright.orchestrator.config.importers.imported import PROJECTS, Imported
from shardwright.orchestrator.config.importers.scripts import flag_fields
from shardwright.orchestrator.config.importers.table import key, text
from shardwright.orchestrator.config.job_flags import imported_job
from shardwright.orchestrator.config.model import resolve_task
from shardwright.orchestrator.config.model_file import model_config
from shardwright.orchestrator.models import leaves
from shardwright.orchestrator.models.family_table import architecture_of
from shardwright.orchestrator.models.presets import SIZED
from shardwright.orchestrator.report import sections
from shardwright.orchestrator.report.explain_imported import explain
from shardwright.orchestrator.road import build
from shardwright.orchestrator.road.units import unit_service
from tests.support.cells import long_in_matrix

FOLDER = Path(__file__).parent / "imported"


def read(project: str, path: Path, *flags: str) -> tuple[JobConfig, Imported]:
    args = cli._parser().parse_args(["plan", "--from", project, str(path), *flags])
    job, found = imported_job(args)
    assert found
    return job, found


def written(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def titan(folder: Path, **tables: Mapping[str, Any]) -> Path:
    config = {"model": {"name": "llama3", "flavor": "8B"}, **tables}
    return written(folder, "job.json", json.dumps(config, indent=1))


def refused(project: str, path: Path, *flags: str) -> UsageError:
    with pytest.raises(UsageError) as error:
        read(project, path, *flags)
    return error.value


EXAMPLES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "torchtitan 8B": (
        "torchtitan",
        "titan_8b.toml",
        {
            "model.preset": "llama3-8b",
            "model.seq_len": 8192,
            "model.learning_rate": 3e-4,
            "strategy.name": "fsdp",
            "strategy.remat": "selective",
            "strategy.micro_batch": 1,
            "strategy.global_batch": 32,
            "cluster.instances": 1,
            "mesh.dp_shard": -1,
            "mesh.tp": 0,
        },
    ),
    "torchtitan 70B": (
        "torchtitan",
        "titan_70b.json",
        {
            "model.preset": "llama3-70b",
            "strategy.name": "fsdp",
            "strategy.remat": "full",
            "strategy.micro_batch": 8,
            "strategy.global_batch": 32,
            "strategy.reduce_dtype": "float32",
            "strategy.reshard_after_forward": True,
            "mesh.tp": 8,
        },
    ),
    "torchtitan 405B": (
        "torchtitan",
        "titan_405b.json",
        {
            "model.preset": "",
            "model.dtype": "bfloat16",
            "strategy.micro_batch": 2,
            "strategy.remat": "full",
            "mesh.tp": 8,
            "mesh.dp_shard": -1,
        },
    ),
    "Megatron GPT-3 175B": (
        "megatron",
        "megatron_gpt3_175b.sh",
        {
            "model.preset": "gpt3-175b",
            "model.seq_len": 2048,
            "model.dtype": "bfloat16",
            "strategy.name": "llm-training",
            "strategy.zero": 0,
            "strategy.remat": "none",
            "strategy.global_batch": 1536,
            "strategy.reduce_gradients": "after",
            "strategy.sequence_parallel": False,
            "mesh.tp": 8,
            "mesh.pp": 16,
            "cluster.instances": 4,
        },
    ),
    "Megatron Llama 3 8B": (
        "megatron",
        "megatron_llama3_8b.sh",
        {
            "model.preset": "llama3-8b",
            "model.seq_len": 8192,
            "strategy.zero": 1,
            "strategy.global_batch": 128,
            "strategy.reduce_dtype": "bfloat16",
            "strategy.reduce_gradients": "last",
            "cluster.instances": 1,
            "mesh.dp_shard": -1,
        },
    ),
    "Megatron GPT 345M": (
        "megatron",
        "megatron_gpt_345m.sh",
        {
            "model.preset": "gpt3-350m",
            "model.seq_len": 1024,
            "strategy.remat": "full",
            "strategy.micro_batch": 2,
            "strategy.global_batch": 16,
            "mesh.tp": 2,
            "mesh.pp": 2,
        },
    ),
    "Megatron Mixtral 8x7B": (
        "megatron",
        "megatron_mixtral_8x7b.sh",
        {
            "model.preset": "",
            "model.seq_len": 4096,
            "strategy.zero": 1,
            "strategy.global_batch": 256,
            "cluster.instances": 1,
            "mesh.pp": 4,
            "mesh.ep": 8,
            "mesh.dp_shard": -1,
        },
    ),
    "NxDT Llama 3 8B": (
        "nxdt",
        "nxdt_llama3_8b.yaml",
        {
            "model.preset": "llama3-8b",
            "cluster.target": "trn1.32xlarge",
            "cluster.instances": 4,
            "strategy.global_batch": 1024,
            "strategy.zero": 1,
            "strategy.remat": "selective",
            "strategy.sequence_parallel": True,
            "compiler.model_type": "transformer",
            "mesh.tp": 32,
        },
    ),
    "NxDT Llama 3 8B LoRA": (
        "nxdt",
        "nxdt_llama3_8b_lora.yaml",
        {
            "model.preset": "llama3-8b",
            "model.lora_r": 16,
            "model.lora_alpha": 32.0,
            "model.lora_targets": ("q_proj", "k_proj", "v_proj"),
            "cluster.instances": 1,
            "strategy.global_batch": 64,
            "strategy.zero": 0,
            "mesh.tp": 32,
        },
    ),
    "NxDT Llama 3 70B": (
        "nxdt",
        "nxdt_llama3_70b.yaml",
        {
            "model.preset": "llama3-70b",
            "cluster.instances": 16,
            "mesh.tp": 32,
            "mesh.pp": 8,
            "mesh.dp_shard": -1,
            "strategy.schedule": "1f1b",
        },
    ),
    "NxDT Llama 2 7B": (
        "nxdt",
        "nxdt_llama2_7b.yaml",
        {
            "model.preset": "llama2-7b",
            "model.seq_len": 4096,
            "model.learning_rate": 3e-4,
            "cluster.instances": 1,
            "mesh.tp": 8,
        },
    ),
}
"""Project, file, and keys of the job that it is."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_public_example_is_the_job_it_says(name: str) -> None:
    project, file, keys = EXAMPLES[name]
    job, found = read(project, FOLDER / file)
    assert {key: job.value(key) for key in keys} == keys
    section = found.section()
    assert not section["unknown"]
    lines = (FOLDER / file).read_text().splitlines()
    for row in section["read"]:
        word = row["field"].rpartition(".")[2]
        assert word in lines[row["line"] - 1].replace("-", "_"), row


TP8 = ("--mesh", "dp_shard=auto,tp=8")
COUNTERPARTS = {
    "torchtitan 8B": TP8,
    "torchtitan 70B": ("--instances", "16", "--micro-batch", "1"),
    "torchtitan 405B": (
        *("--instances", "64", "--micro-batch", "1"),
        *("--mesh", "dp_shard=auto,tp=32"),
    ),
    "Megatron GPT-3 175B": (
        *("--instances", "16", "--mesh", "pp=16,tp=32,dp_shard=auto"),
        *("--set", "strategy.zero=1", "--remat", "full"),
    ),
    "Megatron Llama 3 8B": (*TP8, "--remat", "full"),
    "Megatron GPT 345M": (),
    "Megatron Mixtral 8x7B": (
        *("--instances", "8", "--remat", "full", "--set", "strategy.zero=3"),
        *("--set", "model.capacity_factor=1.25"),
    ),
    "NxDT Llama 3 8B": (),
    "NxDT Llama 3 8B LoRA": (),
    "NxDT Llama 3 70B": (),
    "NxDT Llama 2 7B": (),
}
"""What a machine of ours with enough memory takes besides the file: GPUs of 80 GB hold more of a
step than a core (docs/from.md)."""


SENTENCES = [
    ("torchtitan 405B", "model.converters float8: products are computed in bfloat16, not in a type"
     " of 8 bits"),
    ("torchtitan 70B", "the model is the preset llama3-70b, which has these sizes"),
    ("torchtitan 8B", "a rank is a core: 1 instance of 32 cores for at least 1, the file does not"
     " say (--instances)"),
    ("torchtitan 70B", "defaults of torchtitan: parallelism.pipeline_parallel_schedule 1F1B,"
     " parallelism.pipeline_parallel_microbatch_size 1"),
    ("Megatron GPT-3 175B", "rampup_batch_size 16 16 5859375: steps have the full batch, as after"
     " the ramp"),
    ("Megatron GPT-3 175B", "the model is the preset gpt3-175b, which has these sizes, and its"
     " vocabulary, which the file does not say"),
    ("Megatron GPT-3 175B", "there are the 128 ranks of the mesh, not 8"),
    ("Megatron GPT-3 175B", "fp16 is computed as bfloat16, without a loss scale"),
    ("Megatron GPT-3 175B", "a rank is a core: 4 instances of 32 cores for 128 ranks"
     " (--instances)"),
    ("Megatron Llama 3 8B", "fp8_format hybrid: products are computed in bfloat16, not in a type of"
     " 8 bits"),
    ("Megatron Llama 3 8B", "fp8_param_gather: weights are gathered in bfloat16, not in a type of 8"
     " bits"),
    ("Megatron Llama 3 8B", "conditions of the script are true: fp8_format (line 43),"
     " fp8_param_gather (line 44), vocab_size (line 57)"),
    ("Megatron Llama 3 8B", "LayerNorm is computed as RMSNorm, the norm of this family"),
    ("Megatron GPT 345M", "a micro-batch has 2 samples, not 4: 8 data-parallel ranks share the 16"
     " of a step"),
    ("NxDT Llama 3 8B", 'model.activations_checkpoint_recompute ["CoreAttention"]: products with'
     " weights are kept, all else is recomputed"),
    ("NxDT Llama 3 70B", "model.activations_checkpoint_recompute_mlp true: products with weights"
     " are kept, all else is recomputed"),
    ("NxDT Llama 3 8B", "config.json is not here: what the file itself says is the model"),
    ("NxDT Llama 3 8B", "32 devices of a node: trn1.32xlarge (--target)"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sentence"), SENTENCES)
def test_what_is_assumed_is_said(name: str, sentence: str) -> None:
    project, file, _ = EXAMPLES[name]
    assert sentence in read(project, FOLDER / file)[1].section()["assumed"]


def test_facts_are_told_in_words() -> None:
    """None by its name in this program; what looks like a key is one."""
    for words in FACTS.values():
        keys = re.findall(r"[a-z]+\.[a-z_]+", words)
        assert " " in words or words in KEYS
        assert all(key in KEYS for key in keys) and ("_" not in words or keys)
    with pytest.raises(ValueError, match="requires a key of a job or one of FACTS, got flavour"):
        key("flavour", text)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_field_that_is_read_is_told_as_a_key_or_in_words(name: str) -> None:
    project, file, _ = EXAMPLES[name]
    rows = read(project, FOLDER / file)[1].section()["read"]
    assert len(rows) > 5
    assert {row["means"] for row in rows} <= KEYS.keys() | set(FACTS.values())
    assert all(row["means"] == row["key"] for row in rows if row["key"])


GOALS = [
    ("torchtitan 8B", (), 1000 * 32 * 8192, "training.steps 1,000 x 32 x 8,192 tokens"),
    ("torchtitan 8B", ("--instances", "2"), 1000 * 64 * 8192,
     "training.steps 1,000 x 64 x 8,192 tokens"),
    ("torchtitan 8B", ("--set", "strategy.global_batch_tokens=4Mi"), 1000 * 2**22,
     "training.steps 1,000 x 4,194,304 tokens"),
    ("Megatron GPT-3 175B", (), 500_000 * 1536 * 2048,
     "train_iters 500,000 x 1,536 x 2,048 tokens"),
    ("Megatron Llama 3 8B", (), 1_953_125_000 * 8192, "train_samples 1,953,125,000 x 8,192 tokens"),
    ("NxDT Llama 3 70B", (), 10_000 * 1024 * 8192,
     "trainer.max_steps 10,000 x 1,024 x 8,192 tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "flags", "tokens", "told"), GOALS)
def test_how_long_training_goes_on_is_the_goal(
    name: str, flags: tuple[str, ...], tokens: int, told: str
) -> None:
    project, file, _ = EXAMPLES[name]
    job, found = read(project, FOLDER / file, *flags)
    assert job.goal.tokens == tokens
    assert f"the goal is {tokens:,} tokens: {told} (--tokens)" in found.section()["assumed"]


def test_a_goal_is_what_the_command_says_and_one_of_training(tmp_path: Path) -> None:
    job, found = read("torchtitan", FOLDER / "titan_8b.toml", "--tokens", "1M")
    assert job.goal.tokens == 10**6 and "the goal is" not in " ".join(found.section()["assumed"])
    job, _ = read("torchtitan", titan(tmp_path, training={"steps": 9}), "--mode", "decode")
    assert job.goal.tokens == 0
    job, _ = read("torchtitan", titan(tmp_path, training={"steps": -1}))
    assert job.goal.tokens == 0
    sizes = f"{SIZES} --train-iters 7"
    job, found = read("megatron", written(tmp_path, "a.txt", sizes))
    assert job.goal.tokens == 0
    assert (
        "train_iters 7 is no goal: of how many tokens is not said" in (found.section()["assumed"])
    )
    d = refused("torchtitan", titan(tmp_path, training={"steps": 2**31 - 1, "seq_len": 10**8}))
    assert d.diagnostic.message == (
        "training.steps requires at most 1e+18 tokens in all, got 2,147,483,647 x 256 x"
        " 100,000,000 tokens"
    )


NOT_SAVED = (
    "checkpoint.enable is not on, so nothing is saved there: goodput is that of saving every"
)
INTERVALS = [
    ("torchtitan", {"checkpoint": {"enable": True, "interval": 200}}, (0, 200), ""),
    ("torchtitan", {"checkpoint": {"interval": 200}}, (0, 200), f"{NOT_SAVED} 200 steps"),
    ("torchtitan", {"checkpoint": {"enable_checkpoint": True}}, (0, 500),
     "state is saved every 500 steps, the default of torchtitan"),
    ("torchtitan", {"checkpoint": {"interval": 600, "interval_type": "seconds"}}, (600, 0),
     f"{NOT_SAVED} 600 s"),
    ("torchtitan", {"checkpoint": {"enable": False}}, (0, 0), ""),
    ("torchtitan", {"checkpoint": {"interval": 200, "async_mode": "async"}}, (0, 200),
     "checkpoint.async_mode async: training stops while state is saved (goodput.checkpoint_s)"),
    ("megatron", {"save_interval": 10000}, (0, 10000), ""),
    ("megatron", {"save_interval": 9, "async_save": True}, (0, 9),
     "async_save true: training stops while state is saved (goodput.checkpoint_s)"),
    ("nxdt", {"exp_manager": {"checkpoint_callback_params": {"every_n_train_steps": 300}}},
     (0, 300), ""),
]  # fmt: skip


@pytest.mark.parametrize(("project", "more", "interval", "told"), INTERVALS)
def test_how_often_state_is_saved(
    project: str, more: dict[str, Any], interval: tuple[int, int], told: str, tmp_path: Path
) -> None:
    path = _configured(project, more, tmp_path)
    job, found = read(project, path)
    goodput = job.goodput
    assert (goodput.checkpoint_interval_s, goodput.checkpoint_interval_steps) == interval
    sentences = [s for s in found.section()["assumed"] if "saved" in s]
    assert told in sentences if told else not sentences


def test_an_interval_of_the_command_is_in_its_unit() -> None:
    path = FOLDER / "titan_8b.toml"
    job, _ = read("torchtitan", path, "--set", "goodput.checkpoint_interval_s=60")
    goodput = job.goodput
    assert (goodput.checkpoint_interval_s, goodput.checkpoint_interval_steps) == (60, 0)
    more = ("--set", "goodput.checkpoint_interval_s=60", "--set")
    with pytest.raises(UsageError, match="requires one interval of checkpoints, got"):
        read("torchtitan", path, *more, "goodput.checkpoint_interval_steps=3")


def _configured(project: str, more: dict[str, Any], folder: Path) -> Path:
    """A small configuration of a project, with more tables or arguments."""
    if project == "nxdt":
        config = {"model": {"num_layers": 80, "rope_theta": 500000.0}, **more}
        return written(folder, "job.yaml", "\n".join(_yaml(config)))
    if project == "megatron":
        return written(folder, "args.json", json.dumps({**ARGUMENTS, **more}))
    return titan(folder, **more)


def test_flags_lie_above_the_file() -> None:
    job, _ = read("torchtitan", FOLDER / "titan_8b.toml", "--remat", "none", "--instances", "2")
    assert (job.strategy.remat, job.cluster.instances, job.strategy.global_batch) == ("none", 2, 64)
    job, _ = read("nxdt", FOLDER / "nxdt_llama3_8b.yaml", "--set", "strategy.global_batch=64")
    assert job.strategy.global_batch == 64
    job, _ = read("megatron", FOLDER / "megatron_gpt_345m.sh", "--model", "llama3-8b")
    assert (job.model.preset, job.model.seq_len) == ("llama3-8b", 1024)


def test_a_job_file_and_an_imported_one_are_two() -> None:
    args = cli._parser().parse_args(["plan", "a.toml", "--from", "nxdt", "b.yaml"])
    with pytest.raises(UsageError, match="job file or --from"):
        imported_job(args)


MEGATRON = """torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 2 --hidden-size 32
 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 16 --max-position-embeddings 16
 --micro-batch-size 1 --global-batch-size 2 --vocab-size 256 --make-vocab-size-divisible-by 64
"""


@pytest.mark.matrix
def test_an_imported_job_runs_in_values(tmp_path: Path) -> None:
    file = written(tmp_path, "train.sh", MEGATRON.replace("\n", " \\\n"))
    out = tmp_path / "out"
    words = ["--from", "megatron", str(file), "--target", "trn1.2xlarge", "--progress", "quiet"]
    assert cli.main(["run", *words, "--out", str(out), "--steps", "1"]) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["numerics"]["passed"] and report["numerics"]["worst_loss"]["error"] < 1e-2
    assert {row["field"] for row in report["imported"]["read"]} >= {"num_layers", "hidden_size"}
    assert cli.main(["run", *words, "--out", str(tmp_path / "files"), "--compile-only"]) == 0
    assert list((tmp_path / "files").rglob("*.neff"))
    assert cli.main(["run", "job.toml", *words]) == 2


def test_a_variant_of_a_sweep_lies_above_the_file(tmp_path: Path) -> None:
    """The batch is that of the file on the mesh of the variant."""
    path = titan(tmp_path, training={"local_batch_size": 2}, parallelism={})
    args = cli._parser().parse_args(["sweep", "--from", "torchtitan", str(path)])
    batches = {}
    for tp in (1, 4):
        job, found = imported_job(args, {"mesh.tp": tp})
        assert found and job.mesh.tp == tp
        batches[tp] = job.strategy.global_batch
    assert batches == {1: 64, 4: 16}


def test_sizes_that_no_preset_has_are_the_config_of_the_job(tmp_path: Path) -> None:
    job, _ = read("torchtitan", FOLDER / "titan_405b.json")
    config = json.loads(job.model.config)
    assert (config["hidden_size"], config["intermediate_size"]) == (16384, 53248)
    small = titan(tmp_path, model={"name": "llama3", "flavor": "debugmodel"})
    job, _ = read("torchtitan", small, "--seq-len", "64")
    task = resolve_task(job)
    assert (task.name, task.tokens_per_sample) == ("model", 64)


ROTARY = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "swiglu": True,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
}
ARGUMENTS = {**ROTARY, "ffn_hidden_size": 96, "padded_vocab_size": 128, "seq_length": 16}
SIZES_OF = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16,
    "vocab_size": 128,
}
KIN = [
    ({}, {"model_type": "llama", "intermediate_size": 96, "tie_word_embeddings": True}),
    ({"untie_embeddings_and_output_weights": True},
     {"model_type": "llama", "intermediate_size": 96}),
    ({"window_size": "(7, 0)", "untie_embeddings_and_output_weights": True},
     {"model_type": "mistral", "intermediate_size": 96, "sliding_window": 8}),
    ({"add_qkv_bias": True, "untie_embeddings_and_output_weights": True},
     {"model_type": "qwen2", "intermediate_size": 96}),
    ({"qk_layernorm": True, "untie_embeddings_and_output_weights": True, "kv_channels": 32},
     {"model_type": "qwen3", "intermediate_size": 96, "head_dim": 32}),
    ({"num_experts": 8, "moe_router_topk": 4, "untie_embeddings_and_output_weights": True},
     {"model_type": "mixtral", "intermediate_size": 96, "num_local_experts": 8,
      "num_experts_per_tok": 4}),
    ({"num_experts": 8, "qk_layernorm": True, "moe_ffn_hidden_size": 32, "kv_channels": 32,
      "untie_embeddings_and_output_weights": True},
     {"model_type": "qwen3_moe", "intermediate_size": 96, "moe_intermediate_size": 32,
      "num_experts": 8,
      "num_experts_per_tok": 2, "norm_topk_prob": True, "head_dim": 32}),
]  # fmt: skip


@pytest.mark.parametrize(("more", "config"), KIN, ids=[row[1]["model_type"] for row in KIN])
def test_parts_of_a_model_are_its_type(
    more: dict[str, Any], config: dict[str, Any], tmp_path: Path
) -> None:
    path = written(tmp_path, "args.json", json.dumps(ARGUMENTS | more))
    job, _ = read("megatron", path)
    assert json.loads(job.model.config) == SIZES_OF | config
    resolve_task(job)  # which every key is a part of


LLAMA3_8B = {
    **ROTARY,
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "untie_embeddings_and_output_weights": True,
    "seq_length": 8192,
    "vocab_size": 128256,
    "rotary_base": 500000,
}
VOCABULARIES = [
    (LLAMA3_8B, 1, "llama3-8b", "the model is the preset llama3-8b, which has these sizes"),
    (LLAMA3_8B, 4, "llama3-8b", "the model is the preset llama3-8b, which has these sizes; its"
     " vocabulary is 128,256, there 128,512"),
    (LLAMA3_8B | {"padded_vocab_size": 129024}, 4, "llama3-8b", "the model is the preset"
     " llama3-8b, which has these sizes; its vocabulary is 128,256, there 129,024"),
    (LLAMA3_8B, 512, 131_072, "the vocabulary of 128,256 is padded to 131,072"),
    (LLAMA3_8B | {"vocab_size": 1000}, 4, 1024, "the vocabulary of 1,000 is padded to 1,024"),
    (LLAMA3_8B | {"vocab_size": 1024}, 4, 1024, ""),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "tp", "model", "told"), VOCABULARIES)
def test_a_vocabulary_that_is_padded_is_said(
    arguments: dict[str, Any], tp: int, model: str | int, told: str, tmp_path: Path
) -> None:
    """A preset is one without the padding; any other model has it."""
    more = {"tensor_model_parallel_size": tp}
    job, found = read("megatron", written(tmp_path, "args.json", json.dumps(arguments | more)))
    if isinstance(model, str):
        assert job.model.preset == model
    else:
        assert json.loads(job.model.config)["vocab_size"] == model
    sentences = [s for s in found.section()["assumed"] if "vocabulary" in s or "preset" in s]
    assert sentences == ([told] if told else [])


def test_a_gpt_of_a_preset_has_the_vocabulary_of_that(tmp_path: Path) -> None:
    path = written(tmp_path, "a.txt", f"{SIZES} --vocab-size 50257")
    job, found = read("megatron", path, "--tokens", "1")
    assert job.model.preset == "gpt3-350m"
    own = SIZED["gpt3-350m"][1]["vocab"]
    told = "" if own == 50304 else f"; its vocabulary is {own:,}, there 50,304"
    sentence = f"the model is the preset gpt3-350m, which has these sizes{told}"
    assert sentence in found.section()["assumed"]


def test_what_megatron_drops_unless_it_is_told(tmp_path: Path) -> None:
    """0.1 of both, which the file need not say."""
    told = "default of megatron: {} 0.1: nothing is dropped, so no masks are drawn"
    both = [told.format("attention_dropout"), told.format("hidden_dropout")]

    def dropped(more: str) -> list[str]:
        _, found = read("megatron", written(tmp_path, "a.txt", f"{SIZES} {more}"))
        return [s for s in found.section()["assumed"] if "dropped" in s]

    assert dropped("") == both
    assert dropped("--attention-dropout 0.0") == both[1:]
    assert dropped("--attention-dropout 0.0 --hidden-dropout 0.2") == [
        "hidden_dropout 0.2: nothing is dropped, so no masks are drawn"
    ]


@pytest.mark.parametrize(("flavor", "params"), [("0.6B", 596_049_920), ("30B-A3B", 30_532_122_624)])
def test_flavors_of_qwen3_have_the_published_sizes(
    flavor: str, params: int, tmp_path: Path
) -> None:
    path = titan(tmp_path, model={"name": "qwen3", "flavor": flavor}, training={})
    job, _ = read("torchtitan", path)
    model = architecture_of(model_config(job))
    assert leaves.count_params(model) == params


def test_experts_are_spread_over_ranks_that_share_samples(tmp_path: Path) -> None:
    more = {"num_experts": 8, "expert_model_parallel_size": 4, "tensor_model_parallel_size": 2}
    flags = {"untie_embeddings_and_output_weights": True, "expert_tensor_parallel_size": 1}
    path = written(tmp_path, "args.json", json.dumps(ARGUMENTS | more | flags))
    job, found = read("megatron", path)
    assert (job.mesh.ep, job.mesh.dp_shard, job.mesh.dp_replicate, job.mesh.tp) == (4, 4, -1, 2)
    assert "experts are split over tp 2 as the rest, not over 1" in found.section()["assumed"]


def test_a_config_that_the_file_names_is_read(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 512, "num_hidden_layers": 9, **sizes}
    written(tmp_path, "config.json", json.dumps(config))
    yaml = "data: {global_batch_size: 32}\nmodel:\n  model_config: config.json\n  num_layers: 2\n"
    job, found = read("nxdt", written(tmp_path, "job.yaml", yaml))
    assert json.loads(job.model.config) == config | {"num_hidden_layers": 2}
    assert "the model is" not in " ".join(found.section()["assumed"])


def test_flags_of_the_compiler_are_its_options(tmp_path: Path) -> None:
    yaml = "model: {num_layers: 80, rope_theta: 500000.0}\ncompiler_flags: '-O1 --auto-cast=none'\n"
    job, _ = read("nxdt", written(tmp_path, "job.yaml", yaml))
    assert (job.compiler.optlevel, job.compiler.auto_cast) == (1, "none")
    path = written(tmp_path, "job.yaml", yaml.replace("-O1", "--frobnicate"))
    d = refused("nxdt", path).diagnostic
    assert (d.code, d.loc.line) == ("SW_IMPORT_FIELD", 2) and "--frobnicate" in d.message


def test_old_and_new_names_are_one_field(tmp_path: Path) -> None:
    path = titan(tmp_path, training={"batch_size": 2, "local_batch_size": 4})
    d = refused("torchtitan", path).diagnostic
    assert (d.code, d.loc.line) == ("SW_IMPORT_FIELD", 8)
    assert d.message == (
        "training.local_batch_size requires the value of training.batch_size in line 7, 2, got 4"
    )


def test_a_pipeline_has_its_own_micro_batches(tmp_path: Path) -> None:
    path = titan(
        tmp_path,
        training={"local_batch_size": 8},
        parallelism={"pipeline_parallel_degree": 4, "pipeline_parallel_schedule": "GPipe"},
    )
    job, _ = read("torchtitan", path)
    assert (job.strategy.micro_batch, job.strategy.global_batch) == (1, 64)
    assert (job.strategy.schedule, job.strategy.reshard_after_forward) == ("gpipe", False)


def test_degrees_without_a_free_one_are_the_number_of_ranks(tmp_path: Path) -> None:
    degrees = {"data_parallel_shard_degree": 8, "tensor_parallel_degree": 8}
    told = "a rank is a core: 2 instances of 32 cores for {} (--instances)"
    job, found = read("torchtitan", titan(tmp_path, parallelism=degrees))
    assert (job.cluster.instances, job.mesh.dp_shard, job.mesh.tp) == (2, 8, 8)
    assert told.format("64 ranks") in found.section()["assumed"]
    free = degrees | {"data_parallel_replicate_degree": 8, "data_parallel_shard_degree": -1}
    _, found = read("torchtitan", titan(tmp_path, parallelism=free))
    sentences = found.section()["assumed"]
    assert told.format("at least 64, the file does not say") in sentences


def test_replicas_alone_are_data_parallel(tmp_path: Path) -> None:
    degrees = {"data_parallel_replicate_degree": 8, "data_parallel_shard_degree": 1}
    job, found = read("torchtitan", titan(tmp_path, parallelism=degrees))
    assert (job.strategy.name, job.mesh.dp_replicate) == ("generic", -1)
    assert (
        "dp_replicate takes the cores that are left: 32 cores for 8 ranks"
        in (found.section()["assumed"])
    )


def test_json_of_arguments_is_read_as_flags_are(tmp_path: Path) -> None:
    arguments = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "bf16": True}
    arguments |= {"micro_batch_size": 1, "fp16": False, "world_size": 64, "seq_length": 1024}
    job, _ = read("megatron", written(tmp_path, "args.json", json.dumps(arguments)))
    assert (job.model.preset, job.model.dtype) == ("gpt3-350m", "bfloat16")
    assert job.cluster.instances == 2


def test_an_interleaved_pipeline_of_megatron(tmp_path: Path) -> None:
    flags = "--num-layers 24 --hidden-size=1024 --num-attention-heads 16 --seq-length 1024\n"
    flags += "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2\n"
    flags += "--micro-batch-size 1 --recompute-activations --bf16"
    job, _ = read("megatron", written(tmp_path, "args.txt", flags))
    strategy = job.strategy
    assert (strategy.schedule, strategy.stage_parts) == ("interleaved", 3)
    assert (strategy.remat, strategy.reduce_dtype) == ("selective", "float32")


def test_a_batch_that_is_not_said_is_a_sample_per_rank(tmp_path: Path) -> None:
    flags = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --global-batch-size 64"
    job, _ = read("megatron", written(tmp_path, "args.txt", flags))
    assert (job.strategy.micro_batch, job.strategy.global_batch) == (1, 64)


def test_words_of_scripts(tmp_path: Path) -> None:
    script = (
        'A="\\\n  --num-layers 4 \\\n  --lr ${LR:-1e-3} \\\n"\nN=8\n'
        "B=(--hidden-size $N --bf16)  # --fp16\nrun ${A[@]} a.py --seq-length ${N} --eval-iters -1"
    )
    found = flag_fields(tmp_path, script)
    assert {name: (field.value, field.line) for name, field in found.items()} == {
        "num_layers": ("4", 2),
        "lr": ("1e-3", 3),
        "hidden_size": ("8", 6),
        "bf16": (True, 6),
        "seq_length": ("8", 7),
        "eval_iters": ("-1", 7),
    }


SIZES = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024"
COMMANDS = {
    "torchrun": f"torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py {SIZES}",
    "equals": f"torchrun --nproc-per-node=8 --nnodes=4 pretrain_gpt.py {SIZES}",
    "dashes last": f"torchrun --nnodes=4 --nproc-per-node 8 pretrain_gpt.py {SIZES}",
    "a switch last": f"torchrun --nnodes 4 --nproc_per_node 8 --no_python ./run.sh {SIZES}",
    "a module": f"torchrun --nnodes 4 --nproc_per_node 8 -m training.pretrain {SIZES}",
    "a long module": f"torchrun --nnodes 4 --nproc_per_node 8 --module training.pretrain {SIZES}",
    "launch": f"python -u -m torch.distributed.launch --nproc_per_node 8 --nnodes 4 a.py {SIZES}",
    "run": f"python3 -m torch.distributed.run --nproc_per_node=8 --nnodes 4 a.py {SIZES}",
    "unknown": f"$LAUNCH --nproc_per_node 8 --nnodes 4 pretrain_gpt.py {SIZES}",
    "deepspeed": f"deepspeed --num_nodes 4 --num_gpus 8 pretrain_gpt.py {SIZES}",
    "srun": f"srun -N 4 --ntasks-per-node 8 --mpi=pmix --label python -u a.py {SIZES}",
    "srun of all": f"srun --ntasks 32 bash -c 'python a.py {SIZES}'",
    "srun torchrun": f"srun -N4 --ntasks-per-node=1 torchrun --nproc_per_node 8 a.py {SIZES}",
    "mpirun": f"mpirun -np 32 --mca btl self,tcp --bind-to none -x A=1 ./a.sh {SIZES}",
    "mpiexec": f"/opt/bin/mpiexec --allow-run-as-root -n 32 python a.py {SIZES}",
    "lines": f"OMP=1 srun -N 4 \\\n  --ntasks-per-node=8 \\\n  python a.py \\\n  {SIZES}",
    "slurm": f"#SBATCH -N 4\n#SBATCH --ntasks-per-node=8 --time=1:00\nsrun python a.py {SIZES}",
    "slurm tasks": f"#SBATCH --ntasks 32  # all\nsrun -l sh -c 'python a.py {SIZES}'",
    "slurm nodes": "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=1\nsrun torchrun"
    f" --nnodes $SLURM_NNODES --nproc_per_node 8 a.py {SIZES}",
    "slurm less": f"#SBATCH -N 9\n#SBATCH --ntasks-per-node=1\nsrun -N 4 -n 32 a.py {SIZES}",
    "slurm letters": f"#SBATCH -A a -p b --mem=0 --nodes=4\nsrun -p c -n 32 python a.py {SIZES}",
    "quoted": f'CMD="torchrun --nnodes 4 --nproc_per_node 8 a.py {SIZES}"',
    "piped": f"torchrun --nnodes 4 --nproc_per_node 8 a.py {SIZES} 2>&1 | tee log.txt",
    "and": f"cd a && torchrun --nnodes 4 --nproc_per_node 8 a.py {SIZES} && echo done",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_options_of_launchers_end_at_the_script(name: str, tmp_path: Path) -> None:
    """Each starts 32 ranks of the same model, and each option of a launcher is known."""
    job, found = read("megatron", written(tmp_path, "train.sh", COMMANDS[name]))
    assert (job.model.preset, job.model.seq_len) == ("gpt3-350m", 1024)
    section = found.section()
    assert not section["unknown"]
    told = "a rank is a core: 1 instance of 32 cores for 32 ranks (--instances)"
    assert told in section["assumed"]


def test_a_python_file_may_be_a_value(tmp_path: Path) -> None:
    found = flag_fields(tmp_path, "torchrun --nnodes 4 a.py --data-args-path b.py --seed 1")
    assert {name: field.value for name, field in found.items()} == {
        "nnodes": "4",
        "data_args_path": "b.py",
        "seed": "1",
    }


def test_options_of_srun_are_no_flags_of_the_script(tmp_path: Path) -> None:
    found = flag_fields(tmp_path, "srun --profile all -n 2 --odd 3 ./a --profile --nodes 5")
    assert {name: field.value for name, field in found.items()} == {
        "srun.profile": "all",
        "srun.ntasks": "2",
        "odd": "3",
        "profile": True,
        "nodes": "5",
    }


def test_unknown_fields_are_listed(tmp_path: Path) -> None:
    path = titan(tmp_path, training={"local_batch_size": 1, "new_thing": 3}, other={"x": [1]})
    _, found = read("torchtitan", path)
    section = found.section()
    assert section["unknown"] == [
        {"field": "training.new_thing", "line": 8, "value": "3"},
        {"field": "other.x", "line": 11, "value": "[1]"},
    ]
    texts = dict(sections.imported({"imported": section}))
    assert texts["from"] == (
        "torchtitan job.json: 3 fields read, 0 without counterpart, 2 unknown: training.new_thing"
        " (line 8), other.x (line 11)"
    )
    assert explain(JobConfig(), {"imported": section}) == section
    with pytest.raises(UsageError, match="requires a job of another project"):
        explain(JobConfig(), {})


REFUSED = [
    ("torchtitan", {"training": {"enable_cpu_offload": True}}, 7,
     "training.enable_cpu_offload requires False, got true: parameters and moments stay in device"
     " memory here"),
    ("torchtitan", {"training": {"dtype": "bfloat16"}}, 7,
     "training.dtype requires float32, got bfloat16: stored parameters and moments are fp32 here"),
    ("torchtitan", {"parallelism": {"expert_parallel_degree": 0}}, 7,
     "parallelism.expert_parallel_degree requires a whole number from 1 to 2147483647, got 0"),
    ("torchtitan", {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"}}, 8,
     "activation_checkpoint.selective_ac_option requires op under selective recomputation, got 2:"
     " every so many layers"),
    ("torchtitan", {"model": {"name": "llama4", "flavor": "8B"}}, 3,
     "model.name requires one of llama3, qwen3, got llama4"),
    ("torchtitan", {"model": {"name": "llama3", "flavor": "9B"}}, 4,
     "model.flavor requires one of debugmodel, 8B, 70B, 405B, got 9B"),
    ("torchtitan", {"training": {"seq_len": 1e300}}, 7,
     "training.seq_len requires a whole number from 1 to 2147483647, got 1e+300"),
    ("torchtitan", {"training": {"local_batch_size": 8, "seq_len": 2000000000}}, 8,
     "training.seq_len requires 0 to 100000000, got 2000000000"),
    ("torchtitan", {"optimizer": {"name": "Lion"}}, 7,
     "optimizer.name requires one of AdamW, Adam, got Lion"),
    ("torchtitan", {"parallelism": {"tensor_parallel_degree": 2147483647}}, 7,
     "parallelism.tensor_parallel_degree requires ranks that at most 65536 instances hold, got"
     " 2,147,483,647 ranks"),
    ("megatron", {"moe_shared_expert_intermediate_size": 64, "num_layers": 4}, 2,
     "moe_shared_expert_intermediate_size requires 0, got 64: experts that all rows visit are not"
     " built from these arguments"),
    ("megatron", {**ROTARY, "window_size": "7,0", "num_experts": 8}, 9,
     "num_experts requires parts that a model type has together (llama, mistral, qwen2, qwen3,"
     " mixtral, qwen3_moe), got windows of attention and experts"),
    ("megatron", {**ROTARY, "window_size": "7,7"}, 8,
     "window_size requires positions before and none behind a token, as in 4095,0, got 7,7"),
    ("megatron", {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "kv_channels": 8},
     5, "kv_channels requires --kv-channels 16, the width over the heads, got 8"),
    ("megatron", {"num_layers": 4}, 0, "the width of the model requires --hidden-size, got none"),
    ("megatron", {"num_layers": "$N"}, 2,
     "num_layers requires a whole number from 1 to 2147483647, got $N"),
    ("nxdt", {"model": {"num_layers": 32, "moe": {"frequency": 2}}}, 4,
     "model.moe.frequency requires 1, got 2: all layers have experts here"),
    ("nxdt", {"model": {"num_layers": 32, "peft": {"lora_rank": 16, "lora_bias": "all"}}}, 5,
     "model.peft.lora_bias requires none, got all: adapters have no biases here"),
    ("nxdt", {"model": {"num_layers": 32, "peft": {"target_modules": "qkv_proj"}}}, 4,
     "model.peft.target_modules requires a list of projections, got qkv_proj"),
    ("nxdt", {"precision": {"type": "bf16SR"}}, 2,
     "precision.type requires one of mixed_precision, mixed_precisionSR, autocast, fp32, got"
     " bf16SR"),
    ("nxdt", {"model": {"num_layers": 40, "hidden_size": 64}}, 2,
     "model.num_layers requires sizes of a preset, or besides ffn, heads, got layers 40, hidden"
     " 64"),
    ("nxdt", {"trainer": {"devices": 8}, "model": {"num_layers": 80, "rope_theta": 10000.0}}, 2,
     "trainer.devices requires one of 32, 64, 2, got 8"),
    ("nxdt", {"model": {"num_layers": 32}}, 2,
     "model.num_layers requires sizes of one preset, not of llama2-7b and llama3-8b, got layers"
     " 32"),
]  # fmt: skip


@pytest.mark.parametrize(("project", "config", "line", "message"), REFUSED)
def test_what_changes_the_answer_is_refused(
    project: str, config: dict[str, Any], line: int, message: str, tmp_path: Path
) -> None:
    if project == "nxdt":
        text = "\n".join(_yaml(config))
        path = written(tmp_path, "job.yaml", text)
    elif project == "megatron":
        path = written(tmp_path, "args.json", json.dumps(config, indent=1))
    else:
        path = titan(tmp_path, **config)
    d = refused(project, path).diagnostic
    assert (d.code, d.message, d.loc.line) == ("SW_IMPORT_FIELD", message, line)
    assert d.loc.file == str(path) and d.hint


def _yaml(table: Mapping[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, value in table.items():
        is_table = isinstance(value, dict)
        lines.append(f"{indent}{name}:" + ("" if is_table else f" {value}"))
        lines += _yaml(value, indent + "  ") if is_table else []
    return lines


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{c}: &{c} [{','.join([f'*{b}'] * 9)}]\n" for b, c in zip("abcdefgh", "bcdefghi", strict=True)
)
MALFORMED: dict[str, tuple[str, str, str | bytes, int, str]] = {
    "truncated JSON": ("torchtitan", "a.json", '{"model": {"name": "ll', 1, "not valid JSON"),
    "a list": ("torchtitan", "a.json", "[1, 2]", 1, "requires tables of fields, got a list"),
    "twice in JSON": ("torchtitan", "a.json", '{"a": {"b": 1,\n"b": 2}}', 2, "once, got a.b again"),
    "NaN": ("torchtitan", "a.json", '{"a": NaN}', 0, "NaN is no number"),
    "digits": ("torchtitan", "a.json", '{"a": ' + "9" * 5000 + "}", 0, "not valid JSON"),
    "deep JSON": ("torchtitan", "a.json", '{"a":' * 10**5 + "1" + "}" * 10**5, 0, "too deep"),
    "many levels": (
        "torchtitan",
        "a.json",
        '{"a":' * 50 + "1" + "}" * 50,
        0,
        f"{MOST_DEPTH} level",
    ),
    "empty": ("torchtitan", "a.json", "", 0, "an empty file"),
    "blank": ("nxdt", "a.yaml", " \n\n", 0, "an empty file"),
    "bytes": ("torchtitan", "a.json", bytes(range(256)), 0, "requires text (UTF-8), got bytes"),
    "zeros": ("nxdt", "a.yaml", b"a: 1\0", 0, "got bytes of 0"),
    "truncated TOML": ("torchtitan", "a.toml", "[model]\nname = ", 2, "not valid TOML"),
    "twice in TOML": ("torchtitan", "a.toml", "[a]\nb=1\nb=2\n", 3, "not valid TOML"),
    "aliases": ("nxdt", "a.yaml", BOMB, 2, "requires no aliases, got *a"),
    "twice in YAML": ("nxdt", "a.yaml", "a:\n  b: 1\n  b: 2\n", 3, "once, got a.b again"),
    "a tag": ("nxdt", "a.yaml", "a: !!python/object/apply:os.getcwd []\n", 1, "not valid YAML"),
    "deep YAML": ("nxdt", "a.yaml", "[" * 10**5, 1, f"at most {MOST_DEPTH} levels"),
    "a tab": ("nxdt", "a.yaml", "a:\n\tb: 1\n", 2, "not valid YAML"),
    "no flags": ("megatron", "a.sh", "echo hello\n", 0, "requires flags"),
    "a quote": ("megatron", "a.sh", "--num-layers '3\" `\n", 1, "quotes that close"),
    "twice": ("megatron", "a.sh", "--num-layers 3\n--num-layers 4\n", 2, "--num_layers 4 after 3"),
    "another's": (
        "torchtitan",
        "a.json",
        '{"trainer": {"devices": 32}}',
        1,
        "fields that are known",
    ),
    "no fields": ("torchtitan", "a.json", "{}", 0, "got none of 0"),
    "a comment": ("torchtitan", "a.toml", "# nothing", 0, "got none of 0"),
    "long names": ("nxdt", "a.yaml", "a:\n  " + "b" * 900 + ": 1\n", 2, "got 902: 'a.bbb"),
    "half a letter": ("torchtitan", "a.json", r'{"\ud800": 1}', 1, r"got 1: '\ud800'"),
    "a list as a name": ("nxdt", "a.yaml", "? [a]\n: 1\n", 1, "names of fields require text"),
}
"""Project, file, content, line and part of the message."""


@pytest.mark.parametrize("name", MALFORMED)
def test_a_file_that_is_none_is_refused_soon(name: str, tmp_path: Path) -> None:
    project, file, content, line, message = MALFORMED[name]
    begun = time.perf_counter()
    d = refused(project, written(tmp_path, file, content)).diagnostic
    assert time.perf_counter() - begun < 10
    assert (d.code, d.loc.line) == ("SW_IMPORT", line) and message in d.message
    assert str(tmp_path / file) == d.loc.file


@pytest.mark.parametrize("file", ["a.json", "a.yaml", "a.sh", "a.toml"])
@pytest.mark.parametrize("project", PROJECTS)
def test_a_hundred_megabytes_are_not_read(project: str, file: str, tmp_path: Path) -> None:
    """In a process that may have 4 GiB."""
    with (tmp_path / file).open("wb") as large:
        large.truncate(100 * 10**6)
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))\n"
        "from shardwright.orchestrator.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", code, "plan", "--from", project, str(tmp_path / file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=10)
    assert done.returncode == 2 and "SW_IMPORT" in done.stderr and "at most" in done.stderr


def test_a_value_of_any_length_is_told_in_short(tmp_path: Path) -> None:
    path = titan(tmp_path, model={"name": "llama3", "flavor": "B" * 10**6})
    d = refused("torchtitan", path).diagnostic
    assert len(d.message) < 400 and d.message.endswith("BBB...")


def test_projects_and_files_that_are_not_there(tmp_path: Path) -> None:
    error = refused("torchtitn", tmp_path / "a.json").diagnostic
    assert error.code == "SW_IMPORT" and "torchtitan" in error.hint
    error = refused("torchtitan", tmp_path / "a.json").diagnostic
    assert error.code == "SW_IMPORT" and "cannot read it" in error.message


@pytest.mark.parametrize(
    "name", ["torchtitan 8B", pytest.param("NxDT Llama 3 8B", marks=pytest.mark.matrix)]
)
def test_an_example_is_partitioned_and_estimated(name: str) -> None:
    """Before anything is compiled; `test_a_public_example_fits` compiles them all."""
    project, file, _ = EXAMPLES[name]
    job, _ = read(project, FOLDER / file, *COUNTERPARTS[name])
    with unit_service(job, None) as service:
        ready = build.planned(job, service, build.Stages())
    assert ready.plan.footprint.peak_bytes < ready.layout.target.limit_bytes


OFTEN = ("Megatron GPT 345M",)  # others are read in seconds, and planned in minutes
RARE = EXAMPLES.keys() - OFTEN


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", long_in_matrix(EXAMPLES, OFTEN, RARE))
def test_a_public_example_fits(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    project, file, _ = EXAMPLES[name]
    words = ["plan", "--from", project, str(FOLDER / file), "--tries", "0", "--json"]
    code = cli.main([*words, *COUNTERPARTS[name]])
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["memory"]["fits"], report["memory"]["peak_bytes"]
    assert report["imported"]["project"] == project and report["timing"]["step_time_ps"] > 0
