"""Pure copies: a view stored through another view is a DMA from HBM to HBM, whatever the
strides.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.codegen.builder import Builder, merge_dims
from shardwright.compiler.codegen.domain import Space, Value
from shardwright.compiler.codegen.search import Candidate, Room
from shardwright.compiler.isa.region import Tensor

# A DMA pattern has a first dim and the free dims of the limits.
_FIRST = 1
# Shorter runs are turned on chip, where both sides of the transfer can have longer ones (the DMA
# curve of hardware.json reaches 0.05 at 128 bytes); a copy this small is one descriptor per engine
# anyway.
_MIN_RUN_BYTES = 128
_SMALL_BYTES = 65536


def is_copy(space: Space, sink: int, tensors: Sequence[Tensor]) -> bool:
    """Whether `sink` stores a load, by runs that are long enough, that nothing else reads."""
    source = copied(space, sink, tensors)
    if source is None:
        return False
    walks = source.access, space[sink].access
    rounds_once = source.dtype in {tensors[walk.tensor].dtype for walk in walks}
    return rounds_once and _run_bytes(space, sink, tensors) >= _MIN_RUN_BYTES


def copied(space: Space, sink: int, tensors: Sequence[Tensor]) -> Value | None:
    """The load that `sink` stores, where nothing else reads it and they do not overlap."""
    value = space[sink]
    source = space[value.inputs[0]]
    if value.op != "store" or source.op != "load":
        return None
    users = space.users()[value.inputs[0]]
    ends = tensors[source.access.tensor], tensors[value.access.tensor]
    apart = ends[0] is not ends[1] and not any(t.alias >= 0 for t in ends)
    return source if users == [sink] and apart else None


def _run_bytes(space: Space, sink: int, tensors: Sequence[Tensor]) -> int:
    """Bytes that lie together on both sides of a copy; a whole small copy counts as one run."""
    store = space[sink]
    source, target = space[store.inputs[0]].access, store.access
    item = tensors[target.tensor].dtype.bytes
    if space.elements(store) * item < _SMALL_BYTES:
        return _MIN_RUN_BYTES
    run = 1
    for atom in sorted(store.atoms, key=lambda a: abs(target.stride(a))):
        if not target.stride(atom) == source.stride(atom) == run:
            break
        run *= space.sizes[atom]
    return run * item


def copy_candidates(space: Space, sinks: list[int], room: Room) -> Sequence[Candidate]:
    """There is one way to copy."""
    (sink,) = sinks
    return (Candidate(0.0, lambda builder: emit_copy(builder, space, sink)),)


def emit_copy(builder: Builder, space: Space, sink: int) -> None:
    """Append the DMAs of one copy; dims beyond what a pattern holds become loops."""
    store = space[sink]
    source, target = space[store.inputs[0]].access, store.access
    atoms = sorted(store.atoms, key=lambda a: -abs(target.stride(a)))
    looped = len(atoms) - builder.limits.free_dims - _FIRST
    extents = {a: 1 if at < looped else space.sizes[a] for at, a in enumerate(atoms)}
    (scope,) = builder.scope(extents).nested(space.sizes, dict.fromkeys(atoms[: max(0, looped)], 1))
    sizes = [extents[a] for a in atoms]
    strides = [[walk.stride(a) for a in atoms] for walk in (source, target)]
    into, out = merge_dims(sizes, strides)
    scope.load(scope.hbm(target, out), scope.hbm(source, into))
