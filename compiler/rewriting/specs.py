"""What can be said of a graph and tried: properties that rewrites require and promise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.opdef import Kind
from shardwright.compiler.ir.traits import IDENTITIES, TRAFFIC, of
from shardwright.compiler.ir.types import Graph, Op


@dataclass(frozen=True, slots=True)
class Spec:
    """A property: what it says behind "promises", and the ops of a graph that break it."""

    says: str
    breaking: Callable[[Graph], Iterable[Op]]


def every_op(says: str, holds: Callable[[Op], bool]) -> Spec:
    """Something that holds of each op, in regions too."""
    return Spec(says, lambda graph: (op for op in graph.walk() if not holds(op)))


def without(says: str, names: Collection[str]) -> Spec:
    """No op is one of these."""
    return every_op(f"no {says}", lambda op: op.name not in names)


def no_results(dtypes: Collection[DType], but: Collection[str] = ()) -> Spec:
    """No op but some makes elements of these types."""
    names = " or ".join(dtype.value for dtype in dtypes)
    return every_op(
        f"no results of {names}{' but of ' if but else ''}{' or '.join(but)}",
        lambda op: op.name in but or all(v.type.dtype not in dtypes for v in op.results),
    )


LOOP_FREE = without("loop", of(Kind.CONTROL))
NO_BARRIERS = without("barrier or sharding constraint", IDENTITIES)
NO_WINDOWS = without("convolution or windowed op", of(Kind.WINDOW) | {"convolution"})
NO_CONSTRAINTS = without("sharding constraint", ("sharding_constraint",))
NO_DOUBLES = no_results((DType.F64,))
NO_RANKS = without("position of a core", of(Kind.RANK))
HAVE_GROUPS = every_op(
    "collectives of more than one rank",
    lambda op: op.name not in TRAFFIC or getattr(op.attrs, "group_size", 2) > 1,
)
