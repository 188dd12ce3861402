"""Where inputs and outputs of the step live: batch, weights, optimizer leaves, results.

A weight is stored along one dim of its used layout, an optimizer leaf like the weight it belongs
to, and a result where its input came from. How much of it data-parallel ranks share is the ZeRO
stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardwright.compiler.frontend.roles import PARAMETER_ROLES, STATE_ROLES, WEIGHT_ROLES
from shardwright.compiler.ir.types import Value
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.partition.spec import num_shared
from shardwright.sharding.settings import WEIGHTS
from shardwright.sharding.strategies.decisions import Decisions

LARGE_REPLICATED_BYTES = 1 << 20
REPLICATED = "SW_ZERO_REPLICATED"
"""Above this a leaf that stays whole is worth a warning (our choice, not a hardware fact)."""


def place_batch(step: Decisions) -> None:
    """Batch inputs lie where they are used; the rng is the same everywhere."""
    for slot, value in step.slots("batch"):
        step.place(slot, value, step.layout.of(value), "samples and sequence")
    after = {slot.name: v for slot, v in zip(step.outputs, step.graph.outputs, strict=True)}
    for slot, value in step.slots("cache"):  # a prefill does not read the one it replaces
        step.place(slot, value, step.layout.of(after[slot.name]), "sequences and heads")
    for slot, value in step.slots("rng"):
        step.place(slot, value, step.layout.of(value), "rng is the same on every core")


def place_state(step: Decisions, zero: int) -> None:
    """Spread nothing over the data-parallel ranks (`zero` 0), optimizer state (1 and 2), or
    weights too (3).
    """
    step.zero = zero
    replicas = step.mesh.sizes.get("dp_replicate", 1)
    if zero and replicas > 1 and not step.shard_axes:
        what = {
            WEIGHTS: "weights, gradients and optimizer state",
            2: "gradients and optimizer state",
        }
        step.warn(
            REPLICATED,
            f"strategy.zero = {zero} spreads {what.get(zero, 'optimizer state')} over dp_shard, and"
            f" the mesh has dp_replicate={replicas} alone: every rank holds all of it",
            f"name the axis dp_shard: --mesh dp_shard={replicas}, with the other axes as they are",
        )
    _place_parameters(step)
    _place_optimizer(step)


def spreadable(step: Decisions) -> Iterator[tuple[Slot, Value, dict[int, int]]]:
    """Every weight with the dims along which it may be spread, none that loops walk along, and
    their sizes on a rank."""
    layers = {step.shards.find(dim) for dim in step.walked()}
    for slot, value in step.slots(*WEIGHT_ROLES):
        local = step.layout.of(value).local_shape(value.type.shape, step.mesh.sizes)
        free = [d for d, n in enumerate(local) if n and step.shards.find((value, d)) not in layers]
        yield slot, value, {d: local[d] for d in free}


def _place_parameters(step: Decisions) -> None:
    """Spread every weight along its chosen dim, or say why it stays as it is used."""
    rows = [
        (slot, value, _fitting(step, slot, value, local)) for slot, value, local in spreadable(step)
    ]
    chosen = _chosen_dims(step, {value: fitting for _, value, fitting in rows})
    for slot, value, _ in rows:
        ways = _ways(step, slot, value)
        used = step.layout.of(value)
        named = f"{'*'.join(step.free_axes(used))}={ways}"
        if ways == 1:
            free = step.zero and step.free_axes(used)
            kept = free and {"frozen": _kept(step), "buffer": "a buffer"}.get(slot.role)
            step.place(slot, value, used, kept or "one shard")
        elif value not in chosen:
            _replicate(step, slot, value, f"no dim divides by {named}")
        elif step.zero < WEIGHTS:
            step.place(slot, value, used, _kept(step))
        else:
            fits = "dim of what it is combined with" if chosen[value] else "largest dim"
            why = f"{fits} that divides by {named}"
            step.place(slot, value, step.stored(value) or used, why)


def _ways(step: Decisions, slot: Slot, value: Value) -> int:
    """Over how many ranks a weight is spread. Before stage 3 it only says how its gradient and its
    optimizer state lie; a frozen one has neither. Buffers are nobody's shards, as FSDP leaves those
    of a module."""
    is_spread = slot.role in PARAMETER_ROLES and step.zero >= (
        WEIGHTS if slot.role == "frozen" else 1
    )
    return step.mesh.size(step.free_axes(step.layout.of(value))) if is_spread else 1


def _fitting(step: Decisions, slot: Slot, value: Value, local: Mapping[int, int]) -> list[int]:
    """The dims along which a weight may be spread, the largest first; none on one rank."""
    ways, used = _ways(step, slot, value), step.layout.of(value)
    dims = [d for d, size in local.items() if ways > 1 and size % ways == 0]
    return sorted(dims, key=lambda d: (-local[d], bool(used.dims[d]), d))


def _chosen_dims(step: Decisions, fitting: Mapping[Value, Sequence[int]]) -> dict[Value, bool]:
    """Choose, per weight that has fitting dims, the largest, or the one along which lies what the
    weight is combined with, which the result says. Who has fewer dims to choose from is first:
    scales before the integers that they multiply.
    """
    found: dict[Value, bool] = {}
    for value, dims in sorted(fitting.items(), key=lambda row: len(row[1])):
        tied = (d for d in dims if step.shards.find((value, d)) in step.roots)
        if dims:
            dim = next(tied, dims[0])
            step.roots.add(step.shards.find((value, dim)))
            found[value] = dim != dims[0]
    return found


def _kept(step: Decisions) -> str:
    """Why a weight is whole on every data-parallel rank."""
    return f"zero={step.zero} keeps weights"


def _place_optimizer(step: Decisions) -> None:
    """Optimizer leaves follow their weight: by path and shape, else by what they are added to."""
    weights = WeightNames(step.slots("parameter"))
    for slot, value in step.slots("optimizer"):
        owner = weights.owner(slot.name, value.type.shape)
        name, like = ("the weight it is combined with", value) if owner is None else owner
        spec = step.stored(like)
        if spec is None and owner is None:
            _replicate(step, slot, value, "belongs to no sharded weight")
        else:
            step.place(slot, value, spec or step.layout.of(like), f"follows {name}")


def _replicate(step: Decisions, slot: Slot, value: Value, why: str) -> None:
    """Keep one input as it is used on every core; say so when it is large and state is spread."""
    used = step.layout.of(value)
    step.place(slot, value, used, why)
    axes = step.free_axes(used)
    if value.type.num_bytes >= LARGE_REPLICATED_BYTES and axes and step.zero:
        step.warn(
            "SW_FSDP_REPLICATED",
            f"{slot.name} {value.type} is the same on all ranks of {'*'.join(axes)}: {why}",
            f"choose a {axes[0]} that divides one of its dims, with more ranks as dp_replicate",
        )


def place_results(step: Decisions) -> None:
    """State results live where the state came in; metrics are whole."""
    names = (slot.name for slot in step.inputs)
    state = dict(zip(names, map(step.constraints.__getitem__, step.graph.inputs), strict=True))
    for slot, value in zip(step.outputs, step.graph.outputs, strict=True):
        spec = step.layout.of(value)
        if slot.role in STATE_ROLES:
            spec = state.get(slot.name, spec)
        if slot.role == "parameter" and step.zero < WEIGHTS and step.stored(value):
            step.predict("all_gather", step.free_axes(step.layout.of(value)), value.type)
        step.results.append(spec)


Weight = tuple[Slot, Value]


class WeightNames:
    """Weights by the ends of their paths. States nest in many ways: a moment of
    `state/params/dense/kernel` is `state/opt_state/0/mu/dense/kernel`, that of `0/dense/kernel` is
    `1/mu/dense/kernel`.
    """

    def __init__(self, weights: Sequence[Weight]) -> None:
        self._ends: dict[str, list[Weight]] = {}
        for slot, value in weights:
            for end in _ends(slot.name):
                self._ends.setdefault(end, []).append((slot, value))

    def owner(self, name: str, shape: tuple[int, ...]) -> tuple[str, Value] | None:
        """The weight, with its name, that shares the longest end of its path with the leaf's, of
        several the one with the fewest names of its own between that and what their paths begin
        with; None where that is not one weight, or has another shape.
        """
        end = next((end for end in _ends(name) if end in self._ends), None)
        if end is None:
            return None
        found = self._ends[end]
        own = [_own_names(slot.name, name) for slot, _ in found]
        nearest = [weight for weight, n in zip(found, own, strict=True) if n == min(own)]
        if len(nearest) > 1 or nearest[0][1].type.shape != shape:
            return None
        return nearest[0][0].name, nearest[0][1]


def _ends(name: str) -> list[str]:
    """Every end of a path, the longest first."""
    parts = name.split("/")
    return ["/".join(parts[first:]) for first in range(len(parts))]


def _own_names(weight: str, leaf: str) -> int:
    """Parts of a weight's path that neither begin nor end the leaf's."""
    parts, others = weight.split("/"), leaf.split("/")
    left = parts[num_shared(parts, others) :]
    return len(left) - num_shared(left[::-1], others[::-1])
