"""Pages of docs/ that are sessions: every command is run again and prints what the page says."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path

import pytest

from shardwright.compiler.machine.target import facts_of, load_target, target_names
from tests.support.cells import long_in_matrix
from tests.support.console import NEEDED, PAGES, ROOT, masked, replayed

CONSOLE = re.compile(r"^```console\n.*?^```$", re.MULTILINE | re.DOTALL)


RARE = ("docs/unet.md",)
"""It trains what tests of image models train too."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", long_in_matrix(PAGES, {*PAGES} - {*RARE}, RARE))
def test_a_page_is_what_its_commands_print(name: str) -> None:
    """In a folder like the one it was written in: paths wrap where they are long."""
    if name in NEEDED:
        pytest.importorskip(NEEDED[name], exc_type=ImportError)
    page = (ROOT / name).read_text()
    assert "not tried, to answer in time" not in page, "what is tried depends on the host: --tries"
    with tempfile.TemporaryDirectory() as folder:
        printed = replayed(page, Path(folder), os.environ["NEURON_COMPILE_CACHE_URL"])
    assert masked(printed) == masked(page), (
        f"python -m tests.support.console {name} writes it again"
    )


def test_patches_of_pages_apply(tmp_path: Path) -> None:
    page = (ROOT / "docs/extending.md").read_text()
    replayed(CONSOLE.sub("", page), tmp_path)
    assert '"frugal": frugal' in (tmp_path / "sharding/strategies/registry.py").read_text()


def test_the_page_about_machines_has_every_fact_of_one() -> None:
    page = (ROOT / "docs/extending.md").read_text()
    machines = (load_target(name) for name in target_names())
    facts = {fact for machine in machines for fact in facts_of(machine)}
    cores = (ROOT / "compiler/machine/targets").glob("neuroncore-*.json")
    facts -= {fact for core in cores for fact in json.loads(core.read_text())["facts"]}
    assert sorted(fact for fact in facts if f"`{fact}`" not in page) == []


def test_a_page_is_run_block_by_block(tmp_path: Path) -> None:
    """Files are written where commands find them; output that was recorded is not read."""
    page = "\n".join(
        (
            "```text file=a/b.txt\nhello\n```",
            "```console\n$ cat a/b.txt\nsomething else\n$ cat \\\n  c\n```",
            "```sh\n$ rm -rf /\n```\n",
        )
    )
    given = replayed(page, tmp_path)
    assert "$ cat a/b.txt\nhello\n$ cat \\\n  c\n" in given
    assert given.endswith("[exit 1]\n```\n```sh\n$ rm -rf /\n```\n")


def test_what_fails_without_output_shows_its_errors(tmp_path: Path) -> None:
    page = "```console\n$ python missing.py\n```\n"
    assert "~/missing.py': [Errno 2]" in replayed(page, tmp_path)


def test_numbers_of_tests_are_masked() -> None:
    told = "$ python -m pytest\n...s. [ 50%]\n..... [100%]\n9 passed, 1 skipped in 3.51s\n"
    assert masked(told) == "$ python -m pytest\n... passed\n"


def test_only_what_the_host_decides_is_masked() -> None:
    told = "time       5.115 s per step\nanswered   in 1.2 s: compile 0.5,\n           link 0.1\n"
    assert masked(told) == "time       5.115 s per step\nanswered   in ...\n"


def test_files_that_need_optional_libraries_are_masked() -> None:
    told = "```\nfiles in ~/sweep: sweep.json,\npareto.svg\n```\nmore\n"
    assert masked(told) == "```\nfiles in ~/sweep: ...\n```\nmore\n"


def test_a_tick_between_two_columns_is_where_it_was() -> None:
    """Which of them it is hangs on the last bit of a quotient."""
    assert masked(" 140,000   160,000  180,000\n") == masked(" 140,000    160,000 180,000\n")
