"""Steps of the road that somebody may want to see: what every stage and rewrite made, by name.

A recorder is there for a block of code, in this thread alone (`recording`); without one a step
costs a look at two variables. Recording changes nothing that is computed, so it is in no key.
`orchestrator/dump` is the recorder that writes a folder (`--dump-dir`) and says what each name is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from shardwright.compiler.diagnostics import DiagnosticError, Loc

if TYPE_CHECKING:  # who answers from a cache loads no graphs
    from shardwright.compiler.ir.types import Graph, Value

Remark = Callable[["Value"], str]
"""What is said of a value besides its type, for example where it lives."""
Place = Callable[[Loc], Loc]
"""From the location of an op to the user's."""


class Recorder(Protocol):
    """Keeps steps in the order in which they come."""

    def graph(self, name: str, graph: Graph, remark: Remark | None) -> None:
        """The graph that a step made."""

    def text(self, name: str, text: str, kind: str) -> None:
        """Something that is no graph; `kind` is the ending of its file."""

    def inside(self, folder: str, key: str, place: Place | None) -> Recorder | None:
        """The recorder of a part; None for one that is recorded already, which `key` says."""


_RECORDER: ContextVar[Recorder | None] = ContextVar("recorder", default=None)
_CHECKED: ContextVar[bool] = ContextVar("checked", default=False)


def step(name: str, graph: Graph, remark: Remark | None = None) -> Graph:
    """`graph` itself, which step `name` made; recorded where somebody records, and verified there
    and inside of `checked`.

    Raises: CompileError naming the step, for a watched graph that is not valid.
    """
    recorder = _RECORDER.get()
    if recorder is not None:
        recorder.graph(name, graph, remark)
    if is_watched():
        from shardwright.compiler.ir.verify import verify

        with behind(name):
            verify(graph)
    return graph


@contextmanager
def behind(name: str) -> Iterator[None]:
    """What the block refuses, step `name` made."""
    try:
        yield
    except DiagnosticError as error:
        error.add_note(f"after step {name}")
        raise


def note(name: str, make: Callable[[], str], kind: str = "txt") -> None:
    """A text that belongs to this place of the road; made only where somebody records."""
    recorder = _RECORDER.get()
    if recorder is not None:
        with unrecorded():
            text = make()
        recorder.text(name, text, kind)


def is_recorded() -> bool:
    """Whether steps are recorded here."""
    return _RECORDER.get() is not None


def is_watched() -> bool:
    """Whether steps are verified here, which costs as much as making them."""
    return _CHECKED.get() or is_recorded()


@contextmanager
def checked() -> Iterator[None]:
    """Verify the steps of the block, in this thread, and try what rewrites promise."""
    token = _CHECKED.set(True)
    try:
        yield
    finally:
        _CHECKED.reset(token)


@contextmanager
def within(folder: str, key: str = "", place: Place | None = None) -> Iterator[None]:
    """Steps of the block belong to a part of the road: a program, a function. What has the `key` of
    a part that is recorded already is not recorded again.
    """
    recorder = _RECORDER.get()
    with recording(recorder and recorder.inside(folder, key, place)):
        yield


@contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Record the steps of the block, or none of them."""
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


def unrecorded() -> AbstractContextManager[None]:
    """Record nothing of the block."""
    return recording(None)
