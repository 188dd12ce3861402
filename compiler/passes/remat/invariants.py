"""Quadratic loop invariants that need no contraction (a mask of segment ids) are rematerialised in
the loop body from their small inputs, instead of being read from memory by every iteration.

Invariants made of constants alone are the business of `outline/sink.py`.
"""

from __future__ import annotations

from shardwright.compiler.ir.analysis import invariant_carries
from shardwright.compiler.ir.rewrite import reading, with_invariants, with_ops
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.passes.placement import place_late
from shardwright.compiler.passes.remat.recipes import Recipe, Recipes, contracts, repeat


def remat_invariants(graph: Graph) -> Graph:
    """`graph` whose loops make quadratic invariants themselves; carries that are not read any more
    are left to `dce`.
    """
    if not any(op.regions for op in graph.ops):
        return graph
    recipes = Recipes(graph)
    ops = tuple(_served(op, recipes) if op.regions else op for op in graph.ops)
    return with_ops(graph, ops)


def _served(loop: Op, recipes: Recipes) -> Op:
    """`loop` with its quadratic invariants made inside."""
    carries = [i for i in invariant_carries(loop) if i != loop.attrs.induction]
    found = ((i, _recipe(loop.operands[i], recipes)) for i in carries)
    wanted = {i: recipe for i, recipe in found if recipe is not None}
    return _with_copies(loop, wanted) if wanted else loop


def _recipe(value: Value, recipes: Recipes) -> Recipe | None:
    """How to rematerialise an invariant without contractions."""
    if value in recipes.inputs or value in recipes.constants:
        return None
    found = recipes.find(value, lambda _: True, lambda _: False)
    return None if found is None or any(map(contracts, found.ops)) else found


def _with_copies(loop: Op, wanted: dict[int, Recipe]) -> Op:
    body = loop.regions[0]
    inside = {x: Value(x.type) for recipe in wanted.values() for x in recipe.leaves}
    now = dict(inside)
    copies = [op for recipe in wanted.values() for op in repeat(recipe.ops, now)]
    made = {body.inputs[i]: now[loop.operands[i]] for i in wanted}
    ops = [reading(op, made) for op in body.ops]
    return with_invariants(loop, inside, place_late([*copies, *ops], set(copies)))
