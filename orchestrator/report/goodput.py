"""Goodput: what part of the time a cluster makes steps, when instances fail and state is saved now
and then.

Failures come independently, one instance after `mtbf` on average; after one the job restarts and
repeats what it did since its last checkpoint. Source: Daly 2006, "A higher order estimate of the
optimum checkpoint interval for restart dumps", section 2, complete model; Young 1974 for the
first-order interval. Saving stops training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwright.compiler.frontend.roles import SAVED_ROLES
from shardwright.compiler.machine.target import PS_PER_S, Fact
from shardwright.orchestrator.config.goodput_keys import GoodputConfig
from shardwright.orchestrator.report.text import Facts
from shardwright.orchestrator.road.build import Built
from shardwright.sim_cluster.timing.step_time import StepTiming

GB = 1e9
S_PER_HOUR = 3600.0

UNKNOWN = {
    "instance_mtbf_hours": "default: nothing is published for Trainium; 419 unexpected"
    " interruptions of 2,048 GPU hosts in 54 days (Grattafiori et al. 2024, section 3.3.4)",
    "restart_s": "default, our choice: nothing is published for Trainium",
    "storage_gb_per_s": "default, our choice: storage is the user's",
}
"""Keys whose defaults no page documents, and where these come from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """A cluster that fails: all in seconds."""

    mtbf_s: float  # of the whole cluster
    checkpoint_s: float
    restart_s: float

    def goodput(self, interval_s: float) -> float:
        """Time of useful work over all time, when `interval_s` of work lie between checkpoints."""
        expected = (interval_s + self.checkpoint_s) / self.mtbf_s
        if expected + self.restart_s / self.mtbf_s > 700:  # beyond what a float can hold
            return 0.0
        stretched = math.exp(self.restart_s / self.mtbf_s) * math.expm1(expected)
        return min(1.0, interval_s / self.mtbf_s / stretched) if stretched else 1.0

    def best_interval_s(self) -> float:
        """The interval of the largest goodput: where its derivative is 0, found by bisection.

        With x = interval / mtbf that is (1 - x) exp(x + checkpoint / mtbf) = 1.
        """
        checkpoint = self.checkpoint_s / self.mtbf_s
        low, high = 0.0, 1.0
        while high - low > 1e-12 * high:
            middle = (low + high) / 2
            # As a sum of logarithms: nothing overflows, and small intervals keep their digits.
            rising = math.log1p(-middle) + middle + checkpoint > 0 if middle < 1 else False
            low, high = (middle, high) if rising else (low, middle)
            if middle in (0.0, 1.0):
                break
        return high * self.mtbf_s

    def young_interval_s(self) -> float:
        """The first-order estimate, sqrt(2 checkpoint mtbf)."""
        return math.sqrt(2 * self.checkpoint_s * self.mtbf_s)


def assumed(given: GoodputConfig) -> dict[str, Fact]:
    """The figures of goodput that are defaults, by the key of the job; what does not enter is
    none."""
    usual = GoodputConfig()
    names = [name for name in UNKNOWN if getattr(given, name) == getattr(usual, name)]
    if given.checkpoint_s and "storage_gb_per_s" in names:
        names.remove("storage_gb_per_s")
    return {f"goodput.{n}": Fact(getattr(given, n), "unknown", UNKNOWN[n]) for n in names}


def goodput_section(built: Built, timing: StepTiming) -> Facts:
    """Goodput of a job: with the interval that was asked for, or the best one in whole steps."""
    given, instances = built.job.goodput, built.job.cluster.instances
    buffers = built.plan.step.buffers.values()
    saved = sum(b.global_type.num_bytes for b in buffers if b.role in SAVED_ROLES)
    written_s = saved / (given.storage_gb_per_s * GB * instances)
    failures = Failures(
        mtbf_s=given.instance_mtbf_hours * S_PER_HOUR / instances,
        checkpoint_s=given.checkpoint_s or written_s,
        restart_s=given.restart_s,
    )
    step_s = timing.step_time_ps / PS_PER_S
    best_s = failures.best_interval_s()
    steps = given.checkpoint_interval_steps
    steps = steps or max(1, round((given.checkpoint_interval_s or best_s) / step_s))
    interval_s = steps * step_s
    goodput = failures.goodput(interval_s)
    saving = goodput * failures.checkpoint_s / interval_s
    tokens = built.layout.global_batch * built.tokens_per_sample
    return {
        "mtbf_s": failures.mtbf_s,
        "checkpoint_bytes": saved,
        "checkpoint_s": failures.checkpoint_s,
        "restart_s": failures.restart_s,
        "interval_s": interval_s,
        "interval_steps": steps,
        "best_interval_s": best_s,
        "young_interval_s": failures.young_interval_s(),
        "goodput": goodput,
        "lost_to_checkpoints": saving,
        "lost_to_failures": 1 - goodput - saving,
        "tokens_per_s": goodput * tokens / step_s,
    }
