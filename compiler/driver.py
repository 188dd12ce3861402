"""From functions to tile programs: the pure functions that compile units run.

`compile_function` is bytes to bytes, so that executors can run it anywhere and caches can key it. Units carry no user
locations; an error names an op ordinal, which `located` turns into the user's file and line where the graph is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from compiler.buffers import OutlinedProgram, outline_program
from compiler.codegen.generate import generate
from compiler.diagnostics import DiagnosticError, Loc
from compiler.ir.serialize import load
from compiler.ir.types import Graph, Op
from compiler.isa.encode import pack_function, unpack_function
from compiler.isa.program import Function, Program
from compiler.link import link_program
from compiler.lower.function import ORDINAL_FILE, Signature, lower_function
from compiler.outline import Unit
from compiler.passes.pipeline import run
from compiler.program import StepPlan, StepProgram
from compiler.target import load_target


def compile_function(payload: bytes, options: Mapping[str, Any], target: str) -> bytes:
    """The encoded function of a compile unit (`Unit.payload`) for the machine named `target`.

    Raises: CompileError whose location is an op ordinal (see `located`).
    """
    body = msgpack.unpackb(payload, use_list=False)
    graph = _with_ordinals(load(body["graph"]))
    signature = Signature(parameters=body["parameters"], aliases=body["aliases"])
    function = build_function(graph, signature, options, target)
    return pack_function(function)


def build_function(
    graph: Graph, signature: Signature, options: Mapping[str, Any], target: str
) -> Function:
    """Passes, lowering and tile code of one function graph."""
    machine = load_target(target)
    lowered = lower_function(run(graph), signature)
    regions = [generate(region, lowered.tensors, machine) for region in lowered.regions]
    return Function(
        name=graph.name,
        tensors=lowered.tensors,
        inputs=lowered.inputs,
        outputs=lowered.outputs,
        parameters=lowered.parameters,
        num_registers=lowered.num_registers,
        regions=regions,
        collectives=lowered.collectives,
        scratch_bytes=lowered.scratch_bytes,
        target=target,
    )
