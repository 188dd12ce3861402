"""torchtitan's job configuration: resolved JSON, or TOML of the releases that read it.

Source: pytorch/torchtitan, `torchtitan/config/job_config.py` (releases up to 0.2) and
`torchtitan/config/configs.py`; sizes of `torchtitan/models/{llama3,qwen3}/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from shardwright.compiler.machine.target import FIRST_TARGET
from shardwright.orchestrator.config.importers.imported import Asked, Meaning
from shardwright.orchestrator.config.importers.shapes import (
    Ranks,
    cluster_tables,
    model_tables,
    one_of,
)
from shardwright.orchestrator.config.importers.table import (
    STOPPED,
    Reading,
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
from shardwright.sharding.settings import MOST

_LOG = nothing("logs, profiles and files around training")
_DATA = nothing("which data is read and how, not the work of a step")
_CHECKED = nothing("what runs between steps of training")
_RATE = nothing("a number of the update, not its work")
_MADE = nothing("how the other machine makes code")
_FLOAT8 = nothing("how float8 is made; the converters say whether it is")

TABLE: Table = MappingProxyType(
    {
        "model.name": key("name", text, "llama3"),
        "model.flavor": key("flavor", text),
        "model_spec.name": key("name", text),
        "model_spec.flavor": key("flavor", text),
        "model_spec.model.dim": key("hidden", whole(1)),
        "model_spec.model.n_layers": key("layers", whole(1)),
        "model_spec.model.vocab_size": key("vocab", whole(1)),
        "model_spec.model.layer.attention.n_heads": key("heads", whole(1)),
        "model_spec.model.layer.attention.n_kv_heads": key("kv_heads", whole(1)),
        "model_spec.model.layer.feed_forward.hidden_dim": key("ffn", whole(1)),
        "model_spec.*": nothing("the parts of the model are those of the flavor"),
        "model.converters": instead(
            "",
            assumes="{name} {value}: products are computed in bfloat16, not in a type of 8 bits",
        ),
        "model_converters.*": instead(
            "",
            assumes="{name} {value}: products are computed in bfloat16, not in a type of 8 bits",
        ),
        "model.tokenizer_path": _DATA,
        "model.hf_assets_path": _DATA,
        "model.norm_type": only(
            "rmsnorm", says="the norm of Llama is built", hint="use rmsnorm, or an entry"
        ),
        "model.print_after_conversion": _LOG,
        "hf_assets_path": _DATA,
        "dump_folder": _LOG,
        "training.local_batch_size": key("local_batch", whole(1, MOST), 8),
        "training.batch_size": key("local_batch", whole(1, MOST)),
        "training.global_batch_size": key("global_batch", whole(-1, 100 * MOST), -1),
        "training.seq_len": key("model.seq_len", whole(1), 2048),
        "training.max_norm": key("model.clip", real, 1.0),
        "training.mixed_precision_param": key(
            "model.dtype", words({"bfloat16": "bfloat16", "float32": "float32"}), "bfloat16"
        ),
        "training.mixed_precision_reduce": key(
            "strategy.reduce_dtype",
            words({"float32": "float32", "bfloat16": "bfloat16"}),
            "float32",
        ),
        "training.dtype": only(
            "float32",
            says="stored parameters and moments are fp32 here",
            hint="set it to float32: mixed_precision_param says what is computed in",
        ),
        "training.enable_cpu_offload": only(
            False,
            says="parameters and moments stay in device memory here",
            hint="set it to false; --remat offload keeps activations on the host",
        ),
        "training.tensor_parallel_degree": key("mesh.tp", whole(1)),
        "training.data_parallel_shard_degree": key("mesh.dp_shard", whole(-1)),
        "training.data_parallel_replicate_degree": key("mesh.dp_replicate", whole(1)),
        "training.compile": _MADE,
        "training.steps": key("steps", whole(-1)),
        **dict.fromkeys(("training.dataset", "training.dataset_path"), _DATA),
        **dict.fromkeys(
            ("training.gc_freq", "training.gc_debug", "training.seed", "training.deterministic"),
            nothing("seeds and the host of training"),
        ),
        "parallelism.data_parallel_replicate_degree": key("mesh.dp_replicate", whole(1), 1),
        "parallelism.data_parallel_shard_degree": key("mesh.dp_shard", whole(-1), -1),
        "parallelism.tensor_parallel_degree": key("mesh.tp", whole(1), 1),
        "parallelism.pipeline_parallel_degree": key("mesh.pp", whole(1), 1),
        "parallelism.context_parallel_degree": key("mesh.cp", whole(1), 1),
        "parallelism.expert_parallel_degree": key("mesh.ep", whole(1)),
        "parallelism.expert_tensor_parallel_degree": instead(
            1, assumes="{name} {value}: experts are split over tp as the rest"
        ),
        "experimental.pipeline_parallel_degree": key("mesh.pp", whole(1)),
        "experimental.context_parallel_degree": key("mesh.cp", whole(1)),
        "parallelism.fsdp_reshard_after_forward": key(
            "reshard", words({"default": "", "always": True, "never": False}), "default"
        ),
        "parallelism.enable_sequence_parallel": key("strategy.sequence_parallel", switch),
        "parallelism.pipeline_parallel_schedule": key(
            "strategy.schedule",
            words({"1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved"}),
            "1F1B",
        ),
        "parallelism.pipeline_parallel_microbatch_size": key("pp_batch", whole(1, MOST), 1),
        "parallelism.pipeline_parallel_layers_per_stage": key("stage_layers", whole(1)),
        "parallelism.pipeline_parallel_first_stage_less_layers": instead(
            0, assumes="{name} {value}: stages are balanced by cost instead"
        ),
        "parallelism.pipeline_parallel_last_stage_less_layers": instead(
            0, assumes="{name} {value}: stages are balanced by cost instead"
        ),
        "parallelism.pipeline_parallel_split_points": only(
            "",
            says="stages are cut by cost here",
            hint="leave it empty: the answer shows the layers of every stage",
        ),
        "parallelism.module_fqns_per_model_part": only(
            says="stages are cut by cost here", hint="leave it empty"
        ),
        "parallelism.pipeline_parallel_schedule_csv": only(
            "", says="schedules are gpipe, 1f1b and interleaved", hint="leave it empty"
        ),
        "parallelism.context_parallel_rotate_method": key(
            "strategy.context", words({"allgather": "gather", "alltoall": "ring"})
        ),
        "parallelism.context_parallel_load_balancer": nothing("ranks share causal work as here"),
        "parallelism.disable_loss_parallel": only(
            False,
            says="logits stay split over tp here",
            hint="set it to false: whole logits on every rank are not built",
        ),
        "parallelism.enable_async_tensor_parallel": nothing(
            "the scheduler decides what runs beside collectives"
        ),
        "parallelism.enable_compiled_autograd": _MADE,
        "parallelism.full_dtensor": _MADE,
        "parallelism.enable_fsdp_symm_mem": nothing("the network of the other machine"),
        "activation_checkpoint.mode": key(
            "strategy.remat",
            words({"none": "none", "selective": "selective", "full": "full"}),
            "selective",
        ),
        "activation_checkpoint.selective_ac_option": key("selective", text),
        **dict.fromkeys(
            (
                "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
                *("activation_checkpoint.early_stop", "activation_checkpoint.memory_budget"),
                *("activation_checkpoint.visualize_memory_budget_pareto",),
                *("activation_checkpoint.preserve_rng_state", "activation_checkpoint.debug"),
                *("activation_checkpoint.determinism_check",),
            ),
            nothing("how recomputation is done, not what is recomputed"),
        ),
        "optimizer.name": key(
            "model.optimizer", words({"AdamW": "adamw", "Adam": "adamw"}), "AdamW"
        ),
        "optimizer.lr": key("model.learning_rate", real, 8e-4),
        "optimizer.early_step_in_backward": only(
            False,
            says="the update runs behind the backward pass here",
            hint="set it to false",
        ),
        **dict.fromkeys(
            (
                *("optimizer.beta1", "optimizer.beta2", "optimizer.eps", "optimizer.weight_decay"),
                *("optimizer.implementation", "optimizer.fused", "optimizer.foreach"),
            ),
            _RATE,
        ),
        "lr_scheduler.*": _RATE,
        "compile.*": _MADE,
        "float8.*": _FLOAT8,
        "mx.*": _FLOAT8,
        "quantize.*": instead(
            "", False, assumes="{name} {value}: products are computed in bfloat16"
        ),
        "fault_tolerance.enable": only(
            False, says="replicas that come and go are not modelled", hint="set it to false"
        ),
        "fault_tolerance.*": nothing("fault_tolerance.enable says whether"),
        **dict.fromkeys(("job.*", "profiling.*", "profiler.*", "metrics.*"), _LOG),
        **dict.fromkeys(("comm.*", "debug.*", "memory_estimation.*", "tokenizer.*"), _LOG),
        **dict.fromkeys(("validation.*", "validator.*"), _CHECKED),
        "dataloader.*": _DATA,
        "checkpoint.enable": key("saves", switch),
        "checkpoint.enable_checkpoint": key("saves", switch),
        "checkpoint.interval": key("save_interval", whole(1, 10**9)),
        "checkpoint.interval_type": key("save_unit", words({"steps": "steps", "seconds": "s"})),
        "checkpoint.async_mode": instead("disabled", assumes=STOPPED),
        "checkpoint.*": nothing("what checkpoints hold and where they lie"),
        "experimental.custom_import": only(
            "", says="a model of its own is built by that module", hint="use --model for it"
        ),
        "experimental.custom_args_module": _LOG,
    }
)
"""Rows by `table.field`."""

_LLAMA3: dict[str, Any] = {"vocab": 128256, "rope_theta": 500000.0, "positions": 8192}
_QWEN3: dict[str, Any] = {
    "vocab": 151936,
    "rope_theta": 1e6,
    "positions": 4096,
    "head_dim": 128,
    "eps": 1e-6,
    "has_head_norms": True,
}


def _shape(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> dict[str, Any]:
    return {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}


def _experts(layers: int, hidden: int, heads: int, expert_ffn: int) -> dict[str, Any]:
    shape = _shape(layers, hidden, heads, 4, 3 * hidden)
    return _QWEN3 | shape | {"experts": 128, "chosen": 8, "expert_ffn": expert_ffn}


FLAVORS: Mapping[str, Mapping[str, dict[str, Any]]] = {
    "llama3": {
        "debugmodel": _LLAMA3 | _shape(6, 256, 16, 16, 768) | {"vocab": 2048},
        "8B": _LLAMA3 | _shape(32, 4096, 32, 8, 14336),
        "70B": _LLAMA3 | _shape(80, 8192, 64, 8, 28672),
        "405B": _LLAMA3 | _shape(126, 16384, 128, 8, 53248),
    },
    "qwen3": {
        "0.6B": _QWEN3 | _shape(28, 1024, 16, 8, 3072) | {"is_tied": True},
        "1.7B": _QWEN3 | _shape(28, 2048, 16, 8, 6144) | {"is_tied": True},
        "4B": _QWEN3 | _shape(36, 2560, 32, 8, 9728) | {"is_tied": True},
        "8B": _QWEN3 | _shape(36, 4096, 32, 8, 12288),
        "14B": _QWEN3 | _shape(40, 5120, 40, 8, 17408),
        "32B": _QWEN3 | _shape(64, 5120, 64, 8, 25600),
        "30B-A3B": _experts(48, 2048, 32, 768),
        "235B-A22B": _experts(94, 4096, 64, 1536),
    },
}
"""Sizes of the flavors by model; MLPs are rounded up to multiples, as the registry does it."""
_OTHER_NAMES = {"llama3_ft": "llama3"}


def meaning(reading: Reading, asked: Asked) -> Meaning:
    """The job that the facts come to. Raises UsageError."""
    _check_selective(reading)
    sizes = _sizes(reading)
    tables = {"model": model_tables(reading, "llama", sizes)}
    pp = reading.get("mesh.pp")
    shard = reading.get("mesh.dp_shard")
    ranks = Ranks(
        pp=pp,
        cp=reading.get("mesh.cp"),
        tp=reading.get("mesh.tp"),
        ep=reading.get("mesh.ep", 1),
        shard=0 if shard < 1 else shard,
        replicate=reading.get("mesh.dp_replicate"),
    )
    tables |= cluster_tables(reading, ranks, asked.cores_of(FIRST_TARGET), asked.instances)
    is_ddp = shard == 1 and ranks.replicate > 1 and ranks.cp == 1
    tables["strategy"] = {
        "name": "generic" if is_ddp else "fsdp",
        **_reshards(reading, pp),
        **_stage_parts(reading, pp, sizes["layers"]),
    }
    tables["goodput"] = _saves(reading)
    local, whole_batch = reading.get("local_batch"), reading.get("global_batch")
    tables["strategy"]["micro_batch"] = reading.get("pp_batch") if pp > 1 else local
    if whole_batch > 0:
        tables["strategy"]["global_batch"] = whole_batch
        return Meaning(tables)
    return Meaning(tables, samples_per_rank=local)


def _saves(reading: Reading) -> dict[str, int]:
    """How often state is saved."""
    every, is_on = reading.get("save_interval"), reading.get("saves", False)
    if not every and not is_on:
        return {}
    if not every:
        every = _SAVE_INTERVAL
        reading.assumed.append(f"state is saved every {every} steps, the default of torchtitan")
    unit = reading.get("save_unit", "steps")
    if not is_on:
        told = f"{every} steps" if unit == "steps" else f"{every} s"
        reading.assumed.append(
            f"checkpoint.enable is not on, so nothing is saved there: goodput is that of saving"
            f" every {told}"
        )
    return {f"checkpoint_interval_{unit}": every}


_SAVE_INTERVAL = 500
"""`checkpoint.interval` where it is not said."""


def _check_selective(reading: Reading) -> None:
    option = reading.get("selective", "op")
    if reading.get("strategy.remat") == "selective" and option != "op":
        raise reading.refuse(
            "selective",
            "op under selective recomputation",
            f"{option}: every so many layers",
            'set selective_ac_option = "op", or mode = "full", which recomputes all layers',
        )


def _sizes(reading: Reading) -> dict[str, Any]:
    """The sizes of the flavor. Raises UsageError for one that is unknown or was changed."""
    name = reading.get("name")
    flavors = FLAVORS.get(_OTHER_NAMES.get(name, name))
    if flavors is None:
        raise one_of(reading, "name", name, FLAVORS)
    flavor = reading.get("flavor") or ""
    plain = flavor.removesuffix("_flex_attn").removesuffix("_varlen_attn")
    plain = plain.removesuffix("_flex").removesuffix("_varlen")
    if plain not in flavors:
        raise one_of(reading, "flavor", flavor or "none", flavors)
    sizes = flavors[plain]
    for fact in ("hidden", "layers", "vocab", "heads", "kv_heads", "ffn"):
        if reading.get(fact, sizes[fact]) != sizes[fact]:
            raise reading.refuse(
                fact,
                f"{sizes[fact]}, that of the flavor {flavor}",
                str(reading.get(fact)),
                "give a model of your own sizes as --model config.json",
            )
    return sizes


def _reshards(reading: Reading, pp: int) -> dict[str, bool]:
    """By default weights are kept between the passes where there is a pipeline."""
    asked = reading.get("reshard")
    return {"reshard_after_forward": pp == 1 if asked == "" else asked}


def _stage_parts(reading: Reading, pp: int, layers: int) -> dict[str, int]:
    each = reading.get("stage_layers")
    if pp == 1 or reading.get("strategy.schedule") != "interleaved" or not each:
        return {}
    return {"stage_parts": max(2, -(-layers // (each * pp)))}
