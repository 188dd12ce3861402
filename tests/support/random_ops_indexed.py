"""Random ops that address: dynamic slices, gathers, scatters, sorts, windows, convolutions, loops.

Same form as `random_ops.py`.
"""

from __future__ import annotations

import math

from tests.support.random_graphs import (
    ENGINE_ERROR,
    LARGEST,
    MAX_ELEMENTS,
    SIZES,
    ULP,
    Grower,
    Growth,
    Var,
    ints,
    type_text,
)
from tests.support.random_ops import float_of, for_fold, sliced


def _starts(g: Grower, x: Var) -> list[Var]:
    """Scalar indices, computed ones included, some out of bounds (they are clamped)."""
    scalars = [v for v in g.pool if v.type == type_text((), "i32")]
    made = [g.constant(g.rng.randint(-1, n), (), "i32") for n in x.shape]
    return [g.rng.choice(scalars) if scalars and g.rng.random() < 0.5 else m for m in made]


def dynamic_slice(g: Grower) -> Var | None:
    x = g.pick(lambda v: len(v.shape) > 0)
    if x is None:
        return None
    sizes = tuple(g.rng.randint(1, n) for n in x.shape)
    attribute = f"slice_sizes = {ints(sizes)}"
    operands = (x, *_starts(g, x))
    return g.emit("dynamic_slice", operands, sizes, x.dtype, attribute, "", x.bound, x.error)


def dynamic_update_slice(g: Grower) -> Var | None:
    x = g.pick(lambda v: len(v.shape) > 0)
    if x is None:
        return None
    operands = (x, sliced(g, x), *_starts(g, x))
    op = "dynamic_update_slice"
    return g.emit(op, operands, x.shape, x.dtype, bound=x.bound, error=x.error)


def _indices(g: Grower, size: int) -> Var:
    """[count, 1] positions below `size`: computed ones, or multiples of a number."""
    found = g.pick(lambda v: v.dtype == "i32" and 0 < v.size <= 600)
    shape = (found.size if found else g.rng.choice((*SIZES, 129, 300)), 1)
    if found:
        index = g.emit("reshape", (found,), shape, "i32")
    else:
        index = g.emit("iota", (), shape, "i32", "iota_dimension = 0 : i64")
        factor = g.constant(g.rng.choice((1, 3, 7)), shape, "i32")
        index = g.like("multiply", [index, factor], 0, 0)
    low, high = g.constant(0, (), "i32"), g.constant(size - 1, (), "i32")
    return g.emit("clamp", (low, index, high), shape, "i32")


def gather(g: Grower) -> Var | None:
    """Rows along one dim, which may be anywhere; the others stay, or a window of them."""
    x = g.pick(lambda v: len(v.shape) > 0)
    if x is None:
        return None
    dim = g.rng.randrange(len(x.shape))
    index = _indices(g, x.shape[dim])
    rest = [n for d, n in enumerate(x.shape) if d != dim]
    sizes = [1 if d == dim else n for d, n in enumerate(x.shape)]
    at = g.rng.randint(0, len(rest))  # where the positions go among the dims of the result
    shape = (*rest[:at], index.shape[0], *rest[at:])
    offsets = [d for d in range(len(shape)) if d != at]
    attribute = (
        f"dimension_numbers = #stablehlo.gather<offset_dims = {offsets}, collapsed_slice_dims ="
        f" [{dim}], start_index_map = [{dim}], index_vector_dim = 1>, slice_sizes = {ints(sizes)},"
        " indices_are_sorted = false"
    )
    if math.prod(shape) > MAX_ELEMENTS:
        return None
    return g.emit("gather", (x, index), shape, x.dtype, attribute, "", x.bound, x.error)


