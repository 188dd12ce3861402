"""Which indices of a model go on the axes inside of its layers: sequence, experts, tensors.

Each step reads what the model's indices are, takes an axis and adds to the used layout; a model
that has no such index is refused. What data-parallel ranks store is the business of `state.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from shardwright.compiler.diagnostics import ShardingError
from shardwright.compiler.frontend.roles import WEIGHT_ROLES
from shardwright.compiler.ir.opdef import OPS, Kind
from shardwright.compiler.ir.types import Value
from shardwright.sharding.indices.dims import reached
from shardwright.sharding.indices.indices import Class, IndexClasses
from shardwright.sharding.indices.tensor_parallel import broken, cover, cut, expert_families, prices
from shardwright.sharding.settings import StrategySettings
from shardwright.sharding.strategies.decisions import Decisions
from shardwright.sharding.strategies.layout import expert_rows, query_dims, sequence_parallel_values
from shardwright.sharding.strategies.split import Split, rooms, spread
from shardwright.sharding.strategies.tensor_plan import TensorPlan, plan_of


def split_layers(step: Decisions, settings: StrategySettings) -> None:
    """Give the axes inside of layers their indices: `cp` the sequence, `ep` experts, `tp` the rest.

    Raises ShardingError for a model without the index an axis needs.
    """
    _split_sequence(step, "cp")
    _split_experts(step, "ep")
    _split_tensors(step, "tp", settings)


def _split_sequence(step: Decisions, axis: str) -> None:
    """Lay the sequence over `axis`. Raises ShardingError for a model without a sequence."""
    axes = step.real((axis,))
    if not axes:
        return
    _find_sequence(step)
    if not step.layout.sequence:
        raise ShardingError(
            "SW_SEQUENCE",
            f"mesh.{axis} requires a sequence dim that crosses layers, the step has none",
            hint=f"set mesh.{axis} to 1",
        )
    step.layout = replace(step.layout, sequence_axes=axes)


def _find_sequence(step: Decisions) -> None:
    """Read what crosses the layers as indices: the hidden dim, a feature index that every layer
    reads and adds to, and the sequence with its queries. A model without layers has neither.

    A dim is a position when a batch input has it (a table of learned positions has it too), or when
    no weight has it.
    """
    indices, samples = step.layout.indices, step.labels.dims
    batch, weights = step.values("batch"), step.values(*WEIGHT_ROLES)
    given = {f for v in batch for d, f in indices.families(v) if d != samples.get(v)}
    weighty = {f for v in weights for _, f in indices.families(v)}
    crossing = [s.loop.regions[0].inputs[carry] for s in step.scans for carry in s.boundaries]
    crossing += [value for run in step.runs for boundary in run.boundaries for value in boundary]
    found = {
        family
        for value in crossing
        if value in samples
        for dim, family in indices.families(value)
        if dim != samples[value] and value.type.shape[dim] > 1
    }
    sequence = frozenset(f for f in found if f in given or f not in weighty)
    step.layout = replace(step.layout, sequence=sequence, hidden=frozenset(found - sequence))
    step.layout = replace(step.layout, queries=query_dims(step.graph, step.layout))


def _split_tensors(step: Decisions, axis: str, settings: StrategySettings) -> None:
    """Split the tensor-parallel dims of the weights over `axis`, those of the user's plan where
    there is one; and, when asked, values with the hidden dim along their sequence.
    """
    ways = step.mesh.sizes.get(axis, 1)
    if ways == 1:
        return
    _find_sequence(step)
    weights = _matrices(step)
    found = _shared_out(step, weights, ways, plan=settings.tensor_plan)
    shares = found.shares
    step.mesh = step.mesh.refined(axis, shares.atoms)
    atoms = step.mesh.atoms(axis)
    split = {member: tuple(atoms[i] for i in numbers) for member, numbers in shares.classes.items()}
    step.layout = replace(step.layout, mesh=step.mesh, split=split)
    if found.plan is None:
        _warn_of_uneven(step, axis, weights)
    else:
        step.findings += found.plan.notes(step, axis, found.best)
    if settings.sequence_parallel and step.layout.sequence - _slid(step):
        along = sequence_parallel_values(step.graph, step.layout)
        step.layout = replace(step.layout, sequence_parallel_axes=atoms, spread=along)


SLIDING = (Kind.CONTRACTION, Kind.WINDOW)


def _slid(step: Decisions) -> set[Class]:
    """Families of dims that windows slide along: heights and widths of images are no sequence that
    could be apart between layers, since the next convolution needs its neighbours."""
    families = step.layout.indices.family
    windowed = (op for op in step.graph.walk() if OPS[op.name].kind in SLIDING)
    return {families(dim) for op in windowed for dim in cut(op)}


def padding_of(step: Decisions, settings: StrategySettings) -> dict[Class, Fraction]:
    """By how much families of weight dims grow, so that `tp` divides them; of those that tensor
    parallelism would split, were they even, and that parts of an axis do not fill anyway.
    """
    ways = step.mesh.sizes.get("tp", 1)
    if ways == 1 or not settings.pad_uneven:
        return {}
    _split_sequence(step, "cp")
    _split_experts(step, "ep")
    _find_sequence(step)
    indices, smallest = step.layout.indices, _smallest(step, _candidates(step))
    uneven = {f for f, size in smallest.items() if size > ways and size % ways}
    if not uneven:
        return {}
    weights = _matrices(step)
    shared = _shared_out(step, weights, ways, uneven, settings.tensor_plan)
    chosen, shares = shared.chosen, shared.shares
    classes = [c for v in weights for _, c in indices.classes(v)]
    return {
        family: Fraction(-(-smallest[family] // ways) * ways, smallest[family])
        for family in uneven & chosen
        if _taken(family, classes, indices, shares) < ways
    }


@dataclass(frozen=True, slots=True)
class _Shared:
    """The families that are split and how; the `best` by price, which they are without a plan."""

    chosen: set[Class]
    shares: Split
    best: set[Class]
    plan: TensorPlan | None


def _shared_out(
    step: Decisions,
    weights: Sequence[Value],
    ways: int,
    more: Collection[Class] = (),
    plan: str = "",
) -> _Shared:
    """The families that `ways` cores, or `more`, could share and that split the weights at the
    least price, or those of a plan, and how they share them. Raises ShardingError for a plan of
    other weights.
    """
    indices = step.layout.indices
    price = prices(step.graph, indices, step.labels.dims)
    ends = broken(step.graph, indices)
    candidates = _candidates(step)
    found = rooms(indices, candidates, ways)
    splittable = {f for f, room in found.items() if room > 1 or f in more}
    best = cover(weights, indices, price, splittable - ends)
    own = None
    if plan:
        fitting = {f: max(room, 1 + (f in more)) for f, room in found.items()}
        own = plan_of(step, plan, _layer_families(step), candidates, ends, fitting)
    chosen = best if own is None else own.families
    return _Shared(chosen, spread(indices, chosen, ways, price, ends), best, own)


def _taken(family: Class, classes: Sequence[Class], indices: IndexClasses, shares: Split) -> int:
    """How many ways the largest weight dim of a family is split."""
    own = [c for c in classes if indices.family(c) == family]
    largest = max(own, key=lambda c: c[0].type.shape[c[1]])
    return math.prod(shares.atoms[i] for i in shares.classes.get(largest, ()))


def _warn_of_uneven(step: Decisions, axis: str, weights: Sequence[Value]) -> None:
    """A warning per weight that `axis` splits less than it could, had an index another size. One
    that some op cuts is whole whatever its size."""
    atoms = step.mesh.atoms(axis)
    ways = step.mesh.size(atoms)
    splittable = _candidates(step) - broken(step.graph, step.layout.indices)
    smallest = _smallest(step, splittable)
    for slot, value in step.slots(*WEIGHT_ROLES) if ways > 1 else ():
        used = step.mesh.size([a for a in step.layout.of(value).axes if a in atoms])
        families = step.layout.indices.families(value) if value in weights and used < ways else ()
        for dim, family in families:
            size = smallest.get(family, 0)
            if size <= ways or size % ways == 0:
                continue
            each = value.type.shape[dim] // size
            step.warn(
                "SW_TENSOR_UNEVEN",
                f"{slot.name} {value.type} is split {used} of {ways} ways over {axis}: dim {dim}"
                f" requires a multiple of {ways * each}, got {value.type.shape[dim]}",
                f"pad it to {-(-size // ways) * ways * each}, or choose a {axis} that divides"
                f" {size}",
            )


def _smallest(step: Decisions, families: Collection[Class]) -> dict[Class, int]:
    """Elements of the smallest index of each family: what a core must get a whole number of."""
    found: dict[Class, int] = {}
    for member in step.layout.indices.all():
        family, size = step.layout.indices.family(member), member[0].type.shape[member[1]]
        if family in families and size > 1:
            found[family] = min(size, found.get(family, size))
    return found


def _split_experts(step: Decisions, axis: str) -> None:
    """Give each core of `axis` some experts.

    Raises ShardingError for a model without experts, or a number that does not divide.
    """
    axes = step.real((axis,))
    if not axes:
        return
    _find_sequence(step)
    indices, weights = step.layout.indices, step.weights()
    on_batch = reached(step.graph, step.values("batch") + step.values("cache"))
    ways = step.mesh.size(axes)
    found = expert_families(step.graph, indices, weights, on_batch)
    fitting = {f for f, room in rooms(indices, found, ways).items() if room == ways}
    if not fitting:
        raise ShardingError(
            "SW_EXPERTS",
            f"mesh.{axis}={ways} requires weights with an expert dim that it divides, the step"
            f" has {'other numbers of experts' if found else 'none'}",
            hint=f"set mesh.{axis} to 1 or to a divisor of the number of experts",
        )
    step.layout = replace(step.layout, experts=dict.fromkeys(fitting, axes))
    step.layout = replace(step.layout, rows=expert_rows(step.graph, step.layout))


def _matrices(step: Decisions) -> list[Value]:
    """The weights with two dims besides those of layers."""
    layers, families = _layer_families(step), step.layout.indices.families
    return [
        value
        for value in step.values(*WEIGHT_ROLES)
        if sum(f not in layers and value.type.shape[d] > 1 for d, f in families(value)) > 1
    ]


def _layer_families(step: Decisions) -> set[Class]:
    """Families of the dims that loops walk along layer by layer."""
    return {step.layout.indices.family(dim) for dim in step.walked()}


def _candidates(step: Decisions) -> set[Class]:
    """Families of weight dims that may be split: not samples, sequence, layers, hidden dim."""
    indices = step.layout.indices
    kept_whole = _layer_families(step) | step.layout.hidden | step.layout.sequence
    kept_whole |= {indices.family((v, d)) for v, d in step.labels.dims.items()}
    kept_whole |= step.layout.experts.keys()
    return {f for v in step.values(*WEIGHT_ROLES) for _, f in indices.families(v)} - kept_whole
