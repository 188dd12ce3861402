"""Units that do what a test wants, in any worker of any executor: partition units whose payload is
a shell script.

A partition unit asks the interpreter of SHARDWRIGHT_PARTITIONER_PYTHON. Here that is a program that
runs each request as a script and answers what it wrote, so units can sleep, refuse, crash, or kill
the worker that runs them, and the code of the workers is the product's own.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgpack
import pytest

from shardwright.orchestrator.service.executor import Executor, Outcome, WorkUnit
from shardwright.orchestrator.service.flight import fly
from shardwright.orchestrator.service.units import digest
from shardwright.sharding.partition.partitioner import PYTHON_VARIABLE

# One request after the other: a script finds where to write in $answer, whose process it may kill
# in $worker and $partitioner. It needs no site packages, so it starts quickly.
_INTERPRETER = f"""#!{sys.executable} -IS
import os, shutil, struct, subprocess, tempfile
while head := os.read(0, 8):
    size = struct.unpack("<Q", head)[0]
    with tempfile.NamedTemporaryFile() as script, tempfile.NamedTemporaryFile() as answer:
        while script.tell() < size:
            script.write(os.read(0, size - script.tell()))
        script.flush()
        known = dict(answer=answer.name, worker=str(os.getppid()), partitioner=str(os.getpid()))
        subprocess.run(["sh", script.name], env=os.environ | known, stdin=subprocess.DEVNULL)
        with open(answer.name, "rb") as written, open(1, "wb", closefd=False) as out:
            out.write(struct.pack("<Q", os.stat(answer.name).st_size))
            shutil.copyfileobj(written, out)
"""


@contextmanager
def scripted(folder: Path) -> Iterator[None]:
    """Inside, partition units run their payload, also in workers that start there."""
    script = folder / "interpreter"
    script.write_text(_INTERPRETER)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PYTHON_VARIABLE, str(script))
        yield


def unit(name: str, script: str) -> WorkUnit:
    """A unit that runs `script`."""
    payload = script.encode()
    return WorkUnit("partition", digest([name.encode(), payload]), name, payload)


def answer(data: bytes, before: str = ":") -> str:
    """A script that answers `data`, after the command `before`."""
    return f"{before}\n{_written({'graph': data})}"


def refusal(code: str) -> str:
    """A script that refuses, as the partitioner does for a graph it cannot partition."""
    return _written({"error": [code, "refused", None, "no"]})


def killing(times: int, folder: Path, data: bytes) -> str:
    """A script that kills its worker the first `times` times, and leaves a file in `folder` each
    time it starts; later it answers."""
    count = f'ls "{folder}" | wc -l'
    kill = f'n=$({count}); : > "{folder}/$n"; [ "$n" -ge {times} ] || kill -9 $worker'
    return answer(data, kill)


def leaving_a_file(folder: Path, name: str, data: bytes, seconds: float = 0.0) -> str:
    """A script that leaves one more file in `folder` every time it is run to its end."""
    return f'sleep {seconds}\n: > "{folder}/{name}-$$"\n{_written({"graph": data})}'


def _written(value: object) -> str:
    octal = "".join(f"\\{byte:03o}" for byte in msgpack.packb(value))
    return f"printf '{octal}' > \"$answer\""


class Listed:
    """A source of units that are all this job's own."""

    def __init__(self, units: Sequence[WorkUnit]) -> None:
        self.units = list(units)

    def take(self) -> WorkUnit | None:
        return self.units.pop(0) if self.units else None

    def __bool__(self) -> bool:
        return bool(self.units)


def run(executor: Executor, units: Sequence[WorkUnit]) -> list[Outcome]:
    """Outcomes as they come."""
    return list(fly(lambda: executor, Listed(units)))


def results(outcomes: Sequence[Outcome]) -> dict[str, bytes | None]:
    return {outcome.unit.key: outcome.result for outcome in outcomes}


def pid_of(outcome: Outcome) -> int:
    return int(outcome.worker.partition(":")[2])


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and pid != os.getpid()
