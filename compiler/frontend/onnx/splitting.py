"""An ONNX graph in parts: what is compiled, and what stays on the host.

A node is compiled where it has a row, and shapes and types of all that it reads and makes are known
before it runs. What is known altogether (shapes, above all) is computed here and becomes constants.
What the compiler refuses later is told to `split` again, which leaves it to the host then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwright.compiler.frontend.capture import function_artifact
from shardwright.compiler.frontend.graphs.graph import Graph, Model, Node, Value
from shardwright.compiler.frontend.graphs.interpreter import evaluate, reads
from shardwright.compiler.frontend.graphs.sizes import Sizes
from shardwright.compiler.frontend.graphs.types import Array, computed_type, narrowed
from shardwright.compiler.frontend.levels import without_small
from shardwright.compiler.frontend.onnx.foreseen import Foreseen, Shaped, foreseen
from shardwright.compiler.frontend.onnx.model import read_model

ASKED = "it is to stay on the CPU"
SMALL = "its part has fewer operators than a compiled one"
"""Why a node stays on the host: a user said so, or it would be alone."""


@dataclass(frozen=True, slots=True)
class Part:
    """Nodes that run together. `inputs` and `outputs` are values that cross its border, `weights`
    initializers that it reads."""

    nodes: tuple[Node, ...]
    is_compiled: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...]

    @property
    def key(self) -> object:
        """What tells it from other parts of its graph."""
        return tuple(node.number for node in self.nodes), self.outputs


@dataclass(frozen=True, slots=True)
class Split:
    """A graph in parts, in an order in which they run; `kept` are nodes that stay on the host, and
    why; `folded` are values that nodes on the host, or the caller, read and that are known."""

    parts: tuple[Part, ...]
    kept: tuple[tuple[Node, str], ...]
    folded: tuple[str, ...]


@dataclass(frozen=True)
class Opened:
    """A model whose parts are looked for. Places in it are called by the name of its file alone, so
    that the folder in which it lies is nowhere in what is made of it."""

    data: bytes
    path: Path
    model: Model
    sizes: Sizes
    known: Foreseen

    @classmethod
    def read(cls, data: bytes, path: Path, sizes: Sizes) -> Opened:
        """The model of a file. Raises as `read_model`, but for values that are no numbers, and as
        `foreseen`."""
        model = replace(read_model(data, str(path), is_tolerant=True), file=path.name)
        return cls(data, path, model, sizes, foreseen(model, sizes))

    @cached_property
    def live(self) -> tuple[Node, ...]:
        """Nodes that results depend on, whose results are not all known."""
        wanted = {output.name for output in self.model.graph.outputs}
        found = []
        for node in reversed(self.model.graph.nodes):
            made = [name for name in node.outputs if name in wanted]
            if made and not all(map(self.known.is_known, made)):
                found.append(node)
                wanted |= set(reads(node))
        return tuple(reversed(found))

    def split(self, refused: Mapping[int, str], least: int) -> Split:
        """Its parts. `refused` are nodes by number that are not to be compiled, and why; compiled
        parts have at least `least` nodes."""
        made = {name: node.number for node in self.live for name in node.outputs if name}
        nodes = {node.number: node for node in self.live}
        reasons = {n: refused.get(n) or self.known.reasons.get(n, "") for n in nodes}
        compiled = {n for n, reason in reasons.items() if not reason}

        def operands(number: int) -> Iterable[int]:
            return (made[name] for name in reads(nodes[number]) if name in made)

        found = without_small(list(nodes), operands, compiled, lambda _: 1, least)
        kept = [(nodes[n], reasons[n] or SMALL) for n in nodes if not found[n][1]]
        sides = sorted(set(found.values()))
        groups = [([nodes[n] for n in nodes if found[n] == side], side[1]) for side in sides]
        parts = tuple(self._part(group, side) for group, side in groups)
        return Split(parts, tuple(kept), self._folded(parts))

    def _part(self, nodes: Sequence[Node], is_compiled: bool) -> Part:
        own = {name for node in nodes for name in node.outputs if name}
        read = [n for n in dict.fromkeys(n for node in nodes for n in reads(node)) if n not in own]
        numbers = {node.number for node in nodes}
        wanted = {output.name for output in self.model.graph.outputs}
        for node in self.live:
            if node.number not in numbers:
                wanted |= set(reads(node))
        weights = [n for n in read if n in self.known.weights]
        inputs = [n for n in read if n not in self.known.weights and not self.known.is_known(n)]
        outputs = [n for node in nodes for n in node.outputs if n in wanted]
        return Part(tuple(nodes), is_compiled, tuple(inputs), tuple(outputs), tuple(weights))

    def _folded(self, parts: Sequence[Part]) -> tuple[str, ...]:
        """Known values that no initializer is, which the host reads or the caller gets."""
        read = [n for p in parts if not p.is_compiled for node in p.nodes for n in reads(node)]
        read += [output.name for output in self.model.graph.outputs]
        initial, given = self.model.graph.constants, {v.name for v in self.model.graph.inputs}
        names = (n for n in read if n not in initial and n not in given and self.known.is_known(n))
        return tuple(dict.fromkeys(names))

    def shaped(self, name: str) -> Shaped:
        """Type and shape of a value that crosses the border of a compiled part."""
        seen = self.known.values[name]
        assert isinstance(seen, Shaped)
        return seen

    def weight(self, name: str) -> Array:
        """An initializer as a compiled part has it."""
        return narrowed(self.known.weights[name])

    def artifact(self, part: Part, inline: bool) -> bytes:
        """The StableHLO of a compiled part, with weights as constants, or as its first arguments.
        Raises ImportRuleError at a node."""
        import jax

        function, names = self._function(part), list(part.weights)
        inputs = [_struct(self.shaped(name)) for name in part.inputs]
        weights = [self.weight(name) for name in names]
        if not inline:
            given = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in weights]
            return function_artifact(
                lambda given, *values: function(dict(zip(names, given, strict=True)), values),
                given,
                *inputs,
            )
        own = dict(zip(names, map(jax.numpy.asarray, weights), strict=True))
        return function_artifact(lambda *values: function(own, values), *inputs)

    def _function(self, part: Part) -> Callable[[Mapping[str, Any], Sequence[Any]], list[Any]]:
        """A part as a function of its weights by name and its inputs in order."""
        own = {name for node in part.nodes for name in node.outputs}
        read = {name for node in part.nodes for name in reads(node)} - own
        constants = {n: self.known.values[n] for n in sorted(read) if self.known.is_known(n)}
        inputs = tuple(Value(name, None, None) for name in part.inputs)
        outputs = tuple(Value(name, None, None) for name in part.outputs)
        graph = Graph("part", part.nodes, inputs, outputs, constants)  # type: ignore[arg-type]
        model = replace(self.model, graph=graph)

        def function(weights: Mapping[str, Any], values: Sequence[Any]) -> list[Any]:
            given = dict(zip(part.inputs, values, strict=True))
            return evaluate(model, {**weights, **given})

        return function


def _struct(seen: Shaped) -> Any:
    import jax

    return jax.ShapeDtypeStruct(seen.shape, computed_type(seen.dtype))


def asked(nodes: Iterable[Node], names: Collection[str]) -> dict[int, str]:
    """Nodes by number that are named, by their own name or their operator's, and why they stay on
    the host."""
    return {n.number: ASKED for n in nodes if n.name in names or n.operator in names}
