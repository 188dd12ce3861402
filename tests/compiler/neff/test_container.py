"""The container: identity of write and read, byte determinism, and refusal of every kind of
damage."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.diagnostics import CapacityError, LoadError
from shardwright.compiler.neff import writer
from shardwright.compiler.neff.format import (
    ALIGNMENT,
    FEATURE_BORDERS,
    FEATURE_ROW_SUMS,
    FEATURE_SUBGRAPHS,
    FEATURE_ZSTD,
    HEADER_BYTES,
    MAX_FILE_BYTES,
    MAX_RAW_BYTES,
    Header,
)
from shardwright.compiler.neff.format import DTYPES as COLUMN_TYPES
from shardwright.compiler.neff.reader import Container
from shardwright.compiler.neff.writer import pack

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


@pytest.mark.parametrize(
    "kind", ["program", "core", "cores", "manifest", "bundle", "unit", "checkpoint", "state"]
)
def test_every_kind_of_file_is_read_as_that_kind_alone(kind: str) -> None:
    data = pack(kind, {"rank": 3}, {"a": b"xyz"})
    found = Container(data, kind=kind)
    assert (found.header.kind, found.meta, bytes(found.read("a"))) == (kind, {"rank": 3}, b"xyz")
    with pytest.raises(LoadError, match=f"SW_NEFF_KIND.*got a {kind} file"):
        Container(data, kind="poem")


def test_what_no_reader_takes_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of 2 x 8 bytes and 3 more are 19; a kind that is none."""
    sections = {"a": np.arange(2, dtype=np.int64), "b": b"xyz"}
    monkeypatch.setattr(writer, "MAX_RAW_BYTES", 19)
    pack("program", {}, sections)
    monkeypatch.setattr(writer, "MAX_RAW_BYTES", 18)
    with pytest.raises(CapacityError, match=r"SW_NEFF_SIZE.*at most 18 bytes .*, got 19"):
        pack("program", {}, sections)
    with pytest.raises(AssertionError):
        pack("poem", {}, {})


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


def headed(**fields: Any) -> bytes:
    """The sample with other fields in its header, all checksums right."""
    data = sample()
    header = replace(Header.unpack(data[:HEADER_BYTES]), **fields)
    return header.pack() + data[HEADER_BYTES:]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"major": 1}, "format 2 with features 0xf required, got format 1 with features 0x1"),
        ({"major": 0}, "format 2 with features 0xf required, got format 0 with features 0x1"),
        ({"major": 65535}, "got format 65535 with features 0x1"),
        ({"features": 16}, "got format 2 with features 0x10"),
        ({"features": 2**63 | 1}, "got format 2 with features 0x8000000000000001"),
    ],
)
def test_formats_and_features_of_other_releases_are_refused(
    fields: dict[str, int], message: str
) -> None:
    """Whatever their checksums say."""
    with pytest.raises(LoadError) as caught:
        Container(headed(**fields))
    assert caught.value.code == "SW_NEFF_VERSION"
    assert caught.value.diagnostic.message.endswith(message)


@pytest.mark.parametrize("feature", [0, 1, 2, 4, 8, 15])
def test_known_features_and_minor_releases_are_read(feature: int) -> None:
    assert Container(headed(features=feature, minor=9)).meta["name"] == "p"


def test_the_header_has_its_fields_where_readers_look() -> None:
    """Magic, major 2, minor 0, CRC, features, kind, table, sha256; the size of the file at 92."""
    data = sample()
    assert data[:12] == b"SWNEFF\r\n" + b"\x02\x00\x00\x00"
    assert int.from_bytes(data[92:100], "little") == len(data)
    assert (HEADER_BYTES, ALIGNMENT) == (256, 64)
    assert all(row.offset % 64 == 0 for row in Container(data).sections.values())


def test_the_size_in_the_header_is_that_of_the_file() -> None:
    data = sample()
    for size in (len(data) - 1, len(data) + 1):
        with pytest.raises(LoadError, match=rf"SW_NEFF_TRUNCATED.*{size} bytes required, got"):
            Container(headed(file_bytes=size))


def test_a_newer_format_and_a_foreign_file_are_named_as_such() -> None:
    newer = bytearray(sample())
    newer[8] = 9
    with pytest.raises(LoadError, match="SW_NEFF_VERSION"):
        Container(bytes(newer))
    with pytest.raises(LoadError, match="SW_NEFF_MAGIC"):
        Container(b"\x7fELF".ljust(2 * HEADER_BYTES, b"\0"))
    with pytest.raises(LoadError, match="SW_NEFF_KIND"):
        Container(sample(), kind="core")


