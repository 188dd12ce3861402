"""A cold sweep of 48 points of Llama-2 70B on 16 instances, and the same sweep again.

    python benchmarks/sweep.py [--workers N]

Two strategies x six tensor-parallel sizes x two pipelines x two remats. Wall seconds mean something
on an idle machine only; CPU seconds (user and system, all processes of the sweep) hardly change
with the load. Bar (issue 6): cold within 300 s of two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

COMMAND = [
    *("-m", "shardwright", "sweep", "--model", "llama2-70b", "--instances", "16", "--json"),
    *("--mesh", "dp_shard=auto", "--vary", "strategy=fsdp,llm-training"),
    *("--vary", "mesh.tp=1,2,4,8,16,32", "--vary", "mesh.pp=1,4", "--vary", "remat=none,full"),
]


@dataclass(frozen=True, slots=True)
class Run:
    """One process: wall and CPU seconds, what became of points, units that were computed."""

    wall_s: float
    cpu_s: float
    states: Counter[str]
    units: Counter[str]


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(folder: Path, events: Path, workers: str) -> Run:
    start, before = time.perf_counter(), cpu_s()
    flags = ["--workers", workers, "--out", str(folder / "out"), "--events", str(events)]
    environment = {**os.environ, "NEURON_COMPILE_CACHE_URL": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, *COMMAND, *flags], env=environment, stdout=subprocess.PIPE, check=False
    )
    if done.returncode not in (0, 71):
        sys.exit(done.returncode)
    wall, used = time.perf_counter() - start, cpu_s() - before
    lines = map(json.loads, events.read_text().splitlines()) if events.exists() else ()
    units = Counter(line["kind"] for line in lines if line["event"] == "unit.done")
    states = Counter(point["status"] for point in json.loads(done.stdout)["points"])
    return Run(wall, used, states, units)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="0", help="worker processes; 0: one per CPU")
    workers = parser.parse_args().workers
    print(f"{'':6}{'wall s':>8}{'cpu s':>8}{'points':>8}  units computed; what became of points")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "again"):
            found = run(Path(folder), Path(folder, f"{name}.events"), workers)
            points = sum(found.states.values())
            print(
                f"{name:6}{found.wall_s:>8.1f}{found.cpu_s:>8.1f}{points:>8}  {dict(found.units)};"
                f" {dict(found.states)}",
                flush=True,
            )
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")


if __name__ == "__main__":
    main()
