"""The list of screens that people read: every command of it is understood."""

from __future__ import annotations

import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from shardwright.orchestrator.cli import _asked
from shardwright.orchestrator.config.job_flags import job_config

LIST = Path(__file__).with_name("twenty_screens.txt")
JOBS = [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]


def test_there_are_twenty() -> None:
    assert len(JOBS) == len(set(JOBS)) == 20


@pytest.mark.parametrize("job", JOBS)
def test_the_job_is_understood(job: str) -> None:
    """What it asks for is known before anything is built."""
    words = shlex.split(job)
    asked = job_config(_asked(words))
    given = dict(pairwise(words))
    assert asked.cluster.instances == int(given.get("--instances", asked.cluster.instances))
    assert asked.model.preset == (
        "" if "--recipe" in given or "job.toml" in job else given["--model"]
    )
    assert asked.model.recipe == given.get("--recipe", "")


def test_advice_is_typed_behind_the_command() -> None:
    """Keys that a flag of the command gives are those of the advice then."""
    words = shlex.split(next(job for job in JOBS if "pp=8" in job))
    advised = ["mesh.pp=4", "mesh.dp_shard=64", "strategy.global_batch=512"]
    asked = job_config(_asked([*words, *(w for key in advised for w in ("--set", key))]))
    assert (asked.mesh.pp, asked.mesh.dp_shard, asked.strategy.global_batch) == (4, 64, 512)
