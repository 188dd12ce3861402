"""`--auto-cast`: fp32 operations computed in a shorter type, as neuronx-cc does it.

`matmult` rounds the fp32 operands of contractions and leaves everything else as it is; `all` also
computes every fp32 elementwise operation and reduction in the short type. Inputs and outputs of a
function keep their types, and so does what only moves data or crosses cores. Source of the rules:
the `--auto-cast` entry of the neuronx-cc command-line reference. `relayout` rounds what is
transposed: source, `--fast-math` in the command reference of neuron-cc (fast-relayout).
"""

from __future__ import annotations

from collections.abc import Callable

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import defining
from shardwright.compiler.ir.facts import permutation
from shardwright.compiler.ir.opdef import Kind, make_op
from shardwright.compiler.ir.ops import ConvertAttrs
from shardwright.compiler.ir.rewrite import with_operands, with_ops
from shardwright.compiler.ir.sampled import Casts
from shardwright.compiler.ir.traits import CONTRACTIONS, of
from shardwright.compiler.ir.types import Graph, Op, Value, tensor_type
from shardwright.compiler.options import CompileOptions

CAST_TYPES = {
    "bf16": DType.BF16,
    "fp16": DType.F16,
    "tf32": DType.TF32,
    "fp8_e4m3": DType.F8E4M3,
}
_ARITHMETIC = of(Kind.ELEMENTWISE, Kind.REDUCTION, Kind.WINDOW) - {"bitcast_convert"}
"""Ops that compute on elements; conversions say their type themselves."""


def casts_of(options: CompileOptions) -> Casts | None:
    """What `auto_cast` and `auto_cast_type` round; None when they leave types alone."""
    if options.auto_cast == "none":
        return None
    arithmetic = _ARITHMETIC if options.auto_cast == "all" else frozenset()
    return Casts(CAST_TYPES[options.auto_cast_type], CONTRACTIONS | arithmetic, arithmetic)


def auto_cast(graph: Graph, options: CompileOptions) -> Graph:
    """`graph` (loop-free) computed as `auto_cast`, `auto_cast_type` and `relayout` say."""
    casts, moved = casts_of(options), CAST_TYPES.get(options.relayout)
    if casts is None and moved is None:
        return graph

    def cast(op: Op) -> DType | None:
        if permutation(op) is not None:
            return moved
        return casts.dtype if casts is not None and op.name in casts.operands_of else None

    return _Caster(graph, cast).run()


class _Caster:
    """One graph with its fp32 operations rewritten to the types that `cast` gives, None for those
    that stay.

    `values` holds what an old value is now: an arithmetic result may have become shorter. Whoever
    needs the declared type asks `declared`, whoever computes in the short type asks `short`.
    """

    def __init__(self, graph: Graph, cast: Callable[[Op], DType | None]) -> None:
        self.graph = graph
        self.cast = cast
        self.ops: list[Op] = []
        self.values: dict[Value, Value] = {}
        self.converted: dict[tuple[Value, DType], Value] = {}

    def run(self) -> Graph:
        """The rewritten graph: same inputs, outputs of the same types."""
        for op in self.graph.ops:
            short = self.cast(op)
            if short is not None and any(_is_fp32(v) for v in op.operands):
                self._compute(op, short)
            else:
                declared = tuple(self._as(v, v.type.dtype) for v in op.operands)
                self.ops.append(with_operands(op, declared))
        outputs = tuple(self._as(v, v.type.dtype) for v in self.graph.outputs)
        return with_ops(self.graph, self.ops, outputs)

    def _as(self, value: Value, dtype: DType) -> Value:
        """What `value` is now, as `dtype`."""
        now = self.values.get(value, value)
        if now.type.dtype is dtype:
            return now
        key = (now, dtype)
        if key not in self.converted:
            convert = make_op("convert", (now,), ConvertAttrs(dtype))
            self.ops.append(convert)
            self.converted[key] = convert.result
        return self.converted[key]

    def _compute(self, op: Op, short: DType) -> None:
        """An operation on operands of the short type. Contractions still give their declared
        result, since the sum leaves PSUM in fp32.
        """
        operands = tuple(self._as(v, short if _is_fp32(v) else v.type.dtype) for v in op.operands)
        for result in op.results:
            if _is_fp32(result) and op.name not in CONTRACTIONS:
                self.values[result] = Value(tensor_type(result.type.shape, short))
        results = tuple(self.values.get(r, r) for r in op.results)
        self.ops.append(defining(with_operands(op, operands), results))


def _is_fp32(value: Value) -> bool:
    return value.type.dtype is DType.F32
