"""Value runs: whole training steps of all ranks of a mesh, from program files and a manifest alone.

The stages of a pipeline follow their own schedules (`stage_order.py`). The ranks of a stage run the
same program in lock step up to the next collective, wherever they live: this module tells the
hosts of ranks (`rank_host.py`) what to do next, and passes on what they send each other without
looking at it. The first time a program runs, one core also runs it instruction by instruction (L0)
from the same inputs, and the distance is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from shardwright.compiler.diagnostics import Diagnostic, SimulationError
from shardwright.compiler.isa.program import CollectiveCall, Program
from shardwright.compiler.neff.manifest import Manifest, NamedBuffer
from shardwright.compiler.neff.schedule import STAGE_AXIS, Transfer, run_counts
from shardwright.sim_cluster.instructions.index_watch import IndexWatch
from shardwright.sim_cluster.timing.stage_order import StageOrder
from shardwright.sim_cluster.values import layout
from shardwright.sim_cluster.values.exchange import not_in_step
from shardwright.sim_cluster.values.rank_host import RankHost, Shards, invoke
from shardwright.sim_cluster.values.result import L0_BOUND, ValueResult

Handle = Any
"""What a host sent to another, as its back end holds it."""


class Reply(Protocol):
    """What a host was asked."""

    def answer(self) -> Any:
        """Wait for the answer. Raises what the method raised, or HostLostError."""

    def sent(self) -> Sequence[Handle]:
        """What it sends, one handle per host; none for methods that send nothing."""


class Hosts(Protocol):
    """Hosts of ranks, wherever they are. Each does what it is asked in order."""

    spans: Sequence[range]

    def ask(
        self, host: int, method: str, *args: object, incoming: Sequence[Handle] | None = None
    ) -> Reply:
        """Call a method of a host, with what every host sent it as the last argument where
        `incoming` is given; does not wait."""

    def replace(self, host: int) -> None:
        """New hosts, without state, for a lost one and all others that are gone too."""

    def close(self) -> None:
        """Release the hosts."""


class HostLostError(Exception):
    """A host went away, or is taken for gone, and the state of its ranks with it; `why` is empty
    where nothing is known."""

    def __init__(self, host: int, why: str = "") -> None:
        super().__init__(f"host {host}" + (f": {why}" if why else ""))
        self.host, self.why = host, why


@dataclass(frozen=True, slots=True)
class _Done:
    """A reply that is there."""

    _answer: Any
    _sent: Sequence[Handle]

    def answer(self) -> Any:
        """See Reply."""
        return self._answer

    def sent(self) -> Sequence[Handle]:
        """See Reply."""
        return self._sent


class LocalHosts:
    """Hosts of ranks in this process, one as a rule."""

    def __init__(self, hosts: Sequence[RankHost]) -> None:
        self.hosts = hosts
        self.spans = hosts[0].spans

    def ask(
        self, host: int, method: str, *args: object, incoming: Sequence[Handle] | None = None
    ) -> Reply:
        """See Hosts."""
        given = args if incoming is None else (*args, incoming)
        answer, sent = invoke(self.hosts[host], method, given)
        # What is sent is memory that the ranks go on to write.
        return _Done(answer, [[a if a is None else a.copy() for a in arrays] for arrays in sent])

    def replace(self, host: int) -> None:
        """See Hosts; what is lost here is lost with all of us."""
        raise HostLostError(host)

    def close(self) -> None:
        """See Hosts."""
        for host in self.hosts:
            host.close()


class ValueRun:
    """The cores of one step in values.

    `programs` maps the names of the manifest's schedule to linked programs. With `check_l0`, the
    first run of every program is also made at L0 on the first core of its stage, and compared with
    L1 within `l0_bound` or what rounding explains. The ranks live on
    `hosts`, by default on one in this process made with `settings` (those of `RankHost`): at
    `level` L0 every core executes every instruction; `threads` host threads share the ranks; with
    `strict_indices` an index out of bounds ends the run. Results do not depend on hosts or threads.
    """

    def __init__(
        self,
        programs: Mapping[str, Program],
        manifest: Manifest,
        *,
        check_l0: bool = True,
        l0_bound: float = L0_BOUND,
        hosts: Hosts | None = None,
        **settings: Any,
    ) -> None:
        named = {name for schedule in manifest.schedules for name in run_counts(schedule)}
        if missing := named - programs.keys():
            raise SimulationError(
                "SW_SIM_PROGRAM", f"the schedule names programs {sorted(missing)}, not given"
            )
        self.programs, self.manifest = programs, manifest
        self.check_l0, self.l0_bound = check_l0, l0_bound
        self.hosts = hosts or LocalHosts([RankHost(programs, manifest, **settings)])
        self._everyone = range(len(self.hosts.spans))
        self.result = ValueResult()
        self._batch: Mapping[str, np.ndarray] = {}
        self._leaves: dict[str, list[NamedBuffer]] = {}
        for buffer in manifest.buffers.values():
            self._leaves.setdefault(buffer.leaf, []).append(buffer)
        stacks = manifest.stacks.items()
        self._rows = {leaf: (name, i) for name, row in stacks for i, leaf in enumerate(row)}

    def reset(self) -> None:
        """All ranks as before their first step, but for what is to be loaded."""
        self._ask(self._everyone, "reset")

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Shard global arrays into the named buffers of all ranks, converting to the buffers'
        types.

        Raises SimulationError for an unknown name or a wrong shape.
        """
        for name, array in layout.stacked(state, self.manifest.stacks).items():
            parts = self._leaf(name)
            whole = layout.check_leaf(parts, np.asarray(array))
            for buffer in parts:
                wanted = layout.sharded_shape(buffer, self.manifest.mesh)
                own = layout.padded(buffer, layout.part_of(buffer, whole), wanted)
                own = layout.check_global(buffer, own, wanted)
                hosts = self._hosts_of(buffer)
                self._all(
                    self.hosts.ask(h, "put", buffer.name, self._shards(buffer, own, h))
                    for h in hosts
                )

    def step(self, batch: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """One step of all stages on a global batch; the metrics by name.

        Raises SimulationError (SW_SIM_DEADLOCK) when stages wait for each other.
        """
        for name in batch:
            self._leaf(name)
        self._batch = batch
        StageOrder(self.manifest.schedules, self.manifest.transfers, self).run()
        metrics = self.gather(self._metrics())
        self.result.steps.append(metrics)
        return metrics

    def gather(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Global arrays of leaves. Raises SimulationError when copies that must be equal differ."""
        wanted = {name: self._rows.get(name, (name, None)) for name in sorted(names)}
        whole = {
            stack: layout.join_parts([(b, self._gathered(b)) for b in self._leaf(stack)])
            for stack in {stack for stack, _ in wanted.values()}
        }
        return {
            n: whole[stack] if i is None else whole[stack][i] for n, (stack, i) in wanted.items()
        }

    def run(self, stage: int, program: str, number: int) -> Iterator[int]:
        """Run one program on the ranks of a stage in lock step, for micro-batch `number`.

        Yields the stage at collectives over stages, which `join` finishes.
        """
        hosts = self._on(stage)
        self._begin(stage, program, number, hosts)
        nothing: dict[int, list[Handle]] = {h: [None] * len(self._everyone) for h in hosts}
        incoming = nothing
        while True:
            replies = {h: self.hosts.ask(h, "advance", stage, incoming=incoming[h]) for h in hosts}
            answers = self._all(replies.values())
            call = self._same_call(program, hosts, [call for call, _ in answers])
            if call is None:
                checks = [check for _, check in answers if check is not None]
                self.result.l0.update((check.program, check) for check in checks)
                return
            if STAGE_AXIS in call.axes:
                yield stage
                incoming = nothing
            else:
                incoming = self._passed_on(replies)

    def join(self, parts: Sequence[int]) -> None:
        """A collective over the stages `parts`."""
        replies = {h: self.hosts.ask(h, "meet", parts) for h in self._everyone}
        self._all(replies.values())
        self._ask(self._everyone, "finish", parts, incoming=self._passed_on(replies))

    def read(self, transfer: Transfer, number: int) -> Mapping[int, Reply]:
        """What the ranks of a stage send."""
        index = self.manifest.transfers.index(transfer)
        replies = {h: self.hosts.ask(h, "read", index, number) for h in self._on(transfer.source)}
        self._all(replies.values())
        return replies

    def write(self, transfer: Transfer, number: int, data: Mapping[int, Reply]) -> None:
        """Put what the ranks of a stage received in its buffer."""
        index = self.manifest.transfers.index(transfer)
        self._ask(self._on(transfer.target), "write", index, number, incoming=self._passed_on(data))

    def findings(self) -> list[Diagnostic]:
        """Warnings of all hosts: indices that were out of bounds."""
        watch = IndexWatch()
        for counts in self._ask(self._everyone, "indices"):
            for name, loc, count in counts:
                watch.counts[name, loc] = watch.counts.get((name, loc), 0) + count
        return watch.findings

    def close(self) -> None:
        """Release the hosts."""
        self.hosts.close()

    def _begin(self, stage: int, program: str, number: int, hosts: Sequence[int]) -> None:
        """Start a program with what it reads of the batch."""
        whole = dict(self._micro_batch(program, number))
        check = self.l0_bound if self.check_l0 and program not in self.result.l0 else None
        replies = []
        for host in hosts:
            batch = {b.name: self._shards(b, array, host) for b, array in whole.values()}
            replies.append(self.hosts.ask(host, "begin", stage, program, number, batch, check))
        self._all(replies)

    def _micro_batch(
        self, program: str, number: int
    ) -> Iterator[tuple[str, tuple[NamedBuffer, np.ndarray]]]:
        """What a program reads of the batch: buffers, and the arrays all ranks have together."""
        count = self.manifest.num_microbatches
        for name in self.programs[program].inputs:
            (buffer,) = self._leaf(name) if name in self._leaves else (None,)
            if buffer is not None and buffer.role == "batch":
                whole = np.asarray(self._batch[name])
                part = layout.micro_batch(buffer, self.manifest.mesh, whole, number, count)
                yield name, (buffer, part)

    def _shards(self, buffer: NamedBuffer, array: np.ndarray, host: int) -> Shards:
        """What the ranks of a host hold of a global array."""
        mesh, found = self.manifest.mesh, {}
        for rank in self.hosts.spans[host]:
            where = layout.shard_slices(buffer, mesh, rank)
            found[tuple(s.start for s in where)] = array[where]
        return found

    def _gathered(self, buffer: NamedBuffer) -> np.ndarray:
        """The global array of one buffer."""
        shards: dict[int, np.ndarray] = {}
        for own in self._ask(self._hosts_of(buffer), "shards", buffer.name):
            shards |= own
        return layout.cropped(buffer, layout.gather_array(buffer, self.manifest.mesh, shards))

    def _passed_on(self, replies: Mapping[int, Reply]) -> dict[int, list[Handle]]:
        """For every host, what each sent it."""
        sent = {host: reply.sent() for host, reply in replies.items()}
        everyone = self._everyone
        return {h: [sent[o][h] if o in sent else None for o in everyone] for h in everyone}

    def _same_call(
        self, program: str, hosts: Sequence[int], calls: Sequence[CollectiveCall | None]
    ) -> CollectiveCall | None:
        """What all hosts wait for. Raises SimulationError when they do not agree."""
        first = calls[0]
        for host, call in zip(hosts, calls, strict=True):
            if first is None or call is None:
                if first is not call:
                    message = f"some ranks of {program} end before others"
                    raise SimulationError("SW_SIM_LOCK_STEP", message)
            elif call.met != first.met:
                ranks = [self.hosts.spans[h].start for h in (hosts[0], host)]
                raise not_in_step(ranks[0], first, ranks[1], call)
        return first

    def _ask(
        self,
        hosts: Iterable[int],
        method: str,
        *args: object,
        incoming: Mapping[int, Sequence[Handle]] | None = None,
    ) -> list[Any]:
        """What hosts answer, each with what is passed on to it."""
        given = incoming or {}
        return self._all(self.hosts.ask(h, method, *args, incoming=given.get(h)) for h in hosts)

    @staticmethod
    def _all(replies: Iterable[Reply]) -> list[Any]:
        """The answers of all, which work at the same time."""
        return [reply.answer() for reply in list(replies)]

    def _on(self, stage: int) -> list[int]:
        """The hosts of a stage."""
        ranks = self.manifest.ranks(stage)
        spans = enumerate(self.hosts.spans)
        return [h for h, span in spans if span.start < ranks.stop and ranks.start < span.stop]

    def _hosts_of(self, buffer: NamedBuffer) -> list[int]:
        """The hosts that have a buffer."""
        stages = (s for s in range(len(self.manifest.schedules)) if buffer.on(s))
        return sorted({host for stage in stages for host in self._on(stage)})

    def _metrics(self) -> set[str]:
        """Reported scalars; what starts at zero is an accumulator of one core and belongs to no
        report."""
        buffers = self.manifest.buffers.values()
        return {b.name for b in buffers if b.role == "metric" and b.initial != "zeros"}

    def _leaf(self, name: str) -> list[NamedBuffer]:
        try:
            return self._leaves[name]
        except KeyError:
            raise SimulationError(
                "SW_SIM_BINDING", f"the step has no buffer named {name!r}"
            ) from None
