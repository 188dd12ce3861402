"""What kernels may touch while a collective is on its way, on one physical core and on two; what a
function is bound to."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from l0_cases import hbm, instr, node

from shardwright.compiler.diagnostics import SimulationError, UsageError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine, KernelProgram, Tensor, View
from shardwright.compiler.isa.program import (
    Call,
    CollectiveCall,
    Engine,
    Function,
    Kernel,
    Program,
    ProgramBuffer,
    Repeat,
)
from shardwright.sim_cluster.values.functions import Bound, FunctionCode, _overwritten
from shardwright.sim_cluster.values.memory import CoreMemory
from shardwright.sim_cluster.values.programs import ProgramCode

F32, I32, BF16 = DType.F32, DType.I32, DType.BF16
HERE = Affine()


def start(source: Any, target: Any) -> Kernel:
    attrs = {"collective": 0, "source": source, "target": target}
    return Kernel(KernelProgram("collective_start", "start", attrs=attrs))


WAIT = Kernel(KernelProgram("collective_wait", "wait", attrs={"collective": 0}))
IDLE = Kernel(KernelProgram("idle", "idle"))


def copy(source: int, target: int) -> Kernel:
    """Tensor to tensor, through the DMA engines alone."""
    whole = (1, 8)
    move = instr("dma", Engine.DMA_IN, hbm(target, HERE, whole), hbm(source, HERE, whole))
    return Kernel(KernelProgram("compute", f"copy to {target}"), [], [move])


def computed(source: int, target: int) -> Kernel:
    """Tensor to tensor, as the nodes of L1."""
    at = [View(tensor, HERE, (1,)) for tensor in (source, target)]
    nodes = node("load", (), (0,), view=at[0]), node("store", (0,), (0,), view=at[1])
    return Kernel(KernelProgram("compute", f"copy to {target}", (8,), nodes))


def register(tensor: int, at: int = 0, **bounds: int) -> Kernel:
    attrs = {"register": 4, "view": View(tensor, Affine(at), ())} | bounds
    return Kernel(KernelProgram("register_load", "load", attrs=attrs))


KINDS = ("input", "input", "input", "input", "scratch")


def function(*kernels: Kernel, partner: list[Kernel] | None = None) -> Function:
    """Tensors 0 to 3 are inputs of 8 fp32, 4 is scratch."""
    tensors = [Tensor(f"t{n}", (8,), F32, kind, offset_bytes=0) for n, kind in enumerate(KINDS)]
    call = CollectiveCall("all_reduce", ("dp",), F32, (1, 8, 1), "add", name="sum")
    known = (0, 1, 2, 3)
    return Function(
        "f", tensors, known, (), (), 5, list(kernels), [call], 32, "trn2.48xlarge", partner
    )


def bound(given: Function, level: str = "L0") -> tuple[Bound, list[np.ndarray]]:
    arrays = [np.full(8, n, np.float32) for n in range(4)]
    code = FunctionCode(given, level)
    return code.bind([a.view(np.uint8) for a in arrays], [], np.zeros(32, np.uint8)), arrays


def run(given: Function) -> list[np.ndarray]:
    """The inputs after a run in which every collective doubles what was sent."""
    made, arrays = bound(given)
    for request in made.run({}):
        request.deliver(2 * request.source)
    return arrays


def refused(code: str) -> AbstractContextManager[Any]:
    return pytest.raises(SimulationError, match=code) if code else nullcontext()


RACE = "SW_L0_COLLECTIVE_RACE"
# The collective sends tensor 0 into tensor 1.
BETWEEN = [
    (copy(2, 3), ""),
    (copy(0, 3), ""),  # what is sent may be read
    (copy(2, 0), RACE),
    (copy(2, 1), RACE),
    (copy(1, 3), RACE),
    (copy(2, 4), ""),
]


@pytest.mark.parametrize(("between", "code"), BETWEEN)
def test_between_start_and_wait(between: Kernel, code: str) -> None:
    with refused(code):
        arrays = run(function(start(0, 1), between, WAIT))
        assert arrays[1].tolist() == [0.0] * 8


@pytest.mark.parametrize(("between", "code"), BETWEEN)
def test_between_start_and_wait_on_the_other_core(between: Kernel, code: str) -> None:
    """It knows that the collective has started, and its own end is waited for."""
    partner = [IDLE, replace(between, after=1), IDLE]
    with refused(code):
        run(function(start(0, 1), IDLE, replace(WAIT, after=2), partner=partner))


@pytest.mark.parametrize(("behind", "is_waiting"), [(copy(1, 3), False), (copy(1, 3), True)])
def test_the_other_core_waits_for_the_end_of_a_collective(behind: Kernel, is_waiting: bool) -> None:
    """Three kernels of core 0: start, wait, nothing."""
    late = replace(behind, after=2 if is_waiting else 0)
    with refused("" if is_waiting else "SW_L0_RACE|SW_L0_COLLECTIVE_RACE"):
        arrays = run(function(start(2, 1), WAIT, IDLE, partner=[IDLE, IDLE, late]))
        assert arrays[3].tolist() == [4.0] * 8


@pytest.mark.parametrize(
    ("first", "code"), [(copy(2, 3), "SW_L0_RACE"), (copy(3, 2), ""), (copy(2, 1), "")]
)
def test_a_register_of_one_core_from_what_the_other_writes(first: Kernel, code: str) -> None:
    with refused(code):
        run(function(first, IDLE, partner=[register(3), IDLE]))


def test_values_on_one_core_and_what_comes_back() -> None:
    """Sent as it was at the start; delivered where the view says."""
    tensors = [Tensor("x", (16,), F32, "input"), Tensor("y", (16,), F32, "input")]
    given = replace(function(), tensors=tensors, inputs=(0, 1))
    at = View(0, Affine(8), (1,)), View(1, Affine(4), (1,))
    for level in ("L0", "L1"):
        own = replace(given, kernels=[start(*at), WAIT])
        x, y = np.arange(16, dtype=np.float32), np.zeros(16, np.float32)
        code = FunctionCode(own, level)
        made = code.bind([x.view(np.uint8), y.view(np.uint8)], [], np.zeros(32, np.uint8))
        (request,) = _requests(made, lambda sent: sent + 100)
        assert request == list(range(8, 16))
        assert y.tolist() == [0.0] * 4 + [float(n) for n in range(108, 116)] + [0.0] * 4


def _requests(made: Bound, change: Any) -> list[list[float]]:
    sent = []
    for request in made.run({}):
        sent.append(request.source.tolist())
        request.deliver(change(request.source))
    return sent


def test_what_nobody_wrote_is_not_sent_and_no_register() -> None:
    with refused("SW_L0_UNINITIALISED.*sends elements nobody wrote"):
        run(function(start(4, 1), WAIT))
    with refused("SW_L0_UNINITIALISED.*loads a register nobody wrote"):
        run(function(register(4)))
    arrays = run(function(copy(2, 4), start(4, 1), WAIT))
    assert arrays[1].tolist() == [4.0] * 8
    arrays = run(function(start(0, 4), WAIT, copy(4, 1)))  # what arrived is there
    assert arrays[1].tolist() == [0.0] * 8


@pytest.mark.parametrize(("at", "code"), [(7, ""), (8, "SW_L0_UNINITIALISED")])
def test_what_arrives_is_written_and_what_lies_behind_it_is_not(at: int, code: str) -> None:
    """8 elements arrive in a tensor of 9."""
    given = function(start(0, View(4, HERE, (1,))), WAIT, register(4, at))
    given.tensors[4] = replace(given.tensors[4], shape=(9,))
    arrays = [np.zeros(32, np.uint8) for _ in range(4)]
    made = FunctionCode(given, "L0").bind(arrays, [], np.zeros(36, np.uint8))
    with refused(code):
        assert len(_requests(made, lambda sent: sent)) == 1


def test_what_is_sent_is_copied_where_a_donated_output_overwrites_it() -> None:
    """Tensor 3 takes the memory of input 0, and is written between start and wait."""
    given = function(start(0, 1), computed(2, 3), WAIT)
    given.tensors[3] = replace(given.tensors[3], kind="output", alias=0)
    given = replace(given, inputs=(0, 1, 2), outputs=(3,))
    arrays = [np.full(8, n, np.float32) for n in (5, 1, 2)]
    inputs = [a.view(np.uint8) for a in arrays]
    made = FunctionCode(given, "L1").bind(inputs, [inputs[0]], np.zeros(32, np.uint8))
    assert _requests(made, lambda sent: sent) == [[5.0] * 8]
    assert [a[0] for a in arrays] == [2.0, 5.0, 2.0]


def test_two_collectives_in_flight_touch_what_each_of_them_names() -> None:
    """The second sends 2 into 3: the first has landed when the other core reads what it brought."""

    def of_second(kernel: Kernel) -> Kernel:
        attrs = {**kernel.program.attrs, "collective": 1}
        return replace(kernel, program=replace(kernel.program, attrs=attrs))

    late = replace(copy(1, 4), after=3)
    own = (start(0, 1), of_second(start(2, 3)), WAIT, of_second(WAIT))
    given = function(*own, partner=[IDLE, IDLE, late, IDLE])
    arrays = run(replace(given, collectives=given.collectives * 2))
    assert [a[0] for a in arrays] == [0.0, 0.0, 2.0, 4.0]


def test_more_than_there_is_room_for_does_not_arrive() -> None:
    made, _ = bound(function(start(0, 1), WAIT))
    request = next(iter(made.run({})))
    with refused("SW_SIM_COLLECTIVE.*receives 9 elements, its target has 8"):
        request.deliver(np.zeros(9, np.float32))


def test_collectives_in_an_order_that_cannot_be() -> None:
    with refused("SW_SIM_COLLECTIVE.*waits for collective 0 before it starts"):
        FunctionCode(function(WAIT, start(0, 1)))
    with refused(r"SW_SIM_COLLECTIVE.*returns before it waits for collectives \[0\]"):
        run(function(start(0, 1)))
    with refused("SW_SIM_KERNEL.*has the unknown kind jump"):
        FunctionCode(function(Kernel(KernelProgram("jump", "r"))))
    with refused("SW_SIM_LEVEL.*got 'L2'"):
        FunctionCode(function(), "L2")
    with refused("SW_NEFF_CONTENT.*kernel load of function f: KeyError"):
        FunctionCode(function(Kernel(KernelProgram("register_load", "load"))))
    second = {"collective": 1, "source": 0, "target": 1}  # where there is one, number 0
    with refused("SW_NEFF_CONTENT.*kernel start of function f: IndexError"):
        FunctionCode(function(Kernel(KernelProgram("collective_start", "start", attrs=second))))


def test_a_kernel_that_needs_a_package_is_no_damaged_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy has no bf16."""
    given = function(computed(0, 1))
    given.tensors[0] = replace(given.tensors[0], dtype=BF16)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    monkeypatch.delitem(vars(BF16), "numpy", raising=False)  # what is known of it already
    with pytest.raises(UsageError, match="SW_NEEDS_ML_DTYPES"):
        FunctionCode(given, "L1")


