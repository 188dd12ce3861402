"""The list of screens that people read: every command of it is understood."""

from __future__ import annotations

import shlex
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
    config = job_config(_asked(shlex.split(job)))
    assert config.cluster.instances >= 1
