"""`python -m shardwright.sim_cluster BUNDLE`: load a bundle from where it lies, run it, time it.

Needs this package, `compiler`, `collectives`, NumPy, msgpack and zstandard: no graph, no jax, no
orchestrator. Exit codes are those of the `shardwright` command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from shardwright.collectives.ops import TORUS
from shardwright.compiler.diagnostics import DiagnosticError, UsageError
from shardwright.compiler.machine.target import PS_PER_S, load_target, logical
from shardwright.compiler.neff.arrays import read_arrays, write_arrays
from shardwright.compiler.neff.bundle import Bundle, load_bundle
from shardwright.sim_cluster.timing.contention import Packets
from shardwright.sim_cluster.timing.step_time import Step, band
from shardwright.sim_cluster.values.run_values import ValueRun

Arrays = Mapping[str, np.ndarray]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        if bool(args.inputs) != bool(args.outputs):
            raise UsageError("SW_USAGE", "--inputs and --outputs require each other")
        bundle = load_bundle(args.bundle)
        cores, target = bundle.manifest.num_cores, bundle.manifest.target
        print(
            f"{args.bundle}: {len(bundle.programs)} programs for {cores} cores of {target}, sound"
        )
        if args.inputs:
            _save(args.outputs, run_steps(bundle, _read(args.inputs, bundle), args.steps))
        if args.time:
            _print_time(bundle)
    except DiagnosticError as error:
        print(error.diagnostic.render(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m shardwright.sim_cluster", description=__doc__)
    parser.add_argument("bundle", type=Path, help="a bundle directory")
    work = parser.add_mutually_exclusive_group()
    work.add_argument("--inputs", type=Path, help=".npz: global arrays by buffer name")
    work.add_argument("--verify", action="store_true", help="only check the files (the default)")
    parser.add_argument("--outputs", type=Path, help=".npz to write: the state, metrics per step")
    parser.add_argument(
        "--steps", type=int, default=0, help="steps; batch arrays then have a first axis of steps"
    )
    parser.add_argument("--time", action="store_true", help="print the simulated time of a step")
    return parser


def run_steps(bundle: Bundle, inputs: Arrays, steps: int = 0) -> dict[str, np.ndarray]:
    """The state after the steps, by buffer name, and metrics with a first axis of steps.

    `inputs` holds every buffer that is given (state and batch). `steps` 0 is one step on the batch
    as it is; otherwise batch arrays have a first axis of that length.
    Raises UsageError for a missing buffer or another number of batches.
    """
    given = [b for b in bundle.manifest.buffers.values() if b.initial == "given"]
    given = [b for b in given if b.role != "coordinate"]
    wanted = {name: b for b in given for name in bundle.manifest.user_leaves(b)}
    if missing := sorted(wanted.keys() - inputs.keys()):
        raise UsageError("SW_INPUTS", f"inputs require an array {missing[0]}, one of {missing}")
    batch = {name: inputs[name] for name, b in wanted.items() if b.role == "batch"}
    for name, array in batch.items():
        if steps and (array.ndim == 0 or len(array) != steps):
            raise UsageError(
                "SW_INPUTS", f"{name} requires a first axis of {steps} steps, got {array.shape}"
            )
    run = ValueRun(bundle.programs, bundle.manifest)
    run.load({name: array for name, array in inputs.items() if name not in batch})
    metrics = [
        run.step({n: a[k] if steps else a for n, a in batch.items()}) for k in range(steps or 1)
    ]
    for check in run.result.l0.values():
        print(f"{check.program}: L0 against L1 {check.distance:.1e} on core {check.rank}")
    found = run.gather(wanted.keys() - batch.keys())
    return found | {name: np.stack([m[name] for m in metrics]) for name in metrics[0]}


def _read(path: Path, bundle: Bundle) -> Arrays:
    """The arrays of a file, those of buffers in their types. Raises UsageError."""
    try:
        stored = read_arrays(path)
    except (OSError, ValueError, BadZipFile) as error:
        raise UsageError("SW_INPUTS", f"cannot read {path} as .npz: {error}") from error
    buffers = bundle.manifest.buffers.values()
    dtypes = {name: b.dtype for b in buffers for name in bundle.manifest.user_leaves(b)}
    wanted = {name: dtypes[name] for name in stored if name in dtypes}
    for name, dtype in wanted.items():
        if not stored[name].is_taken_as(dtype):
            raise UsageError(
                "SW_INPUTS", f"{name} requires {dtype.value}, {path} has {stored[name].kind}"
            )
    typed = {name: stored[name].of_type(dtype) for name, dtype in wanted.items()}
    return {name: array.array for name, array in stored.items()} | typed


def _save(path: Path, arrays: Arrays) -> None:
    with path.open("wb") as file:
        write_arrays(file, arrays.items())


def _print_time(bundle: Bundle) -> None:
    manifest = bundle.manifest
    step = Step(
        programs=bundle.programs,
        schedules=manifest.schedules,
        transfers=manifest.transfers,
        mesh=manifest.mesh,
        target=logical(
            load_target(manifest.target),
            manifest.lnc,
            hypothetical=bool(manifest.metadata.get("hypothetical")),
        ),
        instances=manifest.instances,
        placement=manifest.metadata.get("placement", TORUS),
        packets=Packets.from_dict(manifest.metadata.get("packets", {})),
        collectives=manifest.metadata.get("collectives", {}),
    )
    rows = [f"{name} {t.step_time_ps / PS_PER_S:.9f} s" for name, t in band(step).items()]
    print(f"simulated step time: {', '.join(rows)}")


if __name__ == "__main__":
    sys.exit(main())
