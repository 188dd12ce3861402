"""What stages of a pipeline do in which order, event by event, on a machine that writes it down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.neff.schedule import Transfer
from shardwright.sim_cluster.timing.stage_order import StageOrder


@dataclass
class Log:
    """A machine: `joins` says how many collectives over stages a program has."""

    joins: Mapping[str, int] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)

    def run(self, stage: int, program: str, number: int) -> Iterator[str]:
        self.events.append(f"{stage} {program}{number}")
        for n in range(self.joins.get(program, 0)):
            yield f"{program}{number}.{n}@{stage}"

    def join(self, parts: Sequence[str]) -> None:
        self.events.append(f"join {' '.join(parts)}")

    def read(self, transfer: Transfer, number: int) -> str:
        return f"{transfer.sent}{number}"

    def write(self, transfer: Transfer, number: int, data: Any) -> None:
        self.events.append(f"{transfer.target} gets {data} as {transfer.received}{number}")


def transfer(sent: str, source: int, target: int, once: bool = False, **names: str) -> Transfer:
    given = {"received": f"{sent}'", "writer": "f", "reader": "f"} | names
    return Transfer(sent=sent, source=source, target=target, num_bytes=1, once=once, **given)


def ordered(schedules: Any, *transfers: Transfer, **joins: int) -> list[str]:
    log = Log(joins)
    StageOrder(schedules, transfers, log).run()
    return log.events


TWICE = ((("f",), 2),)


def test_a_stage_runs_its_schedule() -> None:
    both = ((("f", "b"), 2), (("u",), 1))
    assert ordered((both,)) == ["0 f0", "0 b0", "0 f1", "0 b1", "0 u0"]


def test_the_last_run_may_be_another_program() -> None:
    """It works on the next micro-batch, and sends and receives what the one before would."""
    stages = ((("f",), 1), (("f.last",), 1))
    assert ordered((stages, stages), transfer("x", 0, 1), transfer("y", 0, 1, True)) == [
        *("0 f0", "0 f.last1"),
        *("1 gets x0 as x'0", "1 gets y1 as y'0", "1 f0"),
        *("1 gets x1 as x'1", "1 f.last1"),
    ]


def test_every_run_sends_to_the_next_stage() -> None:
    assert ordered((TWICE, TWICE), transfer("x", 0, 1)) == [
        "0 f0",
        "0 f1",
        "1 gets x0 as x'0",
        "1 f0",
        "1 gets x1 as x'1",
        "1 f1",
    ]


def test_what_is_sent_once_is_that_of_the_last_run_for_the_first() -> None:
    assert ordered((TWICE, TWICE), transfer("w", 0, 1, once=True)) == [
        "0 f0",
        "0 f1",
        "1 gets w1 as w'0",
        "1 f0",
        "1 f1",
    ]


def test_transfers_are_of_their_programs_and_stages() -> None:
    """Stage 1 sends gradients of b back to 0; nothing of other writers moves."""
    both = ((("f", "b"), 1),)
    forward, back = transfer("x", 0, 1), transfer("g", 1, 0, writer="b", reader="b")
    assert ordered((both, both), forward, back) == [
        "0 f0",
        "1 gets x0 as x'0",
        "1 f0",
        "1 b0",
        "0 gets g0 as g'0",
        "0 b0",
    ]


def test_collectives_over_stages_join_when_all_have_come() -> None:
    """Stage 1 comes to its first while stage 0 has one program more in front."""
    found = ordered(((((("a", "f")), 1),), ((("f",), 1),)), f=2)
    assert found == [
        "0 a0",
        "0 f0",
        "1 f0",
        "join f0.0@0 f0.0@1",
        "join f0.1@0 f0.1@1",
    ]


def test_a_deadlock_says_what_each_stage_waits_for() -> None:
    lost = transfer("x", 1, 0, writer="never")
    with pytest.raises(SimulationError) as stuck:
        ordered((TWICE, ((("u",), 1),), ((("c",), 1),)), lost, c=1)
    assert stuck.value.code == "SW_SIM_DEADLOCK"
    text = str(stuck.value)
    assert "stage 0 waits for x' from stage 1 before run 0 of f; stage 1 has ended" in text
    assert "stage 2 waits for a collective over stages in c" in text
