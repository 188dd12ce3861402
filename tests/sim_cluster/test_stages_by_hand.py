"""Steps of two pipeline stages and of cores that share a bank, worked out by hand.

Under the peak profile: Vector at 1.12 GHz, 16 DMA engines of 27.2 GB/s, 410 GB/s of HBM per core,
stalls filled by neighbours, 100 us for the launch of a program.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine, KernelProgram, Tensor
from shardwright.compiler.isa.program import (
    AccessPattern,
    Call,
    Engine,
    Function,
    Instr,
    Kernel,
    Program,
    Space,
    Tile,
)
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.neff.schedule import Transfer
from shardwright.sim_cluster.timing.faults import Faults
from shardwright.sim_cluster.timing.step_time import Step, time_step

HELD = AccessPattern(Space.SBUF, 0, Affine(), ((1, 128), (1, 1024)))
THERE = AccessPattern(Space.HBM, 0, Affine(), ((1, 5_000_000),))
ADD = Instr("tensor_tensor", Engine.VECTOR, HELD, (HELD, HELD), {"op": "add"})  # 1,828,571 ps
COPY = Instr("dma", Engine.DMA_IN, THERE, (THERE,))  # 20 MB


def program(name: str, *instructions: Instr) -> Program:
    tensors = [Tensor("x", (5_000_000,), DType.F32, "input")]
    tiles = [Tile("t", Space.SBUF, 128, 1024, DType.F32)]
    kernel = Kernel(KernelProgram("compute", name), tiles, list(instructions))
    function = Function(name, tensors, (), (), (), 0, [kernel], [])
    return Program(name, "t", [function], [], (), (), (Call(0, (), ()),), 0)


def step(
    mesh: dict[str, int],
    programs: Sequence[Program],
    *,
    count: int = 1,
    transfers: Sequence[Transfer] = (),
    faults: Faults | None = None,
) -> Step:
    """Every program is a stage, run `count` times."""
    return Step(
        programs={p.name: p for p in programs},
        schedules=tuple((((p.name,), count),) for p in programs),
        mesh=mesh,
        target=load_target("trn1n.32xlarge"),
        instances=1,
        transfers=tuple(transfers),
        faults=faults or Faults(),
    )


SENT = Transfer(
    sent="y", received="x", source=0, target=1, writer="f", reader="b", num_bytes=65_536
)


def test_a_pipeline_of_two_stages() -> None:
    """A message of 64 KiB between both cores of a chip: 0.7 + 1 us + 131,072 touched bytes / 410.

    Stage 0 runs until 101,828,571 and 203,657,142; the messages arrive 2,019,688 later. Stage 1
    runs from 103,848,259 to 205,676,830, when the second one is there, and to 307,505,401.
    """
    both = [program("f", ADD), program("b", ADD)]
    found = time_step(step({"pp": 2}, both, count=2, transfers=[SENT]), "peak")
    assert found.step_time_ps == 307_505_401
    first, second = found.stages_ps
    spent = {"launch": 200_000_000, "compute": 3_657_142, "memory": 0}
    assert first == {**spent, "bubble": 0, "idle": 103_848_259}
    wanted = {**spent, "bubble": 101_828_571, "collective_pp": 2_019_688, "idle": 0}
    assert second == found.breakdown_ps == wanted
    assert found.last is found.last_of(1)
    assert found.last_of(0).end_ps == 205_676_830  # its last message has left then
    assert found.last_of(0).charged_ps == {"launch": 200_000_000, "compute": 3_657_142}


def test_a_stage_of_four_cores_with_a_slow_one() -> None:
    """Core 1 of stage 0 takes 1.5 times as long: 150,000,000 + 2,742,856. Stage 1 is on the next
    chip: both messages are priced on the link between, 131,072 B at 96 GB/s, 1,365,334, and 0.7 us
    more. Its core 1 waits for that message, core 0 does not."""
    both = [program("f", ADD), program("b", ADD)]
    slow = step({"pp": 2, "dp": 2}, both, transfers=[SENT], faults=Faults(slow_cores={1: 1.5}))
    found = time_step(slow, "peak")
    message = 2_400_000 + 1_365_334
    sent = [101_828_571 + message, 152_742_856 + message]
    ends = sorted(result.end_ps for result in found.results)
    assert ends == [*sent, sent[0] + 101_828_571, sent[1] + 101_828_571]
    assert found.rank_classes == 4 and found.step_time_ps == ends[3]


@pytest.mark.parametrize(
    ("mesh", "copy_ps"),
    [
        # One core of a chip: 40 MB / 820 GB/s, more than the engines' 20 * 65676 / 27.2
        ({"dp": 1}, 48_780_488),
        # Both at once: 40 MB / 410
        ({"dp": 2}, 97_560_976),
    ],
)
def test_cores_that_share_a_bank(mesh: dict[str, int], copy_ps: int) -> None:
    found = time_step(step(mesh, [program("p", COPY)]), "peak")
    assert found.step_time_ps == 100_000_000 + copy_ps


def test_a_core_beside_one_that_has_finished_copying() -> None:
    """One core copies once, its neighbour, 1.5 times as slow to start, when that is nearly done.

    The first starts at 100,000,000 with the whole bank and would take 48,780,488; the second one
    starts at 150,000,000, when it has finished, and takes 1.5 times as long with the whole bank.
    """
    found = time_step(
        step({"dp": 2}, [program("p", COPY)], faults=Faults(slow_cores={1: 1.5})), "peak"
    )
    assert sorted(r.end_ps for r in found.results) == [148_780_488, 150_000_000 + 73_170_732]
