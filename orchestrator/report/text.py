"""Numbers as people read them, for every screen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Report = Mapping[str, Any]
"""A report as its JSON has it; `shape.py` says what that of a job holds."""
Facts = Mapping[str, Any]
"""A part of a report: a section, or a row of one."""
GIB = 2**30
MIB = 2**20
KIB = 2**10


def count_text(number: float) -> str:
    """A count with a decimal prefix: 3.03 M, 201 T."""
    for exponent, prefix in zip(range(18, 0, -3), "EPTGMk", strict=True):
        if number >= 0.9995 * 10**exponent:  # three digits of less are below 1000 of the next
            return f"{number / 10**exponent:.3g} {prefix}"
    return f"{number:.3g} "


def mesh_text(report: Report) -> str:
    """The axes of a mesh as a job gives them: `pp=2,dp_shard=16`."""
    return ",".join(f"{axis}={size}" for axis, size in report["mesh"].items())


def micro_batches_text(count: int) -> str:
    """How many micro-batches a step has."""
    return "1 micro-batch" if count == 1 else f"{count} micro-batches"


def counted(report: Report) -> str:
    """What rates and costs of a report are per: tokens, or samples where those are not made of
    tokens."""
    is_text = report["batch"]["tokens_per_sample"] > 1 or "inference" in report
    return "token" if is_text else "sample"


_UNITS = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))


def size_text(num_bytes: float) -> str:
    """Bytes in binary units."""
    for size, unit in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def last_digit(num_bytes: float) -> float:
    """What the last digit of `size_text` counts, in bytes."""
    return next((0.01 * size for size, _ in _UNITS if num_bytes >= size), 1.0)


def parameters_text(graph: Facts) -> str:
    """How many parameters a model has, and how many of them are trained where some are frozen."""
    trained = graph.get("trained", graph["params"])  # older reports do not say it
    text = f"{count_text(graph['params']).rstrip()} parameters"
    return (
        text if trained == graph["params"] else f"{text} ({count_text(trained).rstrip()} trained)"
    )


def seconds_text(seconds: float) -> str:
    """Seconds in the unit that reads best."""
    if seconds >= 1:
        return f"{seconds:.3f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3f} ms"
    return f"{seconds * 1e6:.1f} us"


def share_text(part: float, whole: float = 1, digits: int = 0) -> str:
    """A share in percent with so many digits: 86 %, or 0.4 % where whole percents say nothing; what
    is there but too small for that is marked.
    """
    percent = 100 * part / whole if whole else 0.0
    if 0 < percent < 0.05:
        return "<0.1 %"
    digits = digits if percent >= 9.95 or percent == 0 else 1
    return f"{percent:.{digits}f} %"


def rate_text(rate: float, digits: int = 1) -> str:
    """A utilisation in percent with so many digits behind the point; below 10 % with one more that
    means something than that: 57.6 %, 4.1 %, 0.42 %."""
    percent = 100 * rate
    if 0 < percent < 1e-3:
        return "<0.001 %"
    if 0 < percent < 10 - 0.5 * 10**-digits:
        return f"{percent:#.{digits + 1}g} %"
    return f"{percent:.{digits}f} %"


def change_text(change: float) -> str:
    """A change in percent of what was: `+4.6 %`, `-22.6 %`."""
    return f"{change:+.1%}".replace("%", " %")


_LONG = ((86_400.0, "day"), (3600.0, "hour"), (60.0, "minute"), (1.0, "second"))


def long_text(seconds: float) -> str:
    """A long time in three digits of the unit that reads best: 41.2 days, 9.75 hours."""
    size, name = next((unit for unit in _LONG if seconds >= 0.9995 * unit[0]), _LONG[-1])
    number = digits_text(seconds / size)
    return f"{number} {name}" if number == "1" else f"{number} {name}s"


def digits_text(number: float) -> str:
    """Three digits that mean something, all of those before the point: 1,234, 41.2, 30."""
    return f"{number:,.0f}" if number >= 999.5 else f"{number:.3g}"


def large_usd_text(usd: float) -> str:
    """Dollars of a whole training: $1.22 M, $785 K, $12.50."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if usd >= 0.9995 * size:
            return f"${digits_text(usd / size)} {unit}"
    return usd_text(usd) if usd else "$0"


def usd_text(usd: float) -> str:
    """Dollars with three digits that mean something: $8.65, $0.00213, $1,234."""
    if usd >= 100:
        return f"${usd:,.0f}"
    if usd >= 1:
        return f"${usd:.2f}"
    return f"${usd:#.3g}" if usd >= 1e-4 else f"${usd:.2e}"


def place_text(found: Facts) -> str:
    """Where a finding is: ` (model.py:12)`; empty where it has no place."""
    loc = found.get("loc")
    return f" ({loc['file']}:{loc['line']})" if loc and loc["file"] else ""
