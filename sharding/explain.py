"""Who decided where every tensor lies, and why every collective is there.

The step is partitioned again, whole, with ops that carry their number instead of their location:
so each value of the answer is known in the graph that was asked about. Collectives are those of the
per-core graph, with what they move, how often, and the op that needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

from shardwright.compiler.diagnostics import UNKNOWN_LOC, Loc
from shardwright.compiler.ir.facts import dim_map
from shardwright.compiler.ir.opdef import Kind
from shardwright.compiler.ir.ops import ShardingConstraintAttrs
from shardwright.compiler.ir.rewrite import with_ops
from shardwright.compiler.ir.traits import REDUCTIONS_OF_RANKS, TRAFFIC, of
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.rewriting.driver import Rewrite
from shardwright.sharding.cut.rewrites import LOCALIZED, PARTITIONED, REWRITTEN, RING
from shardwright.sharding.indices.tensor_parallel import contracted
from shardwright.sharding.partition.findings import surprises
from shardwright.sharding.partition.mesh import Mesh
from shardwright.sharding.partition.partitioned import PartitionedGraph
from shardwright.sharding.partition.partitioner import PartitionUnit
from shardwright.sharding.plan import Prepared
from shardwright.sharding.prepare.rewrites import WITHOUT_PHANTOM
from shardwright.sharding.strategies import INPUT, Recipe, ValueId, value_ids

NODE = "node"  # file name of the locations that number the ops
KEEPING = of(
    *(Kind.VIEW, Kind.PART, Kind.CAST, Kind.IDENTITY, Kind.COLLECTIVE, Kind.RANK, Kind.TRANSFER),
    combines=False,
)
ADDING = REDUCTIONS_OF_RANKS | {"add"}
"""Ops whose result is a sum of parts where their first operand is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One tensor: its name (a leaf) or op, its layout in whole axes, and who decided it."""

    name: str
    loc: Loc
    type: str
    layout: str
    decided: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One collective; `num_bytes` is what a core holds on the larger side, `times` per step and
    micro-batch.
    """

    kind: str
    axes: str
    group_size: int
    num_bytes: int
    times: int
    loc: Loc
    cause: str
    leaf: str
    predicted: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """Every tensor with dims, leaves first, and every collective in program order; `stacks` names
    the user's leaves in stacks of layers.
    """

    tensors: tuple[Placed, ...]
    collectives: tuple[Moved, ...]
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def leaves(self) -> Explanation:
        """The leaves alone, and every collective."""
        return Explanation(tuple(t for t in self.tensors if not t.loc.file), self.collectives)

    def about(self, text: str) -> Explanation:
        """What `text` names: part of a leaf's name, an op, a place (`model.py:12`) or a scope."""
        tensors = (t for t in self.tensors if self._names(text, t.name) or _at(t.loc, text))
        moved = (
            m
            for m in self.collectives
            if self._names(text, m.leaf) or text == m.kind or _at(m.loc, text)
        )
        return Explanation(tuple(tensors), tuple(moved), self.stacks)

    def _names(self, text: str, leaf: str) -> bool:
        """True when `text` is part of the leaf's name, or of one that is stacked in it."""
        return any(text in name for name in (leaf, *self.stacks.get(leaf, ())))


def _at(loc: Loc, text: str) -> bool:
    """True when `text` is the end of a place, or part of its scope."""
    return str(loc).endswith(text) or text in loc.scope


def explain_sharding(prepared: Prepared, unit: PartitionUnit) -> Explanation:
    """The explanation of a decided step. Raises ShardingError, as planning it does."""
    recipe = prepared.recipe
    origins = [op.loc for op in recipe.graph.walk()]
    graph = NUMBERED(recipe.graph, count())
    slots = (prepared.inputs, prepared.outputs)
    part = REWRITTEN(PARTITIONED(graph, prepared.mesh, recipe.specs, *slots, recipe.tied, unit))
    local, _ = RING(LOCALIZED(part), prepared.settings.context)
    expected = recipe.expected
    found = [] if expected is None else surprises(part.graph, expected)
    unasked = {op.loc for op in found}
    if prepared.has_phantom:
        local, _ = WITHOUT_PHANTOM(local)
        part = local.source
    values = (*local.graph.inputs, *local.graph.outputs)
    named = zip((*part.inputs, *part.outputs), values, strict=True)
    leaves = {value: slot.name for slot, value in named}
    moved = _Collectives(part.mesh, origins, unasked).of(local.graph, leaves, 1)
    return Explanation(tuple(_tensors(prepared, part, origins)), tuple(moved), prepared.stacks)


def numbered(graph: Graph, numbers: Iterator[int]) -> Graph:
    """`graph` whose ops, in the order of `walk`, have their number as location."""
    ops = []
    for op in graph.ops:
        loc = Loc(NODE, next(numbers))
        regions = tuple(numbered(r, numbers) for r in op.regions)
        ops.append(Op(op.name, op.operands, op.results, op.attrs, regions, loc))
    return with_ops(graph, ops)


NUMBERED = Rewrite(
    "numbered", numbered, "the location of each op is its number", besides="the numbers"
)


