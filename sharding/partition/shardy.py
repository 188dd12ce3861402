"""The Shardy adapter: our graph and specs in, a partitioned graph out, with the partitioner in a
process of its own (`partitioner`).

There the graph is printed to StableHLO, gets its shardings by op ordinal, goes through propagation,
explicit reshards and collectives (passes measured on jaxlib 0.10.2), and is imported again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgpack

from shardwright.compiler.diagnostics import Loc, ShardingError
from shardwright.compiler.frontend.mlir import call_target
from shardwright.compiler.ir.facts import shuffled
from shardwright.compiler.ir.printer import MANUAL_REGION, to_stablehlo
from shardwright.compiler.ir.serialize import dump, load
from shardwright.compiler.ir.types import Graph
from shardwright.sharding.partition.mesh import Mesh
from shardwright.sharding.partition.partitioned import (
    PartitionedGraph,
    Slot,
    decode_partitioned,
    encode_partitioned,
)
from shardwright.sharding.partition.partitioner import PartitionUnit, ask
from shardwright.sharding.partition.shardy_import import SHUFFLE, ShardyReader
from shardwright.sharding.partition.spec import ShardingSpec, replicated
from shardwright.sharding.strategies import INPUT, OUTPUT, ValueId, value_ids

Ties = Sequence[tuple[int, int]]
_ERROR_TAIL = 2000
_ORDINAL = "op"  # file name of the locations of an answer: the line is the op's ordinal
PROPAGATE = (
    "builtin.module(sdy-propagation-pipeline)",
    "builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true}))",
    "builtin.module(func.func(sdy-reshard-to-collectives))",
    "builtin.module(canonicalize)",
)
RULES_PASS = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
RULELESS = {
    "func.return",
    "sdy.mesh",
    "sdy.sharding_constraint",
    "stablehlo.constant",
    "stablehlo.iota",
    "stablehlo.optimization_barrier",
    "stablehlo.return",
    "stablehlo.while",
}


def partition(
    graph: Graph,
    mesh: Mesh,
    specs: Mapping[ValueId, ShardingSpec],
    inputs: Sequence[Slot] = (),
    outputs: Sequence[Slot] = (),
    tied: Ties = (),
    unit: PartitionUnit | None = None,
) -> PartitionedGraph:
    """Partition `graph` over `mesh`: in a child process, or with the `unit` that answers requests.

    `specs` is keyed by (op ordinal, result index), (-1, input index) or (-2, output index); what it
    leaves out is the partitioner's choice, the same one for each (input, output) of `tied`.

    A request has no locations, so that equal graphs make equal ones: where an op comes from changes
    with every line of the user's file, and with what jax has traced before in the same process.
    The answer names ops of the request, whose locations it gets here.

    Raises: ShardingError when the child refuses, ExecutionError when it crashes or does not end in
    time.
    """
    origins = [op.loc for op in graph.walk()]
    request = encode_request(graph, mesh, specs, inputs, outputs, tied)

    def place(loc: Loc) -> Loc:
        """Where an op of the request comes from, by its name there."""
        return origins[loc.line] if loc.file == _ORDINAL else loc

    try:
        return decode_partitioned((unit or ask)(request), place)
    except ShardingError as refused:
        told = refused.diagnostic
        loc = told.loc and place(told.loc)
        raise ShardingError(told.code, told.message, loc, told.hint) from refused


def encode_request(
    graph: Graph,
    mesh: Mesh,
    specs: Mapping[ValueId, ShardingSpec],
    inputs: Sequence[Slot],
    outputs: Sequence[Slot],
    tied: Ties = (),
) -> bytes:
    """The child's input, without locations."""
    body = {
        "graph": dump(graph, with_locs=False),
        "mesh": [mesh.axes, mesh.origins],
        "specs": [[key, spec.dims, spec.unreduced] for key, spec in specs.items()],
        "tied": tied,
        "inputs": [s.row() for s in inputs],
        "outputs": [s.row() for s in outputs],
    }
    data: bytes = msgpack.packb(body)
    return data


