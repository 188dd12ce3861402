"""Files that somebody made to harm their reader: every checksum in them is right. They are refused
with a code, before memory is taken for them and without touching a file outside of the bundle."""

from __future__ import annotations

import hashlib
import os
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest

from shardwright.compiler.diagnostics import LoadError
from shardwright.compiler.neff import bundle as bundle_module
from shardwright.compiler.neff.bundle import Bundle, load_bundle, write_bundle
from shardwright.compiler.neff.format import HEADER_BYTES, MAX_RAW_BYTES, Header
from shardwright.compiler.neff.manifest import Manifest
from shardwright.compiler.neff.reader import Container
from shardwright.compiler.neff.writer import pack
from shardwright.orchestrator.cli import main
from tests.system.test_damage import file_of, refused, verify_refuses

HOSTILE: tuple[Any, ...] = (-1, 2**63, 2**40, 0, "x" * 70, "../../x", None, [], {}, [[[]]], True)
MUTATIONS, SEED = 400, 11


def with_rows(rows: list[Any], stored: bytes = b"", meta: Any = None) -> bytes:
    """A container with the table of contents that is given, its checksums right."""
    toc = msgpack.packb({"meta": {} if meta is None else meta, "sections": rows})
    body = stored + b"\0" * (-len(stored) % 64)
    digest = hashlib.sha256(toc).digest()
    at, end = HEADER_BYTES + len(body), HEADER_BYTES + len(body) + len(toc)
    header = Header("program", 1, at, len(toc), zlib.crc32(toc), digest, end)
    return header.pack() + body + toc


def frame(size: int) -> bytes:
    """A zstd frame of a few bytes that says it holds `size`: one run of zeros."""
    block = (1 | 1 << 1 | min(size, 2**17) << 3).to_bytes(3, "little") + b"\0"
    return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", size) + block


def bomb(declared: int, in_frame: int) -> bytes:
    data = frame(in_frame)
    row = ["s", HEADER_BYTES, len(data), declared, "zstd", zlib.crc32(data), "", []]
    return with_rows([row], data)


def code_of(data: bytes) -> str:
    with pytest.raises(LoadError) as caught:
        Container(data).verify()
    return caught.value.code


def test_a_frame_of_the_declared_size_is_read() -> None:
    assert Container(bomb(1000, 1000)).read("s") == bytes(1000)


@pytest.mark.parametrize(
    ("declared", "in_frame", "code"),
    [
        (1000, 2**40, "SW_NEFF_CONTENT"),
        (2**40, 2**40, "SW_NEFF_SIZE"),
        (MAX_RAW_BYTES + 1, 1000, "SW_NEFF_SIZE"),
        (2**31, 1000, "SW_NEFF_CONTENT"),
        (1000, 999, "SW_NEFF_CONTENT"),
    ],
)
def test_a_size_bomb_takes_no_memory(declared: int, in_frame: int, code: str) -> None:
    assert code_of(bomb(declared, in_frame)) == code


def test_many_sections_of_an_allowed_size_are_a_bomb_too() -> None:
    data = frame(2**30)
    rows = [[f"s{n}", HEADER_BYTES, len(data), 2**30, "zstd", 0, "", []] for n in range(9)]
    assert code_of(with_rows(rows, data)) == "SW_NEFF_SIZE"


def test_a_frame_without_a_size_is_refused() -> None:
    import zstandard

    data = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
    row = ["s", HEADER_BYTES, len(data), 1000, "zstd", zlib.crc32(data), "", []]
    assert code_of(with_rows([row], data)) == "SW_NEFF_CONTENT"


ROW = ["s", HEADER_BYTES, 0, 0, "raw", 0, "<i4", [0]]


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("at", range(8))
def test_a_row_of_the_table_with_nonsense(at: int, value: Any) -> None:
    row = [*ROW[:at], value, *ROW[at + 1 :]]
    for shape in ([-1, 0], [0, -4], [2**62, 2**62, 0]):
        for rows in ([row], [[*ROW[:7], shape]], [value], value):
            with_coded_end(partial(verified, with_rows(rows)))


@pytest.mark.parametrize("meta", [[], "text", 5, None])
def test_meta_that_is_no_map(meta: Any) -> None:
    toc = with_rows([], meta=meta) if meta is not None else with_rows([])
    with_coded_end(lambda: Container(toc).verify())


def verified(data: bytes) -> None:
    Container(data).verify()


