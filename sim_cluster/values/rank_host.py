"""A host of ranks: the memories and programs of a range of ranks, and their part in collectives.

Whoever drives a value run (`run_values.py`) calls the methods of its hosts by name, in this
process or in others; one host of all ranks is the run in one process. What ranks send to ranks of
other hosts leaves as arrays, one list per host, and comes in the same way. A host computes what
its own ranks receive, in the order of the schedule, so that bits do not depend on the hosts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgpack
import numpy as np

from shardwright.collectives.ops import positions
from shardwright.compiler.diagnostics import Loc, SimulationError
from shardwright.compiler.isa.program import CollectiveCall, Program
from shardwright.compiler.neff.bundle import program_bytes, read_program
from shardwright.compiler.neff.manifest import Manifest, NamedBuffer
from shardwright.compiler.neff.reader import Container
from shardwright.compiler.neff.schedule import STAGE_AXIS, run_counts
from shardwright.compiler.support.rounding import Draws, allowed
from shardwright.sim_cluster.instructions.index_watch import Access, IndexWatch
from shardwright.sim_cluster.values import layout
from shardwright.sim_cluster.values.exchange import Exchange, Payload, Schedules, ring_schedules
from shardwright.sim_cluster.values.functions import L0, L1, CollectiveRequest
from shardwright.sim_cluster.values.memory import CoreMemory
from shardwright.sim_cluster.values.programs import ProgramCode
from shardwright.sim_cluster.values.result import L0Check, distance

Running = Iterator[CollectiveRequest]
Shards = Mapping[tuple[int, ...], np.ndarray]
"""Shards of a global array by where they begin in it."""
SENDING = ("advance", "meet", "read")
"""Methods that return a pair: their answer, and one payload per host."""


@dataclass(slots=True)
class _Stage:
    """A program that runs on the ranks of a stage that are here."""

    program: str
    ranks: Sequence[int]
    running: Sequence[Running]
    shadow: _Shadow | None
    waiting: dict[int, CollectiveRequest] = field(default_factory=dict)  # by rank


class RankHost:
    """See the module. `spans` are the ranks of every host, `number` is which of them this is."""

    def __init__(
        self,
        programs: Mapping[str, Program],
        manifest: Manifest,
        spans: Sequence[range] = (),
        number: int = 0,
        *,
        level: str = L1,
        schedules: Schedules = ring_schedules,
        threads: int = 1,
        strict_indices: bool = False,
    ) -> None:
        self.programs, self.manifest = programs, manifest
        self.spans, self.number = spans or (range(manifest.num_cores),), number
        self.watch = IndexWatch(strict_indices)
        self.ranks = self.spans[number]
        self.cores = {rank: self._new_core(rank) for rank in self.ranks}
        self._exchange = Exchange(self.spans, number, schedules)
        named = _programs_of(manifest, self.ranks)
        self._codes = {n: ProgramCode(programs[n], level, self.watch) for n in named}
        self._pool = ThreadPoolExecutor(threads) if threads > 1 and level == L1 else None
        self._stages: dict[int, _Stage] = {}
        self.reset()

    @classmethod
    def unpacked(cls, data: bytes) -> RankHost:
        """The host that `packed_host` describes."""
        row = msgpack.unpackb(data, use_list=False)
        programs = {n: read_program(Container(b, n)) for n, b in row["programs"].items()}
        spans = tuple(range(*span) for span in row["spans"])
        manifest = Manifest.from_meta(row["manifest"], "value run")
        return cls(programs, manifest, spans, row["number"], **row["settings"])

    def reset(self) -> None:
        """Zeros where the manifest says so, whatever a step that was not ended has added up;
        coordinates from the rank."""
        for buffer in self.manifest.buffers.values():
            for rank in self._having(buffer):
                array = self.cores[rank].array(buffer.name, buffer.dtype)
                if buffer.role == "coordinate":
                    array[:] = layout.coordinate(buffer, self.manifest.mesh, rank)
                elif buffer.initial == "zeros":
                    array[:] = 0

    def put(self, name: str, shards: Shards) -> None:
        """Fill a named buffer of all ranks here."""
        buffer = self.manifest.buffers[name]
        self._put(buffer, shards, self._having(buffer))

    def put_bytes(self, name: str, ranks: Sequence[int], data: np.ndarray) -> None:
        """Fill a named buffer of some ranks with bytes."""
        for rank in ranks:
            self.cores[rank].named[name][:] = data

    def begin(
        self,
        stage: int,
        program: str,
        number: int,
        batch: Mapping[str, Shards],
        l0_bound: float | None,
    ) -> None:
        """Start a program for micro-batch `number`; with `l0_bound` the first rank of the stage
        runs it at L0 as well, if it is here."""
        ranks = self._of_stage(stage)
        for name, shards in batch.items():
            self._put(self.manifest.buffers[name], shards, ranks)
        for rank in ranks:
            self.cores[rank].select(number)
        first = self.manifest.ranks(stage)[0]
        shadow = None
        if l0_bound is not None and first in self.cores:
            shadow = _Shadow(self.programs[program], self.cores[first], first, l0_bound)
        running = [self._codes[program].run(self.cores[rank]) for rank in ranks]
        self._stages[stage] = _Stage(program, ranks, running, shadow)

    def advance(
        self, stage: int, incoming: Sequence[Payload | None]
    ) -> tuple[tuple[CollectiveCall | None, L0Check | None], list[Payload]]:
        """Finish the collective the stage waits for, if any, and run to the next: its call (None:
        the program has ended, with what L0 has to say), and what is sent for it. For a collective
        over stages nothing is sent before they `meet`."""
        now = self._stages[stage]
        if now.waiting:
            self.finish((stage,), incoming)
        requests = self._run(now)
        if now.shadow is not None:
            now.shadow.advance(requests[0])
        now.waiting = {r: q for r, q in zip(now.ranks, requests, strict=True) if q is not None}
        if now.waiting and len(now.waiting) < len(requests):
            raise SimulationError(
                "SW_SIM_LOCK_STEP", f"some ranks of {now.program} end before others"
            )
        nothing: list[Payload] = [() for _ in self.spans]
        if not now.waiting:
            check = now.shadow.compare(self.manifest.buffers) if now.shadow else None
            return (None, check), nothing
        call = now.waiting[now.ranks[0]].call
        return (call, None), nothing if STAGE_AXIS in call.axes else self.meet((stage,))[1]

    def meet(self, stages: Sequence[int]) -> tuple[None, list[Payload]]:
        """What the ranks here send for the collective all ranks of `stages` wait for."""
        return None, self._exchange.sent(*self._meeting(stages))

    def finish(self, stages: Sequence[int], incoming: Sequence[Payload | None]) -> None:
        """Deliver the result of that collective to the ranks here."""
        self._exchange.finish(*self._meeting(stages), incoming)
        for stage in stages:
            if stage in self._stages:
                self._stages[stage].waiting = {}

    def read(self, transfer: int, number: int) -> tuple[None, list[Payload]]:
        """What ranks here send with a transfer."""
        t = self.manifest.transfers[transfer]
        sent: list[list[np.ndarray]] = [[] for _ in self.spans]
        for source, target in self._pairs(transfer):
            if source in self.cores:
                data = self.cores[source].slot(t.sent, number)
                sent[self._exchange.host_of(target)].append(data)
        return None, list(sent)

    def write(self, transfer: int, number: int, incoming: Sequence[Payload | None]) -> None:
        """Put what ranks here receive with a transfer in its buffer."""
        received = [iter(payload or ()) for payload in incoming]
        name = self.manifest.transfers[transfer].received
        for source, target in self._pairs(transfer):
            if target in self.cores:
                data = next(received[self._exchange.host_of(source)])
                self.cores[target].slot(name, number)[:] = data

    def shards(self, name: str) -> dict[int, np.ndarray]:
        """The distinct shards of a named buffer by a rank that has them. Raises SimulationError
        (SW_SIM_REPLICAS)."""
        buffer = self.manifest.buffers[name]
        own = {r: self.cores[r].array(name, buffer.dtype) for r in self._having(buffer)}
        return layout.distinct(buffer, self.manifest.mesh, own)

    def digests(self, names: Sequence[str]) -> list[tuple[int, str, bytes]]:
        """Rank, name and digest of the bytes of named buffers."""
        return [
            (rank, name, hashlib.sha256(self.cores[rank].named[name].data).digest())
            for name in names
            for rank in self._having(self.manifest.buffers[name])
        ]

    def state_of(self, rank: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """The bytes of named buffers of a rank."""
        return {name: self.cores[rank].named[name] for name in names}

    def indices(self) -> list[tuple[Access, Loc | None, int]]:
        """Indices out of bounds so far: access, place, how many."""
        return [(name, loc, count) for (name, loc), count in self.watch.counts.items()]

    def close(self) -> None:
        """Stop the host threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _meeting(
        self, stages: Sequence[int]
    ) -> tuple[dict[int, CollectiveRequest], Sequence[int], Mapping[str, int]]:
        """Requests of the ranks here, all ranks that take part, and their mesh."""
        requests: dict[int, CollectiveRequest] = {}
        for stage in stages:
            if stage in self._stages:
                requests |= self._stages[stage].waiting
        ranks = [rank for stage in stages for rank in self.manifest.ranks(stage)]
        whole = len(stages) == len(self.manifest.schedules)
        return requests, ranks, self.manifest.mesh if whole else self.manifest.stage_mesh

    def _run(self, now: _Stage) -> list[CollectiveRequest | None]:
        """Run every rank to its next collective (None: it has ended)."""
        if self._pool is None:
            return [_next_quietly(running) for running in now.running]
        return list(self._pool.map(_next_quietly, now.running))

    def _pairs(self, transfer: int) -> Iterator[tuple[int, int]]:
        t = self.manifest.transfers[transfer]
        return zip(self.manifest.ranks(t.source), self.manifest.ranks(t.target), strict=True)

    def _of_stage(self, stage: int) -> list[int]:
        return [rank for rank in self.manifest.ranks(stage) if rank in self.cores]

    def _having(self, buffer: NamedBuffer) -> list[int]:
        """The ranks here that have a buffer."""
        return [rank for rank in self.ranks if buffer.on(self.manifest.stage(rank))]

    def _put(self, buffer: NamedBuffer, shards: Shards, ranks: Sequence[int]) -> None:
        for rank in ranks:
            shard = shards[layout.shard_start(buffer, self.manifest.mesh, rank)]
            self.cores[rank].array(buffer.name, buffer.dtype)[:] = shard.reshape(-1)

    def _new_core(self, rank: int) -> CoreMemory:
        """The memory of a rank."""
        stage = self.manifest.stage(rank)
        own = [b for b in self.manifest.buffers.values() if b.on(stage)]
        return CoreMemory(
            [(b.name, b.num_bytes) for b in own],
            {b.name: b.slots_on(stage) for b in own},
            positions(self.manifest.mesh, rank),
        )


