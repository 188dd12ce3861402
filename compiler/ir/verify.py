"""The structure check every pass and unit runs: SSA order, arity, attributes, and types inferred
again.

All findings are collected and raised once. A finding here is a bug of ours or a damaged file,
never a mistake in the user's model; the importer reports those.
"""

from __future__ import annotations

from shardwright.compiler.diagnostics import CompileError, Diagnostic
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.types import Graph, Op, Value

MAX_SHOWN = 20


def findings(graph: Graph, typed: set[Op] | None = None) -> list[Diagnostic]:
    """Everything that is wrong with `graph`, regions included; empty when it is sound.

    Ops in `typed` are known to have the right types, those found to join it: an op is never edited,
    so a pipeline infers the types of each op once.
    """
    found: list[Diagnostic] = []
    _check_graph(graph, graph.name, set(), found, set() if typed is None else typed)
    return found


def verify(graph: Graph, typed: set[Op] | None = None) -> Graph:
    """`graph` itself when it is sound; `typed` as in `findings`. Raises CompileError SW_IR_INVALID
    with all findings.
    """
    found = findings(graph, typed)
    if not found:
        return graph
    lines = [d.render() for d in found[:MAX_SHOWN]]
    if len(found) > MAX_SHOWN:
        lines.append(f"... and {len(found) - MAX_SHOWN} more")
    first = next((d.loc for d in found if d.loc), None)
    count = f"{len(found)} finding{'s' * (len(found) != 1)}"
    message = f"graph {graph.name} is not valid, {count}:\n" + "\n".join(lines)
    raise CompileError("SW_IR_INVALID", message, first)


def _check_graph(
    graph: Graph, path: str, outside: set[Value], found: list[Diagnostic], typed: set[Op]
) -> None:
    """Check one level; `outside` are the values of enclosing levels, which it must not use."""
    defined: set[Value] = set()
    for value in graph.inputs:
        _define(value, defined, f"{path}: input", None, found)
    for i, op in enumerate(graph.ops):
        results = op.results
        plain = len(results) == 1 and not op.regions and op in typed
        if plain and results[0] not in defined and defined.issuperset(op.operands):
            defined.add(results[0])  # an op of known types: most ops of most graphs
            continue
        where = f"{path}/{i}:{op.name}"
        _check_uses(op, where, defined, outside, found)
        if op not in typed:
            before = len(found)
            _check_op(op, where, found)
            if len(found) == before:
                typed.add(op)
        for region in op.regions:
            _check_graph(region, where, outside | defined, found, typed)
        for value in op.results:
            _define(value, defined, where, op, found)
    for k, value in enumerate(graph.outputs):
        if value not in defined:
            _report(found, None, f"{path}: output {k} requires a value of this graph")


def _define(
    value: Value, defined: set[Value], where: str, op: Op | None, found: list[Diagnostic]
) -> None:
    if value in defined:
        _report(found, op, f"{where} requires a value of its own, got one defined before")
    defined.add(value)


def _check_uses(
    op: Op, where: str, defined: set[Value], outside: set[Value], found: list[Diagnostic]
) -> None:
    for k, value in enumerate(op.operands):
        if value in defined:
            continue
        got = "a captured value" if value in outside else "a value defined later or nowhere"
        _report(found, op, f"{where} requires operand {k} defined before it, got {got}")


def _check_op(op: Op, where: str, found: list[Diagnostic]) -> None:
    """Infer the result types again."""
    opdef = OPS.get(op.name)
    if opdef is None:
        _report(found, op, f"{where} requires a known op, got {op.name}")
        return
    if opdef.attrs is None and op.attrs is not None:
        _report(found, op, f"{where} requires no attributes, got {op.attrs}")
    if op.regions and op.name != "loop":
        _report(found, op, f"{where} requires no regions, got {len(op.regions)}")
    try:
        types = opdef.infer([v.type for v in op.operands], op.attrs, op.regions)
    except (ValueError, IndexError, TypeError) as error:
        _report(found, op, f"{where}: {error}")
        return
    given = tuple(v.type for v in op.results)
    if types != given:
        want, have = (", ".join(str(t) for t in x) or "none" for x in (types, given))
        _report(found, op, f"{where} requires results {want}, got {have}")


def _report(found: list[Diagnostic], op: Op | None, message: str) -> None:
    found.append(Diagnostic("SW_IR_INVALID", message, op.loc if op else None))
