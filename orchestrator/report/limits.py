"""What an answer cannot tell, and how far it can be trusted: one rule for every command.

The report, the screen, `validate` and docs/model.md all take it from here. Which figures an answer
rests on, and how far each moves it, is `sim_cluster/timing/sensitivity.py`'s to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

from shardwright.compiler.frontend.task import Mode
from shardwright.compiler.machine.target import Fact, Target
from shardwright.orchestrator.config.config import JobConfig, recipe_job
from shardwright.orchestrator.report.text import Facts
from shardwright.orchestrator.validation.published import PublishedRun
from shardwright.orchestrator.validation.recipes import recipe
from shardwright.sharding.settings import DISTRIBUTED_OPTIMIZER, MANUAL, StrategySettings
from shardwright.sharding.strategies.decisions import SHARD_AXES
from shardwright.sim_cluster.calibration import constants
from shardwright.sim_cluster.profiles import STALL_RECOVERY, STREAMING
from shardwright.sim_cluster.timing.sensitivity import TOUCH, assumptions

MEASURED_MACHINES = ("trn1.32xlarge",)
"""Machines of published training runs. Those of 2023 on say "trn1.32xlarge/trn1n.32xlarge", so that
none is surely trn1n (training_data_decoder.csv and its neighbours in the Neuron documentation)."""

MEASURED_AXES = ("pp", "dp_replicate", "dp_shard", "tp")
DOCUMENTED, EXTRAPOLATED = "documented", "extrapolated"


@dataclass(frozen=True, slots=True)
class Asked:
    """What an answer is about: machine, mesh axes above 1, strategy, whether it is a run that is
    published, with its model, layout, batches and software, and whether it is training."""

    target: Target
    axes: tuple[str, ...]
    strategy: StrategySettings
    is_published: bool
    trains: bool = True

    @property
    def is_measured(self) -> bool:
        """Whether published runs are on such a machine."""
        return not self.target.is_hypothetical and self.target.name in MEASURED_MACHINES

    @property
    def has_measured_axes(self) -> bool:
        """Whether published runs have such axes."""
        return not self.is_own_sharding and set(self.axes) <= set(MEASURED_AXES)

    @property
    def is_own_sharding(self) -> bool:
        """Whether the step says itself what its axes are and what lies over them."""
        return self.strategy.name == MANUAL and bool(self.axes)

    @property
    def shards_weights(self) -> bool:
        """Whether data-parallel ranks share more than the state of the optimizer."""
        shared = self.strategy.zero_stage > DISTRIBUTED_OPTIMIZER
        return self.trains and shared and not set(SHARD_AXES).isdisjoint(self.axes)


def asked(
    job: JobConfig, target: Target, mesh: Mapping[str, int], is_published: bool | None = None
) -> Asked:
    """What a job's answer is about; a job says itself whether it is a published run, unless that is
    known."""
    axes = tuple(axis for axis, size in mesh.items() if size > 1)
    known = _is_published(job) if is_published is None else is_published
    return Asked(target, axes, job.strategy, known, Mode(job.model.mode).trains)


def _is_published(job: JobConfig) -> bool:
    """Whether a job is a measured run in which nothing that a plan depends on has another value."""
    if not job.model.recipe or not isinstance(recipe(job.model.recipe), PublishedRun):
        return False
    own = recipe_job(job.model.recipe)
    tables = attrgetter("model", "strategy", "mesh", "compiler", "faults")
    cluster = replace(job.cluster, profile=own.cluster.profile)
    return tables(job) == tables(own) and cluster == own.cluster


@dataclass(frozen=True, slots=True)
class Confidence:
    """How far an answer can be trusted: documented, calibrated on rows, or extrapolated."""

    text: str
    why: str


def confidence(about: Asked) -> Confidence:
    """Extrapolated, where no published run is of that kind; else calibrated on the rows that its
    constants were fitted to; documented, where none of them enters.
    """
    reasons = [one.short for one in STATEMENTS if one.extrapolates and one.holds(about)]
    if reasons:
        return Confidence(EXTRAPOLATED, "; ".join(reasons))
    fitted = constants()
    entering = [fitted[STREAMING], fitted[STALL_RECOVERY]]
    entering += [fitted[TOUCH]] if about.axes else []
    rows = [one.fitted_on.partition(" (")[0] for one in entering if one.fitted_on]
    if rows:
        names = ", ".join(one.name for one in entering if one.fitted_on)
        return Confidence(f"calibrated on {'; '.join(dict.fromkeys(rows))}", f"through {names}")
    return Confidence(DOCUMENTED, "no fitted constant enters")


@dataclass(frozen=True, slots=True)
class Statement:
    """Something an answer cannot tell: in a few words, and in a sentence.

    `extrapolates` where no published run is of the kind that `holds` describes.
    """

    short: str
    text: str
    holds: Callable[[Asked], bool] = lambda _: True
    extrapolates: bool = False


STATEMENTS = (
    Statement(
        "no published run is known to be on this machine",
        "Training on any machine but trn1.32xlarge: published runs are of trn1.32xlarge, or do not"
        " say whether they are of trn1n.32xlarge; rates of trn1n's links are a reading of its data"
        " sheet, and no collective of it has been published.",
        lambda about: about.trains and not about.is_measured,
        extrapolates=True,
    ),
    Statement(
        "no inference is compared with a published run",
        "Inference on any machine: constants are fitted to runs of training alone. What serving"
        " adds to a step is not in it: scheduling of requests, sampling, tokens on their way to the"
        " host, and layouts of weights that a serving library chooses for the machine.",
        lambda about: not about.trains,
        extrapolates=True,
    ),
    Statement(
        "none shards weights (FSDP)",
        "How much of the gathering of weights (FSDP, ZeRO-2 and -3) a runtime really hides: no"
        " published run shards more than the state of the optimizer.",
        lambda about: about.shards_weights,
        extrapolates=True,
    ),
    Statement(
        "none has context or expert parallelism",
        "Context and expert parallelism: no published run has either.",
        lambda about: about.trains and not about.is_own_sharding and not about.has_measured_axes,
        extrapolates=True,
    ),
    Statement(
        "none has shardings of its own",
        "Steps with meshes and shardings of their own (strategy manual): published runs lie as"
        " their libraries lay them out.",
        lambda about: about.is_own_sharding,
        extrapolates=True,
    ),
    Statement(
        "no published run has its settings (--recipe)",
        "Any job but a published run as it was run: model, layout, batches, precision, attention"
        " and the software of its release decide a step time more than any constant of the machine."
        " `--recipe` names the runs that are planned as `validate` predicts them.",
        lambda about: (
            about.trains
            and about.is_measured
            and about.has_measured_axes
            and not (about.shards_weights or about.is_published)
        ),
        extrapolates=True,
    ),
    Statement(
        "differences below 10 %",
        "Differences below about 10 % between kinds of runs: releases of one published setup are 6"
        " to 34 % apart, which no figure of a machine explains. Two plans of one model, compiled by"
        " the same code, compare better than that.",
    ),
    Statement(
        "what neuronx-cc would emit",
        "What neuronx-cc would emit: the code that is timed is this compiler's own. Where its"
        " fusion, tiles or layouts differ, single operators are off by more than a step is.",
    ),
    Statement(
        "host work and input",
        "Host work, reading and decoding of data, logging, compilation of the first step: a step is"
        " one in the steady state, with its batch in memory.",
    ),
    Statement(
        "checkpoints in the step",
        "Saving of checkpoints in the time of a step: it counts in goodput only.",
        lambda about: about.trains,
    ),
    Statement(
        "a busy cluster",
        "Stragglers, congestion by other jobs, clocks that are throttled: machines are healthy and"
        " alone unless [faults] says otherwise.",
    ),
    Statement(
        "bits of the real machine",
        "Bits of the real machine: orders of sums are those of our code, functions of the Scalar"
        " engine are exact to the type, and rounding is to nearest even. Losses and logits agree"
        " within docs/numerics.md, not digit by digit.",
    ),
)


def limits_section(
    about: Asked, profile: str, goodput: Mapping[str, Fact], transfers: bool = False
) -> Facts:
    """The block of the report: what it cannot tell, and the figures that no page documents, those
    of `goodput` last; `transfers`: whether the step uses the host's link.
    """
    figures = (*assumptions(about.target, profile, transfers).items(), *goodput.items())
    return {
        "cannot_tell": [
            {"short": one.short, "text": one.text} for one in STATEMENTS if one.holds(about)
        ],
        "assumed": [
            {"name": name, "value": fact.value, "status": fact.status, "source": fact.source}
            for name, fact in figures
            if fact.status != DOCUMENTED
        ],
    }
