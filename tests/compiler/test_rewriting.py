"""The driver of graph rewrites: it names, records and verifies what it runs, and tries what that
promises."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from shardwright.compiler.diagnostics import CompileError, Loc
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.ir.ops import AllReduceAttrs, AxisIndexAttrs, ReduceAttrs
from shardwright.compiler.ir.types import Graph, Op, Value, tensor_type
from shardwright.compiler.lower.rewrites import LOWERABLE, NO_COMPOSITES, NO_WIDE_INTEGERS
from shardwright.compiler.program import StepPlan, StepProgram
from shardwright.compiler.rewriting import specs
from shardwright.compiler.rewriting.driver import Rewrite, in_programs, run
from shardwright.compiler.steps import Place, Recorder, Remark, checked, recording
from tests.support.outside_driver import outside_driver

NO_TANH = specs.without("tanh", ("tanh",))


def graph_of(*names: str) -> Graph:
    """A chain of elementwise ops of one operand."""
    b = Builder(loc=Loc("net.py", 7))
    value = b.input((4,))
    for name in names:
        value = b.op(name, value)
    return b.finish(value)


def same(graph: Graph) -> Graph:
    return graph


def exponential(graph: Graph) -> Graph:
    return graph_of("exponential")


def tanh(graph: Graph) -> Graph:
    return graph_of("tanh")


def nothing(graph: Graph) -> Graph | None:
    return None


def broken(graph: Graph) -> Graph:
    return Graph(graph.inputs, graph.ops[1:], graph.outputs, graph.name)


class Kept(Recorder):
    """Steps by folder and name."""

    def __init__(self, steps: list[str] | None = None, folder: str = "") -> None:
        self.steps = [] if steps is None else steps
        self.folder = folder

    def graph(self, name: str, graph: Graph, remark: Remark | None) -> None:
        said = remark(graph.outputs[0]) if remark else ""
        self.steps.append(f"{self.folder}{name}{said}")

    def text(self, name: str, text: str, kind: str) -> None:
        raise AssertionError(name)

    def inside(self, folder: str, key: str, place: Place | None) -> Recorder:
        return Kept(self.steps, f"{folder}/")


CLEAN = Rewrite("clean", exponential, "", leaves=(NO_TANH,))
DEFECTS = {
    "promise": ((Rewrite("leave", same, "", leaves=(NO_TANH,)),), "leave promises no tanh, got"),
    "need": ((Rewrite("ask", same, "", needs=(NO_TANH,)),), "ask requires no tanh, got tanh of"),
    "both ends": ((Rewrite("both", same, "", keeps=(NO_TANH,)),), "both requires no tanh"),
    "later": ((CLEAN, Rewrite("undo", tanh, "")), "undo has to keep no tanh, got tanh of"),
}


@pytest.mark.parametrize(("rewrites", "said"), DEFECTS.values(), ids=DEFECTS)
def test_a_broken_promise_names_its_rewrite(
    rewrites: tuple[Rewrite[Graph, ..., Graph], ...], said: str
) -> None:
    graph = graph_of("tanh")
    run(graph, rewrites)  # nobody looks
    with pytest.raises(CompileError) as caught, checked():
        run(graph, rewrites)
    assert caught.value.code == "SW_IR_INVALID" and f"rewrite {said}" in str(caught.value)
    assert caught.value.loc == Loc("net.py", 7)


def test_a_rewrite_whose_graph_is_not_valid_is_named() -> None:
    one = Rewrite("lose", broken, "")
    graph = graph_of("tanh", "exponential")
    one(graph)  # nobody looks
    with pytest.raises(CompileError, match="SW_IR_INVALID") as caught, checked():
        one(graph)
    assert caught.value.__notes__ == ["after step lose"]
    with pytest.raises(CompileError, match="SW_IR_INVALID") as caught:
        run(graph, (one,))  # lists are verified always
    assert caught.value.__notes__ == ["after step lose"]


@dataclass(frozen=True)
class Located:
    """A graph with something known about it."""

    graph: Graph
    where: str


def test_steps_are_recorded_whatever_has_the_graph() -> None:
    def located(graph: Graph, where: str) -> Located:
        return Located(graph, where)

    def noted(one: Located) -> tuple[Graph, str]:
        return one.graph, one.where

    def remark(one: Located) -> Remark:
        return lambda value: f" {one.where} {value.type}"

    kept = Kept()
    with recording(kept):
        found = Rewrite("located", located, "", remark=remark)(graph_of("tanh"), "here")
        assert Rewrite("noted", noted, "")(found) == (found.graph, "here")
        assert Rewrite("nothing", nothing, "")(found.graph) is None
        run(found.graph, (CLEAN,))
    assert kept.steps == ["located here tensor<4xf32>", "noted", "clean"]


def test_context_is_bound_for_a_list() -> None:
    def repeated(graph: Graph, name: str, times: int = 1) -> Graph:
        return graph_of(*[name] * times)

    bound = Rewrite("repeated", repeated, "", leaves=(NO_TANH,)).given("tanh", times=2)
    assert [op.name for op in run(graph_of("negate"), (bound,)).ops] == ["tanh", "tanh"]
    with pytest.raises(CompileError, match="repeated promises no tanh"), checked():
        bound(graph_of("negate"))


def test_programs_are_rewritten_each_in_its_folder() -> None:
    names = ("forward", "backward")
    programs = tuple(
        StepProgram(name=name, graph=graph_of("tanh"), inputs=("x",), outputs=("y",))
        for name in names
    )
    plan = StepPlan(mesh={}, buffers={}, programs=programs, schedules=())
    kept = Kept()
    with recording(kept):
        assert in_programs(plan, Rewrite("same", same, "")) is plan
        changed = in_programs(plan, CLEAN)
        assert Rewrite("whole", lambda plan: plan, "")(changed) is changed
    assert [p.graph.ops[0].name for p in changed.programs] == ["exponential"] * 2
    steps = [f"programs/{p}/{step}" for step in ("same", "clean", "whole") for p in names]
    assert kept.steps == steps


def loop() -> Graph:
    b = Builder()
    return b.finish(*b.loop(3, [b.input((4,))], lambda inside, _, carries: carries))


def made(name: str, *, dtype: DType = DType.F32, attrs: object = None) -> Callable[[], Graph]:
    def make() -> Graph:
        b = Builder()
        return b.finish(b.op(name, b.input((4, 4), dtype), attrs=attrs))

    return make


def rank() -> Graph:
    op = Op("axis_index", (), (Value(tensor_type((), DType.I32)),), AxisIndexAttrs(("tp",)))
    return Graph((), (op,), op.results)


BROKEN = [
    (specs.LOOP_FREE, loop),
    (specs.NO_BARRIERS, made("optimization_barrier")),
    (specs.NO_DOUBLES, made("tanh", dtype=DType.F64)),
    (specs.NO_RANKS, rank),
    (specs.HAVE_GROUPS, made("all_reduce", attrs=AllReduceAttrs(("tp",)))),
    (NO_WIDE_INTEGERS, made("negate", dtype=DType.I64)),
    (NO_COMPOSITES, made("tan")),
    (LOWERABLE, rank),
]


@pytest.mark.parametrize(("spec", "make"), BROKEN, ids=lambda x: getattr(x, "says", ""))
def test_a_spec_finds_what_breaks_it(spec: specs.Spec, make: Callable[[], Graph]) -> None:
    graph = make()
    assert list(spec.breaking(graph)) == [graph.ops[-1]]
    assert not list(spec.breaking(made("reduce", attrs=ReduceAttrs("add", (0,)))()))


RULES = """
from shardwright.compiler.ir.rewrite import with_ops
from shardwright.compiler.rewriting.driver import Rewrite

def helped(graph: Graph) -> Graph:
    return _Level().run(graph)

class _Level:
    def run(self, graph: Graph) -> Graph:
        return with_ops(graph, ())

HELPED = Rewrite("helped", helped, "")
"""
ROAD = """
from rules import HELPED, helped
from shardwright.compiler.ir import rewrite

def driven(graph: Graph) -> Graph:
    return HELPED(graph)

def by_hand(one):
    return helped(one)

def rebuilt(one):
    return rewrite.with_ops(one, ())

def mapped(graph: Graph) -> tuple[Graph, int]:
    return Graph((), (), ()), 1
"""


def test_what_the_driver_does_not_run_is_found() -> None:
    trees = {"rules": ast.parse(RULES), "road": ast.parse(ROAD)}
    assert outside_driver(trees) == [("road", n) for n in ("by_hand", "rebuilt", "mapped")]
    assert outside_driver(trees, ("road",)) == []
