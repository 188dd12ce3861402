"""Run a step plan over N reference ranks in lock step: NumPy op references, collectives from ring
schedules.

Every rank holds its own buffers and evaluates the same programs; at a collective all ranks meet,
the schedule of each group moves the data, and they go on. State comes in and goes out as whole
arrays, by buffer name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np

from shardwright.collectives.algorithms.pairwise import collective_permute
from shardwright.collectives.ops import CollectiveKind, ReplicaGroups, group_index
from shardwright.collectives.values.buckets import execute_parts
from shardwright.collectives.values.execute import execute
from shardwright.compiler.ir.reference import steps
from shardwright.compiler.ir.types import Op
from shardwright.compiler.neff.schedule import Transfer
from shardwright.compiler.program import BufferInfo, StepPlan, StepProgram
from shardwright.sim_cluster.timing.stage_order import StageOrder
from shardwright.sim_cluster.values.layout import stacked
from tests.support.collective_schedules import flat

Buffers = dict[str, np.ndarray]


class ReferenceRanks:
    """The ranks of a plan's mesh with their buffers."""

    def __init__(self, plan: StepPlan, state: Mapping[str, np.ndarray]) -> None:
        self.plan = plan
        self.mesh = dict(plan.mesh)
        self.num_ranks = math.prod(self.mesh.values())
        self.buffers: list[Buffers] = [{} for _ in range(self.num_ranks)]
        self.collectives = 0
        self.programs = {p.name: p for p in plan.programs}
        self.micro_batches: Sequence[Mapping[str, np.ndarray]] = ()
        state = stacked(state, plan.stacks)
        for info in plan.buffers.values():
            self._initialise(info, state)

    def _holding(self, info: BufferInfo) -> list[tuple[int, Buffers]]:
        """The ranks that have a buffer."""
        stages = (s for s in range(len(self.plan.schedules)) if info.on(s))
        return [(rank, self.buffers[rank]) for s in stages for rank in self.ranks_of(s)]

    def _initialise(self, info: BufferInfo, state: Mapping[str, np.ndarray]) -> None:
        whole = state.get(info.part.leaf if info.part else info.name)
        if whole is not None and info.part:
            rows = range(info.part.first, info.part.first + info.global_type.shape[info.part.dim])
            whole = np.take(whole, rows, axis=info.part.dim)
        for rank, buffers in self._holding(info):
            local = info.local_type
            if info.role == "coordinate":
                index = group_index(self.mesh, info.axes[0], rank)
                buffers[info.name] = np.asarray(index, local.dtype.numpy)
            elif info.initial == "zeros":
                buffers[info.name] = np.zeros(local.shape, local.dtype.numpy)
            elif info.initial == "given" and info.role != "batch":
                buffers[info.name] = self.shard(info, whole, rank)

    def shard(self, info: BufferInfo, whole: np.ndarray, rank: int) -> np.ndarray:
        """What `rank` holds of a whole array."""
        assert whole.shape == info.global_type.shape, info.name
        if whole.shape != self.held(info):
            pairs = zip(whole.shape, self.held(info), strict=True)
            whole = np.pad(whole, [(0, held - given) for given, held in pairs])
        for dim, axes in enumerate(info.axes):
            size = info.local_type.shape[dim]
            start = group_index(self.mesh, axes, rank) * size
            whole = np.take(whole, range(start, start + size), axis=dim)
        return np.array(whole, order="C")

    def held(self, info: BufferInfo) -> tuple[int, ...]:
        """The shape that all shards make up: the global one, or a padded one."""
        pairs = zip(info.local_type.shape, info.axes, strict=True)
        return tuple(size * math.prod(self.mesh[a] for a in axes) for size, axes in pairs)

    def gather(self, name: str) -> np.ndarray:
        """The whole array of a leaf, joined where it lies in parts, taken out of its stack."""
        for stack, leaves in self.plan.stacks.items():
            if name in leaves:
                return self.gather(stack)[leaves.index(name)]
        if name in self.plan.buffers:
            return self._gather(self.plan.buffers[name])
        infos = (i for i in self.plan.buffers.values() if i.part and i.part.leaf == name)
        infos = sorted(infos, key=lambda i: i.part.first)
        return np.concatenate([self._gather(i) for i in infos], axis=infos[0].part.dim)

    def _gather(self, info: BufferInfo) -> np.ndarray:
        """The whole array of a buffer; ranks that hold the same part must hold the same bits."""
        name = info.name
        whole = np.zeros(self.held(info), info.global_type.dtype.numpy)
        written: dict[tuple[int, ...], np.ndarray] = {}
        for rank, buffers in self._holding(info):
            where = tuple(group_index(self.mesh, axes, rank) for axes in info.axes)
            shard = buffers[name]
            assert shard.shape == info.local_type.shape, name
            if where in written:
                assert written[where].tobytes() == shard.tobytes(), f"{name} differs between ranks"
                continue
            written[where] = shard
            sizes = info.local_type.shape
            index = tuple(slice(i * n, (i + 1) * n) for i, n in zip(where, sizes, strict=True))
            whole[index] = shard
        return whole[tuple(slice(size) for size in info.global_type.shape)]

    def run_step(self, micro_batches: Sequence[Mapping[str, np.ndarray]]) -> None:
        """One step; one whole micro-batch by buffer name per repetition."""
        self.micro_batches = micro_batches
        StageOrder(self.plan.schedules, self.plan.transfers, self).run()

    def run(self, stage: int, program: str, number: int):
        """One program on the ranks of its stage, for one micro-batch."""
        if number < len(self.micro_batches):
            self._load_batch(self.micro_batches[number], stage)
        yield from self._run(self.programs[program], self.ranks_of(stage), number)

    def join(self, parts: Sequence) -> None:
        """A collective over stages; `parts` are the requests of the ranks of each."""
        requests = [request for part in parts for request in part[0]]
        results = self._collective(*zip(*requests, strict=True), self.mesh)
        for part in parts:
            part[1][:], results = results[: len(part[0])], results[len(part[0]) :]

    def read(self, transfer: Transfer, number: int) -> list[np.ndarray]:
        """What the ranks of a stage send."""
        slot = self.slot(transfer.sent, number, transfer.source)
        return [self.buffers[r][slot] for r in self.ranks_of(transfer.source)]

    def write(self, transfer: Transfer, number: int, data: Sequence[np.ndarray]) -> None:
        """What the ranks of a stage receive."""
        slot = self.slot(transfer.received, number, transfer.target)
        for rank, array in zip(self.ranks_of(transfer.target), data, strict=True):
            self.buffers[rank][slot] = array

    def ranks_of(self, stage: int) -> range:
        """The ranks of a stage, which are neighbours."""
        count = self.num_ranks // len(self.plan.schedules)
        return range(stage * count, (stage + 1) * count)

    def slot(self, name: str, number: int, stage: int) -> str:
        """Where a buffer is for one micro-batch."""
        slots = self.plan.buffers[name].slots_on(stage)
        return f"{name}#{number % slots}" if slots > 1 else name

    def _load_batch(self, batch: Mapping[str, np.ndarray], stage: int) -> None:
        for info in self.plan.buffers.values():
            if info.role == "batch":
                for rank in self.ranks_of(stage):
                    self.buffers[rank][info.name] = self.shard(info, batch[info.name], rank)

    def _run(self, program: StepProgram, ranks: range, number: int):
        """The ranks of a stage in lock step; yields at collectives over stages."""
        runs = [self._rank_run(program, self.buffers[rank], number) for rank in ranks]
        requests: list = []
        for run in runs:
            self._advance(run, None, requests)
        while requests:
            ops, args = zip(*requests, strict=True)
            if "pp" in ops[0].attrs.axes:
                results: list = [None] * len(requests)
                yield requests, results
            else:
                inner = {axis: size for axis, size in self.mesh.items() if axis != "pp"}
                results = self._collective(ops, args, inner)
            requests = []
            for run, result in zip(runs, results, strict=True):
                self._advance(run, (result,), requests)

    def _rank_run(self, program: StepProgram, buffers: Buffers, number: int):
        """One rank: a generator of its collectives."""
        arrays = [buffers[self.slot(name, number, program.stage)] for name in program.inputs]
        found = yield from steps(program.graph, arrays)
        names = (self.slot(name, number, program.stage) for name in program.outputs)
        buffers.update(zip(names, found, strict=True))

    @staticmethod
    def _advance(run, value, requests) -> None:
        with suppress(StopIteration):
            requests.append(run.send(value))

    def _collective(self, ops: Sequence[Op], args: Sequence[Sequence[np.ndarray]], mesh):
        op = ops[0]
        same = all((other.name, other.attrs) == (op.name, op.attrs) for other in ops)
        assert same, "ranks left lock step"
        assert op.name != "axis_index", "coordinates are inputs of a program"
        self.collectives += 1
        results: list[np.ndarray | None] = [None] * len(ops)
        for group in ReplicaGroups.from_axes(mesh, op.attrs.axes).groups:
            assert len(group) == op.attrs.group_size
            shards = run_collective(op, [args[rank][0] for rank in group])
            for rank, shard in zip(group, shards, strict=True):
                assert shard.shape == op.result.type.shape, op
                results[rank] = shard
        return results


