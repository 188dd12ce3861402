"""What our processes ask of their host: CPUs, and how often Python looks for reference cycles."""

from __future__ import annotations

import gc
import os

# Our choice. Graphs are millions of small objects that live long and hold no cycles. With Python's
# own thresholds (700, 10, 10) a quarter of the time of an 80-layer unrolled step went into walking
# them; with these it cannot be measured, and peak memory is the same.
_THRESHOLDS = (50_000, 20, 50)


def num_cpus() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0))


def collect_rarely() -> None:
    """Set the thresholds of the cycle collector for a process that holds graphs."""
    gc.set_threshold(*_THRESHOLDS)
