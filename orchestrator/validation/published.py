"""Published training runs, one per row of a CSV file, as `validate` predicts them.

A row gives the architecture, layout, batches, precision and measured step time of a run in columns.
What the columns leave open (and what a published script says otherwise) is decided here by rules
that hold for every row, each with its source; nothing is fitted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.collectives.timing.runtimes import CURRENT, runtime_of_date
from shardwright.compiler.machine.target import load_target, target_names
from shardwright.orchestrator.validation.published_columns import (
    finite,
    machines_named,
    positive,
    read_table,
    whole,
)
from shardwright.orchestrator.validation.published_mfu import sequence_flops
from shardwright.orchestrator.validation.run_settings import RunSettings, settings_of

COLUMNS = (
    *("id", "model", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len"),
    *("matmul_params_b", "framework", "tp", "pp", "dp", "zero1", "microbatch"),
    *("microbatches_per_step_per_replica", "precision", "activation_checkpointing"),
    *("sequence_parallel", "nodes", "instance", "step_time_s"),
)

OPTIONAL = ("primary", "group", "optimizer", "neuron_version", "first_published", "notes")
"""Columns that may be missing."""

FAMILIES = {"bert": "encoder", "vit": "vit", "llama": "llama", "gpt": "gpt"}
"""Word in the model's name (any case) -> family of `orchestrator/models`."""

CLASSES = 1000
"""Classes of an image model whose table names no vocabulary: those of the published checkpoint
(google/vit-base-patch16-224); its head is below a percent of the step."""

OPTIMIZERS = ("adamw", "adam", "lamb")


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Element types of a run: stored weights, activations, what norms, softmax and loss compute
    in, gradients as they are added up and reduced, what norms, softmax and embeddings hand on."""

    params: str
    activations: str
    statistics: str
    gradients: str
    stream: str = ""  # that of activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """All of a run that decides its predicted time: runs with equal ones have one prediction.
    `micro_batch` is per replica; `target` is the machine it is taken to be."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq_len: int
    tp: int
    pp: int
    dp: int
    zero1: bool
    micro_batch: int
    num_microbatches: int
    storage: Storage
    optimizer: str
    attention: str
    remat: str
    accumulation: bool  # sums of short types stay fp32 between operations
    dropout: float = 0.0
    fused_projections: bool = False  # projections of one input are one matrix
    replicated_kv: bool = False  # every tensor-parallel rank has key-value heads of its own
    one_hot_loss: bool = False  # the loss finds targets by one-hot rows
    host_us: int = 0  # of a step, in which cores wait for the host
    sequence_parallel: bool
    nodes: int
    target: str
    runtime: str = CURRENT.name  # of collectives, when the run was published

    @property
    def cores(self) -> int:
        """NeuronCores of the run."""
        return self.tp * self.pp * self.dp

    @property
    def layout(self) -> str:
        """What kind of run it is: data-parallel, tensor-parallel or pipeline."""
        if self.pp > 1:
            return "pipeline"
        return "tensor-parallel" if self.tp > 1 else "data-parallel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A training run as somebody set it up; `settings` is the profile of its software."""

    id: str
    model: str
    settings: RunSettings
    workload: Workload

    def unsupported(self) -> str:
        """Why the run cannot be predicted; empty when it can."""
        w = self.workload
        sizes = (w.layers, w.hidden, w.heads, w.ffn, w.vocab, w.seq_len, w.tp, w.pp, w.dp)
        batches = (w.micro_batch, w.num_microbatches)
        if not w.family:
            return f"model requires one of {', '.join(FAMILIES)} in its name, got {self.model!r}"
        if min(sizes) < 1 or w.hidden % w.heads:
            return f"architecture requires positive sizes and heads dividing hidden, got {sizes}"
        if min(batches) < 1:
            return f"batches require positive sizes, got {batches}"
        if w.target not in target_names():
            return f"instance requires one of {', '.join(target_names())}, got {w.target!r}"
        cores = load_target(w.target).cores * w.nodes
        if w.cores != cores:
            return f"tp * pp * dp requires {cores} cores of {w.nodes} nodes, got {w.cores}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun(Setup):
    """A setup whose step was measured."""

    group: str
    primary: bool
    matmul_params: float
    step_time_s: float

    @property
    def model_flops(self) -> float:
        """FLOPs of one optimizer step, as the published table has them in its MFU column."""
        w = self.workload
        sequence = sequence_flops(w.layers, w.hidden, w.seq_len, self.matmul_params)
        return w.dp * w.micro_batch * w.num_microbatches * sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableRun:
    """A row with a cell that says nothing; it is reported with the others."""

    id: str
    group: str
    model: str
    primary: bool
    reason: str


Row = PublishedRun | UnreadableRun


