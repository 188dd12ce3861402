"""Every spelling and every negative, registered."""

from __future__ import annotations

from tests.corpus import libraries, negatives, spellings
from tests.corpus.case import CORPUS, NEGATIVES

SOURCES = (spellings, libraries, negatives)
FAST = 5
"""Plain pytest takes every fifth spelling; `-m matrix` takes all."""

ALL = list(CORPUS.values())
SOME = ALL[::FAST]
NONE = list(NEGATIVES.values())
