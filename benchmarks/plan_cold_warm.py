"""Cold against warm `plan` of a 70B step on 1024 cores: whole processes, once per executor.

    python benchmarks/plan_cold_warm.py [EXECUTOR ...]

Wall seconds mean something on an idle machine only; CPU seconds (user, all processes of the job)
hardly change with the load. A cold answer has tried what there was time for (`docs/plan.md`).
Bars: cold within 12 s of two idle cores and 2 GB, all compile
units within 8 CPU seconds, warm at least 20 times faster.
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
from dataclasses import dataclass
from typing import Any

COMMAND = ["-m", "shardwright", "plan", "--model", "llama2-70b", "--instances", "32", "--json"]
EXECUTORS = ("auto", "inline")
HEADER = (
    f"{'executor':10}{'cold s':>8}{'cpu s':>8}{'compile s':>11}{'units s':>9}{'warm s':>8}"
    f"{'ratio':>7}{'peak GB':>9}{'tries':>7}"
)


@dataclass(frozen=True, slots=True)
class Run:
    """One process: wall and CPU seconds, and its report."""

    wall_s: float
    cpu_s: float
    report: dict[str, Any]


def run(cache: str, executor: str) -> Run:
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, *COMMAND, "--executor", executor]
    environment = {**os.environ, "NEURON_COMPILE_CACHE_URL": cache}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    if done.returncode not in (0, 71):
        sys.exit(done.stderr.decode())
    wall = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    return Run(wall, used, json.loads(done.stdout))


def row(executor: str) -> str:
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = run(cache, executor), run(cache, executor)
    peak_gb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    stages = cold.report["provenance"]["stages_s"]
    units = sum(u["seconds"] for u in cold.report["units"] if u["kind"] == "compile")
    return (
        f"{executor:10}{cold.wall_s:>8.2f}{cold.cpu_s:>8.2f}{stages['compile']:>11.2f}"
        f"{units:>9.2f}{warm.wall_s:>8.2f}{cold.wall_s / warm.wall_s:>7.1f}{peak_gb:>9.2f}"
        f"{len(cold.report['whatif']['tried']):>7}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("executors", nargs="*", default=EXECUTORS)
    print(f"{HEADER}   load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    for executor in parser.parse_args().executors:
        print(row(executor), flush=True)


if __name__ == "__main__":
    main()
