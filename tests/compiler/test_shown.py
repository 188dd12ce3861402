"""Texts about tiling, memory and overlap say what the code of a function does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from shardwright.compiler.driver import compile_unit
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.isa.program import Function
from shardwright.compiler.linking.residency import scratch_peak
from shardwright.compiler.lower.function import Signature
from shardwright.compiler.lower.write_out import tensor_spans
from shardwright.compiler.machine.target import Target, load_target
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.outline.unit import Unit
from shardwright.compiler.shown.charts import bytes_text, share_bar, span_chart, table, time_chart
from shardwright.compiler.steps import Place, Recorder, Remark, recording
from shardwright.compiler.timing.evaluate import engine_spans, function_segments

TARGET = "trn1n.32xlarge"


class Kept(Recorder):
    """Texts by name, whatever part they belong to."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def graph(self, name: str, graph: object, remark: Remark | None) -> None:
        """Not looked at."""

    def text(self, name: str, text: str, kind: str) -> None:
        self.texts[name] = text

    def inside(self, folder: str, key: str, place: Place | None) -> Recorder:
        return self


@dataclass(frozen=True)
class Shown:
    function: Function
    target: Target
    texts: dict[str, str]


@pytest.fixture(scope="module")
def shown() -> Shown:
    """Two products with a function between them, in kernels of their own."""
    b = Builder()
    x, up, down = b.input((300, 256)), b.input((256, 1024)), b.input((1024, 128))
    h = b.op("tanh", b.dot(x, up, contract=((1,), (0,))))
    graph = b.finish(b.dot(h, down, contract=((1,), (0,))))
    kept = Kept()
    with recording(kept):
        unit = Unit("mlp", graph, Signature())
        function = compile_unit(unit, TARGET, CompileOptions(optlevel=1, attention="fused"))
    return Shown(function, load_target(TARGET), kept.texts)


def test_charts() -> None:
    assert span_chart(2, 3, 5) == "..##."
    assert span_chart(0, 0, 1) == "#"
    assert span_chart(50, 99, 100, width=10) == ".....#####"
    assert time_chart(50, 100, 200, 1.0, width=8) == "..##...."
    assert time_chart(0, 1, 1000, 0.0, width=4) == "=..."
    assert share_bar(1, 2, width=4) == "##" and share_bar(0, 0, width=4) == ""
    assert [bytes_text(n) for n in (1023, 1536, 3 << 20)] == ["1023 B", "1.5 KiB", "3.0 MiB"]
    assert list(table([("a", 1), ("bb", 22)], right=(1,))) == ["a    1", "bb  22"]


def rows(text: str, pattern: str) -> Iterator[re.Match[str]]:
    found = list(re.finditer(pattern, text, re.MULTILINE))
    assert found, pattern
    return iter(found)


def test_blocks_of_loops_cover_their_iter_dims(shown: Shown) -> None:
    text = shown.texts["tiling"]
    sizes = {int(m[1]) for m in rows(text, r"^    iteration dim \d+ of (\d+)")}
    assert {256, 1024, 128} <= sizes
    for match in rows(text, r"^    iteration dim \d+ of (\d+).*: loop r\d+: (\d+) blocks of (\d+)"):
        size, trip, block = map(int, match.groups())
        assert trip > 0 and block > 0 and trip * block <= size
    for match in rows(text, r"^  (SBUF|PSUM): ([\d.]+) KiB of ([\d.]+) KiB"):
        assert 0 < float(match[2]) <= float(match[3]) == {"SBUF": 192, "PSUM": 16}[match[1]]
    assert len(list(rows(text, r"^    -> \d+: "))) == len(
        [k for k in shown.function.kernels if k.program.kind == "compute"]
    )


def test_every_tile_has_its_row(shown: Shown) -> None:
    tiles = [tile for kernel in shown.function.kernels for tile in kernel.tiles]
    found = [
        (m[1], m[2], int(m[3]), int(m[4]))
        for m in rows(
            shown.texts["tiling"],
            r"^    \d+ (\w+) +(sbuf|psum) +(\d+) x (\d+) \w+ ",
        )
    ]
    assert found == [(t.name, t.space.value, t.partitions, t.elements) for t in tiles]


def test_memory_has_a_row_per_tensor_with_its_life(shown: Shown) -> None:
    function, text = shown.function, shown.texts["memory"]
    spans = tensor_spans([k.program for k in function.kernels])
    found = {
        int(m[1]): (int(m[3]), int(m[4]), m[2])
        for m in rows(text, r"^ *(\d+)  (?:\w+) .*  (\S+) +(\d+)\.\.(\d+) +[.#]+$")
    }
    assert {n: life[:2] for n, life in found.items()} == spans
    for number, (_, _, place) in found.items():
        tensor = function.tensors[number]
        own = f"scratch+{tensor.offset_bytes}" if tensor.kind == "scratch" else "bound"
        assert place == own
    assert f"({function.scratch_bytes} bytes)" in text
    assert scratch_peak(function).num_bytes <= function.scratch_bytes


def test_engines_are_busy_in_a_call_as_long_as_its_time_says(shown: Shown) -> None:
    spans = [cores[0] for cores in engine_spans(shown.function, shown.target)]
    times = [t for s in function_segments(shown.function, shown.target) for t in s.kernels]
    assert len(spans) == len(times) > 1
    for found, time in zip(spans, times, strict=True):
        assert {name: span.busy_ps for name, span in found.items()} == dict(time.busy_ps)
        assert all(span.busy_ps <= span.end_ps - span.begin_ps for span in found.values())
    if not shown.target.core.stall_recovery:
        end = max(span.end_ps for found in spans for span in found.values())
        assert end == sum(time.duration_ps for time in times)
    lines = list(rows(shown.texts["overlap"], r"^    (\w+) +[\d.]+ us .* us  [.#=]{64}$"))
    assert [m[1] for m in lines] == [name for found in spans for name in found]
