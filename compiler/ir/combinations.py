"""How elements are combined: names that reductions, windows, scatters and collectives share."""

from __future__ import annotations

import numpy as np

REDUCTIONS: dict[str, np.ufunc] = {
    "add": np.add,
    "multiply": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
EXTREMES = frozenset(("max", "min"))
"""Their result is one of the elements: nothing is rounded."""
ELEMENTWISE_OF = {kind: f"{kind}imum" if kind in EXTREMES else kind for kind in REDUCTIONS}
"""The elementwise op that combines two values in the same way."""
