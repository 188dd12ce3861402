"""What decides about a step before its time does: it does not fit, the vendor's compiler would
refuse it, it would be faster than anything that was published.

Read from a report alone. Screens end with these lines and pages begin with their badges, whatever
else there is no room for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.orchestrator.report.text import Facts, Report, counted, rate_text, size_text
from shardwright.orchestrator.report.tried import effect_text, short_change

VENDOR_LIMITS = ("NCC_EBVF030", "NCC_EXTP004")
"""Codes with which the vendor's compiler refuses a program that runs here all the same."""

_SAME = 1e-9  # our choice: two products of the same figures differ by less


@dataclass(frozen=True, slots=True)
class Verdict:
    """One of them: in two or three words, and in a sentence."""

    badge: str
    text: str


def verdicts(report: Report) -> list[Verdict]:
    """All that hold, the most decisive first."""
    fits = report["memory"]["fits"]
    return [*_memory(report), *_refused(report), *(_above(report) if fits else ())]


def refusals(report: Report) -> dict[str, Facts]:
    """The first finding of each code with which the vendor's compiler would refuse a program."""
    return {f["code"]: f for f in report["findings"][::-1] if f["code"] in VENDOR_LIMITS}


def _memory(report: Report) -> Iterator[Verdict]:
    memory = report["memory"]
    if not memory["fits"]:
        peak, limit = memory["peak_bytes"], memory["limit_bytes"]
        text = f"a core needs {size_text(peak)}, {size_text(peak - limit)} more than it may use"
        yield Verdict("does not fit", f"does not fit: {text}{_what_fits(report)}")


def _what_fits(report: Report) -> str:
    """The first change that was tried and fits: one that the vendor's compiler takes, if any."""
    rows = [row for row in _planned(report) if row["status"] == "fits"]
    if not rows:
        return ""
    best = min(rows, key=lambda row: len(row["refused"]))
    return f"; {short_change(best['change'])}: {effect_text(best, counted(report))}"


def _planned(report: Report) -> list[Facts]:
    return [row for row in report.get("whatif", {}).get("tried", ()) if "refused" in row]


def _refused(report: Report) -> Iterator[Verdict]:
    told: set[str] = set()
    for code, found in refusals(report).items():
        cure = _cure(report, found)
        then = "likewise" if cure in told else cure
        text = f"neuronx-cc would refuse this, {code}: {found['message']}; {then}"
        yield Verdict(f"refused by neuronx-cc: {code}", text)
        told.add(cure)


def _cure(report: Report, found: Facts) -> str:
    """The change that was tried and cures a refusal, with what it costs; else what was tried and
    does not, and what else may."""
    rows = _planned(report)
    cures = [row for row in rows if found["code"] not in row["refused"]]
    if cures:
        row = min(cures, key=lambda row: (row["status"] != "fits", len(row["refused"])))
        how = "cures it:" if not row["refused"] else "cures this, not all:"
        how = how if row["status"] == "fits" else "would cure it, but"
        return f"{short_change(row['change'])} {how} {effect_text(row, counted(report))}"
    if rows:
        tried = " and ".join(short_change(row["change"]) for row in rows)
        text, hint = f"refused with {tried} as well", str(found["hint"])
        is_tried = any(word in hint for row in rows for word in row["change"].split())
        return text if is_tried else f"{text}; {hint}"
    return str(found["hint"])


def _above(report: Report) -> Iterator[Verdict]:
    timing = report["timing"]
    best = timing.get("published")
    if best is None or best["times"] <= 1:
        return
    text = (
        f"above anything published: MFU {rate_text(timing['mfu'])} is"
        f" {best['times']:.2f} times the best of this kind of model on"
        f" {' or '.join(best['machines'])}, {published_text(best)}"
    )
    if ends_at_published(timing):
        text += "; the slow end of the band is therefore the step at that MFU, no estimate of ours"
    yield Verdict("above anything published", text)


def ends_at_published(timing: Facts) -> bool:
    """Whether the slow end of the band is no profile's step but was set to the step at the best
    published MFU (`report.band`)."""
    times = (timing.get("published") or {"times": 0.0})["times"]
    end, step_s = timing["band_s"][1], timing["step_time_s"]
    return times > 1 and math.isclose(end, step_s * times, rel_tol=_SAME)


def published_text(best: Facts) -> str:
    """A published MFU and whose it is: `32.1 % (Llama2-13B on 1,024 cores, SDK 2.18.0, T151)`."""
    run = f"{best['model']} on {best['cores']:,} cores, SDK {best['release']}, {best['id']}"
    return f"{rate_text(best['mfu'])} ({run})"
