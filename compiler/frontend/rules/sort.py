"""`sort`: the comparator region becomes keys.

A comparator compares the two elements of one operand, or of several in turn: less in the first, or
equal in the first and less in the rest. Around the elements JAX writes selects that make zeros and
NaNs equal; they turn the total order of the comparison into the numeric one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.compiler.frontend.mlir import direction, producer, results_of
from shardwright.compiler.frontend.rules.fold import of_elements
from shardwright.compiler.frontend.rules.registry import RefusedError, Site, Values, imports, refuse
from shardwright.compiler.ir.ops import SortAttrs
from shardwright.compiler.ir.types import Value

_SWAPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}


@dataclass(frozen=True, slots=True)
class _Element:
    """The left or right element of an operand, zeros and NaNs made equal or not."""

    operand: int
    is_right: bool
    is_numeric: bool


@imports("stablehlo.sort")
def sort(site: Site) -> Values:
    """Every sort is stable: a comparator with LE means the same as with LT."""
    comparator = _Comparator(site, site.op.regions[0].blocks[0])
    keys = comparator.keys()
    operands = (*site.operands, *comparator.computed)
    ordered = site.emit("sort", operands, SortAttrs(site.int("dimension"), keys)).results
    return ordered[: len(site.operands)]


def approx_top_k(site: Site) -> Values:
    """The custom call of lax.approx_max_k and approx_min_k: exact, ties lowest index first."""
    config = site.op.attributes["mhlo.backend_config"]
    dim, count = (int(config[k].value) for k in ("reduction_dim", "top_k"))
    if len(site.operands) != 4 or not config["aggregate_to_topk"].value:
        refuse(
            "NCC_EHCA005",
            "custom call ApproxTopK requires one array with its indices and aggregate_to_topk",
            "leave aggregate_to_topk=True, or use lax.top_k",
        )
    name = site.op.attributes["called_computations"][0].value
    block = site.importer.functions[name].regions[0].blocks[0]
    ((operand, order, _),) = _Comparator(site, block).keys()
    attrs = SortAttrs(dim, ((operand, order, "total"),))
    ordered = site.emit("sort", site.operands[:2], attrs).results
    return [site.make.first(v, dim, count) for v in ordered]


class _Comparator:
    """Reads one comparator block."""

    def __init__(self, site: Site, block: Any) -> None:
        self.site = site
        self.block = block
        self.computed: list[Value] = []  # operands of ours: keys that the block makes of elements
        self.arguments = {a: i for i, a in enumerate(block.arguments)}
        (self.result,) = results_of(block)

    def keys(self) -> tuple[tuple[int, str, str], ...]:
        """The keys that the block compares by."""
        return self._keys(self.result)

    def _keys(self, value: Any) -> tuple[tuple[int, str, str], ...]:
        """Keys of "less in the first, or equal in it and `_keys` of the rest"."""
        op = producer(value)
        if op is not None and op.name == "stablehlo.compare":
            return (self._less(op),)
        if op is not None and op.name == "stablehlo.not":
            return (self._not_less(op),)
        if op is not None and op.name == "stablehlo.select":
            return self._chosen(op)
        if op is not None and op.name == "stablehlo.or":
            for first, rest in (op.operands, reversed(list(op.operands))):
                less, both = producer(first), producer(rest)
                if less is not None and both is not None and both.name == "stablehlo.and":
                    return self._lexicographic(less, both)
        raise _refused(op)

    def _chosen(self, op: Any) -> tuple[tuple[int, str, str], ...]:
        """Keys of a choice: the rest where equal in the first, else less in the first."""
        equal, less = producer(op.operands[0]), producer(op.operands[2])
        if less is None or less.name != "stablehlo.compare" or equal is None:
            raise _refused(op)
        head = self._less(less)
        if not self._is_equal(equal, head):
            raise _refused(op)
        return (head, *self._keys(op.operands[1]))

    def _not_less(self, op: Any) -> tuple[int, str, str]:
        """A comparison turned around: the same where each two elements have an order."""
        inner = producer(op.operands[0])
        if inner is None or inner.name != "stablehlo.compare":
            raise _refused(op)
        operand, order, kind = self._less(inner)
        if kind != "total":
            raise _refused(op)
        return operand, {"LT": "GT", "GT": "LT"}[order], kind

    def _is_equal(self, op: Any, head: tuple[int, str, str]) -> bool:
        """Whether `op` compares the two elements that `head` orders for equality."""
        if op.name != "stablehlo.compare" or _direction(op) != "EQ":
            return False
        left, right = (self._element(v) for v in op.operands)
        return left.operand == right.operand == head[0] and left.is_right != right.is_right

    def _lexicographic(self, less: Any, both: Any) -> tuple[tuple[int, str, str], ...]:
        if less.name != "stablehlo.compare":
            raise _refused(less)
        head = self._less(less)
        for equal, rest in (both.operands, reversed(list(both.operands))):
            op = producer(equal)
            if op is not None and self._is_equal(op, head):
                return (head, *self._keys(rest))
        raise _refused(both)

    def _less(self, op: Any) -> tuple[int, str, str]:
        order = _direction(op)
        if (made := self._made_key(*op.operands)) is not None:
            left, right = (_Element(made, bool(n), False) for n in range(2))
        else:
            left, right = (self._element(v) for v in op.operands)
        paired = left.operand == right.operand and left.is_right != right.is_right
        if order not in _SWAPPED or not paired or left.is_numeric != right.is_numeric:
            raise _refused(op)
        if left.is_right:
            order = _SWAPPED[order]
        is_float = (*self.site.operands, *self.computed)[left.operand].type.dtype.is_float
        is_total = "TOTALORDER" in str(op.attributes.get("compare_type", ""))
        kind = "numeric" if left.is_numeric or (is_float and not is_total) else "total"
        return (left.operand, order[0] + "T", kind)

    def _made_key(self, left: Any, right: Any) -> int | None:
        """The number of an operand of ours for what both sides compute of their elements alike;
        None for elements themselves, and where the sides are not alike.
        """
        one, other = producer(left), producer(right)
        if one is None or other is None or one.name == "stablehlo.select":
            return None
        if not self._alike(left, right):
            return None
        arrays = {a: self.site.operands[n // 2] for a, n in self.arguments.items() if not n % 2}
        key = of_elements(self.site, self.block, left, arrays)
        if key is None:
            return None
        self.computed.append(key)
        return len(self.site.operands) + len(self.computed) - 1

    def _alike(self, left: Any, right: Any) -> bool:
        """Whether `left` is made of left elements as `right` of the right ones."""
        if left in self.arguments or right in self.arguments:
            number = self.arguments.get(left, 1)
            return not number % 2 and self.arguments.get(right) == number + 1
        one, other = producer(left), producer(right)
        if one is None or other is None or one.name != other.name:
            return False
        same = _named(one) == _named(other)
        return same and all(map(self._alike, one.operands, other.operands))

    def _element(self, value: Any) -> _Element:
        if value in self.arguments:
            number = self.arguments[value]
            return _Element(number // 2, bool(number % 2), False)
        source = self._cleaned(self._cleaned(value, "NE"), "EQ")
        if source not in self.arguments:
            raise _refused(producer(value))
        found = self._element(source)
        return _Element(found.operand, found.is_right, True)

    def _cleaned(self, value: Any, wanted: str) -> Any:
        """x behind select(x EQ 0, 0, x), or behind select(x NE x, NaN, x)."""
        op = producer(value)
        if op is None or op.name != "stablehlo.select":
            return value
        choice, constant, source = op.operands
        test, number = producer(choice), _constant(constant)
        other = 0.0 if wanted == "EQ" else np.nan
        matches = number is not None and np.array_equal(number, other, equal_nan=True)
        if test is None or test.name != "stablehlo.compare" or not matches:
            raise _refused(op)
        if _direction(test) != wanted:
            raise _refused(test)
        return source


def _named(op: Any) -> dict[str, Any]:
    """The attributes of an op, but for marks of ours."""
    return {n: op.attributes[n] for n in op.attributes if not n.startswith("shardwright.")}


def _constant(value: Any) -> np.ndarray | None:
    op = producer(value)
    if op is None or op.name not in ("stablehlo.constant", "sdy.constant"):
        return None
    return np.asarray(op.attributes["value"].get_splat_value().value)


def _direction(op: Any) -> str:
    return direction(op.attributes["comparison_direction"])


def _refused(op: Any) -> RefusedError:
    what = "an element itself" if op is None else op.name.removeprefix("stablehlo.")
    return RefusedError(
        "NCC_EVRF001",
        "sort requires a comparator that compares operands one after the other, got one with"
        f" {what}",
        "sort by jnp.sort, jnp.argsort or lax.sort with num_keys",
    )
