"""The parser of the command's arguments, and how their help names values.

argparse does the work; a mistake is a usage error with a code and, where a name is nearly right,
with the name that may have been meant.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from typing import Any, NoReturn, TypeVar

from shardwright.compiler.diagnostics import UsageError, did_you_mean

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises UsageError (SW_USAGE) in place of leaving the process."""

    @property
    def lists(self) -> str:
        """Where everything that may be given is listed."""
        return f"`{self.prog} --help` lists what it takes"

    def json_flag(self, what: str = "JSON") -> None:
        """The flag with which the answer goes to stdout as data."""
        self.add_argument("--json", action="store_true", help=f"print {what} on stdout")

    def error(self, message: str) -> NoReturn:
        """Raise the usage error of a mistake that is no misspelt name."""
        raise self._refusal(message)

    def _refusal(self, message: str, hint: str = "") -> UsageError:
        return UsageError("SW_USAGE", f"{self.prog}: {message}", hint=hint or self.lists)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does; what is left over is refused here, where the flags are known."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [name for action in self._actions for name in action.option_strings]
            hint = did_you_mean(unknown[0].partition("=")[0], flags)
            raise self._refusal(f"unrecognized arguments: {' '.join(unknown)}", hint)
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            name = "/".join(action.option_strings) or action.metavar or action.dest
            raise self._refusal(
                f"{name} requires one of {', '.join(known)}, got {value!r}",
                did_you_mean(str(value), known),
            )


def known_word(word: str, words: Collection[str], what: str) -> str:
    """The word, if it is one of those that `what` takes. Raises UsageError."""
    if word not in words:
        message = f"{what} requires one of {', '.join(words)}, got {word!r}"
        raise UsageError("SW_USAGE", message, hint=did_you_mean(word, words))
    return word


def asked_of(kind: Callable[..., T], args: argparse.Namespace, **others: Any) -> T:
    """What a verb is asked, as the dataclass of that: its fields are the arguments of their names,
    but for `others`."""
    names = inspect.signature(kind).parameters.keys() - others.keys()
    return kind(**{name: getattr(args, name) for name in names}, **others)


def lazily(module: str, function: str, *names: str) -> Callable[[argparse.Namespace], int]:
    """A verb whose module is loaded when it runs; its function gets the arguments of these
    names."""

    def verb(args: argparse.Namespace) -> int:
        found = import_module(f"shardwright.orchestrator.{module}")
        code: int = getattr(found, function)(*(getattr(args, name) for name in names))
        return code

    return verb


def comma_words(text: str) -> list[str]:
    """What stands between commas."""
    return [word for word in map(str.strip, text.split(",")) if word]


def with_values(text: str, values: Sequence[Any], default: Any = None) -> str:
    """The help of a flag with the values it takes, and the one it has where nothing is given."""
    named = f" [{', '.join(map(str, values))}]" if values else ""
    usual = "" if default is None else f" (default {default})"
    return (text + named + usual).replace("%", "%%")
