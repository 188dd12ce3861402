"""Compile units as bytes: what goes in (a function graph without user locations) and what comes out
(a function).

Equal functions have equal bytes wherever they come from, so that each is compiled once and caches
can key them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import msgpack
import numpy as np

from shardwright.compiler.diagnostics import LoadError
from shardwright.compiler.ir.serialize import dump, load
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.isa.decode import decode_function
from shardwright.compiler.isa.encode import encode_function
from shardwright.compiler.isa.program import Function
from shardwright.compiler.lower.function import Signature
from shardwright.compiler.neff.format import DTYPES
from shardwright.compiler.neff.writer import section_row
from shardwright.compiler.support.schema import COUNTS, TEXT, Rule, one_of, row, several

FORMAT = 1
_ROWS = several(
    row(TEXT, one_of("", *DTYPES), COUNTS, Rule("bytes", lambda v: isinstance(v, bytes)))
)


@dataclass(frozen=True)
class Unit:
    """A function to compile: its graph (locations of the first use) and how it is called."""

    name: str
    graph: Graph
    signature: Signature

    @cached_property
    def payload(self) -> bytes:
        """The graph without locations, and the signature."""
        body = {"graph": dump(self.graph, with_locs=False), **asdict(self.signature)}
        data: bytes = msgpack.packb(body)
        return data

    @cached_property
    def key(self) -> str:
        """sha256 of the payload."""
        return hashlib.sha256(self.payload).hexdigest()


def read_payload(payload: bytes) -> tuple[Graph, Signature]:
    """The content of `Unit.payload`. Raises LoadError for damaged graph bytes."""
    body = msgpack.unpackb(payload, use_list=False)
    signature = Signature(**{name: body[name] for name in ("parameters", "aliases", "ranges")})
    return load(body["graph"]), signature


def pack_function(function: Function) -> bytes:
    """The sections of a function as bytes, deterministic."""
    sections = encode_function(function)
    rows = [[name, *section_row(sections[name])] for name in sorted(sections)]
    data: bytes = msgpack.packb([FORMAT, rows])
    return data


def unpack_function(data: bytes) -> Function:
    """Inverse of `pack_function`. Raises LoadError for another format, and for what no compiler
    makes."""
    try:
        version, rows = msgpack.unpackb(data)
        if version != FORMAT:
            raise LoadError(
                "SW_UNIT_FORMAT", f"a packed function requires format {FORMAT}, got {version}"
            )
        _ROWS.require(rows, "sections")
        return decode_function(
            {name: _unpack_section(kind, shape, raw) for name, kind, shape, raw in rows}
        )
    except (KeyError, TypeError, ValueError, RecursionError, msgpack.UnpackException) as error:
        raise LoadError(
            "SW_UNIT_FORMAT",
            f"a packed function makes no sense: {error!r}",
            hint="remove what is stored: shardwright cache clean --kind compile",
        ) from error


def _unpack_section(kind: str, shape: Sequence[int], raw: bytes) -> Any:
    return np.frombuffer(raw, np.dtype(kind)).reshape(shape) if kind else raw
