"""A served NEFF under a server: every request ends in a response, an error or a cancellation,
whatever clients, reloads and the simulator's processes do.

The defect of Triton that release notes name is a hang. Here a simulator hangs by SIGSTOP and dies
by SIGKILL, so that nothing depends on how long something takes; waits end by the watchdog alone.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from shardwright.orchestrator.cli import main
from tests.support.triton.models import AFFINE, TWICE, run_direct, write_neff
from tests.support.triton.server import (
    LOOK_S,
    WATCHDOG_S,
    LoadFailedError,
    Request,
    Server,
    counted,
    simulators,
)

RNG = np.random.default_rng(0)
INPUTS = [
    {
        "arg0": RNG.normal(size=(4, 8)).astype(np.float32),
        "arg1": RNG.normal(size=(8, 3)).astype(np.float32),
    }
    for _ in range(4)
]
BACKOFF_S = 0.1
WRONG = [
    {"arg0": INPUTS[0]["arg0"]},
    {**INPUTS[0], "arg1": INPUTS[0]["arg1"].astype(np.float64)},
    {**INPUTS[0], "arg1": INPUTS[0]["arg1"].T.copy()},
]


@pytest.fixture(scope="module")
def neff(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_neff(tmp_path_factory.mktemp("affine") / "a.neff", AFFINE)


@pytest.fixture(scope="module")
def expected(neff: Path) -> list[np.ndarray]:
    return [run_direct(neff, arrays)["out0"] for arrays in INPUTS]


def serve(neff: Path, repository: Path, *flags: str) -> Server:
    assert main(["triton", str(neff), str(repository), "--name", "m", *flags]) == 0
    return Server(repository)


@pytest.fixture
def two(neff: Path, tmp_path: Path) -> Iterator[Server]:
    """Two instances and a queue of four."""
    with serve(neff, tmp_path, "--instances", "2", "--queue", "4") as server:
        server.load("m")
        yield server


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WATCHDOG_S
    while not holds():
        assert time.monotonic() < end, "it never happens"
        time.sleep(LOOK_S)


def stopped(server: Server) -> list[int]:
    """Its simulators, which answer no more."""
    pids = simulators(server.models["m"])
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_what_hangs_dies_or_is_given_up(
    two: Server, expected: list[np.ndarray], tmp_path: Path
) -> None:
    """One load of two instances through everything that befalls a simulator."""
    first = [two.infer("m", INPUTS[k % 4]) for k in range(4)]
    assert counted(first) == {"response": 4}
    for number, request in enumerate(first):
        np.testing.assert_array_equal(request.results["out0"], expected[number % 4])
        assert request.results["out1"].shape == ()

    # Both hang: two requests run, four wait, the others are refused at once.
    pids = stopped(two)
    running = [two.infer("m", INPUTS[0]) for _ in range(2)]
    until(lambda: not two.models["m"].queue)
    waiting = [two.infer("m", INPUTS[1]) for _ in range(4)]
    refused = [two.infer("m", INPUTS[2]) for _ in range(10)]
    assert {(r.kind, r.status, r.message) for r in refused} == {
        ("error", "UNAVAILABLE", "Exceeds maximum queue size")
    }
    assert not any(r.is_over for r in (*running, *waiting))
    # One that waits and one that runs are cancelled; the latter's simulator is replaced.
    waiting[0].cancel()
    assert waiting[0].kind == "cancelled"
    running[0].cancel()
    assert running[0].wait().kind == "cancelled" and "SW_TRITON_CANCELLED" in running[0].message
    assert counted(waiting[1:]) == {"response": 3}, "by the replacement alone"
    np.testing.assert_array_equal(waiting[1].results["out0"], expected[1])
    assert not running[1].is_over
    for pid in pids:
        if is_running(pid):
            os.kill(pid, signal.SIGCONT)
    assert running[1].wait().kind == "response"
    assert sum(map(is_running, pids)) == 1

    # Both die while they run.
    pids = stopped(two)
    running = [two.infer("m", INPUTS[0]) for _ in range(2)]
    until(lambda: not two.models["m"].queue)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert {(r.wait().kind, r.status) for r in running} == {("error", "UNAVAILABLE")}
    assert all("SW_TRITON_ENDED" in r.message and "status -9" in r.message for r in running)
    after = [two.infer("m", INPUTS[3]) for _ in range(4)]
    assert counted(after) == {"response": 4}
    np.testing.assert_array_equal(after[0].results["out0"], expected[3])

    # What is unloaded while it runs ends first; nobody is left.
    pids = simulators(two.models["m"])
    last = [two.infer("m", INPUTS[1]) for _ in range(4)]
    two.unload("m")
    assert counted(last) == {"response": 4}
    assert two.infer("m", INPUTS[0]).status == "UNAVAILABLE"
    until(lambda: not any(map(is_running, pids)))


def test_a_run_that_takes_too_long_is_an_error(neff: Path, tmp_path: Path) -> None:
    with serve(neff, tmp_path, "--timeout", "4") as server:
        server.load("m")
        (pid,) = stopped(server)
        request = server.infer("m", INPUTS[0]).wait()
        assert (request.kind, request.status) == ("error", "UNAVAILABLE")
        assert "[SW_TRITON_TIMEOUT]" in request.message and "request_timeout_s" in request.message
        assert not is_running(pid)

        # A stub that is killed takes its simulator with it, also one that computes.
        assert server.infer("m", INPUTS[0]).wait().kind == "response"
        (pid,) = simulators(server.models["m"])
        server.models["m"].stubs[0].process.kill()
        until(lambda: not is_running(pid))
        found = [server.infer("m", INPUTS[0]).wait().kind for _ in range(2)]
        assert found == ["error", "response"], "Triton starts a stub again"


def test_requests_that_wait_are_one_run(tmp_path: Path) -> None:
    """What waits behind a run that hangs: one, one and two samples of four; then three."""
    neff = write_neff(tmp_path / "t.neff", TWICE)
    with serve(neff, tmp_path, "--max-batch", "4") as server:
        server.load("m")
        (pid,) = stopped(server)
        given = [np.full((rows, 2), rows, np.float32) for rows in (4, 1, 1, 2, 3)]
        requests = [server.infer("m", {"arg0": given[0]})]
        until(lambda: not server.models["m"].queue)
        requests += [server.infer("m", {"arg0": array}) for array in given[1:]]
        assert server.infer("m", {"arg0": np.ones((5, 2), np.float32)}).status == "INVALID_ARG"
        os.kill(pid, signal.SIGCONT)
        assert counted(requests) == {"response": 5}
        assert server.models["m"].runs == [1, 3, 1]
    for request, array in zip(requests, given, strict=True):
        np.testing.assert_array_equal(request.results["out0"], 2 * array)


def test_files_that_change_below_a_model_need_a_load(neff: Path, tmp_path: Path) -> None:
    with serve(neff, tmp_path) as server:
        server.load("m")
        _change_below(server, neff, tmp_path / "m" / "1" / "model.neff")


def _change_below(server: Server, neff: Path, served: Path) -> None:
    write_neff(served, TWICE)
    assert server.infer("m", INPUTS[0]).wait().kind == "response", "what is loaded is served"
    os.kill(simulators(server.models["m"])[0], signal.SIGKILL)
    ended, changed = (server.infer("m", INPUTS[0]).wait() for _ in range(2))
    assert (ended.kind, changed.kind) == ("error", "error")
    assert "[SW_TRITON_ENDED]" in ended.message and "[SW_TRITON_CHANGED]" in changed.message
    with pytest.raises(LoadFailedError, match=r"another input|SW_TRITON_CONFIG"):
        server.load("m")
    shutil.copyfile(neff, served)
    assert server.infer("m", INPUTS[0]).wait().kind == "response"


def test_a_neff_that_is_damaged_fails_the_load(neff: Path, tmp_path: Path) -> None:
    data = bytearray(neff.read_bytes())
    data[len(data) // 2] ^= 0xFF
    with serve(neff, tmp_path) as server:
        (tmp_path / "m" / "1" / "model.neff").write_bytes(data)
        with pytest.raises(LoadFailedError, match="SW_NEFF_CHECKSUM"):
            server.load("m")
        assert server.infer("m", INPUTS[0]).status == "UNAVAILABLE"


class Clients:
    """Threads that send requests, some of them wrong, and give some up; `allow` says how many."""

    def __init__(self, server: Server, each: int, count: int) -> None:
        self.sent: list[tuple[int, Request]] = []
        self._allowed, self._guard = threading.Semaphore(0), threading.Lock()
        self.threads = [
            threading.Thread(target=self._send, args=(server, each, seed)) for seed in range(count)
        ]
        for thread in self.threads:
            thread.start()

    def allow(self, count: int) -> None:
        self._allowed.release(count)

    def _send(self, server: Server, each: int, seed: int) -> None:
        chosen = random.Random(seed)
        for _ in range(each):
            assert self._allowed.acquire(timeout=WATCHDOG_S)
            which = chosen.randrange(len(INPUTS))
            is_wrong = chosen.random() < 0.1
            request = server.infer("m", chosen.choice(WRONG) if is_wrong else INPUTS[which])
            with self._guard:
                self.sent.append((-1 if is_wrong else which, request))
            if chosen.random() < 0.2:
                request.cancel()
            if chosen.random() < 0.7:
                request.wait()
            if request.is_over and request.status == "UNAVAILABLE":
                time.sleep(BACKOFF_S)

    def ended(self, expected: Sequence[np.ndarray]) -> Counter[str]:
        """How many ended in what; values are held to `expected`."""
        for thread in self.threads:
            thread.join(WATCHDOG_S)
            assert not thread.is_alive()
        found = counted([request for _, request in self.sent])
        for which, request in self.sent:
            if request.kind == "response":
                assert which >= 0, "a wrong request has no response"
                np.testing.assert_array_equal(request.results["out0"], expected[which])
            elif request.kind == "error":
                assert request.message
                is_refused = request.status == "INVALID_ARG"
                assert is_refused == (which < 0) or "no available" in request.message
        return found


def test_requests_while_it_is_loaded(
    neff: Path, expected: list[np.ndarray], tmp_path: Path
) -> None:
    """Refused before, answered after, and answered by the old one while a new one is loaded."""
    with serve(neff, tmp_path) as server:
        clients = Clients(server, 15, 2)
        clients.allow(30)
        server.load("m")
        more = Clients(server, 15, 2)
        more.allow(30)
        server.load("m")
        late = server.infer("m", INPUTS[2])
        found, again = clients.ended(expected), more.ended(expected)
        assert late.wait().kind == "response"
    assert sum(found.values()) == sum(again.values()) == 30
    assert set(found) | set(again) <= {"response", "error", "cancelled"}
    valid = [r for which, r in more.sent if which >= 0]
    assert not [r.message for r in valid if r.kind == "error"], "a reload loses nothing"


EVENTS = ("reload", "kill", "stop", "stub", "unload")


def befall(server: Server, event: str) -> None:
    """Let something happen to the model."""
    if event == "unload":
        server.unload("m")
    if event in ("unload", "reload"):
        server.load("m")
        return
    model = server.models["m"]
    if event == "stub":
        model.stubs[0].process.kill()
        return
    until(lambda: bool(simulators(model)))
    kind = signal.SIGKILL if event == "kill" else signal.SIGSTOP
    os.kill(simulators(model)[-1], kind)


@pytest.mark.matrix
def test_a_thousand_requests(neff: Path, expected: list[np.ndarray], tmp_path: Path) -> None:
    """Eight clients, two instances, cancels and wrong requests; and within every fifty requests a
    reload, an unload, or a process of a simulator or a stub that dies or hangs."""
    with serve(neff, tmp_path, "--instances", "2", "--queue", "24", "--timeout", "2") as server:
        config = tmp_path / "m" / "config.pbtxt"
        limits = config.read_text().replace('string_value: "120"', 'string_value: "4"')
        config.write_text(limits)  # a replacement may be stopped while it loads
        server.load("m")
        clients = Clients(server, 125, 8)
        for number, event in enumerate(EVENTS * 4, 1):
            clients.allow(50)
            befall(server, event)
            until(lambda: len(clients.sent) == 50 * number)  # noqa: B023, called at once
        found = clients.ended(expected)
    assert sum(found.values()) == len(clients.sent) == 1000
    assert set(found) == {"response", "error", "cancelled"}
    assert found["response"] > 100, found