def test_memory_is_taken_for_the_constants_of_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of 12 and 6 bytes; inputs and scratch are others' memory."""
    asked: list[tuple[int, str]] = []
    monkeypatch.setattr(
        "shardwright.sim_cluster.values.functions.require_memory", lambda *a: asked.append(a)
    )
    given = function()
    given.tensors += [
        Tensor("a", (3,), F32, "constant", data=np.arange(3, dtype=np.float32).tobytes()),
        Tensor("b", (3,), BF16, "constant", data=bytes(6)),
    ]
    code = FunctionCode(given, "L1")
    assert asked == [(18, "constants of function f")]
    assert list(code.constants) == [5, 6] and code.constants[5].tolist() == [0, 1, 2]


def test_tensors_are_bound_to_as_many_bytes_as_they_have() -> None:
    code = FunctionCode(function(), "L1")
    whole = [np.zeros(32, np.uint8) for _ in range(4)]
    code.bind(whole, [], np.zeros(32, np.uint8))
    for size in (28, 36):
        with refused(f"SW_SIM_BINDING.*t0 .input. of f: requires 32 bytes, got {size}"):
            code.bind([np.zeros(size, np.uint8), *whole[1:]], [], np.zeros(32, np.uint8))
    with refused("t4 .scratch. of f: requires 32 bytes, got 31"):
        code.bind(whole, [], np.zeros(31, np.uint8))
    with pytest.raises(ValueError, match="shorter"):
        code.bind(whole[:3], [], np.zeros(32, np.uint8))
    unknown = replace(function(), inputs=(0, 1, 2))
    with refused("t3 .input. of f: is not bound"):
        FunctionCode(unknown, "L1").bind(whole[:3], [], np.zeros(32, np.uint8))
    twice = replace(function(), inputs=(0, 1, 2, 2))
    with refused("t2 .input. of f: one tensor requires one buffer"):
        FunctionCode(twice, "L1").bind(whole, [], np.zeros(32, np.uint8))
    FunctionCode(replace(function(), inputs=(0, 1, 2, 3, 3)), "L1").bind(
        [*whole, whole[3]], [], np.zeros(32, np.uint8)
    )
    donated = function()
    donated.tensors[3] = replace(donated.tensors[3], kind="output", alias=1)
    donated = replace(donated, inputs=(0, 1, 2), outputs=(3,))
    FunctionCode(donated, "L1").bind(whole[:3], [whole[1]], np.zeros(32, np.uint8))
    with refused("t3 .output. of f: requires the memory of the input it replaces"):
        FunctionCode(donated, "L1").bind(whole[:3], [whole[3]], np.zeros(32, np.uint8))


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_elements_in_the_bytes_that_are_written_are_known_wherever_memory_begins(
    first: int,
) -> None:
    """Two numbers of four bytes, from an address that is `first` beyond a multiple of four. Of the
    first one bytes 2 and 3 are written; of both, bytes 2 to 5; of the second its first two bytes,
    the other half of which is marked as not written."""
    memory = np.zeros(16, np.uint8)
    begin = (first - memory.ctypes.data) % 4
    numbers = memory[begin : begin + 8].view(np.float32)

    def overwritten(start: int, mask: list[bool]) -> tuple[int, list[bool]]:
        written = memory[begin + start : begin + start + len(mask)]
        at, marks = _overwritten(written, np.array(mask), numbers)
        return at, marks.tolist()

    assert overwritten(2, [True] * 2) == (0, [True])
    assert overwritten(2, [True] * 4) == (0, [True, True])
    assert overwritten(2, [True, True, False, False]) == (0, [True, False])
    assert overwritten(4, [True] * 2 + [False] * 2) == (1, [True])