def with_coded_end(action: Callable[[], object]) -> str:
    """The code an action ends with, empty for none; any other error is the test's failure."""
    try:
        action()
    except LoadError as error:
        return error.code
    return ""


@pytest.mark.parametrize("sha", ["../../../secret", "/etc/passwd", "a" * 63, "A" * 64, "", None, 7])
def test_digests_that_are_paths_lead_nowhere(sha: Any, bundle_copy: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.neff").write_bytes(file_of(bundle_copy, "program").read_bytes())
    for kind in ("manifest", "core"):
        path = file_of(bundle_copy, kind)
        container = Container.open(path)
        meta = dict(container.meta)
        meta["programs"] = dict.fromkeys(meta["programs"], sha)
        path.write_bytes(pack(kind, meta, {}))
    assert refused(bundle_copy) == "SW_NEFF_CONTENT"
    core = str(file_of(bundle_copy, "core"))
    for words in (["info", core], ["export", str(bundle_copy)]):
        assert main(["neff", *words]) == (0 if words[0] == "info" else 72)
    assert main(["neff", "dump", core, "--program", "forward"]) == 72


@pytest.mark.parametrize("kind", ["program", "manifest", "core"])
def test_links_out_of_a_bundle_are_not_followed(
    kind: str, bundle_copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file_of(bundle_copy, kind)
    outside = tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    assert refused(bundle_copy) == "SW_NEFF_PATH"
    verify_refuses(bundle_copy, "SW_NEFF_PATH", capsys)
    if kind != "core":
        exported = tmp_path / "exported.neff"
        assert main(["neff", "export", str(bundle_copy), "--output", str(exported)]) == 72
        assert not exported.exists()


def test_links_inside_of_a_bundle_and_to_it_are_followed(bundle_copy: Path, tmp_path: Path) -> None:
    path = file_of(bundle_copy, "program")
    path.rename(path.with_name("renamed"))
    path.symlink_to("renamed")
    (tmp_path / "link").symlink_to(bundle_copy)
    assert load_bundle(tmp_path / "link").programs


def test_a_bundle_is_not_written_through_links(small_bundle: Bundle, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.neff").write_bytes(b"not yours")
    out = tmp_path / "out"
    out.mkdir()
    (out / "programs").symlink_to(elsewhere)
    with pytest.raises(LoadError, match="SW_NEFF_PATH"):
        write_bundle(out, small_bundle.manifest, small_bundle.programs, {})
    assert [path.name for path in elsewhere.iterdir()] == ["mine.neff"]


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**41)


@pytest.mark.parametrize("make", [os.mkfifo, sparse, os.mkdir, lambda p: p.symlink_to("/dev/zero")])
def test_what_is_no_file_of_sensible_size_is_not_read(
    make: Callable[[Path], None], bundle_copy: Path, tmp_path: Path
) -> None:
    path = file_of(bundle_copy, "program")
    path.unlink()
    make(path)
    assert refused(bundle_copy) in ("SW_NEFF_MISSING", "SW_NEFF_PATH")
    make(tmp_path / "file.neff")
    assert main(["neff", "verify", str(tmp_path / "file.neff")]) == 72


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything inside of plain data, containers too."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield from leaves(item, (*path, at))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    if isinstance(value, dict):
        return {**value, path[0]: changed(value[path[0]], path[1:], new)}
    copy = list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], new)
    return type(value)(copy)


def mutations(value: Any, count: int) -> Iterator[Any]:
    """Copies of plain data with one thing in them replaced."""
    dice = random.Random(SEED)
    places = [path for path in leaves(value) if path]
    for _ in range(count):
        yield changed(value, dice.choice(places), dice.choice(HOSTILE))


@pytest.mark.matrix
def test_a_manifest_with_one_thing_wrong(bundle_copy: Path) -> None:
    """Its cores are bound to it again where that can be, so that the loader goes on."""
    path = file_of(bundle_copy, "manifest")
    meta = Container.open(path).meta
    codes = set()
    for changed_meta in mutations(meta, MUTATIONS):
        data = pack("manifest", changed_meta, {})
        path.write_bytes(data)

        def load(data: bytes = data, changed_meta: Any = changed_meta) -> None:
            manifest = Manifest.from_meta(changed_meta, "manifest")
            if manifest.num_cores <= 8:
                bundle_module._write_cores(bundle_copy, manifest, hashlib.sha256(data).hexdigest())
            load_bundle(bundle_copy)

        codes.add(with_coded_end(load))
    assert "SW_NEFF_CONTENT" in codes
