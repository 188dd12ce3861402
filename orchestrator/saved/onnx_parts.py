"""An ONNX model to a model whose supported parts are NEFF files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardwright.compiler.diagnostics import CompileError, ImportRuleError, UsageError
from shardwright.compiler.frontend.levels import divided
from shardwright.compiler.frontend.locations import named_file
from shardwright.compiler.frontend.onnx.foreseen import Shaped
from shardwright.compiler.frontend.onnx.model import Node, files_beside
from shardwright.compiler.frontend.onnx.saved_form import Saving, file_of, saved_bytes
from shardwright.compiler.frontend.onnx.sizes import Sizes
from shardwright.compiler.frontend.onnx.splitting import Key, Opened, Part, Split, asked
from shardwright.compiler.surface.resolve import Resolved
from shardwright.orchestrator.compile.part_files import InProcess, part_neff, workdir
from shardwright.orchestrator.road.bundling import compiler_version
from shardwright.orchestrator.saved.asked import Asked
from shardwright.orchestrator.terminal.outputs import write
from shardwright.orchestrator.traced.report import CPU, NEURON, KeptRow, PartitionReport, PartRow

FORMAT = 1


def save_onnx(path: Path, output: Path, wanted: Asked) -> PartitionReport:
    """Write the model of a file with its supported parts as NEFF files. Raises UsageError where
    nothing is left to compile, or for sizes that are missing; ImportRuleError for a damaged file;
    else the DiagnosticError of the compiler."""
    resolved = wanted.resolved
    sizes = Sizes.of(wanted.input_shape or resolved.command.input_shape)
    with named_file(str(path)):
        opened = Opened.read(path.read_bytes(), path, sizes)
    with workdir(wanted.compiler_workdir) as folder:
        made = _Making(opened, wanted, resolved, folder)
        split = made.divided()
        neffs = [made.neffs[part.key] for part in split.parts if part.is_compiled]
    report = _report(opened, split)
    saving = Saving(
        neffs=neffs,
        target=resolved.command.target.name,
        has_weights=not wanted.extract_weights,
        beside=f"{output.stem}.neffs" if wanted.beside else "",
        about={"format": FORMAT, "compiler": compiler_version(), "report": report.as_dict()},
    )
    data = saved_bytes(opened, split, saving)
    for number, neff in enumerate(neffs if saving.beside else ()):
        write(output.parent / file_of(saving.beside, number), neff, "--output")
    _copy_beside(data, path.parent, output.parent, bool(saving.beside) and saving.beside)
    write(output, data, "--output")
    return report


def _copy_beside(data: bytes, source: Path, folder: Path, but: str | bool) -> None:
    """Files with weights that the host still reads (those of branches), into the folder of the
    output."""
    if source.resolve() == folder.resolve():
        return
    for file in files_beside(data, source):
        place = file.relative_to(source)
        if place.parts[0] != but:
            write(folder / place, file.read_bytes(), "--output")


@dataclass(slots=True)
class _Making:
    """A model on its way to parts."""

    opened: Opened
    wanted: Asked
    resolved: Resolved
    folder: Path
    neffs: dict[Key, bytes] = field(default_factory=dict)
    """Of parts that compile: those that stay as they are when others are divided again are compiled
    once."""

    def divided(self) -> Split:
        """Parts of which every compiled one compiles. Raises UsageError where none is left."""
        nodes = self.opened.model.graph.nodes
        self._check_names(nodes)
        kept = asked(nodes, set(self.wanted.no_fuse_ops))

        def split(refused: Mapping[int, str]) -> Split:
            found = self.opened.split({**refused, **kept}, self.wanted.minimum_segment_size)
            if not any(part.is_compiled for part in found.parts):
                raise _nothing(self.opened.path, found)
            return found

        return divided(
            split, lambda found: next(filter(None, map(self._refusals, found.parts)), {})
        )

    def _check_names(self, nodes: tuple[Node, ...]) -> None:
        known = {node.name for node in nodes} | {node.operator for node in nodes}
        for name in self.wanted.no_fuse_ops:
            if name not in known:
                raise UsageError(
                    "SW_USAGE",
                    f"no_fuse_ops requires names of nodes or operators of the model, got {name!r}",
                    hint=f"operators are {', '.join(sorted({n.operator for n in nodes}))}",
                )

    def _refusals(self, part: Part) -> dict[int, str]:
        """Nodes of a part that do not compile, and why. Raises DiagnosticError where it is no
        node's line."""
        if not part.is_compiled or part.key in self.neffs:
            return {}
        inline = not self.wanted.extract_weights
        weights = () if inline else part.weights
        try:
            artifact = self.opened.artifact(part, inline)
            reader = InProcess((*weights, *part.inputs), part.outputs)
            name = f"neff-{len(self.neffs)}"
            self.neffs[part.key] = part_neff(artifact, name, self.resolved, self.folder, reader)
        except (ImportRuleError, CompileError) as error:
            loc = error.diagnostic.loc
            line = loc.line if loc and loc.file == self.opened.model.file else 0
            if line not in {node.number for node in part.nodes}:
                raise
            return {line: f"{error.diagnostic.message} [{error.code}]"}
        return {}


def _nothing(path: Path, split: Split) -> UsageError:
    shown = dict.fromkeys(f"{node.operator}: {reason}" for node, reason in split.kept)
    return UsageError(
        "SW_NO_OPERATORS",
        f"{path.name} requires operators that are compiled, got {'; '.join(shown) or 'none'}",
        hint="--minimum-segment-size 1 compiles single ones; shapes that follow from no row are"
        " read from value_info: onnx.shape_inference.infer_shapes(model)",
    )


def _report(opened: Opened, split: Split) -> PartitionReport:
    """What became of the model."""

    def size(names: tuple[str, ...]) -> int:
        seen = (opened.known.values[name] for name in names)
        return sum(each.num_bytes for each in seen if isinstance(each, Shaped))

    parts = tuple(
        PartRow(
            where=NEURON if part.is_compiled else CPU,
            operators=dict(Counter(node.operator for node in part.nodes)),
            bytes_in=size(part.inputs),
            bytes_out=size(part.outputs),
            weight_bytes=size(part.weights),
        )
        for part in split.parts
    )
    kept = tuple(
        KeptRow(
            operator=node.operator,
            module=node.name,
            line=f"{opened.path.name}:{node.number}",
            reason=reason,
            count=1,
        )
        for node, reason in split.kept
    )
    return PartitionReport(parts=parts, kept=kept)
