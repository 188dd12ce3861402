"""Files of several programs that run one behind the other, on cores and on the host.

A container of kind `pipeline` has a program file per piece on a core, the graph of a piece on the
host, and in its table which piece runs where and what goes from one to the next. Source of the
shape: a NEFF of Inferentia 1 has one subgraph per core of a serial pipeline (NEFF page).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.compiler.diagnostics import LoadError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.serialize import dump, load
from shardwright.compiler.ir.types import Graph, TensorType, tensor_type
from shardwright.compiler.isa.program import Program
from shardwright.compiler.neff.bundle import read_program
from shardwright.compiler.neff.format import PROGRAM_SECTION
from shardwright.compiler.neff.manifest import MAX_CORE_FILES
from shardwright.compiler.neff.reader import Container
from shardwright.compiler.neff.writer import pack
from shardwright.compiler.support.schema import (
    COUNT,
    COUNTS,
    TEXT,
    Items,
    Rule,
    Table,
    row,
    several,
)

KIND = "pipeline"
HOST_CORE = -1
_GRAPH = "graph/"
_CORE = Rule(
    "a core, or -1 for the host", lambda v: type(v) is int and HOST_CORE <= v < MAX_CORE_FILES
)
_CORES = Rule("a number of cores", lambda v: type(v) is int and 0 < v <= MAX_CORE_FILES)
OPERATORS = several(row(TEXT, COUNT, COUNT, TEXT))
"""Rows of `serial/placement.py: OperatorRow`."""
_PIECE = Table(
    {"name": TEXT, "core": _CORE, "inputs": several(TEXT), "outputs": several(TEXT)},
)
META = Table(
    {
        "name": TEXT,
        "target": TEXT,
        "cores": _CORES,
        "inputs": several(row(TEXT, TEXT, COUNTS)),
        "outputs": several(row(TEXT, TEXT)),
        "pieces": Items(_PIECE),
    },
    {"operators": OPERATORS},
    is_open=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A piece of a file: its program, or the graph that the host computes; the core it runs on;
    names of what it reads and makes."""

    name: str
    core: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    program: Program | None = None
    graph: Graph | None = None

    @property
    def types(self) -> dict[str, TensorType]:
        """The types of what it reads and makes."""
        if self.program is not None:
            named = {b.name: tensor_type(b.shape, b.dtype) for b in self.program.buffers}
            return {name: named[name] for name in (*self.inputs, *self.outputs)}
        assert self.graph is not None
        values = zip(
            (*self.inputs, *self.outputs), (*self.graph.inputs, *self.graph.outputs), strict=True
        )
        return {name: value.type for name, value in values}


@dataclass(frozen=True, slots=True, kw_only=True)
class SerialFile:
    """What a file of kind `pipeline` holds: the types of the model's inputs, and `outputs`, which
    are (name, name of the value that it is)."""

    meta: Mapping[str, Any]
    inputs: Mapping[str, TensorType]
    outputs: tuple[tuple[str, str], ...]
    stages: tuple[Stage, ...]

    @property
    def types(self) -> dict[str, TensorType]:
        """The types of all values by name."""
        made = {name: kind for stage in self.stages for name, kind in stage.types.items()}
        return {**self.inputs, **made}


def serial_bytes(
    meta: Mapping[str, Any],
    programs: Mapping[str, bytes],
    graphs: Mapping[str, Graph],
    compress: bool = True,
) -> bytes:
    """The file of program files and host graphs by piece; `meta` is that of `META`."""
    META.require(meta, "meta")
    sections = {f"{PROGRAM_SECTION}{name}": data for name, data in programs.items()}
    sections |= {f"{_GRAPH}{name}": dump(graph, with_locs=True) for name, graph in graphs.items()}
    return pack(KIND, meta, sections, compress)


def read_serial(container: Container) -> SerialFile:
    """The content of a container of kind `pipeline`. Raises LoadError when it makes no sense."""
    try:
        META.require(container.meta, "meta")
        stages = tuple(_stage(container, row) for row in container.meta["pieces"])
        found = SerialFile(
            meta=container.meta,
            inputs={
                name: tensor_type(tuple(shape), DType(dtype))
                for name, dtype, shape in container.meta["inputs"]
            },
            outputs=tuple((name, value) for name, value in container.meta["outputs"]),
            stages=stages,
        )
        _check(found)
        return found
    except (KeyError, TypeError, ValueError) as error:
        raise LoadError("SW_NEFF_CONTENT", f"{container.name}: pipeline: {error!r}") from error


def _stage(container: Container, given: Mapping[str, Any]) -> Stage:
    name, core = given["name"], given["core"]
    inputs, outputs = tuple(given["inputs"]), tuple(given["outputs"])
    if core == HOST_CORE:
        graph = load(container.read(f"{_GRAPH}{name}"))
        return Stage(name=name, core=core, inputs=inputs, outputs=outputs, graph=graph)
    data = container.read(f"{PROGRAM_SECTION}{name}")
    program = read_program(Container(data, f"{container.name}:{name}", "program"))
    if program.inputs != inputs or program.outputs != outputs:
        raise ValueError(f"piece {name} reads and makes something else than its program")
    return Stage(name=name, core=core, inputs=inputs, outputs=outputs, program=program)


def _check(file: SerialFile) -> None:
    """Raises ValueError for a value that is read before it is made, or has two types, and for a
    core that the file has not."""
    made = dict(file.inputs)
    for stage in file.stages:
        if stage.core >= file.meta["cores"]:
            raise ValueError(f"piece {stage.name} is on core {stage.core} of {file.meta['cores']}")
        types = stage.types
        _known(stage.inputs, made, f"piece {stage.name}")
        for name in stage.inputs:
            if made[name] != types[name]:
                raise ValueError(f"{name} is {made[name]}, piece {stage.name} reads {types[name]}")
        made |= {name: types[name] for name in stage.outputs}
    _known([value for _, value in file.outputs], made, "the file")


def _known(names: Sequence[str], made: Mapping[str, Any], who: str) -> None:
    for name in names:
        if name not in made:
            raise ValueError(f"{who} reads {name}, which nothing has made")
