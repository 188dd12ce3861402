"""Flags that describe a job, for every verb that takes one: common keys by a name of their own, any
key by `--set`, and the environment below them.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from shardwright.compiler.diagnostics import Diagnostic, UsageError, did_you_mean
from shardwright.compiler.frontend.tensorflow.start import KERAS, is_saved, split_name
from shardwright.orchestrator.compile import cc_flags
from shardwright.orchestrator.config import config
from shardwright.orchestrator.config.arguments import with_values
from shardwright.orchestrator.config.importers.imported import (
    PROJECTS,
    Asked,
    Imported,
    imported,
)
from shardwright.orchestrator.config.model import MODELS
from shardwright.orchestrator.config.model_file import FILES, is_text
from shardwright.orchestrator.environment import reading
from shardwright.orchestrator.models.presets import preset_list, preset_names
from shardwright.orchestrator.terminal.terminal import say
from shardwright.orchestrator.validation.recipes import Tables

File = TypeVar("File", bound=Path | None)

_FLAGS = {
    "recipe": (
        "model.recipe",
        "a published run, layout or service as the job (docs/validation.md)",
    ),
    "strategy": ("strategy.name", "distribution strategy"),
    "target": ("cluster.target", "instance type or family, or a JSON file"),
    "instances": ("cluster.instances", "number of instances"),
    "lnc": ("cluster.lnc", "physical cores per logical NeuronCore; 0: as the machine has them"),
    "placement": ("cluster.placement", "a name, or the axes from outermost to innermost"),
    "profile": ("cluster.profile", "machine rates"),
    "executor": ("run.executor", "where units run"),
    "workers": ("run.workers", "worker processes or Ray actors"),
    "hosts": ("run.hosts", "processes or Ray actors that hold the cores of the value run"),
    "checkpoint-every": ("run.checkpoint_every", "steps between checkpoints of the value run"),
    "progress": ("run.progress", "progress on stderr"),
    "events": ("output.events", "append JSON lines about units to this file"),
    "steps": ("run.steps", "optimizer steps of the value run"),
    "seed": ("run.seed", "seed of parameters and batches"),
    "mode": ("model.mode", "what a step does"),
    "seq-len": ("model.seq_len", "tokens per sample, for example 4096 or 4Ki"),
    "dtype": ("model.dtype", "compute type; auto: as the model says"),
    "lora": ("model.lora_r", "rank of low-rank adapters, trained in place of the model; 0: none"),
    "micro-batch": ("strategy.micro_batch", "samples per rank and micro-batch"),
    "global-batch": ("strategy.global_batch", "samples per step; of inference sequences"),
    "global-batch-tokens": ("strategy.global_batch_tokens", "the same in tokens, for example 4Mi"),
    "remat": ("strategy.remat", "recomputation of activations"),
    "tokens": ("goal.tokens", "tokens to train on, for example 1T: how long, for how much"),
    "deadline": ("goal.deadline", "the time there is for them, for example 30d"),
    "budget": ("goal.budget", "the dollars there are for them, for example 2M"),
    "price": (
        "price.usd_per_hour",
        "your own dollars per instance hour: 21.5, or MACHINE=9,...",
    ),
    "price-kind": ("price.kind", "which published price: on-demand (default) or capacity-block"),
    "tries": ("run.tries", "changes that plan tries and reports; auto: two, if time allows"),
    "out": ("output.dir", "output directory; of plan report.json and report.html"),
}
_ALIASES = {"lnc": ("logical-nc-config",)}
_SWITCHES: dict[str, tuple[str, bool, str]] = {
    "hypothetical": (
        "cluster.hypothetical",
        True,
        "allow logical NeuronCores the machine cannot have",
    ),
    "fresh": ("cache.fresh", True, "ask anew: what is stored is no answer, and is replaced"),
    "resume": ("run.resume", True, "go on from the last checkpoint in the output directory"),
    "no-compare": ("run.compare", False, "values without the unsharded step beside them"),
}
_AXES = tuple(axis.name for axis in dataclasses.fields(config.MeshConfig))
_KEYS = (*(key for key, _ in _FLAGS.values()), *(key for key, _, _ in _SWITCHES.values()))


def add_job_verb(verbs: Any, name: str, help: str, own: Sequence[str] = ()) -> Any:
    """A verb about one job: its file, and the flags that describe it, as in `add_job_flags`."""
    parser = verbs.add_parser(name, help=help)
    parser.add_argument("job", type=Path, nargs="?", help="job.toml (optional)")
    add_source_flag(parser)
    add_job_flags(parser, own)
    return parser


def add_source_flag(parser: argparse.ArgumentParser) -> None:
    """What may stand in the place of a job file."""
    parser.add_argument(
        "--from",
        dest="source",
        nargs=2,
        metavar=("PROJECT", "FILE"),
        help=f"a training configuration of {', '.join(PROJECTS)} as the job (docs/from.md)",
    )


def add_job_flags(parser: argparse.ArgumentParser, own: Sequence[str] = ()) -> None:
    """Everything that says which job is meant, except its file. Flags that are the verb's `own`
    mean something else there: their keys are given by --set."""
    parser.add_argument(
        "--model",
        help="config.json or its folder, module:function, file.py:function, a lowered step (.hlo,"
        " .mlir, ...), an ONNX or MXNet model, a SavedModel's folder, or a preset:"
        f" {preset_list()}",
    )
    parser.add_argument(
        "--mesh",
        metavar="AXIS=SIZE,...",
        help="the whole mesh, for example dp_replicate=2,dp_shard=16; one size may be auto. Axes:"
        f" {', '.join(_AXES)}",
    )
    usual = config.JobConfig()
    parser.set_defaults(**{_FLAGS[flag][0]: None for flag in own})
    for flag, (key, text) in _FLAGS.items():
        if flag in own:
            continue
        spellings = (flag, *_ALIASES.get(flag, ()))
        names = dict.fromkeys(f"--{s}" for n in spellings for s in (n, n.replace("-", "_")))
        default, words = usual.value(key), config.words_of(key)
        shown = default if words and str(default) in words else None  # else it is told in words
        parser.add_argument(
            *names,
            dest=key,
            metavar=key.partition(".")[2].upper(),
            help=with_values(text, words, shown),
        )
    for flag, (key, value, text) in _SWITCHES.items():
        parser.add_argument(f"--{flag}", dest=key, action="store_const", const=value, help=text)
    parser.add_argument(
        "--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="any key of the job"
    )
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key of [faults]: slow_cores=5:1.3, dead_cores=17, slow_links=0/3-7:0.5, jitter=0.1",
    )


def job_config(args: argparse.Namespace, changes: config.Keys | None = None) -> config.JobConfig:
    """The job that the arguments of a verb with `add_job_flags` describe, with `changes` of its
    keys on top."""
    return imported_job(args, changes)[0]


def imported_job(
    args: argparse.Namespace, changes: config.Keys | None = None
) -> tuple[config.JobConfig, Imported | None]:
    """The same, with `--from` below all else that is said, and what was read from there. Raises
    UsageError for a job file beside it, and as `imported`."""
    if getattr(args, "source", None) is None:
        return job_configs(args, [args.job], changes=changes)[args.job], None
    if args.job:
        raise UsageError(
            "SW_USAGE",
            f"a job file or --from is required, got {args.job} and --from {args.source[1]}",
            hint="leave one out; what the imported job does not say is --set table.key=value",
        )
    from shardwright.orchestrator.config.layout import layout_of, machine_of  # which load NumPy
    from shardwright.sharding.partition.mesh import DATA_AXES

    bare = config.load(None, _overrides(args), _given(args), changes=changes)

    def cores_of(target: str) -> int:
        is_said = "cluster.target" in bare.given
        return machine_of(bare if is_said else bare.but({"cluster.target": target})).cores

    said = "cluster.instances" in bare.given
    asked = Asked(cores_of=cores_of, instances=bare.cluster.instances if said else 0)
    found = imported(args.source[0], Path(args.source[1]), asked)
    job = job_configs(args, [None], changes=changes, below=found.below(bare.given))[None]
    ways = layout_of(job.but(_ANY_BATCH)).mesh.size(DATA_AXES)
    job = job.but(found.with_batch(ways, bare.given))
    return job.but(found.with_goal(job, bare.given)), found


_ANY_BATCH = {"strategy.global_batch": 0, "strategy.global_batch_tokens": 0}
"""That of any mesh."""


def job_configs(
    args: argparse.Namespace,
    files: Sequence[File],
    on_cluster: bool = False,
    changes: config.Keys | None = None,
    below: Tables | None = None,
) -> dict[File, config.JobConfig]:
    """The same for every job file; jobs that will run `on_cluster` keep their paths. What the
    environment has to say is said once, for the jobs without changes. `below` are tables that
    only the environment lies below."""
    environment, variables = cc_flags.job_tables(os.environ), reading.of_jobs(os.environ)
    tables = reading.tables(variables, environment.tables)
    for name, keys in (below or {}).items():
        tables[name] = {**tables.get(name, {}), **keys}
    given = (_overrides(args), _given(args), tables, changes)
    jobs = {file: config.load(file, *given) for file in files}
    if changes is None:
        told = (_told(variables, job) for job in jobs.values())
        lines = [notice.render() for notice in (*environment.notices, *chain(*told))]
        for line in dict.fromkeys(lines):
            say(line, err=True)
    if on_cluster:
        return jobs
    return {file: config.with_absolute_paths(job) for file, job in jobs.items()}


def _told(variables: Sequence[reading.Said], job: config.JobConfig) -> Iterator[Diagnostic]:
    """What became of the environment in a job, and of old names in it."""
    for text in job.renamed:
        yield Diagnostic("SW_FLAG", text, severity="warning")
    given = {one.row.key: job.value(one.row.key) for one in variables if one.row.key}
    yield from reading.notices(variables, given)
    yield from reading.unused(os.environ)


def _overrides(args: argparse.Namespace) -> list[str]:
    """What `--set` and `--fault` say."""
    return [*args.set, *(f"faults.{text}" for text in args.fault)]


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags say, by key; None where a flag is left out. A mesh is given whole and takes
    the place of the file's; `--model` takes that of what a file trains, but of no other flag's: two
    that name a model are refused like two keys."""
    given = {key: getattr(args, key) for key in _KEYS}
    model = {key: value for key, value in _model_flag(args.model).items() if not given.get(key)}
    mesh = {} if args.mesh is None else _mesh_flag(args.mesh)
    return given | model | mesh


