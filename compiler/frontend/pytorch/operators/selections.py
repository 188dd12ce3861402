"""Arrays some of whose dims have a size that only data know: rows that a mask selects.

They stay where they are. A dim of the selected rows is as long as the mask, and the mask says which
positions count (`Selection`); torch's rows are those, in order. So an operator of single rows needs
nothing, one that reduces rows leaves the others out, and samples stay on the ranks that hold them.
What other positions hold is without meaning, but no NaN: neither value nor gradient of a row that
torch does not have may reach one that it has.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.compiler.diagnostics import UsageError

Sizes = Any
"""`sizes.Sizes`: a size as a number, or an expression of torch's symbols."""


def selected(given: str) -> UsageError:
    """The error of rows whose number depends on values."""
    return UsageError(
        "SW_TORCH_VALUES",
        f"a compiled step requires shapes that do not depend on values, got {given}",
        hint="take torch.where with all rows, or a fixed number of rows (topk)",
    )


def of_rows(name: str, why: str = "") -> UsageError:
    """The error of an operator that has no rule for rows of a mask."""
    called = name.removesuffix(".default")
    return selected(f"{called} of rows that a mask or nonzero selects{why}")


def is_mask(x: Any) -> bool:
    """Whether an index says True or False of each element."""
    return bool(jnp.issubdtype(getattr(x, "dtype", None) or int, jnp.bool_))


@dataclass(frozen=True, slots=True)
class Selection:
    """Which positions count; equal names have equal ones. `size` is torch's, an expression."""

    name: str
    size: Any
    live: Any  # bool [positions]


@dataclass(frozen=True, slots=True)
class Dim:
    """A dim whose positions are those of its factors, the last one fastest: selections, and
    numbers of positions that all count. `size` is torch's, an expression."""

    size: Any
    factors: tuple[Selection | int, ...]

    @property
    def key(self) -> tuple[str | int, ...]:
        """Equal for dims of which the same positions count."""
        return tuple(f if isinstance(f, int) else f.name for f in self.factors)

    @property
    def positions(self) -> int:
        """How many there are."""
        return math.prod(f if isinstance(f, int) else f.live.shape[0] for f in self.factors)

    @property
    def live(self) -> Any:
        """Which positions count: bool [positions]."""
        found = jnp.ones(1, bool)
        for factor in self.factors:
            own = jnp.ones(factor, bool) if isinstance(factor, int) else factor.live
            found = (found[:, None] & own).reshape(-1)
        return found

    @property
    def count(self) -> Any:
        """How many count, a traced number."""
        lives = (f if isinstance(f, int) else f.live for f in self.factors)
        return math.prod(n if isinstance(n, int) else jnp.sum(n, dtype=jnp.int32) for n in lives)


Dims = tuple[Dim | None, ...]
"""Of an array's dims; None is one of torch's size."""


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, slots=True)
class Selected:
    """An array with dims of a size that only data know; where no row is, `fill` stands, or
    anything if it is None."""

    array: Any
    dims: Dims
    fill: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array: a dim of rows has all positions."""
        return tuple(self.array.shape)

    @property
    def dtype(self) -> Any:
        """Of its elements."""
        return self.array.dtype

    @property
    def ndim(self) -> int:
        """How many dims it has."""
        return len(self.dims)

    @property
    def live(self) -> Any:
        """Which elements count, of a shape that the array's own broadcasts."""
        return live_of(self.dims)

    def filled(self, value: Any) -> Any:
        """The array with `value` where no row is."""
        if self.fill is not None and self.fill == value:
            return self.array
        return jnp.where(self.live, self.array, jnp.asarray(value, self.dtype))

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """JAX's parts of it: arrays, and what stands."""
        return (self.array, *_lives(self.dims)), (_without_lives(self.dims), self.fill)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Sequence[Any]) -> Selected:
        """It again, of such parts."""
        return cls(children[0], _with_lives(aux[0], children[1:]), aux[1])


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, slots=True)
class Count:
    """A number that only data know; of a size, the dim that has it."""

    value: Any
    dim: Dim | None = None

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """JAX's parts of it: arrays, and what stands."""
        dims = (self.dim,)
        return (self.value, *_lives(dims)), _without_lives(dims)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Sequence[Any]) -> Count:
        """It again, of such parts."""
        return cls(children[0], _with_lives(aux, children[1:])[0])


def _lives(dims: Dims) -> list[Any]:
    return [f.live for dim in dims if dim for f in dim.factors if isinstance(f, Selection)]


def _without_lives(dims: Dims) -> Dims:
    return _with_lives(dims, [None] * len(_lives(dims)))


def _with_lives(dims: Dims, lives: Sequence[Any]) -> Dims:
    given = iter(lives)

    def renewed(factor: Selection | int) -> Selection | int:
        if isinstance(factor, int):
            return factor
        return Selection(factor.name, factor.size, next(given))

    return tuple(dim and Dim(dim.size, tuple(map(renewed, dim.factors))) for dim in dims)


def live_of(dims: Dims) -> Any:
    """Which elements count of an array with these dims, in a shape that broadcasts to its own."""
    found: Any = jnp.ones((1,) * len(dims), bool)
    for n, dim in enumerate(dims):
        if dim is not None:
            found = found & dim.live.reshape([-1 if m == n else 1 for m in range(len(dims))])
    return found


