"""64-bit floats, which no engine computes: refused where a step makes them, or computed in fp32
where that is asked for.

JAX has none unless `jax_enable_x64` is set. Checked after folding, so that constants which are only
converted do not count. Source: error page NCC_ESPP004, unsupported element types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import CompileError, Diagnostic
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops import BitcastConvertAttrs, ConstantAttrs, ConvertAttrs
from shardwright.compiler.ir.rewrite import Level, with_ops, with_regions
from shardwright.compiler.ir.types import Graph, Op, TensorType, Value, tensor_type
from shardwright.compiler.options import CompileOptions

_ADVICE = (
    "leave jax_enable_x64 (JAX_ENABLE_X64) unset, make it float32 (dtype=jnp.float32) where arrays,"
    " constants and schedules are made, or ask for fp32 with --double-precision f32 (of a job:"
    " --set compiler.double_precision=f32)"
)
_SHOWN = 4  # lines that a warning names


def check_doubles(graph: Graph) -> Graph:
    """The graph as it is. Raises CompileError at the first operation that has or makes a 64-bit
    float, for an argument at its first reader; for one that is only returned, without a line.
    """
    for op in graph.walk():
        for value in (*op.operands, *op.results):
            if _is_double(value):
                raise _refused(op, f"{op.name} requires elements of up to 32 bits")
    for value in graph.outputs:
        if value.type.dtype is DType.F64:
            raise CompileError(
                "NCC_ESPP004",
                f"results require elements of up to 32 bits, got {value.type}",
                hint=_ADVICE,
            )
    return graph


def _refused(op: Op, required: str) -> CompileError:
    wide = next(v.type for v in (*op.operands, *op.results) if _is_double(v))
    return CompileError("NCC_ESPP004", f"{required}, got {wide}", op.loc, _ADVICE)


def doubles_narrowed(graph: Graph, options: CompileOptions) -> list[Diagnostic]:
    """The warning that names the lines of 64-bit floats which `narrow_doubles` makes fp32, where
    options ask for that.
    """
    found = [op for op in graph.walk() if _has_doubles(op)]
    given = [v for v in graph.inputs if _is_double(v)]
    if options.double_precision != "f32" or not (found or given):
        return []
    lines = list(dict.fromkeys(str(op.loc) for op in found if op.loc.line))
    more = f" and {len(lines) - _SHOWN} more lines" if len(lines) > _SHOWN else ""
    where = f": {', '.join(lines[:_SHOWN])}{more}" if lines else ""
    told = ((len(given), "argument"), (len(found), "operation"))
    count = " and ".join(f"{n} {word}{'s' * (n > 1)}" for n, word in told if n)
    message = f"{count} of 64-bit floats in fp32{where}"
    first = next((op.loc for op in found if op.loc.line), None)
    advice = "24 bits of precision in place of 53: compare the results with those of float64"
    return [Diagnostic("SW_FLOAT64", message, first, advice, severity="warning")]


def narrow_doubles(graph: Graph) -> Graph:
    """`graph` with fp32 in place of 64-bit floats, arguments and results too.

    Raises: CompileError for what reads or makes the 64 bits themselves.
    """
    if not any(map(_is_double, graph.inputs)) and not any(map(_has_doubles, graph.walk())):
        return graph
    level = Level()

    def narrow(values: Sequence[Value]) -> tuple[Value, ...]:
        new = tuple(Value(_narrow(v.type)) if _is_double(v) else v for v in values)
        level.replace(values, new)
        return new

    inputs = narrow(graph.inputs)
    for old in graph.ops:
        op = with_regions(level.update(old), tuple(map(narrow_doubles, old.regions)))
        if not _has_doubles(old):
            level.ops.append(op)
        elif isinstance(op.attrs, BitcastConvertAttrs):
            raise _refused(old, f"{op.name} requires a float of up to 32 bits")
        elif isinstance(op.attrs, ConvertAttrs) and _narrow(op.result.type) == op.operands[0].type:
            level.replace(op.results, op.operands)
        else:
            attrs, results = _attributes(op.attrs), narrow(op.results)
            level.ops.append(Op(op.name, op.operands, results, attrs, op.regions, op.loc))
    return with_ops(graph, level.ops, tuple(map(level.now, graph.outputs)), inputs)


def _is_double(value: Value) -> bool:
    return value.type.dtype is DType.F64


def _has_doubles(op: Op) -> bool:
    return any(map(_is_double, (*op.operands, *op.results)))


def _narrow(type: TensorType) -> TensorType:
    return tensor_type(type.shape, DType.F32) if type.dtype is DType.F64 else type


def _attributes(attrs: Any) -> Any:
    """Attributes whose types are fp32. A finite number beyond fp32, such as what masks a score, is
    its largest.
    """
    if isinstance(attrs, ConstantAttrs) and attrs.type.dtype is DType.F64:
        numbers, most = np.frombuffer(attrs.data, np.float64), np.finfo(np.float32).max
        kept = np.where(np.isfinite(numbers), np.clip(numbers, -most, most), numbers)
        return ConstantAttrs(kept.astype(np.float32).tobytes(), _narrow(attrs.type))
    types = {f.name: getattr(attrs, f.name) for f in fields(attrs)} if attrs is not None else {}
    new: dict[str, Any] = {
        name: _narrow(given) for name, given in types.items() if isinstance(given, TensorType)
    }
    new |= {name: DType.F32 for name, given in types.items() if given is DType.F64}
    return replace(attrs, **new) if new else attrs
