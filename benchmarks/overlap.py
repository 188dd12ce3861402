"""What the overlap knobs do to a step: writes docs/overlap.md.

    python benchmarks/overlap.py [--cache DIR]

Llama-2-70B, and 7B for small weights, on 16 trn1n.32xlarge (512 cores), one micro-batch of one
sample per data-parallel rank: each row is a whole plan (compiled programs, simulated step), with
one knob changed after another.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shardwright.orchestrator.config.config import load
from shardwright.orchestrator.road.plan_cache import plan

PAGE = Path(__file__).resolve().parent.parent / "docs" / "overlap.md"
MARK = "<!-- below: benchmarks/overlap.py -->"
PS, GIB = 10**12, 2**30
EARLY, LATE = "early_all_gather_shift", "late_reduce_scatter_shift"
BUCKET, TOKENS, STREAMS = "bucket_mb", "dependency_tokens", "cc_streams"
SHIFTS = [{}, {EARLY: 1}, {EARLY: 1, LATE: 1}]
BOTH = {EARLY: 1, LATE: 1}


@dataclass(frozen=True)
class Case:
    """A job and the knobs that are tried on it."""

    title: str
    job: Sequence[str]
    knobs: Sequence[dict[str, object]]


CASES = (
    Case(
        "fsdp over 512 cores, 4096 positions",
        ("strategy.name=fsdp", "mesh.dp_shard=512"),
        SHIFTS,
    ),
    Case(
        "fsdp over 512 cores, 1024 positions",
        ("strategy.name=fsdp", "mesh.dp_shard=512", "model.seq_len=1024"),
        [*SHIFTS, {BUCKET: 256}, {EARLY: 1, BUCKET: 32}, {EARLY: 1, BUCKET: 256}],
    ),
    Case(
        "fsdp over 64 times tensor parallel 8, 4096 positions",
        ("strategy.name=fsdp", "mesh.dp_shard=64", "mesh.tp=8"),
        [
            {},
            {TOKENS: "true"},
            BOTH,
            {**BOTH, TOKENS: "true"},
            {**BOTH, TOKENS: "true", BUCKET: 64},
            {**BOTH, STREAMS: 2},
            {**BOTH, STREAMS: 2, TOKENS: "true"},
            {**BOTH, STREAMS: 2, "collective_packet_bytes": "65536,4096"},
        ],
    ),
    Case(
        "llama2-7b, fsdp over 64 times tensor parallel 8, 512 positions",
        (
            "model.preset=llama2-7b",
            "strategy.name=fsdp",
            "mesh.dp_shard=64",
            "mesh.tp=8",
            "model.seq_len=512",
        ),
        [{}, {BUCKET: 50}, {**BOTH, STREAMS: 2}, {**BOTH, STREAMS: 2, BUCKET: 50}],
    ),
)


def rows(case: Case, cache: str) -> Iterator[str]:
    """The table of a case."""
    yield f"\n### {case.title}\n"
    yield (
        "| knobs | step s | compute s | memory s | exposed collectives s | of which |"
        " hidden s | gathered GiB | peak GiB |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for knobs in case.knobs:
        settings = [f"strategy.{k}={v}" for k, v in knobs.items()]
        common = ("model.preset=llama2-70b", "cluster.instances=16", f"cache.dir={cache}")
        report = plan(load(None, [*common, *case.job, *settings]))
        yield _row(", ".join(f"`{k} = {v}`" for k, v in knobs.items()) or "none", report)


def _row(name: str, report: dict[str, Any]) -> str:
    timing, memory = report["timing"], report["memory"]
    spent = {k: v / PS for k, v in timing["breakdown_ps"].items()}
    exposed = {k.removeprefix("collective_"): v for k, v in spent.items() if "collective_" in k}
    parts = ", ".join(f"{k} {v:.3f}" for k, v in exposed.items() if v >= 0.0005)
    peak = f"{memory['peak_bytes'] / GIB:.2f}" + ("" if memory["fits"] else " (does not fit)")
    cells = (
        name,
        f"{timing['step_time_s']:.3f}",
        f"{spent['compute']:.3f}",
        f"{spent['memory']:.3f}",
        f"{sum(exposed.values()):.3f}",
        parts,
        f"{sum(timing['hidden_ps'].values()) / PS:.3f}",
        f"{memory['categories']['gathered'] / GIB:.2f}",
        peak,
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Rewrite the tables of the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", default="")
    cache = parser.parse_args().cache
    head = PAGE.read_text().partition(MARK)[0]
    lines: list[str] = []
    for case in CASES:
        lines += rows(case, cache)
        PAGE.write_text(head + MARK + "\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