def scatter(g: Grower) -> Var | None:
    """Sums, largest or smallest per row; rows may be hit several times."""
    x = g.pick(lambda v: v.is_float and len(v.shape) > 0)
    if x is None:
        return None
    dim = g.rng.randrange(len(x.shape))
    index = _indices(g, x.shape[dim])
    rest = [n for d, n in enumerate(x.shape) if d != dim]
    update = float_of(g, (index.shape[0], *rest), x.dtype)
    if update is None:
        return None
    prepared = for_fold(g, update, index.shape[0] + 1)
    if prepared is None or prepared[0] == "multiply":
        return None
    op, update, bound, error = prepared
    x = g.at_most(x, max(1, bound))
    attribute = (
        f"scatter_dimension_numbers = #stablehlo.scatter<update_window_dims ="
        f" {list(range(1, len(rest) + 1))}, inserted_window_dims = [{dim}],"
        f" scatter_dims_to_operand_dims = [{dim}], index_vector_dim = 1>,"
        " indices_are_sorted = false, unique_indices = false"
    )
    bound, error = x.bound + bound, error + x.error
    region = g.combiner(op, x.dtype)
    return g.emit("scatter", (x, index, update), x.shape, x.dtype, attribute, region, bound, error)


def sort(g: Grower) -> Var | None:
    x = g.pick(lambda v: len(v.shape) > 0 and v.dtype != "i1")
    if x is None:
        return None
    dim = g.rng.randrange(len(x.shape))
    a, b, c = (g.name() for _ in range(3))
    t, direction = type_text((), x.dtype), g.rng.choice(("LT", "GT"))
    region = (
        f'{{ ^bb0({a}: {t}, {b}: {t}): {c} = "stablehlo.compare"({a}, {b})'
        f" <{{comparison_direction = #stablehlo<comparison_direction {direction}>}}>"
        f' : ({t}, {t}) -> tensor<i1> "stablehlo.return"({c}) : (tensor<i1>) -> () }}'
    )
    attribute = f"dimension = {dim} : i64, is_stable = true"
    return g.emit("sort", (x,), x.shape, x.dtype, attribute, region, x.bound, x.error)


def _windows(g: Grower, n: int) -> tuple[int, int, tuple[int, int], int]:
    """(window, stride, padding, number of windows) along a dim of n."""
    window, step = g.rng.randint(1, min(4, n)), g.rng.choice((1, 1, 2, 3))
    low, high = g.rng.randint(0, window - 1), g.rng.randint(0, window - 1)
    return window, step, (low, high), (n + low + high - window) // step + 1


def reduce_window(g: Grower) -> Var | None:
    x = g.pick(lambda v: v.is_float and 0 < len(v.shape) <= 4)
    if x is None:
        return None
    rows = [_windows(g, n) if g.rng.random() < 0.6 else (1, 1, (0, 0), n) for n in x.shape]
    prepared = for_fold(g, x, math.prod(window for window, *_ in rows))
    if prepared is None or prepared[0] == "multiply":
        return None
    op, x, bound, error = prepared
    init = g.identity(op, x.dtype)
    padding = ", ".join(f"[{low}, {high}]" for _, _, (low, high), _ in rows)
    attribute = (
        f"window_dimensions = {ints([r[0] for r in rows])}, window_strides ="
        f" {ints([r[1] for r in rows])},"
        f" padding = dense<[{padding}]> : tensor<{len(rows)}x2xi64>"
    )
    shape, region = tuple(r[3] for r in rows), g.combiner(op, x.dtype)
    return g.emit("reduce_window", (x, init), shape, x.dtype, attribute, region, bound, error)


