"""Which indices of a model tensor parallelism splits: the cheapest cover of its weight matrices.

Every weight matrix gives one of its dims to the axis. The price of a family is the bytes of the
results it is contracted into, since those become partial sums over the axis. `cover` finds the
families of least total price; `spread` says which part of a product takes which share of the axis.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from shardwright.compiler.ir.factors import FactorKind
from shardwright.compiler.ir.facts import factors_of, pairing
from shardwright.compiler.ir.ops import ReshapeAttrs
from shardwright.compiler.ir.traits import INDEXED
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.sharding.indices.dims import Dim, factors
from shardwright.sharding.indices.indices import Class, IndexClasses

SEARCH_LIMIT = 20_000
"""Steps of the search for a cover; beyond it the best found so far is taken (our choice)."""


def prices(graph: Graph, classes: IndexClasses, batch: Mapping[Value, int]) -> Counter[Class]:
    """Bytes that splitting each family moves, per execution of the graph.

    These are the results it is contracted into (partial sums) and the operands that ops cut along
    it (gathers), of ops that touch a value with samples; loop bodies once per trip.
    """
    found: Counter[Class] = Counter()
    for op, times in _counted(graph, 1):
        if any(v in batch for v in (*op.operands, *op.results)):
            size = times * sum(v.type.num_bytes for v in op.results)
            for family in {classes.family(dim) for dim in contracted(op)}:
                found[family] += size
            for value, dim in cut(op):
                found[classes.family((value, dim))] += times * value.type.num_bytes
    return found


def _counted(graph: Graph, times: int) -> Iterator[tuple[Op, int]]:
    """Every op with how often it runs, where its level runs `times` times."""
    for op in graph.ops:
        for region in op.regions:
            yield from _counted(region, times * op.attrs.trip)
        yield op, times


def contracted(op: Op) -> Iterator[Dim]:
    """The dims `op` sums over or looks up in, operand by operand (what adds up scattered updates is
    told by theirs).
    """
    kind = FactorKind.LOOKED_UP if op.name in INDEXED else FactorKind.COMBINED
    places = (place for factor in factors_of(op) if factor.kind is kind for place in factor.places)
    for n, d in sorted(places, key=itemgetter(0)):
        if n < len(op.operands):
            yield op.operands[n], d


def expert_families(
    graph: Graph, classes: IndexClasses, weights: Collection[Value], on_batch: Collection[Value]
) -> set[Class]:
    """The families of weight dims that pick a matrix of their own: batch dims of a product between
    what only weights made and what depends on the batch.
    """
    found: set[Class] = set()
    for op in graph.walk():
        if (dims := pairing(op)) is None:
            continue
        left, right = op.operands
        sides = ((left, right, dims.lhs_batch), (right, left, dims.rhs_batch))
        for value, other, batch in sides:
            if value in weights and other in on_batch:
                found |= {classes.family((value, dim)) for dim in batch}
    return found


def broken(graph: Graph, classes: IndexClasses) -> set[Class]:
    """The families that some op cuts."""
    return {classes.family(dim) for op in graph.walk() for dim in cut(op)}


def cut(op: Op) -> Iterator[Dim]:
    """The operand dims that end at `op` without being summed over: sliced, padded, joined.

    A reshape cuts nothing: it makes products and parts.
    """
    if op.regions or isinstance(op.attrs, ReshapeAttrs):
        return
    tied = {dim for factor in factors(op) for dim in factor} | set(contracted(op))
    for value in op.operands:
        for dim, size in enumerate(value.type.shape):
            if size > 1 and (value, dim) not in tied:
                yield value, dim


@dataclass(slots=True)
class _Group:
    """Families that look alike: the same price, the same places in weights of the same shapes.

    Unrolled layers repeat a family per layer; one decision serves them all.
    """

    families: set[Class] = field(default_factory=set)
    price: int = 0
    rivals: set[object] = field(default_factory=set)


def cover(
    weights: Sequence[Value],
    classes: IndexClasses,
    price: Mapping[Class, int],
    allowed: Collection[Class],
) -> set[Class]:
    """The families that leave the fewest elements of weights whole, of those of least total price.

    Two families of one weight are never both chosen. A weight that no choice can split beside the
    others stays whole: of a low-rank pair beside a matrix that is split, the one that shares none
    of the matrix's split dim.
    """
    groups, group_of = _groups(weights, classes, price, allowed)
    needs: Counter[frozenset[object]] = Counter()
    for weight in weights:
        mine = frozenset(group_of[f] for _, f in classes.families(weight) if f in group_of)
        if mine:
            needs[mine] += weight.type.num_elements
            for key in mine:
                groups[key].rivals |= mine - {key}
    chosen = _Search(groups).run(list(needs.items()))
    return {family for key in chosen for family in groups[key].families}


def _groups(
    weights: Sequence[Value],
    classes: IndexClasses,
    price: Mapping[Class, int],
    allowed: Collection[Class],
) -> tuple[dict[object, _Group], dict[Class, object]]:
    """Groups by signature, and the signature of each family; families of one weight stay apart."""
    places: dict[Class, list[tuple[tuple[int, ...], int]]] = defaultdict(list)
    for weight in weights:
        for dim, family in classes.families(weight):
            if family in allowed:
                places[family].append((weight.type.shape, dim))
    looks = {f: (price.get(f, 0), tuple(sorted(where))) for f, where in places.items()}
    alike: set[object] = set()
    for weight in weights:
        mine = Counter(looks[f] for _, f in classes.families(weight) if f in looks)
        alike |= {look for look, count in mine.items() if count > 1}
    signature: dict[Class, object] = {
        family: (look, number) if look in alike else look
        for number, (family, look) in enumerate(looks.items())
    }
    groups: dict[object, _Group] = defaultdict(_Group)
    for family, key in signature.items():
        groups[key].families.add(family)
        groups[key].price += price.get(family, 0)
    return dict(groups), signature


_Need = tuple[frozenset[object], int]
"""Groups of which one must be taken, or so many elements stay whole."""


class _Search:
    """Branch and bound over groups."""

    def __init__(self, groups: Mapping[object, _Group]) -> None:
        self.groups = groups
        self.best: frozenset[object] = frozenset()
        self.least: tuple[float, float] = (math.inf, math.inf)
        self.steps = 0

    def run(self, needs: list[_Need]) -> frozenset[object]:
        """The cheapest of the choices that leave the fewest elements whole."""
        self._visit(needs, frozenset(), frozenset(), 0, 0)
        return self.best

    def _visit(
        self,
        needs: list[_Need],
        taken: frozenset[object],
        banned: frozenset[object],
        unmet: int,
        price: int,
    ) -> None:
        """Meet the need with the fewest ways left, or else leave it."""
        self.steps += 1
        left = [(need - banned, size) for need, size in needs if not need & taken]
        ways = [(way, size) for way, size in left if way]
        unmet += sum(size for way, size in left if not way)
        if (unmet, price) >= self.least or self.steps > SEARCH_LIMIT:
            return
        if not ways:
            self.best, self.least = taken, (unmet, price)
            return
        shortest, size = min(ways, key=lambda row: len(row[0]))
        for key in sorted(shortest, key=lambda k: self.groups[k].price):
            group = self.groups[key]
            rivals = banned | frozenset(group.rivals)
            self._visit(ways, taken | {key}, rivals, unmet, price + group.price)
        if (unmet + size, price) < self.least:
            self._visit(ways, taken, banned | shortest, unmet, price)
