"""Scaling studies: one job on growing clusters of several machines, weak and strong.

A study is a sweep whose points are (mode, machine, number of instances); this module says what job
each of them is and what the rows say together: efficiency, and which machine is best from where.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.machine.target import load_target, logical
from shardwright.orchestrator.changes.change import frugal
from shardwright.orchestrator.config.config import JobConfig, Keys
from shardwright.orchestrator.config.layout import asked_batch
from shardwright.orchestrator.config.model import resolve_task
from shardwright.orchestrator.report.tried import FITS
from shardwright.orchestrator.whatif.points import Point
from shardwright.orchestrator.whatif.rows import METRICS, Metric, Row
from shardwright.sharding.partition.mesh import DATA_AXES, SHARD_AXIS
from shardwright.sharding.settings import AUTO
from shardwright.sharding.strategies.registry import default_axes

WEAK, STRONG = "weak", "strong"
MODES = (WEAK, STRONG)
STRONG_BATCH = 1024
"""Samples of a step under strong scaling where the job does not say: 4 million tokens of sequences
of 4096, the batch of Llama 2 (Touvron et al. 2023, section 2.2)."""

MOST_SHARDS = 512
"""Ranks that share one copy of the state; more ranks hold more copies (HSDP). Our choice: a gather
over more of them waits longer than it saves memory."""

QUESTIONS = {"fastest": "tokens_per_s", "cheapest": "usd_per_1e6_tokens"}
EQUAL = 1e-3
"""Machines whose figures differ by less are called alike (our choice; the model's own error is
larger)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is varied, and how a job grows."""

    targets: Sequence[str]
    instances: Sequence[int]
    modes: Sequence[str] = MODES
    most_shards: int = MOST_SHARDS


@dataclass(frozen=True, slots=True)
class Curve:
    """Rows of one machine in one mode, by number of instances."""

    mode: str
    target: str
    rows: Mapping[int, Row]

    @property
    def base(self) -> Row | None:
        """What efficiency is measured against: the smallest cluster that fits, else the smallest
        that has an answer."""
        answered = [row for row in self.rows.values() if row.metrics]
        return next((row for row in answered if row.status == FITS), next(iter(answered), None))


def points(study: Study, base: JobConfig, job: Callable[[Keys], JobConfig]) -> list[Point]:
    """The points of a study; `base` is the job without them, `job` makes one of changed keys.

    Raises UsageError for a mesh in which nothing can grow, and for unknown machines.
    """
    found, strong_batch = [], _strong_batch(study, base)
    says_mesh = any(asdict(base.mesh).values())
    for mode, target, count in itertools.product(study.modes, study.targets, study.instances):
        batch = strong_batch if mode == STRONG else 0
        sizes = _sizes(study, base, target, count, batch)
        if not says_mesh and sizes == _sizes(replace(study, most_shards=0), base, target, count, 0):
            sizes = {}  # a plan looks at what weights divide by
        keys = {
            "cluster.instances": count,
            "strategy.global_batch": batch,
            "strategy.global_batch_tokens": 0,
            **{f"mesh.{axis}": size for axis, size in sizes.items()},
            "cluster.target": target,
        }
        values = {"mode": mode, "target": target, "instances": str(count)}
        found.append(Point(values, job(keys)))
    return found


def _strong_batch(study: Study, base: JobConfig) -> int:
    """The samples of a step of the job, or near `STRONG_BATCH` where it does not say. Raises
    UsageError for tokens that are no whole number of micro-batches."""
    if STRONG not in study.modes or base.strategy.global_batch:
        return base.strategy.global_batch
    if base.strategy.global_batch_tokens:
        return asked_batch(base.strategy, 1, resolve_task(frugal(base)).tokens_per_sample)
    # The multiple next to it of the samples that every cluster of the study takes at a time; itself
    # where that is more than twice as many.
    each = base.strategy.smallest_micro_batch
    axes = [axis for axis in DATA_AXES if axis != "ep"]
    clusters = itertools.product(study.targets, study.instances)
    sizes = (_sizes(study, base, *cluster, STRONG_BATCH) for cluster in clusters)
    ways = math.lcm(*(each * math.prod(found.get(a, 1) for a in axes) for found in sizes))
    return STRONG_BATCH if ways > 2 * STRONG_BATCH else max(1, round(STRONG_BATCH / ways)) * ways


def _sizes(study: Study, base: JobConfig, target: str, count: int, batch: int) -> dict[str, int]:
    """The mesh of so many instances for a step of `batch` samples (0: as many as ranks have)."""
    cluster = base.cluster
    machine = logical(load_target(target), cluster.lnc, cluster.hypothetical, "cluster.lnc")
    samples = batch // base.strategy.smallest_micro_batch  # that ranks may have, one each at least
    return mesh_sizes(_axes(base), machine.cores * count, study.most_shards, samples)


def _axes(base: JobConfig) -> dict[str, int]:
    """The axes of the job, or of its strategy; one is AUTO. Raises UsageError."""
    given = {axis: size for axis, size in asdict(base.mesh).items() if size}
    if not given:
        defaults = default_axes(base.strategy.name).items()
        given = {axis: AUTO if size == "auto" else int(size) for axis, size in defaults}
    if AUTO not in given.values():
        shown = ",".join(f"{axis}={size}" for axis, size in given.items())
        raise UsageError(
            "SW_USAGE",
            f"scale requires a mesh with an axis that grows, got {shown}",
            hint="write auto for one size, for example --mesh dp_shard=auto,tp=8",
        )
    return given


def mesh_sizes(
    axes: Mapping[str, int], cores: int, most_shards: int = 0, samples: int = 0
) -> dict[str, int]:
    """Sizes on so many cores of a mesh with one AUTO axis, which takes what others leave.

    With more data ranks than `samples` of a step (0: no bound) `tp` takes the rest. State is shared
    by at most `most_shards` ranks (0: no bound); multiples of them hold copies.
    """
    sizes = dict(axes)
    grows = next(axis for axis, size in axes.items() if size == AUTO)
    fixed = math.prod(size for axis, size in axes.items() if axis not in (grows, "ep"))
    rest = max(1, cores // fixed)
    if samples and grows in DATA_AXES:
        other = math.prod(n for axis, n in axes.items() if axis in DATA_AXES and n != AUTO)
        more = max(1, rest * other // samples)
        rest //= more
        sizes["tp"] = sizes.get("tp", 1) * more
    sizes[grows] = rest
    is_shared = grows == SHARD_AXIS and "dp_replicate" not in sizes
    if is_shared and most_shards and rest > most_shards and rest % most_shards == 0:
        sizes |= {"dp_replicate": rest // most_shards, SHARD_AXIS: most_shards}
    return {axis: size for axis, size in sizes.items() if size > 1 or axis == grows}


def curves(rows: Sequence[Row]) -> list[Curve]:
    """The curves of a study, with `efficiency` among the metrics of their rows: tokens per second
    and instance against the curve's base."""
    found: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        key = row.values["mode"], row.values["target"]
        found.setdefault(key, {})[int(row.values["instances"])] = row
    return [_with_efficiency(Curve(*key, dict(sorted(own.items())))) for key, own in found.items()]


