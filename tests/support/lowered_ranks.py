"""Reference ranks that run outlined programs: calls over buffers, lowered kernels, an arena of
garbage.

The collectives still come from the schedules of `ReferenceRanks`; everything between them is what
the compiler made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import (
    AllGatherAttrs,
    AllReduceAttrs,
    AllToAllAttrs,
    CollectivePermuteAttrs,
    ReduceScatterAttrs,
)
from shardwright.compiler.ir.types import Op, Value, tensor_type
from shardwright.compiler.isa.kernel import View
from shardwright.compiler.isa.program import Call, CollectiveCall
from shardwright.compiler.linking.placement import place
from shardwright.compiler.lower.write_out import Lowered
from shardwright.compiler.outline import Outlined, outline
from shardwright.compiler.outline.buffers import OutlinedProgram
from shardwright.compiler.passes.pipeline import PASSES
from shardwright.compiler.program import BufferInfo, StepPlan, StepProgram
from shardwright.compiler.rewriting.driver import run
from shardwright.sim_cluster.values.kernels import prepare
from tests.support.kernel_reference import lower_function, run_nodes
from tests.support.reference_ranks import ReferenceRanks


def lower_units(outlined: Outlined) -> dict[str, Lowered]:
    """Every compile unit lowered, by key."""
    return {u.key: lower_function(run(u.graph, PASSES), u.signature) for u in outlined.functions}


@dataclass
class _Bound:
    """A lowered function ready to run: executors per kernel."""

    lowered: Lowered
    steps: list


class LoweredRanks(ReferenceRanks):
    """`literal` runs kernels by the slow reading of the tests instead of L1."""

    def __init__(
        self, plan: StepPlan, state: Mapping[str, np.ndarray], literal: bool = False
    ) -> None:
        super().__init__(plan, state)
        self.outlined = outline(plan)
        self.by_name = {p.name: p for p in self.outlined.programs}
        self.units = {k: self._bind(v, literal) for k, v in lower_units(self.outlined).items()}
        self._ops: dict[tuple[str, int], Op] = {}

    def _bind(self, lowered: Lowered, literal: bool) -> _Bound:
        dtypes = tuple(t.dtype for t in lowered.tensors)
        steps = []
        for kernel in lowered.kernels:
            if kernel.kind != "compute":
                steps.append(None)
            elif literal:
                steps.append(lambda memory, registers, k=kernel: run_nodes(k, memory, registers))
            else:
                steps.append(prepare(kernel, dtypes))
        return _Bound(lowered, steps)

    def _rank_run(self, program: StepProgram, buffers, number: int):
        return self._rank(self.by_name[program.name], buffers)

    def _rank(self, program: OutlinedProgram, named: dict[str, np.ndarray]):
        """Generator of collectives of one rank."""
        placed = place(program, {})  # every call has a zone of its own here
        arena = np.full(placed.arena_bytes, 0xA5, np.uint8)
        memory = []
        for buffer in placed.buffers:
            size = math.prod(buffer.shape) * buffer.dtype.bytes
            if buffer.kind == "arena":
                raw = arena[buffer.offset_bytes : buffer.offset_bytes + size]
            else:
                if buffer.name not in named:
                    named[buffer.name] = (
                        np.full(size, 0xA5, np.uint8).view(buffer.dtype.numpy).reshape(buffer.shape)
                    )
                named[buffer.name] = np.array(named[buffer.name], order="C")
                raw = named[buffer.name].reshape(-1).view(np.uint8)
            memory.append(raw)
        with np.errstate(all="ignore"):
            yield from self._steps(program, program.steps, memory, {})

    def _steps(self, program, steps, memory, registers):
        for step in steps:
            if isinstance(step, Call):
                yield from self._call(program.functions[step.function], step, memory, registers)
                continue
            for i in range(step.trip):
                yield from self._steps(program, step.steps, memory, {**registers, step.register: i})

    def _call(self, key: str, call: Call, memory, registers):
        bound = self.units[key]
        lowered = bound.lowered
        zone = np.full(lowered.scratch_bytes, 0xA5, np.uint8)
        given = dict(zip(lowered.inputs, call.inputs, strict=True))
        given |= dict(zip(lowered.outputs, call.outputs, strict=True))
        tensors = []
        for number, tensor in enumerate(lowered.tensors):
            size = math.prod(tensor.shape) * tensor.dtype.bytes
            if tensor.kind == "constant":
                raw = np.frombuffer(tensor.data, np.uint8)
            elif tensor.kind == "scratch":
                raw = zone[tensor.offset_bytes : tensor.offset_bytes + size]
            else:
                raw = memory[given[number]]
            if tensor.alias >= 0:
                assert raw is memory[given[tensor.alias]]
            tensors.append(raw.view(tensor.dtype.numpy))
        local = dict(
            zip(lowered.parameters, (p.value(registers) for p in call.parameters), strict=True)
        )
        flying: dict[int, np.ndarray] = {}
        for kernel, step in zip(lowered.kernels, bound.steps, strict=True):
            attrs = kernel.attrs
            if step is not None:
                step(tensors, local)
            elif kernel.kind == "register_load":
                value = int(tensors[attrs["view"].tensor][attrs["view"].offset.value(local)])
                local[attrs["register"]] = min(max(value, attrs["low"]), attrs["high"])
            elif kernel.kind == "collective_start":
                number = attrs["collective"]
                op = self._op(key, number, lowered.collectives[number])
                (sent,), (came,) = op.operands, op.results
                source = _run_of(tensors, attrs["source"], sent.type.num_elements, local)
                target = _run_of(tensors, attrs["target"], came.type.num_elements, local)
                flying[number] = (source.copy(), target)
                target.view(np.uint8)[:] = 0xA5
            else:
                number = attrs["collective"]
                source, target = flying.pop(number)
                op = self._op(key, number, lowered.collectives[number])
                (result,) = yield op, [source.reshape(op.operands[0].type.shape)]
                target[:] = result.reshape(-1)

    def _op(self, key: str, number: int, call: CollectiveCall) -> Op:
        if (key, number) not in self._ops:
            size = math.prod(self.mesh[a] for a in call.axes)
            dim = 0 if call.parts else 1
            attrs = {
                "all_gather": lambda: AllGatherAttrs(dim, call.axes, size, call.parts),
                "reduce_scatter": lambda: ReduceScatterAttrs(
                    dim, call.axes, call.reduction, size, call.parts
                ),
                "collective_permute": lambda: CollectivePermuteAttrs(call.axes, call.pairs, size),
                "all_to_all": lambda: AllToAllAttrs(1, 1, call.axes, size),
                "all_reduce": lambda: AllReduceAttrs(call.axes, call.reduction, size, call.parts),
            }[call.kind]()
            shape = (math.prod(call.source_shape),) if call.parts else call.source_shape
            value = Value(tensor_type(shape, call.dtype))
            self._ops[(key, number)] = make_op(call.kind, [value], attrs)
        return self._ops[(key, number)]


def _run_of(
    tensors: Sequence[np.ndarray], place: int | View, size: int, registers: Mapping[int, int]
) -> np.ndarray:
    """What a collective sends or fills: a tensor, or a run of `size` elements in one."""
    if not isinstance(place, View):
        return tensors[place]
    at = place.offset.value(registers)
    return tensors[place.tensor][at : at + size]


def run_alone(
    program: StepProgram, state: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], LoweredRanks]:
    """Buffers of one core after one run of `program`, and the ranks (of which there is one)."""
    types = dict(zip(program.inputs, (v.type for v in program.graph.inputs), strict=True))
    types |= dict(zip(program.outputs, (v.type for v in program.graph.outputs), strict=True))
    buffers = {
        name: BufferInfo(
            name=name,
            role="parameter",
            local_type=kind,
            global_type=kind,
            axes=((),) * kind.rank,
            initial="given" if name in state else "computed",
        )
        for name, kind in types.items()
    }
    plan = StepPlan(
        mesh={"dp_shard": 1},
        buffers=buffers,
        programs=(program,),
        schedules=((((program.name,), 1),),),
    )
    ranks = LoweredRanks(plan, state, literal=True)
    ranks.run_step([{}])
    return ranks.buffers[0], ranks
