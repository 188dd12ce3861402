"""The folder of a dump: steps in the order they come, numbered in the part they belong to, and an
index that says what each file is.

What an earlier dump left in the folder goes first; nothing else is touched. The index is written
when the block ends, whatever ended it: a dump of a refused job ends with the stage that refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from shardwright.compiler.diagnostics import Loc, UsageError
from shardwright.compiler.ir.text import annotated_text
from shardwright.compiler.ir.types import Graph, Value
from shardwright.compiler.steps import Place, Recorder, Remark, recording
from shardwright.orchestrator.dump.names import FILES, README, about
from shardwright.orchestrator.terminal import outputs

FLAG = "--dump-dir"
INDEX = "README.txt"
_LISTED = re.compile(r"^  ([\w./+-]+\.(?:txt|mlir))  ", re.MULTILINE)


class Dump:
    """A dump, recorded in as many blocks as its job comes in."""

    def __init__(self, folder: Path, flag: str = FLAG) -> None:
        """Make the folder ready. Raises UsageError (SW_OUTPUT) where it cannot be written."""
        outputs.prepare(folder, flag)
        _clear(folder, flag)
        self._whole = _Whole(folder, flag)
        self._top = _Part(self._whole)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Write the steps of the block. Raises UsageError (SW_OUTPUT) where that cannot be."""
        try:
            with recording(self._top):
                yield
        except BaseException:
            with suppress(UsageError):  # what ended the block is told
                self._index()
            raise
        self._index()

    def _index(self) -> None:
        text = README + "".join(self._whole.lines())
        outputs.write(self._whole.root / INDEX, text, self._whole.flag)


@contextmanager
def dumping(folder: Path | None, flag: str = FLAG) -> Iterator[None]:
    """Write the steps of a block to a folder, which nobody else writes meanwhile; none without
    one. Raises as `Dump` and `outputs.held` do."""
    with ExitStack() as held:
        if folder:
            held.enter_context(outputs.held(folder, flag))
            held.enter_context(Dump(folder, flag).recorded())
        yield


def _clear(folder: Path, flag: str) -> None:
    """Remove the files that the index of an earlier dump lists. Raises UsageError (SW_OUTPUT) where
    the index would take the place of something else.
    """
    index = folder / INDEX
    with outputs.writing(folder, flag):
        text = index.read_text(errors="replace") if index.is_file() else ""
        if text and not text.startswith(README.partition("\n")[0]):
            raise UsageError(
                "SW_OUTPUT",
                f"{flag} requires a folder whose {INDEX} is that of a dump, got {index}",
                hint="name another folder",
            )
        for name in _LISTED.findall(text):
            path = folder / name
            if ".." not in Path(name).parts and not Path(name).is_absolute():
                path.unlink(missing_ok=True)
                with suppress(OSError):  # what else lies there stays
                    path.parent.rmdir()


@dataclass(slots=True)
class _Whole:
    """What the parts of a dump share."""

    root: Path
    flag: str
    index: list[tuple[str, str, str]] = field(default_factory=list)
    """Folder, file and what it is; nothing for a step that changed nothing, which has no file."""
    parts: dict[tuple[str, str], _Part] = field(default_factory=dict)
    names: Counter[str] = field(default_factory=Counter)

    def lines(self) -> Iterator[str]:
        """The index: the whole step, then its parts, each in order."""
        order = tuple(FILES)
        folders = list(dict.fromkeys(folder for folder, _, _ in self.index))
        folders.sort(key=lambda f: order.index(f.partition("/")[0]))
        width = max(
            (len(folder) + len(file) + 1 for folder, file, text in self.index if text), default=0
        )
        for folder in folders:
            yield "\n"
            rows = [(file, text) for of, file, text in self.index if of == folder]
            for is_same, group in groupby(rows, lambda row: not row[1]):
                if is_same:
                    yield f"    no change: {', '.join(file for file, _ in group)}\n"
                    continue
                for file, text in group:
                    name = f"{folder}/{file}" if folder else file
                    yield f"  {name:<{width}}  {text}\n"


class _Part(Recorder):
    """A folder of the dump; `place` tells the user's locations of its graphs."""

    def __init__(self, whole: _Whole, folder: str = "", place: Place | None = None) -> None:
        self._whole, self._folder, self._place = whole, folder, place
        self._number = 0
        self._last: tuple[str, str] | None = None  # the last graph: its text and its file

    def graph(self, name: str, graph: Graph, remark: Remark | None) -> None:
        """A file with the graph, unless the step before left it so."""
        text = annotated_text(graph, remark or _nothing, self._place or _same)
        if self._last is not None and self._last[0] == text:
            self._tell(f"{self._number:02d}-{name}", "")
            self._number += 1
            return
        self._last = text, self._write(name, text, "txt")

    def text(self, name: str, text: str, kind: str) -> None:
        """A file with the text."""
        self._write(name, text, kind)

    def inside(self, folder: str, key: str, place: Place | None) -> Recorder | None:
        """A folder of its own; numbered where another part has its name."""
        name = re.sub(r"[^\w./-]", "_", folder)
        known = self._whole.parts.get((name, key))
        if known is not None:
            return None if key else known
        self._whole.names[name] += 1
        count = self._whole.names[name]
        part = _Part(self._whole, name if count == 1 else f"{name}.{count}", place)
        self._whole.parts[name, key] = part
        return part

    def _write(self, name: str, text: str, kind: str) -> str:
        file = f"{self._number:02d}-{name}.{kind}"
        self._number += 1
        outputs.write(self._whole.root / self._folder / file, text, self._whole.flag)
        self._tell(file, about(self._folder, name) or name)
        return file

    def _tell(self, file: str, text: str) -> None:
        self._whole.index.append((self._folder, file, text))


def _nothing(_value: Value) -> str:
    return ""


def _same(loc: Loc) -> Loc:
    return loc
