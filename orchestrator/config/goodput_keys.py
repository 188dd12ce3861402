"""The table `[goodput]` of a job: how often machines fail, what saving and starting again cost."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.compiler.diagnostics import UsageError
from shardwright.sharding.settings import limited


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputConfig:
    """Failures and checkpoints of a long run."""

    instance_mtbf_hours: float = limited(6300.0, 1.0, 1e9)
    """Mean time between failures of one instance. Unknown-default: nothing is published for
    Trainium; 419 unexpected interruptions of 2,048 GPU hosts in 54 days are 6,300 hours
    (Grattafiori et al. 2024, section 3.3.4)."""

    restart_s: float = limited(600.0, 0.0, 1e9)
    """From a failure to the first new step: detection, replacement, loading. Unknown-default."""

    checkpoint_interval_s: float = limited(0.0, 0.0, 1e9)
    """Training between two checkpoints; 0 takes the best interval."""

    checkpoint_interval_steps: int = limited(0, 0, 10**9)
    """The same in steps; 0: as `checkpoint_interval_s` says."""

    checkpoint_s: float = limited(0.0, 0.0, 1e9)
    """How long saving stops training; 0: parameters and optimizer state at `storage_gb_per_s`."""

    storage_gb_per_s: float = limited(1.0, 1e-3, 1e6)
    """What every instance writes to storage, all together. Unknown-default."""


USUAL = GoodputConfig()


def check_interval(given: GoodputConfig) -> None:
    """Refuse two intervals of checkpoints. Raises UsageError."""
    if given.checkpoint_interval_s and given.checkpoint_interval_steps:
        raise UsageError(
            "SW_USAGE",
            "[goodput] requires one interval of checkpoints, got checkpoint_interval_s"
            f" {given.checkpoint_interval_s:g} and checkpoint_interval_steps"
            f" {given.checkpoint_interval_steps}",
            hint="leave one out, or set it to 0",
        )
