"""The result of partitioning: one graph with global types, its collectives, and a spec for every
value.

Region inputs and region results of loops carry specs too, because loops bind them one to one. The
byte form is what the partition unit returns: values are numbered in the order of `all_values`,
never named. Localisation is next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack

from shardwright.compiler.diagnostics import Diagnostic, LoadError, Loc
from shardwright.compiler.ir.serialize import dump, load
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.support.fields import check_fields
from shardwright.compiler.support.schema import COUNTS, PLAIN, TEXT, Rule, Table, row, several
from shardwright.sharding.partition.mesh import Mesh
from shardwright.sharding.partition.spec import ShardingSpec

_DAMAGE = (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError)
_BODY = Table(
    {
        "graph": Rule("bytes", lambda v: isinstance(v, bytes)),
        "specs": several(row(several(several(TEXT)), several(TEXT))),
        "spec_of_value": COUNTS,
        "mesh": row(several(row(TEXT, Rule("a size", lambda v: type(v) is int and v > 0))), PLAIN),
        "inputs": several(PLAIN),
        "outputs": several(PLAIN),
        "findings": several(PLAIN),
    }
)


@dataclass(frozen=True, slots=True)
class Slot:
    """Name (the path of the leaf) and role of one graph input or output.

    role: parameter, optimizer, cache, batch, rng, metric. `batch_dim` is the sample dim of an input
    that has samples.
    `shape` is the user's, where the step's is padded. A stack of layers (`sharding/prepare/reroll`)
    lists the user's `leaves` that its dim 0 counts.
    """

    name: str
    role: str
    batch_dim: int | None = None
    shape: tuple[int, ...] | None = None
    leaves: tuple[str, ...] = ()

    def row(self) -> tuple[object, ...]:
        """Its fields, as bytes hold them."""
        return (self.name, self.role, self.batch_dim, self.shape, self.leaves)


class SlotLike(Protocol):
    """What the front end says of an argument or result, as far as partitioning reads it."""

    @property
    def name(self) -> str:
        """The path of the leaf."""

    @property
    def role(self) -> str:
        """Its role."""

    @property
    def batch_dim(self) -> int | None:
        """The sample dim of an input that has samples."""


def slots(infos: Iterable[SlotLike]) -> tuple[Slot, ...]:
    """Slots of the arguments or results of a captured step."""
    return tuple(Slot(info.name, info.role, info.batch_dim) for info in infos)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedGraph:
    """A graph in global types with collectives, and where every value lives.

    `inputs` and `outputs` name the slots of the graph in order; `findings` are what the user should
    know.
    """

    graph: Graph
    specs: Mapping[Value, ShardingSpec]
    mesh: Mesh
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    findings: tuple[Diagnostic, ...] = ()


def all_values(graph: Graph) -> Iterator[Value]:
    """Every value: inputs, then per op its results and those of its regions."""
    yield from graph.inputs
    for op in graph.ops:
        yield from op.results
        for region in op.regions:
            yield from all_values(region)


def encode_partitioned(part: PartitionedGraph) -> bytes:
    """Byte form of `part`, deterministic."""
    table: dict[ShardingSpec, int] = {}
    index = [table.setdefault(part.specs[v], len(table)) for v in all_values(part.graph)]
    body = {
        "graph": dump(part.graph, with_locs=True),
        "specs": [[spec.dims, spec.unreduced] for spec in table],
        "spec_of_value": index,
        "mesh": [part.mesh.axes, part.mesh.origins],
        "inputs": [s.row() for s in part.inputs],
        "outputs": [s.row() for s in part.outputs],
        "findings": [d.as_dict() for d in part.findings],
    }
    data: bytes = msgpack.packb(body)
    return data


def decode_partitioned(
    data: bytes, place: Callable[[Loc], Loc] = lambda loc: loc
) -> PartitionedGraph:
    """Inverse of `encode_partitioned`; `place` makes locations of those in `data`. Raises LoadError
    for what no partition unit answers."""
    try:
        return _decoded(msgpack.unpackb(data, use_list=False), place)
    except (*_DAMAGE, msgpack.UnpackException) as error:
        raise LoadError(
            "SW_UNIT_FORMAT",
            f"a partitioned graph makes no sense: {error!r}",
            hint="remove what is stored: shardwright cache clean --kind partition",
        ) from error


def _decoded(body: Any, place: Callable[[Loc], Loc]) -> PartitionedGraph:
    _BODY.require(body, "partitioned graph")
    graph = load(body["graph"], place)
    table = [ShardingSpec(dims, unreduced) for dims, unreduced in body["specs"]]
    values = list(all_values(graph))
    found = PartitionedGraph(
        graph=graph,
        specs={v: table[i] for v, i in zip(values, body["spec_of_value"], strict=True)},
        mesh=Mesh(*body["mesh"]),
        inputs=tuple(Slot(*s) for s in body["inputs"]),
        outputs=tuple(Slot(*s) for s in body["outputs"]),
        findings=tuple(_diagnostic(d, place) for d in body["findings"]),
    )
    for one in (found.mesh, *table, *found.inputs, *found.outputs):
        check_fields(one)
    _check_specs(found)
    return found


def _check_specs(found: PartitionedGraph) -> None:
    """A spec has a dim per dim of its value, of axes of the mesh; a slot per input and output."""
    axes = set(found.mesh.names)
    for value, spec in found.specs.items():
        named = {*spec.axes, *spec.unreduced}
        if len(spec.dims) != len(value.type.shape) or not named <= axes:
            raise ValueError(f"{spec} does not lay out {value.type} over {sorted(axes)}")
    sides = ((found.inputs, found.graph.inputs), (found.outputs, found.graph.outputs))
    if any(len(slots) not in (0, len(values)) for slots, values in sides):
        raise ValueError("inputs and outputs require one slot each")


def _diagnostic(fields: dict[str, object], place: Callable[[Loc], Loc]) -> Diagnostic:
    """A finding from its dict form."""
    loc = fields["loc"]
    where = place(Loc(**loc)) if isinstance(loc, dict) else None
    code, message, hint, severity = (
        str(fields[k]) for k in ("code", "message", "hint", "severity")
    )
    return Diagnostic(code, message, where, hint, severity)
