"""What the fields of attributes hold, so that attributes follow where a dim is added in front.

A field is declared with its role (`dims: tuple[int, ...] = field(metadata=DIMS)`); `stacked` reads
the roles. Attributes without one are not known to have a form for stacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

Role = Mapping[str, Callable[[Any, int], Any]]
_STACKED = "stacked"


def _role(stacked: Callable[[Any, int], Any]) -> Role:
    """What becomes of the field where every value of the op gets a first dim of so many."""
    return {_STACKED: stacked}


DIM = _role(lambda dim, count: dim + 1)
DIMS = _role(lambda dims, count: tuple(d + 1 for d in dims))
PLACES = _role(lambda dims, count: (0, *(d + 1 for d in dims)))
"""Per dim of one value the dim of another that has its index."""
SIZES = _role(lambda sizes, count: (count, *sizes))


def per_dim(neutral: int) -> Role:
    """A number per dim, `neutral` where a dim is left as it is."""
    return _role(lambda numbers, count: (neutral, *numbers))


def is_stackable(attrs: Any) -> bool:
    """Whether `stacked` knows what becomes of `attrs`."""
    return attrs is not None and any(_STACKED in f.metadata for f in fields(attrs))


def stacked(attrs: Any, count: int) -> Any:
    """The attributes of the same op on `count` values at once, stacked along a new first dim."""
    roles = {f.name: f.metadata[_STACKED] for f in fields(attrs) if _STACKED in f.metadata}
    return replace(attrs, **{n: role(getattr(attrs, n), count) for n, role in roles.items()})
