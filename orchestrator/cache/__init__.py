"""The content-addressed cache: results of units by unit key, plans by plan key.

`entry.py` says what an entry is, `location.py` where a cache lies, `local.py` keeps entries in a
directory, `cache.py` is what the rest of the program uses.
"""

from shardwright.orchestrator.cache.cache import Cache, open_cache
from shardwright.orchestrator.cache.entry import About

__all__ = ["About", "Cache", "open_cache"]