def changed_keys(name: str, value: str) -> config.Keys:
    """The keys of a job that `name` sets to `value`: a key (`strategy.remat`), or what has a flag
    (`remat`, `model`; `mesh` sets every axis). Raises UsageError for anything else."""
    name = name.strip()
    flag = name.replace("_", "-")
    if flag == "model":
        return _model_flag(value)
    if flag == "mesh":
        return _mesh_flag(value)
    for given, (key, _) in _FLAGS.items():
        if flag in (given, *_ALIASES.get(given, ())):
            return {key: value}
    table, dot, key = name.replace("-", "_").partition(".")
    if not (table and dot and key):
        names = ("model", "mesh", *_FLAGS)
        raise UsageError(
            "SW_USAGE",
            f"a job has no key {name!r}",
            hint=did_you_mean(flag, names, f"give table.key, or one of {', '.join(names)}"),
        )
    return {f"{table}.{key}": value}


ENDINGS = {
    "mxnet": ("-symbol.json",),
    "config": (".json",),
    "hlo": (".hlo", ".pb", ".txt", ".mlir", ".mlirbc", ".stablehlo", ".bin", ".pt2"),
    "onnx": (".onnx",),
    "tensorflow": (KERAS,),
}
"""Key of `[model]` -> how the names of its files end."""


