"""The table of op lowerings: how an op becomes tasks, indexing maps and kernel nodes.

Each file of an op family registers its ops here; makers run while the body is built, `indexing`
while kernels are formed, `emit` when a kernel is written out. Collectives are no compute kernels:
they have makers alone, as ops that become copies and writes. Elementwise ops of the graph IR share
one entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.types import Op
from shardwright.compiler.lower.indexing_map import IndexingMap
from shardwright.compiler.lower.task import LOOP, Task

if TYPE_CHECKING:
    from shardwright.compiler.lower.body import Body
    from shardwright.compiler.lower.emit import Emitter
    from shardwright.compiler.lower.space import Space

ELEMENTWISE = "elementwise"


@dataclass(frozen=True, slots=True)
class Lowering:
    """The rules of the tasks of one op name: `indexing` gives the map of the result; `emit` returns
    the node of the result, or -1 when the task only writes memory.
    """

    indexing: Callable[[Space, Task], IndexingMap]
    emit: Callable[[Emitter, Task], int]


Maker = Callable[["Body", Op], None]
MAKERS: dict[str, Maker] = {}
LOWERINGS: dict[str, Lowering] = {}


def register_maker(name: str, make: Maker) -> None:
    """Say how an op is added to a body. Raises ValueError on a second definition of the name."""
    if name in MAKERS:
        raise ValueError(f"the tasks of {name} are defined twice")
    MAKERS[name] = make


def register(name: str, lowering: Lowering) -> None:
    """Add the rules of tasks. Raises ValueError on a second definition of the name."""
    if name in LOWERINGS:
        raise ValueError(f"the lowering of {name} is defined twice")
    LOWERINGS[name] = lowering


def maker_of(name: str) -> Maker | None:
    """What adds the tasks of an op to a body, None for ops that cannot be lowered."""
    return MAKERS.get(_entry(name))


def lowering_of(name: str) -> Lowering:
    """The rules of tasks by the name of their op."""
    return LOWERINGS[_entry(name)]


def _entry(name: str) -> str:
    opdef = OPS.get(name)
    return ELEMENTWISE if opdef is not None and opdef.elementwise else name


def as_loop(body: Body, op: Op) -> None:
    """One task that computes `op` from its operands."""
    body.add_task(op, LOOP, op.operands)


def first_operand(emitter: Emitter, task: Task) -> int:
    """The node of what a task only stores."""
    return emitter.operand(task, 0)
