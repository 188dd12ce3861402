"""What the runtime of a release adds to a collective besides the machine: facts about a run.

Published times of 2023 carry a launch floor of tens to hundreds of microseconds that runs of the
same machine from 2025 on do not have. A named runtime says so; `current` adds nothing and is the
default everywhere. Nothing here is fitted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardwright.collectives.ops import CollectiveError, CollectiveKind, ReplicaGroups

if TYPE_CHECKING:  # both need numpy, which who only names runtimes does not
    from shardwright.collectives.timing.times import CollectiveTime
    from shardwright.collectives.topology import Topology

US = 1_000_000  # picoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Releases up to a date (`until`, year and month; empty for the newest)."""

    name: str
    until: str
    chip_ps: int = 0  # every collective of ranks of one chip
    instance_ps: int = 0  # every collective of ranks of several chips
    barrier_ps: int = 0  # every time ranks of several instances meet
    source: str

    def added_ps(
        self, kind: CollectiveKind, *, chips: int, instances: int, ranks: int, elements: int
    ) -> int:
        """What a collective of `ranks` on `chips` of each of `instances` takes longer.

        Ranks of several instances meet before each half of an all_reduce, or once when there are
        fewer elements than ranks, which leaves nothing to scatter (inferred).
        """
        halves = kind is CollectiveKind.ALL_REDUCE and elements >= ranks
        meetings = (1 + halves) if instances > 1 else 0
        alone = self.chip_ps if chips == 1 else self.instance_ps
        return alone * (instances == 1) + meetings * self.barrier_ps

    def launching(
        self,
        time: CollectiveTime,
        kind: CollectiveKind,
        topology: Topology,
        groups: ReplicaGroups,
        elements: int,
    ) -> CollectiveTime:
        """`time` of a collective of `groups`, with what this runtime takes longer to launch it."""
        first = groups.groups[0]
        added = self.added_ps(
            kind,
            chips=len({rank // topology.ranks_per_chip for rank in first}),
            instances=len({rank // topology.ranks_per_instance for rank in first}),
            ranks=groups.size,
            elements=elements,
        )
        return replace(time, launch_ps=time.launch_ps + added, total_ps=time.total_ps + added)


RUNTIMES = (
    Runtime(
        name="2023",
        until="2023-11",
        chip_ps=50 * US,
        instance_ps=150 * US,
        barrier_ps=500 * US,
        source="documented: barrier of 500 us before 2023-12 (release notes of aws-neuronx-"
        "collectives); inferred: launch floor of 50 to 150 us, its low end within a chip",
    ),
    Runtime(
        name="2024",
        until="2024-12",
        barrier_ps=40 * US,
        source="documented: barrier of 40 us from 2023-12 (release notes of aws-neuronx-"
        "collectives)",
    ),
    Runtime(
        name="current",
        until="",
        source="inferred: published small collectives of 2025 take their steps and nothing more",
    ),
)
CURRENT = RUNTIMES[-1]


def runtime_named(name: str) -> Runtime:
    """The runtime called `name`. Raises CollectiveError for an unknown one."""
    known = {runtime.name: runtime for runtime in RUNTIMES}
    if name not in known:
        raise CollectiveError(f"a runtime is one of {', '.join(known)}, got {name!r}")
    return known[name]


def runtime_of_date(text: str) -> Runtime:
    """The runtime of a date as tables print it: `2023-04`, `2025`, `2025-26`; the newest when there
    is none."""
    found = re.search(r"\b(20\d\d)(?:-(\d\d))?\b", text)
    if not found:
        return CURRENT
    month = found[2] if found[2] and 1 <= int(found[2]) <= 12 else "06"
    date = f"{found[1]}-{month}"
    return next(runtime for runtime in RUNTIMES if not runtime.until or date <= runtime.until)
