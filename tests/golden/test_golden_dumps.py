"""Dumps of golden cells: pipelines, overlap, logical cores, convolutions and rings have every stage
in files that read back.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwright.compiler.ir.parse import parse
from shardwright.compiler.ir.text import to_text
from shardwright.compiler.isa import kernel_text
from shardwright.orchestrator.cache import open_cache
from shardwright.orchestrator.config.config import JobConfig
from shardwright.orchestrator.dump import dumping
from shardwright.orchestrator.road.stages import Traces
from shardwright.orchestrator.service.executor import InlineExecutor
from shardwright.orchestrator.service.service import UnitService
from tests.golden.cells import CELLS, GoldenCell
from tests.golden.record import run_cell
from tests.support.cells import long_in_matrix

DUMPED = {
    "hsdp-kept-two-instances-O1": ("grouped", "bucketed", "shifted"),
    "pipeline-1f1b-trn2-O1": ("staged", "reductions_last"),
    "generic-conv": ("windows",),
    "ring-O1-unfused": ("ring",),
}
"""Cells, and what each has that others have not."""
GRAPH = re.compile(r'^("[^"\n]+"|[\w.]+)\(%?.*\) \{$', re.MULTILINE)


def without_comments(text: str) -> str:
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("//"))
    return "".join(f"{re.sub('  // .*', '', line)}\n" for line in lines)


SHOWN = [cell for cell in CELLS if cell.name in DUMPED]
OFTEN = [cell for cell in SHOWN if cell.name == "generic-conv"]


@pytest.mark.parametrize(
    "cell", long_in_matrix(SHOWN, OFTEN, [c for c in SHOWN if c not in OFTEN]), ids=str
)
def test_a_cell_can_be_read_stage_by_stage(cell: GoldenCell, tmp_path: Path) -> None:
    service = UnitService(InlineExecutor, open_cache(JobConfig().cache))
    with service, dumping(tmp_path):
        run_cell(cell.job, service, Traces())
    graphs = 0
    for path in tmp_path.rglob("*.txt"):
        text = without_comments(path.read_text())
        if path.name.endswith("-kernels.txt"):
            assert kernel_text.to_text(*kernel_text.parse(text, str(path))) == text
        elif GRAPH.match(text):
            assert to_text(parse(text, str(path)), with_locs=True) == text
            graphs += 1
    assert graphs > 30
    steps = {path.stem.partition("-")[2] for path in tmp_path.rglob("*.txt")}
    assert steps >= {*DUMPED[cell.name]}
    index = (tmp_path / "README.txt").read_text()
    described = re.findall(r"^  (\S+\.(?:txt|mlir)) +(\S.*)$", index.partition("\nFiles")[2], re.M)
    files = [p for p in tmp_path.rglob("*.*") if p.is_file() and p.name != "README.txt"]
    assert len(described) == len(files)
    assert all(" " in text for _, text in described), "every step has a sentence"
