"""`sort`: the comparator region becomes keys.

A comparator compares the two elements of one operand, or of several in turn: less in the first, or
equal in the first and less in the rest. Around the elements JAX writes selects that make zeros and
NaNs equal; they turn the total order of the comparison into the numeric one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright.compiler.frontend.rules.registry import RefusedError, imports, refuse
from shardwright.compiler.ir.ops import SliceAttrs, SortAttrs
from shardwright.compiler.ir.types import Value

if TYPE_CHECKING:
    from shardwright.compiler.frontend.importer import Site

_SWAPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}


@dataclass(frozen=True, slots=True)
class _Element:
    """One side of a comparison: the left or right element of an operand, zeros and NaNs made equal
    or not.
    """

    operand: int
    is_right: bool
    is_numeric: bool


@imports("stablehlo.sort")
def sort(site: Site) -> Sequence[Value]:
    """Every sort is stable: a comparator with LE means the same as with LT."""
    block = site.op.regions[0].blocks[0]
    (result,) = list(block.operations)[-1].operands
    keys = _Comparator(site, block).keys(result)
    return site.emit("sort", site.operands, SortAttrs(site.int("dimension"), keys)).results


def approx_top_k(site: Site) -> Sequence[Value]:
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
    (result,) = list(block.operations)[-1].operands
    ((operand, direction, _),) = _Comparator(site, block).keys(result)
    attrs = SortAttrs(dim, ((operand, direction, "total"),))
    ordered = site.emit("sort", site.operands[:2], attrs).results
    shape = ordered[0].type.shape
    limit = tuple(count if d == dim else n for d, n in enumerate(shape))
    cut = SliceAttrs((0,) * len(shape), limit, (1,) * len(shape))
    return [site.emit("slice", (v,), cut).result for v in ordered]


class _Comparator:
    """Reads one comparator block."""

    def __init__(self, site: Site, block: Any) -> None:
        self.site, self.block = site, block
        self.arguments = {a: i for i, a in enumerate(block.arguments)}

    def keys(self, value: Any) -> tuple[tuple[int, str, str], ...]:
        """Keys of "less in the first, or equal in it and `keys` of the rest"."""
        op = self._producer(value)
        if op is not None and op.name == "stablehlo.compare":
            return (self._less(op),)
        if op is not None and op.name == "stablehlo.or":
            for first, rest in (op.operands, reversed(list(op.operands))):
                less, both = self._producer(first), self._producer(rest)
                if less is not None and both is not None and both.name == "stablehlo.and":
                    return self._lexicographic(less, both)
        raise self._refused(op)

    def _lexicographic(self, less: Any, both: Any) -> tuple[tuple[int, str, str], ...]:
        if less.name != "stablehlo.compare":
            raise self._refused(less)
        head = self._less(less)
        for equal, rest in (both.operands, reversed(list(both.operands))):
            op = self._producer(equal)
            if op is not None and op.name == "stablehlo.compare" and self._direction(op) == "EQ":
                left, right = (self._element(v) for v in op.operands)
                if left.operand == right.operand == head[0] and left.is_right != right.is_right:
                    return (head, *self.keys(rest))
        raise self._refused(both)

    def _less(self, op: Any) -> tuple[int, str, str]:
        direction = self._direction(op)
        left, right = (self._element(v) for v in op.operands)
        paired = left.operand == right.operand and left.is_right != right.is_right
        if direction not in _SWAPPED or not paired or left.is_numeric != right.is_numeric:
            raise self._refused(op)
        if left.is_right:
            direction = _SWAPPED[direction]
        is_float = self.site.operands[left.operand].type.dtype.is_float
        is_total = "TOTALORDER" in str(op.attributes.get("compare_type", ""))
        order = "numeric" if left.is_numeric or (is_float and not is_total) else "total"
        return (left.operand, direction[0] + "T", order)

    def _element(self, value: Any) -> _Element:
        if value in self.arguments:
            number = self.arguments[value]
            return _Element(number // 2, bool(number % 2), False)
        source = self._cleaned(self._cleaned(value, "NE"), "EQ")
        if source not in self.arguments:
            raise self._refused(self._producer(value))
        found = self._element(source)
        return _Element(found.operand, found.is_right, True)

    def _cleaned(self, value: Any, direction: str) -> Any:
        """x behind select(x EQ 0, 0, x), or behind select(x NE x, NaN, x)."""
        op = self._producer(value)
        if op is None or op.name != "stablehlo.select":
            return value
        choice, constant, source = op.operands
        test = self._producer(choice)
        number = self._constant(constant)
        wanted = 0.0 if direction == "EQ" else np.nan
        matches = number is not None and np.array_equal(number, wanted, equal_nan=True)
        if test is None or test.name != "stablehlo.compare" or not matches:
            raise self._refused(op)
        if self._direction(test) != direction:
            raise self._refused(test)
        return source

    def _constant(self, value: Any) -> np.ndarray | None:
        op = self._producer(value)
        if op is None or op.name not in ("stablehlo.constant", "sdy.constant"):
            return None
        return np.asarray(op.attributes["value"].get_splat_value().value)

    def _direction(self, op: Any) -> str:
        return str(op.attributes["comparison_direction"]).removesuffix(">").split()[-1]

    def _producer(self, value: Any) -> Any:
        return self.site.block_producer(self.block, value)

    def _refused(self, op: Any) -> RefusedError:
        what = "an element itself" if op is None else op.name.removeprefix("stablehlo.")
        return RefusedError(
            "NCC_EVRF001",
            "sort requires a comparator that compares operands one after the other, got one with"
            f" {what}",
            "sort by jnp.sort, jnp.argsort or lax.sort with num_keys",
        )
