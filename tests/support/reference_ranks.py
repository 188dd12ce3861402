"""Run a step plan over N reference ranks in lock step: NumPy op references, collectives from ring
schedules.

Every rank holds its own buffers and evaluates the same programs; at a collective all ranks meet,
the schedule of each group moves the data, and they go on. State comes in and goes out as whole
arrays, by buffer name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from collectives.algorithms.pairwise import collective_permute
from collectives.algorithms.ring import ring
from collectives.execute import execute
from collectives.ops import CollectiveKind, ReplicaGroups, group_index
from compiler.ir.reference import steps
from compiler.ir.types import Op
from compiler.program import BufferInfo, StepPlan, StepProgram

Buffers = dict[str, np.ndarray]


class ReferenceRanks:
    """The ranks of a plan's mesh with their buffers."""

    def __init__(self, plan: StepPlan, state: Mapping[str, np.ndarray]) -> None:
        self.plan = plan
        self.mesh = dict(plan.mesh)
        self.num_ranks = math.prod(self.mesh.values())
        self.buffers: list[Buffers] = [{} for _ in range(self.num_ranks)]
        self.collectives = 0
        for info in plan.buffers.values():
            self._initialise(info, state)

    def _initialise(self, info: BufferInfo, state: Mapping[str, np.ndarray]) -> None:
        for rank, buffers in enumerate(self.buffers):
            local = info.local_type
            if info.role == "coordinate":
                index = group_index(self.mesh, info.axes[0], rank)
                buffers[info.name] = np.asarray(index, local.dtype.numpy)
            elif info.initial == "zeros":
                buffers[info.name] = np.zeros(local.shape, local.dtype.numpy)
            elif info.initial == "given" and info.role != "batch":
                buffers[info.name] = self.shard(info, state[info.name], rank)

    def shard(self, info: BufferInfo, whole: np.ndarray, rank: int) -> np.ndarray:
        """What `rank` holds of a whole array."""
        assert whole.shape == info.global_type.shape, info.name
        for dim, axes in enumerate(info.axes):
            size = info.local_type.shape[dim]
            start = group_index(self.mesh, axes, rank) * size
            whole = np.take(whole, range(start, start + size), axis=dim)
        return np.array(whole, order="C")

    def gather(self, name: str) -> np.ndarray:
        """The whole array of a buffer; ranks that hold the same part must hold the same bits."""
        info = self.plan.buffers[name]
        whole = np.zeros(info.global_type.shape, info.global_type.dtype.numpy)
        written: dict[tuple[int, ...], np.ndarray] = {}
        for rank, buffers in enumerate(self.buffers):
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
        return whole

    def run_step(self, micro_batches: Sequence[Mapping[str, np.ndarray]]) -> None:
        """One step; one whole micro-batch by buffer name per repetition."""
        programs = {p.name: p for p in self.plan.programs}
        for names, count in self.plan.schedule:
            for turn in range(count):
                self._load_batch(micro_batches[turn])
                for name in names:
                    self._run(programs[name])

    def _load_batch(self, batch: Mapping[str, np.ndarray]) -> None:
        for info in self.plan.buffers.values():
            if info.role == "batch":
                for rank, buffers in enumerate(self.buffers):
                    buffers[info.name] = self.shard(info, batch[info.name], rank)

    def _run(self, program: StepProgram) -> None:
        runs = [steps(program.graph, [b[name] for name in program.inputs]) for b in self.buffers]
        outputs: list[list[np.ndarray]] = []
        requests = []
        for run in runs:
            self._advance(run, None, requests, outputs)
        while requests:
            results = self._collective([op for op, _ in requests], [args for _, args in requests])
            requests = []
            for run, result in zip(runs, results, strict=True):
                self._advance(run, (result,), requests, outputs)
        for buffers, arrays in zip(self.buffers, outputs, strict=True):
            buffers.update(zip(program.outputs, arrays, strict=True))

    @staticmethod
    def _advance(run, value, requests, outputs) -> None:
        try:
            requests.append(run.send(value))
        except StopIteration as stop:
            outputs.append(stop.value)

    def _collective(self, ops: Sequence[Op], args: Sequence[Sequence[np.ndarray]]):
        op = ops[0]
        assert all(other is op for other in ops), "ranks left lock step"
        assert op.name != "axis_index", "coordinates are inputs of a program"
        self.collectives += 1
        results: list[np.ndarray | None] = [None] * self.num_ranks
        for group in ReplicaGroups.from_axes(self.mesh, op.attrs.axes).groups:
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
    schedule = ring(kind, [tuple(range(n))])
    reduction = getattr(op.attrs, "reduction", "add")
    contiguous = [np.array(s, order="C") for s in sources]
    results = execute(schedule, contiguous, shape=view, reduction=reduction)
    return [r.reshape(op.result.type.shape) for r in results]


def _all_to_all(op: Op, sources: Sequence[np.ndarray]) -> list[np.ndarray]:
    n, attrs = len(sources), op.attrs
    pieces = [np.split(s, n, axis=attrs.split_dim) for s in sources]
    return [np.concatenate([p[t] for p in pieces], axis=attrs.concat_dim) for t in range(n)]
