"""Compile units: a function graph and how it is called, as bytes without user locations.

Equal functions have equal bytes wherever they come from, so that each is compiled once and caches can key them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import msgpack

from compiler.ir.serialize import dump, load
from compiler.ir.types import Graph
from compiler.lower.function import Signature


@dataclass(frozen=True)
class Unit:
    """A function to compile: its graph (locations of the first use) and how it is called."""

    name: str
    graph: Graph
    signature: Signature

    @cached_property
    def payload(self) -> bytes:
        """The graph without locations, and the signature."""
        body = {
            "graph": dump(self.graph, with_locs=False),
            "parameters": self.signature.parameters,
            "aliases": self.signature.aliases,
        }
        data: bytes = msgpack.packb(body)
        return data

    @cached_property
    def key(self) -> str:
        """sha256 of the payload."""
        return hashlib.sha256(self.payload).hexdigest()


def read_payload(payload: bytes) -> tuple[Graph, Signature]:
    """The content of `Unit.payload`. Raises LoadError for damaged graph bytes."""
    body = msgpack.unpackb(payload, use_list=False)
    signature = Signature(parameters=body["parameters"], aliases=body["aliases"])
    return load(body["graph"]), signature
