"""Flags of a command as fields: a file of arguments, or the shell script that gives them.

No shell is run. Lines are split as a shell splits them; assignments of plain values are followed;
what stands in a branch counts as given, and is marked.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from shardwright.orchestrator.config.importers.fields import (
    Field,
    Fields,
    checked,
    unreadable,
)
from shardwright.orchestrator.config.importers.launchers import FLAG, LAUNCHERS, SBATCH, Command

_ASSIGNED = re.compile(r"(?:export\s+|local\s+)?([A-Za-z_]\w*)=([^(].*)?")
_OPENED = re.compile(r"([A-Za-z_]\w*\+?=)?\((?=-|$)|[A-Za-z_]\w*\+?=(?=--)")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^${}]*))?\}|(\w+))")
_STARTS = "|".join(["python[0-9.]*", *map(re.escape, LAUNCHERS)])
_LAUNCHED = re.compile(rf"(?:^|[\s/=])(?:{_STARTS})\s")
_DEPTHS = {"if": 1, "fi": -1, "case": 1, "esac": -1}
_SBATCH = "#SBATCH "
_OF_SLURM = {
    "sbatch.nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "sbatch.ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "sbatch.ntasks_per_node": ("SLURM_NTASKS_PER_NODE",),
}
"""Variables of a job of Slurm, by the option that they have the value of."""
MOST_CHARACTERS = 1000  # of a value (our choice; paths are the longest)


def flag_fields(path: Path, text: str) -> Fields:
    """The flags of a script or of a file of arguments, dashes as underscores. Raises UsageError
    for quotes that do not close, and for a flag that is given twice with different values."""
    found: dict[str, Field] = {}
    values: dict[str, str] = {}
    depth, command = 0, Command()
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith(_SBATCH):
            line, command = line.removeprefix(_SBATCH), Command(SBATCH)
        words = _words(path, number, line)
        depth += _DEPTHS.get(words[0], 0) if words else 0
        _assign(line, values)
        for name, said in command.flags(words):
            value = [_filled(word, values) for word in said]
            field = Field(
                checked(path, name, number), " ".join(value) if value else True, number, depth > 0
            )
            values |= dict.fromkeys(_OF_SLURM.get(name, ()), str(field.value))
            before = found.setdefault(name, field)
            if before.value != field.value and not (before.is_conditional or field.is_conditional):
                raise unreadable(
                    path,
                    number,
                    f"a flag may be given once, got --{name} {field.shown()} after"
                    f" {before.shown()} in line {before.line}",
                    "keep the one that counts",
                )
        if not line.rstrip().endswith("\\"):
            command = Command()
    if not found:
        raise unreadable(path, 0, "a file of arguments requires flags (--num-layers 32), got none")
    return found


def _words(path: Path, number: int, line: str) -> list[str]:
    """The words of a line; quotes that open or close a list of flags over several lines are blanks.
    Words that hold several flags, or a command that starts ranks, are split once more."""
    line = line.rstrip().removesuffix("\\")
    for text in (line, line.replace('"', " "), line.replace("'", " ")):
        try:
            words = shlex.split(text, comments=True)
        except ValueError:
            continue
        bare = map(_bare, words)
        spread = (word.split() if _holds_flags(word) else [word] for word in bare)
        return [word for part in spread for word in part if word]
    raise unreadable(path, number, "a line of a script requires quotes that close, got one open")


def _holds_flags(word: str) -> bool:
    return bool(FLAG.match(word) or _LAUNCHED.search(word))


def _bare(word: str) -> str:
    """A word of a list of flags without what opens or closes the list."""
    if opened := _OPENED.match(word):
        word = word[opened.end() :]
    if word.endswith(")") and "(" not in word:
        word = word[:-1]
    return word.rstrip(";")


def _assign(line: str, values: dict[str, str]) -> None:
    """Keep what a line gives a variable, where that is a plain value."""
    found = _ASSIGNED.fullmatch(line.strip().removesuffix("\\").strip())
    if not found:
        return
    text = (found[2] or "").partition(" #")[0].strip().strip("\"'")
    if not FLAG.search(text):
        values[found[1]] = _filled(text, {k: v for k, v in values.items() if k != found[1]})


def _filled(word: str, values: dict[str, str]) -> str:
    """A word with its variables replaced, as far as they are known."""

    def of(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        return values.get(name, match[0] if default is None else default.strip("\"'"))

    return _VARIABLE.sub(of, word)[:MOST_CHARACTERS]
