"""A machine of the user: a JSON file that names a known machine and the facts that differ.

    {"base": "trn1n.32xlarge", "facts": {"chips_per_instance": 8, "shape": [2, 4], "efa_gbps": 800}}

Facts have the names and units of `targets/*.json`, of the machine or of its NeuronCore, as plain
values or as {"value": ..., "source": ...}. All findings are raised at once. What an engine accepts
(partitions, tile limits, memories of a core) is that of the generation and cannot be changed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import Loc, UsageError, did_you_mean
from shardwright.compiler.support.documents import parse_json, read_text
from shardwright.compiler.support.schema import FLAG, Rule

_MOST = 2**40  # of any figure in its unit: no machine is beyond, no arithmetic on it is either
TOPOLOGIES = ("torus", "ring", "line", "switch", "none")
RATE = "neuronlink_gb_per_s_per_link_per_direction"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(low: int, high: int = _MOST) -> Rule:
    limit = "" if high == _MOST else f" up to {high}"
    text = f"a whole number from {low}{limit}"
    return Rule(text, lambda value: type(value) is int and low <= value <= high)


def _number(above: float = 0.0, at_least: bool = False) -> Rule:
    def holds(value: Any) -> bool:
        return _is_number(value) and (value >= above if at_least else value > above)

    return Rule(f"a number {'of at least' if at_least else 'above'} {above:g}", holds)


def _one_of(*allowed: Any) -> Rule:
    return Rule(f"one of {', '.join(map(str, allowed))}", lambda value: value in allowed)


def _list(rule: Rule) -> Rule:
    text = f"a list, each {rule.what}"
    return Rule(text, lambda v: isinstance(v, list) and bool(v) and all(map(rule.holds, v)))


def _either(first: Rule, second: Rule) -> Rule:
    return Rule(f"{first.what}, or {second.what}", lambda v: first.holds(v) or second.holds(v))


_AT_LEAST_0 = _number(0, at_least=True)
RULES = {
    "chips_per_instance": _count(1, 4096),
    "physical_cores_per_chip": _count(1, 128),
    "allowed_lnc": _list(_one_of(1, 2)),
    "hbm_gib_per_chip": _number(),
    "hbm_gb_per_s_per_chip": _number(),
    "chip_bf16_tflops_published": _number(),
    "model_code_overhead_mb_per_physical_core": _count(0),
    "dma_ring_reserve_mb_per_core": _count(0),
    "topology": _one_of(*TOPOLOGIES),
    "shape": _list(_count(1, 4096)),
    RATE: _either(_AT_LEAST_0, _list(_AT_LEAST_0)),
    "host_memory_gib": _AT_LEAST_0,
    "host_link_gb_per_s": _AT_LEAST_0,
    "efa_gbps": _AT_LEAST_0,
    "efa_devices": _count(0, 4096),
    "price_usd_per_hour_on_demand": _either(_AT_LEAST_0, _one_of(None)),
    "price_usd_per_hour_capacity_block": _either(_AT_LEAST_0, _one_of(None)),
    "tensor_clock_ghz": _number(),
    "vector_clock_ghz": _number(),
    "scalar_clock_ghz": _number(),
    "gpsimd_clock_ghz": _number(),
    "dma_engine_sustained_gb_per_s": _number(),
    "dma_fixed_ns": _AT_LEAST_0,
    "cross_engine_semaphore_ns": _AT_LEAST_0,
    "program_start_us": _AT_LEAST_0,
    "tensor_bf16_tflops": _number(),
    "sbuf_bytes_per_partition": _count(64, 1 << 20),
    "semaphores": _count(1, 4096),
    "physical_cores_per_hbm_bank": _count(1, 128),
    "collective_launch_us": _AT_LEAST_0,
    "neuronlink_wire_us": _AT_LEAST_0,
    "efa_hop_us": _AT_LEAST_0,
    "collective_mesh": _one_of("flat", "grouped"),
    "mesh_max_bytes": _count(0),
    "rdh_max_bytes": _count(0),
    "kangaring": FLAG,
    "flat_ring_min_bytes": _count(0),
}


def read_custom(path: Path, known: list[str]) -> tuple[str, dict[str, Any]]:
    """(base machine, facts that differ) of a file, each fact alone checked.

    Raises UsageError SW_TARGET with everything that is wrong.
    """
    data = _parsed(path)
    findings = [f"unknown key {key!r}" for key in sorted(set(data) - {"base", "facts"})]
    base, facts = data.get("base"), data.get("facts", {})
    if base not in known:
        findings.append(f"base requires one of {', '.join(known)}, got {base!r}")
    if not isinstance(facts, Mapping):
        findings.append(f"facts requires an object, got {facts!r}")
        facts = {}
    values = {key: _value(fact) for key, fact in facts.items()}
    findings += [text for key, value in values.items() if (text := _wrong(key, value))]
    refuse(path, findings)
    return str(base), values


def check_together(path: Path, facts: Mapping[str, Any]) -> None:
    """Raises UsageError SW_TARGET for facts, the base's included, that do not fit each other."""
    shape, chips, topology = facts["shape"], facts["chips_per_instance"], facts["topology"]
    findings = []
    if topology == "switch":
        nested = all(b % a == 0 for a, b in pairwise(shape))
        if shape[-1] != chips or not nested:
            findings.append(
                "shape of a switch requires domains that divide each other up to"
                f" chips_per_instance {chips}, got {shape}"
            )
    elif math.prod(shape) != chips:
        findings.append(f"shape requires a product of chips_per_instance {chips}, got {shape}")
    if topology in ("ring", "line", "none") and len(shape) != 1:
        findings.append(f"shape of a {topology} requires one side, got {shape}")
    if topology == "none" and chips != 1:
        findings.append(f"topology none requires chips_per_instance 1, got {chips}")
    findings += _rate_findings(facts)
    if bool(facts["efa_devices"]) != bool(facts["efa_gbps"]):
        findings.append(
            f"EFA requires both efa_devices and efa_gbps, got {facts['efa_devices']} and"
            f" {facts['efa_gbps']}"
        )
    cores = facts["physical_cores_per_chip"]
    if any(cores % lnc for lnc in facts["allowed_lnc"]):
        findings.append(
            f"allowed_lnc requires divisors of physical_cores_per_chip {cores}, got"
            f" {facts['allowed_lnc']}"
        )
    refuse(path, findings)


