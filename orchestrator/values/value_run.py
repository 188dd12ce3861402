"""The value run of a job: its steps on the ranks' hosts, checkpoints, and what a lost host costs.

A host that is lost is replaced, every rank goes back to the last checkpoint (or to the first
state), and the steps since are made again; they are the same bits, so the run is that of a calm
day. `--resume` does the same in another process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgpack
from threadpoolctl import threadpool_limits

from shardwright.compiler.diagnostics import Diagnostic, ExecutionError, LoadError
from shardwright.compiler.frontend import reference
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.neff.bundle import Bundle
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.config.model import resolve_task
from shardwright.orchestrator.host import executor_kind
from shardwright.orchestrator.road.build import Built
from shardwright.orchestrator.road.numerics import Leaves, level_bound
from shardwright.orchestrator.road.usage import check_hosts, check_steps
from shardwright.orchestrator.service.events import EventLog
from shardwright.orchestrator.service.executor import Emit
from shardwright.orchestrator.service.progress import Progress
from shardwright.orchestrator.values.checkpoint import (
    Checkpoint,
    Writer,
    clear,
    head_meta,
    kept_buffers,
    prune,
    step_folder,
    steps_in,
)
from shardwright.sharding.partition.partitioned import all_values
from shardwright.sim_cluster.values.rank_host import RankHost, packed_host, spans_of
from shardwright.sim_cluster.values.result import L0Check
from shardwright.sim_cluster.values.run_values import HostLostError, Hosts, LocalHosts, ValueRun

VALUE_THREADS = 2
MAX_LOSSES = 3  # of hosts in a row without a new step in between; as for units


@dataclass(frozen=True, slots=True)
class Values:
    """What the value run gave: the loss of every step, the state after one step, the checks at L0,
    warnings, and the metrics of the first step, where this process made it."""

    losses: tuple[float, ...]
    after_one: Leaves
    l0: Mapping[str, L0Check]
    findings: tuple[Diagnostic, ...] = ()
    metrics: Leaves = field(default_factory=dict)


def run_values(
    built: Built,
    bundle: Bundle,
    progress: Progress,
    events: EventLog,
    drawn: Callable[[], Leaves | None] | None = None,
) -> Values:
    """All steps on all simulated cores, from the loaded bundle; `events` is closed after it.
    `drawn` is as in `Source`. Raises UsageError for a timing-only task, LoadError for a checkpoint
    of another run, and ExecutionError (SW_HOST_LOST) when hosts are lost again and again."""
    job = built.job
    check_steps(job.run.steps)
    source = Source(
        task=resolve_task(job),
        global_batch=built.layout.global_batch,
        seed=job.run.seed,
        data=job.run.data,
        compare=job.run.compare,
        drawn=drawn,
    )
    hosts = hosts_of(job, bundle)
    bound = level_bound(job, {value.type.dtype for value in all_values(built.graph)})
    run = ValueRun(bundle.programs, bundle.manifest, l0_bound=bound, hosts=hosts)
    # Whoever has loaded NumPy: threads of BLAS beside cores on threads of ours wait by spinning.
    with closing(run), closing(events), threadpool_limits(1, "blas"):
        folder = Path(job.output.dir) / "checkpoints"
        saved = Checkpoints(folder, job.run.checkpoint_every, _identity(built, bundle))
        training = Training(run, source, saved, progress, events)
        if job.run.resume:
            training.resume()
        return training.train(job.run.steps)


def hosts_of(job: JobConfig, bundle: Bundle) -> Hosts:
    """Where the ranks of a job live. Raises UsageError for more hosts than ranks, or than a Ray
    cluster has CPUs."""
    programs, manifest, count = bundle.programs, bundle.manifest, job.run.hosts
    strict = job.run.strict_indices
    check_hosts(count, manifest.num_cores)
    name = executor_kind(job.run.executor)
    if not count:
        return LocalHosts(
            [RankHost(programs, manifest, threads=VALUE_THREADS, strict_indices=strict)]
        )
    spans = spans_of(manifest.num_cores, count)
    packed = [
        packed_host(programs, manifest, spans, n, strict_indices=strict) for n in range(count)
    ]
    if name == "ray":
        from shardwright.orchestrator.values.ray_hosts import RayHosts

        return RayHosts(spans, packed, job.run.host_timeout_s)
    if name == "inline":
        return LocalHosts([RankHost.unpacked(data) for data in packed])
    from shardwright.orchestrator.values.process_hosts import ProcessHosts

    return ProcessHosts(spans, packed, job.run.host_timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the first state and the batches of a run come from. With `compare`, the state is drawn
    at once, as the unsharded run draws it, or is what that has `drawn` already (None: it has it no
    longer); else in parts of at most `part_bytes`, or one leaf."""

    task: TrainTask
    global_batch: int
    seed: int = 0
    data: str | None = None
    compare: bool = True
    part_bytes: int = 2**28
    drawn: Callable[[], Leaves | None] | None = None

    def state(self, stacks: Mapping[str, Sequence[str]]) -> Iterator[Leaves]:
        """The first state in parts; the leaves of one of `stacks` come together."""
        if self.compare:
            drawn = self.drawn() if self.drawn is not None else None
            yield reference.initial_state(self.task, self.seed) if drawn is None else drawn
            return
        for part in self._parts(stacks):
            yield reference.initial_leaves(self.task, self.seed, part)

    def _parts(self, stacks: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
        """Names of leaves that are drawn together."""
        sizes = reference.state_sizes(self.task)
        stack_of = {leaf: tuple(leaves) for leaves in stacks.values() for leaf in leaves}
        part: list[str] = []
        for stack in dict.fromkeys(stack_of.get(name, (name,)) for name in sizes):
            if part and sum(sizes[name] for name in (*part, *stack)) > self.part_bytes:
                yield part
                part = []
            part += stack
        yield part

    def batches(self, after: int) -> Iterator[Leaves]:
        """The batches of the steps after so many."""
        every = reference.task_batches(self.task, self.seed, self.global_batch, self.data)
        yield from (reference.batch_leaves(batch) for batch in islice(every, after, None))


class Checkpoints:
    """The checkpoints of a run in a directory: saved every so many steps (0: never) and after the
    first and the last. A run that does not go on from those that are there replaces them."""

    def __init__(self, folder: Path, every: int, identity: Mapping[str, Any]) -> None:
        self.folder, self.every, self.identity = folder, every, identity
        self.latest: Path | None = None  # of this run
        self.warnings: list[str] = []

    def is_due(self, step: int, steps: int) -> bool:
        """Whether the state after `step` is to be saved."""
        return bool(self.every) and (step % self.every == 0 or step in (1, steps))

    def save(self, run: ValueRun, step: int, losses: Sequence[float]) -> Path:
        """Write the state of all ranks."""
        with Writer(self.folder, step) as writer:
            held = _holders(run)
            for rank in range(run.manifest.num_cores):
                own = [name for name, by in held.items() if by.get(rank) == rank]
                if own:
                    (host,) = [h for h, span in enumerate(run.hosts.spans) if rank in span]
                    writer.add(rank, run.hosts.ask(host, "state_of", rank, own).answer())
            l0 = list(run.result.l0.values())
            writer.finish(head_meta(step, losses, l0, self.identity, run.manifest, held))
        saved, is_first = step_folder(self.folder, step), self.latest is None
        self.latest = saved
        if is_first:  # those of another run, once there is one of this
            clear(self.folder, saved)
        prune(self.folder, saved)
        return saved

    def last(self) -> Checkpoint | None:
        """The last one of this run that can be read. Raises LoadError when all are of others: two
        runs have some in one place where the second was ended before it had removed the first's."""
        others = []
        for path in steps_in(self.folder):
            try:
                found = Checkpoint(path)
            except LoadError as error:
                self.warnings.append(f"{error.diagnostic.message}; an earlier step is taken")
                continue
            if other := self._other(found):
                others.append(other)
                continue
            self.latest = path
            return found
        if others:
            raise others[0]
        return None

    def restore(self, run: ValueRun, found: Checkpoint) -> None:
        """Give all ranks the state of a checkpoint. Raises LoadError for damaged files."""
        for name, holder, ranks in found.stored():
            data = found.bytes_of(name, holder)
            parts = [[rank for rank in ranks if rank in span] for span in run.hosts.spans]
            replies = [
                run.hosts.ask(host, "put_bytes", name, own, data)
                for host, own in enumerate(parts)
                if own
            ]
            for reply in replies:
                reply.answer()
        run.result.l0 |= {check.program: check for check in found.head.l0}

    def first_state(self) -> Leaves:
        """The state after the first step. Raises LoadError."""
        found = Checkpoint(step_folder(self.folder, 1))
        if other := self._other(found):
            raise other
        return dict(found.leaves())

    def _other(self, found: Checkpoint) -> LoadError | None:
        """The error of a checkpoint of another run."""
        for name, required in self.identity.items():
            if (given := found.head.identity.get(name)) != required:
                return LoadError(
                    "SW_CHECKPOINT",
                    f"{found.path} requires {name} {given}, got {required}",
                    hint="resume with the job it was written by, or take another --out",
                )
        return None


@dataclass(slots=True)
class Training:
    """Steps of a run, one after the other, through the loss of hosts."""

    run: ValueRun
    source: Source
    saved: Checkpoints
    progress: Progress
    emit: Emit
    losses: list[float] = field(default_factory=list)
    after_one: Leaves | None = None
    metrics: Leaves = field(default_factory=dict)  # of the first step
    is_loaded: bool = False
    furthest: int = 0  # steps that were made, also those that are made again
    lost: int = 0  # hosts in a row without a new step in between

    def resume(self) -> None:
        """Go on from the last checkpoint, if there is one. Raises LoadError where the state after
        the first step, which is compared, is gone."""
        found = self.saved.last()
        if found is None:
            self.progress.say(f"no checkpoint in {self.saved.folder}; starting with step 1")
            return
        if self.source.compare:
            self.after_one = self.saved.first_state()
        self.progress.say(f"goes on after step {found.head.step} of {found.path}")
        self.emit("values.resumed", step=found.head.step, path=str(found.path))

    def train(self, steps: int) -> Values:
        """The steps that are left. Raises LoadError when more were made already."""
        while True:
            try:
                self._go_on(steps)
                return self._values()
            except HostLostError as error:
                self.lost += 1
                self._replace(error)

    def _go_on(self, steps: int) -> None:
        if not self.is_loaded:
            self._rewind()
        done = len(self.losses)
        if done > steps:
            raise LoadError(
                "SW_CHECKPOINT",
                f"{self.saved.latest} requires run.steps {done} or more, got {steps}",
                hint="resume with as many steps, or start again without --resume",
            )
        for batch in islice(self.source.batches(done), steps - done):
            self._step(batch, steps)
            if len(self.losses) > self.furthest:
                self.furthest, self.lost = len(self.losses), 0

    def _step(self, batch: Leaves, steps: int) -> None:
        metrics = self.run.step(batch)
        mode = self.source.task.mode
        result = f"metrics/{mode.result}"
        losses = [*self.losses, mode.number(metrics[result])]
        number = len(losses)
        if number == 1:
            self.metrics = metrics
            if self.source.compare:
                manifest = self.run.manifest  # of its leaves those of the user that outlive a step
                kept = [b for b in kept_buffers(manifest) if b.initial == "given"]
                names = {leaf for b in kept for leaf in manifest.user_leaves(b)}
                self.after_one = self.run.gather(sorted(names))
                if not mode.trains:
                    self.after_one[result] = metrics[result]
        if self.saved.is_due(number, steps):
            path = self.saved.save(self.run, number, losses)
            self.emit("checkpoint.saved", step=number, path=str(path))
        self.losses = losses
        self.progress.step(number - 1, steps, losses[-1], None)

    def _rewind(self) -> None:
        """To the last checkpoint of this run, or to its first state."""
        self.losses = []
        if self.saved.latest is not None:
            found = Checkpoint(self.saved.latest)
            self.saved.restore(self.run, found)
            self.losses = list(found.head.losses)
        else:
            self.run.reset()
            for part in self.source.state(self.run.manifest.stacks):
                self.run.load(part)
        self.is_loaded, self.furthest = True, max(self.furthest, len(self.losses))

    def _replace(self, error: HostLostError) -> None:
        """Another host for the ranks of one that is gone. Raises ExecutionError when that happens
        again and again."""
        hosts, host, why = self.run.hosts, error.host, error.why
        span = hosts.spans[host]
        where = f"ranks {span.start}-{span.stop - 1}"
        self.emit("host.lost", host=host, first_rank=span.start, ranks=len(span), why=why)
        if self.lost >= MAX_LOSSES:
            raise ExecutionError(
                "SW_HOST_LOST",
                f"a value run requires hosts that live, host {host} ({where}) was lost, the"
                f" {self.lost}th time without a new step in between" + (f": {why}" if why else ""),
                hint="see what it prints on stderr; with more hosts each needs less memory",
            )
        told = f"was lost: {why}" if why else "was lost"
        self.progress.say(f"host {host} ({where}) {told}; another one takes its place")
        hosts.replace(host)
        self.is_loaded = False

    def _values(self) -> Values:
        l0 = dict(self.run.result.l0)
        told = [Diagnostic("SW_CHECKPOINT", w, severity="warning") for w in self.saved.warnings]
        findings = (*self.run.findings(), *told)
        return Values(tuple(self.losses), self.after_one or {}, l0, findings, self.metrics)


def _holders(run: ValueRun) -> dict[str, dict[int, int]]:
    """For every kept buffer and rank, the first rank with the same bytes."""
    names = [buffer.name for buffer in kept_buffers(run.manifest)]
    replies = [run.hosts.ask(host, "digests", names) for host in range(len(run.hosts.spans))]
    held: dict[str, dict[int, int]] = {name: {} for name in names}
    first: dict[tuple[str, bytes], int] = {}
    for reply in replies:
        for rank, name, digest in reply.answer():
            held[name][rank] = first.setdefault((name, digest), rank)
    return held


def _identity(built: Built, bundle: Bundle) -> dict[str, Any]:
    """What runs must share so that one can go on from the other's checkpoint."""
    job = built.job
    bare = replace(bundle.manifest, metadata={}, instances=0)  # without what says nothing of values
    return {
        "programs": hashlib.sha256(msgpack.packb(bare.to_meta())).hexdigest(),
        "run.seed": job.run.seed,
        "run.compare": job.run.compare,
        "run.data": _data_digest(job.run.data),
        "strategy.global_batch": built.layout.global_batch,
    }


def _data_digest(data: str) -> str:
    """The text of a run: the digest of a file, the name of any other."""
    path = Path(data)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else data
