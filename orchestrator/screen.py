"""What a person sees at the end: one screen. All numbers come from the report; what is seen while a
job runs is `progress.py`'s."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from compiler.target import PS_PER_S
from sim_cluster.contention import COLLECTIVE_PACKET_BYTES, COMPUTE_PACKET_BYTES

GIB = 2**30
MIB = 2**20
KIB = 2**10
_UNITS_PER_LINE = 3
_CATEGORY_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "white")


def run_screen(report: dict[str, Any]) -> None:
    """The screen at the end of `run`."""
    console = Console(highlight=False)
    _headline(console, report)
    _units(console, report)
    _losses(console, report)
    _memory(console, report["memory"])
    _timing(console, report)
    _stages(console, report)
    _cannot_tell(console, report["limits"])
    _findings(console, report)
    files = report["provenance"]["files"]
    console.print(f"[bold]files[/]    bundle {files['bundle']}")
    console.print(f"         report {files['report']}   trace {files['trace']}")


def plan_screen(report: dict[str, Any]) -> None:
    """The screen of `plan`: at most 24 lines."""
    console = Console(highlight=False)
    _headline(console, report)
    _memory(console, report["memory"])
    _timing(console, report)
    _stages(console, report)
    stages = report["provenance"]["stages_s"]
    console.print(f"[bold]stages[/]   {sum(stages.values()):.1f} s of this machine")
    _indented(console, [f"{name} {seconds:.2f}" for name, seconds in stages.items()])
    _findings(console, report)


def _headline(console: Console, report: dict[str, Any]) -> None:
    job, graph = report["job"], report["graph"]
    mesh = ", ".join(f"{axis}={size}" for axis, size in report["mesh"].items())
    cluster = job["cluster"]
    console.rule(f"[bold]{graph['name']}[/]  {job['strategy']['name']}  {mesh}", align="left")
    console.print(
        f"[bold]job[/]      {count_text(graph['params'])} parameters, "
        f"{count_text(graph['flops_per_step'])}FLOP per step, {report['cores']} cores "
        f"({cluster['instances']} x {cluster['target']})"
    )
    _logical_cores(console, report)
    _placement(console, report["placement"])
    _streams(console, report)
    if report["context"]:
        console.print(f"[bold]context[/]  {report['context']}")
    compiler = job["compiler"]
    console.print(
        f"[bold]compiler[/] -O{compiler['optlevel']}, model type {compiler['model_type']}, "
        f"attention {compiler['attention']}"
    )


def _logical_cores(console: Console, report: dict[str, Any]) -> None:
    """One line, where a core is more than one physical core."""
    cores = report["logical_cores"]
    if cores["lnc"] == 1:
        return
    regions = cores["regions_cut"] + cores["regions_alone"]
    share = cores["alone_ps"] / (report["timing"]["step_time_ps"] or 1)
    note = "[bold red]hypothetical[/], " if cores["hypothetical"] else ""
    console.print(
        f"[bold]cores[/]    {note}LNC {cores['lnc']}: {cores['per_instance']} cores of"
        f" {size_text(cores['hbm_bytes'])} per instance; {cores['regions_alone']} of {regions}"
        f" regions on one physical core alone, {share:.0%} of the step"
    )


def _placement(console: Console, placement: dict[str, Any]) -> None:
    """One line, where a mesh has an axis to place."""
    if placement["axes"]:
        places = "; ".join(f"{axis} on {place}" for axis, place in placement["axes"].items())
        console.print(f"[bold]placed[/]   {placement['name']}: {places}")


def _streams(console: Console, report: dict[str, Any]) -> None:
    """A line per stream, where collectives run on several or packets are not the runtime's own."""
    rows = report["streams"]["streams"]
    chosen = report["streams"]["compute_packet_bytes"] != COMPUTE_PACKET_BYTES
    chosen |= any(row["packet_bytes"] != COLLECTIVE_PACKET_BYTES for row in rows)
    if len(rows) < 2 and not chosen:
        return
    compute = report["streams"]["compute_packet_bytes"] / KIB
    console.print(f"[bold]streams[/]  DMA packets of compute {compute:g} KiB")
    total = report["timing"]["step_time_ps"] or 1
    _indented(console, [_stream_text(row, total) for row in rows])


