"""`shardwright doctor`: whether this host can run jobs, and what to do where it cannot.

A check has failed when something will not work, and warns when it will work badly. Libraries that
can crash are tried in processes of their own. No secret is read, only whether there is one.
"""

from __future__ import annotations

import argparse
import os
import resource
import secrets
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.orchestrator.cache import open_cache
from shardwright.orchestrator.cache.entry import GIB, EntryName, pack_entry
from shardwright.orchestrator.cache.location import locate
from shardwright.orchestrator.cache.store import Store, StoreError
from shardwright.orchestrator.config.config import CacheConfig
from shardwright.orchestrator.host import PACKAGES_ROOT, num_cpus
from shardwright.orchestrator.terminal import terminal

OK, WARN, FAIL = "ok", "warn", "fail"
_FILES = 4096
"""Source: ray/_private/worker.py warns below it."""
_SHM_BYTES = 2 * GIB
"""Our choice: Ray falls back to files in /tmp when its object store (by default three tenths of the
memory) does not fit; results of units are megabytes."""
_FREE_BYTES = GIB
"""Our choice: results of a 70B job are some hundred megabytes."""
_MEMORY_BYTES = 4 * GIB
"""Our choice: a 70B plan takes 2 GB, and a worker as much again."""
_TRY_S = 120.0
"""Our choice: importing jax takes 12 s on a host that is very busy."""
_JAX = """import jax, jaxlib; x = jax.jit(lambda x: x + 1)(1.0); assert float(x) == 2.0
print('jax', jax.__version__, 'jaxlib', jaxlib.__version__, 'on', jax.devices()[0].platform)"""
_RAY = "import ray; print('ray', ray.__version__)"


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, how it is, what was found, and what to do."""

    name: str
    state: str
    found: str
    advice: str = ""


def add_verbs(verbs: Any) -> None:
    """Add the verb to the command."""
    parser = verbs.add_parser("doctor", help="whether this host can run jobs")
    parser.add_argument("--cache-dir", default="", metavar="PLACE", help="default: as a job's")
    parser.json_flag()
    parser.set_defaults(verb=main)


def main(args: argparse.Namespace) -> int:
    """Print every check; 1 when something will not work."""
    checks = examined(args.cache_dir)
    failed = any(check.state == FAIL for check in checks)
    if args.json:
        terminal.say_json({"ok": not failed, "checks": [asdict(c) for c in checks]})
    else:
        _show(checks)
    return 1 if failed else 0


def examined(cache_dir: str = "") -> list[Check]:
    """All checks."""
    with ThreadPoolExecutor() as pool:  # the slow ones are processes
        jax = pool.submit(_tried, "jax", _JAX, {"JAX_PLATFORMS": "cpu"})
        ray = pool.submit(_tried, "ray", _RAY, {})
        quick = [_python(), _packages(), *_cache(cache_dir), _shared_memory(), _files(), _token()]
        return [*quick[:2], jax.result(), _partitioner(), ray.result(), *quick[2:], _host()]


def _check(name: str, found: str, holds: bool, advice: str, otherwise: str = WARN) -> Check:
    return Check(name, OK, found) if holds else Check(name, otherwise, found, advice)


def _python() -> Check:
    found = f"{sys.version.split()[0]} at {sys.executable}"
    advice = "Python 3.11 is required: the pinned releases are for it"
    return _check("python", found, sys.version_info[:2] == (3, 11), advice, FAIL)


def _packages() -> Check:
    from packaging.requirements import Requirement

    missing, found = [], []
    for text in _requirements():
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            missing.append(f"{wanted} is not there")
            continue
        found.append(f"{wanted.name} {version}")
        if not wanted.specifier.contains(version, prereleases=True):
            missing.append(f"{wanted} is required, got {version}")
    told = "; ".join(missing) or ", ".join(found)
    return _check("packages", told, not missing, "pip install -c constraints.txt -e .", FAIL)


def _requirements() -> list[str]:
    """Of the installed distribution, else of the checkout."""
    try:
        return metadata.requires("shardwright") or []
    except metadata.PackageNotFoundError:
        import tomllib

        project = PACKAGES_ROOT / "pyproject.toml"
        text = project.read_text() if project.exists() else "[project]\ndependencies = []"
        return list(tomllib.loads(text)["project"]["dependencies"])


def _tried(name: str, code: str, environment: dict[str, str]) -> Check:
    """Whether a library does its work in a process of its own."""
    advice = f"run `{sys.executable} -c 'import {name}'` to see why"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=_TRY_S,
            env=os.environ | environment,
        )
    except subprocess.TimeoutExpired:
        return Check(name, FAIL, f"no answer within {_TRY_S:g} s", advice)
    errors = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    found = errors[-1] if done.returncode else done.stdout.strip()
    return _check(name, found, not done.returncode, advice, FAIL)


def _partitioner() -> Check:
    """The interpreter that partitions, which may be another one."""
    from shardwright.sharding.partition.partitioner import PYTHON_VARIABLE, partitioner_version

    own = os.environ.get(PYTHON_VARIABLE, "")
    try:
        found = f"jaxlib {partitioner_version()}"
    except (DiagnosticError, metadata.PackageNotFoundError) as error:
        return Check(
            "partitioner", FAIL, str(error).splitlines()[0], f"set or unset {PYTHON_VARIABLE}"
        )
    return Check("partitioner", OK, f"{found} of {own}" if own else found)


def _cache(configured: str) -> Iterator[Check]:
    """The directory, and the bucket behind it. Jobs go on without either."""
    settings = CacheConfig(dir=configured)
    try:
        location, cache = locate(configured), open_cache(settings)
    except DiagnosticError as error:
        yield Check("cache", FAIL, error.diagnostic.message, error.diagnostic.hint)
        return
    for store in cache.stores:
        name, loss = "shared cache", "share nothing with other hosts"
        if store is cache.local:
            name, loss = "cache", "compute everything again"
        advice = f"jobs run, but {loss}"
        if trouble := _probed(store):
            yield Check(name, WARN, f"{store.place}: {trouble}", f"{advice}; docs/cache.md")
        elif store is cache.local:
            free = shutil.disk_usage(location.directory).free
            found = f"{store.place} ({location.reason}), {free / GIB:.1f} GiB free"
            yield _check(name, found, free >= _FREE_BYTES, f"it is nearly full; {advice}")
        else:
            yield Check(name, OK, f"{store.place} ({location.reason})")


def _probed(store: Store) -> str:
    """What a store says to an entry that is locked, written, read and removed."""
    name = EntryName("doctor", secrets.token_hex(32))
    data = pack_entry(name, b"probe")
    try:
        release = store.lock(name)
        store.write(name, data)
        found = store.read(name)
        if release is not None:
            release()
        store.remove(name)
    except StoreError as error:
        return str(error)
    return "" if found == data else "an entry that was written cannot be read"


def _shared_memory() -> Check:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Check("/dev/shm", WARN, str(error.strerror), "Ray is slow without it")
    advice = "Ray is slow without 2 GiB (docker run --shm-size=4g)"
    return _check("/dev/shm", f"{free / GIB:.1f} GiB free", free >= _SHM_BYTES, advice)


def _files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Ray raises the soft limit itself.
    holds = resource.RLIM_INFINITY in (soft, hard) or max(soft, hard) >= _FILES
    advice = f"Ray wants {_FILES}: ulimit -n {_FILES}"
    return _check("open files", f"{soft}, at most {hard}", holds, advice)


def _token() -> Check:
    """Where Ray takes its token from, and who can read it."""
    mode = os.environ.get("RAY_AUTH_MODE", "")
    named = os.environ.get("RAY_AUTH_TOKEN_PATH", "")
    if mode == "disabled":
        advice = "whoever reaches the cluster's ports can run code: set RAY_AUTH_MODE=token"
        return Check("token", WARN, "RAY_AUTH_MODE=disabled", advice)
    if os.environ.get("RAY_AUTH_TOKEN"):
        return Check("token", OK, "in RAY_AUTH_TOKEN")
    path = Path(named).expanduser() if named else Path.home() / ".ray" / "auth_token"
    if not path.is_file():
        own = "none; a Ray that a job starts gets its own"
        found = f"RAY_AUTH_TOKEN_PATH={named} is no file" if named else own
        return _check("token", found, not named, "scripts/cluster.sh up", FAIL)
    bits, advice = stat.S_IMODE(path.stat().st_mode), ""
    if bits & 0o077:
        advice = f"others can read it: chmod 600 {path}"
    elif named and mode != "token":
        advice = "clients of Ray use it with RAY_AUTH_MODE=token alone"
    return _check("token", f"{path}, mode {bits:04o}", not advice, advice)


def _host() -> Check:
    free, total = _memory()
    found = f"{num_cpus()} CPUs, {free / GIB:.1f} of {total / GIB:.1f} GiB of memory free"
    advice = "large models want 4 GiB: fewer --workers, a smaller model"
    return _check("host", found, free >= _MEMORY_BYTES, advice)


def _memory() -> tuple[int, int]:
    """(free, all) bytes of memory, of the container where it has a bound."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    rows = {name: int(rest.split()[0]) << 10 for name, _, rest in (r.partition(":") for r in lines)}
    free, total = rows["MemAvailable"], rows["MemTotal"]
    try:
        bound = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):  # no container, or no bound
        return free, total
    return min(free, bound - used), min(total, bound)


def _show(checks: list[Check]) -> None:
    from rich.table import Table
    from rich.text import Text

    colours = {OK: "green", WARN: "yellow", FAIL: "red"}
    table = Table(box=None, show_header=False, pad_edge=False)
    for check in checks:
        text = Text(check.found)
        if check.advice:
            text.append(f"\n{check.advice}", style="bold")
        table.add_row(check.name, Text(check.state, colours[check.state]), text)
    console = terminal.console()
    console.print(table)
    failed = [check.name for check in checks if check.state == FAIL]
    console.print(f"will not work: {', '.join(failed)}" if failed else "jobs can run here")
