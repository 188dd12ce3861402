"""NxD Training's YAML: models of Hugging Face (`model_source: hf`) and of Megatron.

Source: aws-neuron/neuronx-distributed-training, `examples/conf/*.yaml`, and the YAML configuration
page of the Neuron documentation.
"""

from __future__ import annotations

import json
import os
from types import MappingProxyType
from typing import Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.compile.cc_flags import job_tables
from shardwright.orchestrator.compile.compile_flags import ENVIRONMENT
from shardwright.orchestrator.config.importers.imported import Asked, Meaning
from shardwright.orchestrator.config.importers.shapes import (
    LLAMA,
    Ranks,
    cluster_tables,
    model_tables,
)
from shardwright.orchestrator.config.importers.table import (
    STOPPED,
    Reading,
    Row,
    Table,
    instead,
    key,
    nothing,
    only,
    real,
    switch,
    text,
    whole,
    words,
)
from shardwright.orchestrator.config.model_file import read_config

_LOG = nothing("logs, checkpoints and evaluation between steps")
_EPOCHS = nothing("passes over the data: how many tokens these are, the file does not say")
_DATA = nothing("which data is read and how, not the work of a step")
_RATE = nothing("a number of the update, not its work")
_START = nothing("how parameters begin, not their size")
_HOST = nothing("how the host runs programs")
_MADE = nothing("which kernel computes it: the compiler's choice here")
_PRECISION = nothing("of precision.type manual alone")
_OWN = "give the model as an entry of your own (docs/own-step.md)"
_DROPPED = instead(0, assumes="{name} {value}: nothing is dropped, so no masks are drawn")

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Projections that are one matrix in this project -> what they are here."""


def _targets(value: Any) -> tuple[str, ...]:
    """`target_modules` of adapters."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError("a list of projections")
    return tuple(part for name in value for part in _FUSED.get(name, (name,)))


def _adapters(above: str) -> dict[str, Row]:
    """The rows of the table `peft`, which lies in another in some releases."""
    rows = {
        "lora_rank": key("model.lora_r", whole(1)),
        "lora_alpha": key("model.lora_alpha", real),
        "target_modules": key("model.lora_targets", _targets),
        "lora_dropout": _DROPPED,
        "lora_bias": only("none", says="adapters have no biases here", hint="leave it out"),
        "*": _LOG,
    }
    return {f"{above}.peft.{name}": row for name, row in rows.items()}


