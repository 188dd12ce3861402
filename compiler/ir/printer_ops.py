"""How the attributes of each op are spelled in StableHLO's generic form.

`ATTRIBUTES` maps an op name to its attribute entries; ops that are absent have none. Ops that are
more than one line of StableHLO (loops, reductions, constants, collectives) are written by
`printer`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops.host import HOST
from shardwright.compiler.ir.ops.shape import ConstantAttrs
from shardwright.compiler.ir.types import Op

CHLO_OPS = frozenset(("atan", "erf", "erfc"))
"""Functions that StableHLO spells in CHLO and that stay one op until lowering."""

# The partitioner has no rules for ops that StableHLO does not have: there an elementwise op with
# rules carries the name in the attribute `MEANT`.
STAND_INS = dict.fromkeys(CHLO_OPS, "stablehlo.tanh") | {"random_bits": "stablehlo.xor"}
MEANT = "shardwright.op"

ROUNDING_FORMATS = {DType.BF16: {"exponent_bits": 8, "mantissa_bits": 7}}
"""Formats a conversion may be asked to round to (`ConvertAttrs.rounds`)."""


def dense_array(values: Sequence[int]) -> str:
    """A dense i64 array attribute."""
    return f"array<i64: {', '.join(map(str, values))}>" if values else "array<i64>"


def integer(value: int) -> str:
    """An i64 attribute."""
    return f"{value} : i64"


def _numbers(values: Sequence[int]) -> str:
    return f"[{', '.join(map(str, values))}]"


def dense_constant(attrs: ConstantAttrs) -> str:
    """A dense elements attribute; bytes are spelled in hex, so that no value is rounded."""
    if not attrs.type.num_elements:
        body = ""
    elif attrs.type.dtype is DType.PRED:
        array = attrs.array()
        body = json.dumps(bool(array.flat[0]) if attrs.is_splat else array.tolist())
    else:
        body = f'"0x{attrs.data.hex().upper()}"'
    return f"dense<{body}> : {attrs.type}"


def _dot(op: Op) -> list[str]:
    a = op.attrs
    numbers = (
        f"lhs_batching_dimensions = {_numbers(a.lhs_batch)}, "
        f"rhs_batching_dimensions = {_numbers(a.rhs_batch)}, "
        f"lhs_contracting_dimensions = {_numbers(a.lhs_contract)}, "
        f"rhs_contracting_dimensions = {_numbers(a.rhs_contract)}"
    )
    return [f"dot_dimension_numbers = #stablehlo.dot<{numbers}>"]


def _convolution(op: Op) -> list[str]:
    a = op.attrs
    parts = ((a.lhs, "bf"), (a.rhs, "oi"), (a.out, "bf"))
    lhs, rhs, out = (_conv_dims(dims, names) for dims, names in parts)
    return [
        f"dimension_numbers = #stablehlo.conv<{lhs}x{rhs}->{out}>",
        f"feature_group_count = {integer(a.feature_groups)}",
        f"batch_group_count = {integer(a.batch_groups)}",
        f"window_strides = {dense_array(a.strides)}",
        f"lhs_dilation = {dense_array(a.lhs_dilation)}",
        f"rhs_dilation = {dense_array(a.rhs_dilation)}",
        f"padding = {paddings(a.low, a.high)}",
    ]


def _conv_dims(dims: Sequence[int], names: str) -> str:
    """Which dim is what: the two letters, then spatial dims by number."""
    shown = [*names, *map(str, range(len(dims) - 2))]
    return f"[{', '.join(shown[dims.index(d)] for d in range(len(dims)))}]"


def paddings(low: Sequence[int], high: Sequence[int]) -> str:
    """A dense [[low, high], ...] attribute."""
    if not low:
        return "dense<> : tensor<0x2xi64>"
    pairs = ", ".join(_numbers(pair) for pair in zip(low, high, strict=True))
    return f"dense<[{pairs}]> : tensor<{len(low)}x2xi64>"


def window(op: Op) -> list[str]:
    """Sizes, strides and paddings of a windowed op."""
    a = op.attrs
    return [
        f"window_dimensions = {dense_array(a.sizes)}",
        f"window_strides = {dense_array(a.strides)}",
        f"padding = {paddings(a.low, a.high)}",
    ]


def _gather(op: Op) -> list[str]:
    a = op.attrs
    lists = (
        "offset_dims",
        "collapsed_slice_dims",
        "operand_batching_dims",
        "start_indices_batching_dims",
        "start_index_map",
    )
    numbers = ", ".join(f"{n} = {_numbers(getattr(a, n))}" for n in lists)
    return [
        f"dimension_numbers = #stablehlo.gather<{numbers}, "
        f"index_vector_dim = {a.index_vector_dim}>",
        f"slice_sizes = {dense_array(a.slice_sizes)}",
        "indices_are_sorted = false",
    ]


def _scatter(op: Op) -> list[str]:
    a = op.attrs
    lists = (
        "update_window_dims",
        "inserted_window_dims",
        "input_batching_dims",
        "scatter_indices_batching_dims",
        "scatter_dims_to_operand_dims",
    )
    numbers = ", ".join(f"{n} = {_numbers(getattr(a, n))}" for n in lists)
    return [
        f"scatter_dimension_numbers = #stablehlo.scatter<{numbers}, "
        f"index_vector_dim = {a.index_vector_dim}>",
        "indices_are_sorted = false",
        f"unique_indices = {json.dumps(a.unique)}",
    ]


def _slice(op: Op) -> list[str]:
    a = op.attrs
    return [
        f"start_indices = {dense_array(a.start)}",
        f"limit_indices = {dense_array(a.limit)}",
        f"strides = {dense_array(a.stride)}",
    ]


def _pad(op: Op) -> list[str]:
    a = op.attrs
    return [
        f"edge_padding_low = {dense_array(a.low)}",
        f"edge_padding_high = {dense_array(a.high)}",
        f"interior_padding = {dense_array(a.interior)}",
    ]


def _one(name: str, spell: Callable[[Any], str]) -> Callable[[Op], list[str]]:
    """One entry `name = spell(attrs)`."""
    return lambda op: [f"{name} = {spell(op.attrs)}"]


def _direction(attrs: Any) -> str:
    return f"#stablehlo<comparison_direction {attrs.direction}>"


def _slid(op: Op) -> tuple[int, ...]:
    """Dims along which windows slide."""
    a = op.attrs
    rows = zip(a.sizes, a.strides, a.low, a.high, strict=True)
    return tuple(d for d, row in enumerate(rows) if row != (1, 1, 0, 0))


def _resized(op: Op) -> tuple[int, ...]:
    """Dims whose size changes from the operand to the result."""
    sizes = zip(op.operands[0].type.shape, op.result.type.shape, strict=True)
    return tuple(d for d, (before, after) in enumerate(sizes) if before != after)


def _updated(op: Op) -> tuple[int, ...]:
    """Dims of which a part is replaced."""
    sizes = zip(op.operands[0].type.shape, op.operands[1].type.shape, strict=True)
    return tuple(d for d, (whole, part) in enumerate(sizes) if whole != part)


WHOLE_DIMS: dict[str, Callable[[Op], tuple[int, ...]]] = {
    "concatenate": lambda op: (op.attrs.dim,),
    "dynamic_slice": _resized,
    "dynamic_update_slice": _updated,
    "pad": _resized,
    "reduce_window": _slid,
    "reverse": lambda op: op.attrs.dims,
    "select_and_scatter": _slid,
    "slice": _resized,
    "sort": lambda op: (op.attrs.dim,),
}
"""Dims on which an op cannot be computed from a part: a partitioner has to gather them first."""


def moved_to(memory: str) -> list[str]:
    """The entries of JAX's annotation that a value is in `memory`."""
    kind = "pinned_host" if memory == HOST else memory
    return [
        'call_target_name = "annotate_device_placement"',
        f'mhlo.frontend_attributes = {{_xla_buffer_placement = "{kind}"}}',
    ]


ATTRIBUTES: dict[str, Callable[[Op], list[str]]] = {
    "broadcast_in_dim": _one("broadcast_dimensions", lambda a: dense_array(a.dims)),
    "compare": _one("comparison_direction", _direction),
    "concatenate": _one("dimension", lambda a: integer(a.dim)),
    "constant": _one("value", dense_constant),
    "convolution": _convolution,
    "dot_general": _dot,
    "dynamic_slice": _one("slice_sizes", lambda a: dense_array(a.sizes)),
    "gather": _gather,
    "host_load": _one("slice_sizes", lambda a: dense_array(a.sizes)),
    "iota": _one("iota_dimension", lambda a: integer(a.dim)),
    "pad": _pad,
    "reverse": _one("dimensions", lambda a: dense_array(a.dims)),
    "scatter": _scatter,
    "slice": _slice,
    "transpose": _one("permutation", lambda a: dense_array(a.permutation)),
}
