"""What a user hands over: a training step with its abstract state and batches, as one `TrainTask`.

A job names a function that returns a task (`entry = "module:function"`); presets build theirs in
`models/`. Nothing here imports jax: a task only holds the user's functions, `capture.py` and
`reference.py` call them.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.compiler.diagnostics import Loc, UsageError
from shardwright.compiler.frontend.roles import ROLES
from shardwright.compiler.frontend.user_code import called

if TYPE_CHECKING:
    from shardwright.compiler.frontend.capture import Captured

BATCH = "batch"
BatchFactory = Callable[[int, int, str | None], Iterator[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainTask:
    """A training step as a JAX and optax user writes it.

    `step(*state, batch) -> (*state, metrics)`: pure, traces at any batch size, returns the state
    with unchanged types;
    `metrics` is a scalar loss or a pytree with a scalar `loss`. The loss and gradients are means
    over the samples, so that micro-batches average. A step may take the batch as several arguments,
    and keys that it does not return, and return the same in another way: `step_form.py` finds what
    is what, unless it is said. `arguments` is what the step takes, in order: names of the state's
    parts, "batch", or pieces of it ("batch/x"); any other name is a key, a fresh one per step.
    `results` names what it returns, a tuple ("params", "opt_state", "metrics"), and `loss` is the
    path of the loss among the metrics. `fresh_keys` are the parts of the state that are such keys.
    `init(key) -> state` (a tuple) draws the first state from a `jax.random.key`. Without it the
    task is timing-only and
    `state` gives the tuple of pytrees of `jax.ShapeDtypeStruct`.
    `batch(n)` is the pytree of `jax.ShapeDtypeStruct` of `n` samples; `batch_dim` is its sample
    dim.
    `batches(seed, n, data)` iterates over NumPy pytrees of `n` samples; `data` is `[run] data` of
    the job. What leaves of the state are is found by name and use (`roles.py`); `roles` says it by
    path or path prefix ("state/step" -> "optimizer").
    `samples` is how many the batch has that the user's example is of; 0 where there is none.
    `captured` is there instead of the functions where the step comes as a file (`module_task.py`):
    the capture of `n` samples.
    `full_precision` is the same task computed in fp32: what runs of a bf16 task are compared with.
    `model` is the task without copies, where `step` computes parts of the model on several ranks
    alike (key-value heads of more tensor-parallel ranks than there are): what MFU counts.
    """

    step: Callable[..., Any]
    batch: Callable[[int], Any]
    init: Callable[[Any], tuple[Any, ...]] | None = None
    state: tuple[Any, ...] | None = None
    batches: BatchFactory | None = None
    state_names: tuple[str, ...] = ("params", "opt_state")
    arguments: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    loss: str = ""
    fresh_keys: tuple[str, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)
    samples: int = 0
    batch_dim: int = 0
    tokens_per_sample: int = 1
    full_precision: TrainTask | None = None
    model: TrainTask | None = None
    captured: Callable[[int], Captured] | None = None
    name: str = "step"

    def __post_init__(self) -> None:
        if self.init is None and self.state is None:
            raise UsageError(
                "SW_TASK_STATE",
                "a TrainTask requires `init` or `state`, got neither",
                hint="give init=fn(key) -> (params, opt_state), or the abstract state for timing",
            )
        unknown = sorted(set(self.roles.values()) - set(ROLES))
        if unknown:
            raise UsageError(
                "SW_TASK_ROLE", f"roles of a TrainTask are {', '.join(ROLES)}, got {unknown}"
            )


def entry_names(entry: str) -> tuple[str, str]:
    """Module and function of `module:function`. Raises UsageError for another form."""
    module_name, _, function_name = entry.partition(":")
    if not module_name or not function_name:
        raise UsageError("SW_ENTRY", f'[model] entry requires "module:function", got "{entry}"')
    return module_name, function_name


def load_task(
    entry: str,
    folder: Path,
    arguments: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> TrainTask:
    """Import `module:function` from `folder` (then from the environment) and call it with
    `arguments`, and with `settings` of the job by their keys (`strategy.remat`), which it takes as
    `remat`.

    Raises: UsageError when the entry cannot be found, raises or does not return a TrainTask, or
    takes a setting not.
    """
    module_name, function_name = entry_names(entry)
    with _on_path(folder):
        function = _find_function(module_name, function_name, folder)
        taken = _taken(function, function_name, settings or {})
        with called(f"[model] entry {entry}", str(folder)):
            task = function(**(arguments or {}), **taken)
    if not isinstance(task, TrainTask):
        raise UsageError(
            "SW_ENTRY",
            f"[model] entry {entry} requires a function returning a TrainTask, got "
            f"{type(task).__name__}",
            hint="from shardwright import TrainTask",
        )
    return task


def _taken(function: Callable[..., Any], name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as arguments of the function. Raises UsageError for one that it does not take:
    a step of the user's is theirs, nothing else could obey.
    """
    parameters = inspect.signature(function).parameters.values() if settings else ()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    taken = {}
    for key, value in settings.items():
        argument = key.rpartition(".")[2]
        if not takes_all and argument not in names:
            code = getattr(inspect.unwrap(function), "__code__", None)
            raise UsageError(
                "SW_MODEL_SETTING",
                f"{key} = {value!r} requires a function that takes {argument}, got"
                f" {name}({', '.join(sorted(names))})",
                Loc(Path(code.co_filename).name, code.co_firstlineno) if code else None,
                f"write def {name}({argument}=...) and build the step with it, or leave the"
                " setting out",
            )
        taken[argument] = value
    return taken


@contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    """`folder` first on the import path."""
    path = str(folder.resolve())
    sys.path.insert(0, path)
    try:
        yield
    finally:
        sys.path.remove(path)


def _find_function(module_name: str, function_name: str, folder: Path) -> Callable[..., Any]:
    """The function of the entry. Raises UsageError when module or function is missing."""
    _forget_namesake(module_name, folder)
    importlib.invalidate_caches()
    try:
        with called(f"importing {module_name}", str(folder)):
            module = importlib.import_module(module_name)
    except UsageError as error:
        missing = error.__cause__
        if not isinstance(missing, ModuleNotFoundError) or not missing.name:
            raise
        if not f"{module_name}.".startswith(f"{missing.name}."):
            raise  # the module is there, something it imports is not
        raise UsageError(
            "SW_ENTRY", f"[model] entry requires a module {module_name}, none in {folder}"
        ) from missing
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(
            "SW_ENTRY", f"[model] entry requires a function {function_name} in {module.__file__}"
        )
    return function


def _forget_namesake(module_name: str, folder: Path) -> None:
    """Drop a loaded module of the same name (`model.py` is common) from another job's folder."""
    own = folder.resolve() / f"{module_name}.py"
    loaded = getattr(sys.modules.get(module_name), "__file__", None)
    if loaded is not None and own.is_file() and Path(loaded).resolve() != own:
        del sys.modules[module_name]
