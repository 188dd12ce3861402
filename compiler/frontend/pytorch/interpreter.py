"""A graph of operators as a function of JAX arrays.

Each operator's row is called below frames that have the user's file and line, and in the scope of
its module, so that whatever is said about it later names both.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.compiler.diagnostics import Loc, UsageError
from shardwright.compiler.frontend.locations import LocationReader
from shardwright.compiler.frontend.pytorch.distribution import Recompute
from shardwright.compiler.frontend.pytorch.exporting import (
    BUFFER,
    CONSTANT,
    INPUT,
    LITERAL,
    PARAMETER,
    WRAPPED,
    Exported,
    of_values,
    operators,
    row_name,
)
from shardwright.compiler.frontend.pytorch.operators import ATEN, HIGHER_ORDER
from shardwright.compiler.frontend.pytorch.operators.registry import Place
from shardwright.compiler.frontend.pytorch.recomputing import computed_again, stretches
from shardwright.compiler.frontend.pytorch.types import array_of, check_type, numpy_type

if TYPE_CHECKING:
    import torch

IGNORED = {"device", "layout", "memory_format", "pin_memory", "non_blocking", "generator"}
"""Arguments that say where a tensor lies, and who draws."""
CHECKS = {"_assert_tensor_metadata.default", "_assert_async.msg", "_assert_scalar.default"}
MOST_FRAMES = 6  # of a node's stack, the innermost ones (JAX keeps ten)


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
    given = iter(values.inputs)
    by_kind: dict[str, Callable[[str], Any]] = {
        PARAMETER: values.params.__getitem__,
        BUFFER: values.buffers.__getitem__,
        CONSTANT: exported.constants.__getitem__,
        LITERAL: lambda _: None,
        INPUT: lambda _: next(given),
    }
    arguments = [by_kind[kind](name) for kind, name in exported.arguments]
    results = _Run(exported.graph, _Keys(values.key), exported.recomputed)(*arguments)
    named = list(zip(exported.results, results, strict=True))
    return [r for name, r in named if not name], {name: r for name, r in named if name}


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
    recomputed: Mapping[str, Recompute] = field(default_factory=dict)

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        import jax

        known: dict[Any, Any] = {}
        given = iter(arguments)
        for path, nodes in stretches(self.module.graph.nodes, module_path, self.recomputed):
            if path:
                computed_again(nodes, self.recomputed[path], known, self._enter)
                continue
            for node in nodes:
                if node.op == "placeholder":
                    known[node] = jax.tree.map(jax.numpy.asarray, next(given))
                elif node.op == "output":
                    return [_value(part, known) for part in node.args[0]]
                else:
                    self._enter(node, known)
        raise AssertionError("a graph has an output")

    def _enter(self, node: torch.fx.Node, known: dict[Any, Any]) -> None:
        """Enter what a node makes."""
        is_attribute = node.op == "get_attr"
        known[node] = self._attribute(node.target) if is_attribute else self._call(node, known)

    def _attribute(self, name: str) -> Any:
        """A graph of a branch or a loop, or a tensor that stands in the graph itself."""
        import torch

        found = operator.attrgetter(name)(self.module)
        if isinstance(found, torch.fx.GraphModule):
            return _Run(found, self.keys)
        import jax

        return jax.numpy.asarray(array_of(found))

    def _call(self, node: torch.fx.Node, known: Mapping[Any, Any]) -> Any:
        import jax

        args = [_value(part, known) for part in node.args]
        if node.target is operator.getitem:
            return args[0][args[1]]
        kwargs = {
            name: _value(part, known) for name, part in node.kwargs.items() if name not in IGNORED
        }
        name = row_name(node.target)
        if name in CHECKS:
            return None
        with jax.named_scope(module_path(node).replace(".", "/")):
            found = _at(frames(node), partial(self._row(node, name), *args, **kwargs))
        return _typed(found, node.meta.get("val"))

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
        return Place(tuple(int(n) for n in first.shape), numpy_type(first.dtype), self.keys.draw)


def checked(exported: Exported) -> Exported:
    """The graph itself. Raises UsageError where it has operators without a row, numbers without a
    type here, or sizes that are data."""
    for node, _ in operators(exported.graph):
        for part in _parts(node.meta.get("val")):
            if any(type(size) is not int for size in getattr(part, "shape", (part,))):
                raise of_values(user_line(node))
            check_type(part, user_line(node))
    without = [
        node
        for node, op in operators(exported.graph)
        if row_name(op) not in ATEN and row_name(op) not in CHECKS
    ]
    if without:
        raise unsupported(without)
    return exported


def _parts(said: Any) -> Iterator[Any]:
    """What a node makes: tensors, and numbers that are data."""
    if isinstance(said, list | tuple):
        for part in said:
            yield from _parts(part)
    elif said is not None:
        yield said


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


def module_path(node: torch.fx.Node) -> str:
    """The path of the module that a node is in, `layers.0.attention`; "" of the outermost."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    return path.removeprefix(WRAPPED).removeprefix(".")


_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')


@cache
def _torch_folder() -> str:
    import torch

    return str(Path(torch.__file__).parent)


def frames(node: torch.fx.Node) -> tuple[tuple[str, int], ...]:
    """(file, line) of the calls that led to a node, the innermost first, without torch's own."""
    found = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [(file, int(line)) for file, line, _ in found if not file.startswith(_torch_folder())]
    return tuple(own[::-1][:MOST_FRAMES])


def user_line(node: torch.fx.Node) -> Loc | None:
    """The user's innermost line of a node."""
    found = frames(node)
    return LocationReader().innermost(found) if found else None


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
