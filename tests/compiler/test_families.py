"""Things that are joined two by two, against sets of them."""

from __future__ import annotations

import random

from shardwright.compiler.support.families import Families


def test_families_are_the_sets_that_joining_makes() -> None:
    rng = random.Random(0)
    things = [f"t{i}" for i in range(40)]
    families, sets = Families[str](), {thing: {thing} for thing in things}
    for _ in range(30):
        one, other = rng.sample(things, 2)
        kept = families.of(other)
        families.join(one, other)
        assert families.of(one) == kept
        both = sets[one] | sets[other]
        sets |= dict.fromkeys(both, both)
        assert {t for t in things if families.of(t) == kept} == both
