"""Value runs: whole training steps of all ranks of a mesh, from program files and a manifest alone.

The stages of a pipeline follow their own schedules (`stage_order.py`). The ranks of a stage run the
same program in lock step up to the next collective wait, then `exchange` moves the data of all
groups. The first time a program runs, one core also runs it instruction by instruction (L0)
from the same inputs, and the distance is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from compiler.diagnostics import SimulationError
from compiler.isa.program import Program
from compiler.neff.manifest import Manifest, NamedBuffer
from compiler.neff.schedule import STAGE_AXIS, Transfer, run_counts
from sim_cluster import layout
from sim_cluster.exchange import Schedules, exchange, ring_schedules
from sim_cluster.functions import L0, L1, CollectiveRequest
from sim_cluster.index_watch import IndexWatch
from sim_cluster.memory import CoreMemory
from sim_cluster.programs import ProgramCode
from sim_cluster.result import L0Check, ValueResult, distance
from sim_cluster.stage_order import StageOrder

Running = Iterator[CollectiveRequest]


class ValueRun:
    """The cores of one step in values.

    `programs` maps the names of the manifest's schedule to linked programs. With `check_l0`, the
    first run of every program is also made at L0 on the first core of its stage. `level` is that of
    the run itself: at L0 every core executes every instruction. Indices out of bounds are counted
    in `watch`, or end the run with `strict_indices`. `threads` host threads share the ranks;
    results do not depend on it.
    """

    def __init__(
        self,
        programs: Mapping[str, Program],
        manifest: Manifest,
        *,
        check_l0: bool = True,
        level: str = L1,
        schedules: Schedules = ring_schedules,
        threads: int = 1,
        strict_indices: bool = False,
    ) -> None:
        named = {name for schedule in manifest.schedules for name in run_counts(schedule)}
        if missing := named - programs.keys():
            raise SimulationError(
                "SW_SIM_PROGRAM", f"the schedule names programs {sorted(missing)}, not given"
            )
        self.programs, self.manifest, self.schedules = programs, manifest, schedules
        self.check_l0 = check_l0
        self.result = ValueResult()
        self.watch = IndexWatch(strict_indices)
        self._codes = {name: ProgramCode(p, level, self.watch) for name, p in programs.items()}
        self._pool = ThreadPoolExecutor(threads) if threads > 1 and level == L1 else None
        self._batch: Mapping[str, np.ndarray] = {}
        self.cores = [c for s in range(len(manifest.schedules)) for c in self._new_cores(s)]
        self._leaves: dict[str, list[NamedBuffer]] = {}
        for buffer in manifest.buffers.values():
            self._leaves.setdefault(buffer.leaf, []).append(buffer)
        stacks = manifest.stacks.items()
        self._rows = {leaf: (name, i) for name, row in stacks for i, leaf in enumerate(row)}
        self._fill_initial()

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
                self._scatter(buffer, own, self._ranks(buffer))

    def step(self, batch: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """One step of all stages on a global batch; the metrics by name.

        Raises SimulationError (SW_SIM_DEADLOCK) when stages wait for each other.
        """
        for name in batch:
            self._leaf(name)
        self._batch = batch
        with np.errstate(all="ignore"):
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

    def _gathered(self, buffer: NamedBuffer) -> np.ndarray:
        """The global array of one buffer."""
        ranks = self._ranks(buffer)
        shards = {rank: self.cores[rank].array(buffer.name, buffer.dtype) for rank in ranks}
        return layout.cropped(buffer, layout.gather_array(buffer, self.manifest.mesh, shards))

    def run(self, stage: int, program: str, number: int) -> Iterator[list[CollectiveRequest]]:
        """Run one program on the ranks of a stage in lock step, for micro-batch `number`.

        Yields the requests of collectives over stages, which `join` answers.
        """
        ranks = self.manifest.ranks(stage)
        cores = [self.cores[rank] for rank in ranks]
        self._load_micro_batch(program, number, ranks)
        for core in cores:
            core.select(number)
        code = self._codes[program]
        shadow = self._shadow(program, ranks) if self._unchecked(program) else None
        running = [code.run(core) for core in cores]
        while waiting := self._waiting(program, running, shadow):
            if STAGE_AXIS in waiting[0].call.axes:
                yield waiting
            else:
                exchange(waiting, self.manifest.stage_mesh, self.schedules)
        if shadow is not None:
            self.result.l0[program] = shadow.compare(cores[0], self.manifest.buffers)

    def _waiting(
        self, program: str, running: Sequence[Running], shadow: _Shadow | None
    ) -> list[CollectiveRequest]:
        """Run to the next collective; the requests of all ranks, none when all have ended."""
        requests = self._advance(running)
        if shadow is not None:
            shadow.advance(requests[0])
        waiting = [r for r in requests if r is not None]
        if waiting and len(waiting) < len(requests):
            raise SimulationError("SW_SIM_LOCK_STEP", f"some ranks of {program} end before others")
        return waiting

    def join(self, parts: Sequence[list[CollectiveRequest]]) -> None:
        """A collective over stages; `parts` are the requests of the ranks of each."""
        exchange([r for part in parts for r in part], self.manifest.mesh, self.schedules)

    def read(self, transfer: Transfer, number: int) -> list[np.ndarray]:
        """What the ranks of a stage send."""
        ranks = self.manifest.ranks(transfer.source)
        return [self.cores[rank].slot(transfer.sent, number).copy() for rank in ranks]

    def write(self, transfer: Transfer, number: int, data: Sequence[np.ndarray]) -> None:
        """Put what the ranks of a stage received in its buffer."""
        for rank, sent in zip(self.manifest.ranks(transfer.target), data, strict=True):
            self.cores[rank].slot(transfer.received, number)[:] = sent

    def close(self) -> None:
        """Stop the host threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _advance(self, running: Sequence[Running]) -> list[CollectiveRequest | None]:
        """Run every rank to its next collective (None: it has ended)."""
        if self._pool is None:
            return [next(r, None) for r in running]
        return list(self._pool.map(_next_quietly, running))

    def _unchecked(self, program: str) -> bool:
        """True when a program has yet to be compared with L0."""
        return self.check_l0 and program not in self.result.l0

    def _shadow(self, name: str, ranks: range) -> _Shadow:
        return _Shadow(self.programs[name], self.cores[ranks[0]], ranks[0])

    def _new_cores(self, stage: int) -> Iterator[CoreMemory]:
        """The memories of a stage's cores."""
        own = [b for b in self.manifest.buffers.values() if b.on(stage)]
        slots = {b.name: b.slots_on(stage) for b in own}
        for _ in self.manifest.ranks(stage):
            yield CoreMemory([(b.name, b.num_bytes) for b in own], slots)

    def _ranks(self, buffer: NamedBuffer) -> list[int]:
        """The ranks that have a buffer."""
        stages = (s for s in range(len(self.manifest.schedules)) if buffer.on(s))
        return [rank for stage in stages for rank in self.manifest.ranks(stage)]

    def _metrics(self) -> set[str]:
        """Reported scalars; what starts at zero is an accumulator of one core and belongs to no
        report.
        """
        buffers = self.manifest.buffers.values()
        return {b.name for b in buffers if b.role == "metric" and b.initial != "zeros"}

    def _leaf(self, name: str) -> list[NamedBuffer]:
        try:
            return self._leaves[name]
        except KeyError:
            raise SimulationError(
                "SW_SIM_BINDING", f"the step has no buffer named {name!r}"
            ) from None

    def _fill_initial(self) -> None:
        """Zeros where the manifest says so; coordinates from the rank."""
        for buffer in self.manifest.buffers.values():
            for rank in self._ranks(buffer):
                core = self.cores[rank]
                if buffer.role == "coordinate":
                    core.array(buffer.name, buffer.dtype)[:] = layout.coordinate(
                        buffer, self.manifest.mesh, rank
                    )
                elif buffer.initial == "zeros":
                    core.array(buffer.name, buffer.dtype)[:] = 0

    def _load_micro_batch(self, program: str, number: int, ranks: range) -> None:
        """Put what a program reads of the batch in the buffers of its ranks."""
        count = self.manifest.num_microbatches
        for name in self.programs[program].inputs:
            (buffer,) = self._leaf(name) if name in self._leaves else (None,)
            if buffer is not None and buffer.role == "batch":
                whole = np.asarray(self._batch[name])
                part = layout.micro_batch(buffer, self.manifest.mesh, whole, number, count)
                self._scatter(buffer, part, ranks)

    def _scatter(self, buffer: NamedBuffer, array: np.ndarray, ranks: Sequence[int]) -> None:
        for rank in ranks:
            shard = array[layout.shard_slices(buffer, self.manifest.mesh, rank)]
            self.cores[rank].array(buffer.name, buffer.dtype)[:] = shard.reshape(-1)


