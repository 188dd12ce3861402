"""A graph of operators as a function of JAX arrays.

Each operator's row is called below frames that have the user's file and line, and in the scope of
its module, so that whatever is said about it later names both.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.pytorch.distribution import Recompute
from shardwright.compiler.frontend.pytorch.exporting import (
    BUFFER,
    CONSTANT,
    INPUT,
    LITERAL,
    PARAMETER,
    Exported,
    of_values,
    operators,
)
from shardwright.compiler.frontend.pytorch.operators import ATEN, HIGHER_ORDER
from shardwright.compiler.frontend.pytorch.operators.registry import Place, row_name
from shardwright.compiler.frontend.pytorch.operators.selected_rows import (
    SELECTING,
    Call,
    called,
    has_rule,
)
from shardwright.compiler.frontend.pytorch.operators.selections import (
    NUMBERS,
    Count,
    Selected,
    computed,
    is_mask,
    leaves_of,
    of_rows,
    selected,
)
from shardwright.compiler.frontend.pytorch.places import at_line, frames, module_path, user_line
from shardwright.compiler.frontend.pytorch.recomputing import computed_again, recomputed_around
from shardwright.compiler.frontend.pytorch.regions import CHECKPOINT, ENTER, evaluated, region_of
from shardwright.compiler.frontend.pytorch.sizes import Sizes, is_pointwise, unknown_of
from shardwright.compiler.frontend.pytorch.types import array_of, numpy_type
from shardwright.compiler.frontend.written_at import called_at

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
    results = _Run(exported.graph, _Keys(values.key), exported.recomputed)(*arguments)
    named = list(zip(exported.results, results, strict=True))
    parts = exported.graph.graph.output_node().args[0]
    for node, result in zip(parts, results, strict=True):
        if isinstance(result, Selected | Count):
            with at_line(node):
                raise selected("rows that a mask or nonzero selects as a result")
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
    recomputed: Mapping[str, Recompute] = field(default_factory=dict)
    sizes: Sizes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", Sizes(self.module.graph))

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        given = iter(arguments)
        nodes = list(self.module.graph.nodes)
        known = {node: next(given) for node in nodes if node.op == "placeholder"}
        self._evaluate(nodes, known, self.recomputed)
        return [_value(part, known) for part in nodes[-1].args[0]]

    def _evaluate(
        self,
        nodes: Sequence[torch.fx.Node],
        known: dict[Any, Any],
        recomputed: Mapping[str, Recompute],
    ) -> None:
        """Add what nodes are to what is known; modules of `recomputed` are computed again."""
        within = partial(self._evaluate, recomputed={})
        place = 0
        while place < len(nodes):
            node = nodes[place]
            if _enters(node):
                region = region_of(nodes, place)
                is_again = region.kind == CHECKPOINT
                inside = within if is_again else partial(self._evaluate, recomputed=recomputed)
                evaluated(region, known, inside)
                place += len(region.nodes) + 2
            elif path := recomputed_around(node, recomputed):
                end = _end_of(nodes, place, path, recomputed)
                computed_again(nodes[place:end], recomputed[path], known, within)
                place = end
            else:
                self._enter(node, known)
                place += 1

    def _enter(self, node: torch.fx.Node, known: dict[Any, Any]) -> None:
        """Add what one node is, unless it is an argument or the result."""
        if node.op == "get_attr":
            known[node] = self._attribute(node.target)
        elif node.op == "call_function":
            known[node] = self._call(node, known)

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
        target = node.target
        if not row_name(target) and getattr(target, "__name__", "") in NUMBERS:
            return self._number(node, args)
        has_token = getattr(target, "name", str)() == "with_effects"
        if has_token:  # (token, operator, what it takes), of one whose order with others matters
            target, args = args[1], args[2:]
        name = row_name(target)
        if name in CHECKS:
            return [None, None]
        with at_line(node):
            check_static(node)
            call: Callable[[], Any]
            if _selects(name, args, kwargs):
                call = partial(self._selected, node, name, args, kwargs)
            else:
                call = partial(self._row(node, name), *args, **kwargs)
            with jax.named_scope(module_path(node).replace(".", "/")):
                found = called_at(frames(node), call)
            return [None, found] if has_token else _typed(found, node.meta.get("val"))

    def _number(self, node: torch.fx.Node, args: Sequence[Any]) -> Any:
        """A number that is computed of others; none where only checks take it."""
        if all(row_name(user.target) in CHECKS for user in node.users):
            return None
        return computed(node.target.__name__, args, self.sizes.of(node.meta["val"]))

    def _selected(
        self, node: torch.fx.Node, name: str, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        """What an operator gives of rows that a mask selects, or selects itself."""
        masks = {
            n: self.sizes.elements(part)
            for n, part in enumerate(leaves_of(node.args))
            if hasattr(part, "meta")
        }
        row = partial(self._row, node, name)
        said = node.meta.get("val")
        name = name or str(node.target)
        return called(Call(name, row, args, kwargs, said, self.sizes, masks), is_pointwise(node))

    def _row(
        self, node: torch.fx.Node, name: str, shape: tuple[int, ...] | None = None
    ) -> Callable[..., Any]:
        if name and name in ATEN:
            row = ATEN[name]
            return partial(row, self._place(node, shape)) if ATEN.is_placed(name) else row
        higher = getattr(node.target, "name", lambda: "")() if not name else ""
        if higher and higher in HIGHER_ORDER:
            return HIGHER_ORDER[higher]
        raise unsupported([node])

    def _place(self, node: torch.fx.Node, shape: tuple[int, ...] | None) -> Place:
        first = node.meta["val"]
        first = first[0] if isinstance(first, tuple | list) else first
        given: Any = next((a.meta.get("val") for a in node.args if hasattr(a, "meta")), None)
        is_in_order = True
        if hasattr(given, "is_contiguous") and not list(unknown_of(given)):
            is_in_order = bool(given.is_contiguous())
        shape = tuple(int(n) for n in first.shape) if shape is None else shape
        return Place(shape, numpy_type(first.dtype), self.keys.draw, is_in_order)


def _enters(node: torch.fx.Node) -> bool:
    return str(node.target) == f"{ENTER}.default"


def _end_of(
    nodes: Sequence[torch.fx.Node], place: int, path: str, recomputed: Mapping[str, Recompute]
) -> int:
    """Where the call of a module ends that the node at a place is in; regions stay whole."""
    while place < len(nodes) and recomputed_around(nodes[place], recomputed) == path:
        region = region_of(nodes, place) if _enters(nodes[place]) else None
        place += len(region.nodes) + 2 if region else 1
    return place


def _selects(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator takes rows that a mask selects, or selects such."""
    leaves = leaves_of([args, kwargs])
    if any(isinstance(part, Selected | Count) for part in leaves):
        return True
    return name in SELECTING and (SELECTING[name] or any(map(is_mask, leaves[1:])))


