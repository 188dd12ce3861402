"""The kinds of files that the forge makes, by name: what they start from, and how one is judged.

A kind's material is made once, where JAX may be loaded; its judge works in processes that read
files and nothing else.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
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


def _no_material(folder: Path) -> None:
    """Its judge makes what it starts from."""


def _model_material(kind: str, folder: Path) -> list[bytes]:
    from tests.support.forge.models import sources

    return sources()[kind]


def _model_judge(kind: str, given: tuple[str, list[bytes]]) -> Judge:
    from tests.support.forge.models import judge_of

    return judge_of(kind, given[1])


def _job_judge(name: str, given: tuple[str, None]) -> Judge:
    from tests.support.forge import jobs

    judge: Judge = getattr(jobs, name)(given[0])
    return judge


@cache
def _stored_material(folder: Path) -> Any:
    from tests.support.forge.stored import material

    return material(folder)


def _stored_judge(name: str, given: tuple[str, Any]) -> Judge:
    from tests.support.forge import stored

    judge: Judge = getattr(stored, name)(given)
    return judge


KINDS: dict[str, Kind] = {
    "programs": Kind(_program_material, _program_judge),
    **{
        kind: Kind(partial(_model_material, kind), partial(_model_judge, kind))
        for kind in ("stablehlo", "bytecode", "hlo text", "hlo proto")
    },
    **{
        name: Kind(_no_material, partial(_job_judge, f"{name}_judge"))
        for name in ("jobs", "configs", "targets", "points")
    },
    **{
        name: Kind(_stored_material, partial(_stored_judge, f"{name}_judge"))
        for name in ("plans", "reports", "journals", "entries")
    },
}


def mixed_judge(given: tuple[str, list[tuple[str, Any, int]]]) -> Judge:
    """Judges of several kinds in one process: rows of kind, material and number of cases, which
    are numbered one behind the other."""
    folder, rows = given
    judges = {kind: KINDS[kind].prepare((folder, material)) for kind, material, _ in rows}
    cases = [(kind, number) for kind, _, count in rows for number in range(count)]

    def judge(number: int) -> str:
        kind, own = cases[number]
        return f"{kind}: {judges[kind](own)}"

    return judge
