"""Sections of the screens of `plan` and `run`: a report in, lines of text out.

Lines fit the width they were asked for, whatever the report holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.text import Text

from shardwright.collectives.ops import LINEAR
from shardwright.compiler.machine.target import PS_PER_S
from shardwright.orchestrator.report.bars import bar, bar_to_limit, legend
from shardwright.orchestrator.report.bottleneck import last_stage
from shardwright.orchestrator.report.cost import basis_text, list_text, missing_text
from shardwright.orchestrator.report.goal import doubts, goal_texts, rests_on
from shardwright.orchestrator.report.text import (
    KIB,
    count_text,
    counted,
    micro_batches_text,
    place_text,
    rate_text,
    seconds_text,
    share_text,
    size_text,
    usd_text,
)
from shardwright.orchestrator.report.tried import auto_text, decided
from shardwright.orchestrator.report.verdict import VENDOR_LIMITS, published_text, verdicts
from shardwright.orchestrator.terminal import terminal
from shardwright.orchestrator.terminal.age import AGAIN, FLAG, age_text, counted_text, oldest
from shardwright.sim_cluster.timing.contention import COLLECTIVE_PACKET_BYTES, COMPUTE_PACKET_BYTES

Report = Mapping[str, Any]
Section = Callable[[Report, int], list[Text]]

TASKS = "partition, compile and timing tasks"  # what screens call units of work
TITLE = 11  # columns of the titles on the left
_NEARLY_ALL = 0.995  # our choice: what is left is less than a percent
_SHOWN = 5e-4  # of a bar: less has no cell, and is <0.1 %


def titled(title: str, text: Text | str, width: int) -> list[Text]:
    """A title and its text, wrapped."""
    body = Text.from_markup(text) if isinstance(text, str) else text
    wrapped = _wrapped(body, width)
    names = [title, *([""] * (len(wrapped) - 1))]
    return [
        Text.assemble((name.ljust(TITLE), "bold"), line, no_wrap=True)
        for name, line in zip(names, wrapped, strict=True)
    ]


_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:%|[hsB]|[mu]s|[KMG]iB)(?![A-Za-z]))")
_NO_BREAK = "\ue000"  # of private use: a no-break space is one more space to what wraps


def _wrapped(text: Text, width: int) -> list[Text]:
    """The lines of a text beside the titles, a number and its unit on one."""
    joined = text.copy()
    joined.plain = _BEFORE_UNIT.sub(_NO_BREAK, text.plain)
    lines = list(joined.wrap(terminal.console(width=width), max(20, width - TITLE)))
    for line in lines:
        line.plain = line.plain.replace(_NO_BREAK, " ")
        line.rstrip()
    return lines


def plain(title: str, text: str, width: int) -> list[Text]:
    """As `titled`, of text that is not ours: brackets are brackets."""
    return titled(title, Text(text), width)


def parts_of(parts: Sequence[Text], width: int) -> list[Text]:
    """Parts on as many indented lines as they need; only what is longer than a line is broken."""
    room = width - TITLE
    lines: list[Text] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= room:
            lines[-1].append("  ").append(part)
        else:
            lines += _wrapped(part, width)
    return [Text.assemble(" " * TITLE, line, no_wrap=True) for line in lines]


def headline(report: Report, width: int) -> list[Text]:
    """Model, strategy and mesh, in a rule; at its end that the answer is a stored one: this line is
    never left out."""
    mesh = ",".join(f"{axis}={size}" for axis, size in report["mesh"].items()) or "one core"
    name = report["graph"]["name"]
    text = Text.assemble((name, "bold"), f"  {report['job']['strategy']['name']}  {mesh} ")
    stored_s = _stored_s(report)
    mark = f" stored, {age_text(stored_s)}: {FLAG} asks anew" if stored_s else ""
    text.truncate(width - 1 - len(mark), overflow="ellipsis")
    return [text.append("─" * (width - len(text) - len(mark)), style="dim").append(mark)]


def job(report: Report, width: int) -> list[Text]:
    """Sizes: model, cores, samples of a step; and the type of its products."""
    graph, cluster, batch = report["graph"], report["job"]["cluster"], report["batch"]
    tokens = f" of {batch['tokens_per_sample']:,} tokens" if batch["tokens_per_sample"] > 1 else ""
    length = report.get("resolved", {}).get("model.seq_len")
    if tokens and length and report["job"]["model"]["config"]:  # a preset's is no news
        tokens += " (the config's)"
    samples = "1 sample" if batch["global_batch"] == 1 else f"{batch['global_batch']:,} samples"
    products = f" in {name}" if (name := products_text(report)) else ""
    text = (
        f"{count_text(graph['params'])} parameters on {report['cores']:,} cores"
        f" ({cluster['instances']} x {cluster['target']}),"
        f" {count_text(graph['flops_per_step'])}FLOP{products} per step of {samples}{tokens},"
        f" {micro_batches_text(batch['num_microbatches'])}"
    )
    return plain("job", text, width)


def products_text(report: Report) -> str:
    """The type that most FLOPs of contractions are in, and what it is cast to; empty where there
    are none or an older report does not say."""
    types = report["graph"].get("product_types")
    if not types:
        return ""
    name, share = max(types.items(), key=lambda item: item[1])
    text: str = name if share > _NEARLY_ALL else f"{name} ({share_text(share)})"
    options = report["job"]["compiler"]
    if name == "f32" and options["auto_cast"] != "none":
        text += f" cast to {options['auto_cast_type']}"
    return text


def roles(report: Report, width: int) -> list[Text]:
    """What the leaves of a user's own step were taken for."""
    model = report["job"]["model"]
    if not (model["entry"] or model["hlo"]):
        return []
    told = []
    for row in report["graph"]["roles"]:
        more = len(row["paths"]) - MOST_PATHS
        few = ", ".join(row["paths"][:MOST_PATHS]) + (f" and {more} more" if more > 0 else "")
        told.append(f"{_ROLE_TEXT[row['role']]} {few}")
    return plain("roles", "; ".join(told), width)


