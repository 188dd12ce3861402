"""Functions in values: tensors bound to memory, kernels in order, collectives as requests to
whoever runs all ranks.

`FunctionCode` is prepared once and shared by all cores; `Bound` holds one core's tensors. A run is
a generator: it yields a `CollectiveRequest` at every `collective_wait` and goes on when the driver
has delivered the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from shardwright.compiler.diagnostics import DiagnosticError, SimulationError
from shardwright.compiler.isa.kernel import STORES, KernelProgram, Tensor, View, tensor_of
from shardwright.compiler.isa.limits import limits_for
from shardwright.compiler.isa.program import CollectiveCall, Function, Kernel
from shardwright.compiler.support.rounding import Draws
from shardwright.sim_cluster.instructions.index_watch import Access, Outside
from shardwright.sim_cluster.instructions.l0 import KernelCode
from shardwright.sim_cluster.instructions.operands import HbmTensors
from shardwright.sim_cluster.instructions.past import Past
from shardwright.sim_cluster.instructions.physical_cores import CoreWatch, interleaved
from shardwright.sim_cluster.instructions.races import strided_key
from shardwright.sim_cluster.instructions.tiles import OnChip
from shardwright.sim_cluster.values.host_memory import require_memory
from shardwright.sim_cluster.values.index_tests import IndexTest, index_tests
from shardwright.sim_cluster.values.kernels import affine, prepare

L0, L1 = "L0", "L1"


@dataclass(slots=True, eq=False)
class CollectiveRequest:
    """One rank waits for a collective: what it sends (captured at the start) and where the result
    goes."""

    call: CollectiveCall
    source: np.ndarray
    deliver: Callable[[np.ndarray], None]


@dataclass(slots=True)
class _Flight:
    """A started collective: the data captured, the tensors it touches, the element offset in the
    target."""

    data: np.ndarray
    source: int
    target: int
    target_at: int


class Bound:
    """The tensors of a function on one core, and the collectives it has in flight."""

    def __init__(
        self,
        code: FunctionCode,
        arrays: Sequence[np.ndarray],
        position: Mapping[str, int] | None = None,
    ) -> None:
        self.code = code
        self.position = position or {}  # of the core, along the axes of its mesh
        self.tensors = HbmTensors(arrays)
        self.registers: dict[int, int] = {}
        self.flight: dict[int, _Flight] = {}
        self.pasts: list[Past] = []  # of every physical core (L0)
        self.clashes: list[list[int]] = _clashes(arrays) if code.level == L0 else []

    def is_first(self, axes: Sequence[str]) -> bool:
        """Whether the core is the first along mesh axes, which tells for all of them."""
        return not any(self.position.get(axis) for axis in axes)

    def run(self, registers: Mapping[int, int]) -> Iterator[CollectiveRequest]:
        """Execute the function with its parameter registers set."""
        self.registers = dict(registers)
        self.flight.clear()
        if self.code.level == L0:
            self.pasts = [Past() for _ in self.code.function.subgraphs]
            self.tensors.masks = [self._new_mask(n) for n in range(len(self.tensors.arrays))]
            self.tensors.watch = CoreWatch() if self.code.is_watched else None
        for action in self.code.actions:
            request = action(self)
            if request is not None:
                yield request
        if self.flight:
            raise SimulationError(
                "SW_SIM_COLLECTIVE",
                f"function {self.code.function.name} returns before it waits for collectives"
                f" {sorted(self.flight)}",
            )
        if self.code.level == L0:
            self._check_outputs()

    def _new_mask(self, number: int) -> np.ndarray | None:
        """Nothing written in scratch and outputs; inputs, and what shares memory with them, hold
        data."""
        function, arrays = self.code.function, self.tensors.arrays
        fresh = function.tensors[number].kind in ("scratch", "output")
        given = any(function.tensors[n].kind == "input" for n in self.clashes[number])
        return np.zeros(arrays[number].size, np.bool_) if fresh and not given else None

    def _check_outputs(self) -> None:
        for number in self.code.function.outputs:
            mask = self.tensors.masks[number]
            if mask is not None and not mask.all():
                raise SimulationError(
                    "SW_L0_OUTPUT_UNWRITTEN",
                    f"function {self.code.function.name} returns with {int((~mask).sum())}"
                    f" unwritten elements of output {self.code.function.tensors[number].name}",
                )


Action = Callable[[Bound], CollectiveRequest | None]


class FunctionCode:
    """A function ready to run at one level. `chip` is the on-chip memory L0 works on (shared by all
    its kernels)."""

    def __init__(
        self,
        function: Function,
        level: str = L1,
        chip: OnChip | None = None,
        outside: Outside | None = None,
        draws: Draws | None = None,
    ) -> None:
        if level not in (L0, L1):
            raise SimulationError("SW_SIM_LEVEL", f"a level is L0 or L1, got {level!r}")
        self.function, self.level, self.outside, self.draws = function, level, outside, draws
        self.dtypes = tuple(t.dtype for t in function.tensors)
        require_memory(
            sum(t.num_bytes for t in function.tensors if t.kind == "constant"),
            f"constants of function {function.name}",
        )
        self.constants = {
            n: _constant(t) for n, t in enumerate(function.tensors) if t.kind == "constant"
        }
        self.chip = chip if chip or level == L1 else OnChip(limits_for(function.target))
        self.codes: list[KernelCode] = []
        self.started: dict[int, KernelProgram] = {}  # by collective
        self.is_watched = level == L0 and len(function.subgraphs) > 1
        self.shared_targets = self._shared_targets()
        self.actions = [self._prepared(*at) for at in self._order()]

    def bind(
        self,
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        scratch: np.ndarray,
        position: Mapping[str, int] | None = None,
    ) -> Bound:
        """Tensors over byte buffers, in the order of the function's inputs and outputs, on the core
        at a position of its mesh.

        Raises SimulationError (SW_SIM_BINDING) for a wrong number or size, or a donation that is
        not one buffer.
        """
        function = self.function
        arrays: list[np.ndarray | None] = [
            self.constants.get(n) for n in range(len(function.tensors))
        ]
        given = [
            *zip(function.inputs, inputs, strict=True),
            *zip(function.outputs, outputs, strict=True),
        ]
        for number, memory in given:
            typed, bound = self._typed(number, memory), arrays[number]
            if bound is not None and bound.ctypes.data != typed.ctypes.data:
                self._refuse("one tensor requires one buffer", number)
            arrays[number] = typed
        for number, tensor in enumerate(function.tensors):
            if tensor.kind == "scratch":
                end = tensor.offset_bytes + tensor.num_bytes
                arrays[number] = self._typed(number, scratch[max(tensor.offset_bytes, 0) : end])
        self._check_donation(arrays)
        return Bound(self, [a for a in arrays if a is not None], position)

    @property
    def instructions(self) -> int:
        """Instructions executed so far (L0)."""
        return sum(code.executed for code in self.codes)

    def _typed(self, number: int, memory: np.ndarray) -> np.ndarray:
        tensor = self.function.tensors[number]
        if memory.nbytes != tensor.num_bytes:
            self._refuse(f"requires {tensor.num_bytes} bytes, got {memory.nbytes}", number)
        return memory.view(tensor.dtype.numpy).reshape(-1)

    def _check_donation(self, arrays: Sequence[np.ndarray | None]) -> None:
        for number, tensor in enumerate(self.function.tensors):
            array = arrays[number]
            if array is None:
                self._refuse("is not bound", number)
            source = arrays[tensor.alias] if tensor.alias >= 0 else None
            if source is not None and source.ctypes.data != array.ctypes.data:
                self._refuse("requires the memory of the input it replaces", number)

    def _refuse(self, what: str, number: int) -> NoReturn:
        tensor = self.function.tensors[number]
        raise SimulationError(
            "SW_SIM_BINDING",
            f"tensor {tensor.name} ({tensor.kind}) of {self.function.name}: {what}",
        )

    def _order(self) -> list[tuple[int, int]]:
        """(physical core, kernel) in the order they run: at L1 core by core, kernel by kernel."""
        subgraphs = self.function.subgraphs
        if self.level == L0:
            return interleaved(subgraphs)
        return [(c, n) for n in range(len(subgraphs[0])) for c in range(len(subgraphs))]

    def _prepared(self, core: int, number: int) -> Action:
        """The action of a kernel; a kernel whose description makes no sense is refused."""
        kernel = self.function.subgraphs[core][number]
        try:
            action = self._action(kernel, core, number)
            return self._watched(action, core, kernel) if self.is_watched else action
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            if isinstance(error, DiagnosticError):
                raise
            raise SimulationError(
                "SW_NEFF_CONTENT",
                f"kernel {kernel.program.name} of function {self.function.name}: {error!r}",
                None,
                "the file is damaged; compile again or copy the bundle again",
            ) from error

    def _watched(self, action: Action, core: int, kernel: Kernel) -> Action:
        """`action` on a physical core, its accesses to HBM known to the watch. Collectives touch
        source and target from start to wait."""
        program = kernel.program
        flight = program.attrs.get("collective", -1)
        touched = self._touched_whole(program)

        def run(bound: Bound) -> CollectiveRequest | None:
            watch = bound.tensors.watch
            assert watch is not None
            watch.enter(core, kernel.after)
            watch.land(flight)
            for tensor, is_written in touched:
                array = bound.tensors.arrays[tensor]
                key = strided_key(array.ctypes.data, (), array.nbytes)
                watch.touch(tensor, key, is_written)
            if program.kind == "collective_start":
                watch.fly(flight)
            return action(bound)

        return run

    def _touched_whole(self, program: KernelProgram) -> list[tuple[int, bool]]:
        """(tensor, whether it is written) of a kernel without instructions."""
        if program.kind == "register_load":
            return [(program.attrs["view"].tensor, False)]
        if program.kind not in ("collective_start", "collective_wait"):
            return []
        attrs = self.started[program.attrs["collective"]].attrs
        return [(tensor_of(attrs["source"]), False), (tensor_of(attrs["target"]), True)]

    def _action(self, kernel: Kernel, core: int, number: int) -> Action:
        program = kernel.program
        if program.kind == "compute":
            at_l0 = self.level == L0
            action = self._compute_l0(kernel, core) if at_l0 else self._compute_l1(program)
            return self._tested(action, core, number)
        action = self._without_code(program, core)
        if self.level == L1:
            return action

        def pass_by(bound: Bound) -> CollectiveRequest | None:
            bound.pasts[core].skip(program.kind != "idle")
            return action(bound)

        return pass_by

    def _without_code(self, program: KernelProgram, core: int) -> Action:
        """The action of a kernel that is no code of the engines. All physical cores load registers;
        the first tells of wrong ones."""
        match program.kind:
            case "idle":
                return lambda bound: None
            case "register_load":
                return self._register_load(program, None if core else self.outside)
            case "collective_start":
                return self._start(program)
            case "collective_wait":
                return self._wait(program)
        raise SimulationError(
            "SW_SIM_KERNEL", f"kernel {program.name} has the unknown kind {program.kind}"
        )

    def _compute_l1(self, program: KernelProgram) -> Action:
        run = prepare(program, self.dtypes, self.draws)
        return lambda bound: run(bound.tensors.arrays, bound.registers)

    def _index_tests(self, core: int, number: int) -> list[IndexTest]:
        """The tests of a kernel on a physical core, without those of what the cores before it look
        up too: a kernel may be cut along other dims than its indices have."""
        tests = [
            index_tests(subgraph[number].program, self.function.tensors)
            for subgraph in self.function.subgraphs[: core + 1]
        ]
        known = [test.key for others in tests[:-1] for test in others]
        return [test for test in tests[-1] if test.key not in known]

    def _tested(self, action: Action, core: int, number: int) -> Action:
        """`action` of a kernel, after whoever watches indices was told of those that lie outside.
        Of ranks that have the same indices, the first tells."""
        outside = self.outside
        tests = self._index_tests(core, number) if outside is not None else []
        if outside is None or not tests:
            return action
        program = self.function.subgraphs[core][number].program

        def run(bound: Bound) -> CollectiveRequest | None:
            for test in tests:
                if bound.is_first(test.replicated):
                    failed = test.count(bound.tensors.arrays, bound.registers)
                    if failed:
                        outside(program, test.access, failed)
            return action(bound)

        return run

    def _compute_l0(self, kernel: Kernel, core: int) -> Action:
        assert self.chip is not None
        code = KernelCode(kernel, self.dtypes, self.chip)
        self.codes.append(code)

        def run(bound: Bound) -> None:
            if bound.tensors.watch is None:  # which sees to it element by element
                _check_flight(bound, code)
            code.run(bound.tensors, bound.registers, bound.pasts[core])
            for number in code.hbm_writes:
                _forget_overlapped(bound, number)

        return run

    def _register_load(self, program: KernelProgram, outside: Outside | None) -> Action:
        view: View = program.attrs["view"]
        register, offset, tensor = program.attrs["register"], affine(view.offset), view.tensor
        low, high = program.attrs.get("low"), program.attrs.get("high")
        replicated = program.attrs.get("replicated")

        def load(bound: Bound) -> None:
            at = _start_of(offset, 1, bound, tensor, program)
            _require_written(bound, tensor, slice(at, at + 1), program, "loads a register")
            value = int(bound.tensors.arrays[tensor][at])
            kept = value if low is None else max(value, low)
            kept = kept if high is None else min(kept, high)
            moved = kept != value and replicated is not None and bound.is_first(replicated)
            if outside is not None and moved:
                outside(program, Access.GATHER, 1)
            bound.registers[register] = kept

        return load

    def _start(self, program: KernelProgram) -> Action:
        number = program.attrs["collective"]
        call = self.function.collectives[number]
        elements = call.num_elements
        source, source_at = _place(program.attrs["source"])
        target, target_at = _place(program.attrs["target"])
        self.started[number] = program
        still = self.level == L1 and not self._is_written_in_flight(number, source)

        def start(bound: Bound) -> None:
            at = _start_of(source_at, elements, bound, source, program)
            sent = slice(at, at + elements)
            _require_written(bound, source, sent, program, "sends elements")
            window = bound.tensors.arrays[source][sent]
            data = window if still else window.copy()
            behind = _start_of(target_at, 0, bound, target, program)
            bound.flight[number] = _Flight(data, source, target, behind)

        return start

    def _wait(self, program: KernelProgram) -> Action:
        number = program.attrs["collective"]
        call = self.function.collectives[number]
        if number not in self.started:
            raise SimulationError(
                "SW_SIM_COLLECTIVE",
                f"kernel {program.name} waits for collective {number} before it starts",
            )

        def wait(bound: Bound) -> CollectiveRequest:
            flight = bound.flight.pop(number)

            def deliver(result: np.ndarray) -> None:
                arrays, low = bound.tensors.arrays, flight.target_at
                given = arrays[flight.target].size - low
                if result.size > given:
                    raise SimulationError(
                        "SW_SIM_COLLECTIVE",
                        f"kernel {program.name} receives {result.size} elements, its target has"
                        f" {given}",
                    )
                if flight.target in self.shared_targets:
                    arrays[flight.target] = result.reshape(-1)
                    return
                arrays[flight.target][low : low + result.size] = result.reshape(-1)
                mask = bound.tensors.masks[flight.target]
                if mask is not None:
                    mask[low : low + result.size] = True

            return CollectiveRequest(call, flight.data, deliver)

        return wait

    def _is_written_in_flight(self, number: int, source: int) -> bool:
        """Whether a kernel between start and wait stores to what the collective sends."""
        flying = False
        side_by_side = zip(*self.function.subgraphs, strict=True)
        for program in (kernel.program for pair in side_by_side for kernel in pair):
            if program.attrs.get("collective") == number:
                flying = program.kind == "collective_start"
            elif flying and any(self._root(t) == self._root(source) for t in _stored(program)):
                return True
        return False

    def _root(self, number: int) -> int:
        """The input whose memory a donated output takes, or the tensor itself."""
        alias = self.function.tensors[number].alias
        return number if alias < 0 else self._root(alias)

    def _shared_targets(self) -> frozenset[int]:
        """Scratch tensors only collectives fill, as a whole: at L1 ranks may share one read-only
        result."""
        if self.level == L0:
            return frozenset()
        filled = {
            k.program.attrs["target"]
            for k in self.function.kernels
            if k.program.kind == "collective_start" and isinstance(k.program.attrs["target"], int)
        }
        stored = {n for s in self.function.subgraphs for k in s for n in _stored(k.program)}
        return frozenset(n for n in filled - stored if self.function.tensors[n].kind == "scratch")


def _stored(program: KernelProgram) -> set[int]:
    """Tensors a kernel stores to."""
    return {node.attrs["view"].tensor for node in program.nodes if node.op in STORES}


def _constant(tensor: Tensor) -> np.ndarray:
    """The data of a constant; a splat stores one element."""
    data = np.frombuffer(tensor.data, tensor.dtype.numpy)
    count = math.prod(tensor.shape)
    return data if data.size == count else np.ascontiguousarray(np.broadcast_to(data, count))


def _start_of(
    offset: Callable[[Mapping[int, int]], int],
    count: int,
    bound: Bound,
    tensor: int,
    program: KernelProgram,
) -> int:
    """Where `count` elements of a tensor begin. Raises SimulationError when they are not there."""
    size = bound.tensors.arrays[tensor].size
    try:
        at = offset(bound.registers)
    except KeyError as error:
        raise SimulationError(
            "SW_SIM_BINDING", f"kernel {program.name} reads register {error} that nobody has set"
        ) from error
    if not 0 <= at <= at + count <= size:
        raise SimulationError(
            "SW_SIM_BINDING",
            f"kernel {program.name} touches elements {at}..{at + count} of tensor {tensor}, which"
            f" has {size}",
        )
    return at


def _require_written(
    bound: Bound, tensor: int, elements: slice, program: KernelProgram, does: str
) -> None:
    """Raises SimulationError SW_L0_UNINITIALISED for elements that nobody wrote."""
    mask = bound.tensors.masks[tensor]
    if mask is not None and not mask[elements].all():
        raise SimulationError("SW_L0_UNINITIALISED", f"kernel {program.name} {does} nobody wrote")


def _place(operand: int | View) -> tuple[int, Callable[[Mapping[int, int]], int]]:
    """(tensor, element offset) of a collective's operand: a whole tensor, or a dense run of it at a
    View's offset."""
    if isinstance(operand, View):
        return operand.tensor, affine(operand.offset)
    return operand, lambda registers: 0


