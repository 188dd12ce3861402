"""`neuron-profile` and `neuron-explorer`: one execution of a file as a profile, and its sums.

`capture` simulates the file and writes a session (our own JSON, with the vendor's ending .ntff,
that says it is a simulation); `view` shows it in the forms of the vendor's tool. Fields are the
explorer's, as far as a simulation of a file knows them; the rest is left out, not invented. Times
of the summary are seconds, of instructions nanoseconds; `_percent` fields are parts of 1. It is
the time of a step (profile nominal), whose constants are fitted; `neff run --time` has them not.

Source: profile schema reference and profile user guide (names); everything else is counted here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import LoadError, UsageError
from shardwright.compiler.isa.program import Program
from shardwright.compiler.machine.target import PS_PER_S, Target, load_target, logical
from shardwright.compiler.surface.resolve import find_target
from shardwright.orchestrator.neff.neff_files import ProgramFile, open_program
from shardwright.orchestrator.neff.neff_time import timed_step
from shardwright.orchestrator.runtime.counted import Counted, count
from shardwright.orchestrator.terminal import outputs
from shardwright.orchestrator.terminal.strict_json import dumps
from shardwright.orchestrator.terminal.terminal import say
from shardwright.sim_cluster.timing.step_time import Replayed
from shardwright.sim_cluster.timing.trace import lanes, trace_json

FORMAT = "shardwright-profile 1"
FORMATS = ("summary-text", "summary-json", "json", "perfetto")
_ENGINES = ("tensor", "vector", "scalar", "gpsimd", "sync")
_QUEUES = ("dma_in", "dma_out")
_MOST_BYTES = 2**28  # of a session (our choice)


def captured(path: Path, opened: ProgramFile, target: Target) -> dict[str, Any]:
    """The session of one execution, plain data."""
    program = opened.program
    seen = logical(target, program.lnc, bool(opened.meta.get("hypothetical")))
    timing = timed_step(opened, target, traced=True)
    return {
        "format": FORMAT,
        "is_simulation": True,
        "neff": path.name,
        "digest": _digest(path),
        "target": target.name,
        "summary": summary(program, seen, timing),
        "instruction": list(_instructions(program, timing)),
        "trace": json.loads(trace_json(timing)),
    }


def summary(program: Program, target: Target, timing: Replayed) -> dict[str, float]:
    """The fields of the explorer's summary that a simulation knows. Engines are those of the core
    that finishes last, their times summed over its physical cores; utilisation is of one core's
    published peaks."""
    done, seconds = count(program), timing.step_time_ps / PS_PER_S
    launch = timing.breakdown_ps.get("launch", 0) / PS_PER_S
    busy = {name: ps / PS_PER_S / timing.lnc for name, ps in timing.engines_ps.items()}
    dma = max((busy.get(name, 0.0) for name in _QUEUES), default=0.0)
    active = max(0.0, seconds - launch)
    moved = done.hbm_read_bytes + done.hbm_write_bytes
    peak, rate = target.published_flops_per_s_per_core, _hbm_rate(target)
    found: dict[str, float] = {
        "total_time": seconds,
        "total_exec_time": seconds,
        **_time("total", active, seconds),
        "model_flops": done.matmul_flops,
        "hardware_flops": done.matmul_flops + done.transpose_flops,
        "transpose_flops": done.transpose_flops,
        "mm_arithmetic_intensity": done.matmul_flops / moved if moved else 0.0,
        "peak_flops_bandwidth_ratio": peak / rate,
        "mfu_estimated_percent": done.matmul_flops / (peak * seconds),
        "hfu_estimated_percent": (done.matmul_flops + done.transpose_flops) / (peak * seconds),
        "mbu_estimated_percent": moved / (rate * seconds),
        "total_bandwidth_available": rate * seconds,
    }
    for engine in _ENGINES:
        found |= _time(f"{engine}_engine", busy.get(engine, 0.0), seconds)
        found[f"{engine}_engine_instruction_time"] = busy.get(engine, 0.0)
        found[f"{engine}_engine_instruction_count"] = done.of_engine(engine)
    found["matmul_instruction_count"] = done.of_opcode("matmul")
    found |= _time("dma", dma, seconds)
    return found | _moved(program, done) | _collectives(timing, seconds)


def _time(name: str, active: float, seconds: float) -> dict[str, float]:
    share = active / seconds if seconds else 0.0
    return {f"{name}_active_time": active, f"{name}_active_time_percent": share}


def _moved(program: Program, done: Counted) -> dict[str, float]:
    """Bytes and transfers. What code spills goes to the scratch zones of its calls, through the
    same queues: the file does not say which transfer is one."""
    total = done.hbm_read_bytes + done.hbm_write_bytes
    return {
        "hbm_read_bytes": done.hbm_read_bytes,
        "hbm_write_bytes": done.hbm_write_bytes,
        "dma_transfer_count": done.dma_transfers,
        "dma_transfer_total_bytes": total,
        "dma_transfer_average_bytes": total / done.dma_transfers if done.dma_transfers else 0.0,
        "inputs_outputs_weights_size_bytes": sum(
            b.num_bytes for b in program.buffers if b.kind == "named"
        )
        + program.constant_bytes,
    }


def _collectives(timing: Replayed, seconds: float) -> dict[str, float]:
    waited = sum(n for name, n in timing.breakdown_ps.items() if name.startswith("collective"))
    hidden = sum(timing.hidden_ps.values())
    return {
        "cc_op_count": sum(use.count for use in timing.collectives),
        **_time("cc_op", (waited + hidden) / PS_PER_S, seconds),
    }


def _hbm_rate(target: Target) -> float:
    """Bytes per second of a logical core's part of HBM."""
    return target.hbm_bytes_per_s_per_core * target.lnc


