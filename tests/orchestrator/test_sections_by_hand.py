"""Sections about memory, functions and instructions, `nccom`'s columns and the figures of `neff`,
against arithmetic that stands here."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.collectives.ops import CollectiveKind
from shardwright.collectives.timing.times import CollectiveTime
from shardwright.compiler.diagnostics import CapacityError, UsageError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import KernelProgram, Node, Tensor
from shardwright.compiler.isa.program import (
    Call,
    Engine,
    Function,
    Instr,
    Kernel,
    Loop,
    Program,
    ProgramBuffer,
    Repeat,
)
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.timing.evaluate import KernelTime
from shardwright.orchestrator.commands import nccom
from shardwright.orchestrator.neff import neff_time, neff_tools
from shardwright.orchestrator.neff.neff_files import ProgramFile
from shardwright.orchestrator.report import memory_report, report, step_report
from shardwright.orchestrator.road import fitting
from shardwright.sharding.memory.arena import Holding, Moment
from shardwright.sharding.memory.footprint import Footprint, category_of, check_limit, worst_stage
from shardwright.sim_cluster.timing.step_parts import (
    FunctionTime,
    ProgramRun,
    StepParts,
    Timeline,
    Track,
)
from tests.support.invented_job import buffer, invented, machine

F32 = DType.F32
GIB = 2**30
TRN1N = "trn1n.32xlarge"

# Memory


def footprint(peak: int, program: str = "forward") -> Footprint:
    return Footprint(
        categories={"parameters": peak - 100, "activations": 100},
        peak_bytes=peak,
        peak_program=program,
        argument_bytes={"parameters": peak - 100},
        arena_bytes={program: 100},
        timeline=(Moment(program, 3, "layer", 2, {"parameters": peak - 100, "activations": 100}),),
        held=tuple(Holding(f"t{n}", "parameters", 50 - n) for n in range(30)),
    )


@pytest.mark.parametrize(("over", "fits"), [(-1, True), (0, True), (1, False)])
def test_the_last_byte_below_the_limit_fits(
    over: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 GiB less the reserve of the runtime; the fullest stage decides."""
    own = machine(hbm_bytes_per_core=16 * GIB, reserve_bytes_per_core=GIB)
    fullest = footprint(15 * GIB + over, "backward")
    found = (footprint(14 * GIB), fullest)
    monkeypatch.setattr(memory_report, "compiled_footprints", lambda _: found)
    built = invented(own)
    built.plan.footprint = footprint(15 * GIB + 7)
    section = memory_report.memory_section(built)
    assert section["limit_bytes"] == 15 * GIB == own.limit_bytes
    assert section["reserve_bytes"] == GIB
    assert (section["peak_bytes"], section["peak_program"]) == (15 * GIB + over, "backward")
    assert section["fits"] is fits
    assert section["estimate"]["peak_bytes"] == 15 * GIB + 7
    assert [row["peak_bytes"] for row in section["per_stage"]] == [14 * GIB, 15 * GIB + over]
    assert [row["bytes"] for row in section["largest"]] == list(range(50, 30, -1))
    assert section["timeline"][0]["live_bytes"] == 15 * GIB + over


