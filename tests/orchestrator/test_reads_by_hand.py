"""What counts as read by a user's function, and how a file is told from what it was."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import py_compile
import sys
import threading
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from shardwright import compiler
from shardwright.orchestrator.keys import reads
from shardwright.orchestrator.keys.reads import file_digest, observed, recorded


def sha(data: bytes) -> str:
    """Of one part behind its length, as keys have it."""
    return hashlib.sha256(len(data).to_bytes(8, "little") + data).hexdigest()


def read_in(block: Callable[[], object]) -> dict[str, str]:
    found: dict[str, str] = {}
    with recorded(found):
        block()
    return found


def test_files_that_are_opened_for_reading_in_the_block(tmp_path: Path) -> None:
    """Those that are not there too: what a step does depends on that."""
    names = ("read", "bytes", "written", "both", "appended", "before", "gone", "a.pyc", "absent")
    files = {name: tmp_path / name for name in names}
    for path in files.values():
        path.write_bytes(b"old")
    files["absent"].unlink()
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
        with contextlib.suppress(FileNotFoundError):
            files["absent"].read_bytes()
        for system in (
            "/proc/self/stat",
            "/dev/null",
            "/sys/kernel/mm/transparent_hugepage/enabled",
        ):
            with contextlib.suppress(FileNotFoundError):
                Path(system).read_bytes()
        Path(np.__file__).read_bytes()
        Path(os.__file__).read_bytes()
        Path(compiler.__file__ or "").read_bytes()
        os.close(os.open(tmp_path, os.O_RDONLY))
        here = Path.cwd()
        os.chdir(tmp_path)
        Path("both").read_bytes()  # by a name of its own folder
        os.chdir(here)
    files["written"].read_bytes()
    own = {Path(name).name: value for name, value in found.items() if f"read {tmp_path}" in name}
    old = sha(b"old")
    assert own == {"read": old, "bytes": old, "both": old, "gone": "", "absent": ""}
    assert found["kept"] == "1"
    theirs = (Path(np.__file__), Path(os.__file__), Path(compiler.__file__ or ""))
    assert not {f"read {path}" for path in theirs} & found.keys()
    assert not [name for name in found if name.startswith(("read /proc", "read /dev", "read /sys"))]


def test_folders_that_are_listed_in_the_block(tmp_path: Path) -> None:
    """By their names, not what compiles or imports in them."""
    ways = {
        "listed": os.listdir,
        "scanned": lambda path: list(os.scandir(path)),
        "matched": lambda path: list(Path(path).glob("*.x")),
        "walked": lambda path: list(os.walk(os.fsencode(path))),
    }
    for name in (*ways, "imported"):
        (tmp_path / name / "__pycache__").mkdir(parents=True)
        (tmp_path / name / "a").write_text("")
    (tmp_path / "imported" / "of_a_list.py").write_text("")
    sys.path.insert(0, str(tmp_path / "imported"))
    try:
        found = read_in(
            lambda: [
                *(ways[name](str(tmp_path / name)) for name in ways),
                importlib.import_module("of_a_list"),
                os.listdir(Path(np.__file__).parent),
                os.listdir(Path(compiler.__file__ or "").parent),
            ]
        )
    finally:
        sys.path.remove(str(tmp_path / "imported"))
        del sys.modules["of_a_list"]
    lists = {name.removeprefix("listed "): v for name, v in found.items() if "listed " in name}
    walked = {str(tmp_path / "walked" / "__pycache__"): hashlib.sha256().hexdigest()}
    assert lists == {str(tmp_path / name): sha(b"a") for name in ways} | walked
    (tmp_path / "listed" / "b").write_text("")
    (tmp_path / "scanned" / "a").write_text("changed")
    now = observed(found)
    changed = {name for name in now if now[name] != found[name]}
    assert changed == {f"listed {tmp_path}/listed"}


def test_modules_that_are_looked_for_in_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every folder of the path: what is found, what raises, what is not there."""
    first, second = tmp_path / "first", tmp_path / "second"
    (second / "a_package").mkdir(parents=True)
    first.mkdir()
    (second / "that_raises.py").write_text("raise ImportError('not here')")
    (second / "a_package" / "__init__.py").write_text("")
    (second / "a_package" / "part.py").write_text("")
    for folder in (second, first):
        monkeypatch.syspath_prepend(str(folder))
    (second / "of_no_source.py").write_text("raise ImportError('not here')")
    py_compile.compile(str(second / "of_no_source.py"), str(second / "of_no_source.pyc"))
    (second / "of_no_source.py").unlink()
    names = ("that_raises", "that_is_nowhere", "of_no_source", "a_package.part", "a_package.other")

    def tried() -> None:
        for name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)

    for _ in range(2):  # compiled, then of the compiled file
        found = read_in(tried)
        for name in names:
            sys.modules.pop(name, None)
        del sys.modules["a_package"]
        own = {name: value for name, value in found.items() if str(tmp_path) in name}
        raises, package = second / "that_raises.py", second / "a_package"
        places = [f"{folder}/{name}" for folder in (first, second) for name in names[:3]]
        places += [f"{first}/a_package", *(f"{package}/{name}" for name in ("part", "other"))]
        assert own == dict.fromkeys((f"looked for {place}" for place in places), "") | {
            f"looked for {second}/that_raises": str(raises),
            f"looked for {second}/of_no_source": str(second / "of_no_source.pyc"),
            f"looked for {package}": str(package / "__init__.py"),
            f"looked for {package}/part": str(package / "part.py"),
            f"read {raises}": sha(raises.read_bytes()),
            f"read {package}/__init__.py": sha(b""),
            f"read {package}/part.py": sha(b""),
        }
    (first / "a_package").mkdir()  # of no file: the search goes on, and may end here
    (package / "other.py").write_text("")
    now = observed(own)
    changed = {name: value for name, value in now.items() if value != own[name]}
    assert changed == {
        f"looked for {first}/a_package": f"{first}/a_package",
        f"looked for {package}/other": f"{package}/other.py",
    }


