"""What makes a function that was read from a file sound: its parts fit each other.

Columns have been checked against their tables (`columns.py`), so every number is in range of its
pool. Here are the rules between parts: a node reads earlier nodes, a view has a stride per iter
dim, constants have the data of their shape, tokens are there when an instruction waits for them.
They hold for whatever the compiler makes. Everything raises ValueError, which the reader turns into
SW_NEFF_CONTENT.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardwright.collectives.ops import CollectiveKind
from shardwright.compiler.isa.attributes import (
    ELEMENTWISE,
    INSTRUCTION_ATTRIBUTES,
    KERNEL_ATTRIBUTES,
    NODE_FORMS,
)
from shardwright.compiler.isa.instructions import INSTRUCTIONS, TOKENS_ONLY
from shardwright.compiler.isa.kernel import STORES, Affine, KernelProgram, Node, Tensor, View
from shardwright.compiler.isa.limits import walk
from shardwright.compiler.isa.program import (
    TRANSFERS,
    AccessPattern,
    CollectiveCall,
    Function,
    Instr,
    Kernel,
    ProgramBuffer,
    Space,
)
from shardwright.compiler.isa.schema import DTYPE
from shardwright.compiler.isa.tokens import check_tokens
from shardwright.compiler.support.schema import (
    COUNT,
    COUNTS,
    MOST,
    TEXT,
    Rule,
    Table,
    one_of,
    row,
    several,
)

MOST_DIMS = 64
"""Of an array of NumPy, which has an axis per iter dim."""
MOST_REGISTERS = 2**16
"""Our choice: a register is a loop of the source or a scalar it loads."""

_TRIPLE = row(COUNT, COUNT, COUNT)
_NUMBERS = several(COUNT, most=2**20)
HEAD = Table(
    {
        "name": TEXT,
        "target": TEXT,
        "inputs": _NUMBERS,
        "outputs": _NUMBERS,
        "parameters": _NUMBERS,
        "num_registers": COUNT,
        "scratch_bytes": COUNT,
        "collectives": several(
            Rule("a collective", lambda v: isinstance(v, tuple) and len(v) in (8, 9))
        ),
    }
)
"""What the section `function` holds."""
_COLLECTIVE: Mapping[str, Rule] = {
    "kind": one_of(*(kind.value for kind in CollectiveKind), *TRANSFERS),
    "axes": several(TEXT),
    "dtype": DTYPE,
    "source_shape": _TRIPLE,
    "reduction": TEXT,
    "stream": COUNT,
    "name": TEXT,
    "pairs": several(row(COUNT, COUNT)),
    "parts": several(_TRIPLE),
}
_TENSOR_KIND = one_of("input", "output", "constant", "scratch")
_KERNEL_KIND = one_of(*KERNEL_ATTRIBUTES)


def check_collective(call: CollectiveCall, where: str) -> None:
    """Its fields are of the kinds they must be."""
    for name, rule in _COLLECTIVE.items():
        rule.require(getattr(call, name), f"{where}: {name}")
    if not all(map(math.prod, call.shapes)):
        raise ValueError(f"{where}: at least one element is required to be sent")


def check_function(function: Function) -> None:
    """All rules. Raises ValueError for the first that is broken."""
    check_indices(function.parameters, function.num_registers, "parameters")
    if function.num_registers > MOST_REGISTERS:
        raise ValueError(f"at most {MOST_REGISTERS} registers, got {function.num_registers}")
    for number, tensor in enumerate(function.tensors):
        _check_tensor(number, tensor, function)
    _check_bindings(function)
    lengths = {len(subgraph) for subgraph in function.subgraphs}
    if len(lengths) > 1:
        raise ValueError(f"subgraphs of one length are required, got {sorted(lengths)}")
    checker = _Kernels(function)
    for core, subgraph in enumerate(function.subgraphs):
        checker.check(subgraph, core)


def check_indices(numbers: Iterable[int], count: int, what: str) -> None:
    """Every number names one of `count` things."""
    for number in numbers:
        if not 0 <= number < count:
            raise ValueError(f"{what} require 0..{count - 1}, got {number}")


def size_bytes(tensor: Tensor | ProgramBuffer, what: str) -> int:
    """Its bytes, if its shape is one that can be."""
    shape = tensor.shape
    COUNTS.require(shape, f"{what}: shape")
    size = tensor.num_bytes
    if size > MOST or len(shape) > MOST_DIMS:
        raise ValueError(f"{what} requires at most {MOST} bytes in {MOST_DIMS} dims, got {shape}")
    return size


def check_place(first: int, size: int, room: int, what: str) -> None:
    """`size` bytes from byte `first` on are inside of a zone of `room` bytes."""
    end = first + size
    if not 0 <= first <= end <= room:
        raise ValueError(f"{what}: bytes inside of 0..{room} are required, got {first}..{end}")


def _check_tensor(number: int, tensor: Tensor, function: Function) -> None:
    where = f"tensor {number}"
    _TENSOR_KIND.require(tensor.kind, f"{where}: kind")
    size = size_bytes(tensor, where)
    given = len(tensor.data)
    if tensor.kind == "constant" and given not in (size, tensor.dtype.bytes):
        raise ValueError(f"{where}: data of {size} bytes or one element are required, got {given}")
    if tensor.kind != "constant" and given:
        raise ValueError(f"{where}: a tensor that is no constant has data")
    if tensor.kind == "scratch":
        check_place(tensor.offset_bytes, size, function.scratch_bytes, where)
    if tensor.alias >= 0:
        source = function.tensors[tensor.alias]
        if tensor.kind != "output" or source.kind != "input":
            raise ValueError(f"{where}: an output takes the memory of an input, got {source.kind}")


def _check_bindings(function: Function) -> None:
    for what, numbers in (("inputs", function.inputs), ("outputs", function.outputs)):
        check_indices(numbers, len(function.tensors), what)
    for number in function.inputs:
        if function.tensors[number].kind != "input":
            raise ValueError(f"input tensor {number} is of kind {function.tensors[number].kind}")


class _Kernels:
    """The kernels of a function; sets of attributes and patterns are checked once for each use.
    What is wrong is said without its place, which whoever goes through a list adds."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.tensors, self.registers = function.tensors, function.num_registers
        self._seen: set[tuple[int, int]] = set()
        self._patterns: set[int] = set()

    def check(self, kernels: Sequence[Kernel], core: int) -> None:
        """One subgraph in order."""
        behind = 0  # kernels since the last at which all cores are at one point
        flying: set[int] = set()
        for number, kernel in enumerate(kernels):
            try:
                is_event = self._kernel(kernel, behind)
                first = self.function.kernels[number].program
                if is_event or first.kind.startswith("collective"):
                    self._event(kernel.program, flying, core)
                    behind = 0
                else:
                    behind += 1
            except ValueError as error:
                raise ValueError(f"kernel {number} ({kernel.program.name}): {error}") from error
        if flying:
            raise ValueError(f"collectives {sorted(flying)} are not awaited")

    def _kernel(self, kernel: Kernel, behind: int) -> bool:
        """Whether it starts or awaits a collective; `behind` are the kernels that borders may lie
        back."""
        _KERNEL_KIND.require(kernel.program.kind, "kind")
        self._program(kernel.program)
        self._code(kernel)
        check_tokens(kernel)
        for border in kernel.borders or ():
            if not 1 <= border.back <= behind:
                raise ValueError(f"a border lies 1..{behind} kernels back, got {border.back}")
        return kernel.program.kind.startswith("collective")

    def _event(self, program: KernelProgram, flying: set[int], core: int) -> None:
        """Starts and waits of a collective alternate, and core 1 has no part in them."""
        if core:
            if program.kind != "idle":
                raise ValueError("core 1 has no collectives, and is idle beside one")
            return
        number = program.attrs["collective"]
        if (program.kind == "collective_start") == (number in flying):
            raise ValueError(f"{program.kind} of {number} is out of turn")
        flying.symmetric_difference_update((number,))

    def _attributes(self, table: Table, attrs: Any) -> None:
        key = (id(table), id(attrs))
        if key not in self._seen:
            table.require(attrs, "attributes")
            self._seen.add(key)

    def _program(self, program: KernelProgram) -> None:
        attrs, iter_dims = program.attrs, program.iter_dims
        self._attributes(KERNEL_ATTRIBUTES[program.kind], attrs)
        COUNTS.require(iter_dims, "iteration dims")
        if len(iter_dims) > MOST_DIMS:
            raise ValueError(
                f"at most {MOST_DIMS} iteration dims are required, got {len(iter_dims)}"
            )
        if program.nodes and program.kind != "compute":
            raise ValueError(f"a kernel of kind {program.kind} has no nodes")
        for number, node in enumerate(program.nodes):
            try:
                self._node(node, number, program)
            except ValueError as error:
                raise ValueError(f"node {number} ({node.op}): {error}") from error
        if program.kind == "register_load":
            check_indices((attrs["register"],), self.registers, "registers")
            self._view(attrs["view"], 0)
        if "collective" in attrs:
            check_indices((attrs["collective"],), len(self.function.collectives), "collectives")
        if program.kind == "collective_start":
            self._operands(program)

    def _operands(self, program: KernelProgram) -> None:
        """Tensors of a collective, and enough elements to send."""
        call = self.function.collectives[program.attrs["collective"]]
        needed = call.num_elements
        for name in ("source", "target"):
            place = program.attrs[name]
            if isinstance(place, View):
                self._view(place, len(place.strides))
                continue
            check_indices((place,), len(self.tensors), "tensors")
            given = math.prod(self.tensors[place].shape)
            if name == "source" and given < needed:
                raise ValueError(f"{needed} elements to send are required, got {given}")

    def _node(self, node: Node, number: int, program: KernelProgram) -> None:
        form, iter_dims = NODE_FORMS.get(node.op, ELEMENTWISE), node.iter_dims
        if len(node.inputs) not in form.inputs:
            raise ValueError(f"{form.inputs} inputs are required, got {len(node.inputs)}")
        check_indices(node.inputs, number, "inputs")
        if any(program.nodes[i].op in STORES for i in node.inputs):
            raise ValueError("a store has no value")
        check_indices(iter_dims, len(program.iter_dims), "iteration dims")
        if list(iter_dims) != sorted(set(iter_dims)):
            raise ValueError(f"iteration dims in ascending order are required, got {iter_dims}")
        if math.prod(program.iter_dims[a] for a in iter_dims) > MOST:
            raise ValueError(f"a value of at most {MOST} points is required, got {iter_dims}")
        self._attributes(form.attributes, node.attrs)
        if node.attrs:
            self._node_attributes(node.attrs, program.iter_dims)

    def _node_attributes(self, attrs: Mapping[str, Any], iter_dims: Sequence[int]) -> None:
        """What attributes name is there."""
        if "view" in attrs:
            self._view(attrs["view"], len(iter_dims))
        for name in ("over", "order"):
            if name in attrs:
                check_indices(attrs[name], len(iter_dims), name)
                if len(set(attrs[name])) != len(attrs[name]):
                    raise ValueError(f"{name} requires each iteration dim once, got {attrs[name]}")
        if "atom" in attrs:
            check_indices((attrs["atom"],), len(iter_dims), "iteration dims")
        for name in ("start", "value"):
            if isinstance(attrs.get(name), Affine):
                self._affine(attrs[name])
        for bound in attrs.get("bounds", ()):
            if len(bound.strides) != len(iter_dims):
                raise ValueError(f"a bound requires {len(iter_dims)} strides, got {bound}")

    def _view(self, view: View, iter_dims: int) -> None:
        check_indices((view.tensor,), len(self.tensors), "tensors of views")
        if len(view.strides) != iter_dims:
            raise ValueError(f"a view requires {iter_dims} strides, got {view.strides}")
        self._affine(view.offset)

    def _affine(self, value: Affine) -> None:
        if value.terms:
            check_indices((r for r, _ in value.terms), self.registers, "registers")

    def _code(self, kernel: Kernel) -> None:
        for tile in kernel.tiles:
            if tile.space is Space.HBM or tile.loop >= self.registers:
                raise ValueError(f"tile {tile.name} requires SBUF or PSUM, and a loop of its own")
        borders = len(kernel.borders or ())
        for number, instr in enumerate(walk(kernel.body)):
            try:
                self._instruction(instr)
                for pattern in (*instr.srcs, *instr.dsts):
                    self._pattern(pattern, kernel)
                check_indices(instr.borders, borders, "borders")
            except ValueError as error:
                where = f"instruction {number} ({instr.opcode})"
                raise ValueError(f"{where}: {error}") from error

    def _instruction(self, instr: Instr) -> None:
        definition = INSTRUCTIONS.get(instr.opcode)
        if definition is None:
            raise ValueError("there is no such instruction")
        if instr.engine not in definition.issuers:
            raise ValueError(f"{instr.engine.value} cannot issue it")
        if len(instr.srcs) not in definition.sources:
            raise ValueError(f"{definition.sources} sources required, got {len(instr.srcs)}")
        if (instr.dst is None) != (instr.opcode in TOKENS_ONLY):
            raise ValueError("wait and signal have no destination, all others have one")
        self._attributes(INSTRUCTION_ATTRIBUTES[instr.opcode], instr.attrs)
        if "start" in instr.attrs:
            self._affine(instr.attrs["start"])
        if registers := instr.attrs.get("zero_when"):
            check_indices(registers, self.registers, "registers")

    def _pattern(self, pattern: AccessPattern, kernel: Kernel) -> None:
        if id(pattern) not in self._patterns:  # what all its users share
            self._affine(pattern.offset)
            self._patterns.add(id(pattern))
        if pattern.space is Space.HBM:
            check_indices((pattern.buffer,), len(self.tensors), "tensors")
            return
        check_indices((pattern.buffer,), len(kernel.tiles), "tiles")
        tile = kernel.tiles[pattern.buffer]
        if tile.space is not pattern.space or pattern.dims[0][0] != 1:
            raise ValueError(f"{pattern.dims} in {pattern.space.value} does not fit {tile.name}")
