"""Names of stacked leaves: one pattern for the paths of all layers.

The pattern keeps every part of the path that the layers share, so that an optimizer leaf still ends
like the weight it belongs to, and a user recognises both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"(\d+)", re.ASCII)


def stack_name(names: Sequence[str]) -> str:
    """`block_{0..11}/kernel` for `block_0/kernel`, `block_1/kernel`, ..."""
    parts = [name.split("/") for name in names]
    if len({len(path) for path in parts}) > 1:
        return _choice(names)
    return "/".join(_part(column) for column in zip(*parts, strict=True))


def _part(column: Sequence[str]) -> str:
    """One part of all paths."""
    if len(set(column)) == 1:
        return column[0]
    found = [_NUMBER.split(text) for text in column]  # number of each text between two others
    if any(len(pieces) != 3 for pieces in found):
        return _choice(column)
    around = {(before, after) for before, _, after in found}
    if len(around) > 1:
        return _choice(column)
    before, after = around.pop()
    return before + _counted([number for _, number, _ in found]) + after


def _counted(texts: Sequence[str]) -> str:
    """Numbers as a range where they are one; the texts of those it leaves out follow from the width
    of the first.
    """
    numbers = [int(text) for text in texts]
    first, last, step = numbers[0], numbers[-1], numbers[1] - numbers[0]
    wanted = range(first, last + (1 if step > 0 else -1), step) if step else ()
    width = len(texts[0]) if texts[0].startswith("0") else 0
    if list(texts) != [f"{n:0{width}}" for n in wanted]:
        return _choice(texts)
    second = "" if step == 1 else f",{texts[1]}"
    return f"{{{texts[0]}{second}..{texts[-1]}}}"


def _choice(texts: Sequence[str]) -> str:
    return "{" + ",".join(dict.fromkeys(texts)) + "}"