def run_collective(op: Op, sources: Sequence[np.ndarray]) -> list[np.ndarray]:
    """One group of one collective of the IR, by its ring schedule."""
    shape, n = sources[0].shape, len(sources)
    if op.name == "all_to_all":
        return _all_to_all(op, sources)
    if op.name == "collective_permute":
        sent = execute(collective_permute(n, op.attrs.pairs), [np.array(s) for s in sources])
        return [s.reshape(shape) for s in sent]
    kind = CollectiveKind(op.name)
    dim = getattr(op.attrs, "dim", 0) if shape else 0
    view = (math.prod(shape[:dim]), shape[dim] if shape else 1, math.prod(shape[dim + 1 :]))
    schedule = flat(kind, "ring", [tuple(range(n))])
    reduction = getattr(op.attrs, "reduction", "add")
    contiguous = [np.array(s, order="C") for s in sources]
    results = execute_parts(schedule, contiguous, op.attrs.parts or (view,), reduction=reduction)
    return [r.reshape(op.result.type.shape) for r in results]


def _all_to_all(op: Op, sources: Sequence[np.ndarray]) -> list[np.ndarray]:
    n, attrs = len(sources), op.attrs
    pieces = [np.split(s, n, axis=attrs.split_dim) for s in sources]
    return [np.concatenate([p[t] for p in pieces], axis=attrs.concat_dim) for t in range(n)]
