"""What unrolled layers cost: CPU seconds of every stage for a decoder of few and of many layers.

    python benchmarks/depth.py [LAYERS ...]

A Flax decoder of width 512 under FSDP on 32 cores, as its users write it, compiled in this process
from an empty cache; beside it a scanned model of 80 layers. Bar (issue 3): an unrolled model costs
about what a scanned one does. `capture` is JAX tracing and lowering the user's Python.
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

from compiler.frontend.models.presets import preset_task
from compiler.frontend.task import TrainTask
from compiler.target import load_target
from orchestrator.build import Layout, Stages, build_task
from orchestrator.cache import Cache
from orchestrator.config import JobConfig
from orchestrator.executor import InlineExecutor
from orchestrator.host import collect_rarely
from orchestrator.service import UnitService
from sharding.mesh import make_mesh
from tests.models import flax_decoder

CORES = 32
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


def row(name: str, task: TrainTask) -> str:
    stages = CpuStages()
    layout = Layout(
        target=load_target("trn1n.32xlarge"),
        mesh=make_mesh({"dp_shard": CORES}),
        captured_batch=CORES,
        global_batch=CORES,
        num_microbatches=1,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        UnitService(InlineExecutor, Cache(Path(folder))) as service,
    ):
        built = build_task(JobConfig(), layout, task, service, stages)
    ours = sum(stages.seconds.values()) - stages.seconds["capture"]
    cells = "".join(f"{stages.seconds[s]:>11.2f}" for s in STAGES)
    return f"{name:14}{len(built.graph.ops):>7}{cells}{ours:>15.2f}"


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


if __name__ == "__main__":
    main()
