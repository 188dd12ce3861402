"""Weak and strong scaling of Llama-2 7B and 70B with FSDP from 1 to 512 instances: writes
docs/scaling.md and its plots.

    python benchmarks/scaling.py [--cache DIR] [--rows FILE] [--modes weak strong]

Every point is a whole plan: captured, partitioned, compiled, linked and timed under all profiles on
trn1n.32xlarge; the same programs are then timed on trn1.32xlarge, whose cores are the same.
Finished points are kept in `--rows`, so that an interrupted run goes on. Wants the extra `plot`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from compiler.target import PS_PER_S, load_target
from orchestrator.build import Stages, build
from orchestrator.config import load
from orchestrator.job import step_of, unit_service
from orchestrator.report import base_report
from sim_cluster.step_time import Timings, timed

DOCS = Path(__file__).resolve().parent.parent / "docs"
MODELS = ("llama2-7b", "llama2-70b")
MODES = ("weak", "strong")
ENDS = ("conservative", "peak")
INSTANCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MOST_SHARDS = 512  # ranks that share a copy of the state; more ranks hold more copies (HSDP)
STRONG_BATCH = 2048  # samples per step, however many instances
CORES = 32
OTHER = "trn1.32xlarge"
EQUAL = 1e-5  # steps that differ by less are the same: a few microseconds
HEAD = """# Scaling

Weak and strong scaling of Llama-2 7B and 70B with FSDP, sequences of 4096 tokens and full
recomputation, from 1 to 512 instances of trn1n.32xlarge, and of the same programs on trn1.32xlarge.
Written by `benchmarks/scaling.py`; every point is a whole plan (captured, partitioned, compiled,
linked, timed). All of it is **extrapolated**: no published run is FSDP. Steps are nominal, with the
band from `peak` to `conservative`.

- State is shared by up to 512 ranks; more ranks hold more copies of it (`dp_replicate`).
- *Weak*: one sample per rank. *Strong*: 2048 samples per step; up to 64 instances fewer ranks do
  more micro-batches, beyond that `tp` grows with the instances.
- *Efficiency* is tokens per second and instance against the smallest number of instances whose
  memory suffices. *Exposed* is the part of the step that waits for collectives.
