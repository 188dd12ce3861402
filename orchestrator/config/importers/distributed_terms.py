"""What PyTorch's terms of distribution come to here: keys of a job, and a row per term that says
what was said, what is done, and where they differ why.

Every term of a `Distribution` ends in a row; one without keys has no counterpart, or changes
nothing. `pytorch.py` reads the files.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from shardwright.compiler.diagnostics import Loc, UsageError
from shardwright.compiler.frontend.pytorch.distribution import (
    AXIS_NAMES,
    Distribution,
    Parallel,
    Recompute,
    Style,
    axis_named,
    matching,
    pattern_of,
)
from shardwright.orchestrator.config.importers.term import Term
from shardwright.orchestrator.config.importers.unit_terms import policy_terms, unit_terms
from shardwright.sharding.partition.mesh import AXES
from shardwright.sharding.strategies.tensor_plan import plan_text

_DDP_BUCKET_MB = 25  # of DistributedDataParallel where bucket_cap_mb is not said
_SCHEDULES = {
    "ScheduleGPipe": "gpipe",
    "Schedule1F1B": "1f1b",
    "ScheduleInterleaved1F1B": "interleaved",
}


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
    parts = (
        _mesh,
        _strategy,
        unit_terms,
        _replicas,
        _parallel,
        _recompute,
        _pipeline,
        _batch,
        _others,
    )
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
        yield from policy_terms(one.precision, one.loc)


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


def _batch(said: Distribution) -> Iterator[Term]:
    """The batch of a process: one micro-batch, unless a pipeline says how many it makes of it."""
    if said.samples and not (said.pipeline and said.pipeline.micro_batches):
        yield Term(
            term="batch of a process",
            said=f"{said.samples} samples",
            loc=said.mesh_loc,
            keys={"strategy.micro_batch": said.samples},
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
    "ShardingStrategy": ({}, "", "shards lie over all ranks: give it a device_mesh of two dims"),
    "fully_shard(shard_placement_fn=...)": ({}, "", "the largest dim that divides is sharded"),
    "fully_shard(ignored_params=...)": ({}, "", "every weight is sharded"),
    "ignored_modules": ({}, "", "every weight is sharded"),
    "split_policy": ({}, "", "stages are shared out by cost (strategy.stage_balance)"),
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
