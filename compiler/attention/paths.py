"""How values of one component were made: what is an exponential, a probability, a softmax
derivative.

Probabilities are an exponential, then scaled by rows, dropped, converted or rearranged; anything
added from outside of the component afterwards (the one-hot of a cross-entropy) makes it something
else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwright.compiler.attention.indexing_maps import IndexingMaps, Space
from shardwright.compiler.ir.facts import (
    behind,
    chooses,
    operands_of,
    pairing,
    product_of,
    signs,
    splat,
)
from shardwright.compiler.ir.opdef import OPS, Kind
from shardwright.compiler.ir.ops import BroadcastInDimAttrs
from shardwright.compiler.ir.traits import MOVES, of
from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.support.walks import answered, reached

_VIEWS = of(Kind.IDENTITY, Kind.VIEW, Kind.CAST) | {"negate"}
_KEEPING = _VIEWS | MOVES | {"maximum"}


class Paths:
    """Answers about the mapped values of one level, remembered per value."""

    def __init__(self, maps: IndexingMaps) -> None:
        self.maps = maps
        self.users = maps.graph.uses()
        ops = maps.graph.ops
        self._exponentials = {v for op in ops if op.name == "exponential" for v in op.results}
        self._exponential: dict[Value, bool] = {}
        self._probability: dict[tuple[Value, Space], bool] = {}
        self._row: dict[tuple[Value, Space], bool] = {}

    def is_exponential(self, value: Value) -> bool:
        """True when an exponential of the component is among what `value` was made of."""
        return answered(value, self._exponential, self._inside, self._made_of_exponential)

    def _made_of_exponential(self, value: Value) -> bool:
        inside = self._inside(value)
        made = value in self._exponentials or any(self._exponential[v] for v in inside)
        return bool(inside) and made

    def _inside(self, value: Value) -> list[Value]:
        """Operands of the component of `value`."""
        op = self.maps.producers.get(value)
        read = () if op is None else operands_of(op, value)
        return [v for v in read if self.maps.same_component(v, value)]

    def is_probability(self, value: Value, keys: Space) -> bool:
        """True for an exponential over the keys that was only scaled by rows and rearranged."""
        return answered((value, keys), self._probability, self._core, self._made_as_probability)

    def _core(self, asked: tuple[Value, Space]) -> list[tuple[Value, Space]]:
        """Operands over the keys that are no rows."""
        value, keys = asked
        inside = [v for v in self._inside(value) if self._spans(v, keys)]
        return [(v, keys) for v in inside if not self._is_row(v, keys)]

    def _made_as_probability(self, asked: tuple[Value, Space]) -> bool:
        op = self.maps.producers.get(asked[0])
        if op is None:
            return False
        if asked[0] in self._exponentials:
            return True
        good = [self._probability[one] for one in self._core(asked)]
        if product_of(op):
            return len(good) == 1 and good[0]
        if _adds(op):
            splats = sum(map(self._is_splat, op.operands))
            return len(good) + splats == len(op.operands) and bool(good) and all(good)
        keeps = op.name in _KEEPING or chooses(op) or pairing(op) is not None
        return keeps and any(good)

    def _spans(self, value: Value, keys: Space) -> bool:
        return value in self.maps.indexing and self.maps.space(value) >= keys

    def _is_splat(self, value: Value) -> bool:
        return splat(self.maps.producers.get(value)) is not None

    def _is_row(self, value: Value, keys: Space) -> bool:
        """True for a row value that was broadcast along the keys."""
        return answered((value, keys), self._row, self._row_operands, self._made_as_row)

    def _row_operands(self, asked: tuple[Value, Space]) -> list[tuple[Value, Space]]:
        """What must be rows for a value to be one."""
        value, keys = asked
        op = self.maps.producers.get(value)
        if op is None or value not in self.maps.indexing or self._spreads_row(op, keys):
            return []
        keeps = op.name in _VIEWS or OPS[op.name].elementwise
        return [(v, keys) for v in self._inside(value)] if keeps else []

    def _made_as_row(self, asked: tuple[Value, Space]) -> bool:
        value, keys = asked
        op = self.maps.producers.get(value)
        if op is None or value not in self.maps.indexing:
            return False
        read = self._row_operands(asked)
        return self._spreads_row(op, keys) or (bool(read) and all(self._row[v] for v in read))

    def _spreads_row(self, op: Op, keys: Space) -> bool:
        spreads = isinstance(op.attrs, BroadcastInDimAttrs)
        return spreads and not self._spans(op.operands[0], keys)

    def product_behind(self, value: Value) -> Op | None:
        """The multiplication or division that `value` is, behind views and selections."""
        op = self.maps.producers.get(value)
        while op is not None and (op.name in _VIEWS or chooses(op)):
            value = op.operands[1 if chooses(op) else op.results.index(value)]
            op = self.maps.producers.get(value)
        return op if product_of(op) else None

    def _source(self, value: Value) -> Value:
        """`value` before views."""
        return behind(value, self.maps.producers, lambda op: op.name in _VIEWS)

    def uses_stored(self, total: Op, product: Op, keys: Space) -> bool:
        """True for the derivative written with stored probabilities P: P * (dP + r), or the same
        multiplied out, where r follows from the row sum of P * dP.
        """
        stored = {self._source(v) for v in product.operands}

        def spreads(op: Op) -> bool:
            return op.name in _VIEWS or (bool(product_of(op)) and not self._spans(op.result, keys))

        for value in self._reached(total.result, spreads):
            for op in self._readers(value):
                if not self._spans(op.result, keys):
                    continue
                if _adds(op) and self._is_scaled_by(op.result, stored):
                    return True
                scaled = _multiplies(op) and self._reads(op, stored)
                if scaled and self._is_added_to(op.result, product.result):
                    return True
        return False

    def _reached(self, value: Value, through: Callable[[Op], bool]) -> set[Value]:
        """`value` and what follows from it through some ops."""
        return reached([value], lambda v: (op.results[0] for op in self._readers(v) if through(op)))

    def _readers(self, value: Value) -> Sequence[Op]:
        return self.users.get(value, ())

    def _is_scaled_by(self, value: Value, stored: set[Value]) -> bool:
        """True when `value`, behind views and selections, is multiplied by one of `stored`."""

        def keeps(op: Op) -> bool:
            return op.name in _VIEWS or chooses(op)

        return any(
            _multiplies(op) and self._reads(op, stored)
            for scaled in self._reached(value, keeps)
            for op in self._readers(scaled)
        )

    def _is_added_to(self, value: Value, other: Value) -> bool:
        return any(_adds(op) and self._reads(op, {other}) for op in self._readers(value))

    def _reads(self, op: Op, values: set[Value]) -> bool:
        """Whether `op` reads one of `values`, or a view of it."""
        return any(self._source(v) in values for v in op.operands)


def _adds(op: Op) -> bool:
    return len(signs(op)) > 1


def _multiplies(op: Op) -> bool:
    return len(product_of(op)) > 1
