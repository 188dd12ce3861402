"""Better collectives than the partitioner's, on our IR; every rewrite keeps the values.

all_reduce then all_slice becomes reduce_scatter (then all_reduce over what is left: HSDP); gathers
of splats vanish; the scalar sums of a norm share one all_reduce; gathers move the narrower type;
what all iterations of a loop gather alike is gathered in front of it; two gradients of one weight
are added before they are scattered. Rewrites reuse the result values they replace, so specs stay
valid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shardwright.compiler.diagnostics import Loc
from shardwright.compiler.ir.analysis import invariant_carries, is_light
from shardwright.compiler.ir.combinations import ELEMENTWISE_OF
from shardwright.compiler.ir.facts import lookup, splat, takes_at
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import (
    AllGatherAttrs,
    AllReduceAttrs,
    BroadcastInDimAttrs,
    ConstantAttrs,
    ConvertAttrs,
    ReduceScatterAttrs,
    ReshapeAttrs,
    TransposeAttrs,
)
from shardwright.compiler.ir.rewrite import reading, with_ops, with_regions
from shardwright.compiler.ir.traits import REDUCTIONS_OF_RANKS
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.support.walks import answered
from shardwright.sharding.partition.partitioned import PartitionedGraph, all_values
from shardwright.sharding.partition.spec import ShardingSpec, replicated

SHAPE_CHANGES = (ReshapeAttrs, TransposeAttrs)
MAX_COUNTED = 8  # ops a core repeats rather than wait for its peers (our choice)


def rewrite(part: PartitionedGraph) -> PartitionedGraph:
    """All rewrites to a fixed point, then partial values marked as such.

    `specs` of the result hold every value of the new graph, and nothing else.
    """
    specs = dict(part.specs)
    graph = part.graph
    while (better := _rewrite_graph(graph, specs)) is not graph:
        graph = better
    _mark_partial(graph, specs)
    kept = {value: specs[value] for value in all_values(graph)}
    return replace(part, graph=graph, specs=kept)


def _rewrite_graph(graph: Graph, specs: dict[Value, ShardingSpec]) -> Graph:
    """One pass over a level and its regions; `graph` itself when nothing applies."""
    ops = [
        with_regions(op, tuple([_rewrite_graph(r, specs) for r in op.regions])) for op in graph.ops
    ]
    level = _Level(with_ops(graph, ops), specs)
    changed = level.graph is not graph
    out: list[Op] = []
    for op in level.graph.ops:
        rule = RULES.get(op.name)
        new = rule(level, op) if rule is not None else None
        if new is None:
            out.append(op)
        else:
            out += new
            changed = True
    return level.finish(out) if changed else graph


class _Level:
    """One level being rewritten: who makes and who reads each value, and specs of new values."""

    def __init__(self, graph: Graph, specs: dict[Value, ShardingSpec]) -> None:
        self.graph = graph
        self.specs = specs
        self.made = graph.producers()
        self.users = graph.uses()
        self.outputs = frozenset(graph.outputs)
        self.taken: set[Op] = set()

    def producer(self, value: Value, *attrs: type) -> Op | None:
        """The op that makes `value`, when it has attributes of one of these classes, if any are
        given, and is not rewritten in this pass.
        """
        op = self.made.get(value)
        wanted = op is not None and (not attrs or isinstance(op.attrs, attrs))
        return op if wanted and op not in self.taken else None

    def only_use(self, value: Value, user: Op) -> bool:
        """True when nothing but one operand of `user` reads `value`."""
        reads = user.operands.count(value)
        return reads == 1 and self.users[value] == [user] and value not in self.outputs

    def take(self, *ops: Op) -> None:
        """Mark ops as rewritten, so that no other rewrite of this pass uses them."""
        self.taken.update(ops)

    def emit(self, like: Op, operands: Sequence[Value], spec: ShardingSpec) -> Op:
        """`like` on other operands, with a new result."""
        return self.make(like.name, operands, like.attrs, spec, like.loc)

    def make(
        self, name: str, operands: Sequence[Value], attrs: object, spec: ShardingSpec, loc: Loc
    ) -> Op:
        """A new op whose result lives as `spec`."""
        op = make_op(name, operands, attrs, loc=loc)
        self.specs[op.result] = spec
        return op

    def finish(self, ops: list[Op]) -> Graph:
        """The new level, without collectives and shape changes nothing reads any more."""
        read = set(self.graph.outputs)
        kept = []
        for op in reversed(ops):
            if op not in self.taken or any(v in read for v in op.results):
                kept.append(op)
                read.update(op.operands)
        return with_ops(self.graph, kept[::-1])


def _yields(op: Op, result: Value, operands: tuple[Value, ...] | None = None) -> Op:
    """`op`, on other operands where given, with `result` as its result."""
    read = op.operands if operands is None else operands
    return Op(op.name, read, (result,), op.attrs, op.regions, op.loc)


def _scatter_slice(level: _Level, op: Op) -> list[Op] | None:
    """all_slice over A of all_reduce over A and B, possibly with shape changes between."""
    chain: list[Op] = []
    user, value = op, op.operands[0]
    while level.only_use(value, user) and (step := level.producer(value, *SHAPE_CHANGES)):
        chain.append(step)
        user, value = step, step.operands[0]
    reduce = level.producer(value, AllReduceAttrs)
    if reduce is None or not level.only_use(value, user):
        return None
    axes = reduce.attrs.axes
    if not set(op.attrs.axes) <= set(axes):
        return None
    level.take(op, reduce, *chain)
    made: list[Op] = []
    value = reduce.operands[0]
    for step in reversed(chain):
        made.append(level.emit(step, (value,), level.specs[step.result]))
        value = made[-1].result
    kind, spec = reduce.attrs.reduction, level.specs[op.result]
    attrs = ReduceScatterAttrs(op.attrs.dim, op.attrs.axes, kind)
    made.append(level.make("reduce_scatter", (value,), attrs, spec, reduce.loc))
    rest = tuple(a for a in axes if a not in op.attrs.axes)
    if rest:
        attrs_rest = AllReduceAttrs(rest, kind)
        made.append(level.make("all_reduce", (made[-1].result,), attrs_rest, spec, reduce.loc))
    made[-1] = _yields(made[-1], op.result)
    return made


def _spare_splat(level: _Level, op: Op) -> list[Op] | None:
    """A gather or slice of equal elements is those made again in the other layout."""
    source = level.producer(op.operands[0], ConstantAttrs, BroadcastInDimAttrs)
    if source is None or (splat(source) is None and [v.type.rank for v in source.operands] != [0]):
        return None
    return [_yields(source, op.result)]


def _spare_count(level: _Level, op: Op) -> list[Op] | None:
    """A gather of what every core can count for itself (positions, masks) is counted whole."""
    if level.specs[op.result].axes:
        return None
    steps = _counted(level, op.operands[0])
    if not steps:
        return None
    whole: dict[Value, Value] = {}
    made: list[Op] = []
    for step in steps:
        operands = [whole[v] for v in step.operands]
        made.append(level.emit(step, operands, replicated(step.result.type.rank)))
        whole[step.result] = made[-1].result
    made[-1] = _yields(made[-1], op.result)
    return made


def _counted(level: _Level, value: Value) -> list[Op]:
    """The ops behind a value that depends on no input, in order; empty when it does or is long."""
    behind: dict[Value, Op] = {}
    todo = [value]
    while todo:
        one = todo.pop()
        if one in behind:
            continue
        op = level.producer(one)
        if op is None or not is_light(op) or len(behind) > MAX_COUNTED:
            return []
        behind[one] = op
        todo += op.operands
    made: dict[Value, Op] = {}
    answered(value, made, lambda v: behind[v].operands, behind.__getitem__)
    return list(dict.fromkeys(made.values()))


def _slice(level: _Level, op: Op) -> list[Op] | None:
    return _spare_splat(level, op) or _scatter_slice(level, op)


def _gather(level: _Level, op: Op) -> list[Op] | None:
    return _spare_splat(level, op) or _spare_count(level, op) or _gather_before_widening(level, op)


def _gather_before_widening(level: _Level, op: Op) -> list[Op] | None:
    """all_gather of a widening convert gathers what was converted."""
    widen = level.producer(op.operands[0], ConvertAttrs)
    if widen is None or not level.only_use(widen.result, op):
        return None
    source = widen.operands[0]
    if source.type.dtype.bytes >= widen.result.type.dtype.bytes:
        return None
    level.take(op, widen)
    gather = level.emit(op, (source,), level.specs[op.result])
    return [gather, _yields(widen, op.result, gather.results)]


def _narrow_before_gather(level: _Level, op: Op) -> list[Op] | None:
    """A narrowing convert of an all_gather is done on the shard."""
    gather = level.producer(op.operands[0], AllGatherAttrs)
    if gather is None or not level.only_use(gather.result, op):
        return None
    source, dtype = gather.operands[0], op.result.type.dtype
    if dtype.bytes >= source.type.dtype.bytes:
        return None
    level.take(op, gather)
    convert = level.make("convert", (source,), ConvertAttrs(dtype), level.specs[source], op.loc)
    return [convert, _yields(gather, op.result, convert.results)]


def _add(level: _Level, op: Op) -> list[Op] | None:
    return _add_before_reduction(level, op) if op.result.type.rank else _merge_scalars(level, op)


def _add_before_reduction(level: _Level, op: Op) -> list[Op] | None:
    """The sum of two reduced gradients of one layout is the reduced sum: a tied weight is reduced
    once.
    """
    found = [_pending_reduction(level, v, op) for v in op.operands]
    left, right = found[0], found[1]
    if left is None or right is None or left[0] is right[0] or left[0].attrs != right[0].attrs:
        return None
    sources = (left[0].operands[0], right[0].operands[0])
    if left[0].name != right[0].name or level.specs[sources[0]] != level.specs[sources[1]]:
        return None
    level.take(op, *left, *right)
    total = level.make("add", sources, None, level.specs[sources[0]], op.loc)
    return [total, _yields(left[0], op.result, total.results)]


def _pending_reduction(level: _Level, value: Value, user: Op) -> list[Op] | None:
    """The sum reduction that makes `value` for `user` alone, then the transposes between that undo
    each other.
    """
    if not level.only_use(value, user):
        return None
    outer = level.producer(value, TransposeAttrs)
    between: list[Op] = []
    if outer is not None:
        inner = level.producer(outer.operands[0], TransposeAttrs)
        if inner is None or not level.only_use(inner.result, outer) or not _inverse(inner, outer):
            return None
        between, value, user = [inner, outer], inner.operands[0], inner
        if not level.only_use(value, user):
            return None
    op = level.producer(value, AllReduceAttrs, ReduceScatterAttrs)
    return None if op is None or op.attrs.reduction != "add" else [op, *between]


def _inverse(first: Op, second: Op) -> bool:
    """True when two transposes give the operand back."""
    turned = [first.attrs.permutation[d] for d in second.attrs.permutation]
    return turned == list(range(len(turned)))


def _merge_scalars(level: _Level, op: Op) -> list[Op] | None:
    """A tree of scalar additions reduces its partial terms of one kind together, once."""
    users = level.users.get(op.result, [])
    if op in level.taken or any(u.name == op.name and level.only_use(op.result, u) for u in users):
        return None
    inner: list[Op] = []
    leaves = _leaves(level, op, inner)
    reduces = {
        v: r
        for v, user in leaves
        if (r := level.producer(v, AllReduceAttrs)) and level.only_use(v, user)
    }
    axes = next(iter(reduces.values())).attrs if reduces else None
    merged = [v for v, r in reduces.items() if r.attrs == axes and r.attrs.reduction == "add"]
    if len(merged) < 2:
        return None
    level.take(op, *inner, *(reduces[v] for v in merged))
    made, total = _sum(level, [reduces[v].operands[0] for v in merged], op)
    made.append(level.make("all_reduce", (total,), axes, replicated(0), op.loc))
    others = [v for v, _ in leaves if v not in merged]
    rest, _ = _sum(level, [made[-1].result, *others], op)
    made += rest
    made[-1] = _yields(made[-1], op.result)
    return made


def _leaves(level: _Level, op: Op, inner: list[Op]) -> list[tuple[Value, Op]]:
    """Terms of the addition tree under `op` with the addition that reads them; `inner` collects the
    additions.
    """
    found: list[tuple[Value, Op]] = []
    for value in op.operands:
        below = level.producer(value)
        if below is not None and below.name == op.name and level.only_use(value, op):
            inner.append(below)
            found += _leaves(level, below, inner)
        else:
            found.append((value, op))
    return found


def _sum(level: _Level, values: list[Value], like: Op) -> tuple[list[Op], Value]:
    """Additions from left to right."""
    made: list[Op] = []
    total = values[0]
    for value in values[1:]:
        made.append(level.make("add", (total, value), None, replicated(0), like.loc))
        total = made[-1].result
    return made, total


def _gather_before_loop(level: _Level, op: Op) -> list[Op] | None:
    """What every iteration gathers whole of a value that the loop does not change, and takes a part
    of, is gathered once, in front of it. What it reads whole stays where it is: all layers of a
    loop over micro-batches would be whole at once.
    """
    body = op.regions[0]
    users = body.uses()
    operands, results = list(op.operands), list(op.results)
    inside: dict[Value, Value] = {}
    made: list[Op] = []
    for i in invariant_carries(op):
        readers, result = users.get(body.inputs[i], []), op.results[i]
        if not _are_one_gather(readers) or level.users.get(result) or result in level.outputs:
            continue
        if not all(_takes_part(user) for one in readers for user in users.get(one.result, ())):
            continue
        whole = level.emit(readers[0], (op.operands[i],), level.specs[readers[0].result])
        made.append(whole)
        operands[i], results[i] = whole.result, Value(whole.result.type)
        within = Value(whole.result.type)
        inside |= dict.fromkeys((body.inputs[i], *(one.result for one in readers)), within)
        level.specs |= dict.fromkeys((within, results[i]), level.specs[whole.result])
    if not made:
        return None
    ops = [reading(one, inside) for one in body.ops if inside.keys().isdisjoint(one.results)]
    ends = (body.inputs, body.outputs)
    inputs, outputs = (tuple(inside.get(v, v) for v in values) for values in ends)
    region = with_ops(body, ops, outputs, inputs)
    return [*made, Op(op.name, tuple(operands), tuple(results), op.attrs, (region,), op.loc)]


def _takes_part(op: Op) -> bool:
    """Whether `op` reads some elements alone, at places that are data."""
    return takes_at(op) or lookup(op) is not None


def _are_one_gather(readers: Sequence[Op]) -> bool:
    """True for gathers that are all alike."""
    return bool(readers) and all(
        isinstance(one.attrs, AllGatherAttrs) and one.attrs == readers[0].attrs for one in readers
    )


RULES: dict[str, Callable[[_Level, Op], list[Op] | None]] = {
    "add": _add,
    "all_gather": _gather,
    "all_slice": _slice,
    "convert": _narrow_before_gather,
    "loop": _gather_before_loop,
}


def _mark_partial(graph: Graph, specs: dict[Value, ShardingSpec]) -> None:
    """Say of every value that still has to be reduced over which axes it is partial."""
    made = graph.producers()
    for op in reversed(graph.ops):
        for region in op.regions:
            _mark_partial(region, specs)
        if op.name in REDUCTIONS_OF_RANKS:
            pending = specs[op.result].unreduced
            axes = (*op.attrs.axes, *(a for a in pending if a not in op.attrs.axes))
            joins = ELEMENTWISE_OF[op.attrs.reduction]
            for value in _parts(op.operands[0], joins, made):
                specs[value] = ShardingSpec(specs[value].dims, axes)


def _parts(value: Value, joins: str, made: dict[Value, Op]) -> set[Value]:
    """`value` and, through shape changes and the op that `joins` parts, what it is made of."""
    seen, todo = {value}, [value]
    while todo:
        op = made.get(todo.pop())
        if op is not None and (op.name == joins or isinstance(op.attrs, SHAPE_CHANGES)):
            fresh = set(op.operands) - seen
            seen |= fresh
            todo += fresh
    return seen
