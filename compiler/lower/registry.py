"""The table of op lowerings: how an op becomes tasks, index-space labels and region nodes.

Each file of an op family registers its ops here; `make` runs while the body is built, `label` while
regions are formed, `emit` when a region is written out. Elementwise ops of the graph IR share one
entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.types import Op
from shardwright.compiler.lower.labels import Labels
from shardwright.compiler.lower.task import Task

if TYPE_CHECKING:
    from shardwright.compiler.lower.body import Body
    from shardwright.compiler.lower.emit import Emitter
    from shardwright.compiler.lower.space import Space

ELEMENTWISE = "elementwise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowering:
    """The rules of one op name.

    `make` adds the op's tasks to a body (None for internal ops); `label` gives the labels of the
    result; `emit` returns the node of the result, or -1 when the task only writes memory or is not
    a compute region.
    """

    make: Callable[[Body, Op], None] | None = None
    label: Callable[[Space, Task], Labels]
    emit: Callable[[Emitter, Task], int]


LOWERINGS: dict[str, Lowering] = {}


def register(name: str, lowering: Lowering) -> None:
    """Add the rules of an op. Raises ValueError on a second definition of the name."""
    if name in LOWERINGS:
        raise ValueError(f"the lowering of {name} is defined twice")
    LOWERINGS[name] = lowering


def find(name: str) -> Lowering | None:
    """The rules of an op, None when there are none."""
    if name in LOWERINGS:
        return LOWERINGS[name]
    opdef = OPS.get(name)
    return LOWERINGS[ELEMENTWISE] if opdef is not None and opdef.elementwise else None
