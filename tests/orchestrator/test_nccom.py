"""`shardwright nccom`: nccom-test's arguments in, its columns out, with reasons and a band."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.orchestrator.cli import main
from shardwright.orchestrator.commands import nccom_values
from shardwright.orchestrator.commands.nccom import COLUMNS
from shardwright.orchestrator.config.collective_settings import parse_bytes


def nccom(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str, str]:
    code = main(["nccom", *line.split()])
    out = capsys.readouterr()
    return code, out.out, out.err


def results(capsys: pytest.CaptureFixture[str], line: str) -> list[dict[str, Any]]:
    code, out, _ = nccom(capsys, f"{line} --json")
    assert code == 0
    return json.loads(out)["results"]


def test_the_table_is_the_tools(capsys: pytest.CaptureFixture[str]) -> None:
    line = "allr -r 8 -b 1kb -e 1mb -f 4 -d fp32 --target trn1.32xlarge -n 50 -w 5"
    code, out, err = nccom(capsys, line)
    head, *rows, average = out.splitlines()
    assert code == 0 and head.split() == list(COLUMNS)
    assert [int(row.split()[0]) for row in rows] == [1024 * 4**k for k in range(6)]
    size, count, dtype, time_us, algbw, busbw, name = rows[-1].split()
    assert (int(count), dtype, name) == (int(size) // 4, "fp32", "mesh")
    assert float(algbw) == pytest.approx(int(size) / float(time_us) * 1e6 / 2**30, rel=1e-2)
    assert float(busbw) == pytest.approx(float(algbw) * 2 * 7 / 8, rel=1e-2)
    mean = sum(float(row.split()[5]) for row in rows) / len(rows)
    assert float(average.split()[-1].removesuffix("GB/s")) == pytest.approx(mean, abs=0.02)
    assert not err


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("allr", "all_reduce"),
        ("allg", "all_gather"),
        ("redsct", "reduce_scatter"),
        ("alltoall", "all_to_all"),
        ("allgv", "all_gather"),
        ("alltoallv", "all_to_all"),
        ("permute", "collective_permute"),
        ("sendrecv", "collective_permute"),
    ],
)
def test_every_operation_on_two_instances(
    op: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = nccom(capsys, f"{op} -r 64 -N 2 -b 1mb --json")
    data = json.loads(out)
    assert (code, data["op"], data["is_simulation"]) == (0, kind, True)
    (point,) = data["results"]
    low, high = point["band_us"]
    assert low < point["time:avg(us)"] < high
    parts = point["launch_us"] + point["latency_us"] + point["transfer_us"]
    assert parts == pytest.approx(point["time:avg(us)"], abs=0.01) and point["why"]


def test_sizes_by_step_and_a_file_of_each_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, data = tmp_path / "a.csv", tmp_path / "a.json"
    line = f"allr -r 32 -b 8 -e 16 -i 4 -d fp32 --csv {table} --report-to-json-file {data} --plot"
    code, out, _ = nccom(capsys, line)
    assert code == 0 and "band high" in out and "\x1b" not in out
    rows = list(csv.DictReader(table.open()))
    assert [row["size(B)"] for row in rows] == ["8", "12", "16"]
    assert [r["size(B)"] for r in json.loads(data.read_text())["results"]] == [8, 12, 16]


def test_thresholds_are_settings_and_reasons_name_them(capsys: pytest.CaptureFixture[str]) -> None:
    line = "allg -r 32 -b 2mb"
    (usual,) = results(capsys, line)
    (moved,) = results(capsys, f"{line} --set mesh_max_bytes=4mb")
    assert (usual["algorithm"], moved["algorithm"]) == ("ring", "mesh")
    assert "mesh_max_bytes 4194304" in str(moved["why"])
    assert "mesh_max_bytes" in nccom(capsys, f"{line} --explain")[1]


def test_the_machine_and_its_logical_cores_choose(capsys: pytest.CaptureFixture[str]) -> None:
    line = "allg -r 64 -b 64mb --target trn2.48xlarge"
    assert results(capsys, line)[0]["algorithm"] == "kangaring"
    code, _, err = nccom(capsys, "allg -r 65 -b 1mb --target trn2.48xlarge")
    assert code == 2 and "at most 64 on each trn2.48xlarge, got 65" in err
    (wide,) = results(capsys, "allg -r 65 -b 1mb --target trn2.48xlarge --lnc 1")
    assert wide["count(elems)"] == 65 * 16132  # 2 ** 20, rounded up to the ranks


def test_groups_at_once_share_links_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """Both cores of a chip between two instances: one EFA device serves two groups."""
    one, two = "[[0,32]]", "[[0,32],[1,33]]"
    line = "allr -r 64 -N 2 -b 8mb --custom-replica-groups"
    alone, shared = (float(results(capsys, f"{line} {g}")[0]["transfer_us"]) for g in (one, two))
    assert shared == pytest.approx(2 * alone, rel=1e-3)


def test_pairs_and_runtimes(capsys: pytest.CaptureFixture[str]) -> None:
    def figure(line: str, name: str) -> float:
        return float(str(results(capsys, line)[0][name]))

    line = "permute -r 32 -b 1mb --custom-src-target-pairs"
    near, far = (figure(f"{line} {pair}", "latency_us") for pair in ("[[0,1]]", "[[0,20]]"))
    assert near == pytest.approx(1.4) and far == pytest.approx(1.4 + 4 * 0.7)
    line = "allr -r 64 -N 2 -b 1mb -d fp32 --runtime"
    now, then = (figure(f"{line} {name}", "time:avg(us)") for name in ("current", "2023"))
    assert then - now == pytest.approx(1000)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("gather -r 2", "nccom requires one of allr"),
        ("allr -r 3 -N 2", "multiple of the 2 instances"),
        ("allr -r 4 -N 2 --target inf2.48xlarge", "SW_NETWORK"),
        ("allr -r 2 -b 1mb -e 1kb", "--maxbytes requires at least 1048576"),
        ("allr -r 2 -b 4xb", "--minbytes requires a size"),
        ("allr -r 2 -b 1kb -e 1mb -f 1", "--stepfactor requires above 1"),
        ("allr -r 2 -d fp64", "--datatype requires one of"),
        ("allr -r 2 --set ring_max=1", "--set requires one of"),
        ("allr -r 2 --set mesh=wide", "flat or grouped"),
        ("allr -r 2 --runtime 1999", "a runtime is one of 2023"),
        ("allr -r 2 --custom-replica-groups [[0,0]]", "at most once"),
        ("allr -r 2 --custom-replica-groups none.json", "JSON list of lists"),
        ("permute -r 2 --custom-src-target-pairs [[0,1],[0,1]]", "distinct sources"),
        ("allr -r 2 --target trn9", "target requires one of"),
        ("allr -r 2 --lnc 2", "NCC_EARG001"),
        ("allr -r 2 -N 0", "instances require at least 1, got 0"),
        ("allr -r 2 -N -1", "instances require at least 1, got -1"),
        ("allr -r 2 --csv /dev/null/a.csv", "--csv requires a place that can be written, got /dev"),
        ("allr -r 2 --report-to-json-file /dev/null/a", "--report-to-json-file requires a place"),
        ("allr -r 2 --set inter_mesh_max_instances=1gb", "requires a whole number, got '1gb'"),
        ("allr -r 2 -b 2 -d fp32", "at least one element"),
        ("allr -r 2 -n 0", "--iters requires at least 1"),
        ("allr -r 2 -c twos", "--check requires one of random, all_ones"),
        ("allr -r 2 -t mean", "--stats requires avg"),
        ("allr -r 64 -N 2 -s one", "-N 2 requires as many hosts, got 1"),
        ("allr -r 2 -S -s one", "--slurm-mode requires no --hosts"),
        ("allr -r 2 --hosts-file none", "--hosts-file requires a file"),
        ("allr -r 6 --data-parallel-dimension 4", "requires a divisor of the ranks"),
        ("allr -r 2 --alltoallv-metadata {}", "requires alltoallv, got allr"),
        ("alltoallv -r 2 --alltoallv-metadata [{}]", "requires entries with send_counts"),
        (
            'alltoallv -r 2 --alltoallv-metadata [{"send_counts":[0,0],"send_displs":[0,0],'
            '"recv_counts":[1,1],"recv_displs":[0,0]}]',
            "of which one is above 0",
        ),
        (
            'alltoallv -r 4 --alltoallv-metadata [{"send_counts":[1,2],"send_displs":[0,0],'
            '"recv_counts":[1,1],"recv_displs":[0,0]}]',
            "requires 4 counts of each",
        ),
    ],
)
def test_mistakes_are_refused(line: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = nccom(capsys, line)
    assert code == 2 and text in err


def test_units_are_powers_of_1024() -> None:
    given = ["8", "8B", "1kb", "2M", "1GB"]
    assert [parse_bytes(g, "-b") for g in given] == [8, 8, 1024, 2 << 20, 1 << 30]


EXAMPLE = {
    "send_counts": [512, 1024],
    "send_displs": [0, 512],
    "recv_counts": [256, 768],
    "recv_displs": [0, 256],
}
"""The entry of the tool's user guide, whose 1 MB ran as 1,048,608 B."""


