"""Comparison with the unsharded step, as `docs/numerics.md` defines it.

A leaf passes within its bound. One that does not is judged by what rounding alone does to it in the
user's own step (`compiler/support/rounding.py`): a gradient that cancels to nothing has no digits
that two correct runs agree on, and an optimizer may make much of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from shardwright.compiler.diagnostics import Diagnostic
from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.capture import capture
from shardwright.compiler.frontend.reference import (
    batch_leaves,
    initial_state,
    losses_of_parts,
    run_reference,
    task_batches,
)
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.ir.sampled import sample
from shardwright.compiler.passes.auto_cast import casts_of
from shardwright.compiler.support.rounding import TIMES, allowed, unit_roundoff
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.config.model import compute_type, resolve_task
from shardwright.orchestrator.report.text import Facts
from shardwright.sharding.partition.partitioned import slots
from shardwright.sharding.prepare.rewrites import ROUNDED
from shardwright.sim_cluster.values.result import L0Check, distance

if TYPE_CHECKING:
    from shardwright.orchestrator.values.value_run import Values

Leaves = Mapping[str, np.ndarray]

FP32_BOUND = 1e-5
BF16_BOUND = 1e-2
NO_DIGITS = 1.0
"""An effect of rounding as large as what is compared."""
SAMPLES = 3
"""Draws of the roundings of one step; their largest effect counts."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """What rounding alone does: to every leaf after one step, and to the loss of every step, both
    relative to the unsharded run."""

    leaves: Mapping[str, float]
    losses: tuple[float, ...]
    parts: Parts | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """The first batch in micro-batches, each through the unsharded step: the mean of their losses,
    and where the step makes its loss. Gradients are accumulated as means; a step whose loss is
    another on the whole batch is none."""

    count: int
    mean_loss: float
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The unsharded run: losses of every step, the state after one step, the bound that follows,
    and the metrics of the first step."""

    losses: tuple[float, ...]
    after_one: Leaves
    bound: float
    metrics: Leaves = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a leaf or loss is from the unsharded run, and how far it may be, both relative to
    it; `note` says where one of the two is no number, which makes the error infinite."""

    name: str
    error: float
    allowed: float
    note: str = ""

    @property
    def share(self) -> float:
        """The error as a part of what is allowed."""
        return self.error / self.allowed

    def figures(self) -> Facts:
        """All but the name, for the report."""
        return {"error": self.error, "allowed": self.allowed, "note": self.note}


def differences(
    values: Leaves, losses: Sequence[float], reference: Reference, rounding: Rounding | None = None
) -> tuple[Difference, Difference]:
    """The worst leaf after one step, and the worst loss of a step, by their shares of what they are
    allowed. Without `rounding` that is the bound. A leaf without digits (`undecided`) is the worst
    only where it is outside even of that, or where there is no other."""
    effects = rounding or Rounding({}, (0.0,) * len(losses))

    def compared(name: str, given: np.ndarray, wanted: np.ndarray, effect: float) -> Difference:
        error = distance(given, wanted)
        note = _unordered(given, wanted) if error == float("inf") else ""
        return Difference(name, error, allowed(reference.bound, effect), note)

    leaves = [
        compared(name, values[name], array, effects.leaves.get(name, 0.0))
        for name, array in reference.after_one.items()
    ]
    pairs = zip(losses, reference.losses, effects.losses, strict=True)
    steps = [
        compared(_step(n), np.asarray(given), np.asarray(wanted), effect)
        for n, (given, wanted, effect) in enumerate(pairs, start=1)
    ]
    most = allowed(reference.bound, NO_DIGITS)
    worst = max(leaves, key=lambda leaf: (leaf.share > 1 or leaf.allowed < most, leaf.share))
    return worst, max(steps, key=attrgetter("share"))


def undecided(rounding: Rounding | None) -> list[str]:
    """The leaves that no two correct runs agree on: rounding alone changes all of them."""
    effects = rounding.leaves.items() if rounding else ()
    return [name for name, effect in effects if effect >= NO_DIGITS]


def _step(number: int) -> str:
    return f"step {number}"


def _by_step(losses: Iterable[object]) -> dict[str, np.ndarray]:
    return {_step(n): np.asarray(loss) for n, loss in enumerate(losses, start=1)}


def _unordered(given: np.ndarray, wanted: np.ndarray) -> str:
    """Where two arrays differ by more than numbers can, in words."""
    a, b = given.astype(np.float64), wanted.astype(np.float64)
    apart = ~(np.isfinite(a) & np.isfinite(b)) & ~((a == b) | (np.isnan(a) & np.isnan(b)))
    places = np.argwhere(apart)
    first = tuple(int(i) for i in places[0])
    at = f" at {list(first)}" if first else ""
    more = f" ({len(places)} such places)" if len(places) > 1 else ""
    return f"{a[first]:g}{at} where the unsharded step has {b[first]:g}{more}"


def numerics_section(
    job: JobConfig,
    values: Values,
    reference: Reference | None,
    rounding: Rounding | None = None,
) -> Facts:
    """The comparison with the unsharded run, for the report; without one, that of instructions with
    kernels is left."""
    checks = values.l0.values()
    compared = reference and differences(values.after_one, values.losses, reference, rounding)
    leaf, loss = compared or (None, None)
    return {
        "steps": job.run.steps,
        "losses": list(values.losses),
        "reference_losses": list(reference.losses) if reference else [],
        "worst_loss_error": loss and loss.error,
        "worst_loss": loss and {"step": loss.name, **loss.figures()},
        "worst_param_error": leaf and {"leaf": leaf.name, **leaf.figures()},
        "undecided": undecided(rounding),
        "bound": reference.bound if reference else least_bound(job),
        "l0": {name: check.distance for name, check in values.l0.items()},
        "worst_l0": _worst_check(checks),
        "cast": compute_type(job),
        "rounding": rounding and {"samples": SAMPLES, "times": TIMES},
        "parts": reference and _parts(reference, rounding),
        "passed": all(check.passed for check in checks)
        and all(difference.share <= 1 for difference in compared or ()),
    }


def _parts(reference: Reference, rounding: Rounding | None) -> Facts | None:
    """The micro-batches of a step that is no mean over them; None where it may be one."""
    if rounding is None or (parts := rounding.parts) is None:
        return None
    whole = reference.losses[0]
    apart = distance(np.asarray(parts.mean_loss), np.asarray(whole))
    if apart <= allowed(reference.bound, rounding.losses[0]):
        return None
    return {
        "count": parts.count,
        "mean_loss": parts.mean_loss,
        "loss": whole,
        "place": parts.place,
    }


def metric_findings(
    values: Values, reference: Reference | None, num_microbatches: int
) -> list[Diagnostic]:
    """Warnings of metrics that are no mean over the samples of a batch: a run gives the mean of
    their values in each micro-batch. One that is within a per cent, the bound of short floats, may
    be one."""
    if reference is None or num_microbatches == 1:
        return []
    return [
        Diagnostic(
            "SW_METRIC_PARTS",
            f"{name} of the first step is {_first(given)}, the mean over {num_microbatches}"
            f" micro-batches, and {_first(reference.metrics[name])} of the whole batch: it is no"
            " mean over its samples",
            hint="set strategy.micro_batch to all samples of a rank, or give a mean over samples",
            severity="warning",
        )
        for name, given in values.metrics.items()
        if name != "metrics/loss"  # which has a verdict
        and name in reference.metrics
        and distance(given, reference.metrics[name]) > BF16_BOUND
    ]


def _first(array: np.ndarray) -> str:
    """A number, or the first of an array and how many there are."""
    first = f"{float(array.flat[0]):g}"
    return f"{first} (and {array.size - 1} more)" if array.size > 1 else first


def _worst_check(checks: Iterable[L0Check]) -> Facts | None:
    worst = max(checks, key=lambda check: check.distance / check.allowed, default=None)
    if worst is None:
        return None
    return {
        "program": worst.program,
        "value": worst.worst,
        "error": worst.distance,
        "allowed": worst.allowed,
        "note": "no number on one side" if worst.distance == float("inf") else "",
    }


def least_bound(job: JobConfig) -> float:
    """The bound of a job before anything is known of the error of its compute type."""
    is_narrow = job.strategy.rounds or compute_type(job) != "float32"
    return BF16_BOUND if is_narrow else FP32_BOUND


def level_bound(job: JobConfig, dtypes: Iterable[DType]) -> float:
    """How far instructions may be from kernels in a step that holds values of `dtypes`. Both round
    at the same places, but what they round differs by the order of fp32 sums, which turns some
    roundings round: the bound grows with the shortest type's."""
    casts = casts_of(job.compiler)
    rounded = [DType.BF16] if job.strategy.rounds else []
    rounded += [casts.dtype] if casts is not None else []
    largest = max((unit_roundoff(d) for d in (*dtypes, *rounded) if d.is_narrow), default=0.0)
    return max(FP32_BOUND, BF16_BOUND * largest / unit_roundoff(DType.BF16))


