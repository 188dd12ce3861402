"""What PyTorch's terms of distribution come to here: keys of a job, and a row per term that says
what was said, what is done, and where they differ why.

Every term of a `Distribution` ends in a row; one without keys has no counterpart, or changes
nothing. `pytorch.py` reads the files.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from shardwright.compiler.diagnostics import UNKNOWN_LOC, Loc, UsageError
from shardwright.compiler.frontend.pytorch.distribution import (
    AXIS_NAMES,
    Distribution,
    Parallel,
    Precision,
    Recompute,
    Style,
    Unit,
    axis_named,
    matches,
    matching,
    pattern_of,
)
from shardwright.sharding.partition.mesh import AXES
from shardwright.sharding.settings import MAX_GROUP, MAX_SHIFT
from shardwright.sharding.strategies.tensor_plan import plan_text

DIFFERS = "SW_TORCH_TERM"
"""The code of a row where what is done is not what was said."""
_DDP_BUCKET_MB = 25  # of DistributedDataParallel where bucket_cap_mb is not said
_SCHEDULES = {
    "ScheduleGPipe": "gpipe",
    "Schedule1F1B": "1f1b",
    "ScheduleInterleaved1F1B": "interleaved",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A row: what was said (and where), the keys of a job that it gives or what is done in words,
    and why that is not the same, where it is not."""

    term: str
    said: str
    loc: Loc = UNKNOWN_LOC
    keys: Mapping[str, Any] = field(default_factory=dict)
    does: str = ""
    why: str = ""

    @property
    def done(self) -> str:
        """What is done, in a user's words."""
        told = [f"{key} = {_shown(value)}" for key, value in self.keys.items()]
        return "; ".join([*told, *([self.does] if self.does else [])]) or "nothing"

    def as_dict(self) -> dict[str, Any]:
        """The row of the report."""
        return {
            "term": self.term,
            "said": self.said,
            "file": self.loc.file,
            "line": self.loc.line,
            "done": self.done,
            "keys": dict(self.keys),
            "code": DIFFERS if self.why else "",
            "why": self.why,
        }


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def terms_of(said: Distribution) -> tuple[Term, ...]:
    """The rows of a distribution, in the order of its parts. Raises UsageError (SW_TORCH_MESH,
    SW_TORCH_UNITS, SW_TORCH_SPLIT) for what cannot be."""
    if not (said.units or said.replicated or said.parallel or said.pipeline or said.axes):
        raise UsageError(
            "SW_TORCH_UNITS",
            "a distribution requires a mesh, fully_shard, parallelize_module, DDP or a pipeline,"
            " got none",
            hint="call the function that distributes the model, and return the model",
        )
    parts = (_mesh, _strategy, _units, _replicas, _parallel, _recompute, _pipeline, _others)
    return tuple(row for part in parts for row in part(said))


def tables_of(terms: Sequence[Term]) -> dict[str, dict[str, Any]]:
    """Tables of a job; of a key that several rows give the last counts."""
    tables: dict[str, dict[str, Any]] = {}
    for row in terms:
        for key, value in row.keys.items():
            table, _, name = key.partition(".")
            tables.setdefault(table, {})[name] = value
    return tables


def roles_of(said: Distribution) -> dict[str, str]:
    """The axis of ours that every axis of the mesh is: by its use, else by its name. Raises
    UsageError (SW_TORCH_MESH)."""
    names = [axis.name for axis in said.axes]
    roles: dict[str, str] = {}

    def used(axes: Collection[str], role: str) -> None:
        for name in axes:
            own = axis_named(name)
            keeps = role == "dp_shard" and own in ("cp", "ep")  # which shares state too
            roles.setdefault(name, own if keeps else role)

    for unit in said.units:
        used(unit.replicas, "dp_replicate")
        used(unit.axes, "dp_shard")
    for one in said.parallel:
        used(one.axes, "tp")
    used(said.pipeline.axes if said.pipeline else (), "pp")
    for copy in said.replicated:
        used(copy.axes, "dp_replicate")
    for name in names:
        role = roles.get(name) or axis_named(name)
        if not role:
            known = ", ".join(AXIS_NAMES)
            raise UsageError(
                "SW_TORCH_MESH",
                f"a dim of a DeviceMesh requires a use or a known name, got {name}",
                said.mesh_loc,
                f"use it in fully_shard, parallelize_module or a pipeline, or name it {known}",
            )
        roles[name] = role
    return {name: roles[name] for name in names}


