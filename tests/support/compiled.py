"""A graph or a JAX function compiled for one core and run from its linked program, at L0 and L1."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shardwright.compiler.driver import compile_graph
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.isa.program import Program
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.passes.pipeline import PASSES
from shardwright.compiler.program import StepProgram
from shardwright.compiler.rewriting.driver import run
from shardwright.sim_cluster.values.run_single import run_single

TARGET = "trn1n.32xlarge"
FIRST_TILINGS = CompileOptions(optlevel=1)
"""What most functions are compiled with whose values are compared: kernels as they grow, each with
its first tiling. How kernels are tiled by a search is held by value in the harness rows of
`tests/ops` and in `tests/compiler/codegen`, how a search cuts functions by `system/test_models.py`
and `system/test_whole_road.py`.
"""


def graph_of(fn: Callable, *arguments: np.ndarray) -> Graph:
    """The imported graph of `fn` on arrays like `arguments`."""
    import jax

    return import_module(jax.jit(fn, keep_unused=True).lower(*arguments).as_text(debug_info=True))


def link(graph: Graph, options: CompileOptions = FIRST_TILINGS, target: str = TARGET) -> Program:
    """`graph` compiled as one program; inputs are called arg0, ..., outputs out0, ..."""
    inputs = tuple(f"arg{i}" for i in range(len(graph.inputs)))
    outputs = tuple(f"out{i}" for i in range(len(graph.outputs)))
    step = StepProgram(name="step", graph=run(graph, PASSES), inputs=inputs, outputs=outputs)
    return compile_graph(step, target, options)


def run_levels(
    graph: Graph,
    inputs: Sequence[np.ndarray],
    levels: Sequence[str] = ("L0", "L1"),
    options: CompileOptions = FIRST_TILINGS,
    target: str = TARGET,
) -> list[list[np.ndarray]]:
    """Outputs of `graph` per level."""
    return levels_of(link(graph, options, target), inputs, levels)


def levels_of(
    program: Program, inputs: Sequence[np.ndarray], levels: Sequence[str] = ("L0", "L1")
) -> list[list[np.ndarray]]:
    """Outputs of a program that `link` made, per level."""
    named = {f"arg{i}": np.asarray(a) for i, a in enumerate(inputs)}
    found = [run_single(program, named, level) for level in levels]
    return [[out[f"out{i}"] for i in range(len(program.outputs))] for out in found]


def check_against_jax(
    fn: Callable,
    *arguments: np.ndarray,
    bound: float = 0.0,
    levels: Sequence[str] = ("L0", "L1"),
    options: CompileOptions = FIRST_TILINGS,
) -> None:
    """Hold every output of `fn` at every level within `bound` (L2, relative) of JAX; 0: equal."""
    import jax

    leaves = jax.tree.leaves(arguments)
    wanted = [np.asarray(a) for a in jax.tree.leaves(jax.jit(fn)(*arguments))]
    for level, outputs in zip(
        levels, run_levels(graph_of(fn, *arguments), leaves, levels, options), strict=True
    ):
        assert len(outputs) == len(wanted)
        for number, (have, want) in enumerate(zip(outputs, wanted, strict=True)):
            assert have.shape == want.shape and have.dtype == want.dtype, (level, number)
            if bound == 0.0:
                np.testing.assert_array_equal(have, want, err_msg=f"{level} output {number}")
                continue
            error = np.linalg.norm(have.astype(np.float64) - want.astype(np.float64))
            scale = max(float(np.linalg.norm(want.astype(np.float64))), 1e-12)
            assert error / scale <= bound, (level, number, error / scale)
