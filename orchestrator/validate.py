"""`validate`: published training runs predicted by the real road, beside what was measured.

Data-parallel runs are partitioned, compiled, linked and timed on the whole simulated cluster.
Tensor- and pipeline-parallel runs are estimates: one rank's program goes the same road,
`estimate.py` adds what ranks do together. No constant is fitted; the baseline is.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.diagnostics import UsageError
from compiler.target import PS_PER_S, load_target
from orchestrator import config
from orchestrator.build import Built, Layout, Stages, build_task
from orchestrator.config import JobConfig
from orchestrator.estimate import RankTime, compose, split_ends
from orchestrator.published import PublishedRun, read_runs
from orchestrator.screen import Progress, seconds_text
from orchestrator.service import UnitService
from sharding.mesh import make_mesh
from sim_cluster.macro import Stretch, program_macros
from sim_cluster.network import Network
from sim_cluster.profiles import PROFILES, under_profile
from sim_cluster.step_time import Step, time_step

if TYPE_CHECKING:
    from compiler.frontend.task import TrainTask

NOMINAL = "nominal"
SIMULATED, ESTIMATED = "simulated", "estimate"
REPLICAS = {"dp_replicate": 2}
"""Mesh of a rank's program. Two replicas, so that a micro-batch of 1 still shows its sample dim."""
LAYOUTS = ("data-parallel", "tensor-parallel", "pipeline")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A predicted run: seconds per profile, how it was made, and at nominal rates the shares of the
    step and how busy each engine is while the core's own programs run."""

    run: PublishedRun
    seconds: Mapping[str, float]
    kind: str
    shares: Mapping[str, float]
    busy: Mapping[str, float]

    @property
    def error(self) -> float:
        """Predicted over published at nominal rates, less 1."""
        return self.seconds[NOMINAL] / self.run.step_time_s - 1

    @property
    def band_covers(self) -> bool:
        """True when the published time lies between the profiles."""
        return min(self.seconds.values()) <= self.run.step_time_s <= max(self.seconds.values())


def run(path: Path, rows: Sequence[str], as_json: bool) -> int:
    """Predict rows of a CSV file and print them; returns the exit code.

    `rows` are ids, or "all"; with none, the smallest supported run of each layout.
    Raises UsageError for a bad file, an unknown id or a row that cannot be predicted.
    """
    runs = select(read_runs(path), rows)
    progress = Progress(quiet=as_json)
    with _service(progress) as service:
        predictions = []
        for item in runs:
            progress.say(f"{item.id} {item.model}: {item.layout}, {item.cores} cores")
            predictions.append(predict(item, service))
    report = summary(predictions)
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
    return 0


def select(runs: Sequence[PublishedRun], rows: Sequence[str]) -> list[PublishedRun]:
    """The runs to predict. Raises UsageError as `run` does."""
    by_id = {item.id: item for item in runs}
    if list(rows) == ["all"]:
        return [item for item in runs if not item.unsupported()]
    for row in rows:
        if row not in by_id:
            raise UsageError("SW_ROWS", f"--rows requires ids of the file, got {row}")
        if reason := by_id[row].unsupported():
            raise UsageError("SW_ROWS", f"row {row} cannot be predicted: {reason}")
    return [by_id[row] for row in rows] if rows else _smallest(runs)


