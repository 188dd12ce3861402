"""A job with round numbers, never captured or compiled: what formulas of reports are checked on.

machine    16 chips of 2 cores, 1e6 FLOP/s and 21 USD per hour and instance
cluster    2 instances, 64 cores on `dp_shard`, or on 2 pipeline stages
step       48 samples of 7 tokens in 3 micro-batches, captured with 16 samples
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.machine.network import cluster_topology
from shardwright.compiler.machine.target import Fact, Target, load_target
from shardwright.compiler.neff.schedule import Schedule
from shardwright.compiler.program import BufferInfo, StepPlan, StepProgram
from shardwright.orchestrator.config.config import ClusterConfig, JobConfig
from shardwright.orchestrator.config.goodput_keys import GoodputConfig
from shardwright.orchestrator.config.layout import Layout
from shardwright.orchestrator.road.build import Built
from shardwright.sharding.partition.mesh import make_mesh
from shardwright.sim_cluster.timing.step_time import StepTiming

SCHEDULE: Schedule = ((("forward",), 3),)


def machine(**facts: Any) -> Target:
    """The machine, with other figures where they are given."""
    price = Fact(21.0, "documented", "a list", "2026-01-02", "us-west-2")
    own = {"published_flops_per_s_per_core": 1e6, "prices": {"on-demand": price}}
    return replace(load_target("trn1n.32xlarge"), **(own | facts))


def product(rows: int, depth: int, columns: int) -> Graph:
    """A contraction, and one addition per element of its result."""
    b = Builder()
    x, y, z = b.input((rows, depth)), b.input((depth, columns)), b.input((rows, columns))
    return b.finish(b.add(b.dot(x, y), z))


def programs(**graphs: Graph) -> tuple[StepProgram, ...]:
    """Programs by name; what follows a digit is the stage."""
    rows = []
    for name, graph in graphs.items():
        stage = int(name[-1]) if name[-1].isdigit() else 0
        rows.append(StepProgram(name=name, graph=graph, inputs=(), outputs=(), stage=stage))
    return tuple(rows)


def buffer(name: str, role: str, elements: int, dtype: DType = DType.F32) -> BufferInfo:
    """A buffer of which each core has an eighth."""
    b = Builder()
    whole, part = b.input((elements,), dtype), b.input((elements // 8,), dtype)
    return BufferInfo(
        name=name,
        role=role,
        local_type=part.type,
        global_type=whole.type,
        axes=(("dp_shard",),),
    )


def invented(
    target: Target | None = None,
    programs: tuple[StepProgram, ...] = (),
    buffers: tuple[BufferInfo, ...] = (),
    stages: int = 1,
    goodput: GoodputConfig | None = None,
    schedules: tuple[Schedule, ...] = (),
    **keys: Any,
) -> Built:
    """The job; `keys` replace fields of `Built`."""
    step = StepPlan(
        mesh={"dp_shard": 64},
        buffers={b.name: b for b in buffers},
        programs=programs,
        schedules=schedules or (SCHEDULE,) * stages,
        num_microbatches=3,
    )
    sizes = {"pp": stages, "dp_shard": 64 // stages} if stages > 1 else {"dp_shard": 64}
    cluster = target or machine()
    layout = Layout(
        target=cluster,
        topology=cluster_topology(cluster, 2),
        mesh=make_mesh(sizes),
        captured_batch=16,
        global_batch=48,
        num_microbatches=3,
    )
    fields: dict[str, Any] = {
        "job": JobConfig(
            cluster=ClusterConfig(instances=2), goodput=goodput or JobConfig().goodput
        ),
        "layout": layout,
        "graph": product(40, 20, 32),
        "traced_samples": 16,
        "prepared": SimpleNamespace(recipe=SimpleNamespace(graph=product(40, 20, 32))),
        "plan": SimpleNamespace(step=step, mesh=layout.mesh, parts=()),
        "tokens_per_sample": 7,
        "name": "invented",
        "programs": {},
    }
    return Built(**(fields | keys))


def timing(step_time_ps: int, **fields: Any) -> StepTiming:
    """A step of so many picoseconds, all of them compute unless told."""
    own: dict[str, Any] = {
        "profile": "nominal",
        "step_time_ps": step_time_ps,
        "breakdown_ps": {"compute": step_time_ps},
        "hidden_ps": {},
        "engines_ps": {},
        "lone_ps": 0,
        "stages_ps": ({"compute": step_time_ps},),
        "collectives": (),
        "rank_classes": 1,
        "lnc": 1,
    }
    return StepTiming(**(own | fields))
