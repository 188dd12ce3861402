"""Functions and programs as columns: the sections of a NEFF.

Every repeated thing (access pattern, affine, attribute set, string) is stored once in a pool and
named by index, so that a rolled program costs a few kilobytes and loads without a Python object per
byte. Encoding is deterministic: pools fill in program order. `decode.py` is the exact inverse.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import msgpack
import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.columns import (
    DTYPES,
    END,
    ENGINES,
    HEADS,
    INSTRUCTION,
    LOOP,
    SPACES,
)
from shardwright.compiler.isa.kernel import Affine, Bound, Tensor, View
from shardwright.compiler.isa.limits import walk
from shardwright.compiler.isa.program import (
    AccessPattern,
    Call,
    CollectiveCall,
    Function,
    Instr,
    Kernel,
    Loop,
    Program,
    Repeat,
)
from shardwright.compiler.isa.program_soundness import HEAD as PROGRAM_HEAD
from shardwright.compiler.isa.soundness import HEAD

Sections = dict[str, "np.ndarray[Any, Any] | bytes"]
T = TypeVar("T", bound=Hashable)

DTYPE_EXT = 3
EXTENSIONS: Mapping[int, type] = {1: Affine, 2: View, 4: Bound}
"""Codes of what attributes hold besides plain data and element types: the fields in order."""
_COLUMNS = ("tensors", "code", "tiles", "nodes", "regions", "patterns", "affines")
_CODES = {kind: code for code, kind in EXTENSIONS.items()}


class Pool(dict[T, int]):
    """Distinct items with their numbers, in first-use order."""

    def __missing__(self, item: T) -> int:
        self[item] = number = len(self)
        return number


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


def _fields(value: Any) -> list[Any]:
    """What a dataclass with slots holds."""
    return [getattr(value, name) for name in value.__slots__]


def _ext(value: Any) -> Any:
    if type(value) in _CODES:
        return msgpack.ExtType(_CODES[type(value)], pack_attrs(_fields(value)))
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


class _Encoder:
    """Pools and columns of one function."""

    def __init__(self) -> None:
        self.strings: Pool[str] = Pool()
        self.attrs: Pool[bytes] = Pool()
        self.affines: Pool[Affine] = Pool()
        self.patterns: Pool[AccessPattern] = Pool()
        self.columns = {name: Ragged() for name in _COLUMNS}
        self.borders = Ragged()  # per kernel: queue and how far back, in turn, of every border
        # per kernel: 0 at a barrier, else 1; instruction and border, in turn
        self.behind = Ragged()
        self.row_sums = Ragged()  # per kernel: instruction and second destination, in turn
        self.constants = bytearray()
        numbers: Mapping[str, Callable[[Any], int]] = {
            "strings": self.strings.__getitem__,
            "attrs": lambda attrs: self.attrs[pack_attrs(dict(sorted(attrs.items())))],
            "affines": self.affines.__getitem__,
            "patterns": lambda pattern: -1 if pattern is None else self.patterns[pattern],
            "dtypes": DTYPES.index,
            "engines": ENGINES.index,
            "spaces": SPACES.index,
        }
        self.heads = {
            name: [[numbers.get(f.pool) for f in head.fields] for head in HEADS[name]]
            for name in _COLUMNS
        }

    def add(self, name: str, head: Iterable[Any], rest: Iterable[int] = (), kind: int = 0) -> None:
        """A row of a column: its head with numbers for what is in pools, and what follows."""
        pairs = zip(self.heads[name][kind], head, strict=True)
        made = [value if number is None else number(value) for number, value in pairs]
        self.columns[name].append((*made, *rest))

    def body(self, body: Sequence[Instr | Loop]) -> None:
        for item in body:
            if isinstance(item, Loop):
                self.add("code", (LOOP, item.register, item.trip), kind=LOOP)
                self.body(item.body)
                self.add("code", (END,), kind=END)
            else:
                head = (INSTRUCTION, item.opcode, item.engine, item.attrs, item.dst)
                sources = map(self.patterns.__getitem__, item.srcs)
                rest = chain(sources, item.waits, item.signals)
                self.add("code", (*head, len(item.srcs), len(item.waits)), rest)

    def kernel(self, kernel: Kernel) -> None:
        program = kernel.program
        for tile in kernel.tiles:
            self.add("tiles", _fields(tile))
        for n in program.nodes:
            self.add("nodes", (n.op, n.dtype, n.attrs, len(n.inputs)), (*n.inputs, *n.iter_dims))
        self.body(kernel.body)
        head = (program.kind, program.name, program.attrs, program.loc)
        ends = (len(self.columns[name].ends) for name in ("tiles", "nodes", "code"))
        rest = (*program.iter_dims, *kernel.tokens)
        self.add("regions", (*head, *ends, len(program.iter_dims)), rest)
        borders = kernel.borders or ()
        self.borders.append(x for b in borders for x in (ENGINES.index(b.queue), b.back))
        waits = (x for n, i in enumerate(walk(kernel.body)) for b in i.borders for x in (n, b))
        self.behind.append((int(kernel.borders is not None), *waits))
        sums = ((n, i.row_sum) for n, i in enumerate(walk(kernel.body)) if i.row_sum is not None)
        self.row_sums.append(x for n, p in sums for x in (n, self.patterns[p]))

    def tensor(self, t: Tensor) -> None:
        head = (t.name, t.kind, t.dtype, t.alias, t.offset_bytes, len(self.constants), len(t.data))
        self.constants += t.data
        self.add("tensors", head, t.shape)

    def pools(self) -> None:
        """The columns of patterns and affines, once all are known."""
        for p in self.patterns:
            head = (p.space, p.buffer, p.offset, p.start)
            self.add("patterns", head, chain.from_iterable(p.dims))
        for affine in self.affines:
            self.add("affines", (affine.const,), chain.from_iterable(affine.terms))


def encode_function(function: Function) -> Sections:
    """The sections of one function."""
    enc = _Encoder()
    out: Sections = {}
    for tensor in function.tensors:
        enc.tensor(tensor)
    for kernel in chain.from_iterable(function.subgraphs):
        enc.kernel(kernel)
    enc.pools()
    columns = dict(enc.columns)
    if function.has_borders:
        columns |= {"borders": enc.borders, "behind": enc.behind}
    if enc.row_sums.values:
        columns["row_sums"] = enc.row_sums
    for name, column in columns.items():
        column.store(name, out)
    if len(function.subgraphs) > 1:
        after = [kernel.after for subgraph in function.subgraphs for kernel in subgraph]
        out["after"] = np.asarray(after, np.int64)
    out["constants"] = bytes(enc.constants)
    out["strings"] = pack_attrs(list(enc.strings))
    out["attrs"] = pack_attrs(list(enc.attrs))
    head = {name: getattr(function, name) for name in HEAD.required}
    out["function"] = pack_attrs(
        head | {"collectives": [_collective_row(c) for c in function.collectives]}
    )
    return out


def _collective_row(call: CollectiveCall) -> list[Any]:
    """Without parts where it has none."""
    row = _fields(call)
    return row if call.parts else row[:-1]


def _step_row(step: Call | Repeat) -> list[Any]:
    if isinstance(step, Call):
        return ["call", *_fields(step)]
    return ["repeat", step.register, step.trip, [_step_row(s) for s in step.steps]]


def encode_program(program: Program) -> Sections:
    """The sections of one program: its table, and `f<k>/...` for every function."""
    out: Sections = {}
    head = {name: getattr(program, name, None) for name in PROGRAM_HEAD.required}
    out["program"] = pack_attrs(
        head
        | {
            "buffers": [_fields(b) for b in program.buffers],
            "steps": [_step_row(s) for s in program.steps],
            "metadata": dict(sorted(program.metadata.items())),
            "num_functions": len(program.functions),
        }
    )
    out["locations"] = pack_attrs(list(program.locations))
    for k, function in enumerate(program.functions):
        out.update({f"f{k}/{name}": data for name, data in encode_function(function).items()})
    return out