def test_an_output_is_written_as_a_whole() -> None:
    given = function(copy(0, 3))
    given.tensors[3] = replace(given.tensors[3], kind="output")
    given = replace(given, inputs=(0, 1, 2), outputs=(3,))

    def run_with(kernels: list[Kernel]) -> None:
        whole = [np.zeros(32, np.uint8) for _ in range(4)]
        code = FunctionCode(replace(given, kernels=kernels), "L0")
        list(code.bind(whole[:3], whole[3:], np.zeros(32, np.uint8)).run({}))

    run_with([copy(0, 3)])
    with refused("SW_L0_OUTPUT_UNWRITTEN.*8 unwritten elements of output t3"):
        run_with([copy(0, 2)])


@pytest.mark.parametrize(
    ("bounds", "value"),
    [({}, 7), ({"low": 8}, 8), ({"high": 6}, 6), ({"low": 0, "high": 9}, 7), ({"low": 7}, 7)],
)
def test_registers_are_clamped(bounds: dict[str, int], value: int) -> None:
    given = function(register(0, **bounds))
    given.tensors[0] = Tensor("i", (1,), I32, "input")
    arrays = [np.array([7], np.int32), *(np.zeros(8, np.float32) for _ in range(3))]
    code = FunctionCode(given, "L1")
    made = code.bind([a.view(np.uint8) for a in arrays], [], np.zeros(32, np.uint8))
    assert list(made.run({})) == [] and made.registers == {4: value}


