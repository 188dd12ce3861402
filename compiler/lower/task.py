"""The units of lowering: one task per op that computes or moves data, and the errors that ask for
another try.

Besides the ops of the graph IR there are internal ones: `copy` stores a value of its own, `write`
stores into a window of another value's memory, `register` loads a scalar into a register. They have
no type rule and never leave `lower/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.compiler.diagnostics import CompileError, Loc
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.isa.kernel import Affine
from shardwright.compiler.lower.landing import is_run

COPY, WRITE, REGISTER, ALLOC = "lower.copy", "lower.write", "lower.register", "lower.alloc"

LOOP, CONTRACT, COLLECTIVE, ALONE = "loop", "contract", "collective", "alone"

PARTITIONS = 128  # documented: SBUF partitions of a NeuronCore, rows and columns of its engines

ORDINAL_FILE = "#"
"""File name of locations that only hold an op ordinal: compile units carry no user locations."""


@dataclass(frozen=True, slots=True)
class RegisterAttrs:
    """The register a scalar is loaded into, and the range it is clamped to. With `replicated`, what
    clamping moves is an index out of bounds, which counts once over these mesh axes.
    """

    register: int
    low: int
    high: int
    replicated: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a value: starts (affine in registers), sizes and steps per dim."""

    starts: tuple[Affine, ...]
    sizes: tuple[int, ...]
    steps: tuple[int, ...]

    def is_run_of(self, shape: Sequence[int]) -> bool:
        """Whether it lies in one run of memory, in a value of `shape` that does."""
        return all(step == 1 for step in self.steps) and is_run(self.sizes, shape)

    @property
    def registers(self) -> set[int]:
        """Registers the starts depend on."""
        return {r for start in self.starts for r, _ in start.terms}


@dataclass(slots=True, eq=False)
class Task:
    """One op to be computed. `data` are the operands it reads; `target` is the value whose memory
    it overwrites, all of it or a `window`. Then `version` is the target with that, where the op's
    own result is something else.

    `after` are numbers of tasks that must have finished before this one starts, beyond the
    producers of `data`.
    """

    op: Op
    kind: str
    number: int
    data: tuple[Value, ...]
    target: Value | None = None
    fusable: bool = True
    registers: set[int] = field(default_factory=set)
    after: set[int] = field(default_factory=set)
    window: Window | None = None
    version: Value | None = None

    @property
    def result(self) -> Value:
        """The value (or new version of the target's memory) this task makes."""
        return self.op.result if self.version is None else self.version

    @property
    def flops(self) -> int:
        """Arithmetic of a contraction; what others compute is not counted."""
        return OPS[self.op.name].flops(self.op) if self.kind == CONTRACT else 0

    def fill(self, window: Window) -> None:
        """Overwrite no more than a part of the target."""
        self.window = window
        self.registers |= window.registers


class ClashError(Exception):
    """Two tasks may not share a kernel: one would overwrite what the other still reads, or needs
    the other's result in memory.
    """

    def __init__(self, reader: int, writer: int) -> None:
        super().__init__(reader, writer)
        self.pair = (reader, writer)


class NeedsCopyError(Exception):
    """Strides cannot express uses of `values`: they have to be stored densely first."""

    def __init__(self, *values: Value) -> None:
        super().__init__(*values)
        self.values = values


class NeedsScratchError(Exception):
    """Output number `output` cannot be written in place safely: it is computed elsewhere and copied
    at the end.
    """

    def __init__(self, output: int) -> None:
        super().__init__(output)
        self.output = output


def unsupported(op: Op, what: str, hint: str, code: str = "NCC_EVRF001") -> CompileError:
    """The error for an op the lowering refuses."""
    loc = op.loc if op.loc != Loc() else None
    return CompileError(code, f"{op.name} {what}", loc, hint)
