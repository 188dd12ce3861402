"""Residuals in the memory of the host: moves become transfers, and their buffers leave HBM.

A module says with `move_to` in which memory a value is from there on. Behind the cut every level is
rewritten: a row that is written to a stack on the host is one `host_store`, a row that is read from
one a `host_load`. What only transfers touch is a buffer on the host. Anything else that reads a
value there is refused, as XLA refuses it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

import numpy as np

from shardwright.compiler.diagnostics import ShardingError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.facts import (
    behind,
    keeps_order,
    places_of,
    stored,
    takes_at,
)
from shardwright.compiler.ir.memories import host_values
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import (
    ConstantAttrs,
    HostEmptyAttrs,
    HostLoadAttrs,
    MoveToAttrs,
    ReshapeAttrs,
)
from shardwright.compiler.ir.ops.host import EMPTY, HOST, LOAD, STORE
from shardwright.compiler.ir.rewrite import with_operands, with_ops
from shardwright.compiler.ir.traits import IDENTITIES, PARTS, UPDATES, VIEWS
from shardwright.compiler.ir.types import Graph, Op, Value, tensor_type
from shardwright.compiler.passes.dce import dce
from shardwright.compiler.program import StepPlan, StepProgram
from shardwright.sharding.indices.layers import visited_layers

_BACK = "bring it back first, with jax.device_put(x, jax.memory.Space.Device)"


def on_host(step: StepPlan) -> StepPlan:
    """`step` with transfers for moves, and the buffers that only transfers touch on the host.

    Raises ShardingError (SW_HOST_VALUE) for code that computes with a value on the host, and for
    one that is no residual.
    """
    if not any(_moves(program.graph) for program in step.programs):
        return step
    names: set[str] = set()
    programs = []
    for program in step.programs:  # forward comes before backward
        given = {value for name, value in program.reads if name in names}
        to_host = (op for op in _moves(program.graph) if op.attrs.memory == HOST)
        hosted = host_values(program.graph, given.union(*(op.results for op in to_host)))
        _check_leaving(step, program, hosted)
        names |= {name for name, value in program.writes if value in hosted}
        graph = dce(_Level(program.graph, hosted, None).run())
        programs.append(replace(program, graph=graph))
    buffers = {
        name: replace(info, memory=HOST) if name in names else info
        for name, info in step.buffers.items()
    }
    return replace(step, programs=tuple(programs), buffers=buffers)


def _moves(graph: Graph) -> list[Op]:
    """The moves between memories that a module asks for."""
    return [op for op in graph.walk() if isinstance(op.attrs, MoveToAttrs)]


def _check_leaving(step: StepPlan, program: StepProgram, hosted: Set[Value]) -> None:
    """Only residuals wait on the host."""
    for name, value in program.writes:
        if value in hosted and not step.buffers[name].is_kept:
            raise ShardingError(
                "SW_HOST_VALUE",
                f"the memory of the host requires what forward keeps for backward, got {name}"
                f" ({step.buffers[name].role})",
                hint=f"a step returns what is on the device: {_BACK}",
            )


class _Level:
    """One level under construction. `hosted` are the values on the host; `loop` is the one whose
    body it is.
    """

    def __init__(self, graph: Graph, hosted: Set[Value], loop: Op | None) -> None:
        self.graph, self.hosted, self.loop = graph, hosted, loop
        self.made = graph.producers()
        self.ops: list[Op] = []
        self.now: dict[Value, Value] = {}
        self.before: dict[Value, Value] = {}
        """What is moved to the host, as it is on the device; it goes with what it is written to."""

    def run(self) -> Graph:
        """The level with transfers."""
        for op in self.graph.ops:
            self._add(op)
        outputs = tuple(self._value(v) for v in self.graph.outputs)
        return with_ops(self.graph, self.ops, outputs)

    def _add(self, op: Op) -> None:
        if isinstance(op.attrs, MoveToAttrs):
            self._move(op)
        elif op.regions:
            (body,) = op.regions
            region = _Level(body, self.hosted, op).run()
            operands = tuple(map(self._start, op.operands, body.inputs))
            self.ops.append(Op(op.name, operands, op.results, op.attrs, (region,), op.loc))
        elif self.hosted.isdisjoint((*op.operands, *op.results)):
            self.ops.append(with_operands(op, tuple(map(self._value, op.operands))))
        else:
            self._name(op)

    def _move(self, op: Op) -> None:
        (source,) = op.operands
        now = self.now.get(source, source)
        if op.attrs.memory == HOST:
            self.before[op.result] = now
        elif source in self.before or source not in self.hosted:
            self.now[op.result] = self.before.get(source, now)
        else:
            self.now[op.result] = self._loaded(source, op)

    def _name(self, op: Op) -> None:
        """An op on the host: a write to a stack, or another name for what is there."""
        source = op.operands[0] if op.operands else None
        if op.name in UPDATES and op.operands[1] in self.before:
            self._check_rows(op)
            stack, update, *starts = op.operands
            operands = (self._value(stack), self.before[update], *map(self._value, starts))
            self.ops.append(Op(STORE, operands, op.results, None, (), op.loc))
        elif op.name in IDENTITIES:
            self._pass_on(op)
        elif keeps_order(op) and source in self.before:
            made = make_op("reshape", (self.before[source],), ReshapeAttrs(op.result.type.shape))
            self.before[op.result] = self._put(made)
        elif not takes_at(op) and not keeps_order(op):
            raise ShardingError(
                "SW_HOST_VALUE",
                f"{op.name} requires its operands on the device, got one in host memory",
                op.loc,
                _BACK,
            )

    def _pass_on(self, op: Op) -> None:
        """A barrier holds what is on the device."""
        pairs = list(zip(op.operands, op.results, strict=True))
        kept = [(self._value(v), result) for v, result in pairs if v not in self.hosted]
        moved = ((v, result) for v, result in pairs if v in self.hosted)
        self.before |= {result: self.before[v] for v, result in moved if v in self.before}
        if kept:
            operands, results = zip(*kept, strict=True)
            self.ops.append(Op(op.name, operands, results, op.attrs, (), op.loc))

    def _loaded(self, value: Value, move: Op) -> Value:
        """What is on the host, on the device."""
        kind = value.type
        value = behind(value, self.made, lambda op: keeps_order(op) or op.name in IDENTITIES)
        op = self.made.get(value)
        if op is not None and takes_at(op):
            operands: Sequence[Value] = (op.operands[0], *map(self._value, places_of(op)))
        else:
            operands = (value, *self._zeros(value.type.rank))
        stack = self.made.get(operands[0])
        if stack is not None and not (stack.regions or stack.name in UPDATES):
            raise ShardingError(
                "SW_HOST_VALUE",
                f"a load from the host requires a row of a stack as it was written, got one behind"
                f" {stack.name}",
                move.loc,
                "slice the stack itself, by one row",
            )
        attrs = HostLoadAttrs(value.type.shape)
        loaded = self._put(make_op(LOAD, operands, attrs, loc=move.loc))
        if loaded.type == kind:
            return loaded
        return self._put(make_op("reshape", (loaded,), ReshapeAttrs(kind.shape), loc=move.loc))

    def _check_rows(self, op: Op) -> None:
        """Room that nobody has filled is never read: a loop writes every row of its stack."""
        stack, update, *starts = op.operands
        sizes = zip(stack.type.shape, update.type.shape, starts, strict=True)
        walked = [(size, start) for size, part, start in sizes if size != part]
        match walked:
            case []:
                return
            case [(size, start)] if self.loop is not None:
                visited = visited_layers(self.loop, start)
                if visited is not None and np.array_equal(np.sort(visited), np.arange(size)):
                    return
        raise ShardingError(
            "SW_HOST_VALUE",
            f"a stack on the host requires a loop that writes every row of it, got an update of"
            f" {update.type} of {stack.type}",
            op.loc,
            "scan over the layers, one row of every stack in each",
        )

    def _start(self, operand: Value, carry: Value) -> Value:
        """What a carry starts as; of a stack on the host that is only room."""
        if carry not in self.hosted or operand in self.hosted:
            return self._value(operand)
        if not self._is_constant(operand):
            raise ShardingError(
                "SW_HOST_VALUE",
                f"a stack on the host requires to start as zeros, got {operand.type} of the device",
                hint="let jax.lax.scan stack what goes to the host",
            )
        return self._put(make_op(EMPTY, (), HostEmptyAttrs(operand.type)))

    def _is_constant(self, value: Value) -> bool:
        """True for what a stack starts as, or the part of it that a stage has."""
        first = behind(value, self.made, lambda op: op.name in VIEWS | PARTS)
        return stored(self.made.get(first)) is not None

    def _value(self, value: Value) -> Value:
        """What a value is now; one that is whole on the host is stored there."""
        if value in self.before and value not in self.now:
            room = self._put(make_op(EMPTY, (), HostEmptyAttrs(value.type)))
            starts = self._zeros(value.type.rank)
            self.now[value] = self._put(make_op(STORE, (room, self.before[value], *starts)))
        return self.now.get(value, value)

    def _zeros(self, count: int) -> list[Value]:
        """Starts of a window of everything."""
        zero = ConstantAttrs.full(0, tensor_type((), DType.I32))
        return [self._put(make_op("constant", (), zero))] * count

    def _put(self, op: Op) -> Value:
        self.ops.append(op)
        return op.result
