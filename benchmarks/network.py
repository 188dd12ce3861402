"""Write the generated part of docs/network.md: constants, thresholds, errors per published row.

    python benchmarks/network.py COLLECTIVES.csv [--fit]

The file has the columns of orchestrator/validation/published_collectives.py. Nothing is changed
by `--fit`: it prints what the fitted share would be for every group of rows, against the one in
use.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from shardwright.collectives.algorithms.recipe import Choice
from shardwright.collectives.groups.layout import place
from shardwright.collectives.ops import CollectiveKind, ReplicaGroups
from shardwright.collectives.timing.times import (
    COPY_TOUCHES,
    REDUCE_TOUCHES,
    closed_time,
)
from shardwright.collectives.topology import torus
from shardwright.compiler.machine.target import Target, load_target, logical, target_names
from shardwright.orchestrator.validation.published_collectives import CollectivePrediction
from shardwright.sim_cluster.calibration import constants
from shardwright.sim_cluster.network.collective_costs import collective_costs
from shardwright.sim_cluster.network.network import cluster_topology
from shardwright.sim_cluster.network.what_if import WhatIf
from shardwright.sim_cluster.profiles import PROFILES
from tests.support.collective_schedules import schedule_time
from tests.support.published_rows import predict_file

PAGE = Path(__file__).resolve().parent.parent / "docs" / "network.md"
MARK = "<!-- below: benchmarks/network.py -->"
LARGE, SMALL = 1 << 20, 1 << 16
MACHINES = ("trn1n.32xlarge", "trn2.48xlarge", "trn3-gen1-ultraserver")


def size_text(count: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power and count % (1 << power) == 0:
            return f"{count >> power} {unit}"
    return f"{count} B"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def machines() -> Iterator[str]:
    """Every machine with its chips, wires and EFA devices."""
    rows = []
    for name in target_names():
        target = load_target(name)
        rates = " / ".join(f"{rate / 1e9:g}" for rate in target.link_bytes_per_s)
        shape = " x ".join(map(str, target.shape))
        ranks = " or ".join(str(logical(target, n).cores) for n in target.allowed_lnc)
        efa = (
            f"{target.efa_devices} x {target.efa_bytes_per_s / max(1, target.efa_devices) / 1e9:g}"
        )
        wires = "none" if target.topology == "none" else f"{target.topology} {shape}"
        rows.append((f"`{name}`", wires, rates, ranks, efa if target.efa_devices else "none"))
    head = ("machine", "chips", "link GB/s, one way", "ranks", "EFA devices x GB/s")
    yield from table(head, rows)


def settings() -> Iterator[str]:
    """Constants and thresholds per generation and profile."""
    columns: list[tuple[str, Target, str]] = []
    for name in MACHINES:
        target = logical(load_target(name))
        columns += [(f"{name.partition('.')[0]} {p}", target, p) for p in PROFILES]
    costs = [collective_costs(target, profile) for _, target, profile in columns]

    def row(name: str, cells: Sequence[object]) -> tuple[str, ...]:
        return (name, *map(str, cells))

    rows = [
        row("launch, us", [c.launch_ps / 1e6 for c in costs]),
        row("step inside an instance, us", [c.intra_hop_ps / 1e6 for c in costs]),
        row("each link crossed, us", [t.collectives.wire_ps / 1e6 for _, t, _ in columns]),
        row("step across instances, us", [c.inter_hop_ps / 1e6 for c in costs]),
        row("copy path of a rank, GB/s", [round(c.rank_copy_bytes_per_s / 1e9, 1) for c in costs]),
        row("reduce path, GB/s", [round(c.rank_reduce_bytes_per_s / 1e9, 1) for c in costs]),
        row("share of EFA rate", [c.efa_efficiency for c in costs]),
        row("`mesh`", [c.mesh for c in costs]),
        row("`mesh_max_bytes`", [size_text(c.mesh_max_bytes) for c in costs]),
        row("`rdh_max_bytes`", [size_text(c.rdh_max_bytes) for c in costs]),
        row("`kangaring`", [c.kangaring for c in costs]),
        row("`flat_ring_min_bytes`", [size_text(c.flat_ring_min_bytes) for c in costs]),
        row("`inter_recursive`", [c.inter_recursive for c in costs]),
        row("`inter_mesh_max_instances`", [c.inter_mesh_max_instances for c in costs]),
    ]
    yield from table(("", *(name for name, _, _ in columns)), rows)


def summary(found: Sequence[CollectivePrediction]) -> Iterator[str]:
    """The two bars, and the median of every group."""
    scored = [(p.found, p.error) for p in found if p.found and p.error is not None]
    large = [abs(e) for r, e in scored if r.size_bytes >= LARGE]
    small = [(r, max(1 + e, 1 / (1 + e))) for r, e in scored if r.size_bytes < SMALL]
    inside = sum(factor <= 1.5 for _, factor in small)
    middle = statistics.median(large)
    yield f"- 1 MiB and more: median error {middle:.1%} of {len(large)} rows (bar 15 %)."
    yield (
        f"- below 64 KiB: {inside} of {len(small)} rows within a factor of 1.5, median factor"
        f" {statistics.median(f for _, f in small):.2f}; outside: "
        + (", ".join(r.id for r, f in small if f > 1.5) or "none")
        + "."
    )
    yield f"- {len(found) - len(scored)} rows could not be simulated.\n"
    groups: dict[str, list[float]] = {}
    for row, error in scored:
        groups.setdefault(row.group, []).append(error)
    rows = [
        (
            name,
            str(len(e)),
            f"{statistics.median(map(abs, e)):.1%}",
            f"{min(e):+.1%}",
            f"{max(e):+.1%}",
        )
        for name, e in groups.items()
    ]
    yield from table(("group", "rows", "median error", "lowest", "highest"), rows)


def signed(*errors: float) -> list[str]:
    return [f"{error:+.1%}" for error in errors]


def row_errors(found: Sequence[CollectivePrediction]) -> Iterator[str]:
    """Every row in order; those without a prediction with their reason."""
    rows = []
    for p in found:
        if p.found is None or p.time is None or p.error is None:
            rows.append((p.row.get("id", ""), p.row.get("group", ""), "", "", "", "", p.reason))
            continue
        r = p.found
        who = f"{r.kind.value}, {r.ranks} ranks" + (
            f", {r.instances} nodes" if r.instances > 1 else ""
        )
        where = r.target + (" (assumed)" if r.assumed else "")
        how = f"{p.time.algorithm}, {p.time.bound}"
        times = (f"{r.time_us:.6g}", f"{p.time.total_ps / 1e6:.6g}", f"{p.error:+.1%}")
        rows.append((r.id, f"{who}, {where}", size_text(r.size_bytes), *times, how))
    head = ("row", "what", "size", "published us", "predicted us", "error", "algorithm, limit")
    yield from table(head, rows)


def fitted_share(p: CollectivePrediction) -> float | None:
    """The share of the DMA rate at which a row is predicted exactly; None where it decides
    nothing.
    """
    if p.found is None or p.time is None or p.time.bound != "rank":
        return None
    r, target = p.found, logical(load_target(p.found.target))
    dma = target.lnc * target.core.dma_engines * target.core.dma_engine_bytes_per_s

    def time_us(share: float) -> float:
        rates = {
            "rank_copy_bytes_per_s": round(dma * share),
            "rank_reduce_bytes_per_s": round(dma * share * COPY_TOUCHES / REDUCE_TOUCHES),
        }
        what_if = WhatIf(
            target=target, kind=r.kind, ranks=r.ranks, instances=r.instances, runtime=r.runtime
        )
        return replace(what_if, settings=rates).time(r.size_bytes, r.element_bytes).total_ps / 1e6

    low, high = 0.01, 2.0
    if not time_us(high) < r.time_us < time_us(low):
        return None
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if time_us(middle) > r.time_us else (low, middle)
    return high


def fit(found: Sequence[CollectivePrediction]) -> Iterator[str]:
    """The fitted share by group, from rows of 4 MiB and more that the rank's own path limits."""
    used = constants()["collective_touch"]
    low, high = used.band
    yield f"in use: {used.value} (band {low} to {high}), fitted on {used.fitted_on}"
    groups: dict[str, list[float]] = {}
    for p in found:
        share = fitted_share(p) if p.found and p.found.size_bytes >= 4 << 20 else None
        if p.found and share:
            groups.setdefault(p.found.group, []).append(share)
    for name, shares in groups.items():
        middle = statistics.median(shares)
        yield f"{name}: {middle:.3f} ({min(shares):.3f} to {max(shares):.3f}, {len(shares)} rows)"


