"""A question about the time of a step as bytes, and its answer: what a `time` work unit computes.

The question holds everything by value (programs, mesh, machine, faults, what cores are credited
with), so its digest names the answer on any host. Programs travel without the user's locations,
which no time depends on. `step_time.py` does the timing.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import msgpack
import zstandard

from shardwright.compiler.diagnostics import LoadError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.fields import check_fields
from shardwright.compiler.isa.program import CollectiveCall, Program
from shardwright.compiler.machine.target import CollectiveFacts, CoreModel, Target
from shardwright.compiler.neff.bundle import program_bytes, read_program
from shardwright.compiler.neff.files import inflated
from shardwright.compiler.neff.reader import Container
from shardwright.compiler.neff.schedule import Transfer
from shardwright.compiler.timing.evaluate import RegionTime
from shardwright.sim_cluster.profiles import Profile
from shardwright.sim_cluster.timing.actors import CollectiveDuration, CollectiveUse
from shardwright.sim_cluster.timing.contention import Demand, Packets
from shardwright.sim_cluster.timing.faults import Faults
from shardwright.sim_cluster.timing.kept import KeptFunctions
from shardwright.sim_cluster.timing.step_parts import (
    FunctionTime,
    ProgramRun,
    StepParts,
    Timeline,
    Track,
    step_parts,
)
from shardwright.sim_cluster.timing.step_time import Step, StepTiming, time_step
from shardwright.sim_cluster.timing.trace import trace_json

_BRIEF_CHARS = 80
MAX_TRACE_BYTES = 2**30
"""Our choice: what is larger opens in no viewer."""
_KEPT = KeptFunctions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The time of a step, and what it is made of; the file of its trace, empty unless it was asked
    for."""

    timing: StepTiming
    parts: StepParts
    trace: bytes


def packed_programs(programs: Mapping[str, Program]) -> dict[str, bytes]:
    """The programs of a step as questions about it hold them."""
    return {name: program_bytes(_placeless(p), {}) for name, p in sorted(programs.items())}


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
    row = {"step": {**_columns(step, Step), "programs": programs}, **asked}
    data: bytes = msgpack.packb(_plain(row))
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
    credit = Profile(**row["credit"]) if row["credit"] else None
    step = _step(row["step"])
    timing = time_step(step, row["profile"], True, row["traced"], credit, _KEPT.evaluate)
    trace = zstandard.compress(trace_json(timing)) if row["traced"] else b""
    columns = _columns(timing, StepTiming)
    found = {"timing": columns, "parts": step_parts(timing), "trace": trace}
    data: bytes = msgpack.packb(_plain(found))
    return data


def decode_answer(data: bytes) -> Answer:
    """The answer in the bytes of `answer`. Raises LoadError for a trace that is damaged, or of
    absurd size, and for what no unit answers."""
    try:
        row = _unpacked(data)
        timing = row["timing"]
        uses = tuple(_use(**use) for use in timing["collectives"])
        trace = _trace(row["trace"]) if row["trace"] else b""
        step = StepTiming(**{**timing, "collectives": uses})
        found = Answer(timing=step, parts=_parts(row["parts"]), trace=trace)
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


def _placeless(program: Program) -> Program:
    return replace(program, locations=(), metadata={})


def _columns(value: Any, kind: type[Any]) -> dict[str, Any]:
    """The fields of `kind` in `value`, which may be of a subclass."""
    return {f.name: getattr(value, f.name) for f in fields(kind)}


def _plain(value: Any) -> Any:
    """`value` in what msgpack knows; the order of mappings is kept, that of sets is theirs no
    more."""
    if is_dataclass(value):
        return _plain(_columns(value, type(value)))
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(value)
    return value.value if isinstance(value, enum.Enum) else value


def _unpacked(data: bytes) -> dict[str, Any]:
    row: dict[str, Any] = msgpack.unpackb(data, use_list=False, strict_map_key=False)
    return row


def _step(row: Mapping[str, Any]) -> Step:
    faults = row["faults"]
    made = {
        "programs": {
            n: read_program(Container(b, n), _KEPT.decode) for n, b in row["programs"].items()
        },
        "target": _target(row["target"]),
        "transfers": tuple(Transfer(**transfer) for transfer in row["transfers"]),
        "packets": Packets(**row["packets"]),
        "faults": Faults(**{**faults, "dead_cores": frozenset(faults["dead_cores"])}),
    }
    return Step(**{**row, **made})


def _target(row: Mapping[str, Any]) -> Target:
    collectives, core = CollectiveFacts(**row["collectives"]), CoreModel(**row["core"])
    return Target(**{**row, "collectives": collectives, "core": core})


def _parts(row: Mapping[str, Any]) -> StepParts:
    functions = (
        {**f, "regions": tuple(RegionTime(**r) for r in f["regions"])} for f in row["functions"]
    )
    timelines = (
        {**t, "tracks": tuple(Track(**track) for track in t["tracks"])} for t in row["timelines"]
    )
    return StepParts(
        functions=tuple(FunctionTime(**f) for f in functions),
        runs=tuple(ProgramRun(**run) for run in row["runs"]),
        timelines=tuple(Timeline(**t) for t in timelines),
    )


def _use(call: Mapping[str, Any], cost: Mapping[str, Any], **counts: int) -> CollectiveUse:
    return CollectiveUse(
        CollectiveCall(**{**call, "dtype": DType(call["dtype"])}),
        CollectiveDuration(**{**cost, "demand": Demand(**cost["demand"])}),
        **counts,
    )