def check_static(node: torch.fx.Node) -> None:
    """Raise UsageError for a node whose result is a number, or has a shape, that depends on values,
    where its operator has no rule for that, or is of a type without a counterpart."""
    said = node.meta.get("val")
    name = row_name(node.target)
    if not hasattr(node.target, "_schema"):
        return
    for part in said if isinstance(said, list | tuple) else (said,):
        if type(part).__name__ in _OF_DATA and name != "sym_size.int":
            raise of_values(None)
        if hasattr(part, "dtype"):
            numpy_type(part.dtype)
    if name in CHECKS or has_rule(name, is_pointwise(node)):
        return
    if list(unknown_of([n.meta.get("val") for n in node.all_input_nodes])):
        raise of_rows(name)
    if list(unknown_of(said)):
        raise selected(f"a result of {name.removesuffix('.default')}, whose size does")


def checked(exported: Exported) -> Exported:
    """The graph itself. Raises UsageError for what depends on values, types without a counterpart,
    and operators without a row, of graphs below too."""
    for node, _ in operators(exported.graph):
        with at_line(node):
            check_static(node)
    without = [
        node
        for node, op in operators(exported.graph)
        if row_name(op) not in ATEN and row_name(op) not in {*CHECKS, *SELECTING}
    ]
    if without:
        raise unsupported(without)
    return exported


MOST_NAMED = 5
_OF_DATA = ("SymInt", "SymFloat", "SymBool")
"""torch's numbers that are known only when a program runs."""


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

    if isinstance(found, Selected):
        return replace(found, array=found.array.astype(numpy_type(said.dtype)))
    return jnp.asarray(found).astype(numpy_type(said.dtype))
