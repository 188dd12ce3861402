"""The part of a graph that stays on the host: nodes as plain data that torch's operators run.

It is data so that it can stand in a file that is read without running anybody's code: operators by
their name in torch's registry, arguments of a few kinds, a short list of Python's functions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwright.compiler.diagnostics import LoadError

if TYPE_CHECKING:
    import torch

NUMBERS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "neg", "pow", "getitem", "and_", "or_"),
    *("eq", "ne", "lt", "le", "gt", "ge", "not_"),
)
SIZES = ("sym_int", "sym_float", "sym_not", "sym_max", "sym_min", "sym_ite", "sym_sum")
"""Functions of Python's `operator`, and of torch's, that graphs call on sizes."""
_BRANCH, _LOOP = "cond", "while_loop"
_KINDS = ("dtype", "layout", "memory_format")
"""Types of torch's whose members arguments are."""
_CLOSED = ("aten.from_file",)
"""Operators that would open files by name."""


@dataclass(frozen=True, slots=True)
class HostNode:
    """A call of an operator: `target` is `aten.nonzero.default`, `python.getitem`,
    `torch.sym_max` or `higher_order.cond`; arguments are as `_encoded` makes them."""

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HostGraph:
    """Nodes in order; inputs and outputs are names of values."""

    inputs: tuple[str, ...]
    nodes: tuple[HostNode, ...]
    outputs: tuple[str, ...]

    @property
    def reads(self) -> set[str]:
        """Names of all values that it is called with."""
        return set(self.inputs)

    @property
    def makes(self) -> set[str]:
        """Names of its outputs."""
        return set(self.outputs)

    def run(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs by name. Raises LoadError for an operator that this torch does not have."""
        known = {name: values[name] for name in self.inputs}
        for node in self.nodes:
            args = [_decoded(part, known) for part in node.args]
            kwargs = {name: _decoded(part, known) for name, part in node.kwargs.items()}
            known[node.name] = function_of(node.target)(*args, **kwargs)
        return {name: known[name] for name in self.outputs}

    def as_data(self) -> list[Any]:
        """Lists and mappings that `of_data` reads."""
        rows = [[n.name, n.target, list(n.args), dict(n.kwargs)] for n in self.nodes]
        return [list(self.inputs), rows, list(self.outputs)]

    @classmethod
    def of_data(cls, data: Any) -> HostGraph:
        """Its inverse. Raises LoadError for an operator that this torch does not have; ValueError,
        TypeError for what is no graph."""
        inputs, rows, outputs = data
        nodes = tuple(
            HostNode(str(name), str(target), tuple(args), dict(kwargs))
            for name, target, args, kwargs in rows
        )
        made = cls(tuple(map(str, inputs)), nodes, tuple(map(str, outputs)))
        known = set(made.inputs)
        for node in nodes:
            function_of(node.target)
            if missing := _read([*node.args, *node.kwargs.values()]) - known:
                raise ValueError(f"{node.name} reads {', '.join(sorted(missing))}")
            known.add(node.name)
        if missing := set(made.outputs) - known:
            raise ValueError(f"no node makes {', '.join(sorted(missing))}")
        return made


def _read(part: Any) -> set[str]:
    """Names of values in arguments. Raises LoadError, ValueError, TypeError for other arguments
    than those of `_encoded`."""
    if isinstance(part, list | tuple):
        return {name for each in part for name in _read(each)}
    if isinstance(part, Mapping):
        if "value" in part:
            return {str(part["value"])}
        _decoded(part, {})
    return set()


def host_graph(
    module: torch.fx.GraphModule,
    nodes: Sequence[torch.fx.Node],
    inputs: Sequence[str],
    outputs: Sequence[str],
    aliases: Mapping[str, str],
) -> HostGraph:
    """Nodes of a graph as data; tensors that stand in the graph itself are inputs by their name.
    `aliases` are other names of inputs."""
    rows = []
    for node in nodes:
        args = tuple(_encoded(part, module, aliases) for part in node.args)
        kwargs = {name: _encoded(part, module, aliases) for name, part in node.kwargs.items()}
        rows.append(HostNode(node.name, target_of(node), args, kwargs))
    return HostGraph(tuple(inputs), tuple(rows), tuple(outputs))


def target_of(node: torch.fx.Node) -> str:
    """The name of what a node calls; "" of what the host does not run."""
    import torch

    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    name = getattr(target, "__name__", "")
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{name}" if name in (_BRANCH, _LOOP) else ""
    if name in NUMBERS and getattr(operator, name) is target:
        return f"python.{name}"
    return f"torch.{name}" if name in SIZES and getattr(torch, name, None) is target else ""


def function_of(target: str) -> Callable[..., Any]:
    """What a name stands for. Raises LoadError for an operator that this torch does not have."""
    import torch

    space, _, name = target.partition(".")
    if space == "python" and name in NUMBERS:
        return getattr(operator, name)  # type: ignore[no-any-return]
    if space == "torch" and name in SIZES and hasattr(torch, name):
        return getattr(torch, name)  # type: ignore[no-any-return]
    if space == "higher_order" and name in (_BRANCH, _LOOP):
        return _branch if name == _BRANCH else _loop
    found: Any = None if target.startswith(_CLOSED) else getattr(torch.ops, space, None)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise LoadError(
            "SW_TORCH_FILE",
            f"an operator of torch {torch.__version__} is required, got {target}",
            hint="import the library that registers it, or trace the module again",
        )
    return found  # type: ignore[no-any-return]  # which torch has no types for here


def _branch(predicate: Any, true: Any, false: Any, operands: Sequence[Any] = ()) -> Any:
    return (true if bool(predicate) else false)(*operands)


def _loop(condition: Any, body: Any, carried: Sequence[Any], extra: Sequence[Any] = ()) -> Any:
    while bool(condition(*carried, *extra)[0]):
        carried = body(*carried, *extra)
    return tuple(carried)


def _encoded(part: Any, module: torch.fx.GraphModule, aliases: Mapping[str, str]) -> Any:
    """An argument as plain data: numbers, texts and None are themselves, else a mapping."""
    import torch

    if isinstance(part, torch.fx.Node):
        if part.op == "get_attr":
            found = operator.attrgetter(part.target)(module)
            if isinstance(found, torch.fx.GraphModule):
                return {"graph": _whole(found).as_data()}
        return {"value": aliases.get(part.name, part.name)}
    if isinstance(part, list | tuple):
        return [_encoded(each, module, aliases) for each in part]
    for kind in _KINDS:
        if isinstance(part, getattr(torch, kind)):
            return {kind: str(part).removeprefix("torch.")}
    if isinstance(part, torch.device):
        return {"device": "cpu"}
    if isinstance(part, complex):
        return {"complex": [part.real, part.imag]}
    assert part is None or isinstance(part, bool | int | float | str), type(part)
    return part


def _whole(module: torch.fx.GraphModule) -> HostGraph:
    """The graph of a branch or a body."""
    nodes = list(module.graph.nodes)
    inputs = [node.name for node in nodes if node.op == "placeholder"]
    (results,) = next(node for node in nodes if node.op == "output").args
    calls = [node for node in nodes if node.op == "call_function"]
    return host_graph(module, calls, inputs, [node.name for node in results], {})


def _decoded(part: Any, known: Mapping[str, Any]) -> Any:
    """An argument of `_encoded`. Raises LoadError for another."""
    import torch

    if isinstance(part, list | tuple):
        return [_decoded(each, known) for each in part]
    if not isinstance(part, Mapping):
        return part
    ((key, value),) = part.items()
    if key == "value":
        return known[value]
    if key == "graph":
        graph = HostGraph.of_data(value)
        return lambda *given: list(graph.run(dict(zip(graph.inputs, given, strict=True))).values())
    if key == "complex":
        return complex(*value)
    if key == "device":
        return torch.device("cpu")
    found = getattr(torch, str(value), None)
    if key not in _KINDS or not isinstance(found, getattr(torch, key)):
        raise LoadError("SW_TORCH_FILE", f"an argument of torch's is required, got {part}")
    return found
