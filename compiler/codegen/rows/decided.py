"""What the values of a pass are in columns where some selects are decided, and which share a tile.

A decided select is one of its branches, and a sum with a decided zero its other term, so they need
no code: they lie in the tile of that value. What is kept beyond its block has a tile already, and
the value is made there, for one reader at most and only where nothing else keeps it; any other kept
one is a copy. `group.py` emits what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from shardwright.compiler.codegen.domain import SCALED, SPLATS, Numbers, Value
from shardwright.compiler.codegen.fusion import is_product
from shardwright.compiler.codegen.rows.passes import Pass
from shardwright.compiler.codegen.rows.plan import RowPlan


@dataclass(frozen=True, slots=True)
class Decided:
    """`values` of a pass in some columns; those in `same` lie in another's tile, at its `home`."""

    values: Mapping[int, Value] = field(default_factory=dict)
    same: Mapping[int, int] = field(default_factory=dict)
    home: Mapping[int, int] = field(default_factory=dict)

    def owner(self, number: int) -> int:
        """The value whose code fills the tile of a value."""
        return self.same.get(number, number)

    def inputs(self, number: int) -> Numbers:
        """What a value reads."""
        return tuple(dict.fromkeys(self.values[number].inputs))

    def sharing(self, number: int) -> Numbers:
        """A value and those that lie in its tile."""
        return (number, *(n for n, owner in self.same.items() if owner == number))


def decided(
    plan: RowPlan, pass_: Pass, branches: Mapping[int, int], is_kept: Callable[[int], bool]
) -> Decided:
    """A pass whose selects are their `branches`; what `is_kept` has a tile beyond its block."""
    values: dict[int, Value] = {}
    same: dict[int, int] = {}
    home: dict[int, int] = {}
    for n in pass_.values:
        value = plan.domain[n]
        branch = branches.get(n, _without_zero(plan, branches, value))
        if branch is None:
            values[n] = _unscaled(plan, values, value, same)
            continue
        values[n] = replace(value, op="convert", inputs=(branch,), attrs={})
        owner = same.get(branch, branch)
        if not _alike(plan, value, plan.domain[branch]):
            continue
        if not is_kept(n):
            same[n] = owner
        elif owner in values and owner not in home and not is_kept(owner):
            same[n], home[owner] = owner, n
    return Decided(values, same, home)


def _without_zero(plan: RowPlan, branches: Mapping[int, int], value: Value) -> int | None:
    """What a sum is where the other term is decided to be 0, as masks that are added are."""
    if value.op != "add":
        return None
    given = [plan.domain[branches.get(i, i)] for i in value.inputs]
    for term, rest in zip(given, reversed(value.inputs), strict=True):
        other = plan.domain[rest]
        if term.op == "constant" and term.attrs["value"] == 0 and other.dtype is value.dtype:
            return rest
    return None


def _alike(plan: RowPlan, value: Value, branch: Value) -> bool:
    """Whether a branch has an element for each of the select's; vectors lie on all partitions."""
    row = {plan.row}
    return branch.op not in SPLATS and branch.iter_dims | row == value.iter_dims | row


def _unscaled(
    plan: RowPlan, values: Mapping[int, Value], value: Value, same: Mapping[int, int]
) -> Value:
    """func(x * 1 + bias) of a decided select that is a product made here takes over its scale."""
    if value.op != SCALED or value.attrs["scale"] != 1.0 or value.inputs[0] not in same:
        return value
    owner = same[value.inputs[0]]
    given = plan.domain[owner]
    if owner not in values or not is_product(given):
        return value
    attrs = {**value.attrs, "scale": given.attrs["scale"]}
    return replace(value, inputs=(*given.inputs, *value.inputs[1:]), attrs=attrs)
