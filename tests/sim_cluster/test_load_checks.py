"""Every refusal of a machine to load a program, with its numbers, and the last program it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from shardwright.compiler.diagnostics import LoadError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import CollectiveCall, Function, Program, ProgramBuffer
from shardwright.compiler.machine.target import Target, load_target, logical
from shardwright.sim_cluster.values.load_checks import check_loadable

TRN1N = load_target("trn1n.32xlarge")
TRN2 = load_target("trn2.48xlarge")
MIB = 2**20

TENSORS = [
    ProgramBuffer("w", (256, 1024), DType.F32, "named"),  # 1 MiB
    ProgramBuffer("x", (2, 512, 1024), DType.BF16, "named"),  # 2 MiB
    ProgramBuffer("s", (), DType.F32, "named"),  # 4 bytes
    ProgramBuffer("between", (64, 1024, 1024), DType.F32, "arena", 0),  # in the arena: not added
]
NEEDED = 3 * MIB + 4 + 12 * MIB


def function(lnc: int) -> Function:
    partner = [] if lnc > 1 else None
    return Function("f", [], (), (), (), 0, [], [], 7 * MIB, partner=partner)


def program(lnc: int = 1, target: str = TRN1N.name) -> Program:
    """3 MiB and 4 bytes of tensors, an arena of 12 MiB."""
    return Program("main", target, [function(lnc)], TENSORS, (), (), (), 12 * MIB)


def machine(free: int, base: Target = TRN1N) -> Target:
    """A machine whose cores have so many bytes beside a reserve of 1 GiB."""
    return replace(base, hbm_bytes_per_core=2**30 + free, reserve_bytes_per_core=2**30)


def refusal(
    made: Program,
    meta: Mapping[str, Any],
    here: Target,
    environment: Mapping[str, str] | None = None,
) -> LoadError:
    with pytest.raises(LoadError) as caught:
        check_loadable(made, meta, here, environment or {})
    return caught.value


def test_tensors_arena_and_reserve_together_are_what_a_program_needs() -> None:
    """The last byte counts."""
    check_loadable(program(), {"lnc": 1}, machine(NEEDED), {})
    assert refusal(program(), {"lnc": 1}, machine(NEEDED - 1)).code == "SW_LOAD_MEMORY"


@pytest.mark.parametrize(
    "made",
    [
        replace(program(), arena_bytes=12 * MIB + 1),
        replace(program(), buffers=[*TENSORS, ProgramBuffer("b", (1,), DType.U8, "named")]),
        replace(program(), buffers=[replace(TENSORS[0], shape=(257, 1024)), *TENSORS[1:]]),
        replace(program(), buffers=[replace(TENSORS[0], dtype=DType.I64), *TENSORS[1:]]),
    ],
    ids=["arena", "another tensor", "a larger tensor", "a wider tensor"],
)
def test_every_part_of_the_memory_counts(made: Program) -> None:
    assert refusal(made, {}, machine(NEEDED)).code == "SW_LOAD_MEMORY"


def communicating(sets: int, streams: int = 1) -> Program:
    """A program with collectives over so many sets of mesh axes, as many times two."""
    axes = [tuple(a for bit, a in enumerate("abcde") if n >> bit & 1) for n in range(1, sets + 1)]
    calls = [
        CollectiveCall("all_reduce", group, DType.F32, (1, 8, 1), "add", stream=n % streams)
        for n, group in enumerate(axes * 2)
    ]
    host = CollectiveCall("host_load", (), DType.F32, (1, 8, 1), stream=0)
    made = replace(function(1), collectives=[*calls, host])
    return replace(program(), functions=[made])


@pytest.mark.parametrize(
    ("made_as", "most"),
    [("", 16), ("own", 16), ("2.27.5334", 16), ("2.24.5133", 12), ("2.9.0.16", 12)],
)
def test_a_file_has_as_many_sets_of_groups_as_its_runtime(made_as: str, most: int) -> None:
    meta = {"version_profile": made_as}
    check_loadable(communicating(most), meta, machine(NEEDED), {})
    told = refusal(communicating(most + 1), meta, machine(NEEDED)).diagnostic
    assert told.code == "SW_LOAD_GROUPS"
    assert told.message == (
        f"program main has collectives over {most + 1} sets of replica groups, a file may have"
        f" {most}; NRT_RESOURCE (4)"
    )


def test_a_core_has_four_streams_of_collectives() -> None:
    check_loadable(communicating(8, 4), {}, machine(NEEDED), {})
    told = refusal(communicating(8, 5), {}, machine(NEEDED)).diagnostic
    assert told.code == "SW_LOAD_GROUPS" and "over 5 streams, a file may have 4" in told.message


def test_the_reserve_of_the_runtime_counts() -> None:
    here = replace(machine(NEEDED), reserve_bytes_per_core=2**30 + 1)
    assert refusal(program(), {}, here).code == "SW_LOAD_MEMORY"


def test_what_does_not_fit_is_told_part_by_part() -> None:
    """Arena 4.5 GiB, tensors 3 MiB, reserve 1 GiB, of 4 GiB."""
    made = replace(program(), arena_bytes=9 * 2**29)
    told = refusal(made, {}, machine(3 * 2**30)).diagnostic
    assert told.message == (
        "program main requires 5.50 GiB (tensors 0.00 GiB, shared scratchpad 4.50 GiB, model code"
        " 0.09 GiB, DMA rings 0.91 GiB), a core of trn1n.32xlarge has 4.00 GiB; NRT_RESOURCE (4)"
    )
    assert told.hint == "use more cores, a smaller batch, or shard the tensors"


def test_a_logical_core_has_the_memory_of_both_physical_ones() -> None:
    """And the reserve of both: twice the free bytes."""
    here = machine(NEEDED // 2 + 1, TRN2)
    made = program(2, TRN2.name)
    check_loadable(made, {"lnc": 2}, here, {})
    less = machine(NEEDED // 2 - 1, TRN2)
    assert refusal(made, {"lnc": 2}, less).code == "SW_LOAD_MEMORY"
    assert logical(here, 2).limit_bytes == 2 * here.limit_bytes


GENERATIONS = ("inf1.xlarge", "trn1n.32xlarge", "trn2.48xlarge", "trn3-gen1-ultraserver")


@pytest.mark.parametrize("allowed", ["", "0", "1"])
@pytest.mark.parametrize("made", [1, 2, 3])
@pytest.mark.parametrize("here", [1, 2, 3])
def test_older_programs_load_where_that_is_allowed_and_newer_never(
    made: int, here: int, allowed: str
) -> None:
    environment = {"NEURON_RT_ALLOW_LEGACY_NEFF": allowed} if allowed else {}
    target = load_target(GENERATIONS[here])
    one = program(1, GENERATIONS[made])
    if made == here or (made < here and allowed == "1"):
        check_loadable(one, {}, target, environment)
        return
    told = refusal(one, {}, target, environment).diagnostic
    assert told.code == "SW_LOAD_ARCHITECTURE"
    assert told.message == (
        f"program main requires NeuronCore-v{made + 1} ({GENERATIONS[made]}), got"
        f" NeuronCore-v{here + 1} ({target.name}); NRT_UNSUPPORTED_NEFF_VERSION (10)"
    )
    legacy = ", or set NEURON_RT_ALLOW_LEGACY_NEFF=1 to try it" if made < here else ""
    assert told.hint == f"compile with --target {target.name}{legacy}"


@pytest.mark.parametrize(
    ("lnc", "meta", "here", "environment", "message", "hint"),
    [
        (
            1,
            {"lnc": 1},
            TRN1N,
            {"NEURON_LOGICAL_NC_CONFIG": "2"},
            "program main was compiled for logical NeuronCores of 1, the runtime is set to 2;"
            " NRT_INVALID (2)",
            "compile with --logical-nc-config 2 or set NEURON_LOGICAL_NC_CONFIG=1",
        ),
        (
            1,
            {"lnc": 2},
            TRN2,
            {},
            "program main has subgraphs for 1 physical cores, its file says 2; NRT_INVALID (2)",
            "the file is damaged; compile again",
        ),
        (
            2,
            {"lnc": 1},
            TRN2,
            {},
            "program main has subgraphs for 2 physical cores, its file says 1; NRT_INVALID (2)",
            "the file is damaged; compile again",
        ),
        (
            2,
            {"lnc": 2},
            TRN1N,
            {},
            "program main was compiled for logical NeuronCores of 2, trn1n.32xlarge has those of"
            " 1; NRT_INVALID (2)",
            "compile with --logical-nc-config 1",
        ),
    ],
)
def test_logical_cores_of_another_size_are_refused(
    lnc: int,
    meta: Mapping[str, Any],
    here: Target,
    environment: Mapping[str, str],
    message: str,
    hint: str,
) -> None:
    told = refusal(program(lnc, here.name), meta, here, environment).diagnostic
    assert (told.code, told.message, told.hint) == ("SW_LOAD_LNC", message, hint)


def test_logical_cores_that_are_there_or_supposed_are_taken() -> None:
    for lnc in (1, 2):
        environment = {"NEURON_LOGICAL_NC_CONFIG": str(lnc)}
        check_loadable(program(lnc, TRN2.name), {"lnc": lnc}, TRN2, environment)
    check_loadable(program(2), {"lnc": 2, "hypothetical": True}, TRN1N, {})
    check_loadable(program(), {}, TRN1N, {"NEURON_LOGICAL_NC_CONFIG": ""})
    empty = replace(program(1, TRN2.name), functions=[])
    check_loadable(empty, {"lnc": 2}, TRN2, {})  # which has no subgraph to count


def test_the_environment_of_the_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    with pytest.raises(LoadError, match="SW_LOAD_LNC"):
        check_loadable(program(), {}, TRN1N)
