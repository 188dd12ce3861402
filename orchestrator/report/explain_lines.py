"""`--explain LINE` for lines of the screen without a table of their own: every figure of the line,
and how it arises from other figures of the report.

Made of a report alone, so that a stored answer is explained like a new one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.text import Text

from shardwright.compiler.machine.target import PS_PER_S
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.report.bottleneck import CAPACITY, kind_shares
from shardwright.orchestrator.report.cost import basis_text, list_text, missing_text
from shardwright.orchestrator.report.goal import goal_rows, needs_text, rests_on
from shardwright.orchestrator.report.inference import tokens_text
from shardwright.orchestrator.report.page.words import plain
from shardwright.orchestrator.report.sections import placed_as, products_text
from shardwright.orchestrator.report.text import (
    Facts,
    Report,
    count_text,
    counted,
    place_text,
    rate_text,
    seconds_text,
    share_text,
    size_text,
    usd_text,
)
from shardwright.orchestrator.report.tried import (
    candidate,
    candidate_text,
    effect_text,
    is_chosen,
    is_good,
    title,
)
from shardwright.orchestrator.report.verdict import ends_at_published, published_text, verdicts
from shardwright.orchestrator.terminal import terminal

Rows = Iterator[tuple[str, str, str]]
"""Figures: name, value as the screen shows it, how it arises."""


def explain(_job: JobConfig, report: Report, line: str) -> Facts:
    """`{line, rows}`, a row being `{name, value, how}`."""
    rows = _LINES[line](report)
    return {
        "line": line,
        "rows": [{"name": name, "value": value, "how": how} for name, value, how in rows],
    }


def show(section: Facts) -> None:
    """The figures of the line, one below the other."""
    title = f"{section['line']}: where its figures come from"
    table = terminal.table("figure", "value", "how", title=title, overflow="fold")
    for row in section["rows"]:
        table.add_row(*(Text(row[key]) for key in ("name", "value", "how")))
    terminal.console().print(table)


def _job(report: Report) -> Rows:
    graph, batch, cluster = report["graph"], report["batch"], report["job"]["cluster"]
    mesh = " x ".join(f"{axis} {size}" for axis, size in report["mesh"].items()) or "no axis"
    per_instance = report["logical_cores"]["per_instance"]
    yield (
        "parameters",
        count_text(graph["params"]).strip(),
        f"elements of all parameters of {graph['name']}, sharded or not: {graph['params']:,}",
    )
    if (trained := graph.get("trained", graph["params"])) != graph["params"]:
        yield "trained", count_text(trained).strip(), f"those that a step changes: {trained:,}"
    yield (
        "cores",
        f"{report['cores']:,}",
        f"mesh {mesh}; {cluster['instances']} x {cluster['target']} of {per_instance} cores",
    )
    count, micro = batch["num_microbatches"], batch["micro_batch"]
    ways = batch["global_batch"] // (count * micro)
    if "inference" in report:
        yield from _job_of_inference(report, ways)
        return
    yield (
        "samples of a step",
        f"{batch['global_batch']:,}",
        f"micro_batch {micro} x {ways} data-parallel ranks x {count} micro-batches",
    )
    if batch["tokens_per_sample"] > 1:
        chosen = report.get("resolved", {}).get("model.seq_len")
        why = chosen["why"] if chosen else "model.seq_len of the job"
        yield "tokens of a sample", f"{batch['tokens_per_sample']:,}", why
    yield (
        "FLOP per step",
        f"{count_text(graph['flops_per_step'])}FLOP",
        "every operation of the captured step, recomputation included, for all samples",
    )
    if products := products_text(report):
        how = "the type of most FLOPs of contractions, the wider one of their operands"
        yield "products in", products, f"{how}; compiler.auto_cast and its type cast f32"


def _job_of_inference(report: Report, ways: int) -> Rows:
    section, graph = report["inference"], report["graph"]
    each = section["sequences"] // ways
    yield (
        "sequences",
        f"{section['sequences']:,}",
        f"strategy.global_batch: {each} on each of {ways} data-parallel ranks",
    )
    chosen = report.get("resolved", {}).get("model.seq_len")
    why = chosen["why"] if chosen else "model.seq_len of the job"
    yield "context", f"{section['context']:,}", why
    yield (
        "cache of a sequence",
        size_text(section["cache_bytes_per_sequence"]),
        "keys and values of all layers at every position, those of a window where a layer has one",
    )
    yield (
        "FLOP per step",
        f"{count_text(graph['flops_per_step'])}FLOP",
        "every operation of the captured step, for all sequences",
    )


def _placed(report: Report) -> Rows:
    placed = report["placement"]
    yield "placement", placed_as(placed), f"cluster.placement; {placed['why']}"
    order = " > ".join(placed["order"]) or "one core"
    yield "order of axes", order, "from across instances to neighbouring cores"
    for axis, place in placed["axes"].items():
        yield axis, place, f"the first group of the {report['mesh'].get(axis, 1)} ranks along it"


def _auto(report: Report) -> Rows:
    section = report.get("auto")
    if section is None:
        both = "the job says strategy.remat and strategy.micro_batch itself"
        yield "nothing", "", "inference leaves nothing" if "inference" in report else both
        return
    for row in section["tried"]:
        verdict = "taken" if is_chosen(row, section) else "fits" if is_good(row) else "not taken"
        needed = candidate_text(row, report["memory"]["limit_bytes"])
        if "step_time_s" in row:
            needed += f", {seconds_text(row['step_time_s'])} per step"
        yield candidate(row), verdict, needed
    why = "remat x micro_batch; the least recomputation first, then the largest micro-batch"
    yield "in this order", "", f"{why} (docs/design/0063-auto.md)"


def _compiler(report: Report) -> Rows:
    usual = JobConfig().as_dict()["compiler"]
    for key, value in report["job"]["compiler"].items():
        shown, default = plain(value), plain(usual.get(key))
        yield key, shown, "the default" if shown == default else f"not {default}"


def _rates_of_inference(report: Report) -> Rows:
    section, timing = report["inference"], report["timing"]
    step = seconds_text(timing["step_time_s"])
    each = report["batch"]["tokens_per_sample"]
    yield (
        f"{tokens_text(section)}/s",
        f"{section['tokens_per_s']:,.0f}",
        f"{section['sequences']:,} x {each:,} tokens / {step} of the step",
    )
    moved = f"{size_text(section['weight_bytes'])} of weights and"
    moved += f" {size_text(section['cache_bytes'])} of the cache of a core"
    peak = f"{count_text(section['hbm_bytes_per_s'])}B/s"
    yield (
        "MBU",
        rate_text(section["mbu"], digits=2),
        f"{moved} / {step} / {peak} of its HBM (model bandwidth utilisation, Databricks 2023)",
    )
    peak = f"{count_text(timing['peak_flops_per_s'])}FLOP/s"
    needed = f"{count_text(timing['flops']['model'])}FLOP of contractions, attention in full"
    yield "MFU", rate_text(timing["mfu"], digits=2), f"{needed} / {step} / {peak}"
    if timing["attention"] == "causal":
        causal = f"{count_text(timing['flops']['causal'])}FLOP without the scores that a mask hides"
        yield "causal", rate_text(timing["mfu_causal"], digits=2), f"{causal} / {step} / {peak}"


def _rates(report: Report) -> Rows:
    if "inference" in report:
        yield from _rates_of_inference(report)
        return
    timing, batch = report["timing"], report["batch"]
    step, unit = seconds_text(timing["step_time_s"]), counted(report)
    per_sample = f" x {batch['tokens_per_sample']:,} tokens" if unit == "token" else ""
    yield (
        f"{unit}s/s",
        f"{timing['tokens_per_s']:,.0f}",
        f"{batch['global_batch']:,} samples{per_sample} / {step} of the step",
    )
    peak = timing["peak_flops_per_s"]
    each = f"{count_text(peak / report['cores'])}FLOP/s"
    peak_text = f"{count_text(peak)}FLOP/s"
    yield "peak", peak_text, f"{report['cores']:,} cores x {each}, bf16, as published"
    counts = timing.get("flops")
    if counts is None:  # a report of an older release
        return
    over = f"/ {step} / {peak_text}"
    model = f"{count_text(counts['model'])}FLOP that the model needs, attention in full"
    yield "MFU", rate_text(timing["mfu"], digits=2), f"{model} {over}"
    if timing["attention"] == "causal":
        text = f"{count_text(counts['causal'])}FLOP without the scores that a mask hides {over}"
        yield "causal", rate_text(timing["mfu_causal"], digits=2), text
    text = f"{count_text(counts['executed'])}FLOP of all contractions that cores run {over}"
    yield "HFU", rate_text(timing["hfu"], digits=2), text


def _cost(report: Report) -> Rows:
    cost, cluster, price = report["cost"], report["job"]["cluster"], report.get("price")
    if cost["usd_per_hour"] is None:
        yield "cost", "none", missing_text(price)
        return
    hourly, step = usd_text(cost["usd_per_hour"]), usd_text(cost["usd_per_step"])
    one = usd_text(cost["usd_per_hour"] / cluster["instances"])
    each = f"{cluster['instances']} x {cluster['target']} at {one}, {list_text(price)}"
    yield "per hour", hourly, each
    seconds = seconds_text(report["timing"]["step_time_s"])
    yield "per step", step, f"{hourly} x {seconds} / 3600 s"
    batch, unit = report["batch"], counted(report)
    count = batch["global_batch"] * batch["tokens_per_sample"]
    millions = usd_text(cost["usd_per_1e6_tokens"])
    yield f"per million {unit}s", millions, f"{step} / {count:,} {unit}s of a step x 1,000,000"


def _goal(report: Report) -> Rows:
    found = report.get("goal")
    if found is None:
        asked = "no goal was asked for: --tokens 1T --deadline 30d --budget 2M"
        yield "none", "", "a goal is one of training" if "inference" in report else asked
        return
    step = seconds_text(report["timing"]["step_time_s"])
    steps = f"{found['tokens']:,} {counted(report)}s over those of a step, rounded up"
    goodput = share_text(found["goodput"], digits=2)
    yield "steps", f"{found['steps']:,}", f"{steps}; each takes {step} / {goodput}"
    for name, taken, limit, left in goal_rows(found):
        basis = f", {basis_text(report.get('price'))}" if name == "money" else ""
        yield name, taken, f"limit {limit}, left {left}{basis}"
    if found["needs"]:
        rests = f"; {why}" if (why := rests_on(report)) else ""
        yield "it needs", "", needs_text(found["needs"], counted(report)) + rests


def _verdict(report: Report) -> Rows:
    for found in verdicts(report):
        yield found.badge, "", found.text
    if not verdicts(report):
        above = "" if "inference" in report else ", and no published MFU is below it"
        joint = " and" if "inference" in report else ","
        yield "none", "", f"it fits{joint} neuronx-cc takes it{above}"


def _goodput(report: Report) -> Rows:
    if "goodput" not in report:
        yield "none", "", "inference saves nothing, and goes on with other requests after a failure"
        return
    found, given = report["goodput"], report["job"]["goodput"]
    instances = report["job"]["cluster"]["instances"]
    count = "1 instance" if instances == 1 else f"{instances} instances"
    hours = given["instance_mtbf_hours"]
    each = f"{hours:,.0f} h between failures of an instance, {count}"
    yield "a failure every", f"{found['mtbf_s'] / 3600:,.1f} h", each
    state = f"{size_text(found['checkpoint_bytes'])} of parameters and optimizer state"
    saved = f"{state} at {given['storage_gb_per_s']:g} GB/s of an instance, {count}"
    own = "goodput.checkpoint_s of the job" if given["checkpoint_s"] else saved
    yield "saving takes", seconds_text(found["checkpoint_s"]), own
    asked, own_steps = given["checkpoint_interval_s"], given.get("checkpoint_interval_steps")
    best = f"the best in whole steps is near {seconds_text(found['best_interval_s'])} (Daly 2006)"
    interval = f"goodput.checkpoint_interval_s is {seconds_text(asked)}" if asked else best
    interval = "goodput.checkpoint_interval_steps of the job" if own_steps else interval
    steps = f"{found['interval_steps']:,} steps"
    yield "saved every", steps, f"{seconds_text(found['interval_s'])}: {interval}"
    yield (
        "goodput",
        share_text(found["goodput"], digits=2),
        f"all time less {share_text(found['lost_to_checkpoints'])} for saving and"
        f" {share_text(found['lost_to_failures'])} for failures, which restart in"
        f" {seconds_text(found['restart_s'])} and repeat what was not saved",
    )


def _limited(report: Report) -> Rows:
    """What the sentence chooses from, the largest first."""
    memory = report["memory"]
    if report["bottleneck"]["kind"] == CAPACITY:
        peak = memory["peak_bytes"]
        limit = f"{size_text(peak)} at the peak, limit {size_text(memory['limit_bytes'])}"
        for name, size in Counter(memory["categories"]).most_common():
            yield name, size_text(size), f"{share_text(size, peak)} of {limit}"
        return
    step = report["timing"]["step_time_ps"]
    for number, (name, share) in enumerate(kind_shares(report).items()):
        time = seconds_text(share * step / PS_PER_S)
        chosen = "; the largest share, so it is what is named" if not number else ""
        yield name, time, f"{share_text(share)} of {seconds_text(step / PS_PER_S)}{chosen}"
    busy = report["timing"]["engines"]
    for name, engine in sorted(busy.items(), key=lambda item: -item[1]["share"]):
        yield f"engine {name}", share_text(engine["share"]), "of the step, busy"


def _confidence(report: Report) -> Rows:
    timing, limits = report["timing"], report["limits"]
    yield timing["confidence"], "", timing["confidence_why"]
    low, high = (seconds_text(bound) for bound in timing["band_s"])
    how = "the step under all profiles of the machine's rates"
    if ends_at_published(timing):
        best = published_text(timing["published"])
        how += f"; its slow end is set to the step at the best published MFU, {best}"
    yield "band", f"{low} .. {high}", how
    for figure in limits["assumed"]:
        yield figure["name"], _figure(figure["value"]), f"{figure['status']}: {figure['source']}"
    for one in limits["cannot_tell"]:
        yield "cannot tell", "", one["text"]


def _figure(value: Any) -> str:
    """A figure of a machine as its file has it."""
    if isinstance(value, list):
        return ", ".join(map(_figure, value))
    if type(value) is int:
        return f"{value:,}"
    return f"{value:g}" if type(value) is float else str(value)


def _next(report: Report) -> Rows:
    section = report.get("whatif")
    if section is None:
        yield "nothing", "", "nothing was tried: `plan` tries changes, with --tries above 0"
        return
    for row in section["tried"]:
        verdict = "helps" if row["helps"] else title(row)
        yield row["change"], verdict, effect_text(row, counted(report))
    for change in section["left"]:
        yield change, "not tried", "there was no time for it; --tries N tries N changes"
    kind = report["bottleneck"]["kind"]
    yield "why these", "", f"changes that rules know for a step limited by {kind} (docs/plan.md)"


def _warnings(report: Report) -> Rows:
    for found in report["findings"]:
        hint = f". {found['hint']}" if found["hint"] else ""
        yield found["severity"], found["code"], f"{found['message']}{place_text(found)}{hint}"
    if not report["findings"]:
        yield "none", "", "the report has no findings"


_LINES: Mapping[str, Callable[[Report], Rows]] = {
    "job": _job,
    "placed": _placed,
    "auto": _auto,
    "compiler": _compiler,
    "rates": _rates,
    "cost": _cost,
    "goal": _goal,
    "goodput": _goodput,
    "limited": _limited,
    "confidence": _confidence,
    "next": _next,
    "warnings": _warnings,
    "verdict": _verdict,
}