def _mesh(said: Distribution) -> Iterator[Term]:
    """Sizes of the mesh."""
    if not said.axes:
        return
    roles = roles_of(said)
    sizes: dict[str, int] = {}
    for axis in said.axes:
        role = "dp_shard" if roles[axis.name] == "ep" else roles[axis.name]
        sizes[role] = sizes.get(role, 1) * axis.size
        if roles[axis.name] == "ep":
            sizes["ep"] = sizes.get("ep", 1) * axis.size
    if not said.units and not said.replicated and sizes.get("dp_shard", 1) > 1 and said.parallel:
        sizes["dp_replicate"] = sizes.get("dp_replicate", 1) * sizes.pop("dp_shard")
    order = [roles[axis.name] for axis in said.axes if axis.size > 1]
    places = [AXES.index(role) for role in order]
    moved = any(one > then for one, then in pairwise(places))
    ours = sorted((axis for axis in sizes if sizes[axis] > 1), key=AXES.index)
    why = f"ranks are in the order {', '.join(AXES)} here (cluster.placement)" if moved else ""
    yield Term(
        term="DeviceMesh",
        said=", ".join(f"{axis.name}={axis.size}" for axis in said.axes),
        loc=said.mesh_loc,
        keys={f"mesh.{axis}": sizes[axis] for axis in ours} or {"mesh.dp_shard": 1},
        why=why,
    )


def _strategy(said: Distribution) -> Iterator[Term]:
    """The name of the strategy."""
    if said.units:
        name, what, loc = "fsdp", "fully_shard", said.units[0].loc
    elif said.replicated:
        name, what, loc = "generic", "DistributedDataParallel", said.replicated[0].loc
    else:
        first = said.parallel[0].loc if said.parallel else said.mesh_loc
        name, what, loc = "generic", "no data parallel wrapper", first
    keys: dict[str, Any] = {"strategy.name": name}
    if name == "generic" and said.parallel:
        keys = {"strategy.name": "llm-training", "strategy.zero": 0}
    yield Term(term="data parallelism", said=what, loc=loc, keys=keys)


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


def _units(said: Distribution) -> Iterator[Term]:
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
        said=f"{number} units of {size} layers" if number else f"a unit for every {size}",
        loc=units[0].loc,
        keys={"strategy.layers_per_group": min(size, MAX_GROUP)},
        why=why,
    )
    yield _kept_layers(pattern, units)
    yield from _prefetch(said, units)


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
        said=told or ", ".join(dict.fromkeys(_shown(value) for value in values)),
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
        said="default (false)" if unit.reshard is None else _shown(unit.reshard),
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
    values = ["default" if unit.reshard is None else _shown(unit.reshard) for unit in beside]
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
    yield from _policy(policy, where.loc, differs)


def _policy(policy: Precision, loc: Loc, differs: str = "") -> Iterator[Term]:
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


def _replicas(said: Distribution) -> Iterator[Term]:
    for one in said.replicated:
        bucket = one.bucket_mb or _DDP_BUCKET_MB
        default = "" if one.bucket_mb else " (default)"
        yield Term(
            term=f"DistributedDataParallel of {one.module or 'the model'}",
            said=f"bucket_cap_mb {bucket}{default}",
            loc=one.loc,
            keys={"strategy.zero": 0, "strategy.bucket_mb": bucket},
        )
        yield from _policy(one.precision, one.loc)


def _parallel(said: Distribution) -> Iterator[Term]:
    """Plans of `parallelize_module`: which dim of which weight lies over `tp`."""
    if not said.parallel:
        return
    rows: dict[tuple[str, Style], list[Parallel]] = {}
    for one in said.parallel:
        rows.setdefault((pattern_of(one.module), one.style), []).append(one)
    weights: dict[tuple[str, int], None] = {}
    for (pattern, style), found in rows.items():
        first = found[0]
        split = [(f"{pattern}.{name}", dim) for name, dim in first.weights if name == "weight"]
        weights |= dict.fromkeys(split)
        why = _partly(said, pattern, found)
        yield Term(
            term=f"{style} {pattern or 'the model'}",
            said=_style_text(first),
            loc=first.loc,
            does=_style_done(style, split),
            why=why or _style_differs(first),
        )
    if weights:
        yield Term(
            term="parallelize_module",
            said=f"{len(weights)} weights over tp",
            loc=said.parallel[0].loc,
            keys={"strategy.tensor_plan": plan_text(list(weights))},
            does="beside what the strategy finds by itself: SW_TENSOR_PLAN of the report",
        )
    sequence = [one for one in said.parallel if one.style is Style.SEQUENCE]
    scattered = [one for one in said.parallel if one.outputs == "Shard(1)"]
    has_any = bool(sequence or scattered)
    yield Term(
        term="sequence parallelism",
        said=f"{len(sequence)} SequenceParallel modules" if has_any else "none",
        loc=(sequence or scattered or said.parallel)[0].loc,
        keys={"strategy.sequence_parallel": has_any},
    )


