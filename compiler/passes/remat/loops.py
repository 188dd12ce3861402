"""Remaking across loops: a loop that stacks values, and loops that read them row by row.

The readers rematerialise a value from what the first loop stacks anyway, from loop invariants, and
from values that are stacked instead (row maxima and sums of scores). Nothing reads the old stack
then, so that `dce` drops it from both loops. Which values, and from what: the caller's `Choose`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.compiler.ir.analysis import invariant_carries
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.ops import ReshapeAttrs
from shardwright.compiler.ir.rewrite import carrying, with_invariants, with_ops
from shardwright.compiler.ir.types import Graph, Op, Value, tensor_type
from shardwright.compiler.passes.placement import place_late
from shardwright.compiler.passes.remat.recipes import FIGURES, SHORT_ROW, Recipe, Recipes, repeat
from shardwright.compiler.passes.remat.stacks import RowRead, Stack, row_reads, stacks

Chosen = Iterable[tuple[Stack, Recipe]]
Choose = Callable[["Writer", Sequence[Stack], Mapping[Stack, Collection[Op]]], Chosen]
"""Which of the stacks that loops read row by row (third argument, with those loops; of all in the
second) are rematerialised, and how. It tells the writer of those that stay (`Writer.save`).
"""


def remat_across_loops(graph: Graph, choose: Choose, short_row: int = SHORT_ROW) -> Graph:
    """`graph` whose loops of this level rematerialise what `choose` says, instead of reading it."""
    for loop in [op for op in graph.ops if op.regions]:
        graph = _remat_stacks(graph, loop, choose, short_row)
    return graph


def quadratic(
    writer: Writer, found: Sequence[Stack], read: Mapping[Stack, Collection[Op]]
) -> Chosen:
    """Choose: large values that follow from small ones, one after the other, since what is saved of
    one serves the next; then what follows from values that their readers have on the way.
    """
    large: list[tuple[Stack, Recipe]] = []
    saved: list[Stack] = []
    for stack in found:
        recipe = writer.recipe(stack) if stack in read else None
        if recipe is None:
            writer.save(stack)
            saved.append(stack)
        else:
            large.append((stack, recipe))
            yield stack, recipe
    for stack in saved:
        readers = set(read.get(stack, ()))
        for recipe in (r for other, r in large if readers and readers <= set(read[other])):
            on_the_way = {value for op in recipe.ops for value in op.results}
            more = writer.recipes.following(stack.value, on_the_way.__contains__)
            if more is not None:
                yield stack, recipe.then(more)
                break


def _remat_stacks(graph: Graph, written: Op, choose: Choose, short_row: int) -> Graph:
    """Serve the readers of the stacks of the loop whose results are those of `written`."""
    loop = graph.producers()[written.results[0]]
    found = stacks(loop)
    reads = {s.carry: row_reads(graph, loop.results[s.carry], s.dim) for s in found}
    if not any(reads.values()):
        return graph
    writer = Writer(loop, short_row)
    readers: dict[Op, _Reader] = {}
    loops = {s: [r.loop for r in reads[s.carry] or ()] for s in found if reads[s.carry]}
    for stack, recipe in choose(writer, found, loops):
        for leaf in recipe.leaves:
            writer.store(leaf)
        for read in reads[stack.carry] or ():
            reader = readers.setdefault(read.loop, _Reader(read.loop, writer))
            reader.rematerialise(read, stack, recipe)
    return _rebuilt(graph, writer, readers)


class Writer:
    """The loop that writes the stacks, and the stacks it gets in addition."""

    def __init__(self, loop: Op, short_row: int) -> None:
        self.loop = loop
        self.body = loop.regions[0]
        self.counter = self.body.inputs[loop.attrs.induction]
        self.recipes = Recipes(self.body, short_row, FIGURES)
        self.rows: dict[Value, tuple[Value, int]] = {}
        """Value of an iteration -> (stack outside, dim) that keeps it."""
        self.invariant = {self.body.inputs[i]: i for i in invariant_carries(loop)}
        self.added: list[tuple[Value, Value]] = []  # (value of an iteration, its new stack)

    def recipe(self, stack: Stack) -> Recipe | None:
        """How a reader rematerialises the rows of `stack`; None when it should read them."""
        if stack.value in self.recipes.inputs or stack.value in self.rows:
            return None
        return self.recipes.find(stack.value, self.is_outside, self.rows.__contains__)

    def is_outside(self, value: Value) -> bool:
        """True for what is the same in every iteration, and for the counter."""
        return value in self.invariant or value is self.counter

    def save(self, stack: Stack) -> None:
        """Note that readers may use the rows of `stack`."""
        self.rows.setdefault(stack.value, (self.loop.results[stack.carry], stack.dim))

    def store(self, leaf: Value) -> None:
        """See to it that readers can have `leaf`."""
        if self.is_outside(leaf) or leaf in self.rows:
            return
        trip = self.loop.attrs.trip
        result = Value(tensor_type((trip, *leaf.type.shape), leaf.type.dtype))
        self.added.append((leaf, result))
        self.rows[leaf] = (result, 0)

    def outside(self, value: Value) -> Value | None:
        """What an invariant is outside of the loop."""
        return self.loop.operands[self.invariant[value]] if value in self.invariant else None

    def rebuilt(self) -> list[Op]:
        """First values of the new stacks, then the loop that fills them."""
        if not self.added:
            return [self.loop]
        leaves, results = zip(*self.added, strict=True)
        inputs = [Value(result.type) for result in results]
        before, inside = Builder(), Builder()
        first = [_zeros(before, result) for result in results]
        pairs = zip(inputs, leaves, strict=True)
        outputs = [_write_row(inside, stack, leaf, self.counter) for stack, leaf in pairs]
        body = with_ops(
            self.body,
            (*self.body.ops, *inside.ops),
            (*self.body.outputs, *outputs),
            (*self.body.inputs, *inputs),
        )
        return [*before.ops, carrying(self.loop, first, results, body)]


def _zeros(level: Builder, like: Value) -> Value:
    return level.full(like.type.shape, 0, like.type.dtype)


def _write_row(level: Builder, stack: Value, leaf: Value, counter: Value) -> Value:
    """`stack` with `leaf` written into row `counter`."""
    zero = _zeros(level, counter)
    row = level.reshape(leaf, (1, *leaf.type.shape))
    return level.dynamic_update_slice(stack, row, (counter, *[zero] * leaf.type.rank))


@dataclass(slots=True)
class _Reader:
    """A loop that reads rows, with the invariants and copies it gets."""

    loop: Op
    writer: Writer
    copies: Builder = field(default_factory=Builder)
    replaced: set[Op] = field(default_factory=set)
    inputs: dict[Value, Value] = field(default_factory=dict)  # outside -> in the body, in addition
    now: dict[Value, dict[Value, Value]] = field(default_factory=dict)  # per row start

    def rematerialise(self, read: RowRead, stack: Stack, recipe: Recipe) -> None:
        """Rematerialise the row of `read` instead of slicing it."""
        now = self.now.setdefault(read.row, {})
        for leaf in recipe.leaves:
            if leaf not in now:
                now[leaf] = self._leaf(leaf, read.row)
        self.copies.ops += repeat(recipe.ops, now)
        shape = ReshapeAttrs(read.op.result.type.shape)
        made = now[stack.value]
        self.copies.append(Op("reshape", (made,), read.op.results, shape, (), read.op.loc))
        self.replaced.add(read.op)

    def _leaf(self, leaf: Value, row: Value) -> Value:
        """What `leaf` of iteration `row` is in this body."""
        if leaf is self.writer.counter:
            return self.copies.convert(row, leaf.type.dtype)
        outside = self.writer.outside(leaf)
        if outside is not None:
            return self._inside(outside)
        stack, dim = self.writer.rows[leaf]
        zero = _zeros(self.copies, row)
        sizes = tuple(1 if d == dim else n for d, n in enumerate(stack.type.shape))
        starts = tuple(row if d == dim else zero for d in range(stack.type.rank))
        sliced = self.copies.dynamic_slice(self._inside(stack), starts, sizes)
        return self.copies.reshape(sliced, leaf.type.shape)

    def _inside(self, outside: Value) -> Value:
        """The invariant carry that holds `outside`."""
        body = self.loop.regions[0]
        for i in invariant_carries(self.loop):
            if self.loop.operands[i] is outside and i != self.loop.attrs.induction:
                return body.inputs[i]
        return self.inputs.setdefault(outside, Value(outside.type))

    def rebuilt(self) -> Op:
        """The loop that rematerialises rows."""
        body = self.loop.regions[0]
        ops = [op for op in body.ops if op not in self.replaced]
        placed = place_late([*self.copies.ops, *ops], set(self.copies.ops))
        return with_invariants(self.loop, self.inputs, placed)


def _rebuilt(graph: Graph, writer: Writer, readers: dict[Op, _Reader]) -> Graph:
    """`graph` with the loops that changed."""
    made = {op: [reader.rebuilt()] for op, reader in readers.items()}
    made[writer.loop] = writer.rebuilt()
    return with_ops(graph, [one for op in graph.ops for one in made.get(op, [op])])
