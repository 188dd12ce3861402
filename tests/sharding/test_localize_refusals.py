"""Every requirement of every rule: a sharding that is local, and what is refused when one value of
it lies otherwise. Both axes have two cores, so that types alone tell nothing apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shardwright.compiler.diagnostics import Loc, ShardingError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import (
    ConvolutionAttrs,
    GatherAttrs,
    PadAttrs,
    ReduceWindowAttrs,
    ReverseAttrs,
    ScatterAttrs,
    ShardingConstraintAttrs,
    SortAttrs,
)
from shardwright.compiler.ir.types import Value
from shardwright.sharding.localize import localize
from shardwright.sharding.localize.context import _show
from shardwright.sharding.partition.mesh import make_mesh
from tests.support.building import Builder
from tests.support.partitioned import partitioned

MESH = make_mesh({"dp_replicate": 2, "dp_shard": 2})
R, S, N = ("dp_replicate",), ("dp_shard",), ()
RS = R + S
I32 = DType.I32
AXES, DIM = "SW_LOCALIZE_AXES", "SW_LOCALIZE_DIM"

Dims = dict[str, tuple[tuple[str, ...], ...]]
Build = Callable[[Builder], dict[str, Value]]
Rule = tuple[Build, Dims, list[tuple[Dims, str, str]]]
"""Named values, a sharding that is local, and changes of it with code and text of the refusal."""
RULES: dict[str, Rule] = {}


def convolved(groups: int = 1, batch_groups: int = 1) -> Build:
    """Images [N, H, W, C], filters [2, 2, in, out]; one row and column of padding in front."""

    def build(b: Builder) -> dict[str, Value]:
        x, w = b.input((4, 4, 4, 4)), b.input((2, 2, 4 // groups, 4))
        numbers = ((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))
        windows = ((1, 1), (1, 1), (0, 0), (1, 1), (1, 1))
        attrs = ConvolutionAttrs(*numbers, *windows, groups, batch_groups, DType.F32)
        return {"x": x, "w": w, "y": b.op("convolution", x, w, attrs=attrs)}

    return build


def at(dim: int, axes: tuple[str, ...] = S, rank: int = 4) -> tuple[tuple[str, ...], ...]:
    """Sharded along one dim."""
    return tuple(axes if d == dim else N for d in range(rank))


TIED = "dim . of .* and dim . of .* sharded alike, got"
WINDOWS = "windows slide along it"
RULES |= {
    "convolution": (
        convolved(),
        {"x": (S, N, N, N), "w": (N, N, N, R), "y": (S, N, N, R)},
        [
            ({"x": (S, R, N, N)}, DIM, WINDOWS),
            ({"x": (S, N, R, N)}, DIM, WINDOWS),
            ({"w": (S, N, N, R)}, DIM, WINDOWS),
            ({"w": (N, S, N, R)}, DIM, WINDOWS),
            ({"w": at(4), "y": (S, R, N, N)}, DIM, WINDOWS),
            ({"w": at(4), "y": (S, N, R, N)}, DIM, WINDOWS),
            ({"x": (R, N, N, N)}, AXES, TIED),
            ({"w": (N, N, N, S)}, AXES, TIED),
            ({"x": (S, N, N, R)}, AXES, TIED),
            ({"w": (N, N, S, R)}, AXES, TIED),
        ],
    ),
    "convolution in groups": (
        convolved(groups=2),
        {"x": at(0), "y": at(0)},
        [
            ({"x": (S, N, N, R)}, DIM, "dim 3 whole on every core \\(2 groups split it"),
            ({"w": at(2)}, AXES, "dim 3 of operand 0 and dim 2 of operand 1 sharded alike"),
            ({"w": at(3)}, AXES, "dim 3 of operand 1 and dim 3 of the result sharded alike"),
            ({"y": (S, N, N, R)}, AXES, "dim 3 of operand 1 and dim 3 of the result"),
        ],
    ),
    "convolution in groups of the batch": (
        convolved(batch_groups=2),
        {},
        [({"x": at(0)}, DIM, "dim 0 whole on every core \\(2 groups split it")],
    ),
}


def pooled(b: Builder) -> dict[str, Value]:
    x = b.input((4, 4))
    attrs = ReduceWindowAttrs("max", (1, 2), (1, 2), (0, 0), (0, 0))
    return {"x": x, "y": b.op("reduce_window", x, attrs=attrs)}


def ordered(b: Builder) -> dict[str, Value]:
    x, other = b.input((4, 4)), b.input((4, 4))
    attrs = SortAttrs(1, ((0, "LT", "total"),))
    first, second = b.append(make_op("sort", (x, other), attrs, loc=b.loc))
    return {"x": x, "other": other, "first": first, "second": second}


def product(b: Builder) -> dict[str, Value]:
    """[batch, M, K] x [batch, K, N]."""
    x, w = b.input((4, 4, 4)), b.input((4, 4, 4))
    return {"x": x, "w": w, "y": b.dot(x, w, ((2,), (1,)), ((0,), (0,)))}


def one(name: str, *shapes: tuple[int, ...], attrs: Any = None) -> Build:
    """An op of inputs x0, x1, ... and its result y."""

    def build(b: Builder) -> dict[str, Value]:
        inputs = [b.input(shape) for shape in shapes]
        values = {f"x{n}": value for n, value in enumerate(inputs)}
        return values | {"y": b.op(name, *inputs, attrs=attrs)}

    return build


def made(make: Callable[[Builder, Value], Value], *shape: int) -> Build:
    """What `make` does with x."""

    def build(b: Builder) -> dict[str, Value]:
        x = b.input(shape or (4, 4))
        return {"x": x, "y": make(b, x)}

    return build


def updated(b: Builder) -> dict[str, Value]:
    """Rows 0 and 1 of x are replaced."""
    x, rows, zero = b.input((4, 4)), b.input((2, 4)), b.constant(0, I32)
    return {"x": x, "rows": rows, "y": b.dynamic_update_slice(x, rows, [zero, zero])}


def joined(b: Builder) -> dict[str, Value]:
    x, other = b.input((4, 4)), b.input((4, 4))
    return {"x": x, "other": other, "y": b.concatenate([x, other], 1)}


def held(b: Builder) -> dict[str, Value]:
    x, other = b.input((4, 4)), b.input((4, 4))
    first, second = b.barrier(x, other)
    return {"x": x, "other": other, "first": first, "second": second}


def looped(b: Builder) -> dict[str, Value]:
    x = b.input((4, 4))
    (y,) = b.loop(3, [x], lambda inner, _, carries: [inner.op("negate", carries[0])])
    (body,) = b.ops[-1].regions
    return {"x": x, "y": y, "inside": body.inputs[1], "next": body.outputs[1]}


PART, ALIKE = "it takes a part", "operand and result"
BESIDE = "something is put beside it"
BOTH = (S, R)
MOVED = {"x": BOTH, "y": BOTH}
RULES |= {
    "window": (
        pooled,
        {"x": (S, N), "y": (S, N)},
        [({"x": (R, N)}, AXES, TIED), ({"x": BOTH, "y": BOTH}, DIM, WINDOWS)],
    ),
    "sort": (
        ordered,
        dict.fromkeys(("x", "other", "first", "second"), (S, N)),
        [
            (dict.fromkeys(("x", "other", "first", "second"), (N, S)), DIM, "it is sorted"),
            ({"other": (R, N)}, AXES, TIED),
            ({"first": (R, N)}, AXES, TIED),
            ({"second": (R, N)}, AXES, TIED),
        ],
    ),
    "sort of one": (
        one("sort", (4, 4), attrs=SortAttrs(0, ((0, "GT", "total"),))),
        {"x0": (N, S), "y": (N, S)},
        [
            ({"y": (N, R)}, AXES, TIED),
            ({"x0": (S, N), "y": (S, N)}, DIM, "it is sorted"),
        ],
    ),
    "product": (
        product,
        {"x": (S, N, R), "w": (S, R, N), "y": (S, N, N)},
        [
            ({"w": (R, S, N)}, AXES, TIED),
            ({"w": (S, N, R)}, AXES, TIED),
            ({"y": (R, N, N)}, AXES, TIED),
            ({"x": (S, R, N), "w": (S, N, N)}, AXES, TIED),
            ({"x": (S, N, N), "w": (S, N, R)}, AXES, TIED),
        ],
    ),
    "sum": (
        made(lambda b, x: b.reduce(x, "add", (0,))),
        {"x": (R, S), "y": (S,)},
        [({"y": (R,)}, AXES, TIED)],
    ),
    "elementwise": (
        one("add", (4, 4), (4, 4)),
        {"x0": BOTH, "x1": BOTH, "y": BOTH},
        [({"x0": (R, S)}, AXES, TIED), ({"x1": (R, S)}, AXES, TIED)],
    ),
    "elementwise with bounds": (
        one("clamp", (), (4, 4), ()),
        {"x1": BOTH, "y": BOTH},
        [({"x1": (R, S)}, AXES, TIED)],
    ),
    "transpose": (
        made(lambda b, x: b.transpose(x, (1, 0))),
        {"x": BOTH, "y": (R, S)},
        [({"y": BOTH}, AXES, TIED)],
    ),
    "broadcast": (
        made(lambda b, x: b.broadcast(x, (4, 4, 3), (0, 1)), 4, 1),
        {"x": (S, N), "y": (S, R, N)},
        [({"x": (R, N)}, AXES, TIED)],
    ),
    "broadcast of two": (
        made(lambda b, x: b.broadcast(x, (4, 4), (1, 0)), 4, 4),
        {"x": BOTH, "y": (R, S)},
        [({"x": (S, N)}, AXES, TIED)],
    ),
    "reshape": (
        made(lambda b, x: b.reshape(x, (16,))),
        {"x": (RS, N), "y": (RS,)},
        [
            ({"x": BOTH, "y": (S,)}, "SW_LOCALIZE_RESHAPE", "at the same distance"),
            ({"x": (R, S)}, "SW_LOCALIZE_RESHAPE", "merged or split"),
        ],
    ),
    "slice": (
        made(lambda b, x: b.slice(x, (0, 0), (4, 2))),
        {"x": (S, N), "y": (S, N)},
        [({"x": (R, N)}, AXES, TIED), ({"x": BOTH, "y": BOTH}, DIM, f"dim 1 .*{PART}")],
    ),
    "slice with steps": (
        made(lambda b, x: b.slice(x, (0, 0), (4, 4), (1, 2))),
        {"x": (S, N), "y": (S, N)},
        [({"x": BOTH, "y": BOTH}, DIM, f"dim 1 .*{PART}")],
    ),
    "slice behind a start": (
        made(lambda b, x: b.slice(x, (0, 2), (4, 4))),
        {"x": (S, N), "y": (S, N)},
        [({"x": BOTH, "y": BOTH}, DIM, f"dim 1 .*{PART}")],
    ),
    "concatenate": (
        joined,
        {"x": (S, N), "other": (S, N), "y": (S, N)},
        [
            ({"other": (R, N)}, AXES, TIED),
            ({"x": BOTH, "other": BOTH, "y": BOTH}, DIM, BESIDE),
        ],
    ),
    **{
        f"pad {n}": (
            one("pad", (4, 4), (), attrs=PadAttrs(*((0, pad) for pad in pads))),
            {"x0": (S, N), "y": (S, N)},
            [({"x0": (R, N)}, AXES, TIED), ({"x0": BOTH, "y": BOTH}, DIM, BESIDE)],
        )
        for n, pads in enumerate([(2, 0, 0), (0, 2, 0), (0, 0, 2)])
    },
    "reverse": (
        one("reverse", (4, 4), attrs=ReverseAttrs((1,))),
        {"x0": (S, N), "y": (S, N)},
        [({"x0": (R, N)}, AXES, TIED), ({"x0": BOTH, "y": BOTH}, DIM, PART)],
    ),
    "dynamic slice": (
        made(lambda b, x: b.dynamic_slice(x, [b.constant(0, I32)] * 2, (4, 2))),
        {"x": (S, N), "y": (S, N)},
        [({"x": (R, N)}, AXES, TIED), ({"x": BOTH, "y": BOTH}, DIM, f"dim 1 .*{PART}")],
    ),
    "dynamic update": (
        updated,
        {"x": (N, S), "rows": (N, S), "y": (N, S)},
        [
            ({"y": (N, R)}, AXES, TIED),
            ({"rows": (N, R)}, AXES, TIED),
            (dict.fromkeys(("x", "rows", "y"), (R, S)), DIM, "a part of it is replaced"),
        ],
    ),
    "barrier": (
        held,
        {"x": (S, N), "first": (S, N), "other": (R, N), "second": (R, N)},
        [({"first": (R, N)}, AXES, TIED), ({"second": (S, N)}, AXES, TIED)],
    ),
    "loop": (
        looped,
        {"x": (S, N), "y": (S, N), "inside": (S, N), "next": (S, N)},
        [
            ({"inside": (R, N)}, AXES, "carries and region inputs"),
            ({"next": (R, N)}, AXES, "carries and region outputs"),
            ({"y": (R, N)}, AXES, "carries and results"),
        ],
    ),
    "all_reduce": (
        made(lambda b, x: b.all_reduce(x, R)),
        {"x": (S, N), "y": (S, N)},
        [({"y": (N, S)}, AXES, ALIKE)],
    ),
    "all_gather": (
        made(lambda b, x: b.all_gather(x, 0, S)),
        {"x": (RS, N), "y": (R, N)},
        [({"y": (S, N), "x": (RS, N)}, AXES, "the gathered dim and operand")],
    ),
    "reduce_scatter": (
        made(lambda b, x: b.reduce_scatter(x, 0, S)),
        {"x": (R, N), "y": (RS, N)},
        [({"y": (N, RS)}, AXES, "the scattered dim and result")],
    ),
    "all_slice": (
        made(lambda b, x: b.all_slice(x, 0, S)),
        {"x": (R, N), "y": (RS, N)},
        [({"y": (N, RS)}, AXES, "the sliced dim and result")],
    ),
    "all_to_all": (
        made(lambda b, x: b.all_to_all(x, 0, 1, S)),
        {"x": (N, S), "y": (S, N)},
        [({"x": (S, N)}, AXES, "split and concatenated dims")],
    ),
    "collective_permute": (
        made(lambda b, x: b.collective_permute(x, ((0, 1), (1, 0)), S)),
        {"x": (R, N), "y": (R, N)},
        [({"y": (N, N)}, AXES, "operand and result cut alike")],
    ),
    "sharding_constraint": (
        one("sharding_constraint", (4, 4), attrs=ShardingConstraintAttrs(((), ()))),
        {"x0": (S, N), "y": (S, N)},
        [({"y": (R, N)}, AXES, TIED)],
    ),
    "axes of another mesh": (
        made(lambda b, x: b.all_reduce(x, ("tp",))),
        {},
        [({}, AXES, "requires axes of mesh")],
    ),
    "axes in another order": (
        made(lambda b, x: b.all_reduce(x, S + R)),
        {},
        [({}, "SW_LOCALIZE_ORDER", "requires axes in mesh order")],
    ),
}


def looked_up(attrs: GatherAttrs, table: tuple[int, ...], ids: tuple[int, ...]) -> Build:
    def build(b: Builder) -> dict[str, Value]:
        x, i = b.input(table), b.input(ids, I32)
        return {"x": x, "i": i, "y": b.op("gather", x, i, attrs=attrs)}

    return build


def added(attrs: ScatterAttrs, shape: tuple[int, ...], ids: tuple[int, ...], up: Any) -> Build:
    def build(b: Builder) -> dict[str, Value]:
        x, i, u = b.input(shape), b.input(ids, I32), b.input(up)
        return {"x": x, "i": i, "u": u, "y": b.op("scatter", x, i, u, attrs=attrs)}

    return build


ROWS = GatherAttrs(
    offset_dims=(1,),
    collapsed_slice_dims=(0,),
    start_index_map=(0,),
    index_vector_dim=1,
    slice_sizes=(1, 4),
)
PAIRED = GatherAttrs(  # per batch a row of a table of its own
    offset_dims=(1,),
    collapsed_slice_dims=(1,),
    operand_batching_dims=(0,),
    start_indices_batching_dims=(0,),
    start_index_map=(1,),
    index_vector_dim=1,
    slice_sizes=(1, 1, 4),
)
SUMS = ScatterAttrs(
    update_window_dims=(1,),
    inserted_window_dims=(0,),
    scatter_dims_to_operand_dims=(0,),
    index_vector_dim=1,
    kind="add",
)
VECTOR = "it holds the index vector"
RULES |= {
    "gather": (
        looked_up(ROWS, (8, 4), (4, 1)),
        {"x": (N, R), "i": (S, N), "y": (S, R)},
        [
            ({"i": (R, N), "x": (N, N), "y": (S, N)}, AXES, "indices and batch dims"),
            ({"x": (N, S), "i": (N, N), "y": (N, R)}, AXES, "operand dim 1 and result"),
            ({"x": (S, R)}, AXES, "rows and indices over different axes"),
        ],
    ),
    "gather of pairs": (
        looked_up(replace(ROWS, start_index_map=(0, 1)), (8, 4), (4, 2)),
        {"i": (S, N), "y": (S, N)},
        [({"i": (S, R)}, DIM, VECTOR)],
    ),
    "gather of parts of rows": (
        looked_up(replace(ROWS, slice_sizes=(1, 2)), (8, 4), (4, 1)),
        {"i": (S, N), "y": (S, N)},
        [({"x": (N, R), "y": (S, N)}, DIM, f"dim 1 .*{PART}")],
    ),
    "gather of the first elements of rows": (
        looked_up(replace(ROWS, slice_sizes=(1, 1)), (8, 4), (4, 1)),
        {"i": (S, N), "y": (S, N)},
        [({"x": (N, R), "y": (S, N)}, DIM, f"dim 1 .*{PART}")],
    ),
    "gather of blocks of rows": (
        looked_up(
            replace(ROWS, offset_dims=(1, 2), collapsed_slice_dims=(), slice_sizes=(2, 4)),
            (8, 4),
            (4, 1),
        ),
        {"i": (S, N), "y": (S, N, N)},
        [({"x": (R, N)}, DIM, f"dim 0 .*{PART}")],
    ),
    "gather in batches": (
        looked_up(PAIRED, (4, 8, 4), (4, 1)),
        {"x": (S, N, N), "i": (S, N), "y": (S, N)},
        [({"x": (R, N, N)}, AXES, "batching dims")],
    ),
    "scatter": (
        added(SUMS, (8, 4), (4, 1), (4, 4)),
        {"x": (N, R), "i": (S, N), "u": (S, R), "y": (N, R)},
        [
            ({"y": (R, N)}, AXES, ALIKE),
            ({"u": (N, R)}, AXES, "indices and batch dims"),
            ({"u": (S, N)}, AXES, "operand dim 1 and updates"),
            ({"x": (S, R), "y": (S, R)}, AXES, "rows and indices over different axes"),
        ],
    ),
    "scatter of parts of rows": (
        added(SUMS, (8, 4), (4, 1), (4, 2)),
        {"i": (S, N), "u": (S, N)},
        [({"x": (N, R), "y": (N, R)}, DIM, "dim 1 .*a part of it is updated")],
    ),
}


def part_of(rule: str, change: Dims) -> Any:
    build, dims, _ = RULES[rule]
    b = Builder(loc=Loc("model.py", 41))
    values = build(b)
    outputs = [v for name, v in values.items() if name in ("y", "first", "second")]
    specs = {values[name]: spec for name, spec in (dims | change).items()}
    return partitioned(b.finish(*outputs), MESH, specs)


WITH_A_GOOD_ONE = [rule for rule in RULES if not rule.startswith("axes ")]


def test_dims_are_shown_by_their_axes() -> None:
    assert _show((("dp_shard", "tp"), (), ("ep",))) == "[dp_shard+tp, , ep]"
    assert _show(("dp_shard", "tp")) == "[dp_shard, tp]" and _show("dp_shard") == "dp_shard"


@pytest.mark.parametrize("rule", WITH_A_GOOD_ONE)
def test_a_sharding_that_is_local(rule: str) -> None:
    localize(part_of(rule, {}))


@pytest.mark.parametrize(
    ("rule", "number"), [(rule, n) for rule, row in RULES.items() for n in range(len(row[2]))]
)
def test_what_lies_otherwise_is_refused(rule: str, number: int) -> None:
    change, code, text = RULES[rule][2][number]
    with pytest.raises(ShardingError, match=text) as refused:
        localize(part_of(rule, change))
    assert refused.value.code == code and "model.py:41" in str(refused.value)
