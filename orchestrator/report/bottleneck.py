"""What limits a step, in a sentence: the memory it does not fit, or what its largest share goes to.

Read from a report alone, so that a cached plan needs nothing else for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

from shardwright.orchestrator.report.text import (
    Facts,
    Report,
    micro_batches_text,
    share_text,
    size_text,
)

CAPACITY, COLLECTIVE, LATENCY = "capacity", "collective", "latency"
_PREFIX = "collective_"
_DMA = "dma"
WORTH_A_WORD = 0.05  # our choice: of the FLOPs that run; less changes no decision


def bottleneck(report: Report) -> Facts:
    """`{kind, category, share, text}`: the kind picks what is worth trying (`changes/rules.py`) and
    has the share; the category is the largest of that kind, of the breakdown or of memory."""
    memory = report["memory"]
    if not memory["fits"]:
        return _capacity(memory)
    kind, share = next(iter(kind_shares(report).items()))
    category = "memory" if kind == LATENCY else _largest(report, kind)
    text = _SENTENCES[kind](report, share)
    return {"kind": kind, "category": category, "share": share, "text": text}


def last_stage(timing: Facts) -> int | None:
    """The pipeline stage that finishes last, whose cores the breakdown of the step is of; None
    without a pipeline."""
    rows = timing.get("per_stage", ())
    found = (row["stage"] for row in rows if row["breakdown_ps"] == timing["breakdown_ps"])
    return next(found, None) if len(rows) > 1 else None


def kind_shares(report: Report) -> dict[str, float]:
    """The shares of the step by kind, largest first: collectives of all axes are one kind. Of the
    time in which no compute engine is busy, what queues move data in at most is `memory`; the rest
    is `latency`, in which cores wait for what depends on each other."""
    found: dict[str, float] = defaultdict(float)
    for category, share in _ranked(report).items():
        found[kind_of(category)] += share
    if "memory" in found:
        # Loads and stores share their engines.
        waits = max(0.0, found["memory"] - sum(_busy(report, queues=True).values()))
        found |= {"memory": found["memory"] - waits, LATENCY: waits}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _ranked(report: Report) -> dict[str, float]:
    timing = report["timing"]
    parts = Counter(timing["breakdown_ps"]).most_common()
    return {category: ps / timing["step_time_ps"] for category, ps in parts}


def kind_of(category: str) -> str:
    """The kind of a category of the breakdown."""
    return COLLECTIVE if category.startswith(_PREFIX) else category


def _largest(report: Report, kind: str) -> str:
    return next(name for name in _ranked(report) if kind_of(name) == kind)


def _capacity(memory: Facts) -> Facts:
    peak, limit = memory["peak_bytes"], memory["limit_bytes"]
    category, size = max(memory["categories"].items(), key=lambda item: item[1])
    share = size / peak
    text = (
        f"memory: {size_text(peak - limit)} over the limit; the largest part of what a core"
        f" holds is for {category}, {size_text(size)} ({share_text(share)})"
    )
    return {"kind": CAPACITY, "category": category, "share": share, "text": text}


def _compute(report: Report, share: float) -> str:
    engines = _busy(report, queues=False)
    text = f"compute: engines are busy {share_text(share)} of the step"
    if engines:
        engine, busy = max(engines.items(), key=lambda item: item[1])
        text += f", the {engine} engine {share_text(busy)}"
    what = "recomputation" if _is_recomputed(report["job"]) else "beyond three forward passes"
    parts = {what: recomputed(report), "of replicas or padding": replicated(report)}
    told = [f"{share_text(part)} are {name}" for name, part in parts.items() if part > WORTH_A_WORD]
    return f"{text}; of the FLOPs that run, {', '.join(told)}" if told else text


def _is_recomputed(job: Facts) -> bool:
    """Whether it is a setting of the job that a model of ours computes again."""
    is_ours = any(job["model"].get(key) for key in ("preset", "config", "recipe"))
    return bool(is_ours) and job["strategy"]["remat"] != "none"


def recomputed(report: Report) -> float:
    """The share of the FLOPs that run which the captured step has beyond those of its model."""
    return _beyond(report, "captured", "model")


def replicated(report: Report) -> float:
    """The share of the FLOPs that run which ranks do alike, or on padding."""
    return _beyond(report, "executed", "captured")


def _beyond(report: Report, counted: str, needed: str) -> float:
    counts = report["timing"]["flops"]
    return float(max(0, counts[counted] - counts[needed]) / (counts["executed"] or 1))


def _memory(report: Report, share: float) -> str:
    return (
        f"HBM traffic: engines wait for data {share_text(share)} of the step; queues are busy:"
        f" {_queues_text(report)}"
    )


def _busy(report: Report, queues: bool) -> dict[str, float]:
    """The shares of the step in which queues are busy, or engines."""
    found = report["timing"]["engines"].items()
    return {name: one["share"] for name, one in found if name.startswith(_DMA) == queues}


def _queues_text(report: Report) -> str:
    busy = _busy(report, queues=True).items()
    return ", ".join(f"{name} {share_text(share)}" for name, share in busy) or "none"


def _latency(report: Report, share: float) -> str:
    return (
        f"latency: {share_text(share)} of the step or more no engine computes and no queue moves"
        f" data, each waits for another; queues are busy: {_queues_text(report)}"
    )


def _collective(report: Report, share: float) -> str:
    parts = {n: part for n, part in _ranked(report).items() if n.startswith(_PREFIX) and part}
    axes = {name.removeprefix(_PREFIX): part for name, part in parts.items()}
    text = f"communication over {next(iter(axes))}: cores wait {share_text(share)} of the step"
    if len(axes) > 1:
        each = ", ".join(f"{name} {share_text(part)}" for name, part in axes.items())
        text = f"communication: cores wait {share_text(share)} of the step; {each}"
    rows = [r for r in report["collectives"] if r["exposed_ps"]]
    if not rows:
        return text
    worst = max(rows, key=lambda row: row["exposed_ps"])
    exposed = worst["exposed_ps"] / (worst["time_ps"] or 1)
    return (
        f"{text}; most for {worst['kind']} of {size_text(worst['bytes'])} over"
        f" {worst['group_size']} ranks of {worst['axis']} ({worst['algorithm']}),"
        f" {share_text(exposed)} exposed"
    )


def _bubble(report: Report, share: float) -> str:
    pipeline = report["pipeline"]
    batches = micro_batches_text(pipeline["num_microbatches"])
    stage = last_stage(report["timing"])
    whose = "cores" if stage is None else f"cores of stage {stage}, the last to finish,"
    return (
        f"pipeline: {whose} wait for other stages {share_text(share)} of the step;"
        f" {len(pipeline['stages'])} stages, {batches}, {pipeline['schedule']}"
    )


_SENTENCES: dict[str, Callable[[Report, float], str]] = {
    "compute": _compute,
    "memory": _memory,
    LATENCY: _latency,
    COLLECTIVE: _collective,
    "bubble": _bubble,
    "launch": lambda _, share: (
        f"launches: starting programs takes {share_text(share)} of the step,"
        " which has little work for a core"
    ),
    "idle": lambda _, share: f"cores have nothing to do {share_text(share)} of the step",
    "host": lambda _, share: (
        f"host: cores wait for it {share_text(share)} of the step (cluster.host_us)"
    ),
}