def _smallest(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """Per layout the primary run with the fewest cores, then parameters, then the first."""
    usable = [item for item in runs if not item.unsupported()]
    chosen = []
    for layout in LAYOUTS:
        found = [item for item in usable if item.layout == layout]
        if found:
            chosen.append(min(found, key=_size))
    if not chosen:
        raise UsageError("SW_ROWS", "the file requires a run of a BERT, GPT or Llama, got none")
    return chosen


def _size(item: PublishedRun) -> tuple[bool, int, float]:
    return not item.primary, item.cores, item.matmul_params


def predict(item: PublishedRun, service: UnitService) -> Prediction:
    """Predict one run under every profile."""
    if item.layout == "data-parallel":
        return _simulated(item, service)
    return _estimated(item, service)


def _simulated(item: PublishedRun, service: UnitService) -> Prediction:
    """The whole cluster, every rank a replica.

    Gradients are reduced in the last micro-batch only, as data-parallel training scripts do; the
    recipe reduces in every one, so the others are timed without their collectives.
    Source: dp_bert_large_hf_pretrain_hdf5.py (aws-neuron-samples) reduces after accumulation.
    """
    built = build_rank(item, service, {"dp_replicate": item.dp}, item.layers)
    breakdowns = {name: _replica_step(built, item, name) for name in PROFILES}
    return Prediction(
        run=item,
        seconds={name: sum(parts.values()) / PS_PER_S for name, parts in breakdowns.items()},
        kind=SIMULATED,
        shares=_shares(breakdowns[NOMINAL]),
        busy=_busy(built, NOMINAL),
    )


def _replica_step(built: Built, item: PublishedRun, profile: str) -> Counter[str]:
    """Breakdown of a data-parallel step, in picoseconds."""
    (schedule,) = built.plan.step.schedules
    programs = tuple(name for names, _ in schedule for name in names)
    step = Step(
        programs=built.programs,
        schedules=(((programs, 1),),),
        mesh=built.plan.step.mesh,
        target=built.layout.target,
        instances=item.nodes,
        whole_axes={name: built.plan.mesh.origin(name) for name in built.plan.mesh.names},
    )
    parts = Counter(time_step(step, profile).breakdown_ps)
    for op in _micro_batch(built, profile):
        for name, ps in _charges(op).items():
            parts[name] += (item.num_microbatches - 1) * ps
    return parts


def _charges(op: Stretch) -> dict[str, int]:
    """A stretch by category, as the cluster loop charges it."""
    if op.charge:
        return {op.charge: op.full_ps}
    return {"compute": op.compute_ps, "memory": op.full_ps - op.compute_ps}


def _estimated(item: PublishedRun, service: UnitService) -> Prediction:
    """One rank's program, composed with the communication of all."""
    layers = item.layers // item.pp
    once = build_rank(item, service, REPLICAS, layers)
    twice = build_rank(item, service, REPLICAS, 2 * layers) if item.pp > 1 else None
    target, mesh = once.layout.target, {"pp": item.pp, "dp_replicate": item.dp, "tp": item.tp}
    estimates = {}
    for name in PROFILES:
        rank = rank_time(once, name)
        if twice is not None:
            rank = split_ends(rank, rank_time(twice, name))
        network = Network(target, item.nodes, mesh, name)
        estimates[name] = compose(item, rank, network, _parameters(once))
    return Prediction(
        run=item,
        seconds={name: e.step_time_ps / PS_PER_S for name, e in estimates.items()},
        kind=ESTIMATED,
        shares=_shares(estimates[NOMINAL].parts_ps),
        busy=_busy(once, NOMINAL),
    )


def _shares(parts_ps: Mapping[str, int]) -> dict[str, float]:
    total = sum(parts_ps.values())
    return {name: ps / total for name, ps in parts_ps.items() if ps}


def rank_time(built: Built, profile: str) -> RankTime:
    """One micro-batch and one update of a rank's program, its own collectives left out."""
    update = _stretches(built, [name for name in built.programs if name == "update"], profile)
    return RankTime(
        layers_ps=sum(op.full_ps for op in _micro_batch(built, profile)),
        ends_ps=0,
        update_ps=sum(op.full_ps for op in update),
    )


def _busy(built: Built, profile: str) -> dict[str, float]:
    """Busy share of every engine over one micro-batch."""
    found = _micro_batch(built, profile)
    total = sum(op.full_ps for op in found)
    engines = sorted({engine for op in found for engine in op.segment.busy_ps})
    return {e: sum(op.segment.busy_ps.get(e, 0) for op in found) / total for e in engines}


def _micro_batch(built: Built, profile: str) -> list[Stretch]:
    """What one micro-batch computes, without collectives."""
    return _stretches(built, [name for name in built.programs if name != "update"], profile)


def _stretches(built: Built, names: Sequence[str], profile: str) -> list[Stretch]:
    """What programs compute between collectives, timed alone on their core."""
    target = under_profile(built.layout.target, profile)
    macros = [op for name in names for op in program_macros(built.programs[name], target)]
    return [op for op in macros if isinstance(op, Stretch)]


def _parameters(built: Built) -> int:
    """Parameters a rank stores."""
    buffers = built.plan.step.buffers.values()
    return sum(b.local_type.num_elements for b in buffers if b.role == "parameter")


def build_rank(
    item: PublishedRun, service: UnitService, mesh: Mapping[str, int], layers: int
) -> Built:
    """The linked programs of one rank's share of the model on `mesh`, data-parallel."""
    sizes = make_mesh(mesh)
    batch = item.micro_batch * sizes.num_cores
    layout = Layout(
        target=load_target(item.target),
        mesh=sizes,
        captured_batch=batch,
        global_batch=batch * item.num_microbatches,
        num_microbatches=item.num_microbatches,
    )
    return build_task(_job(item), layout, rank_task(item, layers), service, Stages())


def rank_task(item: PublishedRun, layers: int) -> TrainTask:
    """The training step of one tensor-parallel rank with `layers` layers.

    With sequence parallelism its norms and residuals hold its part of the sequence. Vocabularies
    are padded to the ranks. With fewer kv heads than ranks every rank holds one.
    Source: Megatron-LM pads the vocabulary; neuronx-distributed repeats kv heads.
    """
    from compiler.frontend.models.blocks import Precision, Sizes, TaskOptions
    from compiler.frontend.models.families import family_task

    sizes = Sizes(
        layers=layers,
        hidden=item.hidden,
        heads=item.heads // item.tp,
        head_dim=item.hidden // item.heads,
        ffn=-(-item.ffn // item.tp),
        vocab=-(-item.vocab // item.tp),
        positions=item.seq_len,
    )
    precision = Precision(
        params=item.storage.params, activations=item.storage.activations, matmuls="bf16"
    )
    options = TaskOptions(
        seq_len=item.seq_len,
        sequence_shards=item.tp if item.sequence_parallel else 1,
        precision=precision,
        remat=item.remat,
        name=item.id.lower(),
    )
    return family_task(item.family, sizes, options, max(1, item.kv_heads // item.tp))


def _job(item: PublishedRun) -> JobConfig:
    """The settings of a job that the road reads: machine, strategy, compiler."""
    cluster = config.ClusterConfig(target=item.target, instances=item.nodes)
    return JobConfig(cluster=cluster)


def _service(progress: Progress) -> UnitService:
    from orchestrator.job import unit_service

    return unit_service(JobConfig(), progress)


def baseline(runs: Sequence[PublishedRun]) -> tuple[float, dict[str, float]]:
    """The constant MFU that fits `runs` best, and its error per run.

    Best in the mean of squared log step times, hence the geometric mean.
    """
    peaks = {r.id: load_target(r.target).published_flops_per_s_per_core * r.cores for r in runs}
    mfu = {r.id: r.model_flops / peaks[r.id] / r.step_time_s for r in runs}
    fitted = math.exp(statistics.fmean(math.log(value) for value in mfu.values()))
    return fitted, {name: value / fitted - 1 for name, value in mfu.items()}


def summary(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """The report: a row per run, medians of the absolute errors."""
    fitted, errors = baseline([p.run for p in predictions])
    return {
        "schema": 1,
        "profile": NOMINAL,
        "rows": [_row(p, errors[p.run.id]) for p in predictions],
        "median_error": statistics.median(abs(p.error) for p in predictions),
        "baseline_mfu": fitted,
        "median_baseline_error": statistics.median(abs(e) for e in errors.values()),
        "band_covers": sum(p.band_covers for p in predictions),
    }


def _row(p: Prediction, baseline_error: float) -> dict[str, Any]:
    return {
        "id": p.run.id,
        "model": p.run.model,
        "layout": p.run.layout,
        "cores": p.run.cores,
        "kind": p.kind,
        "predicted_s": p.seconds[NOMINAL],
        "band_s": [min(p.seconds.values()), max(p.seconds.values())],
        "published_s": p.run.step_time_s,
        "error": p.error,
        "baseline_error": baseline_error,
        "shares": dict(p.shares),
        "busy": dict(p.busy),
    }


def show(report: Mapping[str, Any]) -> None:
    """Print a report as a table, with where the time goes below it."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("row", "predicted", "band", "published", "error", "const. MFU", "kind"):
        justify: Any = "left" if name in ("row", "kind") else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    for row in report["rows"]:
        low, high = row["band_s"]
        table.add_row(
            row["id"],
            seconds_text(row["predicted_s"]),
            f"{low:.4g} .. {high:.4g} s",
            seconds_text(row["published_s"]),
            f"{row['error']:+.1%}",
            f"{row['baseline_error']:+.1%}",
            row["kind"],
        )
    console.print(table)
    for row in report["rows"]:
        console.print(f"{row['id']}  {row['model']}, {row['layout']} on {row['cores']} cores")
        console.print(f"      step: {_percents(row['shares'])}")
        console.print(f"      core: {_percents(row['busy'])}")
    _notes(console, report)


def _percents(shares: Mapping[str, float]) -> str:
    largest = sorted(shares.items(), key=lambda pair: -pair[1])
    return "  ".join(f"{name} {share:.1%}" for name, share in largest if share >= 0.0005)


def _notes(console: Any, report: Mapping[str, Any]) -> None:
    """The medians, and what the kinds mean."""
    console.print(
        f"median error {report['median_error']:.1%}; a constant MFU of {report['baseline_mfu']:.1%}"
        f" fitted on the same rows {report['median_baseline_error']:.1%};"
        f" band covers {report['band_covers']} of {len(report['rows'])}"
    )
    kinds = {row["kind"] for row in report["rows"]}
    console.print("".join(text for kind, text in _KIND_NOTES.items() if kind in kinds), end="")


_KIND_NOTES = {
    SIMULATED: "simulated: partitioned, compiled and timed on the whole cluster\n",
    ESTIMATED: "estimate: one rank's compiled program plus formulas for what ranks do together\n",
}