_ROLE_TEXT = {"parameter": "parameters", "optimizer": "optimizer", "rng": "random numbers"}
MOST_PATHS = 3  # of a role that the screen names (our choice)


def logical_cores(report: Report, width: int) -> list[Text]:
    """What a core is, where it is more than one physical core."""
    cores = report["logical_cores"]
    if cores["lnc"] == 1:
        return []
    regions = cores["regions_cut"] + cores["regions_alone"]
    share = cores["alone_ps"] / report["timing"]["step_time_ps"]
    note = "[bold red]hypothetical[/], " if cores["hypothetical"] else ""
    text = (
        f"{note}LNC {cores['lnc']}: {cores['per_instance']} cores of"
        f" {size_text(cores['hbm_bytes'])} per instance; {cores['regions_alone']} of {regions}"
        f" regions on one physical core alone, {share_text(share)} of the step"
    )
    return titled("cores", text, width)


def compiler(report: Report, width: int) -> list[Text]:
    """The options that published runs differ in."""
    options = report["job"]["compiler"]
    text = (
        f"-O{options['optlevel']}, model type {options['model_type']}, attention"
        f" {options['attention']}"
    )
    if (cast := options["auto_cast"]) != "none":
        text += f", auto_cast {cast} to {options['auto_cast_type']}"
    if not options.get("latency_hiding", True):  # older reports do not say it
        text += ", latency hiding off"
    if report["context"]:
        text += f"; context {report['context']}"
    return plain("compiler", text, width)


def placement(report: Report, width: int) -> list[Text]:
    """Where the axes of the mesh lie."""
    placed = report["placement"]
    if not placed["axes"]:
        return []
    places = "; ".join(f"{axis} on {place}" for axis, place in placed["axes"].items())
    return plain("placed", f"{placed_as(placed)}: {places}", width)


def placed_as(placed: Mapping[str, Any]) -> str:
    """The placement that was asked for, or why it is none of the torus."""
    name: str = placed["name"]
    is_asked = name.partition(":")[0].strip() == LINEAR
    if placed.get("kind") != LINEAR or is_asked:  # older reports do not say it
        return name
    return f"linear, since {placed['why'].partition(': ')[2]}"


def streams(report: Report, width: int) -> list[Text]:
    """What runs on every stream, where there are several or packets are not the runtime's own."""
    rows = report["streams"]["streams"]
    compute = report["streams"]["compute_packet_bytes"]
    chosen = compute != COMPUTE_PACKET_BYTES
    chosen |= any(row["packet_bytes"] != COLLECTIVE_PACKET_BYTES for row in rows)
    if len(rows) < 2 and not chosen:
        return []
    total = report["timing"]["step_time_ps"]
    lines = plain("streams", f"DMA packets of compute {compute / KIB:g} KiB", width)
    told = [
        f"{row['stream']}: {', '.join(row['collectives'])}, packets"
        f" {row['packet_bytes'] / KIB:g} KiB, busy {share_text(row['time_ps'], total)}"
        for row in rows
    ]
    return lines + parts_of(list(map(Text, told)), width)


