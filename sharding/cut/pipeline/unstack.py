"""Stacks of layers taken apart: what lies along layers becomes one value per part of the pipeline.

Layer loops are split, and every op on a stack (a gradient, an optimizer leaf, a norm over it) is
made once per part, on that part's layers; a reduction along layers becomes one per part and their
sum. The graph keeps its meaning, which is how it is tested. `partition` and all that follows see
a plain step whose leaves belong to parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwright.compiler.diagnostics import ShardingError
from shardwright.compiler.ir.combinations import ELEMENTWISE_OF
from shardwright.compiler.ir.facts import combination, joined_dim, pairing, resized, splat
from shardwright.compiler.ir.opdef import OPS, make_op
from shardwright.compiler.ir.ops import BroadcastInDimAttrs, SliceAttrs
from shardwright.compiler.ir.rewrite import Level, with_ops
from shardwright.compiler.ir.traits import IDENTITIES, MOVES, REDUCTIONS
from shardwright.compiler.ir.types import Graph, Op, TensorType, Value, tensor_type
from shardwright.compiler.neff.schedule import LeafPart
from shardwright.compiler.passes.dce import dce
from shardwright.sharding.cut.pipeline.assignment import Assignment, Run, assign
from shardwright.sharding.cut.pipeline.balance import PartShare
from shardwright.sharding.cut.pipeline.loops import layers_of, split_loop
from shardwright.sharding.cut.pipeline.partial_sums import total
from shardwright.sharding.indices.dims import factors
from shardwright.sharding.indices.layers import scan_of
from shardwright.sharding.partition.partitioned import Slot

"""The op that joins what two parts reduced, by kind of reduction."""
DISTRIBUTED = MOVES | REDUCTIONS
"""Ops, besides elementwise ones and products, whose work on a stack is that on its layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A step whose leaves belong to parts of a pipeline.

    `parts` says of which leaf a buffer is a part; `homes` the part that uses a leaf, where there is
    only one; `shares` what each part has of the model.
    """

    graph: Graph
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    parts: Mapping[str, LeafPart]
    homes: Mapping[str, int]
    shares: tuple[PartShare, ...]

    @property
    def num_parts(self) -> int:
        """How many parts."""
        return len(self.shares)


def stage_layers(
    graph: Graph,
    inputs: Sequence[Slot],
    outputs: Sequence[Slot],
    num_parts: int,
    balance: str = "cost",
    sizes: Sequence[int] = (),
) -> Staged:
    """The step with its layers shared out over `num_parts` parts, `sizes` of them where given.

    Raises: ShardingError (SW_PIPELINE_LAYERS, SW_PIPELINE_LOOP, SW_PIPELINE_CUT) with the op's line
    for too few layers, loops that are not walked in order, and ops that need a stack whole.
    """
    assignment = assign(graph, inputs, outputs, num_parts, balance, sizes)
    return _Unstack(graph, assignment).staged(inputs, outputs)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A stack by parts: the dim layers lie along, which layers each part has, and its value."""

    dim: int
    runs: tuple[Run, ...]
    values: tuple[Value, ...]


