"""Sections of the screens of `plan` and `run`: a report in, titles and what is said under them out;
`laid` makes lines of them, which fit the width they were asked for, whatever the report holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter

from rich.text import Text

from shardwright.collectives.ops import LINEAR
from shardwright.compiler.machine.target import PS_PER_S
from shardwright.orchestrator.report.bars import bar, bar_to_limit, legend
from shardwright.orchestrator.report.bottleneck import last_stage
from shardwright.orchestrator.report.cost import list_text, missing_text
from shardwright.orchestrator.report.goal import told
from shardwright.orchestrator.report.inference import (
    rates_text,
    result_text,
    step_text,
    tokens_text,
)
from shardwright.orchestrator.report.text import (
    KIB,
    Facts,
    Report,
    count_text,
    counted,
    last_digit,
    mesh_text,
    micro_batches_text,
    parameters_text,
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

What = str | Text | list[str] | list[Text] | Callable[[int], Text]
"""A text, which is wrapped; parts, as many on a line as there is room for; or what is drawn in so
many columns."""
Said = Iterator[tuple[str, What]]
"""What a section says, each under its title."""
Section = Callable[[Report], Said]

TASKS = "partition, compile and timing tasks"  # what screens call units of work
TITLE = 11  # columns of the titles on the left
_NEARLY_ALL = 0.995  # our choice: what is left is less than a percent
_SHOWN = 5e-4  # of a bar: less has no cell, and is <0.1 %


def laid(said: Iterable[tuple[str, What]], width: int) -> list[Text]:
    """Lines of so many columns at most."""
    lines: list[Text] = []
    for title, what in said:
        if isinstance(what, str | Text):
            lines += titled(title, what, width)
        elif isinstance(what, list):
            lines += parts_of(what, width)
        else:
            lines.append(Text(" " * TITLE).append(what(width - TITLE)))
    return lines


def titled(title: str, text: Text | str, width: int) -> list[Text]:
    """A title and its text, wrapped; brackets of a text that is not ours are brackets."""
    wrapped = _wrapped(text, width)
    names = [title, *([""] * (len(wrapped) - 1))]
    return [
        Text.assemble((name.ljust(TITLE), "bold"), line, no_wrap=True)
        for name, line in zip(names, wrapped, strict=True)
    ]


_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:%|[hsB]|[mu]s|[KMG]iB)(?![A-Za-z]))")
_NO_BREAK = "\ue000"  # of private use: a no-break space is one more space to what wraps


def _wrapped(text: Text | str, width: int) -> list[Text]:
    """The lines of a text beside the titles, a number and its unit on one."""
    joined = Text(text) if isinstance(text, str) else text.copy()
    joined.plain = _BEFORE_UNIT.sub(_NO_BREAK, joined.plain)
    lines = list(joined.wrap(terminal.console(width=width), max(20, width - TITLE)))
    for line in lines:
        line.plain = line.plain.replace(_NO_BREAK, " ")
        line.rstrip()
    return lines


def parts_of(parts: Sequence[str | Text], width: int) -> list[Text]:
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
    mesh = mesh_text(report) or "one core"
    name = report["graph"]["name"]
    text = Text.assemble((name, "bold"), f"  {report['job']['strategy']['name']}  {mesh} ")
    stored_s = _stored_s(report)
    mark = f" stored, {age_text(stored_s)}: {FLAG} asks anew" if stored_s else ""
    text.truncate(width - 1 - len(mark), overflow="ellipsis")
    return [text.append("─" * (width - len(text) - len(mark)), style="dim").append(mark)]


def job(report: Report) -> Said:
    """Sizes: model, cores, samples of a step; and the type of its products."""
    graph, cluster, batch = report["graph"], report["job"]["cluster"], report["batch"]
    tokens = f" of {batch['tokens_per_sample']:,} tokens" if batch["tokens_per_sample"] > 1 else ""
    length = report.get("resolved", {}).get("model.seq_len")
    if tokens and length and report["job"]["model"]["config"]:  # a preset's is no news
        tokens += " (the config's)"
    samples = "1 sample" if batch["global_batch"] == 1 else f"{batch['global_batch']:,} samples"
    products = f" in {name}" if (name := products_text(report)) else ""
    step = f"step of {samples}{tokens}, {micro_batches_text(batch['num_microbatches'])}"
    text = (
        f"{parameters_text(graph)} on {report['cores']:,} cores"
        f" ({cluster['instances']} x {cluster['target']}),"
        f" {count_text(graph['flops_per_step'])}FLOP{products} per"
        f" {step_text(report['inference']) if 'inference' in report else step}"
    )
    yield "job", text


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


def imported(report: Report) -> Said:
    """What became of the fields of another project's configuration (`--from`)."""
    if not (section := report.get("imported")):
        return
    name = section["file"].rpartition("/")[2]
    unknown = [f"{row['field']} (line {row['line']})" for row in section["unknown"]]
    told = f": {first_few(unknown)}" if unknown else ""
    what = "terms" if "terms" in section else "fields"
    text = (
        f"{section['project']} {name}: {len(section['read'])} {what} read,"
        f" {len(section['without'])} without counterpart, {len(unknown)} unknown{told}"
    )
    yield "from", text
    yield "assumed", "; ".join(section["assumed"])


