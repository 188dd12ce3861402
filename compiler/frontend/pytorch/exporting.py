"""A module as a graph of the operators that `operators/` has.

`torch.export` runs the module's own Python once on tensors without values. What it gives is made
functional (no operator writes to a tensor, buffers that change are results), and operators without
a row are decomposed as torch itself decomposes them. Shapes are those of the example: another
number of samples is another graph.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardwright.compiler.diagnostics import Loc, UsageError
from shardwright.compiler.frontend.pytorch.distribution import Recompute
from shardwright.compiler.frontend.pytorch.operators import ATEN
from shardwright.compiler.frontend.pytorch.operators.registry import row_name
from shardwright.compiler.frontend.pytorch.places import at_line, raised_at
from shardwright.compiler.frontend.pytorch.regions import MARKERS, kept
from shardwright.compiler.frontend.pytorch.sizes import unknown_of
from shardwright.compiler.frontend.pytorch.types import array_of, numpy_type
from shardwright.compiler.frontend.user_code import called

if TYPE_CHECKING:
    import torch

PARAMETER, BUFFER, CONSTANT, INPUT = "parameter", "buffer", "constant", "input"
LITERAL = "literal"
"""What an argument of a graph is; a literal is no tensor, and stands in the graph where it is used.
"""


CHANGED, EFFECTS = "BUFFER_MUTATION", ("USER_INPUT_MUTATION", "TOKEN")
"""torch's kinds of results that are no results of the module's own."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A module's graph. `arguments` says of each of its placeholders what it is, and of what name;
    `results` which buffer a result is the next value of, "" for one of the module's own, and None
    for what is neither: an input that the code wrote to, or a token that orders effects.
    `constants` are tensors that the code made."""

    graph: torch.fx.GraphModule
    arguments: tuple[tuple[str, str], ...]
    results: tuple[str | None, ...]
    constants: Mapping[str, Any]
    structure: Any
    """Of the module's own results, a `TreeSpec` of torch's."""
    recomputed: Mapping[str, Recompute] = field(default_factory=dict)
    """Paths of modules that the backward pass computes again."""

    @property
    def used(self) -> frozenset[str]:
        """Names of the arguments that something is computed of."""
        given = (node for node in self.graph.graph.nodes if node.op == "placeholder")
        rows = zip(given, self.arguments, strict=True)
        return frozenset(name for node, (_, name) in rows if node.users)


_HINT = "torch.export traces a module without values: its documentation says what it takes"


def export(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    what: str = "",
    hint: str = _HINT,
) -> Exported:
    """The graph of a module's call; `what` is how messages call it, `hint` what they say to do
    where its code fails. Raises UsageError, as `exported_program`."""
    program = exported_program(module, args, kwargs, what, hint, is_whole=True)
    _take_rows_apart(program.graph_module.graph)
    return exported_of(program)


def exported_program(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    what: str = "",
    hint: str = _HINT,
    is_whole: bool = False,
) -> torch.export.ExportedProgram:
    """A module's call as torch exports it, of the operators of the table. Of one that is compiled
    as a whole no part may stay with torch.

    Raises UsageError where its code needs the values of tensors, or fails, or has numbers of a type
    without a counterpart in what is compiled as a whole.
    """
    import torch

    with (
        called(what or type(module).__name__, hint=hint),
        _refused_for_values(),
        _quiet(),
        kept(),
        _masks_as_given(),
        _sizes_not_asked(),
    ):
        program = torch.export.export(module, tuple(args), dict(kwargs), strict=False)
        if is_whole:  # before torch stumbles over them
            _refuse_types(program.graph_module)
        return decomposed(program)


def decomposed(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """An exported program without operators that write to a tensor, and of those with a row where
    torch has a decomposition."""
    _stop_gradients(program.graph_module)
    done: set[Any] = set()
    while new := _decompositions(program, done):  # what is made of one may need another
        program = program.run_decompositions(new)
    return program


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of torch's own code about its own code, and without its log and its
    graph of what could not be exported, which is told in one line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def _masks_as_given() -> Iterator[None]:
    """Let torch.nn's transformers not look whether a mask that they are given is the causal one: it
    is applied either way, and its values are not known (a private function of torch's)."""
    from torch.nn.modules import transformer

    name = "_detect_is_causal_mask"
    found = getattr(transformer, name, None)
    if found is None:
        yield
        return
    setattr(transformer, name, lambda mask, is_causal=None, size=None: is_causal is True)
    try:
        yield
    finally:
        setattr(transformer, name, found)


@contextmanager
def _sizes_not_asked() -> Iterator[None]:
    """Let torch not take its own Python form of the likelihood, which asks whether there are rows
    at all: of rows that a mask selects, only data know. What it takes then asks nothing."""
    import torch
    from torch._decomp import decomposition_table  # long-standing, though not public

    operator = torch.ops.aten.nll_loss.default
    held = decomposition_table.pop(operator, None)
    try:
        yield
    finally:
        if held is not None:
            decomposition_table[operator] = held


_TO_NUMPY = ".numpy() is not supported for tensor subclasses"
_FOR_VALUES = (
    *("GuardOnDataDependentSymNode", "DataDependentOutputException", "UserError"),
    *("DynamicOutputShapeException", "PendingUnbackedSymbolNotFound"),
)


@contextmanager
def _refused_for_values() -> Iterator[None]:
    """Say it in one way where the code asks for the value of a tensor."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ not in _FOR_VALUES and _TO_NUMPY not in str(error):
            raise
        raise of_values(raised_at(error)) from error


def of_values(loc: Loc | None) -> UsageError:
    """The error of code that depends on the values of tensors."""
    return UsageError(
        "SW_TORCH_VALUES",
        "a compiled step requires code that does not depend on values of tensors, got one that asks"
        " for them: an `if`, a loop, `.item()`, `int(x)`, or how many rows a mask selects",
        loc,
        "take torch.where or torch.cond for a branch, a fixed number of rows for a selection, one"
        " variable for a mask that is used twice",
    )


def _refuse_types(graph: torch.fx.GraphModule) -> None:
    """Raise UsageError for complex numbers, at the line that makes them."""
    for node, _ in operators(graph):
        with at_line(node):
            made = node.meta.get("val")
            for part in made if isinstance(made, list | tuple) else (made,):
                if hasattr(part, "dtype"):
                    numpy_type(part.dtype)


def _stop_gradients(graph: torch.fx.GraphModule) -> None:
    """Detach what blocks without gradients return: the blocks are inlined later, and nothing else
    says what `torch.no_grad` said."""
    import torch

    wrap = torch.ops.higher_order.wrap_with_set_grad_enabled
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target is not wrap or node.args[0]:
            continue
        for part in list(node.users):
            with graph.graph.inserting_after(part):
                held = graph.graph.call_function(torch.ops.aten.detach.default, (part,))
            held.meta = dict(part.meta)
            part.replace_all_uses_with(
                held, delete_user_cb=lambda user, held=held: user is not held
            )
    for _, child in graph.named_children():
        if isinstance(child, torch.fx.GraphModule):
            _stop_gradients(child)
    graph.recompile()


_PRODUCTS = {"mm.default": 0, "addmm.default": 1}
"""Products of matrices -> the place of what has the rows."""
_VIEWS = ("view.default", "reshape.default", "_unsafe_view.default")


def _take_rows_apart(graph: torch.fx.Graph) -> None:
    """Multiply samples and positions as they are, where code merges them to the rows of a matrix
    and takes them apart behind the product (`Conv1D` of transformers): merged, ranks that share
    positions would have to gather them. The product's row takes more than two dims, too."""
    for node in list(graph.nodes):
        place = _PRODUCTS.get(row_name(node.target))
        merged = node.args[place] if place is not None else None
        if merged is None or row_name(merged.target) not in _VIEWS:
            continue
        rows = merged.args[0].meta["val"].shape
        if list(unknown_of([merged.args[0].meta["val"], node.meta["val"]])):
            continue
        made = (*rows[:-1], node.meta["val"].shape[-1])
        is_apart = [
            row_name(u.target) in _VIEWS and u.meta["val"].shape == made for u in node.users
        ]
        if merged.meta["val"].shape[-1] != rows[-1] or not is_apart or not all(is_apart):
            continue
        views = list(node.users)
        node.update_arg(place, merged.args[0])
        node.meta["val"] = views[0].meta["val"]
        for view in views:
            view.replace_all_uses_with(node)
            graph.erase_node(view)


def operators(graph: torch.fx.GraphModule) -> Iterator[tuple[torch.fx.Node, Any]]:
    """Nodes that call an operator of ATen's, or of another library, and it, also in graphs below;
    without the markers of regions."""
    import torch

    for node in graph.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and str(node.target) not in MARKERS:
            yield node, node.target
    for _, child in graph.named_children():
        if isinstance(child, torch.fx.GraphModule):
            yield from operators(child)


def _decompositions(program: Any, done: set[Any]) -> dict[Any, Any]:
    """torch's decompositions of what has no row; the first time all that it does by itself, then
    those of what is left, and none where nothing is `done` that was not."""
    import torch
    from torch._decomp import get_decompositions  # long-standing, though not public

    missing = {op for _, op in operators(program.graph_module) if row_name(op) not in ATEN}
    if done and not missing - done:
        return {}
    table = {
        operator: function
        for operator, function in torch.export.default_decompositions().items()
        if row_name(operator) not in ATEN
    }
    found = get_decompositions(list(missing - table.keys()))
    is_first = not done
    done |= {None, *missing}
    return {**found, **table} if found or is_first else {}


_KINDS = {"PARAMETER": PARAMETER, "BUFFER": BUFFER, "CONSTANT_TENSOR": CONSTANT, "TOKEN": LITERAL}


def _kind(spec: Any) -> str:
    return LITERAL if hasattr(spec.arg, "value") else _KINDS.get(spec.kind.name, INPUT)


def _named(spec: Any) -> str:
    return str(spec.target or spec.arg.name)


def _result(spec: Any) -> str | None:
    if spec.kind.name == CHANGED:
        return str(spec.target)
    return None if spec.kind.name in EFFECTS else ""


def exported_of(program: torch.export.ExportedProgram) -> Exported:
    """What is needed of an exported program to evaluate it."""
    signature = program.graph_signature
    arguments = tuple((_kind(spec), _named(spec)) for spec in signature.input_specs)
    results = tuple(_result(spec) for spec in signature.output_specs)
    constants = {
        name: array_of(program.constants[name]) for kind, name in arguments if kind == CONSTANT
    }
    return Exported(program.graph_module, arguments, results, constants, program.call_spec.out_spec)
