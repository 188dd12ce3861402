"""Operators on rows that a mask selects: what each does where no row is (`selections.py`).

A rule takes a `Call` and uses the operator's own row of the table. Operators of single elements
need no rule of their own. What has none is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from shardwright.compiler.frontend.pytorch.operators.indexing import read_in_order
from shardwright.compiler.frontend.pytorch.operators.losses import MEAN, NONE
from shardwright.compiler.frontend.pytorch.operators.reduction import root
from shardwright.compiler.frontend.pytorch.operators.registry import Operators, full_name
from shardwright.compiler.frontend.pytorch.operators.selections import (
    Count,
    Dim,
    Dims,
    Selected,
    Selection,
    Sizes,
    aligned,
    dims_in,
    in_front,
    is_mask,
    leaves_of,
    live_of,
    of_rows,
    plain,
    positions_of,
    ranks,
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
        args, kwargs = replaced((self.args, self.kwargs), lambda x: _filled(x, value))
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
        made = [_wrapped(*pair, fill) for pair in zip(parts, own, strict=True)]
        return made if is_list else made[0]

    def refused(self, why: str = "") -> Exception:
        """The error of an operator that has no rule for what it is given."""
        return of_rows(self.name, why)


def _wrapped(array: Any, dims: Dims, fill: Any) -> Any:
    return Selected(array, dims, fill) if any(dims) else array


def _filled(x: Any, value: Any) -> Any:
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
    return _elementwise(call)


def _elementwise(call: Call) -> Any:
    _joint(call)
    return (call if call.name in FINITE else call.filled(1)).results()


def _joint(call: Call) -> Dims:
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
@RULES.row("floor_divide", "bucketize.Tensor")
def elementwise(call: Call) -> Any:
    """Elements one by one, of operators that torch says it not of."""
    return _elementwise(call)


@RULES.row("one_hot")
def one_hot(call: Call) -> Any:
    """One of classes, also where no row is."""
    return call.filled(0).results()


@RULES.row("arange", "arange.start", "arange.start_step")
def arange(call: Call) -> Any:
    """Numbers, each at the position that counts so far."""
    found = call.results(found=0)
    end = call.args[0] if len(call.args) == 1 else call.args[1]
    start = plain(call.args[0]) if len(call.args) > 1 else 0
    step = plain(call.args[2]) if len(call.args) > 2 else 1
    own = found.dims[0] if isinstance(found, Selected) else None
    if not isinstance(end, Count) or own is None:
        raise call.refused()
    numbers = start + step * ranks(own.live)
    return _filled(replace(found, array=numbers), 0)


def _axes(call: Call, dim: Any) -> list[int]:
    """Dims of the first operand that `dim` says: a number, several, or all."""
    rank = call.args[0].ndim if isinstance(call.args[0], Selected) else len(call.args[0].shape)
    if dim is None or (isinstance(dim, list) and not dim):
        return list(range(rank))
    return [n % max(rank, 1) for n in (dim if isinstance(dim, list) else [dim])]


def _is_unknown(x: Any, axes: Sequence[int]) -> bool:
    """Whether rows of a mask lie along some dims."""
    return isinstance(x, Selected) and any(x.dims[n] for n in axes)


def _lowest(dtype: Any) -> Any:
    """A number that is below all others, and finite."""
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return (jnp.finfo if is_float else jnp.iinfo)(dtype).min


def _highest(dtype: Any) -> Any:
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return (jnp.finfo if is_float else jnp.iinfo)(dtype).max


def _below_all(dtype: Any) -> Any:
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else _lowest(dtype)


def _above_all(dtype: Any) -> Any:
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else _highest(dtype)


_WITHOUT_EFFECT: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("sum", "sum.dim_IntList", "cumsum"), lambda _: 0),
    **dict.fromkeys(("count_nonzero", "count_nonzero.dim_IntList"), lambda _: 0),
    **dict.fromkeys(("any", "any.dim", "any.dims"), lambda _: 0),
    **dict.fromkeys(("all", "all.dim", "all.dims", "prod", "prod.dim_int", "cumprod"), lambda _: 1),
    **dict.fromkeys(("amax", "max"), _below_all),
    **dict.fromkeys(("amin", "min"), _above_all),
    **dict.fromkeys(("softmax.int", "_softmax", "log_softmax.int", "_log_softmax"), _lowest),
}
"""Operators along dims -> what changes nothing along them, by type. It is finite for exponentials,
which would make NaN of rows all of which are minus infinity."""


@RULES.row(*_WITHOUT_EFFECT)
def reduction(call: Call) -> Any:
    """Elements along dims, those of no row left out."""
    x = call.args[0]
    if not isinstance(x, Selected):
        return call.results()
    if _is_unknown(x, _axes(call, call.argument(1, "dim"))):
        value = _WITHOUT_EFFECT[call.name.removesuffix(".default")](x.dtype)
        call = call.with_arguments({0: _filled(x, value)})
    return call.results()


@RULES.row("linalg_vector_norm")
def vector_norm(call: Call) -> Any:
    """Norm along dims; where no row is there are zeros, and ones where it is of single rows."""
    x, order = call.args[0], call.argument(1, "ord", 2)
    is_over_rows = _is_unknown(x, _axes(call, call.argument(2, "dim")))
    if is_over_rows and order < 0:
        raise call.refused()
    return call.with_arguments({0: _filled(x, 0 if is_over_rows else 1)}).results()


@dataclass(frozen=True, slots=True)
class _Moments:
    """Means over dims with rows of a mask."""

    x: Selected
    axes: tuple[int, ...]
    keepdim: bool

    @property
    def count(self) -> Any:
        """How many elements are reduced to one."""
        dims = [self.x.dims[n] for n in self.axes]
        static = math.prod(self.x.shape[n] for n in self.axes if not self.x.dims[n])
        return math.prod((dim.count for dim in dims if dim), start=static)

    def sum(self, array: Any, keepdim: bool) -> Any:
        return jnp.sum(jnp.where(self.x.live, array, 0), self.axes, keepdims=keepdim)

    @property
    def mean(self) -> Any:
        return self.sum(self.x.array, self.keepdim) / self.count

    def variance(self, correction: Any) -> Any:
        centre = self.sum(self.x.array, True) / self.count
        squares = self.sum(jnp.square(self.x.filled(0) - centre), self.keepdim)
        less = 1 if correction is None else correction
        return squares / jnp.maximum(self.count - less, 0)


def _moments(call: Call, keepdim_place: int) -> _Moments | None:
    x, axes = call.args[0], _axes(call, call.argument(1, "dim"))
    if not _is_unknown(x, axes):
        return None
    return _Moments(x, tuple(axes), bool(call.argument(keepdim_place, "keepdim", False)))


@RULES.row("mean", "mean.dim")
def mean(call: Call) -> Any:
    """Mean of the rows that count."""
    moments = _moments(call, 2)
    return call.results(moments and moments.mean)


@RULES.row("var.correction", "std.correction", "var_mean.correction", "std_mean.correction")
@RULES.row("var.dim", "std.dim")
def variance(call: Call) -> Any:
    """Variance, or its root, of the rows that count, perhaps with their mean."""
    moments = _moments(call, 3)
    if moments is None:
        return call.filled(1).results()
    found = moments.variance(call.argument(2, "correction"))
    found = root(found) if call.name.startswith("std") else found
    return call.results([found, moments.mean] if "mean" in call.name else found)


@RULES.row("max.dim", "min.dim", "argmax", "argmin")
def extreme(call: Call) -> Any:
    """The first largest, or smallest, along a dim, and its number among the rows that count."""
    x, dim = call.args[0], call.argument(1, "dim")
    if not isinstance(x, Selected) or not _is_unknown(x, _axes(call, dim)):
        return call.results()
    if dim is None:
        raise call.refused()
    value = _below_all if "max" in call.name else _above_all
    own = x.dims[dim % x.ndim]
    assert own is not None
    number = ranks(own.live)
    filled = call.with_arguments({0: _filled(x, value(x.dtype))})
    if call.name.startswith("arg"):
        return filled.results(number[plain(filled.results())])
    best, index = filled.results()
    return [best, _mapped(index, lambda places: number[places])]


def _mapped(x: Any, change: Callable[[Any], Any]) -> Any:
    return replace(x, array=change(x.array), fill=None) if isinstance(x, Selected) else change(x)


def _dim(place: int, default: int = 0) -> Callable[[Call, Selected], Sequence[int]]:
    """The dims that an argument says."""

    def mixed(call: Call, x: Selected) -> Sequence[int]:
        found = call.argument(place, "dim", default)
        return found if isinstance(found, list) else [found]

    return mixed


def _normalised(call: Call, x: Selected) -> Sequence[int]:
    return range(-len(call.args[1]), 0)


def _but_first(call: Call, x: Selected) -> Sequence[int]:
    return range(1, x.ndim)


def _last_two(call: Call, x: Selected) -> Sequence[int]:
    return (-2, -1)


def _repeated(call: Call, x: Selected) -> Sequence[int]:
    return [-n for n, times in enumerate(reversed(call.args[1]), 1) if times != 1 and n <= x.ndim]


_MIXED: dict[str, Callable[[Call, Selected], Sequence[int]]] = {
    **dict.fromkeys(("select.int", "unbind.int"), _dim(1)),
    **dict.fromkeys(("split.Tensor", "chunk", "split_with_sizes", "split.sizes"), _dim(2)),
    **dict.fromkeys(("sort", "argsort", "glu"), _dim(1, -1)),
    **dict.fromkeys(("topk", "kthvalue"), _dim(2, -1)),
    **dict.fromkeys(("median.dim", "flip", "cummax", "cummin", "logcumsumexp"), _dim(1)),
    **dict.fromkeys(("layer_norm", "rms_norm"), _normalised),
    **dict.fromkeys(("group_norm", "convolution", "conv1d", "conv2d", "conv3d"), _but_first),
    **dict.fromkeys(("tril", "triu", "scaled_dot_product_attention"), _last_two),
    "repeat": _repeated,
}
"""Operators that mix elements along dims in a way that no value is without effect on -> these dims
of each operand."""


@RULES.row(*_MIXED)
def mixing(call: Call) -> Any:
    """Rows one by one, of an operator that mixes other dims."""
    mixed = _MIXED[call.name.removesuffix(".default")]
    for x in leaves_of(call.args):
        if isinstance(x, Selected) and _is_unknown(x, [n % x.ndim for n in mixed(call, x)]):
            raise call.refused(" along the dim of these rows")
    return call.results()


@RULES.row("slice.Tensor")
def sliced(call: Call) -> Any:
    """A slice of other dims, or all of the rows."""
    x, dim = call.args[0], call.argument(1, "dim", 0)
    if not _is_unknown(x, _axes(call, dim)):
        return call.results()
    start, end, step = (call.argument(*at) for at in ((2, "start"), (3, "end"), (4, "step")))
    own = x.dims[dim % x.ndim]
    is_end = end is None or (isinstance(end, Count) and end.dim and end.dim.key == own.key)
    if start or step not in (None, 1) or not (is_end or plain(end) == _ALL):
        raise call.refused(" along the dim of these rows")
    return x


_ALL = 2**63 - 1
"""The end of a slice without one."""


@RULES.row("stack")
def stack(call: Call) -> Any:
    """Arrays of the same rows along a new dim."""
    return call.results()


@RULES.row("cat", "concat")
def cat(call: Call) -> Any:
    """Arrays one behind the other, with the rows of each where they are."""
    parts, dim = call.args[0], call.argument(1, "dim", 0)
    axis = dim % len(call.said.shape)
    own = [x.dims[axis] if isinstance(x, Selected) else None for x in parts]
    if not any(own):
        return call.results()
    pairs = list(zip(parts, own, strict=True))
    lives = [d.live if d else jnp.ones(plain(x).shape[axis], bool) for x, d in pairs]
    name = " and ".join(str(d.key if d else plain(x).shape[axis]) for x, d in pairs)
    size = call.sizes.of(call.said.shape[axis])
    made = Dim(size, (Selection(f"({name})", size, jnp.concatenate(lives)),))
    fills = {x.fill for x in parts if isinstance(x, Selected)}
    return call.results(dims=[made], fill=fills.pop() if len(fills) == 1 else None)


@RULES.row("view", "reshape", "_unsafe_view", "flatten.using_ints", "unflatten.int", "view_as")
@RULES.row("_reshape_copy")
def reshaped(call: Call) -> Any:
    """Elements in order: factors of dims are merged and taken apart as the dims are."""
    x = call.args[0]
    if not isinstance(x, Selected):
        return call.results()
    atoms: list[Selection | int] = []
    for n, dim in zip(x.shape, x.dims, strict=True):
        for atom in dim.factors if dim else (n,):
            _add_factor(atoms, atom)
    atoms.reverse()
    made = []
    for size in map(call.sizes.of, call.said.shape):
        factors = _taken_off(atoms, size, call)
        is_known = all(isinstance(f, int) for f in factors)
        made.append(None if is_known else Dim(size, factors))
    shape = shape_of(call.said.shape, call.sizes, tuple(made))
    return _wrapped(x.array.reshape(shape), tuple(made), x.fill)


def _taken_off(atoms: list[Selection | int], size: Any, call: Call) -> tuple[Selection | int, ...]:
    """Take the factors of one dim from the end of a list."""
    found: list[Selection | int] = []
    left = size  # what is still to be found
    while left != 1:
        atom = atoms.pop() if atoms else None
        if isinstance(atom, Selection):
            left = left / atom.size
            found.append(atom)
        elif atom is None:
            raise call.refused(" to a shape that mixes them")
        else:
            coefficient = left if isinstance(left, int) else int(left.as_coeff_Mul()[0])
            part = math.gcd(atom, coefficient)
            if part == 1:
                raise call.refused(" to a shape that mixes them")
            if part < atom:
                atoms.append(atom // part)
            left = left // part if isinstance(left, int) else left / part
            _add_factor(found, part)
    return tuple(found)


def _add_factor(factors: list[Selection | int], new: Selection | int) -> None:
    """Add the next factor; numbers beside each other are one."""
    last = factors[-1] if factors else None
    if isinstance(new, Selection):
        factors.append(new)
    elif isinstance(last, int):
        factors[-1] = last * new
    elif new != 1:
        factors.append(new)


_CONTRACTED: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("mm", "bmm", "matmul", "mv", "dot"), (0, -2)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), (1, -2)),
    "linear": (0, -1),
}
"""Products -> the place of the first factor, whose last dim is summed over, and the dim of the
second that is."""


@RULES.row(*_CONTRACTED)
def product(call: Call) -> Any:
    """A product, with zeros along a dim of rows that it sums over."""
    place, of_second = _CONTRACTED[call.name.removesuffix(".default")]
    first, second = call.args[place : place + 2]
    rank = len(second.shape)
    dims = (_at(first, -1), _at(second, of_second if rank > 1 else -1))
    if len({dim.key if dim else None for dim in dims}) > 1:
        raise call.refused(" over two sizes")
    if not any(dims):
        return call.results()
    return call.with_arguments({place: _filled(first, 0), place + 1: _filled(second, 0)}).results()


def _at(x: Any, axis: int) -> Dim | None:
    return x.dims[axis] if isinstance(x, Selected) else None


@RULES.row("einsum")
def einsum(call: Call) -> Any:
    """Einstein's sum, with zeros where no row is."""
    return call.filled(0).results()


