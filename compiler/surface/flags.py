"""Every flag of `compile`, declared once: spellings, values, defaults, what it does.

The command line, `NEURON_CC_FLAGS` and the documentation read this table; `resolve.py` turns what a
user gave into options. Which release has a flag, a value or a default is in `timeline.py`. A flag
either sets a field of `CompileOptions`, steers the command, stands for another flag, or is accepted
without effect: recorded in the file, or belonging to the caching wrapper. Sources: the command
reference and release notes of neuronx-cc; "(use)" marks flags seen in public scripts only.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any

from shardwright.compiler.machine.target import NEURON_CC, NEURONX_CC, families
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.surface import neuron_cc
from shardwright.compiler.surface.releases import Profile
from shardwright.compiler.surface.timeline import Row, Subject, row_of, rows


class Kind(enum.Enum):
    """The form of a flag's value."""

    CHOICE = "choice"  # one of `values`, any case
    SWITCH = "switch"  # no value: giving it means `constant`
    INTEGER = "integer"
    TEXT = "text"
    NAMES = "names"  # a comma list of `values`
    WORDS = "words"  # following words that are among `values`


class Effect(enum.Enum):
    """What becomes of a flag."""

    OPTION = "sets a compile option"
    COMMAND = "steers the command"
    REPLACED = "deprecated, stands for another flag"
    RECORDED = "accepted and recorded in the file, no effect here"
    WRAPPER = "read by the caching wrapper, ignored here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag. `usual` is its value where it is left out, unless releases differ (`default`).

    `field` names the option or command setting it sets; `replaces` is the (flag, value) a
    deprecated flag stands for; `old_values` are (old spelling, what it means now), which warn.
    `compiler` is the only one that has the flag (empty: both); on a machine of the other one it is
    refused, with what does the same there (`instead`), or has the effect `foreign`. `renamed` is
    the flag it is for neuron-cc, with the same value; `compiler_defaults` are (compiler, value)
    where a compiler has a default of its own.
    """

    name: str
    aliases: tuple[str, ...] = ()
    kind: Kind = Kind.TEXT
    effect: Effect = Effect.COMMAND
    values: tuple[str, ...] = ()
    constant: Any = True
    usual: Any = None
    field: str = ""
    replaces: tuple[str, str] = ("", "")
    old_values: tuple[tuple[str, str], ...] = ()
    compiler: str = ""
    instead: str = ""
    foreign: Effect | None = None
    renamed: str = ""
    compiler_defaults: tuple[tuple[str, Any], ...] = ()
    help: str
    source: str

    @property
    def released(self) -> Row:
        """Which releases have the flag."""
        return row_of(Subject.FLAG, self.name)

    def value_released(self, value: str) -> Row:
        """Which releases have a value of the flag."""
        return row_of(Subject.VALUE, self.name, value)

    @property
    def defaults(self) -> tuple[Row, ...]:
        """Values of releases when the flag is absent, the oldest first; none where all agree."""
        return rows(Subject.DEFAULT).get(self.name, ())

    def default(self, profile: Profile) -> Any:
        """The value when the flag is absent; None when there is none."""
        held = (row.value for row in self.defaults if profile.holds(row))
        return next(held, self.usual)


_CLI = "command reference"
_CC1 = "command reference of neuron-cc"
_RN = "release notes"
_USE = "public scripts (use)"
_WRAPPER = "persistent cache page"

TARGETS = families()
STRATEGIES = ("generic", "llm-training", "fsdp")
OLD_STRATEGIES = {"nemo": "llm-training"}
"""Older name of a strategy -> its name since."""
DOWNCASTS = ("dot", "scatter", "all_reduce", "reduce_scatter", "pow")
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
LEVEL_NAMES = {"warn": "warning"}  # of neuron-cc


def _command(
    name: str,
    kind: Kind,
    help: str,
    source: str,
    *,
    field: str = "",
    default: Any = None,
    effect: Effect = Effect.COMMAND,
    **rest: Any,
) -> Flag:
    """A flag that sets `field`, which is called as it is unless given."""
    field = field or name.replace("-", "_")
    about = {"help": help, "source": source, "field": field, "usual": default}
    return Flag(name=name, kind=kind, effect=effect, **about, **rest)


def _option(name: str, kind: Kind, help: str, source: str, **rest: Any) -> Flag:
    return _command(name, kind, help, source, effect=Effect.OPTION, **rest)


def _recorded(name: str, kind: Kind, help: str, source: str = _USE, **rest: Any) -> Flag:
    return Flag(name=name, kind=kind, effect=Effect.RECORDED, help=help, source=source, **rest)


_NEURONX: tuple[Flag, ...] = (
    _command(
        "framework",
        Kind.CHOICE,
        "form of the model, which is found by its content (PYTORCH is ours; MXNET, ONNX and"
        " TENSORFLOW are those of neuron-cc)",
        _CLI,
        values=("xla", "pytorch", "onnx", "mxnet", "tensorflow"),
        default="xla",
    ),
    _command(
        "target",
        Kind.TEXT,
        f"instance family ({', '.join(TARGETS)}) or instance type",
        f"{_CLI}; trn3 {_USE}",
    ),
    _command(
        "output",
        Kind.TEXT,
        "the NEFF to write; a directory when several models are given",
        _CLI,
        aliases=("-o",),
        default="file.neff",
        compiler_defaults=((NEURON_CC, "out.neff"),),
    ),
    _command(
        "input-shape",
        Kind.TEXT,
        "sizes of dims that a model of ONNX, MXNet or TensorFlow leaves open, batch=4, or of all"
        " dims of an input, x=4x3x8x8, with commas between them",
        "ours",
    ),
    _command(
        "compiler-version-profile",
        Kind.TEXT,
        "take defaults and operator restrictions of this neuronx-cc release",
        "ours",
        default="own",
        field="profile",
        compiler=NEURONX_CC,
    ),
    _option(
        "model-type",
        Kind.CHOICE,
        "family of the model",
        f"{_CLI}; transformer-inference, cnn-training {_USE}",
        values=("generic", "transformer", "unet-inference"),
        old_values=(("transformer-inference", "transformer"), ("cnn-training", "generic")),
        default="generic",
        compiler=NEURONX_CC,
    ),
    _option(
        "auto-cast",
        Kind.CHOICE,
        "which fp32 operations are cast",
        f"{_CLI}; {_RN} 2.20.9961 and 2.22.12471",
        values=("none", "matmult", "all"),
        old_values=(("matmul", "matmult"),),
        compiler=NEURONX_CC,
        instead="--fp32-cast or --fast-math",
    ),
    _option(
        "auto-cast-type",
        Kind.CHOICE,
        "the type they are cast to",
        _CLI,
        values=("bf16", "fp16", "tf32", "fp8_e4m3"),
        default="bf16",
        compiler=NEURONX_CC,
        instead="--fp32-cast or --fast-math",
    ),
    _option(
        "relayout",
        Kind.CHOICE,
        "the type in which fp32 values are transposed",
        "compiler/options.py",
        values=("exact", "bf16", "fp16"),
        default="exact",
        compiler=NEURONX_CC,
        instead="--fast-math",
    ),
    _command(
        "fast-math",
        Kind.WORDS,
        "which fp32 operations are cast, and how fp32 values are transposed",
        _CC1,
        values=neuron_cc.WORDS,
        default=neuron_cc.DEFAULT,
        compiler=NEURON_CC,
        instead="--auto-cast, --auto-cast-type and --relayout",
    ),
    _command(
        "fp32-cast",
        Kind.CHOICE,
        "which fp32 operations are cast to which type; beats --fast-math",
        _CC1,
        values=tuple(neuron_cc.CASTS),
        compiler=NEURON_CC,
        instead="--auto-cast and --auto-cast-type",
    ),
    _command(
        "io-config",
        Kind.TEXT,
        "inputs, with shapes and types, and outputs of the model: JSON, or a file of it",
        _CC1,
        compiler=NEURON_CC,
        instead="the shapes in the model file",
    ),
    _command(
        "neuroncore-pipeline-cores",
        Kind.INTEGER,
        "NeuronCores over which the model is spread, as groups of operators one behind the other",
        f"{_CC1}; neuronx-cc removed it in 2.4.0.21",
        field="pipeline_cores",
        default=1,
        compiler=NEURON_CC,
        foreign=Effect.RECORDED,
    ),
    _command(
        "minimum-segment-size",
        Kind.INTEGER,
        "operators that a part of the model between operators on the CPU needs to run on cores",
        "minimum_segment_size of torch-neuron and tensorflow-neuron",
        default=1,
        compiler=NEURON_CC,
        foreign=Effect.RECORDED,
    ),
    Flag(
        name="num-neuroncores",
        kind=Kind.INTEGER,
        effect=Effect.REPLACED,
        replaces=("neuroncore-pipeline-cores", ""),
        compiler=NEURON_CC,
        instead="--logical-nc-config, or a mesh of run and plan",
        help="--neuroncore-pipeline-cores, its name from 1.0.24045 on",
        source=_CC1,
    ),
    _option(
        "native-int64",
        Kind.CHOICE,
        "compute 64-bit integers in 64 bits instead of 32 (enabled; trn2 and later)",
        _CLI,
        values=("default", "enabled", "disabled"),
        default="default",
        compiler=NEURONX_CC,
    ),
    _option(
        "implicit-integer-downcast",
        Kind.NAMES,
        "operations on integers that may be computed in fp32 or int32",
        _CLI,
        values=("default", "all", "none", *DOWNCASTS),
        default="default",
        compiler=NEURONX_CC,
    ),
    _command(
        "distribution-strategy",
        Kind.CHOICE,
        "strategy of the whole model; recorded, one core's program does not depend on it",
        f"{_CLI}; {_RN} 2.8.0.25 and 2.11.0.34",
        values=STRATEGIES,
        old_values=tuple(OLD_STRATEGIES.items()),
        default="generic",
        field="strategy",
        compiler=NEURONX_CC,
    ),
    _option(
        "logical-nc-config",
        Kind.INTEGER,
        "physical cores per logical NeuronCore; default 2 on trn2 and trn3",
        f"{_CLI}; error page EARG001",
        field="lnc",
        aliases=("--lnc", "-lnc"),
        values=("1", "2"),
    ),
    _command(
        "hypothetical",
        Kind.SWITCH,
        "allow logical NeuronCores that the target cannot have; the file says so",
        "ours",
        default=False,
    ),
    _option(
        "optlevel",
        Kind.INTEGER,
        "1 quick compile, 2 balanced, 3 whole-model search",
        f"{_CLI}; {_RN} 2.10.0.34",
        aliases=("-O", "--O"),
        values=("1", "2", "3"),
        default=2,
    ),
    Flag(
        name="enable-experimental-o1",
        kind=Kind.SWITCH,
        effect=Effect.REPLACED,
        replaces=("optlevel", "1"),
        help="--optlevel 1",
        source=_RN,
    ),
    _command(
        "num-parallel-jobs",
        Kind.INTEGER,
        "processes that compile the functions of a file; one where nothing is said, the vendor has"
        " 8",
        _RN,
        default=1,
    ),
    _option(
        "enable-mixed-precision-accumulation",
        Kind.SWITCH,
        "keep intermediates of reductions of short types in fp32",
        f"{_RN} 2.13.66 and 2.22.12471",
        field="mixed_precision_accumulation",
        compiler=NEURONX_CC,
    ),
    _option(
        "disable-mixed-precision-accumulation",
        Kind.SWITCH,
        "round intermediates to the declared type",
        f"{_RN} 2.22.12471",
        field="mixed_precision_accumulation",
        constant=False,
        compiler=NEURONX_CC,
    ),
    _option(
        "enable-saturate-infinity",
        Kind.SWITCH,
        "clamp infinities in front of what makes NaN of them (trn1); as a release from 2.13.66 in"
        " front of transposes done by the tensor engine alone",
        f"{_CLI}; {_RN} 2.7.0.40, 2.13.66, 2.17.194",
        field="saturate_infinity",
        default=False,
    ),
    _command(
        "enable-fast-context-switch",
        Kind.SWITCH,
        "load constants at the start of an execution instead of at model load",
        _CLI,
        default=False,
        field="fast_context_switch",
    ),
    _command(
        "enable-fast-loading-neuron-binaries",
        Kind.SWITCH,
        "do not compress the file: larger, loads faster",
        _CLI,
        default=False,
        field="fast_loading",
    ),
    _recorded(
        "disable-dge",
        Kind.SWITCH,
        "descriptors are made at load instead of by the descriptor generation engine",
        _RN,
    ),
    _command(
        "hbm-scratchpad-page-size",
        Kind.INTEGER,
        "MB, a multiple of 512 below 4096; must equal the runtime's page size",
        "device memory page",
        field="scratchpad_page_mb",
    ),
    _option(
        "experimental-unsafe-fp8e4m3fn-as-fp8e4m3",
        Kind.SWITCH,
        "take F8E4M3FN tensors as F8E4M3",
        "error page EVRF051",
        default=False,
        compiler=NEURONX_CC,
    ),
    _option(
        "instruction-limit",
        Kind.INTEGER,
        "instructions a module may have (docs/compile.md)",
        "messages of EVRF007 in public logs: 5,000,000 per module",
        default=5_000_000,
    ),
    _command("logfile", Kind.TEXT, "where every message goes", _CLI, default="log-neuron-cc.txt"),
    _command(
        "verbose",
        Kind.TEXT,
        f"{', '.join(LEVELS)}, or a number (35)",
        _CLI,
        aliases=("-v",),
        default="warning",
    ),
    _command(
        "pipeline",
        Kind.WORDS,
        "`compile SaveTemps` keeps the intermediates",
        _USE,
        values=("compile", "savetemps"),
    ),
    _command(
        "dump-dir",
        Kind.TEXT,
        "every stage as text goes there, numbered and named (docs/text-forms.md)",
        "this compiler only",
    ),
    _recorded("static-weights", Kind.SWITCH, "made needless in 11/2020", _CC1, compiler=NEURON_CC),
    _recorded("batching-en", Kind.SWITCH, "made needless in 11/2020", _CC1, compiler=NEURON_CC),
    _recorded("tensorizer-options", Kind.TEXT, "options of a vendor stage"),
    _recorded("internal-hlo2tensorizer-options", Kind.TEXT, "options of a vendor stage"),
    _recorded("internal-backend-options", Kind.TEXT, "options of a vendor stage"),
    _recorded("cc-pipeline-tiling-factor", Kind.INTEGER, "tiling of the vendor's collectives"),
    _recorded("execute-repetition", Kind.INTEGER, "added by a wrapper"),
    _command(
        "cache_dir",
        Kind.TEXT,
        "where compiled functions are kept, a directory or s3://bucket/prefix (docs/cache.md)",
        _WRAPPER,
    ),
    _command(
        "no_cache",
        Kind.SWITCH,
        "compile without the cache",
        _WRAPPER,
        default=False,
    ),
    _command(
        "retry_failed_compilation",
        Kind.SWITCH,
        "compile again what is remembered as refused",
        _WRAPPER,
        default=False,
    ),
    Flag(
        name="log_level",
        kind=Kind.TEXT,
        effect=Effect.WRAPPER,
        renamed="verbose",
        help="belongs to the caching wrapper",
        source=_WRAPPER,
    ),
)


def _own(field: dataclasses.Field[Any]) -> Flag:
    """The flag of a compile option that no other compiler has."""
    kinds = {"bool": Kind.SWITCH, "int": Kind.INTEGER, "str": Kind.TEXT}
    choices = field.metadata.get("choices", ())
    return _option(
        field.name.replace("_", "-"),
        Kind.CHOICE if choices else kinds[str(field.type)],
        "option of this compiler only",
        "compiler/options.py",
        values=tuple(map(str, choices)),
        constant=not field.default,
        default=field.default,
    )


FLAGS: tuple[Flag, ...] = (
    *_NEURONX,
    *(
        _own(field)
        for field in dataclasses.fields(CompileOptions)
        if field.name not in {flag.field for flag in _NEURONX}
    ),
)


def canonical_name(spelling: str) -> str:
    """A long spelling in the table's form: `--Auto_Cast` is `auto-cast`."""
    return spelling.lstrip("-").replace("_", "-").lower()


BY_SPELLING: dict[str, Flag] = {canonical_name(f.name): f for f in FLAGS} | {
    alias: f for f in FLAGS for alias in f.aliases
}
"""Canonical long names, and aliases as they are written."""


def find(spelling: str) -> Flag | None:
    """The flag of a spelling with its dashes; None for an unknown one."""
    found = BY_SPELLING.get(spelling)
    if found is None and spelling.startswith("--"):
        found = BY_SPELLING.get(canonical_name(spelling))
        found = BY_SPELLING.get(f"--{canonical_name(spelling)}", found)
    return found
