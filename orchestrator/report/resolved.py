"""What the keys of a job stand for that leave a choice to us: `auto`, and 0 where that is no size.

A report has the job as it was asked for (`job`) and the values of those keys beside it
(`resolved`); who shows settings lays one over the other (`resolved_job`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwright.orchestrator.changes.situation import given_sizes
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.config.model import compute_type
from shardwright.orchestrator.report.text import Facts, Report, seconds_text
from shardwright.sharding.settings import AUTO, MANUAL

if TYPE_CHECKING:
    from shardwright.orchestrator.road.build import Built

_OPEN = (0, AUTO, "auto")
"""Values that leave the choice to us, of the keys that `resolved_keys` knows."""


def resolved_keys(built: Built, goodput: Facts | None) -> dict[str, Facts]:
    """`{key: {value, why}}` of the keys of the job that say nothing, in the order of its tables."""
    job, layout = built.job, built.layout
    strategy = job.strategy
    sizes = {axis: (size, "of the mesh") for axis, size in given_sizes(layout.mesh.sizes).items()}
    is_own = strategy.name == MANUAL
    part = "micro-batch" if built.mode.trains else "sequence"
    own = "as the step says"
    gradients = "as gradients have it"
    rows = {
        **_of_model(job, built.context or built.tokens_per_sample),
        **{
            f"mesh.{axis}": sizes.get(axis, (1, "not in the mesh"))
            for axis in job.as_dict()["mesh"]
        },
        "strategy.global_batch": (layout.global_batch, f"one {part} per data-parallel rank"),
        "strategy.zero": (own if is_own else strategy.zero_stage, f"of strategy {strategy.name}"),
        "strategy.param_dtype": ("as the model says", "no policy of types"),
        "strategy.reduce_dtype": (gradients, "no policy of types"),
        "strategy.output_dtype": ("as the model says", "no policy of types"),
        "strategy.reduce_gradients": (strategy.gradient_reduction, f"of strategy {strategy.name}"),
        "strategy.accumulate_dtype": (gradients, "added up in place"),
        "cluster.lnc": (layout.target.lnc, f"default of {layout.target.name}"),
    }
    if goodput:  # what these come to follows from the step, so it is a result and no setting
        said = job.goodput.checkpoint_interval_steps
        interval = "as its steps take" if said else "the best"
        rows["goodput.checkpoint_interval_s"] = (interval, seconds_text(goodput["interval_s"]))
        steps = f"{goodput['interval_steps']:,}"
        rows["goodput.checkpoint_interval_steps"] = ("those of the interval", steps)
        rows["goodput.checkpoint_s"] = (
            "as storage takes it",
            seconds_text(goodput["checkpoint_s"]),
        )
    return {
        key: {"value": value, "why": why}
        for key, (value, why) in rows.items()
        if job.value(key) in _OPEN
    }


def _of_model(job: JobConfig, tokens: int) -> dict[str, tuple[Any, str]]:
    """Who says what the model is like, where the job does not."""
    model, length = job.model, "of the step's samples"
    dtype = ("as the step says", "of the step")
    generator = ("as the step says", "of the step, or jax_default_prng_impl")
    if model.preset or model.config:
        generator = ("as the model says", "of the model")
        length, source = (
            ("of the preset", "presets compute in it")
            if model.preset
            else ("max_position_embeddings of the config", "torch_dtype of the config, if any")
        )
        dtype = (compute_type(job), source)
    return {"model.seq_len": (tokens, length), "model.dtype": dtype, "model.generator": generator}


def resolved_job(report: Report) -> Facts:
    """The job of a report, table by table, with what was chosen in place of what was left open;
    as it was asked for, of reports that do not say what was chosen."""
    tables = dict(report["job"])
    for key, row in report.get("resolved", {}).items():
        table, _, name = key.partition(".")
        tables[table] = {**tables[table], name: row["value"]}
    return tables
