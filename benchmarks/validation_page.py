"""docs/validation.md from a report of `validate`.

    shardwright validate --training T.csv --kernels K.csv --collectives C.csv --json > R
    python benchmarks/validation_page.py R

The text is in validation_page.md; measured and predicted figures come from the report, settings and
recipes from the files that `validate` reads. Bars that are not reached are shown as such.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.orchestrator.validation.published import PublishedRun, Workload
from shardwright.orchestrator.validation.recipes import Served, recipe, recipe_names, recipe_source
from shardwright.orchestrator.validation.run_settings import profiles
from shardwright.sim_cluster.calibration import constants

TEMPLATE = Path(__file__).with_suffix(".md")
PAGE = Path(__file__).parent.parent / "docs" / "validation.md"

BARS = (
    ("leave-one-group-out median error of primary rows", "<= 8 %"),
    ("worst of them", "<= 25 %"),
    ("median over the constant-MFU baseline's", "<= 0.5"),
    ("rows inside the band", ">= 80 %"),
)

PAIRS = (
    ("Llama2-13B, 8 stages over 4", "llama2-13b-nxd-32n-pp8", "llama2-13b-nxd-32n-pp4"),
    ("BERT phase 1, FP32 over BF16", "bert-ph1-1n-fp32", "bert-ph1-1n-bf16"),
    ("BERT phase 1, 16 nodes over 1 node", "bert-ph1-16n-amp", "bert-ph1-1n-bf16"),
)


def main() -> None:
    report = json.loads(Path(sys.argv[1]).read_text())
    training = report["training"]
    parts = {
        **kept_facts(),
        "bars": _bars(training),
        "primary": _training(training),
        "groups": _groups(training["rows"]),
        "kernels": _measured(report["kernels"]),
        "collectives": _measured(report["collectives"]),
    }
    PAGE.write_text(filled(parts))


def filled(parts: Mapping[str, Iterable[str]]) -> str:
    """The template with these parts in their places; places of other parts stay."""
    text = TEMPLATE.read_text()
    for name, lines in parts.items():
        text = text.replace(f"@{name}\n", "\n".join(lines) + "\n")
    return text


def kept_facts() -> dict[str, Iterator[str]]:
    """The parts that are facts of the repository, by their place in the template; no report."""
    return {
        "settings": _settings(),
        "sources": _sources(),
        "recipes": _recipes(),
        "layouts": _layouts(),
        "served": _served(),
        "constants": _constants(),
    }


def _settings() -> Iterator[str]:
    names = ("profile", "attention", "recomputation", "dropout", "sums in fp32", "projections")
    yield _header(*names, "loss", "traced while cores wait")
    for one in profiles():
        sums = _yes(one.accumulation)
        joint = "fused" if one.fused else "separate"
        joint += ", kv heads of every rank" if one.replicated_kv else ""
        dropped = f"{one.dropout:g}"
        traced = f"{one.trace_us_per_layer} us a layer" if one.trace_us_per_layer else "no"
        loss = "one-hot" if one.one_hot_loss else "by index"
        yield _line(one.name, one.attention, one.remat, dropped, sums, joint, loss, traced)


def _sources() -> Iterator[str]:
    """Where each profile's settings are from, a statement to a line."""
    for one in profiles():
        yield f"- `{one.name}`: " + ";\n  ".join(one.source.split("; ")) + "."


def _recipes() -> Iterator[str]:
    yield _header("recipe", "row", "model", "settings", "layout", "published step s", "source")
    for name in recipe_names():
        if isinstance(run := recipe(name), PublishedRun):
            named = (f"`{name}`", run.id, run.model, run.settings.name)
            published = f"{run.step_time_s:g}"
            yield _line(*named, _layout(run.workload), published, recipe_source(name))


def _layouts() -> Iterator[str]:
    names = ("recipe", "model", "layers x width", "tokens", "settings", "layout", "instances")
    yield _header(*names, "samples", "stored as", "recomputation", "source")
    for name in recipe_names():
        if isinstance(run := recipe(name), PublishedRun | Served):
            continue
        w = run.workload
        batch = w.micro_batch * w.dp * w.num_microbatches
        stored = w.storage.params + (", f32 master" if w.storage.gradients == "f32" else "")
        yield _line(
            *(f"`{name}`", run.model, f"{w.layers} x {w.hidden}", f"{w.seq_len:,}"),
            *(run.settings.name, _layout(w), str(w.nodes), f"{batch:,}", stored, w.remat),
            recipe_source(name),
        )


def _served() -> Iterator[str]:
    yield _header("recipe", "model", "machine", "cores", "sequences", "positions", "source")
    for name in recipe_names():
        if isinstance(one := recipe(name), Served):
            cells = (one.preset, one.target, str(one.tp), str(one.sequences), f"{one.context:,}")
            yield _line(f"`{name}`", *cells, recipe_source(name))


