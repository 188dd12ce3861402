"""L1: a kernel as whole-array NumPy, one axis per iter dim.

`prepare` turns a `KernelProgram` into a callable once: shapes, strides, functions and lifetimes are
worked out there, and a call only computes offsets from registers. Loads are views where the type
allows it; stores come last, so that a kernel may update a tensor in place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.dtypes import DType, strided
from shardwright.compiler.isa.kernel import STORES, Affine, Bound, KernelProgram, Node, View
from shardwright.compiler.isa.program import extent
from shardwright.compiler.support.rounding import EXACT, Draws
from shardwright.sim_cluster.instructions.indexed import (
    PUT_ROWS,
    grid,
    legal_rows,
    split_iter_dims,
    window,
)
from shardwright.sim_cluster.values import elementwise as ew
from shardwright.sim_cluster.values.contract import plan_contract
from shardwright.sim_cluster.values.host_memory import kernel_bytes, require_memory
from shardwright.sim_cluster.values.rounding import narrow

Registers = Mapping[int, int]
Arrays = Sequence[np.ndarray]
Values = list[Any]
Step = Callable[[Values, Arrays, Registers], Any]
Prepared = Callable[[Arrays, Registers], None]


def prepare(
    program: KernelProgram,
    dtypes: Sequence[DType],
    draws: Draws | None = None,
) -> Prepared:
    """The kernel as a callable (flat typed arrays, registers) -> None; `dtypes` are those of the
    tensors. With `draws` every float result is moved within its rounding."""
    if program.kind != "compute":
        raise SimulationError(
            "SW_L1_KIND", f"kernel {program.name} of kind {program.kind} has no array form"
        )
    require_memory(kernel_bytes(program), f"kernel {program.name}")
    steps = _Planner(program, dtypes, draws).plan()

    def run(arrays: Arrays, registers: Registers) -> None:
        _execute(program, steps, arrays, registers)

    return run


def _execute(
    program: KernelProgram,
    steps: Sequence[tuple[int, Step, tuple[int, ...]]],
    arrays: Arrays,
    registers: Registers,
    kept: Collection[int] = (),
) -> Values:
    """Run the steps of a kernel; the values of the nodes `kept` are still there afterwards."""
    values: Values = [None] * len(program.nodes)
    number = 0
    try:
        for number, step, dead in steps:
            values[number] = step(values, arrays, registers)
            for d in dead:
                if d not in kept:
                    values[d] = None
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, MemoryError) as error:
        node = program.nodes[number]
        code = "SW_SIM_MEMORY" if isinstance(error, MemoryError) else "SW_L1_KERNEL"
        raise SimulationError(
            code, f"kernel {program.name}, node {number} ({node.op}): {error}"
        ) from error
    return values


def values_of(
    program: KernelProgram, dtypes: Sequence[DType], wanted: Sequence[int]
) -> Callable[[Arrays, Registers], list[np.ndarray]]:
    """What some nodes of a kernel are, as a callable like that of `prepare`; shapes have an axis
    per iter dim."""
    needed = needed_nodes(program, wanted)
    at = {number: i for i, number in enumerate(needed)}
    nodes = (program.nodes[n] for n in needed)
    kept = tuple(replace(n, inputs=tuple(at[i] for i in n.inputs)) for n in nodes)
    part = replace(program, nodes=kept)
    steps = _Planner(part, dtypes, None).plan()
    asked = [at[n] for n in wanted]

    def run(arrays: Arrays, registers: Registers) -> list[np.ndarray]:
        values = _execute(part, steps, arrays, registers, asked)
        return [values[n] for n in asked]

    return run


def needed_nodes(program: KernelProgram, wanted: Iterable[int]) -> list[int]:
    """Some nodes and all that they are computed from, in order."""
    found: set[int] = set()
    waiting = list(wanted)
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            waiting += program.nodes[number].inputs
    return sorted(found)


def affine(expression: Affine, factor: int = 1) -> Callable[[Registers], int]:
    """`expression * factor` as a fast function of the registers."""
    const, terms = expression.const * factor, tuple((r, c * factor) for r, c in expression.terms)
    if not terms:
        return lambda registers: const
    if len(terms) == 1:
        ((register, coefficient),) = terms
        return lambda registers: const + coefficient * registers[register]
    return lambda registers: const + sum(c * registers[r] for r, c in terms)


@dataclass(slots=True)
class _Value:
    """What planning knows of a node's array: shape, element type, and whether its memory is the
    node's own."""

    shape: tuple[int, ...]
    dtype: DType
    owned: bool