TABLE: Table = MappingProxyType(
    {
        "name": nothing("a name"),
        "model_source": key("source", words({"hf": "hf", "megatron": "megatron"}), "hf"),
        "seed": nothing("where random numbers begin"),
        "trainer.devices": key("devices", whole(1), 32),
        "trainer.num_nodes": key("nodes", whole(1), 1),
        "trainer.max_steps": key("steps", whole(-1)),
        "trainer.max_epochs": _EPOCHS,
        "trainer.gradient_clip_val": key("model.clip", real, 1.0),
        **dict.fromkeys(
            (
                *("trainer.log_every_n_steps", "trainer.val_check_interval"),
                *(
                    "trainer.check_val_every_n_epoch",
                    "trainer.num_sanity_val_steps",
                    "trainer.limit_val_batches",
                ),
                *("trainer.limit_test_batches", "trainer.limit_train_batches"),
            ),
            _LOG,
        ),
        "exp_manager.checkpoint_callback_params.every_n_train_steps": key(
            "save_interval", whole(0, 10**9)
        ),
        "exp_manager.async_checkpointing": instead(False, assumes=STOPPED),
        "exp_manager.*": _LOG,
        "distributed_strategy.tensor_model_parallel_size": key("mesh.tp", whole(1), 1),
        "distributed_strategy.pipeline_model_parallel_size": key("mesh.pp", whole(1), 1),
        "distributed_strategy.context_parallel_size": key("mesh.cp", whole(1), 1),
        "distributed_strategy.expert_model_parallel_size": key("mesh.ep", whole(1)),
        "distributed_strategy.virtual_pipeline_model_parallel_size": key("parts", whole(1), 1),
        "distributed_strategy.zero1": key("is_zero1", switch, False),
        "distributed_strategy.sequence_parallel": key("strategy.sequence_parallel", switch, False),
        "distributed_strategy.kv_replicator": nothing("heads of keys are repeated as tp asks"),
        "distributed_strategy.pipeline_cuts": only(
            says="stages are cut by cost here", hint="leave it out"
        ),
        "data.micro_batch_size": key("strategy.micro_batch", whole(1), 1),
        "data.global_batch_size": key("strategy.global_batch", whole(1)),
        "data.seq_length": key("data_length", whole(1)),
        "data.packing": nothing("packed samples have the length of one"),
        "data.*": _DATA,
        "model.model_config": key("config_file", text),
        "model.encoder_seq_length": key("model.seq_len", whole(1)),
        "model.max_position_embeddings": key("positions", whole(1)),
        "model.num_layers": key("layers", whole(1)),
        "model.hidden_size": key("hidden", whole(1)),
        "model.ffn_hidden_size": key("ffn", whole(1)),
        "model.num_attention_heads": key("heads", whole(1)),
        "model.num_kv_heads": key("kv_heads", whole(1)),
        "model.num_query_groups": key("kv_heads", whole(1)),
        "model.kv_channels": key("head_dim", whole(1)),
        "model.vocab_size": key("vocab", whole(1)),
        "model.make_vocab_size_divisible_by": nothing("presets have the size of the vocabulary"),
        "model.rope_theta": key("rope_theta", real),
        "model.layernorm_epsilon": key("eps", real),
        "model.normalization": only("rmsnorm", says="the norm of Llama is built", hint=_OWN),
        "model.position_embedding_type": only("rope", says="Llama's are built", hint=_OWN),
        "model.rotary_percentage": only(1, says="all of a head is rotated here", hint=_OWN),
        "model.activation": only("swiglu", says="a gated MLP is built", hint=_OWN),
        "model.transformer_block_type": only("pre_ln", says="Llama's layers are built", hint=_OWN),
        "model.has_bias": only(False, says="Llama has no biases", hint=_OWN),
        "model.share_embeddings_and_output_weights": only(
            False, says="both ends have their own matrix here", hint=_OWN
        ),
        "model.sliding_window": only(says="attention sees all earlier positions", hint=_OWN),
        "model.hidden_dropout": _DROPPED,
        "model.attention_dropout": _DROPPED,
        "model.ffn_dropout": _DROPPED,
        "model.moe.num_experts": key("experts", whole(1)),
        "model.moe.top_k": key("chosen", whole(1)),
        "model.moe.frequency": only(1, says="all layers have experts here", hint=_OWN),
        "model.moe.glu_mlp": only(True, says="experts are gated here", hint=_OWN),
        "model.moe.normalize_top_k_affinities": only(
            True, says="what an expert counts is normalised here", hint=_OWN
        ),
        "model.moe.dropless": nothing("capacity_factor says whether rows are dropped"),
        "model.moe.capacity_factor": key("model.capacity_factor", real),
        "model.moe.router_aux_loss_coef": instead(
            0, assumes="{name} {value}: the loss that balances experts is not computed"
        ),
        **_adapters("model"),
        "model.weight_init_only": _START,
        "model.fuse_qkv": nothing("projections are products of their own, with the same numbers"),
        "model.qkv_linear": nothing("heads of keys are repeated as tp asks"),
        "model.transpose_nki_inputs": _MADE,
        "model.fusions.*": _MADE,
        **dict.fromkeys(
            (
                *("model.init_method_std", "model.use_scaled_init_method"),
                *("model.use_cpu_initialization", "model.pretrained_ckpt"),
            ),
            _START,
        ),
        "model.apply_query_key_layer_scaling": _MADE,
        "model.persist_layer_norm": _MADE,
        "model.do_layer_norm_weight_decay": _RATE,
        "model.lnc_size": nothing("cluster.lnc, which the machine decides"),
        "model.activations_checkpoint_granularity": key(
            "strategy.remat",
            words({"none": "none", "selective": "selective", "full": "full"}),
        ),
        "model.activations_checkpoint_recompute": instead(
            assumes="{name} {value}: products with weights are kept, all else is recomputed"
        ),
        "model.activations_checkpoint_recompute_mlp": instead(
            False, assumes="{name} {value}: products with weights are kept, all else is recomputed"
        ),
        "model.activations_checkpoint_method": only(
            "uniform", says="all layers are recomputed alike here", hint="leave it out"
        ),
        "model.activations_checkpoint_num_layers": instead(
            1, assumes="{name} {value}: each layer is recomputed by itself"
        ),
        "model.optim.name": key(
            "model.optimizer", words({"adamw": "adamw", "adamw_fp32OptState": "adamw"}), "adamw"
        ),
        "model.optim.lr": key("model.learning_rate", real),
        **dict.fromkeys(
            (
                *("model.optim.weight_decay", "model.optim.capturable", "model.optim.betas"),
                *("model.optim.eps", "model.optim.sched.*"),
            ),
            _RATE,
        ),
        "model_alignment_strategy.sft.*": nothing("how samples are cut"),
        **_adapters("model_alignment_strategy"),
        "model_alignment_strategy.*": only(
            says="preferences take two forward passes",
            hint="plan the step as an entry of your own (docs/own-step.md)",
        ),
        "precision.type": key(
            "model.dtype",
            words(
                {
                    "mixed_precision": "bfloat16",
                    "mixed_precisionSR": "bfloat16",
                    "autocast": "bfloat16",
                    "fp32": "float32",
                }
            ),
            "mixed_precision",
        ),
        **dict.fromkeys(
            (
                *("precision.master_weights", "precision.fp32_grad_acc"),
                *("precision.fp32_grads_cc", "precision.xla_use_bf16"),
                *("precision.xla_downcast_bf16", "precision.neuron_rt_stochastic_rounding_en"),
                "precision.parallel_layers_reduce_dtype",
            ),
            _PRECISION,
        ),
        "compiler_flags": key("compiler_flags", text),
        "compiler_cache_url": _HOST,
        "bucket_size_collectives": nothing(
            "MiB of reductions that their framework joins: strategy.bucket_mb asks for it here"
        ),
        "aync_exec_max_inflight_requests": _HOST,
        "async_exec_max_inflight_requests": _HOST,
        "neuron_rt_exec_timeout": _HOST,
        "neuron_experimental_compress_rg": _HOST,
    }
)
"""Rows by `table.field`."""

