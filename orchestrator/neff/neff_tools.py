"""`shardwright neff info|verify|run`: what a compiled file holds, whether it is sound, and one
program on one core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from rich.table import Table

from shardwright.compiler.diagnostics import Diagnostic, LoadError, SimulationError, UsageError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.program import Program
from shardwright.compiler.linking.budget import count_instructions
from shardwright.compiler.machine.target import load_target, logical
from shardwright.compiler.neff.arrays import read_arrays, write_arrays
from shardwright.compiler.neff.bundle import load_bundle, read_program
from shardwright.compiler.neff.manifest import CoreBinding, Manifest
from shardwright.compiler.neff.reader import Container
from shardwright.compiler.neff.serial import KIND as SERIAL
from shardwright.compiler.neff.serial import SerialFile, read_serial
from shardwright.compiler.surface.releases import profile
from shardwright.compiler.surface.resolve import find_target
from shardwright.compiler.surface.timeline import behaviour
from shardwright.orchestrator.environment import reading
from shardwright.orchestrator.neff.input_dumps import dumping
from shardwright.orchestrator.neff.neff_files import (
    ProgramFile,
    mesh_of,
    open_program,
    programs_of,
)
from shardwright.orchestrator.terminal.outputs import writing
from shardwright.orchestrator.terminal.terminal import console, one_line, say, say_json


def describe(path: Path) -> dict[str, Any]:
    """What `neff info` tells, as plain data. Raises LoadError."""
    container = Container.open(path)
    found: dict[str, Any] = {"file": str(path), "kind": container.header.kind, **container.meta}
    match container.header.kind:
        case "program":
            container.verify()
            program = read_program(container)
            found |= _program(program) | {"runtime memory": _by_runtime(program, container.meta)}
        case "bundle" | "pipeline":
            found["programs"] = {n: _program(read_program(c)) for n, c in programs_of(path).items()}
    return found


def _program(program: Program) -> dict[str, Any]:
    named = {b.name: b for b in program.buffers if b.kind != "arena"}

    def rows(names: tuple[str, ...]) -> list[dict[str, Any]]:
        return [
            {"name": n, "shape": list(named[n].shape), "dtype": named[n].dtype.value} for n in names
        ]

    return {
        "inputs": rows(program.inputs),
        "outputs": rows(program.outputs),
        "functions": [f.name for f in program.functions],
        "lnc": program.lnc,
        "subgraphs": _subgraphs(program),
        "arena_bytes": program.arena_bytes,
        "scratch_bytes": program.scratch_bytes,
        "collectives": sum(len(f.collectives) for f in program.functions),
    }


def _by_runtime(program: Program, meta: Mapping[str, Any]) -> dict[str, int]:
    """What a core holds once a program is loaded, in the columns of the runtime's report."""
    from shardwright.orchestrator.runtime.memory_table import cells
    from shardwright.sim_cluster.values.load_checks import memory_on

    try:
        machine = load_target(program.target)
    except UsageError:  # a machine of somebody's own file
        return {}
    seen = logical(machine, program.lnc, bool(meta.get("hypothetical")))
    return {name: size for name, size in cells(memory_on(program, seen)).items() if size}


def _subgraphs(program: Program) -> dict[str, Any]:
    """Instructions of every physical core, and how the kernels are shared out between two."""
    counts = [0] * program.lnc
    for function in program.functions:
        for core, kernels in enumerate(function.subgraphs):
            counts[core] += sum(count_instructions(k.body, unrolled=False) for k in kernels)
    found: dict[str, Any] = {f"sg{core:02d} instructions": n for core, n in enumerate(counts)}
    if program.lnc > 1:
        found["kernels on both"] = sum(f.num_kernels("compute") for f in program.functions)
        found["kernels on sg00 alone"] = sum(f.num_kernels("idle") for f in program.functions)
    return found


def info(path: Path, as_json: bool) -> int:
    """Print what a file holds."""
    found = describe(path)
    if as_json:
        say_json(found)
        return 0
    table = Table.grid(padding=(0, 2, 0, 0))
    for key, value in found.items():
        table.add_row(one_line(key), _cell(value))
    console().print(table)
    return 0


def _cell(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict) and "dtype" in value[0]:
        return "\n".join(f"{r['name']} {r['dtype']}{r['shape']}" for r in value)
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if isinstance(value, dict):
        return "\n".join(f"{key} = {item}" for key, item in value.items())
    return str(value)


