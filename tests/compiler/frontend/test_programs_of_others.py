"""The sixty programs of `tests/corpus/programs.toml`: every one that this environment can build is
imported and compiled, and its values are those of jax.
"""

from __future__ import annotations

from collections import Counter

import jax
import numpy as np
import pytest

from shardwright.compiler.diagnostics import ImportRuleError
from shardwright.compiler.ir.reference import evaluate
from tests.corpus.foreign import FOREIGN
from tests.corpus.keras_programs import KERAS
from tests.corpus.programs import PROGRAMS, check_equal
from tests.corpus.torch_programs import TORCHVISION, TRANSFORMERS
from tests.models.manual_steps import SHAPES
from tests.support.compiled import graph_of, levels_of, link

FRAMEWORKS = {*TRANSFORMERS, *TORCHVISION, *KERAS}
"""Those of `test_programs_of_frameworks.py`."""
REFUSED = {"random_augment": "while requires a start known when compiling"}
"""jax.random.beta rejects and draws again until it accepts: no schedule can be made of that."""


def test_the_list_is_of_sixty() -> None:
    assert Counter(row["kind"] for row in PROGRAMS.values()) == {
        "transformers": 20,
        "vision": 20,
        "jax": 20,
    }
    assert set(PROGRAMS) == {*FOREIGN, *SHAPES, *FRAMEWORKS}


@pytest.mark.parametrize("name", FOREIGN)
def test_values(name: str) -> None:
    """Those of `SHAPES` are in `test_manual_regions.py`, and partitioned in `tests/sharding`."""
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
    for outputs in (evaluate(graph, leaves), compiled):
        check_equal(outputs, wanted, 1e-4)