def memory(report: Report, width: int) -> list[Text]:
    """The verdict, and what a core holds against its limit."""
    section = report["memory"]
    limit, peak = section["limit_bytes"], section["peak_bytes"]
    verdict = "[green]fits[/]"
    if not section["fits"]:
        verdict = f"[bold red]does not fit[/], {size_text(peak - limit)} over"
    text = (
        f"{verdict}: {size_text(peak)} of {size_text(limit)} per core, {share_text(peak / limit)}"
    )
    parts = {n: size for n, size in section["categories"].items() if size >= _SHOWN * peak}
    sizes = {name: size_text(size) for name, size in parts.items()}
    drawn = Text(" " * TITLE).append(bar_to_limit(parts, limit, width - TITLE))
    lines = [*titled("memory", text, width), drawn, *parts_of(legend(sizes), width)]
    if host := section.get("host"):
        kept, limit = host["bytes"], host["limit_bytes"]
        text = f"and {size_text(kept)} of {size_text(limit)} host memory per instance,"
        lines += parts_of([Text(f"{text} {share_text(kept / limit)}")], width)
    return lines


def auto(report: Report, width: int) -> list[Text]:
    """What was chosen for keys that are left to the memory."""
    section = decided(report)
    if section is None:
        return []
    return plain("auto", auto_text(section, report["memory"]["limit_bytes"]), width)


def timing(report: Report, width: int) -> list[Text]:
    """Step time with its band, and where it goes in the stage that finishes last."""
    section = report["timing"]
    low, high = section["band_s"]
    text = (
        f"{seconds_text(section['step_time_s'])} per step ({section['profile']}),"
        f" band {seconds_text(low)} .. {seconds_text(high)}"
    )
    total = section["step_time_ps"]
    parts = {n: float(ps) for n, ps in section["breakdown_ps"].items() if ps >= _SHOWN * total}
    shares = {name: share_text(ps, total, digits=1) for name, ps in parts.items()}
    drawn = Text(" " * TITLE).append(bar(parts, width - TITLE))
    told, stage = legend(shares), last_stage(section)
    if stage is not None:
        told.append(Text(f"(stage {stage}, the last to finish)"))
    return [*plain("time", text, width), drawn, *parts_of(told, width)]


def rates(report: Report, width: int) -> list[Text]:
    """Utilisation, with its denominator and what it counts of attention, and tokens; beside it the
    best that is published."""
    section = report["timing"]
    mfu, hfu = (rate_text(section[rate]) for rate in ("mfu", "hfu"))
    again = f"(HFU {hfu})"
    if section.get("attention") == "causal":
        causal = rate_text(section["mfu_causal"])
        again = f"(attention in full; causal {causal}), HFU {hfu}"
    text = (
        f"{section['tokens_per_s']:,.0f} {counted(report)}s/s, MFU {mfu} {again} of"
        f" {count_text(section['peak_flops_per_s'])}FLOP/s bf16 peak"
    )
    return [*plain("rates", text, width), *_published(report, width)]


def _published(report: Report, width: int) -> list[Text]:
    """What there is to compare with, if the report says."""
    section = report["timing"]
    if "published" not in section:
        return []
    best, machine = section["published"], report["job"]["cluster"]["target"]
    if best is None:
        kind = _NOBODY[section["attention"]]
        return plain("", f"none published of {kind} on {machine}", width)
    return plain("", f"best published: {published_text(best)}", width)


_NOBODY = {
    "causal": "causal attention",
    "full": "attention in full",
    "none": "models without attention",
}


def cost(report: Report, width: int) -> list[Text]:
    """Dollars at the price that was asked for, with its region and its day, where there is one."""
    section, price = report["cost"], report.get("price")
    if section["usd_per_hour"] is None:
        return plain("cost", missing_text(price), width)
    text = (
        f"{usd_text(section['usd_per_step'])} per step,"
        f" {usd_text(section['usd_per_1e6_tokens'])} per million {counted(report)}s,"
        f" {list_text(price)} ({usd_text(section['usd_per_hour'])} per hour)"
    )
    return plain("cost", text, width)


def goal(report: Report, width: int) -> list[Text]:
    """How long and for how much what is to be trained takes, and what would have to change."""
    if "goal" not in report:
        return []
    basis = basis_text(report.get("price"))
    told, needs = goal_texts(
        report["goal"], counted(report), basis, doubts(report), rests_on(report)
    )
    return plain("goal", told, width) + (plain("it needs", needs, width) if needs else [])


