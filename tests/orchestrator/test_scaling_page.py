"""The points of the scaling page."""

from __future__ import annotations

from benchmarks.scaling import CORES, INSTANCES, STRONG_BATCH, Point


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
