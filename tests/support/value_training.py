"""A value run of the small llama for the tests that interrupt it; as a script, one that goes on
until somebody ends it: `python -m tests.support.value_training BUNDLE CHECKPOINTS`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwright.compiler.neff.bundle import Bundle, load_bundle
from shardwright.orchestrator.service.progress import Progress
from shardwright.orchestrator.values.process_hosts import ProcessHosts
from shardwright.orchestrator.values.value_run import Checkpoints, Source, Training, Values
from shardwright.sim_cluster.values.rank_host import packed_host, spans_of
from shardwright.sim_cluster.values.run_values import Hosts, ValueRun
from tests.support.small_job import small_llama

SOURCE = Source(task=small_llama(), global_batch=8)
IDENTITY = {"test": 1}
HOSTS = 2


@dataclass
class Told:
    """What a run said, and somebody to act on it."""

    act: Callable[[str, dict[str, Any]], None] = lambda event, fields: None
    events: list[str] = field(default_factory=list)

    def __call__(self, event: str, **fields: Any) -> None:
        self.events.append(event)
        self.act(event, fields)


def packed(bundle: Bundle, count: int = HOSTS) -> tuple[Sequence[range], list[bytes]]:
    spans = spans_of(bundle.manifest.num_cores, count)
    return spans, [packed_host(bundle.programs, bundle.manifest, spans, n) for n in range(count)]


def process_hosts(bundle: Bundle) -> ProcessHosts:
    return ProcessHosts(*packed(bundle))


def training(
    bundle: Bundle,
    folder: Path,
    steps: int,
    *,
    hosts: Hosts | None = None,
    every: int = 1,
    resume: bool = False,
    told: Told | None = None,
    source: Source = SOURCE,
    identity: Mapping[str, Any] = IDENTITY,
) -> Values:
    """The steps of a run; its checkpoints are in `folder`."""
    run = ValueRun(bundle.programs, bundle.manifest, check_l0=False, hosts=hosts)
    with closing(run):
        saved = Checkpoints(folder, every, identity)
        one = Training(run, source, saved, Progress("quiet"), told or Told())
        if resume:
            one.resume()
        return one.train(steps)


if __name__ == "__main__":
    small = load_bundle(Path(sys.argv[1]))
    training(small, Path(sys.argv[2]), 10**6, hosts=process_hosts(small))


def pids_of(hosts: Any) -> list[int]:
    """The processes of hosts, which run on workers of this machine or as actors of Ray."""
    if isinstance(hosts, ProcessHosts):
        return [worker.process.pid for worker in hosts._workers]
    return [int(pid) for pid in hosts._ray.get([one.start.remote() for one in hosts._actors])]
