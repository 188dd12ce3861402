"""An ONNX file whose compiled parts are nodes that hold their NEFF files; everything else in it is
what it was, byte for byte.

Such a node is `shardwright::Neff`. Its attributes: `executable`, the file, a tensor of uint8 inside
of the model, or beside it as ONNX's external data; `types`, the element types of its results;
`target`, the machine. Its inputs are the weights that are no constants of the NEFF, and then those
of the part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.graphs.graph import Node
from shardwright.compiler.frontend.graphs.interpreter import reads
from shardwright.compiler.frontend.onnx.foreseen import Shaped
from shardwright.compiler.frontend.onnx.schema import MODEL, SCHEMA
from shardwright.compiler.frontend.onnx.splitting import Opened, Part, Split
from shardwright.compiler.frontend.onnx.tensors import EXTERNAL, external_bytes
from shardwright.compiler.frontend.onnx.wire import Message, read
from shardwright.compiler.frontend.onnx.writing import (
    MOST_BYTES,
    attribute,
    changed,
    declared,
    tensor,
    type_number,
)

DOMAIN, OPERATOR, VERSION = "shardwright", "Neff", 1
EXECUTABLE, TYPES, TARGET = "executable", "types", "target"
_UINT8 = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """How a model is written: `neffs` are those of its compiled parts, in order, `beside` the
    folder of their files relative to the model's, "" where they are inside of it; `has_weights`,
    whether they hold their weights; `about` is kept in the file's metadata."""

    neffs: Sequence[bytes]
    target: str
    has_weights: bool
    beside: str
    about: Mapping[str, Any]


def is_neff(node: Node) -> bool:
    """Whether a node holds a NEFF."""
    return (node.domain, node.operator) == (DOMAIN, OPERATOR)


def file_of(beside: str, number: int) -> str:
    """The file of a part's NEFF, relative to the model's folder."""
    return f"{beside}/neff-{number}.neff"


def saved_bytes(opened: Opened, split: Split, saving: Saving) -> bytes:
    """The file of a model in parts. Raises UsageError for one that is larger than a file of ONNX
    may be."""
    graph = _Graph(opened, split, saving)
    entry = {"key": DOMAIN, "value": json.dumps(dict(saving.about), sort_keys=True)}
    found = changed(
        opened.data,
        MODEL,
        {
            "graph": lambda held: [graph.written(held[-1])],
            "opsets": lambda held: [*held, {"domain": DOMAIN, "version": VERSION}],
            "metadata": lambda held: [*held, entry],
        },
    )
    if len(found) > MOST_BYTES:
        raise UsageError(
            "SW_SAVED_SIZE",
            f"a file of ONNX requires at most {MOST_BYTES} bytes, got {len(found)}",
            hint="--beside keeps NEFF files beside it",
        )
    return found


@dataclass(frozen=True, slots=True)
class _Graph:
    """The graph on its way."""

    opened: Opened
    split: Split
    saving: Saving

    def written(self, data: bytes) -> bytes:
        """Its message."""
        change = {
            "nodes": lambda held: list(self._nodes(held)),
            "initializers": lambda held: list(self._initializers(held)),
            "inputs": lambda held: list(self._values(held, self._dropped)),
            "outputs": lambda held: list(self._values(held, frozenset())),
            "declared": lambda held: list(self._declared(held)),
        }
        return changed(data, "graph", change)

    def _nodes(self, held: Sequence[bytes]) -> Iterator[bytes | Message]:
        """Parts in their order; nodes of the host as they were."""
        count = 0
        for part in self.split.parts:
            if part.is_compiled:
                yield self._neff(part, count)
                count += 1
            else:
                yield from (held[node.number - 1] for node in part.nodes)

    def _neff(self, part: Part, number: int) -> Message:
        saving, neff = self.saving, self.saving.neffs[number]
        held: Message = {"name": f"neff-{number}", "dims": [len(neff)], "type": _UINT8}
        if saving.beside:
            place = {"location": file_of(saving.beside, number), "length": str(len(neff))}
            external = [{"key": key, "value": value} for key, value in place.items()]
            held |= {"external": external, "location": EXTERNAL}
        else:
            held["raw"] = neff
        weights = () if saving.has_weights else part.weights
        types = [type_number(self.opened.shaped(name).dtype) for name in part.outputs]
        return {
            "inputs": [*weights, *part.inputs],
            "outputs": part.outputs,
            "name": f"neff-{number}",
            "operator": OPERATOR,
            "domain": DOMAIN,
            "attributes": [
                attribute(EXECUTABLE, held),
                attribute(TARGET, saving.target),
                attribute(TYPES, types),
            ],
        }

    @property
    def _read(self) -> set[str]:
        """Names of values that are read outside of compiled parts."""
        found = {output.name for output in self.opened.model.graph.outputs}
        for part in self.split.parts:
            if not part.is_compiled:
                found |= {name for node in part.nodes for name in reads(node)}
            elif not self.saving.has_weights:
                found |= set(part.weights)
        return found

    @property
    def _dropped(self) -> frozenset[str]:
        """Initializers that nobody reads any more."""
        return frozenset(set(self.opened.model.graph.constants) - self._read)

    def _initializers(self, held: Sequence[bytes]) -> Iterator[bytes | Message]:
        """Those that are read; external ones with their bytes. Then what was computed."""
        read_names, folder = self._read, self.opened.path.parent
        for data in held:
            message = read(data, "tensor", SCHEMA)
            if message["name"] not in read_names:
                continue
            yield data if message["location"] != EXTERNAL else _held(message, folder)
        for name in self.split.folded:
            array = self.opened.known.values[name]
            assert isinstance(array, np.ndarray)
            yield tensor(name, array)

    def _values(self, held: Sequence[bytes], dropped: frozenset[str]) -> Iterator[bytes | Message]:
        """Inputs or results, with the sizes that were said of open dims."""
        for data in held:
            message = read(data, "value", SCHEMA)
            seen = self.opened.known.values[message["name"]]
            if message["name"] in dropped:
                continue
            if isinstance(seen, Shaped) and _has_open_dims(message):
                yield declared(message["name"], seen.dtype, seen.shape)
            else:
                yield data

    def _declared(self, held: Sequence[bytes]) -> Iterator[bytes | Message]:
        """Types of values inside that are still made."""
        parts = self.split.parts
        outside = {n for p in parts if not p.is_compiled for node in p.nodes for n in node.outputs}
        results = {output.name for output in self.opened.model.graph.outputs}
        yield from (d for d in held if read(d, "value", SCHEMA)["name"] in outside - results)
        for part in parts:
            for name in part.outputs if part.is_compiled else ():
                if name not in results:
                    seen = self.opened.shaped(name)
                    yield declared(name, seen.dtype, seen.shape)


def _held(message: Message, folder: Path) -> Message:
    """A tensor with its bytes in place of the file that has them."""
    kept = {key: message[key] for key in ("name", "dims", "type")}
    return {**kept, "raw": external_bytes(message, folder)}


def _has_open_dims(message: Message) -> bool:
    """Whether a value has no shape, or one with a dim that is no number."""
    shape = (message["type"] or {}).get("tensor") and message["type"]["tensor"]["shape"]
    return shape is None or any(dim["name"] or not dim["size"] for dim in shape["dims"])


def about_of(data: bytes) -> dict[str, Any] | None:
    """What the metadata of a file says of its parts; None of another file. Raises DamagedError,
    ValueError."""
    for entry in read(data, MODEL, SCHEMA)["metadata"]:
        if entry["key"] == DOMAIN:
            found: dict[str, Any] = json.loads(entry["value"])
            return found
    return None