def _model_flag(model: str | None) -> dict[str, str]:
    if model is None:
        return {}
    kind, value = _model_key(model)
    given = {f"model.{name}": "" for name in MODELS}
    return given | {f"model.{kind}": value}


def _model_key(model: str) -> tuple[str, str]:
    """The key of `[model]` that `--model` means, and its value; paths are absolute."""
    if is_saved(Path(split_name(model)[0])):
        return "tensorflow", str(Path(model).resolve())
    file, colon, function = model.rpartition(":")
    if colon:
        is_file = file.endswith(".py")
        return "entry", f"{Path(file).resolve()}:{function}" if is_file else model
    path = Path(model)
    if path.suffix == ".py":
        raise UsageError(
            "SW_ENTRY",
            f"--model of a Python file requires the function or class that gives the model, got"
            f" {model} alone",
            hint=f"give --model {model}:FUNCTION{_defined(path)}",
        )
    if _is_folder(path, model):
        return "config", str((path / "config.json").resolve())
    kind = next((key for key, ends in ENDINGS.items() if model.endswith(ends)), "")
    if kind:
        return kind, str(path.resolve())
    return "preset", model


def _defined(path: Path) -> str:
    """What a Python file defines at its top, to add to a hint; the file is not run."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # the file is judged where it is used
        return ""
    kinds = (ast.FunctionDef, ast.ClassDef)
    names = [node.name for node in body if isinstance(node, kinds) and node.name[0] != "_"]
    return f"; {path.name} defines {', '.join(names)}" if names else ""


def _is_folder(path: Path, model: str) -> bool:
    """Whether a folder with a `config.json` is meant; a preset's name alone is the preset."""
    if os.sep in model or model in (os.curdir, os.pardir):
        return path.is_dir()
    return (path / "config.json").is_file() and model not in preset_names()


def _mesh_flag(mesh: str) -> dict[str, Any]:
    """Every axis: those that are not named have their value in a job that says nothing."""
    pairs = [part.partition("=") for part in mesh.split(",") if part]
    if not all(equals for _, equals, _ in pairs):
        hint = f"axes are {', '.join(_AXES)}"
        raise UsageError("SW_USAGE", f"--mesh requires axis=size,..., got {mesh!r}", hint=hint)
    given = {f"mesh.{axis.strip()}": size.strip() for axis, _, size in pairs}
    return {f"mesh.{axis}": 0 for axis in _AXES} | given


def as_words(args: argparse.Namespace, folder: Path) -> list[str]:
    """Words that say the same as the flags of `args` to a command that is given elsewhere: the
    file of a model is named from `folder`, where the job file lies."""
    given = _given(args)
    for key in (f"model.{name}" for name in FILES):
        if given.get(key) and not is_text(given[key]):
            given[key] = os.path.relpath(given[key], folder)
    if os.path.isabs(entry := given.get("model.entry") or ""):
        given["model.entry"] = os.path.relpath(entry, folder)
    settings = [f"{key}={value}" for key, value in given.items() if value is not None]
    settings += _overrides(args)
    return [word for setting in settings for word in ("--set", setting)]