def _layout(w: Workload) -> str:
    zero = ", ZeRO-1" if w.zero1 else ""
    return f"tp {w.tp}, pp {w.pp}, dp {w.dp}{zero if w.tp * w.pp > 1 else ''}"


def _header(*names: str) -> str:
    return f"{_line(*names)}\n{_line(*('---' for _ in names))}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _constants() -> Iterator[str]:
    yield _header("constant", "nominal", "conservative .. peak", "mechanism", "fitted on")
    for one in constants().values():
        band = f"{one.band[0]:g} .. {one.band[1]:g}"
        fitted = f"{one.fitted_on or 'no rows'}; {one.method}"
        yield _line(one.name, f"{one.value:g}", band, one.mechanism, fitted)


def _bars(training: Mapping[str, Any]) -> Iterator[str]:
    primary = training["primary"]
    median = primary["leave_one_group_out_median_error"]
    found = (
        f"{median:.1%}",
        f"{primary['leave_one_group_out_max_error']:.1%}",
        f"{median / primary['baseline_median_error']:.2f}",
        f"{training['band_covers']:.0%}",
    )
    reached = (
        median <= 0.08,
        primary["leave_one_group_out_max_error"] <= 0.25,
        median <= 0.5 * primary["baseline_median_error"],
        training["band_covers"] >= 0.8,
    )
    yield _header("what", "bar", "now", "reached")
    for (what, bar), now, good in zip(BARS, found, reached, strict=True):
        yield _line(what, bar, now, _yes(good))
    yield from _pairs({row["group"]: row for row in training["rows"] if row["primary"]})


def _pairs(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Ratios of published pairs, and whether they are met within 20 %."""
    for what, above, below in PAIRS:
        if above in rows and below in rows and rows[above]["error"] is not None:
            predicted, published = (
                rows[above][key] / rows[below][key]
                for key in ("predicted_step_time_s", "published_step_time_s")
            )
            same = (predicted > 1) == (published > 1) and abs(predicted / published - 1) <= 0.2
            yield _line(what, f"{published:.2f} within 20 %", f"{predicted:.2f}", _yes(same))


def _training(training: Mapping[str, Any]) -> Iterator[str]:
    names = ("row", "settings", "published", "predicted (band)", "error", "left out")
    yield _header(*names, "constant MFU", "largest shares")
    yield from (_run(row) for row in training["rows"] if row["primary"])
    primary = training["primary"]
    yield (
        f"\nMedian error {primary['median_error']:.1%}, one group left out"
        f" {primary['leave_one_group_out_median_error']:.1%}, constant MFU"
        f" {primary['baseline_median_error']:.1%}. Over all {len(training['rows'])} rows"
        f" {training['median_error']:.1%}, constant MFU {training['baseline_median_error']:.1%}."
    )


def _run(row: Mapping[str, Any]) -> str:
    named = (f"{row['id']} {row['group']}", row["settings"])
    published = f"{row['published_step_time_s']:.4g} s"
    if row["error"] is None:
        return _line(*named, published, f"not predicted: {row['reason']}", "", "", "", "")
    low, high = row["band_s"]
    predicted = f"{row['predicted_step_time_s']:.4g} s ({low:.4g} .. {high:.4g})"
    largest = sorted(row["shares"].items(), key=lambda pair: -pair[1])[:3]
    shares = ", ".join(f"{name} {share:.0%}" for name, share in largest)
    errors = (f"{row['error']:+.1%}", f"{row['left_out_error']:+.1%}")
    return _line(*named, published, predicted, *errors, f"{row['baseline_error']:+.0%}", shares)


def _groups(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield _header("group", "rows", "median error", "from .. to", "inside the band")
    for name, found in _by_group(rows).items():
        inside = sum(row["band_covers"] for row in found)
        yield _line(name, *_spread(found), str(inside))


def _by_group(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["error"] is not None:
            groups.setdefault(row["group"], []).append(row)
    return groups


def _spread(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str, str]:
    errors = [row["error"] for row in rows]
    middle = f"{statistics.median(errors):+.1%}"
    return str(len(rows)), middle, f"{min(errors):+.1%} .. {max(errors):+.1%}"


MEASURED = {
    "median_error": "median error {:.1%}",
    "max_error": "worst {:.1%}",
    "large_median_error": "median from 1 MiB on {:.1%} (bar 15 %)",
    "small_median_factor": "median factor below 64 KiB {:.2f} (bar 1.5)",
    "refused": "{} rows without an answer",
}


def _measured(report: Mapping[str, Any]) -> Iterator[str]:
    shown = {key: text for key, text in MEASURED.items() if report.get(key) is not None}
    yield "; ".join(text.format(report[key]) for key, text in shown.items()) + ".\n"
    yield _header("group", "rows", "median error", "from .. to")
    for name, rows in _by_group(report["rows"]).items():
        yield _line(name, *_spread(rows))
    reasons = {row["reason"] for row in report["rows"] if row["error"] is None}
    if reasons:
        yield "\nNot predicted: " + "; ".join(sorted(reasons)) + "."


if __name__ == "__main__":
    main()
