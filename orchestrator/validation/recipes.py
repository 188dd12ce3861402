"""Published training runs and layouts as jobs: `recipes.toml`, under names of `model.recipe`.

A recipe is a row as `validate` reads one; a layout is one without a measured step. Its model is the
task of the row; its mesh, batches, machine and software are tables of a job, which flags and job
files overrule key by key.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from shardwright.compiler.diagnostics import UsageError, did_you_mean
from shardwright.orchestrator.validation.published import (
    PublishedRun,
    Setup,
    Workload,
    run_of,
    setup_of,
)
from shardwright.orchestrator.validation.published_columns import entries

Tables = Mapping[str, Mapping[str, Any]]


@cache
def _rows() -> Mapping[str, Mapping[str, str]]:
    return {row["name"]: row for row in entries("recipes.toml", "recipe")}


def recipe_names() -> tuple[str, ...]:
    """All of them, in the order of the file."""
    return tuple(_rows())


def recipe_source(name: str) -> str:
    """Where the run of a recipe is published."""
    return _rows()[name]["source"]


@cache
def recipe(name: str) -> Setup:
    """The run of a recipe, a `PublishedRun` where its step was measured. Raises UsageError for an
    unknown one."""
    if name not in _rows():
        raise UsageError(
            "SW_MODEL",
            f"model.recipe requires the name of a published run or layout, got {name!r}",
            hint=did_you_mean(name, recipe_names(), f"recipes are {', '.join(recipe_names())}"),
        )
    row = _rows()[name]
    if "step_time_s" not in row:
        return setup_of(row)
    run = run_of(row, 0)
    assert isinstance(run, PublishedRun), run
    return run


def recipe_tables(name: str) -> Tables:
    """The tables of a job that a recipe sets. Raises UsageError, as `recipe`."""
    return tables_of(recipe(name).workload)


def tables_of(w: Workload) -> Tables:
    """A run as tables of a job: machine, mesh, batches, strategy, compiler.

    Matmuls of fp32 operands are cast to bf16, as the compiler's documented default did until mid
    2025 (neuronx-cc command line reference, `--auto-cast`); what they give, and what is stored,
    stays fp32.

    Scripts reduce gradients once, by calls of their own after the last backward pass, and add them
    up in the type they have, by an operator of its own. Data-parallel ranks share the optimizer
    state only with ZeRO-1.
    Code waits for collectives where the program has them: what schedules them beside code is off
    unless a script asks for it, and none of these does.
    Source: dp_bert_large_hf_pretrain_hdf5.py (aws-neuron-samples), run_llama_nxd.py
    (neuronx-distributed): autograd of PyTorch; conf/megatron_gpt_config.yaml
    (neuronx-nemo-megatron): gradient_accumulation_fusion: False; megatron/model/distributed.py
    (aws-neuron-reference-for-megatron-lm): main_grad.add_(param.grad.data); NEURON_CC_FLAGS of all
    of these, without the `--enable-ccop-compute-overlap` that inference sets
    (neuronx-distributed-inference)."""
    short = w.storage.gradients == w.storage.params
    data = "dp_shard" if w.zero1 else "dp_replicate"
    sizes = {axis: size for axis, size in (("pp", w.pp), (data, w.dp), ("tp", w.tp)) if size > 1}
    return {
        "strategy": {
            "name": "llm-training" if w.tp * w.pp > 1 else "generic",
            "micro_batch": w.micro_batch,
            "global_batch": w.micro_batch * w.dp * w.num_microbatches,
            "remat": w.remat,
            "zero": int(w.zero1),
            "sequence_parallel": w.sequence_parallel,
            "reduce_gradients": "after",
            "accumulate_dtype": "auto" if short else "float32",
            "gradient_accumulation_fusion": False,
        },
        "mesh": sizes or {data: 1},
        "cluster": {
            "target": w.target,
            "instances": w.nodes,
            "lnc": 1,
            "runtime": w.runtime,
            "host_us": w.host_us,
        },
        "compiler": {
            "attention": w.attention,
            "mixed_precision_accumulation": w.accumulation,
            "auto_cast": "matmult",
            "latency_hiding": False,
        },
    }
