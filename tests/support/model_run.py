"""Any JAX function compiled as one program for one core, run at both levels, timed.

The road is the command's: lower, import, step passes, compile, one NEFF program. `figures` adds up
what the evaluator says over the calls of the program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.compiler.driver import compile_graph
from shardwright.compiler.frontend.capture import artifact_of
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.isa.program import Call, Program, Repeat
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.options import DEFAULTS, CompileOptions
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.program import StepProgram
from shardwright.compiler.rewriting.driver import run
from shardwright.compiler.timing.evaluate import function_segments
from shardwright.sim_cluster.values.result import distance
from shardwright.sim_cluster.values.run_single import run_single

TARGET = "trn1n.32xlarge"


@dataclass(frozen=True, slots=True)
class CompiledFunction:
    """A function with example arguments, its graph and its program."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    graph: Graph
    program: Program

    def run(self, level: str) -> list[np.ndarray]:
        """The flat results at a level."""
        leaves = [np.asarray(x) for x in jax.tree.leaves(self.args)]
        named = {f"arg{i}": x for i, x in enumerate(leaves)}
        results = run_single(self.program, named, level)
        return [results[n] for n in self.program.outputs]

    def expected(self) -> list[np.ndarray]:
        """What JAX gives, flat."""
        return jax_results(self.fn, self.args)


def jax_results(fn: Callable[..., Any], args: Sequence[Any]) -> list[np.ndarray]:
    """What JAX computes with its own settings, flat."""
    return [np.asarray(x) for x in jax.tree.leaves(jax.jit(fn)(*args))]


def compile_function(
    fn: Callable[..., Any],
    args: Sequence[Any],
    options: CompileOptions = DEFAULTS,
    target: str = TARGET,
) -> CompiledFunction:
    """`fn` for the shapes of `args`. Raises the DiagnosticError of the stage that refuses."""
    args = jax.tree.map(jnp.asarray, tuple(args))
    traced = jax.jit(fn, keep_unused=True).trace(*args)
    graph = run(import_module(artifact_of(traced)), step_passes(options))
    step = StepProgram(
        name="main",
        graph=graph,
        inputs=tuple(f"arg{i}" for i in range(len(graph.inputs))),
        outputs=tuple(f"out{i}" for i in range(len(graph.outputs))),
    )
    return CompiledFunction(fn, args, graph, compile_graph(step, target, options))


def worst_distance(given: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    """The largest error of any leaf (docs/numerics.md)."""
    assert [a.shape for a in given] == [b.shape for b in wanted]
    return max(distance(a, b) for a, b in zip(given, wanted, strict=True))


@dataclass(frozen=True, slots=True)
class Figures:
    """Totals of one run of a program. `ideal_bytes`: every argument read and every result written
    once.
    """

    time_ps: int
    busy_ps: dict[str, int]
    hbm_bytes: int
    ideal_bytes: int
    tensor_use: float  # useful matmul time at the engine's peak over the time
    instructions: int


def figures(compiled: CompiledFunction) -> Figures:
    """What the evaluator says about a program, calls and repeats counted."""
    program = compiled.program
    target = load_target(program.target)
    calls = Counter[int]()
    _count(program.steps, 1, calls)
    time_ps = hbm_bytes = 0
    busy = Counter[str]()
    for number, times in calls.items():
        for segment in function_segments(program.functions[number], target):
            time_ps += times * segment.duration_ps
            hbm_bytes += times * segment.hbm_bytes
            for engine, ps in segment.busy_ps.items():
                busy[engine] += times * ps
    values = (*compiled.graph.inputs, *compiled.graph.outputs)
    flops = _matmul_flops(compiled.graph)
    peak = target.core.peak_bf16_flops_per_s
    return Figures(
        time_ps=time_ps,
        busy_ps=dict(busy),
        hbm_bytes=hbm_bytes,
        ideal_bytes=sum(v.type.num_bytes for v in values),
        tensor_use=flops / peak / (time_ps / 1e12) if time_ps else 0.0,
        instructions=sum(len(k.body) for f in program.functions for k in f.kernels),
    )


def _count(steps: Sequence[Call | Repeat], times: int, calls: Counter[int]) -> None:
    for step in steps:
        if isinstance(step, Call):
            calls[step.function] += times
        else:
            _count(step.steps, times * step.trip, calls)


def _matmul_flops(graph: Graph) -> int:
    """Flops of the contractions, loops counted by their trips."""
    from shardwright.compiler.ir.opdef import OPS

    total = 0
    for op in graph.ops:
        if op.name in ("dot_general", "convolution"):
            total += OPS[op.name].flops(op)
        trips = op.attrs.trip if op.name == "loop" else 1
        total += sum(trips * _matmul_flops(region) for region in op.regions)
    return total
