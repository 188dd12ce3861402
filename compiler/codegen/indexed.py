"""Rows picked by an index: gathers, and scatter-adds that merge duplicates.

Both work on tiles of up to 128 indices on the partitions. A scatter-add merges equal indices of a
tile with a matmul by their equality matrix, lets only the first of each write, and adds to the rows
as they are in HBM; tiles run in order.
"""

from __future__ import annotations

from collections.abc import Sequence

from compiler.codegen.builder import Held, Scope
from compiler.codegen.reductions import columns
from compiler.codegen.space import Value, Walk
from compiler.codegen.values import Frame, copy_engine
from compiler.diagnostics import CompileError
from compiler.dtypes import DType
from compiler.isa.program import AccessPattern, Engine, Instr
from compiler.isa.program import Space as Memory
from compiler.isa.region import Affine

# fp32 holds every integer up to here exactly (IEEE 754); indices are compared in fp32 after a
# transpose.
_EXACT = 1 << 24


def emit_gather(frame: Frame, number: int, scope: Scope) -> None:
    """dst[p, ...] = row index[p] of the view."""
    value = frame.space.values[number]
    assert value.walk is not None
    index = _index(frame, value.inputs[0], scope)
    held = frame.new(number, value, scope)
    axes = frame.free_axes(value)
    mode = value.attrs.get("mode", "clamp")
    _gather(frame, value, held, index, axes, scope, mode)


def _index(frame: Frame, number: int, scope: Scope) -> Held:
    """The index as one int32 per partition."""
    held = frame.operand(number)
    given = frame.builder.dtype(held)
    if given is DType.I32:
        return held
    result = frame.scratch(frame.space.values[number], scope, DType.I32)
    frame.apply(scope, "tensor_copy", copy_engine(given, DType.I32), result, (held,))
    return result


def _gather(
    frame: Frame,
    value: Value,
    held: Held,
    index: Held,
    axes: Sequence[int],
    scope: Scope,
    mode: str,
) -> None:
    target, source = _rows(frame, value, held, axes, scope)
    picked = scope.on_chip(index, frame.rows(scope), ((1, 1),))
    attrs = {"row_stride": value.attrs["stride"], "rows": value.attrs["rows"], "mode": mode}
    scope.add("dma_gather", Engine.DMA_IN, target, (source, picked), **attrs)


def _rows(
    frame: Frame, value: Value, held: Held, axes: Sequence[int], scope: Scope
) -> tuple[AccessPattern, AccessPattern]:
    """(on-chip pattern, HBM pattern of one row) for an indexed transfer."""
    assert value.walk is not None
    walk = value.walk
    free = Walk(
        walk.offset, {a: s for a, s in walk.strides.items() if a != frame.partition}, walk.tensor
    )
    hbm, chip = scope.transfer(free, held, frame.rows(scope), None, axes)
    return chip, hbm


def emit_scatter_add(frame: Frame, number: int, scope: Scope) -> None:
    """rows[index[p]] += value[p] for one tile of indices, duplicates included."""
    value = frame.space.values[number]
    assert value.walk is not None
    _require_exact(frame, value)
    source, index_number = value.inputs
    index = _index(frame, index_number, scope)
    axes = [a for a in frame.axes if value.walk.stride(a)]
    data = _dense(frame, source, axes, scope)
    equal, target = _merge_matrix(frame, value, index, frame.builder.dtype(data), scope)
    tensor_type = frame.builder.tensors[value.walk.tensor].dtype
    rows, width = frame.rows(scope), scope.elements(axes)
    old = scope.hold(scope.tile("rows", rows, width, tensor_type), axes)
    _gather(frame, value, old, index, axes, scope, "fill")
    _add_merged(frame, equal, data, old, width, scope)
    chip, hbm = _rows(frame, value, old, axes, scope)
    picked = scope.on_chip(target, rows, ((1, 1),))
    attrs = {"row_stride": value.attrs["stride"], "rows": value.attrs["rows"]}
    scope.body.append(Instr("dma_scatter", Engine.DMA_OUT, hbm, (chip, picked), attrs))


def _require_exact(frame: Frame, value: Value) -> None:
    data = frame.space.values[value.inputs[0]]
    if value.attrs["rows"] > _EXACT or not data.dtype.is_float:
        raise CompileError(
            "SW_CODEGEN_SCATTER",
            f"region {frame.space.name}: scatter-add requires float rows and at most {_EXACT} of"
            f" them, got {value.attrs['rows']} rows of {data.dtype.value}",
        )


