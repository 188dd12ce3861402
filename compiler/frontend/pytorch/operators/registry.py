"""The table of operators: ATen's name of an operator -> its function on JAX arrays.

A row is a function that takes what the operator takes, tensors as arrays, types as NumPy's, and
returns what it returns. It says nothing about layouts, devices and random generators, which are
taken away before. What it returns becomes the type that torch says (0-dimensional tensors promote
there otherwise than in JAX), so a row need not care.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

Row = Callable[..., Any]
_F = TypeVar("_F", bound=Row)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operator stands: what torch says its first result is, a source of keys, and whether
    its first argument lies in memory in the order of its elements."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    draw: Callable[[], Any]
    is_in_order: bool = True

    @property
    def key(self) -> Any:
        """A `jax.random.key` of this operator's own, another one in each step."""
        return self.draw()


def full_name(name: str) -> str:
    """The name of an operator with its overload: `relu` is `relu.default`."""
    return name if "." in name else f"{name}.default"


def row_name(operator: Any) -> str:
    """The name of an operator in `ATEN`, with that of its library where it is not ATen's; "" for
    what is no operator, as a branch."""
    return str(operator).removeprefix("aten.") if hasattr(operator, "_schema") else ""


class Operators:
    """Rows by name, `add.Tensor`; `relu` is `relu.default`. Raises KeyError for a second row."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}
        self._placed: set[str] = set()

    def row(self, *names: str, placed: bool = False) -> Callable[[_F], _F]:
        """Decorate a row; one that is `placed` takes its `Place` first."""

        def added(function: _F) -> _F:
            for name in names:
                self.add(name, function, placed)
            return function

        return added

    def add(self, name: str, function: Row, placed: bool = False) -> None:
        """Take `function` for an operator. Raises KeyError where it has a row."""
        full = full_name(name)
        if full in self._rows:
            raise KeyError(f"operator {full} has two rows")
        self._rows[full] = function
        if placed:
            self._placed.add(full)

    def rows(self, functions: Mapping[str, Row]) -> None:
        """Take one function per name."""
        for name, function in functions.items():
            self.add(name, function)

    def __contains__(self, name: str) -> bool:
        return full_name(name) in self._rows

    def __getitem__(self, name: str) -> Row:
        return self._rows[full_name(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def is_placed(self, name: str) -> bool:
        """Whether a row takes its `Place`."""
        return full_name(name) in self._placed


ATEN, HIGHER_ORDER = Operators(), Operators()
"""Rows of `torch.ops.aten` (those of another library have its name in front), and of
`torch.ops.higher_order`, whose rows take graphs as functions; `operators/__init__.py` loads the
files that fill them."""
