"""A kernel made ready for tiling: minimal iter dims per value, merged and split iter dims, splat
constants, roots.

`normalise` turns a `KernelProgram` into a `Domain` that is freely edited by the planners: size-1
iter dims are gone, iter dims that every view walks as one index are one iter dim, values span only
what moves them. `split` cuts one iter dim into a major and a minor part, with a tail where the
minor part does not divide it. Next: `loop_fusion.py` and `contraction.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from shardwright.compiler.codegen.domain import (
    SPLATS,
    AccessMap,
    CoordBound,
    Domain,
    Numbers,
    PerDim,
    Split,
    Value,
)
from shardwright.compiler.codegen.positions import fold_counters, fold_masks
from shardwright.compiler.diagnostics import CompileError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import (
    STORES,
    Bound,
    KernelProgram,
    Node,
    View,
    access_by_index,
)

_TINY, _HUGE = 2.0**-126, 2.0**127  # normal fp32 numbers (IEEE 754)


def normalise(program: KernelProgram) -> Domain:
    """The domain of a compute kernel. Raises CompileError for types the engines do not have."""
    sizes = {a: n for a, n in enumerate(program.iter_dims) if n != 1}
    domain = Domain(program.name, sizes, [])
    number: dict[int, int] = {}
    for n, node in enumerate(program.nodes):
        number[n] = _append(domain, node, tuple(number[i] for i in node.inputs))
    domain.values = _fold_converts(domain)
    fold_masks(domain)
    fold_counters(domain)
    _drop_dead(domain)
    _require_types(domain)
    _merge(domain)
    return domain


_WIDE_INTEGERS = (DType.I64, DType.U64)
_LOW_BITS = (DType.I32, DType.U32)
"""What a DMA makes of a wide integer: it drops the high bits."""


def _require_types(domain: Domain) -> None:
    """Refuse fp64, which no engine has. 64-bit integers are only here where the machine computes
    them (`lower/narrow.py`)."""
    for value in domain.values:
        if value.dtype is DType.F64 and value.op not in STORES:
            raise CompileError(
                "SW_CODEGEN_DTYPE",
                f"kernel {domain.name} requires element types up to 32 bits, got {value.op} of"
                f" {value.dtype.value}",
                hint="compute in f32 or i32",
            )


def _append(domain: Domain, node: Node, inputs: Numbers) -> int:
    """Add `node` with minimal iter dims; returns its number."""
    values, attrs = domain.values, dict(node.attrs)
    access = _access_of(domain, node, attrs)
    iter_dims = frozenset(access.strides) if access else frozenset()
    iter_dims = iter_dims.union(*(b.strides for b in access.bounds)) if access else iter_dims
    if node.op != "load":
        iter_dims = iter_dims.union(*(values[i].iter_dims for i in inputs))
    over = frozenset(attrs.pop("over", ())) & set(domain.sizes)
    if node.op in SPLATS:
        attrs = {k: attrs[k] for k in ("value", "low", "high") if k in attrs}
    if (indexed := access_by_index(node)) is not None:
        inputs = inputs[: len(indexed[0])]  # what lies outside is only counted, by who runs it
        attrs.pop("replicated", None)
    if "order" in attrs:
        attrs["order"] = tuple(a for a in attrs["order"] if a in domain.sizes)
    if over:
        first = _scaled(domain, inputs[0], over - iter_dims, attrs.get("kind", "add"))
        inputs = (first, *inputs[1:])
        over &= iter_dims
    windows = any(w.bounds for w in (values[i].map for i in inputs) if w)
    op = node.op if windows else _without_sum(node.op, over)
    if op == "divide" and (inverse := _inverse(values[inputs[1]])) is not None:
        op, inputs = "multiply", (inputs[0], len(values))
        values.append(inverse)
    values.append(Value(op, inputs, iter_dims - over, node.dtype, access, over, attrs))
    return len(values) - 1


def _inverse(value: Value) -> Value | None:
    """1 / constant if normal: an eighth of a divide's cycles, and maybe another last bit."""
    number = value.attrs.get("value") if value.op == "constant" else None
    if not value.dtype.is_float or not number or not _TINY < abs(1 / float(number)) < _HUGE:
        return None
    return replace(value, dtype=DType.F32, attrs={"value": 1 / float(number)})


def _without_sum(op: str, over: frozenset[int]) -> str:
    """A sum over nothing is no sum."""
    if over or op not in ("reduce", "contract"):
        return op
    return "convert" if op == "reduce" else "multiply"