def _instructions(program: Program, timing: Replayed) -> Iterator[dict[str, Any]]:
    """What engines do, kernel by kernel: the simulator knows how long an engine is busy in one, not
    when each of its instructions begins."""
    places = {}
    for function in program.functions:
        for kernel in function.kernels:
            known = 0 <= kernel.program.loc < len(program.locations)
            places[kernel.program.name] = program.locations[kernel.program.loc] if known else None
    for lane, slices in lanes(timing.last, timing.lnc):
        engine = lane.partition(" ")[0]
        if engine not in (*_ENGINES, *_QUEUES) and not lane.startswith("stream"):
            continue
        for piece in slices:
            place = places.get(piece.name)
            yield {
                "timestamp": piece.start_ps // 1000,
                "duration": max(1, (piece.end_ps - piece.start_ps) // 1000),
                "label": lane,
                "hlo_name": piece.name,
                "opcode": "collective" if lane.startswith("stream") else engine,
                "operands": f"{place[0]}:{place[1]}" if place else "",
            }


def advice(found: Mapping[str, float]) -> Iterator[str]:
    """Where the time goes, by the rules of the explorer's summary page."""
    if found["mfu_estimated_percent"] < 0.5:
        yield "model FLOPs are below 50 % of the peak"
    if found["transpose_flops"] > 0.1 * found["hardware_flops"]:
        yield "transposes are above 10 % of the hardware's FLOPs: look at layouts"


def write_session(path: Path, session: Mapping[str, Any]) -> None:
    """Write a session. Raises UsageError (SW_OUTPUT)."""
    outputs.write(path, dumps(session), "--session-file")


def capture(neff: Path, session: Path, target: str) -> int:
    """`neuron-profile capture`: simulate one execution and write its session."""
    opened = open_program(neff)
    machine = find_target(target) if target else load_target(opened.program.target)
    write_session(session, captured(neff, opened, machine))
    say(f"wrote {session}: one simulated execution on {machine.name}", err=True)
    return 0


def view(neff: Path | None, session: Path, form: str, output: Path | None) -> int:
    """`neuron-profile view`: a session in one of `FORMATS`, on stdout or in a file. Raises
    LoadError for a session that is none, or of another file."""
    found = _read(session)
    if neff is not None and _digest(neff) != found["digest"]:
        raise LoadError(
            "SW_PROFILE",
            f"{session} requires the file that was captured, {found['neff']}, got {neff}",
            hint="capture again: shardwright neuron-profile capture -n FILE -s SESSION",
        )
    text = _shown(found, form)
    if output is None:
        say(text)
    else:
        outputs.write(output, text + "\n", "--output-file")
    return 0


def _shown(found: Mapping[str, Any], form: str) -> str:
    figures: dict[str, float] = found["summary"]
    match form:
        case "summary-json":
            return dumps({found["digest"]: figures}, indent=1)
        case "json":
            rows = {"summary": [figures], "instruction": found["instruction"]}
            return dumps(rows | {"is_simulation": True}, indent=1)
        case "perfetto":
            return dumps(found["trace"])
    lines = [f"{name:<44}{value:.9g}" for name, value in figures.items()]
    hints = [f"hint: {text}" for text in advice(figures)]
    return "\n".join(
        [f"{found['neff']} on {found['target']}, simulated (profile nominal)", *lines, *hints]
    )


def _read(session: Path) -> dict[str, Any]:
    """A session. Raises UsageError for a file that cannot be read, LoadError for none of ours."""
    try:
        data = session.read_bytes() if session.stat().st_size <= _MOST_BYTES else b""
    except OSError as error:
        raise UsageError("SW_USAGE", f"cannot read {session}: {error.strerror}") from error
    try:
        found = json.loads(data)
        if found["format"] == FORMAT and isinstance(found["summary"], dict):
            return dict(found)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise LoadError(
        "SW_PROFILE",
        f"{session}: a session of `shardwright neuron-profile capture` is required",
        hint="sessions of the vendor's tools cannot be read: capture the file here",
    )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]