_NODES = {32: "trn1.32xlarge", 64: "trn2.48xlarge", 2: "trn1.2xlarge"}
"""Devices of a node -> the machine."""


_OVER_CONFIG = {
    fact: LLAMA[fact] for fact in ("layers", "hidden", "ffn", "heads", "kv_heads", "rope_theta")
} | {"positions": "max_position_embeddings"}
"""Facts of the file that overrule the `config.json` which it names."""


def meaning(reading: Reading, asked: Asked) -> Meaning:
    """The job that the facts come to. Raises UsageError."""
    tables: dict[str, dict[str, Any]] = {"model": _model(reading)}
    devices = reading.get("devices")
    if devices not in _NODES:
        known = ", ".join(map(str, _NODES))
        raise reading.refuse("devices", f"one of {known}", str(devices), "say what a node has")
    target = _NODES[devices]
    is_zero1, pp = reading.get("is_zero1"), reading.get("mesh.pp")
    ranks = Ranks(
        pp=pp,
        tp=reading.get("mesh.tp"),
        cp=reading.get("mesh.cp"),
        ep=reading.get("mesh.ep", 1),
        **{"shard" if is_zero1 else "replicate": 0},
        number=devices * reading.get("nodes"),
    )
    tables |= cluster_tables(reading, ranks, asked.cores_of(target), asked.instances)
    tables["cluster"]["target"] = target
    reading.assumed.append(f"{devices} devices of a node: {target} (--target)")
    tables["strategy"] = {
        "name": "llm-training",
        "zero": int(is_zero1),
        "remat": reading.get("strategy.remat", "none"),
        "sequence_parallel": reading.get("strategy.sequence_parallel") and ranks.tp > 1,
        "reduce_gradients": "after",  # as `tables_of` of recipes says of this framework
    }
    if pp > 1 and (parts := reading.get("parts")) > 1:
        tables["strategy"] |= {"schedule": "interleaved", "stage_parts": parts}
    tables["compiler"] = _compiler(reading)
    if every := reading.get("save_interval"):
        tables["goodput"] = {"checkpoint_interval_steps": every}
    return Meaning(tables)


def _model(reading: Reading) -> dict[str, Any]:
    """The model of the sizes; of `model_config` where that file is here."""
    if "model.seq_len" not in reading.found and "data_length" in reading.found:
        reading.found["model.seq_len"] = reading.get("data_length")
        reading.fields["model.seq_len"] = reading.fields["data_length"]
    named = reading.get("config_file")
    path = reading.path.parent / named if named else None
    if path and os.path.isfile(path):
        said = {ours: reading.get(fact) for fact, ours in _OVER_CONFIG.items()}
        return {
            "config": json.dumps(
                read_config(path) | {name: value for name, value in said.items() if value}
            )
        }
    if path:
        reading.assumed.append(f"{named} is not here: what the file itself says is the model")
    facts = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab")
    sizes = {name: reading.get(name) for name in (*facts, "positions", "rope_theta", "eps")}
    if experts := reading.get("experts"):
        chosen = reading.get("chosen", 1)
        sizes |= {"experts": experts, "chosen": chosen, "expert_ffn": sizes["ffn"]}
    return model_tables(reading, "llama", sizes)


def _compiler(reading: Reading) -> dict[str, Any]:
    """The options of the compiler that its flags say. Raises UsageError."""
    flags = reading.get("compiler_flags", "")
    try:
        found = job_tables({ENVIRONMENT: flags})
    except UsageError as error:
        why = error.diagnostic.message
        raise reading.refuse(
            "compiler_flags", "flags of neuronx-cc", f"{flags}: {why}", error.diagnostic.hint
        ) from error
    reading.assumed += [f"compiler_flags: {notice.message}" for notice in found.notices]
    return dict(found.tables.get("compiler", {}))
