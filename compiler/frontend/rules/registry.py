"""The table of import rules: which function turns which StableHLO op into ops of our IR, the site
it gets, and how it refuses an op.

A rule makes ops at its `Site` (the MLIR op with its operands already converted) and returns one
value per result. Rules live in the files of this folder, named like those of `compiler/ir/ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from shardwright.compiler.diagnostics import ImportRuleError, Loc
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import BitcastConvertAttrs, ConstantAttrs
from shardwright.compiler.ir.types import Graph, Op, TensorType, Value, tensor_type
from shardwright.compiler.support.tables import entering

if TYPE_CHECKING:
    from shardwright.compiler.frontend.importer import Importer

Values = Sequence[Value]
"""What a rule returns: a value per result."""
Rule = Callable[["Site"], Values]
Check = Callable[["Site"], None]
"""Looks at an op before its rule does: refuses it, or changes the operands of the site. One of a
CHLO op, which is legalised before there are sites, gets the MLIR op and may only refuse."""

RULES: dict[str, Rule] = {}
imports = entering(RULES, "import rule")
REFUSALS: set[str] = set()
"""Names whose rule always refuses: it is there to say more than "not supported"."""


class RefusedError(Exception):
    """An op that cannot be imported; the importer adds its location."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint

    def at(self, loc: Loc | None, before: str = "") -> ImportRuleError:
        """The error to raise for the op at `loc`; `before` stands in front of the message."""
        return ImportRuleError(self.code, f"{before}{self}", loc, self.hint)


def refuse(code: str, message: str, hint: str = "") -> NoReturn:
    """Refuse the op being imported."""
    raise RefusedError(code, message, hint)


def refuses(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule that always refuses. Raises ValueError, as `imports`."""
    REFUSALS.update(names)
    return imports(*names)


@dataclass(slots=True)
class Capture:
    """A value a region reads from the enclosing scope: the value there, and its carry inside."""

    outer: Value
    inner: Value


@dataclass(slots=True, eq=False)
class Scope:
    """Values and ops of one region while it is built."""

    parent: Scope | None = None
    env: dict[Any, Value] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Site:
    """One MLIR op being imported: its converted operands, its attributes, and where its ops go."""

    importer: Importer
    scope: Scope
    op: Any
    operands: tuple[Value, ...]
    loc: Loc
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.op.name

    def emit(
        self,
        name: str,
        operands: Values,
        attrs: Any = None,
        regions: Sequence[Graph] = (),
    ) -> Op:
        """Append an op of our IR at this place. Refuses what its type rule refuses."""
        try:
            op = make_op(name, operands, attrs, regions, self.loc)
        except ValueError as error:
            refuse("NCC_EVRF064", str(error))
        self.importer.append(self.scope, op)
        return op

    def result_type(self, index: int = 0) -> TensorType:
        """The type of a result."""
        return self.importer.type_of(self.op.results[index].type)

    def result_types(self) -> list[TensorType]:
        """The types of all results."""
        return [self.result_type(i) for i in range(len(self.op.results))]

    @property
    def make(self) -> Maker:
        """Appends ops by what they compute."""
        return Maker(self)

    def optional(self, name: str) -> Any:
        """The MLIR attribute, or None."""
        return self.op.attributes.get(name)

    def decode(self, name: str, decoder: Callable[[Any], Any]) -> Any:
        """The attribute as `decoder` reads it, once per distinct attribute."""
        attribute = self.op.attributes[name]
        key = (self.name, name, attribute)
        cache = self.importer.attributes
        value = cache.get(key)
        if value is None:
            value = cache[key] = decoder(attribute)
        return value

    def ints(self, name: str) -> tuple[int, ...]:
        """An integer array attribute."""
        value: tuple[int, ...] = self.decode(name, tuple)
        return value

    def int(self, name: str) -> int:
        """An integer attribute."""
        return int(self.op.attributes[name].value)

    def constant(self, value: Value) -> np.ndarray | None:
        """The scalar a value always has, when it is a splat constant."""
        op = self.importer.scalars.get(value)
        while op is not None and op.name == "broadcast_in_dim":
            op = self.importer.scalars.get(op.operands[0])
        if op is None or op.name != "constant" or not op.attrs.is_splat:
            return None
        return np.asarray(op.attrs.array().flat[0])


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
