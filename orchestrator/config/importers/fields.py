"""Files of settings as fields: JSON, TOML and YAML flattened to dotted names, each with its value
and its line.

Whatever a file holds, reading it ends in fields or in UsageError (SW_IMPORT), soon and in little
memory: sizes and depths are bounded, aliases of YAML and repeated names are refused. Flags of
scripts are read in `scripts.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from shardwright.compiler.diagnostics import Loc, UsageError
from shardwright.compiler.support.documents import parse_json, parse_toml
from shardwright.compiler.support.files import read_regular

MOST_BYTES = {".json": 2**22}
MOST_OTHER_BYTES = 2**18
"""Our choice: published files have up to 20 kB, resolved ones, which list every layer, 1 MB."""
MOST_DEPTH = 32  # our choice: published files have five levels
MOST_NAME = 200  # characters, with those of the tables around it (our choice; published: 80)
_SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True, slots=True)
class Field:
    """A setting of theirs, where the file has it."""

    name: str
    value: Any
    line: int
    is_conditional: bool = False
    """Whether it stands in a branch of a script."""

    def shown(self) -> str:
        """The value, short enough for a message."""
        text = self.value if isinstance(self.value, str) else json.dumps(self.value, default=str)
        text = text if text.isprintable() else ascii(text)
        return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


Fields = Mapping[str, Field]


def unreadable(path: Path, line: int, why: str, hint: str = "") -> UsageError:
    """The refusal of a file as a whole."""
    return UsageError("SW_IMPORT", why, Loc(str(path), line), hint)


def checked(path: Path, name: str, line: int) -> str:
    """A name that messages can say. Raises UsageError for one that is too long or no text."""
    if len(name) > MOST_NAME or not name.isprintable():
        shown = ascii(name[:_SHOWN])
        required = f"names of fields require at most {MOST_NAME} characters that can be printed"
        raise unreadable(path, line, f"{required}, got {len(name)}: {shown}")
    return name


def text_of(path: Path) -> str:
    """The text of a file of settings. Raises UsageError for what is none."""
    most = MOST_BYTES.get(path.suffix, MOST_OTHER_BYTES)
    try:
        text = read_regular(path, most).decode("utf-8-sig")
    except OSError as error:
        raise unreadable(path, 0, f"cannot read it: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise unreadable(path, 0, "a file of settings requires text (UTF-8), got bytes") from error
    if not text.strip():
        raise unreadable(path, 0, "a file of settings requires fields, got an empty file")
    if "\0" in text:
        raise unreadable(path, 0, "a file of settings requires text, got bytes of 0")
    return text


def json_data(path: Path, text: str) -> Any:
    """The data of JSON. Raises UsageError."""

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no number of JSON")

    try:
        return parse_json(text, parse_constant=constant)
    except ValueError as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 0
        raise unreadable(path, line, f"not valid JSON: {error}") from error


def json_fields(path: Path, text: str) -> Fields:
    """The fields of JSON. Raises UsageError."""
    return _flat(path, json_data(path, text), json_lines(path, text).get)


def toml_data(path: Path, text: str) -> dict[str, Any]:
    """The data of TOML. Raises UsageError."""
    try:
        return parse_toml(text)
    except ValueError as error:
        found = re.search(r"at line (\d+)", str(error))
        last = len(text.splitlines()) if "end of document" in str(error) else 0
        line = int(found[1]) if found else last
        raise unreadable(path, line, f"not valid TOML: {error}") from error


def toml_fields(path: Path, text: str) -> Fields:
    """The fields of TOML. Raises UsageError."""
    return _flat(path, toml_data(path, text), toml_lines(text).get)


def _flat(path: Path, data: Any, line: Callable[[str, int], int]) -> Fields:
    """Every value that is no table, under the names that lead to it."""
    if not isinstance(data, dict):
        kind = type(data).__name__
        raise unreadable(path, 1, f"a file of settings requires tables of fields, got a {kind}")
    found = {}
    for name, value in _leaves(path, data, "", 1):
        found[name] = Field(checked(path, name, line(name, 0)), value, line(name, 0))
    return found


def _leaves(
    path: Path, table: Mapping[str, Any], before: str, depth: int
) -> Iterator[tuple[str, Any]]:
    if depth > MOST_DEPTH:
        raise unreadable(path, 0, f"tables require at most {MOST_DEPTH} levels, got more")
    for key, value in table.items():
        name = f"{before}{key}"
        if isinstance(value, dict) and value:
            yield from _leaves(path, value, f"{name}.", depth + 1)
        else:
            yield name, value


_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,\n]')


def json_lines(path: Path, text: str) -> dict[str, int]:
    """Line of every name in valid JSON. Raises UsageError for a name that an object repeats."""
    lines: dict[str, int] = {}
    names: list[str] = []  # that lead here; the first is the file's, "" stands for a list
    line, word, key = 1, "", ""
    for token in _JSON_TOKEN.findall(text):
        line += token == "\n"
        if token == ":":
            key = json.loads(word)
            full = ".".join([*names[1:], key])
            if full in lines and "" not in names[1:]:
                raise unreadable(path, line, f"a name may be given once, got {full} again")
            lines.setdefault(full, line)
        elif token in "{[":
            names.append(key if token == "{" else "")
        elif token in "}]":
            del names[-1:]
        elif token.startswith('"'):
            word = token
    return lines


_TOML_HEAD = re.compile(r"\s*\[\[?\s*([\w.\-]+)\s*\]")
_TOML_KEY = re.compile(r"\s*(?:([\w.\-]+)|\"([^\"]+)\")\s*=")


def toml_lines(text: str) -> dict[str, int]:
    """Line of every name that stands at the start of one, and of the first head of a table."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if head := _TOML_HEAD.match(line):
            table = f"{head[1]}."
            lines.setdefault(head[1], number)
        elif key := _TOML_KEY.match(line):
            lines.setdefault(table + (key[1] or key[2]), number)
    return lines


