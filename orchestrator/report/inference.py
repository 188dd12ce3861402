"""Rates of inference: how soon a token comes, how many, and how well the memory is used.

Model bandwidth utilisation is the bytes that a step has to move, weights and cache, over its time
and the bandwidth of the memory. Source: Databricks, "LLM Inference Performance Engineering: Best
Practices" (2023): (model parameter bytes + cache bytes) / time per output token / peak bandwidth.
Every core counts what it holds: copies of weights on data-parallel ranks are read by each.
"""

from __future__ import annotations

from shardwright.compiler.frontend.task import Mode
from shardwright.compiler.machine.target import PS_PER_S
from shardwright.orchestrator.report.text import (
    Facts,
    Report,
    count_text,
    digits_text,
    rate_text,
)
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


def step_text(section: Facts) -> str:
    """What a step is of, for the line of the job."""
    count, context = section["sequences"], section["context"]
    if section["mode"] == Mode.PREFILL:
        prompts = "1 prompt" if count == 1 else f"{count:,} prompts"
        return f"prefill of {prompts} of {context:,} tokens"
    sequences = "1 sequence" if count == 1 else f"{count:,} sequences"
    return f"decode step of {sequences}, a cache of {context:,} tokens each"


def result_text(section: Facts) -> str:
    """What the time of a step is the time to."""
    return "to the first token" if section["mode"] == Mode.PREFILL else "per output token"


def tokens_text(section: Facts) -> str:
    """Which tokens a step is paid for."""
    return "input tokens" if section["mode"] == Mode.PREFILL else "output tokens"


def rates_text(report: Report) -> str:
    """Tokens per second and the utilisations, each with its denominator."""
    section, timing = report["inference"], report["timing"]
    tokens = f"{digits_text(section['tokens_per_s'])} {tokens_text(section)}/s"
    if section["sequences"] > 1:
        tokens += f", {digits_text(section['tokens_per_s_per_sequence'])} per sequence"
    mfu = rate_text(timing["mfu"])
    if timing["attention"] == "causal":
        mfu += f" (attention in full; causal {rate_text(timing['mfu_causal'])})"
    return (
        f"{tokens}; MBU {rate_text(section['mbu'])} of"
        f" {count_text(section['hbm_bytes_per_s'])}B/s per core (weights and cache once), MFU {mfu}"
        f" of {count_text(timing['peak_flops_per_s'])}FLOP/s bf16 peak"
    )


def scalar(report: Report) -> str:
    """The number that a run says of every step: the loss, or, of inference, the mean over sequences
    of their best logit."""
    return "score" if "inference" in report else "loss"
