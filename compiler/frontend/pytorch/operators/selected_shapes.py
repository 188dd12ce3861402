"""Views, parts and sizes of rows that a mask selects (`selected_rows.py`), and operators that mix
other dims of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from shardwright.compiler.frontend.pytorch.operators.selected_rows import (
    RULES,
    Call,
    axes_of,
    filled,
    is_over_rows,
    wrapped,
)
from shardwright.compiler.frontend.pytorch.operators.selections import (
    Count,
    Dim,
    Selected,
    Selection,
    leaves_of,
    plain,
    ranks,
    shape_of,
)


@RULES.row("sym_size.int")
def size(call: Call) -> Any:
    """The size of a dim, a number that only data know where it is one of rows."""
    x, dim = call.args
    own = x.dims[dim]
    return Count(own.count, own) if own else x.shape[dim]


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
    return filled(replace(found, array=numbers), 0)


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


def _padded(call: Call, x: Selected) -> Sequence[int]:
    return [-1 - n // 2 for n, width in enumerate(call.args[1]) if width]


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
    **dict.fromkeys(("pad", "constant_pad_nd"), _padded),
}
"""Operators that mix elements along dims in a way that no value is without effect on -> these dims
of each operand."""


@RULES.row(*_MIXED)
def mixing(call: Call) -> Any:
    """Rows one by one, of an operator that mixes other dims."""
    mixed = _MIXED[call.name.removesuffix(".default")]
    for x in leaves_of(call.args):
        if isinstance(x, Selected) and is_over_rows(x, [n % x.ndim for n in mixed(call, x)]):
            raise call.refused(" along the dim of these rows")
    return call.results()


@RULES.row("slice.Tensor")
def sliced(call: Call) -> Any:
    """A slice of other dims, or all of the rows."""
    x, dim = call.args[0], call.argument(1, "dim", 0)
    if not is_over_rows(x, axes_of(call, dim)):
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
    return wrapped(x.array.reshape(shape), tuple(made), x.fill)


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
