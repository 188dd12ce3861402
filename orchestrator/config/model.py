"""The training task a job names: a preset, a Hugging Face `config.json`, the user's own
function, a lowered step, or a model of ONNX, MXNet or TensorFlow."""

from __future__ import annotations

import dataclasses
import os
import site
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.compiler.diagnostics import Loc, UsageError
from shardwright.compiler.frontend.entry import entry_names, load_task
from shardwright.compiler.frontend.task import Mode, TrainTask
from shardwright.compiler.frontend.tensorflow.start import imports_it, is_saved
from shardwright.compiler.neff.format import MAX_FILE_BYTES
from shardwright.compiler.support.files import read_regular
from shardwright.orchestrator.config.config import KEYS, JobConfig, Keys
from shardwright.orchestrator.config.model_file import given_file, is_text, model_config, model_path
from shardwright.orchestrator.models.presets import preset_task
from shardwright.orchestrator.validation.recipes import Served, recipe, trained_recipe

if TYPE_CHECKING:
    from shardwright.orchestrator.models.adapters import Lora

MODELS = ("preset", "config", "entry", "hlo", "onnx", "mxnet", "tensorflow", "recipe")
"""The keys of `[model]` that name one."""
_GRAPHS = {"onnx": "an ONNX model", "mxnet": "an MXNet model"}
"""Keys whose files are graphs of operators, and what to call one."""
_DTYPES = {"float32": "f32", "bfloat16": "bf16"}
_CONFIG_TYPES = {"bfloat16": "bfloat16", "float16": "bfloat16"}
"""`torch_dtype` of a config -> what its step computes in. Checkpoints in float16 are trained in
bfloat16 on these machines."""


def resolve_task(job: JobConfig) -> TrainTask:
    """The task of `[model]`. Raises UsageError, as `check_named`."""
    check_named(job)
    model = job.model
    if mode_of(job) is not Mode.TRAIN:
        return _served(job)
    if traced := _tensorflow_of(job):
        return _of_tensorflow(job, traced)
    if model.entry:
        from shardwright.orchestrator.config.layout import machine_of  # which loads NumPy

        ranks = machine_of(job).cores * job.cluster.instances
        task = load_task(*entry_of(job), settings=own_settings(job), ranks=ranks)
        if model.generator == "auto":
            return task
        from shardwright.compiler.frontend.generator import drawn_by

        return drawn_by(task, model.generator)
    if model.generator != "auto":
        raise UsageError(
            "SW_MODEL_SETTING",
            f"model.generator = {model.generator!r} requires a step of your own (model.entry), got"
            f" {model.preset or model.recipe or given_file(model)[1]}",
            hint="leave the setting out: presets and configs draw nothing, and lowered steps and"
            " recipes say themselves what draws",
        )
    return _ours(job)


def mode_of(job: JobConfig) -> Mode:
    """What a step of a job does."""
    return Mode(job.model.mode)


def _served(job: JobConfig) -> TrainTask:
    """The prefill or the decode step of a decoder. Raises UsageError for a model that is none."""
    from shardwright.orchestrator.config.layout import layout_of  # which loads NumPy
    from shardwright.orchestrator.models.serving import served_config, served_preset

    model, layout = job.model, layout_of(job)
    asked: dict[str, Any] = {
        "mode": mode_of(job),
        "sequences": layout.global_batch,
        "context": model.seq_len,
        "dtype": _DTYPES[compute_type(job)],
    }
    if preset := _served_name(job):
        return served_preset(preset, **asked)
    return _of_file(job, lambda config, name: served_config(config, name=name, **asked))


def _served_name(job: JobConfig) -> str:
    """The preset that a job serves; empty where it serves none."""
    if job.model.recipe and isinstance(served := recipe(job.model.recipe), Served):
        return served.preset
    return job.model.preset


def check_named(job: JobConfig) -> None:
    """That exactly one of `MODELS` is given, an entry in its form. Raises UsageError."""
    model = job.model
    given = [name for name in MODELS if getattr(model, name)]
    if len(given) != 1:
        raise UsageError(
            "SW_MODEL",
            f"[model] requires exactly one of {', '.join(MODELS)}, got {given or 'none'}",
            hint="for example --model llama2-7b",
        )
    if model.entry:
        entry_names(model.entry)
    if mode_of(job) is not Mode.TRAIN:
        _check_served(job)


