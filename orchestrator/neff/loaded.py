"""A NEFF that is held in memory and called: one program, or several of a core's chip one behind the
other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.compiler.diagnostics import LoadError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import Program
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.neff.bundle import read_program
from shardwright.compiler.neff.reader import Container
from shardwright.compiler.neff.serial import KIND as SERIAL
from shardwright.compiler.neff.serial import SerialFile, read_serial
from shardwright.compiler.surface.resolve import find_target

Buffer = tuple[str, DType, tuple[int, ...]]
"""(name, element type, shape) of an argument or a result."""


@dataclass(frozen=True, slots=True)
class LoadedNeff:
    """A NEFF of one rank, checked; calls do not change it, and may be at the same time."""

    content: Program | SerialFile
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]

    @classmethod
    def of(cls, data: bytes | memoryview, name: str, target: str = "") -> LoadedNeff:
        """That of a file's bytes; `name` is what errors call it, `target` the machine, "" the one
        that it was made for. Raises LoadError for damage, another kind, or another machine."""
        from shardwright.sim_cluster.values.load_checks import check_loadable

        container = Container(bytes(data), name)
        container.verify()
        if container.header.kind == SERIAL:
            file = read_serial(container)
            machine = find_target(target or str(file.meta["target"]))
            for stage in file.stages:
                if stage.program is not None:
                    check_loadable(stage.program, file.meta, machine)
            kinds = file.types
            named = [(name, kinds[name]) for name in file.inputs]
            made = [(name, kinds[value]) for name, value in file.outputs]
            given, results = ([(n, k.dtype, k.shape) for n, k in each] for each in (named, made))
            return cls(file, tuple(given), tuple(results))
        if container.header.kind != "program" or container.meta.get("mesh"):
            raise LoadError(
                "SW_NEFF_KIND",
                f"{name}: a file of one rank is required, got a {container.header.kind} file"
                f" of mesh {container.meta.get('mesh') or 'none'}",
            )
        program = read_program(container)
        check_loadable(
            program, container.meta, find_target(target) if target else load_target(program.target)
        )
        known = {b.name: (b.name, b.dtype, tuple(b.shape)) for b in program.buffers}
        return cls(
            program,
            tuple(known[name] for name in program.inputs),
            tuple(known[name] for name in program.outputs),
        )

    def run(self, arrays: Sequence[np.ndarray], level: str = "L1") -> list[np.ndarray]:
        """Its results in order, from its arguments in order. Raises SimulationError."""
        from shardwright.orchestrator.neff.serial_run import run_serial
        from shardwright.sim_cluster.values.run_single import run_single

        given = {b[0]: array for b, array in zip(self.inputs, arrays, strict=True)}
        if isinstance(self.content, Program):
            found = run_single(self.content, given, level)
        else:
            found = run_serial(self.content, given, level)
        return [found[name] for name, _, _ in self.outputs]
