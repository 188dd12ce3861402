"""Reading a model file in a child process, so that no file can end this one.

XLA and MLIR are native code: a damaged HLO proto can crash them, and a malicious one keep them busy
for ever. The child imports one file after another and answers with serialised graphs; when it dies
or takes too long, the file is refused with a code, the next one gets a new child. This process
never loads jaxlib.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any, Self

import msgpack

from shardwright.compiler import diagnostics
from shardwright.compiler.diagnostics import (
    Diagnostic,
    DiagnosticError,
    ImportRuleError,
    InternalError,
    Loc,
)
from shardwright.compiler.frontend.detect import AS_IT_IS, Asked, Module
from shardwright.compiler.frontend.locations import MODULE_FILE
from shardwright.compiler.frontend.rules.process_groups import MeshAxes
from shardwright.compiler.frontend.shardings import ModuleShardings
from shardwright.compiler.frontend.stablehlo import Facts
from shardwright.compiler.ir.ops import ShardingConstraintAttrs
from shardwright.compiler.ir.serialize import dump, load
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.support.child import Child, ending, serve
from shardwright.compiler.surface.releases import Profile

TIMEOUT_S = 1800.0
_STDERR_TAIL = 2000
_NO_TEXT = "conversion error"
"""What jaxlib's bindings say of a name or text that is not UTF-8, as any part of it is read."""


class Isolated:
    """A child that runs a module of ours, and what becomes of one that does not answer. It starts
    with the first request, and anew after one that ended it. Use as a context manager.

    `native` is the code that may end it, `model` what it was given, for messages.
    """

    def __init__(self, module: str, native: str, model: str, timeout_s: float = TIMEOUT_S) -> None:
        self._module, self._native, self._model = module, native, model
        self._timeout_s = timeout_s
        self._child: Child | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ask(self, request: Any, name: str = MODULE_FILE) -> dict[str, Any]:
        """The answer to a request; `name` stands for the model file in locations.

        Raises: the error of the answer; ImportRuleError SW_READER_CRASH or SW_READER_TIMEOUT when
        there was none.
        """
        child = self._start()
        try:
            data = child.ask(msgpack.packb(request), self._timeout_s)
            answer: dict[str, Any] = msgpack.unpackb(data, use_list=False)
        except TimeoutError:
            doing = child.doing()
            self.stop()
            raise ImportRuleError(
                "SW_READER_TIMEOUT",
                f"reading the {self._model} requires at most {self._timeout_s:g} s, got no"
                f" answer{doing}",
                hint=f"simplify the {self._model}, or report it with the file",
            ) from None
        except EOFError:
            error = self._crashed(*child.ended())
            self.stop()
            raise error from None
        if "error" in answer:
            raise _error_of(answer["error"], name, answer["notes"])
        return answer

    def _crashed(self, status: int, said: str) -> ImportRuleError:
        """What to tell about a child that ended with a status and its last words."""
        advice = f"the {self._model} is damaged or made by another release: dump it again"
        if status == -signal.SIGKILL:
            advice = "the host ran out of memory or somebody killed the reader: try again"
        lines = said[-_STDERR_TAIL:].splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ImportRuleError(
            "SW_READER_CRASH",
            f"{self._native} ended with {ending(status)} while it read the {self._model}"
            + (f": {last}" if last else ""),
            hint=advice,
        )

    def _start(self) -> Child:
        if self._child is None:
            self._child = Child([sys.executable, "-m", self._module])
        return self._child

    def stop(self) -> None:
        """End the child; the next request starts another."""
        if self._child is not None:
            self._child.end()
        self._child = None


