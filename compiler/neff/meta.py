"""What the table of contents of a program says about it: which machine, which cores, which
options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shardwright.compiler.isa.program import Program
from shardwright.compiler.neff.manifest import MAX_CORE_FILES
from shardwright.compiler.support.schema import FLAG, TEXT, Rule, Table, one_of, row, several

_SIZE = Rule("a number of cores", lambda v: type(v) is int and 0 < v <= MAX_CORE_FILES)
_MAP = Rule("a map", lambda v: isinstance(v, dict))
PROGRAM_META = Table(
    {},
    {
        "name": TEXT,
        "target": TEXT,
        "lnc": one_of(1, 2),
        "hypothetical": FLAG,
        "mesh": several(row(TEXT, _SIZE)),
        "coordinates": several(row(TEXT, several(TEXT))),
        "options": _MAP,
    },
    is_open=True,
)


def check_program_meta(program: Program, meta: Mapping[str, Any]) -> None:
    """Raises ValueError when `meta` is not that of a program's file, or contradicts the program."""
    PROGRAM_META.require(meta, "meta")
    mesh = {axis: size for axis, size in meta.get("mesh", ())}
    if len(mesh) != len(meta.get("mesh", ())) or math.prod(mesh.values()) > MAX_CORE_FILES:
        raise ValueError(f"meta: a mesh of at most {MAX_CORE_FILES} cores is required, got {mesh}")
    for name, axes in meta.get("coordinates", ()):
        if name not in program.inputs or not mesh.keys() >= set(axes):
            raise ValueError(f"meta: {name} is no coordinate along {axes} of the mesh {mesh}")