def _partly(said: Distribution, pattern: str, found: Sequence[Parallel]) -> str:
    """Why a plan of some layers is one of all."""
    if not said.modules or "*" not in pattern:
        return ""
    all_of = matching(pattern, said.modules)
    missing = len(all_of) - len({one.module for one in found})
    if missing <= 0:
        return ""
    return f"said of {len(found)} of {len(all_of)} layers: layers of one loop are split alike here"


def _style_text(one: Parallel) -> str:
    told = [
        f"{name} {value}" for name, value in (("in", one.inputs), ("out", one.outputs)) if value
    ]
    return ", ".join(told) or "default layouts"


def _style_done(style: Style, split: Sequence[tuple[str, int]]) -> str:
    if style.splits_weights:
        return ", ".join(f"dim {dim} over tp" for _, dim in split)
    if style is Style.SEQUENCE:
        return "tokens over tp between blocks"
    return "found: what an op needs whole is gathered in front of it"


def _style_differs(one: Parallel) -> str:
    if one.style is Style.COLUMN and one.outputs == "Replicate":
        return "what it makes stays split over tp until an op needs it whole (logits: never)"
    return ""


def _recompute(said: Distribution) -> Iterator[Term]:
    """Checkpointed modules: one way for all layers."""
    if not said.checkpointed:
        yield Term(
            term="activation checkpointing",
            said="none",
            keys={"strategy.remat": "none"},
        )
        return
    by_pattern: dict[str, list[Any]] = {}
    for one in said.checkpointed:
        by_pattern.setdefault(pattern_of(one.module), []).append(one)
    names = {name for name, _ in said.lists}
    for pattern, found in by_pattern.items():
        keeps = Counter(one.keeps for one in found).most_common(1)[0][0]
        holder, is_item, _ = pattern.partition(".*")
        is_layer = pattern.endswith("*") and (not names or holder in names)
        remat, why = keeps.value, ""
        if not is_layer and is_item:
            remat = Recompute.SELECTIVE.value
            why = "parts of a layer: products with weights are kept here, the rest is not"
        elif not is_layer and said.lists:
            why = f"recomputed are layers here, not {pattern or 'the whole model'}"
        elif is_layer and said.modules:
            number = dict(said.lists)[holder]
            if len(found) < number:
                remat = keeps.value if 2 * len(found) >= number else "none"
                why = f"{len(found)} of {number} layers: layers are recomputed alike here"
        if keeps is Recompute.SELECTIVE and not why:
            why = "a policy of the user's: products with weights are kept here"
        yield Term(
            term=f"checkpoint {pattern or 'the model'}",
            said=f"{keeps.value}, {len(found)} modules",
            loc=found[0].loc,
            keys={"strategy.remat": remat},
            why=why,
        )


