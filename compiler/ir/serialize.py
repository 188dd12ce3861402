"""Graphs as bytes: msgpack tables, versioned and deterministic.

Types, attributes, op names and locations are interned in tables in order of first use, and values
are numbered per graph level (inputs first, then results in program order), so equal graphs give
equal bytes. Without locations the bytes are what unit keys hash. Loading checks the form only;
`verify` checks the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import msgpack

from shardwright.compiler.diagnostics import UNKNOWN_LOC, LoadError, Loc
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.opdef import LATER, OPS
from shardwright.compiler.ir.types import Graph, Op, TensorType, Value, tensor_type
from shardwright.compiler.support.fields import check_fields

Entry = TypeVar("Entry", bound=Hashable)

FORMAT = "shardwright-graph"
VERSION = 1

_DTYPE_EXT = 1
_TYPE_EXT = 2


def attrs_classes() -> dict[str, type]:
    """Attrs classes of all ops by class name."""
    return {d.attrs.__name__: d.attrs for d in OPS.values() if d.attrs is not None}


Table = dict[Entry, int]
"""Distinct entries, numbered in order of first use."""


def _number(table: Table[Entry], entry: Entry) -> int:
    return table.setdefault(entry, len(table))


@dataclass(slots=True)
class _Writer:
    """The tables of one dump."""

    with_locs: bool
    names: Table[str] = field(default_factory=dict)
    types: Table[TensorType] = field(default_factory=dict)
    attrs: Table[tuple[str, Any]] = field(default_factory=dict)
    locs: Table[Loc] = field(default_factory=dict)

    def graph(self, graph: Graph) -> list[Any]:
        """[name, input types, ops, output values]."""
        numbers = {value: i for i, value in enumerate(graph.inputs)}
        inputs = [_number(self.types, v.type) for v in graph.inputs]
        ops = [self.op(op, numbers) for op in graph.ops]
        return [graph.name, inputs, ops, [numbers[v] for v in graph.outputs]]

    def op(self, op: Op, numbers: dict[Value, int]) -> list[Any]:
        """[name, operand values, result types, attrs, regions, location], -1 for none."""
        attrs = -1 if op.attrs is None else _number(self.attrs, (type(op.attrs).__name__, op.attrs))
        row = [
            _number(self.names, op.name),
            [numbers[v] for v in op.operands],
            [_number(self.types, v.type) for v in op.results],
            attrs,
            [self.graph(r) for r in op.regions],
            _number(self.locs, op.loc) if self.with_locs and op.loc != UNKNOWN_LOC else -1,
        ]
        for value in op.results:
            numbers[value] = len(numbers)
        return row

    def document(self, root: list[Any]) -> dict[str, Any]:
        """Everything, tables first."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "names": list(self.names),
            "types": list(self.types),
            "attrs": [[name, *_field_values(a)] for name, a in self.attrs],
            "locs": [[x.file, x.line, x.scope] for x in self.locs],
            "graph": root,
        }


def _field_values(attrs: Any) -> list[Any]:
    """The values of the fields, without later ones at the end that hold their defaults."""
    values = [getattr(attrs, f.name) for f in fields(attrs)]
    for f in reversed(fields(attrs)):
        if f.metadata != LATER or values[-1] != f.default:
            break
        values.pop()
    return values


def _with_values(attrs: type, values: Sequence[Any]) -> Any:
    """The attrs of `_field_values`. Raises ValueError for another number of fields."""
    known = fields(attrs)
    least = sum(f.metadata != LATER for f in known)
    if not least <= len(values) <= len(known):
        raise ValueError(f"{attrs.__name__} has {len(known)} fields, got {len(values)}")
    return attrs(**{f.name: value for f, value in zip(known, values, strict=False)})


def dump(graph: Graph, with_locs: bool) -> bytes:
    """`graph` as bytes; without locations, moved source lines change nothing.

    Raises: KeyError when an op uses a value that is not defined before it.
    """
    writer = _Writer(with_locs)
    root = writer.graph(graph)
    packed = msgpack.packb(writer.document(root), default=_pack_leaf, use_bin_type=True)
    return bytes(packed)


def _pack_leaf(leaf: object) -> msgpack.ExtType:
    if isinstance(leaf, DType):
        return msgpack.ExtType(_DTYPE_EXT, leaf.value.encode())
    if isinstance(leaf, TensorType):
        body = msgpack.packb([leaf.dtype.value, *leaf.shape])
        return msgpack.ExtType(_TYPE_EXT, body)
    raise TypeError(f"an attribute of class {type(leaf).__name__} has no serialised form")


def _unpack_leaf(code: int, body: bytes) -> object:
    if code == _DTYPE_EXT:
        return DType(body.decode())
    if code == _TYPE_EXT:
        dtype, *shape = msgpack.unpackb(body)
        return tensor_type(tuple(shape), DType(dtype))
    raise ValueError(f"unknown extension {code}")


def load(data: bytes, place: Callable[[Loc], Loc] = lambda loc: loc) -> Graph:
    """The graph of `dump`; `place` makes locations of those in `data`. Raises LoadError for
    foreign, damaged or newer data."""
    try:
        document = msgpack.unpackb(data, use_list=False, ext_hook=_unpack_leaf)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise LoadError(
            "SW_GRAPH_DAMAGED", f"a serialised graph cannot be read: {error}"
        ) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise LoadError("SW_GRAPH_FORMAT", "a serialised graph requires the graph format header")
    if document.get("version") != VERSION:
        raise LoadError(
            "SW_GRAPH_VERSION",
            f"reading a graph requires version {VERSION}, got {document.get('version')}",
            hint="compile again with this version of Shardwright",
        )
    try:
        return _Reader(document, place).graph(document["graph"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise LoadError("SW_GRAPH_DAMAGED", f"a serialised graph is damaged: {error!r}") from error


class _Reader:
    """The tables of one load."""

    def __init__(self, document: dict[str, Any], place: Callable[[Loc], Loc]) -> None:
        classes = attrs_classes()
        self.names = document["names"]
        self.types = document["types"]
        self.locs = [place(Loc(*row)) for row in document["locs"]]
        self.attrs = [_with_values(classes[name], values) for name, *values in document["attrs"]]
        for attrs in self.attrs:
            check_fields(attrs)

    def graph(self, row: tuple[Any, ...]) -> Graph:
        """A graph level from its row."""
        name, input_types, op_rows, outputs = row
        values = [self.value(t) for t in input_types]
        inputs = tuple(values)
        ops = tuple(self.op(r, values) for r in op_rows)
        return Graph(inputs, ops, tuple(_pick(values, v) for v in outputs), name)

    def value(self, number: int) -> Value:
        """A new value of a numbered type."""
        return Value(_pick(self.types, number))

    def op(self, row: tuple[Any, ...], values: list[Value]) -> Op:
        """An op from its row; its results join `values`."""
        name, operands, result_types, attrs, regions, loc = row
        results = tuple(self.value(t) for t in result_types)
        op = Op(
            _pick(self.names, name),
            tuple(_pick(values, v) for v in operands),
            results,
            None if attrs == -1 else _pick(self.attrs, attrs),
            tuple(self.graph(r) for r in regions),
            UNKNOWN_LOC if loc == -1 else _pick(self.locs, loc),
        )
        values.extend(results)
        return op


def _pick(table: Any, number: int) -> Any:
    """Entry `number`; a negative number is damage, not Python's last entry."""
    if number < 0:
        raise IndexError(number)
    return table[number]
