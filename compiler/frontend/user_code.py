"""What the user's own code raises, as one error at the user's line.

Every place that calls functions of the user does it inside of `called`: the import of a model file,
the function that makes the task, and the functions of the task. A package that is missing is named
with the extra of ours that brings it. `told` makes the same of whatever else was raised.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import DiagnosticError, InternalError, Loc, UsageError
from shardwright.compiler.frontend.locations import LocationReader

MOST_LINES = 2  # of a message that are shown (our choice)
EXTRAS = {
    "torch": "torch",
    "tensorflow": "tensorflow",
    "keras": "tensorflow",
    "matplotlib": "plot",
    "pandas": "parquet",
    "pyarrow": "parquet",
    "boto3": "s3",
}
"""Package -> the extra of ours that brings it (`pyproject.toml`)."""


def per_device(given: str, loc: Loc | None = None) -> UsageError:
    """The error of a step that is written for one device of several."""
    return UsageError(
        "SW_PMAP",
        f"a step requires code for all samples, got {given}",
        loc,
        "take jax.pmap, lax.pmean and the axis of devices of its arguments away: what is summed"
        " over devices is found by the partitioner, for any mesh",
    )


def install_hint(package: str) -> str:
    """How a missing package is installed; no index has our name, only the checkout has extras."""
    if package in EXTRAS:
        return f"in the checkout: pip install -e '.[{EXTRAS[package]}]'"
    return "install it where this command runs"


_CURES = {
    "cuDNN": "give the attention implementation='xla': cuDNN's kernels are a GPU's",
    "DynamicCache'>": "model.config.use_cache = False, or use_cache=False in the call: keys of"
    " generation are no result",
    "register a pytree": "torch.export.register_dataclass(Class) tells torch what it holds; or"
    " return a tuple or a dict",
}
"""What libraries raise about what they do not take, by a word of it -> what to do."""


@contextmanager
def called(what: str, base_dir: str | None = None, hint: str = "") -> Iterator[None]:
    """Say where in the user's code something was raised; `what` is the code that is called, paths
    are relative to `base_dir`.

    Raises UsageError for whatever is raised inside, except for our own errors and interrupts.
    """
    try:
        yield
    except DiagnosticError:
        raise
    except ModuleNotFoundError as error:
        raise _missing(error, LocationReader(base_dir)) from error
    except (Exception, SystemExit) as error:
        if isinstance(error, NameError) and "unbound axis name" in str(error):
            given = f"a collective over an axis of devices: {_short(error)}"
            raise per_device(given, place(error, base_dir)) from error
        raise UsageError(
            "SW_TASK_RAISED",
            f"{what} raised {type(error).__name__}: {_short(error)}",
            place(error, base_dir),
            next((cure for word, cure in _CURES.items() if word in str(error)), hint),
        ) from error


def place(error: BaseException, base_dir: str | None = None) -> Loc | None:
    """The user's innermost line of what was raised; for text that is no Python, its own. None where
    no code but ours was at work."""
    reader = LocationReader(base_dir)
    if isinstance(error, SyntaxError) and error.filename:
        return reader.frame(error.filename, error.lineno or 0)
    return reader.raised(error)


def layers(function: Any) -> Iterator[Any]:
    """A function and what it wraps, through decorators and functools.partial, the outermost
    first."""
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        yield function
        inner = function.func if isinstance(function, functools.partial) else None
        function = inner or getattr(function, "__wrapped__", None)


def location(function: Any) -> Loc | None:
    """The first line of a function of the user's, through what wraps it; None where it has none."""
    codes = [getattr(layer, "__code__", None) for layer in layers(function)]
    code = next(filter(None, reversed(codes)), None)
    return Loc(Path(code.co_filename).name, code.co_firstlineno) if code else None


def anew(error: UsageError) -> UsageError:
    """The error without the notes of jax, through whose frames it came."""
    d = error.diagnostic
    return UsageError(d.code, d.message, d.loc, d.hint)


def told(error: Exception) -> DiagnosticError:
    """The one message of whatever reached the command: a missing package, or a defect of ours, with
    the user's line where their code was at work."""
    if isinstance(error, DiagnosticError):
        return error
    reader = LocationReader()
    if isinstance(error, ModuleNotFoundError) and error.name:
        return _missing(error, reader)
    loc = reader.raised(error)
    is_users = loc is not None and not loc.file.startswith("pkg:")
    trace = "".join(traceback.format_exception(error))
    return InternalError.of(error, trace, loc if is_users else None)


def _missing(error: ModuleNotFoundError, reader: LocationReader) -> UsageError:
    package = (error.name or "").partition(".")[0]
    return UsageError(
        "SW_NEEDS_PACKAGE",
        f"a package is required that is not installed: {_short(error)}",
        reader.raised(error),
        install_hint(package),
    )


def _short(error: BaseException) -> str:
    """The first lines of a message; jax's go on with help after an empty one."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return "\n".join(text.strip().split("\n\n")[0].splitlines()[:MOST_LINES])
