"""Tokens of the text forms, and the cursor every parser of them moves along.

One lexer serves graphs and kernels: names, values (`%0`), numbers, strings, types and punctuation;
`//` starts a comment. A cursor refuses what does not fit at the user's line and column. What a
token means is in `values.py` and in the parsers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from shardwright.compiler.diagnostics import Loc, UsageError

T = TypeVar("T")

SYNTAX = "SW_TEXT_SYNTAX"
MAX_DEPTH = 64  # of lists and regions inside each other: deeper is no text of ours (our choice)
_SHOWN = 72  # characters of the line that an error shows

_KINDS = {
    "space": r"[ \t\r\n]+|//[^\n]*",
    "type": r"tensor<[0-9A-Za-z]+>",
    "string": r'"(?:[^"\\\n]|\\.)*"',
    "value": r"%[0-9A-Za-z_]+",
    "hex": r"0x[0-9A-Fa-f]*",
    "float": r"-?[0-9]+(?:\.[0-9]+(?:e[+-]?[0-9]+)?|e[+-]?[0-9]+)|-inf\b",
    "int": r"-?[0-9]+",
    "word": r"[A-Za-z_][0-9A-Za-z_.]*",
    "mark": r"[(){}\[\]<>=,:+*]",
}
_TOKEN = re.compile("|".join(f"(?P<{kind}>{form})" for kind, form in _KINDS.items()))
_END = "end"


@dataclass(frozen=True, slots=True)
class Token:
    """One word of the text; `start` is its character."""

    kind: str
    text: str
    start: int

    def __str__(self) -> str:
        if self.kind == _END:
            return "the end of the text"
        return self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."


def is_word(text: str) -> bool:
    """True when `text` may stand without quotes where a name is expected."""
    return re.fullmatch(_KINDS["word"], text) is not None


def name_text(name: str) -> str:
    """`name` as it is, in quotes where it is no word or one that begins something else."""
    return name if is_word(name) and name != "loc" else json.dumps(name)


class Cursor:
    """A place in a text; `name` is the file that errors point at."""

    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._name = name
        self._tokens = list(self._scan())
        self._at = 0
        self._depth = 0

    def _scan(self) -> Iterator[Token]:
        at = 0
        while at < len(self._text):
            found = _TOKEN.match(self._text, at)
            if found is None:
                bad = Token("character", self._text[at], at)
                raise self.error("a name, a value, a number, a string or a type", bad)
            if found.lastgroup != "space":
                yield Token(str(found.lastgroup), found.group(), at)
            at = found.end()
        yield Token(_END, "", at)

    @property
    def token(self) -> Token:
        """The token that comes next."""
        return self._tokens[self._at]

    @property
    def following(self) -> Token:
        """The one behind it."""
        return self._tokens[min(self._at + 1, len(self._tokens) - 1)]

    def next(self) -> Token:
        """The token that came next; the cursor stands behind it."""
        token = self.token
        self._at = min(self._at + 1, len(self._tokens) - 1)
        return token

    def at(self, *texts: str) -> bool:
        """True in front of one of these words or marks."""
        return self.token.kind in ("word", "mark") and self.token.text in texts

    def accept(self, text: str) -> bool:
        """True, and one token further, in front of `text`."""
        if not self.at(text):
            return False
        self.next()
        return True

    def expect(self, text: str) -> Token:
        """Passes over `text`. Raises UsageError in front of anything else."""
        if not self.at(text):
            raise self.error(f"`{text}`")
        return self.next()

    def take(self, kind: str, what: str) -> Token:
        """A token of `kind`. Raises UsageError that requires `what`."""
        if self.token.kind != kind:
            raise self.error(what)
        return self.next()

    def name(self, what: str) -> str:
        """A word, or a string in quotes."""
        if self.token.kind == "string":
            return self.string(what)
        return self.take("word", what).text

    def string(self, what: str) -> str:
        """What stands between quotes."""
        token = self.take("string", what)
        try:
            found = str(json.loads(token.text))
            found.encode()
        except ValueError as error:  # half of a surrogate pair among them
            raise self.error("a string with the escapes of JSON", token) from error
        return found

    def integer(self, what: str, token: Token | None = None) -> int:
        """A number without a fraction, of 64 bits at most."""
        token = token or self.take("int", what)
        if len(token.text) > len(str(-(2**63))) or not -(2**63) <= int(token.text) < 2**64:
            raise self.error(f"{what} of 64 bits", token)
        return int(token.text)

    def separated(self, item: Callable[[], T], until: str) -> list[T]:
        """Items with commas between them, up to the mark `until`, which is passed over."""
        items: list[T] = []
        with self.nested():
            while not self.accept(until):
                if items:
                    self.expect(",")
                items.append(item())
        return items

    @property
    def place(self) -> int:
        """Where the cursor stands, for `back_to`."""
        return self._at

    def back_to(self, place: int) -> None:
        """Stand there again."""
        self._at = place

    def skip_to(self, text: str) -> None:
        """Forward to the next mark `text`. Raises UsageError when there is none."""
        while not self.at(text):
            if self.token.kind == _END:
                raise self.error(f"`{text}`")
            self.next()

    def end(self) -> None:
        """Raises UsageError when something is left."""
        if self.token.kind != _END:
            raise self.error("the end of the text")

    @contextmanager
    def nested(self) -> Iterator[None]:
        """One level further inside. Raises UsageError too deep inside."""
        if self._depth == MAX_DEPTH:
            raise self.error(f"at most {MAX_DEPTH} levels inside each other")
        self._depth += 1
        yield
        self._depth -= 1

    def error(self, what: str, token: Token | None = None, code: str = SYNTAX) -> UsageError:
        """The refusal of `token` (the next one), where `what` is required."""
        token = token or self.token
        line = self._text.count("\n", 0, token.start) + 1
        first = self._text.rfind("\n", 0, token.start) + 1
        column = token.start - first + 1
        shown = max(first, token.start - _SHOWN // 2)
        source = self._text[shown : shown + _SHOWN].split("\n")[0].rstrip().replace("\t", " ")
        pointer = f"    {source}\n    {' ' * (token.start - shown)}^"
        message = f"the text requires {what}, got {token} in column {column}\n{pointer}"
        return UsageError(code, message, Loc(self._name, line))
