"""Commands, flags and keys that texts of the sources name exist: what a message tells people to
type is what the command takes."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.diagnostics.catalogue import catalogue
from shardwright.compiler.surface.flags import Effect, find
from shardwright.orchestrator import cli
from shardwright.orchestrator.compile import compile_flags
from shardwright.orchestrator.config.config import TABLES
from shardwright.orchestrator.config.importers import nxdt, torchtitan
from shardwright.sim_cluster import __main__ as bundles

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("orchestrator", "sharding", "sim_cluster", "compiler", "collectives", "scripts")
FLAG = re.compile(r"(?<![\w/.-])(--[A-Za-z][\w-]*)")
COMMAND = re.compile(r"\bshardwright (?!compiler |unit service|run: |import )([a-z][^`\n;]*)")
KEY = re.compile(rf"(?<![\w/.])({'|'.join(TABLES)})\.([a-z_]+)\b(?![\w./(])")
HOLE = "\0"  # what an f-string fills in
FOREIGN = {
    "--xla_dump_to": "of XLA_FLAGS",
    "--shm-size": "of docker run",
    "--num-layers": "of Megatron-LM",
    "--swiglu": "of Megatron-LM",
    "--untie-embeddings-and-output-weights": "of Megatron-LM",
    "--moe-router-topk": "of Megatron-LM",
    "--kv-channels": "of Megatron-LM",
    "--enable-ccop-compute-overlap": "of the text of --tensorizer-options",
}
"""Flags of other programs that texts name."""
FILES = {"cluster.yaml", "shardwright.compiler.driver", "model.neff", "model.py"}
"""What has the form of a key and is none."""
OF_JOBS = ("collectives", "compiler", "sharding", "sim_cluster")
"""Packages whose errors reach people through `run` and `plan` as well as through `compile`."""


@dataclass
class Verb:
    """What a verb takes: flags, and verbs of its own."""

    flags: set[str] = field(default_factory=set)
    verbs: dict[str, Verb] = field(default_factory=dict)

    @classmethod
    def of(cls, parser: argparse.ArgumentParser) -> Verb:
        found = cls({name for name in parser._option_string_actions})
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                found.verbs = {name: cls.of(one) for name, one in action.choices.items()}
        return found

    def all_flags(self) -> set[str]:
        return self.flags.union(*(verb.all_flags() for verb in self.verbs.values()))


@cache
def command() -> Verb:
    """The whole command."""
    found = Verb.of(cli._parser())
    found.verbs["compile"] = Verb.of(compile_flags.parser("compile"))
    return found


@cache
def without_verb() -> re.Pattern[str]:
    """A verb and its flags, in a sentence."""
    verbs = command().verbs
    names = [name for verb in verbs.values() for name in verb.verbs]
    first, second = ("|".join(sorted(found, key=len, reverse=True)) for found in (verbs, names))
    begin = rf"(?<![\w-])(?:{first})(?: (?:{second}))?(?: requires| with)?"
    return re.compile(rf"({begin} --?[A-Za-z][^`\n;,(]*)")


def texts(path: Path) -> Iterator[str]:
    """Texts of a source, docstrings left out; holes of f-strings are marked."""
    source = path.read_text()
    if not ("--" in source or "shardwright " in source or KEY.search(source)):
        return
    tree = ast.parse(source)
    told = (ast.Module, ast.ClassDef, ast.FunctionDef)
    inside = {id(n.body[0]) for n in ast.walk(tree) if isinstance(n, told) and n.body}
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if id(node) in inside and isinstance(node, ast.Expr):
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values
            )
            pending += [part for part in node.values if not isinstance(part, ast.Constant)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        else:
            pending += ast.iter_child_nodes(node)


@cache
def told() -> Mapping[str, list[str]]:
    """Every text, by where it is."""
    files = [p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))]
    found = {str(p.relative_to(ROOT)): list(texts(p)) for p in files}
    rows = [f"{entry}" for entry in catalogue().values()]
    return found | {"compiler/diagnostics/catalogue.toml": rows}


def places(pattern: re.Pattern[str]) -> Iterator[tuple[str, str, re.Match[str]]]:
    for file, found in told().items():
        for text in found:
            yield from ((file, text, match) for match in pattern.finditer(text))


def unknown(line: str) -> str:
    """What `shardwright LINE` names that the command does not have; empty when all is there."""
    verb = command()
    for word in line.split():
        word = word.strip("'\".,:()")
        if HOLE in word:
            continue
        if word.startswith("-"):
            name = word.partition("=")[0]
            if not (name in verb.flags or name in FOREIGN or is_of_compile(verb, name)):
                return name
        elif verb is command().verbs["parallel-compile"]:
            return ""  # the rest is the command of the user's script
        elif word in verb.verbs:
            verb = verb.verbs[word]
        elif verb.verbs and word.islower():
            return word
    return ""


def is_of_compile(verb: Verb, name: str) -> bool:
    """Whether `compile` takes a flag in that spelling, its value glued to it or not (`-O1`)."""
    return verb is command().verbs["compile"] and bool(find(name) or find(name[:-1]))


def test_commands_that_texts_name_exist() -> None:
    found = [*places(COMMAND), *places(without_verb())]
    wrong = [(file, m[0], no) for file, _, m in found if (no := unknown(m[1]))]
    assert len(found) > 30 and not wrong, wrong


def test_flags_that_texts_name_exist() -> None:
    known = command().all_flags() | Verb.of(bundles._parser()).flags
    wrong = [
        (file, match[1], text)
        for file, text, match in places(FLAG)
        if match[1] not in known and match[1] not in FOREIGN and not find(match[1])
    ]
    assert not wrong, wrong


def test_a_flag_of_compile_alone_is_told_with_the_key_of_a_job() -> None:
    """Who runs or plans a job cannot give it."""
    of_jobs = command().verbs["run"].flags | command().verbs["plan"].flags
    wrong = []
    for file, text, match in places(FLAG):
        flag = find(match[1])
        if (
            file.startswith(OF_JOBS)
            and "/surface/" not in file
            and match[1] not in of_jobs
            and flag
        ):
            is_advice = "requires" not in text and not file.endswith(".toml")
            if is_advice and flag.field and flag.effect is Effect.OPTION:
                wrong += [] if f"--set compiler.{flag.field}=" in text else [(file, text)]
    assert not wrong, wrong


@pytest.mark.parametrize("source", ["shardwright compile", "NEURON_CC_FLAGS", "--cc-flags"])
def test_a_mistake_in_flags_names_a_help_that_is_there(source: str) -> None:
    with pytest.raises(UsageError) as refused:
        compile_flags.flags_alone(["--frobnicate"], source)
    (line,) = re.findall("`shardwright ([^`]*)`", refused.value.diagnostic.hint)
    assert unknown(line) == ""
    with pytest.raises(SystemExit) as left:
        cli.main(line.split())
    assert left.value.code == 0


def test_keys_that_texts_name_exist() -> None:
    fields = {name: kind.__dataclass_fields__ for name, kind in TABLES.items()}
    foreign = {name for table in (torchtitan.TABLE, nxdt.TABLE) for name in table}
    wrong = [
        (file, match[0], text)
        for file, text, match in places(KEY)
        if match[2] not in fields[match[1]] and match[0] not in FILES
        if not any(name.startswith(match[0]) for name in foreign)
    ]
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("line", "no"),
    [
        ("plan --fresh job.toml", ""),
        ("cache clean --older-than 30d", ""),
        ("neff rune file.neff", "rune"),
        ("bench", "bench"),
        ("plan --trays 2", "--trays"),
        ("compile --optlevl 1", "--optlevl"),
    ],
)
def test_what_is_not_there_is_found(line: str, no: str) -> None:
    assert unknown(line) == no
