"""How long one simulated step takes to time: Llama-2-70B on 512 trn1n.32xlarge, 16,384 cores.

    python benchmarks/cluster_time.py [--cache DIR] [--micro-batches N]

Prints CPU seconds of one answer (one profile: functions evaluated, classes refined, loop replayed),
which hardly change with the load of the machine. Bars: 2 s uniform, 5 s with
one straggler.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shardwright.orchestrator.config.config import load
from shardwright.orchestrator.road.build import build
from shardwright.orchestrator.road.stages import Stages
from shardwright.orchestrator.road.timing import step_of
from shardwright.orchestrator.road.units import unit_service
from shardwright.sim_cluster.timing.faults import Faults
from shardwright.sim_cluster.timing.step_time import Step, time_step

FAULTS = {
    "uniform": Faults(),
    "one straggler": Faults(slow_cores={777: 1.3}),
    "one slow link": Faults(links={3: {(0, 1): 0.25}}),
    "one dead EFA device": Faults(links={3: {("efa", 1): 0.0}}),
    "jitter": Faults(jitter=0.02),
}


def built_step(cache: str, micro_batches: int) -> Step:
    """The compiled step."""
    mesh = ("mesh.dp_replicate=32", "mesh.dp_shard=512")
    common = ("model.preset=llama2-70b", "cluster.instances=512", f"cache.dir={cache}")
    job = load(None, [*common, *mesh, f"strategy.global_batch={16384 * micro_batches}"])
    with unit_service(job, None) as service:
        built = build(job, service, Stages())
    return step_of(built, built.programs)


def main() -> None:
    """Print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", default="")
    parser.add_argument("--micro-batches", type=int, default=1)
    args = parser.parse_args()
    step = built_step(args.cache, args.micro_batches)
    print(f"{'case':22}{'cpu s':>8}{'classes':>9}{'step s':>10}")
    for name, faults in FAULTS.items():
        start = time.process_time()
        timing = time_step(replace(step, faults=faults))
        spent = time.process_time() - start
        simulated = timing.step_time_ps / 1e12
        print(f"{name:22}{spent:8.2f}{timing.classes.count:9}{simulated:10.3f}", flush=True)


if __name__ == "__main__":
    main()
