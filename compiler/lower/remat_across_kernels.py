"""Quadratic values that still cross from one kernel to another are rematerialised by their reader.

The pass over the whole step (`passes/remat`) serves readers that can never share a kernel. Here the
kernels are known: a kernel that did not fit was split, and what its halves would pass through
HBM is often cheaper to compute twice from values a quarter of its size (scores from queries, keys
and row sums). The result is a new graph, which is lowered again and kept if it costs less.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from shardwright.compiler.ir.rewrite import with_operands, with_ops
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.lower.group import Groups, Part
from shardwright.compiler.lower.rule import Budget, traffic
from shardwright.compiler.lower.task import CONTRACT
from shardwright.compiler.passes.dce import dce
from shardwright.compiler.passes.remat.recipes import Recipes, repeat
from shardwright.compiler.support.walks import reached


@dataclass(slots=True)
class _Copies:
    """What is rematerialised: ops in front of each reader, and what the reader reads instead."""

    before: dict[Op, list[Op]] = field(default_factory=dict)
    reads: dict[Op, dict[Value, Value]] = field(default_factory=dict)
    never_fused: list[tuple[Value, Value]] = field(default_factory=list)


Copied = tuple[Graph, list[tuple[Value, Value]]]
"""A graph with copies, and the pairs (original, copy), which may not share a kernel."""


def remat_across_kernels(graph: Graph, groups: Groups) -> Copied | None:
    """`graph` with copies for the kernels that read quadratic values of others. None when there is
    nothing to copy.
    """
    return _with_copies(graph, groups, list(groups.parts.values()))


def halved(graph: Graph, groups: Groups, part: Part) -> Copied | None:
    """`remat_across_kernels` for a reduction fusion cut in two: what its smallest result needs
    stays, the rest rematerialises what it reads of that. None when the kernel has one result, or
    there is nothing to copy.
    """
    needs = [_needed(groups, part, n) for n in part.members if _is_result(groups, part, n)]
    first = min(needs, key=len, default=part.members)
    rest = part.members - first
    if not any(groups.body.tasks[n].kind == CONTRACT for n in rest):
        return None
    return _with_copies(graph, groups, [Part(part.kernel, rest)])


def _is_result(groups: Groups, part: Part, number: int) -> bool:
    task = groups.body.tasks[number]
    return task.kind == CONTRACT and groups.is_stored(task, part.members)


def _needed(groups: Groups, part: Part, number: int) -> frozenset[int]:
    """The tasks of a kernel that one of them needs, itself among them."""

    def makers(one: int) -> set[int]:
        made = map(groups.body.maker, groups.body.tasks[one].data)
        return {task.number for task in made if task is not None} & part.members

    return frozenset(reached((number,), makers))


def _with_copies(graph: Graph, groups: Groups, parts: Collection[Part]) -> Copied | None:
    recipes, copies = Recipes(graph, short_row=0), _Copies()  # figures of rows are on chip or kept
    for part in parts:
        _serve(graph, groups, part, recipes, copies)
    if not copies.reads:
        return None
    ops: list[Op] = []
    for op in graph.ops:
        ops += copies.before.get(op, [])
        reads = copies.reads.get(op, {})
        ops.append(with_operands(op, tuple(reads.get(v, v) for v in op.operands)))
    made = dce(with_ops(graph, ops))
    return made, copies.never_fused


def _serve(graph: Graph, groups: Groups, part: Part, recipes: Recipes, copies: _Copies) -> None:
    """Copies for one kernel; what several of its ops read is made once."""
    body, now = groups.body, dict[Value, Value]()

    def in_memory(value: Value) -> bool:
        made = body.maker(value)
        return made is None or groups.is_live_out(made) or made.number not in part.members

    readers = [t.op for t in groups.tasks(part.members) if t.op in recipes.position]
    for op in sorted(readers, key=recipes.position.__getitem__):
        for value in op.operands:
            producer = body.maker(value)
            if producer is None or producer.number in part.members or groups.is_live_out(producer):
                continue
            recipe = recipes.find(value, lambda _: True, in_memory)
            if recipe is None:
                continue
            for leaf in recipe.leaves:
                now.setdefault(leaf, leaf)
            copies.before.setdefault(op, []).extend(repeat(recipe.ops, now))
            copies.reads.setdefault(op, {})[value] = now[value]
            copies.never_fused += [
                (o.result, now[o.result]) for o in recipe.ops if len(o.results) == 1
            ]


def cost(groups: Groups, budget: Budget) -> float:
    """HBM bytes of all kernels, contractions counted at the bytes they could hide."""
    moved = sum(traffic(groups, part.members) for part in groups.parts.values())
    return moved + sum(task.flops for task in groups.body.tasks) / budget.intensity
