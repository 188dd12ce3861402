"""Bodies of `reduce_window` and `reduce` that are no reduction of the machine, such as logaddexp or
the larger of two values with its position: the body is applied to whole arrays.

A body is associative, not commutative: its first argument is what comes earlier in row-major order.
Windows are folded dim by dim, the minor one first; of n elements a dim takes about 2 log2 n
applications. Every padded element is the start value, and so is the first element of every fold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwright.compiler.frontend.rules.registry import Scope, Site, Values, refuse
from shardwright.compiler.ir.facts import cone
from shardwright.compiler.ir.opdef import OPS, make_op
from shardwright.compiler.ir.types import Op, Value, tensor_type

Dims = tuple[int, ...]
Body = Callable[[Values, Values], Values]
_VIEWS = ("reshape", "broadcast_in_dim")  # of scalars: of arrays, nothing


def fold_windows(site: Site, sizes: Dims, strides: Dims, padding: tuple[Dims, Dims]) -> list[Value]:
    """What the op's body makes of the windows of its operands."""
    body, make = _body(site), site.make
    operands, inits = _halves(site)
    none = (0,) * len(sizes)
    if padding != (none, none):
        pairs = zip(operands, inits, strict=True)
        operands = [make.pad(value, init, *padding) for value, init in pairs]
    for dim in reversed(range(len(sizes))):
        operands = _along(site, body, operands, dim, sizes[dim], strides[dim])
    return _started(site, body, inits, operands)


def fold_dims(site: Site, dims: Dims) -> list[Value]:
    """What the op's body makes of whole `dims` of its operands."""
    body, make = _body(site), site.make
    operands, inits = _halves(site)
    for dim in sorted(dims, reverse=True):
        while operands[0].type.shape[dim] > 1:
            operands = _halved(site, body, operands, inits, dim)
    kept = tuple(n for d, n in enumerate(operands[0].type.shape) if d not in dims)
    if any(operands[0].type.shape[d] == 0 for d in dims):
        return [make.broadcast(init, kept) for init in inits]
    return _started(site, body, inits, [make.reshape(v, kept) for v in operands])


def _halves(site: Site) -> tuple[list[Value], list[Value]]:
    """The operands, and their start values."""
    count = len(site.operands) // 2
    return list(site.operands[:count]), list(site.operands[count:])


def _started(site: Site, body: Body, inits: Values, results: Values) -> list[Value]:
    """`results` behind the start values."""
    shape = results[0].type.shape
    starts = [site.make.broadcast(init, shape) if shape else init for init in inits]
    return list(body(starts, results))


