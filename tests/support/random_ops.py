"""One function per kind of random op: operands from the grower's pool, the op with random but valid
attributes, bounds of the result. None: no operand fits.
"""

from __future__ import annotations

import math

from tests.support.random_graphs import (
    BOOL,
    ENGINE_ERROR,
    FLOATS,
    INTS,
    LARGEST,
    LONG_SIZES,
    MAX_ELEMENTS,
    SIZES,
    ULP,
    Grower,
    Growth,
    Var,
    ints,
)

_SMOOTH: dict[str, tuple[float, float]] = {  # name -> (Lipschitz bound, largest result) on [-8, 8]
    "tanh": (1, 1),
    "logistic": (0.25, 1),
    "sine": (1, 1),
    "cosine": (1, 1),
}
_POSITIVE: dict[str, tuple[float, float]] = {  # the same for operands in [1, 9]
    "sqrt": (0.5, 3),
    "rsqrt": (0.5, 1),
    "log": (1, 2.2),
    "log_plus_one": (0.5, 2.4),
    "cbrt": (0.34, 2.1),
}


def unary(g: Grower) -> Var | None:
    """Operators that are exact on whole numbers."""
    x = g.pick()
    if x is None:
        return None
    if x.dtype == BOOL:
        return g.like("not", [x], 0, 0)
    if not x.is_float:
        signed = x.dtype[0] == "i"
        names = ("not", "popcnt", "count_leading_zeros", *(("negate", "abs", "sign") * signed))
        return g.like(g.rng.choice(names), [x], 0, 0)
    names = ("negate", "abs") if x.error else ("negate", "abs", "sign", "floor", "ceil")
    return g.like(g.rng.choice(names), [x], max(1.0, x.bound), x.error)


def halved(g: Grower) -> Var | None:
    """floor(x / 2) and its kin: fractions appear and go again."""
    x = g.pick(lambda v: v.is_float and not v.error)
    if x is None:
        return None
    half = g.like("multiply", [x, g.constant(0.5, x.shape, x.dtype)], x.bound, 0)
    name = g.rng.choice(("floor", "ceil", "round_nearest_even", "round_nearest_afz"))
    return g.like(name, [half], x.bound, 0)


def smooth(g: Grower) -> Var | None:
    """Functions of the scalar engine."""
    x = g.float_value()
    if x is None:
        return None
    x = g.at_most(x, 8)
    if g.rng.random() < 0.5:
        name, (slope, top) = g.rng.choice(sorted(_SMOOTH.items()))
    elif g.rng.random() < 0.3:
        x = g.at_most(x, 1)
        name, (slope, top) = g.rng.choice(("exponential", "exponential_minus_one")), (2.8, 2.8)
    else:
        name, (slope, top) = g.rng.choice(sorted(_POSITIVE.items()))
        x = g.like("abs", [x], x.bound, x.error)
        x = g.like("add", [x, g.constant(1, x.shape, x.dtype)], 9, x.error)
    return g.like(name, [x], top, slope * x.error + ENGINE_ERROR * top)


def binary(g: Grower) -> Var | None:
    x = g.pick()
    if x is None:
        return None
    y = g.partner(x)
    if x.dtype == BOOL:
        return g.like(g.rng.choice(("and", "or", "xor")), [x, y], 0, 0)
    if not x.is_float:
        names = ("add", "subtract", "multiply", "maximum", "minimum", "and", "or", "xor")
        return g.like(g.rng.choice(names), [x, y], 0, 0)
    name = g.rng.choice(("add", "subtract", "multiply", "maximum", "minimum"))
    if name == "multiply":
        most = 8.0 if x.error or y.error else float(math.isqrt(int(LARGEST[x.dtype])))
        x, y = g.at_most(x, most), g.at_most(y, most)
        error = x.bound * y.error + y.bound * x.error + x.error * y.error
        return g.like(name, [x, y], x.bound * y.bound, error)
    bound = x.bound + y.bound if name in ("add", "subtract") else max(x.bound, y.bound)
    return g.like(name, [x, y], bound, x.error + y.error)


