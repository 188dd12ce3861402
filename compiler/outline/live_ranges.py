"""Shorter live ranges across loops inside a level: stores go first, light code is made again.

A level is cut at the loops in it (`cut.py`), and every value that is made before one of them and
read behind it lies in memory meanwhile, beside what the loop itself needs. So what is written to a
stack goes there before the loop, not in the program's order, and what follows element by element
from lighter values that wait anyway, or from what every iteration has, is made again behind it. The
choice is the one between loops (`passes/remat/save_policy.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardwright.compiler.ir.analysis import invariant_carries
from shardwright.compiler.ir.facts import places_of
from shardwright.compiler.ir.rewrite import reading, with_ops, with_regions, within
from shardwright.compiler.ir.traits import PARTS, UPDATES
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.passes.placement import place_late
from shardwright.compiler.passes.remat.recipes import Recipe, Recipes, is_cheap, repeat
from shardwright.compiler.passes.remat.save_policy import Zone


def shrink_live_ranges(graph: Graph) -> Graph:
    """`graph` whose loop bodies keep less in memory while the loops in them run."""
    graph = within(graph, shrink_live_ranges)
    return with_ops(graph, [_shrunk(op) if _holds_loops(op) else op for op in graph.ops])


def _holds_loops(op: Op) -> bool:
    return any(inner.regions for region in op.regions for inner in region.ops)


def _shrunk(loop: Op) -> Op:
    body = _written_early(loop.regions[0])
    outside = {body.inputs[i] for i in (*invariant_carries(loop), loop.attrs.induction)}
    for number in range(sum(bool(op.regions) for op in body.ops)):
        body = _remade_behind(body, number, outside)
    return with_regions(loop, (body,))


def _written_early(body: Graph) -> Graph:
    """`body` with updates of its stacks right behind what they write, where loops stand between."""
    made, uses = body.producers(), body.uses()
    at = {op: float(i) for i, op in enumerate(body.ops)}
    loops = [at[op] for op in body.ops if op.regions]
    for op in [one for one in body.ops if one.name in UPDATES]:
        moving = _made_for(op, body)
        results = {v for one in moving for v in one.results}
        read = {v for one in moving for v in one.operands} - results
        makers = [made[v] for v in read if v in made]
        last = max(makers, key=at.__getitem__, default=None)
        if last is None or last.regions:
            continue  # it would be a function of its own
        start, others = at[last], [u for u in uses[op.operands[0]] if u not in moving]
        if all(at[u] <= start for u in others) and any(start < one < at[op] for one in loops):
            at.update({one: start + 0.5 for one in moving if at[one] > start})
    return with_ops(body, sorted(body.ops, key=at.__getitem__))


def _made_for(update: Op, body: Graph) -> set[Op]:
    """`update` with what is made for it alone, element by element, and its scalars."""
    made, uses = body.producers(), body.uses()
    found, todo = {update}, [update]
    while todo:
        for value in todo.pop().operands:
            op = made.get(value)
            if op is None or op in found or not is_cheap(op) or value in body.outputs:
                continue
            if value.type.rank == 0 or found.issuperset(uses[value]):
                found.add(op)
                todo.append(op)
    return found


def _remade_behind(body: Graph, number: int, outside: Collection[Value]) -> Graph:
    """`body` with what waits for loop `number` in it made again behind that, where it follows from
    less; every iteration has what is `outside`.
    """
    place = [i for i, op in enumerate(body.ops) if op.regions][number]
    before, loop, behind = body.ops[:place], body.ops[place], body.ops[place + 1 :]
    recipes = _recipes(body, before, loop, behind, outside)
    if not recipes:
        return body
    now = {leaf: leaf for recipe in recipes.values() for leaf in recipe.leaves}
    copies = [op for recipe in recipes.values() for op in repeat(recipe.ops, now)]
    made = {value: now[value] for value in recipes}
    later = [reading(op, made) for op in behind]
    return with_ops(body, (*before, loop, *place_late([*copies, *later], set(copies))))


def _recipes(
    body: Graph, before: Sequence[Op], loop: Op, behind: Sequence[Op], outside: Collection[Value]
) -> dict[Value, Recipe]:
    """How to make again what waits for `loop`, of that for which it pays."""
    read = {v for op in behind for v in op.operands}
    anyway = {*body.outputs, *loop.operands}
    waiting = [v for op in before for v in op.results if v in read]
    given = with_ops(body, before, (*waiting, *anyway))
    zone = Zone(given, outside, waiting, anyway, {v: v for v in waiting if v not in anyway})
    found = zone.recipes()
    recipes = Recipes(body)
    for value in waiting:
        if value in anyway or value in recipes.constants:
            continue
        recipe = recipes.following(value, outside.__contains__)
        if recipe is not None and _read(recipe) <= value.type.num_bytes:
            found[value] = recipe
    return found


def _read(recipe: Recipe) -> int:
    """Bytes that a recipe reads of its leaves, of which slices take a part."""
    leaves, total = set(recipe.leaves), 0
    for op in recipe.ops:
        places = places_of(op)
        for value in op.operands:
            if value in leaves and value not in places:
                total += (op.result if op.name in PARTS else value).type.num_bytes
    return total
