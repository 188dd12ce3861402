"""What a try did, in words: for screens, pages and the verdicts that name a cure; and what was
chosen for a job by trying."""

from __future__ import annotations

from shardwright.orchestrator.report.text import (
    Facts,
    Report,
    counted,
    seconds_text,
    share_text,
    size_text,
    usd_text,
)

FITS, TOO_LARGE, REFUSED = "fits", "does not fit", "refused"
"""What becomes of a candidate, or of a point of a sweep."""
WORTHWHILE = 0.01  # our choice: of time or cost; less is not worth a change
_SHOWN = 5e-4  # of what was: less is no change


def title(row: Facts) -> str:
    """What a try is: worth trying next, a gain that is too small for that, or none."""
    if row["helps"]:
        return "next"
    is_little = row["status"] == "fits" and -WORTHWHILE <= gain(row) <= -_SHOWN
    return f"gains <{100 * WORTHWHILE:.0f} %" if is_little else "no gain"


def tries_of(report: Report) -> list[tuple[str, str, str]]:
    """What was tried beside a plan: what a try is, its change, and what that did."""
    rows, unit = report.get("whatif", {}).get("tried", ()), counted(report)
    return [(title(row), short_change(row["change"]), effect_text(row, unit)) for row in rows]


def gain(row: Facts) -> float:
    """The change of the time or of the cost of a token, whichever falls more."""
    time_change: float = row["time_change"]
    return min(time_change, row["cost_change"] or 0.0)


def short_change(change: str) -> str:
    """A change without the names of tables where they say nothing new."""
    return change.replace("strategy.", "").replace("cluster.", "")


def effect_text(row: Facts, unit: str) -> str:
    """What a try did, per million of a unit: `fits, 1.420 s (-12 %), $2.06/Mtoken (-12 %)`."""
    if row["status"] in ("refused", "failed"):
        return f"{row['code']}, {row['message']}"
    text = f"{chosen_text(row)}{row['status']}, {size_text(row['peak_bytes'])}"
    if row["status"] == "does not fit":
        return text
    text = f"{chosen_text(row)}fits, {seconds_text(row['step_time_s'])} per step"
    if row["same_batch"]:
        text += f" ({_change_text(row['time_change'])})"
    else:
        faster = 1 / (1 + row["time_change"]) - 1
        samples = f"{row['global_batch']:,} {row.get('samples', 'samples')}"
        text += f" of {samples} ({_change_text(faster)} {unit}s/s)"
    if row["cost_change"] is not None:
        text += (
            f", {usd_text(row['usd_per_1e6_tokens'])}/M{unit} ({_change_text(row['cost_change'])})"
        )
    elif row.get("unpriced"):
        text += ", no price of this kind"
    if codes := row.get("refused"):
        text += f"; neuronx-cc would refuse it, {', '.join(codes)}"
    return text


def chosen_text(row: Facts) -> str:
    """What `auto` came to in a try: `remat none, micro_batch 4: `; empty where it has none."""
    found = row.get("chosen")
    return f"{_named(found)}: " if found else ""


def decided(report: Report) -> Facts | None:
    """The section `auto` of a report in which the memory decided about a key."""
    section: Facts | None = report.get("auto")
    return section if section and section["keys"] else None


def chosen_of(report: Report) -> str:
    """What `auto` came to in a report: `remat none, micro_batch 4`; empty where it has none."""
    section = decided(report)
    return _named(auto_values(section)) if section else ""


def _named(values: Facts) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def auto_text(section: Facts, limit_bytes: int) -> str:
    """What was chosen for the keys that a job leaves to the memory, and what was not, with why."""
    values, samples = auto_values(section), section["samples_per_rank"]
    text = _named(values)
    if "micro_batch" in values and samples > 1:
        text += f" of {samples:,} samples per rank"
    own = chosen_row(section)
    if not is_good(own):
        text += f", the nearest{'' if own['status'] == 'fits' else ': nothing fits'}"
        if own["refused"]:
            text += f", though neuronx-cc would refuse it, {', '.join(own['refused'])}"
    told = [
        f"{_named(auto_values(section, row))}: {candidate_text(row, limit_bytes)}"
        for row in section["tried"]
        if not is_good(row) and not is_chosen(row, section)
    ]
    return f"{text}; not {'; '.join(told)}" if told else text


def auto_values(section: Facts, row: Facts | None = None) -> Facts:
    """What was chosen, or what a candidate has, by the names of the keys that the memory decides
    about, the recomputation first."""
    names = [name for name in ("remat", "micro_batch") if f"strategy.{name}" in section["keys"]]
    return {name: (row or section)[name] for name in names}


def is_chosen(row: Facts, section: Facts) -> bool:
    """Whether a candidate is the one that was taken."""
    return all(row[key] == section[key] for key in ("remat", "micro_batch"))


def chosen_row(section: Facts) -> Facts:
    """The candidate that was taken."""
    rows = (row for row in section["tried"] if is_chosen(row, section) and row.get("compiled"))
    found: Facts = next(rows)
    return found


def is_good(row: Facts) -> bool:
    """Whether a candidate fits, and the vendor's compiler takes it."""
    return row["status"] == "fits" and not row["refused"]


def candidate(row: Facts) -> str:
    """A candidate: recomputation and micro-batch."""
    return f"{row['remat']} x {row['micro_batch']}"


def candidate_text(row: Facts, limit_bytes: int) -> str:
    """What became of a candidate: `at least 33.20 GiB of 15.85 GiB`."""
    if row["status"] == "refused":
        return f"{row['code']}, {row['message']}"
    least = "" if row["compiled"] else "at least "
    text = f"{least}{size_text(row['peak_bytes'])} of {size_text(limit_bytes)}"
    if row["refused"]:
        text += f", and neuronx-cc would refuse it, {', '.join(row['refused'])}"
    return text


def _change_text(change: float) -> str:
    """`+4.6 %`, `-23 %`, `no change`."""
    if abs(change) < _SHOWN:
        return "no change"
    return f"{'+' if change >= 0 else '-'}{share_text(abs(change))}"