def convolution(g: Grower) -> Var | None:
    """Any order of dims, strides, padding, one dilation, groups."""
    x = g.pick(lambda v: v.is_float and 3 <= len(v.shape) <= 4)
    if x is None:
        return None
    order = g.rng.sample(range(len(x.shape)), len(x.shape))
    batch, feature, *space = order
    groups = g.rng.choice([n for n in (1, 2, x.shape[feature]) if x.shape[feature] % n == 0])
    rows = [_windows(g, x.shape[d]) for d in space]
    kernel = [x.shape[feature] // groups, groups * g.rng.choice((1, 2, 3)), *(r[0] for r in rows)]
    w = float_of(g, tuple(kernel), x.dtype)
    count = math.prod(kernel) // kernel[1]
    if w is None:
        return None
    most = float(math.isqrt(max(1, int(LARGEST[x.dtype]) // count)))
    if most < 1:
        return None
    x, w = g.at_most(x, most), g.at_most(w, most)
    bound = count * x.bound * w.bound
    error = count * (x.bound * w.error + w.bound * x.error + x.error * w.error)
    error = error and error + (ENGINE_ERROR + ULP[x.dtype]) * bound
    names = {batch: "b", feature: "f"} | {d: str(k) for k, d in enumerate(space)}
    form = ", ".join(names[d] for d in range(len(order)))
    spots = ", ".join(map(str, range(len(space))))
    attribute = (
        f"dimension_numbers = #stablehlo.conv<[{form}]x[i, o, {spots}]->[{form}]>,"
        f" batch_group_count = 1 : i64, feature_group_count = {groups} : i64, window_strides ="
        f" {ints([r[1] for r in rows])}, padding = dense<"
        f"{[list(r[2]) for r in rows]}> : tensor<{len(rows)}x2xi64>"
    )
    sizes = {batch: x.shape[batch], feature: kernel[1]}
    sizes |= {d: r[3] for d, r in zip(space, rows, strict=True)}
    shape = tuple(sizes[d] for d in range(len(order)))
    if math.prod(shape) > MAX_ELEMENTS:
        return None
    return g.emit("convolution", (x, w), shape, x.dtype, attribute, "", bound, error)


def loop(g: Grower) -> Var | None:
    """A counted while: v = clamp(v + step * k), reading a value from outside."""
    x = g.pick(lambda v: v.is_float and not v.error)
    if x is None:
        return None
    step = g.pick(lambda v: v.type == x.type and not v.error) or x
    x, step = g.at_most(x, 8), g.at_most(step, 8)
    zero, result = g.constant(0, (), "i32"), g.name()
    names = [g.name() for _ in range(14)]
    k, v, k2, v2, n, p, one, low, high, kf, kb, sum_, next_, product = names
    t, i32 = x.type, "tensor<i32>"
    scalar = type_text((), x.dtype)
    less = "comparison_direction = #stablehlo<comparison_direction LT>"
    trip = g.rng.randint(1, 4)
    g.lines.append(
        f'{result}:2 = "stablehlo.while"({zero.name}, {x.name}) ({{ ^bb0({k}: {i32}, {v}: {t}):'
        f' {n} = "stablehlo.constant"() <{{value = dense<{trip}> : {i32}}}> : () -> {i32}'
        f' {p} = "stablehlo.compare"({k}, {n}) <{{{less}}}> : ({i32}, {i32}) -> tensor<i1>'
        f' "stablehlo.return"({p}) : (tensor<i1>) -> () }}, {{ ^bb0({k2}: {i32}, {v2}: {t}):'
        f' {one} = "stablehlo.constant"() <{{value = dense<1> : {i32}}}> : () -> {i32}'
        f' {low} = "stablehlo.constant"() <{{value = dense<-8.0> : {scalar}}}> : () -> {scalar}'
        f' {high} = "stablehlo.constant"() <{{value = dense<8.0> : {scalar}}}> : () -> {scalar}'
        f' {kf} = "stablehlo.convert"({k2}) : ({i32}) -> {scalar}'
        f' {kb} = "stablehlo.broadcast_in_dim"({kf}) <{{broadcast_dimensions = array<i64>}}>'
        f" : ({scalar}) -> {t}"
        f' {product} = "stablehlo.multiply"({step.name}, {kb}) : ({t}, {t}) -> {t}'
        f' {sum_} = "stablehlo.add"({v2}, {product}) : ({t}, {t}) -> {t}'
        f' {v}n = "stablehlo.clamp"({low}, {sum_}, {high}) : ({scalar}, {t}, {scalar}) -> {t}'
        f' {next_} = "stablehlo.add"({k2}, {one}) : ({i32}, {i32}) -> {i32}'
        f' "stablehlo.return"({next_}, {v}n) : ({i32}, {t}) -> () }})'
        f" : ({i32}, {t}) -> ({i32}, {t})"
    )
    return Var(f"{result}#1", x.dtype, x.shape, 8.0)


GROWTHS: tuple[Growth, ...] = (
    dynamic_slice,
    dynamic_update_slice,
    gather,
    scatter,
    sort,
    reduce_window,
    convolution,
    loop,
)
