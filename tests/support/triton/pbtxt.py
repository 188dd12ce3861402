"""A reader of protobuf's text format (protobuf.dev, text format specification), and the part of
Triton's `model_config.proto` that we write."""

from __future__ import annotations

import re
from typing import Any

TOKEN = re.compile(
    r"""\s+|\#[^\n]*|(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
    r"""|(?P<number>-?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)|(?P<word>[A-Za-z_]\w*)"""
    r"""|(?P<sign>[{}\[\]<>:,;])"""
)
ESCAPES = {"n": 10, "t": 9, "r": 13, "a": 7, "b": 8, "f": 12, "v": 11}
DATA_TYPES = (
    *("TYPE_BOOL", "TYPE_UINT8", "TYPE_UINT16", "TYPE_UINT32", "TYPE_UINT64", "TYPE_INT8"),
    *("TYPE_INT16", "TYPE_INT32", "TYPE_INT64", "TYPE_FP16", "TYPE_FP32", "TYPE_FP64"),
    *("TYPE_STRING", "TYPE_BF16"),
)
RESHAPE = {"shape": [int]}
TENSOR = {"name": str, "data_type": DATA_TYPES, "dims": [int], "reshape": RESHAPE}
POLICY = {
    "timeout_action": ("REJECT", "DELAY"),
    "default_timeout_microseconds": int,
    "allow_timeout_override": ("true", "false"),
    "max_queue_size": int,
}
GROUP = {"count": int, "kind": ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL")}
CONFIG = {
    "name": str,
    "backend": str,
    "max_batch_size": int,
    "input": [TENSOR],
    "output": [TENSOR],
    "instance_group": [GROUP],
    "dynamic_batching": {"default_queue_policy": POLICY, "max_queue_delay_microseconds": int},
    "parameters": [{"key": str, "value": {"string_value": str}}],
}
"""Field -> its type: `str`, `int`, words of an enum, a message; in a list what may be repeated."""


def tokens(text: str) -> list[tuple[str, str]]:
    """Kinds and words. Raises ValueError for a character that begins none."""
    found, at = [], 0
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"no token at {text[at : at + 20]!r}")
        if match.lastgroup:
            found.append((match.lastgroup, match.group()))
        at = match.end()
    return found


def unquoted(literal: str) -> str:
    data, at, body = bytearray(), 0, literal[1:-1]
    while at < len(body):
        if body[at] != "\\":
            data += body[at].encode()
            at += 1
        elif octal := re.match(r"[0-7]{1,3}", body[at + 1 :]):
            data.append(int(octal.group(), 8))
            at += 1 + octal.end()
        else:
            data.append(ESCAPES.get(body[at + 1], ord(body[at + 1])))
            at += 2
    return data.decode()


class _Reader:
    def __init__(self, text: str) -> None:
        self.rest = tokens(text)[::-1]

    def peek(self) -> str:
        return self.rest[-1][1] if self.rest else ""

    def take(self, *allowed: str) -> bool:
        if self.peek() in allowed and self.rest[-1][0] == "sign":
            self.rest.pop()
            return True
        return False

    def message(self, fields: dict[str, Any], end: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self.rest and self.peek() != end:
            kind, name = self.rest.pop()
            if kind != "word" or name not in fields:
                raise ValueError(f"no field {name}")
            self.field(found, name, fields[name])
            self.take(",", ";")
        if end and not self.take(end):
            raise ValueError(f"{end} is missing")
        return found

    def field(self, found: dict[str, Any], name: str, kind: Any) -> None:
        is_repeated = isinstance(kind, list)
        one = kind[0] if is_repeated else kind
        has_colon = self.take(":")
        if not has_colon and not isinstance(one, dict):
            raise ValueError(f"{name}: a scalar field has a colon")
        if is_repeated and self.take("["):
            values = found.setdefault(name, [])
            while not self.take("]"):
                values.append(self.value(one))
                if not self.take(",") and self.peek() != "]":
                    raise ValueError(f"{name}: , or ] is missing")
        elif is_repeated:
            found.setdefault(name, []).append(self.value(one))
        elif name in found:
            raise ValueError(f"{name} is there twice")
        else:
            found[name] = self.value(one)

    def value(self, kind: Any) -> Any:
        if isinstance(kind, dict):
            if not self.take("{"):
                raise ValueError("{ is missing")
            return self.message(kind, "}")
        token, word = self.rest.pop()
        if kind is str and token == "string":
            return unquoted(word)
        if kind is int and token == "number":
            return int(word)
        if isinstance(kind, tuple) and word in kind:
            return word == "true" if kind == ("true", "false") else word
        raise ValueError(f"{word} is no {kind}")


def read(text: str) -> dict[str, Any]:
    """The configuration of a `config.pbtxt`, as Triton gives it to a model as JSON: `parameters` by
    key, fields that are missing with their defaults. Raises ValueError."""
    found = _Reader(text).message(CONFIG)
    rows = found.get("parameters", [])
    if len({row["key"] for row in rows}) < len(rows):
        raise ValueError("a parameter is there twice")
    found["parameters"] = {row["key"]: row["value"] for row in rows}
    return {"max_batch_size": 0, "input": [], "output": [], **found}
