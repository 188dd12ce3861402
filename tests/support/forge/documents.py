"""Documents that were changed: JSON and TOML by value and by letter, and msgpack by value."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgpack

from tests.support.forge.plain import harmed

_NUMBER = re.compile(r"(?<![\w.\"])-?\d[\d.e+-]*")
_NUMBERS = (
    *("1e309", "-1e309", "1e-400", "nan", "NaN", "inf", "Infinity", "-0", "-1", "0", "0x10"),
    *("9" * 30, "9" * 5000, "1_000", "1.5", "true", "null", '""', "[]", "{}", "1979-05-27"),
)
_TEXTS = (
    *(
        "",
        "/dev/zero",
        ".",
        "..",
        "/proc/self/mem",
        "a\0b",
        "\u202e",
        "x" * 70_000,
        "s3://",
        "${X}",
    ),
    *("auto", "true", "1e309", "nan", "tests/support/forge:KINDS", "config.json", "1:2,3:4", "-1"),
)
_BITS = ("\0", "\n", '"', "'", "[", "]", "{", "}", "=", ",", "#", "\\", "\\u", "\ufeff", "\r")
_DEPTH = 20_000


def changed_document(
    value: Any, write: Callable[[Any], str], dice: random.Random, name: str = "key"
) -> bytes:
    """A document of `value` with something in it changed; `write` makes its text."""
    kind = dice.random()
    if kind < 0.65:
        for _ in range(dice.choice((1, 1, 1, 2, 3))):
            value = _harmed(value, dice)
    try:
        text = write(value)
    except (TypeError, ValueError, RecursionError):
        text = write({})  # no such document can be written
    if kind < 0.65:
        return text.encode("utf-8", "surrogatepass")
    return _letters(text, dice, name)


def _harmed(value: Any, dice: random.Random) -> Any:
    if dice.random() < 0.25 and isinstance(value, dict):
        return {**value, dice.choice(("unknown", "", "mesh", "schema")): dice.choice(_TEXTS)}
    found = harmed(value, dice)
    return found if dice.random() < 0.8 else _with_text(found, dice)


def _with_text(value: Any, dice: random.Random) -> Any:
    """A text somewhere in it that leads elsewhere."""
    if not isinstance(value, dict) or not value:
        return value
    key = dice.choice(list(value))
    inner = value[key]
    changed = _with_text(inner, dice) if isinstance(inner, dict) else dice.choice(_TEXTS)
    return {**value, key: changed}


def _letters(text: str, dice: random.Random, name: str) -> bytes:
    """Numbers, lines and letters, whatever they stand for."""
    if dice.random() < 0.12:
        return _deep(text, dice, name)
    return dice.choice(_LETTERS)(text, dice)


def _deep(text: str, dice: random.Random, name: str) -> bytes:
    """Lists or objects in each other, as a value or alone."""
    deep = dice.choice(("[" * _DEPTH + "]" * _DEPTH, '{"a":' * _DEPTH + "1" + "}" * _DEPTH))
    return (f"{name} = {deep}\n{text}" if dice.random() < 0.5 else deep).encode()


def _other_number(text: str, dice: random.Random) -> bytes:
    places = list(_NUMBER.finditer(text))
    if not places:
        return text.encode()
    place = dice.choice(places)
    return (text[: place.start()] + dice.choice(_NUMBERS) + text[place.end() :]).encode()


def _cut(text: str, dice: random.Random) -> bytes:
    return text[: dice.randrange(len(text) + 1)].encode()


def _line_twice(text: str, dice: random.Random) -> bytes:
    return f"{text}\n{dice.choice(text.splitlines() or [''])}\n".encode()


def _inserted(text: str, dice: random.Random) -> bytes:
    at = dice.randrange(len(text) + 1)
    return (text[:at] + dice.choice(_BITS) + text[at:]).encode()


def _no_text(text: str, dice: random.Random) -> bytes:
    at = dice.randrange(len(text) + 1)
    return text[:at].encode() + dice.choice((b"\xff\xfe", b"\xc3", b"\0\0")) + text[at:].encode()


def _flipped(text: str, dice: random.Random) -> bytes:
    return changed_bytes(text.encode(), dice)


def _repeated(text: str, dice: random.Random) -> bytes:
    lines = text.splitlines(keepends=True) or [""]
    number = dice.randrange(len(lines))
    lines[number] = lines[number].replace("=", dice.choice(("", "==", ":", "= =")))
    return ("".join(lines) * dice.choice((1, 1, 3000))).encode()


_LETTERS: tuple[Callable[[str, random.Random], bytes], ...] = (
    *(_other_number, _other_number, _other_number),
    *(_cut, _line_twice, _inserted, _no_text, _flipped, _repeated),
)


def json_text(value: Any) -> str:
    """A JSON document; NaN and infinity as Python writes them."""
    return json.dumps(value, indent=1)


def toml_text(value: Mapping[str, Any]) -> str:
    """A TOML document of tables."""
    parts = []
    for table, keys in value.items():
        if not isinstance(keys, dict):
            parts.insert(0, f"{_key(table)} = {_toml(keys)}")
            continue
        parts.append(f"[{_key(table)}]")
        parts += [f"{_key(key)} = {_toml(item)}" for key, item in keys.items()]
    return "\n".join(parts) + "\n"


def _key(name: Any) -> str:
    return str(name) if re.fullmatch(r"[\w-]+", str(name)) else json.dumps(str(name))


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        inside = ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items())
        return f"{{{inside}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool | str):
        return json.dumps(value)
    if isinstance(value, int | float):
        return str(value)
    raise TypeError(f"{value!r} has no place in TOML")


def changed_msgpack(data: bytes, dice: random.Random) -> bytes:
    """Packed data with one thing in it changed, or a few of its bytes."""
    if dice.random() < 0.15:
        return changed_bytes(data, dice)
    value = msgpack.unpackb(data, use_list=False, strict_map_key=False)
    try:
        packed: bytes = msgpack.packb(harmed(value, dice))
        return packed
    except (TypeError, ValueError, OverflowError):
        return data


def changed_bytes(data: bytes, dice: random.Random) -> bytes:
    """Bits flipped, runs removed, inserted or repeated."""
    found = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        if not found:
            break
        at, kind, size = dice.randrange(len(found)), dice.random(), dice.randint(1, 8)
        if kind < 0.6:
            found[at] ^= 1 << dice.randrange(8)
        elif kind < 0.75:
            del found[at : at + size]
        elif kind < 0.9:
            found[at:at] = dice.randbytes(size)
        else:
            found[at:at] = found[at : at + 8 * size]
    return bytes(found)
