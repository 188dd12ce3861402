"""Every published Trainium training configuration that ran is said to fit a core.

Rows are the distinct configurations of the published runs that `validate` predicts: model, layout,
batch, precision and recomputation. Each is planned on its own mesh by the strategy that was used
(data, tensor and sequence parallel, ZeRO-1, 1F1B pipelines); the footprint is the estimate from
before compiling, which is an upper one, of the fullest stage.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

from shardwright.compiler.machine.target import load_target
from shardwright.compiler.options import DEFAULTS
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.rewriting.driver import run
from shardwright.orchestrator.models.blocks import Sizes, TaskOptions
from shardwright.orchestrator.models.families import family_task
from shardwright.orchestrator.models.layers import Precision
from shardwright.sharding.memory.footprint import Footprint
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sharding.partition.shardy import answer_request
from shardwright.sharding.settings import StrategySettings
from tests.support.cells import diagonals
from tests.support.road import captured_graph
from tests.support.step_plans import build_plan

LIMIT = load_target("trn1.32xlarge").limit_bytes
SHORT = Precision(params="bf16", activations="bf16")
"""BF16 weights and optimizer math (stochastic rounding)."""
MASTERS = Precision(params="f32", activations="bf16")
"""BF16 compute on fp32 weights, and fp32 masters beside bf16 weights: the same bytes of state."""
WIDE = Precision()
"""FP32 models; that the compiler casts matmuls changes nothing that is stored."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration; `batch` is per replica and micro-batch."""

    family: str
    sizes: Sizes
    precision: Precision
    batch: int
    micro_batches: int
    dp: int
    tp: int = 1
    pp: int = 1
    zero1: bool = False
    sequence_parallel: bool = False
    remat: str = "none"
    kv_heads: int = 0


def sizes(layers: int, hidden: int, heads: int, ffn: int, vocab: int, positions: int) -> Sizes:
    return Sizes(
        layers=layers,
        hidden=hidden,
        heads=heads,
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=vocab,
        positions=positions,
    )


BERT128 = sizes(24, 1024, 16, 4096, 30528, 128)
BERT512 = dataclasses.replace(BERT128, positions=512)
VIT = sizes(12, 768, 12, 3072, 1000, 197)
"""The transformer of ViT-Base; its patch embedding is below a percent of its state."""
GPT7 = sizes(32, 4096, 32, 16384, 50304, 2048)
GPT46 = sizes(56, 8192, 64, 32768, 50304, 2048)
LLAMA13 = sizes(40, 5120, 40, 13824, 32000, 4096)
LLAMA8 = sizes(32, 4096, 32, 14336, 128256, 8192)


def bert(sizes: Sizes, precision: Precision, batch: int, micro_batches: int, dp: int) -> Row:
    return Row(
        family="encoder",
        sizes=sizes,
        precision=precision,
        batch=batch,
        micro_batches=micro_batches,
        dp=dp,
    )


def llama(sizes: Sizes, micro_batches: int, kv_heads: int, **layout: int | bool) -> Row:
    return Row(
        family="llama",
        sizes=sizes,
        precision=MASTERS,
        batch=1,
        micro_batches=micro_batches,
        remat="selective",
        sequence_parallel=True,
        kv_heads=kv_heads,
        **layout,
    )


GPT7_ROW = Row(family="gpt", sizes=GPT7, precision=SHORT, batch=1, micro_batches=16, dp=4, tp=8)
ROWS = {
    "bert-ph1-16n-amp": bert(BERT128, MASTERS, 16, 2, 512),
    "bert-ph1-16n-fp32": bert(BERT128, WIDE, 8, 256, 512),
    "bert-ph1-1n-bf16": bert(BERT128, SHORT, 16, 128, 32),
    "bert-ph1-1n-fp32": bert(BERT128, WIDE, 8, 64, 32),
    "bert-ph2-1n-bf16": bert(BERT512, SHORT, 2, 512, 32),
    "bert-ph2-1n-fp32": bert(BERT512, WIDE, 1, 1024, 32),
    "vit-base-1n": bert(VIT, SHORT, 64, 1, 32),
    "gpt3-6.7b-1n": GPT7_ROW,
    "gpt3-46b-32n": Row(
        family="gpt",
        sizes=GPT46,
        precision=SHORT,
        batch=1,
        micro_batches=64,
        dp=16,
        tp=8,
        pp=8,
        remat="full",
        sequence_parallel=True,
    ),
    "llama2-13b-nxd-32n-pp4": llama(LLAMA13, 32, 40, dp=32, tp=8, pp=4, zero1=True),
    "llama2-13b-nxd-32n-pp8": llama(LLAMA13, 64, 40, dp=16, tp=8, pp=8, zero1=True),
    "llama3.1-8b-32n": llama(LLAMA8, 32, 8, dp=32, tp=32),
    "llama3.1-8b-32n-zero1": llama(LLAMA8, 32, 8, dp=32, tp=32, zero1=True),
}
QUICK = ("bert-ph1-16n-amp", "gpt3-6.7b-1n", "llama3.1-8b-32n")


def planned(row: Row) -> Footprint:
    """The footprint of the fullest stage."""
    vocab = -(-row.sizes.vocab // row.tp) * row.tp  # padded to the ranks, as Megatron-LM does
    options = TaskOptions(
        seq_len=row.sizes.positions, precision=row.precision, remat=row.remat, name="published"
    )
    whole = dataclasses.replace(row.sizes, vocab=vocab)
    task = family_task(row.family, whole, options, row.kv_heads)
    data = "dp_shard" if row.zero1 else "dp_replicate"
    mesh = {a: n for a, n in (("pp", row.pp), (data, row.dp), ("tp", row.tp)) if n > 1}
    settings = StrategySettings(
        name="llm-training",
        zero=int(row.zero1),
        sequence_parallel=row.sequence_parallel,
        schedule="1f1b",
    )
    graph, inputs, outputs = captured_graph(task, row.batch * row.dp)
    plan = build_plan(
        run(graph, step_passes(DEFAULTS)),
        inputs,
        outputs,
        make_mesh(mesh),
        settings=settings,
        num_microbatches=row.micro_batches,
        unit=answer_request,
    )
    return plan.footprint


@pytest.mark.parametrize("name", diagonals(list(ROWS), 5, QUICK))
def test_what_ran_fits(name: str) -> None:
    found = planned(ROWS[name])
    print(f"{name}: {found.peak_bytes / 2**30:.2f} of {LIMIT / 2**30:.2f} GiB")
    assert found.estimated and found.peak_bytes <= LIMIT


def test_half_the_ranks_do_not_fit() -> None:
    """The verdict can be no: the same model on half as many tensor-parallel ranks."""
    assert planned(dataclasses.replace(GPT7_ROW, tp=4)).peak_bytes > LIMIT
