"""A stub process of Triton's Python backend: it loads `model.py` and calls it, one call at a time.

Messages come over a socket: a method with plain arguments; (`cancel`, number) may come while a call
runs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "backend"))

import triton_python_backend_utils as pb_utils


def load(folder: str) -> Any:
    """The class of a version folder."""
    spec = importlib.util.spec_from_file_location("model", Path(folder) / "model.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TritonPythonModel


class Stub:
    """What the server asks for, by name."""

    def __init__(self) -> None:
        self.running: dict[int, pb_utils.InferenceRequest] = {}
        self.given_up: set[int] = set()
        self.model: Any = None

    def auto_complete(self, folder: str, config: dict[str, Any]) -> dict[str, Any]:
        kind = load(folder)
        if not hasattr(kind, "auto_complete_config"):
            return config
        return kind.auto_complete_config(pb_utils.ModelConfig(config)).as_dict()

    def initialize(self, folder: str, args: dict[str, str]) -> None:
        self.model = load(folder)()
        self.model.initialize(args)

    def execute(self, batch: list[tuple[int, list[Any], list[str]]]) -> list[Any]:
        requests = []
        for number, tensors, outputs in batch:
            made = [pb_utils.Tensor.of_type(*tensor) for tensor in tensors]
            self.running[number] = pb_utils.InferenceRequest(made, outputs)
            requests.append(self.running[number])
            if number in self.given_up:
                self.running[number].cancelled.set()
        responses = self.model.execute(requests)
        assert isinstance(responses, list) and len(responses) == len(requests)
        self.running.clear()
        self.given_up.clear()
        return [_plain(response) for response in responses]

    def finalize(self) -> None:
        if hasattr(self.model, "finalize"):
            self.model.finalize()

    def cancel(self, number: int) -> None:
        self.given_up.add(number)
        if request := self.running.get(number):
            request.cancelled.set()


def _plain(response: Any) -> Any:
    if response.has_error():
        return "error", response.error().code(), response.error().message()
    tensors = response.output_tensors()
    return "response", [(t.name(), t.bits(), t.triton_dtype()) for t in tensors]


def main(connection: Connection) -> None:
    stub, calls = Stub(), queue.Queue[Any]()

    def listen() -> None:
        while True:
            try:
                method, *args = connection.recv()
            except (EOFError, OSError):
                os._exit(0)  # the server has ended
            if method == "cancel":
                stub.cancel(*args)
            else:
                calls.put((method, args))

    threading.Thread(target=listen, daemon=True).start()
    while True:
        method, args = calls.get()
        try:
            found = getattr(stub, method)(*args), ""
        except pb_utils.TritonModelException as error:
            found = None, str(error)
        except Exception:
            found = None, f"defect: {traceback.format_exc()}"
        connection.send(json.loads(json.dumps(found)) if method == "auto_complete" else found)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
