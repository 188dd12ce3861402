"""What a release of neuronx-cc refuses or does differently at import, enforced with the user's
location.

Each check looks at one op before its import rule does. Without a named release there are no checks:
this compiler then takes all it can. Sources are those of `surface/releases.py` and
`surface/operators.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np

from shardwright.compiler.diagnostics import CompileError
from shardwright.compiler.frontend.mlir import call_target
from shardwright.compiler.frontend.rules.microscaling import QUANTIZE, SCALED_DOT
from shardwright.compiler.frontend.rules.reduce import reduction_kinds
from shardwright.compiler.frontend.rules.registry import Check, Site, refuse
from shardwright.compiler.ir.facts import behind, stored
from shardwright.compiler.ir.ops import ConstantAttrs
from shardwright.compiler.ir.traits import CASTS, VIEWS
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.surface.operators import Operator, added_later, calls_added_later
from shardwright.compiler.surface.releases import Profile
from shardwright.compiler.surface.timeline import Row, Subject, behaviour, row_of

_PASS_THROUGH = VIEWS | CASTS
_TABLE_REDUCTIONS = ("add", "multiply", "max", "min")
OUTPUT_LIMIT_BYTES = 4 * 10**9
"""documented: error page EVRF024, 4 GB per output tensor."""


def checks_for(
    profile: Profile, generation: str = "", fp8_as_e4m3: bool = False
) -> dict[str, Check]:
    """MLIR op name, or target of a custom call, -> check, for a release and the NeuronCore of a
    `generation` (none: of any); without one for the own profile but for those of the NeuronCore.
    """
    found = {} if profile.is_own else _of_release(profile)
    calls = (
        dict.fromkeys((QUANTIZE, SCALED_DOT), _mx_check(generation, fp8_as_e4m3))
        if generation
        else {}
    )
    calls = {**calls, **found}
    if any(not name.startswith(_STABLEHLO) for name in calls):
        calls["stablehlo.custom_call"] = lambda site: _call(site, calls)
    return calls


_STABLEHLO = ("stablehlo.", "chlo.")


def _of_release(profile: Profile) -> dict[str, Check]:
    found: dict[str, Check] = {
        "stablehlo.gather": _gather,
        "stablehlo.reduce": lambda site: _reduce(site, profile),
        "stablehlo.reduce_window": _reduce_window,
    }
    if not profile.has("pow_any_exponent"):
        found["stablehlo.power"] = _power
    if not profile.has("dynamic_update_index"):
        found["stablehlo.dynamic_update_slice"] = _dynamic_update
    if not profile.has("rng_seed_used"):
        found["stablehlo.rng_bit_generator"] = _ignore_seed
    for name, row in added_later(profile).items():
        found[f"stablehlo.{name}"] = _not_yet(row, profile)
    for name, call in calls_added_later(profile).items():
        found[name] = _not_yet(call, profile)
    return found


def _mx_check(generation: str, fp8_as_e4m3: bool) -> Check:
    """Microscaling calls: of trn3 on, and not where f8E4M3FN is taken as another type."""

    def check(site: Site) -> None:
        name = call_target(site.op)
        if fp8_as_e4m3 or generation in CORES_WITHOUT_MX:
            refuse(
                "NCC_EVRF051",
                f"{name} requires trn3 without --experimental-unsafe-fp8e4m3fn-as-fp8e4m3, got"
                f" NeuronCore-{generation}{' with it' if fp8_as_e4m3 else ''}",
                "compile for trn3, or compute the product in bf16",
            )

    return check


CORES_WITHOUT_MX = ("v1", "v2", "v3")
"""Generations without microscaling formats (documented: error page EVRF051, NKI's quantize_mx)."""


def check_outputs(graph: Graph, profile: Profile) -> None:
    """Refuse output tensors over 4 GB where the release did. Raises CompileError NCC_EVRF024."""
    if profile.is_own or not profile.has("output_over_4gb_refused"):
        return
    for number, value in enumerate(graph.outputs):
        if value.type.num_bytes > OUTPUT_LIMIT_BYTES:
            made = graph.producers().get(value)
            raise CompileError(
                "NCC_EVRF024",
                f"output {number} requires at most {OUTPUT_LIMIT_BYTES} bytes, got"
                f" {value.type.num_bytes} of {value.type}",
                made.loc if made else None,
                "split the output, or name another --compiler-version-profile",
            )


def check_types(graph: Graph, profile: Profile) -> None:
    """Refuse element types that the release does not have yet. Raises CompileError NCC_ESPP047."""
    if profile.is_own:
        return
    inputs = [(value, None) for value in graph.inputs]
    for value, op in (*inputs, *_made(graph)):
        row = row_of(Subject.TYPE, value.type.dtype.value)
        if not profile.holds(row):
            raise CompileError(
                "NCC_ESPP047",
                f"elements of {row.name} require release {row.since}, the profile is {profile}",
                op.loc if op else None,
                f"use fp16 or bf16, or name --compiler-version-profile {row.since} or newer",
            )


def _made(graph: Graph) -> Iterator[tuple[Value, Op]]:
    """Every value that an op of a graph makes, those of its regions too."""
    for op in graph.ops:
        yield from ((value, op) for value in op.results)
        for region in op.regions:
            yield from _made(region)


def _not_yet(row: Operator | Row, profile: Profile) -> Check:
    def check(_: Any) -> None:
        _refuse(
            f"operator {row.name} requires release {row.since}, the profile is {profile}",
            "`shardwright list-operators` prints those of a release; name"
            f" --compiler-version-profile {row.since} or newer",
        )

    return check


def _call(site: Site, checks: Mapping[str, Check]) -> None:
    """A custom call: the check of its target."""
    check = checks.get(call_target(site.op))
    if check:
        check(site)


def _refuse(message: str, hint: str) -> NoReturn:
    refuse("NCC_EVRF001", message, hint)


def _power(site: Site) -> None:
    """Exponents: integers known at compile time."""
    exponent = _constant(site, site.operands[1])
    if exponent is None or not np.all(exponent == np.round(exponent)):
        got = "a computed value" if exponent is None else f"{exponent.flat[0]}"
        since = behaviour("pow_any_exponent").since
        _refuse(
            f"Pow requires a constant integer exponent before {since}, got {got}",
            "write it with exp and log, or name a newer release",
        )


def _dynamic_update(site: Site) -> None:
    """Indices: constants."""
    if any(_constant(site, value) is None for value in site.operands[2:]):
        _refuse(
            "DynamicUpdateSlice requires constant indices before"
            f" {behaviour('dynamic_update_index').since}, got a computed one",
            "use jnp.where with an iota mask, or name a newer release",
        )


def _gather(site: Site) -> None:
    """Indexed dims and window dims: disjoint, so every indexed dim is collapsed or batching."""
    from jaxlib.mlir.dialects import stablehlo

    numbers = stablehlo.GatherDimensionNumbers(site.op.attributes["dimension_numbers"])
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    window = {d for d in range(site.operands[0].type.rank) if d not in gone}
    both = sorted(window & set(numbers.start_index_map))
    if both:
        _refuse(
            "Gather requires start_index_map and remapped offset dims to be disjoint, got"
            f" {both} in both",
            "index whole rows, or use dynamic_slice",
        )


def _reduce(site: Site, profile: Profile) -> None:
    """Kinds: min, max, add, multiply; boolean `or` from the release that maps it to add."""
    count = len(site.operands) // 2
    allowed = (*_TABLE_REDUCTIONS, *(("or",) if profile.has("bool_add_is_or") else ()))
    wrong = [kind for kind in reduction_kinds(site, count) if kind not in allowed]
    if wrong:
        _refuse(
            f"Reduce requires one of {', '.join(allowed)}, got {wrong[0]}",
            "convert to a number and use max or min",
        )
    if any(_constant(site, value) is None for value in site.operands[count:]):
        _refuse(
            "Reduce requires a constant init value, got a computed one",
            "combine the init value after the reduction",
        )


def _reduce_window(site: Site) -> None:
    """One operand and its start value (error page NCC_EVRF019)."""
    if len(site.operands) != 2:
        refuse(
            "NCC_EVRF019",
            f"reduce_window requires one operand and one start value, got {len(site.operands)}"
            " operands",
            "reduce every operand on its own, or name no --compiler-version-profile",
        )


def _ignore_seed(site: Site) -> None:
    """The seed is accepted and not used: the state becomes zeros."""
    (state,) = site.operands
    zeros = ConstantAttrs(bytes(state.type.dtype.bytes), state.type)
    site.operands = (site.emit("constant", (), zeros).result,)


def _constant(site: Site, value: Value) -> np.ndarray | None:
    """The number a value always has, also behind a broadcast or a conversion."""
    made = {op.results[0]: op for op in site.scope.ops if op.results}
    held = stored(made.get(behind(value, made, lambda op: op.name in _PASS_THROUGH)))
    return site.constant(value) if held is None else held.array()
