"""Functions and programs as columns: the sections of a NEFF.

Every repeated thing (access pattern, affine, attribute set, string) is stored once in a pool and
named by index, so that a rolled program costs a few kilobytes and loads without a Python object per
byte. Encoding is deterministic: pools fill in program order. `decode.py` is the exact inverse.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgpack
import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.columns import END, INSTRUCTION, LOOP
from shardwright.compiler.isa.limits import walk
from shardwright.compiler.isa.program import (
    AccessPattern,
    Call,
    CollectiveCall,
    Engine,
    Function,
    Instr,
    Loop,
    Program,
    Region,
    Repeat,
    Space,
    Tile,
)
from shardwright.compiler.isa.region import Affine, Bound, Node, RegionProgram, Tensor, View

Sections = dict[str, "np.ndarray[Any, Any] | bytes"]
T = TypeVar("T", bound=Hashable)

DTYPES = tuple(DType)
ENGINES = tuple(Engine)
SPACES = tuple(Space)
AFFINE_EXT, VIEW_EXT, DTYPE_EXT, BOUND_EXT = 1, 2, 3, 4


class Pool(Generic[T]):
    """Distinct items in first-use order."""

    def __init__(self) -> None:
        self.items: dict[T, int] = {}

    def add(self, item: T) -> int:
        """Index of `item`, new or known."""
        return self.items.setdefault(item, len(self.items))


class Ragged:
    """Rows of integers of varying length: flat values and row ends."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self.ends: list[int] = []

    def append(self, row: Iterable[int]) -> None:
        """Add one row."""
        self.values.extend(row)
        self.ends.append(len(self.values))

    def store(self, name: str, out: Sections) -> None:
        """Write the two columns."""
        out[name] = np.asarray(self.values, np.int64)
        out[f"{name}.end"] = np.asarray(self.ends, np.int64)


def _ext(value: Any) -> Any:
    if isinstance(value, Affine):
        return msgpack.ExtType(AFFINE_EXT, pack_attrs([value.const, value.terms]))
    if isinstance(value, View):
        return msgpack.ExtType(VIEW_EXT, pack_attrs([value.tensor, value.offset, value.strides]))
    if isinstance(value, Bound):
        fields = [value.offset, value.size, value.unit, value.strides]
        return msgpack.ExtType(BOUND_EXT, pack_attrs(fields))
    if isinstance(value, DType):
        return msgpack.ExtType(DTYPE_EXT, value.value.encode())
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(
        f"attribute values are plain data, Affine, View, Bound or DType, got {type(value)}"
    )


def pack_attrs(value: Any) -> bytes:
    """Plain data (with Affine, View and DType inside) as msgpack bytes."""
    packed: bytes = msgpack.packb(value, default=_ext)
    return packed


def _sorted_attrs(attrs: Mapping[str, Any]) -> bytes:
    return pack_attrs({k: attrs[k] for k in sorted(attrs)})


def pack_region(program: RegionProgram) -> bytes:
    """What a region means, as bytes that are equal for equal regions, NaN included."""
    nodes = [[n.op, n.inputs, n.atoms, n.dtype, _sorted_attrs(n.attrs)] for n in program.nodes]
    head = [program.kind, program.name, program.atoms, program.loc, _sorted_attrs(program.attrs)]
    return pack_attrs([*head, nodes])


