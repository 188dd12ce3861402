"""A host of ranks behind a wire: what both ends of it say.

A request is the name of a method with plain arguments and arrays; what ranks send to ranks of other
hosts follows as arrays. `process_hosts.py` and `ray_hosts.py` say what the wire is.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.sim_cluster.values.exchange import Payload
from shardwright.sim_cluster.values.rank_host import RankHost, invoke


def late(limit_s: float) -> str:
    """Why a host counts as lost that is alive."""
    return f"no answer within run.host_timeout_s = {limit_s:g} s"


class HostDefectError(RuntimeError):
    """A host raised what nobody meant to raise; the message is its traceback."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What became of a request: an answer, a diagnosed error, or a traceback."""

    value: Any = None
    error: DiagnosticError | None = None
    defect: str = ""

    def result(self) -> Any:
        """The answer. Raises the error, or HostDefectError."""
        if self.error is not None:
            raise self.error
        if self.defect:
            raise HostDefectError(self.defect)
        return self.value


def serve(host: RankHost, method: str, args: Sequence[Any]) -> tuple[Answered, list[Payload]]:
    """Answer one request; whatever it raises becomes an answer, interrupts excepted."""
    try:
        value, sent = invoke(host, method, args)
    except DiagnosticError as error:
        return Answered(error=error), []
    except Exception:
        return Answered(defect=traceback.format_exc()), []
    return Answered(value), sent
