"""A real job on Ray actors gives the same files as in this process.

What happens when actors are lost: `tests/orchestrator/test_executors.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardwright.compiler.diagnostics import ExecutionError
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.service import ray_head, ray_session
from shardwright.orchestrator.service.executor import WorkUnit
from shardwright.orchestrator.service.process_backend import start_worker
from shardwright.orchestrator.service.ray_backend import RayExecutor
from shardwright.orchestrator.service.ray_session import RaySession
from tests.support.small_job import build_on, bundle_bytes, bundle_of, small_llama, write_job

pytestmark = pytest.mark.ray
WORKERS = 2


@pytest.mark.matrix
def test_bundles_are_the_same_as_inline(tmp_path: Path) -> None:
    mesh = {"dp_shard": 4}
    road = build_on(small_llama(), mesh, tmp_path / "ray", executor=lambda: RayExecutor(WORKERS))
    assert {row.cache for row in road.rows} == {"miss"}
    assert sum(row.kind == "partition" for row in road.rows) == 1
    assert sum(row.kind == "compile" for row in road.rows) >= 6
    workers = {row.worker.partition(":")[0] for row in road.rows}
    assert workers == {f"ray-{n}" for n in range(WORKERS)}
    assert all(row.seconds > 0 for row in road.rows)
    assert str(os.getpid()) not in {row.worker.partition(":")[2] for row in road.rows}
    inline = build_on(small_llama(), mesh, tmp_path / "inline")
    assert {row.worker.partition(":")[0] for row in inline.rows} == {"inline"}
    ours, theirs = (bundle_of(r, tmp_path / f"bundle{n}") for n, r in enumerate((inline, road)))
    assert bundle_bytes(theirs.path) == bundle_bytes(ours.path)


@pytest.mark.matrix
def test_executors_of_a_process_share_its_ray_until_the_last_one_closes(
    compile_units: list[WorkUnit],
) -> None:
    """A Ray, and the token it was started with, are the process's: Ray reads the token once."""
    import ray

    first, second = RayExecutor(1), RayExecutor(1)
    token = os.environ["RAY_AUTH_TOKEN_PATH"]
    assert Path(token).stat().st_mode & 0o777 == 0o600
    first.close()
    second.submit(compile_units[0])
    outcome = second.next()
    assert outcome is not None and outcome.result
    second.close()
    assert not ray.is_initialized()
    third = RayExecutor(1)
    third.submit(compile_units[0])
    outcome = third.next()
    third.close()
    assert outcome is not None and outcome.result
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == token


@pytest.mark.matrix
def test_a_run_with_hosts_starts_one_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units first, then hosts of ranks, which are more than the workers."""
    import ray

    started: list[int] = []
    start = ray_session._start

    def counted(module: object, cpus: int) -> object:
        started.append(cpus)
        return start(module, cpus)

    monkeypatch.setattr(ray_session, "_start", counted)
    job = write_job(
        tmp_path, output={"dir": str(tmp_path / "out")}, cache={"dir": str(tmp_path / "cache")}
    )
    words = ["--executor", "ray", "--workers", "1", "--hosts", "2", "--mesh", "dp_shard=2"]
    machine = ["--target", "trn1.2xlarge", "--no-compare", "--progress", "quiet"]
    assert main(["run", str(job), *words, *machine]) == 0
    assert started == [2]
    assert not ray.is_initialized()
    assert (RaySession.users, RaySession.keepers) == (0, 0)


@pytest.mark.matrix
def test_ray_starts_on_any_thread(compile_units: list[WorkUnit]) -> None:
    """Of a notebook server, for example, where no signal handler can be set."""

    def computed() -> bytes | None:
        executor = RayExecutor(1)
        try:
            executor.submit(compile_units[0])
            outcome = executor.next()
            return outcome and outcome.result
        finally:
            executor.close()

    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(computed).result()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_that_python_did_not_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda _number: None)
    with ray_session._own_handler():
        pass


LOADED_BEFORE = """
import jax
import ray
from shardwright.orchestrator.service.ray_backend import RayExecutor
jax.numpy.zeros(1)
executor = RayExecutor(1)
executor.close()
print("closed")
"""


@pytest.mark.matrix
def test_a_program_that_has_loaded_jax_and_ray_before_starts_one_with_a_token() -> None:
    """It had no token then, and its client would be refused by the cluster it starts. JAX warns of
    a program that forks, as Ray does where it starts its processes."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", LOADED_BEFORE], env=bare, capture_output=True, text=True, check=False
    )
    own = [
        line for line in done.stderr.splitlines() if "(pid=" not in line
    ]  # not what Ray forwards
    assert (done.returncode, done.stdout, own) == (0, "closed\n", [])


def test_a_ray_that_does_not_start_is_an_error_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_head, "__name__", "shardwright.orchestrator.no_such_module")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ExecutionError, match="exit code 1") as caught:
        RayExecutor(1)
    assert caught.value.code == "SW_RAY_START"
    assert (RaySession.users, RaySession.is_ours) == (0, False)


@pytest.mark.matrix
def test_a_ray_that_does_not_start_is_started_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray gives up on its own node after half a minute, which a busy host may need."""
    modules = iter(["shardwright.orchestrator.no_such_module", ray_head.__name__])
    monkeypatch.setattr(
        ray_head, "start_worker", lambda _module, cpus: start_worker(next(modules), cpus)
    )
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    RayExecutor(1).close()
    assert next(modules, None) is None
    assert (RaySession.users, RaySession.is_ours) == (0, False)


@pytest.mark.matrix
def test_a_ray_ends_with_a_program_that_is_killed() -> None:
    script = "import os; from shardwright.orchestrator.service.ray_head import RayHead\n"
    script += "head = RayHead(1)\n"
    script += "print(head._worker.process.pid, head.address(), flush=True); os.abort()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    pid, address = done.stdout.split()
    assert done.returncode == -signal.SIGABRT and ":" in address
    until = time.monotonic() + 20
    while Path("/proc", pid).exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert not Path("/proc", pid).exists()


def test_a_cluster_that_happens_to_run_on_this_host_is_not_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ray.init` without an address joins one, and refuses the number of CPUs then."""
    import ray

    class AskedError(Exception):
        pass

    def init(**options: object) -> None:
        assert options["address"] == "local"
        raise AskedError

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(AskedError):
        ray_head.start(WORKERS)
