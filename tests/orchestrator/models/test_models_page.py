"""docs/model-families.md says what the table of families says."""

from __future__ import annotations

from tests.support.models_page import PAGE, ROOT, page


def test_the_page_of_families_is_current() -> None:
    assert (ROOT / PAGE).read_text() == page(), "run `make docs`"