def verify(path: Path) -> int:
    """Check a file or a whole bundle; raises LoadError with the first fault."""
    if path.is_dir():
        bundle = load_bundle(path)
        count, cores = len(bundle.programs), bundle.manifest.num_cores
        say(f"{path}: bundle of {count} programs and {cores} cores is sound")
        return 0
    container = Container.open(path)
    container.verify()
    match container.header.kind:
        case "program":
            read_program(container)
        case "manifest":
            Manifest.from_meta(container.meta, container.name)
        case "pipeline":
            read_serial(container)
        case "bundle":
            for inner in programs_of(path).values():
                read_program(inner)
        case "core":
            CoreBinding.from_meta(container.meta, container.name)
    say(f"{path}: {container.header.kind} file is sound")
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How `neff run` runs. `target` is the machine; empty means the one the file was made for.
    `seed` turns stochastic rounding on; `strict_indices` makes an index out of bounds an error.
    `iterations`, `warmup` and `jitter` are those of `--time`; `dump_inputs` is the folder in which
    inputs are left when an execution fails."""

    level: str = "L1"
    timed: bool = False
    program: str = ""
    target: str = ""
    seed: int | None = None
    strict_indices: bool = False
    iterations: int = 1
    warmup: int = 0
    jitter: float = 0.0
    dump_inputs: Path | None = None


def run(path: Path, inputs: Sequence[Path], outputs: Path | None, options: RunOptions) -> int:
    """Run one program on one core, or on all ranks of its mesh, print its time, or both: `arg0`,
    `arg1` and so on in, `out0` and so on out, in the order `neff info` lists. Of several files of
    inputs the last that has an array counts. Raises UsageError for inputs that cannot be read,
    SimulationError for missing or misshapen ones and for a program that needs other cores,
    LoadError for a machine that refuses the file."""
    from shardwright.orchestrator.runtime.execution import executing

    if (bool(inputs) and outputs is None) or (outputs is None and not options.timed):
        raise UsageError(
            "SW_USAGE",
            "neff run requires --outputs and --inputs, or --time alone",
            hint="add --outputs out.npz",
        )
    if not options.program and (container := Container.open(path)).header.kind == SERIAL:
        container.verify()
        return _run_serial(read_serial(container), inputs, outputs, options)
    opened = open_program(path, options.program)
    asked = options.target
    target = find_target(asked) if asked else load_target(opened.program.target)
    with executing(path, opened, target):
        if outputs is not None:
            _run_values(opened, inputs, outputs, options)
        if options.timed:
            from shardwright.orchestrator.neff.neff_time import Executions, print_time

            counts = {"count": options.iterations, "warmup": options.warmup}
            print_time(opened, target, Executions(**counts, jitter=options.jitter))
    return 0


def _run_serial(
    file: SerialFile, inputs: Sequence[Path], outputs: Path | None, options: RunOptions
) -> int:
    """`run` of a file of several pieces: all of them, one behind the other."""
    from shardwright.orchestrator.neff.serial_run import run_serial
    from shardwright.sim_cluster.instructions.index_watch import IndexWatch
    from shardwright.sim_cluster.values.load_checks import check_loadable

    target = find_target(options.target or str(file.meta["target"]))
    if target.cores < file.meta["cores"]:
        raise LoadError(
            "SW_LOAD_CORES",
            f"the file requires {file.meta['cores']} cores, got {target.cores} of {target.name};"
            " NRT_RESOURCE (4)",
            hint="run it on a larger instance, or compile with fewer --neuroncore-pipeline-cores",
        )
    for stage in file.stages:
        if stage.program is not None:
            check_loadable(stage.program, file.meta, target)
    if outputs is not None:
        dtypes = {name: kind.dtype for name, kind in file.inputs.items()}
        given = _read_inputs(list(dtypes), dtypes, inputs)
        watch = IndexWatch(options.strict_indices)
        with (
            _rounding(options.seed),
            dumping(options.dump_inputs, str(file.meta.get("name", "pipeline")), given),
        ):
            results = run_serial(file, given, options.level, watch)
        _write_outputs(outputs, results, [name for name, _ in file.outputs], watch.findings)
    if options.timed:
        from shardwright.orchestrator.neff.neff_time import print_serial_time

        print_serial_time(file, target)
    return 0


def _run_values(
    opened: ProgramFile, inputs: Sequence[Path], outputs: Path, options: RunOptions
) -> None:
    from shardwright.sim_cluster.instructions.index_watch import IndexWatch
    from shardwright.sim_cluster.values.run_single import Ranks, run_single

    program = opened.program
    given = inputs_of(program, inputs)
    watch = IndexWatch(options.strict_indices, _unchecked(opened.meta))
    with _rounding(options.seed), dumping(options.dump_inputs, program.name, given):
        results = run_single(program, given, options.level, watch, Ranks(*mesh_of(opened)))
    _write_outputs(outputs, results, program.outputs, watch.findings)


def _write_outputs(
    outputs: Path,
    results: Mapping[str, np.ndarray],
    order: Sequence[str],
    findings: Sequence[Diagnostic],
) -> None:
    """Write `out0`, `out1`, ... in the order of their names, and say what was found. Raises
    SimulationError (SW_SIM_NAN) for a NaN where the runtime's variables ask for it."""
    for finding in findings:
        say(finding.render(), err=True)
    errors = reading.value("NEURON_RT_NUMERICAL_ERRORS_VERBOSITY", "")
    if errors == "critical" or reading.value("NEURON_FAIL_ON_NAN", False):
        _refuse_nan(results)
    names = {f"out{k}": name for k, name in enumerate(order)}
    with writing(outputs, "--outputs"), outputs.open("wb") as stream:
        write_arrays(stream, ((key, results[name]) for key, name in names.items()), names)


