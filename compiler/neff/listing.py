"""A program as text: buffers, calls, and per function every kernel with its meaning and its code.

`neff dump` prints it and `neff diff` compares two of them, so what one shows the other can tell
apart. One line says one thing, and equal programs have equal text. With `engines` only the
instruction streams of those queues are listed, inside the loops they share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from shardwright.compiler.isa.kernel import Tensor
from shardwright.compiler.isa.kernel_text import body_lines, head_text
from shardwright.compiler.isa.program import (
    AccessPattern,
    Call,
    Engine,
    Function,
    Instr,
    Kernel,
    Loop,
    Program,
    ProgramBuffer,
    Repeat,
    Tile,
)
from shardwright.compiler.text.values import affine_text, value_text

_STEP = "  "


def program_lines(program: Program) -> Iterator[str]:
    """Everything but the functions: header, buffers, calls."""
    yield f"program {program.name} for {program.target}"
    yield f"arena {program.arena_bytes} bytes, scratch zones up to {program.scratch_bytes} bytes"
    for number, buffer in enumerate(program.buffers):
        yield f"buffer {number} {_buffer(buffer)}"
    yield from _steps(program.steps, program, 0)


def function_lines(
    function: Function,
    locations: Sequence[tuple[str, int, str]],
    engines: Collection[Engine] = (),
) -> Iterator[str]:
    """One function, or with `engines` its code for those queues alone."""
    yield f"function {function.name} ({len(function.kernels)} kernels)"
    for number, tensor in enumerate(function.tensors):
        yield f"{_STEP}tensor {number} {_tensor(tensor)}"
    for number, call in enumerate(function.collectives):
        shape = " ".join("x".join(map(str, s)) for s in call.shapes)
        over = ",".join(call.axes) or "the host link"
        yield f"{_STEP}collective {number} {call.kind} over {over} {shape}"
    for core, kernels in enumerate(function.subgraphs):
        if len(function.subgraphs) > 1:
            yield f"{_STEP}subgraph sg{core:02d} on physical core {core}"
        for number, kernel in enumerate(kernels):
            yield from _kernel(number, kernel, locations, engines)


def engine_lines(
    function: Function, core: int, engine: Engine, locations: Sequence[tuple[str, int, str]]
) -> Iterator[str]:
    """What one queue of one physical core does in a function, kernel by kernel."""
    for number, kernel in enumerate(function.subgraphs[core]):
        yield from _kernel(number, kernel, locations, [engine])


def _buffer(buffer: ProgramBuffer) -> str:
    place = f"arena+{buffer.offset_bytes}" if buffer.kind == "arena" else buffer.name
    place += " on the host" if buffer.kind == "host" else ""
    return f"{place} {_type(buffer.shape, buffer.dtype.value)}"


def _tensor(tensor: Tensor) -> str:
    place = f" @scratch+{tensor.offset_bytes}" if tensor.kind == "scratch" else ""
    alias = f" aliases tensor {tensor.alias}" if tensor.alias >= 0 else ""
    return f"{tensor.kind} {tensor.name} {_type(tensor.shape, tensor.dtype.value)}{place}{alias}"


def _type(shape: Sequence[int], dtype: str) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _steps(steps: Sequence[Call | Repeat], program: Program, depth: int) -> Iterator[str]:
    for step in steps:
        if isinstance(step, Repeat):
            yield f"{_STEP * depth}repeat p{step.register} {step.trip} times"
            yield from _steps(step.steps, program, depth + 1)
            continue
        given, made = (", ".join(map(str, numbers)) for numbers in (step.inputs, step.outputs))
        registers = "".join(f" {affine_text(a, 'p')}" for a in step.parameters)
        function = program.functions[step.function]
        zone = f" scratch+{step.scratch}" if function.scratch_bytes else ""
        yield f"{_STEP * depth}call {function.name}{registers} ({given}) -> ({made}){zone}"


def _kernel(
    number: int,
    kernel: Kernel,
    locations: Sequence[tuple[str, int, str]],
    engines: Collection[Engine],
) -> Iterator[str]:
    meaning, where = kernel.program, ""
    if 0 <= meaning.loc < len(locations):
        where = " from {}:{}".format(*locations[meaning.loc])
    order = f" after {kernel.after} of the other core" if kernel.after else ""
    start = "" if kernel.borders is None else " without a barrier"
    yield f"{_STEP}kernel {number} {head_text(meaning)}{where}{order}{start}"
    if not engines:
        yield from (f"{_STEP * 2}{line}" for line in body_lines(meaning))
        for position, tile in enumerate(kernel.tiles):
            yield f"{_STEP * 2}tile {position} {_tile(tile)}"
        if kernel.tokens:
            yield f"{_STEP * 2}semaphores {' '.join(map(str, kernel.tokens))}"
        for position, (queue, back) in enumerate(kernel.borders or ()):
            yield f"{_STEP * 2}border {position} {queue.value} behind kernel {number - back}"
    yield from _code(kernel.body, 2, engines)


def _tile(tile: Tile) -> str:
    slots = f" x {tile.slots} slots by r{tile.loop}" if tile.slots > 1 else ""
    size = f"{tile.partitions} x {tile.elements} {tile.dtype.value}"
    return f"{tile.space.value} {tile.name} {size} @{tile.address}{slots}"


def _code(body: Sequence[Instr | Loop], depth: int, engines: Collection[Engine]) -> Iterator[str]:
    for item in body:
        if isinstance(item, Instr):
            if not engines or item.engine in engines:
                yield _STEP * depth + _instr(item)
            continue
        inner = list(_code(item.body, depth + 1, engines))
        if inner:
            yield f"{_STEP * depth}loop r{item.register} {item.trip} times"
            yield from inner


def _instr(instr: Instr) -> str:
    written, sources = (
        "".join(f" {_pattern(p)}" for p in side) for side in (instr.dsts, instr.srcs)
    )
    target = f"{written} <-" if written else ""
    attrs = "".join(f" {k}={value_text(v)}" for k, v in sorted(instr.attrs.items()))
    tokens = "".join(f" border:{b}" for b in instr.borders)
    tokens += "".join(f" wait:{s}" for s in instr.waits)
    tokens += "".join(f" signal:{s}" for s in instr.signals)
    return f"{instr.engine.value:8s}{instr.opcode}{target}{sources}{attrs}{tokens}"


def _pattern(pattern: AccessPattern) -> str:
    dims = " ".join(str(n) if stride == 1 else f"{n}:{stride}" for stride, n in pattern.dims)
    start = f" from partition {pattern.start}" if pattern.start else ""
    return f"{pattern.space.value}{pattern.buffer}+{affine_text(pattern.offset)}[{dims}{start}]"