OF_TRAINING = (
    *("model.optimizer", "model.learning_rate", "model.clip", "model.capacity_factor"),
    *("model.lora_r", "model.lora_alpha", "model.lora_targets", "model.lora_base"),
    *("strategy.global_batch_tokens", "strategy.remat", "strategy.reshard_after_forward"),
    *("strategy.reduce_dtype", "strategy.reduce_gradients", "strategy.late_reduce_scatter_shift"),
    *("strategy.accumulate_dtype", "strategy.gradient_accumulation_fusion"),
    *(key for key in KEYS if key.startswith(("goodput.", "goal."))),
    *("run.checkpoint_every", "run.resume"),
)
"""Keys that say something about training alone."""


def _check_served(job: JobConfig) -> None:
    """Refuse inference of what is no preset, no config and no recipe of serving, and settings of
    training. Raises UsageError."""
    model, usual = job.model, JobConfig().but({"strategy.remat": "none"})
    if not (model.config or _served_name(job)):
        named = next(name for name in MODELS if getattr(model, name))
        raise UsageError(
            "SW_MODE",
            f"model.mode = {model.mode} requires a preset or a config, whose step is built here,"
            f" got model.{named} = {getattr(model, named)}",
            hint="a function of your own compiles as it is: shardwright compile FILE, of its HLO",
        )
    said = [key for key in OF_TRAINING if job.value(key) != usual.value(key)]
    said += [key for key in job.strategy.open_keys if key not in said]
    for key in said:
        raise UsageError(
            "SW_MODE",
            f"model.mode = {model.mode} requires no setting of training, got {key} ="
            f" {job.value(key)!r}",
            hint="leave the setting out, or take --mode train",
        )


def _ours(job: JobConfig) -> TrainTask:
    """The task of a published run, a lowered step, a preset or a config."""
    model = job.model
    if model.recipe:
        _refuse_settings(job, "a published run", ("model.seq_len", "strategy.remat"))
        return _published(job)
    if model.hlo:
        from shardwright.compiler.frontend.module_task import module_task

        _refuse_settings(job, "lowered", ("model.seq_len",))
        return module_task(model_path(job), model.seq_len)
    if given_file(model)[0] in _GRAPHS:
        return _of_graph(job)
    if model.preset:
        return preset_task(model.preset, seq_len=model.seq_len, **_options(job))
    from shardwright.orchestrator.models.config_task import train_task

    def made(config: dict[str, Any], name: str) -> TrainTask:
        return train_task(config, seq_len=model.seq_len, name=name, **_options(job))

    return _of_file(job, made)


def _of_graph(job: JobConfig) -> TrainTask:
    """The task of a model of operators, with the optimizer of the job. Raises UsageError."""
    from shardwright.compiler.frontend.graphs.training import train_task
    from shardwright.orchestrator.models.blocks import make_optimizer

    model, path, key = job.model, model_path(job), given_file(job.model)[0]
    _refuse_settings(job, _GRAPHS[key], ("model.optimizer", "model.learning_rate", "model.clip"))
    try:
        data = read_regular(path, MAX_FILE_BYTES)
    except OSError as error:
        raise UsageError(
            "SW_MODEL", f"model.{key}: cannot read {path}: {error.strerror or error}"
        ) from error
    transformation = make_optimizer(model.optimizer, model.learning_rate, model.clip)
    return train_task(path, data, model.loss, transformation, model.input_shape)


def _tensorflow_of(job: JobConfig) -> str:
    """The path of a model of TensorFlow, with the name behind it, that a job names: a saved one, or
    an entry whose module imports TensorFlow, which this process does not run. Empty for others."""
    if job.model.tensorflow:
        return str(Path(job.base).resolve() / job.model.tensorflow)
    if not job.model.entry:
        return ""
    name = entry_of(job)[0].partition(":")[2]
    module = next(reversed([path for path in _entry_files(job) if path.is_file()]), None)
    return f"{module}:{name}" if module is not None and imports_it(module) else ""


def _of_tensorflow(job: JobConfig, path: str) -> TrainTask:
    """The task of a model of TensorFlow: a step of its own, or with the optimizer of the job.
    Raises UsageError."""
    from shardwright.compiler.frontend.tensorflow.training import train_task
    from shardwright.orchestrator.models.blocks import make_optimizer

    model, obeyed = job.model, ("model.optimizer", "model.learning_rate", "model.clip")
    _refuse_settings(job, "a model of TensorFlow", obeyed if model.loss else ())
    transformation = make_optimizer(model.optimizer, model.learning_rate, model.clip)
    return train_task(path, model.loss, transformation, model.input_shape)