def quotient(g: Grower) -> Var | None:
    """x / (|y| + 1), atan2 and integer division by odd numbers."""
    x = g.pick(lambda v: v.dtype != BOOL)
    if x is None:
        return None
    y = g.partner(x)
    if not x.is_float:
        odd = g.like("or", [y, g.constant(1, x.shape, x.dtype)], 0, 0)
        if x.dtype[0] == "i":  # the smallest number has no quotient by -1
            odd = g.like("and", [odd, g.constant(7, x.shape, x.dtype)], 0, 0)
        return g.like(g.rng.choice(("divide", "remainder")), [x, odd], 0, 0)
    x, y = g.at_most(x, 8), g.at_most(y, 8)
    above = g.like("abs", [y], y.bound, y.error)
    above = g.like("add", [above, g.constant(1, y.shape, y.dtype)], y.bound + 1, y.error)
    name, bound = g.rng.choice((("divide", max(x.bound, 1)), ("atan2", 1.6)))
    error = x.error + x.bound * y.error + ENGINE_ERROR * bound
    return g.like(name, [x, above], bound, error)


def shift(g: Grower) -> Var | None:
    x = g.pick(lambda v: v.dtype in ("i32", "ui32"))
    if x is None:
        return None
    amount = g.like("and", [g.partner(x), g.constant(31, x.shape, x.dtype)], 0, 0)
    names = ("shift_left", "shift_right_logical", "shift_right_arithmetic")
    return g.like(g.rng.choice(names), [x, amount], 0, 0)


def compare(g: Grower) -> Var | None:
    x = g.pick(lambda v: not v.error)
    if x is None:
        return None
    y = g.pick(lambda v: v.type == x.type and not v.error) or x
    direction = g.rng.choice(("EQ", "NE", "LT", "LE", "GT", "GE"))
    attribute = f"comparison_direction = #stablehlo<comparison_direction {direction}>"
    return g.emit("compare", (x, y), x.shape, BOOL, attribute)


def select(g: Grower) -> Var | None:
    p = g.pick(lambda v: v.dtype == BOOL)
    x = p and g.pick(lambda v: v.shape == p.shape and v.dtype != BOOL)
    if p is None or x is None:
        return compare(g)
    y = g.partner(x)
    bound, error = max(x.bound, y.bound), max(x.error, y.error)
    return g.emit("select", (p, x, y), x.shape, x.dtype, bound=bound, error=error)


def convert(g: Grower) -> Var | None:
    """Between floats always, to integers and booleans from exact values."""
    x = g.pick()
    if x is None:
        return None
    to = g.rng.choice(FLOATS if x.error else (*FLOATS, *INTS, BOOL))
    if not x.is_float:
        if to not in FLOATS:
            return g.emit("convert", (x,), x.shape, to)
        return to_float(g, x, to)
    if to in FLOATS:
        x = x if x.error else g.at_most(x, LARGEST[to])
        error = x.error and x.error + ULP[to] * x.bound
        return g.emit("convert", (x,), x.shape, to, bound=x.bound, error=error)
    if to.startswith("u"):
        x = g.like("abs", [x], x.bound, 0)
    x = g.at_most(x, 100)
    return g.emit("convert", (x,), x.shape, to)


def to_float(g: Grower, x: Var, to: str) -> Var:
    """An integer that the float type holds exactly."""
    if x.dtype != BOOL:
        x = g.like("and", [x, g.constant(63, x.shape, x.dtype)], 0, 0)
    return g.emit("convert", (x,), x.shape, to, bound=63)


def iota(g: Grower) -> Var | None:
    shape = g.shape()
    dim = g.rng.randrange(len(shape))
    x = g.emit("iota", (), shape, "i32", f"iota_dimension = {dim} : i64")
    return x if g.rng.random() < 0.5 else to_float(g, x, g.rng.choice(FLOATS))


def reshape(g: Grower) -> Var | None:
    x = g.pick()
    if x is None:
        return None
    shape, left = [], x.size
    for _ in range(g.rng.randint(0, 3)):
        divisors = [n for n in range(1, left + 1) if left % n == 0]
        shape.append(g.rng.choice(divisors))
        left //= shape[-1]
    return moved(g, "reshape", x, (*shape, left))


def moved(g: Grower, op: str, x: Var, shape: tuple[int, ...], attribute: str = "") -> Var:
    """An op that only moves elements."""
    return g.emit(op, (x,), shape, x.dtype, attribute, bound=x.bound, error=x.error)