@dataclass(frozen=True, slots=True)
class _Reach:
    """Where a bounded coordinate goes: its value at index 0, size and unit of the dim, step per
    axis, padding the dim needs, and where index 0 is in the padded dim."""

    start: int
    size: int
    unit: int
    steps: Mapping[int, int]
    sides: tuple[int, int]
    first: int
    after: int  # bounded dims behind this one

    def place(self) -> tuple[Any, ...]:
        """The index of a padded array at which index 0 of the coordinate is first."""
        return (..., slice(self.first, None), *(slice(None) for _ in range(self.after)))


def _reach(bound: Bound, sizes: Sequence[int], after: int) -> _Reach:
    steps = {a: s for a, s in enumerate(bound.strides) if s}
    low, high = extent((s, sizes[a]) for a, s in steps.items())
    sides = (max(0, -low - bound.offset), max(0, bound.offset + high + 1 - bound.size))
    first = bound.offset + sides[0]
    return _Reach(bound.offset, bound.size, bound.unit, steps, sides, first, after)


class _Planner:
    """Turns the nodes of one kernel into steps."""

    def __init__(
        self,
        program: KernelProgram,
        dtypes: Sequence[DType],
        draws: Draws | None,
    ) -> None:
        self.program = program
        self.draws = draws
        self.dtypes = dtypes
        # a kernel of scalars gets one axis, so that values stay arrays
        self.sizes = program.iter_dims or (1,)
        self.values: list[_Value] = []
        self.num_stores = sum(node.op in STORES for node in program.nodes)
        self.order = sorted(range(len(program.nodes)), key=lambda n: program.nodes[n].op in STORES)
        self.position = {number: at for at, number in enumerate(self.order)}
        self.last_use = self._last_uses()

    def plan(self) -> list[tuple[int, Step, tuple[int, ...]]]:
        """[(node, step, nodes whose arrays die after it)], stores last."""
        steps = [self._node(number, node) for number, node in enumerate(self.program.nodes)]
        dead: list[list[int]] = [[] for _ in steps]
        for value, at in self.last_use.items():
            dead[at].append(value)
        return [(number, steps[number], tuple(dead[at])) for at, number in enumerate(self.order)]

    def _last_uses(self) -> dict[int, int]:
        """Position of the last reader of each value."""
        last: dict[int, int] = {}
        for number, node in enumerate(self.program.nodes):
            for i in node.inputs:
                last[i] = max(last.get(i, -1), self.position[number])
        return last

    def _node(self, number: int, node: Node) -> Step:
        build = _BUILDERS.get(node.op, _Planner._elementwise)
        step, owned = build(self, number, node)
        if self.draws is not None and node.op not in EXACT:
            step = self._drawn(node, step, self.draws)
        self.values.append(_Value(self.shape(node.iter_dims), node.dtype, owned))
        return step

    def _drawn(self, node: Node, step: Step, draws: Draws) -> Step:
        """`step` with its result moved within its rounding."""
        op, dtype, terms = node.op, node.dtype, self._terms(node)
        given = self.program.nodes[node.inputs[0]].dtype if node.inputs else dtype
        widens = op == "convert" and given.is_float and given.bytes <= dtype.bytes
        if widens or (op == "reduce" and node.attrs["kind"] not in ("add", "multiply")):
            return step
        of_integers = op == "convert" and not given.is_float

        def run(values: Values, arrays: Arrays, registers: Registers) -> np.ndarray:
            sizes = terms(values, arrays, registers) if terms else None
            return draws.moved(op, step(values, arrays, registers), dtype, sizes, of_integers)

        return run

    def _terms(self, node: Node) -> Step | None:
        """Of a node that adds up, the sums of the magnitudes of its terms."""
        if node.op == "reduce" and node.attrs["kind"] == "add":
            (source,), axes = node.inputs, tuple(sorted(node.attrs["over"]))
            return lambda values, arrays, registers: ew.reduce_array(
                np.abs(values[source]), "add", axes
            )
        if node.op != "contract":
            return None
        lhs, rhs = node.inputs
        nodes, held = self.program.nodes, ew.storage(node.dtype)
        contract = plan_contract(
            self.sizes, nodes[lhs].iter_dims, nodes[rhs].iter_dims, node.attrs["over"]
        )
        return lambda values, arrays, registers: contract(
            np.abs(values[lhs]).astype(held), np.abs(values[rhs]).astype(held)
        )

    def shape(self, iter_dims: Sequence[int]) -> tuple[int, ...]:
        """Shape of a value that spans `iter_dims`."""
        spanned = set(iter_dims)
        return tuple(size if a in spanned else 1 for a, size in enumerate(self.sizes))

    def strides(self, view: View, iter_dims: Sequence[int], item: int = 1) -> tuple[int, ...]:
        """Strides of a view per axis, in elements, or bytes of an `item`; 0 where the value does
        not span the iter dim."""
        spanned = set(iter_dims)
        return tuple(view.strides[a] * item if a in spanned else 0 for a in range(len(self.sizes)))

    def _load(self, number: int, node: Node) -> tuple[Step, bool]:
        if "bounds" in node.attrs:
            return self._load_windows(node), True
        view: View = node.attrs["view"]
        tensor, dtype = view.tensor, self.dtypes[view.tensor]
        stored, held = dtype.numpy, ew.storage(node.dtype)
        offset, strides = (
            affine(view.offset, dtype.bytes),
            self.strides(view, node.iter_dims, dtype.bytes),
        )
        shape, converts = self.shape(node.iter_dims), held != stored
        copies = self._is_stored_directly(number)

        def load(values: Values, arrays: Arrays, registers: Registers) -> np.ndarray:
            window = np.ndarray(shape, stored, arrays[tensor], offset(registers), strides)
            if converts:
                return window.astype(held)
            return window.copy() if copies else window

        return load, converts or copies

    def _load_windows(self, node: Node) -> Step:
        """Windows that may leave the tensor: the dims they move along are padded with zeros."""
        view: View = node.attrs["view"]
        tensor, stored, held = view.tensor, self.dtypes[view.tensor], ew.storage(node.dtype)
        item = stored.bytes
        bounds: Sequence[Bound] = node.attrs["bounds"]
        reaches = [_reach(b, self.sizes, len(bounds) - i - 1) for i, b in enumerate(bounds)]
        offset = affine(view.offset + -sum(r.start * r.unit for r in reaches), item)
        bounded = {a for r in reaches for a in r.steps}
        shape = self.shape(node.iter_dims)
        still = [1 if a in bounded else n for a, n in enumerate(shape)]
        moving = self.strides(view, node.iter_dims, item)
        strides = [0 if a in bounded else s for a, s in enumerate(moving)]
        whole = (*still, *(r.size for r in reaches))
        steps = (*strides, *(r.unit * item for r in reaches))
        sides = ((0, 0),) * len(still) + tuple(r.sides for r in reaches)

        def load(values: Values, arrays: Arrays, registers: Registers) -> np.ndarray:
            inside = np.ndarray(whole, stored.numpy, arrays[tensor], offset(registers), steps)
            padded = np.pad(inside, sides)
            found = list(padded.strides[: len(shape)])
            for r, step in zip(reaches, padded.strides[len(shape) :], strict=True):
                padded = padded[r.place()]
                for iter_dim, coefficient in r.steps.items():
                    found[iter_dim] = coefficient * step
            return strided(padded, shape, found).astype(held)

        return load

    def _is_stored_directly(self, number: int) -> bool:
        """True when a view must become a copy: another store could change the memory before it is
        read."""
        read_by_store = any(n.op in STORES and number in n.inputs for n in self.program.nodes)
        return self.num_stores > 1 and read_by_store

    def _load_indexed(self, number: int, node: Node) -> tuple[Step, bool]:
        view: View = node.attrs["view"]
        index = node.inputs[0]
        index_iter_dims = self.program.nodes[index].iter_dims
        rows, row_stride = node.attrs["rows"], node.attrs["stride"]
        fill = node.attrs.get("mode", "clamp") == "fill"
        offset, strides = affine(view.offset), self.strides(view, node.iter_dims)
        shape, dtype = self.shape(node.iter_dims), node.dtype
        pick = self._row_picker(node, index_iter_dims, row_stride, rows)
        tensor = view.tensor

        def load(values: Values, arrays: Arrays, registers: Registers) -> np.ndarray:
            where, legal = legal_rows(values[index], rows)
            result = ew.hold(pick(arrays[tensor], offset(registers), strides, where), dtype)
            if fill and legal is not None:
                result = np.where(legal, result, np.zeros((), result.dtype))
            return np.broadcast_to(result, shape)

        return load, False

    def _row_picker(
        self, node: Node, index_iter_dims: Sequence[int], row_stride: int, rows: int
    ) -> Callable[[np.ndarray, int, tuple[int, ...], np.ndarray], np.ndarray]:
        """Function (array, offset, strides, rows index) -> picked, an axis per iter dim."""
        sizes, rank = self.sizes, len(self.sizes)
        along = [a for a in range(rank) if a in index_iter_dims]
        others, rest = self._beside(along, node.iter_dims)
        order = (*along, *others, *rest)
        back = tuple(order.index(a) for a in range(rank))
        ones = (1,) * len(rest)
        index_shape, other_shape = tuple(sizes[a] for a in along), tuple(sizes[a] for a in others)
        whole_rows = split_iter_dims(
            sizes, node.attrs["view"].strides, node.iter_dims, index_iter_dims
        )
        spanned = self.shape(node.iter_dims)

        def pick(
            array: np.ndarray, offset: int, strides: tuple[int, ...], where: np.ndarray
        ) -> np.ndarray:
            if whole_rows:
                source = window(
                    array, offset, (rows, *other_shape), (row_stride, *(strides[a] for a in others))
                )
                picked: np.ndarray = source[where.reshape(index_shape)]
                return picked.reshape(index_shape + other_shape + ones).transpose(back)
            address = offset + where * row_stride + grid(spanned, strides)
            if address.min() < 0:
                raise IndexError(f"address {address.min()} lies before the tensor")
            result: np.ndarray = array[address]
            return result

        return pick

    def _beside(
        self, along: Sequence[int], iter_dims: Collection[int]
    ) -> tuple[list[int], list[int]]:
        """Of the iter dims that are not `along` an index, those among `iter_dims`, and the rest."""
        beside = [a for a in range(len(self.sizes)) if a not in along]
        return [a for a in beside if a in iter_dims], [a for a in beside if a not in iter_dims]

    def _constant(self, number: int, node: Node) -> tuple[Step, bool]:
        value = ew.rounded(
            np.asarray(node.attrs["value"]).astype(ew.storage(node.dtype)), node.dtype
        )
        array = np.broadcast_to(value, self.shape(node.iter_dims))
        return (lambda values, arrays, registers: array), False

    def _register(self, number: int, node: Node) -> tuple[Step, bool]:
        value, held = affine(node.attrs["value"]), ew.storage(node.dtype)
        shape = self.shape(node.iter_dims)
        return (
            lambda values, arrays, registers: np.broadcast_to(
                np.asarray(value(registers)).astype(held), shape
            )
        ), False

    def _iota(self, number: int, node: Node) -> tuple[Step, bool]:
        iter_dim, start, dtype = node.attrs["atom"], affine(node.attrs["start"]), node.dtype
        shape = self.shape(node.iter_dims)
        ramp = (np.arange(self.sizes[iter_dim], dtype=np.int64) * node.attrs["step"]).reshape(
            self.shape((iter_dim,))
        )

        def iota(values: Values, arrays: Arrays, registers: Registers) -> np.ndarray:
            line = ew.rounded((ramp + start(registers)).astype(ew.storage(dtype)), dtype)
            return np.broadcast_to(line, shape)

        return iota, False

    def _reduce(self, number: int, node: Node) -> tuple[Step, bool]:
        (source,) = node.inputs
        kind, axes, dtype = node.attrs["kind"], tuple(sorted(node.attrs["over"])), node.dtype
        return (
            lambda values, arrays, registers: ew.rounded(
                ew.reduce_array(values[source], kind, axes), dtype
            )
        ), True

    def _contract(self, number: int, node: Node) -> tuple[Step, bool]:
        lhs, rhs = node.inputs
        nodes, dtype, held = self.program.nodes, node.dtype, ew.storage(node.dtype)
        contract = plan_contract(
            self.sizes, nodes[lhs].iter_dims, nodes[rhs].iter_dims, node.attrs["over"]
        )

        def run(values: Values, arrays: Arrays, registers: Registers) -> np.ndarray:
            a, b = values[lhs].astype(held, copy=False), values[rhs].astype(held, copy=False)
            return ew.rounded(contract(a, b), dtype)

        return run, True

    def _convert(self, number: int, node: Node) -> tuple[Step, bool]:
        (source,) = node.inputs
        given, wanted = self.program.nodes[source].dtype, node.dtype
        if given is wanted:
            self.values[source].owned = False  # two nodes share the memory now
            return (lambda values, arrays, registers: values[source]), False
        return (lambda values, arrays, registers: ew.convert(values[source], given, wanted)), True

    def _bitcast(self, number: int, node: Node) -> tuple[Step, bool]:
        (source,) = node.inputs
        given, wanted = self.program.nodes[source].dtype, node.dtype

        def bitcast(values: Values, arrays: Arrays, registers: Registers) -> np.ndarray:
            bits = np.ascontiguousarray(values[source].astype(given.numpy)).view(wanted.numpy)
            return ew.hold(bits, wanted)

        return bitcast, True

    def _compare(self, number: int, node: Node) -> tuple[Step, bool]:
        a, b = node.inputs
        fn = ew.COMPARE[node.attrs["direction"]]
        return self._spread(lambda values, arrays, registers: fn(values[a], values[b]), node), False

    def _elementwise(self, number: int, node: Node) -> tuple[Step, bool]:
        operand = self.program.nodes[node.inputs[-1]].dtype
        fn, inputs, dtype = ew.function(node.op, operand), node.inputs, node.dtype
        target = self._reusable(number, node) if ew.works_in_place(fn) else -1
        step = _call(fn, inputs, target)
        if dtype.is_narrow:
            step = _rounding(step, dtype)
        return self._spread(step, node), self._is_full(node)

    def _is_full(self, node: Node) -> bool:
        """True when broadcasting the inputs already gives the iter dims of the node."""
        spanned = {a for i in node.inputs for a in self.program.nodes[i].iter_dims}
        return all(a in spanned or self.sizes[a] == 1 for a in node.iter_dims)

    def _spread(self, step: Step, node: Node) -> Step:
        """`step` broadcast to the node's iter dims when its inputs span fewer."""
        if self._is_full(node):
            return step
        shape = self.shape(node.iter_dims)
        return lambda values, arrays, registers: np.broadcast_to(
            step(values, arrays, registers), shape
        )

    def _reusable(self, number: int, node: Node) -> int:
        """An input whose memory the result may take: own, dead after this node, same shape and
        storage; else -1."""
        shape, held = self.shape(node.iter_dims), ew.storage(node.dtype)
        for i in node.inputs:
            value = self.values[i]
            fits = value.shape == shape and ew.storage(value.dtype) == held
            if value.owned and fits and self.last_use[i] == self.position[number]:
                return i
        return -1

    def _store(self, number: int, node: Node) -> tuple[Step, bool]:
        view: View = node.attrs["view"]
        (source,) = node.inputs
        tensor, dtype = view.tensor, self.dtypes[view.tensor]
        stored, shape = dtype.numpy, self.shape(node.iter_dims)
        offset, strides = (
            affine(view.offset, dtype.bytes),
            self.strides(view, node.iter_dims, dtype.bytes),
        )
        rounds = dtype.is_narrow and self.program.nodes[source].dtype is not dtype

        def store(values: Values, arrays: Arrays, registers: Registers) -> None:
            value = narrow(values[source], dtype) if rounds else values[source]
            np.ndarray(shape, stored, arrays[tensor], offset(registers), strides)[...] = value

        return store, False

    def _store_indexed(self, number: int, node: Node) -> tuple[Step, bool]:
        view: View = node.attrs["view"]
        source, index = node.inputs[:2]
        nodes, rank = self.program.nodes, len(self.sizes)
        if not split_iter_dims(self.sizes, view.strides, node.iter_dims, nodes[index].iter_dims):
            raise SimulationError(
                "SW_L1_KERNEL",
                f"kernel {self.program.name}: store_indexed moves its view along the index",
            )
        iter_dims = {*nodes[source].iter_dims, *nodes[index].iter_dims, *node.iter_dims}
        picked = nodes[index].iter_dims
        along = [a for a in node.attrs.get("order", range(rank)) if a in picked]
        others, rest = self._beside(along, iter_dims)
        transposed = (*along, *others, *rest)
        put = PUT_ROWS[node.attrs["kind"]]
        full = tuple(self.sizes[a] if a in iter_dims else 1 for a in range(rank))
        other_shape = tuple(self.sizes[a] for a in others)
        strides, offset = tuple(view.strides[a] for a in others), affine(view.offset)
        rows, row_stride, tensor = node.attrs["rows"], node.attrs["stride"], view.tensor

        def store(values: Values, arrays: Arrays, registers: Registers) -> None:
            where = values[index].transpose(transposed).reshape(-1)
            data = np.broadcast_to(values[source], full).transpose(transposed)
            data = data.reshape((where.size, *other_shape))
            legal = (where >= 0) & (where < rows)
            if not legal.all():
                where, data = where[legal], data[legal]
            target = window(
                arrays[tensor], offset(registers), (rows, *other_shape), (row_stride, *strides)
            )
            if where.size:
                put(target, where.astype(np.int64), data)

        return store, False


