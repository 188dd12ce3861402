"""An ONNX model to a model whose supported parts are NEFF files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.compiler.diagnostics import Loc, UsageError, did_you_mean
from shardwright.compiler.frontend.capture import Lowered
from shardwright.compiler.frontend.graphs.graph import Node
from shardwright.compiler.frontend.graphs.sizes import Sizes
from shardwright.compiler.frontend.locations import named_file
from shardwright.compiler.frontend.onnx.beside import files_beside
from shardwright.compiler.frontend.onnx.foreseen import Shaped
from shardwright.compiler.frontend.onnx.saved_form import Saving, file_of, is_neff, saved_bytes
from shardwright.compiler.frontend.onnx.splitting import Opened, Part, Split, asked
from shardwright.orchestrator.road.bundling import compiler_version
from shardwright.orchestrator.saved.asked import Asked
from shardwright.orchestrator.saved.making import FORMAT, check_original, made, nothing
from shardwright.orchestrator.terminal.outputs import write
from shardwright.orchestrator.traced.report import CPU, NEURON, KeptRow, PartitionReport, PartRow


def save_onnx(path: Path, output: Path, wanted: Asked) -> PartitionReport:
    """Write the model of a file with its supported parts as NEFF files. Raises UsageError where
    nothing is left to compile, or for sizes that are missing; ImportRuleError for a damaged file;
    else the DiagnosticError of the compiler."""
    resolved = wanted.resolved
    sizes = Sizes.of(wanted.input_shape or resolved.command.input_shape)
    with named_file(str(path)):
        opened = Opened.read(path.read_bytes(), path, sizes)
    check_original(path.name, any(map(is_neff, opened.model.graph.nodes)))
    kept = _kept(opened.model.graph.nodes, wanted.no_fuse_ops)
    split, neffs = made(_Graph(opened, not wanted.extract_weights), kept, wanted, resolved)
    report = _report(opened, split)
    if wanted.analyze:
        return report
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


@dataclass(frozen=True, slots=True)
class _Graph:
    """A model as `making.made` divides it."""

    opened: Opened
    inline: bool

    def split(self, refused: Mapping[int, str], least: int) -> Split:
        """Its parts."""
        return self.opened.split(refused, least)

    def module(self, part: Part) -> Lowered:
        """A part's module, with names."""
        weights = () if self.inline else part.weights
        artifact = self.opened.artifact(part, self.inline)
        return Lowered(artifact, (*weights, *part.inputs), part.outputs)

    def at(self, part: Part, loc: Loc | None) -> list[int]:
        """The node of a place, if it is one of a part."""
        line = loc.line if loc and loc.file == self.opened.model.file else 0
        return [node.number for node in part.nodes if node.number == line]

    def nothing(self, split: Split) -> UsageError:
        """The error of a model of which nothing is compiled."""
        return nothing(
            self.opened.path.name,
            [(node.operator, reason) for node, reason in split.kept],
            "--minimum-segment-size 1 compiles single ones; shapes that follow from no row are"
            " read from value_info: onnx.shape_inference.infer_shapes(model)",
        )


def _kept(nodes: Sequence[Node], names: Collection[str]) -> dict[int, str]:
    """Nodes that are to stay on the CPU. Raises UsageError for a name of none."""
    known = {node.name for node in nodes} | {node.operator for node in nodes}
    for name in names:
        if name not in known:
            kinds = ", ".join(sorted({node.operator for node in nodes}))
            raise UsageError(
                "SW_USAGE",
                f"no_fuse_ops requires names of nodes or operators of the model, got {name!r}",
                hint=did_you_mean(name, known, f"operators are {kinds}"),
            )
    return asked(nodes, names)


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
