"""A scaling study on the screen, in one document, and as plots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.report.text import Facts, count_text, large_usd_text
from shardwright.orchestrator.report.tried import FITS, candidate
from shardwright.orchestrator.terminal import plots, terminal, text_plots
from shardwright.orchestrator.whatif.rows import FITTED, METRICS, Row
from shardwright.orchestrator.whatif.scale import (
    QUESTIONS,
    WEAK,
    Curve,
    by_mode,
    orders,
    span_text,
    verdicts,
)
from shardwright.orchestrator.whatif.sweep import Swept
from shardwright.orchestrator.whatif.table import reasons

SCHEMA = 1


def document(found: Sequence[Curve], swept: Swept) -> Facts:
    """What `--json` prints and `scale.json` holds."""
    return {
        "schema": SCHEMA,
        "interrupted": swept.interrupted,
        "orders": {
            mode: {
                name: [asdict(one) for one in orders(own, METRICS[name])]
                for name in QUESTIONS.values()
            }
            for mode, own in by_mode(found).items()
        },
        "prices": list(swept.prices),
        "goal": swept.goal,
        "points": [row.as_dict() for row in all_rows(found)],
    }


def all_rows(found: Sequence[Curve]) -> list[Row]:
    """The rows of all curves."""
    return [row for curve in found for row in curve.rows.values()]


def show(console: Console, found: Sequence[Curve], base: JobConfig) -> None:
    """A table per mode, machines side by side, then which is best from where; `base` is the job
    that grows."""
    for mode, own in by_mode(found).items():
        for table in _tables(console, mode, own):
            console.print(table)
    console.print(
        "eff: tokens/s per instance against the smallest cluster that fits; exp: exposed"
        " communication; $/M: USD per million tokens; in brackets: does not fit"
    )
    if steps := steps_text(found):
        console.print(Text(steps))
    if given_up := batch_text(found, base):
        console.print(Text(given_up))
    for title, lines in (fitted(found) | verdicts(found)).items():
        console.print(Text(title, style="bold"))
        for line in lines:
            console.print(Text(f"  {line}"))
    reasons(console, all_rows(found))


def steps_text(found: Sequence[Curve]) -> str:
    """How many tokens the steps of each mode have, which is what modes differ in; empty where
    nothing has an answer."""
    told = []
    for mode, own in by_mode(found).items():
        counts = [row.metrics["tokens_per_step"] for row in all_rows(own) if row.metrics]
        if counts:
            ends = dict.fromkeys((min(counts), max(counts)))
            told.append(f"{mode} {' to '.join(f'{count:,}' for count in ends)}")
    return f"tokens per step: {'; '.join(told)}" if told else ""


def batch_text(found: Sequence[Curve], base: JobConfig) -> str:
    """That the batch of the job gives way to that of weak scaling; empty where it has none."""
    strategy = base.strategy
    samples, tokens = strategy.global_batch, strategy.global_batch_tokens
    if WEAK not in by_mode(found) or not (samples or tokens):
        return ""
    key = "global_batch_tokens" if tokens else "global_batch"
    said = f"{samples or tokens:,} {'tokens' if tokens else 'samples'}"
    return (
        f"weak: a step has one micro-batch per data-parallel rank; the {said} of the job"
        f" (strategy.{key}) count under strong alone"
    )


def fitted(found: Sequence[Curve]) -> dict[str, list[str]]:
    """By title a line per machine: how activations are kept, by ranges of instances."""
    told: dict[str, list[str]] = {}
    for curve in found:
        rows = {n: row for n, row in curve.rows.items() if row.metrics.keys() >= set(FITTED)}
        values = {n: candidate(row.metrics) for n, row in rows.items()}
        ranges = [(list(counts), value) for value, counts in groupby(values, values.__getitem__)]
        if ranges:
            texts = "; ".join(f"{span_text(n[0], n[-1])}: {value}" for n, value in ranges)
            title = f"{curve.mode}, remat x micro_batch"
            told.setdefault(title, []).append(f"{curve.target} at {texts}")
    return told


def _tables(console: Console, mode: str, own: Sequence[Curve]) -> list[Table]:
    """As many machines side by side as the console shows without cutting a figure short."""
    names = _short_names(own)
    room = console.options.update(max_width=10 * console.width)  # else it is measured as cut short
    tables = []
    for most in range(len(own), 0, -1):
        parts = [own[start : start + most] for start in range(0, len(own), most)]
        tables = [_table(mode, part, names) for part in parts]
        if all(console.measure(t, options=room).maximum <= console.width for t in tables):
            break
    return tables


def _table(mode: str, own: Sequence[Curve], names: Mapping[str, str]) -> Table:
    asked = any("days" in row.metrics for row in all_rows(own))
    more, titles = ("\ndays", "\n$") if asked else (), [f"{mode}\nn"]
    for curve in own:
        titles += [f"{names[curve.target]}\ntokens/s", "\neff", "\nexp", "\n$/M", *more]
    look: dict[str, Any] = {"box": None, "padding": (0, 1, 0, 0), "header_style": "bold"}
    table = terminal.table(*titles, right=titles, no_wrap=True, **look)
    counts = sorted({count for curve in own for count in curve.rows})
    for count in counts:
        cells = [cell for curve in own for cell in _cells(curve.rows.get(count), asked)]
        table.add_row(str(count), *cells)
    return table


def _short_names(found: Sequence[Curve]) -> dict[str, str]:
    families = {c.target: c.target.partition(".")[0] for c in found}
    several = Counter(families.values())
    return {t: name if several[name] == 1 else t for t, name in families.items()}


def _cells(row: Row | None, asked: bool) -> tuple[str, ...]:
    """The figures of a row; with days and dollars, where a goal is `asked` for."""
    if row is None or not row.metrics:
        return ("-",) * (6 if asked else 4)
    usd = METRICS["usd"].of(row)
    short = "-" if usd is None else large_usd_text(usd).removeprefix("$").replace(" ", "")
    more = (METRICS["days"].text(row), short)
    speed = count_text(row.metrics["tokens_per_s"]).replace(" ", "")
    cost = METRICS["usd_per_1e6_tokens"].of(row)
    return (
        speed if row.status == FITS else f"({speed})",
        f"{row.metrics['efficiency']:.0%}",
        f"{row.metrics['exposed']:.0%}",
        "-" if cost is None else f"{cost:.3g}",
        *(more if asked else ()),
    )


def show_plot(console: Console, found: Sequence[Curve]) -> None:
    """Cost per token over the number of instances, on the terminal."""
    names = _short_names(found)
    for mode, own in by_mode(found).items():
        series = {
            names[c.target]: (counts, costs)
            for c in own
            if (counts := _xs(c)) and (costs := _ys(c, "usd_per_1e6_tokens"))
        }
        if any(len(counts) > 2 for counts, _ in series.values()):
            console.print(
                text_plots.lines(series, f"instances, {mode} scaling", "USD per Mtok", log="x")
            )


def write_plots(
    folder: Path, found: Sequence[Curve], prefix: str = "", suffixes: Sequence[str] = plots.SUFFIXES
) -> list[Path]:
    """`PREFIXscale-MODE` in files of these kinds; nothing without matplotlib. What was written."""
    paths = []
    answered = [curve for curve in found if _xs(curve)] if plots.available() else []
    for mode, own in by_mode(answered).items():
        path = folder / f"{prefix}scale-{mode}"
        paths += plots.curves(panels(mode, own), path, suffixes)
    return paths


def panels(mode: str, own: Sequence[Curve]) -> list[plots.Panel]:
    """Speed, efficiency and cost over the number of instances."""

    def along(name: str) -> list[plots.Curve]:
        known = ((curve, _ys(curve, name)) for curve in own)
        return [plots.Curve(name=one.target, x=_xs(one), y=ys) for one, ys in known if ys]

    xs, (first, *_) = _xs(own[0]), _ys(own[0], "tokens_per_s")
    linear = plots.Curve(name="linear", x=xs, y=[first * x / xs[0] for x in xs], ideal=True)
    speed = [
        replace(line, band=_band(one)) for line, one in zip(along("tokens_per_s"), own, strict=True)
    ]
    label = METRICS["usd_per_1e6_tokens"].label
    title = f"{mode} scaling (band: conservative to peak)"
    found = [
        plots.Panel(title, "tokens per second", [*speed, linear], log="xy"),
        plots.Panel(
            "tokens per second and instance", "efficiency", along("efficiency"), share=True
        ),
        plots.Panel("cost", label, along("usd_per_1e6_tokens")),
    ]
    return [panel for panel in found if panel.curves]


def _xs(curve: Curve) -> list[int]:
    """Where the curve has an answer."""
    return [count for count, row in curve.rows.items() if row.metrics]


def _ys(curve: Curve, name: str) -> list[float]:
    """A figure along the curve; nothing where a point has none."""
    values: list[Any] = [curve.rows[count].metrics.get(name) for count in _xs(curve)]
    return [] if None in values else values


def _band(curve: Curve) -> tuple[list[float], list[float]]:
    """Tokens per second at the slow and at the fast end of the band."""
    tokens = _ys(curve, "tokens_per_step")
    low, high = (
        [count / step_s for count, step_s in zip(tokens, _ys(curve, end), strict=True)]
        for end in ("step_time_high_s", "step_time_low_s")
    )
    return low, high
