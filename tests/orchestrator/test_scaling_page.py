"""The plots of the scaling page: valid SVG whose points lie where the data says."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks.line_chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Series, chart
from benchmarks.scaling import CORES, INSTANCES, STRONG_BATCH, Point

SPACE = "{http://www.w3.org/2000/svg}"


def test_points_lie_on_logarithmic_axes() -> None:
    band = [(1, 5, 20), (4, 500, 2000)]
    series = Series("a < b", [(1, 10), (2, 100), (4, 1000)], band)
    root = ElementTree.fromstring(chart("title", "x", "y", [series]))
    dots = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in root.iter(f"{SPACE}circle")]
    middle = (LEFT + WIDTH - RIGHT) / 2
    assert [x for x, _ in dots] == [LEFT, middle, WIDTH - RIGHT]
    # From 1 (below 5) to 10,000 (above 2000): four decades from the bottom to the top.
    decade = (HEIGHT - BOTTOM - TOP) / 4
    assert [round(HEIGHT - BOTTOM - y) for _, y in dots] == [round(n * decade) for n in (1, 2, 3)]
    texts = [t.text for t in root.iter(f"{SPACE}text")]
    assert {"title", "x", "y", "a < b", "10,000"} <= set(texts)


def test_every_point_fills_its_cluster() -> None:
    for mode in ("weak", "strong"):
        for instances in INSTANCES:
            mesh = Point("llama2-7b", mode, instances).mesh
            ranks = 1
            for size in mesh.values():
                ranks *= size
            assert ranks == CORES * instances
            data_ranks = ranks // mesh.get("tp", 1)
            assert mode == "weak" or (data_ranks <= STRONG_BATCH and STRONG_BATCH % data_ranks == 0)
