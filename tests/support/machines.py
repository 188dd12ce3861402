"""Costs and machines the network tests share."""

from __future__ import annotations

from shardwright.collectives.topology import Topology
from shardwright.compiler.target import load_target
from shardwright.sim_cluster.collective_costs import collective_costs
from shardwright.sim_cluster.network import cluster_topology
from shardwright.sim_cluster.profiles import PROFILES as MACHINE_PROFILES

FIRST = load_target("trn1n.32xlarge")
PROFILES = {name: collective_costs(FIRST, name) for name in MACHINE_PROFILES}
CONSERVATIVE, NOMINAL, PEAK = (PROFILES[n] for n in ("conservative", "nominal", "peak"))


def machine(name: str, instances: int = 1) -> Topology:
    """The topology of a target, wires included."""
    return cluster_topology(load_target(name), instances)
