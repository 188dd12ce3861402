"""Published kernels and collectives: what rows say, what is refused, two of each end to end."""

from __future__ import annotations

import csv
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.machine.target import load_target, logical
from shardwright.compiler.timing.evaluate import function_segments
from shardwright.orchestrator.validation import kernel_times
from shardwright.orchestrator.validation.kernel_times import (
    MeasuredKernel,
    kernel_of,
    kernel_seconds,
)
from shardwright.orchestrator.validation.measured import collectives, kernels
from shardwright.orchestrator.validation.published_columns import machines_named

KERNEL = {
    "id": "K1",
    "group": "g",
    "kernel": "NKI GEMM+GELU fused",
    "shape": "M 256, K 128, N 256",
    "dtype": "bf16",
    "target": "trn2.3xlarge (NeuronCore-v3)",
    "latency_us": "10",
}
COLLECTIVE = {
    "id": "C1",
    "group": "g",
    "op": "all_reduce",
    "ranks": "8",
    "nodes": "1",
    "instance": "trn1 (unstated)",
    "dtype": "fp32",
    "size_bytes": str(4 << 20),
    "time_us": "100",
}


def write(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def row(kernel: str, shape: str, dtype: str) -> dict[str, str]:
    return {"kernel": kernel, "shape": shape, "dtype": dtype}


@pytest.mark.parametrize(
    ("words", "kernel"),
    [
        (
            ("NKI matmul v5", "M=64 K=32 N=16", "fp32"),
            MeasuredKernel("product", (64, 32, 16), "f32"),
        ),
        (
            ("GEMM+GELU baseline", "M 64, K 32, N 16", "bf16"),
            MeasuredKernel("product", (64, 32, 16), "bf16", gelu="function", apart=True),
        ),
        (
            ("NKI attention, three phases through HBM", "seq 512, d_head 128", "bf16"),
            MeasuredKernel("attention", (512, 128), "bf16", attention="fused"),
        ),
        (
            ("attention, every operator through HBM", "seq 512, d_head 128", "bf16"),
            MeasuredKernel("attention", (512, 128), "bf16", attention="unfused"),
        ),
        (
            (
                "fused conv2d + bias, 2x2 max pool",
                "batch 1, Cin 8, Cout 4, 9x9, 3x3, valid",
                "fp32",
            ),
            MeasuredKernel("convolution", (1, 8, 4, 9, 3), "f32", pool=2),
        ),
        (
            ("conv2d", "batch 1, Cin 8, Cout 4, 9x9, 3x3, valid", "fp32"),
            MeasuredKernel("convolution", (1, 8, 4, 9, 3), "f32", pool=1),
        ),
        (
            ("NKI flash k-means assign (matmul + argmax epilogue)", "N 64, D 8, K 16", "bf16"),
            MeasuredKernel("nearest", (64, 8, 16), "bf16"),
        ),
    ],
)
def test_words_become_kernels(words: tuple[str, str, str], kernel: MeasuredKernel) -> None:
    assert kernel_of(row(*words)) == kernel


@pytest.mark.parametrize(
    ("words", "kernel"),
    [
        (
            ("NKI GEMM+GELU fused_taylor", "M 64, K 32, N 16", "bf16"),
            MeasuredKernel(
                "product", (64, 32, 16), "bf16", gelu="operators", bias="spread", transposed=True
            ),
        ),
        (
            ("NKI GEMM+GELU fused", "M 64, K 32, N 16", "bf16"),
            MeasuredKernel(
                "product", (64, 32, 16), "bf16", gelu="function", bias="spread", transposed=True
            ),
        ),
        (
            ("NKI attention, fused, stays in SBUF", "seq 512, d_head 128", "bf16"),
            MeasuredKernel("attention", (512, 128), "bf16", transposed=True, wide=True),
        ),
    ],
)
def test_the_source_of_a_kernel_says_more(
    words: tuple[str, str, str], kernel: MeasuredKernel
) -> None:
    source = {"source": "allenkchau/Trainium-Kernel-Fusion@d709ddf1"}
    assert kernel_of(row(*words) | source) == kernel
    plain = kernel_of(row(*words))
    assert (plain.bias, plain.transposed, plain.wide) == ("", False, False)


def test_a_function_apart_is_a_kernel_behind_its_product() -> None:
    together = MeasuredKernel("product", (64, 32, 16), "bf16", gelu="function")
    names = [
        [[op.name for op in graph.ops] for graph in kernel_times._graphs(kernel)]
        for kernel in (together, replace(together, apart=True))
    ]
    (one,), (product, function) = names
    assert "dot_general" in product and "dot_general" not in function
    assert set(product) < set(one) and set(function) - {"constant"} <= set(one)


@pytest.mark.parametrize(
    ("kind", "sizes", "plain", "transposed"),
    [
        ("attention", (64, 32), [(64, 32)] * 3, [(32, 64)] * 3),
        ("product", (64, 32, 16), [(64, 32), (32, 16)], [(32, 64), (32, 16)]),
    ],
)
def test_operands_lie_as_the_source_of_a_kernel_has_them(
    kind: str,
    sizes: tuple[int, ...],
    plain: list[tuple[int, ...]],
    transposed: list[tuple[int, ...]],
) -> None:
    kernel = MeasuredKernel(kind, sizes, "bf16")
    for one, shapes in ((kernel, plain), (replace(kernel, transposed=True), transposed)):
        (graph,) = kernel_times._graphs(one)
        assert [value.type.shape for value in graph.inputs] == shapes


def test_nobody_fills_the_stalls_of_a_kernel() -> None:
    """Whatever share of them neighbours of a kernel fill on that machine."""
    kernel = MeasuredKernel("product", (512, 256, 512), "bf16")
    plain = logical(load_target("trn2.48xlarge"), 1)
    alone = replace(plain, core=replace(plain.core, stall_recovery=0.0))
    (function,) = kernel_times._compiled(kernel, plain.name)
    segments = function_segments(function, alone, recorded=False)
    assert kernel_seconds(kernel, plain) == sum(s.duration_ps for s in segments) / 1e12


def test_what_a_kernel_does_takes_time() -> None:
    """Each of these is more work than what it is compared with."""
    target = logical(load_target("trn2.48xlarge"), 1)

    def seconds(kind: str, *sizes: int, **how: Any) -> float:
        return kernel_seconds(MeasuredKernel(kind, sizes, "bf16", **how), target)

    product = seconds("product", 512, 256, 512)
    added, spread = (seconds("product", 512, 256, 512, bias=how) for how in ("added", "spread"))
    assert product < added < spread
    function = seconds("product", 512, 256, 512, gelu="function")
    assert seconds("product", 512, 256, 512, gelu="operators") > 1.2 * function
    assert seconds("attention", 512, 128, wide=True) > seconds("attention", 512, 128)
    plain = seconds("convolution", 1, 128, 128, 34, 3)
    assert plain > seconds("convolution", 1, 128, 128, 34, 1)
    assert seconds("convolution", 1, 128, 128, 34, 3, pool=2) > 0
    assert seconds("nearest", 512, 128, 256) > seconds("product", 512, 128, 256)


@pytest.mark.parametrize(
    "words",
    [
        ("mamba_v1", "seq 512", "fp32"),
        ("conv2d", "batch 1, Cin 8, Cout 4, 9x8, 3x3, valid", "fp32"),
        ("conv2d", "batch 1, Cin 8, Cout 4, 9x9, 3x3, same", "fp32"),
        ("matmul", "N 4096", "fp32"),
        ("matmul", "M 1, K 1, N 1", ""),
    ],
)
def test_other_words_are_refused(words: tuple[str, str, str]) -> None:
    with pytest.raises(ValueError, match="requires"):
        kernel_of(row(*words))


def test_kernels_are_compiled_and_timed(tmp_path: Path) -> None:
    apart = KERNEL | {"id": "K2", "kernel": "GEMM+GELU baseline"}
    mamba = KERNEL | {"id": "K3", "kernel": "mamba"}
    report = kernels(write(tmp_path / "k.csv", KERNEL, apart, mamba))
    fused, two, refused = report["rows"]
    assert fused["target"] == "trn2.48xlarge"
    assert 0 < fused["predicted_us"] < two["predicted_us"]
    assert fused["error"] == pytest.approx(fused["predicted_us"] / 10 - 1)
    assert refused["error"] is None and "mamba" in refused["reason"]
    assert report["refused"] == 1


def test_collectives_are_priced_by_size(tmp_path: Path) -> None:
    small = COLLECTIVE | {"id": "C2", "size_bytes": "1024", "time_us": "20"}
    unnamed = COLLECTIVE | {"id": "C3", "instance": "unstated"}
    old = COLLECTIVE | {"id": "C4", "era": "2023-04 (first published)"}
    odd = COLLECTIVE | {"id": "C5", "ranks": "33"}
    rows = [row | {"era": row.get("era", "")} for row in (COLLECTIVE, small, unnamed, old, odd)]
    report = collectives(write(tmp_path / "c.csv", *rows))
    large, little, assumed, floored, refused = report["rows"]
    assert large["predicted_us"] > little["predicted_us"] > 0
    errors = [abs(row["error"]) for row in (large, assumed, floored)]
    assert report["large_median_error"] == statistics.median(errors)
    assert (assumed["assumed"], large["assumed"]) == (True, False)
    assert assumed["predicted_us"] == large["predicted_us"]
    assert floored["runtime"] == "2023"
    assert floored["predicted_us"] - large["predicted_us"] == pytest.approx(150)
    assert report["small_median_factor"] == pytest.approx(
        max(1 + little["error"], 1 / (1 + little["error"]))
    )
    assert refused["error"] is None and "got 33" in refused["reason"]


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "", "fast"])
def test_times_that_are_none_are_refused_row_by_row(value: str, tmp_path: Path) -> None:
    report = kernels(write(tmp_path / "k.csv", KERNEL | {"latency_us": value}))
    assert report["refused"] == 1 and "latency_us requires" in report["rows"][0]["reason"]
    report = collectives(write(tmp_path / "c.csv", COLLECTIVE | {"time_us": value}))
    assert report["refused"] == 1 and "time_us requires" in report["rows"][0]["reason"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nodes", "0"),
        ("ranks", "0"),
        ("ranks", "1.5"),
        ("size_bytes", "inf"),
        ("size_bytes", "nan"),
        ("size_bytes", "1e300"),
        ("dtype", "fp8"),
    ],
)
def test_cells_no_collective_can_have(name: str, value: str, tmp_path: Path) -> None:
    report = collectives(write(tmp_path / "c.csv", COLLECTIVE | {name: value}))
    assert report["refused"] == 1 and f"{name} requires" in report["rows"][0]["reason"]


