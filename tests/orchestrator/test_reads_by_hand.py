"""What counts as read by a user's function, and how a file is told from what it was."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import compiler
from orchestrator import reads
from orchestrator.reads import file_digests, recorded


def sha(data: bytes) -> str:
    """Of one part behind its length, as keys have it."""
    return hashlib.sha256(len(data).to_bytes(8, "little") + data).hexdigest()


def test_files_that_are_opened_for_reading_in_the_block(tmp_path: Path) -> None:
    names = ("read", "bytes", "written", "both", "appended", "before", "gone", "a.pyc")
    files = {name: tmp_path / name for name in names}
    for path in files.values():
        path.write_bytes(b"old")
    files["before"].read_bytes()
    found: dict[str, str] = {"kept": "1"}
    with recorded(found):
        files["read"].read_text()
        os.close(os.open(os.fsencode(files["bytes"]), os.O_RDONLY))
        files["written"].write_text("new")
        os.close(os.open(files["both"], os.O_RDWR))
        with files["appended"].open("a") as file:
            file.write("more")
        files["gone"].read_bytes()
        files["gone"].unlink()
        files["a.pyc"].read_bytes()
        Path("/proc/self/stat").read_bytes()
        Path(np.__file__).read_bytes()
        Path(os.__file__).read_bytes()
        Path(compiler.__file__ or "").read_bytes()
        os.listdir(tmp_path)
        here = Path.cwd()
        os.chdir(tmp_path)
        Path("both").read_bytes()  # by a name of its own folder
        os.chdir(here)
    files["written"].read_bytes()
    own = {Path(path).name: value for path, value in found.items() if str(tmp_path) in path}
    assert own == {"read": sha(b"old"), "bytes": sha(b"old"), "both": sha(b"old")}
    assert found["kept"] == "1"
    theirs = (Path(np.__file__), Path(os.__file__), Path(compiler.__file__ or ""))
    assert not {str(path) for path in theirs} & found.keys()


def test_what_an_event_of_python_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names as text or bytes, opened for reading alone; numbers of files are not names."""
    opened: set[str] = set()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reads._THREAD, "opened", opened, raising=False)
    for event, path, flags in (
        ("open", "text", os.O_RDONLY),
        ("open", b"bytes", os.O_RDONLY | os.O_CLOEXEC),
        ("open", "written", os.O_WRONLY),
        ("open", "both", os.O_RDWR | os.O_CREAT),
        ("open", 7, os.O_RDONLY),
        ("os.listdir", "folder", 0),
    ):
        reads._opened(event, (path, None, flags))
    mine = {name for name in opened if name.startswith(str(tmp_path))}
    assert mine == {str(tmp_path / "text"), str(tmp_path / "bytes")}
    monkeypatch.setattr(reads._THREAD, "opened", None)
    reads._opened("open", ("later", None, os.O_RDONLY))
    assert str(tmp_path / "later") not in opened


def test_another_thread_reads_for_itself(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for path in (mine, theirs):
        path.write_bytes(b"")
    found: dict[str, str] = {}
    with recorded(found):
        thread = threading.Thread(target=theirs.read_bytes)
        thread.start()
        thread.join()
        mine.read_bytes()
    assert str(mine) in found and str(theirs) not in found


def test_modules_that_are_loaded_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("of_the_user")
    module.__file__ = str(tmp_path / "own.py")
    Path(module.__file__).write_bytes(b"A = 1")
    monkeypatch.setitem(sys.modules, "of_the_user", module)
    found: dict[str, str] = {}
    with recorded(found):
        pass
    assert found[module.__file__] == sha(b"A = 1")


def test_what_failed_is_recorded_and_heard_no_more(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        path.write_bytes(b"")
    found: dict[str, str] = {}
    with pytest.raises(ValueError, match="theirs"), recorded(found):
        raise ValueError("theirs")
    first.read_bytes()
    assert str(first) not in found
    with recorded(found):
        second.read_bytes()
    assert str(second) in found and str(first) not in found


def test_large_files_by_size_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 64 MiB by content."""
    assert reads.LARGEST == 67_108_864
    monkeypatch.setattr(reads, "LARGEST", 4)
    four, five, gone = (tmp_path / name for name in ("four", "five", "gone"))
    four.write_bytes(b"1234")
    five.write_bytes(b"12345")
    os.utime(five, ns=(7, 1_000_000_123))
    assert file_digests(map(str, (four, five, gone))) == {
        str(four): sha(b"1234"),
        str(five): "5 bytes of 1000000123",
        str(gone): "",
    }
