"""Published runs of tiny models, as rows of the file that `validate --training` reads."""

from __future__ import annotations

import csv
from pathlib import Path

from shardwright.orchestrator.validation.published import COLUMNS, OPTIONAL, PublishedRun, read_runs
from shardwright.orchestrator.validation.published_collectives import (
    CollectivePrediction,
    predict_row,
)

BERT = {
    "id": "B1",
    "primary": "yes",
    "model": "Tiny BERT pre-training",
    "layers": "2",
    "hidden": "64",
    "heads": "4",
    "kv_heads": "4",
    "ffn": "128",
    "vocab": "96",
    "seq_len": "32",
    "matmul_params_b": "0.0001",
    "framework": "test",
    "tp": "1",
    "pp": "1",
    "dp": "32",
    "zero1": "no",
    "microbatch": "2",
    "microbatches_per_step_per_replica": "4",
    "precision": "FP32",
    "activation_checkpointing": "none",
    "sequence_parallel": "n/a",
    "nodes": "1",
    "instance": "trn1.32xlarge/trn1n.32xlarge",
    "step_time_s": "0.5",
}
GPT = BERT | {
    "id": "G1",
    "model": "tiny GPT3",
    "tp": "4",
    "dp": "8",
    "microbatch": "1",
    "precision": "BF16 weights and optimizer math, stochastic rounding (autocast)",
    "activation_checkpointing": "full, 1 layer",
    "sequence_parallel": "no (unverified)",
}
LLAMA = GPT | {
    "id": "L1",
    "model": "Llama2-tiny",
    "layers": "4",
    "pp": "2",
    "dp": "4",
    "zero1": "yes",
    "precision": "BF16 compute, FP32 master weights/optimizer",
    "activation_checkpointing": "selective (core attention)",
    "sequence_parallel": "yes",
}


def write_csv(path: Path, *rows: dict[str, str], drop: str = "") -> Path:
    names = [n for n in (*COLUMNS, *OPTIONAL) if n != drop]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def parsed(tmp_path: Path, row: dict[str, str]) -> PublishedRun:
    (run,) = read_runs(write_csv(tmp_path / "one.csv", row))
    assert isinstance(run, PublishedRun)
    return run


def predict_file(path: Path) -> list[CollectivePrediction]:
    """Every row of a CSV file of collectives, in order."""
    with path.open(newline="") as handle:
        return [predict_row(row) for row in csv.DictReader(handle)]
