"""What a program file says of itself: fields of another kind, or beyond what any machine has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.compiler.neff.meta import PROGRAM_META, check_program_meta


@pytest.mark.parametrize("size", [1, 32, 1024])
def test_a_mesh_has_as_many_cores_as_a_bundle_has_files(size: int) -> None:
    PROGRAM_META.require({"mesh": [["dp", size]]}, "meta")


def test_a_logical_core_is_of_one_physical_core_or_of_two() -> None:
    program: Any = SimpleNamespace(inputs=())
    for cores in (1, 2):
        check_program_meta(program, {"lnc": cores})
    for other in (0, 3, "2", None):
        with pytest.raises(ValueError, match="lnc"):
            check_program_meta(program, {"lnc": other})


@pytest.mark.parametrize("size", [0, -1, 1025, 2.0, True, "4"])
def test_a_mesh_of_other_sizes_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match="a number of cores"):
        PROGRAM_META.require({"mesh": [["dp", size]]}, "meta")
