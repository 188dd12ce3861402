"""The task that a job names: `entry = "module:function"`, a step with the decorator `train_step`,
or a function that returns one, or a `TrainTask`.

The module is looked up in the folder of the job, then in the environment. Whatever the user's code
raises on the way is one error at its line.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.step_form import required_arguments
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.frontend.train_step import TrainStep
from shardwright.compiler.frontend.user_code import called, location


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
    ranks: int = 0,
) -> TrainTask:
    """Import `module:function` from `folder` (then from the environment) and call it with
    `arguments`, and with `settings` of the job by their keys (`strategy.remat`), which it takes as
    `remat`. A decorated step (`train_step.py`) is shown by its own example, which takes them.
    PyTorch code that asks how many ranks there are is told `ranks`, 0 those of the environment.

    Raises: UsageError when the entry cannot be found, raises or does not return a TrainTask, or
    takes a setting not.
    """
    module_name, function_name = entry_names(entry)
    with _on_path(folder):
        function = _find_function(module_name, function_name, folder)
        if isinstance(function, TrainStep):
            example = function.settings.example
            taken = _taken(example, f"the example of {function_name}", settings or {})
            return function.task(settings=taken, base_dir=str(folder))
        own = _taken_by(function, settings or {})
        _refuse_step(entry, function, {*(arguments or {}), *own})
        given = {**(arguments or {}), **own}
        task = _called(entry, function, folder, given, settings or {}, ranks)
        if isinstance(task, TrainStep):
            return task.task(base_dir=str(folder))
    if not isinstance(task, TrainTask):
        raise UsageError(
            "SW_ENTRY",
            f"[model] entry {entry} requires a function returning a TrainTask or a torch.nn.Module,"
            f" got {type(task).__name__}",
            hint="return what the function makes"
            if task is None
            else "from shardwright import TrainTask",
        )
    return task


def call_entry(entry: str, folder: Path, asked_by: str) -> Any:
    """What `module:function`, imported from `folder`, returns without arguments. Raises UsageError
    when it cannot be found, or raises."""
    module_name, function_name = entry_names(entry)
    with _on_path(folder):
        function = _find_function(module_name, function_name, folder)
        with called(f"{asked_by} {entry}", str(folder)):
            return function()


def _called(
    entry: str,
    function: Callable[..., Any],
    folder: Path,
    taken: Mapping[str, Any],
    settings: Mapping[str, Any],
    ranks: int,
) -> Any:
    """What the entry returns; the task of a module of PyTorch, if that is what it makes. Raises
    UsageError at the user's line."""
    what = f"[model] entry {entry}"
    if "torch" in sys.modules:
        from shardwright.compiler.frontend.pytorch.distributed import Undistributed
        from shardwright.compiler.frontend.pytorch.entry import made

        function = Undistributed(function, str(folder), ranks)
        found = made(what, function, folder, taken)
    else:
        with called(what, str(folder)):
            found = function(**taken)
    task = _of_module(what, function, found, folder, taken, settings)
    if task is found and isinstance(found, TrainTask):  # of a module `_of_module` asks
        _taken(function, entry.rpartition(":")[2], settings)
    return task


def _of_module(
    what: str,
    function: Callable[..., Any],
    found: Any,
    folder: Path,
    taken: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> Any:
    """The task of what an entry returned, if that is a module of PyTorch."""
    if "torch" not in sys.modules:
        return found
    from shardwright.compiler.frontend.pytorch.entry import (
        SETTINGS,
        Entry,
        makes_module,
        module_task,
    )

    if not makes_module(found):
        return found
    own = {key.rpartition(".")[2]: value for key, value in settings.items()}
    obeyed = {name: own[name] for name in SETTINGS if name in own and name not in taken}
    others = {key: v for key, v in settings.items() if key.rpartition(".")[2] not in obeyed}
    _taken(function, getattr(function, "__name__", "the entry"), others)
    return module_task(Entry(what, function, str(folder), taken, obeyed), found)


def _refuse_step(entry: str, function: Callable[..., Any], given: Collection[str]) -> None:
    """Refuse a step that nothing shows the arguments of. Raises UsageError."""
    needed = required_arguments(function)
    if set(needed) - set(given):
        name = entry.partition(":")[2]
        raise UsageError(
            "SW_ENTRY",
            f"[model] entry {entry} requires a function that is called without arguments and"
            f" returns a TrainTask, or a decorated step, got {name}({', '.join(needed)})",
            location(function),
            "where it is a training step, decorate it: @shardwright.train_step(example=make), with"
            " a function make() that returns its arguments",
        )


def _taken(function: Callable[..., Any], name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as arguments of the function. Raises UsageError for one that it does not take:
    a step of the user's is theirs, nothing else could obey.
    """
    taken = _taken_by(function, settings)
    for key, value in settings.items():
        argument = key.rpartition(".")[2]
        if argument not in taken:
            names, _ = _parameters(function)
            raise UsageError(
                "SW_MODEL_SETTING",
                f"{key} = {value!r} requires a function that takes {argument}, got"
                f" {name}({', '.join(sorted(names))})",
                location(function),
                f"write def {name}({argument}=...) and build the step with it, or leave the"
                " setting out",
            )
    return taken


def _taken_by(function: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a function takes, as its arguments."""
    names, takes_all = _parameters(function) if settings else (set[str](), False)
    own = {key.rpartition(".")[2]: value for key, value in settings.items()}
    return {name: value for name, value in own.items() if takes_all or name in names}


def _parameters(function: Callable[..., Any]) -> tuple[set[str], bool]:
    """What a function is given by name, and whether it takes any name."""
    parameters = inspect.signature(function).parameters.values() if callable(function) else ()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return names, any(p.kind is p.VAR_KEYWORD for p in parameters)


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
