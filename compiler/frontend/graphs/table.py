"""The table of a form: an operator, and the release from which it holds -> its function.

A row takes its `Call` and the operands: arrays of NumPy where their values are known, of JAX where
they are not, None where they are left out. A row that `folds` is written for both libraries
(`call.xp`), so that what is known stays known. Operands that are `static` are always known. A
result becomes the type of the first operand, unless the row has a type of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwright.compiler.frontend.graphs.errors import unfit
from shardwright.compiler.frontend.graphs.graph import Graph, Node

Function = Callable[..., Any]
MOST_FOLDED = 65536
"""Elements of the largest result that is computed while a graph is traced (our choice: shapes and
masks of small blocks, no weights)."""


@dataclass(frozen=True, slots=True)
class Label:
    """A label that a graph is trained by: its shape and type, and how many classes it names, 0
    where it is no class."""

    shape: tuple[int, ...]
    dtype: Any
    classes: int = 0


@dataclass(frozen=True, slots=True)
class Training:
    """What nodes say while a training step is traced: losses, each a sum over samples; labels that
    are not given, and new values of weights, by name."""

    losses: list[Any] = field(default_factory=list)
    labels: dict[str, Label] = field(default_factory=dict)
    changed: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Call:
    """A node that is computed: `xp` is the library that its row takes, `run` computes a graph of
    it from its inputs; `training` is None where nothing is trained."""

    node: Node
    opset: int
    xp: Any
    run: Callable[[Graph, Sequence[Any]], list[Any]]
    training: Training | None = None

    @property
    def count(self) -> int:
        """How many results are asked for."""
        return len(self.node.outputs)

    def wants(self, place: int) -> bool:
        """Whether a result is used, by its place."""
        return place < self.count and bool(self.node.outputs[place])

    def _get(self, name: str, default: Any, kinds: type | tuple[type, ...], what: str) -> Any:
        value = self.node.attributes.get(name)
        value = default if value is None else value
        if value is not None and not isinstance(value, kinds):
            raise unfit(f"an attribute {name} that is {what}", repr(value)[:60])
        return value

    def integer(self, name: str, default: int = 0) -> int:
        """A whole number among the attributes."""
        return int(self._get(name, default, int, "a whole number"))

    def number(self, name: str, default: float = 0.0) -> float:
        """A number among the attributes."""
        return float(self._get(name, default, (int, float), "a number"))

    def text(self, name: str, default: str = "") -> str:
        """A text among the attributes."""
        return str(self._get(name, default, str, "a text"))

    def ints(self, name: str) -> tuple[int, ...] | None:
        """A list of whole numbers among the attributes; None where it is left out."""
        found = self._get(name, None, tuple, "a list of whole numbers")
        if found is not None and not all(isinstance(each, int) for each in found):
            raise unfit(f"an attribute {name} that is a list of whole numbers", repr(found)[:60])
        return None if found is None else tuple(found)

    def graph(self, name: str) -> Graph:
        """A graph among the attributes. Raises ImportRuleError without."""
        found = self._get(name, None, Graph, "a graph")
        if found is None:
            raise unfit(f"an attribute {name} that is a graph", "none")
        return found  # type: ignore[no-any-return]

    def flag(self, name: str, default: bool = False) -> bool:
        """Yes or no among the attributes, a whole number in some forms."""
        return bool(self.integer(name, default))

    def one_of(self, name: str, default: str, *words: str) -> str:
        """A text that is one of some words."""
        found = self.text(name, default)
        if found not in words:
            raise unfit(f"an attribute {name} of {', '.join(words)}", repr(found)[:60])
        return found

    def library(self, shape: Sequence[int]) -> Any:
        """The library for a result of a shape that operands say nothing of: a large one is left to
        the machine."""
        import jax.numpy as jnp

        size = 1
        for dim in shape:
            if dim < 0:
                raise unfit("a shape without negative dims", str(list(shape)))
            size *= dim
        return self.xp if size <= MOST_FOLDED else jnp


@dataclass(frozen=True, slots=True)
class Row:
    """A row; `until` is the first opset without the operator, 0 where there is none.

    `frozen` are operands that training does not change by gradients, `labels` such as only training
    has. `picks` are the places of indices and of the table that they pick rows of. A node that
    `is_loss` says in training what is minimised.
    """

    operator: str
    since: int
    function: Function
    until: int = 0
    static: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    labels: tuple[int, ...] = ()
    picks: tuple[int, int] | None = None
    is_loss: bool = False
    folds: bool = False
    has_own_type: bool = False


class Operators:
    """Rows by operator, and of each by opset, from `first` on. Raises KeyError for two of one
    opset."""

    def __init__(self, first: int = 1) -> None:
        self._first = first
        self._rows: dict[str, list[Row]] = {}

    def row(
        self, *names: str, since: int | None = None, **rest: Any
    ) -> Callable[[Function], Function]:
        """Decorate a function that is the row of some operators; `rest` as of `Row`."""

        def added(function: Function) -> Function:
            for name in names:
                self.add(Row(name, self._first if since is None else since, function, **rest))
            return function

        return added

    def rows(self, functions: Mapping[str, Function], **rest: Any) -> None:
        """A function per operator."""
        for name, function in functions.items():
            self.row(name, **rest)(function)

    def add(self, row: Row) -> None:
        """Take a row."""
        rows = self._rows.setdefault(row.operator, [])
        if any(other.since == row.since for other in rows):
            raise KeyError(f"operator {row.operator} has two rows from opset {row.since}")
        rows.append(row)
        rows.sort(key=lambda each: each.since)

    def find(self, operator: str, opset: int) -> Row | None:
        """The row of an operator in a release of the operators."""
        rows = [row for row in self._rows.get(operator, ()) if row.since <= opset]
        return rows[-1] if rows and not 0 < rows[-1].until <= opset else None

    def __iter__(self) -> Iterator[Row]:
        for name in sorted(self._rows):
            yield from self._rows[name]


def is_known(value: Any) -> bool:
    """Whether the values of an operand are known."""
    return value is None or isinstance(value, np.ndarray)


def axis_of(axis: int, rank: int) -> int:
    """An axis counted from the front. Raises ImportRuleError for one that is not there."""
    if not -rank <= axis < rank:
        raise unfit(f"an axis from {-rank} to {rank - 1}", str(axis))
    return axis % rank


def axes_of(axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Axes counted from the front, each once."""
    found = tuple(axis_of(int(axis), rank) for axis in axes)
    if len(set(found)) < len(found):
        raise unfit("axes that are named once", str(list(axes)))
    return found
