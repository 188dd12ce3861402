"""What the backward program gets from the forward program, and what it computes again.

Stored values cost memory between the two programs, once per core. Anything that follows from
parameters alone is computed again (with `reshard_after_forward` that includes gathering weights),
and so is any elementwise or data-moving op whose batch-dependent operands are smaller than its
result or needed anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from shardwright.compiler.ir.opdef import Kind
from shardwright.compiler.ir.ops import AllGatherAttrs
from shardwright.compiler.ir.traits import CHEAP, of
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.compiler.passes.placement import place_late

_NEVER_REPEATED = (
    of(Kind.CONTRACTION, Kind.WINDOW, Kind.CONTROL, Kind.COLLECTIVE)
    | of(Kind.INDEXED, combines=True)
) - {"all_gather"}
_LOOK_BACK = 6  # ops; longer chains of cheap ops are stored somewhere in between


@dataclass(slots=True)
class _Chooser:
    """The state of one walk back through the ops of the step."""

    on_batch: set[Value]
    derivable: set[Value]
    regather: bool
    needed: set[Value]
    producers: Mapping[Value, Op]

    def recompute(self, op: Op) -> bool:
        """Whether the backward program repeats a forward op instead of reading its results."""
        if op.name in _NEVER_REPEATED:
            return False
        if not any(v in self.on_batch for v in op.results):
            return self.regather or not isinstance(op.attrs, AllGatherAttrs)
        if op.name not in CHEAP:
            return False
        stored = sum(v.type.num_bytes for v in op.results if v in self.needed)
        return self._operand_bytes(op, _LOOK_BACK) < stored

    def _operand_bytes(self, op: Op, depth: int) -> int:
        """Bytes to store so that `op` can be repeated (shared operands counted twice at worst)."""
        return sum(self._bytes_to_have(v, depth) for v in dict.fromkeys(op.operands))

    def _bytes_to_have(self, value: Value, depth: int) -> int:
        """Bytes to store for the backward program to have `value`: it, or what it follows from."""
        if value not in self.on_batch or value in self.derivable or value in self.needed:
            return 0
        own = value.type.num_bytes
        op = self.producers.get(value)
        if op is None or not depth or op.name not in CHEAP:
            return own
        return min(own, self._operand_bytes(op, depth - 1))


def _derivable(graph: Graph, on_batch: set[Value]) -> set[Value]:
    """Values that follow from batch inputs by cheap ops alone (token ids, masks): not stored."""
    derivable = set(graph.inputs)
    for op in graph.ops:
        if op.name in CHEAP and all(v in derivable or v not in on_batch for v in op.operands):
            derivable.update(op.results)
    return derivable


def choose_residuals(
    graph: Graph,
    forward: set[Op],
    targets: Sequence[Value],
    on_batch: set[Value],
    reshard_after_forward: bool,
) -> tuple[list[Op], list[Value]]:
    """The ops of the backward program, and the forward values it reads in program order.

    Ops that stood among the forward ops now stand right before their first reader, so that what
    they make (a gathered weight, a derivative) does not wait in memory through the program.
    `forward` are the ops of the forward program, `targets` what backward must compute.
    """
    chooser = _Chooser(
        on_batch,
        _derivable(graph, on_batch),
        reshard_after_forward,
        set(targets),
        graph.producers(),
    )
    backward: list[Op] = []
    stored: list[Value] = []
    for op in reversed(graph.ops):
        wanted = [v for v in op.results if v in chooser.needed]
        if not wanted:
            continue
        if op in forward and not chooser.recompute(op):
            stored.extend(reversed(wanted))
            continue
        backward.append(op)
        chooser.needed.update(op.operands)
    return place_late(backward[::-1], _beside_forward(graph, forward)), stored[::-1]


def _beside_forward(graph: Graph, forward: set[Op]) -> set[Op]:
    """Every op up to the last of `forward`: repeated ops, and derivatives written beside them."""
    behind = takewhile(lambda op: op not in forward, reversed(graph.ops))
    return set(graph.ops).difference(behind)
