"""The parts of a graph compiled, whatever framework it is of: each through the ordinary road, and
the graph divided again where that refuses a node."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from shardwright.compiler.diagnostics import CompileError, ImportRuleError, Loc, UsageError
from shardwright.compiler.frontend.capture import Lowered
from shardwright.compiler.frontend.levels import RefusedError, divided
from shardwright.compiler.surface.resolve import Resolved
from shardwright.orchestrator.compile.part_files import InProcess, part_neff, workdir
from shardwright.orchestrator.saved.asked import Asked

FORMAT = 1
"""Of what is noted in a saved model."""


class PartLike(Protocol):
    """A part; `key` tells it from others of its graph."""

    @property
    def is_compiled(self) -> bool:
        """Whether it becomes a NEFF."""
        ...

    @property
    def key(self) -> object:
        """What tells it from others."""
        ...


S = TypeVar("S")


class Divisible(Protocol[S]):
    """A graph of nodes, which have names or numbers."""

    def split(self, refused: Mapping[Any, str], least: int) -> S:
        """Its parts, but for nodes that are refused; compiled ones have `least` operators."""
        ...

    def module(self, part: Any) -> Lowered:
        """A compiled part as a module. Raises ImportRuleError at a node, RefusedError of some."""
        ...

    def at(self, part: Any, loc: Loc | None) -> Sequence[Any]:
        """The nodes of a part at a place that an error has."""
        ...

    def nothing(self, split: S) -> UsageError:
        """The error of a split without a compiled part."""
        ...


def made(
    graph: Divisible[S], kept: Mapping[Any, str], wanted: Asked, resolved: Resolved
) -> tuple[S, list[bytes]]:
    """(the parts of a graph, the NEFF files of the compiled ones in order); `kept` are nodes that
    are not to be compiled. Where it is only analyzed, parts are imported, and nothing is in their
    files. Raises UsageError where nothing is left to compile, and the
    DiagnosticError of the compiler at no node's place."""
    neffs: dict[object, bytes] = {}  # those of parts that stay as they are are compiled once

    def split(refused: Mapping[Any, str]) -> S:
        found = graph.split({**refused, **kept}, wanted.minimum_segment_size)
        if not compiled(found) and not wanted.analyze:
            raise graph.nothing(found)
        return found

    with workdir(wanted.compiler_workdir) as folder:

        def refusals(part: PartLike) -> Mapping[Any, str]:
            try:
                module = graph.module(part)
                reader = InProcess(module.arguments, module.results)
                if wanted.analyze:
                    reader.read(module.artifact, os.getcwd(), resolved.command.profile)
                    neffs[part.key] = b""
                else:
                    name = f"neff-{len(neffs)}"
                    neffs[part.key] = part_neff(module.artifact, name, resolved, folder, reader)
            except RefusedError as error:
                refused: Mapping[Any, str] = error.nodes
                return refused
            except (ImportRuleError, CompileError) as error:
                nodes = graph.at(part, error.diagnostic.loc)
                if not nodes:
                    raise
                return dict.fromkeys(nodes, f"{error.diagnostic.message} [{error.code}]")
            return {}

        def first(found: S) -> Mapping[Any, str]:
            waiting = (part for part in compiled(found) if part.key not in neffs)
            return next(filter(None, map(refusals, waiting)), {})

        found = divided(split, first)
    return found, [neffs[part.key] for part in compiled(found)]


def compiled(split: Any) -> list[PartLike]:
    """The compiled parts of a split."""
    return [part for part in split.parts if part.is_compiled]


def check_original(name: str, is_saved: bool) -> None:
    """Refuse a model that has NEFF files already. Raises UsageError."""
    if is_saved:
        raise UsageError(
            "SW_USAGE",
            f"save requires a model as its framework wrote it, got {name} with NEFF files inside",
            hint="save the original again, with other flags",
        )


def nothing(name: str, kept: Sequence[tuple[str, str]], hint: str) -> UsageError:
    """The error of a model of which nothing is compiled."""
    shown = dict.fromkeys(f"{operator}: {reason}" for operator, reason in kept)
    given = "; ".join(shown) or "none"
    return UsageError(
        "SW_NO_OPERATORS", f"{name} requires operators that are compiled, got {given}", hint=hint
    )
