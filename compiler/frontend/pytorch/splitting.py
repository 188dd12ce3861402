"""A module's graph in parts: what is compiled, and what stays on the host.

An operator is compiled where it has a row, its shapes are known without values, and its types are
the machine's. The rest is torch's own, between the compiled parts. What a row or the compiler
refuses later is told to `split` again (`refused`), which leaves it to the host then.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import FunctionType
from typing import TYPE_CHECKING, Any

from shardwright.compiler.diagnostics import DiagnosticError, Loc, UsageError
from shardwright.compiler.frontend.levels import without_small
from shardwright.compiler.frontend.pytorch.exporting import (
    BUFFER,
    CONSTANT,
    INPUT,
    PARAMETER,
    Exported,
    exported_of,
    exported_program,
)
from shardwright.compiler.frontend.pytorch.host_graph import HostGraph, host_graph, target_of
from shardwright.compiler.frontend.pytorch.interpreter import (
    CHECKS,
    Values,
    evaluate,
    unsupported,
)
from shardwright.compiler.frontend.pytorch.operators import ATEN, HIGHER_ORDER
from shardwright.compiler.frontend.pytorch.operators.registry import row_name
from shardwright.compiler.frontend.pytorch.places import module_path, user_line
from shardwright.compiler.frontend.pytorch.signature import (
    Constant,
    Leaf,
    Signature,
)
from shardwright.compiler.frontend.pytorch.types import array_of, numpy_type
from shardwright.compiler.frontend.user_code import location

if TYPE_CHECKING:
    import torch

_WEIGHTS = (PARAMETER, BUFFER, CONSTANT)
_SIZES = ("sym_constrain_range.default", "sym_constrain_range_for_size.default")
_OURS = "pkg:compiler/"
NO_ROW, SMALL = "no row", "its part has fewer operators than a compiled one"
"""Why an operator stays on the host: it has no row in the table, or would be alone."""


@dataclass(frozen=True, slots=True)
class Kept:
    """An operator that stays on the host."""

    operator: str
    module: str
    loc: Loc | None
    reason: str

    def __str__(self) -> str:
        where = f"{self.module or 'forward'}" + (f" at {self.loc}" if self.loc else "")
        return f"{self.operator} in {where}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Part:
    """Nodes that run together. `inputs` and `outputs` are values that cross its border, `weights`
    names of tensors that are there before a call."""

    nodes: tuple[torch.fx.Node, ...]
    is_compiled: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...]

    @property
    def operators(self) -> list[str]:
        """Names of its operators, in order."""
        return [str(node.target) for node in self.nodes if _counts(node)]


@dataclass(frozen=True, slots=True)
class Split:
    """A module in parts, in the order in which they run."""

    parts: tuple[Part, ...]
    kept: tuple[Kept, ...]


@dataclass(frozen=True)
class Traced:
    """An exported program whose parts are looked for."""

    program: torch.export.ExportedProgram
    loc: Loc | None = None
    """The line of operators that torch knows no line of."""
    exported: Exported = field(init=False)

    def __post_init__(self) -> None:
        graph = self.program.graph_module.graph
        for node in reversed(graph.nodes):
            name = row_name(node.target) if node.op == "call_function" else ""
            if name in CHECKS or name in _SIZES:
                graph.erase_node(node)
        graph.eliminate_dead_code()
        _without_tokens(graph)
        object.__setattr__(self, "exported", exported_of(self.program))

    @cached_property
    def nodes(self) -> dict[str, torch.fx.Node]:
        """All nodes by name."""
        return {node.name: node for node in self.program.graph_module.graph.nodes}

    @cached_property
    def titles(self) -> dict[str, str]:
        """Placeholder -> its name in the module."""
        rows = zip(self._placeholders, self.exported.arguments, strict=True)
        return {node.name: name for node, (_, name) in rows}

    @cached_property
    def weights(self) -> dict[str, str]:
        """Placeholder of a tensor that is there before a call -> the first placeholder of the same
        tensor; buffers that change are none of them."""
        first: dict[int, str] = {}
        found = {}
        changed = set(self.exported.results)
        for node, (kind, name) in zip(self._placeholders, self.exported.arguments, strict=True):
            if kind in _WEIGHTS and name not in changed:
                found[node.name] = first.setdefault(id(self._state(name)), node.name)
        return found

    @property
    def _placeholders(self) -> list[torch.fx.Node]:
        return [node for node in self.nodes.values() if node.op == "placeholder"]

    def _state(self, name: str) -> Any:
        """A parameter, buffer or constant of the program. A buffer that is not saved with a module
        is among the constants."""
        state = self.program.state_dict
        return state[name] if name in state else self.program.constants[name]

    def tensor(self, name: str) -> Any:
        """The tensor of a placeholder, or one that stands in the graph itself."""
        if name in self.titles:
            return self._state(self.titles[name]).detach()
        return _attribute(self.program.graph_module, self.nodes[name])

    @cached_property
    def signature(self) -> Signature:
        """How it is called. Raises UsageError for structures that cannot be written."""
        rows = list(zip(self._placeholders, self.exported.arguments, strict=True))
        own = {name: node for node, (kind, name) in rows if kind in _WEIGHTS}
        kinds = [spec.kind.name for spec in self.program.graph_signature.input_specs]
        given = zip(self._placeholders, kinds, strict=True)
        inputs = tuple(_entry(node) for node, kind in given if kind == "USER_INPUT")
        specs = self.program.graph_signature.output_specs
        changed, buffers, outputs = [], [], []
        for spec in specs:
            if spec.kind.name == "TOKEN":
                continue
            value = self._value(spec)
            if spec.kind.name == "BUFFER_MUTATION":
                node = own[str(spec.target)]
                buffers.append(Leaf.of(node.name, node.meta["val"]))
                changed.append((str(value), node.name))
            elif spec.kind.name == "USER_INPUT_MUTATION":
                changed.append((str(value), str(spec.target)))
            else:
                outputs.append(value)
        return Signature(
            inputs=inputs,
            outputs=tuple(outputs),
            changed=tuple(changed),
            buffers=tuple(buffers),
            call=self.program.call_spec.in_spec,
            result=self.program.call_spec.out_spec,
        )

    def _value(self, spec: Any) -> str | Constant:
        """The value that a result is."""
        if hasattr(spec.arg, "value"):
            return Constant(spec.arg.value)
        return self.weights.get(spec.arg.name, str(spec.arg.name))

    def split(self, refused: Mapping[str, str], least: int) -> Split:
        """Its parts. `refused` are nodes by name that are not to be compiled, and why; compiled
        parts have at least `least` operators. Raises UsageError for an operator that neither side
        runs."""
        calls = [n for n in self.nodes.values() if n.op == "call_function"]
        reasons = {n: refused.get(n.name) or _reason(n) for n in calls}
        compiled = {node for node, reason in reasons.items() if not reason}
        for node in calls:  # an element of a result is where the result is
            if _is_element(node):
                (compiled.add if node.args[0] in compiled else compiled.discard)(node)
        found = without_small(calls, lambda n: n.all_input_nodes, compiled, _counts, least)
        kept = []
        for node in calls:
            if not found[node][1] and _counts(node):
                reason = reasons[node] or SMALL
                kept.append(Kept(str(node.target), module_path(node), self.line(node), reason))
        groups = sorted(set(found.values()), key=lambda side: (side[0], side[1]))
        parts = [self._part([n for n in calls if found[n] == side], side[1]) for side in groups]
        return Split(tuple(parts), tuple(kept))

    def line(self, node: torch.fx.Node) -> Loc | None:
        """The user's line of a node, not ours."""
        found = user_line(node)
        return self.loc if found is None or found.file.startswith(_OURS) else found

    def _part(self, nodes: Sequence[torch.fx.Node], is_compiled: bool) -> Part:
        """A part of some nodes. Raises UsageError for an operator that the host does not run."""
        inside = set(nodes)
        without = [n for n in nodes if not is_compiled and not target_of(n)]
        if without:
            raise unsupported(without)
        read = dict.fromkeys(o for node in nodes for o in node.all_input_nodes if o not in inside)
        weights = dict.fromkeys(filter(None, map(self._weight, read)))
        inputs = [o.name for o in read if not self._weight(o) and o.op != "get_attr"]
        outputs = [n.name for n in nodes if any(user not in inside for user in n.users)]
        return Part(tuple(nodes), is_compiled, tuple(inputs), tuple(outputs), tuple(weights))

    def _weight(self, node: torch.fx.Node) -> str:
        """The name of the weight that a node is; "" of another."""
        if node.name in self.weights:
            return self.weights[node.name]
        return node.name if _is_constant(self.program.graph_module, node) else ""

    def leaf(self, name: str) -> Leaf | None:
        """What a value is; None where its shape depends on values, or it is no tensor."""
        value = self.nodes[name].meta.get("val")
        if value is None:
            value = self.tensor(name)
        sizes = getattr(value, "shape", ("",))
        return Leaf.of(name, value) if all(isinstance(n, int) for n in sizes) else None

    def host(self, part: Part) -> HostGraph:
        """A part of the host as data; its weights are inputs, too."""
        inputs = (*part.inputs, *part.weights)
        graph = self.program.graph_module
        return host_graph(graph, part.nodes, inputs, part.outputs, self.weights)

    def function(self, part: Part) -> _PartFunction:
        """A compiled part as a function of arrays: (weights by name, *inputs) -> outputs."""
        return _PartFunction(self._graph_of(part), part)

    def _graph_of(self, part: Part) -> Exported:
        import torch

        graph, known = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
        module, arguments = self.program.graph_module, []

        def taken(node: torch.fx.Node, kind: str, name: str) -> torch.fx.Node:
            arguments.append((kind, name))
            known[node] = made = graph.placeholder(node.name)
            made.meta = dict(node.meta)
            return made

        def operand(node: torch.fx.Node) -> torch.fx.Node:
            if node not in known:
                if name := self._weight(node):
                    taken(node, PARAMETER, name)
                else:
                    known[node] = graph.node_copy(node)  # the graph of a branch
            return known[node]

        for name in part.inputs:
            taken(self.nodes[name], INPUT, name)
        inside = set(part.nodes)
        for each in dict.fromkeys(o for node in part.nodes for o in node.all_input_nodes):
            if each not in inside:
                operand(each)
        for node in part.nodes:
            known[node] = graph.node_copy(node, operand)
        graph.output(tuple(known[self.nodes[name]] for name in part.outputs))
        made = torch.fx.GraphModule(module, _with_placeholders_first(graph))
        return Exported(made, tuple(arguments), ("",) * len(part.outputs), {}, None)


