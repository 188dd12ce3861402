"""Functions, programs and lock-step runs on hand-written code: registers, arena, donation,
collectives, L0 beside L1.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from l0_cases import hbm, instr, matmul_kernel, node, tile

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.decode import decode_program
from shardwright.compiler.isa.encode import encode_program
from shardwright.compiler.isa.kernel import Affine, KernelProgram, Tensor, View
from shardwright.compiler.isa.limits import walk
from shardwright.compiler.isa.program import (
    Call,
    CollectiveCall,
    Engine,
    Function,
    Kernel,
    Program,
    ProgramBuffer,
    Repeat,
    Space,
    Tile,
)
from shardwright.compiler.neff.manifest import Manifest, NamedBuffer
from shardwright.sim_cluster.values.exchange import exchange
from shardwright.sim_cluster.values.functions import FunctionCode
from shardwright.sim_cluster.values.layout import sharded_shape
from shardwright.sim_cluster.values.memory import CoreMemory
from shardwright.sim_cluster.values.programs import ProgramCode
from shardwright.sim_cluster.values.rank_host import _Shadow
from shardwright.sim_cluster.values.result import distance
from shardwright.sim_cluster.values.run_single import run_single
from shardwright.sim_cluster.values.run_values import ValueRun
from tests.support.l1 import run_program

F32, I32 = DType.F32, DType.I32
TARGET = "trn1n.32xlarge"


def start(collective: int, source: Any, target: Any) -> Kernel:
    return Kernel(
        KernelProgram(
            "collective_start",
            "start",
            attrs={"collective": collective, "source": source, "target": target},
        )
    )


def wait(collective: int) -> Kernel:
    return Kernel(KernelProgram("collective_wait", "wait", attrs={"collective": collective}))


def axpy(at: Affine, size: int, out: int = 2, factor: float = 2.0) -> Kernel:
    """out[at + i] = x[at + i] * factor + y[i] over tensors x 0, y 1."""
    v, row = Engine.VECTOR, (1, 1)
    pattern = (1, size), row
    tiles = [Tile(n, Space.SBUF, size, 1, F32, address=64 * i) for i, n in enumerate("xyo")]
    body = [
        instr("dma", Engine.DMA_IN, tile(0, size, row), hbm(0, at, *pattern)),
        instr("dma", Engine.DMA_IN, tile(1, size, row), hbm(1, Affine(), *pattern), signals=(0,)),
        instr(
            "tensor_scalar",
            v,
            tile(2, size, row),
            tile(0, size, row),
            tile(1, size, row),
            waits=(0,),
            signals=(1,),
            op0="multiply",
            scalar0=factor,
            op1="add",
            scalar1=None,
        ),
        instr("dma", Engine.DMA_OUT, hbm(out, at, *pattern), tile(2, size, row), waits=(1,)),
    ]
    program = KernelProgram(
        "compute",
        "axpy",
        (size,),
        (
            node("load", (), (0,), view=View(0, at, (1,))),
            node("constant", (), (), value=factor),
            node("multiply", (0, 1), (0,)),
            node("load", (), (0,), view=View(1, Affine(), (1,))),
            node("add", (2, 3), (0,)),
            node("store", (4,), (0,), view=View(out, at, (1,))),
        ),
    )
    return Kernel(program, tiles, body, tokens=(0, 0))


def stacked_program() -> Program:
    """For i in range(3): x[i] = 2 x[i] + y in place, through an arena copy of y made by another
    function.
    """
    x, y = Tensor("x", (3, 8), F32, "input"), Tensor("y", (8,), F32, "input")
    layer = Function(
        "layer",
        [x, y, Tensor("x2", (3, 8), F32, "output", alias=0)],
        (0, 1),
        (2,),
        (0,),
        1,
        [axpy(Affine(0, ((0, 8),)), 8)],
        [],
        target=TARGET,
    )
    ones = np.ones(8, np.float32).tobytes()
    first = Function(
        "first",
        [
            Tensor("one", (8,), F32, "constant", data=ones),
            replace(y, name="given"),
            replace(y, kind="output"),
        ],
        (1,),
        (2,),
        (),
        0,
        [axpy(Affine(), 8, factor=3.0)],
        [],
        target=TARGET,
    )
    buffers = [
        ProgramBuffer("x", (3, 8), F32, "named"),
        ProgramBuffer("y", (8,), F32, "named"),
        ProgramBuffer("temp", (8,), F32, "arena", 32),
    ]
    steps = (Call(1, (1,), (2,)), Repeat(0, 3, (Call(0, (0, 2), (0,), (Affine(0, ((0, 1),)),)),)))
    return Program("p", TARGET, [layer, first], buffers, ("x", "y"), ("x",), steps, 64)


@pytest.mark.parametrize("level", ["L0", "L1"])
def test_a_program_loops_over_a_stack_in_place(level: str) -> None:
    x, y = np.arange(24, dtype=np.float32), np.arange(8, dtype=np.float32)
    memory = CoreMemory([("x", 96), ("y", 32)])
    memory.array("x", F32)[:], memory.array("y", F32)[:] = x, y
    assert list(run_program(stacked_program(), memory, level)) == []
    want = 2 * x.reshape(3, 8) + (3 + y)
    np.testing.assert_array_equal(memory.array("x", F32).reshape(3, 8), want)


def fsdp_program(k: int, m: int, n: int, world: int) -> Program:
    """out = reduce_scatter(x^T @ all_gather(w)) over dp: w sharded along k, out along m."""
    tensors = [
        Tensor("x", (k, m), F32, "input"),
        Tensor("w_full", (k, n), F32, "scratch", offset_bytes=0),
        Tensor("part", (m, n), F32, "scratch", offset_bytes=k * n * 4),
        Tensor("w", (k // world, n), F32, "input"),
        Tensor("out", (m // world, n), F32, "output"),
    ]
    calls = [
        CollectiveCall("all_gather", ("dp",), F32, (1, k // world, n), name="gather w"),
        CollectiveCall("reduce_scatter", ("dp",), F32, (1, m, n), "add", name="scatter out"),
    ]
    kernels = [start(0, 3, 1), wait(0), matmul_kernel(m, n, k), start(1, 2, 4), wait(1)]
    scratch = (k * n + m * n) * 4
    function = Function("f", tensors, (0, 3), (4,), (), 3, kernels, calls, scratch, TARGET)
    buffers = [
        ProgramBuffer("x", (k, m), F32, "named"),
        ProgramBuffer("w", (k // world, n), F32, "named"),
        ProgramBuffer("out", (m // world, n), F32, "named"),
    ]
    return Program(
        "step",
        TARGET,
        [function],
        buffers,
        ("x", "w"),
        ("out",),
        (Call(0, (0, 1), (2,)),),
        scratch,
    )


def named(
    name: str, role: str, local: tuple[int, ...], axes: tuple[tuple[str, ...], ...], initial: str
) -> NamedBuffer:
    return NamedBuffer(
        name=name,
        role=role,
        dtype=F32,
        local_shape=local,
        global_shape=local,
        axes=axes,
        initial=initial,
        offset_bytes=0,
    )


def whole(buffer: NamedBuffer, mesh: dict[str, int]) -> NamedBuffer:
    """`buffer` with the global shape its shards make up; a coordinate has none."""
    if buffer.role == "coordinate":
        return buffer
    return replace(buffer, global_shape=sharded_shape(buffer, mesh))


def manifest(
    mesh: dict[str, int], buffers: list[NamedBuffer], num_microbatches: int = 1
) -> Manifest:
    return Manifest(
        name="test",
        target=TARGET,
        instances=1,
        lnc=1,
        mesh=mesh,
        buffers={b.name: whole(b, mesh) for b in buffers},
        programs={},
        schedules=(((("step",), num_microbatches),),),
        num_microbatches=num_microbatches,
        named_bytes=0,
        arena_bytes=0,
        compiler_version="0",
    )


K, M, N = 512, 128, 64


def fsdp_run(threads: int = 1) -> ValueRun:
    mesh = {"dp": 4, "tp": 2}
    buffers = [
        named("x", "batch", (K, M), ((), ("tp",)), "given"),
        named("w", "parameter", (K // 4, N), (("dp",), ()), "given"),
        named("out", "metric", (M // 4, N), (("tp", "dp"), ()), "computed"),
    ]
    return ValueRun({"step": fsdp_program(K, M, N, 4)}, manifest(mesh, buffers), threads=threads)


@pytest.mark.parametrize("threads", [1, 2])
def test_ranks_in_lock_step_with_groups_from_axes(threads: int) -> None:
    rng = np.random.default_rng(3)
    x, w = (
        rng.standard_normal((K, 2 * M)).astype(np.float32),
        rng.standard_normal((K, N)).astype(np.float32),
    )
    run = fsdp_run(threads)
    run.load({"w": w})
    for factor in (1, 2):
        metrics = run.step({"x": x * factor})
        want = (
            4 * factor * (x.astype(np.float64).T @ w)
        )  # the four dp ranks hold the same batch here
        assert distance(metrics["out"], want) <= 1e-6
    np.testing.assert_array_equal(run.gather(["w"])["w"], w)
    check = run.result.l0["step"]
    assert check.instructions > 4 and 0 < check.distance <= 1e-6 and check.worst
    run.close()


def test_a_damaged_instruction_shows_in_the_l0_distance() -> None:
    run = fsdp_run()
    copy = run.programs["step"].functions[0].kernels[2].body[0].body[0].body[3]
    assert copy.opcode == "tensor_copy"
    copy.opcode, copy.attrs = "tensor_unary", {"op": "negate"}
    run.load({"w": np.ones((K, N), np.float32)})
    run.step({"x": np.ones((K, 2 * M), np.float32)})
    assert run.result.l0["step"].distance == pytest.approx(2.0)


def single() -> ValueRun:
    """One core, no collective: y = 2 x + y over eight elements."""
    x, acc = Tensor("x", (8,), F32, "input"), Tensor("acc", (8,), F32, "input")
    tensors = [x, acc, Tensor("acc2", (8,), F32, "output", alias=1)]
    code = [axpy(Affine(), 8)]
    function = Function("f", tensors, (0, 1), (2,), (), 0, code, [], target=TARGET)
    buffers = [ProgramBuffer(name, (8,), F32, "named") for name in ("x", "acc")]
    calls = (Call(0, (0, 1), (1,)),)
    program = Program("step", TARGET, [function], buffers, ("x", "acc"), ("acc",), calls, 0)
    held = [
        named("x", "batch", (8,), ((),), "given"),
        named("acc", "gradient", (8,), ((),), "zeros"),
    ]
    return ValueRun({"step": program}, manifest({"dp": 1}, held))


def test_what_a_program_writes_is_compared_with_l0_where_it_sends_nothing() -> None:
    """The instruction gives y - 2 x, the kernel y + 2 x: 4 x apart of 2 x, for y = 0."""
    run = single()
    (kernel,) = run.programs["step"].functions[0].kernels
    (scaled,) = [i for i in walk(kernel.body) if i.opcode == "tensor_scalar"]
    scaled.attrs = {**scaled.attrs, "scalar0": -2.0}
    run.step({"x": np.ones(8, np.float32)})
    check = run.result.l0["step"]
    assert (check.worst, check.rank) == ("acc", 0)
    assert check.distance == pytest.approx(2.0)


def test_what_cancels_may_be_as_far_apart_as_rounding_makes_it() -> None:
    """y = 2 x - 2 x (1 + 2^-23): nothing is left but roundings, which L0 may make in another order.
    The same distance of what does not cancel is too far."""
    run = single()
    (kernel,) = run.programs["step"].functions[0].kernels
    (scaled,) = [i for i in walk(kernel.body) if i.opcode == "tensor_scalar"]
    scaled.attrs = {**scaled.attrs, "scalar0": float(np.float32(2) * (1 - np.float32(2**-23)))}
    x = np.linspace(1, 2, 8, dtype=np.float32)
    run.load({"acc": -2 * x * (1 + np.float32(2**-23))})
    run.step({"x": x})
    check = run.result.l0["step"]
    assert check.distance > 0.1 and check.passed and check.allowed > 0.1


def test_the_worst_of_several_outputs_is_the_one_that_is_told() -> None:
    """Distances 0, 0.5 and 0.25: the second, and the first where all are 0."""
    run = single()
    run.step({"x": np.ones(8, np.float32)})
    assert run.result.l0["step"].worst == "acc" and run.result.l0["step"].distance == 0
    core = CoreMemory([("a", 4), ("b", 4), ("c", 4)], {"a": 1, "b": 1, "c": 1})
    shadow = _Shadow(replace(run.programs["step"], outputs=("a", "b", "c")), core, 5, 1e-5)
    for name, given in (("a", 4.0), ("b", 6.0), ("c", 5.0)):
        core.array(name, F32)[:] = shadow.drawn.array(name, F32)[:] = 4.0
        shadow.memory.array(name, F32)[:] = given
    found = shadow.compare({n: named(n, "metric", (1,), ((),), "computed") for n in "abc"})
    assert (found.worst, found.distance, found.rank) == ("b", pytest.approx(0.5), 5)


def test_micro_batches_coordinates_zeros_and_replicas() -> None:
    """Accumulate y += 1 * x over micro-batches; every rank sees its own rows of its micro-batch."""
    x, acc = Tensor("x", (8,), F32, "input"), Tensor("acc", (8,), F32, "input")
    function = Function(
        "f",
        [x, acc, Tensor("acc2", (8,), F32, "output", alias=1)],
        (0, 1),
        (2,),
        (),
        0,
        [axpy(Affine(), 8, factor=1.0)],
        [],
        target=TARGET,
    )
    buffers = [ProgramBuffer("x", (8,), F32, "named"), ProgramBuffer("acc", (8,), F32, "named")]
    program = Program(
        "step", TARGET, [function], buffers, ("x", "acc"), ("acc",), (Call(0, (0, 1), (1,)),), 0
    )
    mesh = {"a": 2, "b": 2}
    rank = NamedBuffer(
        name="rank",
        role="coordinate",
        dtype=I32,
        local_shape=(),
        global_shape=(),
        axes=(("a", "b"),),
        initial="given",
        offset_bytes=0,
    )
    run = ValueRun(
        {"step": program},
        manifest(
            mesh,
            [
                named("x", "batch", (8,), (("a",),), "given"),
                named("acc", "gradient", (8,), (("a",),), "zeros"),
                rank,
            ],
            3,
        ),
    )
    batch = np.arange(48, dtype=np.float32)
    run.step({"x": batch})
    np.testing.assert_array_equal(run.gather(["acc"])["acc"], batch.reshape(3, 16).sum(0))
    (host,) = run.hosts.hosts
    assert [int(c.array("rank", I32)[0]) for c in host.cores.values()] == [0, 1, 2, 3]
    host.cores[1].array("acc", F32)[3] += 1
    with pytest.raises(SimulationError, match="ranks 0 and 1"):
        run.gather(["acc"])
    with pytest.raises(SimulationError, match=r"requires shape \[48\], got \[40\]"):
        run.step({"x": batch[:40]})
    with pytest.raises(SimulationError, match=r"requires shape \[48\], got \[16\]"):
        run.step({"x": batch[:16]})


def function_of(kernels: list[Kernel], *kinds: str) -> Function:
    tensors = [
        Tensor(f"t{i}", (8,), F32, kind, offset_bytes=32 * i) for i, kind in enumerate(kinds)
    ]
    inputs = tuple(i for i, k in enumerate(kinds) if k == "input")
    outputs = tuple(i for i, k in enumerate(kinds) if k == "output")
    calls = [CollectiveCall("all_reduce", ("dp",), F32, (1, 8, 1), "add")]
    return Function("f", tensors, inputs, outputs, (), 0, kernels, calls, 256, TARGET)


def run_l0(function: Function) -> None:
    arrays = [np.zeros(32, np.uint8) for _ in range(8)]
    bound = FunctionCode(function, "L0").bind(
        arrays[: len(function.inputs)],
        arrays[4 : 4 + len(function.outputs)],
        np.zeros(256, np.uint8),
    )
    for request in bound.run({}):
        request.deliver(request.source)


AT = Affine()


@pytest.mark.parametrize(
    ("code", "kernels", "kinds"),
    [
        ("SW_L0_UNINITIALISED", [axpy(AT, 8)], ("input", "scratch", "output")),
        ("SW_L0_OUTPUT_UNWRITTEN", [axpy(AT, 7)], ("input", "input", "output")),
        ("SW_L0_UNINITIALISED", [start(0, 1, 2), wait(0)], ("input", "scratch", "output")),
        (
            "SW_L0_COLLECTIVE_RACE",
            [start(0, 0, 2), axpy(AT, 8), wait(0)],
            ("input", "input", "output"),
        ),
        (
            "SW_L0_COLLECTIVE_RACE",
            [start(0, 2, 3), axpy(AT, 8)],
            ("input", "input", "input", "output"),
        ),
        (
            "SW_L0_COLLECTIVE_RACE",
            [start(0, 2, 1), axpy(AT, 8)],
            ("input", "scratch", "input", "output"),
        ),
        ("SW_SIM_COLLECTIVE", [wait(0)], ("input", "output")),
    ],
)
def test_faults_between_kernels(code: str, kernels: list[Kernel], kinds: tuple[str, ...]) -> None:
    with pytest.raises(SimulationError) as caught:
        run_l0(function_of(kernels, *kinds))
    assert caught.value.code == code, str(caught.value)


@pytest.mark.parametrize(("name", "said"), [("", "collective 0"), ("grads", "collective grads")])
def test_a_race_names_its_collective_or_says_which_one(name: str, said: str) -> None:
    function = function_of([start(0, 0, 2), axpy(AT, 8), wait(0)], "input", "input", "output")
    (call,) = function.collectives
    with pytest.raises(SimulationError, match=f"memory of {said} between its start and its wait"):
        run_l0(replace(function, collectives=[replace(call, name=name)]))


def test_two_scratch_tensors_in_the_same_bytes_are_not_both_alive() -> None:
    function = function_of(
        [axpy(AT, 8), axpy(AT, 8, out=4), axpy(AT, 8, out=3)],
        "input",
        "input",
        "scratch",
        "output",
        "scratch",
    )
    run_l0(function)
    third = axpy(AT, 8, out=3)
    third.body[0] = replace(third.body[0], srcs=(replace(third.body[0].srcs[0], buffer=2),))
    function.kernels[2] = third
    run_l0(function)
    function.tensors[4] = replace(
        function.tensors[4], offset_bytes=function.tensors[2].offset_bytes
    )
    with pytest.raises(SimulationError, match="tensor 2"):
        run_l0(function)


def test_a_register_load_is_clamped_and_addresses_later_kernels() -> None:
    tensors = [
        Tensor("x", (16,), F32, "input"),
        Tensor("y", (8,), F32, "input"),
        Tensor("out", (16,), F32, "input"),
        Tensor("i", (1,), I32, "input"),
    ]
    view = View(3, Affine(), ())
    load = Kernel(
        KernelProgram(
            "register_load", "i", attrs={"register": 4, "view": view, "low": 0, "high": 1}
        )
    )
    function = Function(
        "f",
        tensors,
        (0, 1, 2, 3),
        (),
        (),
        5,
        [load, axpy(Affine(0, ((4, 8),)), 8)],
        [],
        target=TARGET,
    )
    for level in ("L0", "L1"):
        x, out = np.arange(16, dtype=np.float32), np.zeros(16, np.float32)
        arrays = [
            a.view(np.uint8) for a in (x, np.zeros(8, np.float32), out, np.array([7], np.int32))
        ]
        list(FunctionCode(function, level).bind(arrays, [], np.zeros(0, np.uint8)).run({}))
        np.testing.assert_array_equal(out, np.where(np.arange(16) < 8, 0, 2 * x))


def test_binding_mistakes_are_refused() -> None:
    program = stacked_program()
    with pytest.raises(SimulationError, match="no buffer named 'y'"):
        list(run_program(program, CoreMemory([("x", 96)])))
    with pytest.raises(SimulationError, match=r"requires bytes 0\.\.32"):
        list(run_program(program, CoreMemory([("x", 96), ("y", 28)])))
    broken = replace(program, steps=(Call(0, (0, 1), (2,), (Affine(),)),))
    broken.buffers[2] = ProgramBuffer("temp", (3, 8), F32, "arena", 0)
    broken.arena_bytes = 96
    with pytest.raises(SimulationError, match="memory of the input it replaces"):
        list(run_program(broken, CoreMemory([("x", 96), ("y", 32)])))


def test_run_single_takes_arrays_by_name() -> None:
    x, y = np.arange(24.0).reshape(3, 8), np.arange(8)
    for level in ("L0", "L1"):
        out = run_single(stacked_program(), {"x": x, "y": y}, level)
        np.testing.assert_array_equal(out["x"], 2 * x + (3 + y))
    with pytest.raises(SimulationError, match=r"input y requires shape \[8\], got nothing"):
        run_single(stacked_program(), {"x": x})
    with pytest.raises(SimulationError, match="one core cannot do alone"):
        run_single(fsdp_program(K, M, N, 4), {"x": np.ones((K, M)), "w": np.ones((K // 4, N))})


def test_a_collective_nobody_waits_for_is_an_error() -> None:
    with pytest.raises(SimulationError, match="returns before it waits"):
        run_l0(function_of([start(0, 0, 1)], "input", "output"))


@pytest.mark.parametrize("level", ["L0", "L1"])
def test_what_a_collective_sends_is_captured_at_its_start(level: str) -> None:
    kernels = [start(0, 2, 3), axpy(AT, 8), wait(0)]
    function = function_of(kernels, "input", "input", "input", "output")
    x, y, sent, got = (np.full(8, i, np.float32) for i in (1, 2, 3, 4))
    bytes_of = [a.view(np.uint8) for a in (x, y, sent, got)]
    bound = FunctionCode(function, level).bind(bytes_of[:3], bytes_of[3:], np.zeros(256, np.uint8))
    if level == "L0":
        with pytest.raises(SimulationError, match="between its start and its wait"):
            list(bound.run({}))
        return
    (request,) = bound.run({})
    np.testing.assert_array_equal(request.source, np.full(8, 3))
    np.testing.assert_array_equal(sent, 2 * x + y)


def test_ranks_share_a_gathered_tensor_only_where_nobody_stores_to_it() -> None:
    gather = FunctionCode(fsdp_program(K, M, N, 4).functions[0])
    assert gather.shared_targets == {1}  # not the output of the reduce_scatter
    kernels = [start(0, 0, 2), wait(0), axpy(AT, 8)]
    assert not FunctionCode(function_of(kernels, "input", "input", "scratch")).shared_targets


@pytest.mark.parametrize("level", ["L0", "L1"])
def test_a_program_survives_its_file_form(level: str) -> None:
    for make, mesh in ((stacked_program, {}), (lambda: fsdp_program(K, M, N, 4), {"dp": 4})):
        program = make()
        sections = encode_program(program)
        loaded = decode_program(lambda name, held=sections: held[name], sections)
        results = []
        for p in (program, loaded):
            cores = [
                CoreMemory([(b.name, _size(b)) for b in p.buffers])
                for _ in range((len(mesh) and 4) or 1)
            ]
            rng = np.random.default_rng(0)
            for core in cores:
                for b in p.buffers:
                    core.array(b.name, b.dtype)[:] = rng.standard_normal(_size(b) // 4)
            running = [run_program(p, core, level) for core in cores]
            while (requests := [next(r, None) for r in running])[0] is not None:
                exchange([r for r in requests if r is not None], mesh)
            results.append([core.array(name, F32).copy() for core in cores for name in p.outputs])
        assert np.isfinite(results[0]).all()
        np.testing.assert_array_equal(results[0], results[1])


def _size(buffer: ProgramBuffer) -> int:
    return int(np.prod(buffer.shape)) * 4


def test_host_threads_change_no_bit() -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((K, 2 * M)).astype(np.float32)
    w = rng.standard_normal((K, N)).astype(np.float32)
    results = []
    for threads in (1, 2):
        run = fsdp_run(threads)
        run.load({"w": w})
        results.append(run.step({"x": x})["out"].tobytes())
        run.close()
    assert results[0] == results[1]


def test_instructions_of_a_program_are_those_of_its_functions() -> None:
    code = ProgramCode.__new__(ProgramCode)
    code.functions = [SimpleNamespace(instructions=n) for n in (3, 4)]
    assert code.instructions == 7
