"""A graph of operators as a function of JAX arrays.

Each operator's row is called below frames that have the user's file and line, and in the scope of
its module, so that whatever is said about it later names both.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.pytorch.exporting import (
    BUFFER,
    CONSTANT,
    INPUT,
    LITERAL,
    PARAMETER,
    Exported,
    operators,
    row_name,
)
from shardwright.compiler.frontend.pytorch.operators import ATEN, HIGHER_ORDER
from shardwright.compiler.frontend.pytorch.operators.indexing import selected
from shardwright.compiler.frontend.pytorch.operators.registry import Place
from shardwright.compiler.frontend.pytorch.places import at_line, frames, module_path, user_line
from shardwright.compiler.frontend.pytorch.regions import ENTER, evaluated, region_of
from shardwright.compiler.frontend.pytorch.types import numpy_type

if TYPE_CHECKING:
    import torch

IGNORED = {"device", "layout", "memory_format", "pin_memory", "non_blocking", "generator"}
"""Arguments that say where a tensor lies, and who draws."""
CHECKS = {
    *("_assert_tensor_metadata.default", "_assert_async.msg", "_assert_async.default"),
    *("_assert_scalar.default", "_linalg_check_errors.default"),
    "sym_constrain_range_for_size.default",
    "sym_constrain_range.default",
}
"""Operators that raise or do nothing."""


@dataclass(frozen=True, slots=True)
class Values:
    """What a graph is called with, by name, and a key that its random operators draw with."""

    params: Mapping[str, Any]
    buffers: Mapping[str, Any]
    inputs: Sequence[Any]
    key: Any = None


def evaluate(exported: Exported, values: Values) -> tuple[list[Any], dict[str, Any]]:
    """(the module's own results, buffers that changed) of a graph.

    Raises UsageError for an operator without a row, at the user's line.
    """
    import jax.numpy as jnp

    given = iter(values.inputs)
    by_kind: dict[str, Callable[[str], Any]] = {
        PARAMETER: values.params.__getitem__,
        BUFFER: values.buffers.__getitem__,
        CONSTANT: exported.constants.__getitem__,
        LITERAL: lambda _: None,
        INPUT: lambda _: next(given),
    }
    found = (by_kind[kind](name) for kind, name in exported.arguments)
    arguments = [None if value is None else jnp.asarray(value) for value in found]
    results = _Run(exported.graph, _Keys(values.key))(*arguments)
    named = list(zip(exported.results, results, strict=True))
    return [r for name, r in named if name == ""], {name: r for name, r in named if name}


@dataclass(slots=True)
class _Keys:
    """Keys of operators that draw, each of its own number."""

    key: Any
    count: int = 0

    def draw(self) -> Any:
        import jax

        if self.key is None:
            raise UsageError(
                "SW_TORCH_RANDOM",
                "a module that draws random numbers requires a key, got none",
                hint="call module.eval() before it is traced, or plan a training step of it",
            )
        self.count += 1
        return jax.random.fold_in(self.key, self.count)


@dataclass(frozen=True, slots=True)
class _Run:
    """A graph, and the graphs in it, as a function."""

    module: torch.fx.GraphModule
    keys: _Keys

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        given = iter(arguments)
        nodes = list(self.module.graph.nodes)
        known = {node: next(given) for node in nodes if node.op == "placeholder"}
        self._evaluate(nodes, known)
        return [_value(part, known) for part in nodes[-1].args[0]]

    def _evaluate(self, nodes: Sequence[torch.fx.Node], known: dict[Any, Any]) -> None:
        """Add what nodes are to what is known."""
        place = 0
        while place < len(nodes):
            node = nodes[place]
            if node.op == "get_attr":
                known[node] = self._attribute(node.target)
            elif str(node.target) == f"{ENTER}.default":
                region = region_of(nodes, place)
                evaluated(region, known, self._evaluate)
                place += len(region.nodes) + 1
            elif node.op == "call_function":
                known[node] = self._call(node, known)
            place += 1

    def _attribute(self, name: str) -> Any:
        """A graph of a branch or a loop, or a tensor that stands in the graph itself."""
        import torch

        found = operator.attrgetter(name)(self.module)
        if isinstance(found, torch.fx.GraphModule):
            return _Run(found, self.keys)
        from shardwright.compiler.frontend.pytorch.types import array_of

        return array_of(found)

    def _call(self, node: torch.fx.Node, known: Mapping[Any, Any]) -> Any:
        import jax

        args = [_value(part, known) for part in node.args]
        if node.target is operator.getitem:
            return args[0][args[1]]
        kwargs = {
            name: _value(part, known) for name, part in node.kwargs.items() if name not in IGNORED
        }
        target = node.target
        has_token = getattr(target, "name", str)() == "with_effects"
        if has_token:  # (token, operator, what it takes), of one whose order with others matters
            target, args = args[1], args[2:]
        name = row_name(target)
        if name in CHECKS:
            return [None, None]
        with at_line(node):
            check_static(node.meta.get("val"))
            with jax.named_scope(module_path(node).replace(".", "/")):
                found = _at(frames(node), partial(self._row(node, name), *args, **kwargs))
            return [None, found] if has_token else _typed(found, node.meta.get("val"))

    def _row(self, node: torch.fx.Node, name: str) -> Callable[..., Any]:
        if name and name in ATEN:
            row = ATEN[name]
            return partial(row, self._place(node)) if ATEN.is_placed(name) else row
        higher = getattr(node.target, "name", lambda: "")() if not name else ""
        if higher and higher in HIGHER_ORDER:
            return HIGHER_ORDER[higher]
        raise unsupported([node])

    def _place(self, node: torch.fx.Node) -> Place:
        first = node.meta["val"]
        first = first[0] if isinstance(first, tuple | list) else first
        given = next((a.meta.get("val") for a in node.args if hasattr(a, "meta")), None)
        is_in_order = bool(getattr(given, "is_contiguous", lambda: True)())
        shape = tuple(int(n) for n in first.shape)
        return Place(shape, numpy_type(first.dtype), self.keys.draw, is_in_order)


def check_static(said: Any) -> None:
    """Raise UsageError for a result whose shape depends on values, or of a type without a
    counterpart; `said` are torch's tensors without values."""
    for part in said if isinstance(said, list | tuple) else (said,):
        if not hasattr(part, "dtype"):
            continue
        numpy_type(part.dtype)
        if not all(isinstance(size, int) for size in part.shape):
            raise selected("rows that a mask, nonzero or unique selects")


def missing(exported: Exported) -> list[torch.fx.Node]:
    """Nodes of operators without a row, of graphs below too. Raises UsageError for shapes that
    depend on values, and for types without a counterpart."""
    for node, _ in operators(exported.graph):
        with at_line(node):
            check_static(node.meta.get("val"))
    return [
        node
        for node, op in operators(exported.graph)
        if row_name(op) not in ATEN and row_name(op) not in CHECKS
    ]


MOST_NAMED = 5


def unsupported(nodes: Sequence[torch.fx.Node]) -> UsageError:
    """The error of operators without a row, by module and line."""
    lines = [f"{node.target} in {module_path(node) or 'forward'}" for node in nodes]
    names = list(dict.fromkeys(lines))
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return UsageError(
        "SW_TORCH_OPERATOR",
        f"operators with a row (docs/pytorch.md) are required, got {', '.join(names[:MOST_NAMED])}"
        + more,
        user_line(nodes[0]),
        "write the module with other operators, or leave that part to the host"
        " (shardwright.torch.trace)",
    )


def _value(part: Any, known: Mapping[Any, Any]) -> Any:
    """An argument of a node as a row takes it."""
    import torch

    if isinstance(part, torch.fx.Node):
        return known[part]
    if isinstance(part, list | tuple):
        return [_value(each, known) for each in part]
    if isinstance(part, torch.dtype):
        return numpy_type(part)
    return part


def _typed(found: Any, said: Any) -> Any:
    """A row's results in the types that torch says."""
    if isinstance(found, list | tuple):
        if not isinstance(said, list | tuple):
            return found
        return [_typed(f, s) for f, s in zip(found, said, strict=False)]
    if found is None or not hasattr(said, "dtype"):
        return found
    import jax.numpy as jnp

    return jnp.asarray(found).astype(numpy_type(said.dtype))


def _at(stack: Sequence[tuple[str, int]], call: Callable[[], Any]) -> Any:
    """What `call` returns, called below frames of the given files and lines."""
    for file, line in stack:
        call = partial(_frame(file, line), call)
    return call()


@cache
def _frame(file: str, line: int) -> Callable[[Callable[[], Any]], Any]:
    """A function that calls what it is given on a line of a file."""
    names: dict[str, Any] = {}
    exec(compile("\n" * (line - 1) + "def at(call): return call()", file, "exec"), names)
    made: Callable[[Callable[[], Any]], Any] = names["at"]
    return made
