"""Command-line text of `compile` -> flags as given: spellings made equal, then argparse.

Global flags may stand before the verb; a value may follow its flag or an equals sign, and may begin
with a dash; `-` and `_` are one, long names have no case. What the flags mean is decided in
`compiler/surface/resolve.py`.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.surface.flags import FLAGS, Effect, Flag, Kind, canonical_name, find
from shardwright.compiler.surface.releases import OWN
from shardwright.compiler.surface.resolve import Given
from shardwright.orchestrator.config.arguments import Parser, with_values

ENVIRONMENT = "NEURON_CC_FLAGS"
PLATFORM = "NEURON_PLATFORM_TARGET_OVERRIDE"
GENERATIONS = {"gen2": "trn1", "gen3": "trn2", "gen4": "trn3"}
"""Other names that the variable has for machines (page on environment variables)."""


class FlagParser(Parser):
    """The parser of the compiler's flags, which stand in an environment variable as well."""

    lists = "`shardwright compile --help` lists the flags"


class _Keep(argparse.Action):
    """Append (flag, value) to the list of what was given, in order."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        flag = find(option_string or "")
        assert flag is not None
        value = values if isinstance(values, str) else ""
        namespace.given = [*namespace.given, Given(flag, value, option_string or "")]


def parser(prog: str) -> FlagParser:
    """The parser of `compile`: one or several files, and every flag of the table."""
    made = FlagParser(
        prog=prog,
        allow_abbrev=False,
        description="Compile HLO or StableHLO for one NeuronCore. Takes neuronx-cc's flags.",
    )
    made.add_argument(
        "files", nargs="*", metavar="FILE", help="HLO, StableHLO, jax.export or torch.export file"
    )
    made.set_defaults(given=[])
    for flag in FLAGS:
        names = [*flag.aliases, f"--{canonical_name(flag.name)}"]
        nargs = {"nargs": 0} if flag.kind is Kind.SWITCH else {"metavar": "VALUE"}
        text = argparse.SUPPRESS
        if flag.effect in (Effect.OPTION, Effect.COMMAND):
            text = with_values(flag.help, flag.values, flag.default(OWN))
        made.add_argument(*names, action=_Keep, dest="given", help=text, **nargs)
    return made


def parse(arguments: Sequence[str], prog: str) -> tuple[list[str], list[Given]]:
    """(files, flags in order) of the text after the verb. Raises UsageError."""
    made = parser(prog)
    found = made.parse_args(joined(arguments))
    if not found.files:
        made.error("the following arguments are required: FILE")
    return found.files, found.given


def of_environment(environment: Mapping[str, str]) -> list[Given]:
    """The machine of NEURON_PLATFORM_TARGET_OVERRIDE, then the flags of NEURON_CC_FLAGS, in order.
    Raises UsageError for what is no flag."""
    words = split_words(environment.get(ENVIRONMENT, ""), ENVIRONMENT)
    given = flags_alone(words, ENVIRONMENT)
    if machine := environment.get(PLATFORM, "").strip():
        machine = GENERATIONS.get(machine.lower(), machine)
        return [*flags_alone(["--target", machine], PLATFORM), *given]
    return given


def split_words(text: str, source: str) -> list[str]:
    """The words of a shell's line. Raises UsageError for an open quote."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError("SW_USAGE", f"{source} requires closed quotes: {error}") from error


def flags_alone(words: Sequence[str], source: str) -> list[Given]:
    """Flags in order, of a place that names no files. Raises UsageError for what is no flag."""
    made = parser(source)
    found = made.parse_args(joined(words))
    if found.files:
        made.error(f"unrecognized arguments: {' '.join(found.files)}")
    given: list[Given] = found.given
    return given


def joined(arguments: Sequence[str]) -> list[str]:
    """The arguments with canonical names, every value behind the equals sign of its flag."""
    made, rest = list[str](), list(arguments)
    while rest:
        word = rest.pop(0)
        flag, value = _read(word)
        made.append(word if flag is None else _joined(flag, value, rest))
    return made


def _read(word: str) -> tuple[Flag | None, str | None]:
    """(flag, value inside the same word) of a word; `-O1` and `-lnc=2` count as such."""
    if not word.startswith("-"):
        return None, None
    spelling, equals, value = word.partition("=")
    flag = find(spelling)
    if flag is None and word[-1:].isdigit():  # glued: -O1
        flag = find(word[:-1])
        return (flag, word[-1]) if flag and flag.kind is Kind.INTEGER else (None, None)
    return flag, value if equals else None


def _joined(flag: Flag, value: str | None, rest: list[str]) -> str:
    """One word for a flag; takes the value off `rest` when it is not there yet."""
    name = f"--{canonical_name(flag.name)}"
    if value is None and flag.kind is Kind.WORDS:
        words = list(takewhile(lambda word: _are_among(word, flag.values), rest))
        del rest[: len(words)]
        value = ",".join(words)
    if value is None and flag.kind is not Kind.SWITCH and rest:
        value = rest.pop(0)
    return name if value is None else f"{name}={value}"


def _are_among(word: str, values: Sequence[str]) -> bool:
    """Whether a word, which quotes may have made of several, holds nothing but `values`."""
    parts = word.lower().replace(",", " ").split()
    return bool(parts) and set(parts) <= set(values)


def split_verb(arguments: Sequence[str], verbs: Sequence[str]) -> tuple[str, list[str]]:
    """(verb, the other arguments) when one of `verbs` is the first word that is neither a flag of
    the table nor a flag's value; else ("", arguments)."""
    words = list(arguments)
    at = 0
    while at < len(words):
        flag, value = _read(words[at])
        if flag is None:
            verb = words[at] if words[at] in verbs else ""
            return verb, words[:at] + words[at + 1 :] if verb else words
        at += 1 if value is not None or flag.kind is Kind.SWITCH else 2
    return "", words
