"""Value runs: whole training steps of all ranks of a mesh in lock step, from program files and a
manifest alone.

Every rank runs the same program up to the next collective wait, then `exchange` moves the data of
all groups. The first time a program runs, one core also runs it instruction by instruction (L0)
from the same inputs, and the distance is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from compiler.diagnostics import SimulationError
from compiler.isa.program import Program
from compiler.neff.manifest import Manifest, NamedBuffer
from sim_cluster import layout
from sim_cluster.exchange import Schedules, exchange, ring_schedules
from sim_cluster.functions import L0, L1, CollectiveRequest
from sim_cluster.index_watch import IndexWatch
from sim_cluster.memory import CoreMemory
from sim_cluster.programs import ProgramCode
from sim_cluster.result import L0Check, ValueResult, distance

Running = Iterator[CollectiveRequest]
L0_RANK = 0


class ValueRun:
    """The cores of one step in values.

    `programs` maps the names of the manifest's schedule to linked programs. With `check_l0`, the
    first run of every program is also made at L0 on core 0. `level` is that of the run itself: at
    L0 every core executes every instruction. Indices out of bounds are counted in `watch`, or end
    the run with `strict_indices`. `threads` host threads share the ranks; results do not depend on
    it.
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
        missing = {n for names, _ in manifest.schedule for n in names} - programs.keys()
        if missing:
            raise SimulationError(
                "SW_SIM_PROGRAM", f"the schedule names programs {sorted(missing)}, not given"
            )
        self.programs, self.manifest, self.schedules = programs, manifest, schedules
        self.check_l0 = check_l0
        self.result = ValueResult()
        self.watch = IndexWatch(strict_indices)
        self._codes = {name: ProgramCode(p, level, self.watch) for name, p in programs.items()}
        self._pool = ThreadPoolExecutor(threads) if threads > 1 and level == L1 else None
        sizes = [(b.name, b.num_bytes) for b in manifest.buffers.values()]
        self.cores = [CoreMemory(sizes) for _ in range(layout.num_ranks(manifest.mesh))]
        self._fill_initial()

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Shard global arrays into the named buffers of all ranks, converting to the buffers'
        types.

        Raises SimulationError for an unknown name or a wrong shape.
        """
        for name, array in state.items():
            buffer = self._buffer(name)
            wanted = layout.sharded_shape(buffer, self.manifest.mesh)
            self._scatter(buffer, layout.check_global(buffer, np.asarray(array), wanted))

    def step(self, batch: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """One step of the schedule on a global batch; the metrics by name."""
        with np.errstate(all="ignore"):
            for names, count in self.manifest.schedule:
                reads_batch = self._reads_batch(names)
                for number in range(count):
                    if reads_batch:
                        self._load_micro_batch(batch, number, count)
                    for name in names:
                        self.run_program(name)
        metrics = self.gather(self._metrics())
        self.result.steps.append(metrics)
        return metrics

    def gather(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Global arrays of named buffers. Raises SimulationError when copies that must be equal
        differ.
        """
        found = {}
        for name in sorted(names):
            buffer = self._buffer(name)
            shards = [core.array(name, buffer.dtype) for core in self.cores]
            found[name] = layout.gather_array(buffer, self.manifest.mesh, shards)
        return found

    def run_program(self, name: str) -> None:
        """Run one program on all ranks in lock step."""
        code = self._codes[name]
        shadow = self._shadow(name) if self.check_l0 and name not in self.result.l0 else None
        running = [code.run(core) for core in self.cores]
        while True:
            requests = self._advance(running)
            if shadow is not None:
                shadow.advance(requests[L0_RANK])
            waiting = [r for r in requests if r is not None]
            if not waiting:
                break
            if len(waiting) < len(requests):
                raise SimulationError("SW_SIM_LOCK_STEP", f"some ranks of {name} end before others")
            exchange(waiting, self.manifest.mesh, self.schedules)
        if shadow is not None:
            self.result.l0[name] = shadow.compare(self.cores[L0_RANK], self.manifest.buffers)

    def close(self) -> None:
        """Stop the host threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _advance(self, running: Sequence[Running]) -> list[CollectiveRequest | None]:
        """Run every rank to its next collective (None: it has ended)."""
        if self._pool is None:
            return [next(r, None) for r in running]
        return list(self._pool.map(_next_quietly, running))

    def _shadow(self, name: str) -> _Shadow:
        return _Shadow(self.programs[name], self.cores[L0_RANK])

    def _metrics(self) -> set[str]:
        """Reported scalars; what starts at zero is an accumulator of one core and belongs to no
        report.
        """
        buffers = self.manifest.buffers.values()
        return {b.name for b in buffers if b.role == "metric" and b.initial != "zeros"}

    def _buffer(self, name: str) -> NamedBuffer:
        try:
            return self.manifest.buffers[name]
        except KeyError:
            raise SimulationError(
                "SW_SIM_BINDING", f"the step has no buffer named {name!r}"
            ) from None

    def _fill_initial(self) -> None:
        """Zeros where the manifest says so; coordinates from the rank."""
        for buffer in self.manifest.buffers.values():
            for rank, core in enumerate(self.cores):
                if buffer.role == "coordinate":
                    core.array(buffer.name, buffer.dtype)[:] = layout.coordinate(
                        buffer, self.manifest.mesh, rank
                    )
                elif buffer.initial == "zeros":
                    core.array(buffer.name, buffer.dtype)[:] = 0

    def _reads_batch(self, names: Iterable[str]) -> bool:
        """True when a program of the schedule entry has a batch buffer among its inputs."""
        read = {buffer for name in names for buffer in self.programs[name].inputs}
        return any(self._buffer(name).role == "batch" for name in read)

    def _load_micro_batch(self, batch: Mapping[str, np.ndarray], number: int, count: int) -> None:
        for name, array in batch.items():
            buffer = self._buffer(name)
            part = layout.micro_batch(buffer, self.manifest.mesh, np.asarray(array), number, count)
            self._scatter(buffer, part)

    def _scatter(self, buffer: NamedBuffer, array: np.ndarray) -> None:
        for rank, core in enumerate(self.cores):
            shard = array[layout.shard_slices(buffer, self.manifest.mesh, rank)]
            core.array(buffer.name, buffer.dtype)[:] = shard.reshape(-1)


def _next_quietly(running: Running) -> CollectiveRequest | None:
    with np.errstate(all="ignore"):  # the error state belongs to a thread
        return next(running, None)


class _Shadow:
    """Core 0 of a program at L0, beside the L1 run: same inputs, and the L1 run's collective
    results.
    """

    def __init__(self, program: Program, core: CoreMemory) -> None:
        self.program = program
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
            self.program.name, L0_RANK, self.code.instructions, self.distance, self.worst
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