@RULES.row("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d")
def likelihood(call: Call) -> Any:
    """Losses of classes; where no row is the target is the one that counts not."""
    x, target = call.args[:2]
    has_chances = jnp.issubdtype(target.dtype, jnp.floating)
    classes = 0 if x.ndim == 1 else 1
    if _is_unknown(x, [classes]):
        if has_chances or call.argument(5, "label_smoothing", 0) or call.argument(2, "weight"):
            raise call.refused(" that are classes")
        positions = positions_of(x.dims[classes])
        x = _filled(x, _lowest(x.dtype))
        target = _mapped(target, lambda n: jnp.where(n < 0, n, positions[n]))
    if not has_chances:
        target = _filled(target, call.argument(4, "ignore_index", -100))
        return call.with_arguments({0: x, 1: target}).results()
    rows = tuple(d for n, d in enumerate(_joint(call)) if n != classes)
    return _loss(call, 3, rows)


_REDUCTIONS = {
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"), 2),
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
}
"""Losses of single elements -> the place of their reduction."""


@RULES.row(*_REDUCTIONS)
def loss(call: Call) -> Any:
    """Losses of elements, their sum, or the mean of those that count."""
    return _loss(call.filled(1), _REDUCTIONS[call.name.removesuffix(".default")], _joint(call))


