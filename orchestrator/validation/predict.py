"""A published run through the road of any job: capture, import, recipe, partition, compile, link,
and the cluster loop on the run's own mesh.

Runs that differ in nothing that decides their time share one prediction. Predictions are stored
beside units, by what they depend on, so that a repeated `validate` builds nothing.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compiler.documents import parse_json
from compiler.isa.fields import check_fields
from compiler.options import CompileOptions
from compiler.target import PS_PER_S, load_target
from orchestrator import config
from orchestrator.build import Built, Layout, build_task
from orchestrator.cache import Cache
from orchestrator.config import JobConfig
from orchestrator.packets import packets_of
from orchestrator.service.service import UnitService
from orchestrator.service.units import PACKAGES, digest, source_digest
from orchestrator.stages import Stages
from orchestrator.timing import Question, answers
from orchestrator.validation.published import Workload
from sharding.mesh import make_mesh
from sharding.settings import StrategySettings
from sim_cluster.calibration import constants
from sim_cluster.profiles import STALL_RECOVERY, STREAMING, Profile
from sim_cluster.step_time import Step, StepTiming

if TYPE_CHECKING:
    from compiler.frontend.task import TrainTask

KIND = "prediction"
IN_PROFILE = (STREAMING, STALL_RECOVERY)


@dataclass(frozen=True, slots=True)
class Timed:
    """A predicted step: seconds, what they are spent on, and how busy engines are in them."""

    seconds: float
    shares: Mapping[str, float]
    busy: Mapping[str, float]


class Predictor:
    """Times workloads under profiles; builds one only when an answer is not stored."""

    def __init__(self, service: UnitService, cache: Cache) -> None:
        self._service = service
        self._cache = cache
        self.asked, self.stored_s = 0, list[float]()  # Unix times of answers that others stored
        self._began_s = time.time()
        self._built: tuple[Workload, Built] | None = None  # the last one: programs are large

    def time(self, workload: Workload, profile: Profile) -> Timed:
        """The step of `workload`. Raises the DiagnosticError of the stage that refuses it."""
        key = _key(workload, profile)
        self.asked += 1
        stored = self._stored(key)
        self._cache.tally.count(KIND, hit=stored is not None)
        if stored is not None:
            return stored
        step = _step(self._programs(workload), workload.runtime)
        asked = Question(
            name=f"step {profile.name}", step=step, profile=profile.name, credit=profile
        )
        (answer,) = answers([asked], self._service)
        timed = shares_of(answer.timing, workload.host_us)
        self._cache.put(KIND, key, json.dumps(dataclasses.asdict(timed)).encode())
        return timed

    def _stored(self, key: str) -> Timed | None:
        """What an entry holds; one that makes no sense is set aside, and counts as absent."""
        entry = self._cache.find(KIND, key)
        if entry is None:
            return None
        try:
            found = Timed(**parse_json(entry.payload))
            check_fields(found)
            if entry.about.stored_s < self._began_s:
                self.stored_s.append(entry.about.stored_s)
            return found
        except (TypeError, ValueError):
            self._cache.set_aside(KIND, key)
            return None

    def _programs(self, workload: Workload) -> Built:
        if self._built is None or self._built[0] != workload:
            self._built = None
            self._built = (workload, build_workload(workload, self._service))
        return self._built[1]


def _key(workload: Workload, profile: Profile) -> str:
    """Digest of what a prediction depends on: of the fitted constants those that are not in
    `profile`, so that another fit leaves what was predicted for it.
    """
    others = {n: dataclasses.asdict(c) for n, c in constants().items() if n not in IN_PROFILE}
    parts = [dataclasses.asdict(workload), dataclasses.asdict(profile), others]
    sources = source_digest(PACKAGES, (".py", ".json")).encode()
    return digest(
        [json.dumps(parts).encode(), sources, load_target(workload.target).digest.encode()]
    )


def _step(built: Built, runtime: str) -> Step:
    return Step(
        programs=built.programs,
        schedules=built.plan.step.schedules,
        transfers=built.plan.step.transfers,
        mesh=built.plan.step.mesh,
        target=built.layout.target,
        instances=built.job.cluster.instances,
        placement=built.placement,
        packets=packets_of(built.job.strategy),
        runtime=runtime,
    )


def shares_of(timing: StepTiming, host_us: int) -> Timed:
    """A step, and before it the time in which cores wait for the host."""
    host_ps = host_us * PS_PER_S // 10**6
    total = timing.step_time_ps + host_ps
    shares, busy = (
        {name: ps / total for name, ps in parts.items() if ps}
        for parts in ({**timing.breakdown_ps, "host": host_ps}, timing.engines_ps)
    )
    return Timed(total / PS_PER_S, shares, busy)


def build_workload(workload: Workload, service: UnitService) -> Built:
    """The linked programs of a run, on its own mesh and machines."""
    return build_task(job_of(workload), layout_of(workload), task_of(workload), service, Stages())


def job_of(w: Workload) -> JobConfig:
    """The run as a job: machine, strategy, compiler.

    Matmuls of fp32 operands are cast to bf16, as the compiler's documented default did until mid
    2025 (neuronx-cc command line reference, `--auto-cast`); what they give, and what is stored,
    stays fp32.

    Scripts reduce gradients once, after the last micro-batch, and add them up in the type they
    have. Data-parallel ranks share the optimizer state only with ZeRO-1.
    Source: dp_bert_large_hf_pretrain_hdf5.py (aws-neuron-samples), run_llama_nxd.py
    (neuronx-distributed).
    """
    short = w.storage.gradients == w.storage.params
    strategy = StrategySettings(
        name="llm-training" if w.tp * w.pp > 1 else "generic",
        micro_batch=w.micro_batch,
        zero=int(w.zero1),
        sequence_parallel=w.sequence_parallel,
        reduce_gradients="last",
        accumulate_dtype="auto" if short else "float32",
    )
    options = CompileOptions(
        attention=w.attention, mixed_precision_accumulation=w.accumulation, auto_cast="matmult"
    )
    cluster = config.ClusterConfig(target=w.target, instances=w.nodes)
    return JobConfig(cluster=cluster, strategy=strategy, compiler=options)


def layout_of(w: Workload) -> Layout:
    """The mesh of the run: pipeline stages, data-parallel ranks, tensor-parallel ranks."""
    data = "dp_shard" if w.zero1 else "dp_replicate"
    sizes = {axis: size for axis, size in (("pp", w.pp), (data, w.dp), ("tp", w.tp)) if size > 1}
    batch = w.micro_batch * w.dp
    return Layout(
        target=load_target(w.target),
        mesh=make_mesh(sizes or {data: 1}),
        captured_batch=batch,
        global_batch=batch * w.num_microbatches,
        num_microbatches=w.num_microbatches,
    )


def task_of(w: Workload) -> TrainTask:
    """The training step of the whole model; vocabularies are padded to the tensor-parallel ranks,
    as Megatron-LM does.
    """
    from compiler.frontend.models.blocks import Precision, Sizes, TaskOptions
    from compiler.frontend.models.families import family_task

    sizes = Sizes(
        layers=w.layers,
        hidden=w.hidden,
        heads=w.heads,
        head_dim=w.hidden // w.heads,
        ffn=w.ffn,
        vocab=-(-w.vocab // w.tp) * w.tp,
        positions=w.seq_len,
        complete=True,
        fused=w.fused_projections,
    )
    types: dict[str, Any] = {
        "params": w.storage.params,
        "activations": w.storage.activations,
        "statistics": w.storage.statistics,
        "stream": w.storage.stream,
    }
    options = TaskOptions(
        seq_len=w.seq_len,
        precision=Precision(**types),
        optimizer=w.optimizer,
        remat=w.remat,
        dropout=w.dropout,
        one_hot_loss=w.one_hot_loss,
        name="published",
    )
    kv_heads = max(w.kv_heads, w.tp) if w.replicated_kv else w.kv_heads
    return family_task(w.family, sizes, options, kv_heads)
