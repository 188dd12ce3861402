"""Hosts of ranks as Ray actors, anywhere in the cluster.

What ranks send each other goes from actor to actor through the object store, as arrays; this
process holds references alone. Ray restarts nothing: a lost actor's ranks come back on another one
from the last checkpoint (`value_run.py`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.orchestrator.service import logs
from shardwright.orchestrator.service.ray_session import (
    RaySession,
    check_cpus,
    lost_errors,
    start_actor,
)
from shardwright.orchestrator.values.serving import Answered, late, serve
from shardwright.sim_cluster.values.rank_host import SENDING, RankHost
from shardwright.sim_cluster.values.run_values import Handle, HostLostError

PATIENCE_S = 2.0
"""How long actors have to say that they are there, after one was lost; who does not is busy. Our
choice: an idle one answers in a millisecond."""


class RankActor:
    """A host of ranks in its own process."""

    def __init__(self, packed: np.ndarray) -> None:
        self.host = RankHost.unpacked(packed.tobytes())
        logs.start_in_actor()

    def start(self) -> str:
        """Answered once the actor is there; its process."""
        return f"{os.getpid()}"

    def ask(self, method: str, args: Sequence[Any], has_incoming: bool, *incoming: Any) -> Any:
        """Answer one request: its answer, and for a method that sends one payload per host."""
        given = (*args, list(incoming)) if has_incoming else args
        answered, sent = serve(self.host, method, given)
        if method not in SENDING:
            return answered
        return [answered, *(sent or [() for _ in self.host.spans])]


@dataclass(slots=True, eq=False)
class _Reply:
    """What an actor was asked; see `run_values.Reply`."""

    _ray: Any
    _host: int
    _answer: Any
    _sent: Sequence[Any]
    _timeout_s: float

    def answer(self) -> Any:
        """See Reply."""
        try:
            answered = self._ray.get(self._answer, timeout=self._timeout_s or None)
        except self._ray.exceptions.GetTimeoutError as error:
            raise HostLostError(self._host, late(self._timeout_s)) from error
        except lost_errors(self._ray) as error:
            raise HostLostError(self._host) from error
        assert isinstance(answered, Answered)
        return answered.result()

    def sent(self) -> Sequence[Handle]:
        """See Reply."""
        return self._sent


class RayHosts:
    """See the module; `packed` are the hosts as `packed_host` makes them, `timeout_s` is how long
    an answer is waited for (0: until its actor dies). Raises UsageError for more hosts than the
    cluster has CPUs."""

    def __init__(
        self, spans: Sequence[range], packed: Sequence[bytes], timeout_s: float = 0.0
    ) -> None:
        self.spans, self.timeout_s = spans, timeout_s
        self._ray: Any = RaySession.enter(len(packed))
        try:
            check_cpus(self._ray, "run.hosts", len(packed))
            self._packed = [self._ray.put(np.frombuffer(data, np.uint8)) for data in packed]
            self._actors = [self._start(host) for host in range(len(packed))]
        except BaseException:
            RaySession.leave()
            raise

    def ask(
        self, host: int, method: str, *args: object, incoming: Sequence[Handle] | None = None
    ) -> _Reply:
        """See Hosts."""
        remote = self._actors[host].ask
        sends = method in SENDING
        if sends:
            remote = remote.options(num_returns=1 + len(self.spans))
        found = remote.remote(method, args, incoming is not None, *(incoming or ()))
        answer, *sent = found if sends else [found]
        return _Reply(self._ray, host, answer, sent, self.timeout_s)

    def replace(self, host: int) -> None:
        """See Hosts."""
        tickets = [actor.start.remote() for actor in self._actors]
        told, _ = self._ray.wait(tickets, num_returns=len(tickets), timeout=PATIENCE_S)
        for number, actor in enumerate(self._actors):
            if number == host or (tickets[number] in told and self._is_gone(tickets[number])):
                self._ray.kill(actor)
                self._actors[number] = self._start(number)

    def close(self) -> None:
        """See Hosts."""
        for actor in self._actors:
            self._ray.kill(actor)
        RaySession.leave()

    def _is_gone(self, ticket: Any) -> bool:
        try:
            self._ray.get(ticket)
        except lost_errors(self._ray):
            return True
        return False

    def _start(self, host: int) -> Any:
        return start_actor(self._ray, RankActor, self._packed[host])
