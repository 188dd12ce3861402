"""Published training runs, one per row of a CSV file, as `validate` predicts them.

A row gives the architecture, layout, batches, precision and measured step time of a run in columns.
What the columns leave open (and what a published script says otherwise) is decided here by rules
that hold for every row, each with its source; nothing is fitted.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from compiler.diagnostics import Loc, UsageError
from compiler.target import load_target

COLUMNS = (
    "id",
    "model",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "seq_len",
    "matmul_params_b",
    "framework",
    "tp",
    "pp",
    "dp",
    "zero1",
    "microbatch",
    "microbatches_per_step_per_replica",
    "precision",
    "activation_checkpointing",
    "sequence_parallel",
    "nodes",
    "instance",
    "step_time_s",
)

FAMILIES = {"bert": "encoder", "gpt": "gpt", "llama": "llama"}
"""Word in the model's name (any case) -> family of `compiler/frontend/models`."""

NO_RECOMPUTATION = ("AWS reference Megatron-LM",)
"""Frameworks whose published script asks for no recomputation, whatever the column guesses.

Source: documented: aws-neuron-reference-for-megatron-lm,
examples/pretrain_gpt3_6.7B_32layers_bf16.sh.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Element types of a run: stored weights, activations, reduced gradients, gathered weights."""

    params: str
    activations: str
    gradients: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """One measured run. `micro_batch` is per replica; `target` is the machine it is taken to be."""

    id: str
    model: str
    family: str
    primary: bool
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq_len: int
    matmul_params: float
    tp: int
    pp: int
    dp: int
    zero1: bool
    micro_batch: int
    num_microbatches: int
    storage: Storage
    remat: str
    sequence_parallel: bool
    nodes: int
    target: str
    step_time_s: float

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

    @property
    def model_flops(self) -> float:
        """FLOPs of one optimizer step without recomputation, attention not halved.

        Source: the definition the published table derives its MFU column with: 6 per matmul
        parameter and token, 12 * layers * hidden * seq_len^2 per sequence.
        """
        sequences = self.dp * self.micro_batch * self.num_microbatches
        attention = 12.0 * self.layers * self.hidden * self.seq_len**2
        return sequences * (6.0 * self.seq_len * self.matmul_params + attention)

    def unsupported(self) -> str:
        """Why the run cannot be predicted; empty when it can."""
        sizes = (self.layers, self.hidden, self.heads, self.ffn, self.vocab, self.seq_len)
        if not self.family:
            return f"model requires one of {', '.join(FAMILIES)} in its name, got {self.model!r}"
        if min(sizes) < 1 or self.hidden % self.heads:
            return f"architecture requires positive sizes and heads dividing hidden, got {sizes}"
        cores = load_target(self.target).cores * self.nodes
        if self.cores != cores:
            return f"tp * pp * dp requires {cores} cores of {self.nodes} nodes, got {self.cores}"
        if self.layers % self.pp or self.heads % self.tp:
            return f"tp {self.tp} and pp {self.pp} require to divide heads and layers"
        return ""


def read_runs(path: Path) -> list[PublishedRun]:
    """All rows of `path`.

    Raises UsageError for an unreadable file, a missing column or a bad value.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("SW_TRAINING_CSV", f"cannot read {path}: {error}") from error
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise UsageError(
            "SW_TRAINING_CSV",
            f"{path} requires columns {', '.join(missing)},"
            f" got {', '.join(reader.fieldnames or ()) or 'none'}",
        )
    return [_run(row, Loc(str(path), reader.line_num)) for row in reader]


def _run(row: Mapping[str, str], loc: Loc) -> PublishedRun:
    text = {name: (row.get(name) or "").strip() for name in (*COLUMNS, "primary")}
    sizes = {
        name: _whole(text, name, loc)
        for name in (
            "layers",
            "hidden",
            "heads",
            "ffn",
            "vocab",
            "seq_len",
            "tp",
            "pp",
            "dp",
            "nodes",
        )
    }
    return PublishedRun(
        id=text["id"],
        model=text["model"],
        family=_family(text["model"]),
        primary=text["primary"].lower() == "yes",
        kv_heads=_whole(text, "kv_heads", loc) or sizes["heads"],
        matmul_params=_number(text, "matmul_params_b", loc) * 1e9,
        zero1=text["zero1"].lower().startswith("yes"),
        micro_batch=_whole(text, "microbatch", loc),
        num_microbatches=_whole(text, "microbatches_per_step_per_replica", loc),
        storage=_storage(text["precision"]),
        remat=_remat(text["activation_checkpointing"], text["framework"]),
        sequence_parallel=text["sequence_parallel"].lower().startswith("yes"),
        # "trn1.32xlarge/trn1n.32xlarge" does not say which was measured: the first is taken.
        target=text["instance"].partition("/")[0],
        step_time_s=_positive(text, "step_time_s", loc),
        **sizes,
    )


def _number(text: Mapping[str, str], name: str, loc: Loc) -> float:
    """A number; an empty cell is 0."""
    try:
        return float(text[name] or 0)
    except ValueError:
        raise UsageError(
            "SW_TRAINING_CSV", f"{name} requires a number, got {text[name]!r}", loc
        ) from None


def _whole(text: Mapping[str, str], name: str, loc: Loc) -> int:
    number = _number(text, name, loc)
    if number != int(number) or number < 0:
        raise UsageError(
            "SW_TRAINING_CSV", f"{name} requires a whole number, got {text[name]!r}", loc
        )
    return int(number)


def _positive(text: Mapping[str, str], name: str, loc: Loc) -> float:
    number = _number(text, name, loc)
    if number <= 0:
        raise UsageError("SW_TRAINING_CSV", f"{name} requires more than 0, got {text[name]!r}", loc)
    return number


def _family(model: str) -> str:
    """The family named in the model's name; empty when none is."""
    name = model.lower()
    return next((family for word, family in FAMILIES.items() if word in name), "")


def _storage(precision: str) -> Storage:
    """Element types of the precision column.

    Matmuls run in bf16 in every run: fp32 models were cast by the compiler's default.
    Source: documented: neuronx-cc command line reference of 2022 to 2025 (`--auto-cast`); with an
    fp32 optimizer, training scripts keep bf16 weights beside fp32 masters and gradients.
    """
    name = precision.lower()
    if name.startswith("bf16 compute"):
        return Storage(params="bf16", activations="bf16", gradients="f32")
    if name.startswith("bf16 autocast"):
        return Storage(params="f32", activations="bf16", gradients="f32")
    wide = name.startswith("fp32")
    kind = "f32" if wide else "bf16"
    return Storage(params=kind, activations=kind, gradients=kind)


def _remat(column: str, framework: str) -> str:
    """Recomputation: none, selective or full."""
    if framework.startswith(NO_RECOMPUTATION):
        return "none"
    return next((word for word in ("selective", "full") if column.startswith(word)), "none")