def _refuse_nan(results: Mapping[str, np.ndarray]) -> None:
    """Raises SimulationError for the first output with a NaN: the runtime ends an execution so."""
    for name, array in results.items():
        lost = int(np.isnan(array.astype(np.float32)).sum()) if array.dtype.kind not in "biu" else 0
        if lost:
            raise SimulationError(
                "SW_SIM_NAN",
                f"output {name} requires numbers, got {lost} NaN of {array.size} elements; the"
                " Neuron runtime says: NRT_EXEC_COMPLETED_WITH_NUM_ERR (1003)",
                hint="find where it comes from, or leave NEURON_FAIL_ON_NAN unset",
            )


def _unchecked(meta: Mapping[str, Any]) -> str:
    """Why programs of the release that a file was compiled as check no indices; empty: they do."""
    made_as = str(meta.get("version_profile", ""))
    if profile(made_as).has("index_check"):
        return ""
    since = behaviour("index_check").since
    return f"neuronx-cc {made_as} does not check indices, {since} is the first that does"


def inputs_of(program: Program, files: Sequence[Path]) -> dict[str, np.ndarray]:
    """The inputs of a program that files have. Raises as `_inputs`."""
    dtypes = {b.name: b.dtype for b in program.buffers if b.kind != "arena"}
    return _read_inputs(program.inputs, dtypes, files)


def _read_inputs(
    wanted: Sequence[str], dtypes: Mapping[str, DType], files: Sequence[Path]
) -> dict[str, np.ndarray]:
    """The inputs that files have; of several the last counts."""
    given = dict[str, np.ndarray]()
    for file in files:
        given |= _inputs(wanted, dtypes, file)
    return given


def _inputs(
    wanted: Sequence[str], dtypes: Mapping[str, DType], file: Path
) -> dict[str, np.ndarray]:
    """The inputs that a file has, by the program's names: `arg0`, `arg1`, ...; of the outputs of
    another program those with these names; arrays of these names; and where there are none, `out0`,
    `out1`, ... in order. Raises
    UsageError for a file that cannot be read, and for an array of another kind."""
    try:
        stored = read_arrays(file)
    except (OSError, ValueError, BadZipFile) as error:
        raise UsageError("SW_NEFF_INPUTS", f"cannot read {file}: {error}") from error
    called = {array.name: array for array in stored.values() if array.name}
    numbered = list(enumerate(wanted))
    found = {n: stored[f"arg{k}"] for k, n in numbered if f"arg{k}" in stored}
    found = found or {n: called[n] for n in wanted if n in called}
    found = found or {n: stored[n] for n in wanted if n in stored}
    found = found or {n: stored[f"out{k}"] for k, n in numbered if f"out{k}" in stored}
    for name, array in found.items():
        if not array.is_taken_as(dtypes[name]):
            kinds = f"{dtypes[name].value}, {file} has {array.kind}"
            raise UsageError("SW_NEFF_INPUTS", f"input {name} requires {kinds}")
    return {name: array.of_type(dtypes[name]) for name, array in found.items()}


def _rounding(seed: int | None) -> AbstractContextManager[None]:
    """Stochastic rounding where asked for, by flag or by the runtime's own variables."""
    from shardwright.sim_cluster.values import rounding

    if seed is None and _rounds_stochastically():
        seed = reading.value("NEURON_RT_STOCHASTIC_ROUNDING_SEED", 0)
    return nullcontext() if seed is None else rounding.stochastic(seed)


def _rounds_stochastically() -> bool:
    """What the runtime's variable says; without it, whether XLA was to make bf16 of floats."""
    asked = reading.said("NEURON_RT_STOCHASTIC_ROUNDING_EN")
    if asked is not None:
        return bool(asked.value)
    return any(reading.value(name, False) for name in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16"))