def test_what_an_event_of_python_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names as text or bytes, opened for reading alone; numbers of files are not names."""
    heard = reads._Heard()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reads._THREAD, "heard", heard, raising=False)
    for event, path, flags in (
        ("open", "text", os.O_RDONLY),
        ("open", b"bytes", os.O_RDONLY | os.O_CLOEXEC),
        ("open", "written", os.O_WRONLY),
        ("open", "both", os.O_RDWR | os.O_CREAT),
        ("open", 7, os.O_RDONLY),
        ("os.listdir", "folder", 0),
        ("os.scandir", None, 0),
        ("os.scandir", 7, 0),
        ("os.remove", "other", 0),
    ):
        reads._happened(event, (path, None, flags))
    mine = {name for name in heard.opened if name.startswith(str(tmp_path))}
    assert mine == {str(tmp_path / "text"), str(tmp_path / "bytes")}
    assert heard.listed == {str(tmp_path / "folder"), str(tmp_path)}
    monkeypatch.setattr(reads._THREAD, "heard", None)
    reads._happened("open", ("later", None, os.O_RDONLY))
    assert str(tmp_path / "later") not in heard.opened


class Own(MetaPathFinder):
    """Finds everything that begins with `made_of_`."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name.startswith("made_of_") else None


def test_who_listens_hears_before_anybody_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another finder makes up, as of packages that are installed to be edited, was looked for
    all the same: a file of that name would be no other answer."""
    monkeypatch.setattr(sys, "meta_path", [Own()])
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    hooks: list[object] = []
    monkeypatch.setattr(sys, "addaudithook", hooks.append)
    reads._listen.__wrapped__()
    heard = reads._Heard()
    monkeypatch.setattr(reads._THREAD, "heard", heard, raising=False)
    assert importlib.util.find_spec("made_of_nothing") is not None
    assert heard.modules == {str(tmp_path / "made_of_nothing")}
    assert hooks == [reads._happened]


def test_another_thread_reads_for_itself(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for path in (mine, theirs):
        path.write_bytes(b"")

    def both() -> None:
        thread = threading.Thread(target=theirs.read_bytes)
        thread.start()
        thread.join()
        mine.read_bytes()

    found = read_in(both)
    assert f"read {mine}" in found and f"read {theirs}" not in found


def test_modules_that_are_loaded_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("of_the_user")
    module.__file__ = str(tmp_path / "own.py")
    Path(module.__file__).write_bytes(b"A = 1")
    monkeypatch.setitem(sys.modules, "of_the_user", module)
    assert read_in(lambda: None)[f"read {module.__file__}"] == sha(b"A = 1")


def test_what_failed_is_recorded_and_heard_no_more(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        path.write_bytes(b"")
    found: dict[str, str] = {}
    with pytest.raises(ValueError, match="theirs"), recorded(found):
        second.read_bytes()
        raise ValueError("theirs")
    first.read_bytes()
    assert f"read {first}" not in found and f"read {second}" in found
    assert f"read {second}" not in read_in(lambda: None)


def test_large_files_by_size_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 64 MiB by content."""
    assert reads.LARGEST == 67_108_864
    monkeypatch.setattr(reads, "LARGEST", 4)
    four, five, gone = (tmp_path / name for name in ("four", "five", "gone"))
    four.write_bytes(b"1234")
    five.write_bytes(b"12345")
    os.utime(five, ns=(7, 1_000_000_123))
    found = [file_digest(str(path)) for path in (four, five, gone)]
    assert found == [sha(b"1234"), "5 bytes of 1000000123", ""]
