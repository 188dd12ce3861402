"""The sixty programs of `tests/corpus/programs.toml`: every one that this environment can build is
imported and compiled, and its values are those of jax.
"""

from __future__ import annotations

import importlib.util
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from shardwright.compiler.diagnostics import ImportRuleError
from shardwright.compiler.ir.reference import evaluate
from tests.corpus.foreign import FOREIGN
from tests.models.manual_steps import SHAPES
from tests.support.compiled import graph_of, levels_of, link

LIST = Path(__file__).parents[2] / "corpus" / "programs.toml"
PROGRAMS: dict[str, dict[str, Any]] = {
    row["name"]: row for row in tomllib.loads(LIST.read_text())["program"]
}
BUILT = {*FOREIGN, *SHAPES}
REFUSED = {"random_augment": "while requires a start known when compiling"}
"""jax.random.beta rejects and draws again until it accepts: no schedule can be made of that."""
NOISE = 1e-2
"""Below this share of the largest output a leaf is held to it: the gradient of a bias in front of a
norm, or of a key, is zero, and what is computed is rounding.
"""


def missing(name: str) -> list[str]:
    """Packages that a program needs and this environment lacks."""
    return [p for p in PROGRAMS[name]["needs"] if importlib.util.find_spec(p) is None]


def test_the_list_is_of_sixty() -> None:
    assert Counter(row["kind"] for row in PROGRAMS.values()) == {
        "transformers": 20,
        "vision": 20,
        "jax": 20,
    }
    assert set(PROGRAMS) >= BUILT


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n not in SHAPES])
def test_values(name: str) -> None:
    """Those of `SHAPES` are in `test_manual_regions.py`, and partitioned in `tests/sharding`."""
    if name not in BUILT:
        pytest.skip(f"needs {', '.join(missing(name)) or 'a builder of PyTorch or Keras modules'}")
    fn, arguments = FOREIGN[name]()
    leaves = [np.asarray(x) for x in jax.tree.leaves(arguments)]
    wanted = [np.asarray(x) for x in jax.tree.leaves(jax.jit(fn)(*arguments))]
    if name in REFUSED:
        with pytest.raises(ImportRuleError, match=REFUSED[name]) as caught:
            graph_of(fn, *arguments)
        found = caught.value.diagnostic
        assert found.code == "NCC_EVRF001" and found.hint and "foreign.py" in str(found.loc)
        return
    graph = graph_of(fn, *arguments)
    (compiled,) = levels_of(link(graph), leaves, ("L1",))
    floats = [w for w in wanted if w.dtype.kind == "f" and w.size]
    floor = NOISE * max((float(np.abs(w).max()) for w in floats), default=0.0)
    for outputs in (evaluate(graph, leaves), compiled):
        for have, want in zip(outputs, wanted, strict=True):
            assert have.dtype == want.dtype and have.shape == want.shape
            scale = max(float(np.abs(want).max(initial=0)), floor)
            np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4 * scale)