def test_a_row_without_a_dtype_has_elements_of_four_bytes(tmp_path: Path) -> None:
    rows = [COLLECTIVE | {"dtype": dtype} for dtype in ("fp32", "unstated", "")]
    times = {r["predicted_us"] for r in collectives(write(tmp_path / "c.csv", *rows))["rows"]}
    assert len(times) == 1 and None not in times


def test_a_kernel_on_no_machine_of_ours_is_refused(tmp_path: Path) -> None:
    (row,) = kernels(write(tmp_path / "k.csv", KERNEL | {"target": "p4d.24xlarge"}))["rows"]
    assert row["error"] is None and "target requires a known machine" in row["reason"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("trn2.3xlarge (NeuronCore-v3, LNC=1 NEFF)", ["trn2.48xlarge"]),
        ("trn1/inf2 (NeuronCore-v2)", ["trn1.32xlarge", "inf2.48xlarge"]),
        ("trn1.32xlarge/trn1n.32xlarge", ["trn1.32xlarge", "trn1n.32xlarge"]),
        ("trn1-trn3", ["trn1.32xlarge", "trn3-gen1-ultraserver"]),
        ("Trn2-Ultraserver", ["trn2-ultraserver"]),
        ("trn1, trn1.32xlarge x2", ["trn1.32xlarge"]),
        ("unstated (trn1?)", []),
    ],
)
def test_the_machines_a_cell_names(text: str, names: list[str]) -> None:
    assert machines_named(text) == names


def test_files_without_columns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="requires columns op"):
        collectives(write(tmp_path / "k.csv", KERNEL))
    with pytest.raises(UsageError, match="cannot read"):
        kernels(tmp_path / "absent.csv")
