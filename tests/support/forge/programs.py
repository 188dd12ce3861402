"""Program files with a few fields changed and every checksum right, and the road they go."""

from __future__ import annotations

import hashlib
import io
import random
import struct
import zlib
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.isa.decode import unpack_attrs
from shardwright.compiler.isa.encode import pack_attrs
from shardwright.compiler.neff.bundle import read_program
from shardwright.compiler.neff.format import DTYPES, HEADER_BYTES, Header
from shardwright.compiler.neff.reader import Container
from shardwright.compiler.neff.writer import pack
from shardwright.orchestrator.neff import neff_text, neff_tools
from tests.support.forge.plain import harmed, near_integer

_SMALL = 2**24
"""Elements of an input that a case is given; a program that asks for more gets none."""
_MOST_CHANGES = 3
_HEADER = struct.Struct("<8sHHIQ16sQQI32sQ")


@dataclass(frozen=True, slots=True)
class Sound:
    """A file that nobody changed, with inputs it runs on."""

    name: str
    data: bytes
    inputs: bytes


@dataclass(slots=True)
class Parts:
    """A container taken apart."""

    meta: Any
    sections: dict[str, Any]
    features: int


def forged(sources: list[Sound], number: int) -> tuple[Sound, bytes]:
    """(the file it was, the changed file) of this number."""
    dice = random.Random(number)
    source = dice.choice(sources)
    if dice.random() < 0.06:
        return source, _outer(source.data, dice)
    container = Container(source.data)
    parts = Parts(
        dict(container.meta),
        {name: container.read(name) for name in container.sections},
        container.header.features,
    )
    for _ in range(dice.choice((1, 1, 1, 2, _MOST_CHANGES))):
        _change(parts, dice)
    try:
        return source, pack("program", parts.meta, parts.sections, False, parts.features)
    except (TypeError, ValueError, OverflowError, AttributeError):
        return source, source.data  # no such file can be written


def _outer(data: bytes, dice: random.Random) -> bytes:
    """A field of the header or of the table of contents changed."""
    header = Header.unpack(data[:HEADER_BYTES])
    end = header.toc_offset
    toc = data[end : end + header.toc_bytes]
    if dice.random() < 0.6:
        try:
            toc = msgpack.packb(harmed(msgpack.unpackb(toc), dice))
        except (TypeError, ValueError, OverflowError):
            return data  # no such table can be written
    header = replace(
        header,
        toc_bytes=len(toc),
        toc_crc32=zlib.crc32(toc),
        toc_sha256=hashlib.sha256(toc).digest(),
        file_bytes=end + len(toc),
    )
    if dice.random() < 0.5:
        field = dice.choice(("features", "toc_offset", "toc_bytes", "file_bytes", "major", "minor"))
        most = 2**16 if field in ("major", "minor") else 2**64
        new = near_integer(getattr(header, field), dice) % most
        header = replace(header, **{field: new})
    return header.pack() + data[HEADER_BYTES:end] + toc


def _change(parts: Parts, dice: random.Random) -> None:
    name = dice.choice(list(parts.sections))
    kind = dice.random()
    if kind < 0.06:
        parts.meta = harmed(parts.meta, dice)
    elif kind < 0.08:
        parts.features ^= 1 << dice.randrange(5)
    elif kind < 0.1:
        _rearranged(parts.sections, name, dice)
    else:
        # An earlier change may have left what cannot be read to be changed again.
        with suppress(TypeError, ValueError, KeyError, msgpack.UnpackException):
            parts.sections[name] = _changed_section(name, parts.sections, dice)


def _rearranged(sections: dict[str, Any], name: str, dice: random.Random) -> None:
    """A section gone, copied over another, or under another name."""
    other, kind = dice.choice(list(sections)), dice.random()
    if kind < 0.4:
        del sections[name]
    elif kind < 0.8:
        sections[name], sections[other] = sections[other], sections[name]
    else:
        sections[dice.choice(("f9/code", "f-1/code", "fx/code", "f0/", "x"))] = sections[name]


def _changed_section(name: str, sections: dict[str, Any], dice: random.Random) -> Any:
    content = sections[name]
    if isinstance(content, np.ndarray):
        return _changed_column(name, sections, dice)
    leaf = name.rpartition("/")[2]
    if leaf == "constants":
        size = dice.randrange(len(content) + 1)
        return dice.choice((content[:size], content + bytes(size), content * 2, content[1:]))
    if leaf == "attrs":
        return _changed_attrs(content, dice)
    return pack_or(content, harmed(unpack_attrs(bytes(content)), dice))


def pack_or(content: bytes, value: Any) -> bytes:
    """`value` as attributes are packed; `content` where nobody can."""
    try:
        return pack_attrs(value)
    except (TypeError, ValueError, OverflowError, AttributeError):
        return content