def test_counts_are_shares_of_the_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.json"
    file.write_text(json.dumps({"alltoallv_metadata": [EXAMPLE]}))
    line = f"alltoallv -r 2 -N 2 -d fp32 -b 1mb -c --alltoallv-metadata {file}"
    (example,) = results(capsys, line)
    assert example["size(B)"] == 1048608 and example["check"]["passed"]


def test_an_exchange_takes_as_long_as_its_longest_part(capsys: pytest.CaptureFixture[str]) -> None:
    def transfer(*counts: list[int]) -> float:
        zeros = [0] * len(counts[0])
        rows = [
            dict(EXAMPLE, send_counts=c, send_displs=zeros, recv_counts=c, recv_displs=zeros)
            for c in counts
        ]
        line = ["alltoallv", "-r", "4", "-b", "16mb", "--alltoallv-metadata", json.dumps(rows)]
        assert main(["nccom", *line, "--json"]) == 0
        return float(json.loads(capsys.readouterr().out)["results"][0]["transfer_us"])

    (even,) = results(capsys, "alltoall -r 4 -b 16mb")
    assert transfer([1] * 4) == pytest.approx(even["transfer_us"], rel=1e-6)
    to_one = transfer([4, 0, 0, 0], [4, 0, 0, 0], [4, 0, 0, 0], [4, 0, 0, 0])
    itself = transfer([4, 0, 0, 0], [0, 4, 0, 0], [0, 0, 4, 0], [0, 0, 0, 4])
    received = 3 * (16 << 20)  # by one rank, over a copy path of 83.8 GB/s (docs/network.md)
    assert itself == 0 and to_one == pytest.approx(received / 83.8e9 * 1e6, rel=1e-3)