def _loss(call: Call, place: int, dims: Dims) -> Any:
    reduction = call.argument(place, "reduction", MEAN)
    if reduction == NONE:
        return call.results()
    args, kwargs = list(call.args[: place + 1]), {**call.kwargs, "reduction": NONE}
    if len(args) > place:
        args[place] = kwargs.pop("reduction")
    args += call.args[place + 1 :]
    losses = call.row(())(*replaced(args, plain), **replaced(kwargs, plain))
    total = jnp.sum(jnp.where(live_of(dims), losses, 0))
    if reduction != MEAN:
        return total
    pairs = zip(dims, losses.shape[-len(dims) :] if dims else (), strict=True)
    outer = math.prod(losses.shape[: losses.ndim - len(dims)])
    return total / math.prod((d.count if d else n for d, n in pairs), start=outer)


@RULES.row("sym_size.int")
def size(call: Call) -> Any:
    """The size of a dim, a number that only data know where it is one of rows."""
    x, dim = call.args
    own = x.dims[dim]
    return Count(own.count, own) if own else x.shape[dim]


@RULES.row("embedding")
def embedding(call: Call) -> Any:
    """Rows of a table, the first one where no row is."""
    if isinstance(call.args[0], Selected):
        raise call.refused()
    return call.filled(0).results()