def test_changes_that_save_something_are_planned_and_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiling made 200 bytes of an estimate of 100. Estimates of 80, 45, 100 and 99 are then 160,
    90, 200, which saves nothing, and 198. A core of the job may use 160, of the machines of two
    changes one byte too few, and just enough. One cannot be planned."""
    estimates = {"a": 80, "b": 45, "c": 100, "d": 99}
    limits = {"a": 159, "d": 198}

    def planned(job: str, service: object, stages: object) -> Any:
        if job == "refused":
            raise CapacityError("SW_A", "why")
        made = invented(machine(hbm_bytes_per_core=limits.get(job, 160), reserve_bytes_per_core=0))
        made.plan.footprint = footprint(estimates[job])
        return made

    ideas = [SimpleNamespace(keys=key) for key in ("a", "b", "refused", "c", "d")]
    monkeypatch.setattr(fitting, "planned", planned)
    monkeypatch.setattr(fitting, "frugal", lambda job: job)
    monkeypatch.setattr(fitting, "unit_service", lambda *_: nullcontext())
    monkeypatch.setattr(memory_report, "situation_of", lambda *_: None)
    monkeypatch.setattr(memory_report, "saving", lambda situation: ideas)
    monkeypatch.setattr(
        memory_report, "changed", lambda job, key: SimpleNamespace(job=key, text=f"key={key}")
    )
    job: Any = "none"
    memory = {"peak_bytes": 200, "limit_bytes": 160, "estimate": {"peak_bytes": 100}}
    rows = memory_report.explain(job, {"memory": memory})["suggestions"]
    assert rows == [
        {"change": "key=b", "saves_bytes": 110, "peak_bytes": 90, "fits": True},
        {"change": "key=a", "saves_bytes": 40, "peak_bytes": 160, "fits": False},
        {"change": "key=d", "saves_bytes": 2, "peak_bytes": 198, "fits": True},
    ]
    cells = [list(column.cells) for column in memory_report._changes(rows).columns]
    assert cells[0] == ["key=b", "key=a", "key=d"] and cells[-1] == ["yes", "no", "yes"]


def test_a_plan_at_the_limit_is_no_error() -> None:
    check_limit(footprint(1000), 1000, "hint")
    with pytest.raises(CapacityError, match=r"requires .*\(1000 bytes\).*limit .*\(999 bytes\)"):
        check_limit(footprint(1000), 999, "hint")
    assert worst_stage([footprint(7), footprint(9), footprint(8)]).peak_bytes == 9


@pytest.mark.parametrize(
    ("role", "category"),
    [
        ("parameter", "parameters"),
        ("gradient", "gradients"),
        ("optimizer", "optimizer"),
        ("residual", "activations"),
        ("gathered", "gathered"),
        ("batch", "other"),
        ("rng", "other"),
    ],
)
def test_categories_of_buffers(role: str, category: str) -> None:
    assert category_of(buffer("b", role, 8)) == category


# Functions


def contraction(rows: int, depth: int, columns: int) -> KernelProgram:
    """A product of two loaded operands over three counters."""
    nodes = (
        Node("load", (), (0, 1), F32),
        Node("load", (), (1, 2), F32),
        Node("contract", (0, 1), (0, 2), F32),
        Node("add", (2, 2), (0, 2), F32),
    )
    return KernelProgram("compute", "product", (rows, depth, columns), nodes, loc=0)


def instr() -> Instr:
    return Instr("tensor_copy", Engine.VECTOR, None)


def looped(body: list[Any], loc: KernelProgram) -> Kernel:
    return Kernel(loc, body=body)


def function(name: str, *kernels: Kernel, partner: list[Kernel] | None = None) -> Function:
    return Function(name, [], (), (), (), 0, list(kernels), [], 40, partner=partner)


PRODUCT = looped([instr(), Loop(0, 5, [instr(), Loop(1, 3, [instr()])])], contraction(4, 5, 6))
COPY = looped([instr(), instr()], KernelProgram("compute", "copy", (8,), (), loc=-1))
STARTED = looped([], KernelProgram("collective_start", "start"))
PROGRAM = Program(
    "forward",
    TRN1N,
    [function("layer", PRODUCT, STARTED, COPY), function("head", COPY)],
    [ProgramBuffer("x", (4, 8), DType.BF16, "named"), ProgramBuffer("a", (9,), F32, "arena")],
    ("x",),
    (),
    (Repeat(0, 10, (Call(0, (), ()), Repeat(1, 2, (Call(1, (), ()),)))), Call(1, (), ())),
    100,
    locations=(("model.py", 7, "step"),),
)


def test_flops_of_a_kernel_are_two_per_product() -> None:
    """4 x 5 x 6 products; additions beside them are not products."""
    assert step_report.flops(contraction(4, 5, 6)) == 240
    assert step_report.flops(COPY.program) == 0


def test_functions_share_out_their_time_by_what_kernels_take_alone() -> None:
    """2 calls took 100 + 50 ps of compute and memory; kernels alone take 10 and 5: 100 and 50 of
    them; 7 ps of waiting belong to the function."""
    alone = (
        KernelTime("0", 10, {"tensor": 9, "vector": 2}, 9, hbm_bytes=64),
        KernelTime("2", 5, {"vector": 4}, 4, hbm_bytes=16),
    )
    charged = {"compute": 100, "memory": 50, "collective_tp": 7}
    time = FunctionTime(program="forward", number=0, calls=2, charged_ps=charged, kernels=alone)
    row = step_report._function(time, {"forward": PROGRAM})
    assert (row["function"], row["calls"], row["time_ps"]) == ("layer", 2, 157)
    assert [k["time_ps"] for k in row["kernels"]] == [100, 50]
    assert [k["flops"] for k in row["kernels"]] == [480, 0] and row["flops"] == 480
    assert [k["hbm_bytes"] for k in row["kernels"]] == [128, 32] and row["hbm_bytes"] == 160
    assert row["kernels"][0]["busy_ps"] == {"tensor": 18, "vector": 4}
    assert "model.py:7" in row["loc"] and row["kernels"][1]["loc"] == ""


def test_a_kernel_on_two_physical_cores_multiplies_on_both() -> None:
    """4 x 5 x 6 products on one core and 3 x 5 x 6 on the other, two operations each, in 2 calls:
    2 * (240 + 180)."""
    half = looped([instr()], contraction(3, 5, 6))
    both = replace(PROGRAM, functions=[function("layer", PRODUCT, partner=[half])])
    alone = (KernelTime("0", 10, {"tensor": 9}, 9, hbm_bytes=64),)
    time = FunctionTime(
        program="forward", number=0, calls=2, charged_ps={"compute": 10}, kernels=alone
    )
    row = step_report._function(time, {"forward": both})
    assert ([k["flops"] for k in row["kernels"]], row["flops"]) == ([840], 840)


def test_shared_out_picoseconds_sum_to_the_whole() -> None:
    """100 ps over 3 and 4 of 7: 42 and 58."""
    alone = tuple(KernelTime(str(n), ps, {}, 0, hbm_bytes=0) for n, ps in ((0, 3), (2, 4)))
    time = FunctionTime(
        program="forward", number=0, calls=1, charged_ps={"compute": 100}, kernels=alone
    )
    rows = step_report._function(time, {"forward": PROGRAM})["kernels"]
    assert [row["time_ps"] for row in rows] == [58, 42]


def test_long_lists_end_with_the_sum_of_the_rest() -> None:
    rows = [{"name": f"r{n}", "time_ps": n, "busy_ps": {"a": n}, "loc": "x"} for n in range(5)]
    assert step_report._bounded(rows, 5, "rows") == rows
    kept = step_report._bounded(rows, 4, "rows")
    assert kept[:3] == rows[:3]
    assert kept[3] == {"name": "2 more rows", "time_ps": 7, "busy_ps": {"a": 7}, "loc": ""}
    other = [{"name": "a", "busy_ps": {"x": 2}}, {"name": "b", "busy_ps": {"y": 5}}]
    assert step_report._bounded(other, 1, "rows")[0]["busy_ps"] == {"x": 2, "y": 5}
    assert (step_report.FUNCTIONS, step_report.KERNELS) == (100, 40)


@pytest.mark.parametrize(
    ("program", "name"), [("forward", "launch"), ("", "wait for other stages")]
)
def test_waits_and_launches_are_functions_without_kernels(program: str, name: str) -> None:
    spent = {"bubble": 4, "launch": 5}
    time = FunctionTime(program=program, number=-1, calls=3, charged_ps=spent, kernels=())
    row = step_report._function(time, {})
    assert (row["function"], row["time_ps"], row["flops"]) == (name, 9, 0)
    assert (row["loc"], row["kernels"]) == ("", [])


def test_charts_and_timelines_are_plain_data() -> None:
    runs = [
        ProgramRun(stage=stage, program="f", number=number, runs=2, start_ps=10, end_ps=30)
        for stage, number in ((0, 0), (1, 0), (0, 2))
    ]
    track = Track(name="tensor", slices=(("r0", 1, 5), ("r1", 5, 9)))
    line = Timeline(program="forward", number=1, duration_ps=9, tracks=(track,), left_out=4)
    parts = StepParts(functions=(), runs=tuple(runs), timelines=(line,))
    assert step_report.step_chart(parts) == [
        {"stage": 0, "runs": [["f", 0, 2, 10, 30], ["f", 2, 2, 10, 30]]},
        {"stage": 1, "runs": [["f", 0, 2, 10, 30]]},
    ]
    assert step_report.timelines(parts, {"forward": PROGRAM}) == [
        {
            "program": "forward",
            "function": "head",
            "duration_ps": 9,
            "left_out": 4,
            "tracks": [{"name": "tensor", "slices": [["r0", 1, 5], ["r1", 5, 9]]}],
        }
    ]


def test_instructions_of_a_program_static_and_run() -> None:
    """layer: 1 + 1 + 1 written, 1 + 5 x (1 + 3) = 21 run, and 2 of the copy; head 2. In all 7
    written; 10 x (23 + 2 x 2) + 2 = 272 run."""
    assert [report._instructions(f, False) for f in PROGRAM.functions] == [5, 2]
    assert report._dynamic(PROGRAM, PROGRAM.steps) == 272


# neff info


def test_what_info_tells_of_a_program() -> None:
    found = neff_tools._program(PROGRAM)
    assert found["inputs"] == [{"name": "x", "shape": [4, 8], "dtype": "bf16"}]
    assert (found["functions"], found["lnc"]) == (["layer", "head"], 1)
    assert found["subgraphs"] == {"sg00 instructions": 7}
    assert (found["arena_bytes"], found["scratch_bytes"], found["collectives"]) == (100, 40, 0)


def test_what_info_tells_of_two_physical_cores() -> None:
    """Core 0 has 5 instructions, core 1 the 3 of the product; the copy is core 0's alone."""
    idle = looped([], KernelProgram("idle", "copy"))
    both = function("layer", PRODUCT, COPY, partner=[PRODUCT, idle])
    assert neff_tools._program(replace(PROGRAM, functions=[both]))["subgraphs"] == {
        "sg00 instructions": 5,
        "sg01 instructions": 3,
        "kernels on both": 1,
        "kernels on sg00 alone": 1,
    }