def _access_of(domain: Domain, node: Node, attrs: dict[str, Any]) -> AccessMap | None:
    if node.op == "iota":
        strides = {attrs.pop("atom"): attrs.pop("step")}
        return AccessMap(
            attrs.pop("start"), {a: s for a, s in strides.items() if a in domain.sizes}
        )
    view: View | None = attrs.pop("view", None)
    if view is None:
        return None
    moving = {a: view.strides[a] for a in domain.sizes if view.strides[a]}
    if node.op in ("load", "load_indexed"):
        moving = {a: s for a, s in moving.items() if a in node.iter_dims}
    bounds = tuple(_coord_bound(domain, b) for b in attrs.pop("bounds", ()))
    return AccessMap(view.offset, moving, view.tensor, bounds)


def _coord_bound(domain: Domain, bound: Bound) -> CoordBound:
    moving = {a: bound.strides[a] for a in domain.sizes if bound.strides[a]}
    return CoordBound(bound.offset, bound.size, bound.unit, moving)


def _scaled(domain: Domain, source: int, missing: frozenset[int], kind: str) -> int:
    """`source` summed over iter dims it does not span: a sum of equal terms is a product."""
    value = domain[source]
    count = domain.points(missing)
    if kind == "xor":
        count %= 2
    if count == 1 or kind in ("max", "min", "and", "or"):
        return source
    factor: Any = float(count) if value.dtype.is_float else count
    op = "power" if kind == "multiply" else "multiply"
    constant = Value("constant", (), frozenset(), value.dtype, attrs={"value": factor})
    domain.values.append(constant)
    domain.values.append(Value(op, (source, len(domain.values) - 1), value.iter_dims, value.dtype))
    return len(domain.values) - 1


def _fold_converts(domain: Domain) -> list[Value]:
    """Converts that a DMA does for free (float loads) and converts to the same type disappear."""
    users = domain.users()
    values = list(domain.values)
    alias = list(range(len(values)))
    for n, value in enumerate(values):
        value = replace(value, inputs=tuple(alias[i] for i in value.inputs))
        values[n] = value
        if value.op != "convert":
            continue
        source = values[value.inputs[0]]
        free = _widens(source, value) and not _minds(domain, users.get(n, ()))
        free = free or _is_extended(domain, value, source, users.get(n, ()))
        if free or source.dtype is value.dtype:
            alias[n] = value.inputs[0]
        elif (
            domain[value.inputs[0]].op == "load"
            and len(users[value.inputs[0]]) == 1
            and source.dtype.is_float
            and value.dtype.is_float
        ) or (source.op == "load" and source.dtype in _WIDE_INTEGERS and value.dtype in _LOW_BITS):
            values[n] = replace(source, dtype=value.dtype)
    return values


def _is_extended(domain: Domain, value: Value, source: Value, readers: Iterable[int]) -> bool:
    """Whether only stores want the high bits of an integer: their DMA extends it."""
    exact = value.dtype in _WIDE_INTEGERS and source.dtype.is_integer
    return exact and _only_stored(domain, readers)


def _only_stored(domain: Domain, readers: Iterable[int]) -> bool:
    """Whether every reader writes the value to memory."""
    return all(domain[n].op == "store" for n in readers)


def _widens(source: Value, value: Value) -> bool:
    """A load converted to fp32 without loss: engines read any float, a DMA moves the short type."""
    widens = source.dtype.bytes < value.dtype.bytes and value.dtype is DType.F32
    return source.op == "load" and source.dtype.is_float and widens


def _minds(domain: Domain, readers: Iterable[int]) -> bool:
    """Whether a reader looks at the type of what it reads."""
    minding = (*STORES, "contract", "bitcast_convert", "convert")
    return any(domain[n].op in minding for n in readers)


def _drop_dead(domain: Domain) -> None:
    """Keep what the stores need."""
    kept = domain.slice(domain.roots)
    number = {old: new for new, old in enumerate(kept)}
    domain.values = [
        replace(domain[n], inputs=tuple(number[i] for i in domain[n].inputs)) for n in kept
    ]
    used = {a for v in domain.values for a in (*v.iter_dims, *v.over)}
    domain.sizes = {a: n for a, n in domain.sizes.items() if a in used}


def _merge(domain: Domain) -> None:
    """Merge pairs of iter dims as long as some pair walks as one index everywhere."""
    merged = True
    while merged:
        merged = False
        for outer in list(domain.sizes):
            for inner in list(domain.sizes):
                if outer != inner and outer in domain.sizes and _walk_as_one(domain, outer, inner):
                    _merge_pair(domain, outer, inner)
                    merged = True


