"""A configuration of another project as tables of a job, and what became of each of its fields.

`imported` reads a file; the tables lie below what flags and `--set` say, as a recipe's do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import UsageError, did_you_mean
from shardwright.orchestrator.config.config import KEYS, JobConfig, Keys
from shardwright.orchestrator.config.importers.facts import FACTS
from shardwright.orchestrator.config.importers.fields import (
    Fields,
    json_fields,
    text_of,
    toml_fields,
    yaml_fields,
)
from shardwright.orchestrator.config.importers.scripts import flag_fields
from shardwright.orchestrator.config.importers.table import Reading, read
from shardwright.orchestrator.config.importers.term import Term, answered

_BATCH = ("global_batch", "global_batch_tokens")
_MODELS = ("preset", "config", "entry", "hlo", "onnx", "mxnet", "tensorflow", "recipe")
_INTERVAL = ("checkpoint_interval_s", "checkpoint_interval_steps")
Reader = Callable[[Path, str], Fields]


@dataclass(frozen=True, slots=True)
class Project:
    """How files of a project are read: by the ends of their names, else as the last one."""

    formats: Mapping[str, Reader] = field(default_factory=dict)
    other: Reader = json_fields
    has_terms: bool = False
    """Whether its files are no settings with a row each: its module has `imported_of`."""


PROJECTS: Mapping[str, Project] = {
    "torchtitan": Project({".json": json_fields, ".toml": toml_fields}, json_fields),
    "megatron": Project({".json": json_fields}, flag_fields),
    "nxdt": Project({".yaml": yaml_fields, ".yml": yaml_fields}, yaml_fields),
    "pytorch": Project(has_terms=True),
}
"""Every project, each with a module of its name that has `TABLE` and `meaning`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command says about the machines: cores of an instance, and how many instances, 0
    where it does not."""

    cores_of: Callable[[str], int]
    """Of a target; of the one that was asked for, if any."""
    instances: int = 0


@dataclass(frozen=True, slots=True)
class Meaning:
    """Tables of a job, and the samples of a data-parallel rank in a step where the batch is said so
    (0: it is said in all)."""

    tables: dict[str, dict[str, Any]]
    samples_per_rank: int = 0


@dataclass(frozen=True, slots=True)
class Imported:
    """A configuration that was read."""

    project: str
    reading: Reading
    meaning: Meaning
    later: list[str] = field(default_factory=list)
    """What was assumed after that."""
    terms: tuple[Term, ...] = ()
    """Terms of distribution, of a project that has no fields."""

    @property
    def tables(self) -> Mapping[str, Mapping[str, Any]]:
        """Tables of a job."""
        tables = {name: dict(keys) for name, keys in self.meaning.tables.items()}
        for name, value in self.reading.found.items():
            if name in KEYS and not name.startswith("mesh."):  # which `meaning` lays out
                table, _, key = name.partition(".")
                tables.setdefault(table, {}).setdefault(key, value)
        return tables

    def below(self, said: Collection[str]) -> Mapping[str, Mapping[str, Any]]:
        """Tables of a job that lie below what the command has `said`: without an interval of
        checkpoints where it says one in the other unit."""
        tables = {name: dict(keys) for name, keys in self.tables.items()}
        if any(f"goodput.{name}" in said for name in _INTERVAL):
            for name in _INTERVAL:
                tables.get("goodput", {}).pop(name, None)
        if "entry" in tables.get("model", {}) and not {f"model.{n}" for n in _MODELS} & {*said}:
            tables["strategy"].pop("remat", None)  # a module recomputes what its own code says
        return tables

    def with_batch(self, ways: int, said: Collection[str]) -> Keys:
        """Keys of the batch on so many data-parallel ranks, for what the command has not `said`.
        Raises UsageError (SW_IMPORT_FIELD) where not every rank has a sample."""
        strategy = self.tables["strategy"]
        samples = strategy.get("global_batch", 0) or self.meaning.samples_per_rank * ways
        if not samples or any(f"strategy.{name}" in said for name in _BATCH):
            return {}
        if samples % ways:
            raise self.reading.refuse(
                "strategy.global_batch",
                f"a multiple of {ways} data-parallel ranks",
                f"{samples} samples of a step",
                f"say how many: --global-batch {-(-samples // ways) * ways}, or fewer ranks with"
                " --instances or --mesh",
            )
        keys = {"strategy.global_batch": samples}
        if "strategy.micro_batch" in said:
            return keys
        each = strategy.get("micro_batch", 1)
        found = math.gcd(samples // ways, each)
        if found != each:
            self.later.append(
                f"a micro-batch has {found} {'sample' if found == 1 else 'samples'}, not {each}:"
                f" {ways} data-parallel ranks share the {samples} of a step"
            )
        return keys | {"strategy.micro_batch": found}

    def with_goal(self, job: JobConfig, said: Collection[str]) -> Keys:
        """Keys of the goal, where the file says how long training goes on and the command has not
        `said` it; `job` has the batch. Raises UsageError (SW_IMPORT_FIELD) for more tokens than a
        goal can have."""
        fact = "steps" if self.reading.get("steps", 0) > 0 else "samples"
        number = self.reading.get(fact, 0)
        if number < 1 or "goal.tokens" in said or job.model.mode != "train":
            return {}
        length, strategy = job.model.seq_len, job.strategy
        one = self.reading.fields[fact]
        each = f"{length:,} tokens"
        per = length
        if fact == "steps":
            per = strategy.global_batch_tokens or strategy.global_batch * length
            own = f"{per:,} tokens"
            each = own if strategy.global_batch_tokens else f"{strategy.global_batch:,} x {each}"
        if not per:
            self.later.append(f"{one.name} {number} is no goal: of how many tokens is not said")
            return {}
        most = KEYS["goal.tokens"].metadata["range"][1]
        if number * per > most:
            raise self.reading.refuse(
                fact,
                f"at most {most:g} tokens in all",
                f"{number:,} x {each}",
                "say them: --tokens 1T",
            )
        self.later.append(
            f"the goal is {number * per:,} tokens: {one.name} {number:,} x {each} (--tokens)"
        )
        return {"goal.tokens": number * per}

    def section(self, findings: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """The section of the report; `findings` are those of the answer."""
        reading = self.reading
        if self.terms:
            return self._of_terms(findings)
        return {
            "project": self.project,
            "file": str(reading.path),
            "read": [
                {
                    "field": one.name,
                    "line": one.line,
                    "value": one.shown(),
                    "key": ours if ours in KEYS else "",
                    "means": FACTS.get(ours, ours),
                }
                for ours, one in reading.fields.items()
            ],
            "without": [
                {"field": one.name, "line": one.line, "value": one.shown(), "why": why}
                for one, why in reading.without
            ],
            "unknown": [
                {"field": one.name, "line": one.line, "value": one.shown()}
                for one in reading.unknown
            ],
            "assumed": [*reading.assumed, *self.later, *reading.defaults],
        }

    def _of_terms(self, findings: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """The section of terms: what was said and what is done, side by side."""
        terms = answered(self.terms, findings)
        rows = [
            (one, {"field": one.term, "line": one.loc.line, "value": one.said}) for one in terms
        ]
        differs = [f"{one.term} ({one.loc}): {one.why}" for one in terms if one.why]
        return {
            "project": self.project,
            "file": str(self.reading.path),
            "read": [
                row | {"key": next(iter(one.keys), ""), "means": one.done}
                for one, row in rows
                if one.keys or one.does
            ],
            "without": [row | {"why": one.why} for one, row in rows if not (one.keys or one.does)],
            "unknown": [],
            "assumed": [*differs, *self.reading.assumed, *self.later],
            "terms": [one.as_dict() for one in terms],
        }


def imported(project: str, path: Path, asked: Asked) -> Imported:
    """Read a file of a project. Raises UsageError for a project that is unknown, a file that is
    none (SW_IMPORT), and fields that no job can have (SW_IMPORT_FIELD)."""
    if project not in PROJECTS:
        raise UsageError(
            "SW_IMPORT",
            f"--from requires one of {', '.join(PROJECTS)}, got {project!r}",
            hint=did_you_mean(project, PROJECTS, "--from PROJECT FILE"),
        )
    how = PROJECTS[project]
    module = import_module(f"shardwright.orchestrator.config.importers.{project}")
    if how.has_terms:
        found: Imported = module.imported_of(path, asked)
        return found
    text = text_of(path)
    fields = how.formats.get(path.suffix.lower(), how.other)(path, text)
    reading = read(path, fields, module.TABLE, project)
    return Imported(project, reading, module.meaning(reading, asked))
