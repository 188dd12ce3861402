"""What a try did, in words: for screens, pages and the verdicts that name a cure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.report.text import seconds_text, share_text, size_text, usd_text


def short_change(change: str) -> str:
    """A change without the names of tables where they say nothing new."""
    return change.replace("strategy.", "").replace("cluster.", "")


def effect_text(row: Mapping[str, Any], unit: str) -> str:
    """What a try did, per million of a unit: `fits, 1.420 s (-12 %), $2.06/Mtoken (-12 %)`."""
    if row["status"] in ("refused", "failed"):
        return f"{row['code']}, {row['message']}"
    text = f"{row['status']}, {size_text(row['peak_bytes'])}"
    if row["status"] == "does not fit":
        return text
    text = f"fits, {seconds_text(row['step_time_s'])} per step"
    if row["same_batch"]:
        text += f" ({_signed(row['time_change'])})"
    else:
        faster = 1 / (1 + row["time_change"]) - 1
        text += f" of {row['global_batch']:,} samples ({_signed(faster)} {unit}s/s)"
    if row["cost_change"] is not None:
        text += f", {usd_text(row['usd_per_1e6_tokens'])}/M{unit} ({_signed(row['cost_change'])})"
    elif row.get("unpriced"):
        text += ", no price of this kind"
    if codes := row.get("refused"):
        text += f"; neuronx-cc would refuse it, {', '.join(codes)}"
    return text


def _signed(change: float) -> str:
    return f"{'+' if change >= 0 else '-'}{share_text(abs(change))}"
