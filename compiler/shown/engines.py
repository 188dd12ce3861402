"""What runs at the same time, as text: engines of a core over the kernels of a function, and
collectives beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from shardwright.compiler.isa.limits import walk
from shardwright.compiler.isa.program import CollectiveCall, Function, Kernel
from shardwright.compiler.machine.target import Target
from shardwright.compiler.shown.charts import table, time_chart, us_text
from shardwright.compiler.timing.evaluate import EngineSpan, engine_spans

_SPARSE = 0.5


def overlap_text(function: Function, target: Target) -> str:
    """The order of engines and collectives of a function."""
    return "\n".join(_lines(function, target)) + "\n"


def _lines(function: Function, target: Target) -> Iterator[str]:
    yield "What runs at the same time in one call of the function, on a core that shares nothing."
    yield "Engines are queues of their own: each does its instructions in order and waits for"
    yield "others where a semaphore says so. A kernel begins behind a barrier, or, without one, on"
    yield "each engine as soon as that has finished the kernel before; then its rows begin left of"
    yield "the end of the kernel above. `#`: the engine is busy most of that time, `=`: less than"
    yield "half of it. `dma_in` loads from HBM, `dma_out` stores. Times start anew behind every"
    yield "collective; the listing has every wait and signal."
    yield from _collectives(function)
    spans = list(engine_spans(function, target))
    for core, kernels in enumerate(function.subgraphs):
        if len(function.subgraphs) > 1:
            yield from ("", f"physical core {core}:")
        for stretch in _stretches(function.kernels):
            yield from _stretch(stretch, kernels, [spans[at][core] for at in stretch])


def _collectives(function: Function) -> Iterator[str]:
    """Where each collective starts, where it is awaited, and what runs between."""
    yield from ("", "collectives:")
    if not function.collectives:
        yield "  none"
        return
    kernels = function.kernels
    waits = {
        k.program.attrs["collective"]: n
        for n, k in enumerate(kernels)
        if k.program.kind == "collective_wait"
    }
    for at, kernel in enumerate(kernels):
        if kernel.program.kind == "collective_start":
            number = kernel.program.attrs["collective"]
            end = waits.get(number, len(kernels))
            between = [n for n in range(at + 1, end) if kernels[n].program.kind == "compute"]
            beside = ", ".join(f"{n} {kernels[n].program.name}" for n in between) or "nothing"
            when = f"starts at kernel {at}, awaited at {end}; beside it {beside}"
            yield f"  {number} {_call(function.collectives[number])}: {when}"


def _call(call: CollectiveCall) -> str:
    shapes = " ".join("x".join(map(str, shape)) for shape in call.shapes)
    over = "+".join(call.axes) or "the host link"
    return f"{call.kind} over {over} of {call.dtype.value}[{shapes}]"


def _stretches(kernels: Sequence[Kernel]) -> Iterator[list[int]]:
    """Numbers of kernels between collectives, which are in the subgraph of core 0."""
    numbered = groupby(enumerate(kernels), lambda row: row[1].program.kind.startswith("collective"))
    yield from ([number for number, _ in rows] for is_apart, rows in numbered if not is_apart)


def _stretch(
    numbers: Sequence[int], kernels: Sequence[Kernel], spans: Sequence[dict[str, EngineSpan]]
) -> Iterator[str]:
    whole = max((s.end_ps for found in spans for s in found.values()), default=0)
    yield from ("", f"kernels {numbers[0]} to {numbers[-1]}, {us_text(whole)}:")
    rows: list[Sequence[object]] = [("engine", "from", "to", "busy", f"0 .. {us_text(whole)}")]
    for number, found in zip(numbers, spans, strict=True):
        kernel = kernels[number]
        start = "behind a barrier" if kernel.borders is None else _borders(kernel, number)
        after = f", after kernel {kernel.after} of the other core" if kernel.after else ""
        rows.append((f"kernel {number} {kernel.program.name}: {start}{after}; {_tokens(kernel)}",))
        for engine, span in found.items():
            lasts = span.end_ps - span.begin_ps
            busy = span.busy_ps / lasts if lasts else 1.0
            chart = time_chart(span.begin_ps, span.end_ps, whole, busy >= _SPARSE)
            times = (us_text(span.begin_ps), us_text(span.end_ps), us_text(span.busy_ps))
            rows.append((f"  {engine}", *times, chart))
    yield from _aligned(rows)


def _aligned(rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Headings as they are, rows of engines side by side."""
    lines = table([row for row in rows if len(row) > 1], right=(1, 2, 3))
    for row in rows:
        yield f"  {row[0]}" if len(row) == 1 else f"  {next(lines)}"


def _borders(kernel: Kernel, number: int) -> str:
    waits = [f"{queue.value} of kernel {number - back}" for queue, back in kernel.borders or ()]
    return f"no barrier, waits for {', '.join(waits)}" if waits else "no barrier, waits for nothing"


def _tokens(kernel: Kernel) -> str:
    waits = sum(len(instr.waits) for instr in walk(kernel.body))
    return f"{len(kernel.tokens)} semaphores, {waits} waits in the code"
