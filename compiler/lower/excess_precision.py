"""Excess precision: a short float is rounded where it is stored, not between operations on chip.

The engines compute in fp32, so what stays inside a kernel stays fp32: around short sums always,
elsewhere where it costs nothing, which is everywhere but in front of Vector's bf16 mode. Across
memory a value keeps its declared type, unless it would be stored in fp32 anyway or is so small that
its bytes take no time. `--disable-mixed-precision-accumulation` turns all of it off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.ops import BitcastConvertAttrs
from shardwright.compiler.ir.traits import CASTS
from shardwright.compiler.ir.types import Value
from shardwright.compiler.isa.kernel import KernelProgram, Node
from shardwright.compiler.lower.task import CONTRACT, COPY, LOOP, WRITE, Task
from shardwright.compiler.support.rounding import EXACT

if TYPE_CHECKING:
    from shardwright.compiler.lower.body import Body
    from shardwright.compiler.lower.group import Groups

SMALL_BYTES = 2400
"""Bytes in fp32 up to which a value crosses memory in fp32: what one DMA descriptor moves in its
least time (documented: dma_descriptor_min_bytes of NeuronCore-v2), so that it costs none.
"""

_FAST_IN_BF16 = frozenset(("add", "multiply", "subtract"))
"""Of two tensors in SBUF, all in bf16: half the cycles (documented: `compiler/isa/costs.py`)."""

_SHORT_TILE = 128 * 64 // 2
"""Elements up to which a tile takes Vector's least time in either mode: 128 lanes, 64 cycles, two
per element (documented: `compiler/isa/costs.py`).
"""

_BY_TYPE = frozenset(("bitcast_convert", "contract", "load_indexed", "store", "store_indexed"))


def keep_wide(program: KernelProgram) -> KernelProgram:
    """`program` with fp32 in place of every short float that arithmetic of the kernel reads.

    Stores, contractions and whatever looks at bits still get the declared type.
    """
    return replace(program, nodes=tuple(_Widener(program).run()))


class _Widener:
    """Which nodes become fp32, then the nodes with conversions where a declared type is read."""

    def __init__(self, program: KernelProgram) -> None:
        self.nodes = program.nodes
        self.sizes = program.iter_dims
        rounding: list[bool] = []
        for node in self.nodes:
            rounding.append(self._rounds(node, rounding))
        self.wide = [False] * len(self.nodes)
        self._choose(rounding)
        self.made: list[Node] = []
        self._rounded: dict[int, int] = {}

    def _rounds(self, node: Node, rounding: Sequence[bool]) -> bool:
        """Whether a node makes a short float of a value that does not fit it as it is."""
        if not node.dtype.is_narrow or "view" in node.attrs or node.attrs.get("rounds"):
            return False
        exact = node.op in EXACT and node.op not in _BY_TYPE
        if exact or (node.op == "reduce" and node.attrs["kind"] in ("max", "min")):
            return any(rounding[i] or self.nodes[i].dtype is DType.F32 for i in node.inputs)
        return _is_short_arithmetic(node) or node.op == "contract"

    def _choose(self, rounding: Sequence[bool]) -> None:
        """Make wide what rounds and what arithmetic reads, readers first."""
        around = self._around_sums()
        readers: list[list[int]] = [[] for _ in self.nodes]
        for n, node in enumerate(self.nodes):
            for i in () if _minds_type(node) else node.inputs:
                readers[i].append(n)
        for n in reversed(range(len(self.nodes))):
            free = n in around or not any(self._is_fast(r) for r in readers[n])
            self.wide[n] = rounding[n] and bool(readers[n]) and free

    def _around_sums(self) -> set[int]:
        """Short sums, the arithmetic that feeds them, and what reads any of it."""
        nodes, found = self.nodes, set[int]()
        for n in reversed(range(len(nodes))):
            is_sum = nodes[n].op == "reduce" and nodes[n].attrs["kind"] == "add"
            if n in found or (is_sum and nodes[n].dtype.is_narrow):
                found |= {n, *(i for i in nodes[n].inputs if _is_short_arithmetic(nodes[i]))}
        for n, node in enumerate(nodes):
            if _is_short_arithmetic(node) and any(i in found for i in node.inputs):
                found.add(n)
        return found

    def _is_fast(self, number: int) -> bool:
        """Whether Vector takes a node at twice the rate because all its types are bf16."""
        node = self.nodes[number]
        if math.prod(self.sizes[a] for a in node.iter_dims) <= _SHORT_TILE or self.wide[number]:
            return False
        if node.op not in _FAST_IN_BF16 or node.dtype is not DType.BF16:
            return False
        operands = [self.nodes[i] for i in node.inputs]
        tensors = all(o.op not in ("constant", "contract") for o in operands)
        return tensors and all(o.dtype is DType.BF16 for o in operands)

    def run(self) -> list[Node]:
        """The nodes of the kernel with its wide values."""
        now: list[int] = []
        for n, node in enumerate(self.nodes):
            declared = _minds_type(node)
            inputs = tuple(self._declared(i, now[i]) if declared else now[i] for i in node.inputs)
            dtype = DType.F32 if self.wide[n] else node.dtype
            if node.op == "convert" and self.made[inputs[0]].dtype is dtype:
                now.append(inputs[0])
                continue
            attrs = {k: v for k, v in node.attrs.items() if k != "rounds"}
            now.append(self._add(replace(node, inputs=inputs, dtype=dtype, attrs=attrs)))
        return self.made

    def _declared(self, number: int, now: int) -> int:
        """An old value in its declared type, rounded where that is first read."""
        if not self.wide[number]:
            return now
        if number not in self._rounded:
            old = self.nodes[number]
            self._rounded[number] = self._add(Node("convert", (now,), old.iter_dims, old.dtype))
        return self._rounded[number]

    def _add(self, node: Node) -> int:
        self.made.append(node)
        return len(self.made) - 1


def _is_short_arithmetic(node: Node) -> bool:
    """Elementwise code or a reduction with a short result."""
    elementwise = node.op in OPS and OPS[node.op].elementwise and node.op != "bitcast_convert"
    return node.dtype.is_narrow and (elementwise or node.op == "reduce")


def _minds_type(node: Node) -> bool:
    """Whether a node must see its inputs in their declared types."""
    if node.op == "store" and node.dtype is DType.F32:
        return False  # `is_held_wide`
    return node.op in _BY_TYPE or (node.op == "convert" and not node.dtype.is_float)


def is_held_wide(body: Body, value: Value) -> bool:
    """Whether scratch holds the short float `value` in fp32: it is small, computed, and all its
    readers are arithmetic.
    """
    producer = body.producer.get(value)
    small = 0 < 4 * value.type.num_elements <= SMALL_BYTES
    if not (
        body.excess_precision and small and value.type.dtype.is_narrow and producer is not None
    ):
        return False
    made = producer.kind in (LOOP, CONTRACT) and producer.op.name not in (COPY, WRITE)
    return made and all(_takes_wide(reader) for reader in body.readers[value])


def _takes_wide(reader: Task) -> bool:
    """Whether a task computes with its operands as numbers of any float type."""
    minds = reader.op.name in (COPY, WRITE) or isinstance(reader.op.attrs, BitcastConvertAttrs)
    if reader.kind != LOOP or minds:
        return False
    return reader.op.name not in CASTS or reader.result.type.dtype.is_float


def stored_wide_elsewhere(groups: Groups) -> set[Value]:
    """fp32 results of conversions that are stored although their short operand, which nobody else
    reads, was stored by another kernel: joined with that kernel, the value is stored once and never
    rounded.
    """
    if not groups.body.excess_precision:
        return set()
    kernel = groups.kernel_of
    found = set()
    for task in groups.body.tasks:
        if task.op.name not in CASTS or task.result.type.dtype is not DType.F32:
            continue
        producer = groups.body.maker(task.data[0])
        if producer is None or kernel[producer.number] == kernel[task.number]:
            continue
        if _only_widened(groups, producer, task) and groups.is_stored(
            task, groups.parts[kernel[task.number]].members
        ):
            found.add(task.result)
    return found


def _only_widened(groups: Groups, producer: Task, convert: Task) -> bool:
    """Whether `convert` is the one reader of a short float that `producer` computes."""
    if producer.kind not in (LOOP, CONTRACT) or groups.is_live_out(producer):
        return False
    short = producer.result.type.dtype.is_narrow
    return short and set(groups.users(producer)) == {convert.number}