def _dense(frame: Frame, number: int, axes: Sequence[int], scope: Scope) -> Held:
    """The data with an element at every point of `axes`, as the matmul reads it."""
    held, value = frame.operand(number), frame.space.values[number]
    if all(a in value.atoms or scope.extent(a) == 1 for a in axes) and number in frame.held:
        return held
    tile = scope.tile("dense", frame.rows(scope), scope.elements(axes), value.dtype)
    full = scope.hold(tile, axes)
    frame.apply(scope, "tensor_copy", Engine.VECTOR, full, (held,))
    return full


def _merge_matrix(
    frame: Frame, value: Value, index: Held, dtype: DType, scope: Scope
) -> tuple[Held, Held]:
    """(equality matrix in `dtype`, index with all but the first of equal ones moved out of
    range).
    """
    rows = frame.rows(scope)
    square = ((1, rows),)

    def tile(name: str, elements: int, kind: DType) -> Held:
        return Held(scope.tile(name, rows, elements, kind), {})

    def vector(
        opcode: str,
        out: Held,
        dims: tuple[tuple[int, int], ...],
        *srcs: AccessPattern,
        **attrs: object,
    ) -> None:
        scope.add(opcode, Engine.VECTOR, scope.on_chip(out, rows, dims), srcs, **attrs)

    wide, equal, earlier = (tile(n, rows, DType.F32) for n in ("wide", "equal", "earlier"))
    vector("tensor_copy", wide, square, scope.on_chip(index, rows, ((0, rows),)))
    turned = scope.on_chip(Held(scope.psum("turned"), {}), rows, square)
    scope.add("transpose", Engine.TENSOR, turned, (scope.on_chip(wide, rows, square),))
    matrix = scope.on_chip(equal, rows, square)
    vector("tensor_tensor", equal, square, scope.on_chip(wide, rows, square), turned, op="EQ")
    order = scope.on_chip(_below_diagonal(frame), rows, square)
    vector("tensor_tensor", earlier, square, matrix, order, op="multiply")
    count, target = tile("count", 1, DType.F32), tile("target", 1, DType.I32)
    attrs = {"op": "add", "num_reduced": 1, "zero_when": ()}
    source = scope.on_chip(earlier, rows, ((1, 1), (1, rows)))
    vector("tensor_reduce", count, ((1, 1),), source, **attrs)
    # An index that has an equal one before it moves out of range, hence it is dropped.
    _move_out(value, index, count, target, rows, scope)
    if dtype is not DType.F32:
        narrow = tile("narrow", rows, dtype)
        vector("tensor_copy", narrow, square, matrix)
        equal = narrow
    return equal, target


def _move_out(
    value: Value, index: Held, count: Held, target: Held, rows: int, scope: Scope
) -> None:
    one = ((1, 1),)
    scope.add(
        "tensor_scalar",
        Engine.VECTOR,
        scope.on_chip(count, rows, one),
        (scope.on_chip(count, rows, one),),
        op0="GT",
        scalar0=0.0,
        reverse0=False,
        op1="multiply",
        scalar1=2.0 * _EXACT,
        reverse1=False,
    )
    srcs = tuple(scope.on_chip(h, rows, one) for h in (index, count))
    scope.add("tensor_tensor", Engine.VECTOR, scope.on_chip(target, rows, one), srcs, op="add")


def _below_diagonal(frame: Frame) -> Held:
    """[P, P] fp32: 1 where column < partition. Made once per region."""
    builder = frame.builder
    size = builder.limits.partitions
    held = builder.filled(0.0, DType.F32, size, part="below diagonal")
    made = ("made", held.tile)
    if made not in builder.once:
        builder.once.add(made)
        out = AccessPattern(Memory.SBUF, held.tile, Affine(), ((1, size), (1, size)))
        ramp = {"start": Affine(), "partition_step": -1, "steps": (1,)}
        builder.prefix.append(Instr("iota", Engine.GPSIMD, out, (), ramp))
        attrs = {"op0": "LT", "scalar0": 0.0, "reverse0": False}
        rest = {"op1": None, "scalar1": None, "reverse1": False}
        builder.prefix.append(Instr("tensor_scalar", Engine.VECTOR, out, (out,), attrs | rest))
    return held


def _add_merged(frame: Frame, equal: Held, data: Held, old: Held, width: int, scope: Scope) -> None:
    """old += equal^T @ data, in blocks of the moving width."""
    rows = frame.rows(scope)
    for inner, first, count in columns(scope, width, frame.builder.limits.moving_max):
        sums = inner.on_chip(Held(inner.psum("merged"), {}), rows, ((1, count),))
        moving = inner.on_chip(data, rows, ((1, count),), first)
        stationary = inner.on_chip(equal, rows, ((1, rows),))
        inner.add("matmul", Engine.TENSOR, sums, (stationary, moving), zero_when=())
        target = inner.on_chip(old, rows, ((1, count),), first)
        inner.add("tensor_tensor", Engine.VECTOR, target, (target, sums), op="add")
