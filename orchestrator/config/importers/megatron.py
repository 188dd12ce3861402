"""Megatron-LM's arguments: the script or the file that gives them, or JSON of their names.

Source: NVIDIA/Megatron-LM, `megatron/training/arguments.py` (names and defaults) and the scripts of
`examples/`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from shardwright.compiler.machine.target import FIRST_TARGET
from shardwright.orchestrator.config.importers.imported import Asked, Meaning
from shardwright.orchestrator.config.importers.shapes import Ranks, cluster_tables, model_tables
from shardwright.orchestrator.config.importers.table import (
    STOPPED,
    Reading,
    Table,
    given,
    instead,
    key,
    nothing,
    only,
    real,
    whole,
    words,
)

_LOG = nothing("logs, checkpoints and the launch of processes")
_LAUNCH = nothing("how processes are started; how many there are is said apart")
_DATA = nothing("which data is read and how, not the work of a step")
_CHECKED = nothing("what runs between steps of training")
_SEED = nothing("where random numbers begin")
_RATE = nothing("a number of the update, not its work")
_MADE = nothing("which code of the other machine computes it")
_OVERLAP = nothing("the scheduler decides what runs beside collectives")
_OWN = "give the model as an entry of your own (docs/own-step.md)"
_BALANCE = instead(
    0, "none", assumes="{name} {value}: the loss that balances experts is not computed"
)
_ROUTER = only(False, says="routers that normalise the best of a softmax are built", hint=_OWN)
_ABSENT = only(False, says="it is not built from these arguments", hint=_OWN)
_FLOAT8 = instead(
    assumes="{name} {value}: products are computed in bfloat16, not in a type of 8 bits"
)
_DROPPED = instead(
    0, assumes="{name} {value}: nothing is dropped, so no masks are drawn", default=0.1
)
_LATENT = nothing("of the model's latent attention, which its own flag asks for")


def _window(value: Any) -> int:
    """How many positions a token sees, itself among them: `--window-size 4095,0` is how many
    before and behind it."""
    before, _, behind = str(value).strip("()[]").partition(",")
    if behind.strip() != "0":
        raise ValueError("positions before and none behind a token, as in 4095,0")
    return int(whole(1)(before.strip())) + 1


TABLE: Table = MappingProxyType(
    {
        "num_layers": key("layers", whole(1)),
        "hidden_size": key("hidden", whole(1)),
        "ffn_hidden_size": key("ffn", whole(1)),
        "num_attention_heads": key("heads", whole(1)),
        "kv_channels": key("head_dim", whole(1)),
        "group_query_attention": key("is_grouped", given),
        "num_query_groups": key("groups", whole(1)),
        "max_position_embeddings": key("positions", whole(1)),
        "seq_length": key("model.seq_len", whole(1)),
        "vocab_size": key("vocab", whole(1)),
        "padded_vocab_size": key("padded_vocab", whole(1)),
        "make_vocab_size_divisible_by": key("vocab_multiple", whole(1), 128),
        "position_embedding_type": key(
            "positions_kind",
            words({"learned_absolute": "learned", "rope": "rope"}),
            "learned_absolute",
        ),
        "use_rotary_position_embeddings": key("is_rotary", given),
        "no_position_embedding": nothing("position_embedding_type says which there are"),
        "rotary_base": key("rope_theta", real),
        "rotary_percent": only(1, says="all of a head is rotated here", hint=_OWN),
        "use_rope_scaling": nothing("scaled rotary positions cost the same"),
        "rope_scaling_factor": nothing("scaled rotary positions cost the same"),
        "rotary_seq_len_interpolation_factor": nothing("scaled rotary positions cost the same"),
        "swiglu": key("is_gated", given),
        "squared_relu": _ABSENT,
        "normalization": key("norm", words({"LayerNorm": "layer", "RMSNorm": "rms"}), "LayerNorm"),
        "apply_layernorm_1p": nothing("another form of the same norm"),
        "norm_epsilon": key("eps", real),
        "qk_layernorm": key("has_head_norms", given),
        "disable_bias_linear": key("has_no_bias", given),
        "add_bias_linear": nothing("disable_bias_linear says whether"),
        "add_qkv_bias": key("has_qkv_bias", given),
        "untie_embeddings_and_output_weights": key("is_untied", given),
        "multi_latent_attention": _ABSENT,
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim", "v_head_dim"), _LATENT),
        "num_experts": key("experts", whole(1)),
        "moe_router_topk": key("chosen", whole(1)),
        "moe_ffn_hidden_size": key("expert_ffn", whole(1)),
        "moe_layer_freq": only(1, says="all layers have experts here", hint=_OWN),
        "moe_shared_expert_intermediate_size": only(
            0, says="experts that all rows visit are not built from these arguments", hint=_OWN
        ),
        "moe_router_load_balancing_type": _BALANCE,
        "moe_aux_loss_coeff": _BALANCE,
        "moe_z_loss_coeff": _BALANCE,
        "moe_expert_capacity_factor": key("model.capacity_factor", real),
        "moe_pad_expert_input_to_capacity": nothing("seats of experts are padded here"),
        "moe_token_drop_policy": instead(
            "position", assumes="{name} {value}: later rows of a sequence are dropped first"
        ),
        "moe_router_pre_softmax": _ROUTER,
        "moe_router_score_function": only(
            "softmax", says="routers score by softmax here", hint=_OWN
        ),
        "moe_router_enable_expert_bias": _ROUTER,
        "moe_router_num_groups": only(says="routers choose among all experts here", hint=_OWN),
        "moe_router_group_topk": only(says="routers choose among all experts here", hint=_OWN),
        "moe_router_dtype": nothing("routers are computed as the rest"),
        **dict.fromkeys(
            (
                *("moe_grouped_gemm", "moe_token_dispatcher_type", "moe_permute_fusion"),
                *("moe_use_legacy_grouped_gemm", "moe_per_layer_logging", "moe_router_fusion"),
            ),
            _MADE,
        ),
        "expert_model_parallel_size": key("mesh.ep", whole(1)),
        "expert_tensor_parallel_size": key("expert_tp", whole(1)),
        "window_size": key("window", _window),
        "spec": only(says="a model made by a module of its own", hint=_OWN),
        "mtp_num_layers": only(0, says="heads of later tokens are not built", hint=_OWN),
        "attention_dropout": _DROPPED,
        "hidden_dropout": _DROPPED,
        "attention_softmax_in_fp32": nothing("statistics of softmax are fp32 here"),
        "tensor_model_parallel_size": key("mesh.tp", whole(1), 1),
        "pipeline_model_parallel_size": key("mesh.pp", whole(1), 1),
        "context_parallel_size": key("mesh.cp", whole(1), 1),
        "cp_comm_type": key("strategy.context", words({"p2p": "ring", "allgather": "gather"})),
        "sequence_parallel": key("strategy.sequence_parallel", given, False),
        "num_layers_per_virtual_pipeline_stage": key("part_layers", whole(1)),
        "num_virtual_stages_per_pipeline_rank": key("strategy.stage_parts", whole(2)),
        "decoder_first_pipeline_num_layers": instead(
            assumes="{name} {value}: stages are balanced by cost instead"
        ),
        "decoder_last_pipeline_num_layers": instead(
            assumes="{name} {value}: stages are balanced by cost instead"
        ),
        "account_for_embedding_in_pipeline_split": nothing("stages are balanced by cost"),
        "account_for_loss_in_pipeline_split": nothing("stages are balanced by cost"),
        "use_distributed_optimizer": key("is_distributed", given),
        "use_torch_fsdp2": key("is_fsdp", given),
        "use_megatron_fsdp": key("is_megatron_fsdp", given),
        "use_custom_fsdp": key("is_megatron_fsdp", given),
        "data_parallel_sharding_strategy": key(
            "sharded",
            words({"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}),
        ),
        "num_distributed_optimizer_instances": only(
            1, says="the optimizer state is spread over all data-parallel ranks", hint="use 1"
        ),
        "micro_batch_size": key("strategy.micro_batch", whole(1)),
        "global_batch_size": key("strategy.global_batch", whole(1)),
        "rampup_batch_size": instead(
            assumes="{name} {value}: steps have the full batch, as after the ramp"
        ),
        "overlap_grad_reduce": key("overlaps_reduction", given, False),
        "accumulate_allreduce_grads_in_fp32": key("reduces_wide", given),
        "grad_reduce_in_bf16": key("reduces_short", given),
        "ddp_bucket_size": nothing("of their kernels' buffers"),
        "no_gradient_accumulation_fusion": key("adds_apart", given),
        "recompute_activations": key("recomputes_attention", given),
        "checkpoint_activations": key("recomputes_all", given),
        "recompute_granularity": key(
            "recomputes", words({"none": "none", "selective": "selective", "full": "full"})
        ),
        "recompute_method": only(
            "uniform",
            says="all layers of a stage are recomputed alike here",
            hint="use uniform, or say it with --remat",
        ),
        "recompute_num_layers": instead(
            1, assumes="{name} {value}: each layer is recomputed by itself"
        ),
        "recompute_modules": instead(
            "core_attn", assumes="{name} {value}: attention is recomputed, products are kept"
        ),
        "cpu_offloading": _ABSENT,
        "optimizer_cpu_offload": _ABSENT,
        "bf16": key("is_bf16", given),
        "fp16": key("is_fp16", given),
        "use_precision_aware_optimizer": only(
            False, says="moments and main weights are fp32 here", hint="leave it out"
        ),
        "fp8": _FLOAT8,
        "fp8_format": _FLOAT8,
        "fp8_hybrid": _FLOAT8,
        "fp8_e4m3": _FLOAT8,
        "fp8_param_gather": instead(
            False, assumes="{name}: weights are gathered in bfloat16, not in a type of 8 bits"
        ),
        **dict.fromkeys(
            (
                *("fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_margin", "fp8_recipe"),
                *("fp8_interval", "fp8_wgrad", "initial_loss_scale", "min_loss_scale"),
                *("loss_scale", "loss_scale_window", "hysteresis"),
            ),
            nothing("how short types are scaled"),
        ),
        "optimizer": key("model.optimizer", words({"adam": "adamw", "sgd": "sgd"}), "adam"),
        "lr": key("model.learning_rate", real),
        "clip_grad": key("model.clip", real, 1.0),
        "nproc_per_node": key("per_node", whole(1)),
        "nnodes": key("nodes", whole(1)),
        "num_gpus": key("per_node", whole(1)),
        "num_nodes": key("nodes", whole(1)),
        "train_iters": key("steps", whole(-1)),
        "train_samples": key("samples", whole(-1)),
        "save_interval": key("goodput.checkpoint_interval_steps", whole(1)),
        "async_save": instead(False, assumes=STOPPED),
        "seed": _SEED,
        **dict.fromkeys(("eval_iters", "eval_interval"), _CHECKED),
        "world_size": key("world", whole(1)),
        "srun.ntasks": key("tasks", whole(1)),
        "srun.ntasks_per_node": key("tasks_per_node", whole(1)),
        "srun.nodes": key("task_nodes", whole(1)),
        "sbatch.ntasks": key("job_tasks", whole(1)),
        "sbatch.ntasks_per_node": key("job_tasks_per_node", whole(1)),
        "sbatch.nodes": key("job_nodes", whole(1)),
        "mpirun.np": key("tasks", whole(1)),
        **dict.fromkeys(("srun.*", "sbatch.*", "mpirun.*"), _LAUNCH),
        **dict.fromkeys(
            (
                *("standalone", "no_python", "use_env", "max_restarts", "monitor_interval"),
                *("start_method", "role", "log_dir", "redirects", "tee", "local_ranks_filter"),
                *("rdzv_conf", "local_addr", "hostfile", "include", "exclude", "launcher"),
                *("launcher_args", "no_local_rank", "no_ssh", "force_multi", "save_pid"),
            ),
            _LAUNCH,
        ),
        **dict.fromkeys(
            (
                *("weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum"),
                *("lr_decay_style", "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters"),
                *("lr_warmup_fraction", "lr_warmup_samples", "min_lr", "decoupled_lr"),
                *("decoupled_min_lr", "init_method_std", "override_opt_param_scheduler"),
                *("start_weight_decay", "end_weight_decay", "weight_decay_incr_style"),
                *("lr_wsd_decay_style", "lr_wsd_decay_iters", "use_checkpoint_opt_param_scheduler"),
            ),
            _RATE,
        ),
        **dict.fromkeys(
            (
                *("data_path", "vocab_file", "merge_file", "split", "tokenizer_type", "mock_data"),
                *("tokenizer_model", "data_cache_path", "num_workers", "dataloader_type"),
                *("tiktoken_pattern", "no_create_attention_mask_in_dataloader", "eod_mask_loss"),
                *(
                    "no_mmap_bin_files",
                    "data_impl",
                    "reset_position_ids",
                    "reset_attention_mask",
                ),
                *("calculate_per_token_loss", "train_data_path", "valid_data_path"),
                *("test_data_path", "per_split_data_args_path", "data_args_path"),
            ),
            _DATA,
        ),
        **dict.fromkeys(
            (
                *("save", "load", "log_interval", "tensorboard_dir", "profile"),
                *("log_throughput", "profile_step_start", "profile_step_end", "profile_ranks"),
                *("ckpt_format", "distributed_timeout_minutes", "master_addr", "master_port"),
                *("node_rank", "no_load_optim", "no_load_rng", "no_save_optim", "no_save_rng"),
                *("wandb_project", "wandb_exp_name", "wandb_save_dir", "distributed_backend"),
                *("exit_duration_in_mins", "exit_signal_handler", "finetune", "log_params_norm"),
                *("log_num_zeros_in_grad", "log_timers_to_tensorboard", "manual_gc"),
                *("log_memory_to_tensorboard", "log_validation_ppl_to_tensorboard"),
                *("manual_gc_interval", "empty_unused_memory_level", "timing_log_level"),
                *("use_dist_ckpt", "dist_ckpt_format", "rdzv_id", "rdzv_backend"),
                *("rdzv_endpoint", "no_initialization", "use_cpu_initialization"),
                *("tensorboard_queue_size", "tensorboard_log_interval", "rerun_mode"),
                *("check_weight_hash_across_dp_replicas_interval", "ckpt_fully_parallel_save"),
            ),
            _LOG,
        ),
        **dict.fromkeys(
            (
                *("attention_backend", "use_flash_attn", "transformer_impl", "use_mcore_models"),
                *("no_masked_softmax_fusion", "no_bias_gelu_fusion", "no_bias_swiglu_fusion"),
                *("no_bias_dropout_fusion", "no_rope_fusion", "cross_entropy_loss_fusion"),
                *("cross_entropy_fusion_impl", "no_persist_layer_norm", "enable_cuda_graph"),
                *("use_legacy_models", "use_ring_exchange_p2p", "no_async_tensor_model_parallel"),
                *("apply_query_key_layer_scaling", "use_te_rng_tracker", "cuda_graph_scope"),
                *("no_async_tensor_model_parallel_allreduce", "deterministic_mode"),
            ),
            _MADE,
        ),
        **dict.fromkeys(
            (
                *("overlap_param_gather", "tp_comm_overlap", "align_grad_reduce"),
                *("align_param_gather", "delay_grad_reduce", "no_delay_grad_reduce"),
                *("overlap_p2p_communication", "no_overlap_p2p_communication"),
                *("overlap_param_gather_with_optimizer_step", "defer_embedding_wgrad_compute"),
                *("no_scatter_gather_tensors_in_pipeline", "tp_comm_bulk_wgrad"),
                *("nccl_ub", "nccl_communicator_config_path", "use_nccl_ub"),
            ),
            _OVERLAP,
        ),
    }
)
"""Rows by the name of an argument, with underscores."""


def meaning(reading: Reading, asked: Asked) -> Meaning:
    """The job that the facts come to. Raises UsageError."""
    tables = {"model": _model(reading)}
    tables["model"]["dtype"] = _dtype(reading)
    zero = _zero(reading)
    data = "shard" if zero else "replicate"
    tp, pp = reading.get("mesh.tp"), reading.get("mesh.pp")
    sizes = {"pp": pp, "tp": tp, "cp": reading.get("mesh.cp"), "ep": _experts(reading), data: 0}
    ranks = Ranks(**({"shard": sizes["ep"]} | sizes), number=_ranks(reading))
    cores = asked.cores_of(FIRST_TARGET)
    tables |= cluster_tables(reading, ranks, cores, asked.instances)
    tables["strategy"] = {
        "name": "fsdp" if zero == 3 else "llm-training",
        "zero": zero,
        "sequence_parallel": reading.get("strategy.sequence_parallel") and tp > 1,
        "remat": _remat(reading),
        "reduce_gradients": _reduces(reading, zero),
        "gradient_accumulation_fusion": not reading.get("adds_apart", False),
        **_reduce_dtype(reading),
        **_interleaved(reading, pp),
    }
    return Meaning(tables)


def _ranks(reading: Reading) -> int:
    """How many ranks the launchers start, 0 where the file does not say: torch's and deepspeed's
    start some on each node; without them the processes of mpirun or srun are the ranks, as many as
    it says or as its job has."""
    job_nodes = reading.get("job_nodes", 1)
    nodes = reading.get("task_nodes", job_nodes)
    on_node = reading.get("tasks_per_node", reading.get("job_tasks_per_node", 0))
    tasks = reading.get("tasks", nodes * on_node or reading.get("job_tasks", 0))
    started = reading.get("per_node", 0) * reading.get("nodes", nodes)
    return int(reading.get("world", started or tasks))


def _model(reading: Reading) -> dict[str, Any]:
    sizes: dict[str, Any]
    sizes = {name: _size(reading, name) for name in ("layers", "hidden", "heads")}
    for name in ("ffn", "head_dim", "positions", "rope_theta", "eps"):
        sizes[name] = reading.get(name)
    sizes["vocab"] = reading.get("vocab")
    is_rotary = reading.get("is_rotary") or reading.get("positions_kind") == "rope"
    if not is_rotary and not reading.get("is_gated"):
        return _gpt(reading, sizes)
    if not (is_rotary and reading.get("is_gated")):
        raise reading.refuse(
            "positions_kind",
            "rotary positions with a gated MLP (--swiglu), or neither",
            "one of them",
            _OWN,
        )
    return _llama(reading, sizes)


def _size(reading: Reading, name: str) -> int:
    found: int | None = reading.get(name)
    if found is None:
        flag = next(f for f, row in TABLE.items() if row.ours == name)
        raise reading.refuse(
            name, f"--{flag.replace('_', '-')}", "none", "name the file that has the sizes"
        )
    return found


def _gpt(reading: Reading, sizes: dict[str, Any]) -> dict[str, Any]:
    """GPT-3: learned positions, LayerNorm, GELU, biases, one matrix for both ends."""
    if reading.get("norm") != "layer" or reading.get("is_grouped"):
        name = "norm" if reading.get("norm") != "layer" else "is_grouped"
        got = "RMSNorm" if name == "norm" else "groups"
        raise reading.refuse(name, "LayerNorm and a key per head with learned positions", got, _OWN)
    for fact, what in (("has_no_bias", "biases"), ("is_untied", "one matrix for both ends")):
        if reading.get(fact):
            reading.assumed.append(f"the GPT has {what}: without is not built")
    if (sizes["head_dim"] or 1) * sizes["heads"] not in (sizes["heads"], sizes["hidden"]):
        width = f"--kv-channels {sizes['hidden'] // sizes['heads']}, the width over the heads"
        raise reading.refuse("head_dim", width, f"{sizes['head_dim']}", _OWN)
    sizes["ffn"] = sizes["ffn"] or 4 * sizes["hidden"]
    return model_tables(reading, "gpt", sizes, _padded(reading))


def _llama(reading: Reading, sizes: dict[str, Any]) -> dict[str, Any]:
    """Llama and its kin: rotary positions, RMSNorm, a gated MLP, no biases of linear layers."""
    if reading.get("norm") == "layer":
        reading.assumed.append("LayerNorm is computed as RMSNorm, the norm of this family")
    if not reading.get("has_no_bias"):
        reading.assumed.append("linear layers have no biases, as in this family")
    sizes["is_tied"] = True if not reading.get("is_untied") else None
    for part in ("window", "has_qkv_bias", "has_head_norms", "experts", "chosen", "expert_ffn"):
        sizes[part] = reading.get(part)
    groups = reading.get("groups", 1) if reading.get("is_grouped") else sizes["heads"]
    sizes["kv_heads"] = groups
    ffn = sizes["ffn"] or int(4 * sizes["hidden"] * 2 / 3) // 64 * 64
    if sizes["experts"]:
        wide, chosen = sizes["expert_ffn"] or ffn, sizes["chosen"] or _CHOSEN
        sizes |= {"expert_ffn": wide, "chosen": chosen}
    return model_tables(reading, "llama", {**sizes, "ffn": ffn}, _padded(reading))


_CHOSEN = 2
"""`--moe-router-topk` where it is not said."""


def _experts(reading: Reading) -> int:
    """Over how many ranks the experts are spread."""
    tp = reading.get("mesh.tp")
    if (given_tp := reading.get("expert_tp", tp)) != tp:
        reading.assumed.append(f"experts are split over tp {tp} as the rest, not over {given_tp}")
    return int(reading.get("mesh.ep", 1))


def _padded(reading: Reading) -> int:
    """The size of the vocabulary as they pad it, 0 where the file has none."""
    if padded := reading.get("padded_vocab"):
        return int(padded)
    multiple: int = reading.get("vocab_multiple") * reading.get("mesh.tp")
    return -(-int(reading.get("vocab", 0)) // multiple) * multiple


def _dtype(reading: Reading) -> str:
    if reading.get("is_fp16"):
        reading.assumed.append("fp16 is computed as bfloat16, without a loss scale")
    return "bfloat16" if reading.get("is_fp16") or reading.get("is_bf16") else "float32"


def _zero(reading: Reading) -> int:
    """What data-parallel ranks share."""
    if reading.get("is_fsdp"):
        return 3
    if reading.get("is_megatron_fsdp"):
        return int(reading.get("sharded", 0))
    return int(bool(reading.get("is_distributed")))


def _remat(reading: Reading) -> str:
    usual = "selective" if reading.get("recomputes_attention") else "none"
    usual = "full" if reading.get("recomputes_all") else usual
    return str(reading.get("recomputes", usual))


def _reduces(reading: Reading, zero: int) -> str:
    if zero > 1:
        return "each"
    return "last" if reading.get("overlaps_reduction") else "after"


def _reduce_dtype(reading: Reading) -> dict[str, str]:
    """Gradients are reduced in fp32 beside bf16, unless it is asked for otherwise."""
    if reading.get("reduces_short"):
        return {"reduce_dtype": "bfloat16"}
    wide = reading.get("reduces_wide") or reading.get("is_bf16")
    return {"reduce_dtype": "float32"} if wide else {}


def _interleaved(reading: Reading, pp: int) -> dict[str, Any]:
    """The schedule of a pipeline with several parts of the model per stage."""
    parts = reading.get("strategy.stage_parts", 0)
    if each := reading.get("part_layers"):
        parts = reading.get("layers") // pp // each
    if pp == 1 or parts < 2:
        return {}
    return {"schedule": "interleaved", "stage_parts": parts}