def _clashes(arrays: Sequence[np.ndarray]) -> list[list[int]]:
    """For every tensor, the others that share bytes with it."""
    spans = [(a.ctypes.data, a.ctypes.data + a.nbytes) for a in arrays]
    return [
        [m for m, (low, high) in enumerate(spans) if m != n and low < end and first < high]
        for n, (first, end) in enumerate(spans)
    ]


def _forget_overlapped(bound: Bound, written: int) -> None:
    """Elements in the same scratch bytes as what was just written hold nothing any more."""
    masks, arrays = bound.tensors.masks, bound.tensors.arrays
    for other in bound.clashes[written]:
        mask = masks[other]
        if mask is not None and bound.code.function.tensors[other].alias != written:
            at, overwritten = _overwritten(arrays[written], masks[written], arrays[other])
            mask[at : at + overwritten.size] &= ~overwritten


def _overwritten(
    array: np.ndarray, mask: np.ndarray | None, other: np.ndarray
) -> tuple[int, np.ndarray]:
    """(first element of `other` that shares bytes with `array`, for it and those behind it whether
    they share bytes with elements that `mask` marks)."""
    start, base = array.ctypes.data, other.ctypes.data
    low = max(start, base)
    high = min(start + array.nbytes, base + other.nbytes)
    marks = np.ones(array.size, np.bool_) if mask is None else mask
    written = np.repeat(marks, array.itemsize)[low - start : high - start]
    at = (low - base) // other.itemsize
    front, back = (low - base) % other.itemsize, -(high - base) % other.itemsize
    elements = np.pad(written, (front, back)).reshape(-1, other.itemsize)
    return at, np.logical_or.reduce(elements, axis=1)


def _check_flight(bound: Bound, code: KernelCode) -> None:
    """Refuse a kernel that touches memory a collective in flight uses."""
    for number, flight in bound.flight.items():
        writes = {n for w in code.hbm_writes for n in (w, *bound.clashes[w])}
        reads = {n for r in code.hbm_reads for n in (r, *bound.clashes[r])}
        if {flight.source, flight.target} & writes or flight.target in reads:
            name = bound.code.function.collectives[number].name or str(number)
            raise SimulationError(
                "SW_L0_COLLECTIVE_RACE",
                f"kernel {code.kernel.program.name} touches memory of collective {name}"
                " between its start and its wait",
            )