def test_what_compresses_is_stored_so_and_comes_back() -> None:
    """From 512 bytes on, where it pays."""
    content = {
        "long": bytes(512),
        "short": bytes(511),
        "dense": np.random.default_rng(1).bytes(600),
    }
    data = pack("unit", {}, content)
    rows = Container(data).sections
    assert {name: row.codec for name, row in rows.items()} == {
        "long": "zstd",
        "short": "raw",
        "dense": "raw",
    }
    assert rows["long"].stored < 100 and read_all(data) == content
    assert Container(data).header.features == FEATURE_ZSTD
    plain = pack("unit", {}, content, compress=False)
    assert Container(plain).header.features == 0 and read_all(plain) == content
    np.testing.assert_array_equal(read_all(sample())["a"], np.arange(500))


def test_bits_of_features() -> None:
    """Files of other releases have them."""
    bits = (FEATURE_ZSTD, FEATURE_SUBGRAPHS, FEATURE_BORDERS, FEATURE_ROW_SUMS)
    assert bits == (1, 2, 4, 8)
    assert COLUMN_TYPES == ("|u1", "<i4", "<i8", "<f4", "<f8")
    assert MAX_FILE_BYTES == MAX_RAW_BYTES == 2**32


def retabled(change: Callable[[dict[str, Any]], None]) -> bytes:
    """Two raw sections of 64 bytes at 256 and 320 with another table, all checksums right."""
    data = pack("unit", {}, {"a": b"A" * 64, "b": np.arange(16, dtype=np.int32)})
    header = Header.unpack(data[:HEADER_BYTES])
    table = msgpack.unpackb(data[header.toc_offset :])
    change(table)
    return sealed(data, table)


def sealed(data: bytes, table: dict[str, Any]) -> bytes:
    """A container with another table, all checksums right."""
    header = Header.unpack(data[:HEADER_BYTES])
    toc = msgpack.packb(table)
    header = replace(
        header,
        toc_bytes=len(toc),
        toc_crc32=zlib.crc32(toc),
        toc_sha256=hashlib.sha256(toc).digest(),
        file_bytes=header.toc_offset + len(toc),
    )
    return header.pack() + data[HEADER_BYTES : header.toc_offset] + toc


FIELDS = ("name", "offset", "stored", "raw", "codec", "crc32", "dtype", "shape")


def with_row(number: int, **fields: Any) -> bytes:
    def change(table: dict[str, Any]) -> None:
        for name, value in fields.items():
            table["sections"][number][FIELDS.index(name)] = value

    return retabled(change)


def test_a_table_that_is_right_is_read() -> None:
    assert read_all(with_row(0)) and read_all(with_row(0, name="other"))["other"] == b"A" * 64


@pytest.mark.parametrize(
    ("number", "fields", "message"),
    [
        (1, {"offset": 319}, "section b overlaps another or leaves the file"),
        (0, {"offset": 255}, "section a overlaps another or leaves the file"),
        (1, {"stored": 65, "raw": 65, "dtype": ""}, "section b overlaps another or leaves"),
        (1, {"dtype": "<i2"}, "section b has type <i2, known are"),
        (1, {"dtype": "|O8"}, r"section b has type \|O8, known are"),
        (1, {"shape": [17]}, r"section b: shape \(17,\) is not 64 bytes"),
        (1, {"shape": [15]}, r"section b: shape \(15,\) is not 64 bytes"),
        (0, {"codec": "lzma"}, "section a has codec lzma"),
        (0, {"codec": "zstd"}, "section a: "),
        (0, {"raw": 65}, "section a has codec raw"),
        (0, {"name": 5}, "5 is no text"),
        (0, {"codec": None}, "None is no text"),
        (0, {"dtype": None}, "None is no text"),
        (0, {"stored": -1}, "-1 is no size"),
        (0, {"offset": True}, "True is no size"),
        (0, {"crc32": 1.5}, "1.5 is no size"),
        (1, {"shape": [-16]}, "-16 is no size"),
    ],
)
def test_every_row_of_a_table_is_checked(number: int, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=f"SW_NEFF_CONTENT.*{message}"):
        read_all(with_row(number, **fields))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.pop("meta"), "table of contents: KeyError"),
        (lambda table: table.pop("sections"), "table of contents: KeyError"),
        (lambda table: table.update(meta=[1]), "meta requires a map"),
        (lambda table: table["sections"][0].pop(), "table of contents: ValueError"),
    ],
)
def test_a_table_that_is_none_is_refused(change: Any, message: str) -> None:
    with pytest.raises(LoadError, match=f"SW_NEFF_CONTENT.*{message}"):
        read_all(retabled(change))


