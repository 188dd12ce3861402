"""Shardwright from Python: the verbs of the command, with typed results.

A job is a `JobConfig` or the path of a job file; keyword arguments are keys of the job,
`table__key`, as `--set table.key=value` is on the command line. Errors are DiagnosticErrors. Heavy
libraries are loaded by the call that needs them.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.frontend.train_step import StepSettings, TrainStep
from shardwright.orchestrator.config import config
from shardwright.orchestrator.config.config import JobConfig

if TYPE_CHECKING:
    from shardwright.compiler.frontend.hook import Hooked
    from shardwright.orchestrator.submission.compile_only import CompileSummary
    from shardwright.orchestrator.submission.graphs import GraphSummary

Job = JobConfig | Path | str


@dataclass(frozen=True, slots=True)
class Report:
    """What `run` and `plan` found; `data` is report.json (docs/report.md), the rest names what is
    asked of it most. It shows itself as its page in a cell of a notebook, else as its screen."""

    data: Mapping[str, Any]
    exit_code: int

    def __repr__(self) -> str:
        from shardwright.orchestrator.report.screen import report_lines

        return "\n".join(report_lines(self.data))

    def _repr_html_(self) -> str:
        """The page in a frame of its own: its styles are not those of the notebook."""
        from shardwright.orchestrator.report.page.page import report_page

        page = html.escape(report_page(self.data))
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 40em; border: 0"></iframe>'

    @property
    def fits(self) -> bool:
        """Whether the step fits the memory of a core."""
        return bool(self.data["memory"]["fits"])

    @property
    def peak_bytes(self) -> int:
        """Memory per core, of the worst stage."""
        return int(self.data["memory"]["peak_bytes"])

    @property
    def step_time_s(self) -> float:
        """Time of a step under the job's profile."""
        return float(self.data["timing"]["step_time_s"])

    @property
    def band_s(self) -> tuple[float, float]:
        """Time of a step under the other profiles."""
        low, high = self.data["timing"]["band_s"]
        return float(low), float(high)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation."""
        return float(self.data["timing"]["mfu"])

    @property
    def losses(self) -> tuple[float, ...]:
        """Losses of the value run; empty for a plan."""
        return tuple(self.data.get("numerics", {}).get("losses", ()))


def job(path: Path | str | None = None, **settings: object) -> JobConfig:
    """The job of a file, or the defaults, with `table__key` settings. Raises UsageError."""
    words = [f"{name.replace('__', '.', 1)}={value}" for name, value in settings.items()]
    return config.with_absolute_paths(config.load(Path(path) if path else None, words))


def run(asked: Job, **settings: object) -> Report:
    """Compile a job, run it in values and in time; files as `shardwright run` leaves them.

    Raises the DiagnosticError of the stage that refuses.
    """
    from shardwright.orchestrator.road import job as road

    resolved = _job(asked, settings)
    with _progress(resolved) as progress:
        data = road.run_job(resolved, progress, inside=True)
    return Report(data, road.exit_code(data))


def plan(asked: Job | TrainTask | Callable[..., Any], *example: Any, **settings: Any) -> Report:
    """Whether a job fits and how fast it is, without values; of a task, the job that the settings
    describe, with the task for its model. A training step, decorated or not, is shown by arguments
    of a call, `plan(step, state, batch, mesh__tp=2)`, arrays or `jax.ShapeDtypeStruct`s; a keyword
    without `__` is one of them. It is planned with as many samples as the call has, where the ranks
    share them evenly and no setting says how many. Raises as `run`.

    The step is traced to know which question it is, because what this process has imported need not
    be what its files say: a stored answer spares the rest.
    """
    from shardwright.orchestrator.road import plan_cache

    task: TrainTask | None = None
    if callable(asked):
        named = {name: settings.pop(name) for name in list(settings) if "__" not in name}
        own = asked if isinstance(asked, TrainStep) else train_step(asked)
        asked = own.task((example, named) if example or named else None)
    elif example:
        raise TypeError("an example of arguments requires a step to plan, not a job or a task")
    if isinstance(asked, TrainTask):
        task, resolved = asked, _job_of_task(settings)
        if not BATCH & settings.keys():
            from shardwright.orchestrator.config.layout import with_samples

            resolved = with_samples(resolved, task.samples)
    else:
        resolved = _job(asked, settings)
    with _progress(resolved) as progress:
        data = plan_cache.plan(resolved, progress=progress, inside=True, task=task)
    data["provenance"]["again"] = "cache__fresh=True"
    return Report(data, plan_cache.exit_code(data))


def compile_only(asked: Job | Sequence[Path | str], **settings: object) -> CompileSummary:
    """Bundles of one job, or of several job files on one service; a job that is refused has its
    error in the summary.

    Raises UsageError for files that are not understood, or cannot share a service.
    """
    from shardwright.orchestrator.submission.compile_only import NAMELESS, compile_jobs

    if isinstance(asked, JobConfig | Path | str):
        name = NAMELESS if isinstance(asked, JobConfig) else Path(asked)
        jobs = {name: _job(asked, settings)}
    else:
        jobs = {Path(file): _job(file, settings) for file in asked}
    with _progress(next(iter(jobs.values()))) as progress:
        return compile_jobs(jobs, progress)


@overload
def capture(step: Callable[..., Any], *, name: str = "") -> Hooked: ...
@overload
def capture(step: None = None, *, name: str = "") -> Callable[[Callable[..., Any]], Hooked]: ...
def capture(
    step: Callable[..., Any] | None = None, *, name: str = ""
) -> Hooked | Callable[[Callable[..., Any]], Hooked]:
    """Decorate a jitted step (or a function, which is jitted): it runs as before, and under
    `shardwright parallel-compile`, or with NEURON_EXTRACT_GRAPHS_ONLY=1, it leaves the graph of
    every signature it is called with in `graphs`, or SHARDWRIGHT_GRAPHS_DIR, and returns zeros.
    """
    from shardwright.compiler.frontend.hook import Hooked

    def hooked(function: Callable[..., Any]) -> Hooked:
        return Hooked(function, name or getattr(function, "__name__", "step"))

    return hooked if step is None else hooked(step)


@overload
def train_step(step: Callable[..., Any], **settings: Any) -> TrainStep: ...
@overload
def train_step(step: None = None, **settings: Any) -> Callable[[Callable[..., Any]], TrainStep]: ...
def train_step(
    step: Callable[..., Any] | None = None, **settings: Any
) -> TrainStep | Callable[[Callable[..., Any]], TrainStep]:
    """Decorate a training step, jitted or not: it runs as before, and a job may name it
    (`--model train.py:step`). `settings` are fields of `StepSettings`: `example`, the arguments of
    a call or a function that makes them, `batches`, and what is said instead of found:
    `arguments`, `results`, `loss`, `roles`, `batch_dim`, `tokens_per_sample`, `name`.
    """

    def decorated(function: Callable[..., Any]) -> TrainStep:
        return TrainStep(function, StepSettings(**settings))

    return decorated if step is None else decorated(step)


def compile_graphs(
    directory: Path | str, flags: Sequence[str] = (), **settings: object
) -> GraphSummary:
    """Compile the graphs that captured steps left; `flags` are neuronx-cc's, `settings` say where
    units run (`run__executor`) and are cached (`cache__dir`).

    Raises UsageError for flags that are not understood.
    """
    from shardwright.orchestrator.submission import graphs

    resolved = job(None, **settings)
    with _progress(resolved) as progress:
        return graphs.compile_graphs(Path(directory), flags, resolved, progress)


def _job_of_task(settings: Mapping[str, object]) -> JobConfig:
    """The job around a task. Raises UsageError for settings of a model, which the task is."""
    if own := sorted(name for name in settings if name.startswith("model__")):
        key = own[0].replace("__", ".", 1)
        raise UsageError(
            "SW_MODEL",
            f"a TrainTask is the model, so settings of [model] do not apply, got {key}",
            hint="make the task with it",
        )
    return job(None, **settings)


BATCH = {f"strategy__{name}" for name in ("micro_batch", "global_batch", "global_batch_tokens")}
"""Settings that say how many samples a step has."""


def _job(asked: Job, settings: Mapping[str, object]) -> JobConfig:
    if isinstance(asked, TrainTask):
        raise UsageError(
            "SW_MODEL",
            "run and compile_only require a job whose processes can import the model, got a"
            " TrainTask",
            hint='put the function that makes it in a module: model__entry="module:function"; plan'
            " takes the task itself",
        )
    if not isinstance(asked, JobConfig):
        return job(asked, **settings)
    if settings:
        raise TypeError("settings require the path of a job file: job(path, ...) makes a JobConfig")
    return config.asked_now(asked)


def _progress(resolved: JobConfig) -> Any:
    from shardwright.orchestrator.service.progress import Progress

    return Progress(resolved.run.progress, elsewhere="quiet")
