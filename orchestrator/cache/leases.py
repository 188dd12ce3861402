"""Locks between hosts that share nothing but a bucket.

A lease is an object that its holder made where there was none, and renews. One that was not renewed
for a minute, by the clock of the service, is that of a host that died, and is replaced. Where the
service has no conditional puts there are no leases: a unit may then be computed by two hosts at
once, which costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time

from shardwright.orchestrator.cache.bucket import Bucket
from shardwright.orchestrator.cache.store import Release, StoreError, nothing

LEASE_S = 60.0
"""Our choice: how long a killed host keeps others waiting. It is renewed three times in that."""


class Leases:
    """The leases of this process in one bucket."""

    def __init__(self, bucket: Bucket, lease_s: float = LEASE_S) -> None:
        self._bucket, self._lease_s = bucket, lease_s
        # Names the holder to people who look into the bucket, and makes every lease's tag its own.
        self._owner = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(8)}".encode()
        self._held: dict[str, str] = {}  # key -> tag
        self._guard = threading.Lock()
        self._renewer: threading.Thread | None = None

    def take(self, key: str) -> Release | None:
        """Take a lease without waiting: what gives it back, None while another holds it. Raises
        StoreError."""
        if not self._bucket.is_conditional:
            return nothing
        tag = self._bucket.put(key, self._owner) or self._taken_over(key)
        if not tag:
            return None
        with self._guard:
            self._held[key] = tag
        self._start()
        return lambda: self._release(key)

    def _taken_over(self, key: str) -> str:
        """The tag of a lease whose holder died, now ours; empty when it lives."""
        found = self._bucket.get(key)
        if found is None:  # given back just now: asked for again like one that is held
            return ""
        return self._bucket.put(key, self._owner, found.tag) if found.age_s > self._lease_s else ""

    def _release(self, key: str) -> None:
        with self._guard:
            tag = self._held.pop(key, "")
        if tag:
            with contextlib.suppress(StoreError):  # it runs out by itself
                self._bucket.delete(key, tag)

    def _start(self) -> None:
        if self._renewer is None:
            self._renewer = threading.Thread(target=self._renew, daemon=True, name="cache leases")
            self._renewer.start()

    def _renew(self) -> None:
        while True:
            time.sleep(self._lease_s / 3)
            for key in list(self._held):
                with self._guard, contextlib.suppress(StoreError):
                    if self._held.get(key):  # empty when it was taken over: computed twice
                        self._held[key] = self._bucket.put(key, self._owner, self._held[key])
