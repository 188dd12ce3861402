"""One function: graph in, kernels and tensors out.

Lowering may find that a value needs memory of its own, that an output cannot be written in place,
or that two tasks may not share a kernel; then it starts again with that knowledge. Every try adds a
fact, so the loop ends.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.compiler.attention import find_attention
from shardwright.compiler.ir.facts import operands_of
from shardwright.compiler.ir.traits import CONTRACTIONS, IDENTITIES, REDUCTIONS
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.lower.accept import Trials, policy_of
from shardwright.compiler.lower.body import UPDATES, Body
from shardwright.compiler.lower.cost_oracle import (
    QUICK_MARGIN,
    SPARE,
    Clock,
    CostOracle,
    time_or_inf,
)
from shardwright.compiler.lower.epilogue_rule import EpilogueRule
from shardwright.compiler.lower.excess_precision import stored_wide_elsewhere
from shardwright.compiler.lower.group import Groups
from shardwright.compiler.lower.latency import arrivals_ps, makespan_ps
from shardwright.compiler.lower.loop_rule import LoopRule
from shardwright.compiler.lower.positions import Positions
from shardwright.compiler.lower.reduction_rule import ReductionRule
from shardwright.compiler.lower.remat_across_kernels import Copied, cost
from shardwright.compiler.lower.rewrites import (
    HALVED,
    LOWERING,
    MADE_ONCE,
    NATIVE_LOWERING,
    REMAT_ACROSS_KERNELS,
    SINK_TRANSPOSES,
)
from shardwright.compiler.lower.rule import Budget, Rule, budget_of
from shardwright.compiler.lower.storage import Storage
from shardwright.compiler.lower.task import (
    ClashError,
    NeedsCopyError,
    NeedsScratchError,
    unsupported,
)
from shardwright.compiler.lower.windows import stored_windows
from shardwright.compiler.lower.write_out import Lowered, place_scratch, write_out
from shardwright.compiler.machine.target import FIRST_TARGET, load_target
from shardwright.compiler.options import DEFAULTS, CompileOptions
from shardwright.compiler.passes.scalars import parameter
from shardwright.compiler.rewriting.driver import run

MAX_TRIES = 1000
MAX_REMAT_ROUNDS = 3  # of values between kernels (our choice)
PATIENCE = 0.01  # of a function: a shorter wait for a collective is worth no kernel (our choice)
WORTH_A_FORM = 0.025  # of a function, that kernels may wait in vain: less is not tried (our choice)
MIN_GAIN = 0.99  # of the cost: less is not worth a larger function (our choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """How a function is called: inputs that are registers, with their range, outputs that take over
    an input's memory, and the range of integers in memory that masks depend on.
    """

    # (input number, low, high); the register is the position here
    parameters: tuple[tuple[int, int, int], ...] = ()
    aliases: tuple[tuple[int, int], ...] = ()  # (output number, input number)
    ranges: tuple[tuple[int, int, int], ...] = ()  # (input number, low, high)


@dataclass(slots=True)
class _Try:
    """What is given, and what earlier tries have found out."""

    graph: Graph
    signature: Signature
    options: CompileOptions
    budget: Budget
    oracle: CostOracle | None
    alone: Collection[Value]  # results that share a kernel with nothing of their score
    never_fused: list[tuple[Value, Value]] = field(default_factory=list)  # values and their copies
    forced: set[Value] = field(default_factory=set)  # values that need memory of their own
    dense: set[Value] = field(default_factory=set)  # those whose readers walk that better
    no_alias: set[int] = field(
        default_factory=set
    )  # outputs that are copied to their place at last
    early: set[Value] = field(default_factory=set)  # results joined with their operand first
    reductions_first: bool = False  # reduction fusions take what they can before epilogues do
    patience_ps: float = math.inf  # how much longer than alone a task waits for collectives

    def anew(self, **changes: Any) -> _Try:
        """The question with `changes`, of which nothing is found out yet."""
        unknown: dict[str, Any] = {n: set() for n in ("forced", "dense", "no_alias", "early")}
        return replace(self, **unknown, **changes)


@dataclass(slots=True)
class Fixpoint:
    """A lowered function with the choices behind it: a try that met no obstacle."""

    attempt: _Try
    lowered: Lowered
    groups: Groups
    rules: Sequence[Rule]
    trials: Trials


def lower_to_fixpoint(
    graph: Graph,
    signature: Signature = Signature(),
    options: CompileOptions = DEFAULTS,
    oracle: CostOracle | None = None,
    budget: Budget | None = None,
) -> Fixpoint:
    """Lower a loop-free graph, with the choices that were made on the way.

    `oracle` times kernels, so that merges can be refused for being slow; without one every legal
    merge is kept. `budget` is that of the machine, or of `FIRST_TARGET`. Raises CompileError for
    what the target cannot do, with the op's location.
    """
    graph = run(graph, NATIVE_LOWERING if options.native_int64 == "enabled" else LOWERING)
    _check_sizes(graph)
    budget = budget or budget_of(load_target(FIRST_TARGET), options)
    alone = _softmax_operators(graph, options)
    found = _best(_Try(graph, signature, options, budget, oracle, alone))
    place_scratch(found.lowered)
    return found


def _best(first: _Try) -> Fixpoint:
    options, oracle = first.options, first.oracle
    if options.attention != "flash" or options.optlevel == 1:
        return _fixpoint(first)
    if oracle is None:
        return _rematerialised(first)[-1]
    found = _chosen(
        [_rematerialised(one) for one in _starts(first, oracle.limit_bytes // SPARE)], oracle
    )
    return _halved(_prompt(found, oracle), oracle)


def _starts(first: _Try, spare_bytes: int) -> Iterator[_Try]:
    """What roads begin with: forms of the graph, and phases in both orders, since which operators
    share a kernel with a contraction depends on who asks first.
    """
    for graph in (first.graph, SINK_TRANSPOSES(first.graph)):
        if graph is not None:
            yield first.anew(graph=graph)
            yield first.anew(graph=graph, reductions_first=True)
    if (once := MADE_ONCE(first.graph, spare_bytes)) is not None:
        yield first.anew(graph=once)


def _rematerialised(attempt: _Try) -> list[Fixpoint]:
    """A lowered function, and again with what still crosses from kernel to kernel rematerialised,
    for as long as that costs less.
    """
    forms = [_fixpoint(attempt)]
    for _ in range(MAX_REMAT_ROUNDS):
        last = forms[-1]
        made = REMAT_ACROSS_KERNELS(last.attempt.graph, last.groups)
        if made is None:
            break
        again = _with_copies(last, made)
        budget = attempt.budget
        if cost(again.groups, budget) >= MIN_GAIN * cost(last.groups, budget):
            break
        forms.append(again)
    return forms


def _chosen(roads: Sequence[Sequence[Fixpoint]], oracle: CostOracle) -> Fixpoint:
    """The fastest of the last forms of the roads, unless a first one is faster: bytes that are
    saved are not always time. Between these two the code that they will run decides, since a search
    gains most of the large kernels that rematerialise.
    """
    first, last = (_quicker([road[at] for road in roads], oracle) for at in (0, -1))
    if _quicker([last, first], oracle) is last:
        return last
    return _quicker([last, first], oracle, oracle.searched)


def _with_copies(found: Fixpoint, made: Copied) -> Fixpoint:
    """The function again, of a graph with copies of values."""
    graph, never_fused = made
    return _fixpoint(
        found.attempt.anew(graph=graph, never_fused=[*found.attempt.never_fused, *never_fused])
    )


def _prompt(found: Fixpoint, oracle: CostOracle) -> Fixpoint:
    """The function with kernels that wait for no collective much longer than their first task has
    to, if that is faster: two products in one kernel wait for both gathers.
    """
    lowered, groups = found.lowered, found.groups
    expected = lowered.expected_ps
    delay = max(groups.delay_ps(part.members) for part in groups.parts.values())
    in_vain = min(lowered.stalled_ps, expected - sum(lowered.flights_ps), delay)
    if not in_vain >= WORTH_A_FORM * expected:  # nor where a kernel has no code
        return found
    other = _fixpoint(found.attempt.anew(patience_ps=PATIENCE * expected))
    return _quicker([found, other], oracle) if other.lowered.is_never_slower(lowered) else found


def _halved(found: Fixpoint, oracle: CostOracle) -> Fixpoint:
    """The function with every reduction fusion in two that is faster so, though it computes twice
    what both halves read: a kernel of forward and backward attention holds all packed tiles of
    both.
    """
    done: set[frozenset[Value]] = set()
    while True:
        before, groups = found, found.groups
        for part in groups.parts.values():
            results = frozenset(groups.body.tasks[n].result for n in part.members)
            if part.phase == ReductionRule.phase and results not in done:
                done.add(results)
                made = HALVED(before.attempt.graph, groups, part)
                if made is not None:
                    found = _quicker([found, _with_copies(found, made)], oracle)
                if found is not before:
                    break
        else:
            return found


def _quicker(forms: Sequence[Fixpoint], oracle: CostOracle, clock: Clock | None = None) -> Fixpoint:
    """The fastest of a function's forms, code and collectives together, by the oracle or another
    `clock`; the first on a tie. One whose kernels pass each other more than HBM holds is none, and
    one that passes much more than another has to be faster by as much as memory is worth.
    """
    limit = oracle.limit_bytes
    least = min(_passed_bytes(form.lowered) for form in forms)

    def price(form: Fixpoint) -> float:
        lowered, size = form.lowered, _passed_bytes(form.lowered)
        if size > limit:
            return math.inf
        worth = 1 + QUICK_MARGIN if size - least > limit // SPARE else 1
        return worth * (lowered.expected_ps if clock is None else _duration_ps(lowered, clock))

    return min(forms, key=price)


def _passed_bytes(lowered: Lowered) -> int:
    """What kernels pass each other through HBM."""
    return sum(t.num_bytes for t in lowered.tensors if t.kind == "scratch")


def _duration_ps(lowered: Lowered, clock: Clock) -> float:
    times = [time_or_inf(clock, kernel, lowered.tensors) for kernel in lowered.kernels]
    queues = [call.queue for call in lowered.collectives]
    return makespan_ps(lowered.kernels, times, lowered.flights_ps, queues)


def _fixpoint(attempt: _Try) -> Fixpoint:
    """The first attempt that meets no obstacle."""
    attempt.dense |= stored_windows(attempt.graph)
    for _ in range(MAX_TRIES):
        try:
            return _attempt(attempt)
        except NeedsCopyError as need:
            # A copy is no help where a reader that cuts its dims otherwise shares its kernel.
            alone = attempt.forced.intersection(need.values)
            assert attempt.dense.isdisjoint(alone), "a dense value cannot be expressed"
            attempt.dense |= alone
            attempt.forced.update(need.values)
        except NeedsScratchError as need:
            assert need.output >= 0 and need.output not in attempt.no_alias, (
                "cannot store an output"
            )
            attempt.no_alias.add(need.output)
    raise AssertionError("lowering has no fixpoint")


def _check_sizes(graph: Graph) -> None:
    """Refuse tensors without elements."""
    for op in graph.ops:
        for value in (*op.operands, *op.results):
            if not value.type.num_elements:
                hint = "remove the empty dim from the model"
                raise unsupported(op, f"requires at least one element, got {value.type}", hint)


def _attempt(given: _Try) -> Fixpoint:
    graph = given.graph
    counters = {
        graph.inputs[i]: parameter(r, low, high)
        for r, (i, low, high) in enumerate(given.signature.parameters)
    }
    aliases = {k: graph.inputs[i] for k, i in given.signature.aliases}
    donated = _donated(graph, {k: v for k, v in aliases.items() if k not in given.no_alias})
    forced, dense = frozenset(given.forced), frozenset(given.dense)
    ranges = {graph.inputs[i]: (low, high) for i, low, high in given.signature.ranges}
    positions, wide = Positions(graph, ranges), given.options.keeps_fp32
    body = Body(graph, counters, positions, donated, forced, dense, wide)
    inputs = [v for v in graph.inputs if v not in counters]
    storage = Storage(body, inputs, aliases, given.no_alias)
    alone = {t.number for t in body.tasks if t.result in given.alone}
    rules = rules_of(given.options, given.budget, alone, given.reductions_first)
    number = {t.result: t.number for t in body.tasks}
    never_fused = {
        (number[a], number[b]) for a, b in given.never_fused if a in number and b in number
    }
    clashes: set[tuple[int, int]] = set()
    arrivals = arrivals_ps(storage.order, given.oracle) if given.oracle is not None else {}
    while True:
        groups = Groups(storage, clashes | never_fused, given.early, arrivals, given.patience_ps)
        try:
            trials = _form(given, groups, rules)
            if found := stored_wide_elsewhere(groups) - given.early:
                given.early |= found
                continue
            lowered = write_out(groups, given.oracle)
            return Fixpoint(given, lowered, groups, rules, trials)
        except ClashError as clash:
            assert clash.pair not in clashes
            clashes.add(clash.pair)
            storage.reset()


def rules_of(
    options: CompileOptions, budget: Budget, alone: Collection[int], reductions_first: bool = False
) -> tuple[Rule, ...]:
    """The phases of growth, in order. `alone`: softmax operators that pass through HBM;
    `reductions_first`: reduction fusions take what they can before epilogues do.
    """
    later: list[Rule] = []
    if options.optlevel > 1:
        later.append(EpilogueRule(budget, alone))
    if options.attention == "flash":
        later.insert(0 if reductions_first else len(later), ReductionRule(budget))
    return LoopRule(budget, alone), *later


def _softmax_operators(graph: Graph, options: CompileOptions) -> set[Value]:
    """Results that share a kernel with nothing of their score: with attention `unfused`, the
    products that make scores and the reductions over them.
    """
    if options.attention != "unfused":
        return set()
    scores = {value for instance in find_attention(graph) for value in instance.scores}
    return {
        op.result
        for op in graph.ops
        if (op.name in REDUCTIONS and op.operands[0] in scores)
        or (op.name in CONTRACTIONS and op.result in scores)
    }


def _form(given: _Try, groups: Groups, rules: Sequence[Rule]) -> Trials:
    """Grow the kernels of a body, phase by phase, and split what does not pay."""
    for rule in rules:
        groups.grow(rule)
    trials = Trials(groups, given.oracle, policy_of(given.options))
    trials.undo_merges()
    return trials


def _donated(graph: Graph, aliases: Mapping[int, Value]) -> set[Value]:
    """Results of updates on the way from an input to the output that owns its memory."""
    made = graph.producers()
    found: set[Value] = set()
    for k, owner in aliases.items():
        path: list[Value] = []
        value = graph.outputs[k]
        while value in made and made[value].name in UPDATES | IDENTITIES:
            op = made[value]
            path.append(value)
            value = operands_of(op, value)[0]
        if value is owner:
            found.update(path)
    return found