class _Encoder:
    """Pools and columns of one function."""

    def __init__(self) -> None:
        self.strings: Pool[str] = Pool()
        self.attrs: Pool[bytes] = Pool()
        self.affines: Pool[Affine] = Pool()
        self.patterns: Pool[AccessPattern] = Pool()
        self.code = Ragged()  # kind, then operands
        self.tiles = Ragged()
        self.nodes = Ragged()
        self.regions = Ragged()
        self.borders = Ragged()  # per region: queue and how far back, in turn, of every border
        self.behind = (
            Ragged()
        )  # per region: 0 at a barrier, else 1; instruction and border, in turn
        self.row_sums = Ragged()  # per region: instruction and second destination, in turn
        self.constants = bytearray()
        self.counts = [0, 0, 0]  # rows so far of code, tiles, nodes

    def body(self, body: Sequence[Instr | Loop]) -> None:
        for item in body:
            if isinstance(item, Loop):
                self.code.append((LOOP, item.register, item.trip))
                self.body(item.body)
                self.code.append((END,))
            else:
                self.code.append(self.instr(item))

    def instr(self, i: Instr) -> tuple[int, ...]:
        return (
            INSTRUCTION,
            self.strings.add(i.opcode),
            ENGINES.index(i.engine),
            self.attrs.add(_sorted_attrs(i.attrs)),
            -1 if i.dst is None else self.patterns.add(i.dst),
            len(i.srcs),
            len(i.waits),
            *(self.patterns.add(s) for s in i.srcs),
            *i.waits,
            *i.signals,
        )

    def tile(self, t: Tile) -> tuple[int, ...]:
        return (
            self.strings.add(t.name),
            SPACES.index(t.space),
            t.partitions,
            t.elements,
            DTYPES.index(t.dtype),
            t.slots,
            t.loop,
            t.address,
        )

    def node(self, n: Node) -> tuple[int, ...]:
        head = (
            self.strings.add(n.op),
            DTYPES.index(n.dtype),
            self.attrs.add(_sorted_attrs(n.attrs)),
        )
        return (*head, len(n.inputs), *n.inputs, *n.atoms)

    def region(self, r: Region) -> None:
        program = r.program
        for tile in r.tiles:
            self.tiles.append(self.tile(tile))
        for node in program.nodes:
            self.nodes.append(self.node(node))
        self.body(r.body)
        self.regions.append(
            (
                self.strings.add(program.kind),
                self.strings.add(program.name),
                self.attrs.add(_sorted_attrs(program.attrs)),
                program.loc,
                len(self.tiles.ends),
                len(self.nodes.ends),
                len(self.code.ends),
                len(program.atoms),
                *program.atoms,
                *r.tokens,
            )
        )
        borders = r.borders or ()
        self.borders.append(x for b in borders for x in (ENGINES.index(b.queue), b.back))
        waits = (x for n, i in enumerate(walk(r.body)) for b in i.borders for x in (n, b))
        self.behind.append((int(r.borders is not None), *waits))
        sums = ((n, i.row_sum) for n, i in enumerate(walk(r.body)) if i.row_sum is not None)
        self.row_sums.append(x for n, p in sums for x in (n, self.patterns.add(p)))

    def tensor(self, t: Tensor) -> tuple[int, ...]:
        start = len(self.constants)
        self.constants += t.data
        head = (self.strings.add(t.name), self.strings.add(t.kind), DTYPES.index(t.dtype))
        return (*head, t.alias, t.offset_bytes, start, len(t.data), *t.shape)

    def pattern_row(self, p: AccessPattern) -> tuple[int, ...]:
        dims = (x for dim in p.dims for x in dim)
        return (SPACES.index(p.space), p.buffer, self.affines.add(p.offset), p.start, *dims)


def encode_function(function: Function) -> Sections:
    """The sections of one function."""
    enc = _Encoder()
    out: Sections = {}
    tensors = Ragged()
    for tensor in function.tensors:
        tensors.append(enc.tensor(tensor))
    for subgraph in function.subgraphs:
        for region in subgraph:
            enc.region(region)
    patterns = Ragged()
    for pattern in enc.patterns.items:
        patterns.append(enc.pattern_row(pattern))
    affines = Ragged()
    for affine in enc.affines.items:
        affines.append((affine.const, *(x for term in affine.terms for x in term)))
    columns = {
        "tensors": tensors,
        "code": enc.code,
        "tiles": enc.tiles,
        "nodes": enc.nodes,
        "regions": enc.regions,
        "patterns": patterns,
        "affines": affines,
    }
    for name, column in columns.items():
        column.store(name, out)
    if function.has_borders:
        enc.borders.store("borders", out)
        enc.behind.store("behind", out)
    if enc.row_sums.values:
        enc.row_sums.store("row_sums", out)
    if len(function.subgraphs) > 1:
        after = [region.after for subgraph in function.subgraphs for region in subgraph]
        out["after"] = np.asarray(after, np.int64)
    out["constants"] = bytes(enc.constants)
    out["strings"] = pack_attrs(list(enc.strings.items))
    out["attrs"] = pack_attrs(list(enc.attrs.items))
    out["function"] = pack_attrs(
        {
            "name": function.name,
            "target": function.target,
            "inputs": function.inputs,
            "outputs": function.outputs,
            "parameters": function.parameters,
            "num_registers": function.num_registers,
            "scratch_bytes": function.scratch_bytes,
            "collectives": [_collective_row(c) for c in function.collectives],
        }
    )
    return out


def _collective_row(c: CollectiveCall) -> list[Any]:
    row = [c.kind, c.axes, c.dtype, c.source_shape, c.reduction, c.stream, c.name, c.pairs]
    return [*row, c.parts] if c.parts else row


def _step_row(step: Call | Repeat) -> list[Any]:
    if isinstance(step, Call):
        row = ["call", step.function, step.inputs, step.outputs, step.parameters]
        return [*row, step.scratch]
    return ["repeat", step.register, step.trip, [_step_row(s) for s in step.steps]]


def encode_program(program: Program) -> Sections:
    """The sections of one program: its table, and `f<k>/...` for every function."""
    out: Sections = {}
    out["program"] = pack_attrs(
        {
            "name": program.name,
            "target": program.target,
            "buffers": [
                [b.name, b.shape, b.dtype, b.kind, b.offset_bytes] for b in program.buffers
            ],
            "inputs": program.inputs,
            "outputs": program.outputs,
            "steps": [_step_row(s) for s in program.steps],
            "arena_bytes": program.arena_bytes,
            "metadata": {k: program.metadata[k] for k in sorted(program.metadata)},
            "num_functions": len(program.functions),
        }
    )
    out["locations"] = pack_attrs(list(program.locations))
    for k, function in enumerate(program.functions):
        out.update({f"f{k}/{name}": data for name, data in encode_function(function).items()})
    return out