def transpose(g: Grower) -> Var | None:
    x = g.pick()
    if x is None:
        return None
    order = g.rng.sample(range(len(x.shape)), len(x.shape))
    shape = tuple(x.shape[d] for d in order)
    return moved(g, "transpose", x, shape, f"permutation = {ints(order)}")


def broadcast(g: Grower) -> Var | None:
    """New dims between those of x, and dims of 1 that grow."""
    x = g.pick(lambda v: v.size <= 1000)
    if x is None:
        return None
    grown = tuple(n if n > 1 else g.rng.choice(SIZES) for n in x.shape)
    rank = len(x.shape) + g.rng.randint(0, 2)
    dims = sorted(g.rng.sample(range(rank), len(x.shape)))
    shape = [g.rng.choice((*SIZES, g.rng.choice(LONG_SIZES))) for _ in range(rank)]
    for size, dim in zip(grown, dims, strict=True):
        shape[dim] = size
    attribute = f"broadcast_dimensions = {ints(dims)}"
    return moved(g, "broadcast_in_dim", x, tuple(shape), attribute)


def slice_(g: Grower) -> Var | None:
    x = g.pick()
    return None if x is None else sliced(g, x)


def sliced(g: Grower, x: Var) -> Var:
    """A strided window of x."""
    start = [g.rng.randrange(n) for n in x.shape]
    limit = [g.rng.randint(s + 1, n) for s, n in zip(start, x.shape, strict=True)]
    step = [g.rng.choice((1, 1, 1, 2, 3)) for _ in start]
    shape = tuple(-(-(b - a) // s) for a, b, s in zip(start, limit, step, strict=True))
    attribute = (
        f"start_indices = {ints(start)}, limit_indices = {ints(limit)}, strides = {ints(step)}"
    )
    return moved(g, "slice", x, shape, attribute)


def reverse(g: Grower) -> Var | None:
    x = g.pick()
    if x is None:
        return None
    return moved(g, "reverse", x, x.shape, f"dimensions = {ints(g.dims(x))}")


def pad(g: Grower) -> Var | None:
    x = g.pick(lambda v: v.dtype != BOOL)
    if x is None:
        return None
    low, high = ([g.rng.randint(-1, 3) for _ in x.shape] for _ in range(2))
    inner = [g.rng.choice((0, 0, 1, 2)) for _ in x.shape]
    shape = tuple(
        max(0, a + b + n + max(0, n - 1) * i)
        for a, b, n, i in zip(low, high, x.shape, inner, strict=True)
    )
    if 0 in shape or math.prod(shape) > MAX_ELEMENTS:
        return None
    attribute = (
        f"edge_padding_low = {ints(low)}, edge_padding_high = {ints(high)},"
        f" interior_padding = {ints(inner)}"
    )
    fill = g.constant(g.rng.choice((0, 1, 3)), (), x.dtype)
    bound = max(x.bound, fill.bound)
    return g.emit("pad", (x, fill), shape, x.dtype, attribute, bound=bound, error=x.error)


def concatenate(g: Grower) -> Var | None:
    x = g.pick(lambda v: len(v.shape) > 0)
    if x is None:
        return None
    dim = g.rng.randrange(len(x.shape))

    def beside(v: Var) -> bool:
        return (v.dtype, v.shape[:dim], v.shape[dim + 1 :]) == (
            x.dtype,
            x.shape[:dim],
            x.shape[dim + 1 :],
        ) and len(v.shape) == len(x.shape)

    parts = [x, *(g.pick(beside) or x for _ in range(g.rng.randint(0, 2)))]
    shape = list(x.shape)
    shape[dim] = sum(v.shape[dim] for v in parts)
    bound, error = max(v.bound for v in parts), max(v.error for v in parts)
    attribute = f"dimension = {dim} : i64"
    return g.emit("concatenate", parts, shape, x.dtype, attribute, bound=bound, error=error)


def reduce(g: Grower) -> Var | None:
    x = g.pick(lambda v: len(v.shape) > 0)
    if x is None:
        return None
    dims = g.dims(x, 1)
    count = math.prod(x.shape[d] for d in dims)
    shape = tuple(n for d, n in enumerate(x.shape) if d not in dims)
    prepared = for_fold(g, x, count)
    if prepared is None:
        return None
    op, x, bound, error = prepared
    init = g.identity(op, x.dtype)
    attribute, region = f"dimensions = {ints(dims)}", g.combiner(op, x.dtype)
    return g.emit("reduce", (x, init), shape, x.dtype, attribute, region, bound, error)


def for_fold(g: Grower, x: Var, count: int) -> tuple[str, Var, float, float] | None:
    """(operator, operand, bound, error) of a fold of `count` elements that stays exact."""
    if x.dtype == BOOL:
        return g.rng.choice(("and", "or")), x, 0, 0
    if not x.is_float:
        return g.rng.choice(("add", "maximum", "minimum", "multiply")), x, 0, 0
    op = g.rng.choice(("add", "add", "maximum", "minimum", "multiply"))
    if op == "add":
        most = LARGEST[x.dtype] // count
        if most < 1:
            return None
        x = g.at_most(x, most)
        error = x.error and count * (x.error + (ENGINE_ERROR + ULP[x.dtype]) * x.bound)
        return op, x, count * x.bound, error
    if op == "multiply":
        if x.error:
            return None
        return op, g.at_most(x, 1), 1, 0
    return op, x, x.bound, x.error


def dot(g: Grower) -> Var | None:
    """Batch and contracting dims at random places; the other operand is found or made."""
    x = g.float_value(1)
    if x is None:
        return None
    order = g.rng.sample(range(len(x.shape)), len(x.shape))
    summed = order[: g.rng.randint(1, len(order))]
    batch = order[len(summed) : len(summed) + g.rng.randint(0, 1)]
    free = [d for d in range(len(x.shape)) if d not in summed and d not in batch]
    other = [x.shape[d] for d in (*batch, *summed)]
    room = max(1, MAX_ELEMENTS // max(1, math.prod(x.shape[d] for d in (*batch, *free))))
    other += [min(room, g.rng.choice((*SIZES, 67, 257)))] * g.rng.randint(0, 1)
    places = g.rng.sample(range(len(other)), len(other))
    y = float_of(g, tuple(other[places.index(d)] for d in range(len(other))), x.dtype)
    return None if y is None else _dot(g, x, y, (batch, summed, free), places)


def float_of(g: Grower, shape: tuple[int, ...], dtype: str) -> Var | None:
    """A float value of a shape: from the pool when there is one, else from iota."""
    if math.prod(shape) > MAX_ELEMENTS:
        return None
    found = g.pick(lambda v: v.shape == shape and v.dtype == dtype)
    if found is not None:
        return found
    dim = max(range(len(shape)), key=lambda d: shape[d])
    return to_float(g, g.emit("iota", (), shape, "i32", f"iota_dimension = {dim} : i64"), dtype)


def _dot(
    g: Grower, x: Var, y: Var, dims: tuple[list[int], list[int], list[int]], places: list[int]
) -> Var | None:
    batch, summed, free = dims
    count = math.prod(x.shape[d] for d in summed)
    most = float(math.isqrt(max(1, 2**22 // count)))
    x, y = g.at_most(x, most), g.at_most(y, most)
    bound = count * x.bound * y.bound
    error = count * (x.bound * y.error + y.bound * x.error + x.error * y.error)
    dtype = x.dtype if bound <= LARGEST[x.dtype] else "f32"
    error = error and error + (ENGINE_ERROR + ULP[dtype]) * bound
    right = [d for d in range(len(y.shape)) if d not in places[: len(batch) + len(summed)]]
    shape = [x.shape[d] for d in (*batch, *free)] + [y.shape[d] for d in right]
    places_b, places_s = places[: len(batch)], places[len(batch) : len(batch) + len(summed)]
    attribute = (
        f"dot_dimension_numbers = #stablehlo.dot<lhs_batching_dimensions = {batch},"
        f" rhs_batching_dimensions = {places_b}, lhs_contracting_dimensions = {summed},"
        f" rhs_contracting_dimensions = {places_s}>"
    )
    return g.emit("dot_general", (x, y), shape, dtype, attribute, bound=bound, error=error)


GROWTHS: tuple[Growth, ...] = (
    unary,
    halved,
    smooth,
    smooth,
    binary,
    binary,
    binary,
    quotient,
    shift,
    compare,
    select,
    convert,
    iota,
    reshape,
    transpose,
    transpose,
    broadcast,
    broadcast,
    slice_,
    reverse,
    pad,
    concatenate,
    reduce,
    reduce,
    reduce,
    dot,
    dot,
)
