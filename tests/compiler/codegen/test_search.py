"""Levels of search: which candidates are tried, and that more tries never make slower code."""

from __future__ import annotations

import sys

import pytest

from shardwright.compiler.codegen import generate
from shardwright.compiler.codegen.generate import Codes
from shardwright.compiler.codegen.overlap import unroll_factors
from shardwright.compiler.codegen.planning import Candidate
from shardwright.compiler.codegen.search import EFFORTS, Effort, fastest, walk, worth_trying
from shardwright.compiler.diagnostics import CapacityError
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.timing.evaluate import busiest_ps, oracle_ps
from tests.compiler.codegen.kernel_harness import BF16, TARGET, Maker
from tests.support.kernel_checks import kernel_time


def candidates(*costs: float) -> list[Candidate]:
    return [Candidate(cost, lambda builder: None) for cost in costs]


def test_a_level_tries_the_cheapest_estimates_within_its_spread() -> None:
    found = candidates(9.0, 1.0, 1.4, 1.6, 1.2)
    assert [c.cost for c in worth_trying(found, Effort(4, 1.5, ((1,),)))] == [1.0, 1.2, 1.4]
    assert [c.cost for c in worth_trying(found, Effort(2, 9.0, ((1,),)))] == [1.0, 1.2]
    assert [c.cost for c in worth_trying(found, EFFORTS[1])] == [1.0]


def test_the_shortest_time_wins_one_nest_at_a_time() -> None:
    first, second = candidates(1.0, 2.0, 3.0), candidates(1.0, 2.0)
    times = {(1.0, 1.0): 50, (2.0, 1.0): 40, (3.0, 1.0): 45, (2.0, 2.0): 30}
    built: list[tuple[float, ...]] = []

    def build(chosen: list[Candidate], below: float) -> tuple[float, ...]:
        built.append(tuple(c.cost for c in chosen))
        return built[-1]

    made, chosen = walk([first, second], build, times.__getitem__)
    assert made == (2.0, 2.0) and chosen == [first[1], second[1]]
    assert len(built) == len(set(built)) == 4


def test_what_does_not_fit_is_passed_over_and_the_first_reason_is_kept() -> None:
    def build(chosen: list[Candidate], below: float) -> float:
        if chosen[0].cost < 3:
            raise CapacityError("SW_SBUF_CAPACITY", f"tile {chosen[0].cost}")
        return chosen[0].cost

    assert walk([candidates(1.0, 2.0, 3.0)], build, int)[0] == 3.0
    with pytest.raises(CapacityError, match=r"tile 1\.0"):
        walk([candidates(1.0, 2.0)], build, int)


def test_every_row_of_unroll_factors_is_a_walk_of_its_own() -> None:
    """The second tiling only pays with two iterations side by side."""
    times = {(1.0, 1): 50, (2.0, 1): 60, (1.0, 2): 55, (2.0, 2): 30}

    def build(chosen: list[Candidate], unroll: int, below: float) -> tuple[float, int]:
        (candidate,) = chosen
        return candidate.cost, unroll

    nests = [candidates(1.0, 2.0)]
    one, both = Effort(2, 9.0, ((1, 2),)), Effort(2, 9.0, ((1, 2), (2,)))
    (first, second), time = nests[0], times.__getitem__
    assert fastest(nests, one, build, time) == ((1.0, 1), [first], 1)
    assert fastest(nests, both, build, time) == ((2.0, 2), [second], 2)


def test_what_does_not_fit_on_one_walk_is_left_out() -> None:
    first, second = candidates(1.0, 2.0)

    def build(chosen: list[Candidate], unroll: int, below: float) -> tuple[float, int]:
        if chosen[0] is second and unroll == 4:
            raise CapacityError("SW_SBUF_CAPACITY", "tile")
        return chosen[0].cost, unroll

    def time(made: tuple[float, int]) -> int:
        return 10 // made[1]

    nests = [[first, second, first, second]]
    effort = Effort(4, 9.0, ((1, 4), (4,)))
    assert fastest(nests, effort, build, time) == ((1.0, 4), [first], 4)