def _stream_text(row: dict[str, Any], total: int) -> str:
    kinds, packets = ", ".join(row["collectives"]), row["packet_bytes"] / KIB
    return f"{row['stream']}: {kinds}, packets {packets:g} KiB, busy {row['time_ps'] / total:.0%}"


def _units(console: Console, report: dict[str, Any]) -> None:
    rows = report["units"]
    computed = sum(1 for r in rows if r["cache"] == "miss")
    note = f"{computed} run, {len(rows) - computed} from the cache"
    if not computed:
        note = "nothing to compile, all from the cache"
    console.print(f"[bold]built[/]    {report['neffs']} NEFFs from {len(rows)} units: {note}")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    cells = [_unit_cells(row) for row in rows]
    for start in range(0, len(cells), _UNITS_PER_LINE):
        table.add_row(*(c for cell in cells[start : start + _UNITS_PER_LINE] for c in cell))
    console.print(table)


def _unit_cells(row: dict[str, Any]) -> tuple[str, str, str]:
    name = "partition" if row["kind"] == "partition" else row["name"]
    return name, f"[dim]{row['worker'].split(':')[0]}[/]", f"{row['seconds']:.2f}s "


def _losses(console: Console, report: dict[str, Any]) -> None:
    numerics = report["numerics"]
    losses = numerics["losses"]
    if len(losses) > 1:
        console.print(loss_plot(losses))
    worst = numerics["worst_param_error"]
    l0 = max(numerics["l0"].values(), default=0.0)
    console.print(
        f"[bold]values[/]   loss {losses[0]:.4f} -> {losses[-1]:.4f} in {numerics['steps']} steps"
    )
    console.print(
        f"         against the unsharded step: worst loss {numerics['worst_loss_error']:.1e}"
    )
    console.print(
        f"         worst leaf after one step {worst['error']:.1e} (bound {numerics['bound']:.0e}): "
        f"{worst['leaf'].rpartition('/')[2]}"
    )
    console.print(
        f"         instruction level (L0) against region level (L1): {l0:.1e} "
        f"(bound {numerics['bound']:.0e})"
    )


def loss_plot(losses: list[float], width: int = 76, height: int = 9) -> Text:
    """The loss curve as text."""
    import plotext

    plotext.clear_figure()
    plotext.plotsize(width, height)
    plotext.theme("clear")
    plotext.plot(list(range(1, len(losses) + 1)), losses, marker="braille")
    plotext.xlabel("step")
    plotext.ylabel("loss")
    return Text.from_ansi(str(plotext.build()))


def _memory(console: Console, memory: dict[str, Any]) -> None:
    limit, peak = memory["limit_bytes"], memory["peak_bytes"]
    verdict = "[green]fits[/]" if memory["fits"] else "[bold red]does not fit[/]"
    console.print(
        f"[bold]memory[/]   {verdict}: {size_text(peak)} of {size_text(limit)} per core "
        f"(reserve {size_text(memory['reserve_bytes'])})"
    )
    parts = [f"{k} {size_text(v)}" for k, v in memory["categories"].items() if v >= MIB / 100]
    _indented(console, parts)


def _timing(console: Console, report: dict[str, Any]) -> None:
    timing, cost = report["timing"], report["cost"]
    low, high = timing["band_s"]
    console.print(
        f"[bold]time[/]     {seconds_text(timing['step_time_s'])} per step ({timing['profile']}, "
        f"band {seconds_text(low)} .. {seconds_text(high)}, {timing['confidence']})"
    )
    console.print(breakdown_bar(timing["breakdown_ps"]))
    total = timing["step_time_ps"] or 1
    _indented(console, [f"{k} {v / total:.1%}" for k, v in timing["breakdown_ps"].items() if v])
    console.print(
        f"[bold]rates[/]    MFU {timing['mfu']:.2%}  HFU {timing['hfu']:.2%}  "
        f"{timing['tokens_per_s']:,.0f} tokens/s"
    )
    _limits(console, report)
    _goodput(console, report["goodput"])
    if "faults" in report:
        faults = report["faults"]
        console.print(
            f"[bold]faults[/]   {faults['slowdown']:.3f} times the step of a healthy cluster,"
            f" {seconds_text(faults['healthy_step_time_ps'] / PS_PER_S)}"
        )
    if cost["usd_per_hour"] is not None:
        console.print(
            f"[bold]cost[/]     ${cost['usd_per_step']:.6f} per step, "
            f"${cost['usd_per_1e6_tokens']:.4f} per million tokens, on demand"
        )