def yaml_fields(path: Path, text: str) -> Fields:
    """The fields of YAML. Raises UsageError; aliases are refused, since few of them can stand for
    any amount of data."""
    import yaml

    try:
        _check_events(path, yaml.parse(text, Loader=yaml.SafeLoader))
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise unreadable(path, 1, "a file of settings requires tables of fields, got none")
        found = {field.name: field for field in _yaml_leaves(path, loader, node, "")}
        return {name: _resolved(field, found) for name, field in found.items()}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        why = getattr(error, "problem", None) or str(error)
        line = mark.line + 1 if mark else 0
        raise unreadable(path, line, f"not valid YAML: {why}") from error
    except (ValueError, OverflowError) as error:
        if isinstance(error, UsageError):
            raise
        raise unreadable(path, 0, f"not valid YAML: {error}") from error


_ELSEWHERE = re.compile(r"\$\{(\.?)([\w.]+)\}")
MOST_HOPS = 8  # from one field to another (our choice)


def _resolved(field: Field, fields: Fields) -> Field:
    """A field with the value of the one that it stands for (`${table.name}`, `${.name}` beside it);
    itself where that is none of the file's."""
    value, name = field.value, field.name
    for _ in range(MOST_HOPS):
        found = _ELSEWHERE.fullmatch(value) if isinstance(value, str) else None
        if not found:
            break
        beside = name.rpartition(".")[0] + "." if found[1] else ""
        name = beside + found[2]
        if name not in fields:
            break
        value = fields[name].value
    return replace(field, value=value)


def _check_events(path: Path, events: Iterator[Any]) -> None:
    """Refuse aliases and depths, one event at a time."""
    import yaml

    depth = 0
    for event in events:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            hint = "write what the alias stands for in its place"
            raise unreadable(path, line, f"YAML requires no aliases, got *{event.anchor}", hint)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_DEPTH:
            raise unreadable(path, line, f"tables require at most {MOST_DEPTH} levels, got more")


def _yaml_leaves(path: Path, loader: Any, node: Any, before: str) -> Iterator[Field]:
    import yaml

    seen = set()
    for key, value in node.value:
        name, line = f"{before}{key.value}", key.start_mark.line + 1
        if not isinstance(key.value, str):
            raise unreadable(path, line, "names of fields require text, got a table or a list")
        if name in seen:
            raise unreadable(path, line, f"a name may be given once, got {name} again")
        seen.add(checked(path, name, line))
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _yaml_leaves(path, loader, value, f"{name}.")
        else:
            yield Field(name, loader.construct_object(value, deep=True), line)
