"""A Triton Inference Server, as far as its documents say what one is to a Python model: models of a
repository, their bounded queues and instances, requests and what became of them.

Every request ends in a response, an error or a cancellation; one that the watchdog had to end is
`hung`. The watchdog is generous: it is there for a test to fail rather than to wait.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from shardwright.orchestrator.host import python_path
from tests.support.triton import pbtxt
from tests.support.triton.backend.triton_python_backend_utils import BF16, TYPES, TritonError

STUB = Path(__file__).with_name("stub.py")
WATCHDOG_S = 150.0
LOOK_S = 0.01
NUMPY = {**TYPES, BF16: ml_dtypes.bfloat16}
STATUS = {getattr(TritonError, name): name for name in dir(TritonError) if name.isupper()}


class LoadFailedError(Exception):
    """A model that cannot be loaded; the message is what its stub said."""


class Request:
    """A request that was sent; `kind` is what it ended in."""

    def __init__(self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str]) -> None:
        self.inputs, self.outputs = dict(inputs), list(outputs)
        self.kind, self.status, self.message = "", "", ""
        self.results: dict[str, np.ndarray] = {}
        self.rows, self.deadline = 1, float("inf")
        self.is_given_up, self.is_told = False, False
        self.model: Model | None = None
        self._ended, self._guard = threading.Event(), threading.Lock()

    def end(self, kind: str, status: str = "", message: str = "", **results: np.ndarray) -> None:
        with self._guard:
            assert not self.kind, "a request ends once"
            self.kind, self.status, self.message, self.results = kind, status, message, results
        self._ended.set()

    def cancel(self) -> None:
        """What a client does that goes away."""
        self.is_given_up = True
        if self.model is not None:
            self.model.drop(self)

    def wait(self) -> Request:
        """The request when it has ended. Raises TimeoutError: nobody ended it."""
        if not self._ended.wait(2 * WATCHDOG_S):
            raise TimeoutError("a request was lost")
        return self

    @property
    def is_over(self) -> bool:
        return self._ended.is_set()


class Stub:
    """A stub process and our end of its socket."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, str(STUB), str(theirs.fileno())],
            env={**os.environ, "PYTHONPATH": python_path(), "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def call(self, method: str, *args: Any) -> Any:
        """Raises LoadFailedError for what the model raised, and where it does not answer."""
        self.connection.send((method, *args))
        if not self.connection.poll(WATCHDOG_S):
            raise LoadFailedError(f"hung: {method}")
        found, error = self.connection.recv()
        if error:
            raise LoadFailedError(error)
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class Model:
    """A loaded version of a model: its queue and its instances."""

    def __init__(self, folder: Path) -> None:
        self.config = pbtxt.read((folder / "config.pbtxt").read_text())
        if self.config["name"] != folder.name or self.config["backend"] != "python":
            raise LoadFailedError("name or backend is another")
        versions = [int(p.name) for p in folder.iterdir() if p.name.isdigit()]
        if not versions:
            raise LoadFailedError("no version is available")
        self.folder = str(folder / str(max(versions)))
        policy = self.config.get("dynamic_batching", {}).get("default_queue_policy", {})
        self.most_queued = policy.get("max_queue_size", 0)
        self.queue_s = policy.get("default_timeout_microseconds", 0) / 1e6
        self.queue: deque[Request] = deque()
        self.runs: list[int] = []  # how many requests each call had
        self._change, self._is_closed = threading.Condition(), False
        self.stubs: list[Stub] = []
        try:
            self._load()
        except LoadFailedError:
            for stub in self.stubs:
                stub.end()
            raise
        self.threads = [
            threading.Thread(target=self._serve, args=(number,), daemon=True)
            for number in range(len(self.stubs))
        ]
        for thread in self.threads:
            thread.start()

    def _load(self) -> None:
        count = sum(group.get("count", 1) for group in self.config["instance_group"])
        self.stubs = [Stub()]
        self.config = self.stubs[0].call("auto_complete", self.folder, self.config)
        self.stubs[0].end()
        self.stubs = [Stub() for _ in range(count)]
        for stub in self.stubs:
            self._initialize(stub)

    def _initialize(self, stub: Stub) -> None:

        args = {
            "model_config": json.dumps(self.config),
            "model_name": self.config["name"],
            "model_version": Path(self.folder).name,
            "model_repository": str(Path(self.folder).parent),
            "model_instance_kind": "CPU",
        }
        stub.call("initialize", self.folder, args)

    def enqueue(self, request: Request) -> bool:
        """Whether it was taken; not where the model is being unloaded."""
        with self._change:
            if self._is_closed:
                return False
            if self.most_queued and len(self.queue) >= self.most_queued:
                request.end("error", "UNAVAILABLE", "Exceeds maximum queue size")
                return True
            request.model = self
            if self.queue_s:
                request.deadline = time.monotonic() + self.queue_s
            self.queue.append(request)
            self._change.notify()
            return True

    def drop(self, request: Request) -> None:
        """A request that was given up: at once where it waits."""
        with self._change:
            if request in self.queue:
                self.queue.remove(request)
                request.end("cancelled")

    def retire(self) -> None:
        """End it when all that it took has ended."""
        with self._change:
            self._is_closed = True
            self._change.notify_all()
        for thread in self.threads:
            thread.join(3 * WATCHDOG_S)
            assert not thread.is_alive(), "an instance hangs"

    def _expire(self) -> None:
        with self._change:
            now = time.monotonic()
            for request in [r for r in self.queue if r.deadline < now]:
                self.queue.remove(request)
                request.end("error", "UNAVAILABLE", "Request timeout expired")

    def _next(self) -> list[Request]:
        """What one call takes; none when the model is unloaded."""
        with self._change:
            while not self.queue:
                if self._is_closed:
                    return []
                self._change.wait(1.0)
            batch = [self.queue.popleft()]
            most = self.config["max_batch_size"]
            while self.queue and sum(r.rows for r in batch) + self.queue[0].rows <= most:
                batch.append(self.queue.popleft())
            self.runs.append(len(batch))
            return batch

    def _serve(self, number: int) -> None:
        while batch := self._next():
            try:
                self._execute(self.stubs[number], batch)
            except (EOFError, OSError):
                for request in batch:
                    if not request.kind:
                        request.end("error", "INTERNAL", "the stub process is not healthy")
                self.stubs[number].end()
                self.stubs[number] = Stub()
                self._initialize(self.stubs[number])
        stub = self.stubs[number]
        with suppress(EOFError, OSError):
            stub.call("finalize")
        stub.end()

    def _execute(self, stub: Stub, batch: list[Request]) -> None:
        rows = [(id(request), _sent(self.config, request), request.outputs) for request in batch]
        stub.connection.send(("execute", rows))
        until = time.monotonic() + WATCHDOG_S
        while not stub.connection.poll(LOOK_S):
            self._expire()
            for request in batch:
                if request.is_given_up and not request.is_told:
                    request.is_told = True
                    stub.connection.send(("cancel", id(request)))
            if time.monotonic() > until:
                for request in batch:
                    request.end("hung")
                raise EOFError
        answers, error = stub.connection.recv()
        for place, request in enumerate(batch):
            if error:
                request.end("error", "INTERNAL", error)
            else:
                _end(request, *answers[place])


def _sent(config: Mapping[str, Any], request: Request) -> list[tuple[str, np.ndarray, str]]:
    kinds = {row["name"]: row for row in config["input"]}
    sent = []
    for name, array in request.inputs.items():
        row = kinds[name]
        bits = array.view(np.uint16) if row["data_type"] == BF16 else array
        sent.append((name, bits.reshape(()) if "reshape" in row else bits, row["data_type"]))
    return sent


def _end(request: Request, kind: str, *told: Any) -> None:
    if kind == "response":
        pairs = {n: a.view(NUMPY[BF16]) if k == BF16 else a for n, a, k in told[0]}
        request.end("response", **pairs)
    else:
        code, message = told
        status = STATUS[code]
        request.end("cancelled" if status == "CANCELLED" else "error", status, message)


class Server:
    """A server with explicit model control."""

    def __init__(self, repository: Path) -> None:
        self.repository = repository
        self.models: dict[str, Model] = {}

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.models):
            self.unload(name)

    def load(self, name: str) -> None:
        """Load, or load again: the old one serves until the new one is ready. Raises
        LoadFailedError."""
        made = Model(self.repository / name)
        old, self.models[name] = self.models.get(name), made
        if old is not None:
            old.retire()

    def unload(self, name: str) -> None:
        self.models.pop(name).retire()

    def infer(
        self, name: str, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] = ()
    ) -> Request:
        """Send a request; it may have ended already."""
        request = Request(inputs, outputs)
        while True:
            model = self.models.get(name)
            if model is None:
                request.end("error", "UNAVAILABLE", f"'{name}' has no available versions")
            elif refused := _refusal(model.config, request):
                request.end("error", "INVALID_ARG", refused)
            elif not model.enqueue(request):
                continue  # a newer one takes its place
            return request


