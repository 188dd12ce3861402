"""Rewrites of a kernel for work in row tiles.

`defer_scaling` moves a product with (or a quotient by) a value that does not span the summed iter
dim from in front of a contraction to behind it, where fewer elements are left: (p / l) v = (p v) /
l. The rounding of a short operand moves with it, so results differ within its unit in the last
place; types whose exponent is shorter than fp32's are left alone. `columns_first` takes a sum over
rows and columns in two steps: a row tile has all columns of its rows, but only some rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shardwright.compiler.codegen.domain import Domain, OfRoots, Rewriting, Value
from shardwright.compiler.dtypes import DType

_WIDE = (DType.F32, DType.BF16)  # exponents of 8 bits: nothing overflows that did not before


def columns_first(domain: Domain, roots: Iterable[int], row: int, inner: frozenset[int]) -> OfRoots:
    """(domain with sums over rows and `inner` iter dims in two steps, inner first, new `roots`)."""
    return _InSteps(domain, roots, row, inner).rewritten()


def wide_products(domain: Domain, roots: Iterable[int], row: int, iter_dim: int) -> OfRoots:
    """(domain with contractions of rows over `iter_dim` in fp32, rounded once, new `roots`)."""
    return _Widened(domain, roots, row, iter_dim).rewritten()


def defer_scaling(domain: Domain, roots: Iterable[int]) -> OfRoots:
    """(rewritten domain, numbers of `roots` in it)."""
    return _Deferred(domain, roots).rewritten()


class _OfRoots(Rewriting):
    """A rewriting of what `roots` need; values of another nest of the kernel stay as they are."""

    def __init__(self, domain: Domain, roots: Iterable[int]) -> None:
        super().__init__(domain)
        self.roots = tuple(roots)
        inside = domain.slice(self.roots)
        self.inside, self.users = set(inside), domain.users(inside)

    def rewritten(self) -> OfRoots:
        return self.run(), tuple(self.number[s] for s in self.roots)

    def made(self, n: int, value: Value) -> int:
        return self.changed(n, value) if n in self.inside else self.add(value)

    def changed(self, n: int, value: Value) -> int:
        raise NotImplementedError

    def converted(self, number: int, dtype: DType) -> int:
        value = self.values[number]
        if value.dtype is dtype:
            return number
        return self.add(Value("convert", (number,), value.iter_dims, dtype))


def _is_sum(value: Value) -> bool:
    return value.op == "reduce" and value.attrs["kind"] == "add" and value.dtype.is_float


class _InSteps(_OfRoots):
    def __init__(
        self, domain: Domain, roots: Iterable[int], row: int, inner: frozenset[int]
    ) -> None:
        super().__init__(domain, roots)
        self.row, self.inner = row, inner

    def changed(self, n: int, value: Value) -> int:
        """The value, or the sum over `inner` iter dims and others that it is, in two steps."""
        if all(self.users[i] == [n] for i in self.old.values[n].inputs):
            value = self._merged(value)
        columns, others = value.over & self.inner, value.over - self.inner
        sums = value.op == "contract" or _is_sum(value)
        spans = [self.values[i].iter_dims for i in value.inputs]
        if not (columns and others and sums and all(self.row in s for s in spans)):
            return self.add(value)
        source = value.inputs[0]
        if value.op == "contract":
            source = self.add(Value("multiply", value.inputs, spans[0] | spans[1], DType.F32))
        add = {"kind": "add"}
        iter_dims = self.values[source].iter_dims - columns
        line = self.add(Value("reduce", (source,), iter_dims, DType.F32, over=columns, attrs=add))
        iter_dims -= others
        return self.add(Value("reduce", (line,), iter_dims, value.dtype, over=others, attrs=add))

    def _merged(self, value: Value) -> Value:
        """`value`, which alone reads its inputs, as one sum when it is a sum of sums."""
        while _is_sum(value):
            source = self.values[value.inputs[0]]
            if not _is_sum(source) or source.dtype is not DType.F32:
                break
            value = replace(value, inputs=source.inputs, over=value.over | source.over)
        return value


class _Widened(_OfRoots):
    def __init__(self, domain: Domain, roots: Iterable[int], row: int, iter_dim: int) -> None:
        super().__init__(domain, roots)
        self.row, self.iter_dim = row, iter_dim

    def changed(self, n: int, value: Value) -> int:
        mine = (
            value.op == "contract" and self.iter_dim in value.over and self.row in value.iter_dims
        )
        if not mine:
            return self.add(value)
        return self.converted(self.add(replace(value, dtype=DType.F32)), value.dtype)


class _Deferred(_OfRoots):
    def changed(self, n: int, value: Value) -> int:
        """The value, or the contraction it is with its scaling behind it."""
        for side in range(2) if value.op == "contract" else ():
            found = _scaling(self.old, self.users, n, self.old.values[n].inputs[side])
            if found is not None:
                source, scale, factor, dtype = found
                inputs = list(value.inputs)
                inputs[side] = self.converted(self.number[source], dtype)
                product = self.add(replace(value, inputs=tuple(inputs), dtype=DType.F32))
                by = (product, self.number[factor])
                scaled = self.add(Value(scale, by, value.iter_dims, DType.F32))
                return self.converted(scaled, value.dtype)
        return self.add(value)


def _scaling(
    domain: Domain, users: dict[int, list[int]], contract: int, operand: int
) -> tuple[int, str, int, DType] | None:
    """(source, multiply or divide, factor, element type) of an operand that only this contraction
    reads, when the factor does not span the summed iter dims and less is left behind them.
    """
    over, result = domain[contract].over, domain[contract].iter_dims
    value = domain[operand]
    dtype, reader = value.dtype, contract
    if value.op == "convert" and users[operand] == [reader]:
        operand, reader = value.inputs[0], operand
        value = domain[operand]
    if value.op not in ("multiply", "divide") or users[operand] != [reader]:
        return None
    a, b = value.inputs
    for source, factor in ((a, b),) if value.op == "divide" else ((a, b), (b, a)):
        scalar = domain[factor]
        fewer = not scalar.iter_dims & over and scalar.iter_dims and scalar.iter_dims <= result
        kept = domain[source].iter_dims == value.iter_dims
        wide = dtype in _WIDE and domain[contract].dtype in _WIDE
        if fewer and kept and wide and domain.points(result) < domain.points(value.iter_dims):
            return source, value.op, factor, dtype
    return None
