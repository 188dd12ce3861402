"""Documents of any content end in plain data, OSError or ValueError; objects made of data are held
to what their classes declare."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shardwright.compiler.support.documents import parse_json, parse_toml, read_text
from shardwright.compiler.support.fields import check_fields


@pytest.mark.parametrize("text", ["[" * 50_000, '{"a":' * 50_000, "9" * 5_000, "{", "\0", ""])
def test_text_that_is_no_json(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize("text", ["a = " + "[" * 50_000, "a = 1\na = 2", "a = {b = }", "\ufeff="])
def test_text_that_is_no_toml(text: str) -> None:
    with pytest.raises(ValueError):
        parse_toml(text)


def test_devices_and_pipes_are_read_only_where_a_person_names_them(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no regular file"):
        read_text(Path("/dev/zero"))
    with pytest.raises(ValueError, match="more than"):
        read_text(Path("/dev/zero"), named_by_user=True)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        read_text(tmp_path / "pipe")
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbf{}")
    assert read_text(tmp_path / "marked") == "{}"


@dataclass(frozen=True)
class Inner:
    ratio: float


@dataclass(frozen=True)
class Outer:
    count: int
    name: str = ""
    flag: bool = False
    pair: tuple[int, str] = (1, "a")
    rows: tuple[Inner, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    place: str | None = None
    anything: Any = None


def test_fields_of_the_declared_types() -> None:
    check_fields(Outer(1, "a", True, (2, "b"), (Inner(1), Inner(0.5)), {"x": 1}, None, object()))


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"count": True}, "count"),
        ({"count": 1.0}, "count"),
        ({"count": 10**60}, "count"),
        ({"count": 1, "name": b"a"}, "name"),
        ({"count": 1, "flag": 1}, "flag"),
        ({"count": 1, "pair": (1,)}, "pair"),
        ({"count": 1, "pair": [1, "a"]}, "pair"),
        ({"count": 1, "rows": (Inner(float("nan")),)}, r"rows\.ratio"),
        ({"count": 1, "rows": (1,)}, "rows"),
        ({"count": 1, "sizes": {"x": "1"}}, "sizes"),
        ({"count": 1, "sizes": {1: 1}}, "sizes"),
        ({"count": 1, "place": 3}, "place"),
    ],
)
def test_fields_of_other_types(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(ValueError, match=rf"Outer\.{where} requires"):
        check_fields(Outer(**fields))
