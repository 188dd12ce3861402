"""`axis_index` ops become inputs: the rank enters a program as a few named scalars, filled by the
loader.

A region cannot capture, so a loop whose body asks for a coordinate carries it unchanged. Values
keep their identity, so tables about the graph stay valid.
"""

from __future__ import annotations

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops import AxisIndexAttrs
from shardwright.compiler.ir.rewrite import Level, with_ops
from shardwright.compiler.ir.types import Graph, Op, Value, tensor_type

Axes = tuple[str, ...]
_PREFIX = "coordinate/"


def coordinate_name(axes: Axes) -> str:
    """The buffer that holds this rank's row-major position over `axes`."""
    return f"{_PREFIX}{'+'.join(axes)}"


def coordinate_axes(name: str) -> Axes:
    """Inverse of `coordinate_name`; no axes for another buffer."""
    return tuple(name.removeprefix(_PREFIX).split("+")) if name.startswith(_PREFIX) else ()


def hoist_coordinates(graph: Graph) -> tuple[Graph, tuple[Axes, ...]]:
    """`graph` with one i32 scalar input appended per distinct `axis_index`, and their axes in
    order.
    """
    found: dict[Axes, Value] = {}
    hoisted = _hoist(graph, found)
    inputs = graph.inputs + tuple(found.values())
    return with_ops(hoisted, hoisted.ops, inputs=inputs), tuple(found)


def _hoist(graph: Graph, found: dict[Axes, Value]) -> Graph:
    """`graph` reading the coordinates in `found`, which grows by those it needs."""
    level = Level()
    for op in graph.ops:
        if isinstance(op.attrs, AxisIndexAttrs):
            level.replace(op.results, (_coordinate(op.attrs.axes, found),))
        else:
            now = level.update(op)
            level.ops.append(_hoist_loop(now, found) if op.regions else now)
    return level.finish(graph)


def _coordinate(axes: Axes, found: dict[Axes, Value]) -> Value:
    """The value that stands for the position over `axes`."""
    if axes not in found:
        found[axes] = Value(tensor_type((), DType.I32))
    return found[axes]


def _hoist_loop(op: Op, found: dict[Axes, Value]) -> Op:
    """The loop, with one more carry per coordinate that its body asks for."""
    inner: dict[Axes, Value] = {}
    (region,) = op.regions
    body = _hoist(region, inner)
    carried = tuple(inner.values())
    outer = tuple(_coordinate(axes, found) for axes in inner)
    new_body = with_ops(body, body.ops, body.outputs + carried, body.inputs + carried)
    results = op.results + tuple(Value(v.type) for v in outer)
    return Op(op.name, op.operands + outer, results, op.attrs, (new_body,), op.loc)
