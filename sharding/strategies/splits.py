"""Which indices of a model go on the axes inside of its layers: sequence, experts, tensors.

Each step reads what the model's indices are, takes an axis and adds to the used layout; a model
that has no such index is refused. What data-parallel ranks store is the business of `state.py`.
"""

from __future__ import annotations

from dataclasses import replace

from compiler.diagnostics import ShardingError
from compiler.ir.types import Value
from sharding.borders import borders
from sharding.dims import reached
from sharding.indices import Class
from sharding.inner import broken, cover, expert_families, prices
from sharding.layout import along_residual, expert_rows, query_dims
from sharding.settings import StrategySettings
from sharding.split import rooms, spread
from sharding.strategies.decisions import Decisions


def split_layers(step: Decisions, settings: StrategySettings) -> None:
    """Give the axes inside of layers their indices: `cp` the sequence, `ep` experts, `tp` the rest.

    Raises ShardingError for a model without the index an axis needs.
    """
    _split_sequence(step, "cp")
    _split_experts(step, "ep")
    _split_tensors(step, "tp", sequence_parallel=settings.sequence_parallel)


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
    """Read what crosses the layers: the residual, and the sequence with its queries."""
    batch, weights = ([v for _, v in step.slots(role)] for role in ("batch", "parameter"))
    found = borders(step.scans, step.runs, step.labels.dims, step.layout.indices, batch, weights)
    step.layout = replace(step.layout, sequence=found.sequence, residual=found.residual)
    step.layout = replace(step.layout, queries=query_dims(step.graph, step.layout))


def _split_tensors(step: Decisions, axis: str, *, sequence_parallel: bool) -> None:
    """Split the inner indices of the weights over `axis`; and the residual along its sequence,
    when asked.
    """
    ways = step.mesh.sizes.get(axis, 1)
    if ways == 1:
        return
    _find_sequence(step)
    indices = step.layout.indices
    price = prices(step.graph, indices, step.labels.dims)
    weights = [v for _, v in step.slots("parameter") if _is_matrix(step, v)]
    ends = broken(step.graph, indices)
    families = cover(weights, indices, price, _inner_families(step, ways) - ends)
    shares = spread(indices, families, ways, price, ends)
    step.mesh = step.mesh.refined(axis, shares.atoms)
    atoms = step.mesh.atoms(axis)
    split = {member: tuple(atoms[i] for i in numbers) for member, numbers in shares.classes.items()}
    step.layout = replace(step.layout, mesh=step.mesh, split=split)
    if sequence_parallel and step.layout.sequence:
        along = along_residual(step.graph, step.layout)
        step.layout = replace(step.layout, residual_axes=atoms, spread=along)


def _split_experts(step: Decisions, axis: str) -> None:
    """Give each core of `axis` some experts.

    Raises ShardingError for a model without experts, or a number that does not divide.
    """
    axes = step.real((axis,))
    if not axes:
        return
    _find_sequence(step)
    indices, weights = step.layout.indices, step.weights()
    on_batch = reached(step.graph, [v for _, v in step.slots("batch")])
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


def _is_matrix(step: Decisions, weight: Value) -> bool:
    """True when a weight has two dims besides those of layers."""
    layers = _layer_families(step)
    kept = [
        d
        for d, family in step.layout.indices.families(weight)
        if family not in layers and weight.type.shape[d] > 1
    ]
    return len(kept) > 1


def _layer_families(step: Decisions) -> set[Class]:
    """Families of the dims that loops walk along layer by layer."""
    return {step.layout.indices.family(dim) for dim in step.walked()}


def _inner_families(step: Decisions, ways: int) -> set[Class]:
    """Families of weight dims that may be split: not samples, sequence, layers or residual."""
    indices = step.layout.indices
    kept_whole = _layer_families(step) | step.layout.residual | step.layout.sequence
    kept_whole |= {indices.family((v, d)) for v, d in step.labels.dims.items()}
    kept_whole |= step.layout.experts.keys()
    found = {f for _, v in step.slots("parameter") for _, f in indices.families(v)} - kept_whole
    return {family for family, room in rooms(indices, found, ways).items() if room > 1}