def test_checksums_of_sections_and_bytes_between_them_are_checked() -> None:
    with pytest.raises(LoadError, match=r"SW_NEFF_CHECKSUM.*section a"):
        read_all(with_row(0, crc32=1))
    with pytest.raises(LoadError, match=r"SW_NEFF_CHECKSUM.*padding between sections"):
        read_all(with_row(0, stored=63, raw=63))
    with pytest.raises(LoadError, match=r"SW_NEFF_CHECKSUM.*padding between sections"):
        read_all(with_row(1, stored=60, raw=60, shape=[15]))
    with pytest.raises(LoadError, match="section c is missing"):
        Container(sample()).read("c")


def test_every_byte_that_belongs_to_nothing_is_zero() -> None:
    """Behind the header, between sections, and up to the table of contents, where the last section
    is one that the table does not have."""
    whole = pack("unit", {}, {"a": b"A" * 60, "none": bytes(64)})
    table = msgpack.unpackb(whole[Header.unpack(whole[:HEADER_BYTES]).toc_offset :])
    table["sections"].pop()
    data = sealed(whole, table)
    container = Container(data)
    inside = {
        n for row in container.sections.values() for n in range(row.offset, row.offset + row.stored)
    }
    between = sorted(set(range(HEADER_BYTES, container.header.toc_offset)) - inside)
    assert between and between[-1] == container.header.toc_offset - 1
    for place in between:
        damaged = data[:place] + b"\1" + data[place + 1 :]
        with pytest.raises(LoadError, match=r"SW_NEFF_CHECKSUM.*padding between sections"):
            Container(damaged)


def test_a_frame_of_another_size_than_the_table_says_is_refused() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(40))
    data = pack("unit", {}, {"a": frame}, compress=False)
    header = Header.unpack(data[:HEADER_BYTES])
    table = msgpack.unpackb(data[header.toc_offset :])
    for raw, message in ((41, "41 bytes required, got 40"), (39, "at most 39 are read")):
        table["sections"][0][3:5] = [raw, "zstd"]
        with pytest.raises(LoadError, match=f"SW_NEFF_CONTENT.*section a: .*{message}"):
            read_all(sealed(data, table))
    table["sections"][0][3:5] = [40, "zstd"]
    assert read_all(sealed(data, table)) == {"a": bytes(40)}


@pytest.mark.parametrize(("size", "refused"), [(2**32 - 64, False), (2**32 - 63, True)])
def test_unpacked_sizes_are_bounded_before_memory_is_taken(size: int, refused: bool) -> None:
    """Both sections together, 2^32 bytes at most."""
    data = with_row(0, codec="zstd", raw=size)
    if not refused:
        assert Container(data).sections["a"].raw == size
        return
    with pytest.raises(LoadError, match=f"SW_NEFF_SIZE.*{2**32} bytes .* got {2**32 + 1}"):
        Container(data)


def test_a_directory_says_where_the_programs_of_a_bundle_are(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="a file is required, got a directory") as caught:
        Container.open(tmp_path)
    assert caught.value.diagnostic.hint == "name a file of it"
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "a1.neff").write_bytes(sample())
    with pytest.raises(LoadError, match="SW_NEFF_MISSING") as caught:
        Container.open(tmp_path)
    assert f"`shardwright neff info {tmp_path}/programs/a1.neff`" in caught.value.diagnostic.hint


def test_a_file_leads_nowhere_else(tmp_path: Path) -> None:
    inside, outside = tmp_path / "bundle", tmp_path / "other.neff"
    inside.mkdir()
    outside.write_bytes(sample())
    (inside / "own.neff").write_bytes(sample())
    (inside / "link.neff").symlink_to(outside)
    assert Container.open(inside / "own.neff", inside=inside).meta["name"] == "p"
    assert Container.open(inside / "link.neff").meta["name"] == "p"
    with pytest.raises(LoadError, match="SW_NEFF_PATH"):
        Container.open(inside / "link.neff", inside=inside)
    with pytest.raises(LoadError, match="SW_NEFF_MISSING"):
        Container.open(inside / "none.neff")
