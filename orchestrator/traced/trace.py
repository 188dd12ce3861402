"""A module of PyTorch to NEFF files, as `torch_neuronx.trace` is used: exported, divided where
operators stay on the CPU, each compiled part lowered and compiled as a model file is.

A part that is refused on its way (a row that does not take its arguments, an operator that the
compiler refuses at its line) is divided again without what was refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import (
    CompileError,
    DiagnosticError,
    ImportRuleError,
    UsageError,
)
from shardwright.compiler.frontend.levels import divided
from shardwright.compiler.frontend.pytorch.splitting import (
    SMALL,
    Kept,
    Part,
    Split,
    Traced,
    at_line,
    refused_rows,
    traced_module,
)
from shardwright.compiler.frontend.pytorch.types import array_of, torch_version
from shardwright.compiler.neff.bundle import read_program
from shardwright.compiler.neff.reader import Container
from shardwright.compiler.surface.resolve import Resolved, resolve
from shardwright.orchestrator.compile.compile_flags import flags_alone, of_environment, split_words
from shardwright.orchestrator.compile.part_files import InProcess, part_neff, workdir
from shardwright.orchestrator.road.bundling import compiler_version
from shardwright.orchestrator.traced.module import TracedModule
from shardwright.orchestrator.traced.parts import CompiledPart, TracedPart, needed
from shardwright.orchestrator.traced.report import PartitionReport, report_of

MOST_INLINE_BYTES = 2**31
"""documented for torch-neuron: constants above 1.9 GB are kept beside the graph; ours is what a
message of protobuf holds."""
Examples = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a module is traced; `trace` says what its arguments mean."""

    compiler_args: Sequence[str] | str = ()
    target: str = "trn1"
    allow_partition: bool = True
    min_operators: int = 2
    inline_weights_to_neff: bool = True
    compiler_workdir: Path | str = ""

    @property
    def resolved(self) -> Resolved:
        """What the flags mean. Raises UsageError."""
        given = self.compiler_args
        words = split_words(given, "compiler_args") if isinstance(given, str) else list(given)
        own = flags_alone(["--target", self.target, *words], "compiler_args")
        return resolve([*of_environment(os.environ), *own])


def trace(
    module: Any,
    example_inputs: Examples = (),
    example_kwarg_inputs: Mapping[str, Any] | None = None,
    settings: Settings | None = None,
) -> TracedModule:
    """A module, compiled for the shapes and types of an example.

    Raises UsageError for a module that cannot be exported, for flags that are not understood, and,
    without `allow_partition`, for operators that are not compiled; else the DiagnosticError of the
    compiler.
    """
    settings = settings or Settings()
    resolved = settings.resolved
    traced = traced_module(module, *_arguments(example_inputs, example_kwarg_inputs))
    with workdir(settings.compiler_workdir) as folder:
        made = _Making(traced, settings, resolved, folder)
        split = made.divided()
        parts = tuple(made.part(part) for part in split.parts)
    signature = traced.signature
    read = needed(parts, signature)
    own = {leaf.name for leaf in signature.buffers}
    names = [name for name in traced.titles if name in read and traced.weights.get(name) == name]
    names += [name for name in traced.nodes if name in read and traced.nodes[name].op == "get_attr"]
    return TracedModule(
        name=type(module).__name__ if hasattr(module, "parameters") else module.__name__,
        signature=signature,
        parts=parts,
        tensors={name: traced.tensor(name).clone() for name in (*names, *own)},
        summary=report_of(traced, split),
        made_by=_made_by(resolved),
    )


def analyze(
    module: Any,
    example_inputs: Examples = (),
    example_kwarg_inputs: Mapping[str, Any] | None = None,
    settings: Settings | None = None,
) -> PartitionReport:
    """What would be compiled and what would stay on the CPU: lowered and imported, not compiled.
    Raises UsageError for a module that cannot be exported."""
    settings = settings or Settings()
    resolved = settings.resolved
    traced = traced_module(module, *_arguments(example_inputs, example_kwarg_inputs))
    with workdir("") as folder:
        split = _Making(traced, settings, resolved, folder, only_imported=True).divided()
    return report_of(traced, split)


def _made_by(resolved: Resolved) -> dict[str, str]:
    return {
        "compiler": compiler_version(),
        "torch": torch_version(),
        "target": resolved.command.target.name,
        "auto_cast": f"{resolved.options.auto_cast} {resolved.options.auto_cast_type}",
    }


