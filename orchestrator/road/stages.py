"""What goes with a job along its road: wall-clock seconds per stage, and captured steps.

Jobs of one process that ask about the same model (the points of a sweep, what `plan` tries) share
`Traces`, so that each distinct step is captured once. Nothing here outlives the process.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

from shardwright.compiler.diagnostics import Diagnostic
from shardwright.compiler.frontend.capture import capture
from shardwright.compiler.frontend.context import module_text
from shardwright.compiler.frontend.shardings import ModuleShardings
from shardwright.compiler.frontend.stablehlo import import_with_shardings
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.ir.text import to_text
from shardwright.compiler.passes.doubles import doubles_narrowed
from shardwright.compiler.passes.pipeline import DOUBLES, step_passes
from shardwright.compiler.rewriting.driver import run
from shardwright.compiler.steps import note, step
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.config.model import model_key, resolve_task
from shardwright.orchestrator.keys.environment import jax_variables
from shardwright.orchestrator.keys.freshness import Folder, jax_settings
from shardwright.orchestrator.keys.reads import Reads, observed, recorded
from shardwright.orchestrator.service.units import digest
from shardwright.sharding.partition.partitioned import slots
from shardwright.sharding.prepare.reroll import Rerolled
from shardwright.sharding.prepare.rewrites import REROLLED
from shardwright.sharding.settings import MANUAL
from shardwright.sharding.shown import slots_text

T = TypeVar("T")
MOST_KEPT = 32
"""Captures that are kept, the newest (our choice): sweeps over batches and lengths have many."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A captured step, re-rolled, after the step passes, what its module says about its
    distribution, and how it was found to be called (`Captured.told`)."""

    step: Rerolled
    samples: int
    user: ModuleShardings
    name: str
    findings: tuple[Diagnostic, ...] = ()
    told: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Of everything that a plan takes from a step. It is the imported module, because its own
        locations have the lines of whoever asked."""
        graph, inputs, outputs = self.step.parts
        slots = "\n".join(map(repr, (*inputs, *outputs)))
        told = (*self.step.notes, *map(repr, self.findings), *self.told)
        texts = (slots, repr(self.user), self.name, str(self.samples), *told)
        return digest(text.encode() for text in (to_text(graph, with_locs=True), *texts))