def test_code_that_cannot_win_is_not_finished() -> None:
    """Of three, the second has an engine that is busy for as long as the first takes in all, and
    the third one that is busy for less."""
    first, second, third = candidates(1.0, 2.0, 3.0)
    busiest, times = {1.0: 10, 2.0: 40, 3.0: 35}, {1.0: 40, 3.0: 36}

    def build(chosen: list[Candidate], below: float) -> float | None:
        (candidate,) = chosen
        return candidate.cost if busiest[candidate.cost] < below else None

    assert walk([[first, second, third]], build, times.__getitem__) == (3.0, [third])


def products() -> Maker:
    """A product whose operands both have k innermost, as in x @ w.T."""
    m = Maker((1021, 768, 2048), "products")
    a, b = m.load((0, 2), BF16), m.load((1, 2), BF16)
    m.store(m.contract(a, b, over=(2,)), (0, 1))
    return m


def softmax() -> Maker:
    m = Maker((600, 3000), "softmax")
    x = m.load((0, 1))
    e = m.node("exponential", m.node("subtract", x, m.reduce(x, (1,), "max")))
    m.store(m.node("divide", e, m.reduce(e, (1,))), (0, 1))
    return m


@pytest.mark.parametrize(("make", "fewer"), [(products, False), (softmax, True)])
def test_code_that_is_not_finished_could_not_have_won(make, fewer, monkeypatch) -> None:
    """A search that finishes all code finds the same, and no code takes less than its bound."""

    def searched() -> tuple[object, int]:
        m, machine = make(), load_target(TARGET)
        codes = Codes(m.program(), m.tensors, TARGET, 0, CompileOptions(optlevel=3))
        recipe = codes.searched().recipe
        tried = [made.kernel for made in codes._made.values()]
        for kernel in tried:
            least = busiest_ps(kernel, m.tensors, machine)
            assert 0 < least <= oracle_ps(kernel, m.tensors, machine)
        return recipe, len(tried)

    recipe, few = searched()
    monkeypatch.setattr(sys.modules[Codes.__module__], "busiest_ps", lambda *_: 0)
    whole, many = searched()
    assert recipe == whole and (few < many if fewer else few <= many)


@pytest.mark.parametrize("make", [products, softmax])
def test_a_higher_level_is_never_slower(make) -> None:
    m, machine = make(), load_target(TARGET)
    times = []
    for level in (1, 2, 3):
        options = CompileOptions(optlevel=level)
        kernel = generate(m.program(), m.tensors, TARGET, 0, options).kernel
        times.append(kernel_time(kernel, m.tensors, machine).duration_ps)
    assert times[0] >= times[1] >= times[2] > 0


@pytest.mark.parametrize("make", [products, softmax])
def test_tilings_that_come_to_the_same_code_are_placed_and_timed_once(
    make, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, asked, ordered, timed = make(), [], [], []
    build, place = Codes._build, Codes._place

    def counted(self, chosen, unroll, *below, **apart):
        asked.append(unroll)
        return build(self, chosen, unroll, *below, **apart)

    def recorded(self, builder, unroll):
        beside = unroll_factors([*builder.prefix, *builder.body], unroll) if unroll > 1 else ()
        ordered.append((repr(builder.code()), beside))
        return place(self, builder, unroll)

    def oracle(kernel, *rest):
        timed.append(kernel)
        return oracle_ps(kernel, *rest)

    monkeypatch.setattr(sys.modules[Codes.__module__], "oracle_ps", oracle)
    monkeypatch.setattr(Codes, "_build", counted)
    monkeypatch.setattr(Codes, "_place", recorded)
    generate(m.program(), m.tensors, TARGET, 0, CompileOptions(optlevel=3))
    assert len(ordered) == len(set(ordered)) < len(asked)
    assert 0 < len(timed) == len({id(kernel) for kernel in timed}) <= len(ordered)
