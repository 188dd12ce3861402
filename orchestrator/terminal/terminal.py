"""What a person reads: the one way to a terminal, on which text of others does nothing.

Names of models, files, jobs and units come from users, from files that somebody else wrote and from
servers. A terminal obeys control characters and the reading order can be turned around by some that
are not seen, so each of them is shown as `?`; brackets and colons are themselves, for nothing here
reads markup. Styles are ours, as `rich.text.Text`.
"""

from __future__ import annotations

import codecs
import io
import sys
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any, TextIO

from shardwright.orchestrator.terminal.strict_json import dumps

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, JustifyMethod, OverflowMethod, RenderableType
    from rich.segment import Segment
    from rich.table import Table
    from rich.text import Text

_KEPT = "\t"
_ADAPTED = "shardwright.adapted"
_REFUSING = ("strict", "surrogateescape")  # Python's defaults, the second in the C locale
_SIGNS = dict(zip("█▓▒░▚▤·─━│┃⣿•", "#=+-xo.--||*.", strict=True))
"""What bars, rules and points are where there are none; other signs of a frame are `+`, other
braille, which curves are drawn in, is `.`."""


def adapt(*streams: TextIO) -> None:
    """Make streams print whatever comes: those whose encoding has no bars get other signs.

    A locale that is not UTF-8, or PYTHONIOENCODING, would end the command in the middle of its
    answer.
    """
    codecs.register_error(_ADAPTED, _in_ascii)
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper) and stream.errors in _REFUSING:
            stream.reconfigure(errors=_ADAPTED)


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = (_sign(c) for c in error.object[error.start : error.end])
    return "".join(signs), error.end


def _sign(char: str) -> str:
    if char in _SIGNS:
        return _SIGNS[char]
    if "\u2800" <= char <= "\u28ff":
        return "."
    return "+" if "\u2500" <= char <= "\u257f" else "?"


def printable(text: str) -> str:
    """Text with what a terminal would obey, or would not show, as `?`; lines stay lines."""
    return "\n".join(map(one_line, text.split("\n")))


def one_line(text: str) -> str:
    """As `printable`, of what is a name: a second line would look like one of ours."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _KEPT else "?" for c in text)


def say(text: str = "", err: bool = False, end: str = "\n") -> None:
    """Print text on stdout, or on stderr."""
    print(printable(text), end=end, file=sys.stderr if err else sys.stdout, flush=True)


def say_json(data: Any) -> None:
    """Print plain data on stdout as the JSON that other programs read (`strict_json.py`)."""
    say(dumps(data, indent=1))


def console(**settings: Any) -> Console:
    """A console for text and tables; `settings` are those of `rich.console.Console`."""
    from rich import console as rich

    class Plain(rich.Console):
        """Its own control codes (a bar that moves) pass, those inside of text do not."""

        def render_str(self, text: str, **settings: Any) -> Text:
            """See rich.console.Console; before it is measured."""
            return super().render_str(printable(text), **settings)

        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            """See rich.console.Console."""
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=printable(segment.text))

    return Plain(**{"highlight": False, "markup": False, "emoji": False, **settings})


def table(
    *columns: str,
    right: Container[str] = (),
    overflow: OverflowMethod = "ellipsis",
    no_wrap: bool = False,
    **settings: Any,
) -> Table:
    """A table without rows, its title and its columns to the left but for those on the `right`;
    `settings` are those of `rich.table.Table`."""
    from rich.table import Table

    made = Table(**{"title_justify": "left", "pad_edge": False, **settings})
    for name in columns:
        side: JustifyMethod = "right" if name in right else "left"
        made.add_column(name, justify=side, overflow=overflow, no_wrap=no_wrap)
    return made


def written(text: str, file: TextIO) -> None:
    """A line of a log that people read with `cat`."""
    print(printable(text), file=file, flush=True)
