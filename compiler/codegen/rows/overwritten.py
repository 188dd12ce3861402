"""Values that take over the PSUM bank of the product they are made from.

Vector reads two operands at a time where one is in PSUM and one in SBUF, and at half the rate where
both are in SBUF. So what follows from a product alone stays in its bank where Vector combines it
with a value in SBUF. Next: `balance.py` weighs engines with it, `group.py` leaves it there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from shardwright.compiler.codegen.domain import BINARY, FROM_PSUM, MASK, Space
from shardwright.compiler.codegen.rows.roles import Roles, inner_of
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.attributes import NodeKind, nodes_of

READ_PSUM = FROM_PSUM | nodes_of(NodeKind.CHOICE, NodeKind.REDUCTION)
"""Nodes of rows whose code reads PSUM."""
# Pairs that take as long as one operand where one of them is in PSUM (isa/costs.py).
_PAIRS = BINARY - nodes_of(NodeKind.LONG)


@dataclass(frozen=True, slots=True)
class Overwritten:
    """The product whose bank a value takes over (`bank_of`), and the pairs of values that are read
    at the full rate for it.
    """

    bank_of: Mapping[int, int]
    pairs: frozenset[int]


def overwritten(
    space: Space, roles: Roles, run: Mapping[int, int], kept: Collection[int]
) -> Overwritten:
    """Of a row region whose values in `kept` have tiles beyond their block."""
    found = _Banks(space, roles, run, kept)
    bank_of: dict[int, int] = {}
    pairs: set[int] = set()
    for pair in sorted(n for n in run if space[n].op in _PAIRS):
        inputs = space[pair].inputs
        for n, other in (inputs[::-1], inputs):  # the one made last waits least for its reader
            product = found.product_of(n)
            in_sbuf = other not in (n, *roles.panels, *bank_of)
            if product is not None and in_sbuf and found.is_block(other, product):
                bank_of[n] = product
                pairs.add(pair)
                break
    return Overwritten(bank_of, frozenset(pairs))


class _Banks:
    """What may lie in the banks of the products of a region."""

    def __init__(
        self, space: Space, roles: Roles, run: Mapping[int, int], kept: Collection[int]
    ) -> None:
        self.space, self.roles, self.run, self.kept = space, roles, run, kept
        self.users = space.users((*roles.rows, *roles.sums))

    def product_of(self, number: int) -> int | None:
        """The product that a value alone follows from, if its bank may hold both."""
        value, values = self.space[number], self.space.values
        if any(values[i].op == MASK for i in value.inputs):
            return None  # GpSimd applies it
        wide = [i for i in value.inputs if values[i].atoms == value.atoms]
        products = [i for i in wide if i in self.roles.panels and self.users[i] == [number]]
        if wide != products or len(products) != 1 or inner_of(self.roles, value) is None:
            return None
        (product,) = products
        mine = self.is_block(number, product) and self.is_block(product, product)
        return product if mine and self._reach_psum([number, *self.users[number]]) else None

    def is_block(self, number: int, product: int) -> bool:
        """Whether a value is fp32 and made block by block in the sweep of a product."""
        value, source = self.space[number], self.space[product]
        beside = value.atoms == source.atoms and self.run.get(number) == self.run[product]
        return beside and value.dtype is DType.F32 and number not in self.kept

    def _reach_psum(self, numbers: Iterable[int]) -> bool:
        ops = {n: self.space[n].op for n in numbers}
        return all(op in READ_PSUM and n not in self.roles.sums for n, op in ops.items())
