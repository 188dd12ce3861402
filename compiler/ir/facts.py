"""What one op says of itself: what it holds, what it reads where, how it combines.

Passes ask these instead of for names, and take an op or None: what makes a value, if anything does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from shardwright.compiler.ir.factors import Factor, FactorKind
from shardwright.compiler.ir.opdef import FIRST, OPS, SECOND
from shardwright.compiler.ir.ops import (
    ConstantAttrs,
    DotGeneralAttrs,
    GatherAttrs,
    ScatterAttrs,
    UnfoldAttrs,
    Windows,
    windows_of,
)
from shardwright.compiler.ir.traits import (
    ALIASING,
    CASTS,
    CONTRACTIONS,
    IDENTITIES,
    IN_ORDER,
    LITERALS,
    PARTS,
    REDUCTIONS,
    TRAFFIC,
    VIEWS,
    WRITES,
)
from shardwright.compiler.ir.types import Op, TensorType, Value


def operands_of(op: Op, result: Value) -> tuple[Value, ...]:
    """What `result` of `op` depends on."""
    if op.name in IDENTITIES:
        return (op.operands[op.results.index(result)],)
    return op.operands


def behind(value: Value, made: Mapping[Value, Op], through: Callable[[Op], bool]) -> Value:
    """What the elements of `value` were before all ops on their way that `through` accepts; `made`
    are the producers of the level.
    """
    while (op := made.get(value)) is not None and through(op):
        value = operands_of(op, value)[0]
    return value


def cone(
    made: Mapping[Value, Op],
    wanted: Iterable[Value],
    stops: Callable[[Value], bool],
    reads: Callable[[Op, Value], Iterable[Value]] = operands_of,
) -> tuple[set[Op], tuple[Value, ...]]:
    """The ops that make the `wanted` values, and the leaves that they read: where `stops` says, and
    what no op of `made` makes.
    """
    ops, leaves, todo = set[Op](), dict[Value, None](), list(wanted)
    while todo:
        value = todo.pop()
        op = made.get(value)
        if op is None or stops(value):
            leaves[value] = None
        elif op not in ops:
            ops.add(op)
            todo += reads(op, value)
    return ops, tuple(leaves)


def places_of(op: Op) -> tuple[Value, ...]:
    """The operands that say where elements are: starts of slices, indices of rows."""
    passed = OPS[op.name].passes
    return () if passed is None or passed.stop is None else op.operands[passed.stop :]


def takes_at(op: Op | None) -> bool:
    """Whether `op` takes a part of a tensor at places that are operands."""
    return op is not None and op.name in PARTS and bool(places_of(op))


def stored(op: Op | None) -> ConstantAttrs | None:
    """The elements that `op` makes, where they are written in the program."""
    return op.attrs if op is not None and isinstance(op.attrs, ConstantAttrs) else None


def splat(op: Op | None) -> ConstantAttrs | None:
    """What `stored` says where one element stands for all."""
    held = stored(op)
    return held if held is not None and held.is_splat else None


def counted_dim(op: Op | None) -> int | None:
    """The dim along which the elements that `op` makes are 0, 1, ..."""
    return op.attrs.dim if op is not None and op.name == "iota" else None


def joined_dim(op: Op | None) -> int | None:
    """The dim along which `op` puts its operands one behind the other."""
    return op.attrs.dim if op is not None and op.name == "concatenate" else None


def limits_of(op: Op | None) -> tuple[Value, Value, Value] | None:
    """The least value, what is clamped and the largest, where `op` clamps."""
    if op is None or op.name != "clamp":
        return None
    low, value, high = op.operands
    return low, value, high


def factors_of(op: Op) -> tuple[Factor, ...]:
    """The indices that `op` walks; none for one that is not asked (control, collectives)."""
    find = OPS[op.name].factors
    if find is None:
        return ()
    if op.name in LITERALS:  # what they hold is no key of a table that lasts
        return tuple(find(op))
    given, made = ([v.type for v in values] for values in (op.operands, op.results))
    return _factors(op.name, op.attrs, tuple(given), tuple(made))


@cache
def _factors(
    name: str, attrs: object, given: tuple[TensorType, ...], made: tuple[TensorType, ...]
) -> tuple[Factor, ...]:
    """Those of all ops with these attributes and types, said of a stand-in for them."""
    find = OPS[name].factors
    assert find is not None
    operands, results = (tuple(map(Value, types)) for types in (given, made))
    return tuple(find(Op(name, operands, results, attrs)))


def dim_map(op: Op) -> tuple[int | None, ...] | None:
    """Per dim of the result the dim of the operand whose index it has, None for one along which all
    elements are alike. Ops that move elements in another way have no map.
    """
    if op.name not in VIEWS:
        return None
    place = {f.of(1): f.of(0) for f in factors_of(op) if f.kind is not FactorKind.LINKED}
    dims = range(op.result.type.rank)
    return tuple([place[d] for d in dims]) if place.keys() >= set(dims) else None


def needed_whole(op: Op) -> tuple[int, ...]:
    """The dims along which `op`, whose operands and results have their dims in one order, gives no
    part of its result for a part of its operands.
    """
    if op.name not in IN_ORDER:
        return ()
    passed = {f.of(0) for f in factors_of(op) if f.kind is FactorKind.PASSED}
    return tuple(d for d in range(op.operands[0].type.rank) if d not in passed)


def permutation(op: Op | None) -> tuple[int, ...] | None:
    """The dims of the operand in the order of the result, where `op` only reorders dims."""
    return op.attrs.permutation if op is not None and op.name == "transpose" else None


def chooses(op: Op | None) -> bool:
    """Whether the first operand of `op` chooses elements of the others."""
    passed = OPS[op.name].passes if op is not None else None
    return passed is not None and passed.start > 0


def pairing(op: Op | None) -> DotGeneralAttrs | None:
    """Which dims of its operands a contraction pairs; None where it moves windows over one."""
    return op.attrs if op is not None and isinstance(op.attrs, DotGeneralAttrs) else None


def combination(op: Op) -> str:
    """How `op` combines elements (`add`, `max`, ...), empty where it combines none."""
    if op.name in CONTRACTIONS:
        return "add"
    if not OPS[op.name].combines:
        return ""
    return str(getattr(op.attrs, "kind", getattr(op.attrs, "reduction", "")))


def linear_in(op: Op) -> tuple[slice, ...]:
    """The operands in which `op` is linear: those of each slice together, the others held."""
    known = OPS[op.name].linear or ()
    if OPS[op.name].combines and combination(op) != "add":
        return ()
    return () if op.name in CASTS and not op.result.type.dtype.is_float else known


def is_linear(op: Op) -> bool:
    """Whether `op` is linear in all its operands together, but for those that say where, and for
    what types round.
    """
    if op.name in CASTS:
        return True
    given = range(len(op.operands) - len(places_of(op)))
    return any(given[group] == given for group in linear_in(op))


def is_sum(op: Op) -> bool:
    """Whether `op` adds up along dims."""
    return op.name in REDUCTIONS and op.attrs.kind == "add"


def resized(op: Op, shape: tuple[int, ...]) -> Any:
    """The attributes of `op` where dims of its operands, and with them of its result, have other
    sizes; `shape` is that of the result.
    """
    resize = OPS[op.name].resize
    return op.attrs if resize is None else resize(op, shape)


def resized_dim(op: Op) -> int | None:
    """The dim that a collective gathers or divides among ranks; None where shapes stay."""
    return getattr(op.attrs, "dim", None) if op.name in TRAFFIC else None


def keeps_order(op: Op) -> bool:
    """True for a reshape in any spelling: the same elements one after the other."""
    if op.name == "broadcast_in_dim":
        same = op.operands[0].type.num_elements == op.result.type.num_elements
        return same and list(op.attrs.dims) == sorted(op.attrs.dims)
    return op.name == "reshape"


def sent_bytes(op: Op) -> int:
    """Bytes of the larger side of a collective or transfer."""
    return max(op.operands[0].type.num_bytes, op.result.type.num_bytes)


def lookup(op: Op | None) -> Windows | None:
    """How the windows lie that `op` takes or writes at indices that are elements."""
    attrs = op.attrs if op is not None else None
    return windows_of(attrs) if isinstance(attrs, GatherAttrs | ScatterAttrs) else None


def moved(op: Op) -> Value:
    """What `op` with a `lookup` moves: the result of a gather, the update of a scatter."""
    return op.operands[2] if op.name in WRITES else op.result


def shuffled(op: Op, made: Mapping[Value, Op]) -> tuple[int, tuple[int, ...]] | None:
    """(dim, places) where `op` gives the slices of its operand along a dim in another order, each
    once: the one at `places[n]` becomes number `n`. None where an order is not written down.
    """
    windows, held = lookup(op), stored(made.get(op.operands[1])) if len(op.operands) > 1 else None
    if windows is None or op.name in WRITES or held is None:
        return None
    (table, moving), attrs = (op.operands[0].type, op.result.type), op.attrs
    if len(attrs.start_index_map) != 1 or attrs.operand_batching_dims or table != moving:
        return None
    (dim,) = attrs.start_index_map
    whole = tuple(1 if d == dim else n for d, n in enumerate(table.shape))
    rest = tuple(d for d in range(table.rank) if d != dim)
    if (attrs.slice_sizes, attrs.collapsed_slice_dims, attrs.offset_dims) != (whole, (dim,), rest):
        return None
    places = tuple(int(n) for n in held.array().reshape(-1))
    return (dim, places) if sorted(places) == list(range(table.shape[dim])) else None


def repeats(op: Op | None, dim: int) -> bool:
    """Whether the elements that `op` makes are alike along `dim`, since it spreads them there."""
    walked = None if op is None else dim_map(op)
    return walked is not None and walked[dim] is None


def signs(op: Op | None) -> tuple[int, ...]:
    """The sign of each operand where `op` adds them up element by element; else nothing."""
    return () if op is None else OPS[op.name].signs


def product_of(op: Op | None) -> tuple[int, ...]:
    """The operands in each of which `op` is linear while the others stay, element by element."""
    if op is None or not OPS[op.name].elementwise or len(op.operands) == 1:
        return ()
    return tuple(g.start for g in linear_in(op) if g in (FIRST, SECOND))


def is_constant_like(op: Op) -> bool:
    """Whether a result needs no memory where the operands need none: splats, counts, views, and
    functions of elements.
    """
    if op.name in LITERALS:
        held = stored(op)
        return held is None or held.is_splat
    is_view = op.name in ALIASING and not isinstance(op.attrs, UnfoldAttrs)
    return is_view or OPS[op.name].elementwise
