"""Things that turn out to belong together, two by two (union-find)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Thing = TypeVar("Thing", bound=Hashable)


class Families(Generic[Thing]):
    """Each thing is alone until it is joined; one of a family stands for all of it."""

    def __init__(self) -> None:
        self._above: dict[Thing, Thing] = {}

    def of(self, thing: Thing) -> Thing:
        """What stands for the family of `thing`."""
        while (above := self._above.get(thing, thing)) is not thing:
            self._above[thing] = thing = self._above.get(above, above)
        return thing

    def join(self, thing: Thing, other: Thing) -> None:
        """Make two families one, for which stands what stands for that of `other`."""
        mine, theirs = self.of(thing), self.of(other)
        if mine is not theirs:
            self._above[mine] = theirs
