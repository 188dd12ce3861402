"""This process's connection with Ray, shared by everything in it that has actors.

A local Ray is started (`ray_head.py`), and ended by its last user, when there is none to join:
inside a Ray job or with RAY_ADDRESS set, that cluster is joined, and our packages come along.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.host import DOOR, inside_ray_job, num_cpus
from shardwright.orchestrator.service import logs
from shardwright.orchestrator.service.ray_head import RayHead

_FORWARDED = ("SHARDWRIGHT_PARTITIONER_PYTHON", logs.VARIABLE)
"""Settings of this process that hold for its actors."""


class RaySession:
    """This process's connection with Ray, which is global to it: started by its first user unless
    somebody else has, shared by all, on whatever thread they are, ended by the last."""

    users = 0
    keepers = 0
    is_ours = False
    _least_cpus = 0
    _head: RayHead | None = None
    _guard = threading.RLock()

    @classmethod
    def enter(cls, workers: int) -> Any:
        """The connected `ray` module."""
        with cls._guard:
            if not os.environ.get("RAY_ADDRESS"):
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                if "RAY_AUTH_MODE" not in os.environ:
                    _ask_for_a_token()
            import ray

            if not ray.is_initialized():
                cls._head = _start(ray, max(workers or num_cpus(), cls._least_cpus))
                cls.is_ours, cls.users = True, 0
            cls.users += 1
            return ray

    @classmethod
    def leave(cls) -> None:
        """One user less."""
        with cls._guard:
            cls.users -= 1
            cls._end_if_unused()

    @classmethod
    @contextmanager
    def kept(cls, cpus: int = 0) -> Iterator[None]:
        """Inside, a Ray that is started here has at least so many CPUs and outlives its users, for
        those that come after them."""
        with cls._guard:
            cls.keepers += 1
            cls._least_cpus = max(cls._least_cpus, cpus)
        try:
            yield
        finally:
            with cls._guard:
                cls.keepers -= 1
                if not cls.keepers:
                    cls._least_cpus = 0
                cls._end_if_unused()

    @classmethod
    def _end_if_unused(cls) -> None:
        if cls.is_ours and not (cls.users or cls.keepers):
            import ray

            ray.shutdown()
            cls.is_ours = False
            if cls._head is not None:
                cls._head.end()
                cls._head = None


def _start(ray: Any, cpus: int) -> RayHead | None:
    """Join the cluster of RAY_ADDRESS, or one of this host that is started, and returned."""
    log = {"logging_config": ray.LoggingConfig(encoding="JSON")} if logs.is_on() else {}
    with _own_handler():
        if os.environ.get("RAY_ADDRESS"):
            ray.init(logging_level="warning", runtime_env=_packages_along(), **log)
            return None
        head = RayHead(cpus)
        try:
            ray.init(address=head.address(), logging_level="error", **log)
        except BaseException:
            head.end()
            raise
        return head


@contextmanager
def _own_handler() -> Iterator[None]:
    """SIGTERM stays handled as it is: ray.init sets a handler on the main thread, and the job's own
    has to win (it keeps finished work and exits 130). Other threads can set none, nor does Ray."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # None: a handler that was not set by Python cannot be set again.
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _ask_for_a_token() -> None:
    """Token authentication for what this process starts. Ray reads the settings when it is loaded,
    which the caller's own program may have done: it is told to read them again, as Ray itself does
    when it makes a token."""
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(_token_file())
    import ray

    raylet: Any = ray._raylet
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


@cache
def _token_file() -> Path:
    """A private token for what this process starts, one as long as it lives, since Ray reads it
    once. Ray's own default writes one to the home directory that others can read."""
    folder = Path(tempfile.mkdtemp(prefix="shardwright-ray-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return path


def _packages_along() -> dict[str, Any]:
    """The runtime environment of actors on a cluster that is joined: our package, as it is here.
    A Ray job has its own, its working directory."""
    if inside_ray_job():
        return {}
    forwarded = {name: os.environ[name] for name in _FORWARDED if name in os.environ}
    return {"py_modules": [str(DOOR)], "env_vars": {"JAX_PLATFORMS": "cpu", **forwarded}}


def num_cpus_of(ray: Any) -> int:
    """CPUs of the cluster."""
    return int(ray.cluster_resources().get("CPU", 0))


def check_cpus(ray: Any, key: str, wanted: int) -> int:
    """The CPUs of the cluster, which has one for each of what `key` wants: Ray itself would wait
    for CPUs that no node has. Raises UsageError."""
    cpus = num_cpus_of(ray)
    if max(wanted, 1) > cpus:
        raise UsageError(
            "SW_RAY_RESOURCES",
            f"{key} requires at most the {cpus} CPUs of the Ray cluster, got {wanted}",
            hint=f"ask for fewer {key.partition('.')[2]}, or add nodes with CPUs to the cluster",
        )
    return cpus


def start_actor(ray: Any, actor: type[Any], *given: object) -> Any:
    """A new actor with a CPU of its own, wherever there is one; Ray does not start it again."""
    remote: Any = ray.remote(actor)
    options = remote.options(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")
    return options.remote(*given)


def lost_errors(ray: Any) -> tuple[type[Exception], ...]:
    """Errors that say nothing about what an actor did: it, its node, or what it left in the store,
    went away."""
    errors = ray.exceptions
    return (
        errors.ActorDiedError,
        errors.ActorUnavailableError,
        errors.WorkerCrashedError,
        errors.NodeDiedError,
        errors.ObjectLostError,
    )
