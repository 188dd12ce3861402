"""`shardwright opt FILE --pass NAME[,NAME]`: one pass, or some, on the text of a graph.

Text in, text out, the verifier run behind every pass. What a pass refuses is the error of the
command; what nobody meant to raise is a defect of the pass, and a coded error too.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from shardwright.compiler.diagnostics import DiagnosticError, InternalError, UsageError
from shardwright.compiler.ir.parse import parse
from shardwright.compiler.ir.text import to_text
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.passes.pipeline import Pass
from shardwright.compiler.rewriting.driver import run as run_passes
from shardwright.compiler.steps import checked
from shardwright.compiler.support.files import read_regular
from shardwright.orchestrator.opt.registry import listed, passes_of
from shardwright.orchestrator.terminal import outputs
from shardwright.orchestrator.terminal.terminal import say

STDIN = "-"
_MOST_BYTES = 2**28  # of a text (our choice): a file that is larger was not written by a person


def run(as_list: bool, file: str, asked: str, output: Path | None) -> int:
    """Print every pass, or run those asked for and print what they made. Raises DiagnosticError."""
    if as_list:
        say(listed(), end="")
        return 0
    if not asked:
        raise UsageError("SW_USAGE", "opt requires --pass NAME[,NAME], got none", hint="opt --list")
    passes = passes_of(asked)
    is_stdin = file in ("", STDIN)
    graph = parse(_text(STDIN if is_stdin else file), "<stdin>" if is_stdin else file)
    made = to_text(rewritten(graph, passes), with_locs=True)
    if output is None:
        say(made, end="")
    else:
        outputs.write(output, made, "--output")
    return 0


def rewritten(graph: Graph, passes: Sequence[Pass]) -> Graph:
    """`graph` after the passes, verified before the first and behind each, with what they require
    and promise. Raises DiagnosticError, also where a pass has a defect.
    """
    try:
        with checked():
            return run_passes(graph, passes)
    except DiagnosticError:
        raise
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        raise InternalError.of(error, trace) from error


def _text(file: str) -> str:
    """The text of a file. Raises UsageError for one that cannot be read, or is no text."""
    try:
        data = sys.stdin.buffer.read() if file == STDIN else read_regular(Path(file), _MOST_BYTES)
        return data.decode()
    except OSError as error:
        raise UsageError(
            "SW_USAGE", f"opt requires a file with the text of a graph, got {file}: {error}"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError("SW_USAGE", f"opt requires text in UTF-8, got {file}: {error}") from error