def _rate_findings(facts: Mapping[str, Any]) -> list[str]:
    rates, sides = facts[RATE], len(facts["shape"])
    if isinstance(rates, list) and len(rates) != sides:
        return [f"{RATE} requires one number per side or domain of shape ({sides}), got {rates}"]
    each = rates if isinstance(rates, list) else [rates]
    if facts["topology"] != "none" and min(each) <= 0:
        return [f"{RATE} requires above 0 where chips are linked, got {rates}"]
    return []


def refuse(path: Path, findings: list[str]) -> None:
    """Raises UsageError SW_TARGET when there are findings."""
    if findings:
        raise UsageError(
            "SW_TARGET",
            "; ".join(findings),
            Loc(file=str(path)),
            "names and units are those of compiler/machine/targets/*.json; docs/network.md has an"
            " example",
        )


def _parsed(path: Path) -> dict[str, Any]:
    try:
        data: Any = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        wrong = f"requires JSON, got {error}"
        if isinstance(error, OSError):
            wrong = f"cannot be read: {error.strerror or error}"
        text = f"the file of a machine {wrong}"
        raise UsageError("SW_TARGET", text, Loc(file=str(path))) from error
    if not isinstance(data, dict):
        refuse(path, [f"the file of a machine requires an object, got {type(data).__name__}"])
    return dict(data)


def _value(fact: Any) -> Any:
    return fact["value"] if isinstance(fact, Mapping) and "value" in fact else fact


def _wrong(key: str, value: Any) -> str:
    rule = RULES.get(key)
    if rule is None:
        return ": ".join(filter(None, (f"unknown fact {key!r}", did_you_mean(key, RULES))))
    if not rule.holds(value):
        return f"{key} requires {rule.what}, got {value!r}"
    largest = max(filter(_is_number, value if isinstance(value, list) else [value]), default=0)
    return f"{key} requires at most {_MOST:g}, got {value!r}" if largest > _MOST else ""
