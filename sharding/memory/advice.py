"""What to change in a plan that does not fit, with the bytes that the plan itself says it saves.

State that is split can be split again, state that every data-parallel rank holds can be spread, and
what is live per sample halves with the samples. These are sums over buffers, exact for state;
`orchestrator/report/memory_report.py` estimates the changes when the user asks why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.compiler.program import BufferInfo, StepPlan
from shardwright.sharding.memory.footprint import Footprint, category_of
from shardwright.sharding.partition.mesh import CONTEXT_AXIS, SHARD_AXIS

MIN_SAVED = 1e-3
"""Part of the peak below which a change is not worth saying (our choice): counts and scales."""

MIN_OF_MISSING = 0.1
"""Part of what is missing below which a change is no advice (our choice): it asks for more than it
brings."""

STATE = ("parameters", "frozen", "gradients", "optimizer")


@dataclass(frozen=True, slots=True)
class Advice:
    """A change and the bytes per core it saves."""

    change: str
    saves_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a plan was asked for that its buffers do not say: the ZeRO stage, the bytes of keys and
    values that a layer gathers (`sharding/cut/ring`), and the flags for twice the shards on twice
    the cores; empty where those are not to be had."""

    zero: int
    context_bytes: int = 0
    wider: str = ""


def advice(memory: Footprint, plan: StepPlan, asked: Asked) -> list[Advice]:
    """Changes that save something to speak of, largest first."""
    least = MIN_SAVED * memory.peak_bytes
    found = [a for a in _changes(memory, plan, asked) if a.saves_bytes > least]
    return sorted(found, key=lambda a: -a.saves_bytes)


def advice_text(memory: Footprint, plan: StepPlan, asked: Asked, limit_bytes: int) -> str:
    """The changes that save a good part of what is over that limit in one line, for its error."""
    over = memory.peak_bytes - limit_bytes
    every = advice(memory, plan, asked)
    changes = [a for a in every if a.saves_bytes >= MIN_OF_MISSING * over]
    told = [f"{a.change} (saves {a.saves_bytes / 2**30:.3f} GiB)" for a in changes]
    if every and not changes:
        nothing = "no change that is counted here saves a tenth of what is missing"
        return f"{nothing}; `plan --explain memory` estimates others"
    if changes and changes[0].saves_bytes < over:
        told.append("none of them is enough alone" if len(changes) > 1 else "not enough alone")
    return "; ".join([*told, "`plan --explain memory` estimates each change"])


def _changes(memory: Footprint, plan: StepPlan, asked: Asked) -> Iterator[Advice]:
    ways = plan.mesh.get(SHARD_AXIS, 1)
    state = [b for b in plan.buffers.values() if category_of(b) in STATE]
    split = [b for b in state if _splits_again(b, ways)]
    saved = sum(b.local_type.num_bytes // 2 for b in split)
    if asked.wider:
        yield Advice(f"shard over twice the cores, {asked.wider}", saved)
    if asked.zero == 0:
        whole = [b for b in state if category_of(b) == "optimizer" and not _axes(b)]
        kept = sum(b.local_type.num_bytes for b in whole)
        yield Advice("spread the optimizer state, strategy.zero = 1", kept - kept // max(ways, 1))
    again = memory.argument_bytes["gathered"]
    yield Advice("gather weights again, strategy.reshard_after_forward = true", again)
    blocks = plan.mesh.get(CONTEXT_AXIS, 1)
    live = memory.categories["gathered"] - again  # at the peak; weights too, which a ring leaves
    sent = min(live, asked.context_bytes) * max(0, blocks - 2) // blocks
    yield Advice("send keys and values around, strategy.context = ring", sent)
    batch = [b for b in plan.buffers.values() if b.role == "batch" and b.local_type.rank]
    if min((b.local_type.shape[0] for b in batch), default=1) > 1:
        live = memory.categories["activations"]
        yield Advice("half the strategy.micro_batch", live // 2)


def _axes(buffer: BufferInfo) -> set[str]:
    """Every axis a buffer is split over."""
    return {a for axes in buffer.axes for a in axes}


def _splits_again(buffer: BufferInfo, ways: int) -> bool:
    """True when the dim that is split over the shard axis divides twice as often."""
    if ways == 1:
        return any(n % 2 == 0 for n in buffer.local_type.shape)
    sizes = zip(buffer.local_type.shape, buffer.axes, strict=True)
    return any(n % 2 == 0 for n, axes in sizes if SHARD_AXIS in axes)