def invoke(host: RankHost, method: str, args: Sequence[Any]) -> tuple[Any, list[Payload]]:
    """Call a method of a host by name: its answer, and what it sends to every host."""
    with np.errstate(all="ignore"):
        found = getattr(host, method)(*args)
    return found if method in SENDING else (found, [])


def packed_host(
    programs: Mapping[str, Program],
    manifest: Manifest,
    spans: Sequence[range],
    number: int,
    **settings: Any,
) -> bytes:
    """A host as bytes, for another process: the programs of its ranks, and plain settings."""
    named = _programs_of(manifest, spans[number])
    row = {
        "programs": {name: program_bytes(programs[name], {}) for name in named},
        "manifest": manifest.to_meta(),
        "spans": [(span.start, span.stop) for span in spans],
        "number": number,
        "settings": settings,
    }
    data: bytes = msgpack.packb(row)
    return data


def _programs_of(manifest: Manifest, ranks: range) -> list[str]:
    """The names of the programs that some ranks run."""
    here = {manifest.stage(rank) for rank in ranks}
    return sorted({name for stage in here for name in run_counts(manifest.schedules[stage])})


def spans_of(num_ranks: int, hosts: int) -> tuple[range, ...]:
    """As many ranks in a row for every host as can be, the same number or one more."""
    ends = [num_ranks * host // hosts for host in range(hosts + 1)]
    return tuple(range(low, high) for low, high in pairwise(ends))


def _next_quietly(running: Running) -> CollectiveRequest | None:
    with np.errstate(all="ignore"):  # the error state belongs to a thread
        return next(running, None)


class _Shadow:
    """The first core of a program at L0, beside the L1 run: same inputs, and the L1 run's
    collective results. And once more at L1 with its roundings drawn, which says what they explain.
    """

    def __init__(self, program: Program, core: CoreMemory, rank: int, bound: float) -> None:
        self.program, self.core, self.rank, self.bound = program, core, rank, bound
        self.code = ProgramCode(program, L0)
        self.memory, self.drawn = core.copy_named(), core.copy_named()
        self.running = self.code.run(self.memory)
        self.drawing = ProgramCode(program, L1, draws=Draws(rank)).run(self.drawn)
        self.found: list[tuple[str, float, float]] = []  # name, distance, allowed

    def advance(self, partner: CollectiveRequest | None) -> None:
        """Run to the next collective; compare what is sent and take the partner's result."""
        requests = _next_quietly(self.running), _next_quietly(self.drawing)
        if any((request is None) != (partner is None) for request in requests):
            raise SimulationError(
                "SW_SIM_LOCK_STEP", f"L0 and L1 of {self.program.name} disagree on collectives"
            )
        request, drawn = requests
        if request is None or drawn is None or partner is None:
            return
        name = f"source of {request.call.name or request.call.kind}"
        self._note(name, request.source, partner.source, drawn.source)
        partner.deliver = _all_of(partner.deliver, request.deliver, drawn.deliver)

    def compare(self, buffers: Mapping[str, NamedBuffer]) -> L0Check:
        """The check, after all runs have ended."""
        for name in self.program.outputs:
            dtype = buffers[name].dtype
            memories = (self.memory, self.core, self.drawn)
            self._note(name, *(memory.array(name, dtype) for memory in memories))
        nothing = ("", 0.0, self.bound)
        worst, far, limit = max(self.found, key=lambda row: row[1] / row[2], default=nothing)
        return L0Check(self.program.name, self.rank, self.code.instructions, far, worst, limit)

    def _note(self, what: str, given: np.ndarray, wanted: np.ndarray, drawn: np.ndarray) -> None:
        far = distance(given, wanted)
        effect = distance(drawn, wanted) if far > self.bound else 0.0
        limit = allowed(self.bound, effect if np.isfinite(effect) else 0.0)
        self.found.append((what, far, limit))


def _all_of(*deliveries: Callable[[np.ndarray], None]) -> Callable[[np.ndarray], None]:
    def deliver(result: np.ndarray) -> None:
        for one in deliveries:
            one(result)

    return deliver