def _tensors(prepared: Prepared, part: PartitionedGraph, origins: list[Loc]) -> Iterator[Placed]:
    """Leaves, then the results of ops."""
    recipe = prepared.recipe
    layouts = {key: _shown(spec.dims, recipe.mesh) for key, spec in recipe.specs.items()}
    layouts |= _layouts(recipe.graph, part)
    ops = list(recipe.graph.walk())
    is_manual = recipe.predicted is None
    for key, value in value_ids(recipe.graph):
        if not value.type.rank:
            continue
        name, loc, layout, decided = "", UNKNOWN_LOC, layouts.get(key, ""), "propagation"
        if key[0] == INPUT:
            name = prepared.inputs[key[1]].name
            decided = _leaf_decided(recipe, name)
        else:
            op = ops[key[0]]
            name, loc, asked = op.name, origins[key[0]], op.attrs
            if isinstance(asked, ShardingConstraintAttrs):
                layout = layout or _shown(asked.spec, recipe.mesh)
            if key in recipe.specs or isinstance(asked, ShardingConstraintAttrs):
                decided = "user" if is_manual else "recipe"
        if layout:  # the partitioner drops some
            yield Placed(name=name, loc=loc, type=str(value.type), layout=layout, decided=decided)


def _leaf_decided(recipe: Recipe, name: str) -> str:
    """Who placed a leaf, in the recipe's words."""
    why = recipe.reasons.get(name, "").partition(": ")[2]
    if not why or recipe.predicted is None:
        return why or "propagation"
    return f"recipe, {why}"


def _shown(dims: tuple[tuple[str, ...], ...], mesh: Mesh) -> str:
    """A layout in whole axes."""
    return f"[{', '.join(mesh.shown(axes) or '-' for axes in dims)}]"


def _layouts(graph: Graph, part: PartitionedGraph) -> dict[ValueId, str]:
    """The layouts of the answer by the ids of the graph that was asked about."""
    names = [op.name for op in graph.walk()]
    found = {(INPUT, i): part.specs[v] for i, v in enumerate(part.graph.inputs)}
    for op in part.graph.walk():
        number = op.loc.line
        if op.loc.file == NODE and names[number] == op.name:
            for i, value in enumerate(op.results):
                found.setdefault((number, i), part.specs[value])
    return {key: _shown(spec.dims, part.mesh) for key, spec in found.items()}


def _keeps(op: Op) -> bool:
    """True for ops whose result still is the leaf they read, in another layout, type or form."""
    return bool(op.operands) and op.name in KEEPING and None not in (dim_map(op) or ())


@dataclass(frozen=True, slots=True)
class _Collectives:
    """Walks the per-core graph; a level knows who makes and reads its values."""

    mesh: Mesh
    origins: list[Loc]
    unasked: set[Loc]

    def of(self, graph: Graph, leaves: dict[Value, str], times: int) -> Iterator[Moved]:
        """The collectives of one level, run `times` times; `leaves` names values."""
        made, users = graph.producers(), graph.uses()
        for op in graph.ops:
            if _keeps(op) and op.operands[0] in leaves:
                leaves[op.results[0]] = leaves[op.operands[0]]
            for region in op.regions:
                inner = zip(region.inputs, op.operands, strict=True)
                named = {v: leaves[w] for v, w in inner if w in leaves}
                yield from self.of(region, named, times * op.attrs.trip)
            if op.name not in TRAFFIC:
                continue
            leaf = leaves.get(op.operands[0], "") or leaves.get(op.result, "")
            if op.name in REDUCTIONS_OF_RANKS:
                cause = self._of_sum(made.get(op.operands[0]), made)
            else:
                cause = self._of_move(op, leaf, users.get(op.result, []))
            yield Moved(
                kind=op.name,
                axes=self.mesh.shown(op.attrs.axes),
                group_size=op.attrs.group_size,
                num_bytes=max(v.type.num_bytes for v in (*op.operands, *op.results)),
                times=times,
                loc=self.origin(op),
                cause=cause,
                leaf=leaf,
                predicted=op.loc not in self.unasked,
            )

    def origin(self, op: Op) -> Loc:
        """The user's location of an op."""
        return self.origins[op.loc.line] if op.loc.file == NODE else op.loc

    def _of_sum(self, source: Op | None, made: Mapping[Value, Op]) -> str:
        """Which op made parts, along how many of its dims."""
        while source is not None and (_keeps(source) or source.name in ADDING):
            source = made.get(source.operands[0])
        if source is None:
            return "parts of what comes into this loop"
        summed = [f"dim {d} of {v.type}" for v, d in contracted(source)]
        over = f" sums over {' and '.join(summed[:2])}, which" if summed else ", whose operand"
        return f"{source.name} at {self.origin(source)}{over} is split"

    def _of_move(self, op: Op, leaf: str, readers: list[Op]) -> str:
        """Who needs the other layout."""
        verb = {"all_gather": "needs whole", "all_to_all": "needs along another dim"}
        reader = next((r for r in readers if not _keeps(r)), next(iter(readers), None))
        who = f"{reader.name} at {self.origin(reader)}" if reader else "what leaves the step"
        what = leaf or f"{op.operands[0].type}"
        return f"{who} {verb.get(op.name, 'needs in another place')} what is split: {what}"