def roles(report: Report) -> Said:
    """What the leaves of a user's own step were taken for."""
    model = report["job"]["model"]
    if model["preset"] or model["config"] or model["recipe"]:
        return
    rows = report["graph"]["roles"]
    told = (f"{_ROLE_TEXT[row['role']]} {first_few(row['paths'])}" for row in rows)
    yield "roles", "; ".join(told)


def first_few(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def own_step(report: Report) -> Said:
    """How a user's own step was found to be called and to answer, where that is not as usual."""
    if lines := report["graph"].get("told"):
        yield "step", f"{report['graph']['name']}: {'; '.join(lines)}"


_ROLE_TEXT = {
    "parameter": "parameters",
    "frozen": "frozen",
    "buffer": "buffers",
    "optimizer": "optimizer",
    "cache": "cache",
    "rng": "random numbers",
}
MOST_NAMED = 3  # leaves or fields in a line of the screen (our choice)


def logical_cores(report: Report) -> Said:
    """What a core is, where it is more than one physical core."""
    cores = report["logical_cores"]
    if cores["lnc"] == 1:
        return
    kernels = cores["kernels_cut"] + cores["kernels_alone"]
    share = cores["alone_ps"] / report["timing"]["step_time_ps"]
    note = "[bold red]hypothetical[/], " if cores["hypothetical"] else ""
    text = (
        f"{note}LNC {cores['lnc']}: {cores['per_instance']} cores of"
        f" {size_text(cores['hbm_bytes'])} per instance; {cores['kernels_alone']} of {kernels}"
        f" kernels on one physical core alone, {share_text(share)} of the step"
    )
    yield "cores", Text.from_markup(text)


def compiler(report: Report) -> Said:
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
    yield "compiler", text


def placement(report: Report) -> Said:
    """Where the axes of the mesh lie."""
    placed = report["placement"]
    if not placed["axes"]:
        return
    places = "; ".join(f"{axis} on {place}" for axis, place in placed["axes"].items())
    yield "placed", f"{placed_as(placed)}: {places}"


def placed_as(placed: Facts) -> str:
    """The placement that was asked for, or why it is none of the torus."""
    name: str = placed["name"]
    is_asked = name.partition(":")[0].strip() == LINEAR
    if placed.get("kind") != LINEAR or is_asked:  # older reports do not say it
        return name
    return f"linear, since {placed['why'].partition(': ')[2]}"


def streams(report: Report) -> Said:
    """What runs on every stream, where there are several or packets are not the runtime's own."""
    rows = report["streams"]["streams"]
    compute = report["streams"]["compute_packet_bytes"]
    chosen = compute != COMPUTE_PACKET_BYTES
    chosen |= any(row["packet_bytes"] != COLLECTIVE_PACKET_BYTES for row in rows)
    if len(rows) < 2 and not chosen:
        return
    total = report["timing"]["step_time_ps"]
    yield "streams", f"DMA packets of compute {compute / KIB:g} KiB"
    yield (
        "",
        [
            f"{row['stream']}: {', '.join(row['collectives'])}, packets"
            f" {row['packet_bytes'] / KIB:g} KiB, busy {share_text(row['time_ps'], total)}"
            for row in rows
        ],
    )


def memory(report: Report) -> Said:
    """The verdict, and what a core holds against its limit: every category that has a cell, or
    without which the others would not come to the digits of the peak."""
    section = report["memory"]
    limit, peak = section["limit_bytes"], section["peak_bytes"]
    verdict = "[green]fits[/]"
    if not section["fits"]:
        verdict = f"[bold red]does not fit[/], {size_text(peak - limit)} over"
    text = (
        f"{verdict}: {size_text(peak)} of {size_text(limit)} per core, {share_text(peak / limit)}"
    )
    least = min(_SHOWN * peak, last_digit(peak))
    parts = {n: size for n, size in section["categories"].items() if size >= least}
    sizes = {name: size_text(size) for name, size in parts.items()}
    yield "memory", Text.from_markup(text)
    yield "", partial(bar_to_limit, parts, limit)
    yield "", legend(sizes)
    if host := section.get("host"):
        kept, limit = host["bytes"], host["limit_bytes"]
        text = f"and {size_text(kept)} of {size_text(limit)} host memory per instance,"
        yield "", [f"{text} {share_text(kept / limit)}"]


def auto(report: Report) -> Said:
    """What was chosen for keys that are left to the memory."""
    section = decided(report)
    if section is None:
        return
    yield "auto", auto_text(section, report["memory"]["limit_bytes"])


def timing(report: Report) -> Said:
    """Step time with its band, and where it goes in the stage that finishes last."""
    section = report["timing"]
    low, high = section["band_s"]
    step = result_text(report["inference"]) if "inference" in report else "per step"
    text = (
        f"{seconds_text(section['step_time_s'])} {step} ({section['profile']}),"
        f" band {seconds_text(low)} .. {seconds_text(high)}"
    )
    total = section["step_time_ps"]
    parts = {n: float(ps) for n, ps in section["breakdown_ps"].items() if ps >= _SHOWN * total}
    shares = {name: share_text(ps, total, digits=1) for name, ps in parts.items()}
    told, stage = legend(shares), last_stage(section)
    if stage is not None:
        told.append(Text(f"(stage {stage}, the last to finish)"))
    yield "time", text
    yield "", partial(bar, parts)
    yield "", told


def rates(report: Report) -> Said:
    """Utilisation, with its denominator and what it counts of attention, and tokens; beside it the
    best that is published."""
    if "inference" in report:
        yield "rates", rates_text(report)
        return
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
    yield "rates", text
    if "published" not in section:  # of an older release
        return
    best, machine = section["published"], report["job"]["cluster"]["target"]
    if best is None:
        yield "", f"none published of {_NOBODY[section['attention']]} on {machine}"
    else:
        yield "", f"best published: {published_text(best)}"


_NOBODY = {
    "causal": "causal attention",
    "full": "attention in full",
    "none": "models without attention",
}


def cost(report: Report) -> Said:
    """Dollars at the price that was asked for, with its region and its day, where there is one."""
    section, price = report["cost"], report.get("price")
    if section["usd_per_hour"] is None:
        yield "cost", missing_text(price)
        return
    tokens = f"{counted(report)}s"
    if "inference" in report:
        tokens = tokens_text(report["inference"])
    text = (
        f"{usd_text(section['usd_per_step'])} per step,"
        f" {usd_text(section['usd_per_1e6_tokens'])} per million {tokens},"
        f" {list_text(price)} ({usd_text(section['usd_per_hour'])} per hour)"
    )
    yield "cost", text


def goal(report: Report) -> Said:
    """How long and for how much what is to be trained takes, and what would have to change."""
    if "goal" not in report:
        return
    text, needs = told(report)
    yield "goal", text
    if needs:
        yield "it needs", needs


def limited_by(report: Report) -> Said:
    """The bottleneck in a sentence."""
    yield "limited by", report["bottleneck"]["text"]


def confidence(report: Report) -> Said:
    """How far the answer can be trusted, and why no further."""
    section, assumed = report["timing"], len(report["limits"]["assumed"])
    text = (
        f"{section['confidence']}: {section['confidence_why']}; {assumed} figures assumed,"
        " docs/model.md"
    )
    yield "confidence", text


def goodput(report: Report) -> Said:
    """What failures and checkpoints leave of training."""
    if "goodput" not in report:
        return
    section = report["goodput"]
    share = share_text(section["goodput"], digits=2)
    text = (
        f"{share}: {seconds_text(section['checkpoint_s'])} to save every"
        f" {section['interval_steps']:,} steps, a failure every {section['mtbf_s'] / 3600:,.1f} h"
    )
    yield "goodput", text


def faults(report: Report) -> Said:
    """What the faults of the cluster cost."""
    if "faults" not in report:
        return
    found = report["faults"]
    healthy = seconds_text(found["healthy_step_time_ps"] / PS_PER_S)
    text = f"{found['slowdown']:.3f} times the step of a healthy cluster, {healthy}"
    yield "faults", text


def stages(report: Report) -> Said:
    """Layers, bubble and memory of every pipeline stage, if there are several; equal neighbours
    once."""
    per_stage, peaks = report["timing"]["per_stage"], report["memory"]["per_stage"]
    pipeline = report["pipeline"]
    if len(per_stage) == 1:
        return
    total = report["timing"]["step_time_ps"]
    texts = [
        f"{'+'.join(map(str, has['layers']))} layers, bubble"
        f" {share_text(time['breakdown_ps']['bubble'], total, 1)}, {size_text(own['peak_bytes'])}"
        for time, own, has in zip(per_stage, peaks, pipeline["stages"], strict=True)
    ]
    batches = micro_batches_text(pipeline["num_microbatches"])
    yield "pipeline", f"{len(texts)} stages, {batches}, {pipeline['schedule']}"
    parts, first = [], 0
    for text, same in groupby(texts):
        last = first + len(list(same)) - 1
        parts.append(f"{first}: {text}" if first == last else f"{first}-{last}: {text}")
        first = last + 1
    yield "", parts


def stored(report: Report) -> Said:
    """That the answer is a stored one, how old it is and the command that asks anew."""
    return _stored(report, 1, 1, "answer", _stored_s(report))


def _stored_s(report: Report) -> float:
    """When a stored answer was stored, the older of its two parts; 0 of one that was computed."""
    stored_s = report["provenance"].get("stored_s", 0.0)
    tried_s = report.get("whatif", {}).get("stored_s", 0.0)
    return oldest((stored_s, tried_s)) if stored_s else 0.0


def stored_units(report: Report) -> Said:
    """The same of an answer that was made of stored units."""
    if not report["provenance"].get("stored_s"):
        times = [row["stored_s"] for row in report["units"] if row.get("stored_s")]
        yield from _stored(report, len(times), len(report["units"]), TASKS, oldest(times))


def _stored(report: Report, count: int, total: int, what: str, since_s: float) -> Said:
    again = report["provenance"].get("again", AGAIN)
    if text := counted_text(count, total, what, since_s, again):
        yield "stored", text


def findings(report: Report) -> Said:
    """Findings, errors first, and what to do about those of one kind; refusals are a verdict."""
    rows = [row for row in report["findings"] if row["code"] not in VENDOR_LIMITS]
    rows.sort(key=lambda row: row["severity"] != "error")
    for (severity, code, hint), same in groupby(rows, key=itemgetter("severity", "code", "hint")):
        told = dict.fromkeys(f"{row['message']}{place_text(row)}" for row in same)
        for n, message in enumerate(told):
            yield "" if n else severity, f"{code}: {message}"
        if hint:
            yield "", hint


def verdict(report: Report) -> Said:
    """What decides; nothing where nothing does."""
    for n, one in enumerate(verdicts(report)):
        yield "" if n else "verdict", Text(one.text, "bold red")
