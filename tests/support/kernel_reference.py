"""An independent reading of `KernelProgram`: whole arrays, one axis per iter dim, addresses written
out as index grids.

Slow and literal on purpose. It shares no code with the L1 executor; the arithmetic comes from the
reference of the graph IR, so that a lowered function can be held equal to its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.opdef import OPS, make_op
from shardwright.compiler.ir.ops import BitcastConvertAttrs, CompareAttrs, ConvertAttrs, ReduceAttrs
from shardwright.compiler.ir.types import Graph, Value, tensor_type
from shardwright.compiler.isa.kernel import KernelProgram, Node, View
from shardwright.compiler.lower.cost_oracle import CostOracle
from shardwright.compiler.lower.function import Signature, lower_to_fixpoint
from shardwright.compiler.lower.rule import Budget
from shardwright.compiler.lower.write_out import Lowered
from shardwright.compiler.options import DEFAULTS, CompileOptions
from shardwright.sim_cluster.values.result import distance

Collective = Callable[..., np.ndarray]
PLAIN = Signature()


def lower_function(
    graph: Graph,
    signature: Signature = PLAIN,
    options: CompileOptions = DEFAULTS,
    oracle: CostOracle | None = None,
    budget: Budget | None = None,
) -> Lowered:
    """A loop-free graph as kernels and tensors."""
    return lower_to_fixpoint(graph, signature, options, oracle, budget).lowered


def run_lowered(
    lowered: Lowered,
    inputs: Sequence[np.ndarray],
    registers: Sequence[int] = (),
    collective: Collective | None = None,
) -> list[np.ndarray]:
    """Outputs of a lowered function; scratch shares one zone that starts as garbage."""
    zone = np.full(lowered.scratch_bytes, 0xA5, np.uint8)
    memory: list[np.ndarray] = []
    for tensor in lowered.tensors:
        size = int(np.prod(tensor.shape, dtype=np.int64))
        if tensor.kind == "scratch":
            part = zone[tensor.offset_bytes : tensor.offset_bytes + size * tensor.dtype.bytes]
            memory.append(part.view(tensor.dtype.numpy))
        elif tensor.kind == "constant":
            memory.append(np.frombuffer(tensor.data, tensor.dtype.numpy))
        elif tensor.alias >= 0:
            memory.append(memory[tensor.alias])
        elif tensor.kind == "output":
            memory.append(
                np.full(size * tensor.dtype.bytes, 0xA5, np.uint8).view(tensor.dtype.numpy)
            )
        else:
            memory.append(np.array(inputs[lowered.inputs.index(len(memory))]).reshape(-1))
    known = dict(zip(lowered.parameters, registers, strict=True))
    flying: dict[int, Callable[[], None]] = {}
    for kernel in lowered.kernels:
        _run_kernel(kernel, memory, known, flying, lowered, collective)
    shapes = [lowered.tensors[t].shape for t in lowered.outputs]
    return [memory[t].reshape(s) for t, s in zip(lowered.outputs, shapes, strict=True)]


def _run_kernel(kernel, memory, registers, flying, lowered, collective) -> None:
    attrs = kernel.attrs
    if kernel.kind == "register_load":
        value = int(memory[attrs["view"].tensor][attrs["view"].offset.value(registers)])
        registers[attrs["register"]] = min(max(value, attrs["low"]), attrs["high"])
    elif kernel.kind == "collective_start":
        source = memory[attrs["source"]].copy()
        memory[attrs["target"]][:] = np.zeros(
            (), memory[attrs["target"]].dtype
        )  # not there before the wait
        call = lowered.collectives[attrs["collective"]]
        target = memory[attrs["target"]]

        def deliver() -> None:
            target[:] = collective(call, source).reshape(-1)

        flying[attrs["collective"]] = deliver
    elif kernel.kind == "collective_wait":
        flying.pop(attrs["collective"])()
    else:
        run_nodes(kernel, memory, registers)


def run_nodes(kernel: KernelProgram, memory: Sequence[np.ndarray], registers) -> None:
    """Execute a compute kernel."""
    values: list[np.ndarray] = []
    for node in kernel.nodes:
        values.append(_node(kernel, node, [values[i] for i in node.inputs], memory, registers))
        if values[-1] is not None:
            want = tuple(n if a in node.iter_dims else 1 for a, n in enumerate(kernel.iter_dims))
            assert values[-1].shape == want, (node, values[-1].shape, want)


def _grid(kernel: KernelProgram, iter_dims: Sequence[int], view: View, registers) -> np.ndarray:
    """Element address of every point of `iter_dims`."""
    assert len(view.strides) == len(kernel.iter_dims)
    total = np.full((1,) * len(kernel.iter_dims), view.offset.value(registers))
    for a in iter_dims:
        shape = [-1 if b == a else 1 for b in range(len(kernel.iter_dims))]
        total = total + (np.arange(kernel.iter_dims[a]) * view.strides[a]).reshape(shape)
    return total


def _load(kernel, node: Node, memory, registers):
    """Elements of a view; zeros where a bounded coordinate leaves its dim."""
    where = _grid(kernel, node.iter_dims, node.attrs["view"], registers)
    inside = np.ones(where.shape, bool)
    for bound in node.attrs.get("bounds", ()):
        indices = np.indices(where.shape, sparse=True)
        steps = zip(indices, bound.strides, strict=True)
        position = sum((i * s for i, s in steps), bound.offset)
        inside = inside & (position >= 0) & (position < bound.size)
    found = memory[node.attrs["view"].tensor][np.where(inside, where, 0)]
    return np.where(inside, found, np.zeros((), found.dtype))


def _node(kernel, node: Node, args, memory, registers):
    attrs = node.attrs
    full = tuple(n if a in node.iter_dims else 1 for a, n in enumerate(kernel.iter_dims))
    if node.op == "load":
        return _load(kernel, node, memory, registers)
    if node.op == "load_indexed":
        rows = np.clip(args[0].astype(np.int64), 0, attrs["rows"] - 1) * attrs["stride"]
        return memory[attrs["view"].tensor][
            _grid(kernel, node.iter_dims, attrs["view"], registers) + rows
        ]
    if node.op == "constant":
        return np.full(full, attrs["value"]).astype(node.dtype.numpy)
    if node.op == "register":
        return np.full(full, attrs["value"].value(registers)).astype(node.dtype.numpy)
    if node.op == "iota":
        count = attrs["start"].value(registers) + attrs["step"] * np.arange(
            kernel.iter_dims[attrs["atom"]]
        )
        return count.reshape(full).astype(node.dtype.numpy)
    if node.op == "contract":
        wide = [a.astype(np.float64) for a in args]
        product = (wide[0] * wide[1]).sum(axis=tuple(attrs["over"]), keepdims=True)
        return product.astype(node.dtype.numpy)
    if node.op == "reduce":
        return _graph_op("reduce", args, ReduceAttrs(attrs["kind"], tuple(attrs["over"]))).reshape(
            full
        )
    if node.op == "store":
        grid = _grid(kernel, node.iter_dims, attrs["view"], registers)
        assert args[0].dtype == memory[attrs["view"].tensor].dtype
        memory[attrs["view"].tensor][grid] = np.broadcast_to(args[0], grid.shape)
        return None
    if node.op == "store_indexed":
        return _store_indexed(kernel, node, args, memory, registers)
    return _elementwise(node, args)


def _store_indexed(kernel, node, args, memory, registers) -> None:
    value, index = args
    target = memory[node.attrs["view"].tensor]
    grid = (
        _grid(kernel, node.iter_dims, node.attrs["view"], registers)
        + index.astype(np.int64) * node.attrs["stride"]
    )
    legal = np.broadcast_to((index >= 0) & (index < node.attrs["rows"]), grid.shape)
    order = list(node.attrs["order"])
    order += [a for a in range(grid.ndim) if a not in order]
    grid, legal, value = (
        np.broadcast_to(a, grid.shape).transpose(order) for a in (grid, legal, value)
    )
    wide = target.astype(np.float64)
    combine = {
        "add": lambda a, b: a + b,
        "multiply": lambda a, b: a * b,
        "max": np.maximum,
        "min": np.minimum,
        "replace": lambda a, b: b,
    }[node.attrs["kind"]]
    for at, update in zip(grid[legal], value[legal].astype(np.float64), strict=True):
        wide[at] = combine(wide[at], update)
    target[:] = wide.astype(target.dtype)


def _elementwise(node: Node, args) -> np.ndarray:
    shape = np.broadcast_shapes(*(a.shape for a in args))
    given = [np.broadcast_to(a, shape) for a in args]
    attrs = None
    if node.op == "compare":
        attrs = CompareAttrs(node.attrs["direction"])
    elif node.op in ("convert", "bitcast_convert"):
        attrs = {"convert": ConvertAttrs, "bitcast_convert": BitcastConvertAttrs}[node.op](
            node.dtype
        )
    result = _graph_op(node.op, given, attrs)
    assert result.dtype == node.dtype.numpy, (node, result.dtype)
    return result


def _graph_op(name: str, args, attrs) -> np.ndarray:
    operands = [Value(tensor_type(a.shape, DType.from_numpy(a.dtype))) for a in args]
    op = make_op(name, operands, attrs)
    return OPS[name].reference(op, list(args))[0]


def check_lowering(
    graph: Graph,
    inputs: Sequence[np.ndarray],
    signature: Signature = PLAIN,
    registers: Sequence[int] = (),
    tolerance: float = 1e-6,
    **options: Any,
) -> Lowered:
    """Lower `graph` and hold it equal to its reference on `inputs` (counter inputs left out)."""
    from shardwright.compiler.ir.reference import evaluate

    lowered = lower_function(graph, signature, **options)
    counters = [i for i, _, _ in signature.parameters]
    rest, count = iter(inputs), iter(registers)
    full = [
        np.asarray(next(count), v.type.dtype.numpy) if i in counters else next(rest)
        for i, v in enumerate(graph.inputs)
    ]
    wanted = evaluate(graph, full)
    given = run_lowered(lowered, inputs, registers)
    for k, (want, have) in enumerate(zip(wanted, given, strict=True)):
        assert want.shape == have.shape and want.dtype == have.dtype, k
        error = distance(have, want)
        assert error <= tolerance, f"output {k}: error {error}"
    return lowered
