"""A user's own choice of what tensor parallelism splits: weights by name, each with one dim.

`strategy.tensor_plan` says it (`layers.*.wq.weight:0`). Dims of one index walk together, so that
what is said of a weight splits others that meet it; where no plan is given the cheapest choice is
found (`splits.py`), and where one is, the two are compared.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from shardwright.compiler.diagnostics import Diagnostic, ShardingError
from shardwright.compiler.frontend.roles import WEIGHT_ROLES
from shardwright.compiler.ir.types import Value
from shardwright.sharding.indices.indices import Class
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.strategies.decisions import Decisions

NAMED = 4  # weights that a note lists by name (our choice)
_PART = re.compile(r"@\d+$")  # of a stack of layers, by the part of a pipeline that has them
_ROW = re.compile(r"\s*([^\s:,]+)\s*:\s*(\d+)\s*")


def rows_of(text: str) -> tuple[tuple[str, int], ...]:
    """(pattern, dim) of a plan. Raises ShardingError (SW_TENSOR_PLAN)."""
    found = []
    for word in filter(str.strip, text.split(",")):
        row = _ROW.fullmatch(word)
        if row is None:
            raise ShardingError(
                "SW_TENSOR_PLAN",
                f"strategy.tensor_plan requires weight:dim, got {word.strip()!r}",
                hint="for example layers.*.attention.wq.weight:0, layers.*.attention.wo.weight:1",
            )
        found.append((row[1], int(row[2])))
    return tuple(found)


def plan_text(rows: Collection[tuple[str, int]]) -> str:
    """A plan as the setting takes it."""
    return ", ".join(f"{pattern}:{dim}" for pattern, dim in rows)


@dataclass(slots=True)
class TensorPlan:
    """The families that a plan names, and what it says of every weight it names."""

    families: set[Class] = field(default_factory=set)
    said: dict[Value, tuple[Slot, int]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Names of weights that cannot be split as said -> why."""

    def notes(self, step: Decisions, axis: str, own: Collection[Class]) -> list[Diagnostic]:
        """What became of the plan, beside the choice `own` that the strategy would have made."""
        atoms = step.mesh.atoms(axis)
        followed = [
            slot.name
            for value, (slot, dim) in self.said.items()
            if set(step.layout.of(value).dims[dim]) & {*atoms}
        ]
        also = [
            slot.name
            for slot, value in step.slots(*WEIGHT_ROLES)
            if value not in self.said and set(step.layout.of(value).axes) & {*atoms}
        ]
        indices = step.layout.indices
        others = [
            f"{slot.name.partition('/')[2]} dim {dim}"
            for slot, value in step.slots(*WEIGHT_ROLES)
            for dim, family in indices.families(value)
            if family in {*own} - self.families
        ]
        text = f"{len(followed)} of {len(self.said) + len(self.refused)} weights of the plan lie"
        text += f" over {axis} as it says"
        if also:
            text += f"; {_few(also)} lie so too, since their indices are the same"
        text += "; the strategy finds the same by itself" if self.families == {*own} else ""
        text += f"; by itself it would split {_few(others)} too" if others else ""
        notes = [Diagnostic("SW_TENSOR_PLAN", text, severity="note")]
        for name, why in self.refused.items():
            hint = "leave it out of the plan, or split another dim of it"
            notes.append(Diagnostic("SW_TENSOR_PLAN", f"{name}: {why}", None, hint, "warning"))
        return notes


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def plan_of(
    step: Decisions,
    text: str,
    layers: Collection[Class],
    candidates: Collection[Class],
    ends: Collection[Class],
    rooms: Mapping[Class, int],
) -> TensorPlan:
    """The plan over the weights of a step. `candidates` may be split, `ends` are cut by some op,
    `rooms` says in how many parts.

    Raises ShardingError (SW_TENSOR_PLAN) for a name or a dim that no weight has.
    """
    plan, indices = TensorPlan(), step.layout.indices
    for pattern, dim in rows_of(text):
        found = [(s, v) for s, v in step.slots(*WEIGHT_ROLES) if _is_named(s, pattern)]
        if not found:
            names = [slot.name for slot, _ in step.slots(*WEIGHT_ROLES)]
            raise ShardingError(
                "SW_TENSOR_PLAN",
                f"strategy.tensor_plan requires weights of the step, got {pattern}",
                hint=f"weights are {_few(names)}; strategy.tensor_plan= leaves the plan out",
            )
        for slot, value in found:
            shape = value.type.shape
            families = sorted(indices.families(value))
            own = [d for d, family in families if family not in layers and shape[d] > 1]
            if dim >= len(own):
                raise ShardingError(
                    "SW_TENSOR_PLAN",
                    f"strategy.tensor_plan requires a dim of {slot.name} {value.type} below"
                    f" {len(own)}, got {dim}",
                    hint="dims are those of one layer's weight",
                )
            family = indices.family((value, own[dim]))
            why = _refusal(family, candidates, ends, rooms, step, value, plan.families)
            if why:
                plan.refused[slot.name] = f"dim {dim} {why}"
            else:
                plan.families.add(family)
                plan.said[value] = slot, own[dim]
    return plan


def _refusal(
    family: Class,
    candidates: Collection[Class],
    ends: Collection[Class],
    rooms: Mapping[Class, int],
    step: Decisions,
    value: Value,
    chosen: Collection[Class],
) -> str:
    """Why a family cannot be split, "" where it can."""
    if family not in candidates:
        return "is the hidden dim, which crosses layers and stays whole"
    if family in ends:
        return "is cut by the model: every core would need columns of its neighbours"
    if rooms.get(family, 1) == 1:
        return "does not divide"
    others = {f for _, f in step.layout.indices.families(value)} - {family}
    return "is split along another dim already" if others & set(chosen) else ""


def _is_named(slot: Slot, pattern: str) -> bool:
    """Whether a pattern names a leaf, or the leaves of a stack, below the part of the state."""
    parts = re.split(r"[./]", pattern)
    for name in slot.leaves or (slot.name,):
        own = re.split(r"[./]", _PART.sub("", name))[1:]
        if len(own) == len(parts) and all(map(fnmatchcase, own, parts)):
            return True
    return False
