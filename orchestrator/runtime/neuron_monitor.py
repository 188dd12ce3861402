"""`neuron-monitor` and `neuron-top`: what cores and memory of this host's simulated machine do.

`neuron-monitor` writes one JSON object per period, in the vendor's keys (neuron-monitor user
guide), for processes that hold cores and what ran in the period; `neuron-top` shows the same as
text. Utilisation is simulated seconds of execution over the period, which the host's own clock
says nothing about.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardwright.compiler.machine.target import Target
from shardwright.orchestrator.host import num_cpus
from shardwright.orchestrator.runtime import memory_table
from shardwright.orchestrator.runtime.machine import Execution, Holder, Machine
from shardwright.orchestrator.runtime.neuron_ls import NONE, seen
from shardwright.orchestrator.runtime.status import Status
from shardwright.orchestrator.terminal.strict_json import dumps
from shardwright.orchestrator.terminal.terminal import say

PERIOD_S = 5.0
"""The vendor's default."""
_SUMMARY = {
    "completed": (Status.NRT_SUCCESS,),
    "completed_with_err": (Status.NRT_EXEC_COMPLETED_WITH_ERR, Status.NRT_EXEC_OOB),
    "completed_with_num_err": (Status.NRT_EXEC_COMPLETED_WITH_NUM_ERR,),
    "timed_out": (Status.NRT_TIMEOUT,),
    "incorrect_input": (Status.NRT_EXEC_BAD_INPUT,),
    "failed_to_queue": (Status.NRT_EXEC_NC_BUSY, Status.NRT_QUEUE_FULL),
}
_ERRORS = {
    "generic": (Status.NRT_FAILURE, Status.NRT_EXEC_COMPLETED_WITH_ERR),
    "numerical": (Status.NRT_EXEC_COMPLETED_WITH_NUM_ERR,),
    "transient": (Status.NRT_EXEC_NC_BUSY, Status.NRT_QUEUE_FULL),
    "model": (Status.NRT_EXEC_BAD_INPUT, Status.NRT_EXEC_OOB, Status.NRT_INVALID),
    "runtime": (Status.NRT_TIMEOUT, Status.NRT_RESOURCE, Status.NRT_FAIL_HOST_MEM_ALLOC),
    "hardware": tuple(one for one in Status if one.name.startswith("NRT_EXEC_HW_")),
}
_POINTS = (0, 1, 25, 50, 75, 99, 100)


def report(target: Target, since_s: float, now_s: float) -> dict[str, Any]:
    """One object of neuron-monitor: processes that hold cores, and what ran from `since_s` on."""
    machine = Machine(target)
    period = max(now_s - since_s, 1e-9)
    held: dict[int, list[Holder]] = {}
    for holder in machine.holders():
        held.setdefault(holder.pid, []).append(holder)
    ran: dict[int, list[Execution]] = {pid: [] for pid in held}
    for execution in machine.executions():
        if since_s <= execution.ended_s <= now_s:
            ran.setdefault(execution.pid, []).append(execution)
    return {
        "neuron_runtime_data": [
            _runtime(pid, held.get(pid, []), ran[pid], target, period) for pid in sorted(ran)
        ],
        "system_data": _system(target, period),
        "instance_info": {
            "instance_name": NONE,
            "instance_id": NONE,
            "instance_type": target.name,
            "instance_availability_zone": "",
            "instance_availability_zone_id": "",
            "instance_region": "",
            "ami_id": "",
            "subnet_id": "",
            "error": "",
        },
        "neuron_hardware_info": {
            "neuron_device_type": "inferentia" if target.name.startswith("inf") else "trainium",
            "neuron_device_version": target.core.generation,
            "neuroncore_version": target.core.generation,
            "neuron_device_count": target.chips,
            "neuron_device_memory_size": target.hbm_bytes_per_core * target.cores_per_chip,
            "neuroncore_per_device_count": target.cores_per_chip,
            "logical_neuroncore_config": target.lnc,
            "error": "",
        },
    }


def _runtime(
    pid: int, held: Sequence[Holder], ran: Sequence[Execution], target: Target, period: float
) -> dict[str, Any]:
    """What one process does."""
    tag = held[0].tag if held else ""
    return {
        "pid": pid,
        "address": "",
        "neuron_runtime_tag": tag or str(pid),
        "error": "",
        "report": {
            "neuroncore_counters": _counters(held, ran, period),
            "execution_stats": _executions(ran, period),
            "memory_used": _memory(held, period),
            "neuron_runtime_vcpu_usage": {
                "period": period,
                "vcpu_usage": {"user": 0.0, "system": 0.0},
                "error": "not measured: the host simulates the device",
            },
        },
    }


def _counters(held: Sequence[Holder], ran: Sequence[Execution], period: float) -> dict[str, Any]:
    cores = {holder.core for holder in held} | {core for one in ran for core in one.cores}
    found = {}
    for core in sorted(cores):
        own = [one for one in ran if core in one.cores]
        busy = sum(one.latency_s for one in own)
        found[str(core)] = {
            "neuroncore_utilization": min(100.0, 100 * busy / period),
            "flops": round(sum(one.flops for one in own) / period),
        }
    return {"period": period, "neuroncores_in_use": found, "error": ""}