@RULES.row("gather", "index_select")
def gather(call: Call) -> Any:
    """Elements along a dim by number."""
    x, dim, places = call.args[:3]
    if _is_unknown(x, _axes(call, dim)):
        x = in_front(x, dim % x.ndim)
    return call.with_arguments({0: x, 2: _filled(places, 0)}).results()


@RULES.row("index_add", "scatter_add")
def added(call: Call) -> Any:
    """x with something added by number: zeros, to the first, where no row is."""
    x, _, places, source = call.args[:4]
    if isinstance(x, Selected):
        raise call.refused()
    return call.with_arguments({2: _filled(places, 0), 3: _filled(source, 0)}).results()


def _selection(call: Call, mask: Any, leaf: int, size: Any) -> Selection:
    """What a mask of any dims selects, its elements in order; `leaf` is its place in the call."""
    dims = mask.dims if isinstance(mask, Selected) else ()
    live = mask.filled(False) if isinstance(mask, Selected) else mask
    name = f"{call.masks[leaf]} {[dim.key if dim else None for dim in dims]}" if any(dims) else ""
    return Selection(name or call.masks[leaf], size, live.reshape(-1))


def _numbers(mask: Any, selection: Selection) -> list[Any]:
    """Indices of what a mask selects along each of its dims."""
    dims = mask.dims if isinstance(mask, Selected) else (None,) * mask.ndim
    places = jnp.unravel_index(jnp.arange(mask.size), mask.shape) if mask.ndim else ()
    numbers = [ranks(d.live)[p] if d else p for d, p in zip(dims, places, strict=True)]
    own = (Dim(selection.size, (selection,)),)
    return [_filled(Selected(n.astype(jnp.int32), own), 0) for n in numbers]


