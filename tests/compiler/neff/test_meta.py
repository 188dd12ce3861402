"""What a program file says of itself: fields of another kind, or beyond what any machine has."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.compiler.neff.meta import PROGRAM_META


@pytest.mark.parametrize("size", [1, 32, 1024])
def test_a_mesh_has_as_many_cores_as_a_bundle_has_files(size: int) -> None:
    PROGRAM_META.require({"mesh": [["dp", size]]}, "meta")


@pytest.mark.parametrize("size", [0, -1, 1025, 2.0, True, "4"])
def test_a_mesh_of_other_sizes_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match="a number of cores"):
        PROGRAM_META.require({"mesh": [["dp", size]]}, "meta")
