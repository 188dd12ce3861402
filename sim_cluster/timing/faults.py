"""What is wrong with a cluster: slow and dead cores, slow and dead links and EFA devices, jitter.

`Faults` speaks of the machine, as the user does: cores by their number in the cluster, links by
instance and chips. `Health` is what of it the cluster loop needs, by classes of ranks. Links are
priced in `degraded.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from shardwright.compiler.diagnostics import SimulationError, UsageError
from shardwright.compiler.machine.target import PS_PER_S
from shardwright.sim_cluster.timing.classes import RankClasses
from shardwright.sim_cluster.timing.hardware import FAULT_CLASSES, heard_of
from shardwright.sim_cluster.timing.macro import MacroOp

EFA = "efa"
Link = tuple[int, int] | tuple[str, int]
"""Two chips of an instance, the lower one first, or `("efa", device)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Faults of a run.

    `slow_cores`: how many times as long the code of a core takes, by number in the cluster; of
    `dead_cores` nothing is ever heard. `hardware`: the class of a core's fault that ends the
    execution (`hardware.py`). `late_cores`: seconds after the others at which a core is loaded and
    meets them; a step begins when all have met. `links`: by instance, what is left of the
    bandwidth of a link or device in both directions; 0 is a dead one. `jitter`: mean delay of a
    stretch of code as a part of its time, drawn from `seed`.
    """

    slow_cores: Mapping[int, float] = field(default_factory=dict)
    dead_cores: frozenset[int] = frozenset()
    hardware: Mapping[int, str] = field(default_factory=dict)
    late_cores: Mapping[int, float] = field(default_factory=dict)
    links: Mapping[int, Mapping[Link, float]] = field(default_factory=dict)
    jitter: float = 0.0
    seed: int = 0

    def __bool__(self) -> bool:
        ends = self.dead_cores or self.hardware
        return bool(self.slow_cores or ends or self.late_cores or self.links or self.jitter)


NO_FAULTS = Faults()


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What the cluster loop needs to know: slow and dead classes, jitter; `dead_cores` are the
    cores of the dead ones, `hardware` the fault of each core that has one, and `failing` that of
    each class."""

    slow: Mapping[int, float] = field(default_factory=dict)
    dead: frozenset[int] = frozenset()
    dead_cores: tuple[int, ...] = ()
    hardware: Mapping[int, str] = field(default_factory=dict)
    failing: Mapping[int, str] = field(default_factory=dict)
    jitter: float = 0.0
    seed: int = 0

    def macros(self, index: int, macros: Sequence[MacroOp]) -> Sequence[MacroOp]:
        """What of the macros of a class it does."""
        if index in self.failing:
            return heard_of(self.failing[index], macros)
        return () if index in self.dead else macros

    def delays(self, classes: RankClasses) -> list[Delay]:
        """The delays of every class."""
        return [
            Delay(
                self.slow.get(index, 1.0),
                self.jitter,
                len(classes.ranks(index)),
                f"{self.seed}/{classes.representative(index)}",
            )
            for index in range(classes.count)
        ]


HEALTHY = Health()


def check_faults(faults: Faults, cores: int, instances: int) -> None:
    """Raise UsageError (SW_FAULT) for cores and instances that the cluster does not have."""
    named = {
        "slow_cores": (faults.slow_cores, cores, "core"),
        "dead_cores": (faults.dead_cores, cores, "core"),
        "hardware": (faults.hardware, cores, "core"),
        "late_cores": (faults.late_cores, cores, "core"),
        "slow_links": (faults.links, instances, "instance"),
    }
    for key, (numbers, count, what) in named.items():
        check_numbers(key, numbers, count, what)


def check_numbers(key: str, numbers: Iterable[int], count: int, what: str) -> None:
    """Raise UsageError (SW_FAULT) for numbers of `faults.key` that are not below `count`."""
    beyond = [n for n in sorted(numbers) if not 0 <= n < count]
    if beyond:
        raise UsageError(
            "SW_FAULT",
            f"faults.{key} requires {what} numbers below {count}, got {beyond[0]}",
            None,
            f"{what} numbers of the cluster start at 0",
        )


class Delay:
    """How many times as long the stretches of a class take, one after the other.

    With jitter, every rank adds exponentially distributed delays of their own to a stretch, and a
    class is as late as the latest of its ranks: the largest of as many draws. That is exact where
    all ranks of a class meet after every stretch, and too late where they meet more rarely.
    Unknown-default: no distribution is published for Trainium.
    """

    def __init__(self, slow: float, jitter: float, ranks: int, seed: str) -> None:
        self.slow, self.jitter, self.ranks = slow, jitter, ranks
        self.random = random.Random(seed)

    def factor(self) -> float:
        """The factor of the next stretch."""
        if not self.jitter:
            return self.slow
        # The largest of n exponential delays is below x with probability (1 - exp(-x))^n.
        below = max(self.random.random(), 1e-300) ** (1 / self.ranks)
        return self.slow * (1 - self.jitter * math.log1p(-min(below, 1 - 1e-16)))


def hanging(
    classes: RankClasses, health: Health, waits: Mapping[int, tuple[str, int]]
) -> SimulationError:
    """The end of a run with cores that are dead or fail; `waits` says what each stuck class waits
    for, and since when in picoseconds."""
    lost = health.dead | health.failing.keys()
    gone = sorted(rank for index in lost for rank in classes.ranks(index))
    stuck: dict[tuple[int, str], list[int]] = {}
    for index, (what, since_ps) in waits.items():
        stuck.setdefault((since_ps, what), []).extend(classes.ranks(index))
    hung = sum(map(len, stuck.values()))
    parts = [
        f"ranks {ranges(sorted(ranks))} in {what} since {since_ps / PS_PER_S:.6f} s"
        for (since_ps, what), ranks in sorted(stuck.items())
    ]
    where = f": {hung} of {len(classes.of_rank)} ranks hang{': ' if parts else ''}"
    ending = where + "; ".join(parts)
    if not health.hardware:
        return SimulationError(
            "SW_DEAD_CORE",
            f"a step requires all cores, got core {ranges(health.dead_cores)} (rank"
            f" {ranges(gone)}) dead{ending}",
            None,
            "leave the instance out; [goodput] says what restarts from checkpoints cost",
        )
    kinds = [(core, FAULT_CLASSES[kind]) for core, kind in sorted(health.hardware.items())]
    found = [f"core {core} has {kind.text}" for core, kind in kinds]
    dead = [f"core {ranges(health.dead_cores)} is dead"] if health.dead_cores else []
    actions = dict.fromkeys(kind.action for _, kind in kinds)
    return SimulationError(
        "SW_HARDWARE_FAULT",
        f"a step requires sound cores: {', '.join(found + dead)} (rank {ranges(gone)}){ending}",
        None,
        "; ".join(actions),
    )


WARNED_EVERY_S = 120
"""Documented: ranks that wait for one say so that often, and wait on (runtime troubleshooting
page)."""


def waiting(late_cores: Mapping[int, float]) -> list[tuple[float, tuple[int, ...]]]:
    """When the cores that are there say that they still wait, in seconds after they were loaded,
    and for which."""
    last = max(late_cores.values(), default=0.0)
    times = range(WARNED_EVERY_S, math.ceil(last), WARNED_EVERY_S)
    return [
        (float(at), tuple(sorted(core for core, until in late_cores.items() if until > at)))
        for at in times
    ]


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as text: 0-3, 5."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