@dataclass(slots=True)
class _Unstack:
    """The rewrite of one step."""

    graph: Graph
    assignment: Assignment
    level: Level = field(default_factory=Level)
    pieces: dict[Value, _Pieces] = field(default_factory=dict)
    made: dict[Value, Op] = field(default_factory=dict)

    def staged(self, inputs: Sequence[Slot], outputs: Sequence[Slot]) -> Staged:
        """The whole step."""
        parts: dict[str, LeafPart] = {}
        homes: dict[str, int] = {}
        new_inputs = list(self._inputs(inputs, parts, homes))
        for op in self.graph.ops:
            self._split(op)
        new_outputs = list(self._outputs(outputs, parts))
        slots, values = zip(*new_inputs, strict=True)
        results, outputs = zip(*new_outputs, strict=True)
        graph = with_ops(self.graph, self.level.ops, outputs, values)
        return Staged(
            graph=dce(graph),
            inputs=slots,
            outputs=results,
            parts=parts,
            homes=homes,
            shares=self.assignment.shares,
        )

    def _inputs(
        self, slots: Sequence[Slot], parts: dict[str, LeafPart], homes: dict[str, int]
    ) -> Iterator[tuple[Slot, Value]]:
        """Inputs, those that layers are stacked along once per part."""
        for slot, value in zip(slots, self.graph.inputs, strict=True):
            stacked = self.assignment.stacked(value) if slot.role != "batch" else None
            if stacked is None:
                if value in self.assignment.leaves:
                    homes[slot.name] = self.assignment.leaves[value]
                yield slot, value
                continue
            dim, runs = stacked
            values = tuple(Value(_part_type(value, dim, run)) for run in runs)
            self.pieces[value] = _Pieces(dim, runs, values)
            for run, piece in zip(runs, values, strict=True):
                own = _part_slot(slot, run, dim, parts)
                homes[own.name] = run.part
                yield own, piece

    def _outputs(
        self, slots: Sequence[Slot], parts: dict[str, LeafPart]
    ) -> Iterator[tuple[Slot, Value]]:
        """Outputs, stacks once per part."""
        stacked = {part.leaf for part in parts.values()}
        for slot, value in zip(slots, self.graph.outputs, strict=True):
            if value not in self.pieces and slot.name in stacked:
                self._take_apart(value)
            found = self.pieces.get(value)
            if found is None:
                yield slot, self.level.now(value)
                continue
            for run, piece in zip(found.runs, found.values, strict=True):
                yield _part_slot(slot, run, found.dim, parts), piece

    def _take_apart(self, value: Value) -> None:
        """Pieces of a value that no stack fed."""
        stacked = self.assignment.stacked(value)
        if stacked is not None:
            dim, runs = stacked
            pieces = tuple(self._piece(value, dim, run) for run in runs)
            self.pieces[value] = _Pieces(dim, runs, pieces)

    def _split(self, op: Op) -> None:
        """`op` by parts, if it reads a stack or is a loop over layers."""
        trips = self.assignment.trips.get(op)
        if trips is not None:
            for part in split_loop(scan_of(op), trips):
                self._split(part)
        elif joined_dim(op) is not None and self._joins(op):
            return
        elif not any(v in self.pieces for v in op.operands):
            self._add(self.level.update(op))
        elif not self._takes(op):
            self._distribute(op)

    def _add(self, op: Op) -> Op:
        self.level.ops.append(op)
        self.made.update(dict.fromkeys(op.results, op))
        return op

    def _joins(self, op: Op) -> bool:
        """True when `op` joins what the parts of a loop stacked: its operands are the pieces."""
        runs = self.assignment.runs(op.result, op.attrs.dim)
        sizes = [v.type.shape[op.attrs.dim] for v in op.operands]
        if not runs or sizes != [run.size for run in runs]:
            return False
        values = tuple(self.level.now(v) for v in op.operands)
        self.pieces[op.result] = _Pieces(op.attrs.dim, runs, values)
        return True

    def _takes(self, op: Op) -> bool:
        """True when `op` takes one part's layers out of a stack."""
        stack = self.pieces.get(op.operands[0])
        if stack is None or not isinstance(op.attrs, SliceAttrs) or set(op.attrs.stride) != {1}:
            return False
        low, high = op.attrs.start[stack.dim], op.attrs.limit[stack.dim]
        for run, piece in zip(stack.runs, stack.values, strict=True):
            ends = (run.first, run.first + run.size)
            if (low, high) == ends and piece.type == op.result.type:
                self.level.replace(op.results, (piece,))
                return True
        return False

    def _distribute(self, op: Op) -> None:
        """`op` once per part."""
        if op.name in IDENTITIES:
            self._distribute_barrier(op)
            return
        if not (op.name in DISTRIBUTED or OPS[op.name].elementwise or pairing(op)):
            raise _whole(op, self._stack(op))
        dims = self._dims(op)
        target = dims.get(op.result)
        runs = self.pieces[self._stack(op)].runs
        values = []
        for run in runs:
            operands = [self._piece(v, dims.get(v), run) for v in op.operands]
            attrs = op.attrs
            if target is not None:
                attrs = resized(op, _part_type(op.result, target, run).shape)
            values.append(self._add(make_op(op.name, operands, attrs, (), op.loc)).result)
        if target is None:
            joined = total(values, self._add, ELEMENTWISE_OF[combination(op)], op.loc)
            self.level.replace(op.results, (joined,))
        else:
            self.pieces[op.result] = _Pieces(target, runs, tuple(values))

    def _stack(self, op: Op) -> Value:
        return next(v for v in op.operands if v in self.pieces)

    def _dims(self, op: Op) -> dict[Value, int]:
        """The dim layers lie along in each operand and in the result; a result without one is a
        reduction over layers.

        Raises ShardingError when operands disagree, or layers are merged with something else.
        """
        stack = self._stack(op)
        wanted = self.pieces[stack]
        dims: dict[Value, int] = {stack: wanted.dim}
        for factor in factors(op):
            if any(v in self.pieces and d == self.pieces[v].dim for v, d in factor):
                dims.update(factor)
        size = sum(run.size for run in wanted.runs)
        for value, dim in dims.items():
            own = self.pieces.get(value, wanted)
            is_other = value in self.pieces and own.dim != dim
            if is_other or value.type.shape[dim] != size or own.runs != wanted.runs:
                raise _whole(op, value)
        if op.result not in dims and not self._reduces(op, dims):
            raise _whole(op, stack)
        return dims

    def _reduces(self, op: Op, dims: Mapping[Value, int]) -> bool:
        """True when the dim of layers is reduced away, in a way that can be joined."""
        if op.name in REDUCTIONS:
            return dims[op.operands[0]] in op.attrs.dims
        return pairing(op) is not None and op.operands[0] in dims and op.operands[1] in dims

    def _distribute_barrier(self, op: Op) -> None:
        """A barrier of pieces; results follow operands."""
        flat: list[Value] = []
        for value in op.operands:
            found = self.pieces.get(value)
            flat += found.values if found else (self.level.now(value),)
        results = iter(self._add(make_op(op.name, flat, op.attrs, (), op.loc)).results)
        for value, result in zip(op.operands, op.results, strict=True):
            found = self.pieces.get(value)
            if found is None:
                self.level.replace((result,), (next(results),))
            else:
                self.pieces[result] = replace(
                    found, values=tuple(next(results) for _ in found.runs)
                )

    def _piece(self, value: Value, dim: int | None, run: Run) -> Value:
        """A part's layers of any value; of what only repeats, a shorter repetition."""
        if value in self.pieces:
            found = self.pieces[value]
            return found.values[found.runs.index(run)]
        value = self.level.now(value)
        if dim is None:
            return value
        op = self.made.get(value)
        if op is not None and _repeats(op, dim):
            attrs = resized(op, _part_type(value, dim, run).shape)
            return self._add(make_op(op.name, op.operands, attrs, (), op.loc)).result
        return self._add(layers_of(value, dim, run.first, run.size)).result


def _repeats(op: Op, dim: int) -> bool:
    """True when the result is the same all along `dim`."""
    if isinstance(op.attrs, BroadcastInDimAttrs):
        return dim not in op.attrs.dims
    return splat(op) is not None


def _part_slot(slot: Slot, run: Run, dim: int, parts: dict[str, LeafPart]) -> Slot:
    """The slot of one part of a leaf."""
    own = replace(slot, name=f"{slot.name}@{run.part}")
    parts[own.name] = LeafPart(slot.name, dim, run.first)
    return own


def _part_type(value: Value, dim: int, run: Run) -> TensorType:
    """The type of what one part has of `value`, along the dim of layers."""
    shape = value.type.shape
    return tensor_type((*shape[:dim], run.size, *shape[dim + 1 :]), value.type.dtype)


def _whole(op: Op, value: Value) -> ShardingError:
    """An op needs the layers of all stages at once."""
    return ShardingError(
        "SW_PIPELINE_CUT",
        f"stages require ops that work layer by layer or sum over layers, got {op.name} of"
        f" {value.type}, whose layers lie on several stages",
        op.loc,
        "use pp = 1, or write the op per layer or as a sum (or maximum) over layers",
    )