def answer_request(request: bytes) -> bytes:
    """What the partitioner's process does, in this one: an encoded partitioned graph; loads jaxlib,
    and native code may end the process. Ops and refusals are named by the ordinals of ops.
    """
    from shardwright.compiler.frontend.context import make_context
    from shardwright.compiler.frontend.stablehlo import import_parsed

    body = msgpack.unpackb(request, use_list=False)
    graph = load(body["graph"])
    mesh = Mesh(*body["mesh"])
    specs = {key: ShardingSpec(dims, unreduced) for key, dims, unreduced in body["specs"]}
    slots = [tuple(Slot(*row) for row in body[side]) for side in ("inputs", "outputs")]
    names = [Loc(_ORDINAL, number) for number, _ in enumerate(graph.walk())]
    with make_context():
        module = _parse(graph, mesh, specs)
        _check_rules(module, names)
        shuffled = _mark_shuffles(module, graph)
        _attach(module, specs)
        _tie(module, body["tied"])
        for passes in (PROPAGATE[:1], PROPAGATE[1:]):  # the first one drops the rules of ops
            _keep_split(module, shuffled)
            _run_passes(module.operation, passes)
        reader = ShardyReader(mesh, names, module.operation.get_asm(large_elements_limit=8))
        imported = import_parsed(module, extra_rules=reader.rules(), hooks=reader.hooks())
        return encode_partitioned(reader.finish(imported, *slots))


def annotated_text(graph: Graph, mesh: Mesh, specs: Mapping[ValueId, ShardingSpec]) -> str:
    """What the partitioner starts from, as StableHLO text: for dumps, and for other partitioners;
    loads jaxlib.
    """
    from shardwright.compiler.frontend.context import make_context

    with make_context():
        module = _parse(graph, mesh, specs)
        _attach(module, specs)
        text: str = module.operation.get_asm(binary=False)
        return text


def _parse(graph: Graph, mesh: Mesh, specs: Mapping[ValueId, ShardingSpec]) -> Any:
    """`graph` as an MLIR module whose ops carry their ordinals; a context must be entered."""
    from shardwright.compiler.frontend.context import parse_module

    placed = {value for key, value in value_ids(graph) if key in specs}
    text = to_stablehlo(graph, mesh=mesh.sizes, ids=True, locs=True, placed=placed)
    return parse_module(text)


def _run_passes(module: Any, passes: Sequence[str]) -> None:
    """Run passes on a module's operation, one by one. Raises ShardingError naming the one that
    fails."""
    from jaxlib.mlir import ir, passmanager

    for text in passes:
        manager = passmanager.PassManager.parse(text)
        # Verified after each of their inner passes, propagation takes three times as long.
        manager.enable_verifier(text == passes[-1])
        try:
            manager.run(module)
        except ir.MLIRError as error:
            raise ShardingError(
                "SW_PARTITIONER_PASS", f"pass {text} failed: {str(error)[:_ERROR_TAIL]}"
            ) from error


def _check_rules(module: Any, origins: Sequence[Loc]) -> None:
    """Refuse ops the partitioner has no rule for: their shardings would be lost without a word."""
    copy = module.operation.clone()
    _run_passes(copy, [RULES_PASS])
    for op in _walk(_function(copy)):
        if "sdy.sharding_rule" not in op.attributes and not _is_ruleless(op):
            loc = origins[int(op.attributes["shardwright.id"].value)]
            raise ShardingError(
                "SW_PARTITIONER_RULE",
                f"partitioning requires a rule for {op.name}, the partitioner has none",
                loc,
            )


def _is_ruleless(op: Any) -> bool:
    """Whether the shardings of an op's operands and results have nothing to do with each other."""
    return op.name in RULELESS or call_target(op) == MANUAL_REGION


def _function(module: Any) -> Any:
    """The only function of a module's operation."""
    (block,) = module.regions[0].blocks
    (function,) = (op.operation for op in block.operations if op.operation.name == "func.func")
    return function


def _walk(op: Any) -> Iterator[Any]:
    """Ops inside of `op`, without the scalar bodies of reductions."""
    for region in op.regions:
        for block in region.blocks:
            for view in block.operations:
                inner = view.operation
                yield inner
                if inner.name == "stablehlo.while":
                    yield from _walk(inner)


