"""What each level of optimisation costs and gives: compile CPU seconds against simulated time.

    python benchmarks/optlevels.py [NAME ...]

Every model is captured and partitioned once; then all its compile units are compiled in this
process at each level, and one step is timed on the nominal profile. Bars: the units of llama2-70b
compile within 8 CPU seconds on level 2, level 1 compiles at least twice as fast (`x level 2` at
most 0.5), and no higher level gives slower code.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.compiler.driver import compile_function
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.fusion.autotuner import forget
from shardwright.compiler.isa.limits import walk
from shardwright.compiler.isa.program import Program
from shardwright.compiler.linking.link import link
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.outline import outline
from shardwright.orchestrator.config.config import JobConfig, load
from shardwright.orchestrator.config.layout import layout_of
from shardwright.orchestrator.config.model import resolve_task
from shardwright.orchestrator.models.blocks import Sizes, TaskOptions
from shardwright.orchestrator.models.families import family_task
from shardwright.orchestrator.models.layers import Precision
from shardwright.orchestrator.road.build import Built, build_task
from shardwright.orchestrator.road.stages import Stages
from shardwright.orchestrator.road.units import unit_service
from shardwright.sim_cluster.timing.step_time import Step, time_step

LEVELS = (1, 2, 3)
HEADER = (
    f"{'model':14}{'level':>6}{'compile cpu s':>15}{'x level 2':>11}{'step ms':>11}"
    f"{'compute ms':>12}{'instrs':>8}"
)


@dataclass(frozen=True, slots=True)
class Model:
    """A model on whole trn1n instances, FSDP over all cores, one sample of `seq_len` per core: a
    preset, or the sizes of a family.
    """

    name: str
    instances: int
    seq_len: int
    family: str = ""
    sizes: tuple[int, int, int] = (0, 0, 0)  # layers, heads, vocabulary

    def task(self, job: JobConfig) -> TrainTask:
        """The training task; families compute in bf16 as presets do."""
        if not self.family:
            return resolve_task(job)
        layers, heads, vocab = self.sizes
        sizes = Sizes(
            layers=layers,
            hidden=64 * heads,
            heads=heads,
            head_dim=64,
            ffn=256 * heads,
            vocab=vocab,
            positions=self.seq_len,
        )
        options = TaskOptions(seq_len=self.seq_len, precision=Precision(activations="bf16"))
        return family_task(self.family, sizes, options)


MODELS = (
    Model("llama2-70b", 32, 4096),
    Model("llama2-7b", 1, 4096),
    Model("llama3-8b", 4, 8192),
    Model("gpt 350m", 1, 1024, "gpt", (24, 16, 50257)),
    Model("encoder 340m", 1, 512, "encoder", (24, 16, 30522)),
)


def built(model: Model, cache: str) -> Built:
    settings = [f"cluster.instances={model.instances}", f"cache.dir={cache}", "run.executor=inline"]
    if not model.family:
        settings += [f"model.preset={model.name}", f"model.seq_len={model.seq_len}"]
    job = load(None, settings)
    return build_task(job, layout_of(job), model.task(job), unit_service(job, None), Stages())


def compile_all(model: Built, level: int) -> tuple[dict[str, Program], float]:
    """The programs at a level, and CPU seconds of all compile units."""
    target, options = model.layout.target.name, CompileOptions(optlevel=level)
    forget()  # what the step was planned with
    outlined = outline(model.plan.step)
    start = time.process_time()
    compiled = [compile_function(f.payload, target, options) for f in outlined.functions]
    seconds = time.process_time() - start
    return link(model.plan.step, outlined, compiled, target), seconds


def rows(model: Model, given: Built) -> list[str]:
    """One row per level."""
    compiled = {level: compile_all(given, level) for level in LEVELS}
    return [
        row(model, given, level, programs, seconds, seconds / compiled[2][1])
        for level, (programs, seconds) in compiled.items()
    ]


def row(
    model: Model,
    given: Built,
    level: int,
    programs: dict[str, Program],
    seconds: float,
    ratio: float,
) -> str:
    step = Step(
        programs=programs,
        schedules=given.plan.step.schedules,
        mesh=given.plan.step.mesh,
        target=given.layout.target,
        instances=model.instances,
    )
    timing = time_step(step)
    compute = timing.breakdown_ps["compute"] + timing.breakdown_ps["memory"]
    instrs = sum(
        1 for p in programs.values() for f in p.functions for k in f.kernels for _ in walk(k.body)
    )
    return (
        f"{model.name:14}{level:>6}{seconds:>15.2f}{ratio:>11.2f}{timing.step_time_ps / 1e9:>11.1f}"
        f"{compute / 1e9:>12.1f}{instrs:>8}"
    )


def chosen(names: Sequence[str]) -> list[Model]:
    return [m for m in MODELS if not names or any(n in m.name for n in names)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only models whose name contains one of these")
    print(HEADER)
    for model in chosen(parser.parse_args().names):
        with tempfile.TemporaryDirectory() as cache:
            given = built(model, cache)
            print(*rows(model, given), sep="\n", flush=True)


if __name__ == "__main__":
    main()
