"""What attributes mean, as tables: those of a kernel by its kind, of a node by its op, of an
instruction by its opcode. Which they are is written in `kernel.py` and `instructions.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

from shardwright.compiler.isa.instructions import INSTRUCTIONS
from shardwright.compiler.isa.schema import AFFINE, BOUND, VIEW
from shardwright.compiler.support.schema import (
    COUNT,
    COUNTS,
    FLAG,
    NOTHING,
    NUMBER,
    TEXT,
    WHOLE,
    WHOLES,
    Rule,
    Table,
    either,
    one_of,
    several,
)

_DIRECTION = one_of("EQ", "NE", "LT", "LE", "GT", "GE")
_LIMIT = either(WHOLE, NOTHING)
_OPERAND = either(COUNT, VIEW)
_ROWS: dict[str, Rule] = {"view": VIEW, "stride": WHOLE, "rows": COUNT}
_COUNTED: dict[str, Rule] = {"replicated": several(TEXT)}
_KEPT_INSIDE: dict[str, Rule] = {"low": _LIMIT, "high": _LIMIT}

KERNEL_ATTRIBUTES: Mapping[str, Table] = {
    "compute": Table(),
    "idle": Table(),
    "register_load": Table({"register": COUNT, "view": VIEW}, {**_KEPT_INSIDE, **_COUNTED}),
    "collective_start": Table({"collective": COUNT, "source": _OPERAND, "target": _OPERAND}),
    "collective_wait": Table({"collective": COUNT}),
}


class NodeKind(enum.Flag):
    """What engines do with a node."""

    NONE = 0
    CURVED = enum.auto()  # of one: an activation function, which only Scalar has
    UNARY = enum.auto()  # of one, others
    BINARY = enum.auto()  # of two
    CHOICE = enum.auto()  # of two and a predicate
    REDUCTION = enum.auto()  # of one, fewer elements than it has
    LINEAR = enum.auto()  # a sum, product or quotient, rounded as it leaves an engine
    EXTREME = enum.auto()  # the larger or smaller of two
    STEADY = enum.auto()  # makes an infinity of nothing finite
    LONG = enum.auto()  # takes an engine several cycles per element


class NodeForm(NamedTuple):
    """How many inputs a node has, its attributes, and its kinds."""

    inputs: tuple[int, ...]
    attributes: Table
    kind: NodeKind = NodeKind.NONE


ELEMENTWISE = NodeForm((1, 2, 3), Table())
"""Of every op that has no entry below."""
NODE_FORMS: Mapping[str, NodeForm] = {
    **{
        op: ELEMENTWISE._replace(kind=kind)
        for kind, ops in {
            NodeKind.CURVED: (
                *("sqrt", "rsqrt", "exponential", "exponential_minus_one", "log", "log_plus_one"),
                *("logistic", "tanh", "sine", "cosine", "erf", "atan", "silu", "silu_dx"),
                *("gelu", "gelu_dx", "gelu_apprx_tanh"),
            ),
            NodeKind.UNARY: ("sign", "floor", "ceil", "round_nearest_even", "reciprocal"),
            NodeKind.UNARY | NodeKind.STEADY: ("not", "negate", "abs", "is_finite"),
            NodeKind.BINARY: (
                *("xor", "shift_left", "shift_right_logical", "shift_right_arithmetic"),
                "random_bits",
            ),
            NodeKind.BINARY | NodeKind.STEADY: ("and", "or"),
            NodeKind.BINARY | NodeKind.LINEAR: ("add", "subtract", "multiply"),
            NodeKind.BINARY | NodeKind.LINEAR | NodeKind.LONG: ("divide",),
            NodeKind.BINARY | NodeKind.LONG: ("power", "remainder"),
            NodeKind.BINARY | NodeKind.EXTREME | NodeKind.STEADY: ("maximum", "minimum"),
            NodeKind.CHOICE | NodeKind.STEADY: ("select",),
        }.items()
        for op in ops
    },
    "load": NodeForm((0,), Table({"view": VIEW}, {"bounds": several(BOUND)})),
    "load_indexed": NodeForm((1, 2), Table(_ROWS, {"mode": one_of("clamp", "fill"), **_COUNTED})),
    "constant": NodeForm((0,), Table({"value": NUMBER})),
    "iota": NodeForm((0,), Table({"atom": COUNT, "start": AFFINE, "step": WHOLE}, _KEPT_INSIDE)),
    "register": NodeForm((0,), Table({"value": AFFINE}, _KEPT_INSIDE)),
    "compare": NodeForm((2,), Table({"direction": _DIRECTION}), NodeKind.STEADY),
    "convert": NodeForm((1,), Table(), NodeKind.UNARY),
    "bitcast_convert": NodeForm((1,), Table()),
    "reduce": NodeForm(
        (1,),
        Table(
            {"kind": one_of("add", "max", "min", "and", "or", "xor", "multiply"), "over": COUNTS}
        ),
        NodeKind.REDUCTION,
    ),
    "contract": NodeForm((2,), Table({"over": COUNTS})),
    "store": NodeForm((1,), Table({"view": VIEW})),
    "store_indexed": NodeForm(
        (2, 3),
        Table(
            {**_ROWS, "kind": one_of("add", "multiply", "max", "min", "replace")},
            {"unique": FLAG, "order": COUNTS, **_COUNTED},
        ),
    ),
}


def nodes_of(*kinds: NodeKind) -> frozenset[str]:
    """The ops of nodes of any of some kinds."""
    return frozenset(op for op, form in NODE_FORMS.items() if any(form.kind & k for k in kinds))


_SCALAR = either(NUMBER, NOTHING)
_VALUES: Mapping[str, Rule] = {
    "zero_when": either(COUNTS, NOTHING),
    "op": TEXT,
    "op0": TEXT,
    "op1": either(TEXT, NOTHING),
    "scalar0": _SCALAR,
    "scalar1": _SCALAR,
    "reverse0": FLAG,
    "reverse1": FLAG,
    "num_reduced": COUNT,
    "value": NUMBER,
    "func": TEXT,
    "scale": _SCALAR,
    "bias": _SCALAR,
    "start": AFFINE,
    "partition_step": WHOLE,
    "steps": WHOLES,
    "direction": _DIRECTION,
    "fill": NUMBER,
    "row_stride": WHOLE,
    "rows": COUNT,
    "mode": one_of("clamp", "fill"),
}
OPTIONAL_ATTRIBUTES = frozenset(
    ("zero_when", "mode", "scale", "bias", "op1", "scalar0", "scalar1", "reverse0", "reverse1")
)
"""Attributes of instructions with a default: an engine that does not get them does the plain
thing."""


def _instruction_table(names: tuple[str, ...]) -> Table:
    must = {n: _VALUES[n] for n in names if n not in OPTIONAL_ATTRIBUTES}
    return Table(must, {n: _VALUES[n] for n in names if n in OPTIONAL_ATTRIBUTES})


INSTRUCTION_ATTRIBUTES: Mapping[str, Table] = {
    name: _instruction_table(definition.attrs) for name, definition in INSTRUCTIONS.items()
}