def _mark_shuffles(module: Any, graph: Graph) -> bool:
    """Mark gathers that put the slices of a dim in another order; whether there are any."""
    from jaxlib.mlir import ir

    found = _shuffles(graph, itertools.count())
    for op in _walk(_function(module.operation)) if found else ():
        number = op.attributes.get("shardwright.id")
        if number is not None and number.value in found:
            dim, places = found[number.value]
            op.attributes[SHUFFLE] = ir.DenseI64ArrayAttr.get([dim, *places])
    return bool(found)


def _keep_split(module: Any, shuffled: bool) -> None:
    """Let a dim stay split through a gather that puts its slices in another order: such as the
    values that ranks send round, where every rank's is a slice. The reader makes the permute.
    """
    from jaxlib.mlir.dialects import sdy

    for op in _walk(_function(module.operation)) if shuffled else ():
        if SHUFFLE not in op.attributes:
            continue
        table, indices = (list(v.type.shape) for v in op.operands)
        numbers = [sdy.DimMappingAttr.get([n]) for n in range(len(table) + len(indices))]
        passed, others = (
            sdy.TensorMappingAttr.get(part)
            for part in (numbers[: len(table)], numbers[len(table) :])
        )
        op.attributes["sdy.sharding_rule"] = sdy.OpShardingRuleAttr.get(
            [*table, *indices],
            [passed, others],
            [passed],
            [],
            [*range(len(table), len(numbers))],
        )


def _shuffles(graph: Graph, ordinals: Iterator[int]) -> dict[int, tuple[int, tuple[int, ...]]]:
    """The `shuffled` ops by ordinal."""
    found, made = {}, graph.producers()
    for op in graph.ops:
        number = next(ordinals)
        if (order := shuffled(op, made)) is not None:
            found[number] = order
        for region in op.regions:
            found |= _shuffles(region, ordinals)
    return found


def _attach(module: Any, specs: Mapping[ValueId, ShardingSpec]) -> None:
    """Put `specs` on arguments, results and ops; ids have then done their work."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    function = _function(module.operation)
    kind = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    sides = (("arg_attrs", INPUT, kind.inputs), ("res_attrs", OUTPUT, kind.results))
    for name, key, types in sides:
        entries = [_slot_attribute(specs.get((key, i))) for i in range(len(types))]
        function.attributes[name] = ir.ArrayAttr.get(entries)
    for op in _walk(function):
        if "shardwright.id" not in op.attributes:
            continue
        ordinal = int(op.attributes["shardwright.id"].value)
        del op.attributes["shardwright.id"]
        given = [specs.get((ordinal, i)) for i in range(len(op.results))]
        if any(given) and op.name != "sdy.sharding_constraint":
            pairs = zip(given, op.results, strict=True)
            shardings = [_sharding(spec, len(r.type.shape)) for spec, r in pairs]
            op.attributes["sdy.sharding"] = sdy.TensorShardingPerValueAttr.get(shardings)


def _tie(module: Any, tied: Ties) -> None:
    """Ask for one sharding of each input and the output that takes its place in the next step."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    block = _function(module.operation).regions[0].blocks[0]
    end = list(block.operations)[-1]
    for number, (i, j) in enumerate(tied):
        for value in (block.arguments[i], end.operation.operands[j]):
            with ir.InsertionPoint(end), ir.Location.unknown():
                sdy.ShardingGroupOp(value, number)


def _slot_attribute(spec: ShardingSpec | None) -> Any:
    """The attribute dictionary of an argument or result."""
    from jaxlib.mlir import ir

    entries = {} if spec is None else {"sdy.sharding": _sharding(spec, len(spec.dims))}
    return ir.DictAttr.get(entries)


def _sharding(spec: ShardingSpec | None, rank: int) -> Any:
    """A closed sharding; without a spec every dim is open."""
    from jaxlib.mlir.dialects import sdy

    dims = [[sdy.AxisRefAttr.get(a) for a in axes] for axes in (spec or replicated(rank)).dims]
    closed = spec is not None
    entries = [sdy.DimensionShardingAttr.get(axes, is_closed=closed) for axes in dims]
    return sdy.TensorShardingAttr.get("mesh", entries)