class Reader(Isolated):
    """A child that imports model files. Use as a context manager."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__("shardwright.compiler.frontend.isolated", "XLA", "module", timeout_s)

    def read(
        self,
        data: bytes,
        base_dir: str,
        profile: Profile,
        name: str = MODULE_FILE,
        asked: Asked = AS_IT_IS,
    ) -> tuple[Graph, Module]:
        """The graph of a file's content under the rules of a release, and what the file held;
        `name` stands for the file in locations of its own lines, `asked` is that of
        `read_module`.

        Raises: the error of the import, at the user's line; ImportRuleError SW_READER_CRASH or
        SW_READER_TIMEOUT when native code did not answer.
        """
        request = [data, base_dir, profile.version, astuple(asked)]
        return read_answer(self.ask(request, name), name)


def read_answer(answer: Mapping[str, Any], name: str) -> tuple[Graph, Module]:
    """What a child says of a file called `name`."""
    aliases, mesh, rows, shardings = answer["facts"]
    regions = tuple(map(load, answer["regions"]))
    findings = tuple(
        Diagnostic(code, message, _loc_of(loc, name), hint, severity)
        for code, message, loc, hint, severity in rows
    )
    facts = Facts(aliases, mesh, findings, shardings and _shardings_of(*shardings), regions)
    form = answer["form"], answer["stablehlo"], facts, answer["arguments"], answer["results"]
    return load(answer["graph"]), Module(*form)


def _shardings_of(meshes: tuple[MeshAxes, ...], *sides: tuple[Any, ...]) -> ModuleShardings:
    """Shardings from their fields."""
    given = [tuple(s and ShardingConstraintAttrs(*s) for s in side) for side in sides]
    return ModuleShardings(meshes, *given)


def _loc_of(row: tuple[str, int, str] | None, name: str) -> Loc | None:
    """A location from its fields; `name` stands for the file in places of its own lines."""
    if row and row[0] == MODULE_FILE:
        row = (name, *row[1:])
    return Loc(*row) if row else None


def _error_of(row: tuple[Any, ...], name: str, notes: Sequence[str]) -> DiagnosticError:
    kind, code, message, loc, hint, _ = row
    error: DiagnosticError = getattr(diagnostics, kind)(code, message, _loc_of(loc, name), hint)
    for note in notes:
        error.add_note(note)
    return error


def _answer(data: bytes, base_dir: str, version: str, asked: tuple[Any, ...]) -> dict[str, Any]:
    from shardwright.compiler.frontend.detect import import_file
    from shardwright.compiler.frontend.rules.restrictions import checks_for

    given, profile = Asked(*asked), Profile(version)
    checks = checks_for(profile, given.generation, given.fp8_as_e4m3)
    try:
        known = profile.has("constant_index_check")
        graph, module = import_file(data, base_dir, checks, given, known)
        return {
            "graph": dump(graph, with_locs=True),
            "form": module.form,
            "stablehlo": module.stablehlo,
            "arguments": module.arguments,
            "results": module.results,
            "facts": astuple(replace(module.facts, regions=()))[:-1],
            "regions": [dump(region, with_locs=True) for region in module.facts.regions],
        }
    except Exception as error:
        if not isinstance(error, DiagnosticError) and _NO_TEXT in str(error):
            refusal = ImportRuleError(
                "SW_STABLEHLO_PARSE",
                "the module requires names and texts in UTF-8, got other bytes",
                hint="correct the module, or dump it again with the framework that made it",
            )
            return error_answer(refusal)
        return error_answer(error)


def error_answer(error: BaseException) -> dict[str, Any]:
    """What a child answers where something was raised; what is no error of ours is a defect."""
    if isinstance(error, DiagnosticError):
        return {"error": _row_of(error), "notes": getattr(error, "__notes__", [])}
    trace = "".join(traceback.format_exception(error))
    return {"error": _row_of(InternalError.of(error, trace)), "notes": [trace]}


def _row_of(error: DiagnosticError) -> tuple[Any, ...]:
    return type(error).__name__, *astuple(error.diagnostic)


if __name__ == "__main__":
    serve(lambda request: bytes(msgpack.packb(_answer(*msgpack.unpackb(request)))))
