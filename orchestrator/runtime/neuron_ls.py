"""`neuron-ls`: the devices of a machine, their cores, memory, links and processes.

Keys of the JSON and columns of the table are the vendor's (neuron-ls user guide). What a simulated
machine does not have (PCI addresses, NUMA nodes, CPU affinity) says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from shardwright.compiler.machine.target import Target, logical
from shardwright.compiler.surface.resolve import find_target
from shardwright.orchestrator.environment import reading
from shardwright.orchestrator.road.bundling import compiler_version
from shardwright.orchestrator.runtime.machine import Holder, Machine
from shardwright.orchestrator.terminal import terminal
from shardwright.orchestrator.terminal.strict_json import dumps
from shardwright.orchestrator.terminal.terminal import say

NONE = "simulated"
"""In the place of what a simulated device does not have."""


def seen(target: str, lnc: int = 0) -> Target:
    """The machine as its logical cores, of the size that a flag or the environment says. Raises
    UsageError for a machine or a size that is none."""
    return logical(find_target(target), lnc or reading.value("NEURON_LOGICAL_NC_CONFIG", 0))


def devices(target: Target, holders: Sequence[Holder]) -> list[dict[str, Any]]:
    """A row per device (chip), in the keys of the vendor's JSON."""
    per = target.cores_per_chip
    rows = []
    for chip in range(target.chips):
        cores = list(range(chip * per, (chip + 1) * per))
        rows.append(
            {
                "neuron_device": chip,
                "bdf": NONE,
                "cpu_affinity": NONE,
                "numa_node": NONE,
                "connected_to": linked(target, chip) or None,
                "nc_count": per,
                "logical_neuroncore_config": target.lnc,
                "memory_size": target.hbm_bytes_per_core * per,
                "neuroncore_ids": cores,
                "neuron_processes": _processes([h for h in holders if h.core in cores]),
            }
        )
    return rows


def linked(target: Target, chip: int) -> list[int]:
    """The chips that a chip has NeuronLinks to, in order."""
    shape = target.shape
    if target.topology == "none" or math.prod(shape) < 2:
        return []
    if target.topology == "switch":
        return [other for other in range(target.chips) if other != chip]
    place = _place(chip, shape)
    found = set()
    for side, step in product(range(len(shape)), (-1, 1)):
        moved = list(place)
        moved[side] += step
        if target.topology == "line" and not 0 <= moved[side] < shape[side]:
            continue
        moved[side] %= shape[side]
        found.add(_number(moved, shape))
    return sorted(found - {chip})


def _place(chip: int, shape: Sequence[int]) -> list[int]:
    place = []
    for size in reversed(shape):
        chip, rest = divmod(chip, size)
        place.append(rest)
    return place[::-1]


def _number(place: Sequence[int], shape: Sequence[int]) -> int:
    number = 0
    for at, size in zip(place, shape, strict=True):
        number = number * size + at
    return number


def _processes(holders: Sequence[Holder]) -> list[dict[str, Any]]:
    """Every process that holds cores of a device."""
    by_pid = {holder.pid: holder for holder in holders}
    return [
        {"pid": pid, "command": one.command, "neuron_runtime_version": compiler_version()}
        for pid, one in by_pid.items()
    ]


def run(target: str, lnc: int, as_json: bool, wide: bool, topology: bool) -> int:
    """Print the devices."""
    machine = seen(target, lnc)
    holders = Machine(machine).holders()
    rows = devices(machine, holders)
    if as_json:
        say(dumps(rows, indent=1))
        return 0
    say(f"instance-type: {machine.name}")
    say("instance-id: simulated")
    say(f"logical-neuroncore-config: {machine.lnc}")
    _table(rows, wide)
    if topology:
        say(drawn(machine))
    return 0


def _table(rows: Sequence[Mapping[str, Any]], wide: bool) -> None:
    """The table of devices; `wide` with processes, as far as there are any."""
    more = ("PID", "COMMAND", "RUNTIME VERSION") if wide else ()
    columns = ("DEVICE", "CORES", "CORE IDS", "MEMORY", "CONNECTED DEVICES", "PCI BDF", *more)
    table = terminal.table(*columns, right=("DEVICE", "CORES"), box=None)
    for row in rows:
        ids, links = row["neuroncore_ids"], row["connected_to"] or ()
        cells = [
            str(row["neuron_device"]),
            str(row["nc_count"]),
            f"{ids[0]}-{ids[-1]}" if len(ids) > 1 else str(ids[0]),
            f"{row['memory_size'] / 2**30:g} GB",
            ", ".join(map(str, links)),
            row["bdf"],
        ]
        if not wide:
            table.add_row(*cells)
            continue
        for number, one in enumerate(row["neuron_processes"] or [{}]):
            own = [str(one.get(k, "")) for k in ("pid", "command", "neuron_runtime_version")]
            table.add_row(*(cells if not number else [""] * len(cells)), *own)
    terminal.console().print(table)


def drawn(target: Target) -> str:
    """The devices of a torus or line as a grid; `~` marks links that wrap around."""
    width = target.shape[-1] if target.topology in ("torus", "line") else target.chips
    wraps = "~" if target.topology == "torus" else " "
    size = len(str(target.chips - 1)) + 2
    lines = []
    for first in range(0, target.chips, width):
        row = [f"[{chip}]".center(size) for chip in range(first, min(first + width, target.chips))]
        lines.append(f"{wraps} {' -- '.join(row)} {wraps}")
    return "\n".join(lines)
