"""The partitioner's process: `python -m shardwright.sharding.partition` (`partitioner.py` asks)."""

from __future__ import annotations

from typing import Any

import msgpack

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.support.child import serve
from shardwright.sharding.partition.shardy import answer_request


def _answer(request: bytes) -> bytes:
    """What the process says to a request; refusals are answers too."""
    try:
        answer: dict[str, Any] = {"graph": answer_request(request)}
    except DiagnosticError as error:
        d = error.diagnostic
        loc = (d.loc.file, d.loc.line, d.loc.scope) if d.loc else None
        answer = {"error": (d.code, d.message, loc, d.hint)}
    return bytes(msgpack.packb(answer))


if __name__ == "__main__":
    serve(_answer)
