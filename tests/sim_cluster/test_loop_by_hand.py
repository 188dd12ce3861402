"""Collectives and code beside each other in the cluster loop, worked out by hand.

Packets of 4 KiB of code and of 64 KiB of collectives take turns at the DMA engines (page on
overlap); wires are shared evenly; collectives of one stream follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import CollectiveCall
from shardwright.compiler.timing.evaluate import KernelTime, Segment
from shardwright.sim_cluster.timing.actors import NO_WANTS, Actor, CollectiveUse, Job, Wants
from shardwright.sim_cluster.timing.classes import refine
from shardwright.sim_cluster.timing.contention import Demand
from shardwright.sim_cluster.timing.faults import Health
from shardwright.sim_cluster.timing.loop_state import loop_state
from shardwright.sim_cluster.timing.macro import MacroOp, Mark, Start, Stretch, Wait
from shardwright.sim_cluster.timing.run_timing import ClassResult, ClusterLoop, CollectiveDuration

GATHER = CollectiveCall("all_gather", ("dp",), DType.F32, (1, 16_384, 1))


def loop_end(*collectives: tuple[int, Demand], code: Stretch, bank_cores: int = 1) -> int:
    """When a core has done its code beside collectives that it starts first, each on a stream."""
    calls = [replace(GATHER, stream=n) for n in range(len(collectives))]
    costs = {
        call: CollectiveDuration(ps, demand, "ring", "", 64, 2)
        for call, (ps, demand) in zip(calls, collectives, strict=True)
    }
    macros = [
        *(Start(call, n) for n, call in enumerate(calls)),
        code,
        *(Wait(n) for n in range(len(calls))),
    ]
    classes = refine({"dp": 2}, [("dp",)], [0, 0])
    loop = ClusterLoop(classes, [macros], lambda call, _: costs[call], bank_cores=bank_cores)
    return loop.run()[0].end_ps


def test_code_and_a_collective_slow_each_other_down() -> None:
    """Code that wants all engines and takes 1000 ps with them, 2000 with half. A collective of 800
    ps that wants 0.8 of them has it: 16/17 would be its turn. Code has 0.2 meanwhile, 160 ps of
    its work in 800, and then all: 840 more."""
    code = Stretch(1000, 2000, 0, Segment("compute", 1000), "f", demand=Demand(1.0))
    assert loop_end((800, Demand(0.8)), code=code) == 1640
    # One that wants all has 16/17: 800 * 17 / 16 = 850, of which code does 50; 950 are left.
    assert loop_end((800, Demand(1.0)), code=code) == 1800


def test_two_collectives_on_a_wire() -> None:
    """400 and 100 ps, both of which want all of wire 3, each half as fast: the second ends at 200,
    when 100 of the first are done; 300 more."""
    still = Stretch(10, 10, 0, Segment("compute", 10), "f")
    wire = Demand(0.0, wires=((3, 1.0),))
    assert loop_end((400, wire), (100, wire), code=still) == 500


def test_a_delay_is_a_multiple_of_the_time() -> None:
    classes = refine({"dp": 2}, [("dp",)], [0, 0])
    code = Stretch(1000, 1000, 600, Segment("compute", 1000), "f")
    none = CollectiveDuration(0, Demand(0.0), "none", "", 0, 2)
    loop = ClusterLoop(classes, [[code]], lambda call, _: none, Health(slow={0: 1.5}))
    (result,) = loop.run()
    assert result.end_ps == 1500 and result.charged_ps == {"compute": 900, "memory": 600}


def charged(
    macros: Sequence[MacroOp], costs: dict[CollectiveCall, int], mesh: dict[str, int]
) -> ClassResult:
    """The one class of a mesh, whose collectives take so long and want nothing."""
    axes = [call.axes for call in costs]
    ranks = 1
    for size in mesh.values():
        ranks *= size
    classes = refine(mesh, axes, [0] * ranks)

    def price(call: CollectiveCall, _: frozenset[int]) -> CollectiveDuration:
        return CollectiveDuration(costs[call], Demand(0.0), "ring", "", 64, 2)

    return ClusterLoop(classes, [list(macros)], price).run()[0]


def still(ps: int) -> Stretch:
    return Stretch(ps, ps, ps, Segment("compute", ps), "f")


def test_collectives_of_a_stream_follow_each_other() -> None:
    """400 ps over dp, then 100 over tp, started together: who waits for the second from 10 on waits
    390 for the first and 100 for it. On streams of their own the second is done at 100."""
    first, second = GATHER, replace(GATHER, axes=("tp",))
    mesh = {"dp": 2, "tp": 2}
    macros = [Start(first, 0), Start(second, 1), still(10), Wait(1), Wait(0)]
    found = charged(macros, {first: 400, second: 100}, mesh)
    assert found.charged_ps == {"compute": 10, "collective_dp": 390, "collective_tp": 100}
    assert found.end_ps == 500
    assert (found.uses[first].total_ps, found.uses[second].total_ps) == (400, 100)
    apart = replace(second, stream=1)
    macros = [Start(first, 0), Start(apart, 1), still(10), Wait(1), Wait(0)]
    found = charged(macros, {first: 400, apart: 100}, mesh)
    assert found.charged_ps == {"compute": 10, "collective_tp": 90, "collective_dp": 300}


def test_what_stages_have_to_do_together_is_no_bubble_once_it_has_begun() -> None:
    """100 ps over all stages, begun at 0 and waited for from 40 on."""
    over = replace(GATHER, axes=("pp",))
    found = charged([Start(over, 0), still(40), Wait(0)], {over: 100}, {"pp": 2})
    assert found.charged_ps == {"compute": 40, "collective_pp": 60} and found.end_ps == 100


def test_waiting_for_a_stage_that_comes_later_is_bubble() -> None:
    """The other stage comes 70 ps later: 70 of bubble, 100 of the collective; itself none."""
    over = replace(GATHER, axes=("pp",))
    classes = refine({"pp": 2}, [("pp",)], [0, 1])
    cost = CollectiveDuration(100, Demand(0.0), "ring", "", 64, 2)
    own: list[list[MacroOp]] = [[still(30)], [still(100)]]
    loop = ClusterLoop(
        classes, [[*code, Start(over, 0), Wait(0)] for code in own], lambda call, _: cost
    )
    early, late = loop.run()
    assert early.charged_ps == {"compute": 30, "bubble": 70, "collective_pp": 100}
    assert late.charged_ps == {"compute": 100, "collective_pp": 100}


def test_what_a_core_does_adds_up() -> None:
    """Two stretches: 5 and 7 ps of them one physical core works alone, engines 20 and 30 ps."""
    macros: list[MacroOp] = []
    for lone, busy in ((5, 20), (7, 30)):
        kernel = KernelTime("r", 100, {}, 100, 0, lone_ps=lone)
        segment = Segment("compute", 100, 100, {"tensor": busy}, kernels=(kernel,))
        macros.append(Stretch(100, 100, 100, segment, "f"))
    found = charged(macros, {GATHER: 1}, {"dp": 2})
    assert (found.end_ps, found.lone_ps, found.busy_ps) == (200, 12, {"tensor": 50})
    assert [(r.start_ps, r.end_ps) for r in found.ran] == [(0, 100), (100, 200)]


def test_what_a_core_spends_is_charged_and_drawn() -> None:
    """What goes on under its name is one interval; another name, or a gap, begins a new one; what
    takes no time is charged and not drawn. Categories without time are none."""
    result = ClassResult()
    f, g = ("p", 0), ("p", 1)
    result.spend("f", 0, 10, {"compute": 6, "memory": 4, "idle": 0}, f)
    result.spend("f", 10, 15, {"compute": 5}, f)
    result.spend("g", 15, 22, {"memory": 7}, g)
    result.spend("g", 22, 22, {"memory": 0}, g)
    result.spend("f", 22, 22, {"launch": 0}, f)
    result.spend("g", 25, 26, {"memory": 1}, f)
    result.spend("g", 26, 26, {"bubble": 3}, f)
    drawn = [(s.lane, s.name, s.start_ps, s.end_ps, s.charged_ps) for s in result.spans]
    assert drawn == [
        ("core", "f", 0, 15, {"compute": 11, "memory": 4}),
        ("core", "g", 15, 22, {"memory": 7}),
        ("core", "g", 25, 26, {"memory": 1, "bubble": 3}),
    ]
    assert result.charged_ps == {"compute": 11, "memory": 12, "bubble": 3}
    assert result.placed_ps == {
        f: {"compute": 11, "memory": 5, "bubble": 3},
        g: {"memory": 7},
    }
    assert result.last is result.spans[-1] and result.end_ps == 0


def test_only_another_share_is_something_new() -> None:
    """Of 1000 ps with all DMA engines, 2000 with half, 300 are done when half is left: 0.7 of the
    work, 1400 ps. Who says the same shares again changes nothing."""
    actor = Actor(0, [Stretch(1000, 2000, 0, Segment("compute", 1000), "f")])
    actor.begin(1.0, 0)
    assert not actor.share(1.0, 1.0, 100)
    assert (actor.since_ps, actor.left) == (0, 1.0)
    assert actor.share(0.5, 1.0, 300)
    assert (actor.since_ps, actor.left, actor.stretch_end_ps) == (300, 0.7, 1700)
    assert not actor.share(0.5, 1.0, 500)
    assert (actor.since_ps, actor.left, actor.stretch_end_ps) == (300, 0.7, 1700)


def test_before_anything_has_begun() -> None:
    """A class at its first macro-operation, alone on its engines and its bank, at no time; a
    collective of which nothing is done and in which nobody has arrived."""
    actor = Actor(3, [still(10)])
    assert (actor.index, actor.position, actor.runs, actor.entered_at) == (3, 0, 0, 0)
    assert (actor.since_ps, actor.began_ps, actor.entered) == (0, 0, ("", 0))
    assert (actor.factor, actor.left, actor.version) == (1.0, 0.0, 0)
    assert (actor.dma_share, actor.hbm_share) == (1.0, 1.0)
    assert actor.wants == NO_WANTS == Wants(Demand(0.0), 0.0, 0.0)
    assert actor.result == ClassResult(0, {}, {}, [], {}, {}, 0, [], None)
    cost = CollectiveDuration(100, Demand(0.0), "ring", "", 64, 2)
    job = Job(GATHER, cost, frozenset((0, 1)), 7)
    assert (job.start_ps, job.end_ps, job.since_ps, job.version) == (-1, -1, 0, 0)
    assert (job.left, job.rate, job.arrived, job.queue) == (1.0, 0.0, set(), 7)
    use = CollectiveUse(GATHER, cost)
    assert (use.count, use.total_ps, use.exposed_ps) == (0, 0, 0)


def test_a_collective_goes_on_at_another_rate_until_nothing_is_left() -> None:
    """One of 100 ps that is looked at later than it ends has nothing left; one of no time has none
    to lose."""
    for duration, left in ((100, 0.0), (0, 1.0)):
        cost = CollectiveDuration(duration, Demand(0.0), "ring", "", 64, 2)
        job = Job(GATHER, cost, frozenset((0,)), 0)
        job.speed(1.0, 0)
        assert job.end_ps == duration
        job.speed(0.5, 150)
        assert (job.left, job.end_ps, job.since_ps) == (left, 150, 150)


def test_what_a_class_does_and_wants() -> None:
    """Its code's 0.3 of HBM and 0.25 and 0.5 of two collectives; code that moves something counts
    as all of a bank of four, whoever waits wants what its collectives take."""
    code = Stretch(8, 8, 8, Segment("compute", 8), "f", demand=Demand(0.2, hbm=0.3))
    actor = Actor(0, [code, still(10), Mark("")])
    for hbm in (0.25, 0.5):
        cost = CollectiveDuration(100, Demand(0.1, hbm=hbm), "ring", "", 64, 2)
        actor.active.append(Job(GATHER, cost, frozenset((0,)), 0))
    assert actor.stretch is code
    assert actor.now_wants(4) == Wants(code.demand, 1.05, 4.75)
    actor.position = 1
    assert actor.now_wants(4) == Wants(still(10).demand, 0.75, 0.75)
    actor.position, actor.waiting = 0, actor.active[0]
    assert actor.stretch is None and actor.now_wants(4) == Wants(NO_WANTS.code, 0.75, 0.75)
    actor.waiting, actor.position = None, 2
    assert actor.stretch is None and not actor.share(0.5, 0.5, 10)
    actor.position = 3
    assert actor.stretch is None


@pytest.mark.parametrize(("duration", "left"), [(0, 1.0), (1, 0.0), (2, 0.5)])
def test_code_of_hardly_any_time_gets_another_share(duration: int, left: float) -> None:
    """One picosecond later."""
    actor = Actor(0, [still(duration)])
    actor.begin(1.0, 10)
    assert actor.share(0.5, 1.0, 11)
    assert (actor.left, actor.since_ps, actor.began_ps) == (left, 11, 10)


def test_what_is_skipped_is_later_and_nothing_else() -> None:
    """3 macro-operations and 500 ps further: from the run of program a, begun at 20 behind the
    mark at 0, to that of b behind the mark at 3; what is begun stays as far as it is."""
    a, b = Mark("a 0"), Mark("b 1")
    actor = Actor(0, [a, still(10), Mark(""), b, still(10), Mark("")])
    actor.position, actor.left, actor.factor, actor.runs = 1, 0.5, 2.0, 7
    actor.since_ps, actor.began_ps, actor.entered = 40, 30, ("a 0", 20)
    actor.skip(3, 500)
    assert (actor.position, actor.entered_at, actor.entered) == (4, 3, ("b 1", 520))
    assert (actor.since_ps, actor.began_ps) == (540, 530)
    assert (actor.left, actor.factor, actor.runs) == (0.5, 2.0, 7)
    assert actor.stretch_end_ps == 540 + 10  # half of 10 ps on a core that takes twice as long
    cost = CollectiveDuration(100, Demand(0.0), "ring", "", 64, 2)
    job = Job(GATHER, cost, frozenset((0,)), 0)
    job.start_ps = job.since_ps = 10
    job.speed(1.0, 10)
    job.speed(0.5, 30)  # 80 of 100 ps are left, at half the rate
    assert (job.left, job.end_ps, job.version) == (0.8, 190, 2)
    job.skip(1000)
    assert (job.start_ps, job.since_ps, job.end_ps) == (1010, 1030, 1190)
    assert (job.left, job.rate, job.version) == (0.8, 0.5, 2)
    job.speed(1.0, 1070)  # 40 ps at half the rate: 60 are left
    assert (job.left, job.end_ps) == (pytest.approx(0.6), 1130)


def state_of(**changed: object) -> object:
    """Of a class in a stretch of code."""
    code = Stretch(1000, 2000, 0, Segment("compute", 1000), "f")
    actor = Actor(0, [code])
    for name, value in changed.items():
        setattr(actor, name, value)
    return loop_state([actor], [(700, actor)], 500, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"left": 0.5},
        {"factor": 2.0},
        {"began_ps": 100},
        {"since_ps": 100},
        {"dma_share": 0.5},
        {"hbm_share": 0.5},
        {"wants": Demand(0.5)},
        {"runs": 1},
        {"entered_at": -1},
    ],
    ids=str,
)
def test_what_the_future_depends_on_is_in_the_state(change: dict[str, object]) -> None:
    assert state_of() == state_of() != state_of(**change)


def test_whose_event_it_is_is_in_the_state() -> None:
    """Of two classes that do the same, either may be the one that is done at 700."""
    code = Stretch(1000, 2000, 0, Segment("compute", 1000), "f")
    actors = [Actor(n, [code]) for n in range(2)]
    first, second = (loop_state(actors, [(700, actor)], 500, 0) for actor in actors)
    assert first != second


def test_time_itself_is_not_in_the_state() -> None:
    code = Stretch(1000, 2000, 0, Segment("compute", 1000), "f")
    states = []
    for now in (0, 500):
        actor = Actor(0, [code])
        actor.since_ps, actor.began_ps = now - 10, now - 20
        states.append(loop_state([actor], [(now + 200, actor)], now, 0))
    assert states[0] == states[1]
