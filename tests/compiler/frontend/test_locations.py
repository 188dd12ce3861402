"""How the file of a location is shown."""

from __future__ import annotations

import pytest

from shardwright.compiler.frontend.locations import CELL_FILE, LocationReader


@pytest.mark.parametrize(
    "file",
    [
        "/tmp/ipykernel_3421/2837465.py",
        "C:\\Temp\\ipykernel_3421\\2837465.py",
        "/root/.ipykernel/1812/command-4093-1837",
        "/tmp/ipython-input-3-2837465.py",
        "<ipython-input-12-0a1b2c3d4e5f>",
    ],
)
def test_cells_of_notebooks_have_one_name(file: str) -> None:
    loc = LocationReader("/work").frame(file, 7)
    assert (loc.file, loc.line) == (CELL_FILE, 7)


@pytest.mark.parametrize("file", ["ipykernel/step.py", "models/ipython-input.py"])
def test_files_of_such_names_are_files(file: str) -> None:
    assert LocationReader("/base").frame(f"/base/{file}", 7).file == file
