"""Sizes of a graph that only data know: which of them are equal, and which masks are the same.

torch gives every call that selects a symbol of its own, `u0`, and states beside it which sizes the
code took for equal. Two masks that are computed alike are one mask here, and so are their sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardwright.compiler.frontend.pytorch.operators.registry import row_name

if TYPE_CHECKING:
    import torch


_VIEWS = {
    *("view.default", "reshape.default", "_unsafe_view.default", "flatten.using_ints"),
    *("unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims", "clone.default"),
    *("contiguous.default", "detach.default", "alias.default", "unflatten.int"),
}
"""Operators whose result has the elements of their first argument, in order."""


def unknown_of(said: Any) -> Iterator[Any]:
    """Sizes in the shapes of torch's results that are known only when a program runs."""
    for part in said if isinstance(said, list | tuple) else (said,):
        if isinstance(part, list | tuple):
            yield from unknown_of(part)
        elif hasattr(part, "dtype"):
            yield from (size for size in part.shape if not isinstance(size, int))


class Sizes:
    """What a graph says of sizes that only data know."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._alike = _Alike()
        self._known: dict[Any, Any] = {}
        masks: dict[str, Any] = {}
        for node in graph.nodes:
            self._alike.add(node)
            for mask, size in _selects(node):
                first = masks.setdefault(self.elements(mask), expression(size))
                self._take_equal(expression(size), first)
        for node in graph.nodes:
            if row_name(node.target) == "_assert_scalar.default":
                stated = node.args[0]
                if getattr(stated, "target", None) is operator.eq:
                    self._take_equal(*(expression(_number(part)) for part in stated.args))

    def of(self, size: Any) -> Any:
        """A size as a number where it is one, or an expression that is the same for equal ones."""
        found = expression(size)
        while not isinstance(found, int) and (news := found.xreplace(self._known)) != found:
            found = news
        return int(found) if isinstance(found, int) or found.is_Integer else found

    def elements(self, node: torch.fx.Node) -> str:
        """A name of what a node has, the same for nodes that have the same elements in order."""
        return self._alike.elements(node)

    def _take_equal(self, one: Any, other: Any) -> None:
        """Two expressions are one size: what follows for a symbol of the first."""
        one, other = self.of(one), self.of(other)
        for a, b in ((one, other), (other, one)):
            if isinstance(a, int) or a == b:
                continue
            factor, symbol = a.as_coeff_Mul()
            ratio = b / factor if not isinstance(b, int) or b % factor == 0 else None
            if symbol.is_Symbol and ratio is not None and symbol not in _symbols(ratio):
                self._known[symbol] = ratio if not isinstance(b, int) else b // factor
                return


class _Alike:
    """Numbers of values: the same for what is computed alike."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._exact: dict[Any, int] = {}
        self._flat: dict[Any, int] = {}

    def add(self, node: torch.fx.Node) -> None:
        exact: Any = node.name
        if node.op == "call_function" and not _is_drawn(node):
            exact = (str(node.target), self._key(node.args), self._key(node.kwargs))
        self._exact[node] = self._number(exact)
        self._flat[node] = self._exact[node]
        first = node.args[0] if node.args else None
        if first not in self._flat:
            return
        if row_name(node.target) in _VIEWS:
            self._flat[node] = self._flat[first]
        elif is_pointwise(node) and node.all_input_nodes == [first]:
            rest = self._key(node.args[1:]), self._key(node.kwargs)
            self._flat[node] = self._number((str(node.target), self._flat[first], rest))

    def elements(self, node: torch.fx.Node) -> str:
        return f"mask {self._flat[node]}"

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _key(self, part: Any) -> Any:
        if isinstance(part, list | tuple):
            return tuple(map(self._key, part))
        if isinstance(part, dict):
            return tuple((name, self._key(each)) for name, each in sorted(part.items()))
        known = self._exact.get(part) if hasattr(part, "meta") else None
        return (type(part).__name__, repr(part)) if known is None else known


def _selects(node: torch.fx.Node) -> Iterator[tuple[torch.fx.Node, Any]]:
    """(a mask of True and False, the number of its elements that are True) of a node."""
    import torch

    name, said = row_name(node.target), node.meta.get("val")
    if name == "nonzero.default" and _dtype(node.args[0]) is torch.bool:
        yield node.args[0], said.shape[0]
    if name == "index.Tensor":
        given = [n for n, mask in enumerate(node.args[1]) if mask is not None]
        mask = node.args[1][given[0]]
        if len(given) == 1 and _dtype(mask) is torch.bool:
            yield mask, said.shape[given[0]]


def _dtype(node: torch.fx.Node) -> Any:
    return getattr(node.meta.get("val"), "dtype", None)


def _symbols(found: Any) -> Any:
    return getattr(found, "free_symbols", ())


def expression(size: Any) -> Any:
    """A size as torch's expression of symbols."""
    node = getattr(size, "node", None)
    return size if node is None else node.expr


def _number(part: Any) -> Any:
    return part.meta["val"] if hasattr(part, "meta") else part


def _tagged(node: torch.fx.Node, tag: str) -> bool:
    import torch

    return getattr(torch.Tag, tag) in getattr(node.target, "tags", ())


def is_pointwise(node: torch.fx.Node) -> bool:
    """Whether torch says of an operator that it takes elements one by one."""
    return _tagged(node, "pointwise") and not _is_drawn(node)


def _is_drawn(node: torch.fx.Node) -> bool:
    return _tagged(node, "nondeterministic_seeded")
