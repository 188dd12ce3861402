"""Traced programs (jaxprs) before they are lowered: what a result depends on, and kernels of other
machines in them.

Calls, loops and branches are equations with programs of their own among their parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwright.compiler.diagnostics import Diagnostic, ImportRuleError, Loc
from shardwright.compiler.frontend.locations import LocationReader
from shardwright.compiler.frontend.user_code import per_device

PMAP_FILE = "jax/_src/pmap.py"
"""Where jax has `pmap`, which is a `shard_map` of its own."""


def used_arguments(program: Any, result: int) -> list[bool]:
    """Per argument of a closed program whether a result depends on it, also through loops."""
    from jax.interpreters.partial_eval import dce_jaxpr

    wanted = [n == result for n in range(len(program.jaxpr.outvars))]
    used: list[bool] = dce_jaxpr(_silent(program.jaxpr), wanted)[1]
    return used


_CALLED = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "checkpoint": "jaxpr"}
"""Equations that compute their program once, and the parameter that holds it."""


def kept_arguments(program: Any, count: int) -> list[bool]:
    """Per argument of a closed program, of the first `count`, whether the result of its number is
    the argument itself, also behind calls and loops that hand it through, and behind an update of
    zeros (optax.set_to_zero)."""
    given = program.jaxpr.invars
    return [_source(program.jaxpr, n) is given[n] for n in range(count)]


def is_returned(program: Any, number: int) -> bool:
    """Whether a result of a closed program is the argument of its number, and nothing between."""
    return program.jaxpr.outvars[number] is program.jaxpr.invars[number]


def _source(program: Any, result: int) -> Any:
    """The variable that a result of a program is, as far back as it is only handed on."""
    makers = {value: (e, n) for e in program.eqns for n, value in enumerate(e.outvars)}
    value = program.outvars[result]
    while not hasattr(value, "val") and value in makers:  # a literal is no variable
        source = _handed(*makers[value]) or _added(makers[value][0], makers)
        if source is None:
            break
        value = source
    return value


def _added(equation: Any, makers: Mapping[Any, tuple[Any, int]]) -> Any:
    """The operand of an addition that zeros are added to; None of any other equation."""
    if equation.primitive.name not in _ADDING:
        return None
    result = equation.outvars[0].aval
    whole = [v for v in equation.invars if not _is_zero(v, makers)]
    return whole[0] if len(whole) == 1 and whole[0].aval == result else None


def _is_zero(value: Any, makers: Mapping[Any, tuple[Any, int]]) -> bool:
    """Whether a value is a zero of the program's text, or that as an array."""
    import numpy as np  # which the command goes without

    while not hasattr(value, "val"):
        equation = makers[value][0] if value in makers else None
        if equation is None or equation.primitive.name not in _OF_A_SCALAR:
            return False
        value = equation.invars[0]
    return bool(np.all(value.val == 0))


_ADDING = frozenset(("add", "add_any"))  # primitives of jax
_OF_A_SCALAR = frozenset(("broadcast_in_dim", "convert_element_type"))


def _handed(equation: Any, result: int) -> Any:
    """The operand that a result of an equation is; None where it is computed."""
    params, name = equation.params, equation.primitive.name
    key = "jaxpr" if name == "scan" else _CALLED.get(name, "")
    if not (inner := params.get(key)):
        return None
    body = getattr(inner, "jaxpr", inner)
    if name == "scan" and result >= params["num_carry"]:
        return None
    source = _source(body, result)
    if source not in body.invars:
        return None
    place = body.invars.index(source)
    is_other_carry = name == "scan" and place != params["num_consts"] + result
    return None if is_other_carry else equation.invars[place]


def check_kernels(program: Any, base_dir: str | None = None) -> None:
    """Refuse kernels of Pallas in a closed program, which are written for the units of a GPU or
    TPU; interpreted ones are ordinary operators.

    Raises: ImportRuleError SW_PALLAS at the user's line.
    """
    for equation, *calls in _equations(program.jaxpr, set()):
        if equation.primitive.name == "pallas_call" and not equation.params["interpret"]:
            raise ImportRuleError(
                "SW_PALLAS",
                "a step requires operators, got a kernel of Pallas, which is written for a GPU or"
                " TPU",
                _place((equation, *calls), base_dir),
                "call its jax.numpy form (attention: implementation='xla'), or give pallas_call"
                " interpret=True, which is slower code of ordinary operators",
            )


def check_pmap(program: Any, base_dir: str | None = None) -> None:
    """Refuse parts under `jax.pmap`, whose arguments have an axis of devices. Raises: UsageError
    SW_PMAP at the user's line."""
    for equations in _equations(program.jaxpr, set()):
        traces = [e.source_info.traceback for e in equations if e.source_info.traceback]
        files = (frame.file_name for trace in traces for frame in trace.frames)
        is_manual = equations[0].primitive.name == "shard_map"
        if is_manual and any(file.endswith(PMAP_FILE) for file in files):
            raise per_device("a function under jax.pmap", _place(equations, base_dir))


