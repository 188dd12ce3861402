"""Which memory every value of a function lives in, and the order that sharing memory demands.

Inputs, outputs and constants are tensors; what crosses kernels goes to scratch. An output that
shares the memory of an input is written where it belongs when every reader of the old value can run
before; otherwise it is computed elsewhere and copied at the end (`NeedsScratchError` asks for
that).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.facts import keeps_order, permutation
from shardwright.compiler.ir.ops import UnfoldAttrs
from shardwright.compiler.ir.traits import IDENTITIES
from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.isa.kernel import Tensor
from shardwright.compiler.lower import views
from shardwright.compiler.lower.body import Body
from shardwright.compiler.lower.excess_precision import is_held_wide
from shardwright.compiler.lower.order import Order
from shardwright.compiler.lower.task import (
    COLLECTIVE,
    CONTRACT,
    COPY,
    LOOP,
    PARTITIONS,
    WRITE,
    NeedsCopyError,
    NeedsScratchError,
    Task,
)
from shardwright.compiler.lower.views import Coordinate, Layout, dense

BLOCKED = 64
"""Rows whose number divides by this are moved in blocks, the fewest being two rows on each of 32
partitions (`codegen/row_blocks.py`)."""


@dataclass(frozen=True, slots=True)
class Place:
    """A value in memory: tensor number and strides, and where windows may leave it."""

    tensor: int
    layout: Layout
    bounds: tuple[Coordinate, ...] = ()


class Storage:
    """Tensors and homes of one body. `aliases` maps output numbers to the input numbers whose
    memory they take over.
    """

    def __init__(
        self,
        body: Body,
        inputs: Sequence[Value],
        aliases: Mapping[int, Value],
        no_alias: Collection[int],
    ) -> None:
        self.body = body
        self.tensors: list[Tensor] = []
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.must_store: set[Value] = set()
        self._takeovers: list[tuple[Value, Value, int]] = []  # (owner, root, output)
        self._home: dict[Value, Place] = {}
        self.order = Order(body)
        self._number = {v: i for i, v in enumerate(inputs)}
        for i, value in enumerate(inputs):
            self.inputs.append(len(self.tensors))
            self._add(value, Tensor(f"in{i}", value.type.shape, value.type.dtype, "input"))
        self._overwritten = set(aliases.values())
        self._rewritten = {body.root(t.target) for t in body.tasks if t.target is not None}
        for k, value in enumerate(map(body.now, body.graph.outputs)):
            self._place_output(k, value, aliases.get(k), k in no_alias)
        self._order_rewrites()
        for owner, root, k in self._takeovers:
            self._before_overwriting(owner, root, k)
        self._fixed = (list(self.tensors), dict(self._home))

    def reset(self) -> None:
        """Forget scratch and constants, before kernels are written out again."""
        self.tensors, self._home = list(self._fixed[0]), dict(self._fixed[1])

    def output_of(self, tensor: int) -> int:
        """Output number of an output tensor, -1 for others."""
        return self.outputs.index(tensor) if tensor in self.outputs else -1

    def place(self, value: Value) -> Place:
        """Where `value` can be read. Raises NeedsCopyError when strides cannot say it."""
        base, chain = self.body.path(value)
        place = self.home(base)
        layout, seen = place.layout, base
        bounds: tuple[Coordinate, ...] = ()
        for view in chain:
            op = self.body.views[view]
            if isinstance(op.attrs, UnfoldAttrs) and op.attrs.padded:
                padded = views.padded_windows(seen.type.shape, layout, op.attrs)
                if padded is None:
                    raise self.dense_copy_of(seen)
                (layout, bounds), seen = padded, view
                continue
            behind = _through(self.body, view, layout)
            moved = [_through(self.body, view, b.where) for b in bounds]
            if behind is None or None in moved:
                raise self.dense_copy_of(seen)
            bounds = tuple(
                replace(b, where=where)
                for b, where in zip(bounds, moved, strict=True)
                if where is not None
            )
            layout, seen = behind, view
        return Place(place.tensor, layout, bounds)

    def dense_copy_of(self, value: Value) -> NeedsCopyError | NeedsScratchError:
        """The request for a dense `value`: a copy, or an output not permuted at its source."""
        root = self.body.root(self.body.base(value))
        place = self.home(root)
        output = self.output_of(place.tensor)
        permuted = place.layout != dense(root.type.shape)
        return NeedsScratchError(output) if permuted and output >= 0 else NeedsCopyError(value)

    def home(self, value: Value) -> Place:
        """Memory of a base value; scratch or a constant is made on first use."""
        root = self.body.root(value)
        if root in self._home:
            return self._home[root]
        if root in self.body.constants:
            op = self.body.constants[root]
            name, data = f"c{len(self.tensors)}", op.attrs.data
            self._add(root, Tensor(name, root.type.shape, root.type.dtype, "constant", data=data))
        else:
            self._scratch(root)
        return self._home[root]

    def _scratch(self, root: Value) -> None:
        """Scratch for a value, in the order its readers walk if its producer can write any."""
        layout = self._wanted_layout(root)
        sizes = [piece for pieces in layout.dims for piece in pieces]
        shape = tuple(size for size, _ in sorted(sizes, key=lambda p: -p[1]))
        wide = root not in self._rewritten and is_held_wide(self.body, root)
        dtype = DType.F32 if wide else root.type.dtype
        self._add(root, Tensor(f"t{len(self.tensors)}", shape, dtype, "scratch"), layout)

    def _wanted_layout(self, root: Value) -> Layout:
        """The layout most loop readers of a contraction's result walk row-major, else dense;
        where short rows cannot be moved in blocks, that of its views with the longest rows.

        A contraction writes rows of either orientation at the same cost; a loop fusion that reads
        against the order in memory loads element by element. Collectives need dense memory.
        """
        natural = dense(root.type.shape)
        producer = self.body.producer.get(root)
        if producer is None or producer.kind != CONTRACT:
            return natural
        loops: Counter[Layout] = Counter()
        views = {natural}
        for task in self.body.tasks:
            for value in task.data:
                base, chain = self.body.path(value)
                if base is not root:
                    continue
                if task.kind == COLLECTIVE or task.target is root:
                    return natural
                behind, layout = self._behind(value)
                wanted = layout if behind is root else natural
                if task.kind == LOOP:
                    loops[wanted] += bool(chain)
                views.add(wanted)
        if loops:
            return max(loops, key=lambda k: (loops[k], k == natural))
        if _row(natural)[1] % BLOCKED == 0:
            return natural
        return max(sorted(views, key=str), key=lambda k: (_row(k)[0], k == natural))

    def window(self, task: Task) -> Place:
        """Where a task stores its result: its home, or the part of it that the task fills."""
        place = self.home(task.result)
        if (filled := task.window) is None:
            return place
        layout = views.window(place.layout, filled)
        assert layout is not None, "the target of a write is dense"
        return Place(place.tensor, layout)

    def _add(self, value: Value, tensor: Tensor, layout: Layout | None = None) -> None:
        """A new tensor that `value` fills, densely unless told otherwise."""
        self._home[value] = Place(len(self.tensors), layout or dense(value.type.shape))
        self.tensors.append(tensor)

    def _place_output(self, k: int, value: Value, owner: Value | None, no_alias: bool) -> None:
        """Make output tensor `k` and decide which value is stored there."""
        alias = self._number[owner] if owner is not None else -1
        number = len(self.tensors)
        self.tensors.append(Tensor(f"out{k}", value.type.shape, value.type.dtype, "output", alias))
        self.outputs.append(number)
        base, layout = self._behind(value)
        root = None if base is None else self.body.root(base)
        if root is not None and root is owner and layout == dense(value.type.shape):
            return
        if (
            base is not None
            and root is not None
            and not no_alias
            and self._takes(base, root, layout)
        ):
            self._home[root] = Place(number, layout)
            self.must_store.add(base)
            if owner is not None:
                self._takeovers.append((owner, root, k))
            return
        self._copy_to_output(k, value, owner, number)

    def _behind(self, value: Value) -> tuple[Value | None, Layout]:
        """(base, its layout) such that storing the base that way gives `value` row-major; no base
        if a view is not 1:1.
        """
        base, chain = self.body.path(value)
        layout: Layout | None = dense(value.type.shape)
        for view in reversed(chain):
            op = self.body.views[view]
            if layout is None:
                break
            if keeps_order(op):
                layout = views.reshape(layout, op.operand.type.shape)
            elif (order := permutation(op)) is not None:
                layout = views.transpose(layout, [order.index(d) for d in range(len(order))])
            elif op.name not in IDENTITIES:
                return None, dense(())
        return (None, dense(())) if layout is None else (base, layout)

    def _takes(self, base: Value, root: Value, layout: Layout) -> bool:
        """True when the memory of `root` may be the output itself."""
        task = self.body.producer.get(base)
        if task is None or root in self._home or root in self.body.constants:
            return False
        if root not in self.body.producer and root not in self.body.made:
            return False  # an input
        simple = task.op.name != WRITE and task.kind != COLLECTIVE and base is root
        return simple or layout == dense(root.type.shape)

    def _copy_to_output(self, k: int, value: Value, owner: Value | None, number: int) -> None:
        """Copy `value` to output `k` after everything that reads the memory's old content."""
        body = self.body
        by = Op(COPY, (value,), (Value(value.type),), loc=body.loc_of(value))
        base = body.base(value)
        if base in self._overwritten:
            value = body.copy(value, by)
        result = body.copy(value, by)
        task = body.producer[result]
        task.fusable = owner is None
        self._home[result] = Place(number, dense(value.type.shape))
        self.must_store.add(result)
        if owner is not None:
            self._takeovers.append((owner, result, k))

    def _before_overwriting(self, owner: Value, root: Value, output: int) -> None:
        """Let all readers of an input run before the tasks that write `root` over it."""
        body = self.body
        writers = [t for t in body.tasks if body.root(t.result) is root]
        readers = self.order.readers(owner)
        for writer in writers:
            if readers & self.order.following(writer):
                raise NeedsScratchError(output)
            writer.after |= readers - {writer.number}

    def _order_rewrites(self) -> None:
        """A write in place follows the readers of the version it overwrites."""
        for task in self.body.tasks:
            if task.target is not None:
                self.must_store.add(task.target)
                task.after |= self.order.readers(task.target) - {task.number}


def _row(layout: Layout) -> tuple[int, int]:
    """(contiguous elements of a partition: those of the dims inside the first one, from the
    innermost out, that fills the partitions; the size of that one, 0 without one).
    """
    row = 1
    for size, stride in sorted((p for dim in layout.dims for p in dim), key=lambda p: p[1]):
        if stride != row or (size >= PARTITIONS and row > 1):
            return row, size
        row *= size
    return row, 0


def _through(body: Body, view: Value, layout: Layout) -> Layout | None:
    """Layout behind one view op."""
    if view in body.windows:
        return views.window(layout, body.windows[view])
    return views.behind(body.views[view], layout)
