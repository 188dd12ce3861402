"""A host whose collectives deliver something else, as a fault of the partitioner, the compiler or a
rank would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shardwright.compiler.neff.bundle import Bundle
from shardwright.sim_cluster.values.functions import CollectiveRequest
from shardwright.sim_cluster.values.rank_host import RankHost

Tamper = Callable[[int, np.ndarray, Mapping[int, np.ndarray]], np.ndarray]
"""(rank, what it would get, what every rank would get) -> what it gets."""


NOISE = 1e-6
"""Of the largest element that any collective of the run has sent before."""


class FaultyHost(RankHost):
    """Counts the collectives it finishes, and tampers with some by their number."""

    def __init__(self, bundle: Bundle, faults: Mapping[int, Tamper] | None = None) -> None:
        super().__init__(bundle.programs, bundle.manifest)
        self.faults = faults or {}
        self.changed = False  # whether tampering changed more than rounding
        self.largest = 0.0
        self.calls: list[tuple[str, int]] = []
        """Kind of every collective of floats with more than one element, and elements sent."""

    def _run(self, now: Any) -> list[CollectiveRequest | None]:
        requests = super()._run(now)
        waiting = {
            rank: one for rank, one in zip(now.ranks, requests, strict=True) if one is not None
        }
        first = next(iter(waiting.values()), None)
        if first is None or first.source.dtype.kind != "f" or first.source.size == 1:
            return requests
        number = len(self.calls)
        self.calls.append((first.call.kind, first.source.size))
        sources = [float(np.abs(request.source).max()) for request in waiting.values()]
        self.largest = max(self.largest, *sources)
        if number in self.faults:
            self._tamper(waiting, self.faults[number])
        return requests

    def _compare(self, given: np.ndarray, right: np.ndarray) -> None:
        """A gradient of zero is rounding: one part of it is as good as another."""
        apart = float(np.abs(given.astype(np.float64) - right).max())
        self.changed |= apart > NOISE * self.largest

    def _tamper(self, waiting: Mapping[int, CollectiveRequest], tamper: Tamper) -> None:
        """Deliver when all results are known."""
        deliveries = {rank: request.deliver for rank, request in waiting.items()}
        results: dict[int, np.ndarray] = {}

        def keeper(rank: int) -> Callable[[np.ndarray], None]:
            def keep(result: np.ndarray) -> None:
                results[rank] = result.copy()
                if len(results) == len(deliveries):
                    for other, deliver in deliveries.items():
                        given = tamper(other, results[other], results)
                        self._compare(given, results[other])
                        deliver(given)

            return keep

        for rank, request in waiting.items():
            request.deliver = keeper(rank)
