"""How a PyTorch user distributes a model: FSDP2's terms as one frozen object, without torch.

`distributed.py` reads it from the user's code, `distribution_table.py` from a table; what it comes
to here is decided in `orchestrator/config/importers/pytorch.py`. Names of modules and parameters
are those of the user's `nn.Module`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from shardwright.compiler.diagnostics import UNKNOWN_LOC, Loc


class Style(StrEnum):
    """Styles of `torch.distributed.tensor.parallel`."""

    COLUMN = "ColwiseParallel"
    ROW = "RowwiseParallel"
    SEQUENCE = "SequenceParallel"
    INPUT = "PrepareModuleInput"
    OUTPUT = "PrepareModuleOutput"
    INPUT_OUTPUT = "PrepareModuleInputOutput"

    @property
    def splits_weights(self) -> bool:
        """Whether weights of the module lie over the axis; else only what goes in and out does."""
        return self in (Style.COLUMN, Style.ROW)


class Recompute(StrEnum):
    """What a checkpointed module keeps between its passes."""

    FULL = "full"
    """Its inputs."""
    SELECTIVE = "selective"
    """What a policy of the user picks (`context_fn`)."""
    OFFLOAD = "offload"
    """Everything, in the memory of the host (`offload_wrapper`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A dim of the DeviceMesh, outermost first in a `Distribution`."""

    name: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """MixedPrecisionPolicy: names of torch's types, "" where none is given."""

    param_dtype: str = ""
    reduce_dtype: str = ""
    output_dtype: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A group of parameters that is gathered and reduced as one: a call of `fully_shard`.

    `modules` are those of the call, "" the model itself. With `group` they are patterns instead
    (`layers.*`): so many matches in order are a unit. `parameters` are held by no unit inside of
    it. `reshard` None is the default: true for all but the root. `axes` are those that it is
    sharded over, `replicas` those of copies (the first dim of a mesh of two); none is all ranks.
    """

    modules: tuple[str, ...]
    group: int = 0
    parameters: tuple[str, ...] = ()
    reshard: bool | int | None = None
    precision: Precision = Precision()
    axes: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()
    offload: str = ""
    loc: Loc = UNKNOWN_LOC

    @property
    def is_root(self) -> bool:
        """Whether it is the whole model, with what no other unit holds."""
        return self.modules == ("",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """A module of a `parallelize_module` plan.

    `module` is a path or a pattern, `weights` its parameters with the dim that lies over the axis.
    Layouts are as PyTorch prints them ("Shard(dim=1)"), "" where none is given.
    """

    module: str
    style: Style
    weights: tuple[tuple[str, int], ...] = ()
    inputs: str = ""
    outputs: str = ""
    axes: tuple[str, ...] = ()
    loc: Loc = UNKNOWN_LOC


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed:
    """A module whose activations are computed again; a path or a pattern."""

    module: str
    keeps: Recompute = Recompute.FULL
    loc: Loc = UNKNOWN_LOC


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A point between stages of a pipeline, in front of a module or behind it."""

    module: str
    is_behind: bool = False
    loc: Loc = UNKNOWN_LOC


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Stages in order, and how micro-batches go through them (a class of torch's, "" and 0 where
    none is said)."""

    cuts: tuple[Cut, ...] = ()
    axes: tuple[str, ...] = ()
    schedule: str = ""
    micro_batches: int = 0
    loc: Loc = UNKNOWN_LOC


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """A model whose gradients are averaged whole: DistributedDataParallel, FSDP1's NO_SHARD."""

    module: str
    axes: tuple[str, ...] = ()
    bucket_mb: int = 0
    precision: Precision = Precision()
    loc: Loc = UNKNOWN_LOC


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """A term that is none of the above: what was said, and a value."""

    term: str
    value: str = ""
    loc: Loc = UNKNOWN_LOC


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """What a user's code says about how a model is distributed.

    `modules` are the paths of all modules in the order of the model, empty where only names are
    known; `lists` those that hold layers in a row (ModuleList, Sequential, ModuleDict), with how
    many. `samples` are those of the batch that the code gives beside the model, which in PyTorch is
    one of a process; 0 where it gives none.
    """

    axes: tuple[Axis, ...] = ()
    units: tuple[Unit, ...] = ()
    parallel: tuple[Parallel, ...] = ()
    checkpointed: tuple[Checkpointed, ...] = ()
    pipeline: Pipeline | None = None
    replicated: tuple[Replicated, ...] = ()
    others: tuple[Other, ...] = ()
    lists: tuple[tuple[str, int], ...] = ()
    modules: tuple[str, ...] = ()
    samples: int = 0
    mesh_loc: Loc = UNKNOWN_LOC

    @property
    def cores(self) -> int:
        """Ranks of the mesh; 0 without one."""
        found = 1 if self.axes else 0
        for axis in self.axes:
            found *= axis.size
        return found


AXIS_NAMES = {
    "pp": ("pp", "pipe", "pipeline", "stage"),
    "dp_replicate": ("dp_replicate", "replicate", "ddp", "rep", "dp_rep", "dp_outer"),
    "dp_shard": ("dp_shard", "fsdp", "shard", "dp", "data", "batch", "dp_inner", "zero"),
    "cp": ("cp", "context", "ring", "sp", "seq", "sequence"),
    "tp": ("tp", "tensor", "model", "mp"),
    "ep": ("ep", "expert", "experts", "dp_shard_in_ep"),
}
"""Axes of ours -> names that people give to such a dim of a DeviceMesh."""


def axis_named(name: str) -> str:
    """The axis of ours that a dim is called after, "" for none."""
    wanted = name.lower()
    if wanted == "dp_shard_mod_ep":  # torchtitan: what `ep` leaves of dp_shard
        return "dp_shard"
    return next((axis for axis, names in AXIS_NAMES.items() if wanted in names), "")


_SPLIT_DIMS = {
    "Linear": {Style.COLUMN: 0, Style.ROW: 1},
    "Embedding": {Style.COLUMN: 1, Style.ROW: 0},
}
"""Dims of weights that styles spread: of a Linear [out, in], of an Embedding [rows, columns]
(torch.distributed.tensor.parallel.style)."""
SPLIT_KINDS = tuple(_SPLIT_DIMS)


def split_weights(style: Style, kind: str, *, has_bias: bool) -> tuple[tuple[str, int], ...]:
    """(parameter, dim) of what a style spreads of a module of a kind; a row's bias stays whole."""
    if not style.splits_weights:
        return ()
    bias = (("bias", 0),) if has_bias and style is Style.COLUMN else ()
    return (("weight", _SPLIT_DIMS[kind][style]), *bias)


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def pattern_of(path: str) -> str:
    """A path with `*` for the number of its layer, the first: what the same module of every layer
    has in common. Numbers below are those of modules in a Sequential, which differ."""
    return _NUMBER.sub("*", path, count=1)


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern names a path: part by part, as plans of `parallelize_module` are read."""
    parts, names = pattern.split("."), path.split(".")
    return len(parts) == len(names) and all(map(fnmatchcase, names, parts))


def matching(pattern: str, paths: Iterable[str]) -> list[str]:
    """The paths that a pattern names, in their order."""
    return [path for path in paths if matches(pattern, path)]
