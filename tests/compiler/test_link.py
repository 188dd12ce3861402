"""Units compile to functions, functions link to programs: deterministic, located, refused with a
line.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwright.compiler.diagnostics import CompileError, LoadError, Loc
from shardwright.compiler.driver import compile_function, compile_graph
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.isa.encode import encode_program
from shardwright.compiler.isa.program import Program
from shardwright.compiler.linking.link import link
from shardwright.compiler.lower.function import Signature
from shardwright.compiler.outline import outline
from shardwright.compiler.outline.unit import pack_function, read_payload, unpack_function
from shardwright.compiler.program import StepPlan, StepProgram
from tests.support.graphs import layer_stack

TARGET = "trn1n.32xlarge"
STEP = StepProgram(name="step", graph=layer_stack(), inputs=("x", "w"), outputs=("y", "kept"))
PLAN = StepPlan(mesh={"dp_shard": 1}, buffers={}, programs=(STEP,), schedules=(((("step",), 1),),))


def as_bytes(program: Program) -> dict[str, bytes]:
    sections = encode_program(program)
    return {k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in sections.items()}


def test_units_linked_by_hand_equal_the_whole_road() -> None:
    outlined = outline(PLAN)
    compiled = [compile_function(u.payload, TARGET) for u in outlined.functions]
    linked = link(PLAN, outlined, compiled, TARGET)["step"]
    assert as_bytes(linked) == as_bytes(compile_graph(STEP, TARGET))


def test_functions_survive_packing() -> None:
    for unit in outline(PLAN).functions:
        data = compile_function(unit.payload, TARGET)
        assert pack_function(unpack_function(data)) == data
        graph, signature = read_payload(unit.payload)
        assert signature == unit.signature and len(graph.ops) == len(unit.graph.ops)


def test_a_payload_holds_all_of_a_signature() -> None:
    """Registers, outputs that take over inputs, and ranges of integers that masks depend on."""
    (unit, *_) = outline(PLAN).functions
    signature = Signature(parameters=((0, 1, 5),), aliases=((0, 1),), ranges=((1, -3, 9),))
    assert read_payload(replace(unit, signature=signature).payload)[1] == signature


def test_another_format_is_refused() -> None:
    import msgpack

    with pytest.raises(LoadError, match="SW_UNIT_FORMAT"):
        unpack_function(msgpack.packb([99, []]))
    with pytest.raises(LoadError, match=r"SW_UNIT_FORMAT.*makes no sense: TypeError"):
        unpack_function(msgpack.packb(5))
    for rows in ([["regions", "", [1]]], [["regions", "", [-1], b""]], [["r", "u9", [1], b""]]):
        with pytest.raises(LoadError, match=r"SW_UNIT_FORMAT.*sections requires"):
            unpack_function(msgpack.packb([1, rows]))


def test_kernels_point_at_the_users_lines() -> None:
    program = compile_graph(STEP, TARGET)
    assert program.locations == (("model.py", 7, "stack"),)
    locs = {f.name: {k.program.loc for k in f.kernels} for f in program.functions}
    assert locs.pop("copy") == {-1}, "a copy between buffers comes from no op"
    assert locs and all(found == {0} for found in locs.values())
    assert len({f.name for f in program.functions}) == len(program.functions)


def test_code_is_there() -> None:
    program = compile_graph(STEP, TARGET)
    compute = [k for f in program.functions for k in f.kernels if k.program.kind == "compute"]
    assert compute and all(k.body for k in compute)


def test_refusals_reach_the_user_with_file_and_line() -> None:
    b = Builder()
    x = b.op("tanh", b.input((4, 3)))
    b.loc = Loc("model.py", 41)
    graph = b.finish(b.all_slice(x, 0, ("dp_shard",), group_size=2))
    step = StepProgram(name="step", graph=graph, inputs=("x",), outputs=("y",))
    with pytest.raises(CompileError, match=r"model.py:41: error\[NCC_EVRF001\]: all_slice"):
        compile_graph(step, TARGET)