def read_runs(path: Path) -> list[Row]:
    """All rows of `path`, each under an id of its own. Raises UsageError for an unreadable file or
    a missing column."""
    runs: dict[str, Row] = {}
    for line, cells in read_table(path, COLUMNS):
        name = cells["id"] or f"line {line}"
        name = name if name not in runs else f"{name} (line {line})"
        runs[name] = run_of(cells | {"id": name}, line)
    return list(runs.values())


_SIZES = ("layers", "hidden", "heads", "ffn", "vocab", "seq_len", "tp", "pp", "dp", "nodes")


def run_of(cells: Mapping[str, str], line: int) -> Row:
    """The run that the cells of a line describe, or why there is none."""
    text = _with_optional(cells)
    named: dict[str, Any] = {"id": text["id"], "model": text["model"]}
    named |= {"group": text["group"] or text["model"], "primary": text["primary"].lower() == "yes"}
    try:
        settings = settings_of(text)
        return PublishedRun(
            **named,
            settings=settings,
            matmul_params=finite(text["matmul_params_b"], "matmul_params_b") * 1e9,
            step_time_s=positive(text["step_time_s"], "step_time_s"),
            workload=_workload(text, settings),
        )
    except ValueError as error:
        return UnreadableRun(**named, reason=f"line {line}: {error}")


def setup_of(cells: Mapping[str, str]) -> Setup:
    """The setup that these cells describe: a run's, without what was measured of it. Raises
    ValueError for a cell that says nothing."""
    text = _with_optional(cells)
    settings = settings_of(text)
    workload = _workload(text, settings)
    return Setup(id=text["id"], model=text["model"], settings=settings, workload=workload)


def _with_optional(cells: Mapping[str, str]) -> dict[str, str]:
    return {**dict.fromkeys(OPTIONAL, ""), **cells}


def _workload(text: Mapping[str, str], settings: RunSettings) -> Workload:
    sizes = {name: whole(text[name], name) for name in _SIZES}
    name = text["model"].lower()
    family = next((family for word, family in FAMILIES.items() if word in name), "")
    if family == "vit":
        sizes["vocab"] = sizes["vocab"] or CLASSES
    column = text["activation_checkpointing"]
    remat = _remat(column) if settings.remat == "column" else settings.remat
    machines, optimizer = machines_named(text["instance"]), text["optimizer"].lower()
    return Workload(
        family=family,
        kv_heads=whole(text["kv_heads"], "kv_heads") or sizes["heads"],
        zero1=text["zero1"].lower().startswith("yes"),
        micro_batch=whole(text["microbatch"], "microbatch"),
        num_microbatches=whole(
            text["microbatches_per_step_per_replica"], "microbatches_per_step_per_replica"
        ),
        storage=_storage(text["precision"]),
        # AdamW where the table names none of ours, as the training scripts default.
        optimizer=optimizer if optimizer in OPTIMIZERS else "adamw",
        attention=settings.attention,
        remat=remat,
        accumulation=settings.accumulation,
        dropout=settings.dropout,
        fused_projections=settings.fused,
        replicated_kv=settings.replicated_kv,
        one_hot_loss=settings.one_hot_loss,
        host_us=settings.trace_us_per_layer * sizes["layers"] // max(1, sizes["pp"]),
        sequence_parallel=text["sequence_parallel"].lower().startswith("yes"),
        # "trn1.32xlarge/trn1n.32xlarge" does not say which was measured: the first is taken.
        target=machines[0] if machines else text["instance"],
        runtime=runtime_of_date(text["first_published"]).name,
        **sizes,
    )


def _storage(precision: str) -> Storage:
    """Element types of the precision column.

    "BF16 weights" turn every fp32 tensor into bf16, what norms and softmax compute in too.
    Source: documented: Neuron application note on XLA_USE_BF16 and XLA_DOWNCAST_BF16; with an fp32
    optimizer, training scripts keep bf16 weights beside fp32 masters and gradients, and softmax in
    fp32. PyTorch's autocast op reference: products are bf16, layer_norm, softmax and cross_entropy
    take and give fp32."""
    name = precision.lower()
    if name.startswith("bf16 compute"):
        return Storage(params="bf16", activations="bf16", statistics="f32", gradients="f32")
    if name.startswith("bf16 autocast"):
        return Storage(
            params="f32", activations="bf16", statistics="f32", gradients="f32", stream="f32"
        )
    kind = "f32" if name.startswith("fp32") else "bf16"
    return Storage(params=kind, activations=kind, statistics=kind, gradients=kind)


REMAT = {"selective": "selective", "full": "full"} | dict.fromkeys(
    ("none", "no", "n/a", "unstated", ""), "none"
)
"""First word of the recomputation column -> recomputation."""


def _remat(column: str) -> str:
    """Recomputation: none, selective or full; what follows the first word is a remark. Raises
    ValueError for other words."""
    found = re.search(r"[^\s,;:(]+", column.lower())
    word = found[0] if found else ""
    if word not in REMAT:
        known = ", ".join(key for key in REMAT if key)
        raise ValueError(f"activation_checkpointing requires one of {known}, got {column!r}")
    return REMAT[word]
