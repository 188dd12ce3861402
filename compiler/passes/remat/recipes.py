"""How a value is rematerialised: the ops back to values at least four times smaller, and when that
is worth it.

A recipe ends at small values (row maxima and sums, queries, keys), at values that are in memory
anyway, and at ops that are not repeated. What is made of constants and counts alone is always
repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial

from shardwright.compiler.ir.build import cloned, fresh
from shardwright.compiler.ir.combinations import EXTREMES
from shardwright.compiler.ir.facts import (
    behind,
    combination,
    is_constant_like,
    operands_of,
    pairing,
)
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.rewrite import with_ops
from shardwright.compiler.ir.traits import (
    ALIASING,
    CHEAP,
    CONTRACTIONS,
    IDENTITIES,
    LITERALS,
    REDUCTIONS,
    RESHAPING,
)
from shardwright.compiler.ir.types import Graph, Op, Value

RATIO = 4
"""A value is quadratic when all it follows from takes a quarter of its bytes (our choice: storing
those instead must pay for reading them).
"""

MAX_CONTRACTIONS = 2

MAX_FLOPS_PER_BYTE = 256
"""Contractions repeated per byte not stored. inferred: NeuronCore-v2, 92 TFLOP/s bf16 against 410
GB/s of HBM per core, is 224; scores of head width 128 cost 64 in fp32 and 128 in bf16, an MLP of
width 1024 costs 512 and 1024 and is saved.
"""

SHORT_ROW = 2048
"""Elements of a row whose maximum or sum is rematerialised rather than saved: it is stored and read
in a 4-byte descriptor a row, which takes longer than another pass over so many scores (our choice,
by time of GPT-3 and Llama-3 8B steps at 512 to 8192 positions).
"""

FIGURES = (*EXTREMES, "add")
"""Of a row; a sum may be rounded otherwise in another function, as it may under jax.checkpoint."""

_CHEAP_OPS = 12  # of a chain that leads from a small value to one that is in memory anyway


Question = Callable[[Value], bool]


@dataclass(frozen=True, slots=True)
class Recipe:
    """`ops` in program order make a value from `leaves`."""

    ops: tuple[Op, ...]
    leaves: tuple[Value, ...]

    def then(self, other: Recipe) -> Recipe:
        """What makes of the values on its way what `other` makes of them."""
        needed, ops = set(other.leaves), list[Op]()
        for op in reversed(self.ops):
            if not needed.isdisjoint(op.results):
                ops.append(op)
                needed.update(op.operands)
        leaves = tuple(v for v in self.leaves if v in needed)
        return Recipe((*reversed(ops), *other.ops), leaves)


def contracts(op: Op) -> bool:
    """True for ops that contract, in a loop body or themselves."""
    if op.regions:
        return any(inner.name in CONTRACTIONS for inner in op.regions[0].walk())
    return op.name in CONTRACTIONS


def is_cheap(op: Op) -> bool:
    """Ops that only move data or work element by element; a table of constants is in memory."""
    if op.name in LITERALS:
        return is_constant_like(op)
    return op.name in CHEAP


def may_repeat(op: Op) -> bool:
    """Ops a recipe may hold. A loop qualifies when it only counts, shifts and adds (generators of
    random bits).
    """
    if op.regions:
        return all(is_cheap(inner) for inner in op.regions[0].ops)
    return is_cheap(op) or pairing(op) is not None or op.name in REDUCTIONS


class Recipes:
    """Recipes for the values of one graph level; they go through `figures` of rows of up to
    `short_row` elements.
    """

    def __init__(
        self, graph: Graph, short_row: int = SHORT_ROW, figures: Collection[str] = EXTREMES
    ) -> None:
        self.short_row = short_row
        self.figures = figures
        self.inputs = set(graph.inputs)
        self.producers = graph.producers()
        self.position = {op: i for i, op in enumerate(graph.ops)}
        self.constants = constant_exprs(graph)
        self._short_rows: dict[int, set[Value]] = {}
        self._widest = self._widest_leaves(graph)

    def _widest_leaves(self, graph: Graph) -> dict[Value, float]:
        """Per value that may be rematerialised, the bytes that its widest leaf has at least: on
        each way back the narrowest value serves best. Inputs count a quarter, as `_pays` allows.
        """
        widest: dict[Value, float] = {}
        for op in graph.ops:
            if not may_repeat(op):
                continue
            for result in op.results:
                given = (v for v in operands_of(op, result) if v not in self.constants)
                widest[result] = max((self._narrowest(v, widest) for v in given), default=0)
        return widest

    def _narrowest(self, value: Value, widest: Mapping[Value, float]) -> float:
        size = value.type.num_bytes
        return size / RATIO if value in self.inputs else min(size, widest.get(value, size))

    def may_pay(self, value: Value) -> bool:
        """False when `find` has nothing for `value`, whatever is resident and available."""
        if value in self.constants or value not in self._widest:
            return False
        return self._widest[value] * RATIO <= self._behind_views(value).type.num_bytes

    def find(self, value: Value, resident: Question, available: Question) -> Recipe | None:
        """How to rematerialise `value`, if that pays.

        `resident` are level inputs that stay in memory as they are, `available` values that the
        place of the recipe has for other reasons. Views cost nothing, so sizes are compared with
        what `value` is a view of.
        """
        saved = self._behind_views(value)
        first = self._search(value, partial(self._ends, saved), dots=MAX_CONTRACTIONS)
        if first is None:
            return None
        recipe = self._with_cheap_leaves(first, resident, available)
        return recipe if self._pays(saved, recipe, resident, available) else None

    def following(self, value: Value, known: Question) -> Recipe | None:
        """The few cheap ops, if any are needed, by which `value` follows from known ones."""
        if known(value):
            return Recipe((), (value,))
        found = self._search(value, known, is_cheap, _CHEAP_OPS)
        return found if found is not None and all(map(known, found.leaves)) else None

    def _behind_views(self, value: Value) -> Value:
        """The value that would be in memory if `value` were saved."""
        return behind(value, self.producers, lambda op: op.name in RESHAPING)

    def _ends(self, value: Value, x: Value) -> bool:
        """Whether a recipe for `value` ends at `x`: what is small, and is not of short rows."""
        return shrinks(value, x) and x not in self._of_short_rows(value.type.num_bytes)

    def _of_short_rows(self, size: int) -> set[Value]:
        """Figures of short rows of so many bytes, and what follows from such alone. All of them at
        once, in order: a sort is a chain of thousands of cheap ops."""
        if size not in self._short_rows:
            found = self._short_rows[size] = set[Value]()
            for op in self.position:
                found.update(x for x in op.results if self._is_of_short_rows(size, op, x, found))
        return self._short_rows[size]

    def _is_of_short_rows(self, size: int, op: Op, x: Value, found: Collection[Value]) -> bool:
        """Whether a result `x` of `op` is one of those, given those before it."""
        if x.type.num_bytes * RATIO > size:
            return False
        if op.name in REDUCTIONS and combination(op) in self.figures:
            row = op.operands[0].type.num_elements // x.type.num_elements
            is_row = op.operands[0].type.num_bytes * RATIO > size
            return row <= self.short_row and is_row
        given = [v for v in operands_of(op, x) if v not in self.constants]
        return is_cheap(op) and bool(given) and all(v in found for v in given)

    def _search(
        self,
        value: Value,
        stop: Question,
        may: Callable[[Op], bool] = may_repeat,
        most: int | None = None,
        dots: int | None = None,
    ) -> Recipe | None:
        """The ops behind `value` up to leaves: what `stop` accepts, inputs, ops that `may` refuses.

        None when there is nothing to repeat, or more than `most` ops, or more than `dots`
        contractions: behind a residual stream are those of all layers.
        """
        ops: set[Op] = set()
        contractions = 0
        leaves: dict[Value, None] = {}
        seen: set[Value] = set()
        todo = [value]
        while todo and (most is None or len(ops) <= most):
            x = todo.pop()
            if x in seen:
                continue
            seen.add(x)
            op = self.producers.get(x)
            stops = x is not value and x not in self.constants and stop(x)
            if op is None or stops or not may(op):
                leaves[x] = None
                continue
            contractions += op.name in CONTRACTIONS and op not in ops
            if dots is not None and contractions > dots:
                return None
            ops.add(op)
            todo += operands_of(op, x)
        if value in leaves or todo:
            return None
        return self._in_order(ops, leaves)

    def _in_order(self, ops: Iterable[Op], leaves: Iterable[Value]) -> Recipe:
        return Recipe(tuple(sorted(ops, key=self.position.__getitem__)), tuple(leaves))

    def _with_cheap_leaves(self, recipe: Recipe, resident: Question, available: Question) -> Recipe:
        """`recipe` with leaves replaced by cheap ops, where that needs less memory."""

        def there(x: Value) -> bool:
            return (x in self.inputs and resident(x)) or available(x)

        ops, leaves = set(recipe.ops), dict[Value, None]()
        seen: set[Value] = set()
        todo = list(reversed(recipe.leaves))
        while todo:
            leaf = todo.pop()
            if leaf in seen:
                continue
            seen.add(leaf)
            longer = self._cheap(leaf, resident, there)
            if longer is None:
                leaves[leaf] = None
                continue
            ops.update(longer.ops)
            todo += reversed(longer.leaves)
        return self._in_order(ops, leaves)

    def _cheap(self, leaf: Value, resident: Question, there: Question) -> Recipe | None:
        """Cheap ops that make `leaf` from what is there; or from values small beside it when it is
        quadratic itself (a mask that all heads share): others rematerialise it, so it is not saved.
        """
        if leaf in self.inputs and resident(leaf):
            return None
        is_small = partial(shrinks, self._behind_views(leaf))
        found = self._search(leaf, is_small, is_cheap)
        if found is not None and all(map(is_small, found.leaves)):
            return found
        found = None if there(leaf) else self._search(leaf, there, is_cheap, _CHEAP_OPS)
        return found if found is not None and _all_there(leaf, found, there) else None

    def _pays(self, value: Value, recipe: Recipe, resident: Question, available: Question) -> bool:
        """Small leaves, few contractions, and less arithmetic than the memory traffic is worth."""
        if all(op.name in ALIASING for op in recipe.ops):
            return False  # nothing is stored for another look at a small value
        dots = [op for op in recipe.ops if op.name in CONTRACTIONS]
        flops = sum(OPS[op.name].flops(op) for op in dots)
        size = value.type.num_bytes
        if len(dots) > MAX_CONTRACTIONS or flops > MAX_FLOPS_PER_BYTE * size:
            return False
        saved = [x for x in recipe.leaves if x in self.inputs and resident(x)]
        made = [x for x in recipe.leaves if x not in saved]
        if not all(shrinks(value, x) for x in made):
            return False
        stored = sum(x.type.num_bytes for x in made if not available(x))
        read = sum(x.type.num_bytes for x in saved)
        return stored * RATIO <= size and read * (1 if dots else RATIO) <= size


def _all_there(leaf: Value, recipe: Recipe, there: Question) -> bool:
    """True when `recipe` makes `leaf` from what is there, without reading much more than it."""
    size = sum(x.type.num_bytes for x in recipe.leaves)
    return all(there(x) for x in recipe.leaves) and size <= 2 * leaf.type.num_bytes


def shrinks(value: Value, result: Value) -> bool:
    """True when `result` takes at most a quarter of the bytes of `value`."""
    return result.type.num_bytes * RATIO <= value.type.num_bytes


def constant_exprs(graph: Graph) -> set[Value]:
    """Values made of constants and counts alone."""
    found: set[Value] = set()
    for op in graph.ops:
        made = is_cheap(op) and op.name not in IDENTITIES
        if made and all(v in found for v in op.operands):
            found.update(op.results)
    return found


def repeat(ops: Iterable[Op], now: MutableMapping[Value, Value]) -> list[Op]:
    """Copies of `ops` that read what `now` holds; their results are added to `now`."""
    made: list[Op] = []
    for op in ops:
        if op.name in IDENTITIES:
            for operand, result in zip(op.operands, op.results, strict=True):
                if operand in now:
                    now.setdefault(result, now[operand])
        elif any(result not in now for result in op.results):
            made.append(fresh(op, [now[v] for v in op.operands], tuple(map(copied, op.regions))))
            for old, new in zip(op.results, made[-1].results, strict=True):
                now.setdefault(old, new)
    return made


def copied(graph: Graph) -> Graph:
    """The same graph with values of its own."""
    now = {v: Value(v.type) for v in graph.inputs}
    ops = [cloned(op, now, tuple(map(copied, op.regions))) for op in graph.ops]
    inputs, outputs = tuple(now[v] for v in graph.inputs), tuple(now[v] for v in graph.outputs)
    return with_ops(graph, ops, outputs, inputs)