def _refusal(config: Mapping[str, Any], request: Request) -> str:
    """Why the server refuses a request, before any model sees it."""
    most = config["max_batch_size"]
    rows = {row["name"]: row for row in config["input"]}
    if set(rows) != set(request.inputs):
        return f"expected inputs {sorted(rows)}, got {sorted(request.inputs)}"
    sizes = set()
    for name, array in request.inputs.items():
        if array.dtype != NUMPY[rows[name]["data_type"]]:
            return f"inference input '{name}' data-type is {array.dtype}"
        shape = list(array.shape)
        if most:
            sizes.add(shape.pop(0) if shape else 0)
        if shape != rows[name]["dims"]:
            return f"unexpected shape for input '{name}'"
    if most and (len(sizes) > 1 or not 0 < max(sizes) <= most):
        return f"inference request batch-size must be <= {most}"
    request.rows = max(sizes, default=1)
    known = {row["name"] for row in config["output"]}
    if unknown := set(request.outputs) - known:
        return f"unexpected inference output {unknown}"
    return ""


def counted(requests: Sequence[Request]) -> Counter[str]:
    """How many ended in what, once all have."""
    return Counter(request.wait().kind for request in requests)


def simulators(model: Model) -> list[int]:
    """Processes of the simulators of a model: the children of its stubs."""
    found = []
    for stub in model.stubs:
        pid = stub.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        found += list(map(int, children))
    return found