def _without_tokens(graph: torch.fx.Graph) -> None:
    """Call operators with effects (checks of a factorisation) as they are. torch wraps them, so
    that each hands a token to the next; here nodes run in order."""
    import torch

    wrap = getattr(torch.ops.higher_order, "with_effects", None)
    for node in [n for n in graph.nodes if n.target is wrap]:
        token, called, *args = node.args
        with graph.inserting_before(node):
            made = graph.call_function(called, tuple(args), dict(node.kwargs))
        value = node.meta.get("val", (None,))[1:]
        made.meta = {**node.meta, "val": value[0] if len(value) == 1 else value or None}
        for user in list(node.users):
            place = user.args[1]
            if place == 0:
                user.replace_all_uses_with(token)
            elif len(value) == 1:
                user.replace_all_uses_with(made)
            else:
                user.args = (made, place - 1)
                continue
            graph.erase_node(user)
        graph.erase_node(node)


def _with_placeholders_first(graph: torch.fx.Graph) -> torch.fx.Graph:
    """The graph with graphs of branches behind the placeholders, where they are expected."""
    last = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    for node in list(graph.nodes):
        if node.op == "get_attr":
            last.prepend(node)
    return graph


@dataclass(frozen=True, slots=True)
class _PartFunction:
    """A part as a function of arrays."""

    exported: Exported
    part: Part

    def __call__(self, weights: Mapping[str, Any], *inputs: Any) -> tuple[Any, ...]:
        results, _ = evaluate(self.exported, Values(weights, {}, inputs))
        return tuple(results)

    def artifact(self, weights: Mapping[str, Any], leaves: Sequence[Leaf], inline: bool) -> bytes:
        """The StableHLO of the part, with `weights` as constants, or as its first arguments."""
        import jax

        from shardwright.compiler.frontend.capture import artifact_of

        shapes = [jax.ShapeDtypeStruct(leaf.shape, _machine(leaf.dtype)) for leaf in leaves]
        if inline:
            own = {name: jax.numpy.asarray(array) for name, array in weights.items()}
            jitted = jax.jit(lambda *inputs: self(own, *inputs), keep_unused=True)
            return artifact_of(jitted.trace(*shapes))
        names = list(weights)
        jitted = jax.jit(
            lambda given, *inputs: self(dict(zip(names, given, strict=True)), *inputs),
            keep_unused=True,
        )
        given = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in weights.values()]
        return artifact_of(jitted.trace(given, *shapes))


