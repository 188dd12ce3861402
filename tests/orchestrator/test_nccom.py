"""`shardwright nccom`: nccom-test's arguments in, its columns out, with reasons and a band."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from shardwright.orchestrator.cli import main
from shardwright.orchestrator.commands.nccom import COLUMNS, parse_bytes


def nccom(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str, str]:
    code = main(["nccom", *line.split()])
    out = capsys.readouterr()
    return code, out.out, out.err


def results(capsys: pytest.CaptureFixture[str], line: str) -> list[dict[str, object]]:
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
    assert "--iters, --warmup_iters change nothing" in err


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("allr", "all_reduce"),
        ("allg", "all_gather"),
        ("redsct", "reduce_scatter"),
        ("alltoall", "all_to_all"),
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
    line = f"allg -r 32 -b 8 -e 16 -i 4 -d fp32 --csv {table} --report-to-json-file {data} --plot"
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
    assert wide["count(elems)"] == 2**20


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
    ],
)
def test_mistakes_are_refused(line: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = nccom(capsys, line)
    assert code == 2 and text in err


def test_units_are_powers_of_1024() -> None:
    given = ["8", "8B", "1kb", "2M", "1GB"]
    assert [parse_bytes(g, "-b") for g in given] == [8, 8, 1024, 2 << 20, 1 << 30]
