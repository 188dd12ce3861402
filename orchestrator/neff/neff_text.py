"""`shardwright neff dump|diff`: what the engines of a compiled program do, and what changed.

Both print `compiler/neff/listing.py`; `diff` compares the two texts function by function, so that a
renamed function with the same code shows as a rename only.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from shardwright.compiler.isa.program import Engine, Function, Program
from shardwright.compiler.neff.listing import function_lines, program_lines
from shardwright.orchestrator.config.arguments import known_word
from shardwright.orchestrator.neff.neff_files import open_program
from shardwright.orchestrator.terminal.terminal import say

_CONTEXT_LINES = 2
_MAX_LINES = 40  # of one function's difference; the rest is counted


def dump(path: Path, program: str, function: str, engines: Sequence[str]) -> int:
    """Print a program, one function of it, or only some engines' streams."""
    opened = open_program(path, program).program
    wanted = [f for f in opened.functions if function in ("", f.name)]
    if function:
        known_word(function, [f.name for f in opened.functions], "--function")
    else:
        say("\n".join(program_lines(opened)))
    for one in wanted:
        say("\n".join(function_lines(one, opened.locations, [Engine(e) for e in engines])))
    return 0


def diff(first: Path, second: Path, program: str) -> int:
    """Print how two programs differ; 0 when they do the same, 1 when not."""
    a, b = (open_program(path, program).program for path in (first, second))
    lines = list(_compare(list(program_lines(a)), list(program_lines(b))))
    old, new = ({f.name: f for f in p.functions} for p in (a, b))
    for name in old:
        lines += _function_changes(name, (a, old[name]), (b, new.get(name)))
    lines += [f"+ function {name}" for name in new if name not in old]
    say("\n".join(lines) if lines else f"{first} and {second} do the same")
    return 1 if lines else 0


def _function_changes(
    name: str, old: tuple[Program, Function], new: tuple[Program, Function | None]
) -> list[str]:
    """The heading and the changed lines of one function; empty when nothing changed."""
    if new[1] is None:
        return [f"- function {name}"]
    before = list(function_lines(old[1], old[0].locations))
    after = list(function_lines(new[1], new[0].locations))
    changes = _compare(before, after)
    shown = list(islice(changes, _MAX_LINES))
    if not shown:
        return []
    hidden = sum(1 for _ in changes)
    more = [f"... {hidden} more lines"] if hidden else []
    return [f"~ function {name}: {len(before)} lines, now {len(after)}", *shown, *more]


def _compare(before: list[str], after: list[str]) -> Iterator[str]:
    """Changed lines with a little context, without file headings."""
    return islice(difflib.unified_diff(before, after, n=_CONTEXT_LINES, lineterm=""), 2, None)
