"""That an answer is a stored one, how old it is and how to ask anew: one wording for every screen
and error."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Sequence

FLAG = "--fresh"
AGAIN = f"the same with {FLAG}"  # where no command is known
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def age_text(stored_s: float, now_s: float | None = None) -> str:
    """The age of what was stored at a Unix time: `3 h old`; clocks of hosts may differ a little."""
    age = max(0.0, (time.time() if now_s is None else now_s) - stored_s)
    size, name = next((unit for unit in _UNITS if age >= unit[0]), _UNITS[-1])
    return f"{int(age // size)} {name} old"


def oldest(times_s: Iterable[float]) -> float:
    """The earliest of the times at which something was stored; 0 where nothing was."""
    return min(filter(None, times_s), default=0.0)


def again(words: Sequence[str]) -> str:
    """The command of `words`, its verb first, as it is asked anew."""
    given = [word for word in words if word != FLAG]
    return shlex.join(["shardwright", *given[:1], FLAG, *given[1:]])


def counted_text(stored: int, total: int, what: str, oldest_s: float, command: str) -> str:
    """`3 of 8 points are stored, the oldest 3 h old; ask anew: COMMAND`; empty where none is."""
    if not (stored and oldest_s):
        return ""
    which = f"{stored} of {total} {what}" if total > 1 else f"the {what.removesuffix('s')}"
    are = "are" if stored > 1 else "is"
    oldest_one = "the oldest " if stored > 1 else ""
    return f"{which} {are} stored, {oldest_one}{age_text(oldest_s)}; ask anew: {command}"
