"""A question about the time of a step as bytes, and its answer: what a `time` work unit computes.

The question holds everything by value (programs, mesh, machine, faults, what cores are credited
with), so its digest names the answer on any host. Programs travel without the user's locations,
which no time depends on. `step_time.py` does the timing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import zstandard

from shardwright.compiler.diagnostics import LoadError
from shardwright.compiler.isa.program import Program
from shardwright.compiler.neff.bundle import program_bytes, read_program
from shardwright.compiler.neff.reader import Container
from shardwright.compiler.support.fields import check_fields, made, plain
from shardwright.compiler.support.files import inflated
from shardwright.sim_cluster.profiles import Profile
from shardwright.sim_cluster.timing.memo import FunctionMemo
from shardwright.sim_cluster.timing.step_parts import StepParts, step_parts
from shardwright.sim_cluster.timing.step_time import Step, StepTiming, time_step
from shardwright.sim_cluster.timing.trace import trace_json

_BRIEF_CHARS = 80
MAX_TRACE_BYTES = 2**30
"""Our choice: what is larger opens in no viewer."""
_MEMO = FunctionMemo()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The time of a step, and what it is made of; the file of its trace, empty unless it was asked
    for."""

    timing: StepTiming
    parts: StepParts
    trace: bytes


def packed_programs(programs: Mapping[str, Program]) -> dict[str, bytes]:
    """The programs of a step as questions about it hold them."""
    placeless = {n: replace(p, locations=(), metadata={}) for n, p in sorted(programs.items())}
    return {name: program_bytes(program, {}) for name, program in placeless.items()}


def encode_question(
    step: Step,
    profile: str,
    credit: Profile | None = None,
    traced: bool = False,
    programs: Mapping[str, bytes] | None = None,
) -> bytes:
    """What `time_step` is asked, as bytes; `programs` are the step's, if they are packed."""
    programs = packed_programs(step.programs) if programs is None else programs
    asked = {"profile": profile, "credit": credit, "traced": traced}
    row = {"step": plain(replace(step, programs={})) | {"programs": programs}, **plain(asked)}
    data: bytes = msgpack.packb(row)
    return data


def question_parts(question: bytes) -> dict[str, str]:
    """What is in a question, by name; what is long by its digest."""
    row = _unpacked(question)
    step = dict(row.pop("step"))
    programs = {f"program {name}": data for name, data in step.pop("programs").items()}
    return {name: _brief(value) for name, value in {**programs, **step, **row}.items()}


def _brief(value: Any) -> str:
    text = "" if isinstance(value, bytes) else str(value)
    if 0 < len(text) <= _BRIEF_CHARS:
        return text
    return hashlib.sha256(msgpack.packb(value)).hexdigest()


def answer(question: bytes) -> bytes:
    """Time the step of a question. Raises what `time_step` raises."""
    row = _unpacked(question)
    credit = made(Profile, row["credit"]) if row["credit"] else None
    step = _step(row["step"])
    timing = time_step(step, row["profile"], True, row["traced"], credit, _MEMO.evaluate)
    trace = zstandard.compress(trace_json(timing)) if row["traced"] else b""
    found = {
        "timing": plain(timing, StepTiming),
        "parts": plain(step_parts(timing)),
        "trace": trace,
    }
    data: bytes = msgpack.packb(found)
    return data


def decode_answer(data: bytes) -> Answer:
    """The answer in the bytes of `answer`. Raises LoadError for a trace that is damaged, or of
    absurd size, and for what no unit answers."""
    try:
        row = _unpacked(data)
        trace = _trace(row["trace"]) if row["trace"] else b""
        found: Answer = made(Answer, {**row, "trace": trace})
        check_fields(found)
        return found
    except (KeyError, TypeError, ValueError, AttributeError, msgpack.UnpackException) as error:
        raise LoadError(
            "SW_UNIT_FORMAT",
            f"the time of a step makes no sense: {error!r}",
            hint="remove what is stored: shardwright cache clean --kind time",
        ) from error


def _trace(frame: bytes) -> bytes:
    try:
        return inflated(frame, MAX_TRACE_BYTES)
    except ValueError as error:
        raise LoadError(
            "SW_NEFF_CONTENT",
            f"the trace of a stored time cannot be unpacked: {error}",
            hint="remove what is stored: shardwright cache clean --kind time",
        ) from error


def _unpacked(data: bytes) -> dict[str, Any]:
    row: dict[str, Any] = msgpack.unpackb(data, use_list=False, strict_map_key=False)
    return row


def _step(row: Mapping[str, Any]) -> Step:
    step: Step = made(Step, {**row, "programs": {}})
    files = row["programs"].items()
    return replace(
        step, programs={n: read_program(Container(b, n), _MEMO.decode) for n, b in files}
    )
