"""What a loop saves for a later loop, reduced to the lightest values that the rest follows from
element by element.

JAX's scan keeps every operand of every derivative: of a GELU six tensors of the feed-forward width,
all of which follow from one. The lightest set is a minimum cut between what a layer computes by
contractions and reductions, and the stacks that are read; the readers repeat the elementwise ops in
between. Source of the idea: min-cut recomputation of PyTorch's AOTAutograd (functorch 2022).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from shardwright.compiler.ir.facts import cone, operands_of
from shardwright.compiler.ir.rewrite import within
from shardwright.compiler.ir.traits import IDENTITIES, LITERALS, MOVES
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.passes.remat.loops import Chosen, Writer, remat_across_loops
from shardwright.compiler.passes.remat.recipes import Recipe, constant_exprs, is_cheap
from shardwright.compiler.passes.remat.stacks import Stack
from shardwright.compiler.support.families import Families
from shardwright.compiler.support.min_cut import FlowNetwork

MIN_SAVED = 0.125
"""Part of the bytes that must be saved, so that near ties leave the user's choice (ours)."""

_FREE = MOVES | IDENTITIES | LITERALS | {"convert"}
"""Ops that cost no pass of an engine: engines convert what they read and write."""

BYTES_PER_OP = 1.0
"""Bytes saved per element and op that is computed twice. inferred: NeuronCore-v2 stores and loads a
byte in 7.4 ps (16 queues at 17 GB/s), Vector computes an element in 8.1 ps (128 lanes, 0.96 GHz).
"""


def save_policy(graph: Graph) -> Graph:
    """`graph` with loops that save fewer bytes for other loops, loop bodies included.

    Values are equal bit by bit. What is not read any more is left to `dce`.
    """
    return within(remat_across_loops(graph, lightest), save_policy)


def lightest(writer: Writer, found: Sequence[Stack], read: Collection[Stack]) -> Chosen:
    """Choose: stacks that follow from a lighter set of values, element by element."""
    outside = {v for v in writer.body.inputs if writer.is_outside(v)}
    anyway = {s.value for s in found if s not in read}
    rows = {writer.body.outputs[s.carry]: s.value for s in found}
    recipes = Zone(writer.body, outside, {s.value for s in read}, anyway, rows).recipes()
    for stack in found:
        if stack.value not in recipes:
            writer.save(stack)
    for stack in found:
        if stack.value in recipes:
            yield stack, recipes[stack.value]


class Zone:
    """The elementwise ops of a graph behind the values that are saved for other code, and their
    cut.

    `outside` are inputs that the other code has as well, `wanted` is what is saved for it, `anyway`
    what is saved for others; `savers` are outputs that only save something, which they are mapped
    to.
    """

    def __init__(
        self,
        graph: Graph,
        outside: Collection[Value],
        wanted: Collection[Value],
        anyway: Collection[Value],
        savers: Mapping[Value, Value],
    ) -> None:
        self.graph = graph
        self.savers = savers
        self.producers = graph.producers()
        self.outside = self._outside(outside)
        self.anyway = anyway
        self.targets = [v for v in _in_order(graph, wanted) if v not in self.outside]
        self.edges: list[tuple[Value, Value]] = []
        self.weights: dict[Value, int] = {}
        self.sources: list[Value] = []
        self._walk()

    def _outside(self, inputs: Collection[Value]) -> set[Value]:
        """What the other code has without being given it: `inputs`, constants and what cheap ops
        make of them (a layer's row of stacked weights).
        """
        known = {*inputs, *constant_exprs(self.graph)}
        for op in self.graph.ops:
            if is_cheap(op):
                known.update(v for v in op.results if known.issuperset(operands_of(op, v)))
        return known

    def _walk(self) -> None:
        """Nodes and edges behind the targets."""
        todo = list(self.targets)
        while todo:
            value = todo.pop()
            if value in self.weights:
                continue
            self.weights[value] = 0 if value in self.anyway else value.type.num_bytes
            before = self._before(value)
            if not before:
                self.sources.append(value)
            self.edges += [(v, value) for v in before]
            todo += before

    def _before(self, value: Value) -> list[Value]:
        """The operands that `value` follows from; none where it has to be saved itself."""
        op = self.producers.get(value)
        if op is None or not is_cheap(op):
            return []
        return [v for v in dict.fromkeys(operands_of(op, value)) if v not in self.outside]

    def recipes(self) -> dict[Value, Recipe]:
        """Per target that is not saved, how it is made of what is."""
        if not self.targets:
            return {}
        network = FlowNetwork(self.weights, self.edges, self.sources, self.targets)
        saved = set(network.minimum_cut())
        made = {v: self._recipe(v, saved) for v in self.targets if v not in saved}
        return {v: made[v] for group in self._groups(made) if self._pays(group) for v in group}

    def _groups(self, made: Mapping[Value, Recipe]) -> list[dict[Value, Recipe]]:
        """Targets that follow from common values: what is saved of them is saved once, so that they
        pay together or not at all.
        """
        families = Families[Value]()
        for target, recipe in made.items():
            for leaf in set(recipe.leaves) - self.outside:
                families.join(target, leaf)
        groups: dict[Value, dict[Value, Recipe]] = {}
        for target, recipe in made.items():
            groups.setdefault(families.of(target), {})[target] = recipe
        return list(groups.values())

    def _pays(self, made: Mapping[Value, Recipe]) -> bool:
        """True when keeping what `made` follows from saves enough."""
        leaves = {leaf for recipe in made.values() for leaf in recipe.leaves}
        before = sum(self.weights[v] for v in leaves | set(made) if v in self.targets)
        saved = before - sum(self.weights.get(v, 0) for v in leaves)
        return saved >= max(MIN_SAVED * before, BYTES_PER_OP * self._repeated(made))

    def _recipe(self, target: Value, saved: set[Value]) -> Recipe:
        ops, leaves = cone(self.producers, [target], saved.__contains__)
        return Recipe(tuple(op for op in self.graph.ops if op in ops), leaves)

    def _repeated(self, made: Mapping[Value, Recipe]) -> int:
        """Elements of arithmetic that are computed at both places."""
        repeated = {op for recipe in made.values() for op in recipe.ops}
        both = repeated & self._wanted_here(set(made))
        computed = (v for op in both if op.name not in _FREE for v in op.results)
        return sum(v.type.num_elements for v in computed)

    def _wanted_here(self, dropped: set[Value]) -> set[Op]:
        """Ops that `graph` itself needs once `dropped` are not saved."""
        outputs = [v for v in self.graph.outputs if self.savers.get(v) not in dropped]
        return cone(self.producers, outputs, lambda _: False, lambda op, _: op.operands)[0]


def _in_order(graph: Graph, values: Collection[Value]) -> list[Value]:
    """`values` in the order they are made."""
    made = [v for op in graph.ops for v in op.results if v in values]
    return [v for v in graph.inputs if v in values] + made