def leaves_of(part: Any) -> list[Any]:
    """What stands in arguments of an operator, in order."""
    if isinstance(part, list | tuple):
        return [leaf for each in part for leaf in leaves_of(each)]
    if isinstance(part, Mapping):
        return leaves_of(list(part.values()))
    return [part]


def replaced(part: Any, change: Any) -> Any:
    """Arguments of an operator with each of `leaves_of` changed."""
    if isinstance(part, list | tuple):
        return [replaced(each, change) for each in part]
    if isinstance(part, Mapping):
        return {name: replaced(each, change) for name, each in part.items()}
    return change(part)


def plain(part: Any) -> Any:
    """An argument as a row takes it."""
    if isinstance(part, Selected):
        return part.array
    return part.value if isinstance(part, Count) else part


def ranks(live: Any) -> Any:
    """The number of each position that counts among those that do."""
    return jnp.cumsum(live.astype(jnp.int32)) - 1


def positions_of(dim: Dim) -> Any:
    """The positions that count, in order, and zeros behind them."""
    length = dim.positions
    to = jnp.where(dim.live, ranks(dim.live), length)  # which is outside
    return jnp.zeros(length, jnp.int32).at[to].set(jnp.arange(length), mode="drop")


def in_front(x: Selected, axis: int, positions: int | None = None) -> Selected:
    """x with the rows along a dim moved to its front, in order, the first `positions` of them."""
    dim = x.dims[axis]
    assert dim is not None
    source = positions_of(dim)[:positions]
    array = jnp.take(x.filled(0), source, axis, mode="clip")
    front = front_dim(dim.size, dim.count, source.shape[0])
    dims = tuple(front if n == axis else own for n, own in enumerate(x.dims))
    return Selected(Selected(array, dims).filled(0), dims, 0)


def front_dim(size: Any, count: Any, positions: int) -> Dim:
    """A dim of which the first `count` positions count."""
    live = jnp.arange(positions) < count
    return Dim(size, (Selection(f"front {size} {positions}", size, live),))


NUMBERS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": lambda a, b: jnp.asarray(a, jnp.float32) / b,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "neg": operator.neg,
    "pow": operator.pow,
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "and_": jnp.logical_and,
    "or_": jnp.logical_or,
    "sym_not": jnp.logical_not,
    "sym_min": jnp.minimum,
    "sym_max": jnp.maximum,
    "sym_int": lambda a: jnp.trunc(a).astype(jnp.int32),
    "sym_float": lambda a: jnp.asarray(a, jnp.float32),
    "_sym_sqrt": lambda a: jnp.sqrt(jnp.asarray(a, jnp.float32)),
}
"""Functions of Python's and torch's on sizes that only data know, by the name that torch records
them under."""


def computed(name: str, args: Sequence[Any], size: Any) -> Count:
    """A number that is computed of others. A sum or a product of sizes is a size."""
    function = NUMBERS[name]
    value = function(*map(plain, args))
    dims = [part.dim for part in args if isinstance(part, Count)]
    if name not in ("add", "mul") or not all(dims):
        return Count(value)
    most = (p.dim.positions if isinstance(p, Count) and p.dim else p for p in args)
    return Count(value, front_dim(size, value, function(*most)))


def aligned(parts: Any) -> Any:
    """Arguments of an operator, of which the same positions count along dims of one size: where
    masks differ, rows are moved to the front."""
    keys: dict[Any, dict[Any, int]] = {}
    for dim in dims_in(parts):
        keys.setdefault(dim.size, {})[dim.key] = dim.positions
    several = {size: min(found.values()) for size, found in keys.items() if len(found) > 1}

    def moved(part: Any) -> Any:
        if isinstance(part, Count) and part.dim and part.dim.size in several:
            dim = part.dim
            return Count(part.value, front_dim(dim.size, dim.count, several[dim.size]))
        if isinstance(part, Selected):
            for axis, own in enumerate(part.dims):
                if own and own.size in several:
                    part = in_front(part, axis, several[own.size])
        return part

    return replaced(parts, moved) if several else parts


def dims_in(parts: Any) -> list[Dim]:
    """Dims of a size that only data know, of all in some arguments."""
    found: list[Dim] = []
    for leaf in leaves_of(parts):
        if isinstance(leaf, Selected):
            found += filter(None, leaf.dims)
        elif isinstance(leaf, Count) and leaf.dim:
            found.append(leaf.dim)
    return found


def resolved(shape: Iterable[Any], sizes: Sizes, known: Sequence[Dim]) -> Dims:
    """The dims of a result of torch's shape, of those that went in."""
    by_size = {dim.size: dim for dim in known}
    found: list[Dim | None] = []
    for size in map(sizes.of, shape):
        if not isinstance(size, int) and size not in by_size:
            raise selected(f"a dim of {size} rows, which no operand has")
        found.append(None if isinstance(size, int) else by_size[size])
    return tuple(found)


def shape_of(shape: Iterable[Any], sizes: Sizes, dims: Dims) -> tuple[int, ...]:
    """How long the dims of a result are here."""
    pairs = zip(map(sizes.of, shape), dims, strict=True)
    return tuple(dim.positions if dim else int(size) for size, dim in pairs)
