"""`shardwright neff unpack`: a program file taken apart into a folder, as neuron-packager does it.

One JSON for the graph, and a folder per physical core (`sg00`, `sg01`) with `def.json`, its queues
and variables, and one JSON per engine: what it is given, function by function. Names and fields
follow the vendor's tree where there is something to say; engines have our names, and instructions
are text, since there is no binary of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwright.compiler.isa.limits import walk
from shardwright.compiler.isa.program import Engine, Program
from shardwright.compiler.neff.listing import engine_lines
from shardwright.orchestrator.neff.neff_files import open_program
from shardwright.orchestrator.neff.neff_tools import describe
from shardwright.orchestrator.terminal import outputs
from shardwright.orchestrator.terminal.terminal import say

_QUEUES = {Engine.DMA_IN: "in", Engine.DMA_OUT: "out"}


def unpack(path: Path, out: Path, program: str) -> int:
    """Write the parts of a file into the folder `out`, and print their paths.

    Raises: LoadError for a damaged file, UsageError (SW_OUTPUT) for a folder that refuses.
    """
    opened = open_program(path, program).program
    files = {"neff.json": describe(path)}
    for core in range(opened.lnc):
        folder = f"sg{core:02d}"
        streams = {e: _stream(opened, core, e) for e in Engine}
        used = {engine: stream for engine, stream in streams.items() if stream}
        files[f"{folder}/def.json"] = _definition(opened, core, list(used))
        for engine, stream in used.items():
            files[f"{folder}/{engine.value}.json"] = {"engine": engine.value, "functions": stream}
    outputs.prepare(out)
    for name, content in files.items():
        outputs.write(out / name, json.dumps(content, indent=1) + "\n")
        say(str(out / name))
    return 0


def _stream(program: Program, core: int, engine: Engine) -> dict[str, list[str]]:
    """What an engine of a physical core is given, by function; without those that give nothing."""
    found = {}
    for function in program.functions:
        code = [i for kernel in function.subgraphs[core] for i in walk(kernel.body)]
        if any(instr.engine is engine for instr in code):
            found[function.name] = list(engine_lines(function, core, engine, program.locations))
    return found


def _definition(program: Program, core: int, engines: Sequence[Engine]) -> dict[str, Any]:
    """Queues of transfers, and variables with their sizes in bytes."""
    queues = {e.value: {"type": _QUEUES[e], "owner": e.value} for e in engines if e in _QUEUES}
    roles = dict.fromkeys(program.inputs, "input") | dict.fromkeys(program.outputs, "output")
    variables = {
        buffer.name if buffer.kind != "arena" else f"arena{number}": {
            "type": roles.get(buffer.name, "tmp-buf") if buffer.kind != "arena" else "tmp-buf",
            "var_id": number,
            "size": buffer.num_bytes,
            "shape": list(buffer.shape),
            "dtype": buffer.dtype.value,
            **({"offset": buffer.offset_bytes} if buffer.kind == "arena" else {}),
        }
        for number, buffer in enumerate(program.buffers)
    }
    return {
        "name": program.name,
        "physical_core": core,
        "engines": [engine.value for engine in engines],
        "dma_queue": queues,
        "var": variables,
    }
