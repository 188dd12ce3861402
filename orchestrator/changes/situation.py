"""Where a job stands when a change of it is looked for: what it asks for, and how it lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.compiler.frontend.task import Mode
from shardwright.orchestrator.changes.change import as_chosen
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.config.layout import Layout
from shardwright.orchestrator.config.model import compute_type
from shardwright.orchestrator.report.text import Report
from shardwright.sharding.settings import MANUAL, StrategySettings

COMPUTE = ("tensor", "vector", "scalar", "gpsimd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A job as rules see it; sizes of the mesh are those a job names (`ep` is a part of
    `dp_shard`). With `has_wide_products` most of its products are of fp32 and nothing casts them;
    with `draws_in_code` GpSimd is its busiest engine, and it may be the generator that it runs.
    Keys that the job leaves to the memory, `open_keys`, have the values that were chosen.
    """

    job: JobConfig
    mesh: Mapping[str, int]
    global_batch: int
    num_microbatches: int
    has_wide_products: bool = False
    draws_in_code: bool = False
    open_keys: tuple[str, ...] = ()

    @property
    def strategy(self) -> StrategySettings:
        """What is asked of the distribution."""
        return self.job.strategy

    @property
    def is_ours(self) -> bool:
        """Whether the model is one that we write, so that `[model]` and `remat` change it."""
        return is_ours(self.job)

    @property
    def trains(self) -> bool:
        """Whether the step has gradients."""
        return Mode(self.job.model.mode).trains

    @property
    def is_manual(self) -> bool:
        """Whether the mesh is the step's own."""
        return self.strategy.name == MANUAL

    @property
    def is_full_precision(self) -> bool:
        """Whether a model of ours computes in fp32, and may do otherwise."""
        return bool(self.is_ours and not self.job.model.recipe) and (
            compute_type(self.job) == "float32"
        )

    @property
    def zero(self) -> int:
        """The ZeRO stage, resolved."""
        return self.strategy.zero_stage

    def size(self, axis: str) -> int:
        """The size of an axis; 1 where the mesh does not have it."""
        return self.mesh.get(axis, 1)


def is_ours(job: JobConfig) -> bool:
    """Whether the model of a job is one that we write."""
    return bool(job.model.preset or job.model.config or job.model.recipe)


def given_sizes(mesh: Mapping[str, int]) -> dict[str, int]:
    """The axes of a mesh as a job names them."""
    sizes = dict(mesh)
    sizes["dp_shard"] = sizes.get("dp_shard", 1) * sizes.get("ep", 1)
    return sizes


def laid_out(job: JobConfig, layout: Layout) -> Situation:
    """That of a job of which nothing is known but how it lies."""
    return Situation(
        job=job,
        mesh=given_sizes(layout.mesh.sizes),
        global_batch=layout.global_batch,
        num_microbatches=layout.num_microbatches,
    )


def situation_of(job: JobConfig, report: Report) -> Situation:
    """That of a planned job."""
    return Situation(
        job=as_chosen(job, report),
        open_keys=job.strategy.open_keys,
        mesh=given_sizes(report["mesh"]),
        global_batch=report["batch"]["global_batch"],
        num_microbatches=report["batch"]["num_microbatches"],
        has_wide_products=job.compiler.auto_cast == "none" and _wide(report) > 0.5,
        draws_in_code=_draws_in_code(job, report),
    )


def _draws_in_code(job: JobConfig, report: Report) -> bool:
    """Whether the step is a user's own, leaves the generator to jax, and is busiest with integers
    on GpSimd, of which Threefry's are exclusive ors."""
    if not job.model.entry or job.model.generator != "auto" or "xor" not in report["graph"]["ops"]:
        return False
    engines = {n: e["share"] for n, e in report["timing"]["engines"].items() if n in COMPUTE}
    return max(engines, key=engines.__getitem__, default="") == "gpsimd"


def _wide(report: Report) -> float:
    return float(report["graph"].get("product_types", {}).get("f32", 0.0))
