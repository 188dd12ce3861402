"""Private copies of the repository: a damage is written there, so that every process a test starts
meets it, and nobody else does."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Tree:
    """One copy. Files that are written get times that never repeat, since Python takes a compiled
    module for good when size and second of its source agree."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._clock = 1_000_000_000

    @classmethod
    def copied(cls, path: Path) -> Tree:
        """A copy of what git knows of, as it lies in the working directory."""
        shutil.rmtree(path, ignore_errors=True)
        listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True).stdout
        for name in names.decode().split("\0"):
            if name and ((ROOT / name).is_file() or (ROOT / name).is_symlink()):
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, path / name, follow_symlinks=False)
        return cls(path)

    @contextmanager
    def holding(self, name: str, text: str) -> Iterator[None]:
        """Within the block the file `name` has `text`."""
        original = (self.path / name).read_text()
        self._write(name, text)
        try:
            yield
        finally:
            self._write(name, original)

    def _write(self, name: str, text: str) -> None:
        path = self.path / name
        path.write_text(text)
        self._clock += 10
        os.utime(path, (self._clock, self._clock))
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()