def _pipeline(said: Distribution) -> Iterator[Term]:
    """Cut points as layers of stages, schedule and micro-batches. Raises UsageError."""
    pipeline = said.pipeline
    if pipeline is None:
        return
    if pipeline.cuts:
        sizes = _layers_of_parts(said)
        keys: dict[str, Any] = {"strategy.stage_layers": ", ".join(map(str, sizes))}
        pp = math.prod(a.size for a in said.axes if roles_of(said)[a.name] == "pp")
        parts, why = len(sizes), ""
        if pp == 1:
            keys["mesh.pp"] = parts
        elif parts % pp:
            raise _split(f"cuts for {pp} stages", f"{parts} parts", pipeline.cuts[0].loc)
        elif parts > pp:
            keys |= {"strategy.stage_parts": parts // pp, "strategy.schedule": "interleaved"}
        yield Term(
            term="pipeline split_spec",
            said=", ".join(
                f"{'behind' if c.is_behind else 'at'} {c.module}" for c in pipeline.cuts
            ),
            loc=pipeline.cuts[0].loc,
            keys=keys,
            does="embedding in the first stage, head and loss in the last",
            why=why,
        )
    if pipeline.schedule:
        known = _SCHEDULES.get(pipeline.schedule)
        yield Term(
            term="pipeline schedule",
            said=pipeline.schedule,
            loc=pipeline.loc,
            keys={"strategy.schedule": known or "1f1b"},
            why="" if known else f"schedules here are {', '.join(_SCHEDULES.values())}",
        )
    if pipeline.micro_batches:
        roles = roles_of(said)
        ways = math.prod(a.size for a in said.axes if roles[a.name] not in ("pp", "tp", "cp"))
        yield Term(
            term="pipeline micro-batches",
            said=str(pipeline.micro_batches),
            loc=pipeline.loc,
            keys={"strategy.global_batch": pipeline.micro_batches * ways},
            does="of one sample per rank, unless the job says --micro-batch and --global-batch",
        )


def _layers_of_parts(said: Distribution) -> list[int | str]:
    """Layers of every part; the last is `*` where the model is not known. Raises UsageError."""
    assert said.pipeline is not None
    firsts: list[int] = []
    holders = set()
    for cut in said.pipeline.cuts:
        holder, _, number = cut.module.rpartition(".")
        if not number.isdecimal() or (said.modules and holder not in dict(said.lists)):
            required = "cuts between layers (modules of one ModuleList)"
            raise _split(required, repr(cut.module), cut.loc)
        holders.add(holder)
        firsts.append(int(number) + cut.is_behind)
    if len(holders) > 1:
        required = "cuts between the layers of one list"
        raise _split(required, ", ".join(sorted(holders)), said.pipeline.cuts[0].loc)
    ends = [0, *sorted(firsts)]
    total = dict(said.lists).get(next(iter(holders)))
    sizes: list[int | str] = [after - before for before, after in pairwise(ends)]
    rest = total - ends[-1] if total else 1
    if min([*(size for size in sizes if isinstance(size, int)), rest]) < 1:
        told = ", ".join(cut.module for cut in said.pipeline.cuts)
        raise _split("layers between any two cuts, and at both ends", told, said.pipeline.loc)
    return [*sizes, rest if total else "*"]


def _split(required: str, got: str, loc: Loc) -> UsageError:
    return UsageError(
        "SW_TORCH_SPLIT",
        f"a pipeline requires {required}, got {got}",
        loc,
        "cut in front of a layer, for example layers.8; without cuts stages are shared out by cost",
    )


_NOTHING = "the step is compiled as a whole"
_WHY: Mapping[str, tuple[Mapping[str, Any], str, str]] = {
    "torch.compile": ({}, _NOTHING, ""),
    "forward_prefetch": ({}, "see prefetching", ""),
    "backward_prefetch": ({}, "", "backward gathers as early as forward does"),
    "requires_gradient_sync": ({"strategy.reduce_gradients": "last"}, "", ""),
    "requires_all_reduce": (
        {},
        "",
        "sums over copies are made with those over shards here (strategy.reduce_gradients)",
    ),
    "is_last_backward": ({}, "known from the number of micro-batches", ""),
    "gradient_divide_factor": ({}, "", "gradients are means over all samples here"),
    "unshard": ({}, "", "gathers stand where the strategy puts them"),
    "reshard": ({}, "", "gathers stand where the strategy puts them"),
    "torch.utils.checkpoint": ({}, "kept as it is called: the model's own recomputation", ""),
    "distribute_tensor": ({}, "", "a tensor lies as its index does; say it in a plan"),
    "distribute_module": ({}, "", "a module lies as its plan says; say it in a plan"),
}
"""Terms without a place of their own -> keys, what is done, why that differs."""


def _others(said: Distribution) -> Iterator[Term]:
    for other in said.others:
        keys, does, why = _WHY.get(other.term, ({}, "", "it has no counterpart here"))
        if other.term == "requires_gradient_sync" and other.value != "False":
            keys, does = {}, "reduced after each micro-batch"
        yield Term(
            term=other.term,
            said=other.value or "called",
            loc=other.loc,
            keys=keys,
            does=does,
            why=why,
        )