def _walk_as_one(domain: Domain, outer: int, inner: int) -> bool:
    size = domain.sizes.get(inner)
    if size is None:
        return False
    for value in domain.values:
        if (outer in value.iter_dims) != (inner in value.iter_dims):
            return False
        if (outer in value.over) != (inner in value.over):
            return False
        if value.map and any(s.get(outer, 0) != s.get(inner, 0) * size for s in _moves(value.map)):
            return False
        if not _keeps_order(value, outer, inner):
            return False
    return True


def _moves(access: AccessMap) -> list[PerDim]:
    """Steps per iter dim of the address and of every bounded coordinate."""
    return [access.strides, *(b.strides for b in access.bounds)]


def _moved(access: AccessMap, change: Callable[[PerDim], PerDim]) -> AccessMap:
    """`access` with `change` applied to the steps of the address and of every coordinate."""
    bounds = tuple(replace(b, strides=change(b.strides)) for b in access.bounds)
    return replace(access, strides=change(access.strides), bounds=bounds)


def _keeps_order(value: Value, outer: int, inner: int) -> bool:
    """Whether one index over both iter dims runs through an ordered store in its order."""
    order = value.attrs.get("order", ())
    return outer not in order or order[order.index(outer) + 1 :][:1] == (inner,)


def joined_iter_dims(
    domain: Domain, numbers: Iterable[int], outer: int, inner: int
) -> Domain | None:
    """`domain` with two iter dims as one for `numbers`; None where they do not walk so."""
    if not _walk_as_one(replace(domain, values=[domain[n] for n in numbers]), outer, inner):
        return None
    joined = replace(domain, sizes=dict(domain.sizes), values=list(domain.values))
    _merge_pair(joined, outer, inner)
    return joined


def _merge_pair(domain: Domain, outer: int, inner: int) -> None:
    """`inner` takes over the index of both."""
    domain.sizes[inner] *= domain.sizes.pop(outer)
    domain.values = [_without(v, outer) for v in domain.values]


def _without(value: Value, iter_dim: int) -> Value:
    """`value` where another iter dim has taken over the index of `iter_dim`."""
    access, attrs = value.map, value.attrs
    if access is not None:
        access = _moved(access, lambda steps: {a: s for a, s in steps.items() if a != iter_dim})
    if iter_dim in attrs.get("order", ()):
        attrs = {**attrs, "order": tuple(a for a in attrs["order"] if a != iter_dim)}
    iter_dims, over = value.iter_dims - {iter_dim}, value.over - {iter_dim}
    return replace(value, iter_dims=iter_dims, over=over, map=access, attrs=attrs)


def split(domain: Domain, iter_dim: int, minor_size: int) -> tuple[Domain, Split]:
    """`domain` with `iter_dim` cut into (major, minor); it keeps its number as the minor part.

    The major iter dim is absent (-1 in the result) when one run is all there is.
    """
    size = domain.sizes[iter_dim]
    minor_size = min(minor_size, size)
    if minor_size == size:
        return domain, Split(-1, iter_dim, 0)
    major = max(domain.sizes) + 1
    made = Split(major, iter_dim, size % minor_size)
    sizes = dict(domain.sizes) | {major: size // minor_size, iter_dim: minor_size}
    values = [_split_value(v, iter_dim, major, minor_size) for v in domain.values]
    splits = domain.splits | {major: made}
    return replace(domain, sizes=sizes, values=values, splits=splits), made


def _split_value(value: Value, iter_dim: int, major: int, minor_size: int) -> Value:
    iter_dims = value.iter_dims | {major} if iter_dim in value.iter_dims else value.iter_dims
    over = value.over | {major} if iter_dim in value.over else value.over
    access = value.map
    if access:
        access = _moved(
            access,
            lambda steps: (
                {**steps, major: steps[iter_dim] * minor_size} if iter_dim in steps else steps
            ),
        )
    return replace(value, iter_dims=iter_dims, over=over, map=access)


def near_divisor(size: int, limit: int) -> int:
    """The largest divisor of `size` in (limit/2, limit], else `limit`."""
    return next((r for r in range(limit, limit // 2, -1) if size % r == 0), limit)


def contiguous_run(domain: Domain, access: AccessMap, free: Sequence[int], extents: PerDim) -> int:
    """Elements in a row that a transfer touches when the iter dims `free` have `extents`."""
    run = 1
    for iter_dim in sorted(free, key=lambda a: abs(access.stride(a)) or 1 << 60):
        if access.stride(iter_dim) != run:
            break
        run *= extents[iter_dim]
        if extents[iter_dim] != domain.sizes[iter_dim]:
            break
    return run