def check_groups(program: Any, base_dir: str | None = None) -> None:
    """Refuse collectives over parts of an axis. Raises: ImportRuleError at the user's line."""
    for equation, *calls in _equations(program.jaxpr, set()):
        groups = equation.params.get("axis_index_groups")
        if groups is not None:
            raise ImportRuleError(
                "NCC_EVRF001",
                f"{equation.primitive.name} requires whole axes of a mesh, got axis_index_groups"
                f" {groups}",
                _place((equation, *calls), base_dir),
                "give the mesh two axes in place of this one, and name the one that a group is",
            )


def check_nested(program: Any, base_dir: str | None = None) -> None:
    """Refuse gradients of a `shard_map` inside of another one: what jax keeps for the backward pass
    it places over the axes of both, of which the outer ones are taken (jax 0.10.2 refuses them too,
    when it lowers).

    Raises: ImportRuleError at the user's line.
    """
    for equation, *calls in _equations(program.jaxpr, set()):
        if equation.primitive.name != "shard_map":
            continue
        specs = (*equation.params["in_specs"], *equation.params["out_specs"])
        named = {axis for spec in specs for axis in _axes(spec)}
        taken = named - set(equation.params["newly_manual_axes"])
        if taken:
            raise ImportRuleError(
                "NCC_EVRF001",
                "shard_map inside of a shard_map requires values over its own axes, got the"
                f" gradient's residuals over {', '.join(sorted(taken))} too",
                _place((equation, *calls), base_dir),
                "jax takes no gradient of nested shard_map: make one over the axes of both",
            )


def _axes(spec: Any) -> Iterator[str]:
    """The axes that a PartitionSpec names."""
    for entry in spec:
        yield from (entry,) if isinstance(entry, str) else entry or ()


def manual_parts(program: Any, base_dir: str | None = None) -> tuple[Diagnostic, ...]:
    """The warning about parts that are written per rank and computed as code of whole values."""
    places = [
        _place(equations, base_dir)
        for equations in _equations(program.jaxpr, set())
        if equations[0].primitive.name == "shard_map"
    ]
    if not places:
        return ()
    lines = {str(place) for place in places}
    count = "1 part" if len(lines) == 1 else f"{len(lines)} parts"
    return (
        Diagnostic(
            "SW_SHARD_MAP",
            f"{count} written per rank (shard_map) computed as what every rank computes, side by"
            " side; the collectives are those the partitioner finds",
            places[0],
            "--explain collective shows them; strategy manual, over the axes of the shard_map, has"
            " its permutes and exchanges as they are written",
            "warning",
        ),
    )


def _place(equations: Sequence[Any], base_dir: str | None) -> Loc:
    """The user's line of an equation and what calls it: a function that is jitted itself is traced
    apart, and knows no frames around it."""
    traces = [e.source_info.traceback for e in equations if e.source_info.traceback]
    frames = [(frame.file_name, frame.line_num) for trace in traces for frame in trace.frames]
    return LocationReader(base_dir).innermost(frames)


def _equations(
    program: Any, seen: set[int], calls: tuple[Any, ...] = ()
) -> Iterator[tuple[Any, ...]]:
    """All equations, each with those whose programs it is in, the innermost first; each program
    once, since calls of one function share theirs."""
    if id(program) in seen:
        return
    seen.add(id(program))
    for equation in program.eqns:
        yield equation, *calls
        if equation.primitive.name == "pallas_call":
            continue
        for value in equation.params.values():
            for inner in _programs(value):
                yield from _equations(inner, seen, (equation, *calls))


def _programs(value: Any) -> Iterator[Any]:
    """The programs in a parameter of an equation."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from _programs(part)
    elif hasattr(value, "jaxpr"):
        yield value.jaxpr
    elif hasattr(value, "eqns"):
        yield value


def _silent(program: Any) -> Any:
    """A program without effects: what a step prints of a moment makes it no parameter."""
    if not program.effects:
        return program
    eqns = [
        eqn.replace(effects=frozenset(), params={k: _quiet(v) for k, v in eqn.params.items()})
        for eqn in program.eqns
    ]
    return program.replace(eqns=eqns, effects=frozenset())


def _quiet(value: Any) -> Any:
    """A parameter of an equation whose programs have no effects."""
    if isinstance(value, tuple):
        return tuple(map(_quiet, value))
    if hasattr(value, "jaxpr"):
        return value.replace(jaxpr=_silent(value.jaxpr))
    return _silent(value) if hasattr(value, "eqns") else value
