"""A private Ray head with a token, started and ended by `scripts/cluster.sh`, and what a user types
at it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PORTS = ("dashboard-agent-listen-port", "ray-client-server-port")


@dataclass(frozen=True)
class Head:
    """A running head: the variables of its clients, and its token."""

    environment: dict[str, str]
    token: str
    up: tuple[str, ...] = ()

    def start_anew(self) -> None:
        """End the head and start another one in its place, which knows no jobs."""
        subprocess.run([self.up[0], "down"], env=self.environment, check=True)
        subprocess.run(self.up, env=self.environment, check=True, capture_output=True)

    def start(self, words: list[str], folder: Path) -> subprocess.Popen[str]:
        """A command of a client, in `folder`."""
        return subprocess.Popen(
            words,
            cwd=folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, words: list[str], folder: Path) -> tuple[int, str, str]:
        """Its exit code, stdout and stderr; the token is in neither."""
        process = self.start(words, folder)
        out, err = process.communicate(timeout=240)
        assert self.token not in out + err + " ".join(words)
        return process.returncode, out, err

    def shardwright(self, *words: str, folder: Path) -> tuple[int, str, str]:
        """Our command."""
        return self.run([sys.executable, "-m", "shardwright", *words], folder)


@contextmanager
def ray_head(folder: Path) -> Iterator[Head]:
    """A head of one CPU on free ports; nothing of it is left afterwards."""
    names = ("PORT", "DASHBOARD_PORT", *_PORTS)
    ports = dict(zip(names, _free_ports(len(names)), strict=True))
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    inherited.pop("PYTHONPATH", None)  # jobs have what is uploaded with them
    environment = inherited | {"STATE": str(folder), "PATH": path}
    environment |= {name: str(ports[name]) for name in names[:2]}
    script = str(ROOT / "scripts" / "cluster.sh")
    extra = [f"--{name}={ports[name]}" for name in _PORTS]
    words = [script, "up", "--num-cpus=1", "--object-store-memory=100000000", *extra]
    try:
        told = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert told.returncode == 0, told.stderr
        exports = (line.removeprefix("export ") for line in told.stdout.splitlines())
        variables = dict(line.split("=", 1) for line in exports)
        variables["PYTHONPATH"] = str(ROOT)
        yield Head(environment | variables, (folder / "token").read_text(), tuple(words))
    finally:
        subprocess.run([script, "down"], env=environment, check=True)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports
