"""Whether a step was made of the files as they are: only then its answer is kept as one about them.

A new process imports a model as its files say. A process that goes on keeps what it has imported,
whatever becomes of the files, so an answer from it may be one of older files, or of settings that
something else made (docs/design/0054-keys-of-questions.md).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.config.model import entry_folders
from shardwright.orchestrator.keys.reads import Reads, is_users, loaded_files, observed
from shardwright.orchestrator.service.units import digest


def jax_settings() -> str:
    """Digest of jax's settings as they are; empty where jax is not loaded."""
    config = getattr(sys.modules.get("jax"), "config", None)
    values = dict(config.values) if config is not None else {}
    return digest(f"{name}={values[name]!r}".encode() for name in sorted(values)) if values else ""


@dataclass(slots=True)
class Folder:
    """What this process knows of the models of a job's folder, or of those that are nobody's code.
    `settings` are jax's before the first capture of the process, and as captures of this folder
    left them. `first` is what the folder's functions read when they were first called."""

    settings: set[str]
    is_foreign: bool  # somebody else had loaded its modules before
    first: Reads = field(default_factory=dict)

    @classmethod
    def of(cls, job: JobConfig) -> Folder:
        """The folder of a job."""
        if not _INITIAL:
            _INITIAL.append(jax_settings())
        name = job.base if job.model.entry else ""
        if name not in _FOLDERS:
            _FOLDERS.setdefault(name, cls({_INITIAL[0]}, _is_loaded(job)))
        return _FOLDERS[name]

    def learn(self, reads: Reads) -> None:
        """Keep what was read for the first time. It counts for everything that is captured later: a
        module is imported once, and a function that jax has traced is not always called again."""
        for name, value in reads.items():
            self.first.setdefault(name, value)

    def is_as_first(self) -> bool:
        """Whether all that was read is now what it was when it was first read."""
        return not self.is_foreign and observed(self.first) == self.first


_FOLDERS: dict[str, Folder] = {}
_INITIAL: list[str] = []


def _is_loaded(job: JobConfig) -> bool:
    """Whether modules of a job's own folders are there before the first question about it."""
    if not job.model.entry:
        return False
    folders = {os.path.realpath(folder) for folder in entry_folders(job)}
    loaded = (Path(os.path.realpath(name)) for name in loaded_files() if is_users(name))
    return any(path.is_relative_to(folder) for path in loaded for folder in folders)
