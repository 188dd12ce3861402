"""Units of FSDP as settings: how many layers are one, what is kept and fetched early, types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.compiler.diagnostics import Loc
from shardwright.compiler.frontend.pytorch.distribution import (
    Distribution,
    Precision,
    Unit,
    matches,
    pattern_of,
)
from shardwright.orchestrator.config.importers.term import Term, shown
from shardwright.sharding.settings import MAX_GROUP, MAX_SHIFT


@dataclass(frozen=True, slots=True)
class _Units:
    """Units by where their modules are: those of layers, by pattern, and those beside them."""

    layers: Mapping[str, list[Unit]]
    inner: Mapping[str, list[Unit]]
    beside: list[Unit]


def _sorted(said: Distribution) -> _Units:
    """Units whose modules are numbered are of layers; inside of one another they are inner."""
    found: dict[str, list[Unit]] = {}
    beside = []
    for unit in said.units:
        patterns = {pattern_of(module) for module in unit.modules}
        pattern = min(patterns, key=len)
        if "*" in pattern:
            found.setdefault(pattern, []).append(unit)
        else:
            beside.append(unit)
    lists = {name for name, _ in said.lists}
    layers: dict[str, list[Unit]] = {}
    inner: dict[str, list[Unit]] = {}
    for pattern, units in found.items():
        holder = pattern.rpartition(".*")[0]
        is_layer = pattern.endswith("*") and (not lists or holder in lists)
        (layers if is_layer else inner)[pattern] = units
    return _Units(layers, inner, beside)


def unit_terms(said: Distribution) -> Iterator[Term]:
    """Units of FSDP: their size, their precision, what is kept, what is fetched early."""
    if not said.units:
        return
    by_place = _sorted(said)
    if by_place.layers:
        for pattern, units in by_place.layers.items():
            yield from _layer_units(said, pattern, units)
    elif not by_place.inner:
        yield from _whole_unit(said)
    yield from _inner_units(by_place)
    if by_place.layers or by_place.inner:
        yield from _units_beside(said, by_place)
    yield from _precision(said, by_place)
    for unit in said.units:
        if unit.offload:
            yield Term(
                term="offload_policy",
                said=f"CPUOffloadPolicy of {_names(unit)}",
                loc=unit.loc,
                why="parameters and moments stay in device memory here; strategy.remat = offload"
                " keeps activations in that of the host",
            )
            break


def _names(unit: Unit) -> str:
    return ", ".join(module or "the model" for module in unit.modules)


def _layer_units(said: Distribution, pattern: str, units: list[Unit]) -> Iterator[Term]:
    sizes = Counter(unit.group or len(unit.modules) for unit in units)
    size, _ = sizes.most_common(1)[0]
    why = ""
    if len(sizes) > 1 and {*sizes} - {size} != {
        sum(u.group or len(u.modules) for u in units) % size
    }:
        told = ", ".join(f"{count} of {number}" for number, count in sorted(sizes.items()))
        why = f"units differ ({told} layers): all have as many here"
    if size > MAX_GROUP:
        why = f"a unit has at most {MAX_GROUP} layers here: its code is one function"
    number = len(units) if not units[0].group else 0
    yield Term(
        term=f"fully_shard {pattern}",
        said=f"{number} units of {_layers(size)}" if number else f"a unit for {_layers(size)}",
        loc=units[0].loc,
        keys={"strategy.layers_per_group": min(size, MAX_GROUP)},
        why=why,
    )
    yield _kept_layers(pattern, units)
    yield from _prefetch(said, units)


def _layers(number: int) -> str:
    return f"{number} layer" if number == 1 else f"{number} layers"


def _kept_layers(pattern: str, units: list[Unit]) -> Term:
    """`reshard_after_forward` of the units of layers; all have one here."""
    values = [True if unit.reshard is None else unit.reshard for unit in units]
    kept = [value is False or value == 0 for value in values]
    most = 2 * sum(kept) > len(kept)
    why = ""
    if any(kept) and not all(kept):
        which = "the last" if kept == [False] * (len(kept) - 1) + [True] else f"{sum(kept)}"
        why = f"{which} of {len(kept)} differs: layers of one loop are kept alike here"
        if which == "the last":
            why += "; its gather stands right behind that of the forward pass"
    ranks = sorted({v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 1})
    if ranks:
        why = f"weights are resharded over all ranks here, not over {ranks[0]}: backward gathers"
        why += " the same bytes from more of them"
    told = "default (true)" if all(unit.reshard is None for unit in units) else ""
    return Term(
        term=f"reshard_after_forward of {pattern}",
        said=told or ", ".join(dict.fromkeys(shown(value) for value in values)),
        loc=units[-1].loc if why else units[0].loc,
        keys={"strategy.reshard_after_forward": not most},
        why=why,
    )


def _prefetch(said: Distribution, units: list[Unit]) -> Iterator[Term]:
    """A unit is gathered while the one before it computes, and reduced beside the next: PyTorch's
    own order, or so many units early as the code says."""
    asked = [other for other in said.others if other.term == "forward_prefetch"]
    numbers = [int(other.value) for other in asked if other.value.isdecimal()]
    early = min(max(numbers, default=1), MAX_SHIFT)
    yield Term(
        term="prefetching",
        said=f"forward, {early} units" if numbers else "implicit: the next unit",
        loc=asked[0].loc if asked else units[0].loc,
        keys={
            "strategy.early_all_gather_shift": early,
            "strategy.late_reduce_scatter_shift": 1,
        },
        why="backward gathers as early as forward here" if numbers and early > 1 else "",
    )


def _whole_unit(said: Distribution) -> Iterator[Term]:
    """The model as one unit: gathered once, kept up to the end of the backward pass."""
    unit = said.units[-1]
    layers = max((number for _, number in said.lists), default=MAX_GROUP)
    why = "layers and what is beside them are two units here"
    if layers > MAX_GROUP:
        why = f"units have at most {MAX_GROUP} layers here, and what is beside them is one"
    yield Term(
        term=f"fully_shard of {_names(unit)}",
        said="one unit of all weights",
        loc=unit.loc,
        keys={
            "strategy.layers_per_group": min(layers, MAX_GROUP),
            "strategy.root_unit": "all",
        },
        why=why,
    )
    keeps = unit.reshard is not None and bool(unit.reshard)
    yield Term(
        term="reshard_after_forward of the root",
        said="default (false)" if unit.reshard is None else shown(unit.reshard),
        loc=unit.loc,
        keys={"strategy.reshard_after_forward": keeps, "strategy.reshard_root": keeps},
    )


def _inner_units(by_place: _Units) -> Iterator[Term]:
    for pattern, units in by_place.inner.items():
        keys = {} if by_place.layers else {"strategy.layers_per_group": 0}
        one = "a layer's weights are one unit" if by_place.layers else "every weight is one alone"
        yield Term(
            term=f"fully_shard {pattern}",
            said=f"{len(units)} units inside of layers",
            loc=units[0].loc,
            keys=keys,
            why=f"units are whole layers here: {one}",
        )
        if not by_place.layers:
            yield _kept_layers(pattern, units)


def _units_beside(said: Distribution, by_place: _Units) -> Iterator[Term]:
    """Units of what lies outside of layers: embedding, last norm, head."""
    beside = by_place.beside
    if said.modules:
        beside = [unit for unit in beside if unit.parameters]
    if not beside:
        if by_place.beside:
            root = by_place.beside[-1]
            told = "holds no weight of its own"
            yield Term(term="fully_shard of the model", said=told, loc=root.loc, does="the same")
        elif said.modules:
            yield Term(
                term="fully_shard of the model",
                said="none",
                loc=said.units[-1].loc,
                does="one unit of what no other holds",
                why="without it PyTorch keeps those parameters whole and does not reduce their"
                " gradients",
            )
        return
    loc = beside[-1].loc
    names = "; ".join(map(_names, beside))
    if len(beside) == 1:
        unit, why = "all", ""
    else:
        ends = Counter(_is_behind(said, one, by_place) for one in beside)
        fits = max(ends.values()) == 1
        unit = "ends"
        why = "" if fits else "what lies in front of the layers is one unit here, and behind them"
    told = f"{len(beside)} units: {names}" if len(beside) > 1 else f"one unit: {names}"
    keys = {"strategy.root_unit": unit} if by_place.layers else {}
    yield Term(term="fully_shard beside layers", said=told, loc=loc, keys=keys, why=why)
    yield _kept_beside(said, beside, by_place)


def _is_behind(said: Distribution, unit: Unit, by_place: _Units) -> bool:
    """Whether a unit's modules come behind the layers, as the model lists its modules."""
    if not said.modules or unit.is_root:
        return unit.is_root
    last = max(
        (n for n, name in enumerate(said.modules) for p in by_place.layers if matches(p, name)),
        default=0,
    )
    return all(said.modules.index(module) > last for module in unit.modules)


