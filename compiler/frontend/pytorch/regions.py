"""Parts of a module's code that have a gradient of their own making: what is inside of
`torch.utils.checkpoint.checkpoint` is computed again behind the forward pass, and a
`torch.autograd.Function` has a backward that its user wrote.

torch.export would trace through both as if they were nothing. While it runs they are replaced by
functions that put markers into the graph, operators without a meaning that survive whatever torch
does to a graph: one that what goes in passes (`enter`), one that what comes out passes (`leave`),
and in between, for a backward, one that makes the gradients of what comes out (`cotangents`), from
which the backward is traced into the same graph. Nodes between two markers, in the order in which
they were traced, are the region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright.compiler.frontend.pytorch.operators.selections import Selected, of_rows
from shardwright.compiler.frontend.pytorch.places import at_line

if TYPE_CHECKING:
    import torch

LIBRARY = "shardwright"
ENTER, COTANGENTS, LEAVE = (f"{LIBRARY}.{name}" for name in ("enter", "cotangents", "leave"))
MARKERS = {f"{name}.default" for name in (ENTER, COTANGENTS, LEAVE)}
CHECKPOINT, FUNCTION = "checkpoint", "function"
"""Kinds of regions; the name of one is its kind, a colon and a number."""


@cache
def _markers() -> Any:
    """Declare the markers; `leave` takes what comes out, the gradients of what went in, and which
    of what went in these are of."""
    import torch

    library = torch.library.Library(LIBRARY, "FRAGMENT")
    library.define("enter(Tensor[] inputs, str name) -> Tensor[]")
    library.define("cotangents(Tensor[] outputs, str name) -> Tensor[]")
    library.define("leave(Tensor[] outputs, Tensor[] gradients, int[] of, str name) -> Tensor[]")

    def copies(tensors: Any, *_: Any) -> Any:
        return [tensor.clone() for tensor in tensors]

    for name in ("enter", "cotangents", "leave"):
        library.impl(name, copies, "CompositeExplicitAutograd")
    return library  # whose end would take the declarations back


@contextmanager
def kept() -> Iterator[None]:
    """Keep regions in what is exported meanwhile."""
    import torch
    from torch.utils import checkpoint as module

    _markers()
    numbers = count()
    with ExitStack() as stack:
        apply = torch.autograd.Function.__dict__["apply"]
        stack.callback(setattr, torch.autograd.Function, "apply", apply)
        torch.autograd.Function.apply = classmethod(_function(apply, numbers))
        # What users import is a wrapper that calls what stands in this attribute (private, but so
        # in all of 2.x, torch/_compile.py): code that has the wrapper already gets ours too.
        wrapped = module.checkpoint.__wrapped__
        attribute = "__dynamo_disable"
        stack.callback(_restore, wrapped, attribute, getattr(wrapped, attribute, None))
        setattr(wrapped, attribute, _checkpoint(numbers))
        yield


def _restore(holder: Any, attribute: str, value: Any) -> None:
    if value is None:
        delattr(holder, attribute)
    else:
        setattr(holder, attribute, value)


def _through(marker: str, value: Any, *rest: Any) -> tuple[Any, list[Any]]:
    """(a value whose tensors went through a marker, these tensors)."""
    import torch
    from torch.utils import _pytree

    leaves, structure = _pytree.tree_flatten(value)
    places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if not places:
        return value, []
    operator = getattr(getattr(torch.ops, LIBRARY), marker.removeprefix(f"{LIBRARY}."))
    marked = operator([leaves[n] for n in places], *rest)
    for n, tensor in zip(places, marked, strict=True):
        leaves[n] = tensor
    return _pytree.tree_unflatten(leaves, structure), list(marked)


_OPTIONS = (
    *("use_reentrant", "context_fn", "determinism_check", "debug", "preserve_rng_state"),
    "early_stop",
)
"""Of `checkpoint`: ways to do it, and what it stores nevertheless. Masks are those of the forward
pass in any case, since a key draws them."""


def _checkpoint(numbers: Iterator[int]) -> Callable[..., Any]:
    def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
        own = {key: value for key, value in kwargs.items() if key not in _OPTIONS}
        name = f"{CHECKPOINT}:{next(numbers)}"
        (args, own), entered = _through(ENTER, (args, own), name)
        result = function(*args, **own)
        return _through(LEAVE, result, [], [], name)[0] if entered else result

    return checkpoint


def _function(apply: Any, numbers: Iterator[int]) -> Callable[..., Any]:
    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        is_torchs = cls.__module__.split(".")[0] == "torch"
        is_traced = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        if is_torchs or not torch.is_grad_enabled() or not is_traced:
            return apply.__func__(cls, *args, **kwargs)
        return _with_backward(cls, args, kwargs, f"{FUNCTION}:{next(numbers)}")

    return applied


def _with_backward(cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """Call a function's forward, and trace its backward behind it."""
    import inspect

    import torch

    class Context(torch.autograd.function.FunctionCtx):  # type: ignore[misc]
        to_save: Sequence[Any] = ()
        non_differentiable: Sequence[Any] = ()
        materialize_grads = True

        @property
        def saved_tensors(self) -> tuple[Any, ...]:
            return tuple(self.to_save)

    # a function either takes the context itself, or has it set up afterwards
    has_setup = cls.setup_context is not torch.autograd.Function.setup_context
    if has_setup:
        bound = inspect.signature(cls.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        args, kwargs = bound.args, bound.kwargs
    context = Context()
    context.needs_input_grad = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    tensors = [n for n, a in enumerate(args) if isinstance(a, torch.Tensor)]
    args = list(args)
    for n, tensor in zip(
        tensors, _through(ENTER, [args[n] for n in tensors], name)[1], strict=True
    ):
        args[n] = tensor
    result = cls.forward(*args, **kwargs) if has_setup else cls.forward(context, *args, **kwargs)
    if has_setup:
        cls.setup_context(context, tuple(args), result)
    results = result if isinstance(result, tuple) else (result,)
    given = iter(_through(COTANGENTS, list(results), name)[1])
    with torch.no_grad():  # `once_differentiable` asks for it
        gradients = cls.backward(
            context, *(next(given) if isinstance(r, torch.Tensor) else None for r in results)
        )
    every = gradients if isinstance(gradients, tuple) else (gradients,)
    of = [n for n, g in enumerate(every) if isinstance(g, torch.Tensor) and n in tensors]
    found = [every[n] for n in of]
    return _through(LEAVE, result, found, [tensors.index(n) for n in of], name)[0]


@dataclass(frozen=True, slots=True)
class Region:
    """Nodes between two markers, of a graph whose nodes are in order."""

    enter: torch.fx.Node
    nodes: Sequence[torch.fx.Node]
    leave: torch.fx.Node

    @property
    def kind(self) -> str:
        """What it is: `CHECKPOINT` or `FUNCTION`."""
        return str(self.enter.args[1]).partition(":")[0]

    @property
    def given(self) -> list[torch.fx.Node]:
        """Nodes before it whose values it uses, those that are marked first."""
        inside = {self.enter, *self.nodes}
        used = (n for node in (*self.nodes, self.leave) for n in node.all_input_nodes)
        return list(dict.fromkeys([*self.enter.args[0], *(n for n in used if n not in inside)]))

    @property
    def taken(self) -> list[torch.fx.Node]:
        """Nodes in it whose values are used behind it; what is marked is that of the marker."""
        inside = {*self.nodes, self.leave}
        return [n for n in self.nodes if any(user not in inside for user in n.users)]

    def halves(self) -> tuple[list[torch.fx.Node], torch.fx.Node, list[torch.fx.Node]]:
        """(nodes of the forward, the marker between, nodes of the backward) of a function."""
        places = (n for n, node in enumerate(self.nodes) if _is(node, COTANGENTS, self.enter))
        place = next(places)
        return list(self.nodes[:place]), self.nodes[place], list(self.nodes[place + 1 :])


def _is(node: torch.fx.Node, marker: str, enter: torch.fx.Node) -> bool:
    is_marker = str(node.target) == f"{marker}.default"
    return is_marker and node.args[-1] == enter.args[-1]


def region_of(nodes: Sequence[torch.fx.Node], first: int) -> Region:
    """The region that the node at a place enters."""
    enter = nodes[first]
    last = next(n for n in range(first, len(nodes)) if _is(nodes[n], LEAVE, enter))
    return Region(enter, nodes[first + 1 : last], nodes[last])


Known = dict[Any, Any]
Run = Callable[[Sequence[Any], Known], Any]
"""Evaluates nodes, given what is known of others, and adds what they are to that."""


def evaluated(region: Region, known: Known, run: Run) -> None:
    """Evaluate a region, and add what it is known by outside."""
    import jax

    arrays = [n for n in region.given if _is_array(known[n])]
    fixed = {n: known[n] for n in region.given if not _is_array(known[n])}
    values = [known[n] for n in arrays]
    others = region.taken

    def forward(values: Sequence[Any], nodes: Sequence[Any]) -> tuple[Any, Known]:
        inside = {**fixed, **dict(zip(arrays, values, strict=True))}
        inside[region.enter] = [inside[n] for n in region.enter.args[0]]
        run(nodes, inside)
        marked = [inside[n] for n in region.leave.args[0]]
        return (marked, [inside[n] for n in others if n in inside]), inside

    if region.kind == FUNCTION:
        if any(isinstance(value, Selected) for value in values):
            with at_line(region.enter):
                raise of_rows("a torch.autograd.Function")
        results, more = _own_gradient(region, arrays, forward, run)(*values)
    else:
        body = jax.checkpoint(lambda values: forward(values, region.nodes)[0])
        results, more = body(values)
    known[region.leave] = results
    known.update(zip(others, more, strict=False))


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _own_gradient(region: Region, arrays: Sequence[Any], forward: Any, run: Run) -> Any:
    """A region of a function, with its user's backward for its gradient."""
    import jax

    first, marker, second = region.halves()
    needed = {n for node in (*second, region.leave) for n in node.all_input_nodes} - set(second)

    function = jax.custom_vjp(lambda *values: forward(values, first)[0])

    def needed_of(inside: Known) -> list[Any]:
        return [n for n in inside if n in needed and _is_array(inside[n])]

    order: list[Any] = []  # of what is saved
    held: Known = {}  # what is no array, as sizes

    def kept_forward(*values: Any) -> Any:
        results, inside = forward(values, first)
        order[:] = needed_of(inside)
        held.update((n, v) for n, v in inside.items() if n in needed and not _is_array(v))
        return results, ([inside[n] for n in order], values)

    def backward(rest: Any, cotangents: Any) -> Any:
        saved, values = rest
        inside: Known = {**held, **dict(zip(order, saved, strict=True))}
        marked = marker.args[0]
        inside[marker] = [
            _dense(cotangent, node) for cotangent, node in zip(cotangents[0], marked, strict=True)
        ]
        run(second, inside)
        _, gradients, of, _ = region.leave.args
        found: Known = {}
        for place, gradient in zip(of, gradients, strict=True):
            node = region.enter.args[0][place]  # which may have gone in twice
            own = inside[gradient]
            found[node] = found[node] + own if node in found else own
        return tuple(_of_type(found.get(n, 0), v) for n, v in zip(arrays, values, strict=True))

    function.defvjp(kept_forward, backward)
    return function


def _dense(cotangent: Any, node: torch.fx.Node) -> Any:
    """A cotangent as the backward takes it: zeros of a result that has no gradient."""
    import jax
    import jax.numpy as jnp

    from shardwright.compiler.frontend.pytorch.types import numpy_type

    if cotangent.dtype == jax.dtypes.float0:
        return jnp.zeros(cotangent.shape, numpy_type(node.meta["val"].dtype))
    return cotangent


def _of_type(gradient: Any, value: Any) -> Any:
    """A gradient in the type and shape of a value."""
    import jax
    import jax.numpy as jnp

    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return np.zeros(value.shape, jax.dtypes.float0)
    return jnp.broadcast_to(jnp.asarray(gradient, value.dtype), value.shape)