class Traces:
    """Tasks and captured steps by what they depend on. Threads may share one: what one of them
    captures, the others wait for. `given` is the task of a question that names no model."""

    def __init__(self, given: TrainTask | None = None) -> None:
        self._given = given
        self._lock = threading.RLock()  # capture is Python code: two at a time are no faster
        self._tasks: dict[Hashable, TrainTask] = {}
        self._traced: dict[Hashable, tuple[TrainTask, Traced]] = {}
        self._reads: dict[Hashable, Reads] = {}
        self._doubtful: set[Hashable] = set()
        self._loaded_as = ""

    def task(self, job: JobConfig) -> TrainTask:
        """The task of `[model]`, or the one that was given. Raises what `resolve_task` raises."""
        if self._given is not None:
            return self._given
        with self._lock:
            read = self._reads.get(model_key(job), {})
            if observed(read) != read:  # data that a function read are others now
                self._forget(job)
            return self._once(
                self._tasks,
                lambda: (model_key(job), self._settings()),
                lambda: self._recorded(job, lambda: resolve_task(job)),
            )

    def traced(self, job: JobConfig, task: TrainTask, samples: int, stages: Stages) -> Traced:
        """The step of a task for so many samples."""
        is_own = job.strategy.name == MANUAL
        # The task is kept beside its step, so that its id stays its own.
        kept = self._once(
            self._traced,
            lambda: (
                id(task),
                samples,
                is_own,
                _saves_rows(job),
                job.compiler,
                job.base,
                self._settings(),
            ),
            lambda: (task, self._recorded(job, lambda: _traced(job, task, samples, stages))),
        )
        return kept[1]

    def reads(self, job: JobConfig) -> Reads:
        """What the user's own function read so far: digests of files and variables, versions of
        packages, by name (`reads.py`)."""
        with self._lock:
            return dict(self._reads.get(model_key(job), {}))

    def is_doubtful(self, job: JobConfig) -> bool:
        """Whether jax had settings at a capture of the model that a new process may not have."""
        with self._lock:
            return model_key(job) in self._doubtful

    def _recorded(self, job: JobConfig, make: Callable[[], T]) -> T:
        folder, model = Folder.of(job), model_key(job)
        if jax_settings() not in folder.settings:
            self._doubtful.add(model)
        reads = self._reads.setdefault(model, {})
        with recorded(reads) if job.model.entry else nullcontext():
            found = make()
        folder.learn(reads)
        if model not in self._doubtful:
            folder.settings.add(jax_settings())
        return found

    def _settings(self) -> Hashable:
        """What a capture of the same files depends on besides; that jax is loaded is no change."""
        now = jax_settings()
        self._loaded_as = self._loaded_as or now
        return "" if now == self._loaded_as else now, frozenset(jax_variables().items())

    def _forget(self, job: JobConfig) -> None:
        """Drop what was made of a model; its task is asked for again, which makes another."""
        model = model_key(job)
        self._reads.pop(model, None)
        for key in [key for key in self._tasks if isinstance(key, tuple) and key[0] == model]:
            del self._tasks[key]

    def _once(
        self, kept: dict[Hashable, T], key: Callable[[], Hashable], make: Callable[[], T]
    ) -> T:
        with self._lock:
            if (before := key()) in kept:
                return kept[before]
            found = kept[before] = make()
            kept[key()] = found  # which settings of its own may have changed
            while len(kept) > MOST_KEPT:
                del kept[next(iter(kept))]
            return found


@dataclass(slots=True)
class Stages:
    """Wall-clock seconds per stage, in order, and the captures that the job may share. `begun` is
    told the name of a stage when it begins for the first time."""

    seconds: dict[str, float] = field(default_factory=dict)
    traces: Traces = field(default_factory=Traces)
    begun: Callable[[str], None] | None = None

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the block's time to a stage."""
        if self.begun is not None and name not in self.seconds:
            self.begun(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def trace(self, job: JobConfig, task: TrainTask, samples: int) -> Traced:
        """The step of a task for so many samples, captured unless it is shared."""
        return self.traces.traced(job, task, samples, self)


def _traced(job: JobConfig, task: TrainTask, samples: int, stages: Stages) -> Traced:
    with stages.timed("capture"):
        captured = capture(task, samples, job.base)
    with stages.timed("import"):
        note("captured", lambda: module_text(captured.artifact), "mlir")
        imported, user = import_with_shardings(captured.artifact, base_dir=job.base)
        note("roles", lambda: slots_text(imported, captured.inputs, captured.outputs))
        narrowed = doubles_narrowed(imported, job.compiler)
        step("imported", imported)
        rolled = Rerolled(
            graph=imported, inputs=slots(captured.inputs), outputs=slots(captured.outputs)
        )
        if job.strategy.name != MANUAL:  # whose shardings are the user's, leaf by leaf
            rolled = REROLLED(rolled.graph, rolled.inputs, rolled.outputs)
        note("repeats", lambda: _repeats_text(rolled))
        passes = step_passes(job.compiler, samples, _saves_rows(job))
        rolled = dataclasses.replace(rolled, graph=run(rolled.graph, (*passes, DOUBLES)))
    findings = (*captured.findings, *narrowed)
    return Traced(rolled, samples, user, captured.name, findings, captured.told)


def _saves_rows(job: JobConfig) -> bool:
    return job.strategy.context == "ring"


def _repeats_text(rolled: Rerolled) -> str:
    """What became of repeated layers, and the slots of the step as it is now."""
    notes = "".join(f"{line}\n" for line in rolled.notes) or "no layers repeat outside of loops\n"
    return f"{notes}\n{slots_text(*rolled.parts)}"