def _arguments(
    inputs: Examples, kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of an example: one tensor, a sequence of them, or a mapping
    as tokenizers give."""
    named = dict(kwargs or {})
    if isinstance(inputs, Mapping):
        return (), {**inputs, **named}
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), named


@dataclass(slots=True)
class _Making:
    """A module on its way to parts."""

    traced: Traced
    settings: Settings
    resolved: Resolved
    folder: Path
    only_imported: bool = False
    neffs: dict[Part, bytes] = field(default_factory=dict)
    """Of parts that compile: those that stay as they are when others are divided again are compiled
    once."""
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def divided(self) -> Split:
        """Parts of which every compiled one compiles. Raises UsageError where nothing is left to
        compile, or something may not stay on the CPU."""

        def split(refused: Mapping[str, str]) -> Split:
            found = self.traced.split(refused, self.settings.min_operators)
            self._check(found)
            return found

        return divided(
            split, lambda found: next(filter(None, map(self._refusals, found.parts)), {})
        )

    def _check(self, split: Split) -> None:
        if split.kept and not self.settings.allow_partition:
            without = [each for each in split.kept if each.reason != SMALL]
            raise _not_compiled(without, "allow_partition=True leaves them to the CPU")
        if (
            split.kept
            and not any(part.is_compiled for part in split.parts)
            and (not self.only_imported)
        ):
            raise _not_compiled(split.kept, "nothing is left for a NEFF: run the module in torch")

    def _refusals(self, part: Part) -> dict[str, str]:
        """Nodes of a part that do not compile, and why; none where all do. Raises DiagnosticError
        where it is nobody's line."""
        if not part.is_compiled or part in self.neffs:
            return {}
        try:
            artifact = self._artifact(part)
        except Exception:
            if found := refused_rows(self.traced, part):
                return found
            raise
        try:
            self.neffs[part] = self._neff(artifact)
        except (ImportRuleError, CompileError) as error:
            nodes = at_line(part, error.diagnostic.loc)
            if not nodes:
                raise
            reason = f"{error.diagnostic.message} [{error.code}]"
            return {node.name: reason for node in nodes}
        return {}

    def part(self, part: Part) -> TracedPart:
        """A part that was compiled, or its graph of the host."""
        if not part.is_compiled:
            return self.traced.host(part)
        neff = self.neffs[part]
        leaves = [leaf for leaf in map(self.traced.leaf, part.outputs) if leaf is not None]
        return CompiledPart(
            neff=neff,
            program=read_program(Container(neff)),
            weights=() if self.settings.inline_weights_to_neff else part.weights,
            inputs=part.inputs,
            outputs=tuple(leaves),
        )

    def _artifact(self, part: Part) -> bytes:
        for name in part.weights:
            if name not in self.arrays:
                self.arrays[name] = array_of(self.traced.tensor(name))
        weights = {name: self.arrays[name] for name in part.weights}
        inline = self.settings.inline_weights_to_neff
        size = sum(array.nbytes for array in weights.values())
        if inline and size > MOST_INLINE_BYTES:
            raise UsageError(
                "SW_TORCH_INLINE",
                f"weights in a NEFF require at most {MOST_INLINE_BYTES} bytes, got {size}",
                hint="inline_weights_to_neff=False keeps them beside it",
            )
        leaves = [leaf for leaf in map(self.traced.leaf, part.inputs) if leaf is not None]
        return self.traced.function(part).artifact(weights, leaves, inline)

    def _neff(self, artifact: bytes) -> bytes:
        """The NEFF of a module; empty where it is only imported."""
        name = f"part-{len(self.neffs)}"
        if self.only_imported:
            InProcess().read(artifact, os.getcwd(), self.resolved.command.profile)
            return b""
        neff = part_neff(artifact, name, self.resolved, self.folder)
        if (kind := Container(neff).header.kind) != "program":
            raise UsageError(
                "SW_USAGE",
                f"trace requires modules that become one program, got a {kind} file: operators on"
                " the CPU, or --neuroncore-pipeline-cores above 1",
                hint="torch.export.save the module, and give it to `shardwright compile`",
            )
        return neff


def _not_compiled(kept: Sequence[Kept], hint: str) -> DiagnosticError:
    """The error of operators that are not compiled, all of them by module and line."""
    return UsageError(
        "SW_TORCH_OPERATOR",
        f"operators that compile are required, got {'; '.join(dict.fromkeys(map(str, kept)))}",
        kept[0].loc,
        hint,
    )
