"""What planners take transfers and cycles for, worked out by hand from the pages of the machine."""

from __future__ import annotations

import pytest

from shardwright.compiler.codegen.planning import MIN_CYCLES, Rates
from shardwright.compiler.isa.program import Engine
from shardwright.compiler.machine.target import load_target

RATES = Rates(load_target("trn1n.32xlarge").core)


def test_cycles_of_engines() -> None:
    """1000 cycles at 2.8, 1.12, 1.4 and 1.4 GHz; the shortest interval has 64."""
    engines = (Engine.TENSOR, Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD)
    found = [RATES.engine_ns(engine, 1000) for engine in engines]
    assert found == pytest.approx([357.142857, 892.857143, 714.285714, 714.285714])
    assert MIN_CYCLES == 64


@pytest.mark.parametrize(
    ("total", "run", "rows", "wanted"),
    [
        # 128 runs of 4096 B on 16 engines of 17 B/ns: 8 * 4236 / 17
        (128 * 4096, 4096, 128, 1993.4118),
        # 100 rows use 13 engines: ceil(100 / 13) = 8 runs of 4000 + 140 B on the busiest
        (100 * 4000, 4000, 100, 1948.2353),
        # 9 rows use 2: ceil(4.5) = 5 of at least 2400 B
        (9 * 100, 100, 9, 705.8824),
        # no more than 16 engines: ceil(6.25) = 7 runs of 565 elements, just 2400 B; 2404 with 566
        (100 * 2260, 2260, 300, 988.2353),
        (100 * 2264, 2264, 300, 989.8824),
    ],
)
def test_transfers(total: int, run: int, rows: int, wanted: float) -> None:
    assert RATES.transfer_ns(total, run, rows) == pytest.approx(wanted, rel=1e-6)
