"""What unrolled layers cost: CPU seconds of every stage for a decoder of few and of many layers.

    python benchmarks/depth.py [LAYERS ...]

A Flax decoder of width 512 under FSDP on 32 cores, as its users write it, compiled in this process
from an empty cache; beside it a scanned model of 80 layers. Bar: an unrolled model costs about what
a scanned one does. `capture` is JAX tracing and lowering the user's Python.
Then the planning of models of 70B parameters for 4096 cores, recipe to footprint. Bars for
partition, rewrite and localization: 1 s scanned, 6 s unrolled.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shardwright.compiler.frontend.capture import capture
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.rewriting.driver import run
from shardwright.orchestrator.cache import Cache
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.config.layout import Layout
from shardwright.orchestrator.host import collect_rarely
from shardwright.orchestrator.models.presets import preset_task
from shardwright.orchestrator.road.build import build_task
from shardwright.orchestrator.road.stages import Stages
from shardwright.orchestrator.service.executor import InlineExecutor
from shardwright.orchestrator.service.service import UnitService
from shardwright.sharding.localize import localize
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.partitioned import slots
from shardwright.sharding.partition.partitioner import ask
from shardwright.sharding.partition.rewrite import rewrite
from shardwright.sharding.plan import complete, partitioned, prepare
from shardwright.sharding.prepare.reroll import reroll
from tests.models import flax_decoder

CORES = 32
LARGE_CORES = 4096
PLANNING = ("recipe", "partition", "rewrite", "localize", "complete")
STAGES = ("capture", "import", "recipe", "partition", "localize", "outline", "compile", "link")


class CpuStages(Stages):
    """User CPU seconds instead of wall time, child processes included."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """See Stages."""
        start = _cpu_s()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + _cpu_s() - start


def _cpu_s() -> float:
    return time.process_time() + resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


def layout_on(cores: int) -> Layout:
    return Layout(
        target=load_target("trn1n.32xlarge"),
        mesh=make_mesh({"dp_shard": cores}),
        captured_batch=cores,
        global_batch=cores,
        num_microbatches=1,
    )


def row(name: str, task: TrainTask) -> str:
    stages = CpuStages()
    layout = layout_on(CORES)
    with (
        tempfile.TemporaryDirectory() as folder,
        UnitService(InlineExecutor, Cache(Path(folder))) as service,
    ):
        built = build_task(JobConfig(), layout, task, service, stages)
    ours = sum(stages.seconds.values()) - stages.seconds["capture"]
    cells = "".join(f"{stages.seconds[s]:>11.2f}" for s in STAGES)
    return f"{name:14}{len(built.graph.ops):>7}{cells}{ours:>15.2f}"


def planning_row(name: str, task: TrainTask) -> str:
    """CPU seconds of the stages between import and outline; `bar` is what the bars speak of."""
    stages, layout = CpuStages(), layout_on(LARGE_CORES)
    captured = capture(task, layout.captured_batch)
    imported = import_module(captured.artifact)
    rolled = reroll(imported, slots(captured.inputs), slots(captured.outputs))
    graph = run(rolled.graph, step_passes())
    with stages.timed("recipe"):
        ready = prepare(graph, rolled.inputs, rolled.outputs, layout.mesh)
    with stages.timed("partition"):
        answer = partitioned(ready, ask)
    with stages.timed("rewrite"):
        better = rewrite(answer)
    with stages.timed("localize"):
        localize(better)
    bar = sum(stages.seconds.values()) - stages.seconds["recipe"]
    with stages.timed("complete"):
        complete(ready, answer)
    cells = "".join(f"{stages.seconds[s]:>11.2f}" for s in PLANNING)
    return f"{name:14}{len(graph.ops):>7}{cells}{bar:>15.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("layers", nargs="*", type=int, default=[8, 80])
    collect_rarely()
    titles = "".join(f"{s:>11}" for s in STAGES)
    print(f"{'model':14}{'ops':>7}{titles}{'after capture':>15}")
    print(row("scanned 80", preset_task("llama2-70b", seq_len=128)), flush=True)
    for layers in parser.parse_args().layers:
        task = flax_decoder.train_task(num_layers=layers, width=512, num_heads=8, seq_len=128)
        print(row(f"unrolled {layers}", task), flush=True)
    titles = "".join(f"{s:>11}" for s in PLANNING)
    print(f"\n{'70B, 4096':14}{'ops':>7}{titles}{'for the bar':>15}")
    print(planning_row("scanned 80", preset_task("llama2-70b", seq_len=4096)), flush=True)
    task = flax_decoder.train_task(num_layers=80, width=8192, num_heads=64, seq_len=4096)
    print(planning_row("unrolled 80", task), flush=True)


if __name__ == "__main__":
    main()
