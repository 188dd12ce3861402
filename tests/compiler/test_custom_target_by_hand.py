"""What a user's machine may say: the ends of every fact, and facts that do not fit each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.machine.custom_target import RATE, RULES, check_together, read_custom
from shardwright.compiler.machine.target import load_target

MOST = 2**40
COUNTS = {  # fact -> its least and largest whole number
    "chips_per_instance": (1, 4096),
    "physical_cores_per_chip": (1, 128),
    "model_code_overhead_mb_per_physical_core": (0, MOST),
    "dma_ring_reserve_mb_per_core": (0, MOST),
    "efa_devices": (0, 4096),
    "physical_cores_per_hbm_bank": (1, 128),
    "mesh_max_bytes": (0, MOST),
    "rdh_max_bytes": (0, MOST),
    "flat_ring_min_bytes": (0, MOST),
    "sbuf_bytes_per_partition": (64, 1 << 20),
    "semaphores": (1, 4096),
}
ABOVE_0 = {
    *("hbm_gib_per_chip", "hbm_gb_per_s_per_chip", "chip_bf16_tflops_published"),
    *("tensor_clock_ghz", "vector_clock_ghz", "scalar_clock_ghz", "gpsimd_clock_ghz"),
    *("dma_engine_sustained_gb_per_s", "tensor_bf16_tflops"),
}
FROM_0 = {
    *("efa_gbps", "dma_fixed_ns", "cross_engine_semaphore_ns", "program_start_us"),
    *("collective_launch_us", "neuronlink_wire_us", "efa_hop_us"),
    *("host_link_gb_per_s", "host_memory_gib"),
}
OTHERS: dict[str, tuple[list[Any], list[Any]]] = {  # fact -> what it may be, and what not
    "allowed_lnc": ([[1], [2], [1, 2]], [[], [0], [3], [1, 3], 1]),
    "topology": (["torus", "ring", "line", "switch", "none"], ["mesh", None, 1]),
    "shape": ([[1], [4096, 1]], [[0, 4], [4097], [], 4, [1.5], ["4"]]),
    RATE: ([0, 96, 1.5, [0, 3.5]], [-1, [96, -1], [], "96", None]),
    "price_usd_per_hour_on_demand": ([None, 0, 3.5], [-1, "free"]),
    "price_usd_per_hour_capacity_block": ([None, 0, 3.5], [-1, "free"]),
    "collective_mesh": (["flat", "grouped"], ["round", True]),
    "kangaring": ([True, False], [1, 0, None, "yes"]),
}


def test_every_fact_that_may_be_given_is_here() -> None:
    assert RULES.keys() == COUNTS.keys() | ABOVE_0 | FROM_0 | OTHERS.keys()


def refused(tmp_path: Path, key: str, value: Any) -> str:
    """What is said of a fact in a file; nothing where it is taken."""
    facts = repr({key: value}).replace("'", '"').replace("None", "null")
    file = tmp_path / "m.json"
    file.write_text(
        f'{{"base": "b", "facts": {facts.replace("True", "true").replace("False", "false")}}}'
    )
    try:
        assert read_custom(file, ["b"]) == ("b", {key: value})
    except UsageError as error:
        return error.diagnostic.message
    return ""


@pytest.mark.parametrize(("key", "ends"), COUNTS.items())
def test_whole_numbers(key: str, ends: tuple[int, int], tmp_path: Path) -> None:
    low, high = ends
    assert not any(refused(tmp_path, key, value) for value in ends)
    limit = "" if high == MOST else f" up to {high}"
    for value in (low - 1, high + 1, 1.5, True, "1"):
        text = refused(tmp_path, key, value)
        assert text.startswith(f"{key} requires a whole number from {low}{limit}, got "), text


@pytest.mark.parametrize("key", sorted(ABOVE_0 | FROM_0))
def test_rates_and_times(key: str, tmp_path: Path) -> None:
    words = "above 0" if key in ABOVE_0 else "of at least 0"
    assert not any(refused(tmp_path, key, value) for value in (1e-9, 1, MOST))
    assert bool(refused(tmp_path, key, 0)) == (key in ABOVE_0)
    for value in (-1e-9, True, "1"):
        assert refused(tmp_path, key, value).startswith(f"{key} requires a number {words}, got ")
    assert "requires at most 1.09951e+12" in refused(tmp_path, key, MOST + 1)


@pytest.mark.parametrize("key", OTHERS)
def test_choices_and_lists(key: str, tmp_path: Path) -> None:
    good, bad = OTHERS[key]
    assert not any(refused(tmp_path, key, value) for value in good)
    assert all(f"{key} requires" in refused(tmp_path, key, value) for value in bad)


def test_a_rate_in_a_list_has_an_end_too(tmp_path: Path) -> None:
    assert "at most" in refused(tmp_path, RATE, [1, MOST + 1])
    assert not refused(tmp_path, RATE, [1, MOST])


def test_a_fact_with_its_source_and_one_that_is_misspelt(tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    file.write_text('{"base": "b", "facts": {"efa_gbps": {"value": 5, "source": "x"}}}')
    assert read_custom(file, ["a", "b"]) == ("b", {"efa_gbps": 5})
    file.write_text('{"base": "b"}')
    assert read_custom(file, ["b"]) == ("b", {})
    assert refused(tmp_path, "zzz", 5) == "unknown fact 'zzz'"
    assert "unknown fact 'efa_gbs': did you mean efa_gbps?" in refused(tmp_path, "efa_gbs", 5)


def test_the_digest_is_of_the_facts_in_any_order_and_of_the_base(tmp_path: Path) -> None:
    texts = {
        "one": '{"base": "trn1n.32xlarge", "facts": {"efa_hop_us": 12, "dma_fixed_ns": 9}}',
        "two": '{"base": "trn1n.32xlarge", "facts": {"dma_fixed_ns": 9, "efa_hop_us": 12}}',
        "value": '{"base": "trn1n.32xlarge", "facts": {"efa_hop_us": 12, "dma_fixed_ns": 8}}',
        "base": '{"base": "trn1.32xlarge", "facts": {"efa_hop_us": 12, "dma_fixed_ns": 9}}',
    }
    digests = {}
    for name, text in texts.items():
        (tmp_path / f"{name}.json").write_text(text)
        digests[name] = load_target(str(tmp_path / f"{name}.json")).digest
    assert digests["one"] == digests["two"]
    assert len(set(digests.values())) == 3


TORUS: dict[str, Any] = {
    "shape": [4, 4],
    "chips_per_instance": 16,
    "topology": "torus",
    RATE: 96,
    "efa_devices": 8,
    "efa_gbps": 800,
    "physical_cores_per_chip": 2,
    "allowed_lnc": [1, 2],
}
ALONE = TORUS | {"topology": "none", "shape": [1], "chips_per_instance": 1, RATE: 0}
SWITCH = TORUS | {"topology": "switch", "shape": [4, 8, 16], RATE: [1, 2, 3]}
TOGETHER: dict[str, tuple[dict[str, Any], str]] = {
    "torus": (TORUS, ""),
    "torus of one side": (TORUS | {"shape": [16]}, ""),
    "alone": (ALONE, ""),
    "ring": (TORUS | {"topology": "ring", "shape": [16]}, ""),
    "switch": (SWITCH, ""),
    "switch, one domain": (SWITCH | {"shape": [16], RATE: 5}, ""),
    "no EFA": (TORUS | {"efa_devices": 0, "efa_gbps": 0}, ""),
    "product": (TORUS | {"shape": [4, 5]}, "shape requires a product of chips_per_instance 16"),
    "switch, whole": (SWITCH | {"shape": [4, 8]} | {RATE: 5}, "up to chips_per_instance 16"),
    "switch, nested": (SWITCH | {"shape": [4, 6, 16]}, "domains that divide each other"),
    "ring of two sides": (TORUS | {"topology": "ring"}, "shape of a ring requires one side"),
    "line of two sides": (TORUS | {"topology": "line"}, "shape of a line requires one side"),
    "none of two sides": (ALONE | {"shape": [1, 1]}, "shape of a none requires one side"),
    "none of two chips": (
        ALONE | {"shape": [2], "chips_per_instance": 2},
        "topology none requires chips_per_instance 1, got 2",
    ),
    "rates": (TORUS | {RATE: [1, 2, 3]}, r"one number per side or domain of shape \(2\)"),
    "no rate": (TORUS | {RATE: 0}, "above 0 where chips are linked, got 0"),
    "one rate of none": (TORUS | {RATE: [5, 0]}, "above 0 where chips are linked"),
    "devices alone": (TORUS | {"efa_gbps": 0}, "requires both efa_devices and efa_gbps, got 8"),
    "rate alone": (TORUS | {"efa_devices": 0}, "requires both efa_devices and efa_gbps, got 0"),
    "odd cores": (TORUS | {"physical_cores_per_chip": 3}, "divisors of physical_cores_per_chip 3"),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_facts_that_fit_and_that_do_not(name: str) -> None:
    facts, text = TOGETHER[name]
    if not text:
        check_together(Path("m.json"), facts)
        return
    with pytest.raises(UsageError, match=text) as refusal:
        check_together(Path("m.json"), facts)
    assert ";" not in refusal.value.diagnostic.message  # this one alone
