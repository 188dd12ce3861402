"""Random valid modules, compiled and run at both levels, against XLA: zero wrong results.

A short slice here and by hypothesis, a long one in the matrix, a thousand by `make modules`, any
range of seeds by `python -m tests.system.test_random_graphs FIRST COUNT`.
"""

from __future__ import annotations

import random
import sys
import traceback
import warnings
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.options import CompileOptions
from tests.support import random_ops, random_ops_indexed, xla
from tests.support.cells import long_in_matrix
from tests.support.compiled import TARGET, run_levels
from tests.support.random_graphs import Module, Var, random_module

GROWTHS = (*random_ops.GROWTHS, *random_ops_indexed.GROWTHS)
SLACK = 2.0  # both sides may be off by the error, and in opposite directions


def variant(seed: int) -> tuple[CompileOptions, str]:
    """The options and the machine a seed is compiled with."""
    options = (
        CompileOptions(),
        CompileOptions(optlevel=1),
        CompileOptions(),
        CompileOptions(optlevel=3),
        CompileOptions(attention="unfused"),
        CompileOptions(attention="fused"),
    )
    machines = (TARGET, "trn2.48xlarge", TARGET, "trn3-gen1-ultraserver", TARGET)
    return options[seed % len(options)], machines[seed % len(machines)]


def check(module: Module, seed: int = 0, lnc: int = 1) -> None:
    """Every output at L0 and L1 against XLA, in the seed's variant on `lnc` physical cores."""
    graph = import_module(module.text)
    wanted = _reference(module, graph)
    for level, given_ in zip(("L0", "L1"), _runs(module, graph, seed, lnc), strict=True):
        for number, (var, have, want) in enumerate(
            zip(module.outputs, given_, wanted, strict=True)
        ):
            _check_output(var, have, want, f"{level} output {number}")


def _reference(module: Module, graph: Graph) -> list[np.ndarray]:
    """XLA's outputs, or those of the operators' references: XLA:CPU has no kernel for some dots of
    short floats, and a fused update may overwrite a part of its operand that it still has to read.
    """
    if "dynamic_update_slice" in module.text:
        return evaluate(graph, module.inputs)
    try:
        return xla.run(module.text, module.inputs)
    except jax.errors.JaxRuntimeError as error:
        if "UNIMPLEMENTED" not in str(error):
            raise
        return evaluate(graph, module.inputs)


def _runs(module: Module, graph: Graph, seed: int, lnc: int) -> list[list[np.ndarray]]:
    options, machine = variant(seed)
    options = replace(options, lnc=lnc)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        return run_levels(graph, module.inputs, options=options, target=machine)


def _check_output(var: Var, have: np.ndarray, want: np.ndarray, where: str) -> None:
    assert have.shape == want.shape and have.dtype == want.dtype, where
    if not var.error:
        np.testing.assert_array_equal(have, want, err_msg=where)
        return
    distance = np.abs(have.astype(np.float64) - want.astype(np.float64))
    assert np.all(distance <= SLACK * var.error), (where, float(distance.max()), var.error)


def module_of(seed: int) -> Module:
    rng = random.Random(seed)
    return random_module(rng, GROWTHS, rng.choice((3, 6, 10, 16)))


@pytest.mark.parametrize("seed", range(20))
def test_seeded_modules(seed: int) -> None:
    check(module_of(seed), seed)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False), st.integers(1, 5))
def test_drawn_modules(rng: random.Random, steps: int) -> None:
    """The same modules from hypothesis' draws, so that a failure shrinks."""
    check(random_module(rng, GROWTHS, steps))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", long_in_matrix(range(8), (0,), range(1, 8)))
def test_many_seeded_modules(block: int) -> None:
    for seed in range(1000 + 125 * block, 1025 + 125 * block):
        try:
            check(module_of(seed), seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def main() -> None:
    """Say which of COUNT seeds from FIRST on fail, with the error."""
    first, count = map(int, sys.argv[1:3])
    failed = 0
    for seed in range(first, first + count):
        try:
            check(module_of(seed), seed)
        except Exception:
            failed += 1
            print(f"FINDING seed {seed}: {traceback.format_exc(limit=-2)[-1500:]}", flush=True)
    print(f"{failed} of {count} seeds failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