def _machine(dtype: str) -> Any:
    import torch

    return numpy_type(getattr(torch, dtype))


def refused_rows(traced: Traced, part: Part) -> dict[str, str]:
    """Nodes of a part whose rows do not take their arguments, and why."""
    import jax

    found = {}
    for node in part.nodes:
        if _is_element(node):
            continue
        alone = traced._part([node], True)
        function = traced.function(alone)
        weights = {name: jax.numpy.asarray(array_of(traced.tensor(name))) for name in alone.weights}
        leaves = [_leaves(traced.nodes[name]) for name in alone.inputs]
        try:
            jax.eval_shape(lambda *given, f=function, w=weights: f(w, *given), *leaves)
        except DiagnosticError as error:
            found[node.name] = f"{error.diagnostic.message} [{error.code}]"
        except Exception as error:
            found[node.name] = f"its row raised {type(error).__name__}: {error}".splitlines()[0]
    return found


def _leaves(node: torch.fx.Node) -> Any:
    """A value without values, as JAX has it."""
    import jax

    value = node.meta["val"]
    if isinstance(value, tuple | list):
        return tuple(jax.ShapeDtypeStruct(tuple(v.shape), numpy_type(v.dtype)) for v in value)
    return jax.ShapeDtypeStruct(tuple(value.shape), numpy_type(value.dtype))


