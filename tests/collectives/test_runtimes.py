from __future__ import annotations

import pytest

from shardwright.collectives.ops import CollectiveError, CollectiveKind
from shardwright.collectives.timing.runtimes import (
    CURRENT,
    RUNTIMES,
    runtime_named,
    runtime_of_date,
)
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import CollectiveCall
from shardwright.compiler.machine.target import load_target
from shardwright.sim_cluster.network.network import Network

REDUCE, GATHER = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER
US = 10**6


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("2023-04 (first published, Neuron 2.10)", "2023"),
        ("2023-12", "2024"),
        ("2025-09 on (device-time floats)", "current"),
        ("2025-26", "current"),
        ("2025", "current"),
        ("", "current"),
        ("Neuron 2.27", "current"),
    ],
)
def test_runtimes_by_date(text, name):
    assert runtime_of_date(text).name == name


def test_a_runtime_of_2023_adds_floors_and_barriers():
    old = runtime_named("2023")

    def added(kind, chips, instances, ranks, elements=1 << 20):
        where = {"chips": chips, "instances": instances, "ranks": ranks, "elements": elements}
        return old.added_ps(kind, **where) // US

    assert added(REDUCE, 1, 1, 2) == 50 and added(REDUCE, 16, 1, 32) == 150
    assert added(REDUCE, 32, 2, 64) == 1000 and added(GATHER, 32, 2, 64) == 500
    assert added(REDUCE, 32, 2, 64, elements=2) == 500  # nothing to scatter


def test_the_newest_adds_nothing_and_all_have_sources():
    where = {"chips": 32, "instances": 2, "ranks": 64, "elements": 1}
    assert CURRENT.added_ps(REDUCE, **where) == 0
    assert all(runtime.source for runtime in RUNTIMES)
    with pytest.raises(CollectiveError, match="one of 2023, 2024, current"):
        runtime_named("1999")


def test_a_step_launches_its_collectives_as_the_runtime_of_its_date_did():
    call = CollectiveCall("all_reduce", ("tp",), DType.BF16, (1, 1 << 20, 1), "add")

    def duration(name):
        target, mesh = load_target("trn1.32xlarge"), {"dp": 4, "tp": 8}
        network = Network(target, 1, mesh, "nominal", runtime=runtime_named(name))
        first = next(iter(network.alternatives(call).values()))
        assert first == network.duration(call).duration_ps
        return first

    assert duration("2023") - duration("current") == 150 * US
    assert duration("2024") == duration("current")
