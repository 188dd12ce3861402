"""`[faults]` from text: what is understood, what is refused with the key and the entry."""

from __future__ import annotations

import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.machine.network import cluster_topology
from shardwright.compiler.machine.target import load_target
from shardwright.orchestrator.cli import _parser
from shardwright.orchestrator.config.config import FaultsConfig, load
from shardwright.orchestrator.config.faults import faults_of
from shardwright.orchestrator.config.job_flags import job_config
from shardwright.sim_cluster.timing.faults import Faults

TOPOLOGY = cluster_topology(load_target("trn1n.32xlarge"), 3)


def test_every_key() -> None:
    found = faults_of(
        FaultsConfig(
            slow_cores="5:1.3, 64-66:1.1",
            dead_cores="17,20-21",
            hardware="40:sram, 41-42:hbm-repairable",
            late_cores="50:300, 51:0.5",
            slow_links="0/7-3:0.5, 2/efa1:0, 2/0-1:0.25",
            jitter=0.02,
            seed=7,
        ),
        TOPOLOGY,
    )
    assert found == Faults(
        slow_cores={5: 1.3, 64: 1.1, 65: 1.1, 66: 1.1},
        dead_cores=frozenset({17, 20, 21}),
        hardware={40: "sram", 41: "hbm-repairable", 42: "hbm-repairable"},
        late_cores={50: 300.0, 51: 0.5},
        links={0: {(3, 7): 0.5}, 2: {("efa", 1): 0.0, (0, 1): 0.25}},
        jitter=0.02,
        seed=7,
    )
    assert found
    assert not faults_of(FaultsConfig(seed=3), TOPOLOGY)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("slow_cores", "5"),
        ("slow_cores", "5:0.5"),
        ("slow_cores", "x:2"),
        ("slow_cores", "96:2"),
        ("slow_cores", "9-5:2.0"),
        ("slow_cores", "3:1.5, 3:1.1"),
        ("slow_cores", "0-7:1.5, 7:1.5"),
        ("slow_cores", "0-99999999999:2"),
        ("dead_cores", "63-32"),
        ("dead_cores", "0-99999999999"),
        ("dead_cores", "9" * 5000),
        ("dead_cores", "3:1"),
        ("dead_cores", "96"),
        ("hardware", "5"),
        ("hardware", "5:flash"),
        ("hardware", "96:hbm"),
        ("hardware", "5:hbm, 5:dma"),
        ("late_cores", "5:-1"),
        ("late_cores", "5:soon"),
        ("late_cores", "96:1"),
        ("slow_links", "3-7:0.5"),
        ("slow_links", "0/3-7:1.5"),
        ("slow_links", "0/3-7"),
        ("slow_links", "0/0-5:0.5"),
        ("slow_links", "3/0-1:0.5"),
        ("slow_links", "0/efa16:0.5"),
        ("slow_links", "0/3-7:0.5, 0/7-3:0.25"),
        ("slow_links", "2/efa1:0, 2/efa1:0.5"),
    ],
)
def test_what_is_refused(key: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"SW_FAULT.*faults.{key} requires"):
        faults_of(FaultsConfig(**{key: text}), TOPOLOGY)


def test_the_flag_is_a_key_of_the_table() -> None:
    words = ["plan", "--fault", "slow_cores=5:1.3,6:1.2", "--fault", "jitter=0.1"]
    faults = job_config(_parser().parse_args(words)).faults
    assert (faults.slow_cores, faults.jitter) == ("5:1.3,6:1.2", 0.1)
    with pytest.raises(UsageError, match=r"unknown key faults\.slow"):
        job_config(_parser().parse_args(["plan", "--fault", "slow=1"]))
    with pytest.raises(UsageError, match=r"faults\.jitter requires 0\.0 to 10\.0"):
        load(None, ["faults.jitter=-1"])
