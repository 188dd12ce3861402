"""Functions and programs as columns: the sections of a NEFF.

Every repeated thing (access pattern, affine, attribute set, string) is stored once in a pool and
named by index, so that a rolled program costs a few kilobytes and loads without a Python object per
byte. Encoding is deterministic: pools fill in program order. `decode_*` is the exact inverse; files
are checked by `compiler/neff` before they come here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Generic, TypeVar

import msgpack
import numpy as np

from compiler.dtypes import DType
from compiler.isa.limits import walk
from compiler.isa.program import (
    AccessPattern,
    Border,
    Call,
    CollectiveCall,
    Engine,
    Function,
    Instr,
    Loop,
    Program,
    ProgramBuffer,
    Region,
    Repeat,
    Space,
    Tile,
)
from compiler.isa.region import Affine, Bound, Node, RegionProgram, Tensor, View

Sections = dict[str, "np.ndarray[Any, Any] | bytes"]
T = TypeVar("T", bound=Hashable)

_DTYPES = tuple(DType)
_ENGINES = tuple(Engine)
_SPACES = tuple(Space)
_INSTR, _LOOP, _END = 0, 1, 2
_AFFINE_EXT, _VIEW_EXT, _DTYPE_EXT, _BOUND_EXT = 1, 2, 3, 4


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


def read_ragged(name: str, sections: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """The rows of a `Ragged`."""
    values = np.asarray(sections[name]).tolist()
    ends = np.asarray(sections[f"{name}.end"]).tolist()
    return [tuple(values[start:end]) for start, end in pairwise([0, *ends])]


def _ext(value: Any) -> Any:
    if isinstance(value, Affine):
        return msgpack.ExtType(_AFFINE_EXT, pack_attrs([value.const, value.terms]))
    if isinstance(value, View):
        return msgpack.ExtType(_VIEW_EXT, pack_attrs([value.tensor, value.offset, value.strides]))
    if isinstance(value, Bound):
        fields = [value.offset, value.size, value.unit, value.strides]
        return msgpack.ExtType(_BOUND_EXT, pack_attrs(fields))
    if isinstance(value, DType):
        return msgpack.ExtType(_DTYPE_EXT, value.value.encode())
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(
        f"attribute values are plain data, Affine, View, Bound or DType, got {type(value)}"
    )


def _unext(code: int, data: bytes) -> Any:
    if code == _AFFINE_EXT:
        return Affine(*unpack_attrs(data))
    if code == _VIEW_EXT:
        return View(*unpack_attrs(data))
    if code == _BOUND_EXT:
        return Bound(*unpack_attrs(data))
    return DType(data.decode())


def pack_attrs(value: Any) -> bytes:
    """Plain data (with Affine, View and DType inside) as msgpack bytes."""
    packed: bytes = msgpack.packb(value, default=_ext)
    return packed


def unpack_attrs(data: bytes) -> Any:
    """Inverse of `pack_attrs`; sequences come back as tuples."""
    return msgpack.unpackb(data, ext_hook=_unext, use_list=False)


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
                self.code.append((_LOOP, item.register, item.trip))
                self.body(item.body)
                self.code.append((_END,))
            else:
                self.code.append(self.instr(item))

    def instr(self, i: Instr) -> tuple[int, ...]:
        return (
            _INSTR,
            self.strings.add(i.opcode),
            _ENGINES.index(i.engine),
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
            _SPACES.index(t.space),
            t.partitions,
            t.elements,
            _DTYPES.index(t.dtype),
            t.slots,
            t.loop,
            t.address,
        )

    def node(self, n: Node) -> tuple[int, ...]:
        head = (
            self.strings.add(n.op),
            _DTYPES.index(n.dtype),
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
        self.borders.append(x for b in borders for x in (_ENGINES.index(b.queue), b.back))
        waits = (x for n, i in enumerate(walk(r.body)) for b in i.borders for x in (n, b))
        self.behind.append((int(r.borders is not None), *waits))
        sums = ((n, i.row_sum) for n, i in enumerate(walk(r.body)) if i.row_sum is not None)
        self.row_sums.append(x for n, p in sums for x in (n, self.patterns.add(p)))

    def tensor(self, t: Tensor) -> tuple[int, ...]:
        start = len(self.constants)
        self.constants += t.data
        head = (self.strings.add(t.name), self.strings.add(t.kind), _DTYPES.index(t.dtype))
        return (*head, t.alias, t.offset_bytes, start, len(t.data), *t.shape)

    def pattern_row(self, p: AccessPattern) -> tuple[int, ...]:
        dims = (x for dim in p.dims for x in dim)
        return (_SPACES.index(p.space), p.buffer, self.affines.add(p.offset), p.start, *dims)


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


class _Decoder:
    """Reads the sections of one function."""

    def __init__(self, sections: Mapping[str, Any]) -> None:
        self.sections = sections
        self.strings: tuple[str, ...] = unpack_attrs(bytes(sections["strings"]))
        self.attrs = [unpack_attrs(a) for a in unpack_attrs(bytes(sections["attrs"]))]
        self.affines = [
            Affine(row[0], tuple(zip(row[1::2], row[2::2], strict=True)))
            for row in read_ragged("affines", sections)
        ]
        self.patterns = [self.pattern(row) for row in read_ragged("patterns", sections)]
        self.code = read_ragged("code", sections)
        self.tiles = [self.tile(row) for row in read_ragged("tiles", sections)]
        self.nodes = [self.node(row) for row in read_ragged("nodes", sections)]

    def pattern(self, row: tuple[int, ...]) -> AccessPattern:
        space, buffer, offset, start, *dims = row
        pairs = tuple(zip(dims[::2], dims[1::2], strict=True))
        return AccessPattern(_SPACES[space], buffer, self.affines[offset], pairs, start)

    def tile(self, row: tuple[int, ...]) -> Tile:
        name, space, partitions, elements, dtype, slots, loop, address = row
        return Tile(
            self.strings[name],
            _SPACES[space],
            partitions,
            elements,
            _DTYPES[dtype],
            slots,
            loop,
            address,
        )

    def node(self, row: tuple[int, ...]) -> Node:
        op, dtype, attrs, count, *rest = row
        return Node(
            self.strings[op],
            tuple(rest[:count]),
            tuple(rest[count:]),
            _DTYPES[dtype],
            self.attrs[attrs],
        )

    def instr(self, row: tuple[int, ...]) -> Instr:
        _, opcode, engine, attrs, dst, sources, waits, *rest = row
        return Instr(
            self.strings[opcode],
            _ENGINES[engine],
            None if dst < 0 else self.patterns[dst],
            tuple(self.patterns[s] for s in rest[:sources]),
            self.attrs[attrs],
            tuple(rest[sources : sources + waits]),
            tuple(rest[sources + waits :]),
        )

    def body(self, rows: Sequence[tuple[int, ...]]) -> list[Instr | Loop]:
        stack: list[list[Instr | Loop]] = [[]]
        for row in rows:
            if row[0] == _INSTR:
                stack[-1].append(self.instr(row))
            elif row[0] == _LOOP:
                loop = Loop(row[1], row[2], [])
                stack[-1].append(loop)
                stack.append(loop.body)
            else:
                stack.pop()
        return stack[0]

    def regions(self) -> list[Region]:
        out: list[Region] = []
        tile0 = node0 = code0 = 0
        for row in read_ragged("regions", self.sections):
            kind, name, attrs, loc, tile1, node1, code1, num_atoms, *rest = row
            program = RegionProgram(
                self.strings[kind],
                self.strings[name],
                tuple(rest[:num_atoms]),
                tuple(self.nodes[node0:node1]),
                self.attrs[attrs],
                loc,
            )
            body = self.body(self.code[code0:code1])
            out.append(Region(program, self.tiles[tile0:tile1], body, tuple(rest[num_atoms:])))
            tile0, node0, code0 = tile1, node1, code1
        self._add_borders(out)
        self._add_row_sums(out)
        return out

    def _add_row_sums(self, regions: Sequence[Region]) -> None:
        """A file without the column has no instruction with two destinations."""
        if "row_sums" not in self.sections:
            return
        for region, row in zip(regions, read_ragged("row_sums", self.sections), strict=True):
            code = list(walk(region.body))
            for number, pattern in zip(row[::2], row[1::2], strict=True):
                code[number].row_sum = self.patterns[pattern]

    def _add_borders(self, regions: Sequence[Region]) -> None:
        """A file without the columns has barriers between all regions."""
        if "borders" not in self.sections:
            return
        rows = (read_ragged(name, self.sections) for name in ("borders", "behind"))
        for region, borders, (begins_at_once, *behind) in zip(regions, *rows, strict=True):
            if not begins_at_once:
                continue
            pairs = zip(borders[::2], borders[1::2], strict=True)
            region.borders = tuple(Border(_ENGINES[queue], back) for queue, back in pairs)
            code = list(walk(region.body))
            for number, border in zip(behind[::2], behind[1::2], strict=True):
                code[number].borders += (border,)

    def subgraphs(self) -> tuple[list[Region], list[Region] | None]:
        """The regions of each physical core; a file for single cores has no column `after`."""
        regions = self.regions()
        if "after" not in self.sections:
            return regions, None
        after = np.asarray(self.sections["after"]).tolist()
        half = len(regions) // 2
        for number, (region, count) in enumerate(zip(regions, after, strict=True)):
            if not 0 <= count <= number % half:
                raise ValueError(f"region {number % half} waits for {count} of the other core")
            region.after = count
        return regions[:half], regions[half:]

    def tensors(self) -> list[Tensor]:
        constants = bytes(self.sections["constants"])
        out = []
        for row in read_ragged("tensors", self.sections):
            name, kind, dtype, alias, offset, start, size, *shape = row
            data = constants[start : start + size]
            out.append(
                Tensor(
                    self.strings[name],
                    tuple(shape),
                    _DTYPES[dtype],
                    self.strings[kind],
                    alias,
                    offset,
                    data,
                )
            )
        return out


def decode_function(sections: Mapping[str, Any]) -> Function:
    """Inverse of `encode_function`."""
    dec = _Decoder(sections)
    head = unpack_attrs(bytes(sections["function"]))
    regions, partner = dec.subgraphs()
    return Function(
        name=head["name"],
        tensors=dec.tensors(),
        inputs=head["inputs"],
        outputs=head["outputs"],
        parameters=head["parameters"],
        num_registers=head["num_registers"],
        regions=regions,
        collectives=[CollectiveCall(*row) for row in head["collectives"]],
        scratch_bytes=head["scratch_bytes"],
        target=head["target"],
        partner=partner,
    )


def _step_row(step: Call | Repeat) -> list[Any]:
    if isinstance(step, Call):
        return ["call", step.function, step.inputs, step.outputs, step.parameters]
    return ["repeat", step.register, step.trip, [_step_row(s) for s in step.steps]]


def _read_step(row: Sequence[Any]) -> Call | Repeat:
    if row[0] == "call":
        return Call(*row[1:])
    return Repeat(row[1], row[2], tuple(_read_step(s) for s in row[3]))


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
            "scratch_bytes": program.scratch_bytes,
            "metadata": {k: program.metadata[k] for k in sorted(program.metadata)},
            "num_functions": len(program.functions),
        }
    )
    out["locations"] = pack_attrs(list(program.locations))
    for k, function in enumerate(program.functions):
        out.update({f"f{k}/{name}": data for name, data in encode_function(function).items()})
    return out


def decode_program(
    get: Callable[[str], Any],
    names: Iterable[str],
    function: Callable[[Mapping[str, Any]], Function] = decode_function,
) -> Program:
    """Inverse of `encode_program`; `get` returns the checked content of a section by name, and
    `function` decodes one."""
    head = unpack_attrs(bytes(get("program")))
    by_function: dict[int, dict[str, Any]] = {}
    for name in names:
        prefix, _, rest = name.partition("/")
        if rest and prefix.startswith("f"):
            by_function.setdefault(int(prefix[1:]), {})[rest] = get(name)
    if len(by_function) != head["num_functions"]:  # what is declared takes no memory
        raise ValueError(f"{head['num_functions']} functions required, got {len(by_function)}")
    return Program(
        name=head["name"],
        target=head["target"],
        functions=[function(by_function[k]) for k in range(len(by_function))],
        buffers=[ProgramBuffer(*row) for row in head["buffers"]],
        inputs=head["inputs"],
        outputs=head["outputs"],
        steps=tuple(_read_step(s) for s in head["steps"]),
        arena_bytes=head["arena_bytes"],
        scratch_bytes=head["scratch_bytes"],
        locations=unpack_attrs(bytes(get("locations"))),
        metadata=head["metadata"],
    )
