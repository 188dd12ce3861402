"""What is said of a step of inference: its words where a training step has others."""

from __future__ import annotations

from shardwright.compiler.frontend.task import Mode
from shardwright.orchestrator.report.text import (
    Facts,
    Report,
    count_text,
    digits_text,
    rate_text,
)


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
