"""What our processes ask of their host: CPUs, where our packages are, whether this is a job of a
Ray cluster, and how often Python looks for reference cycles."""

from __future__ import annotations

import gc
import os
from pathlib import Path

DOOR = Path(__file__).parents[1]
"""The folder of the package `shardwright`: that of its links in a checkout."""
PACKAGES_ROOT = DOOR.parent
"""On the path of workers."""
# Our choice. Graphs are millions of small objects that live long and hold no cycles. With Python's
# own thresholds (700, 10, 10) a quarter of the time of an 80-layer unrolled step went into walking
# them; with these it cannot be measured, and peak memory is the same.
_THRESHOLDS = (50_000, 20, 50)


def num_cpus() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0))


def package_folder(name: str) -> Path:
    """The folder of one of our packages."""
    return DOOR / name


def python_path() -> str:
    """PYTHONPATH of a process that is to find our packages."""
    return os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(PACKAGES_ROOT))))


def inside_ray_job() -> bool:
    """Whether this is the entrypoint of a submitted Ray job: its working directory is a copy that
    Ray made and deletes, and its cluster is there to be used."""
    return bool(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"))


def executor_kind(configured: str) -> str:
    """What `run.executor` comes to: `auto` is Ray inside a Ray job and where RAY_ADDRESS is set."""
    is_joined = inside_ray_job() or bool(os.environ.get("RAY_ADDRESS"))
    return "ray" if configured == "auto" and is_joined else configured


def collect_rarely() -> None:
    """Set the thresholds of the cycle collector for a process that holds graphs."""
    gc.set_threshold(*_THRESHOLDS)
