"""The autotuner: tile code for a kernel, searched and timed on one core of the target.

Reduction fusions are timed with their first tiling: what they will run is at least as fast, and
trying more tilings twice is what would take long. Equal kernels are timed once; what matters is
their structure and the types of tensors, not which tensors they are or where a window starts.
Nothing is searched twice, and code that the kernel will run is kept until then. What was found for
kernels of equal meaning is known to all autotuners of a process: functions of a sweep have kernels
in common.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from shardwright.compiler.codegen.generate import Codes, Generated, Recipe, generate
from shardwright.compiler.codegen.relocate import relocated
from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.isa.kernel import KernelProgram, Tensor, View, root_of
from shardwright.compiler.machine.target import Target
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.timing.evaluate import oracle_ps

_FIRST_REGISTER = 1 << 20  # above every register of a function
_MOST_BEGUN = 24  # kernels whose code is kept for a search: the ways to cut one, twice (our choice)
_MOST_FOUND = 1 << 14
"""Kernels whose times are known to later autotuners, the newest (our choice): 100 bytes each."""


@dataclass(frozen=True, slots=True)
class Found:
    """What came of a kernel: its recipe, and the time of its code."""

    recipe: Recipe
    duration_ps: int


class Memo:
    """What came of the kernels that this process has made code for on one target with the same
    options, by `meaning`. It follows from that, so an autotuner that knows it answers as one
    that does not.
    """

    def __init__(self) -> None:
        self._found: dict[bytes, Found] = {}

    def find(self, effort: str, meant: Hashable, make: Callable[[], Found]) -> Found:
        """What is known, else what `make` gives. Nothing is kept of what raises."""
        key = hashlib.sha256(repr((effort, meant)).encode()).digest()
        found = self._found.pop(key, None) or make()
        self._found[key] = found  # the newest
        if len(self._found) > _MOST_FOUND:
            del self._found[next(iter(self._found))]
        return found


@lru_cache(maxsize=8)
def _memo(_target: str, _options: CompileOptions) -> Memo:
    return Memo()


def forget() -> None:
    """Begin as a new process does, for those who time compiling."""
    _memo.cache_clear()


class Autotuner:
    """Simulated picoseconds of kernels on a physical core of `target`."""

    def __init__(self, target: Target, options: CompileOptions) -> None:
        self.target = target
        self.options = options
        self._known: dict[Hashable, int | DiagnosticError] = {}
        self._fitted: dict[Hashable, int | DiagnosticError] = {}
        self._recipes: dict[Hashable, Recipe] = {}
        self._codes: dict[Hashable, tuple[Generated, Sequence[int]]] = {}  # and their tensors
        self._begun: dict[Hashable, Codes] = {}
        self._memo = _memo(repr(target), options)

    def __call__(self, program: KernelProgram, tensors: Sequence[Tensor]) -> int:
        """Time of a kernel. Raises CompileError or CapacityError when there is no code for it."""
        key = _structure(program, tensors)
        return _once(self._known, key, lambda: self._measure(key, program, tensors))

    def searched(self, program: KernelProgram, tensors: Sequence[Tensor]) -> int:
        """Time of the code that a kernel will run; what `generate` makes of it is known then.
        Raises as a call does.
        """
        made = self.generate(program, tensors, _FIRST_REGISTER)
        return oracle_ps(made.kernel, tensors, self.target)

    def first_fit_ps(self, program: KernelProgram, tensors: Sequence[Tensor]) -> int:
        """Time of a kernel with its first tiling; a search that follows goes on from there. Raises
        as a call does.
        """

        def first() -> Found:
            codes = self._begin(program, tensors)
            return _found(codes, codes.first())

        def duration_ps() -> int:
            return self._memo.find("first", meaning(program, tensors), first).duration_ps

        return _once(self._fitted, _structure(program, tensors), duration_ps)

    def _measure(self, key: Hashable, program: KernelProgram, tensors: Sequence[Tensor]) -> int:
        if _is_row_kernel(program) and self.options.optlevel > 1:
            return self.first_fit_ps(program, tensors)
        if program.kind == "compute" and key not in self._recipes:
            return self._search(key, program, tensors).duration_ps
        made = self._repeated(key, program, tensors)
        self._codes[meaning(program, tensors)] = made, _tensors(program)
        return oracle_ps(made.kernel, tensors, self.target)

    def generate(
        self, program: KernelProgram, tensors: Sequence[Tensor], first_register: int
    ) -> Generated:
        """Code for a kernel; what was found for one of the same structure is not searched again.

        Raises CompileError, CapacityError.
        """
        key, meant = _structure(program, tensors), meaning(program, tensors)
        if program.kind == "compute" and not (meant in self._codes or key in self._recipes):
            self._search(key, program, tensors)
        mine = _tensors(program)
        known = self._codes.get(meant)
        made, numbers = known or (self._repeated(key, program, tensors), mine)
        renamed = dict(zip(numbers, mine, strict=True))
        kernel = relocated(made.kernel, program, renamed, _FIRST_REGISTER, first_register)
        last = made.next_register - _FIRST_REGISTER + first_register
        return replace(made, kernel=kernel, next_register=last)

    def _search(self, key: Hashable, program: KernelProgram, tensors: Sequence[Tensor]) -> Found:
        """The best tiling of a kernel, which those of the same structure take too; its code is kept
        where it had to be made for that.
        """
        meant = meaning(program, tensors)

        def search() -> Found:
            codes = self._begin(program, tensors)
            made = codes.searched()
            self._codes[meant] = made, _tensors(program)
            return _found(codes, made)

        found = self._memo.find("searched", meant, search)
        self._recipes[key] = found.recipe
        return found

    def _repeated(
        self, key: Hashable, program: KernelProgram, tensors: Sequence[Tensor]
    ) -> Generated:
        """Code by the recipe of the structure, with registers that begin at `_FIRST_REGISTER`."""
        target, recipe = self.target.name, self._recipes.get(key)
        return generate(program, tensors, target, _FIRST_REGISTER, self.options, recipe)

    def _begin(self, program: KernelProgram, tensors: Sequence[Tensor]) -> Codes:
        """A memo of what was planned and made for the latest kernels."""
        key = meaning(program, tensors), (*_tensors(program),)
        if key not in self._begun:
            if len(self._begun) == _MOST_BEGUN:
                del self._begun[next(iter(self._begun))]
            name = self.target.name
            self._begun[key] = Codes(program, tensors, name, _FIRST_REGISTER, self.options)
        return self._begun[key]


def _found(codes: Codes, made: Generated) -> Found:
    assert made.recipe is not None
    return Found(made.recipe, codes.oracle_ps(made))


def _once(
    known: dict[Hashable, int | DiagnosticError], key: Hashable, make: Callable[[], int]
) -> int:
    """What `make` gives or raises, asked once for every key."""
    if key not in known:
        try:
            known[key] = make()
        except DiagnosticError as error:
            known[key] = error
    found = known[key]
    if isinstance(found, DiagnosticError):
        raise found
    return found


def _is_row_kernel(program: KernelProgram) -> bool:
    """Several contractions, or one and reductions beside it."""
    ops = [n.op for n in program.nodes]
    contractions = ops.count("contract")
    return contractions > 1 or (contractions == 1 and "reduce" in ops)


def _views(program: KernelProgram) -> list[View]:
    """All views, in the order of the nodes."""
    values = (n.attrs[k] for n in program.nodes for k in sorted(n.attrs))
    return [value for value in values if isinstance(value, View)]


def _tensors(program: KernelProgram) -> list[int]:
    """The tensors a kernel touches, by first use."""
    return list(dict.fromkeys(view.tensor for view in _views(program)))


def meaning(program: KernelProgram, tensors: Sequence[Tensor]) -> Hashable:
    """A key, equal for kernels whose code differs in tensor numbers and registers only."""
    numbers = {n: at for at, n in enumerate(_tensors(program))}
    roots: dict[int, int] = {}
    shared = [roots.setdefault(root_of(tensors, n), at) for n, at in numbers.items()]
    kinds = [(tensors[n].kind, tensors[n].alias >= 0) for n in numbers]
    offsets = [view.offset for view in _views(program)]
    return _structure(program, tensors), program.name, (*shared,), (*kinds,), (*offsets,)


def _structure(program: KernelProgram, tensors: Sequence[Tensor]) -> Hashable:
    seen: dict[int, int] = {}

    def plain(value: Any) -> Hashable:
        if not isinstance(value, View):
            return repr(value)
        number = seen.setdefault(value.tensor, len(seen))
        tensor = tensors[value.tensor]
        return number, tensor.dtype, tensor.shape, value.strides

    nodes = [
        (n.op, n.inputs, n.iter_dims, n.dtype, *((k, plain(n.attrs[k])) for k in sorted(n.attrs)))
        for n in program.nodes
    ]
    return program.kind, program.iter_dims, tuple(nodes)