def _executions(ran: Sequence[Execution], period: float) -> dict[str, Any]:
    def counted(table: Mapping[str, Iterable[Status]]) -> dict[str, int]:
        kinds = {name: set(map(int, statuses)) for name, statuses in table.items()}
        return {name: sum(one.status in kind for one in ran) for name, kind in kinds.items()}

    times = sorted(one.latency_s for one in ran if one.status == Status.NRT_SUCCESS)
    latency = (
        {f"p{p}": times[round(p / 100 * (len(times) - 1))] for p in _POINTS} if times else None
    )
    return {
        "period": period,
        "error_summary": counted(_ERRORS),
        "execution_summary": counted(_SUMMARY),
        "latency_stats": {"total_latency": latency, "device_latency": latency},
        "error": "",
    }


def _memory(held: Sequence[Holder], period: float) -> dict[str, Any]:
    """Bytes by the vendor's categories: of cores, and of what is loaded."""
    cores = {str(holder.core): _of_core(holder.memory) for holder in held}
    models: dict[str, list[Holder]] = {}
    for holder in held:
        models.setdefault(holder.model, []).append(holder)
    return {
        "period": period,
        "neuron_runtime_used_bytes": {
            "host": 0,
            "neuron_device": sum(holder.total_bytes for holder in held),
            "usage_breakdown": {
                "host": dict.fromkeys(
                    ("application_memory", "constants", "dma_buffers", "tensors"), 0
                ),
                "neuroncore_memory_usage": cores,
            },
        },
        "loaded_models": [
            {
                "name": name,
                "uuid": own[0].uuid,
                "model_id": number,
                "is_running": True,
                "subgraphs": {
                    f"sg_{at:02d}": {
                        "memory_used_bytes": {"host": 0, "neuron_device": holder.total_bytes},
                        "neuroncore_index": holder.core,
                        "neuron_device_index": 0,
                    }
                    for at, holder in enumerate(own)
                },
            }
            for number, (name, own) in enumerate(models.items(), start=10001)
        ],
        "error": "",
    }


def _of_core(memory: Mapping[str, int]) -> dict[str, int]:
    return {
        "constants": memory.get("model constants", 0),
        "model_code": memory.get("model code", 0),
        "model_shared_scratchpad": memory.get("shared scratchpad", 0),
        "runtime_memory": memory.get("DMA rings", 0) + memory.get("profiler buffers", 0),
        "tensors": memory.get("tensors", 0),
    }


def _system(target: Target, period: float) -> dict[str, Any]:
    """Of the host: its memory; the devices' error counters, which a simulation has none of."""
    page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    free = os.sysconf("SC_AVPHYS_PAGES")
    counters = ("mem_ecc_corrected", "mem_ecc_uncorrected", "sram_ecc_uncorrected")
    return {
        "memory_info": {
            "period": period,
            "memory_total_bytes": page * pages,
            "memory_used_bytes": page * (pages - free),
            "swap_total_bytes": 0,
            "swap_used_bytes": 0,
            "error": "",
        },
        "neuron_hw_counters": {
            "period": period,
            "neuron_devices": [
                {"neuron_device_index": n, **dict.fromkeys(counters, 0)}
                for n in range(target.chips)
            ],
            "error": "",
        },
        "vcpu_usage": {
            "period": period,
            "average_usage": {"user": 100 * os.getloadavg()[0] / num_cpus()},
            "error": "of the load of a minute",
        },
    }


def monitor(target: str, lnc: int, period_s: float, count: int) -> int:
    """Print an object per period, `count` of them; 0: until it is interrupted."""
    machine, since_s, written = seen(target, lnc), time.time() - period_s, 0
    while True:
        now_s = time.time()
        say(dumps(report(machine, since_s, now_s)))
        since_s, written = now_s, written + 1
        if written == count:
            return 0
        time.sleep(period_s)


def top(target: str, lnc: int) -> int:
    """Print cores, memory and models of now, and what has run in the last hour."""
    machine = Machine(seen(target, lnc))
    holders, now = machine.holders(), time.time()
    ran = [one for one in machine.executions() if now - one.ended_s < 3600]
    label = "d" if machine.target.lnc > 1 else ""
    version = f"{machine.target.core.generation}{label}"
    say(f"{machine.target.name} {version}: {len(holders)} of {machine.target.cores} cores held")
    if holders:
        rows = {f"NC {h.core} ({h.pid} {h.model})": h.memory for h in holders}
        say(memory_table.report(rows))
    for one in ran[-10:]:
        cores = ", ".join(map(str, one.cores))
        rate = one.flops / one.latency_s / 1e12 if one.latency_s else 0.0
        status = Status(one.status)
        say(f"{one.model} on NC {cores}: {one.latency_s * 1e3:.6f} ms, {rate:.3f} TFLOPS, {status}")
    return 0