@pytest.mark.parametrize("lnc", [1, 2])
def test_constants_are_loaded_at_the_full_rate_of_the_dma_engines(lnc: int) -> None:
    """4,352,000 bytes at 16 engines x 17 GB/s are 16 us; of two physical cores half of that."""
    constant = Tensor("c", (4_352_000,), DType.U8, "constant", data=bytes(4_352_000))
    partner = [] if lnc == 2 else None
    made = replace(function("f"), tensors=[constant], partner=partner)
    program = replace(PROGRAM, functions=[made])
    asked = {"options": {"enable_fast_context_switch": True}}
    target = load_target(TRN1N)
    found = neff_time._constants_ps(ProgramFile(program, asked), target)
    assert found == 16_000_000 // lnc
    assert neff_time._constants_ps(ProgramFile(program, {}), target) == 0


@pytest.mark.parametrize(("ranks", "instances"), [(32, 1), (33, 2), (64, 2), (65, 3)])
def test_ranks_are_on_as_few_instances_as_have_the_cores(
    ranks: int, instances: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def time_step(step: Any, **_: Any) -> Any:
        asked.append(step)
        return type("Timed", (), {"step_time_ps": 5})

    monkeypatch.setattr(neff_time, "time_step", time_step)
    opened = ProgramFile(PROGRAM, {"mesh": [["dp", ranks]]})
    assert neff_time.timed_step(opened, load_target(TRN1N)).step_time_ps == 5
    assert (asked[0].instances, asked[0].mesh) == (instances, {"dp": ranks})


def test_more_than_an_instance_needs_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = type("Timed", (), {"step_time_ps": 5})
    monkeypatch.setattr(neff_time, "time_step", lambda _, **__: timed)
    files = {ranks: ProgramFile(PROGRAM, {"mesh": [["dp", ranks]]}) for ranks in (24, 25)}
    assert neff_time.timed_step(files[24], load_target("inf2.48xlarge"))
    with pytest.raises(UsageError, match="of 25 ranks requires at most 24 cores"):
        neff_time.timed_step(files[25], load_target("inf2.48xlarge"))


# nccom


def point(
    kind: CollectiveKind, ranks: int, size: int = 2**20, total_ps: int = 10**8
) -> nccom.Point:
    time = CollectiveTime(
        total_ps=total_ps,
        launch_ps=2_500_000,
        latency_ps=7_500_000,
        transfer_ps=90_000_000,
        algorithm="hierarchical",
        why="because",
        bound="link",
        touch_bytes_per_rank=0,
    )
    return nccom.Point(
        size_bytes=size, dtype="bf16", ranks=ranks, kind=kind, time=time, band_us=(90.0, 120.0)
    )


@pytest.mark.parametrize(
    ("kind", "ranks", "factor"),
    [
        (CollectiveKind.ALL_REDUCE, 8, 2 * 7 / 8),
        (CollectiveKind.ALL_REDUCE, 2, 1.0),
        (CollectiveKind.ALL_GATHER, 8, 7 / 8),
        (CollectiveKind.REDUCE_SCATTER, 4, 3 / 4),
        (CollectiveKind.ALL_TO_ALL, 32, 31 / 32),
        (CollectiveKind.COLLECTIVE_PERMUTE, 8, 1.0),
    ],
)
def test_bandwidths_of_algorithm_and_bus(kind: CollectiveKind, ranks: int, factor: float) -> None:
    """1 MiB in 100 us are 10,000 MiB/s, 9.765625 GiB/s; the bus carries 2 (r - 1) / r of it for
    all_reduce, (r - 1) / r for the others, all of it between pairs.

    Source: nccom-test page of the Neuron documentation.
    """
    found = point(kind, ranks)
    assert found.time_us == pytest.approx(100.0)
    assert found.algbw_gib_s == pytest.approx(9.765625, rel=1e-12)
    assert found.busbw_gib_s == pytest.approx(9.765625 * factor, rel=1e-12)


def test_columns_are_rounded_as_the_tools_are() -> None:
    found = point(CollectiveKind.ALL_GATHER, 8, size=3000, total_ps=123_456_789)
    assert found.cells() == (3000, 1500, "bf16", 123.46, 0.0226, 0.0198, "hier")
    record = found.record()
    assert (record["schedule"], record["why"], record["bound"]) == (
        "hierarchical",
        "because",
        "link",
    )
    times = [record[f"{name}_us"] for name in ("launch", "latency", "transfer")]
    assert times == pytest.approx([2.5, 7.5, 90.0]) and record["band_us"] == [90.0, 120.0]


def test_the_average_is_of_bus_bandwidths() -> None:
    pair = [point(CollectiveKind.ALL_REDUCE, 8), point(CollectiveKind.ALL_GATHER, 8)]
    assert nccom._average(pair) == pytest.approx(9.765625 * (1.75 + 0.875) / 2)
    assert nccom.table(pair).endswith("Avg bus bandwidth: 12.8174GB/s")


def series(first: str, last: str, step: str = "", factor: str = "") -> list[int]:
    keys: dict[str, Any] = {name: "" for name in nccom.Request.__dataclass_fields__}
    keys |= {"minbytes": first, "maxbytes": last, "stepbytes": step, "stepfactor": factor}
    return nccom.sizes(nccom.Request(**keys | {"op": "allr", "datatype": "uint8"}), 8)


def test_sizes_by_factor_by_step_and_by_tenths() -> None:
    assert series("8", "100", factor="2") == [8, 16, 32, 64]
    assert series("8", "64", factor="2") == [8, 16, 32, 64]
    assert series("3", "12", factor="1.5") == [3, 4, 6, 9]  # 4.5 and 13.5 rounded down
    assert series("1", "4", factor="1.1") == [1, 2, 3, 4]  # at least one more
    assert series("8", "24", step="8") == [8, 16, 24]
    assert series("100", "200") == list(range(100, 201, 10))
    assert series("5", "8") == [5, 6, 7, 8]
    assert series("1kb", "1kb") == [1024]


def test_widths_of_elements() -> None:
    widths = {1: "uint8 int8", 2: "uint16 int16 fp16 bf16", 4: "uint32 int32 fp32"}
    known = {name: size for size, names in widths.items() for name in names.split()}
    assert known == nccom.ELEMENT_BYTES