def by_mode(found: Sequence[Curve]) -> dict[str, list[Curve]]:
    """The curves of every mode."""
    modes: dict[str, list[Curve]] = {}
    for curve in found:
        modes.setdefault(curve.mode, []).append(curve)
    return modes


def _with_efficiency(curve: Curve) -> Curve:
    if curve.base is None:
        return curve
    each = _per_instance(curve.base)
    rows = {
        count: replace(row, metrics={**row.metrics, "efficiency": _per_instance(row) / each})
        if row.metrics
        else row
        for count, row in curve.rows.items()
    }
    return replace(curve, rows=rows)


def _per_instance(row: Row) -> float:
    tokens: float = row.metrics["tokens_per_s"]
    return tokens / int(row.values["instances"])


Order = tuple[tuple[str, ...], ...]
"""Machines, best first; those that are alike together."""


@dataclass(frozen=True, slots=True)
class Range:
    """From the first to the last of these numbers of instances machines have one order."""

    first: int
    last: int
    order: Order


def orders(found: Sequence[Curve], metric: Metric) -> list[Range]:
    """The order of machines in a figure by number of instances, of those that fit there: where it
    changes, they break even."""
    counts = sorted({count for curve in found for count in curve.rows})
    at = {count: order for count in counts if (order := _order_at(found, count, metric))}
    same = ((order, list(own)) for order, own in itertools.groupby(at, at.__getitem__))
    return [Range(own[0], own[-1], order) for order, own in same]


def _order_at(found: Sequence[Curve], count: int, metric: Metric) -> Order:
    rows = {c.target: c.rows[count] for c in found if count in c.rows}
    ranks = {t: metric.rank(r) for t, r in rows.items() if r.status == FITS and metric.of(r)}
    groups: list[tuple[str, ...]] = []
    last = 0.0
    for target in sorted(ranks, key=ranks.__getitem__):
        if groups and abs(ranks[target] / last - 1) <= EQUAL:
            groups[-1] += (target,)
        else:
            groups.append((target,))
            last = ranks[target]
    return tuple(groups)


def verdicts(found: Sequence[Curve]) -> dict[str, list[str]]:
    """By mode and question, a line per range of instances: which machines are fastest, and cheapest
    per token. Of one machine there is nothing to say."""
    told = {}
    for mode, own in by_mode(found).items():
        if len(own) == 1:
            continue
        for question, name in QUESTIONS.items():
            if ranges := orders(own, METRICS[name]):
                told[f"{mode}, {question} first"] = [
                    f"{span_text(r.first, r.last)}: {', '.join(map(' = '.join, r.order))}"
                    for r in ranges
                ]
    return told


def span_text(first: int, last: int) -> str:
    """A range of numbers of instances."""
    return f"{first}" if first == last else f"{first} to {last}"