@RULES.row("nonzero")
def nonzero(call: Call) -> Any:
    """The indices of what is not zero, [rows, dims], each where the element is."""
    x = call.args[0]
    mask = _mapped(x, lambda array: array != 0)
    size = call.sizes.of(call.said.shape[0])
    selection = _selection(call, mask, 0, size)
    numbers = [plain(n) for n in _numbers(mask, selection)]
    array = jnp.stack(numbers, -1) if numbers else jnp.zeros((1, 0), jnp.int32)
    return _selected(array, (None,), 0, selection)


def _selected(array: Any, others: Dims, axis: int, selection: Selection) -> Any:
    """An array whose dim `axis` is that of a selection, without the elements of other rows."""
    dims = (*others[:axis], Dim(selection.size, (selection,)), *others[axis:])
    found = Selected(array, dims)
    if not isinstance(selection.size, int):
        return _filled(found, 0)
    front = in_front(found, axis, selection.size)  # a number of rows that the code states
    return _wrapped(front.array, (*others[:axis], None, *others[axis:]), 0)


@RULES.row("masked_select")
def masked_select(call: Call) -> Any:
    """Elements of x where the mask is, in order."""
    dims, (x, mask) = _joint(call), call.args
    shape = jnp.broadcast_shapes(x.shape, mask.shape)
    dims = (None,) * (len(shape) - len(dims)) + dims
    live = jnp.broadcast_to(_filled_plain(mask, False) & live_of(dims), shape).reshape(-1)
    size = call.sizes.of(call.said.shape[0])
    name = f"{call.masks[1]} {shape} {[dim.key if dim else None for dim in dims]}"
    array = jnp.broadcast_to(plain(x), shape).reshape(-1)
    return _selected(array, (), 0, Selection(name, size, live))


def _filled_plain(x: Any, value: Any) -> Any:
    return plain(_filled(x, value))


@RULES.row("index.Tensor", "_unsafe_index.Tensor")
def index(call: Call) -> Any:
    """x at a mask, x at indices, or at both."""
    x, indices = call.args
    given = [n for n, i in enumerate(indices) if i is not None]
    mask = indices[given[0]]
    dims = x.dims if isinstance(x, Selected) else (None,) * x.ndim
    if len(given) == 1 and is_mask(mask):
        axis, rank = given[0], mask.ndim
        size = call.sizes.of(call.said.shape[axis])
        selection = _selection(call, mask, 1 + axis, size)
        shape = (*x.shape[:axis], selection.live.shape[0], *x.shape[axis + rank :])
        others = (*dims[:axis], *dims[axis + rank :])
        return _selected(plain(x).reshape(shape), others, axis, selection)
    every = _as_numbers(call, indices)
    for n, places in enumerate(every):
        if places is not None and dims[n]:
            x = in_front(x, n)
    own = dims_in([every, call.kwargs])
    found = call.with_arguments({0: x, 1: [_filled(i, 0) for i in every]})
    return _refilled(found.results(dims=own))


