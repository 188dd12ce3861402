"""The kinds of files that the forge makes, by name: what they start from, and how one is judged.

A kind's material is made once, where JAX may be loaded; its judge works in processes that read
files and nothing else.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.forge import programs
from tests.support.forge.pool import Judge, Prepare


@dataclass(frozen=True, slots=True)
class Kind:
    """How to make the material of a kind, and its judge from (folder, material)."""

    material: Callable[[Path], Any]
    prepare: Prepare


def _program_material(folder: Path) -> list[programs.Sound]:
    from tests.support.forge.sound import sound_files

    return sound_files(folder)


def _program_judge(given: tuple[str, list[programs.Sound]]) -> Judge:
    folder, sources = given
    own = Path(tempfile.mkdtemp(dir=folder, prefix=f"{os.getpid()}-"))

    def judge(number: int) -> str:
        source, data = programs.forged(sources, number)
        ends = programs.judged(source, data, own)
        return next(filter(None, ends.values()), "done")

    return judge


KINDS: dict[str, Kind] = {
    "programs": Kind(_program_material, _program_judge),
}