def _halved(site: Site, body: Body, values: Values, inits: Values, dim: int) -> list[Value]:
    """Neighbours along `dim` folded; an odd last element meets the start value."""
    make, shape = site.make, values[0].type.shape
    if shape[dim] % 2:
        none = (0,) * len(shape)
        one = tuple(int(d == dim) for d in range(len(shape)))
        values = [make.pad(v, init, none, one) for v, init in zip(values, inits, strict=True)]
    count = -(-shape[dim] // 2)
    sides = ([_every(site, v, dim, k, count, 2) for v in values] for k in (0, 1))
    return list(body(*sides))


def _along(site: Site, body: Body, values: Values, dim: int, size: int, stride: int) -> list[Value]:
    """Windows of `size` elements along `dim`, `stride` apart."""
    length = values[0].type.shape[dim]
    count = max(0, (length - size) // stride + 1)
    if size == stride == 1:
        return list(values)
    if (size - 1) * count > 2 * size.bit_length() * length:
        values = _doubled(site, body, values, dim, size)
        return [_every(site, v, dim, 0, count, stride) for v in values]
    folded = [_every(site, v, dim, 0, count, stride) for v in values]
    for at in range(1, size):
        folded = list(body(folded, [_every(site, v, dim, at, count, stride) for v in values]))
    return folded


def _doubled(site: Site, body: Body, values: Values, dim: int, size: int) -> list[Value]:
    """Windows of `size` elements at every place, of windows of 1, 2, 4, ... elements."""
    count = values[0].type.shape[dim] - size + 1
    folded: list[Value] = []
    power, at = 1, 0
    while True:
        if size & power:
            part = [_every(site, v, dim, at, count, 1) for v in values]
            folded = list(body(folded, part)) if folded else part
            at += power
        if at == size:
            return folded
        places = values[0].type.shape[dim] - power
        sides = ([_every(site, v, dim, k, places, 1) for v in values] for k in (0, power))
        values = body(*sides)
        power *= 2


def _every(site: Site, value: Value, dim: int, first: int, count: int, stride: int) -> Value:
    """`count` elements along `dim` from `first` on, `stride` apart."""
    shape = value.type.shape
    if (first, count, stride) == (0, shape[dim], 1):
        return value
    end = first + (count - 1) * stride + 1 if count else first
    rows = [(first, end, stride) if d == dim else (0, n, 1) for d, n in enumerate(shape)]
    starts, ends, steps = (tuple(row) for row in zip(*rows, strict=True))
    return site.make.slice(value, starts, ends, steps)


def _body(site: Site) -> Body:
    """The op's body as a function of arrays. Refuses one that is not of elementwise ops."""
    importer, scope = site.importer, Scope(site.scope)
    block = site.op.regions[0].blocks[0]
    inputs = [Value(importer.type_of(a.type)) for a in block.arguments]
    hooks = importer.hooks
    importer.hooks = type(hooks)()  # scalars that are in no graph
    outputs = importer.block(site.op, block, scope, inputs)
    importer.hooks = hooks
    for op in scope.ops:
        if not (op.name == "constant" or op.name in _VIEWS or OPS[op.name].elementwise):
            name = site.name.removeprefix("stablehlo.")
            refuse(
                "NCC_EVRF001",
                f"{name} requires a body of elementwise operators, got {op.name}",
                "write the fold with jax.lax.associative_scan or jax.lax.scan",
            )

    def apply(earlier: Values, later: Values) -> Values:
        shape = earlier[0].type.shape
        now = dict(zip(inputs, (*earlier, *later), strict=True))
        for capture in scope.captures:
            now[capture.inner] = _spread(site, capture.outer, shape)
        for op in scope.ops:
            now[op.results[0]] = _on_arrays(site, op, [now[v] for v in op.operands], shape)
        return [now[v] for v in outputs]

    return apply


def of_elements(site: Site, block: Any, value: Any, arrays: Mapping[Any, Value]) -> Value | None:
    """What a value of `block`, a body of scalars, is for every element of the `arrays` that stand
    for arguments; None where it is not made by elementwise ops.
    """
    importer, scope = site.importer, Scope(site.scope)
    inputs = [Value(importer.type_of(a.type)) for a in block.arguments]
    hooks = importer.hooks
    importer.hooks = type(hooks)()
    importer.block(site.op, block, scope, inputs)
    importer.hooks = hooks
    wanted = scope.env[value]
    ops, _ = cone({r: op for op in scope.ops for r in op.results}, [wanted], lambda _: False)
    given = dict(zip(inputs, block.arguments, strict=True))
    now = {v: arrays[a] for v, a in given.items() if a in arrays}
    shape = next(iter(arrays.values())).type.shape
    for op in (op for op in scope.ops if op in ops):
        known = op.name == "constant" or op.name in _VIEWS or OPS[op.name].elementwise
        if not known or any(v not in now for v in op.operands):
            return None
        now[op.results[0]] = _on_arrays(site, op, [now[v] for v in op.operands], shape)
    return now.get(wanted)


def _on_arrays(site: Site, op: Op, operands: Sequence[Value], shape: Dims) -> Value:
    """An op of scalars, for every element of arrays."""
    if op.name in _VIEWS:
        return operands[0]
    if op.name == "constant":
        number = op.attrs.array().reshape(-1)[0]
        return site.make.splat(number, tensor_type(shape, op.result.type.dtype))
    return site.make.append(make_op(op.name, tuple(operands), op.attrs, (), site.loc))[0]


def _spread(site: Site, scalar: Value, shape: Dims) -> Value:
    """A scalar of outside for every element."""
    return site.make.broadcast(scalar, shape) if shape else scalar
