"""The golden cells: what is asked of each, as words that `shardwright plan --set` takes too.

Between them they have every strategy, every schedule of a pipeline, every machine that programs are
compiled for, both logical cores, all optimization levels and the knobs that change code or time.
Sizes are small where size proves nothing. What runs in values is compared elsewhere; a cell keeps
what must not change unnoticed. `quick` cells are in `make test`, the others in `make matrix`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.orchestrator.config import config
from shardwright.orchestrator.config.config import JobConfig

FOLDER = Path(__file__).parent

SMALL = "model.config=models/small.json"
"""A Llama of four layers in fp32, grouped key-value heads."""
WIDE = "model.config=models/wide.json model.dtype=bfloat16"
"""A Llama of four layers whose matrices fill the engines, in bf16."""


def _entry(name: str) -> str:
    return f"model.entry=golden_models:{name}"


@dataclass(frozen=True, slots=True)
class GoldenCell:
    """One job; `words` set its keys, several to a line."""

    name: str
    is_quick: bool
    words: tuple[str, ...]

    def __str__(self) -> str:
        return self.name

    @property
    def job(self) -> JobConfig:
        """The job, whose files lie beside this one."""
        sets = [word for words in self.words for word in words.split()]
        return replace(config.load(None, ["run.executor=inline", *sets]), base=str(FOLDER))


def quick(name: str, *words: str) -> GoldenCell:
    """A cell of `make test`."""
    return GoldenCell(name, True, words)


def long(name: str, *words: str) -> GoldenCell:
    """A cell of `make matrix`."""
    return GoldenCell(name, False, words)


CELLS = (
    # FSDP: weights gathered per layer, gradients scattered, two micro-batches.
    quick("fsdp", SMALL, "mesh.dp_shard=32 strategy.global_batch=64"),
    quick(
        "hsdp-kept-two-instances-O1",
        SMALL,
        "model.dtype=bfloat16 strategy.reshard_after_forward=false strategy.remat=selective",
        "mesh.dp_replicate=2 mesh.dp_shard=32 cluster.instances=2 compiler.optlevel=1",
        "strategy.cc_streams=2 strategy.early_all_gather_shift=1",
        "strategy.late_reduce_scatter_shift=1 strategy.layers_per_group=1 strategy.bucket_mb=8",
        "strategy.compute_packet_bytes=16384 strategy.collective_packet_bytes=65536,32768",
    ),
    long(
        "pipeline-1f1b-trn2-O1",
        SMALL,
        "strategy.name=llm-training mesh.pp=2 mesh.dp_shard=8 mesh.tp=4 model.optimizer=sgd",
        "strategy.global_batch=32 cluster.target=trn2.48xlarge compiler.optlevel=1",
    ),
    quick(
        "pipeline-interleaved-faults-O1",
        SMALL,
        "strategy.name=llm-training strategy.schedule=interleaved mesh.pp=2 mesh.dp_shard=16",
        "strategy.global_batch=64 faults.slow_cores=5:1.3 faults.slow_links=0/3-7:0.5",
        "compiler.optlevel=1 model.optimizer=sgd",
    ),
    quick("generic-conv", _entry("resnet"), "strategy.name=generic cluster.target=trn1.2xlarge"),
    quick(
        "zero2-gpt-inf2-O1",
        _entry("tied_gpt"),
        "strategy.name=generic strategy.zero=2 strategy.global_batch=48",
        "cluster.target=inf2.48xlarge compiler.model_type=transformer compiler.optlevel=1",
    ),
    quick(
        "experts-O1",
        _entry("experts"),
        "mesh.dp_shard=32 mesh.ep=8 compiler.optlevel=1",
    ),
    quick(
        "ring-O1-unfused",
        SMALL,
        "strategy.name=generic strategy.context=ring mesh.dp_replicate=8 mesh.cp=4",
        "strategy.remat=none compiler.optlevel=1 compiler.attention=unfused",
        "cluster.target=trn1.32xlarge",
    ),
    quick(
        "vit-cast-fp8-trn3-O1",
        _entry("vit"),
        "strategy.name=generic strategy.zero=1 cluster.target=trn3-gen2-ultraserver cluster.lnc=1",
        "compiler.auto_cast=all compiler.auto_cast_type=fp8_e4m3 compiler.optlevel=1",
    ),
    quick("manual", _entry("own_sharding"), "strategy.name=manual"),
    # Fully sharded and replicated state, and what moves its collectives.
    long("fsdp-O2-no-remat", SMALL, "mesh.dp_shard=32 strategy.remat=none"),
    long("fsdp-on-host", SMALL, "mesh.dp_shard=32 strategy.remat=offload"),
    # Gradients of more than 64 KiB a layer, added up in the loop.
    long(
        "accumulated-last",
        "model.preset=gpt3-125m model.seq_len=128 mesh.dp_shard=32 strategy.global_batch=64",
        "strategy.reduce_gradients=last strategy.late_reduce_scatter_shift=1",
    ),
    long("fsdp-O3", SMALL, "mesh.dp_shard=32 compiler.optlevel=3"),
    long(
        "fsdp-policy",
        SMALL,
        "mesh.dp_shard=32 strategy.param_dtype=bfloat16 strategy.reduce_dtype=bfloat16",
        "strategy.output_dtype=bfloat16 strategy.accumulate_dtype=auto strategy.global_batch=64",
    ),
    long("fsdp-tp-tokens", SMALL, "mesh.dp_shard=8 mesh.tp=4 strategy.dependency_tokens=true"),
    long(
        "hsdp-tp-linear",
        SMALL,
        "mesh.dp_replicate=2 mesh.dp_shard=4 mesh.tp=4 cluster.placement=linear",
    ),
    long(
        "hsdp-wide-two-instances",
        WIDE,
        "model.seq_len=256 mesh.dp_replicate=2 mesh.dp_shard=32 cluster.instances=2",
    ),
    long(
        "generic-zero0",
        SMALL,
        "strategy.name=generic strategy.zero=0 strategy.global_batch=64",
    ),
    long(
        "generic-zero1-last",
        SMALL,
        "strategy.name=generic strategy.zero=1 strategy.global_batch=64",
        "strategy.reduce_gradients=last",
    ),
    # Megatron-style splits and pipelines.
    long("tp", SMALL, "strategy.name=llm-training mesh.tp=8 mesh.dp_shard=4"),
    long(
        "tp-whole-sequence",
        SMALL,
        "strategy.name=llm-training mesh.tp=4 mesh.dp_shard=8",
        "strategy.sequence_parallel=false",
    ),
    long(
        "tp-padded",
        SMALL,
        "strategy.name=llm-training mesh.tp=16 mesh.dp_shard=2 strategy.zero=3",
    ),
    long(
        "pipeline-gpipe",
        SMALL,
        "strategy.name=llm-training mesh.pp=4 mesh.tp=2 mesh.dp_shard=4",
        "strategy.schedule=gpipe strategy.global_batch=32",
    ),
    long(
        "pipeline-1f1b-trn2",
        SMALL,
        "strategy.name=llm-training mesh.pp=2 mesh.dp_shard=8 mesh.tp=4",
        "strategy.global_batch=32 cluster.target=trn2.48xlarge",
    ),
    long(
        "pipeline-fsdp-layers",
        SMALL,
        "mesh.pp=4 mesh.dp_shard=8 strategy.stage_balance=layers strategy.global_batch=64",
    ),
    long(
        "pipeline-lamb",
        _entry("bert"),
        "strategy.name=llm-training mesh.pp=2 mesh.dp_shard=16 strategy.global_batch=64",
    ),
    # Sequences over cores, experts, and other kinds of code.
    long("context-gathered", SMALL, "mesh.dp_shard=8 mesh.cp=4"),
    long("context-ring", SMALL, "strategy.context=ring mesh.dp_shard=4 mesh.cp=4 mesh.tp=2"),
    long(
        "experts-trn3",
        _entry("experts"),
        "mesh.dp_shard=576 mesh.ep=8 cluster.target=trn3-gen2-ultraserver",
    ),
    long("experts-dropless", _entry("dropless"), "mesh.dp_shard=32 mesh.ep=4"),
    long("experts-grouped", _entry("grouped"), "strategy.name=generic"),
    long("dropout", _entry("dropout"), "mesh.dp_shard=32"),
    long(
        "bert-zero2-inf2",
        _entry("bert"),
        "strategy.name=generic strategy.zero=2 cluster.target=inf2.48xlarge",
        "compiler.model_type=transformer",
    ),
    long(
        "unet",
        _entry("unet"),
        "strategy.name=generic compiler.model_type=unet-inference",
        "cluster.target=trn1.2xlarge",
    ),
    long("vit-trn2", _entry("vit"), "cluster.target=trn2-ultraserver mesh.dp_shard=256"),
    # Compiler options and machines.
    long(
        "cast-matmult",
        SMALL,
        "mesh.dp_shard=32 compiler.auto_cast=matmult cluster.target=trn1.32xlarge",
    ),
    long(
        "cast-all-tf32",
        SMALL,
        "mesh.dp_shard=12 compiler.auto_cast=all compiler.auto_cast_type=tf32",
        "cluster.target=inf2.24xlarge",
    ),
    long(
        "fused-transformer",
        SMALL,
        "model.dtype=bfloat16 mesh.dp_shard=32 compiler.attention=fused",
        "compiler.model_type=transformer compiler.mixed_precision_accumulation=false",
    ),
    long(
        "hypothetical-lnc2",
        SMALL,
        "mesh.dp_shard=16 cluster.lnc=2 cluster.hypothetical=true",
    ),
    long("trn3-gen1", SMALL, "mesh.dp_shard=256 cluster.target=trn3-gen1-ultraserver"),
    long(
        "jitter",
        SMALL,
        "mesh.dp_shard=32 faults.jitter=0.1 faults.seed=3 compiler.optlevel=1",
    ),
    # Timing alone: 70 billion parameters on 256 cores.
    long("llama-70b", "model.preset=llama2-70b mesh.dp_shard=32 mesh.tp=8 cluster.instances=8"),
)