def _call(fn: ew.Function, inputs: Sequence[int], target: int) -> Step:
    """A step that applies `fn`, into the memory of input `target` unless that is -1."""
    if len(inputs) == 1:
        (a,) = inputs
        if target < 0:
            return lambda values, arrays, registers: fn(values[a])
        return lambda values, arrays, registers: fn(values[a], out=values[a])
    if len(inputs) == 2:
        a, b = inputs
        if target < 0:
            return lambda values, arrays, registers: fn(values[a], values[b])
        return lambda values, arrays, registers: fn(values[a], values[b], out=values[target])
    return lambda values, arrays, registers: fn(*(values[i] for i in inputs))


def _rounding(step: Step, dtype: DType) -> Step:
    """`step` with its result rounded to a narrow float type."""
    return lambda values, arrays, registers: ew.rounded(step(values, arrays, registers), dtype)


_BUILDERS: dict[str, Callable[[_Planner, int, Node], tuple[Step, bool]]] = {
    "load": _Planner._load,
    "load_indexed": _Planner._load_indexed,
    "constant": _Planner._constant,
    "register": _Planner._register,
    "iota": _Planner._iota,
    "reduce": _Planner._reduce,
    "contract": _Planner._contract,
    "convert": _Planner._convert,
    "bitcast_convert": _Planner._bitcast,
    "compare": _Planner._compare,
    "store": _Planner._store,
    "store_indexed": _Planner._store_indexed,
}