def test_the_code_of_a_program_has_its_chip_and_its_watch() -> None:
    """At L0 all functions share the chip of the program's target; the watch is asked once."""
    program = Program("p", "trn2.48xlarge", [function(), function()], [], (), (), (), 0)
    outside: Any = object()
    watch: Any = SimpleNamespace(of=lambda asked: outside if asked is program else None)
    first, second = ProgramCode(program, "L0", watch).functions
    assert first.chip is second.chip is not None and first.outside is outside
    alone = ProgramCode(program).functions[0]
    assert (alone.level, alone.chip, alone.outside) == ("L1", None, None)


def test_a_repeated_call_is_bound_once() -> None:
    """Three runs of one call, which is bound once."""
    program = Program(
        "p",
        "trn1n.32xlarge",
        [replace(function(copy(0, 3)), target="trn1n.32xlarge")],
        [ProgramBuffer(name, (8,), F32, "named") for name in "abcd"],
        tuple("abcd"),
        ("d",),
        (Repeat(1, 3, (Call(0, (0, 1, 2, 3), (), scratch=16),)),),
        48,
    )
    memory = CoreMemory([(name, 32) for name in "abcd"])
    memory.array("a", F32)[:] = 5
    code = ProgramCode(program, "L0")
    assert list(code.run(memory)) == [] and memory.array("d", F32).tolist() == [5.0] * 8
    assert (memory.arena.size, len(memory.bindings)) == (48, 1)
    assert code.instructions == 3
