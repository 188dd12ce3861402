"""The compile service on the units of one job: two workers against one, overhead per unit, warm
against cold.

    python benchmarks/service.py [--model llama2-7b] [--executor process|ray] [--repeat N]

Bars (issue 5): two workers at least 1.7 times as fast as one in the compile phase of a job with 16
distinct units or more; at most 20 ms per unit beyond the compile; warm at least 20 times as fast as
cold. Phases start with workers that are there, as in a job, where they start during the capture.
Wall times mean something on a machine with two idle CPUs only. On others, read how many of the two
workers are busy on average (seconds inside units per second: the ratio on an idle machine), and the
processor time of the service per unit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shardwright.orchestrator.cache import Cache
from shardwright.orchestrator.config.config import load
from shardwright.orchestrator.road.build import build
from shardwright.orchestrator.road.stages import Stages
from shardwright.orchestrator.road.units import executor_of
from shardwright.orchestrator.service.executor import Executor, InlineExecutor, Limits, WorkUnit
from shardwright.orchestrator.service.service import UnitService

STRATEGIES = ("fsdp", "llm-training")
BARS = {"two workers": 1.7, "overhead_ms": 20.0, "warm": 20.0}


class Watching(InlineExecutor):
    """Keeps the units it runs."""

    def __init__(self, found: list[WorkUnit]) -> None:
        super().__init__(Limits())
        self._found = found

    def submit(self, unit: WorkUnit) -> None:
        """See Executor."""
        self._found.append(unit)
        super().submit(unit)


@dataclass(frozen=True, slots=True)
class Phase:
    """One run of all units: wall seconds, those inside units, processor seconds of the service."""

    wall_s: float
    units_s: float
    service_cpu_s: float


def compile_units(model: str) -> list[WorkUnit]:
    """Distinct compile units of a job under each strategy."""
    found: list[WorkUnit] = []
    with tempfile.TemporaryDirectory() as folder:
        for strategy in STRATEGIES:
            job = load(None, [f"model.preset={model}", f"strategy.name={strategy}"])
            with UnitService(lambda: Watching(found), Cache(Path(folder))) as service:
                build(job, service, Stages())
    return [unit for unit in found if unit.kind == "compile"]


def phase(executor: Callable[[], Executor], cache: Cache, units: list[WorkUnit]) -> Phase:
    """Run the units on workers that have started."""
    with UnitService(executor, cache) as service:
        made = service._started()
        waiting = WorkUnit("no such kind", "", "", b"")  # answered by every worker when it is there
        for _ in range(made.slots):
            made.submit(waiting)
        for _ in range(made.slots):
            made.next()
        begin, before = time.perf_counter(), time.process_time()
        service.run(units)
        wall, cpu = time.perf_counter() - begin, time.process_time() - before
        return Phase(wall, sum(row.seconds for row in service.rows), cpu)


def measure(kind: str, workers: int, units: list[WorkUnit]) -> tuple[Phase, Phase]:
    """The cold phase and the warm one after it."""
    executor = executor_of(load(None, [f"run.executor={kind}", f"run.workers={workers}"]))
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(Path(folder))
        cold = phase(executor, cache, units)
        return cold, phase(InlineExecutor, cache, units)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama2-7b")
    parser.add_argument("--executor", default="process", choices=("process", "ray"))
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    units = compile_units(args.model)
    print(f"{len(units)} distinct compile units of {args.model} ({', '.join(STRATEGIES)})")
    rounds = [
        [measure(args.executor, workers, units) for workers in (1, 2)] for _ in range(args.repeat)
    ]
    for (one, warm), (two, _) in rounds:
        print(
            f"1 worker {one.wall_s:6.2f} s, 2 workers {two.wall_s:6.2f} s, inside units"
            f" {one.units_s:6.2f} s, warm {warm.wall_s * 1e3:5.0f} ms"
        )
    ratio = statistics.median(one.wall_s / two.wall_s for (one, _), (two, _) in rounds)
    warm_ratio = statistics.median(one.wall_s / warm.wall_s for (one, warm), _ in rounds)
    each = [1e3 / len(units) * (one.wall_s - one.units_s) for (one, _), _ in rounds]
    cpu = [1e3 / len(units) * one.service_cpu_s for (one, _), _ in rounds]
    overhead = statistics.median(each)
    busy = statistics.median(two.units_s / two.wall_s for _, (two, _) in rounds)
    bar = BARS["two workers"]
    print(f"2 workers: {ratio:.2f} times as fast (bar {bar}); {busy:.2f} of them busy on average")
    print(
        f"overhead per unit: {overhead:.1f} ms wall, {statistics.median(cpu):.1f} ms processor"
        f" (bar {BARS['overhead_ms']:g} ms)"
    )
    print(f"warm: {warm_ratio:.0f} times as fast (bar {BARS['warm']:g})")


if __name__ == "__main__":
    main()
