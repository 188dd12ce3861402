"""`--enable-mixed-precision-accumulation`: sums of short floats keep fp32 around them.

Around every `reduce` that adds in a narrow type, the elementwise code that feeds it and that reads
it (softmax, layer normalisation) is computed in fp32; what leaves that group is rounded to its
declared type once. Without the option every operation rounds its result as the graph says. Source:
the option's entry of the neuronx-cc command-line reference (on by default since 2.22).
"""

from __future__ import annotations

from compiler.dtypes import DType
from compiler.ir.opdef import OPS, make_op
from compiler.ir.ops import ConvertAttrs
from compiler.ir.types import Graph, Op, Value, tensor_type

_VIEWS = frozenset(("broadcast_in_dim", "reshape", "transpose"))
_TYPE_BOUND = frozenset(("convert", "bitcast_convert", "compare", "is_finite"))


def accumulate_in_fp32(graph: Graph) -> Graph:
    """`graph` (loop-free) with fp32 intermediates around its narrow sums."""
    group = _groups(graph)
    return _Widener(graph, group).run() if group else graph


def _groups(graph: Graph) -> set[Op]:
    """Narrow sums, the elementwise ops that only lead to them, and those that read them."""
    producers = graph.producers()
    group: set[Op] = set()
    waiting = [op for op in graph.ops if _is_narrow_sum(op)]
    while waiting:
        op = waiting.pop()
        if op not in group:
            group.add(op)
            made = (producers.get(v) for v in op.operands)
            waiting += [p for p in made if p is not None and _joins(p)]
    for op in graph.ops:
        reads = any(producers.get(v) in group for v in op.operands)
        if op not in group and reads and _joins(op):
            group.add(op)
    return group


def _is_narrow_sum(op: Op) -> bool:
    return op.name == "reduce" and op.attrs.kind == "add" and op.result.type.dtype.is_narrow


def _joins(op: Op) -> bool:
    """Narrow elementwise arithmetic, views of it, and other reductions of it."""
    wanted = OPS[op.name].elementwise or op.name in _VIEWS or op.name == "reduce"
    return wanted and op.name not in _TYPE_BOUND and op.results[0].type.dtype.is_narrow


class _Widener:
    """The ops of `group` on fp32 values; everybody else sees the declared types."""

    def __init__(self, graph: Graph, group: set[Op]) -> None:
        self.graph = graph
        self.group = group
        self.ops: list[Op] = []
        self.wide: dict[Value, Value] = {}
        self.declared: dict[Value, Value] = {}
        self.made = {v for op in group for v in op.results}

    def run(self) -> Graph:
        """The rewritten graph: same inputs, outputs of the same types."""
        for op in self.graph.ops:
            if op in self.group:
                self._widen(op)
            else:
                operands = tuple(self._as_declared(v) for v in op.operands)
                self.ops.append(Op(op.name, operands, op.results, op.attrs, op.regions, op.loc))
        outputs = tuple(self._as_declared(v) for v in self.graph.outputs)
        return Graph(self.graph.inputs, tuple(self.ops), outputs, self.graph.name)

    def _widen(self, op: Op) -> None:
        operands = tuple(self._as_wide(v) for v in op.operands)
        result = Value(tensor_type(op.result.type.shape, DType.F32))
        self.wide[op.result] = result
        self.ops.append(Op(op.name, operands, (result,), op.attrs, op.regions, op.loc))

    def _as_wide(self, value: Value) -> Value:
        if value not in self.wide and value.type.dtype.is_narrow:
            self.wide[value] = self._convert(value, DType.F32)
        return self.wide.get(value, value)

    def _as_declared(self, value: Value) -> Value:
        """The declared form of a value that the group made, rounded where first needed."""
        if value not in self.made:
            return value
        if value not in self.declared:
            self.declared[value] = self._convert(self.wide[value], value.type.dtype)
        return self.declared[value]

    def _convert(self, value: Value, dtype: DType) -> Value:
        convert = make_op("convert", (value,), ConvertAttrs(dtype))
        self.ops.append(convert)
        return convert.result
