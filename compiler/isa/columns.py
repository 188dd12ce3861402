"""What the columns of a function may hold: rows with a head of fields, each in its range.

A column is flat numbers and the ends of rows. A field is a number, or names an entry of a pool by
its index. All rows are checked at once, before anything is made of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import Engine, Space
from shardwright.compiler.support.schema import MOST

INSTRUCTION, LOOP, END = 0, 1, 2
"""The first number of a row of code."""


DTYPES, ENGINES, SPACES = tuple(DType), tuple(Engine), tuple(Space)
"""Pools that every file has."""


class Field(NamedTuple):
    """A number of a row: at least `low`, and below the size of a pool or at most `most`."""

    name: str
    pool: str = ""
    low: int = 0
    most: int = MOST


class Head(NamedTuple):
    """The fields every row begins with; what follows comes in groups of `group` numbers. Rows of
    code have a head for each kind of row."""

    fields: tuple[Field, ...]
    group: int = 1
    least: int = 0  # groups
    first: int | None = None


_NAME = Field("name", "strings")
_DTYPE = Field("element type", "dtypes")
_SPACE = Field("memory", "spaces")
_ATTRS = Field("attributes", "attrs")
HEADS: Mapping[str, tuple[Head, ...]] = {
    "affines": (Head((Field("constant", low=-MOST),), 2),),
    "patterns": (
        Head((_SPACE, Field("buffer"), Field("offset", "affines"), Field("start")), 2, least=1),
    ),
    "code": (
        Head(
            (
                Field("kind"),
                Field("opcode", "strings"),
                Field("engine", "engines"),
                _ATTRS,
                Field("destination", "patterns", -1),
                Field("sources"),
                Field("waits"),
            ),
            first=INSTRUCTION,
        ),
        Head((Field("kind"), Field("register"), Field("trip count")), MOST, first=LOOP),
        Head((Field("kind"),), MOST, first=END),
    ),
    "tiles": (
        Head(
            (
                _NAME,
                _SPACE,
                Field("partitions", low=1),
                Field("elements", low=1),
                _DTYPE,
                Field("slots", low=1),
                Field("loop", low=-1),
                Field("address", low=-1),
            ),
            MOST,
        ),
    ),
    "nodes": (Head((Field("op", "strings"), _DTYPE, _ATTRS, Field("inputs"))),),
    # `regions` is the name in files of what holds kernels
    "regions": (
        Head(
            (
                Field("kind", "strings"),
                _NAME,
                _ATTRS,
                Field("location", low=-1),
                Field("tiles"),
                Field("nodes"),
                Field("code"),
                Field("iteration dims"),
            )
        ),
    ),
    "tensors": (
        Head(
            (
                _NAME,
                Field("kind", "strings"),
                _DTYPE,
                Field("alias", "tensors", -1),
                Field("offset", low=-1),
                Field("first byte"),
                Field("bytes"),
            )
        ),
    ),
    "borders": (Head((), 2),),
    "behind": (Head((Field("start", most=1),), 2),),
    "row_sums": (Head((), 2),),
}


def numbers(name: str, sections: Mapping[str, Any]) -> np.ndarray:
    """A column of whole numbers. Raises ValueError for anything else."""
    column = np.asarray(sections[name])
    if column.ndim != 1 or column.dtype.kind not in "iu":
        raise ValueError(f"{name} requires a column of whole numbers, got {column.dtype}")
    if column.size and not -MOST <= int(column.min()) <= int(column.max()) <= MOST:
        raise ValueError(f"{name} requires numbers of at most {MOST}")
    return column.astype(np.int64)


def read_rows(name: str, sections: Mapping[str, Any], pools: Mapping[str, int]) -> list[list[Any]]:
    """The rows of a column; `pools` are sizes by name. Raises ValueError for a row that is none."""
    values, ends = numbers(name, sections), numbers(f"{name}.end", sections)
    starts = np.concatenate((np.zeros(1, np.int64), ends[:-1])) if ends.size else ends
    if (ends < starts).any() or (int(ends[-1]) if ends.size else 0) != values.size:
        raise ValueError(f"{name}: the ends of rows require to rise to {values.size}")
    heads = HEADS[name]
    if len(heads) == 1:
        _check(name, heads[0], values, starts, ends, pools)
    else:  # every row against the head that its first number names
        if (starts == ends).any():
            raise ValueError(f"{name}: a row requires a first number")
        kinds = values[starts]
        for head in heads:
            some = kinds == head.first
            _check(name, head, values, starts[some], ends[some], pools)
        if not np.isin(kinds, (INSTRUCTION, LOOP, END)).all():
            raise ValueError(f"{name}: a row of an unknown kind")
    flat, bounds = values.tolist(), pairwise([0, *ends.tolist()])
    return [flat[start:end] for start, end in bounds]


def _check(
    name: str,
    head: Head,
    values: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    pools: Mapping[str, int],
) -> None:
    rest = ends - starts - len(head.fields)
    if (rest < head.least * head.group).any() or (rest % head.group).any():
        raise ValueError(f"{name}: a row requires {len(head.fields)} fields and whole groups")
    if not head.fields or not starts.size:
        return
    most = [pools[field.pool] - 1 if field.pool else field.most for field in head.fields]
    found = values[starts[:, None] + np.arange(len(head.fields))]
    wrong = (found < [field.low for field in head.fields]) | (found > most)
    if wrong.any():
        row, at = (int(n) for n in np.argwhere(wrong)[0])
        field = head.fields[at]
        raise ValueError(
            f"{name}, row {row}: {field.name} requires {field.low}..{most[at]},"
            f" got {int(found[row, at])}"
        )
