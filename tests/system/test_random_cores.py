"""Random modules on two physical cores against XLA, every kernel cut that can be, at both levels.

What is cut is for the cost oracle to say elsewhere; here the whole kernel is offered only where
there is no cut, so that small modules cut everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from shardwright.compiler.fusion import logical_core
from shardwright.compiler.fusion.logical_core import Way
from shardwright.compiler.isa.kernel import KernelProgram, Tensor
from tests.support.cells import long_in_matrix
from tests.system.test_random_graphs import check, module_of

offered = logical_core._offered


@pytest.fixture(autouse=True)
def always_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_whole(program: KernelProgram, tensors: Sequence[Tensor]) -> Iterator[Way]:
        whole, *ways = offered(program, tensors)
        yield from ways or [whole]

    monkeypatch.setattr(logical_core, "_offered", without_whole)


OTHERS = [first for first in range(24, 624, 50) if (first - 24) % 200]


@pytest.mark.parametrize("first", range(12, 24, 6))
def test_random_modules_are_cut(first: int) -> None:
    for seed in range(first, first + 6):
        check(module_of(seed), seed, lnc=2)


@pytest.mark.parametrize("first", long_in_matrix(range(24, 624, 50), range(24, 624, 200), OTHERS))
def test_many_random_modules_are_cut(first: int) -> None:
    for seed in range(first, first + 10):
        check(module_of(seed), seed, lnc=2)


def test_the_slice_has_kernels_of_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut plainly, cut with sums of each core, and not cut at all."""
    kinds: set[object] = set()
    cutting = logical_core._offered

    def watched(program: KernelProgram, tensors: Sequence[Tensor]) -> Iterator[Way]:
        for way in cutting(program, tensors):
            kinds.add("alone" if way.pairs[0][1].kind == "idle" else len(way.pairs))
            yield way

    monkeypatch.setattr(logical_core, "_offered", watched)
    for seed in range(12):
        check(module_of(seed), seed, lnc=2)
    assert kinds == {1, 2, "alone"}