def at_line(part: Part, loc: Loc | None) -> list[torch.fx.Node]:
    """The nodes of a part that a line of the user's made, which are no views of others."""
    if loc is None or not loc.line:
        return []
    lines = [(node, user_line(node)) for node in part.nodes if _counts(node)]
    return [
        node
        for node, line in lines
        if line and line.line == loc.line and _same_file(line.file, loc.file)
    ]


def _same_file(one: str, other: str) -> bool:
    """Whether two names are of one file: one may be relative to a folder."""
    return one.endswith(other) or other.endswith(one)


def traced_module(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Traced:
    """A module, or a function of tensors, in evaluation mode. Raises UsageError, as
    `exported_program`."""
    import torch

    if isinstance(module, torch.nn.Module):
        with _evaluated(module), torch.no_grad():
            return Traced(exported_program(module, args, kwargs))
    if not callable(module):
        raise UsageError(
            "SW_TORCH_INPUT",
            f"a torch.nn.Module or a function of tensors is required, got {type(module).__name__}",
        )

    class Called(torch.nn.Module):  # type: ignore[misc]  # which torch has no types for here
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    function = _named_forward(module)
    name = getattr(inspect.unwrap(module), "__name__", "function")
    with torch.no_grad():
        return Traced(exported_program(Called(), args, kwargs, name), location(module))


def _named_forward(function: Any) -> Any:
    """A function under the name whose lines torch writes down."""
    if not isinstance(function, FunctionType):
        return function
    code = function.__code__.replace(co_name="forward")
    parts = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    made = FunctionType(code, *parts)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


@contextmanager
def _evaluated(module: torch.nn.Module) -> Iterator[None]:
    """A module in evaluation mode, and afterwards as it was."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _entry(node: torch.fx.Node) -> Leaf | Constant:
    """An argument of a call."""
    import torch

    value = node.meta.get("val")
    return Leaf.of(node.name, value) if isinstance(value, torch.Tensor) else Constant(value)


def _counts(node: torch.fx.Node) -> int:
    """1 of an operator, 0 of an element of a result."""
    return int(not _is_element(node))


def _is_element(node: torch.fx.Node) -> bool:
    """Whether a node takes one of the results of another."""
    import operator

    return node.target is operator.getitem


def _attribute(module: Any, node: torch.fx.Node) -> Any:
    import operator

    return operator.attrgetter(str(node.target))(module)


def _is_constant(module: Any, node: torch.fx.Node) -> bool:
    """Whether a node is a tensor that stands in the graph itself."""
    import torch

    return node.op == "get_attr" and isinstance(_attribute(module, node), torch.Tensor)


def _reason(node: torch.fx.Node) -> str:
    """Why an operator is not compiled; "" where it is."""
    import torch

    if _is_element(node):
        return ""
    if not _has_row(node):
        is_operator = isinstance(node.target, torch._ops.OpOverload)
        return NO_ROW if is_operator else "no row for it, or for an operator inside"
    for value in (node, *node.all_input_nodes):
        reason = _type_reason(value)
        if reason:
            return reason
    return ""


def _has_row(node: torch.fx.Node) -> bool:
    """Whether an operator, and those in its graphs, have rows."""
    import torch

    name = row_name(node.target)
    if name:
        return name in ATEN
    higher = getattr(node.target, "name", lambda: "")
    if not isinstance(node.target, torch._ops.HigherOrderOperator) or higher() not in HIGHER_ORDER:
        return False
    owner = node.graph.owning_module
    graphs = [_attribute(owner, o) for o in node.all_input_nodes if o.op == "get_attr"]
    inner = [n for g in graphs if isinstance(g, torch.fx.GraphModule) for n in g.graph.nodes]
    return not any(_reason(n) for n in inner if n.op == "call_function")


def _type_reason(node: torch.fx.Node) -> str:
    """Why a value is none that is compiled."""
    import torch

    if node.op == "get_attr":
        return ""
    value = node.meta.get("val")
    for each in value if isinstance(value, tuple | list) else (value,):
        if not isinstance(each, torch.Tensor):
            return "is a number of the host, not a tensor"
        if not all(isinstance(size, int) for size in each.shape):
            return "its shape depends on values"
        try:
            numpy_type(each.dtype)
        except UsageError:
            return f"its type is {str(each.dtype).removeprefix('torch.')}"
    return ""
