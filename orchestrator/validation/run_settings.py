"""Software settings of published runs: named profiles of `run_settings.toml`.

Which form attention had, what was computed again and what the compiler of a release did by default
decide a step time more than any constant of the machine. They are facts about a run, looked up by
its framework, model and release, each with its source; nothing is fitted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from shardwright.orchestrator.validation.published_columns import entries, matches

Release = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """One profile: how attention keeps scores, what is computed again (`column`: as the row says),
    whether sums of short types stay fp32, the share of elements that dropout drops, whether
    projections that read the same input are one matrix, whether key-value heads fewer than
    tensor-parallel ranks are copied into weights of every rank, whether the loss finds targets by
    one-hot rows, and the microseconds per layer that the host takes to trace a micro-batch while
    cores wait: a script that reads the loss of every step cannot trace ahead of it."""

    name: str
    attention: str
    remat: str
    accumulation: bool
    source: str
    dropout: float = 0.0
    fused: bool = False
    replicated_kv: bool = False
    one_hot_loss: bool = False
    trace_us_per_layer: int = 0
    match: Mapping[str, str] = field(default_factory=dict)
    since: str = ""
    until: str = ""

    def holds(self, columns: Mapping[str, str]) -> bool:
        """Whether a row's columns are those of this profile."""
        given = release(columns.get("neuron_version", ""))
        late = given or (99, 0)  # a row without a release is taken to be of the newest
        after = not self.since or late >= (release(self.since) or late)
        before = not (self.until and late >= (release(self.until) or late))
        return after and before and matches(self.match, columns)


@cache
def profiles() -> tuple[RunSettings, ...]:
    """All profiles, in the order they are tried."""
    return tuple(RunSettings(**entry) for entry in entries("run_settings.toml", "profile"))


def settings_of(columns: Mapping[str, str]) -> RunSettings:
    """The profile of a row; the last one takes every row."""
    return next(one for one in profiles() if one.holds(columns))


def release(text: str) -> Release | None:
    """The first release in `text` ("2.5-2.6", "2.4 (Sep 2022)") as numbers; None without one."""
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None
