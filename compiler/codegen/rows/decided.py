"""What the values of a stage are in columns where some selects are decided, and which share a tile.

A decided select is its first branch, so it needs no code: it lies in the tile of that branch. A
select that is kept beyond its block has a tile already, and the branch is made there, for one
select at most and only where nothing else keeps the branch; any other kept select is a copy.
`group.py` emits what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from compiler.codegen.fusion import SCALED, is_product
from compiler.codegen.rows.levels import Stage
from compiler.codegen.rows.plan import RowPlan
from compiler.codegen.space import SPLATS, Value


@dataclass(frozen=True, slots=True)
class Decided:
    """`values` of a stage as they are in some columns. Values in `same` lie in the tile of the one
    they map to, which is made in the tile of its `home` if it has one.
    """

    values: Mapping[int, Value] = field(default_factory=dict)
    same: Mapping[int, int] = field(default_factory=dict)
    home: Mapping[int, int] = field(default_factory=dict)

    def owner(self, number: int) -> int:
        """The value whose code fills the tile of a value."""
        return self.same.get(number, number)

    def inputs(self, number: int) -> tuple[int, ...]:
        """What a value reads."""
        return tuple(dict.fromkeys(self.values[number].inputs))

    def sharing(self, number: int) -> tuple[int, ...]:
        """A value and those that lie in its tile."""
        return (number, *(n for n, owner in self.same.items() if owner == number))


def decided(
    plan: RowPlan, stage: Stage, true: frozenset[int], is_kept: Callable[[int], bool]
) -> Decided:
    """The stage where the selects `true` are their first branch; `is_kept` tells which values have
    a tile beyond their block.
    """
    values: dict[int, Value] = {}
    same: dict[int, int] = {}
    home: dict[int, int] = {}
    for n in stage.values:
        value = plan.space.values[n]
        values[n] = value if n in true else _unscaled(plan, values, value, same)
        if n not in true:
            continue
        branch = value.inputs[1]
        values[n] = replace(value, op="convert", inputs=(branch,), attrs={})
        owner = same.get(branch, branch)
        if not _alike(plan, value, plan.space.values[branch]):
            continue
        if not is_kept(n):
            same[n] = owner
        elif owner in values and owner not in home and not is_kept(owner):
            same[n], home[owner] = owner, n
    return Decided(values, same, home)


def _alike(plan: RowPlan, value: Value, branch: Value) -> bool:
    """Whether a branch has an element for each of the select's; vectors lie on all partitions."""
    row = {plan.roles.row}
    return branch.op not in SPLATS and branch.atoms | row == value.atoms | row


def _unscaled(
    plan: RowPlan, values: Mapping[int, Value], value: Value, same: Mapping[int, int]
) -> Value:
    """func(x * 1 + bias) of a decided select that is a product made here takes over its scale."""
    if value.op != SCALED or value.attrs["scale"] != 1.0 or value.inputs[0] not in same:
        return value
    owner = same[value.inputs[0]]
    given = plan.space.values[owner]
    if owner not in values or not is_product(given):
        return value
    attrs = {**value.attrs, "scale": given.attrs["scale"]}
    return replace(value, inputs=(*given.inputs, *value.inputs[1:]), attrs=attrs)
