"""A SavedModel of TensorFlow to a SavedModel whose supported parts are NEFF files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwright.compiler.diagnostics import Loc, UsageError
from shardwright.compiler.frontend.capture import Lowered
from shardwright.compiler.frontend.graphs.sizes import Sizes
from shardwright.compiler.frontend.tensorflow.saved_form import ABOUT, FILE, neff_ops, saved_bytes
from shardwright.compiler.frontend.tensorflow.splitting import (
    Opened,
    Part,
    Split,
    asked,
    open_saved,
)
from shardwright.orchestrator.road.bundling import compiler_version
from shardwright.orchestrator.saved.asked import Asked
from shardwright.orchestrator.saved.making import FORMAT, check_original, made, nothing
from shardwright.orchestrator.terminal.outputs import write
from shardwright.orchestrator.traced.report import CPU, NEURON, KeptRow, PartitionReport, PartRow


def save_tensorflow(path: Path, output: Path, wanted: Asked) -> PartitionReport:
    """Write a signature of a SavedModel with its supported parts as NEFF files, into a folder that
    holds nothing else. Raises UsageError where nothing is left to compile, for sizes that are
    missing, for settings that SavedModels do not have; LoadError for a damaged model; else the
    DiagnosticError of the compiler."""
    if wanted.beside or wanted.extract_weights:
        raise UsageError(
            "SW_USAGE",
            "--beside and --extract-weights require an ONNX model, got a SavedModel",
            hint="NEFF files are constants of a SavedModel, and weights are in them",
        )
    is_taken = output.exists() and (not output.is_dir() or any(output.iterdir()))
    if is_taken and not wanted.analyze:
        raise UsageError("SW_USAGE", f"--output requires an empty folder, got {output}")
    resolved = wanted.resolved
    sizes = Sizes.of(wanted.input_shape or resolved.command.input_shape)
    check_original(path.name, next(neff_ops(path), None) is not None)
    opened = open_saved(path, wanted.signature, sizes)
    kept = asked(opened, set(wanted.no_fuse_ops))
    split, neffs = made(_Graph(path, opened), kept, wanted, resolved)
    report = _report(path, opened, split)
    if wanted.analyze:
        return report
    about = {"format": FORMAT, "compiler": compiler_version(), "report": report.as_dict()}
    data = saved_bytes(opened, split, neffs, resolved.command.target.name)
    write(output / ABOUT, json.dumps(about, sort_keys=True, indent=1), "--output")
    write(output / FILE, data, "--output")
    return report


@dataclass(frozen=True, slots=True)
class _Graph:
    """A model as `making.made` divides it."""

    path: Path
    opened: Opened

    def split(self, refused: Mapping[str, str], least: int) -> Split:
        """Its parts."""
        return self.opened.split(refused, least)

    def module(self, part: Part) -> Lowered:
        """A part's module, with names."""
        return Lowered(self.opened.hlo(part), part.inputs, part.outputs)

    def at(self, part: Part, loc: Loc | None) -> list[str]:
        """The operators of a place."""
        return self.opened.at(part, loc)

    def nothing(self, split: Split) -> UsageError:
        """The error of a model of which nothing is compiled."""
        kinds = [(self.opened.live[name].type, reason) for name, reason in split.kept]
        return nothing(self.path.name, kinds, "--minimum-segment-size 1 compiles single ones")


def _report(path: Path, opened: Opened, split: Split) -> PartitionReport:
    """What became of the model."""
    parts = tuple(
        PartRow(
            where=NEURON if part.is_compiled else CPU,
            operators=dict(Counter(opened.count(part))),
            bytes_in=sum(map(opened.size, part.inputs)),
            bytes_out=sum(map(opened.size, part.outputs)),
            weight_bytes=sum(opened.size(f"{name}:0") for name in part.constants),
        )
        for part in split.parts
        if opened.count(part)
    )
    kept = tuple(
        KeptRow(
            operator=opened.live[name].type, module=name, line=path.name, reason=reason, count=1
        )
        for name, reason in split.kept
    )
    return PartitionReport(parts=parts, kept=kept)
