"""Writing a kernel out: loads, nodes and stores over numbered iter dims.

The tasks of a kernel are emitted twice. The first time, aligning strides and re-making values
splits iter dims; the second time the iter dims are final and get their numbers. Equal loads and
rematerialised values appear once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations, zip_longest
from types import MappingProxyType
from typing import Any, NoReturn

from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.isa.kernel import Bound, KernelProgram, Node, View, root_of
from shardwright.compiler.lower import registry
from shardwright.compiler.lower.indexing_map import IndexingMap, IterDim, all_leaves, leaves
from shardwright.compiler.lower.remat_in_kernel import Occurrence, rematerialise
from shardwright.compiler.lower.space import Space
from shardwright.compiler.lower.storage import Place, Storage
from shardwright.compiler.lower.task import (
    WRITE,
    ClashError,
    NeedsCopyError,
    NeedsScratchError,
    Task,
)
from shardwright.compiler.lower.views import Coordinate, Layout, align, strides_of

Attrs = Mapping[str, Any]
NONE: Attrs = MappingProxyType({})


class Emitter:
    """Nodes of one kernel. `space` holds its indexing maps, `storage` says where values live."""

    def __init__(self, space: Space, storage: Storage, stored: Callable[[Task], bool]) -> None:
        self.space = space
        self.body = space.body
        self.storage = storage
        self._stored = stored
        self._task: Task | None = None
        self._start()
        self._run()
        self._start()  # iter dims are final now
        self._run()
        self._check_overlap()

    def _start(self) -> None:
        self.nodes: list[Node] = []
        self._spans: list[frozenset[IterDim]] = []
        self._memo: dict[object, int] = {}
        self.rematerialised: dict[Occurrence, int] = {}
        self._results: dict[Value, int] = {}
        self._loads: list[tuple[int, View]] = []
        self._indexed: list[tuple[int, int]] = []
        self._stores: list[tuple[int, View]] = []
        self._iter_dims = {a: i for i, a in enumerate(_ordered_iter_dims(self.space))}

    def _run(self) -> None:
        for task in self.space.tasks:
            self._task = task
            self._results[task.result] = registry.lowering_of(task.op.name).emit(self, task)
        for task in self.space.tasks:
            if self._results[task.result] >= 0 and self._stored(task):
                self._store(task)

    def program(self, name: str, loc: int) -> KernelProgram:
        """The finished kernel."""
        sizes = tuple(a.size for a in self._iter_dims)
        return KernelProgram("compute", name, sizes, tuple(self.nodes), {}, loc)

    def numbers(self, iter_dims: Iterable[IterDim]) -> tuple[int, ...]:
        """Sorted numbers of iter dims, which get one if they are new."""
        return tuple(sorted(self._iter_dims.setdefault(a, len(self._iter_dims)) for a in iter_dims))

    def iter_dims_of(self, node: int) -> set[IterDim]:
        """Iter dims a node's value spans."""
        return set(self._spans[node])

    def node(
        self,
        op: str,
        inputs: Sequence[int],
        iter_dims: Iterable[IterDim],
        dtype: DType,
        attrs: Attrs = NONE,
    ) -> int:
        """Append a node, or find the equal one."""
        span = frozenset(iter_dims)
        key = (op, tuple(inputs), span, dtype, repr(sorted(attrs.items())))
        if key not in self._memo:
            self.nodes.append(Node(op, tuple(inputs), self.numbers(span), dtype, dict(attrs)))
            self._spans.append(span)
            self._memo[key] = len(self.nodes) - 1
        return self._memo[key]

    def constant(self, value: float | int | bool, dtype: DType) -> int:
        """The node of one number."""
        return self.node("constant", (), (), dtype, {"value": value})

    def pointwise(self, op: str, inputs: Sequence[int], dtype: DType, attrs: Attrs = NONE) -> int:
        """A node at the points of its inputs."""
        return self.node(op, inputs, {a for i in inputs for a in self._spans[i]}, dtype, attrs)

    def elementwise(self, op: Op, inputs: Sequence[int]) -> int:
        """The node of an elementwise op of the graph."""
        attrs: dict[str, Any] = {}
        if op.attrs is not None:
            given = ((name, getattr(op.attrs, name, None)) for name in ("direction", "rounds"))
            attrs = {name: value for name, value in given if value}
        return self.pointwise(op.name, inputs, op.result.type.dtype, attrs)

    def operand(self, task: Task, k: int) -> int:
        """The node of operand `k`: rematerialised, computed here, or loaded."""
        value, indexing = task.data[k], self.space.operand(task, k)
        if self.body.is_rematerialised(value):
            return rematerialise(self, value, indexing)
        if self.space.is_inside(value):
            return self._results[self.body.base(value)]
        return self.load(value, indexing)

    def load(
        self,
        value: Value,
        indexing: IndexingMap,
        everywhere: bool = False,
        place: Place | None = None,
    ) -> int:
        """A load of `value`; `everywhere` makes it span iter dims it is only repeated along,
        `place` is a part of it to load.
        """
        place = place or self.storage.place(value)
        view = self.view(place, indexing, value)
        bounds = tuple(self._bound(c, indexing, value) for c in place.bounds)
        moving = [view.strides, *(b.strides for b in bounds)]
        span = {
            a
            for a in all_leaves(indexing)
            if everywhere or any(s[self._iter_dims[a]] for s in moving)
        }
        attrs = {"view": view} | ({"bounds": bounds} if bounds else {})
        number = self.node("load", (), span, self.storage.tensors[view.tensor].dtype, attrs)
        assert self._task is not None
        self._loads.append((self._task.number, view))
        return number

    def view(self, place: Place, indexing: IndexingMap, value: Value) -> View:
        """`place` in the index space of the kernel.

        Raises NeedsCopyError when pieces and iter dims do not divide.
        """
        return View(place.tensor, place.layout.offset, self._strides(place.layout, indexing, value))

    def _bound(self, coordinate: Coordinate, indexing: IndexingMap, value: Value) -> Bound:
        where = coordinate.where
        strides = self._strides(where, indexing, value)
        return Bound(where.offset.const, coordinate.size, coordinate.unit, strides)

    def _strides(self, layout: Layout, indexing: IndexingMap, value: Value) -> tuple[int, ...]:
        """Step per iter dim of the kernel. Raises NeedsCopyError when pieces do not divide."""
        pairs: list[tuple[IterDim, int]] = []
        for expr, pieces in zip(indexing, layout.dims, strict=True):
            if not align(expr, pieces):
                raise self.storage.dense_copy_of(value)
            pairs += strides_of(expr, pieces)
        self.numbers(a for a, _ in pairs)
        strides = [0] * len(self._iter_dims)
        for iter_dim, stride in pairs:
            strides[self._iter_dims[iter_dim]] += stride
        return tuple(strides)

    def _store(self, task: Task) -> None:
        """Store the result of a task where it lives."""
        place = self.storage.window(task)
        indexing = self.space.results[task.result]
        view = self.view(place, indexing, task.result)
        span = [a for expr in indexing for a in leaves(expr)]
        number = self._results[task.result]
        dtype = self.storage.tensors[place.tensor].dtype
        self.nodes.append(Node("store", (number,), self.numbers(span), dtype, {"view": view}))
        self._spans.append(frozenset())
        self._stores.append((task.number, view))

    def note_indexed_load(self, tensor: int) -> None:
        """Remember that this task reads elements of a tensor that are not known here."""
        assert self._task is not None
        self._indexed.append((self._task.number, tensor))

    def note_store(self, task: Task, view: View) -> None:
        """Remember a store that a rule emitted itself."""
        self._stores.append((task.number, view))

    def _check_overlap(self) -> None:
        """Memory that is read and written here must be read and written at the same points.

        Two writes to one memory must fill disjoint ranges.
        """
        tasks, memory = self.body.tasks, partial(root_of, self.storage.tensors)
        for (first, a), (second, b) in combinations(self._stores, 2):
            if memory(a.tensor) == memory(b.tensor) and not _no_alias(tasks[first], tasks[second]):
                raise ClashError(first, second)
        for writer, out in self._stores:
            moved = [(r, v.tensor) for r, v in self._loads if not _same_points(v, out)]
            for reader, tensor in (*moved, *self._indexed):
                if memory(tensor) == memory(out.tensor):
                    self._order(reader, writer, out.tensor)

    def _order(self, reader: int, writer: int, tensor: int) -> NoReturn:
        """Ask for another try in which `reader` is done before `writer` overwrites `tensor`."""
        if reader != writer:
            raise ClashError(reader, writer)
        task = self.body.tasks[writer]
        if task.op.name == WRITE:
            raise NeedsCopyError(task.data[0])
        raise NeedsScratchError(self.storage.output_of(tensor))