- Rows whose state does not fit the 16 GiB of a core are timed all the same and say so.
"""


@dataclass(frozen=True)
class Point:
    """One number of instances of a curve."""

    model: str
    mode: str
    instances: int

    @property
    def mesh(self) -> dict[str, int]:
        """Mesh axes above 1."""
        ranks, tp = CORES * self.instances, 1
        if self.mode == "strong":
            tp = max(1, ranks // STRONG_BATCH)
        shards = min(ranks // tp, MOST_SHARDS)
        sizes = {"dp_replicate": ranks // tp // shards, "dp_shard": shards, "tp": tp}
        return {axis: size for axis, size in sizes.items() if size > 1}

    def settings(self, cache: str) -> list[str]:
        """The job as overrides."""
        batch = [f"strategy.global_batch={STRONG_BATCH}"] if self.mode == "strong" else []
        return [
            f"model.preset={self.model}",
            f"cluster.instances={self.instances}",
            f"cache.dir={cache}",
            *(f"mesh.{axis}={size}" for axis, size in self.mesh.items()),
            *batch,
        ]


@dataclass(frozen=True)
class Row:
    """What came out of a point: seconds of a step per profile on trn1n and on trn1, and the rest of
    the nominal answer."""

    point: Point
    steps: Mapping[str, float]
    other: Mapping[str, float]
    tokens: int
    exposed: float
    mfu: float
    peak_gib: float
    fits: bool

    def tokens_per_s(self, seconds: float | None = None) -> float:
        """Tokens per second with a step time, the nominal one unless given."""
        return self.tokens / (seconds or self.steps["nominal"])


def row_of(point: Point, cache: str) -> Row:
    """Plan a point on both machines."""
    job, stages = load(None, point.settings(cache)), Stages()
    with unit_service(job, None) as service:
        built = build(job, service, stages)
        step = step_of(built, built.programs)
        timings = timed(step, "nominal")
        report = base_report(built, timings, service, stages, {})
    timing, memory = report["timing"], report["memory"]
    exposed = sum(v for k, v in timing["breakdown_ps"].items() if k.startswith("collective"))
    return Row(
        point,
        _seconds(timings),
        _seconds(timed(replace(step, target=load_target(OTHER)), "nominal")),
        built.layout.global_batch * built.tokens_per_sample,
        exposed / timing["step_time_ps"],
        timing["mfu"],
        memory["peak_bytes"] / 2**30,
        memory["fits"],
    )


def _seconds(timings: Timings) -> dict[str, float]:
    return {name: t.step_time_ps / PS_PER_S for name, t in timings.band.items()}


def read_rows(path: Path) -> dict[Point, Row]:
    """Rows of earlier runs."""
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = [Row(**{**data, "point": Point(**data["point"])}) for data in found]
    return {row.point: row for row in rows}


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The rows of one curve."""
    yield (
        "| instances | mesh | micro-batches | step s | band s | trn1 step s | tokens/s |"
        " efficiency | exposed | MFU | peak GiB |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    first = next((r for r in rows if r.fits), rows[0])
    each = first.tokens_per_s() / first.point.instances
    for row in rows:
        yield f"| {' | '.join(_cells(row, each))} |"


def _cells(row: Row, each: float) -> list[str]:
    point, steps = row.point, row.steps
    ranks = CORES * point.instances // point.mesh.get("tp", 1)
    batches = STRONG_BATCH // ranks if point.mode == "strong" else 1
    return [
        str(point.instances),
        ", ".join(f"{axis} {size}" for axis, size in point.mesh.items()),
        str(batches),
        f"{steps['nominal']:.3f}",
        f"{min(steps.values()):.3f} .. {max(steps.values()):.3f}",
        f"{row.other['nominal']:.3f}",
        f"{row.tokens_per_s():,.0f}",
        f"{row.tokens_per_s() / point.instances / each:.1%}",
        f"{row.exposed:.1%}",
        f"{row.mfu:.1%}",
        f"{row.peak_gib:.2f}" + ("" if row.fits else " (does not fit)"),
    ]


def plot(mode: str, curves: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Tokens per second of both models on both machines, with the band of trn1n, as SVG."""
    import matplotlib.pyplot as plt

    # The same rows give the same file: no date, and ids from a fixed salt.
    plt.rcParams["svg.hashsalt"] = "shardwright"
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for model, rows in curves.items():
        xs = [row.point.instances for row in rows]
        (line,) = axes.plot(xs, [r.tokens_per_s() for r in rows], "o-", label=f"{model}, trn1n")
        low, high = ([r.tokens_per_s(r.steps[end]) for r in rows] for end in ENDS)
        axes.fill_between(xs, low, high, color=line.get_color(), alpha=0.15)
        trn1 = [r.tokens_per_s(r.other["nominal"]) for r in rows]
        axes.plot(xs, trn1, "x", color="black", label=f"{model}, trn1")
        linear = [rows[0].tokens_per_s() * x / xs[0] for x in xs]
        axes.plot(xs, linear, "--", color=line.get_color(), label=f"{model}, linear")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.set(xlabel="instances of 32 cores", ylabel="tokens per second")
    axes.set_title(f"FSDP, {mode} scaling (band: conservative to peak)")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def verdict(rows: Sequence[Row]) -> str:
    """trn1n against trn1, under every profile."""
    ratios = {
        (row.point, name): row.other[name] / row.steps[name] for row in rows for name in row.steps
    }
    text = (
        f"In {len(ratios)} comparisons (points times profiles) trn1 takes"
        f" {min(ratios.values()):.4f} to {max(ratios.values()):.4f} times the step of trn1n."
    )
    slower = {key: ratio for key, ratio in ratios.items() if ratio < 1 - EQUAL}
    if not slower:
        return text + f" trn1n is nowhere slower by more than {EQUAL:.3%}."
    shown = (
        f"{point.model} {point.mode} {point.instances} {name} {1 / ratio - 1:.2%}"
        for (point, name), ratio in slower.items()
    )
    return f"{text} trn1n is slower by more than {EQUAL:.3%} in {len(slower)}: {', '.join(shown)}."


def write_page(rows: Mapping[Point, Row]) -> None:
    """The page and its plots, of the rows there are."""
    parts = [HEAD]
    for mode in MODES:
        own = sorted((r for p, r in rows.items() if p.mode == mode), key=_instances)
        curves = {model: [r for r in own if r.point.model == model] for model in MODELS}
        curves = {model: found for model, found in curves.items() if found}
        if not curves:
            continue
        plot(mode, curves, DOCS / f"scaling-{mode}.svg")
        parts.append(f"\n## {mode.capitalize()} scaling\n![{mode} scaling](scaling-{mode}.svg)\n")
        for model, found in curves.items():
            parts += [f"\n### {model}\n" + "\n".join(table(found)) + "\n"]
    parts.append(f"\n## trn1n against trn1\n{verdict(list(rows.values()))}\n")
    (DOCS / "scaling.md").write_text("".join(parts))


def _instances(row: Row) -> int:
    return row.point.instances


def main() -> None:
    """Plan what `--rows` does not hold yet, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", default="", help="unit cache")
    parser.add_argument("--rows", type=Path, default=Path("scaling-rows.jsonl"))
    parser.add_argument("--modes", nargs="*", default=MODES)
    args = parser.parse_args()
    rows = read_rows(args.rows)
    points = [Point(m, mode, n) for mode in args.modes for n in INSTANCES for m in MODELS]
    for point in (p for p in points if p not in rows):
        rows[point] = row = row_of(point, args.cache)
        with args.rows.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        print(point.mode, point.model, point.instances, f"{row.steps['nominal']:.3f}", flush=True)
    write_page(rows)


if __name__ == "__main__":
    main()
