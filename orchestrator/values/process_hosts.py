"""Hosts of ranks in worker processes of this machine.

A host is a fresh interpreter and a session of its own, like the workers of the process executor;
what ranks send each other passes through this process unread. A host does one thing at a time, so
that a request is never written to one that is still writing. One that keeps us waiting too long is
ended, and lost like one that died.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from shardwright.orchestrator.service import logs
from shardwright.orchestrator.service.process_backend import Worker, start_worker
from shardwright.orchestrator.values.serving import Answered, late, serve
from shardwright.sim_cluster.values.rank_host import RankHost
from shardwright.sim_cluster.values.run_values import Handle, HostLostError

PROTOCOL = 5  # of pickle: arrays as they lie in memory


class Watch:
    """Ends a host that we have waited for `limit_s` (0: never), whether for its answer or for room
    for a request. A thread of its own, because no read with a time limit covers a host that stops
    in the middle of a message. Time is counted look by look: while this process is stopped, none
    passes."""

    _LOOKS = 4  # within the limit
    _MOST_S = 1.0  # from one to the next

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._waited: dict[Worker, float] = {}
        self._ended: set[Worker] = set()
        self._guard, self._is_over = threading.Lock(), threading.Event()
        if limit_s:
            threading.Thread(target=self._look, daemon=True, name="value hosts").start()

    @contextmanager
    def waiting(self, worker: Worker) -> Iterator[None]:
        """Inside, we wait for a host."""
        with self._guard:
            self._waited[worker] = 0.0
        try:
            yield
        finally:
            with self._guard:
                del self._waited[worker]

    def why(self, worker: Worker) -> str:
        """Why a host is gone, if we ended it."""
        return late(self.limit_s) if worker in self._ended else ""

    def close(self) -> None:
        """End the thread."""
        self._is_over.set()

    def _look(self) -> None:
        while not self._is_over.wait(pause := min(self.limit_s / self._LOOKS, self._MOST_S)):
            with self._guard:
                for worker in self._waited:
                    self._waited[worker] += pause
                    # What is there to be read is an answer: it is we who are late.
                    if self._waited[worker] >= self.limit_s and not worker.connection.poll():
                        self._ended.add(worker)
                        worker.process.kill()


@dataclass(slots=True, eq=False)
class _Reply:
    """What a process was asked; see `run_values.Reply`."""

    _worker: Worker
    _host: int
    _watch: Watch
    _answered: Answered | None = None
    _sent: Sequence[bytes] = ()
    _is_lost: bool = False

    def answer(self) -> Any:
        """See Reply."""
        self.arrive()
        if self._answered is None:
            raise HostLostError(self._host, self._watch.why(self._worker))
        return self._answered.result()

    def sent(self) -> Sequence[Handle]:
        """See Reply."""
        self.arrive()
        return self._sent

    def arrive(self) -> None:
        """Wait for all of it."""
        if self._answered is not None or self._is_lost:
            return
        connection = self._worker.connection
        try:
            with self._watch.waiting(self._worker):
                answered, count = connection.recv()
                self._sent = [connection.recv_bytes() for _ in range(count)]
            self._answered = answered
        except (EOFError, OSError):
            self._is_lost = True


class ProcessHosts:
    """See the module; `packed` are the hosts as `packed_host` makes them, `timeout_s` is how long
    one is waited for (0: until it dies)."""

    def __init__(
        self, spans: Sequence[range], packed: Sequence[bytes], timeout_s: float = 0.0
    ) -> None:
        self.spans = spans
        self.watch = Watch(timeout_s)
        self._packed = packed
        self._workers = [start_worker(__name__) for _ in packed]
        self._last: dict[int, _Reply] = {}
        for host in range(len(packed)):
            self._furnish(host)

    def ask(
        self, host: int, method: str, *args: object, incoming: Sequence[Handle] | None = None
    ) -> _Reply:
        """See Hosts."""
        if host in self._last:
            self._last[host].arrive()
        worker = self._workers[host]
        with suppress(OSError), self.watch.waiting(worker):  # a dead host: its answer says so
            worker.connection.send((method, args, incoming is not None, len(incoming or ())))
            for handle in incoming or ():
                worker.connection.send_bytes(pickle.dumps(None) if handle is None else handle)
        self._last[host] = _Reply(worker, host, self.watch)
        return self._last[host]

    def replace(self, host: int) -> None:
        """See Hosts."""
        for number, worker in enumerate(self._workers):
            if number == host or worker.process.poll() is not None:
                worker.end()
                self._workers[number] = start_worker(__name__)
                self._last.pop(number, None)
                self._furnish(number)

    def close(self) -> None:
        """See Hosts."""
        self.watch.close()
        for worker in self._workers:
            worker.end()

    def _furnish(self, host: int) -> None:
        worker = self._workers[host]
        with suppress(OSError), self.watch.waiting(worker):
            worker.connection.send_bytes(self._packed[host])


def _serve(connection: Connection) -> None:
    """The host: answer requests until the job closes the socket."""
    logs.start()
    with suppress(EOFError, OSError):
        host = RankHost.unpacked(connection.recv_bytes())
        while True:
            method, args, has_incoming, count = connection.recv()
            incoming = [pickle.loads(connection.recv_bytes()) for _ in range(count)]
            answered, sent = serve(host, method, (*args, incoming) if has_incoming else args)
            connection.send((answered, len(sent)))
            for payload in sent:
                connection.send_bytes(pickle.dumps(payload, PROTOCOL))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
