"""Functions and programs from the sections of a NEFF: the inverse of `encode.py`.

Whatever stands in a section, only what is sound comes out: numbers are in range of what they name
(`columns.py`), attributes are what they must be (`attributes.py`), and the parts fit each other
(`soundness.py`). Everything else raises ValueError (KeyError for a section or field that is
missing), which the reader of the file turns into a refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgpack

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.columns import (
    DTYPES,
    ENGINES,
    HEADS,
    INSTRUCTION,
    LOOP,
    SPACES,
    numbers,
    read_rows,
)
from shardwright.compiler.isa.encode import DTYPE_EXT, EXTENSIONS
from shardwright.compiler.isa.kernel import Affine, Bound, KernelProgram, Node, Tensor, View
from shardwright.compiler.isa.limits import walk
from shardwright.compiler.isa.program import (
    AccessPattern,
    Border,
    CollectiveCall,
    Function,
    Instr,
    Kernel,
    Loop,
    Program,
    ProgramBuffer,
    Tile,
)
from shardwright.compiler.isa.program_soundness import HEAD as PROGRAM_HEAD
from shardwright.compiler.isa.program_soundness import LOCATIONS, check_program, read_step
from shardwright.compiler.isa.schema import AFFINE, BOUND, VIEW
from shardwright.compiler.isa.soundness import HEAD, check_collective, check_function, check_indices
from shardwright.compiler.support.schema import MOST_DEPTH, TEXT, Rule, several

_STRINGS = several(TEXT)
_ATTRIBUTE_SETS = several(Rule("attributes", lambda v: isinstance(v, bytes)))
_RULES: Mapping[type, Rule] = {Affine: AFFINE, View: VIEW, Bound: BOUND}
_POOLED = {
    name: [
        [(at, f.pool) for at, f in enumerate(head.fields) if f.pool not in ("", "tensors")]
        for head in heads
    ]
    for name, heads in HEADS.items()
}
"""Per column and kind of row, the places of a head that name something of a pool. A tensor stays a
number."""
Row = list[Any]


def _unext(code: int, data: bytes) -> Any:
    if code == DTYPE_EXT:
        return DType(data.decode())
    if code not in EXTENSIONS:
        raise ValueError(f"no attribute has the code {code}")
    kind = EXTENSIONS[code]
    value = kind(*unpack_attrs(data))
    _RULES[kind].require(value, "an attribute")
    return value


def unpack_attrs(data: bytes) -> Any:
    """Inverse of `pack_attrs`; sequences come back as tuples."""
    return msgpack.unpackb(data, ext_hook=_unext, use_list=False)


class _Decoder:
    """Reads the sections of one function."""

    def __init__(self, sections: Mapping[str, Any]) -> None:
        self.sections = sections
        strings = unpack_attrs(bytes(sections["strings"]))
        _STRINGS.require(strings, "strings")
        packed = unpack_attrs(bytes(sections["attrs"]))
        _ATTRIBUTE_SETS.require(packed, "attrs")
        self.pools: dict[str, Sequence[Any]] = {
            "strings": strings,
            "attrs": [unpack_attrs(a) for a in packed],
            "dtypes": DTYPES,
            "engines": ENGINES,
            "spaces": SPACES,
        }
        self.pools["affines"] = [Affine(row[0], _pairs(row[1:])) for row in self.rows("affines")]
        self.patterns = [self.pattern(row) for row in self.rows("patterns")]
        self.pools["patterns"] = self.patterns
        self.code = self.rows("code")
        self.tiles = [Tile(*row) for row in self.rows("tiles")]
        self.nodes = [self.node(row) for row in self.rows("nodes")]

    def rows(self, name: str) -> list[Row]:
        """The checked rows of a column. A head has what its numbers name, None for a negative
        one."""
        sizes = {pool: len(items) for pool, items in self.pools.items()}
        found, pooled = read_rows(name, self.sections, sizes), _POOLED[name]
        for row in found:
            for at, pool in pooled[row[0]] if len(pooled) > 1 else pooled[0]:
                row[at] = self.pools[pool][row[at]] if row[at] >= 0 else None
        return found

    def pattern(self, row: Row) -> AccessPattern:
        space, buffer, offset, start, *dims = row
        if min(dims[1::2]) < 1:
            raise ValueError(f"patterns: positive sizes are required, got {dims[1::2]}")
        return AccessPattern(space, buffer, offset, _pairs(dims), start)

    def node(self, row: Row) -> Node:
        op, dtype, attrs, count, *rest = row
        return Node(op, tuple(rest[:count]), tuple(rest[count:]), dtype, attrs)

    def instr(self, row: Row) -> Instr:
        _, opcode, engine, attrs, dst, sources, waits, *rest = row
        if sources + waits > len(rest):
            raise ValueError(f"code: {sources} sources and {waits} waits in {len(rest)} numbers")
        check_indices(rest[:sources], len(self.patterns), "patterns of sources")
        return Instr(
            opcode,
            engine,
            dst,
            tuple([self.patterns[s] for s in rest[:sources]]),
            attrs,
            tuple(rest[sources : sources + waits]),
            tuple(rest[sources + waits :]),
        )

    def body(self, rows: Sequence[Row], registers: int) -> list[Instr | Loop]:
        stack: list[list[Instr | Loop]] = [[]]
        for row in rows:
            if row[0] == INSTRUCTION:
                stack[-1].append(self.instr(row))
            elif row[0] == LOOP:
                check_indices((row[1],), registers, "code: registers of loops")
                loop = Loop(row[1], row[2], [])
                stack[-1].append(loop)
                stack.append(loop.body)
            else:
                stack.pop()
            if not 1 <= len(stack) <= MOST_DEPTH:
                raise ValueError(f"code: loops that end, at most {MOST_DEPTH} deep, are required")
        if len(stack) > 1:
            raise ValueError("code: a loop does not end in its kernel")
        return stack[0]

    def kernels(self, registers: int) -> list[Kernel]:
        """All kernels in order. Each has the tiles, nodes and code behind those of the one before
        it."""
        out: list[Kernel] = []
        begun, whole = (0, 0, 0), (len(self.tiles), len(self.nodes), len(self.code))
        for row in self.rows("regions"):
            kind, name, attrs, loc, *ends_of, num_iter_dims = row[:8]
            ends, rest = tuple(ends_of), row[8:]
            if num_iter_dims > len(rest) or not all(
                a <= b <= c for a, b, c in zip(begun, ends, whole, strict=True)
            ):
                raise ValueError(f"regions: ends between {begun} and {whole} required, got {ends}")
            (tiles, nodes, code) = (slice(a, b) for a, b in zip(begun, ends, strict=True))
            iter_dims = tuple(rest[:num_iter_dims])
            program = KernelProgram(kind, name, iter_dims, tuple(self.nodes[nodes]), attrs, loc)
            body = self.body(self.code[code], registers)
            out.append(Kernel(program, self.tiles[tiles], body, tuple(rest[num_iter_dims:])))
            begun = ends
        if begun != whole:
            raise ValueError(f"regions require all of {whole} tiles, nodes and code, got {begun}")
        self._add_borders(out)
        self._add_row_sums(out)
        return out

    def _add_row_sums(self, kernels: Sequence[Kernel]) -> None:
        """A file without the column has no instruction with two destinations."""
        if "row_sums" not in self.sections:
            return
        for kernel, row in zip(kernels, self.rows("row_sums"), strict=True):
            code = list(walk(kernel.body))
            check_indices(row[::2], len(code), "row_sums: instructions")
            check_indices(row[1::2], len(self.patterns), "row_sums: patterns")
            for number, pattern in _pairs(row):
                code[number].row_sum = self.patterns[pattern]

    def _add_borders(self, kernels: Sequence[Kernel]) -> None:
        """A file without the columns has barriers between all kernels."""
        if "borders" not in self.sections:
            return
        rows = (self.rows(name) for name in ("borders", "behind"))
        for kernel, borders, (begins_at_once, *behind) in zip(kernels, *rows, strict=True):
            if not begins_at_once:
                continue
            check_indices(borders[::2], len(ENGINES), "borders: queues")
            kernel.borders = tuple(Border(ENGINES[q], back) for q, back in _pairs(borders))
            code = list(walk(kernel.body))
            check_indices(behind[::2], len(code), "behind: instructions")
            for number, border in _pairs(behind):
                code[number].borders += (border,)

    def subgraphs(self, registers: int) -> tuple[list[Kernel], list[Kernel] | None]:
        """The kernels of each physical core; a file for single cores has no column `after`."""
        kernels = self.kernels(registers)
        if "after" not in self.sections:
            return kernels, None
        after = numbers("after", self.sections).tolist()
        half = len(kernels) // 2
        for number, (kernel, count) in enumerate(zip(kernels, after, strict=True)):
            if not 0 <= count <= number % half:
                raise ValueError(f"kernel {number % half} waits for {count} of the other core")
            kernel.after = count
        return kernels[:half], kernels[half:]

    def tensors(self) -> list[Tensor]:
        constants = bytes(self.sections["constants"])
        ends = numbers("tensors.end", self.sections)
        self.pools["tensors"] = range(len(ends))
        out = []
        for name, kind, dtype, alias, offset, start, size, *shape in self.rows("tensors"):
            if start + size > len(constants):
                raise ValueError(f"tensors: {len(constants)} bytes of constants, {start}+{size}")
            data = constants[start : start + size]
            out.append(Tensor(name, tuple(shape), dtype, kind, alias, offset, data))
        return out


def _pairs(flat: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(zip(flat[::2], flat[1::2], strict=True))


def decode_function(sections: Mapping[str, Any]) -> Function:
    """Inverse of `encode_function`. Raises ValueError for what no compiler makes."""
    dec = _Decoder(sections)
    head = unpack_attrs(bytes(sections["function"]))
    HEAD.require(head, "function")
    calls = [CollectiveCall(*row) for row in head["collectives"]]
    for number, call in enumerate(calls):
        check_collective(call, f"collective {number}")
    kernels, partner = dec.subgraphs(head["num_registers"])
    parts = {"tensors": dec.tensors(), "kernels": kernels, "partner": partner}
    function = Function(**{**head, "collectives": calls, **parts})
    check_function(function)
    return function


def decode_program(
    get: Callable[[str], Any],
    names: Iterable[str],
    function: Callable[[Mapping[str, Any]], Function] = decode_function,
) -> Program:
    """Inverse of `encode_program`; `get` returns the checked content of a section by name, and
    `function` decodes one."""
    head = unpack_attrs(bytes(get("program")))
    PROGRAM_HEAD.require(head, "program")
    by_function: dict[int, dict[str, Any]] = {}
    for name in names:
        prefix, _, rest = name.partition("/")
        if rest and prefix.startswith("f"):
            by_function.setdefault(int(prefix[1:]), {})[rest] = get(name)
    if len(by_function) != head["num_functions"]:  # what is declared takes no memory
        raise ValueError(f"{head['num_functions']} functions required, got {len(by_function)}")
    locations = unpack_attrs(bytes(get("locations")))
    LOCATIONS.require(locations, "locations")
    del head["num_functions"]
    parts = {
        "functions": [function(by_function[k]) for k in range(len(by_function))],
        "buffers": [ProgramBuffer(*row) for row in head["buffers"]],
        "steps": tuple(read_step(s) for s in head["steps"]),
        "locations": locations,
    }
    program = Program(**{**head, **parts})
    check_program(program)
    return program