def host_times() -> Iterator[str]:
    """How long the model itself takes: a choice timed in closed form, a schedule link by link."""
    many = cluster_topology(load_target("trn1n.32xlarge"), 128)
    tiers = torus(
        4,
        4,
        ranks_per_chip=16,
        link_bytes_per_s=128 * 10**9,
        instances=16,
        efa_bytes_per_s=400 * 10**9,
        efa_devices=16,
    )
    costs = collective_costs(load_target("trn1n.32xlarge"), "nominal")
    cases = (
        ("4096 ranks, flat ring of 128 trn1n", many, ("flat_ring",), closed_time),
        (
            "4096 ranks, 16 x 16 x 16 tiers",
            tiers,
            ("hierarchical", "rdh", "recursive"),
            closed_time,
        ),
        ("256 ranks, flat ring, link by link", None, ("flat_ring",), schedule_time),
        (
            "256 ranks, two rings, link by link",
            None,
            ("hierarchical", "ring", "ring"),
            schedule_time,
        ),
    )
    rows = []
    for name, given, (algorithm, *levels), timer in cases:
        topology = given or cluster_topology(load_target("trn1n.32xlarge"), 8)
        groups = ReplicaGroups((tuple(range(topology.num_ranks)),))
        began = time.process_time()
        layout = place(topology, groups)
        choice = Choice(CollectiveKind.ALL_REDUCE, layout, algorithm, "", *levels)
        found = timer(choice, 1 << 20, 4, costs)
        seconds = time.process_time() - began
        equal = found == closed_time(choice, 1 << 20, 4, costs)
        predicted = f"{found.total_ps / 1e6:.1f}"
        rows.append((name, f"{seconds:.3f}", predicted, "yes" if equal else "NO"))
    head = ("1 MiB all-reduce", "host seconds, one CPU", "predicted us", "equals the closed form")
    yield from table(head, rows)


def main() -> None:
    """Rewrite the tables of the page, or print the fit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--fit", action="store_true")
    args = parser.parse_args()
    found = predict_file(args.csv)
    if args.fit:
        print("\n".join(fit(found)))
        return
    parts = (
        ("Machines", machines()),
        ("Constants and thresholds", settings()),
        ("Against published measurements", summary(found)),
        ("Row by row", row_errors(found)),
        ("Host time", host_times()),
    )
    text = "\n".join(f"\n## {title}\n\n" + "\n".join(lines) for title, lines in parts)
    PAGE.write_text(f"{PAGE.read_text().partition(MARK)[0]}{MARK}\n{text}\n")


if __name__ == "__main__":
    main()
