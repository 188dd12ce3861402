"""Hosts of ranks in worker processes of this machine.

A host is a fresh interpreter and a session of its own, like the workers of the process executor;
what ranks send each other passes through this process unread. A host does one thing at a time, so
that a request is never written to one that is still writing.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from orchestrator.service import logs
from orchestrator.service.process_backend import Worker, start_worker
from orchestrator.values.serving import Answered, serve
from sim_cluster.rank_host import RankHost
from sim_cluster.run_values import Handle, HostLostError

_MODULE = "orchestrator.values.process_hosts"
PROTOCOL = 5  # of pickle: arrays as they lie in memory


class _Reply:
    """What a process was asked; see `run_values.Reply`."""

    def __init__(self, worker: Worker, host: int) -> None:
        self._worker, self._host = worker, host
        self._answered: Answered | None = None
        self._sent: list[bytes] = []
        self._is_lost = False

    def answer(self) -> Any:
        """See Reply."""
        self.arrive()
        if self._answered is None:
            raise HostLostError(self._host)
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
            answered, count = connection.recv()
            self._sent = [connection.recv_bytes() for _ in range(count)]
            self._answered = answered
        except (EOFError, OSError):
            self._is_lost = True


class ProcessHosts:
    """See the module; `packed` are the hosts as `packed_host` makes them."""

    def __init__(self, spans: Sequence[range], packed: Sequence[bytes]) -> None:
        self.spans = spans
        self._packed = packed
        self._workers = [start_worker(_MODULE) for _ in packed]
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
        with suppress(OSError):  # a dead host: its answer says so
            worker.connection.send((method, args, incoming is not None, len(incoming or ())))
            for handle in incoming or ():
                worker.connection.send_bytes(pickle.dumps(None) if handle is None else handle)
        self._last[host] = _Reply(worker, host)
        return self._last[host]

    def replace(self, host: int) -> None:
        """See Hosts."""
        for number, worker in enumerate(self._workers):
            if number == host or worker.process.poll() is not None:
                worker.end()
                self._workers[number] = start_worker(_MODULE)
                self._last.pop(number, None)
                self._furnish(number)

    def labels(self) -> list[str]:
        """What hosts are called in logs."""
        return [f"process-{n}:{w.process.pid}" for n, w in enumerate(self._workers)]

    def close(self) -> None:
        """See Hosts."""
        for worker in self._workers:
            worker.end()

    def _furnish(self, host: int) -> None:
        with suppress(OSError):
            self._workers[host].connection.send_bytes(self._packed[host])


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