def _limits(console: Console, report: dict[str, Any]) -> None:
    """Why the answer is no more certain, and where it says what it cannot tell (`plan` has one line
    for it, `run` all)."""
    why, assumed = report["timing"]["confidence_why"], len(report["limits"]["assumed"])
    console.print(f"[bold]limits[/]   {why}; {assumed} figures assumed: docs/model.md")


def _cannot_tell(console: Console, limits: dict[str, Any]) -> None:
    """What the answer cannot tell, each in a few words."""
    console.print("[bold]what this cannot tell you[/] (report.json says more)")
    _indented(console, [f"{one['short']}," for one in limits["cannot_tell"]])


def _goodput(console: Console, goodput: dict[str, Any]) -> None:
    saved = seconds_text(goodput["checkpoint_s"])
    console.print(
        f"[bold]goodput[/]  {goodput['goodput']:.2%}: {saved} to save every"
        f" {goodput['interval_steps']} steps, a failure every {goodput['mtbf_s'] / 3600:,.1f} h"
    )


def _stages(console: Console, report: dict[str, Any]) -> None:
    """Layers, bubble and memory of every pipeline stage, if there are several; equal neighbours
    once.
    """
    timing, memory = report["timing"]["per_stage"], report["memory"]["per_stage"]
    pipeline = report["pipeline"]
    if len(timing) == 1:
        return
    total = report["timing"]["step_time_ps"] or 1
    texts = [
        f"{'+'.join(map(str, has['layers']))} layers, bubble"
        f" {time['breakdown_ps']['bubble'] / total:.1%}, {size_text(own['peak_bytes'])}"
        for time, own, has in zip(timing, memory, pipeline["stages"], strict=True)
    ]
    count, schedule = pipeline["num_microbatches"], pipeline["schedule"]
    batches = "1 micro-batch" if count == 1 else f"{count} micro-batches"
    console.print(f"[bold]pipeline[/] {len(texts)} stages, {batches}, {schedule}")
    parts, first = [], 0
    for text, same in groupby(texts):
        last = first + len(list(same)) - 1
        parts.append(f"{first}: {text}" if first == last else f"{first}-{last}: {text}")
        first = last + 1
    _indented(console, parts)


def _indented(console: Console, parts: list[str]) -> None:
    """Parts on as many indented lines as they need."""
    line = "        "
    for part in parts:
        if len(line) + len(part) + 2 > console.width:
            console.print(line)
            line = "        "
        line += f" {part} "
    console.print(line)


def breakdown_bar(breakdown: dict[str, int], width: int = 66) -> Text:
    """One bar whose pieces sum to the step."""
    bar = Text(" " * 9)
    total = sum(breakdown.values()) or 1
    drawn = 0
    passed = 0
    for index, (_, ps) in enumerate((k, v) for k, v in breakdown.items() if v):
        passed += ps
        cells = round(passed / total * width) - drawn
        bar.append("█" * cells, style=_CATEGORY_COLOURS[index % len(_CATEGORY_COLOURS)])
        drawn += cells
    return bar


def _findings(console: Console, report: dict[str, Any]) -> None:
    for finding in report["findings"][:3]:
        console.print(f"[yellow]{finding['severity']}[/] {finding['code']}: {finding['message']}")
        if finding["hint"]:
            console.print(f"         {finding['hint']}")
    if len(report["findings"]) > 3:
        console.print(f"         {len(report['findings']) - 3} more findings in report.json")


def count_text(number: float) -> str:
    """A count with a decimal prefix: 3.03 M, 201 T."""
    for exponent, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**exponent:
            return f"{number / 10**exponent:.3g} {prefix}"
    return f"{number:.3g} "


def size_text(num_bytes: float) -> str:
    """Bytes in binary units."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.2f} MiB"


def seconds_text(seconds: float) -> str:
    """Seconds in the unit that reads best."""
    if seconds >= 1:
        return f"{seconds:.3f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3f} ms"
    return f"{seconds * 1e6:.1f} us"
