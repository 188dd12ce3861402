"""Published training runs, layouts and serving settings as jobs: `recipes.toml`, under names of
`model.recipe`.

A recipe of training is a row as `validate` reads one; a layout is one without a measured step. Its
model is the task of the row; its mesh, batches, machine and software are tables of a job, which
flags and job files overrule key by key. One of serving is a preset, and how it is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Serving settings: `tp` cores of `target` hold the preset, and a cache of `context` positions
    for each of `sequences`; `accumulation`: sums of short types stay fp32."""

    preset: str
    target: str
    tp: int
    sequences: int
    context: int
    accumulation: bool


@cache
def _rows() -> Mapping[str, Mapping[str, Any]]:
    rows = [row for table in ("recipe", "served") for row in entries("recipes.toml", table)]
    return {row["name"]: row for row in rows}


def recipe_names() -> tuple[str, ...]:
    """All of them, in the order of the file."""
    return tuple(_rows())


def recipe_source(name: str) -> str:
    """Where the run of a recipe is published."""
    source: str = _rows()[name]["source"]
    return source


@cache
def recipe(name: str) -> Setup | Served:
    """What a recipe sets up, a `PublishedRun` where its step was measured. Raises UsageError for an
    unknown one."""
    if name not in _rows():
        raise UsageError(
            "SW_MODEL",
            f"model.recipe requires the name of a published run, layout or service, got {name!r}",
            hint=did_you_mean(name, recipe_names(), f"recipes are {', '.join(recipe_names())}"),
        )
    row = _rows()[name]
    if "preset" in row:
        return Served(**{key: row[key] for key in Served.__dataclass_fields__})
    if "step_time_s" not in row:
        return setup_of(row)
    run = run_of(row, 0)
    assert isinstance(run, PublishedRun), run
    return run


def recipe_tables(name: str) -> Tables:
    """The tables of a job that a recipe sets. Raises UsageError, as `recipe`."""
    found = recipe(name)
    return _served_tables(found) if isinstance(found, Served) else tables_of(found.workload)


def trained_recipe(name: str) -> Setup:
    """The run or layout of a recipe of training. Raises UsageError for any other."""
    found = recipe(name)
    if isinstance(found, Served):
        raise UsageError(
            "SW_MODE",
            f"model.mode = train requires a recipe of training, got {name}, which serves",
            hint=f"leave the mode out, or train its model: --model {found.preset}",
        )
    return found


def _served_tables(one: Served) -> Tables:
    """Decoding, unless a job says prefill: weights and cache lie over all cores of the setting."""
    return {
        "model": {"mode": "decode", "seq_len": one.context},
        "strategy": {"global_batch": one.sequences},
        "mesh": {"tp": one.tp},
        "cluster": {"target": one.target, "instances": 1},
        "compiler": {"mixed_precision_accumulation": one.accumulation},
    }


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
