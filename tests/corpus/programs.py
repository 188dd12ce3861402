"""The list of `programs.toml`, what an environment lacks for it, and when results are equal."""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

PROGRAMS: dict[str, dict[str, Any]] = {
    row["name"]: row
    for row in tomllib.loads(Path(__file__).with_name("programs.toml").read_text())["program"]
}
NOISE = 1e-2
"""Below this share of the largest output a leaf is held to it: the gradient of a bias in front of a
norm, or of a key, is zero, and what is computed is rounding.
"""


def missing(name: str) -> list[str]:
    """Packages that a program needs and this environment lacks."""
    return [p for p in PROGRAMS[name]["needs"] if importlib.util.find_spec(p) is None]


def check_equal(have: Sequence[np.ndarray], wanted: Sequence[np.ndarray], bound: float) -> None:
    """Hold every element within `bound` of the wanted one, relative to it or its leaf's largest."""
    floats = [w for w in wanted if w.dtype.kind == "f" and w.size]
    floor = NOISE * max((float(np.abs(w).max()) for w in floats), default=0.0)
    for number, (one, other) in enumerate(zip(have, wanted, strict=True)):
        assert one.dtype == other.dtype and one.shape == other.shape, number
        scale = max(float(np.abs(other).max(initial=0)), floor)
        np.testing.assert_allclose(
            one, other, rtol=bound, atol=bound * scale, err_msg=f"leaf {number}"
        )