def _changed_attrs(content: bytes, dice: random.Random) -> bytes:
    """One set of attributes changed, or the table of them."""
    rows = unpack_attrs(bytes(content))
    if dice.random() < 0.1:
        return pack_or(content, harmed(rows, dice))
    full = [n for n, row in enumerate(rows) if _holds_attributes(row)]
    if not full:
        return content
    number = dice.choice(full)
    row = pack_or(rows[number], harmed(unpack_attrs(rows[number]), dice))
    return pack_attrs([*rows[:number], row, *rows[number + 1 :]])


def _holds_attributes(row: Any) -> bool:
    """Whether there is something to change; an earlier change may have left anything."""
    try:
        return bool(unpack_attrs(row))
    except (TypeError, ValueError, msgpack.UnpackException):
        return False


def _changed_column(name: str, sections: dict[str, Any], dice: random.Random) -> Any:
    column, kind = sections[name].copy(), dice.random()
    if not column.size or kind < 0.04:
        return np.resize(column, dice.randrange(2 * column.size + 2))
    if kind < 0.07:
        return column.astype(dice.choice([np.dtype(d) for d in DTYPES]))
    if kind < 0.15 and f"{name}.end" in sections:
        return _swapped_rows(column, sections[f"{name}.end"], dice)
    at = dice.randrange(column.size)
    old = int(column.flat[at])
    other = int(column.flat[dice.randrange(column.size)])
    new = other if dice.random() < 0.3 else near_integer(old, dice)
    limit = np.finfo(column.dtype) if column.dtype.kind == "f" else np.iinfo(column.dtype)
    column.flat[at] = min(max(new, limit.min), limit.max)
    return column


def _swapped_rows(column: Any, ends: Any, dice: random.Random) -> Any:
    """Two rows of equal length in each other's place."""
    bounds = [*zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)]
    (a0, a1), (b0, b1) = dice.choice(bounds), dice.choice(bounds)
    if 0 <= a0 < a1 and a1 - a0 == b1 - b0:
        column[a0:a1], column[b0:b1] = column[b0:b1].copy(), column[a0:a1].copy()
    return column


def judged(source: Sound, data: bytes, folder: Path) -> dict[str, str]:
    """How every command ended on the file: the code of the refusal, empty where it did its work.
    What the reader refuses, all refuse: it is given to one more of them. Whatever else is raised is
    a finding."""
    path, sound = folder / "forged.neff", folder / f"{source.name}.neff"
    path.write_bytes(data)
    if not sound.exists():
        sound.write_bytes(source.data)
    inputs, out = folder / "in.npz", folder / "out.npz"
    refusal = _ended("verify", lambda: neff_tools.verify(path))
    inputs.write_bytes(source.inputs if refusal else _inputs(source, data))
    commands: dict[str, Callable[[], object]] = {
        "info": lambda: neff_tools.info(path, False),
        "info --json": lambda: neff_tools.info(path, True),
        "dump": lambda: neff_text.dump(path, "", "", ()),
        "diff": lambda: neff_text.diff(sound, path, ""),
        "run L1 --time": lambda: neff_tools.run(
            path, [inputs], out, neff_tools.RunOptions(level="L1", timed=True)
        ),
        "run L0": lambda: neff_tools.run(path, [inputs], out, neff_tools.RunOptions(level="L0")),
    }
    if refusal:
        more = random.Random(data).choice(list(commands))
        return {"verify": refusal, more: _ended(more, commands[more])}
    return {name: _ended(name, command) for name, command in commands.items()}


def _ended(name: str, command: Callable[[], object]) -> str:
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            command()
    except DiagnosticError as error:
        return error.code
    except BaseException as error:
        error.add_note(f"neff {name}")
        raise
    return ""


def _inputs(source: Sound, data: bytes) -> bytes:
    """Inputs of the shapes that the changed file asks for, where they are small; else those of the
    file it was."""
    try:
        program = read_program(Container(data))
        named = {b.name: b for b in program.buffers if b.kind == "named"}
        shapes = [(named[n].shape, named[n].dtype.numpy) for n in program.inputs]
        arrays = [_some(shape, dtype) for shape, dtype in shapes]
    except Exception:  # whatever is wrong with it, the commands say
        return source.inputs
    if [(a.shape, a.dtype) for a in arrays] == _of(source.inputs):
        return source.inputs
    stream = io.BytesIO()
    np.savez(stream, **{f"arg{k}": a for k, a in enumerate(arrays)})
    return stream.getvalue()


def _of(inputs: bytes) -> list[tuple[Any, Any]]:
    with np.load(io.BytesIO(inputs)) as arrays:
        return [(a.shape, a.dtype) for a in (arrays[f"arg{k}"] for k in range(len(arrays.files)))]


def _some(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    size = 1
    for n in shape:
        size *= n
    if not 0 <= size <= _SMALL:
        raise ValueError(f"{size} elements")
    return (np.arange(size) % 5).astype(dtype).reshape(shape)
