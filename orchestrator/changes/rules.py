"""What may be worth trying, by what limits a step: a table of rules, each one change of the job.

Rules only say what is tried and in which order; what a change does is never guessed, the job is
planned with it (`tries.py`). Changes keep the samples of a step, so that its time says how they
compare; where one cannot, rates do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from shardwright.compiler.machine.target import load_target, logical
from shardwright.orchestrator.changes.situation import Situation
from shardwright.orchestrator.config.config import Keys
from shardwright.orchestrator.report.bottleneck import (
    CAPACITY,
    COLLECTIVE,
    LATENCY,
    kind_shares,
    recomputed,
)
from shardwright.orchestrator.report.text import Facts, Report
from shardwright.orchestrator.report.verdict import refusals
from shardwright.sharding.settings import AUTO, DISTRIBUTED_OPTIMIZER, REMATS, WEIGHTS

BUCKET_MB = 64  # our choice: below it latency is a part of a collective on every machine here
KEYS_OF_MEMORY = {"strategy.remat", "strategy.micro_batch"}
TOKENS_PER_CORE = 4096
"""Our choice: a sequence that leaves more to each core is spread over more of them where the memory
is too small."""
RANKED_SHARE = 0.05  # our choice: of the step; a smaller category is not what to begin with
FAST_NETWORK = {"trn1.32xlarge": "trn1n.32xlarge"}
NEXT_MACHINE = {"trn1.32xlarge": "trn2.48xlarge", "trn1n.32xlarge": "trn2.48xlarge"}


@dataclass(frozen=True, slots=True)
class Idea:
    """Keys of the job and their new values; `more` is memory it may add, in multiples of what a
    category holds now: what surely does not fit is not tried."""

    keys: Keys
    more: Mapping[str, float] = field(default_factory=dict)


Ideas = Iterator[Idea]
Rule = Callable[[Situation], Ideas]
Rules = Mapping[str, tuple[Rule, ...]]
"""By the kind of bottleneck."""


def ideas(now: Situation, report: Report) -> Ideas:
    """What is worth trying, the most promising first: what cures a refusal of the vendor's
    compiler, for a job that does not fit what saves memory, else settings by what could be gained,
    in the order of the table, and other machines at last."""
    kinds = _by_gain(now, report) if report["memory"]["fits"] else [CAPACITY]
    cures = CURES if refusals(report) else ()
    worth = (WORTH, MACHINES) if now.trains else (SERVED,)
    rules = (*cures, *(rule for table in worth for rule in _rules(table, kinds)))
    found = (idea for rule in rules for idea in rule(now))
    return _distinct(i for i in found if is_open(i, now) and may_fit(i, report["memory"]))


def _distinct(found: Iterable[Idea]) -> Ideas:
    """Without what an earlier idea changes too: two rules may come to one mesh."""
    seen: list[Keys] = []
    for idea in found:
        if idea.keys not in seen:
            seen.append(idea.keys)
            yield idea


def _rules(table: Rules, kinds: Sequence[str]) -> list[Rule]:
    return [rule for kind in kinds for rule in table.get(kind, ())]


def _by_gain(now: Situation, report: Report) -> list[str]:
    """Kinds of what takes a share of the step, the largest first. A step has to compute: of that
    counts what is done twice, or all of it where a shorter type or another generator may do."""
    found = {name: share for name, share in kind_shares(report).items() if share > RANKED_SHARE}
    if "compute" in found and not (now.has_wide_products or now.draws_in_code):
        found["compute"] *= recomputed(report)
    return sorted(found, key=lambda name: -found[name])


def saving(now: Situation) -> Ideas:
    """What may save memory."""
    worth = WORTH if now.trains else SERVED
    found = (idea for rule in worth[CAPACITY] for idea in rule(now))
    return _distinct(idea for idea in found if is_open(idea, now))


def is_open(idea: Idea, now: Situation) -> bool:
    """Whether the model allows an idea: a lowered step has the samples in flight that it has."""
    return not now.job.model.hlo or _in_flight(now, idea.keys) == _in_flight(now, {})


def _in_flight(now: Situation, keys: Keys) -> int:
    """Samples of a micro-batch on all ranks, with other values of some keys."""
    ways = (keys.get(f"mesh.{axis}", now.size(axis)) for axis in ("dp_replicate", "dp_shard"))
    count: int = math.prod(ways) * keys.get("strategy.micro_batch", now.strategy.micro_batch)
    return count


def may_fit(idea: Idea, memory: Facts) -> bool:
    """Whether what an idea adds could fit."""
    held = memory["categories"]
    more = sum(factor * held.get(category, 0) for category, factor in idea.more.items())
    return not more or memory["peak_bytes"] + more <= memory["limit_bytes"]


def _strategy(**keys: Any) -> dict[str, Any]:
    return {f"strategy.{key}": value for key, value in keys.items()}


def _same_samples(now: Situation, **keys: Any) -> dict[str, Any]:
    """A change of how samples lie, which keeps those of a step."""
    return _strategy(global_batch=now.global_batch, **keys)


def _mesh(now: Situation, **sizes: int) -> dict[str, Any]:
    whole = {**now.mesh, **sizes}
    return {f"mesh.{a}": n for a, n in whole.items() if n > 1 or a == "dp_shard" or a in now.mesh}


def _halved(source: str, target: str, **more: float) -> Rule:
    """Half of an axis given to another; samples of a step stay where they can."""

    def rule(now: Situation) -> Ideas:
        if now.is_manual or now.size(source) % 2:
            return
        sizes = {source: now.size(source) // 2, target: now.size(target) * 2}
        if sizes.get("dp_shard", 0) % now.size("ep"):
            return
        kept = _spread(now) if target == "dp_shard" else _same_samples(now)
        if target == "dp_replicate" and now.global_batch % sizes[target]:
            kept = _strategy(global_batch=2 * now.global_batch)
        yield Idea({**_mesh(now, **sizes), **kept}, more)

    return rule


def _where(holds: Callable[[Situation], bool], keys: Keys, **more: float) -> Rule:
    return lambda now: iter([Idea(keys, more)] if holds(now) else [])


def _spread(now: Situation) -> Keys:
    """The samples of a step over twice the ranks: fewer micro-batches, or smaller ones, or twice
    the samples."""
    if now.num_microbatches % 2 == 0:
        return _same_samples(now)
    if now.strategy.micro_batch % 2 == 0:
        return _same_samples(now, micro_batch=now.strategy.micro_batch // 2)
    return _strategy(global_batch=2 * now.global_batch)


_cast_products = _where(lambda now: now.has_wide_products, {"compiler.auto_cast": "matmult"})
_machines_generator = _where(lambda now: now.draws_in_code, {"model.generator": "rbg"})
_code_beside_collectives = _where(
    lambda now: not now.job.compiler.latency_hiding, {"compiler.latency_hiding": True}
)
_loops_kept = _where(lambda now: now.job.compiler.optlevel > 1, {"compiler.optlevel": 1})
"""-O1: tile loops are not unrolled, so that there are fewer instructions."""
_shorter_type = _where(lambda now: now.is_full_precision, {"model.dtype": "bfloat16"})
_remat = _where(
    lambda now: now.is_ours and now.strategy.remat != REMATS[-1], _strategy(remat=REMATS[-1])
)
_ring_of_context = _where(
    lambda now: now.size("cp") > 1 and now.strategy.context != "ring", _strategy(context="ring")
)
_gather_of_context = _where(
    lambda now: now.size("cp") > 1 and now.strategy.context == "ring", _strategy(context="gather")
)
_sequence_parallel = _where(
    lambda now: now.size("tp") > 1 and not now.strategy.sequence_parallel,
    _strategy(sequence_parallel=True),
)
_no_shifts = _where(
    lambda now: bool(now.strategy.early_all_gather_shift or now.strategy.late_reduce_scatter_shift),
    _strategy(early_all_gather_shift=0, late_reduce_scatter_shift=0),
)
_gather_again = _where(
    lambda now: not now.strategy.reshard_after_forward, _strategy(reshard_after_forward=True)
)
_buckets = _where(
    lambda now: not now.strategy.bucket_mb and not now.is_manual,
    _strategy(bucket_mb=BUCKET_MB),
    gathered=1.0,
)
_second_stream = _where(
    lambda now: (
        now.strategy.cc_streams == 1
        and now.size("dp_shard") > 1
        and sum(size > 1 for size in now.mesh.values()) > 1
    ),
    _strategy(cc_streams=2),
)
_interleaved = _where(
    lambda now: now.strategy.schedule != "interleaved" and now.size("pp") > 1,
    _strategy(schedule="interleaved"),
    activations=0.5,
)
_less_tensor_parallel = _halved("tp", "dp_shard", activations=1.0, parameters=1.0, frozen=1.0)
_more_tensor_parallel = _halved("dp_shard", "tp")
_copies_to_tensor_parallel = _halved("dp_replicate", "tp")
_tensor_parallel_to_copies = _halved("tp", "dp_replicate", parameters=1.0)
_more_stages = _halved("dp_shard", "pp")


def _one_copy(now: Situation) -> Ideas:
    """All cores tensor parallel on one copy of the weights; what they do not divide is padded."""
    copies = now.size("dp_replicate")
    if copies > 1 and not now.is_manual:
        mesh = _mesh(now, dp_replicate=1, tp=now.size("tp") * copies)
        yield Idea(mesh | _same_samples(now))


_fewer_stages = _halved("pp", "dp_shard", parameters=1.0, frozen=1.0, optimizer=1.0)
_less_context_parallel = _halved("cp", "dp_shard", activations=1.0)


def _what_fits(now: Situation) -> Ideas:
    """The least recomputation and the largest micro-batch that fit, unless that is the job."""
    keys: dict[str, Any] = {}
    if now.is_ours and now.strategy.remat != REMATS[0]:
        keys |= _strategy(remat="auto")
    if now.num_microbatches > 1 and now.size("pp") == 1 and not now.job.model.hlo:
        keys |= _same_samples(now, micro_batch=AUTO)  # stages want many
    if keys.keys() & KEYS_OF_MEMORY - set(now.open_keys):
        yield Idea(keys)


def _smaller_micro_batch(now: Situation) -> Ideas:
    if now.strategy.micro_batch % 2 == 0:
        yield Idea(_same_samples(now, micro_batch=now.strategy.micro_batch // 2))


def _more_samples(now: Situation) -> Ideas:
    yield Idea(_strategy(global_batch=2 * now.global_batch))


def _larger_cores(now: Situation) -> Ideas:
    """Physical cores grouped as the machine has them by default: half as many cores of twice the
    memory, with half the shards, or else half the copies."""
    cluster = now.job.cluster
    most = max(load_target(cluster.target).allowed_lnc)
    if now.is_manual or cluster.hypothetical or not 0 < cluster.lnc < most:
        return
    fewer = most // cluster.lnc
    for axis in ("dp_shard", "dp_replicate"):
        size = now.size(axis) // fewer
        if now.size(axis) % fewer == 0 and (axis != "dp_shard" or size % now.size("ep") == 0):
            mesh = _mesh(now, **{axis: size})
            yield Idea({"cluster.lnc": most, **mesh, **_same_samples(now)})
            return


def _sequence_over_cores(now: Situation) -> Ideas:
    """A long sequence over as many cores as leave `TOKENS_PER_CORE` to each."""
    tokens, shards = now.job.model.seq_len // now.size("cp"), now.size("dp_shard")
    ways = 1
    while tokens > ways * TOKENS_PER_CORE and shards % (2 * ways * now.size("ep")) == 0:
        ways *= 2
    if ways > 1 and not now.is_manual:
        mesh = _mesh(now, cp=now.size("cp") * ways, dp_shard=shards // ways)
        yield Idea(mesh | _same_samples(now))


def _one_shift_more(key: str) -> Rule:
    """Weights gathered, or gradients reduced, one layer further from where they are used."""

    def rule(now: Situation) -> Ideas:
        if now.zero == WEIGHTS and now.size("dp_shard") > 1:
            yield Idea({f"strategy.{key}": getattr(now.strategy, key) + 1}, {"gathered": 1.0})

    return rule


_early_gathers = _one_shift_more("early_all_gather_shift")
_late_reductions = _one_shift_more("late_reduce_scatter_shift")


def _reduce_once(now: Situation) -> Ideas:
    if now.num_microbatches > 1 and now.strategy.gradient_reduction == "each":
        more = {"gradients": float(now.size("dp_shard"))}
        yield Idea(_strategy(reduce_gradients="last"), more)


def _reduce_each(now: Situation) -> Ideas:
    once = now.strategy.gradient_reduction != "each"
    if now.num_microbatches > 1 and once and now.zero == WEIGHTS:
        yield Idea(_strategy(reduce_gradients="each"))


def _save_gathered(now: Situation) -> Ideas:
    if now.strategy.reshard_after_forward and now.zero == WEIGHTS and now.size("dp_shard") > 1:
        ways = float(now.size("dp_shard"))
        # Gathered in half of their type, frozen ones as they are stored.
        more = {"parameters": ways / 2.0, "frozen": ways}
        yield Idea(_strategy(reshard_after_forward=False), more)


def _shards_inside_instances(now: Situation) -> Ideas:
    """HSDP: shards as far as an instance reaches, copies across instances."""
    count, shard = now.job.cluster.instances, now.size("dp_shard")
    if now.is_manual or count == 1 or shard % count or shard == count:
        return
    if (shard // count) % now.size("ep") or now.size("dp_replicate") > 1:
        return
    held = ("parameters", "frozen", "gradients", "optimizer")
    more = {name: count - 1.0 for name in held}
    yield Idea(_mesh(now, dp_shard=shard // count, dp_replicate=count), more)


def _shards_for_copies(now: Situation) -> Ideas:
    copies = now.size("dp_replicate")
    if copies > 1 and not now.is_manual:
        keys = _mesh(now, dp_replicate=1, dp_shard=now.size("dp_shard") * copies)
        finer = {} if now.zero == WEIGHTS else _strategy(zero=WEIGHTS)
        yield Idea(keys | finer)


def _shards_that_divide(now: Situation) -> Ideas:
    """The odd part of the shards as copies: widths divide by powers of two, 24 shards leave them
    whole."""
    shards = now.size("dp_shard")
    even = shards & -shards
    if now.is_manual or even in (1, shards) or even % now.size("ep"):
        return
    copies = now.size("dp_replicate") * (shards // even)
    yield Idea(_mesh(now, dp_replicate=copies, dp_shard=even))


def _finer_zero(now: Situation) -> Ideas:
    if now.size("dp_shard") > 1 and not now.is_manual:
        for stage in (DISTRIBUTED_OPTIMIZER, WEIGHTS):
            if stage > now.zero:
                yield Idea(_strategy(zero=stage))


def _machine(others: Mapping[str, str], now: Situation) -> Ideas:
    """As many cores of another machine, so that mesh and samples stay."""
    cluster = now.job.cluster
    other = others.get(cluster.target)
    if other is None or cluster.hypothetical or cluster.lnc:
        return
    here, there = (logical(load_target(name)).cores for name in (cluster.target, other))
    cores = here * cluster.instances
    if cores % there:
        return
    count = {"cluster.instances": cores // there} if here != there else {}
    yield Idea({"cluster.target": other, **count})


_faster_network = partial(_machine, FAST_NETWORK)
_cheaper_network = partial(_machine, {fast: slow for slow, fast in FAST_NETWORK.items()})
_next_machine = partial(_machine, NEXT_MACHINE)


def more_instances(now: Situation) -> Ideas:
    """Twice the instances, with twice the shards."""
    if now.is_manual or not load_target(now.job.cluster.target).efa_devices:
        return
    more = {"cluster.instances": 2 * now.job.cluster.instances, **_spread(now)}
    yield Idea({**_mesh(now, dp_shard=2 * now.size("dp_shard")), **more})


WORTH: Rules = MappingProxyType(
    {
        CAPACITY: (
            _remat,
            _smaller_micro_batch,
            _larger_cores,
            _sequence_over_cores,
            _gather_again,
            _no_shifts,
            _reduce_each,
            _finer_zero,
            _ring_of_context,
            _shards_that_divide,
            _shards_for_copies,
            _shorter_type,
            _more_tensor_parallel,
            _more_stages,
            more_instances,
            _next_machine,
        ),
        "compute": (
            _cast_products,
            _shorter_type,
            _machines_generator,
            _what_fits,
            _ring_of_context,
            _gather_of_context,
            _less_tensor_parallel,
            _early_gathers,
        ),
        "memory": (_cast_products, _shorter_type, _what_fits, _less_tensor_parallel, _more_samples),
        LATENCY: (_what_fits, _less_tensor_parallel, _more_samples),
        COLLECTIVE: (
            _code_beside_collectives,
            _sequence_parallel,
            _ring_of_context,
            _gather_of_context,
            _reduce_once,
            _what_fits,
            _early_gathers,
            _less_tensor_parallel,
            _shards_inside_instances,
            _less_context_parallel,
            _buckets,
            _late_reductions,
            _second_stream,
            _save_gathered,
            _more_samples,
        ),
        "bubble": (_smaller_micro_batch, _fewer_stages, _interleaved, _more_samples),
        "launch": (_what_fits, _more_samples),
        "idle": (_what_fits, _more_samples),
        "host": (_more_samples,),  # which of a step waits for its first micro-batch alone
    }
)
"""By the kind of bottleneck (`report/bottleneck.py`), the most promising first."""

MACHINES: Rules = MappingProxyType(
    {
        "compute": (_cheaper_network, _next_machine),
        "memory": (_cheaper_network, _next_machine),
        COLLECTIVE: (_faster_network,),
    }
)
"""The same of machines, which nobody changes as easily as a setting: behind all of those."""

SERVED: Rules = MappingProxyType(
    {
        kind: (
            *(_shorter_type, _copies_to_tensor_parallel, _one_copy, _tensor_parallel_to_copies),
            *more,
        )
        for kind, more in {
            CAPACITY: (_next_machine,),
            "compute": (_next_machine,),
            "memory": (_more_samples, _next_machine),
            LATENCY: (_more_samples,),
            COLLECTIVE: (_more_samples,),
            "launch": (_more_samples,),
            "idle": (_more_samples,),
        }.items()
    }
)
"""The same of inference: cores share a copy of the weights, or have their own, for more sequences.
"""

CURES: tuple[Rule, ...] = (_loops_kept, _smaller_micro_batch, _more_tensor_parallel)
"""What lowers the instructions of the largest operator, the least costly first."""
