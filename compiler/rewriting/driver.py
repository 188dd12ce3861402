"""The driver of graph rewrites: every change of a graph on the road is a `Rewrite` that runs here.

A rewrite is declared once, in the list of its stage, with a name, a line for people, and what has
to hold before and behind it (`specs.py`). Calling it runs it, and what it makes is a step that can
be recorded (`compiler/steps.py`). Where steps are watched, its graphs are verified and its specs
tried, which costs about as much as rewriting; lists (`run`) are verified always. All stages in
order are in `orchestrator/opt/registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar, runtime_checkable

from shardwright.compiler.diagnostics import CompileError
from shardwright.compiler.ir.types import Graph, Op
from shardwright.compiler.ir.verify import verify
from shardwright.compiler.program import StepPlan
from shardwright.compiler.rewriting.specs import Spec
from shardwright.compiler.steps import Remark, behind, is_watched, step, within

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


@runtime_checkable
class HasGraph(Protocol):
    """A graph with what is known about it: where values live, who gave it."""

    @property
    def graph(self) -> Graph:
        """The graph."""


@dataclass(frozen=True, slots=True)
class Rewrite(Generic[S, P, T]):
    """A named rewrite of a graph.

    `run` is given what has the graph, and what it reads besides; it makes something with graphs
    (`graphs_of`), or None where there is nothing to do. `help` says in a line what it does,
    `needs` and `leaves` what holds before and behind it, `keeps` what holds at both; `besides` is
    what `run` reads that a text of the graph does not have, `remark` what is said of each value
    where the step is recorded.
    """

    name: str
    run: Callable[Concatenate[S, P], T]
    help: str
    needs: tuple[Spec, ...] = ()
    leaves: tuple[Spec, ...] = ()
    keeps: tuple[Spec, ...] = ()
    besides: str = ""
    remark: Callable[[T], Remark] | None = None

    def __call__(self, subject: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """What `run` makes of `subject`, as a step.

        Raises: CompileError SW_IR_INVALID, where steps are watched, for a graph that is not valid
        or not as the rewrite says; what `run` raises.
        """
        if not is_watched():
            return self.run(subject, *args, **kwargs)
        for _, graph in graphs_of(subject):
            self.check(graph, "requires", (*self.needs, *self.keeps))
        made = self.run(subject, *args, **kwargs)
        remark = self.remark(made) if self.remark else None
        for folder, graph in graphs_of(made):
            with within(folder) if folder else nullcontext():
                step(self.name, graph, remark)
            self.check(graph, "promises", (*self.leaves, *self.keeps))
        return made

    def given(self, *args: P.args, **kwargs: P.kwargs) -> Rewrite[S, [], T]:
        """The same rewrite with what it reads besides, for a list."""

        def run(subject: S) -> T:
            return self.run(subject, *args, **kwargs)

        ends = (self.needs, self.leaves, self.keeps)
        return Rewrite(self.name, run, self.help, *ends, self.besides, self.remark)

    def check(self, graph: Graph, verb: str, specs: Iterable[Spec]) -> None:
        """Raises CompileError SW_IR_INVALID for the first op that breaks one of `specs`."""
        for spec in specs:
            op = next(iter(spec.breaking(graph)), None)
            if op is not None:
                raise self._broken(graph, verb, spec, op)

    def _broken(self, graph: Graph, verb: str, spec: Spec, op: Op) -> CompileError:
        types = ", ".join(str(value.type) for value in op.results)
        message = f"rewrite {self.name} {verb} {spec.says}, got {op.name} of {types or 'nothing'}"
        hint = "a defect of a rewrite: report it with the graph; a text needs what comes before it"
        return CompileError("SW_IR_INVALID", f"{message} in graph {graph.name}", op.loc, hint)


def graphs_of(made: object) -> Iterator[tuple[str, Graph]]:
    """The graphs in what a rewrite takes or makes, each with the folder of the road it belongs to:
    a graph, what has one, the programs of a step, or what stands first in a tuple.
    """
    match made:
        case Graph():
            yield "", made
        case StepPlan():
            yield from ((f"programs/{p.name}", p.graph) for p in made.programs)
        case (first, *_):
            yield from graphs_of(first)
        case HasGraph():
            yield "", made.graph


def run(graph: Graph, rewrites: Sequence[Rewrite[Graph, ..., Graph]]) -> Graph:
    """`graph` after a list of rewrites, each a step; what one of them promises holds to the end.

    Raises: CompileError SW_IR_INVALID naming the rewrite whose result is not valid, or, where steps
    are watched, breaks a promise.
    """
    typed: set[Op] = set()
    promised: tuple[Spec, ...] = ()
    verify(graph, typed)
    for one in rewrites:
        before, graph = graph, one(graph)
        if graph is not before:
            with behind(one.name):
                verify(graph, typed)
        if is_watched():
            one.check(graph, "has to keep", promised)
            promised += one.leaves + one.keeps
    return graph


def in_programs(
    plan: StepPlan, one: Rewrite[Graph, P, Graph], *args: P.args, **kwargs: P.kwargs
) -> StepPlan:
    """`plan` with the graph of every program rewritten; `plan` itself where none changes."""
    programs = []
    for program in plan.programs:
        with within(f"programs/{program.name}"):
            programs.append(replace(program, graph=one(program.graph, *args, **kwargs)))
    if all(new.graph is old.graph for new, old in zip(programs, plan.programs, strict=True)):
        return plan
    return replace(plan, programs=tuple(programs))
