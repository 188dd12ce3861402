"""Memory over time as text: scratch tensors of a function over its kernels, arena buffers of a
program over its calls. One row per tensor, one column per position, `#` while its bytes are in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwright.compiler.isa.program import Function, Program
from shardwright.compiler.linking.residency import Residency
from shardwright.compiler.lower.write_out import tensor_spans
from shardwright.compiler.schedule import hbm
from shardwright.compiler.shown.charts import (
    bytes_text,
    share_bar,
    span_chart,
    table,
    tensor_text,
    type_text,
)

_ROW = 24  # columns of the bars of bytes in use


def function_memory(function: Function) -> str:
    """The tensors of a function, when the kernels need them, and the scratch zone they share."""
    return "\n".join(_function_lines(function)) + "\n"


def _function_lines(function: Function) -> Iterator[str]:
    programs = [kernel.program for kernel in function.kernels]
    spans, count = tensor_spans(programs), len(programs)
    scratch = [i for i, t in enumerate(function.tensors) if t.kind == "scratch"]
    lives = {i: hbm.Lifetime(function.tensors[i].num_bytes, *spans.get(i, (0, 0))) for i in scratch}
    bound = hbm.liveness_bound(list(lives.values()))
    yield "HBM of one call. `bound` tensors are buffers of the caller: its arena, or named buffers."
    yield "Scratch tensors lie in the function's own zone and share its bytes when they live apart."
    yield ""
    yield f"scratch zone: {bytes_text(function.scratch_bytes)} ({function.scratch_bytes} bytes);"
    yield f"no plan of these kernels needs less than {bytes_text(bound)} ({bound} bytes)"
    yield ""
    yield f"When tensors are in use; a column is a kernel, 0 to {count - 1}:"
    rows: list[Sequence[object]] = [("tensor", "kind", "bytes", "at", "kernels", "in use")]
    for number, tensor in enumerate(function.tensors):
        if number not in spans:
            continue
        first, last = spans[number]
        place = "constant" if tensor.kind == "constant" else "bound"
        if tensor.alias >= 0:
            place = f"memory of {tensor.alias}"
        elif number in lives:
            place = f"scratch+{tensor.offset_bytes}"
        size, chart = bytes_text(tensor.num_bytes), span_chart(first, last, count)
        rows.append((number, tensor_text(tensor), size, place, f"{first}..{last}", chart))
    yield from table(rows, right=(0, 2))
    yield ""
    yield "Scratch bytes in use while each kernel runs:"
    live = [
        sum(hbm.aligned(life.size_bytes) for life in lives.values() if life.start <= at <= life.end)
        for at in range(count)
    ]
    rows = [
        (at, f"{p.kind} {p.name}", bytes_text(size), share_bar(size, max(live), _ROW))
        for at, (p, size) in enumerate(zip(programs, live, strict=True))
    ]
    yield from table(rows, right=(0, 2))


def program_memory(program: Program) -> str:
    """The calls of a linked program, what they hold, and when arena buffers are in use."""
    return "\n".join(_program_lines(program)) + "\n"


def _program_lines(program: Program) -> Iterator[str]:
    found = Residency(program)
    count = len(found.calls)
    yield "HBM of a program besides named buffers: the arena, planned over calls. A call's scratch"
    yield "zone lies in it for as long as the call takes (see the memory of each function)."
    yield ""
    yield f"arena: {bytes_text(program.arena_bytes)} ({program.arena_bytes} bytes);"
    yield f"no plan of these calls needs less than {bytes_text(found.bound_bytes)}"
    yield ""
    yield "Calls in program order, loop bodies once, with the bytes that are in use meanwhile:"
    most = max((m.live_bytes for m in found.moments), default=0)
    head = ("call", "function", "times", "values", "scratch", "zone at", "in use")
    rows: list[Sequence[object]] = [head]
    for at, (moment, placed) in enumerate(zip(found.moments, found.calls, strict=True)):
        bar = share_bar(moment.live_bytes, most, _ROW) + (" peak" if at == found.peak else "")
        sizes = (bytes_text(moment.arena_bytes), bytes_text(moment.scratch_bytes))
        zone = f"arena+{placed.call.scratch}" if moment.scratch_bytes else ""
        rows.append((at, moment.function, moment.repeats, *sizes, zone, bar))
    yield from table(rows, right=(0, 2, 3, 4))
    yield ""
    yield f"When arena buffers are in use; a column is a call, 0 to {count - 1}:"
    rows = [("buffer", "type", "bytes", "at", "calls", "in use")]
    for number in sorted(found.arena, key=lambda n: program.buffers[n].offset_bytes):
        calls = [at for at, placed in enumerate(found.calls) if number in placed.live]
        if not calls:
            continue
        buffer = program.buffers[number]
        kind, size = type_text(buffer.shape, buffer.dtype), bytes_text(buffer.num_bytes)
        chart = span_chart(calls[0], calls[-1], count)
        place, span = f"arena+{buffer.offset_bytes}", f"{calls[0]}..{calls[-1]}"
        rows.append((number, kind, size, place, span, chart))
    yield from table(rows, right=(0, 2))
    yield ""
    yield "Tensors in memory at the peak:"
    peak = [(f"  {held.name}", bytes_text(held.num_bytes), held.loc) for held in found.at_peak()]
    yield from table(peak, right=(1,))
