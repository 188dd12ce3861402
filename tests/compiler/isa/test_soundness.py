"""A function or program with one thing in it that no compiler makes is refused when it is read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.decode import decode_program
from shardwright.compiler.isa.encode import encode_program
from shardwright.compiler.isa.kernel import Affine, View
from shardwright.compiler.isa.program import (
    NO_PLACE,
    Call,
    Engine,
    Function,
    Instr,
    Loop,
    Program,
    ProgramBuffer,
    Repeat,
)
from shardwright.compiler.isa.soundness import check_function
from shardwright.compiler.isa.tokens import check_tokens
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.support.schema import MOST
from tests.support.model_run import compile_function


@pytest.fixture(scope="module")
def program() -> Program:
    def layers(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w) * 2.0 + jnp.arange(16.0)

    args = (np.ones((40, 24), np.float32), np.ones((24, 16), np.float32))
    return compile_function(layers, args, CompileOptions(), "trn1n.32xlarge").program


def read(program: Program) -> Program:
    sections = encode_program(program)
    return decode_program(lambda name: sections[name], sections)


def instructions(function: Function) -> list[Instr]:
    """Of the first kernel, loops opened."""

    def inside(body: list[Instr | Loop]) -> list[Instr]:
        return [i for x in body for i in ([x] if isinstance(x, Instr) else inside(x.body))]

    return inside(function.kernels[0].body)


def node(function: Function, op: str, **changes: Any) -> None:
    """Change the first node of that op."""
    kernel = function.kernels[0]
    nodes = list(kernel.program.nodes)
    at = next(n for n, found in enumerate(nodes) if found.op == op)
    nodes[at] = replace(nodes[at], **changes)
    kernel.program = replace(kernel.program, nodes=tuple(nodes))


def instr(function: Function, name: str, **changes: Any) -> None:
    found = next(i for i in instructions(function) if i.opcode == name)
    for name, value in changes.items():
        setattr(found, name, value)


def tensor(function: Function, number: int, **changes: Any) -> None:
    function.tensors[number] = replace(function.tensors[number], **changes)


NOWHERE = View(99, Affine(), (0, 0, 0))
DAMAGES: dict[str, tuple[Callable[[Function], None], str]] = {
    "a tensor that is not there": (lambda f: node(f, "load", attrs={"view": NOWHERE}), "views"),
    "a stride too few": (lambda f: node(f, "load", attrs={"view": View(0, Affine(), (1,))}), "str"),
    "no view": (lambda f: node(f, "load", attrs={}), "requires view"),
    "an attribute of another type": (lambda f: node(f, "load", attrs={"view": 3}), "view of a"),
    "an attribute nobody knows": (lambda f: node(f, "tanh", attrs={"fast": 1}), "has no 'fast'"),
    "a value of a later node": (lambda f: node(f, "tanh", inputs=(10**6,)), "inputs require"),
    "one input too many": (lambda f: node(f, "store", inputs=(0, 0)), r"\(1,\) inputs"),
    "iteration dims out of order": (lambda f: node(f, "tanh", iter_dims=(1, 0)), "ascending"),
    "an opcode": (lambda f: instr(f, "matmul", opcode="matmull"), "no such instruction"),
    "a source too few": (lambda f: instr(f, "matmul", srcs=()), "sources"),
    "no destination": (lambda f: instr(f, "matmul", dst=None), "destination"),
    "a semaphore": (lambda f: instr(f, "matmul", waits=(77,)), "semaphore 77"),
    "a border": (lambda f: instr(f, "matmul", borders=(3,)), "borders"),
    "a register": (lambda f: instr(f, "matmul", attrs={"zero_when": (999,)}), "registers"),
    "a kind of tensor": (lambda f: tensor(f, 0, kind="outputs"), "kind requires one of"),
    "data of no constant": (lambda f: tensor(f, 0, data=b"1234"), "no constant"),
    "a size without end": (lambda f: tensor(f, 0, shape=(2**30, 2**30)), f"at most {MOST}"),
    "an alias of itself": (lambda f: tensor(f, 0, alias=0), "memory of an input"),
    "a parameter": (lambda f: setattr(f, "parameters", (999,)), "parameters require"),
    "tokens without end": (lambda f: setattr(f.kernels[0], "tokens", (2**40,)), "tokens"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_one_thing_wrong_in_a_function(name: str, program: Program) -> None:
    damage, words = DAMAGES[name]
    function = copy.deepcopy(program.functions[0])
    check_function(function)
    damage(function)
    with pytest.raises(ValueError, match=words):
        check_function(function)


CALLS: dict[str, tuple[Callable[[Call], Any], str]] = {
    "a function": (lambda c: replace(c, function=7), "called functions require"),
    "a negative function": (lambda c: replace(c, function=-1), "a step requires"),
    "a buffer too few": (lambda c: replace(c, inputs=c.inputs[:1]), "buffers, got 1"),
    "a buffer of another size": (lambda c: replace(c, inputs=c.inputs[::-1]), "bytes for"),
    "a parameter nobody asked for": (lambda c: replace(c, parameters=(Affine(1),)), "parameters"),
    "a zone behind the arena": (lambda c: replace(c, scratch=MOST), "bytes of scratch from byte"),
    "a zone in front of it": (lambda c: replace(c, scratch=-1), "a step requires"),
    "repeats without end": (lambda c: nested(c, 40), "32 deep"),
    "a trip count below zero": (lambda c: Repeat(0, -1, (c,)), "a step requires"),
}


def nested(step: Any, depth: int) -> Any:
    return step if not depth else Repeat(0, 1, (nested(step, depth - 1),))


@pytest.mark.parametrize("name", CALLS)
def test_one_thing_wrong_in_the_calls(name: str, program: Program) -> None:
    damage, words = CALLS[name]
    changed = replace(program, steps=(damage(program.steps[0]), *program.steps[1:]))
    with pytest.raises(ValueError, match=words):
        read(changed)


def test_an_arena_buffer_without_a_place_is_one_that_no_call_names(program: Program) -> None:
    nowhere = ProgramBuffer("", (4,), DType.F32, "arena", NO_PLACE)
    assert read(replace(program, buffers=[*program.buffers, nowhere])).buffers[-1] == nowhere
    unplaced = [replace(b, kind="arena", offset_bytes=NO_PLACE) for b in program.buffers]
    with pytest.raises(ValueError, match="has no place in the arena"):
        read(replace(program, buffers=unplaced, inputs=(), outputs=()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"outputs": ("nobody",)}, "no buffer is named"),
        ({"inputs": (3,)}, "inputs requires a list"),
        ({"arena_bytes": -1}, "arena_bytes requires"),
        ({"arena_bytes": 2**60}, "arena_bytes requires"),
        ({"locations": (("a.py", -3, ""),)}, "locations requires"),
        ({"metadata": {"x": b"bytes"}}, "metadata requires"),
    ],
)
def test_one_thing_wrong_in_the_head(change: dict[str, Any], words: str, program: Program) -> None:
    read(program)
    with pytest.raises(ValueError, match=words):
        read(replace(program, **change))


def test_loops_of_any_length_take_and_give_tokens(program: Program) -> None:
    kernel = copy.deepcopy(program.functions[0].kernels[0])
    take = Instr("wait", Engine.VECTOR, None, waits=(0,))
    give = Instr("signal", Engine.TENSOR, None, signals=(0,))
    for trip, tokens, fits in ((10**9, 1, True), (10**9, 0, False)):
        kernel.body, kernel.tokens = [Loop(0, trip, [take, give])], (tokens,)
        if fits:
            check_tokens(kernel)
        else:
            with pytest.raises(ValueError, match="nothing signals"):
                check_tokens(kernel)
    kernel.body, kernel.tokens = [Loop(0, 10**9, [give])], (0,)
    with pytest.raises(ValueError, match="as it was found"):
        check_tokens(kernel)