def _refilled(x: Any) -> Any:
    return _filled(replace(x, fill=None), 0) if isinstance(x, Selected) else x


def _as_numbers(call: Call, indices: Sequence[Any]) -> list[Any]:
    """Indices with numbers instead of masks."""
    found: list[Any] = []
    known = {dim.key: dim.size for dim in dims_in([*indices])}
    for n, places in enumerate(indices):
        if not is_mask(places):
            found.append(places)
            continue
        own = _selection(call, places, 1 + n, None)
        size = known.get((own.name,)) or _unknown_size(call)
        found += _numbers(places, replace(own, size=size))
    return found


def _unknown_size(call: Call) -> Any:
    """The only size of a result that no operand has."""
    known = {dim.size for dim in dims_in((call.args, call.kwargs))}
    sizes = {call.sizes.of(n) for n in call.said.shape}
    new = [n for n in sizes if not isinstance(n, int) and n not in known]
    if len(new) != 1:
        raise call.refused(" and of indices")
    return new[0]


@RULES.row("index_put", "_unsafe_index_put")
def index_put(call: Call) -> Any:
    """x with rows replaced, or added to, where a mask is, or at indices."""
    x, indices, values = call.args[:3]
    accumulate = bool(call.argument(3, "accumulate", False))
    given = [n for n, i in enumerate(indices) if i is not None]
    first = indices[given[0]]
    if len(given) == 1 and is_mask(first):
        return call.results(_put_at(call, x, first, given[0], values, accumulate))
    if any(map(is_mask, indices)):
        raise call.refused(" and of indices")
    if _is_unknown(x, given):
        raise call.refused()
    where = tuple(slice(None) if i is None else i for i in indices)
    length = plain(x).shape[given[0]]
    numbers = [
        i if isinstance(i, slice) else plain(_filled(_from_start(i, plain(x).shape[n]), length))
        for n, i in enumerate(where)
    ]  # outside, where no row is
    at = plain(x).at[tuple(numbers)]
    values = plain(values).astype(x.dtype)
    return call.results(at.add(values, mode="drop") if accumulate else at.set(values, mode="drop"))


def _from_start(places: Any, size: int) -> Any:
    return _mapped(places, lambda n: jnp.where(n < 0, n + size, n))


def _put_at(call: Call, x: Any, mask: Any, axis: int, values: Any, accumulate: bool) -> Any:
    """x with `values` for the rows of a mask of some dims from `axis` on."""
    selection = _selection(call, mask, 1 + axis, None)
    array, rank = plain(x), mask.ndim
    after = array.ndim - axis - rank
    length = selection.live.shape[0]
    rows = array.reshape(*array.shape[:axis], length, *array.shape[axis + rank :])
    place = plain(values).ndim - after - 1  # of the rows in the values
    own = _at(values, place) if place >= 0 else None
    if own is not None and own.key != (selection.name,):
        values = in_front(values, place)
    given = plain(values)
    if place >= 0 and given.shape[place] != 1 and (own is None or own.key != (selection.name,)):
        given = read_in_order(given, selection.live, place)
    live = selection.live.reshape(-1, *[1] * after)
    made = jnp.where(live, (rows + given if accumulate else given).astype(array.dtype), rows)
    return made.reshape(array.shape)


@RULES.row("masked_scatter")
def masked_scatter(call: Call) -> Any:
    """x with the elements of rows, in order, where the mask is."""
    x, mask, source = call.args
    if isinstance(x, Selected) or isinstance(mask, Selected):
        raise call.refused()
    others = range(1, source.ndim)
    if _is_unknown(source, others):
        live = jnp.broadcast_to(source.live, source.shape).reshape(-1)
        pairs = zip(source.dims, source.shape, strict=True)
        size = math.prod(dim.size if dim else n for dim, n in pairs)
        elements = Selection("elements", size, live)
        source = Selected(source.array.reshape(-1), (Dim(size, (elements,)),), source.fill)
    return call.with_arguments({2: in_front(source, 0)}).results()
