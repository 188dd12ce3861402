"""Costs and machines the network tests share, and machines of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwright.collectives.topology import Topology
from shardwright.compiler.machine.network import cluster_topology
from shardwright.compiler.machine.target import load_target
from shardwright.sim_cluster.network.collective_costs import collective_costs
from shardwright.sim_cluster.profiles import PROFILES as MACHINE_PROFILES

FIRST = load_target("trn1n.32xlarge")
PROFILES = {name: collective_costs(FIRST, name) for name in MACHINE_PROFILES}
CONSERVATIVE, NOMINAL, PEAK = (PROFILES[n] for n in ("conservative", "nominal", "peak"))


def machine(name: str, instances: int = 1) -> Topology:
    """The topology of a target, wires included."""
    return cluster_topology(load_target(name), instances)


def wiring(topology: Topology) -> str:
    """What a topology is made of, in one line."""
    efa = int(topology.bytes_per_s[topology.is_efa].sum()) // 2
    tail = f", EFA {efa / 1e9:g} GB/s each" if efa else ""
    return (
        f"{topology.name}: {topology.num_instances} x {topology.num_chips} chips x"
        f" {topology.ranks_per_chip} ranks, {(~topology.is_efa).sum()} directed links{tail}"
    )


def machine_file(folder: Path, base: str = "trn1n.32xlarge", **facts: Any) -> str:
    """The path of a machine that differs from `base` in `facts` (docs/network.md)."""
    path = folder / "machine.json"
    path.write_text(json.dumps({"base": base, "facts": facts}))
    return str(path)