def _of_file(job: JobConfig, made: Callable[[dict[str, Any], str], TrainTask]) -> TrainTask:
    """The task that is `made` of a config and its name. Raises UsageError at the file."""
    path = model_path(job)
    place = path.resolve()  # `config.json` has the name of its folder
    name = (place.parent.name if place.name == "config.json" else place.stem) or "model"
    name = "model" if is_text(job.model.config) else name
    try:
        return made(model_config(job), name)
    except UsageError as error:
        d = error.diagnostic
        if d.code not in ("SW_MODEL_CONFIG", "SW_SEQ_LEN"):
            raise
        # The values of the file are at fault.
        where = d.loc if is_text(job.model.config) else Loc(str(path))
        raise UsageError(d.code, d.message, where, d.hint) from error


_OF_OUR_STEPS = (
    *("model.seq_len", "model.dtype", "model.optimizer", "model.learning_rate", "model.clip"),
    *("strategy.remat", "model.lora_r", "model.lora_alpha", "model.lora_targets"),
    *("model.lora_base", "model.capacity_factor"),
)
"""Keys that say how a step of ours is built; the user's own function may take them as arguments."""


def own_settings(job: JobConfig) -> Keys:
    """What the job says about how its step is built, by key."""
    usual, found = JobConfig(), {}
    for key in _OF_OUR_STEPS:
        value, default = job.value(key), usual.value(key)
        says_nothing = value in (0, "auto") and value == default
        if not says_nothing and (key in job.given or value != default):
            found[key] = value
    return found


def _refuse_settings(job: JobConfig, what: str, obeyed: Sequence[str]) -> None:
    """Refuse what a step that is `what` cannot obey. Raises UsageError."""
    instead = "take a preset or a config"
    key, given = given_file(job.model)
    if key or job.model.entry:
        instead = "lower the step again with it" if key == "hlo" else "export the model with it"
    if key == "tensorflow" or job.model.entry:
        instead = "say it in the code of the model"
    for key, value in own_settings(job).items():
        if key not in obeyed:
            raise UsageError(
                "SW_MODEL_SETTING",
                f"{key} = {value!r} requires a step that is built here, got"
                f" {given or job.model.entry or job.model.recipe}, which is {what}",
                hint=f"leave the setting out, or {instead}",
            )


def _published(job: JobConfig) -> TrainTask:
    """The step of a published run, for as many tensor-parallel ranks as the job has."""
    from shardwright.orchestrator.validation.tasks import task_of

    own = trained_recipe(job.model.recipe).workload
    return task_of(
        dataclasses.replace(
            own,
            tp=max(1, job.mesh.tp),
            remat=job.strategy.remat,
            seq_len=job.model.seq_len or own.seq_len,
        ),
        job.model.recipe,
    )


def entry_of(job: JobConfig) -> tuple[str, Path]:
    """`module:function`, and the folder where the module is looked up first. A file of Python
    (`folder/file.py:function`), relative to the job, is a module of its folder."""
    module, colon, function = job.model.entry.rpartition(":")
    if not module.endswith(".py"):
        return job.model.entry, Path(job.base)
    path = Path(job.base) / module
    if not path.is_file():
        raise UsageError("SW_ENTRY", f"[model] entry requires a file {path}, there is none")
    return f"{path.stem}{colon}{function}", path.parent


def compute_type(job: JobConfig) -> str:
    """The resolved `model.dtype`."""
    if job.model.dtype != "auto":
        return job.model.dtype
    if job.model.recipe:
        own = recipe(job.model.recipe)
        is_short = isinstance(own, Served) or own.workload.storage.activations == "bf16"
        return "bfloat16" if is_short else "float32"
    if not job.model.config:
        return "bfloat16" if job.model.preset else "float32"
    config = model_config(job)
    return _CONFIG_TYPES.get(str(config.get("dtype") or config.get("torch_dtype")), "float32")


def _options(job: JobConfig) -> dict[str, Any]:
    model = job.model
    return {
        "lora": _lora(job),
        "capacity_factor": model.capacity_factor,
        "seats_for_all": _has_seats(job),
        "dtype": _DTYPES[compute_type(job)],
        "optimizer": model.optimizer,
        "clip": model.clip,
        "lr": model.learning_rate,
        "remat": job.strategy.remat,
    }


