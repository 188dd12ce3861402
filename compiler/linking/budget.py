"""What one program may cost a core: HBM by category and instructions, refused in stages with the
documented codes.

The checks come as early as the answer is certain: on inputs and outputs, on the memory plan, on
each function's code (a value that stays on the chip costs no HBM), on the whole program.
Instructions are counted as the vendor's compiler lays them out: at optlevel 2 and 3 tile loops are
unrolled, at 1 they stay loops (inferred from the documented cure of "too many instructions after
unroll": -O1); calls of a repeated layer count once. Our own code keeps its loops either way; the
count models the documented limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain

from shardwright.compiler.diagnostics import CapacityError, CompileError, Loc
from shardwright.compiler.ir.facts import pairing
from shardwright.compiler.ir.types import Graph, Op
from shardwright.compiler.isa.costs import tensor_cycles
from shardwright.compiler.isa.program import Engine, Function, Instr, Loop, Program, calls_of
from shardwright.compiler.lower.task import ORDINAL_FILE

OPERATOR_LIMIT = 300_000
"""Instructions of one fused operator: the larger of the two figures in public logs of EXTP003 and
EXTP004 (150,000 and 300,000)."""

MATMUL_FLOPS = 2 * 128 * 128 * 512
"""Most arithmetic one tensor-engine instruction does (documented tile limits of NeuronCore-v2)."""

_MEMORY_HELP = "use a smaller batch or sequence, recomputation, or shard over more cores"
_CODE_HELP = (
    "compile with -O1 (of a job: --set compiler.optlevel=1; tile loops stay loops), split the"
    " model, or shard over more cores"
)
_GB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """HBM of one program on one core, in bytes; the categories of the vendor's message."""

    constants: int
    io: int
    intermediates: int
    scratch: int

    @property
    def total(self) -> int:
        """Peak bytes."""
        return self.constants + self.io + self.intermediates + self.scratch

    def as_dict(self) -> dict[str, int]:
        """Plain data for a file's meta."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"model constants {_size(self.constants)}, I/O tensors {_size(self.io)}, intermediate"
            f" tensors {_size(self.intermediates)}, scratchpad {_size(self.scratch)}"
        )


def memory_of(program: Program) -> Memory:
    """The split of a linked program."""
    return Memory(
        constants=program.constant_bytes,
        io=sum(b.num_bytes for b in program.buffers if b.kind == "named"),
        intermediates=program.arena_bytes - program.scratch_bytes,
        scratch=program.scratch_bytes,
    )


def check_io_memory(
    graph: Graph, limit_bytes: int, aliases: Sequence[tuple[int, int]] = ()
) -> None:
    """Refuse inputs and outputs that do not fit alone; `aliases` are (output, input) in one memory.

    Raises: CapacityError NCC_EOOM002.
    """
    shared = {graph.outputs[output] for output, _ in aliases}
    io = sum(v.type.num_bytes for v in {*graph.inputs, *graph.outputs} - shared)
    if io > limit_bytes:
        memory = Memory(constants=0, io=io, intermediates=0, scratch=0)
        raise _over("NCC_EOOM002", "inputs and outputs alone", io, limit_bytes, memory)


def check_operator_memory(function: Function, limit_bytes: int) -> None:
    """Refuse a fused operator whose tensors in HBM do not fit together; what it keeps on the chip
    does not count.

    Raises: CapacityError NCC_EVRF009.
    """
    for kernel in function.kernels:
        views = [n.attrs["view"] for n in kernel.program.nodes if "view" in n.attrs]
        tensors = {view.tensor: function.tensors[view.tensor] for view in views}.values()
        need = sum(tensor.num_bytes for tensor in tensors)
        if need > limit_bytes:
            raise CapacityError(
                "NCC_EVRF009",
                f"operator {kernel.program.name} requires {_size(need)} of HBM for its tensors, the"
                f" limit is {_size(limit_bytes)} per core",
                _location(kernel.program.loc),
                _MEMORY_HELP,
            )


def check_activations(arena_bytes: int, scratch_bytes: int, limit_bytes: int) -> None:
    """Refuse intermediate tensors (between functions and inside of one) that do not fit alone.

    Raises: CapacityError NCC_EXSP001.
    """
    need = arena_bytes + scratch_bytes
    if need > limit_bytes:
        memory = Memory(constants=0, io=0, intermediates=arena_bytes, scratch=scratch_bytes)
        raise _over("NCC_EXSP001", "activation tensors alone", need, limit_bytes, memory)


def check_program_memory(program: Program, limit_bytes: int) -> Memory:
    """The split of `program`. Raises: CapacityError NCC_EOOM001 when the sum exceeds the limit."""
    memory = memory_of(program)
    if memory.total > limit_bytes:
        raise _over("NCC_EOOM001", f"program {program.name}", memory.total, limit_bytes, memory)
    return memory


def _over(code: str, what: str, need: int, limit: int, memory: Memory) -> CapacityError:
    return CapacityError(
        code,
        f"{what}: peak HBM usage is {_size(need)}, the limit is {_size(limit)} per core: {memory}",
        hint=_MEMORY_HELP,
    )


def _size(number: int) -> str:
    return f"{number / _GB:.2f} GiB" if number >= _GB // 100 else f"{number} bytes"


def scratchpad_pages(
    programs: Sequence[Sequence[tuple[int, int]]], page_bytes: int
) -> tuple[int, int]:
    """(shared, private) bytes that programs of one core take from a scratchpad in pages.

    A program is a list of variables (offset, size). A variable that crosses a page border gets
    memory of its own; the rest share the pages of the largest program.
    Source: the runtime's device memory page (its worked example is a test).
    """
    variables = [v for program in programs for v in program]
    ends = max((offset + size for offset, size in variables), default=0)
    private = sum(size for offset, size in variables if offset % page_bytes + size > page_bytes)
    return -(-ends // page_bytes) * page_bytes, private


def scratchpad_variables(program: Program) -> list[tuple[int, int]]:
    """(offset, size) of what a program keeps in the scratchpad: buffers of its arena, then scratch
    tensors where the calls have their zones.
    """
    arena = [
        (b.offset_bytes, b.num_bytes)
        for b in program.buffers
        if b.kind == "arena" and b.offset_bytes >= 0
    ]
    zones = {
        (call.scratch + t.offset_bytes, t.num_bytes)
        for call in calls_of(program.steps)
        for t in program.functions[call.function].tensors
        if t.kind == "scratch" and t.offset_bytes >= 0
    }
    return [*arena, *sorted(zones)]


def count_instructions(body: Sequence[Instr | Loop], unrolled: bool) -> int:
    """Instructions of a body, loops once or unrolled."""
    total = 0
    for item in body:
        if isinstance(item, Loop):
            total += count_instructions(item.body, unrolled) * (item.trip if unrolled else 1)
        else:
            total += 1
    return total


def tensor_work(function: Function) -> tuple[float, float]:
    """Cycles of the tensor engine (without waiting), of which of transposes: the second."""
    total = transposes = 0.0
    for kernel in chain.from_iterable(function.subgraphs):
        for instr, times in _of_tensor_engine(kernel.body, 1):
            cycles = times * tensor_cycles(instr, kernel.tiles, function.tensors)
            total += cycles
            transposes += cycles if instr.opcode == "transpose" else 0.0
    return total, transposes


def _of_tensor_engine(body: Sequence[Instr | Loop], times: int) -> Iterator[tuple[Instr, int]]:
    """Every instruction of the tensor engine, and how often it is issued."""
    for item in body:
        if isinstance(item, Loop):
            yield from _of_tensor_engine(item.body, times * item.trip)
        elif item.engine is Engine.TENSOR and item.opcode in ("matmul", "transpose"):
            yield item, times


def check_graph_instructions(graph: Graph, limit: int, optlevel: int) -> None:
    """Refuse a graph whose contractions alone need more instructions than a module may have.

    Raises: CompileError NCC_EVRF007.
    """
    if optlevel == 1:
        return
    least = sum(_least_instructions(op) for op in graph.walk())
    if least > limit:
        raise _too_many("NCC_EVRF007", "the module requires at least", least, limit, None)


def _least_instructions(op: Op) -> int:
    dims = pairing(op)
    if dims is None:
        return 0
    lhs, result = op.operands[0].type, op.results[0].type
    summed = math.prod(lhs.shape[dim] for dim in dims.lhs_contract)
    return 2 * result.num_elements * summed // MATMUL_FLOPS


def check_operator_instructions(
    functions: Sequence[Function], optlevel: int, called: str = ""
) -> None:
    """Raises: CompileError NCC_EXTP004 when the largest fused operator of `functions` is over its
    limit; `called` is how the vendor's compiler names the function, where there is one.
    """
    kernels = [k for function in functions for subgraph in function.subgraphs for k in subgraph]
    counts = [count_instructions(kernel.body, unrolled=optlevel > 1) for kernel in kernels]
    if max(counts, default=0) > OPERATOR_LIMIT:
        kernel = kernels[counts.index(max(counts))].program
        what, loc = f"operator {kernel.name} requires", _location(kernel.loc)
        raise _too_many("NCC_EXTP004", what, max(counts), OPERATOR_LIMIT, loc, called)


def function_instructions(function: Function, optlevel: int) -> int:
    """Instructions of a function as the vendor's compiler lays them out at a level."""
    kernels = chain.from_iterable(function.subgraphs)
    return sum(count_instructions(k.body, unrolled=optlevel > 1) for k in kernels)


def check_module_instructions(
    count: int, limit: int, name: str = "the module", called: str = ""
) -> None:
    """Raises: CompileError NCC_EBVF030 when a module has more instructions than `limit`; `called`
    is its largest function.
    """
    if count > limit:
        raise _too_many("NCC_EBVF030", f"{name} requires", count, limit, None, called)


def subgraph_name(number: int, name: str) -> str:
    """What the vendor's compiler calls the function with a number, and what we do."""
    return f"sg{number:04d} ({name})"


def _location(ordinal: int) -> Loc | None:
    return Loc(ORDINAL_FILE, ordinal) if ordinal >= 0 else None


def _too_many(
    code: str, what: str, count: int, limit: int, loc: Loc | None, called: str = ""
) -> CompileError:
    where = f" for function {called}" if called else ""
    return CompileError(
        code,
        f"too many instructions after unroll{where}: {what} {count}, the limit is {limit}",
        loc,
        _CODE_HELP,
    )