def _next_quietly(running: Running) -> CollectiveRequest | None:
    with np.errstate(all="ignore"):  # the error state belongs to a thread
        return next(running, None)


class _Shadow:
    """The first core of a program at L0, beside the L1 run: same inputs, and the L1 run's
    collective results.
    """

    def __init__(self, program: Program, core: CoreMemory, rank: int) -> None:
        self.program, self.rank = program, rank
        self.code = ProgramCode(program, L0)
        self.memory = core.copy_named()
        self.running = self.code.run(self.memory)
        self.distance, self.worst = 0.0, ""

    def advance(self, partner: CollectiveRequest | None) -> None:
        """Run to the next collective; compare what is sent and take the partner's result."""
        request = next(self.running, None)
        if (request is None) != (partner is None):
            raise SimulationError(
                "SW_SIM_LOCK_STEP", f"L0 and L1 of {self.program.name} disagree on collectives"
            )
        if request is None or partner is None:
            return
        self._note(
            f"source of {request.call.name or request.call.kind}", request.source, partner.source
        )
        partner.deliver = _both(partner.deliver, request.deliver)

    def compare(self, core: CoreMemory, buffers: Mapping[str, NamedBuffer]) -> L0Check:
        """The check, after both runs have ended."""
        for name in self.program.outputs:
            dtype = buffers[name].dtype
            self._note(name, self.memory.array(name, dtype), core.array(name, dtype))
        return L0Check(
            self.program.name, self.rank, self.code.instructions, self.distance, self.worst
        )

    def _note(self, what: str, given: np.ndarray, wanted: np.ndarray) -> None:
        found = distance(given, wanted)
        if found > self.distance or not self.worst:
            self.distance, self.worst = found, what


def _both(
    first: Callable[[np.ndarray], None], second: Callable[[np.ndarray], None]
) -> Callable[[np.ndarray], None]:
    def deliver(result: np.ndarray) -> None:
        first(result)
        second(result)

    return deliver
