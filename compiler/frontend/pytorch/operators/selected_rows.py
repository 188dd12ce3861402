"""Operators on rows that a mask selects: what each does where no row is (`selections.py`).

A rule takes a `Call` and uses the operator's own row of the table. Operators of single elements
need no rule of their own. What has none is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from shardwright.compiler.frontend.pytorch.operators.registry import Operators, full_name
from shardwright.compiler.frontend.pytorch.operators.selections import (
    Dim,
    Dims,
    Selected,
    Sizes,
    aligned,
    dims_in,
    leaves_of,
    of_rows,
    plain,
    replaced,
    resolved,
    shape_of,
)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an operator with rows of a mask in it. `row` makes its row of the table for a shape
    of the first result, `said` are torch's results, `mask` names of masks among the arguments."""

    name: str
    row: Callable[[tuple[int, ...]], Callable[..., Any]]
    args: list[Any]
    kwargs: dict[str, Any]
    said: Any
    sizes: Sizes
    masks: dict[int, str]

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by its place or its name."""
        given = self.args[place] if len(self.args) > place else default
        return self.kwargs.get(name, given)

    def with_arguments(self, changes: dict[int, Any]) -> Call:
        """With other arguments at some places."""
        args = [changes.get(n, part) for n, part in enumerate(self.args)]
        return replace(self, args=args)

    def filled(self, value: Any) -> Call:
        """With a value in all operands where no row is."""
        args, kwargs = replaced((self.args, self.kwargs), lambda x: filled(x, value))
        return replace(self, args=args, kwargs=kwargs)

    def results(self, found: Any = None, dims: Sequence[Dim] = (), fill: Any = None) -> Any:
        """What the row gives, or `found`, as results of torch's shapes, whose dims are those that
        went in, or `dims`."""
        known = [*dims_in((self.args, self.kwargs)), *dims]
        is_list = isinstance(self.said, list | tuple)
        said = list(self.said) if is_list else [self.said]
        own = [resolved(s.shape, self.sizes, known) for s in said]
        if found is None:
            row = self.row(shape_of(said[0].shape, self.sizes, own[0]))
            found = row(*replaced(self.args, plain), **replaced(self.kwargs, plain))
        parts = list(found) if is_list else [found]
        made = [wrapped(*pair, fill) for pair in zip(parts, own, strict=True)]
        return made if is_list else made[0]

    def refused(self, why: str = "") -> Exception:
        """The error of an operator that has no rule for what it is given."""
        return of_rows(self.name, why)


def wrapped(array: Any, dims: Dims, fill: Any) -> Any:
    """A result with rows along some of its dims, or the array itself where there are none."""
    return Selected(array, dims, fill) if any(dims) else array


def filled(x: Any, value: Any) -> Any:
    """An argument with a value where no row is."""
    return replace(x, array=x.filled(value), fill=value) if isinstance(x, Selected) else x


Rule = Callable[[Call], Any]
RULES = Operators()
"""Rules of operators by name."""

FINITE = frozenset(
    full_name(name)
    for name in (
        *("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar", "rsub.Scalar", "rsub.Tensor"),
        *("mul.Tensor", "mul.Scalar", "neg", "abs", "square", "relu", "gelu", "silu", "sigmoid"),
        *("tanh", "leaky_relu", "elu", "selu", "mish", "hardtanh", "relu6", "hardswish"),
        *("hardsigmoid", "softplus", "log_sigmoid", "sin", "cos", "erf", "sign", "clamp"),
        *("clamp_min", "clamp_max", "where.self", "where.ScalarSelf", "where.ScalarOther"),
        *("masked_fill.Scalar", "masked_fill.Tensor", "maximum", "minimum", "dropout"),
        *("native_dropout", "addcmul", "lerp.Scalar", "lerp.Tensor"),
    )
)
"""Operators of single elements that are finite with their gradients where what they take is. Others
find a one where no row is, where all of them are numbers."""
KEPT = frozenset(
    full_name(name)
    for name in (
        *("clone", "contiguous", "alias", "lift_fresh_copy", "detach", "to.dtype", "_to_copy"),
        *("to.dtype_layout", "to.device", "to.other", "type_as", "transpose.int", "t", "numpy_T"),
        *("permute", "movedim.int", "movedim.intlist", "unsqueeze", "squeeze.dim", "squeeze.dims"),
        *("squeeze", "expand", "expand_as"),
    )
)
"""Operators whose results are elements of their operand: what stands where no row is stays."""


def called(call: Call, is_pointwise: bool) -> Any:
    """What an operator gives. Raises UsageError where it has no rule."""
    args, kwargs = aligned((call.args, call.kwargs))
    call = replace(call, args=args, kwargs=kwargs)
    if call.name in RULES:
        return RULES[call.name](call)
    if call.name in KEPT:
        return call.results(fill=getattr(call.args[0], "fill", None))
    if not is_pointwise:
        raise call.refused()
    return elementwise(call)


def joint_dims(call: Call) -> Dims:
    """The dims of what operands are broadcast to. Raises UsageError where two are not the same."""
    operands = [x for x in leaves_of((call.args, call.kwargs)) if isinstance(x, Selected)]
    joint: list[Dim | None] = []
    for axis in range(-max((x.ndim for x in operands), default=0), 0):
        dims = [x.dims[axis] for x in operands if x.ndim >= -axis and x.dims[axis]]
        if len({dim.key for dim in dims if dim}) > 1:
            raise call.refused(", of several sizes")
        joint.append(dims[0] if dims else None)
    return tuple(joint)


SELECTING = {
    **dict.fromkeys(("nonzero.default", "masked_select.default"), True),
    **dict.fromkeys(("index.Tensor", "_unsafe_index.Tensor"), False),
}
"""Operators that select rows, and whether they do so without a mask among their indices."""


def has_rule(name: str, is_pointwise: bool) -> bool:
    """Whether an operator takes rows of a mask."""
    return is_pointwise or name in RULES or name in KEPT


@RULES.row("hardswish", "where.ScalarSelf", "where.ScalarOther", "where.Scalar", "prelu")
@RULES.row("log_sigmoid", "masked_fill.Tensor", "fill.Scalar", "fill.Tensor", "rsub.Tensor")
@RULES.row("dropout", "native_dropout", "feature_dropout", "rand_like", "randn_like", "bernoulli")
@RULES.row("bernoulli.p", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros")
@RULES.row("new_ones", "new_full", "new_empty", "zeros", "ones", "full", "rand", "randn")
@RULES.row("empty.memory_format", "scalar_tensor", "__and__.Tensor", "__or__.Tensor")
@RULES.row("floor_divide", "eye")
def elementwise(call: Call) -> Any:
    """Elements one by one; the names are those of operators that torch says it not of."""
    joint_dims(call)
    return (call if call.name in FINITE else call.filled(1)).results()


@RULES.row("one_hot")
def one_hot(call: Call) -> Any:
    """One of classes, also where no row is."""
    return call.filled(0).results()


def axes_of(call: Call, dim: Any) -> list[int]:
    """Dims of the first operand that `dim` says: a number, several, or all."""
    rank = call.args[0].ndim if isinstance(call.args[0], Selected) else len(call.args[0].shape)
    if dim is None or (isinstance(dim, list) and not dim):
        return list(range(rank))
    return [n % max(rank, 1) for n in (dim if isinstance(dim, list) else [dim])]


def is_over_rows(x: Any, axes: Sequence[int]) -> bool:
    """Whether rows of a mask lie along some dims."""
    return isinstance(x, Selected) and any(x.dims[n] for n in axes)


def lowest(dtype: Any) -> Any:
    """A number that is below all others, and finite."""
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return (jnp.finfo if is_float else jnp.iinfo)(dtype).min


def mapped(x: Any, change: Callable[[Any], Any]) -> Any:
    """An argument whose array is changed."""
    return replace(x, array=change(x.array), fill=None) if isinstance(x, Selected) else change(x)


def dim_at(x: Any, axis: int) -> Dim | None:
    """The dim of rows that an argument has along an axis, if it has one."""
    return x.dims[axis] if isinstance(x, Selected) else None
