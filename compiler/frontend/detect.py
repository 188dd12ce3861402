"""One model file of unknown form -> StableHLO that the importer reads; the form is found by
content.

Known forms: HLO module proto (also inside of an `HloProto`), HLO text, StableHLO text, MLIR
bytecode, portable StableHLO artifact, what `jax.export` serialises, programs that
`torch.export.save` wrote, graphs of operators of other frameworks (`graphs/forms.py`), and programs
that were traced of TensorFlow. File names do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwright.compiler.diagnostics import ImportRuleError, UsageError
from shardwright.compiler.frontend.context import BYTECODE, is_portable
from shardwright.compiler.frontend.graphs.forms import NAMES, form_of
from shardwright.compiler.frontend.hlo import hlo_to_stablehlo
from shardwright.compiler.frontend.locations import MODULE_FILE
from shardwright.compiler.frontend.pytorch import archive
from shardwright.compiler.frontend.stablehlo import NO_FACTS, Check, Facts, import_partition
from shardwright.compiler.frontend.tensorflow.start import is_program
from shardwright.compiler.ir.types import Graph

_LISTED = " or ".join(NAMES)
_NESTED_MESSAGE = 0x0A  # the first field of an HloProto is a message, of an HloModuleProto a name


@dataclass(frozen=True, slots=True)
class Module:
    """A model file: the form that was found, StableHLO as text, bytecode or artifact, and what else
    it says (known once it is imported). `arguments` and `results` are names that a file gives.
    """

    form: str
    stablehlo: bytes | str
    facts: Facts = NO_FACTS
    arguments: tuple[str, ...] = ()
    results: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """How a file is read: `as_step` the training step of a program of torch's; of a graph of
    operators `file` is its path, beside which files of its weights lie, and `input_shape` says
    sizes of dims that it leaves open. `generation` is that of the NeuronCore it is compiled for
    (none: of any), `fp8_as_e4m3` whether f8E4M3FN is taken as f8E4M3 there.
    """

    as_step: bool = False
    file: str = MODULE_FILE
    input_shape: str = ""
    generation: str = ""
    fp8_as_e4m3: bool = False


AS_IT_IS = Asked()


def read_module(data: bytes, asked: Asked = AS_IT_IS) -> Module:
    """The module of a file's content.

    Raises: ImportRuleError (SW_MODEL_FORM, SW_HLO_PARSE) when it is none of the known forms, or as
    the reader of its form; UsageError for an `input_shape` that it does not take.
    """
    form = form_of(data)
    if form is not None:
        from shardwright.compiler.frontend.graphs.program import lowered_file as lowered_graph

        found = lowered_graph(data, asked.file, asked.input_shape)
        name = form.form.name.lower()
        return Module(name, found.artifact, NO_FACTS, found.arguments, found.results)
    if is_program(data):
        from shardwright.compiler.frontend.tensorflow.program import lowered_file as lowered_traced

        found = lowered_traced(data)
        return Module("tensorflow", found.artifact, NO_FACTS, found.arguments, found.results)
    if asked.input_shape:
        raise UsageError(
            "SW_MODEL_SHAPE",
            f"--input-shape requires a model of {_LISTED}, got {asked.input_shape} for another",
            hint="other forms have fixed shapes: lower the model with the ones that are meant",
        )
    if archive.is_program(data):
        from shardwright.compiler.frontend.pytorch.program_file import lowered_file

        found = lowered_file(data, asked.as_step)
        return Module("torch.export", found.artifact, NO_FACTS, found.arguments, found.results)
    if data.startswith(BYTECODE):
        return Module("stablehlo artifact" if is_portable(data) else "mlir bytecode", data)
    exported = _exported_artifact(data)
    if exported is not None:
        return Module("jax.export", exported)
    text = _text(data)
    if text is None:
        return Module("hlo proto", hlo_to_stablehlo(_module_proto(data)))
    if _starts_with(text, "HloModule"):
        return Module("hlo text", hlo_to_stablehlo(text))
    if "module" in text or "func.func" in text:
        return Module("stablehlo text", text)
    raise _unknown(data)


def import_file(
    data: bytes,
    base_dir: str | None = None,
    checks: Mapping[str, Check] | None = None,
    asked: Asked = AS_IT_IS,
    known_indices: bool = True,
) -> tuple[Graph, Module]:
    """The graph of a model file, and what was in the file (see `read_module`). Constant indices out
    of bounds are left to those who run it where `known_indices` is off.

    Raises: ImportRuleError, as `read_module` and `import_module`.
    """
    module = read_module(data, asked)
    graph, facts = import_partition(
        module.stablehlo, base_dir=base_dir, checks=checks, known_indices=known_indices
    )
    return graph, replace(module, facts=facts)


def _text(data: bytes) -> str | None:
    """The content as text; None for binary content."""
    if not data.strip():
        raise _unknown(data)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    printable = all(c.isprintable() or c.isspace() for c in text[:4096])
    return text if printable and "\0" not in text else None


def _starts_with(text: str, word: str) -> bool:
    """Whether the first line that is no comment starts with `word`."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("//")), "")
    return first.startswith(word)


def _exported_artifact(data: bytes) -> bytes | None:
    """The portable artifact inside of a serialised `jax.export.Exported`; None for another form.

    The file is a flatbuffer that holds the artifact as a vector: its length, then its bytes.
    """
    at = data.find(BYTECODE)
    if at < 4 or not is_portable(data, at):
        return None
    size = int.from_bytes(data[at - 4 : at], "little")
    return data[at : at + size] if at + size <= len(data) else None


def _module_proto(data: bytes) -> bytes:
    """The module of an `HloProto` (which wraps it); an `HloModuleProto` as it is."""
    if data[:1] != b"\n":
        raise _unknown(data)
    size, at, shift = 0, 1, 0
    while at < len(data) and shift <= 28:
        size |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            break
    inner = data[at : at + size]
    return inner if inner[:1] == bytes([_NESTED_MESSAGE]) else data


def _unknown(data: bytes) -> ImportRuleError:
    return ImportRuleError(
        "SW_MODEL_FORM",
        f"a model file requires HLO, StableHLO, jax.export, torch.export, {_LISTED} content, got"
        f" {len(data)} bytes that begin with {data[:16]!r}",
        hint="dump the module with --xla_dump_to, or save jax.export(...).serialize(), or"
        " torch.export.save(program, path)",
    )