def _kept_beside(said: Distribution, beside: list[Unit], by_place: _Units) -> Term:
    """`reshard_after_forward` beside layers: of what the backward pass reads, which the weights of
    an embedding in front of the layers are not."""
    read = [unit for unit in beside if _is_behind(said, unit, by_place)] or beside
    kept = [
        unit.reshard is False or unit.reshard == 0 or (unit.reshard is None and unit.is_root)
        for unit in read
    ]
    most = 2 * sum(kept) > len(kept)
    values = ["default" if unit.reshard is None else shown(unit.reshard) for unit in beside]
    mixed = any(kept) and not all(kept)
    why = "weights outside of layers are kept alike here" if mixed else ""
    return Term(
        term="reshard_after_forward beside layers",
        said=", ".join(dict.fromkeys(values)),
        loc=read[-1].loc,
        keys={"strategy.reshard_root": not most},
        why=why,
    )


def _precision(said: Distribution, by_place: _Units) -> Iterator[Term]:
    """MixedPrecisionPolicy, that of layers where units differ."""
    layers = [unit for units in by_place.layers.values() for unit in units] or list(said.units)
    policies = Counter(unit.precision for unit in layers)
    policy, _ = policies.most_common(1)[0]
    where = next(unit for unit in layers if unit.precision == policy)
    everywhere = {unit.precision for unit in said.units if unit.parameters or not said.modules}
    differs = (
        "units differ: all have the policy of the layers here" if everywhere - {policy} else ""
    )
    yield from policy_terms(policy, where.loc, differs)


def policy_terms(policy: Precision, loc: Loc, differs: str = "") -> Iterator[Term]:
    """A policy of types; `differs` says why not all units have it."""
    if policy == Precision():
        return
    keys: dict[str, Any] = {}
    why = differs
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        value = getattr(policy, name)
        if value == "float16":
            value, why = "bfloat16", f"{name} float16: the machine computes in bfloat16"
        if value == "bfloat16" or (value == "float32" and name == "reduce_dtype"):
            keys[f"strategy.{name}"] = value
    told = ", ".join(
        f"{name} {getattr(policy, name)}"
        for name in ("param_dtype", "reduce_dtype", "output_dtype")
        if getattr(policy, name)
    )
    does = "" if keys else "the model's own types"
    yield Term(term="MixedPrecisionPolicy", said=told, loc=loc, keys=keys, does=does, why=why)
