"""What the time of a step rests on, and how far it moves when one of these figures is another.

Figures are those of the machine's own data files, of the calibration, and the share of EFA that
collectives reach; each has its status and source. Programs stay as they were compiled: a figure
that tile choices weigh is changed for the run only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardwright.collectives.costs import THRESHOLDS
from shardwright.compiler.machine.target import Fact, Target, altered, facts_of
from shardwright.sim_cluster.calibration import constants
from shardwright.sim_cluster.network.collective_costs import EFA_EFFICIENCY, collective_costs
from shardwright.sim_cluster.profiles import PROFILES, STALL_RECOVERY, STREAMING, Profile
from shardwright.sim_cluster.timing.step_time import Step, time_step

SHARE = 0.2
"""How far a figure is moved: down and up by this part of itself."""

HOST_RATE = "host_link_gb_per_s"
TIMED = (
    "tensor_clock_ghz",
    "vector_clock_ghz",
    "scalar_clock_ghz",
    "gpsimd_clock_ghz",
    "compute_latency_cycles",
    "wide_stride_factor",
    "cross_engine_semaphore_ns",
    "program_start_us",
    "dma_engine_sustained_gb_per_s",
    "dma_fixed_ns",
    "dma_descriptor_min_bytes",
    "dma_descriptor_extra_bytes",
    "hbm_gb_per_s_per_chip",
    HOST_RATE,
    "neuronlink_gb_per_s_per_link_per_direction",
    "neuronlink_wire_us",
    "collective_launch_us",
    "mesh_max_bytes",
    "rdh_max_bytes",
    "flat_ring_min_bytes",
    "efa_gbps",
    "efa_hop_us",
)
"""Facts that a run reads as a rate, a duration, a size of a transfer or a threshold. Others are not
moved: how much there is of something, what is there at all, prices, and what only code is chosen
by."""

EFA = "efa_efficiency"
TOUCH = "collective_touch"
NETWORK = {TOUCH: ("rank_copy_bytes_per_s", "rank_reduce_bytes_per_s"), EFA: (EFA,)}
"""Assumptions of the network -> the fields of `CollectiveCosts` in which they count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A step with one figure `SHARE` lower and higher: relative changes of its time."""

    name: str
    fact: Fact
    lower: float
    higher: float

    @property
    def most(self) -> float:
        """The larger change, without its sign."""
        return max(abs(self.lower), abs(self.higher))


def assumptions(
    target: Target, profile: str = "nominal", transfers: bool = False
) -> dict[str, Fact]:
    """All figures that times on `target` rest on, by name; those it does not have (an EFA rate of
    0) are left out, and that of the host's link where a step has no `transfers`."""
    facts = facts_of(target)
    read = (name for name in TIMED if name in facts and (transfers or name != HOST_RATE))
    found = {name: facts[name] for name in read if _is_there(facts[name].value)}
    source = "published two-node tables of trn1 and trn2 (sim_cluster/network/collective_costs.py)"
    if facts["efa_gbps"].value:
        found[EFA] = Fact(EFA_EFFICIENCY[profile], "inferred", source)
    for name, one in constants().items():
        status = "fitted" if one.fitted_on else "unknown"
        found[name] = Fact(one.under(profile), status, one.fitted_on or one.mechanism)
    return found


def _transfers(step: Step) -> bool:
    """Whether a step moves anything over the host's link."""
    functions = (f for program in step.programs.values() for f in program.functions)
    return any(call.is_transfer for f in functions for call in f.collectives)


def _is_there(value: Any) -> bool:
    return any(value) if isinstance(value, list) else bool(value)


def sensitivity(step: Step, profile: str = "nominal") -> list[Moved]:
    """How far every assumption moves the step, the one that moves it most first.

    Raises what `time_step` raises.
    """
    base = time_step(step, profile).step_time_ps
    found = []
    for name, fact in assumptions(step.target, profile, _transfers(step)).items():
        lower, higher = (
            time_step(other, profile, credit=credit).step_time_ps / base - 1
            for other, credit in _moved(step, profile, name, fact.value)
        )
        found.append(Moved(name=name, fact=fact, lower=lower, higher=higher))
    return sorted(found, key=lambda moved: -moved.most)


def _moved(step: Step, profile: str, name: str, value: Any) -> Iterator[tuple[Step, Profile]]:
    """The step and what cores are credited with, when a figure is lower, and when it is higher."""
    credit = PROFILES[profile]
    for share in (-SHARE, SHARE):
        if name == STREAMING:
            yield step, replace(credit, streaming=_scaled(value, share))
        elif name == STALL_RECOVERY:  # a share that may be 0: by points
            yield step, replace(credit, stall_recovery=min(1.0, max(0.0, value + share)))
        elif name in NETWORK:
            costs = collective_costs(step.target, profile, **step.collectives)
            values = {field: getattr(costs, field) for field in NETWORK[name]}
            rates = {field: _scaled(v, share, isinstance(v, int)) for field, v in values.items()}
            yield replace(step, collectives={**step.collectives, **rates}), credit
        else:
            yield replace(step, target=with_moved(step.target, name, value, share)), credit


def with_moved(target: Target, name: str, value: Any, share: float) -> Target:
    """The machine with the value of one of its facts moved by `share`."""
    return altered(target, {name: _scaled(value, share, whole=name in THRESHOLDS)})


def _scaled(value: Any, share: float, whole: bool = False) -> Any:
    """A figure moved by `share`; lists move together. `whole` is for bytes that are compared or
    counted one by one; a duration or rate that happens to be written as 18 moves to 14.4."""
    if isinstance(value, list):
        return [_scaled(one, share, whole) for one in value]
    moved = value * (1 + share)
    return round(moved) if whole else moved
