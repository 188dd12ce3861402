"""The values that walk along one gathered index, at one level of a per-core graph.

Starting from gathers over an axis, the index is followed through every op that keeps it, forward to
what reads it and back through cheap ops to what it meets (masks, positions). What is found is a
closed region: it is entered by gathers and by slices of what a core has anyway, and left by
reductions. `terms.py` asks in which order they can be taken.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.compiler.ir.facts import pairing, resized_dim
from shardwright.compiler.ir.opdef import OPS, Kind
from shardwright.compiler.ir.traits import IDENTITIES, LITERALS, REDUCTIONS, REDUCTIONS_OF_RANKS, of
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.sharding.indices.dims import factors, reached

MOVING = of(Kind.IDENTITY, Kind.VIEW) | {"reverse"}
FOLDS = ("add", "max", "min")


class TwoIndicesError(Exception):
    """A value would walk along the index by two of its dims."""


@dataclass(slots=True)
class Level:
    """One level of a graph and its `gathers` of activations; who makes and who reads each value,
    and which values follow from a gather.
    """

    graph: Graph
    gathers: Sequence[Op]
    made: Mapping[Value, Op] = field(init=False)
    users: Mapping[Value, Sequence[Op]] = field(init=False)
    gathered: set[Value] = field(init=False)
    numbers: dict[Value, int] = field(init=False)
    _known: dict[Hashable, int] = field(init=False)

    def __post_init__(self) -> None:
        self.made = self.graph.producers()
        self.users = self.graph.uses()
        self.gathered = reached(self.graph, [op.result for op in self.gathers])
        self.numbers = {value: i for i, value in enumerate(self.graph.inputs)}
        self._known = {value: i for value, i in self.numbers.items()}
        for op in self.graph.ops:
            self._number_results(op)

    def _number_results(self, op: Op) -> None:
        """Number results so that equal values have one number, whatever barriers are between."""
        read = [self.numbers[v] for v in op.operands]
        if op.name in IDENTITIES:
            self.numbers.update(zip(op.results, read, strict=True))
            return
        same = (OPS[op.name].pure or op in self.gathers) and not op.regions
        for i, value in enumerate(op.results):
            key: Hashable = (op.name, op.attrs, *read, i) if same else value
            self.numbers[value] = self._known.setdefault(key, len(self._known))


@dataclass(slots=True)
class Index:
    """One gathered index: `dims` of the values that walk along it; those in `derived` follow from
    what was gathered, the others every core can make or slice.
    """

    level: Level
    axes: tuple[str, ...]
    dims: dict[Value, int] = field(default_factory=dict)
    derived: set[Value] = field(default_factory=set)
    entries: list[Op] = field(default_factory=list)
    _todo: list[Op] = field(default_factory=list)

    @classmethod
    def of(cls, level: Level, first: Op) -> Index:
        """The index that `first` gathers, with all other gathers that meet it.

        Raises: TwoIndicesError.
        """
        index = cls(level, first.attrs.axes)
        index._mark(first.result, first.attrs.dim, derived=True)
        while index._todo:
            index._follow(index._todo.pop())
        index.entries = [op for op in level.gathers if op.result in index.derived]
        return index

    def _mark(self, value: Value, dim: int, derived: bool) -> None:
        """Note that `value` walks along the index, and look around it."""
        fresh = value not in self.dims
        if self.dims.setdefault(value, dim) != dim:
            raise TwoIndicesError
        op = self.level.made.get(value)
        if op is not None and op in self.level.gathers and op.attrs.dim == dim:
            derived = True
        if derived and value not in self.derived:
            self.derived.add(value)
            self._todo += self.level.users.get(value, ())
        if fresh and op is not None and (is_cheap(op) or value in self.level.gathered):
            self._todo.append(op)

    def _follow(self, op: Op) -> None:
        """Carry the index from marked operands or results of `op` to the others."""
        if not (is_cheap(op) or op.name in REDUCTIONS or pairing(op) is not None):
            return
        for factor in factors(op):
            marked = [(v, d) for v, d in factor if self.dims.get(v) == d]
            derived = any(v in self.derived and v in op.operands for v, _ in marked)
            backward = any(v in op.results for v, _ in marked)
            if not (derived or backward) or len({v.type.shape[d] for v, d in factor}) > 1:
                continue
            for value, dim in factor:
                self._mark(value, dim, derived and value in op.results)

    def inside(self, op: Op) -> bool:
        """True when a result of `op` walks along the index."""
        return op not in self.entries and any(v in self.dims for v in op.results)

    def ends(self, op: Op) -> bool:
        """True for a sum, maximum or minimum along the index, alone or scattered back to where the
        index lives.
        """
        if self.inside(op) or not any(v in self.derived for v in op.operands):
            return False
        if op.name in REDUCTIONS_OF_RANKS:
            own = op.attrs.axes == self.axes and resized_dim(op) == self.dims[op.operands[0]]
            return bool(own and op.attrs.reduction == "add")
        if op.name in REDUCTIONS:
            return op.attrs.kind in FOLDS
        return pairing(op) is not None and all(v in self.dims for v in op.operands)

    def escapes(self) -> list[Value]:
        """Derived values that something else reads whole."""
        outputs = set(self.level.graph.outputs)
        found = []
        for value in self.derived.difference(*(op.results for op in self.entries)):
            users = self.level.users.get(value, ())
            if value in outputs or not all(self.inside(u) or self.ends(u) for u in users):
                found.append(value)
        return found


def is_cheap(op: Op) -> bool:
    """True for ops a core repeats rather than slice their result."""
    return OPS[op.name].elementwise or op.name in MOVING or op.name in LITERALS
