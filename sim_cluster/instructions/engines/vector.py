"""Elementwise and reducing instructions of the Vector engine and of GpSimd.

Vector computes in fp32 whatever the operands are; GpSimd keeps integers exact. Bitwise operations
have no fp32 meaning and work on the bits on either engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import Instr
from shardwright.sim_cluster.instructions.engines.registry import (
    Executor,
    Registers,
    Views,
    compute_type,
    executes,
    overwrites,
    reader,
    require,
    same_shape,
    scalar_operand,
    widest,
    writer,
)
from shardwright.sim_cluster.values import elementwise as ew


def _operator(name: str, compute: DType) -> tuple[ew.Function, DType]:
    """(function, type of its result) of a binary elementwise name or a compare direction."""
    if name in ew.COMPARE:
        return ew.COMPARE[name], DType.PRED
    return ew.function(name, compute), compute


def _type_for(instr: Instr, names: tuple[str, ...], srcs: tuple[DType, ...]) -> DType:
    """Compute type; bitwise names keep integers on any engine."""
    if any(n in ew.BITWISE for n in names) and not any(s.is_float for s in srcs):
        return widest(srcs)
    return compute_type(instr.engine, srcs)


@executes("tensor_tensor")
def tensor_tensor(instr: Instr, dst: DType, srcs: tuple[DType, ...]) -> Executor:
    """dst = a op b."""
    same_shape(instr, 0, 1)
    name = instr.attrs["op"]
    compute = _type_for(instr, (name,), srcs)
    fn, result = _operator(name, compute)
    read_a, read_b = (reader(s, compute) for s in srcs)
    if isinstance(fn, np.ufunc) and dst is result is compute is DType.F32:
        return lambda out, views, registers: fn(read_a(views[0]), read_b(views[1]), out=out)
    write = writer(dst, result)
    return lambda out, views, registers: write(out, fn(read_a(views[0]), read_b(views[1])))


def _as_number(fn: ew.Function) -> ew.Function:
    return lambda a, b: fn(a, b).astype(ew.F32)


@executes("tensor_scalar")
def tensor_scalar(instr: Instr, dst: DType, srcs: tuple[DType, ...]) -> Executor:
    """dst = (src op0 s0) op1 s1; the intermediate is not rounded."""
    same_shape(instr, 0)
    attrs = instr.attrs
    names = tuple(attrs[o] for o in ("op0", "op1") if attrs.get(o))
    compute = _type_for(instr, names, srcs)
    stages: list[tuple[ew.Function, bool, Callable[[Views], np.ndarray]]] = []
    result, used = compute, 1
    for stage, name in enumerate(names):
        fn, next_result = _operator(name, result)
        if next_result is DType.PRED and compute is DType.F32 and stage + 1 < len(names):
            fn, next_result = _as_number(fn), compute  # a compare hands on 1.0 or 0.0
        other, used = scalar_operand(instr, srcs, used, attrs.get(f"scalar{stage}"), result)
        stages.append((fn, bool(attrs.get(f"reverse{stage}", False)), other))
        result = next_result
    read, write = reader(srcs[0], compute), writer(dst, result)

    def execute(out: np.ndarray, views: Views, registers: Registers) -> None:
        value = read(views[0])
        for fn, reverse, other in stages:
            value = fn(other(views), value) if reverse else fn(value, other(views))
        write(out, value)

    return execute


@executes("tensor_reduce")
def tensor_reduce(instr: Instr, dst: DType, srcs: tuple[DType, ...]) -> Executor:
    """dst = reduce of the last dims of src, overwriting or combining with dst."""
    assert instr.dst is not None
    given, shape, count = instr.srcs[0].shape, instr.dst.shape, instr.attrs["num_reduced"]
    kept = given[: len(given) - count]
    require(
        0 < count < len(given) and math.prod(kept) == math.prod(shape) and kept[0] == shape[0],
        "SW_L0_SHAPE",
        f"tensor_reduce of the last {count} dims of {list(given)} does not give {list(shape)}",
    )
    kind, axes = instr.attrs["op"], tuple(range(len(given) - count, len(given)))
    compute = _type_for(instr, (kind,), srcs)
    combine = ew.function({"max": "maximum", "min": "minimum"}.get(kind, kind), compute)
    read, read_old, write = reader(srcs[0], compute), reader(dst, compute), writer(dst, compute)
    zero = overwrites(instr.attrs.get("zero_when", ()))

    def execute(out: np.ndarray, views: Views, registers: Registers) -> None:
        value = ew.reduce_array(read(views[0]), kind, axes).reshape(shape)
        write(out, value if zero(registers) else combine(read_old(out), value))

    return execute


@executes("tensor_copy")
def tensor_copy(instr: Instr, dst: DType, srcs: tuple[DType, ...]) -> Executor:
    """dst = src in the type of dst. Vector and Scalar pass integers through fp32 only when one side
    is a float."""
    same_shape(instr, 0)
    write = writer(dst, srcs[0])
    if srcs[0].is_narrow and not dst.is_float:
        read = reader(srcs[0], DType.F32)
        return lambda out, views, registers: write(out, read(views[0]))
    return lambda out, views, registers: write(out, views[0])


@executes("bitcast_copy")
def bitcast_copy(instr: Instr, dst: DType, srcs: tuple[DType, ...]) -> Executor:
    """dst = the bits of src."""
    same_shape(instr, 0)
    require(
        dst.bytes == srcs[0].bytes,
        "SW_L0_SHAPE",
        f"bitcast_copy requires equal widths, got {srcs[0].value} and {dst.value}",
    )
    bits = np.dtype(f"u{dst.bytes}")
    return lambda out, views, registers: np.copyto(out.view(bits), views[0].view(bits))


@executes("select")
def select(instr: Instr, dst: DType, srcs: tuple[DType, ...]) -> Executor:
    """dst = on_true where pred else on_false."""
    same_shape(instr, 0, 1, 2)
    compute = compute_type(instr.engine, srcs[1:])
    read_true, read_false = (reader(s, compute) for s in srcs[1:])
    write = writer(dst, compute)
    return lambda out, views, registers: write(
        out, np.where(views[0] != 0, read_true(views[1]), read_false(views[2]))
    )


@executes("memset")
def memset(instr: Instr, dst: DType, srcs: tuple[DType, ...]) -> Executor:
    """dst = value."""
    value = np.asarray(instr.attrs["value"]).astype(dst.numpy)
    return lambda out, views, registers: np.copyto(out, value)


@executes("tensor_unary")
def tensor_unary(instr: Instr, dst: DType, srcs: tuple[DType, ...]) -> Executor:
    """dst = op(src)."""
    same_shape(instr, 0)
    name = instr.attrs["op"]
    compute = _type_for(instr, (name,), srcs)
    fn, read = ew.function(name, compute), reader(srcs[0], compute)
    write = writer(dst, DType.PRED if name == "is_finite" else compute)
    return lambda out, views, registers: write(out, fn(read(views[0])))
