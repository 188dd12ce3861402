"""What rules that write an op out in several of ours make them with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.ops import BitcastConvertAttrs, ConstantAttrs
from shardwright.compiler.ir.types import Op, TensorType, Value, tensor_type

if TYPE_CHECKING:
    from shardwright.compiler.frontend.importer import Site


class Maker(Builder):
    """Adds ops where a site stands; what their type rules refuse is refused there."""

    def __init__(self, site: Site) -> None:
        super().__init__(loc=site.loc)
        self._site = site

    def append(self, op: Op) -> tuple[Value, ...]:
        """Add an op made elsewhere."""
        self._site.importer.append(self._site.scope, op)
        return op.results

    def op(self, name: str, *operands: Value, attrs: Any = None) -> Value:
        """Add an op with one result."""
        return self._site.emit(name, operands, attrs).result

    def splat(self, number: float | np.ndarray, type: TensorType) -> Value:
        """`number` for every element of `type`."""
        return self.op("constant", attrs=ConstantAttrs.full(number, type))

    def dense(self, array: np.ndarray, dtype: DType) -> Value:
        """A constant that holds every element of `array`, equal ones too."""
        data = array.astype(dtype.numpy).tobytes()
        return self.op("constant", attrs=ConstantAttrs(data, tensor_type(array.shape, dtype)))

    def with_number(self, name: str, a: Value, number: float) -> Value:
        """An op of a value and a splat of its type."""
        return self.op(name, a, self.splat(number, a.type))

    def convert(self, a: Value, dtype: DType) -> Value:
        """`a` as `dtype`; itself where it is of that type."""
        return a if a.type.dtype is dtype else super().convert(a, dtype)

    def bitcast(self, a: Value, dtype: DType) -> Value:
        """The bits of `a` as a type of the same width."""
        if a.type.dtype is dtype:
            return a
        return self.op("bitcast_convert", a, attrs=BitcastConvertAttrs(dtype))

    def spread_back(self, a: Value, dims: Sequence[int], like: Value) -> Value:
        """`a`, which lacks `dims` of `like`, the same along them."""
        kept = [d for d in range(like.type.rank) if d not in dims]
        return self.broadcast(a, like.type.shape, kept)

    def first(self, a: Value, dim: int, count: int) -> Value:
        """The first `count` elements along a dim."""
        limit = tuple(count if d == dim else n for d, n in enumerate(a.type.shape))
        return self.slice(a, (0,) * a.type.rank, limit)
