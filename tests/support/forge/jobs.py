"""Jobs and what they name, changed: `job.toml`, `config.json`, machines, lists of points. Each goes
the road that `plan` takes before it traces; of configurations, some are traced."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.machine.target import load_target
from shardwright.orchestrator.config import config
from shardwright.orchestrator.config.model import resolve_task
from shardwright.orchestrator.road.capture import placed_task
from shardwright.orchestrator.road.plan_cache import plan_parts
from shardwright.orchestrator.road.stages import Stages
from shardwright.orchestrator.whatif.points import read_list
from tests.support.forge.documents import changed_document, json_text, toml_text
from tests.support.forge.pool import Judge
from tests.support.small_job import JOB, SIZES

_TRACED_EVERY = 40
_CONFIGS: tuple[dict[str, Any], ...] = (
    {"model_type": "llama", **SIZES, "rms_norm_eps": 1e-5, "rope_theta": 1e4},
    {
        **SIZES,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    {**SIZES, "model_type": "mistral", "sliding_window": 4096, "attention_dropout": 0.0},
)
_POINTS = (
    '{"mesh.tp": 2, "strategy.remat": "none"}\n{"cluster": {"instances": 2}, "mesh.tp": null}\n',
    'mesh,strategy.zero\n"dp_shard=4,tp=2",1\n,2\n',
)


def _every_key() -> dict[str, Any]:
    """A job with every key there is, at its default."""
    defaults = config.JobConfig().as_dict()
    return {name: dict(defaults[name]) for name in config.TABLES}


def _job_sources() -> list[dict[str, Any]]:
    small = tomllib.loads(JOB)
    preset = {
        "model": {"preset": "llama2-7b", "seq_len": 512, "dtype": "bfloat16"},
        "strategy": {"name": "llm-training", "micro_batch": 1, "global_batch": 64, "zero": "auto"},
        "mesh": {"pp": 2, "dp_shard": "auto", "tp": 8},
        "cluster": {"instances": 2, "placement": "torus", "collectives": "mesh_max_bytes=2mb"},
        "faults": {"slow_cores": "5:1.3, 8-15:1.1", "slow_links": "0/3-7:0.5", "jitter": 0.1},
        "goodput": {"restart_s": 600.0},
    }
    every = _every_key()
    every["model"]["config"] = "config.json"
    return [small, preset, every]


def jobs_judge(folder: str) -> Judge:
    """`job.toml`: read, its files digested, laid out on the machine, its model looked up."""
    own, sources = _folder(folder), _job_sources()
    path = own / "job.toml"

    def judge(number: int) -> str:
        dice = random.Random(number)
        path.write_bytes(changed_document(dice.choice(sources), toml_text, dice, "seq_len"))

        def planned() -> None:
            overrides = ("model.seq_len=8",) if dice.random() < 0.05 else ()
            job = config.load(path, overrides, {"run.seed": 3} if dice.random() < 0.05 else None)
            config.with_absolute_paths(job)
            plan_parts(_local(job, own))
            placed_task(job, Stages())

        return _ended(planned)

    return judge


def _local(job: config.JobConfig, own: Path) -> config.JobConfig:
    """The job with a cache of its own, so that no other place is asked."""
    return dataclasses.replace(job, cache=config.CacheConfig(dir=str(own / "cache")))


def configs_judge(folder: str) -> Judge:
    """`config.json`: read and made a model; some are traced."""
    own = _folder(folder)
    (own / "job.toml").write_text(JOB)
    path = own / "config.json"

    def judge(number: int) -> str:
        dice = random.Random(number)
        path.write_bytes(changed_document(dice.choice(_CONFIGS), json_text, dice))

        def modelled() -> None:
            job = config.load(own / "job.toml")
            plan_parts(job)
            task = resolve_task(job)
            if number % _TRACED_EVERY == 0:
                stages = Stages()
                stages.trace(job, task, 2)

        return _ended(modelled)

    return judge


def targets_judge(folder: str) -> Judge:
    """The user's own machine: read and made a target."""
    own, given = _folder(folder), json.loads(json.dumps(_TARGET))

    def judge(number: int) -> str:
        dice = random.Random(number)
        path = own / f"{number}.json"
        path.write_bytes(changed_document(given, json_text, dice))
        try:
            return _ended(lambda: load_target(str(path)))
        finally:
            path.unlink()

    return judge


_TARGET: dict[str, Any] = {
    "base": "trn1n.32xlarge",
    "facts": {
        "hbm_gib_per_chip": {"value": 64, "status": "given", "source": "mine"},
        "price_usd_per_hour_on_demand": 12.5,
        "shape": [4, 4],
        "neuronlink_gb_per_s_per_link_per_direction": [96.0, 48.0],
        "efa_devices": 8,
        "allowed_lnc": [1],
        "kangaring": True,
    },
}


def points_judge(folder: str) -> Judge:
    """A list of points for `sweep`: JSON lines or CSV."""
    own = _folder(folder)

    def judge(number: int) -> str:
        dice = random.Random(number)
        which = dice.randrange(2)
        path = own / ("points.jsonl", "points.csv")[which]
        text = _POINTS[which]
        path.write_bytes(changed_document(text, str, dice))
        return _ended(lambda: read_list(path))

    return judge


def _folder(folder: str) -> Path:
    own = Path(tempfile.mkdtemp(dir=folder, prefix=f"{os.getpid()}-"))
    (own / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    return own


def _ended(work: Any) -> str:
    try:
        work()
    except DiagnosticError as error:
        return error.code
    return "done"
