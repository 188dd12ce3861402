"""How the attributes of each op are spelled in StableHLO's generic form.

Ops that are more than one line of StableHLO (loops, reductions, collectives) are written by
`printer`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.ops.gather import LAST_STARTS, watched
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


def spelled(value: object) -> str:
    """The attribute that holds a field of an op's attributes, by the type of what is in it."""
    match value:
        case bool():
            return json.dumps(value)
        case int():
            return integer(value)
        case tuple():
            return dense_array(value)
    raise TypeError(f"an attribute of class {type(value).__name__} has no spelling")


def _entries(**fields: str) -> Callable[[Op], list[str]]:
    """`name = value`, for each name the field of the attributes that has the value."""
    return lambda op: [f"{n} = {spelled(getattr(op.attrs, field))}" for n, field in fields.items()]


def _lists(attrs: object, **fields: str) -> str:
    """Lists of dims inside of one attribute, named as in `_entries`."""
    return ", ".join(f"{n} = {_numbers(getattr(attrs, field))}" for n, field in fields.items())


def _dot(op: Op) -> list[str]:
    numbers = _lists(
        op.attrs,
        lhs_batching_dimensions="lhs_batch",
        rhs_batching_dimensions="rhs_batch",
        lhs_contracting_dimensions="lhs_contract",
        rhs_contracting_dimensions="rhs_contract",
    )
    return [f"dot_dimension_numbers = #stablehlo.dot<{numbers}>"]


def _convolution(op: Op) -> list[str]:
    a = op.attrs
    parts = ((a.lhs, "bf"), (a.rhs, "oi"), (a.out, "bf"))
    lhs, rhs, out = (_conv_dims(dims, names) for dims, names in parts)
    return [
        f"dimension_numbers = #stablehlo.conv<{lhs}x{rhs}->{out}>",
        *_CONVOLVED(op),
        f"padding = {_paddings(a.low, a.high)}",
    ]


def _conv_dims(dims: Sequence[int], names: str) -> str:
    """Which dim is what: the two letters, then spatial dims by number."""
    shown = [*names, *map(str, range(len(dims) - 2))]
    return f"[{', '.join(shown[dims.index(d)] for d in range(len(dims)))}]"


_CONVOLVED = _entries(
    feature_group_count="feature_groups",
    batch_group_count="batch_groups",
    window_strides="strides",
    lhs_dilation="lhs_dilation",
    rhs_dilation="rhs_dilation",
)


def _paddings(low: Sequence[int], high: Sequence[int]) -> str:
    """A dense [[low, high], ...] attribute."""
    if not low:
        return "dense<> : tensor<0x2xi64>"
    pairs = ", ".join(_numbers(pair) for pair in zip(low, high, strict=True))
    return f"dense<[{pairs}]> : tensor<{len(low)}x2xi64>"


_SIZES = _entries(window_dimensions="sizes", window_strides="strides")


def _window(op: Op) -> list[str]:
    """Sizes, strides and paddings of a windowed op."""
    return [*_SIZES(op), f"padding = {_paddings(op.attrs.low, op.attrs.high)}"]


def _gather(op: Op) -> list[str]:
    return [
        f"dimension_numbers = #stablehlo.gather<{_walked(op, *_GATHERED)}>",
        f"slice_sizes = {dense_array(op.attrs.slice_sizes)}",
        "indices_are_sorted = false",
        *_last_starts(op),
    ]


def _last_starts(op: Op) -> list[str]:
    """Where a padded operand ended, for who reads the text back."""
    known = op.attrs.last_starts if watched(op) is None else ()
    return [f"{LAST_STARTS} = {dense_array(known)}"] if known else []


def _scatter(op: Op) -> list[str]:
    return [
        f"scatter_dimension_numbers = #stablehlo.scatter<{_walked(op, *_SCATTERED)}>",
        "indices_are_sorted = false",
        f"unique_indices = {json.dumps(op.attrs.unique)}",
        *_last_starts(op),
    ]


_GATHERED = (
    "offset_dims",
    "collapsed_slice_dims",
    "operand_batching_dims",
    "start_indices_batching_dims",
    "start_index_map",
)
_SCATTERED = (
    "update_window_dims",
    "inserted_window_dims",
    "input_batching_dims",
    "scatter_indices_batching_dims",
    "scatter_dims_to_operand_dims",
)


def _walked(op: Op, *names: str) -> str:
    """Dimension numbers of windows whose places are elements."""
    lists = _lists(op.attrs, **dict(zip(names, names, strict=True)))
    return f"{lists}, index_vector_dim = {op.attrs.index_vector_dim}"


def direction(name: str, kind: str = "") -> list[str]:
    """The entries of a comparison; `kind` is the order of floats where it is said."""
    entries = [f"comparison_direction = #stablehlo<comparison_direction {name}>"]
    return entries + [f"compare_type = #stablehlo<comparison_type {kind}>"] * bool(kind)


def moved_to(memory: str) -> list[str]:
    """The entries of JAX's annotation that a value is in `memory`."""
    kind = "pinned_host" if memory == HOST else memory
    return [
        'call_target_name = "annotate_device_placement"',
        f'mhlo.frontend_attributes = {{_xla_buffer_placement = "{kind}"}}',
    ]


ATTRIBUTES: dict[str, Callable[[Op], list[str]]] = {
    "all_gather": _entries(all_gather_dim="dim"),
    "all_to_all": _entries(
        split_dimension="split_dim", concat_dimension="concat_dim", split_count="group_size"
    ),
    "broadcast_in_dim": _entries(broadcast_dimensions="dims"),
    "compare": lambda op: direction(op.attrs.direction),
    "concatenate": _entries(dimension="dim"),
    "constant": lambda op: [f"value = {dense_constant(op.attrs)}"],
    "convolution": _convolution,
    "dot_general": _dot,
    "dynamic_slice": _entries(slice_sizes="sizes"),
    "gather": _gather,
    "host_load": _entries(slice_sizes="sizes"),
    "iota": _entries(iota_dimension="dim"),
    "move_to": lambda op: moved_to(op.attrs.memory),
    "pad": _entries(edge_padding_low="low", edge_padding_high="high", interior_padding="interior"),
    "reduce": _entries(dimensions="dims"),
    "reduce_scatter": _entries(scatter_dimension="dim"),
    "reduce_window": _window,
    "reverse": _entries(dimensions="dims"),
    "scatter": _scatter,
    "select_and_scatter": _window,
    "slice": _entries(start_indices="start", limit_indices="limit", strides="stride"),
    "sort": lambda op: [f"dimension = {integer(op.attrs.dim)}", "is_stable = true"],
    "transpose": _entries(permutation="permutation"),
}


def attributes_of(op: Op) -> list[str]:
    """The attribute entries of `op`; most ops have none."""
    rule = ATTRIBUTES.get(op.name)
    return rule(op) if rule else []
