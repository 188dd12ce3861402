"""Predicted against published collective times of trn1, row by row.

    python benchmarks/collectives_vs_published.py COLLECTIVES.csv

The file has the columns group, op, ranks, nodes, instance, size_bytes, time_us. Rows whose instance
is not trn1 are left out. Nothing is fitted here; errors are predicted / published - 1.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from pathlib import Path

from collectives.cost import CollectiveTime, collective_time
from collectives.ops import CollectiveKind, ReplicaGroups
from compiler.target import load_target
from sim_cluster.collective_costs import collective_costs
from sim_cluster.network import cluster_topology
from sim_cluster.profiles import PROFILES

HEADER = "group             op           ranks       bytes  published predicted    error  how (us)"
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "uint8": 1}


def predict(row: dict[str, str], profile: str) -> CollectiveTime:
    """The model's time of one row: ranks 0, 1, ... of each instance, evenly."""
    nodes, ranks = int(row["nodes"]), int(row["ranks"])
    target = load_target("trn1.32xlarge")
    topology = cluster_topology(target, nodes)
    first = range(ranks // nodes)
    group = tuple(node * topology.ranks_per_instance + r for node in range(nodes) for r in first)
    return collective_time(
        CollectiveKind(row["op"]),
        topology,
        ReplicaGroups((group,)),
        int(row["size_bytes"]),
        ELEMENT_BYTES.get(row["dtype"], 4),
        collective_costs(target, profile),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path, help="published rows")
    parser.add_argument("--profile", choices=sorted(PROFILES), default="nominal")
    args = parser.parse_args()
    with args.csv.open(newline="") as handle:
        rows = [r for r in csv.DictReader(handle) if "trn1" in r["instance"]]
    print(HEADER)
    errors: dict[str, list[float]] = {}
    for row in rows:
        time = predict(row, args.profile)
        published, predicted = float(row["time_us"]), time.total_ps / 1e6
        error = predicted / published - 1
        errors.setdefault(row["group"], []).append(error)
        what = f"{row['group']:18}{row['op']:12}{row['ranks']:>6}{row['size_bytes']:>12}"
        figures = f"{published:>10.1f}{predicted:>10.1f}{error:>+9.1%}"
        print(f"{what}{figures}  {time.algorithm}, {time.bound}")
    for group, found in errors.items():
        middle, worst = statistics.median(map(abs, found)), max(map(abs, found))
        print(f"{group}: median error {middle:.1%}, worst {worst:.1%}, rows {len(found)}")


if __name__ == "__main__":
    main()