def limited_by(report: Report, width: int) -> list[Text]:
    """The bottleneck in a sentence."""
    return plain("limited by", report["bottleneck"]["text"], width)


def confidence(report: Report, width: int) -> list[Text]:
    """How far the answer can be trusted, and why no further."""
    section, assumed = report["timing"], len(report["limits"]["assumed"])
    text = (
        f"{section['confidence']}: {section['confidence_why']}; {assumed} figures assumed,"
        " docs/model.md"
    )
    return plain("confidence", text, width)


def goodput(report: Report, width: int) -> list[Text]:
    """What failures and checkpoints leave."""
    section = report["goodput"]
    share = share_text(section["goodput"], digits=2)
    text = (
        f"{share}: {seconds_text(section['checkpoint_s'])} to save every"
        f" {section['interval_steps']:,} steps, a failure every {section['mtbf_s'] / 3600:,.1f} h"
    )
    return plain("goodput", text, width)


def faults(report: Report, width: int) -> list[Text]:
    """What the faults of the cluster cost."""
    if "faults" not in report:
        return []
    found = report["faults"]
    healthy = seconds_text(found["healthy_step_time_ps"] / PS_PER_S)
    text = f"{found['slowdown']:.3f} times the step of a healthy cluster, {healthy}"
    return plain("faults", text, width)


def stages(report: Report, width: int) -> list[Text]:
    """Layers, bubble and memory of every pipeline stage, if there are several; equal neighbours
    once."""
    per_stage, peaks = report["timing"]["per_stage"], report["memory"]["per_stage"]
    pipeline = report["pipeline"]
    if len(per_stage) == 1:
        return []
    total = report["timing"]["step_time_ps"]
    texts = [
        f"{'+'.join(map(str, has['layers']))} layers, bubble"
        f" {share_text(time['breakdown_ps']['bubble'], total, 1)}, {size_text(own['peak_bytes'])}"
        for time, own, has in zip(per_stage, peaks, pipeline["stages"], strict=True)
    ]
    batches = micro_batches_text(pipeline["num_microbatches"])
    lines = plain("pipeline", f"{len(texts)} stages, {batches}, {pipeline['schedule']}", width)
    parts, first = [], 0
    for text, same in groupby(texts):
        last = first + len(list(same)) - 1
        parts.append(f"{first}: {text}" if first == last else f"{first}-{last}: {text}")
        first = last + 1
    return lines + parts_of([Text(part) for part in parts], width)


def stored(report: Report, width: int) -> list[Text]:
    """That the answer is a stored one, how old it is and the command that asks anew."""
    return _stored(report, 1, 1, "answer", _stored_s(report), width)


def _stored_s(report: Report) -> float:
    """When a stored answer was stored, the older of its two parts; 0 of one that was computed."""
    stored_s = report["provenance"].get("stored_s", 0.0)
    tried_s = report.get("whatif", {}).get("stored_s", 0.0)
    return oldest((stored_s, tried_s)) if stored_s else 0.0


def stored_units(report: Report, width: int) -> list[Text]:
    """The same of an answer that was made of stored units."""
    if report["provenance"].get("stored_s"):
        return []
    times = [row["stored_s"] for row in report["units"] if row.get("stored_s")]
    return _stored(report, len(times), len(report["units"]), TASKS, oldest(times), width)


def _stored(
    report: Report, count: int, total: int, what: str, since_s: float, width: int
) -> list[Text]:
    again = report["provenance"].get("again", AGAIN)
    text = counted_text(count, total, what, since_s, again)
    return plain("stored", text, width) if text else []


def findings(report: Report, width: int) -> list[Text]:
    """Findings, errors first, and what to do about those of one kind; refusals are a verdict."""
    lines: list[Text] = []
    rows = [row for row in report["findings"] if row["code"] not in VENDOR_LIMITS]
    rows.sort(key=lambda row: row["severity"] != "error")
    for (severity, code, hint), same in groupby(rows, key=itemgetter("severity", "code", "hint")):
        told = dict.fromkeys(f"{row['message']}{place_text(row)}" for row in same)
        for n, message in enumerate(told):
            lines += plain("" if n else severity, f"{code}: {message}", width)
        lines += plain("", hint, width) if hint else []
    return lines


def verdict(report: Report, width: int) -> list[Text]:
    """What decides; nothing where nothing does."""
    lines: list[Text] = []
    for one in verdicts(report):
        lines += titled("" if lines else "verdict", Text(one.text, "bold red"), width)
    return lines
