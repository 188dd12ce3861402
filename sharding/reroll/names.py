"""Names of stacked leaves: one pattern for the paths of all layers.

The pattern keeps every part of the path that the layers share, so that an optimizer leaf still ends
like the weight it belongs to, and a user recognises both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"\d+")


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
    texts = {_NUMBER.sub("{}", text) for text in column}
    numbers = [_NUMBER.findall(text) for text in column]
    if len(texts) > 1 or any(len(found) != 1 for found in numbers):
        return _choice(column)
    return texts.pop().format(_counted([int(found[0]) for found in numbers]))


def _counted(numbers: Sequence[int]) -> str:
    """Numbers as a range where they are one."""
    first, last, step = numbers[0], numbers[-1], numbers[1] - numbers[0]
    if step == 0 or list(numbers) != list(range(first, last + (1 if step > 0 else -1), step)):
        return _choice([str(n) for n in numbers])
    return f"{{{first}..{last}}}" if step == 1 else f"{{{first},{numbers[1]}..{last}}}"


def _choice(texts: Sequence[str]) -> str:
    return "{" + ",".join(dict.fromkeys(texts)) + "}"
