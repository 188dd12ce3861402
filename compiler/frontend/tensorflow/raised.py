"""What the user's code, TensorFlow and XLA raise in the child, as one error at the user's line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from shardwright.compiler.diagnostics import DiagnosticError, ImportRuleError, Loc, UsageError
from shardwright.compiler.frontend.locations import LocationReader
from shardwright.compiler.frontend.tensorflow.places import Place, place_of
from shardwright.compiler.frontend.user_code import called

_LINE = re.compile(r'File "([^"]+)", line (\d+)')
_NODE = re.compile(r"\{\{(?:function_)?node ([^}]*\}\}\{\{node )?([^}]+)\}\}")
_UNSUPPORTED = re.compile(r"XLA_\w+: (\w+) \(")
_LIBRARIES = re.compile(r"[/\\](?:site|dist)-packages[/\\]")


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Say where in the user's code something was raised; functions that TensorFlow rewrote say the
    lines of what they were in their message.

    Raises UsageError.
    """
    try:
        with called(what):
            yield
    except UsageError as error:
        text = str(error.__cause__ or "")
        if error.code != "SW_TASK_RAISED" or not (lines := _users_lines(text)):
            raise
        d, kind = error.diagnostic, type(error.__cause__).__name__
        said = _last(text).removeprefix(f"{kind}: ")
        raise UsageError(d.code, f"{what} raised {kind}: {said}", lines[-1], d.hint) from error


def _users_lines(text: str) -> list[Loc]:
    """Lines of the user's that a message names, the outermost first."""
    reader = LocationReader()
    found = [(m[1], int(m[2])) for m in _LINE.finditer(text)]
    return [reader.frame(f, n) for f, n in found if not _LIBRARIES.search(f) and f[:1] != "<"]


def _last(text: str) -> str:
    """What a message of a rewritten function says behind the lines."""
    parts = [part.strip() for part in text.strip().split("\n\n") if part.strip()]
    spoken = [p for p in parts if not p.startswith(("in user code", "File ", "Call arguments"))]
    words = " ".join((spoken or parts)[0].split()) if parts else ""
    return words[:300]


def of_xla(error: Exception, places: Mapping[str, Place]) -> DiagnosticError:
    """What XLA says of a function that it does not take, at the line of the operator."""
    text = str(error)
    node = _NODE.search(text)
    place = _inner(node[2], places) if node else None
    loc = LocationReader().frame(*place) if place else None
    unsupported = _UNSUPPORTED.findall(text)
    if unsupported or "No registered" in text:
        shown = ", ".join(dict.fromkeys(unsupported)) or (node[2] if node else "another")
        return ImportRuleError(
            "SW_TF_OPERATOR",
            f"a function requires operators that XLA has, got {shown}",
            loc,
            "no engine has strings, tables or calls of Python: do that part before the function,"
            " where the data is read",
        )
    if "compile-time constant" in text or "dynamic" in text.lower():
        return ImportRuleError(
            "NCC_EMOD025",
            f"shapes require to be known while the function is compiled, got {_first(text)}",
            loc,
            "take a fixed number of rows: tf.where or tf.math.top_k in place of tf.boolean_mask",
        )
    return ImportRuleError(
        "SW_TF_OPERATOR",
        f"a function requires to be compiled by XLA, got {_first(text)}",
        loc,
        "tf.function(..., jit_compile=True) says the same of it",
    )


def _inner(node: str, places: Mapping[str, Place]) -> Place | None:
    """The place of an operator that may be one of a function that is called, without its call."""
    called = (place for name, place in places.items() if name.endswith(f"/{node}"))
    return place_of(node, places) or next(called, None)


def _first(text: str) -> str:
    """The first sentence of what XLA says."""
    words = text.replace("Failed getting HLO text: '", "").strip().splitlines()
    return words[0][:300] if words else "nothing"
