"""Rates of inference: how soon a token comes, how many, and how well the memory is used.

Model bandwidth utilisation is the bytes that a step has to move, weights and cache, over its time
and the bandwidth of the memory. Source: Databricks, "LLM Inference Performance Engineering: Best
Practices" (2023): (model parameter bytes + cache bytes) / time per output token / peak bandwidth.
Every core counts what it holds: copies of weights on data-parallel ranks are read by each.
"""

from __future__ import annotations

from shardwright.compiler.frontend.task import Mode
from shardwright.compiler.machine.target import PS_PER_S
from shardwright.orchestrator.report.text import Facts
from shardwright.orchestrator.road.build import Built
from shardwright.sharding.memory.footprint import buffer_bytes
from shardwright.sim_cluster.timing.step_time import StepTiming


def inference_section(built: Built, timing: StepTiming) -> Facts:
    """What a step of inference comes to; bytes are those of one core. A prefill has the time to the
    first token, a decode step the time per output token, which every sequence waits for."""
    step, layout = built.plan.step, built.layout
    seconds = timing.step_time_ps / PS_PER_S
    held = {
        role: sum(buffer_bytes(step, b) for b in step.buffers.values() if b.role == role)
        for role in ("parameter", "cache")
    }
    whole = sum(b.global_type.num_bytes for b in step.buffers.values() if b.role == "cache")
    bandwidth = layout.target.hbm_bytes_per_s_per_core * layout.target.lnc
    is_prefill = built.mode is Mode.PREFILL
    return {
        "mode": str(built.mode),
        "sequences": layout.global_batch,
        "context": built.context,
        "weight_bytes": held["parameter"],
        "cache_bytes": held["cache"],
        "cache_bytes_per_sequence": whole // layout.global_batch,
        "hbm_bytes_per_s": bandwidth,
        "mbu": sum(held.values()) / seconds / bandwidth,
        "time_to_first_token_s": seconds if is_prefill else None,
        "time_per_output_token_s": None if is_prefill else seconds,
        "tokens_per_s": layout.global_batch * built.tokens_per_sample / seconds,
        "tokens_per_s_per_sequence": built.tokens_per_sample / seconds,
    }