def _has_seats(job: JobConfig) -> bool:
    """Whether experts that drop no row have a seat for each: where cores exchange rows, and where a
    core has several samples, whose blocks would each copy the matrices of their expert."""
    return job.mesh.ep > 1 or job.strategy.smallest_micro_batch > 1


def _lora(job: JobConfig) -> Lora | None:
    """The adapters of a job. Raises UsageError for what is said about adapters that are none."""
    model, usual = job.model, JobConfig().model
    if not model.lora_r:
        for name in ("lora_alpha", "lora_targets", "lora_base"):
            if getattr(model, name) != getattr(usual, name):
                raise UsageError(
                    "SW_MODEL_SETTING",
                    f"model.{name} requires adapters, got model.lora_r = 0",
                    hint="say their rank: --lora 16",
                )
        return None
    from shardwright.orchestrator.models.adapters import Lora

    alpha = model.lora_alpha or 2.0 * model.lora_r
    return Lora(r=model.lora_r, alpha=alpha, targets=model.lora_targets, base=model.lora_base)


def model_key(job: JobConfig) -> Hashable:
    """What the task of a job depends on, while this process lasts."""
    files = tuple((path, path.read_bytes()) for path in source_files(job))
    settings = tuple(own_settings(job).items()), job.strategy.remat
    # A step with a cache is one of as many sequences, which a mesh may decide.
    batch = (job.strategy, job.mesh, job.cluster) if mode_of(job) is not Mode.TRAIN else ()
    mesh = job.mesh.tp if job.model.recipe else 0
    return job.model, *settings, mesh, _has_seats(job), batch, job.base, files


def source_files(job: JobConfig) -> Iterable[Path]:
    """The user's files that `[model]` names: a config, a lowered step, the module of an entry and
    the packages around it. What a module imports is known only once it is captured (`reads.py`).
    Raises UsageError for a config that cannot be read."""
    if job.model.config:
        model_config(job)  # which says what is wrong with it
        return [] if is_text(job.model.config) else [model_path(job)]
    key, _ = given_file(job.model)
    if key and (path := model_path(job)).exists():  # else the task says what is wrong
        return _BESIDE.get(key, _of_folder)(path)
    return [path for path in _entry_files(job) if path.is_file()] if job.model.entry else []


def _of_operators(path: Path) -> Iterator[Path]:
    """A model of operators, and the files with its weights."""
    from shardwright.compiler.frontend.graphs.forms import form_of

    if not path.is_file():
        return
    yield path
    data = path.read_bytes()
    form = form_of(data)
    found = form.beside(data, path) if form is not None else ()
    yield from (file for file in found if file.is_file())  # else reading the model says so


def _of_folder(path: Path) -> Iterator[Path]:
    """A file, or the files of a SavedModel's folder."""
    is_folder = path.is_dir() and is_saved(path)
    found = sorted(path.rglob("*")) if is_folder else [path]
    return (file for file in found if file.is_file())


_BESIDE: Mapping[str, Callable[[Path], Iterable[Path]]] = {
    "onnx": _of_operators,
    "mxnet": _of_operators,
}
"""Key of `[model]` -> the files that what it names is made of, where one names others."""


def entry_folders(job: JobConfig) -> set[Path]:
    """The folder of a job and those of its entry, wherever they are."""
    return {Path(job.base), *(path.parent for path in _entry_files(job))}


def _entry_files(job: JobConfig) -> Iterator[Path]:
    """The files of an entry's packages, and of its module."""
    entry, folder = entry_of(job)
    places: Sequence[str] | None = [str(folder), *sys.path]
    for name in entry.partition(":")[0].split("."):
        spec = PathFinder.find_spec(name, places)
        if spec is None:
            return
        if spec.origin:
            yield Path(spec.origin)
        places = spec.submodule_search_locations or ()


def installed() -> list[str]:
    """Every installed distribution with its version. Not those that a package brings along and puts
    on `sys.path` when it is loaded (Ray does): the answer would depend on what this process has
    loaded."""
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = (*site.getsitepackages(), site.getusersitepackages(), *own)
    places = (Path(place) for place in dict.fromkeys(folders) if place)
    found = (entry for place in places if place.is_dir() for entry in os.listdir(place))
    return sorted({name for name in found if name.endswith(".dist-info")})
