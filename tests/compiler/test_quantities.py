"""Amounts as people write them, in tokens, seconds and dollars."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.compiler.support.quantities import DURATION, MONEY, TOKENS, Quantity


@pytest.mark.parametrize(
    ("kind", "written", "amount"),
    [
        (TOKENS, "1T", 10**12),
        (TOKENS, "1.5t", 1_500_000_000_000),
        (TOKENS, "300 B", 300 * 10**9),
        (TOKENS, "4M", 4_000_000),
        (TOKENS, "4Mi", 4_194_304),
        (TOKENS, "2Ki", 2048),
        (TOKENS, "1Gi", 2**30),
        (TOKENS, "12k", 12_000),
        (TOKENS, "1e12", 10**12),
        (TOKENS, "1e40", 10**40),  # more digits than Decimal divides exactly
        (TOKENS, "1_000", 1000),
        (TOKENS, 4096, 4096),
        (TOKENS, 1e12, 10**12),
        (TOKENS, 0, 0),
        (DURATION, "30d", 2_592_000.0),
        (DURATION, "6w", 6 * 604_800.0),
        (DURATION, "36h", 129_600.0),
        (DURATION, "90min", 5400.0),
        (DURATION, "0.5 s", 0.5),
        (DURATION, 0, 0.0),
        (MONEY, "2M", 2e6),
        (MONEY, "$750K", 750e3),
        (MONEY, "1.25B", 1.25e9),
        (MONEY, "21.50", 21.5),
        (MONEY, 21.5, 21.5),
    ],
)
def test_what_is_written(kind: Quantity, written: Any, amount: float) -> None:
    found = kind.read(written)
    assert found == amount and type(found) is type(amount)


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        (TOKENS, "1Q"),
        (TOKENS, "-1"),
        (TOKENS, "1.5"),
        (TOKENS, "0.0001K"),
        (TOKENS, "T"),
        (TOKENS, ""),
        (TOKENS, True),
        (TOKENS, None),
        (TOKENS, float("inf")),
        (DURATION, "30"),
        (DURATION, 30),
        (DURATION, "30m"),
        (MONEY, "2 Euro"),
        (MONEY, "nan"),
        (MONEY, [2]),
    ],
)
def test_what_is_no_amount(kind: Quantity, written: Any) -> None:
    """A duration needs its unit: 30 may be days as well as seconds."""
    assert kind.read(written) is None
