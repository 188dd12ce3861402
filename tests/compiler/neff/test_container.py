"""The container: identity of write and read, byte determinism, and refusal of every kind of
damage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.diagnostics import LoadError
from compiler.neff.format import HEADER_BYTES
from compiler.neff.reader import Container
from compiler.neff.writer import pack

COLUMNS = st.one_of(
    st.binary(max_size=2000),
    st.lists(st.integers(-(2**62), 2**62), max_size=300).map(lambda v: np.asarray(v, np.int64)),
)
SECTIONS = st.dictionaries(st.text("abc/.", min_size=1, max_size=8), COLUMNS, max_size=5)


def sample() -> bytes:
    columns = {"a": np.arange(500, dtype=np.int64), "b": b"xyz", "empty": b""}
    return pack("program", {"name": "p", "mesh": [["dp_shard", 4]]}, columns)


def read_all(data: bytes) -> dict[str, object]:
    container = Container(data)
    container.verify()
    return {name: container.read(name) for name in container.sections}


@given(SECTIONS)
@settings(max_examples=50, deadline=None)
def test_write_then_read_is_identity(sections: dict[str, object]) -> None:
    data = pack("manifest", {"k": 1}, sections)
    assert data == pack("manifest", {"k": 1}, sections)
    back = read_all(data)
    assert list(back) == list(sections)
    for name, content in sections.items():
        np.testing.assert_array_equal(np.asarray(back[name]), np.asarray(content))


def test_every_flipped_byte_is_refused_with_a_code() -> None:
    data = sample()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        with pytest.raises(LoadError) as caught:
            read_all(bytes(damaged))
        assert caught.value.code.startswith("SW_NEFF_"), position


def test_every_truncation_is_refused() -> None:
    data = sample()
    for size in range(0, len(data), 7):
        with pytest.raises(LoadError) as caught:
            read_all(data[:size])
        assert caught.value.code in {"SW_NEFF_TRUNCATED", "SW_NEFF_CHECKSUM"}


def test_a_newer_format_and_a_foreign_file_are_named_as_such() -> None:
    newer = bytearray(sample())
    newer[8] = 9
    with pytest.raises(LoadError, match="SW_NEFF_VERSION"):
        Container(bytes(newer))
    with pytest.raises(LoadError, match="SW_NEFF_MAGIC"):
        Container(b"\x7fELF".ljust(2 * HEADER_BYTES, b"\0"))
    with pytest.raises(LoadError, match="SW_NEFF_KIND"):
        Container(sample(), kind="core")