@pytest.mark.parametrize("op", ["allr", "allg", "allgv", "redsct", "alltoall", "permute"])
@pytest.mark.parametrize("mode", ["random", "all_ones"])
def test_values_are_those_of_numpy(
    op: str, mode: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    for dtype in ("uint8", "bf16", "fp32"):
        code, out, _ = nccom(capsys, f"{op} -r 6 -b 1000 -d {dtype} -c {mode}")
        assert code == 0 and f"check {mode} (seed 0) passed: values of 6 ranks" in out
    monkeypatch.chdir(tmp_path)
    run = nccom_values.execute

    def damaged(*given: Any, **named: Any) -> list[np.ndarray]:
        results = [r.copy() for r in run(*given, **named)]
        results[-1].reshape(-1)[-1] += 1
        return results

    monkeypatch.setattr(nccom_values, "execute", damaged)
    code, out, err = nccom(capsys, f"{op} -r 6 -b 1002 -d int16 -c {mode}")
    assert code == 1 and "failed: off by" in err and "passed" not in out
    (saved,) = tmp_path.glob("nccom_check_*.npz")
    with np.load(saved) as arrays:
        assert (arrays["output5"] != arrays["golden5"]).sum() == 1
        assert len(arrays.files) == 18 and arrays["input0"].dtype == np.int16


def test_the_seed_is_of_the_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    run = nccom_values.execute

    def noted(schedule: Any, sources: Any) -> Any:
        seen.append(sources[0].tobytes())
        return run(schedule, sources)

    monkeypatch.setattr(nccom_values, "execute", noted)
    for seed in ("1", "2", "1"):
        results(capsys, f"allg -r 4 -b 64 -c --seed {seed}")
    first, second, third = seen
    assert first == third != second


def test_repetitions_are_counted_and_take_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = nccom(capsys, "allr -r 8 -n 15 -w 5 -I 10 -W 5 --json")
    data = json.loads(out)
    assert (data["iterations"], data["warmup_iterations"]) == (150, 150)  # the page's example
    (point,) = data["results"]
    assert (
        point["time:min(us)"]
        == point["time:max(us)"]
        == pytest.approx(point["time:avg(us)"], abs=0.01)
    )
    head, row, _ = nccom(capsys, "allr -r 8 -t avg p50 p99")[1].splitlines()
    assert head.split()[3:6] == ["time:avg(us)", "time:p50(us)", "time:p99(us)"]
    assert len(set(row.split()[3:6])) == 1


def test_sizes_of_both_sides_are_columns(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = nccom(capsys, "allg -r 32 -b 1kb -d fp32 --show-input-output-size")
    head, row, _ = out.splitlines()
    assert head.split()[2:4] == ["total_input_size(B)", "total_output_size(B)"]
    assert row.split()[2:4] == ["32", "1024"]  # those of the page


def test_sizes_are_rounded_to_the_ranks_that_share_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def sizes(line: str) -> list[object]:
        return [r["size(B)"] for r in results(capsys, line)]

    assert sizes("alltoall -r 6 -b 1000") == sizes("redsct -r 6 -b 1000") == [1002]
    assert sizes("allg -r 6 -b 1000 -d fp32") == [1008]
    assert sizes("allr -r 6 -b 1000") == sizes("allgv -r 6 -b 1000") == [1000]


def test_a_dimension_of_groups_is_across_instances(capsys: pytest.CaptureFixture[str]) -> None:
    line = "allr -r 64 -N 2 -b 8mb"
    (grouped,) = results(capsys, f"{line} --data-parallel-dimension 2")
    by_hand = [[rank, rank + 32] for rank in range(32)]
    (listed,) = results(
        capsys, f"{line} --custom-replica-groups {json.dumps(by_hand).replace(' ', '')}"
    )
    assert grouped["time:avg(us)"] == listed["time:avg(us)"]


def test_hosts_are_given_listed_or_allocated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hosts(flags: str) -> list[str]:
        return list(json.loads(nccom(capsys, f"allr -r 64 -N 2 {flags} --json")[1])["hosts"])

    (tmp_path / "hosts").write_text("# two\n10.0.0.1 slots=32\n\n10.0.0.2\n10.0.0.3\n")
    assert hosts("") == []
    assert hosts("--hosts a b") == ["a", "b"]
    assert hosts(f"--hosts-file {tmp_path / 'hosts'}") == ["10.0.0.1", "10.0.0.2"]
    assert hosts("--slurm-mode") == ["slurm-alloc-0", "slurm-alloc-1"]
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    code, _, err = nccom(capsys, "allr -r 64 -N 2 -S --slurm-job-id 12345")
    assert code == 2 and "requires as many hosts, got 1: slurm-12345-0" in err


def test_pairs_that_no_link_joins_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    line = "permute -r 32 -b 1mb --custom-src-target-pairs"
    ring = json.dumps([[r, (r + 2) % 8] for r in range(0, 8, 2)]).replace(" ", "")  # four chips
    assert "warning" not in nccom(capsys, f"{line} {ring}")[2]
    assert "warning" not in nccom(capsys, "permute -r 32 -b 1mb")[2]
    code, _, err = nccom(capsys, f"{line} [[0,20],[1,3],[2,10]]")
    assert code == 0 and "warning: pairs that no link joins: 1, [0, 20] crosses 4" in err


def test_pairs_in_the_form_of_the_guide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [[0, 1], [1, 0], [2, 3], [3, 2], *([n, n] for n in range(4, 8))]
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps({"src_target_pairs": [pairs]}))
    bare = json.dumps(pairs).replace(" ", "")
    line = "permute -r 8 -b 1mb --custom-src-target-pairs"
    assert results(capsys, f"{line} {file}") == results(capsys, f"{line} {bare}")
