"""Instructions for one value at a time: loads, stores and elementwise nodes on a tile.

A `Frame` fixes which iter dim lies on the partitions and which lie along the free dims; `emit` adds
the code of one value at a scope, reading values that are already held. Reductions, contractions and
indexed accesses have files of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardwright.compiler.codegen.builder import Box, Builder, Dims, Held, Scope, by_numbers
from shardwright.compiler.codegen.domain import (
    ACTIVATIONS,
    BINARY,
    CODELESS,
    MASK,
    SCALED,
    UNARY,
    AccessMap,
    Domain,
    Value,
)
from shardwright.compiler.codegen.positions import NEGATED
from shardwright.compiler.diagnostics import CompileError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import Engine, Space


class Frame:
    """Code for values of a domain with `partition` on the partitions and `axes` along free dims."""

    def __init__(
        self,
        builder: Builder,
        domain: Domain,
        partition: int | None,
        axes: Sequence[int],
        slots: tuple[int, int] = (2, 2),
    ) -> None:
        self.builder = builder
        self.domain = domain
        self.partition = partition
        self.axes = tuple(axes)
        self.slots = slots  # of tiles that a DMA fills or empties, and of the others
        self.held: dict[int, Held] = {}
        self.joining = {
            i: (n, at)
            for n, value in enumerate(domain.values)
            if value.op == "join"
            for at, i in enumerate(value.inputs)
        }
        self._open: dict[int, tuple[object, Held]] = {}  # joins begun, and the body that holds them
        self.stored = {
            domain[n].inputs[0]: domain[n].map for n in domain.roots if domain[n].op == "store"
        }

    def rows(self, scope: Scope) -> int:
        """Partitions in use at `scope`."""
        return scope.extent(self.partition)

    def free_axes(self, value: Value) -> list[int]:
        """Free axes a value spans, major to minor."""
        return [a for a in self.axes if a in value.iter_dims]

    def sums_in_passing(self, number: int) -> bool:
        """Whether a reduction may be a by-product of the activation that makes what it reads."""
        return True

    def emit(self, number: int, scope: Scope, definition: Value | None = None) -> None:
        """Code for value `number`, or for its `definition` here; splats are made by readers."""
        value = definition or self.domain[number]
        if value.op in CODELESS:
            return
        emit = _EMITTERS.get(value.op)
        if emit is None:
            raise CompileError(
                "SW_CODEGEN_OP", f"no tile code for kernel node {value.op}", hint="report this op"
            )
        emit(self, number, value, scope)

    def new(self, number: int, value: Value, scope: Scope, dtype: DType | None = None) -> Held:
        """A tile for value `number`, remembered as where it is held."""
        if number in self.joining:
            join, index = self.joining[number]
            whole = self._joined(join, scope)
            self.held[number] = part_of(whole, self.domain[join], index)
        else:
            self.held[number] = self._own_tile(number, value, scope, dtype)
        return self.held[number]

    def _joined(self, join: int, scope: Scope) -> Held:
        """The tile of a join that is being filled in the body of `scope`."""
        body, held = self._open.get(join, (None, None))
        if held is None or body is not scope.body:
            held = self._own_tile(join, self.domain[join], scope)
            self._open[join] = (scope.body, held)
        return held

    def close(self, join: int) -> None:
        """All parts of a join are there."""
        self.held[join] = self._open.pop(join)[1]

    def _own_tile(
        self, number: int, value: Value, scope: Scope, dtype: DType | None = None
    ) -> Held:
        axes = self.layout(number, value)
        name = f"{value.op}{number}"
        loaded = value.op in ("load", "load_indexed")
        slots = self.slots[0] if loaded or number in self.stored else self.slots[1]
        kind = dtype or value.dtype
        return scope.spanning(axes, name, self.rows(scope), kind, slots, loaded)

    def layout(self, number: int, value: Value) -> list[int]:
        """Free axes in the order of the view a value is loaded or stored through: long runs."""
        access = value.map if value.op == "load" else self.stored.get(number)
        axes = self.free_axes(value)
        return sorted(axes, key=lambda a: -abs(access.stride(a))) if access else axes

    def scratch(self, like: Value, scope: Scope, dtype: DType, number: int | None = None) -> Held:
        """A tile like that of a value for an intermediate result, which the caller releases."""
        axes = self.free_axes(like) if number is None else self.layout(number, like)
        return scope.spanning(axes, "scratch", self.rows(scope), dtype, self.slots[1])

    def operand(self, number: int) -> Held:
        """Where a value is held; splats come from tiles made in front of the kernel."""
        if number in self.held:
            return self.held[number]
        value = self.domain[number]
        assert value.op in ("constant", "register"), (self.domain.name, number, value)
        return self.builder.filled(value.attrs["value"], value.dtype)

    def constant(self, number: int) -> Any | None:
        """The number a value stands for, None when it is not a constant."""
        value = self.domain[number]
        return value.attrs["value"] if value.op == "constant" else None

    def is_row_scalar(self, number: int, scope: Scope) -> bool:
        """Whether a value has one element per partition here."""
        value = self.domain[number]
        return all(scope.extent(a) == 1 for a in self.free_axes(value))

    def copy(self, scope: Scope, engine: Engine, dst: Held, src: Held) -> None:
        """One copy over all of `dst`."""
        self.apply(scope, "tensor_copy", engine, dst, (src,))

    def engine(self, *held: Held) -> Engine:
        """Vector, or GpSimd when an integer takes part (Vector computes in fp32)."""
        integer = any(self.builder.dtype(h).is_integer for h in held)
        return Engine.GPSIMD if integer else Engine.VECTOR

    def apply(
        self,
        scope: Scope,
        opcode: str,
        engine: Engine,
        dst: Held,
        srcs: Sequence[Held],
        **attrs: Any,
    ) -> None:
        """One elementwise instruction over all of `dst`."""
        axes = [a for a in self.axes if a in dst.strides]
        out, *ins = scope.patterns(self.rows(scope), axes, dst, *srcs)
        scope.add(opcode, engine, out, ins, **attrs)


Emitter = Callable[[Frame, int, Value, Scope], None]


def _load(frame: Frame, number: int, value: Value, scope: Scope) -> None:
    held = frame.new(number, value, scope)
    emit_load(frame, value.access, held, frame.free_axes(value), scope)


def emit_load(
    frame: Frame, access: AccessMap, held: Held, axes: Sequence[int], scope: Scope
) -> None:
    """A DMA of a view into a tile; partitions the view does not move along get copies."""
    for place, part in _within_dims(frame, access, held, axes, scope):
        source, target = place.transfer(access, part, frame.rows(place), frame.partition, axes)
        place.load(target, source)


def _within_dims(
    frame: Frame, access: AccessMap, held: Held, axes: Sequence[int], scope: Scope
) -> Iterator[tuple[Scope, Held]]:
    """Where a transfer has as many dims as a pattern may: loops over its outermost axes."""
    hbm, _ = scope.transfer(access, held, frame.rows(scope), frame.partition, axes)
    if len(hbm.dims) - 1 <= frame.builder.limits.free_dims:
        yield scope, held
        return
    outer = max((a for a in axes if scope.extent(a) > 1), key=lambda a: abs(access.stride(a)))
    box, (inner, at) = scope.boxes[outer], scope.counted(scope.extent(outer))
    inner.boxes[outer] = Box(box.origin + at, 1)
    part = Held(held.tile, held.strides, held.offset + at * held.strides.get(outer, 0))
    yield from _within_dims(frame, access, part, axes, inner)


def part_of(whole: Held, joined: Value, index: int) -> Held:
    """View number `index` of a value that spans a coalesced iter dim."""
    iter_dim = joined.attrs["iter_dim"]
    strides = {a: s for a, s in whole.strides.items() if a != iter_dim}
    return Held(whole.tile, strides, whole.offset + index * whole.strides[iter_dim])


def _part(frame: Frame, number: int, value: Value, scope: Scope) -> None:
    whole = frame.held[value.inputs[0]]
    frame.held[number] = part_of(whole, value, value.attrs["index"])


def _join(frame: Frame, number: int, value: Value, scope: Scope) -> None:
    frame.close(number)


def _store(frame: Frame, number: int, value: Value, scope: Scope) -> None:
    access = value.access
    axes = [a for a in frame.axes if access.stride(a)]
    held = _materialised(frame, value, axes, scope)
    for place, part in _within_dims(frame, access, held, axes, scope):
        rows = frame.rows(place) if access.stride(frame.partition) else 1
        target, source = place.transfer(access, part, rows, frame.partition, axes)
        place.store(target, source)


def _materialised(frame: Frame, store: Value, axes: Sequence[int], scope: Scope) -> Held:
    """The stored value with elements along all `axes`, in an order in which its DMA reads runs."""
    (number,) = store.inputs
    source, access = frame.domain[number], store.access
    axes = sorted(axes, key=lambda a: -abs(access.stride(a)))
    moving = [a for a in axes if scope.extent(a) > 1]
    missing = [a for a in moving if a not in source.iter_dims]
    if not missing:
        held = frame.operand(number)
        if not moving or held.strides[moving[-1]] == 1:
            return held
    constant = frame.constant(number)
    if constant is not None:
        elements = scope.elements(axes)
        return scope.hold(frame.builder.filled(constant, source.dtype, elements), axes)
    held = scope.spanning(axes, f"spread{number}", frame.rows(scope), source.dtype)
    operand = frame.operand(number)
    frame.copy(scope, frame.engine(held), held, operand)
    scope.release(held)
    return held


def _iota(frame: Frame, number: int, value: Value, scope: Scope) -> None:
    held = frame.new(number, value, scope)
    axes = [a for a in frame.axes if a in held.strides and scope.extent(a) > 1]
    out = scope.on_chip(held, frame.rows(scope), _dims_of(scope, held, axes))
    scope.add("iota", Engine.GPSIMD, out, (), **_steps(frame, value, axes, scope))


def _binary(frame: Frame, number: int, value: Value, scope: Scope) -> None:
    """dst = a op b in the cheapest form: immediate, one scalar per partition, or two tensors."""
    op, (a, b) = value.attrs.get("direction", value.op), value.inputs
    if frame.constant(a) is not None and frame.constant(b) is None:
        _with_scalar(frame, op, b, a, True, number, value, scope)
    elif frame.constant(b) is not None or _scalar_pays(frame, b, a, scope):
        _with_scalar(frame, op, a, b, False, number, value, scope)
    elif _scalar_pays(frame, a, b, scope):
        _with_scalar(frame, op, b, a, True, number, value, scope)
    else:
        left, right = frame.operand(a), frame.operand(b)
        held = frame.new(number, value, scope)
        engine = _engine_of(op) or frame.engine(left, right, held)
        frame.apply(scope, "tensor_tensor", engine, held, (left, right), op=op)


def _engine_of(op: str) -> Engine | None:
    """The engine that alone has an operator: v2 has one generator (`nki.isa.rng`)."""
    return Engine.VECTOR if op == "random_bits" else None


def _scalar_pays(frame: Frame, scalar: int, tensor: int, scope: Scope) -> bool:
    return frame.is_row_scalar(scalar, scope) and not frame.is_row_scalar(tensor, scope)


def _with_scalar(
    frame: Frame,
    op: str,
    tensor: int,
    scalar: int,
    reverse: bool,
    number: int,
    value: Value,
    scope: Scope,
) -> None:
    """dst = tensor op scalar, swapped if `reverse`: an immediate, or one element per partition."""
    source, immediate = frame.operand(tensor), frame.constant(scalar)
    second = None if immediate is not None else frame.operand(scalar)
    if op == "divide" and not reverse and second is not None and value.dtype.is_float:
        second, op = _reciprocal(frame, scalar, second, scope), "multiply"
    held = frame.new(number, value, scope)
    axes = [a for a in frame.axes if a in held.strides]
    out, into = scope.patterns(frame.rows(scope), axes, held, source)
    srcs = [into]
    if second is not None:
        srcs.append(scope.flat(second, frame.rows(scope), 1))
    engine = _engine_of(op) or frame.engine(source, held, *([second] if second else []))
    attrs = by_numbers((op, immediate), reverse=reverse)
    scope.add("tensor_scalar", engine, out, srcs, **attrs)


def _reciprocal(frame: Frame, number: int, held: Held, scope: Scope) -> Held:
    """1 / row scalar: elements then cost a multiply each, not a divide (8 times the cycles)."""
    result = frame.scratch(frame.domain[number], scope, DType.F32)
    frame.apply(scope, "tensor_unary", Engine.VECTOR, result, (held,), op="reciprocal")
    scope.release(result)
    return result


def _activation(frame: Frame, number: int, value: Value, scope: Scope) -> None:
    source = frame.operand(value.inputs[0])
    held = frame.new(number, value, scope)
    attrs = {"func": value.op, "scale": 1.0, "bias": 0.0}
    frame.apply(scope, "activation", Engine.SCALAR, held, (source,), **attrs)


def _scaled(frame: Frame, number: int, value: Value, scope: Scope) -> None:
    """func(x * scale + bias) as made by `fusion.py`; terms that are None are row scalars."""
    source, *rows = (frame.operand(i) for i in value.inputs)
    held = frame.new(number, value, scope)
    axes = [a for a in frame.axes if a in held.strides]
    out, into = scope.patterns(frame.rows(scope), axes, held, source)
    srcs = [into, *(scope.flat(r, frame.rows(scope), 1) for r in rows)]
    func, scale, bias = (value.attrs[k] for k in ("func", "scale", "bias"))
    if value.attrs.get("engine") != Engine.VECTOR.value:
        scope.add("activation", Engine.SCALAR, out, srcs, func=func, scale=scale, bias=bias)
        return
    if func == "square":
        scope.add("tensor_tensor", Engine.VECTOR, out, (into, into), op="multiply")
        return
    terms = (("multiply", scale, 1.0), ("add", bias, 0.0))
    steps = [(op, number) for op, number, neutral in terms if number != neutral]
    if not steps:
        scope.add("tensor_copy", Engine.VECTOR, out, srcs)
        return
    scope.add("tensor_scalar", Engine.VECTOR, out, srcs, **by_numbers(*steps))


def _unary(frame: Frame, number: int, value: Value, scope: Scope) -> None:
    source = frame.operand(value.inputs[0])
    held = frame.new(number, value, scope)
    frame.apply(scope, "tensor_unary", frame.engine(source, held), held, (source,), op=value.op)


def _convert(frame: Frame, number: int, value: Value, scope: Scope) -> None:
    source = frame.operand(value.inputs[0])
    given = frame.builder.dtype(source)
    held = frame.new(number, value, scope)
    if given.is_float and value.dtype.is_integer:
        _truncate(frame, value, source, held, scope)
        return
    frame.copy(scope, copy_engine(given, value.dtype), held, source)


def copy_engine(given: DType, wanted: DType) -> Engine:
    """Scalar for floats (Vector has more work), GpSimd for exact integers, Vector for the rest."""
    if given.is_float and wanted.is_float:
        return Engine.SCALAR
    exact = given.is_integer and not wanted.is_float
    return Engine.GPSIMD if exact else Engine.VECTOR


def _truncate(frame: Frame, value: Value, source: Held, held: Held, scope: Scope) -> None:
    """Float to integer rounds towards zero: sign(x) * floor(abs(x)), which the copy keeps."""
    size, sign = (frame.scratch(value, scope, DType.F32) for _ in range(2))
    frame.apply(scope, "tensor_unary", Engine.VECTOR, size, (source,), op="abs")
    frame.apply(scope, "tensor_unary", Engine.VECTOR, size, (size,), op="floor")
    frame.apply(scope, "tensor_unary", Engine.VECTOR, sign, (source,), op="sign")
    frame.apply(scope, "tensor_tensor", Engine.VECTOR, size, (size, sign), op="multiply")
    frame.copy(scope, Engine.VECTOR, held, size)
    scope.release(size)
    scope.release(sign)


def _bitcast(frame: Frame, number: int, value: Value, scope: Scope) -> None:
    source = frame.operand(value.inputs[0])
    held = frame.new(number, value, scope)
    frame.apply(scope, "bitcast_copy", frame.engine(source, held), held, (source,))


def _select(frame: Frame, number: int, value: Value, scope: Scope) -> None:
    if frame.domain[value.inputs[0]].op == MASK:
        _masked(frame, number, value, scope)
        return
    sources = [frame.operand(i) for i in value.inputs]
    held = frame.new(number, value, scope)
    frame.apply(scope, "select", frame.engine(*sources[1:], held), held, sources)


def _masked(frame: Frame, number: int, value: Value, scope: Scope) -> None:
    """A select by position; what is still in PSUM leaves it first, as GpSimd does not reach it."""
    pred, kept, filled = value.inputs
    mask, fill = frame.domain[pred], frame.constant(filled)
    direction = mask.attrs["direction"]
    if fill is None:
        kept, fill, direction = filled, frame.constant(kept), NEGATED[direction]
    source, held = frame.operand(kept), frame.new(number, value, scope)
    if frame.builder.tiles[source.tile].space is Space.PSUM:
        frame.copy(scope, Engine.SCALAR, held, source)
        source = held
    axes = [a for a in frame.axes if a in held.strides and scope.extent(a) > 1]
    out, into = (
        scope.on_chip(h, frame.rows(scope), _dims_of(scope, h, axes)) for h in (held, source)
    )
    attrs = _steps(frame, mask, axes, scope)
    scope.add("affine_select", Engine.GPSIMD, out, (into,), direction=direction, fill=fill, **attrs)


def _dims_of(scope: Scope, held: Held, axes: Sequence[int]) -> Dims:
    return tuple((held.strides.get(a, 0), scope.extent(a)) for a in axes) or ((1, 1),)


def _steps(frame: Frame, value: Value, axes: Sequence[int], scope: Scope) -> dict[str, Any]:
    """Attributes of who counts an access map: start, step per partition and per free dim."""
    access = value.access
    steps = tuple(access.stride(a) for a in axes) or (0,)
    across = access.stride(frame.partition)
    return {"start": scope.address(access), "partition_step": across, "steps": steps}


def _clamp(frame: Frame, number: int, value: Value, scope: Scope) -> None:
    low, x, high = value.inputs
    bounds = frame.constant(low), frame.constant(high)
    if None not in bounds:
        source = frame.operand(x)
        held = frame.new(number, value, scope)
        attrs = by_numbers(("maximum", bounds[0]), ("minimum", bounds[1]))
        frame.apply(scope, "tensor_scalar", frame.engine(source, held), held, (source,), **attrs)
        return
    sources = [frame.operand(i) for i in value.inputs]
    held = frame.new(number, value, scope)
    engine = frame.engine(*sources, held)
    frame.apply(scope, "tensor_tensor", engine, held, (sources[1], sources[0]), op="maximum")
    frame.apply(scope, "tensor_tensor", engine, held, (held, sources[2]), op="minimum")


_EMITTERS: dict[str, Emitter] = {
    **dict.fromkeys(BINARY, _binary),
    **dict.fromkeys(ACTIVATIONS, _activation),
    **dict.fromkeys(UNARY, _unary),
    SCALED: _scaled,
    "load": _load,
    "part": _part,
    "join": _join,
    "store": _store,
    "iota": _iota,
    "compare": _binary,
    "convert": _convert,
    "bitcast_convert": _bitcast,
    "select": _select,
    "clamp": _clamp,
}