def _no_alias(first: Task, second: Task) -> bool:
    """True when two tasks write ranges of one tensor that do not meet in some dim."""
    a, b = first.window, second.window
    if a is None or b is None:
        return False
    for d, (x, y) in enumerate(zip(a.starts, b.starts, strict=True)):
        low, high = (x.const, y.const)
        ends = (low + (a.sizes[d] - 1) * a.steps[d], high + (b.sizes[d] - 1) * b.steps[d])
        if x.terms == y.terms and (ends[0] < high or ends[1] < low):
            return True
    return False


def _same_points(a: View, b: View) -> bool:
    steps = zip_longest(a.strides, b.strides, fillvalue=0)  # later views know of more iter dims
    return a.offset == b.offset and all(x == y for x, y in steps)


def _ordered_iter_dims(space: Space) -> list[IterDim]:
    """Iter dims in the order of the largest result, so that arrays stay near memory order."""
    ranked = sorted(space.tasks, key=lambda t: -t.result.type.num_elements)
    found: dict[IterDim, None] = {}
    for task in ranked:
        found.update(dict.fromkeys(all_leaves(space.results[task.result])))
    for task in ranked:
        for k in range(len(task.data)):
            found.update(dict.fromkeys(all_leaves(space.operand(task, k))))
    return list(found)
