"""What attributes mean, as tables: those of a region by its kind, of a node by its op, of an
instruction by its opcode. Which they are is written in `region.py` and `instructions.py`.
"""

from __future__ import annotations

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
_KEPT_INSIDE: dict[str, Rule] = {"low": _LIMIT, "high": _LIMIT}

REGION_ATTRIBUTES: Mapping[str, Table] = {
    "compute": Table(),
    "idle": Table(),
    "register_load": Table({"register": COUNT, "view": VIEW}, _KEPT_INSIDE),
    "collective_start": Table({"collective": COUNT, "source": _OPERAND, "target": _OPERAND}),
    "collective_wait": Table({"collective": COUNT}),
}


class NodeForm(NamedTuple):
    """How many inputs a node has, and its attributes."""

    inputs: tuple[int, ...]
    attributes: Table


ELEMENTWISE = NodeForm((1, 2, 3), Table())
"""Of every op that has no entry below."""
NODE_FORMS: Mapping[str, NodeForm] = {
    "load": NodeForm((0,), Table({"view": VIEW}, {"bounds": several(BOUND)})),
    "load_indexed": NodeForm((1, 2), Table(_ROWS, {"mode": one_of("clamp", "fill")})),
    "constant": NodeForm((0,), Table({"value": NUMBER})),
    "iota": NodeForm((0,), Table({"atom": COUNT, "start": AFFINE, "step": WHOLE}, _KEPT_INSIDE)),
    "register": NodeForm((0,), Table({"value": AFFINE}, _KEPT_INSIDE)),
    "compare": NodeForm((2,), Table({"direction": _DIRECTION})),
    "convert": NodeForm((1,), Table()),
    "bitcast_convert": NodeForm((1,), Table()),
    "reduce": NodeForm(
        (1,),
        Table(
            {"kind": one_of("add", "max", "min", "and", "or", "xor", "multiply"), "over": COUNTS}
        ),
    ),
    "contract": NodeForm((2,), Table({"over": COUNTS})),
    "store": NodeForm((1,), Table({"view": VIEW})),
    "store_indexed": NodeForm(
        (2,),
        Table(
            {**_ROWS, "kind": one_of("add", "multiply", "max", "min", "replace")},
            {"unique": FLAG, "order": COUNTS},
        ),
    ),
}

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
    (
        *("zero_when", "mode", "scale", "bias"),
        *("op1", "scalar0", "scalar1", "reverse0", "reverse1"),
    )
)
"""Attributes of instructions with a default: an engine that does not get them does the plain
thing."""


def _instruction_table(names: tuple[str, ...]) -> Table:
    must = {n: _VALUES[n] for n in names if n not in OPTIONAL_ATTRIBUTES}
    return Table(must, {n: _VALUES[n] for n in names if n in OPTIONAL_ATTRIBUTES})


INSTRUCTION_ATTRIBUTES: Mapping[str, Table] = {
    name: _instruction_table(definition.attrs) for name, definition in INSTRUCTIONS.items()
}