def run_unsharded(
    job: JobConfig,
    global_batch: int,
    begun: Callable[[Leaves], None] | None = None,
) -> Reference:
    """The reference of a job: fp32 where the model has that, on one device, on the same batches;
    `begun` is told the first state of the job, in its own type. For a process of its own."""
    task = resolve_task(job)
    exact = task.full_precision or task
    if begun is not None and exact is not task:
        begun(initial_state(task, job.run.seed))
        begun = None
    run = run_reference(
        exact,
        steps=job.run.steps,
        global_batch=global_batch,
        seed=job.run.seed,
        data=job.run.data,
        keep=(1,),
        begun=begun,
    )
    return Reference(
        losses=run.losses,
        after_one=run.states[1] | _results(task, run.metrics),
        bound=least_bound(job),
        metrics=run.metrics,
    )


def _results(task: TrainTask, metrics: Leaves) -> dict[str, np.ndarray]:
    """The logits of inference, which are compared like the state."""
    name = f"metrics/{task.mode.result}"
    return {} if task.mode.trains else {name: metrics[name]}


def measure_rounding(
    job: JobConfig, global_batch: int, reference: Reference, num_microbatches: int
) -> Rounding:
    """What rounding does to the leaves and losses of a job, as its model, its precision policy and
    `auto_cast` round; and what its micro-batches give, where there are several.

    The step is drawn `SAMPLES` times; from each state that comes out, the unsharded run goes on to
    its end. A draw that is NaN or infinite elsewhere than the reference says nothing and counts
    for nothing. For a process of its own."""
    task, run = resolve_task(job), job.run
    captured = capture(task, global_batch, job.base)
    graph = import_module(captured.artifact, base_dir=job.base)
    graph = ROUNDED(graph, slots(captured.inputs), job.strategy)
    batch = next(task_batches(task, run.seed, global_batch, run.data))
    given = initial_state(task, run.seed) | batch_leaves(batch)
    inputs = [given[argument.name] for argument in captured.inputs]
    names, result = [one.name for one in captured.outputs], f"metrics/{task.mode.result}"
    casts = casts_of(job.compiler)
    wanted = {**reference.after_one, **_by_step(reference.losses)}
    effects = dict.fromkeys(wanted, 0.0)
    for seed in range(SAMPLES):
        drawn = dict(zip(names, sample(graph, inputs, seed, casts), strict=True))
        state = {name: drawn[name] for name in reference.after_one}
        losses = task.mode.number(drawn[result]), *_later_losses(job, task, global_batch, state)
        found = state | _by_step(losses)
        for name, array in wanted.items():
            effect = distance(found[name], array)
            if effect < float("inf"):
                effects[name] = max(effects[name], effect)
    leaves = {name: effects[name] for name in reference.after_one}
    # Of one number a draw may happen to meet none: what rounding did before, it may do again.
    steps = accumulate((effects[_step(n)] for n in range(1, run.steps + 1)), max)
    loss = graph.outputs[names.index(result)]
    maker = graph.producers().get(loss)
    parts = None
    if num_microbatches > 1:
        state = initial_state(task, run.seed)
        parted = losses_of_parts(task, state, batch, captured.inputs, num_microbatches)
        mean = float(np.mean(parted, dtype=np.float64))
        parts = Parts(num_microbatches, mean, str(maker.loc) if maker else "")
    return Rounding(leaves, tuple(steps), parts)


def _later_losses(
    job: JobConfig, task: TrainTask, global_batch: int, state: Leaves
) -> tuple[float, ...]:
    """The losses of all steps but the first, from a state after it."""
    if job.run.steps == 1:
        return ()
    batches = islice(task_batches(task, job.run.seed, global_batch, job.run.data), 1, None)
    rest = run_reference(
        task, steps=job.run.steps - 1, global_batch=global_batch, batches=batches, start=dict(state)
    )
    return rest.losses
