"""The releases of neuronx-cc, and the profile that stands for one: what
`--compiler-version-profile` names.

A profile says which rows of the time line (`timeline.py`) hold. Without one the defaults are those
of the newest release, and nothing is refused that this compiler can do.
Source of the versions: neuronx-cc release notes, 2022-10 to 2026-08.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.surface.timeline import Row, behaviour

Version = tuple[int, ...]


RELEASES = (
    *("2.1.0.76", "2.2.0.73", "2.3.0.4"),  # 2022
    *("2.4.0.21", "2.5.0.28", "2.6.0.19", "2.7.0.40", "2.8.0.25", "2.9.0.16"),  # 2023
    *("2.10.0.34", "2.10.0.35", "2.11.0.34", "2.11.0.35", "2.12.54"),
    *("2.12.68", "2.13.66", "2.13.68", "2.13.72", "2.14.213", "2.15.128"),  # 2024
    *("2.16.345", "2.17.194", "2.18.121", "2.19.8089", "2.20.9961"),  # to 2025
    *("2.21.18209", "2.22.12471"),
    *("2.24.5133", "2.27.5334"),  # 2026
)
"""Versions of all published releases, the oldest first."""
OLDEST, LATEST = RELEASES[0], RELEASES[-1]
_SHORT = {"2.1.76": OLDEST}
"""Other spelling of a version -> the one of its release notes."""


def parse_version(text: str) -> Version:
    """`2.13.68.0` as numbers. Raises UsageError (SW_USAGE) for anything else."""
    if not re.fullmatch(r"\d+(\.\d+){1,4}", text):
        raise UsageError(
            "SW_USAGE",
            f"--compiler-version-profile requires a version like {LATEST}, got {text!r}",
            hint=f"releases run from {OLDEST} to {LATEST}",
        )
    return tuple(int(part) for part in text.split("."))


@dataclass(frozen=True, slots=True)
class Profile:
    """A release whose defaults and operator table apply; empty: this compiler's own profile."""

    version: str = ""

    @property
    def is_own(self) -> bool:
        """No release was named."""
        return not self.version

    def at_least(self, since: str) -> bool:
        """Whether the release is `since` or newer; the own profile is newer than all."""
        if self.is_own or not since:
            return True
        return _padded(parse_version(self.version)) >= _padded(parse_version(since))

    def holds(self, row: Row) -> bool:
        """Whether a row of the time line holds."""
        return self.at_least(row.since) and not (row.until and self.at_least(row.until))

    def deprecates(self, row: Row) -> bool:
        """Whether the release warns about what the row is about."""
        return bool(row.deprecated) and self.at_least(row.deprecated)

    def has(self, name: str) -> bool:
        """Whether a behaviour of the time line holds."""
        return self.holds(behaviour(name))

    def __str__(self) -> str:
        return self.version or "own"


OWN = Profile()


def profile(text: str) -> Profile:
    """The profile named `text`: a version, `latest`, or `own`.

    Raises UsageError (SW_USAGE) for a version older than the first release or newer than the last.
    """
    name = text.strip().lower()
    if name in ("", "own"):
        return OWN
    found = Profile(LATEST if name == "latest" else _SHORT.get(name, name))
    if not found.at_least(OLDEST) or parse_version(found.version)[:3] > parse_version(LATEST):
        raise UsageError(
            "SW_USAGE",
            f"--compiler-version-profile requires a release from {OLDEST} to {LATEST}, got {text}",
            hint="`own` is this compiler without the restrictions of a release",
        )
    return found


def _padded(version: Version) -> Version:
    return (*version, *(0,) * 5)[:5]
