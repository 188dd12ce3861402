"""What limits a step, in a sentence: the memory it does not fit, or what its largest share goes to.

Read from a report alone, so that a cached plan needs nothing else for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.report.text import share_text, size_text

CAPACITY, COLLECTIVE = "capacity", "collective"
_PREFIX = "collective_"


def bottleneck(report: Mapping[str, Any]) -> dict[str, Any]:
    """`{kind, category, share, text}`: the kind picks what is worth trying (`whatif/rules.py`),
    the category is that of the breakdown, or of memory."""
    memory = report["memory"]
    if not memory["fits"]:
        return _capacity(memory)
    ranked = shares(report)
    category, share = next(iter(ranked.items()))
    kind = kind_of(category)
    text = _SENTENCES[kind](report, category)
    return {"kind": kind, "category": category, "share": share, "text": text}


def shares(report: Mapping[str, Any]) -> dict[str, float]:
    """The shares of the step by category, largest first."""
    timing = report["timing"]
    total = timing["step_time_ps"] or 1
    parts = sorted(timing["breakdown_ps"].items(), key=lambda item: -item[1])
    return {category: ps / total for category, ps in parts}


def kind_of(category: str) -> str:
    """The kind of a category of the breakdown."""
    return COLLECTIVE if category.startswith(_PREFIX) else category


def _capacity(memory: Mapping[str, Any]) -> dict[str, Any]:
    peak, limit = memory["peak_bytes"], memory["limit_bytes"]
    category, size = max(memory["categories"].items(), key=lambda item: item[1])
    share = size / peak
    text = (
        f"memory: {size_text(peak - limit)} over the limit; most of what a core holds is for"
        f" {category}, {size_text(size)} ({share_text(share)})"
    )
    return {"kind": CAPACITY, "category": category, "share": share, "text": text}


def _compute(report: Mapping[str, Any], category: str) -> str:
    timing = report["timing"]
    share = shares(report)[category]
    engines = {n: e["share"] for n, e in timing["engines"].items() if not n.startswith("dma")}
    text = f"compute: engines are busy {share_text(share)} of the step"
    if engines:
        engine, busy = max(engines.items(), key=lambda item: item[1])
        text += f", the {engine} engine {share_text(busy)}"
    again = 1 - timing["mfu"] / timing["hfu"] if timing["hfu"] else 0.0
    if again > 0.05 and report["job"]["strategy"]["remat"] == "full":  # our choice: worth a word
        text += f"; {share_text(again)} of its FLOPs are not the model's (recomputation)"
    return text


def _memory(report: Mapping[str, Any], category: str) -> str:
    moved = ", ".join(
        f"{name} {share_text(engine['share'])}"
        for name, engine in report["timing"]["engines"].items()
        if name.startswith("dma")
    )
    return (
        f"HBM traffic: engines wait for data {share_text(shares(report)[category])} of the step;"
        f" queues are busy: {moved}"
    )


def _collective(report: Mapping[str, Any], category: str) -> str:
    axes = category.removeprefix(_PREFIX)
    rows = [r for r in report["collectives"] if r["exposed_ps"] and _same(r["axis"], axes)]
    text = f"communication over {axes}: cores wait {share_text(shares(report)[category])} of"
    text += " the step"
    if not rows:
        return text
    worst = max(rows, key=lambda row: row["exposed_ps"])
    exposed = worst["exposed_ps"] / (worst["time_ps"] or 1)
    return (
        f"{text}; most for {worst['kind']} of {size_text(worst['bytes'])} over"
        f" {worst['group_size']} ranks ({worst['algorithm']}), {share_text(exposed)} exposed"
    )


def _same(shown: str, axes: str) -> bool:
    """Whether the axes of a row (`tp`, `dp_shard(4 of 8)+ep`) are those of a category."""
    return "_".join(part.partition("(")[0] for part in shown.split("+")) == axes


def _bubble(report: Mapping[str, Any], category: str) -> str:
    pipeline = report["pipeline"]
    count = pipeline["num_microbatches"]
    batches = "1 micro-batch" if count == 1 else f"{count} micro-batches"
    return (
        f"pipeline: cores wait for other stages {share_text(shares(report)[category])} of the step;"
        f" {len(pipeline['stages'])} stages, {batches}, {pipeline['schedule']}"
    )


def _launch(report: Mapping[str, Any], category: str) -> str:
    return (
        f"launches: starting programs takes {share_text(shares(report)[category])} of the step,"
        " which has little work for a core"
    )


def _idle(report: Mapping[str, Any], category: str) -> str:
    return f"cores have nothing to do {share_text(shares(report)[category])} of the step"


_SENTENCES: dict[str, Callable[[Mapping[str, Any], str], str]] = {
    "compute": _compute,
    "memory": _memory,
    COLLECTIVE: _collective,
    "bubble": _bubble,
    "launch": _launch,
    "idle": _idle,
}
