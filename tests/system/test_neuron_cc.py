"""Inferentia 1 as a user has it: models compiled by neuron-cc's options, spread over cores, with
operators on the host, run in values and in time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.machine.target import altered, load_target
from shardwright.compiler.neff.reader import Container
from shardwright.compiler.neff.serial import read_serial
from shardwright.compiler.surface.operators import NEURON_CC_LISTED
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.neff.neff_time import band_ps, serial_time
from tests.support.model_files import compile_line, info_of, run_neff, write_model
from tests.support.serial_models import MODELS, Model

EPSILON = {"bf16": 2.0**-8, "fp16": 2.0**-11}
"""Spacing of numbers of a type at 1."""
ROUNDINGS = 8
"""Of values as large as the largest one, that a result may be away by: its operators one behind
the other round a few values each."""
CASTS = {
    "": "bf16",
    "--fast-math none": "bf16",
    "--fp32-cast all-fp16": "fp16",
    "--fp32-cast matmult": "bf16",
    "--fast-math fp32-cast-matmult-fp16 no-fast-relayout": "fp16",
}
SAMPLE = [
    ("perceptron", 1, ""),
    ("perceptron", 4, "--fp32-cast all-fp16"),
    ("convolutions", 2, "--fast-math none"),
    ("block", 4, ""),
]
"""Cells of every run; the others with `make exhaustive`."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cells() -> list[Any]:
    every = [(name, cores, cast) for name in MODELS for cores in (1, 2, 4) for cast in CASTS]
    return [
        pytest.param(*cell, marks=() if cell in SAMPLE else pytest.mark.exhaustive)
        for cell in every
    ]


def compiled(model: Model, words: str = "", name: str = "m") -> Path:
    write_model(Path(f"{name}.mlir"), model.function, [model.argument])
    line = f"shardwright compile {name}.mlir --target inf1 --output {name}.neff {words}"
    assert compile_line(line) == 0
    return Path(f"{name}.neff")


def off(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, as a part of the largest value."""
    return float(abs(found - expected).max() / abs(expected).max())


@pytest.mark.parametrize(("name", "cores", "cast"), cells())
def test_values_are_those_of_jax_within_the_rounding_of_the_cast(
    name: str, cores: int, cast: str, folder: Path
) -> None:
    model, epsilon = MODELS[name], EPSILON[CASTS[cast]]
    path = compiled(model, f"--neuroncore-pipeline-cores {cores} {cast}")
    found = {level: run_neff(path, [model.argument], level)[0] for level in ("L0", "L1")}
    for values in found.values():
        assert off(values, model.expected) < ROUNDINGS * epsilon
    assert off(found["L0"], model.expected) > epsilon / 16, "the cast rounds"
    assert off(found["L0"], found["L1"]) < 2 * epsilon, "a sum in another order rounds elsewhere"


def test_a_short_cast_is_further_away_than_a_longer_one(folder: Path) -> None:
    model = MODELS["perceptron"]
    words = ("--fp32-cast all", "--fp32-cast all-fp16")
    paths = [compiled(model, line, f"m{number}") for number, line in enumerate(words)]
    bf16, fp16 = (off(run_neff(path, [model.argument])[0], model.expected) for path in paths)
    assert fp16 < bf16 / 2


def test_relayout_decides_whether_what_is_transposed_is_rounded(folder: Path) -> None:
    model = Model(lambda x: x.T + 0.0 * x.sum(), MODELS["perceptron"].argument)
    exact = compiled(model, "--fast-math fp32-cast-matmult no-fast-relayout", "exact")
    fast = compiled(model, "--fast-math fp32-cast-matmult fast-relayout", "fast")
    assert off(run_neff(exact, [model.argument])[0], model.expected) == 0
    rounded = model.argument.astype(np.float16).astype(np.float32).T
    np.testing.assert_array_equal(run_neff(fast, [model.argument])[0], rounded)


def test_every_core_of_a_pipeline_has_a_program_and_weights_of_its_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = compiled(MODELS["block"], "--neuroncore-pipeline-cores 4")
    file = read_serial(Container.open(path))
    assert [stage.core for stage in file.stages] == [-1, 0, 1, 2, 3]
    assert [stage.name for stage in file.stages] == ["cpu00", "sg00", "sg01", "sg02", "sg03"]
    made = {name for stage in file.stages for name in stage.outputs}
    assert all(set(stage.inputs) <= made for stage in file.stages if stage.core >= 0)
    info = info_of(path, capsys)
    assert info["kind"] == "pipeline" and info["cores"] == 4
    assert list(info["programs"]) == ["sg00", "sg01", "sg02", "sg03"]
    assert main(["neff", "verify", str(path)]) == 0
    assert main(["neff", "dump", str(path), "--program", "sg02"]) == 0


def test_the_old_name_of_the_option_means_the_same(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = MODELS["perceptron"]
    new = compiled(model, "--neuroncore-pipeline-cores 2", "new").read_bytes()
    capsys.readouterr()
    old = compiled(model, "--num-neuroncores 2", "old").read_bytes()
    assert "use --neuroncore-pipeline-cores 2" in capsys.readouterr().err
    assert len(new) == len(old)


def test_operators_that_stay_on_the_cpu_are_told_and_run_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = MODELS["block"]
    path = compiled(model, "--verbose info")
    shown = capsys.readouterr()
    warnings = [line for line in shown.err.splitlines() if "SW_HOST_OPERATOR" in line]
    (gather,) = warnings
    assert re.search(r"serial_models.py:\d+: warning\[SW_HOST_OPERATOR\]: gather stays", gather)
    rows = info_of(path, capsys)["operators"]
    total, on_cores = sum(row[1] for row in rows), sum(row[2] for row in rows)
    assert total - on_cores == model.on_host and rows[0][2] < rows[0][1]
    assert f"{on_cores} of {total} operators on NeuronCores" in shown.out
    assert re.search(r"gather +1  no: runs as a CPU node", shown.out)
    file = read_serial(Container.open(path))
    (host,) = (stage.graph for stage in file.stages if stage.graph is not None)
    computed = [op.name for op in host.ops if op.operands]
    assert computed[-1] == "gather" and len(computed) >= model.on_host


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: jnp.flip(jnp.tanh(x), 1) * 2.0, "reverse"),
        (lambda x: jax.lax.bitcast_convert_type(x * 2.0, jnp.int32) + 1, "bitcast_convert"),
        (lambda x: jnp.cbrt(x * 2.0) + 1.0, "cbrt"),
    ],
    ids=["reverse", "bitcast_convert", "cbrt"],
)
def test_operators_of_no_list_of_neuron_cc_stay_on_the_cpu(
    function: Any, operator: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(function, MODELS["perceptron"].argument)
    path = compiled(model, "--fast-math fp32-cast-matmult no-fast-relayout")
    assert f"{operator} stays on the CPU" in capsys.readouterr().err
    np.testing.assert_allclose(run_neff(path, [model.argument])[0], model.expected, 1e-5, 1e-6)


def test_the_list_of_operators_is_that_of_neuron_cc(capsys: pytest.CaptureFixture[str]) -> None:
    """59 names of XLA: 62 of neuronx-cc, less three. The source counts them."""
    assert main(["list-operators", "--target", "inf1"]) == 0
    names = capsys.readouterr().out.split()
    assert len(names) == len(set(names)) and not {"Rev", "SelectAndScatter", "Conv"} & set(names)
    assert {"DotGeneral", "Gather", "Allreduce"} <= set(names)
    assert len(NEURON_CC_LISTED) == 59


def refused(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    try:
        code = compile_line(f"shardwright compile {line}")
    except SystemExit as error:
        code = int(str(error.code))
    return code, capsys.readouterr().err


IO = '{"inputs": {"arg0": [[4, 32], "float32"]}, "outputs": ["out0"]}'
REFUSALS = [
    ("--neuroncore-pipeline-cores 5", "SW_USAGE", "requires 1 to 4, got 5"),
    ("--neuroncore-pipeline-cores 0", "SW_USAGE", "requires 1 to 4, got 0"),
    ("--target inf1.24xlarge --neuroncore-pipeline-cores 64", "SW_USAGE", "as many as there are"),
    ("--fast-math all none", "SW_USAGE", "one of all, none, got all and none"),
    ("--fast-math fp32-cast-all,fp32-cast-matmult", "SW_USAGE", "keep fp32-cast-all or"),
    ("--fast-math fast-relayout no-fast-relayout", "SW_USAGE", "one of fast-relayout"),
    ("--fast-math=quick", "SW_USAGE", "requires words of all, none"),
    ("--fp32-cast half", "SW_USAGE", "one of all, all-fp16"),
    ("--auto-cast all", "SW_USAGE", "use --fp32-cast or --fast-math"),
    ("--model-type transformer", "SW_USAGE", "a --target of neuronx-cc"),
    ("--compiler-version-profile latest", "SW_USAGE", "a --target of neuronx-cc"),
    ("--lnc 2", "NCC_EARG001", "requires 1, got 2"),
    ("--target trn1 --fp32-cast all", "SW_USAGE", "use --auto-cast and --auto-cast-type"),
    ("--target trn1 --io-config x.json", "SW_USAGE", "a --target of neuron-cc"),
    ("--io-config no.json", "SW_IO_CONFIG", "cannot read no.json"),
    ("--io-config s3://b/c.json", "SW_IO_CONFIG", "a file, a file:// address or JSON"),
    ("--io-config '{}'", "SW_IO_CONFIG", "requires inputs"),
    (f"--io-config '{IO.replace('4, 32', '8, 32')}'", "SW_IO_CONFIG", "arg0 as float32[4, 32]"),
    (f"--io-config '{IO.replace('float32', 'int8')}'", "SW_IO_CONFIG", "got int8[4, 32]"),
    (f"--io-config '{IO.replace('arg0', 'x')}'", "SW_IO_CONFIG", "input arg0 of the model"),
    (f"--io-config '{IO.replace('out0', 'logits')}'", "SW_IO_CONFIG", "outputs among out0"),
]


@pytest.mark.parametrize(("words", "code", "text"), REFUSALS, ids=[r[0][:45] for r in REFUSALS])
def test_what_neuron_cc_does_not_take_is_refused(
    words: str, code: str, text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = MODELS["perceptron"]
    write_model(folder / "m.mlir", model.function, [model.argument])
    target = "" if "--target" in words else "--target inf1"
    found, shown = refused(f"m.mlir {target} {words}", capsys)
    assert found == 2 and code in shown and text in shown


def test_an_io_config_chooses_outputs_in_its_order(folder: Path) -> None:
    model = Model(lambda x: (x * 2.0, x + 1.0, x.sum()), MODELS["perceptron"].argument)
    config = {"inputs": {"arg0": [[4, 32], "float32"]}, "outputs": ["out1", "out0"]}
    (folder / "io.json").write_text(json.dumps(config))
    for number, given in enumerate(("io.json", f"file://{folder}/io.json")):
        path = compiled(model, f"--fast-math none --io-config {given}", f"m{number}")
        plus, twice = run_neff(path, [model.argument])
        np.testing.assert_array_equal(plus, model.argument + np.float32(1))
        np.testing.assert_array_equal(twice, model.argument * np.float32(2))


MODULES = {
    "int8": ("%r = stablehlo.add %a, %a : tensor<4xi8>", "4xi8", "NCC_ESPP004", "got i8"),
    "int64": ("%r = stablehlo.add %a, %a : tensor<4xi64>", "4xi64", "NCC_ESPP004", "got i64"),
    "dynamic": ("%r = stablehlo.add %a, %a : tensor<?xf32>", "?xf32", "NCC_EMOD025", "?xf32"),
    "no work": (
        "%r = stablehlo.reverse %a, dims = [0] : tensor<4xf32>",
        "4xf32",
        "SW_NO_OPERATORS",
        "core",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_models_that_the_machine_does_not_take_are_refused(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    op, shape, code, text = MODULES[name]
    kind = f"tensor<{shape}>"
    lines = f"func.func public @main(%a: {kind}) -> {kind} {{\n  {op}\n  return %r : {kind}\n}}\n"
    (folder / "m.mlir").write_text(lines)
    found, shown = refused("m.mlir --target inf1", capsys)
    assert found == 70 and code in shown and text in shown


def test_time_has_a_band_and_says_that_it_is_hypothetical(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = compiled(MODELS["perceptron"], "--neuroncore-pipeline-cores 2")
    capsys.readouterr()
    assert main(["neff", "run", str(path), "--time"]) == 0
    shown = capsys.readouterr().err
    seconds = [float(s) for s in re.findall(r"([\d.]+) s", shown.splitlines()[0])]
    middle, low, high = seconds
    assert 0 < low < middle < high
    assert "hypothetical: no clock of NeuronCore-v1 is published for its vector and scalar" in shown
    assert main(["neff", "run", str(path), "--program", "sg00", "--time"]) == 0
    assert "band" in capsys.readouterr().err


def test_the_band_is_that_of_all_figures_without_a_source_at_their_ends(folder: Path) -> None:
    file = read_serial(Container.open(compiled(MODELS["block"], "--neuroncore-pipeline-cores 2")))
    target = load_target("inf1.xlarge")

    def timed(machine: Any) -> int:
        return serial_time(file, machine).request_ps

    low, high = band_ps(timed, target)
    slow = {
        "vector_clock_ghz": 0.5,
        "scalar_clock_ghz": 0.5,
        "cross_engine_semaphore_ns": 1300,
        "program_start_us": 1000,
        "dma_engine_sustained_gb_per_s": 4.2,
    }
    fast = {
        "vector_clock_ghz": 1.5,
        "scalar_clock_ghz": 1.5,
        "cross_engine_semaphore_ns": 36,
        "program_start_us": 10,
        "dma_engine_sustained_gb_per_s": 10,
    }
    assert high == timed(altered(target, slow)) and low == timed(altered(target, fast))


def test_a_request_takes_all_cores_one_behind_the_other_and_a_stream_the_slowest(
    folder: Path,
) -> None:
    file = read_serial(Container.open(compiled(MODELS["block"], "--neuroncore-pipeline-cores 4")))
    found = serial_time(file, load_target("inf1.xlarge"))
    assert found.request_ps == sum(found.cores) + found.hand_offs + found.launches
    assert found.slowest_ps == max(found.cores) and min(found.cores) > 0
    # Each tensor of another core: 1.3 us of a DMA transfer, 0.1 us of a semaphore, and its bytes at
    # half of 12.5 GB/s, since memory is written and read. One start of 100 us, behind the host.
    place = {name: stage.core for stage in file.stages for name in stage.outputs}
    handed = [
        stage.types[name].num_bytes
        for stage in file.stages
        for name in stage.inputs
        if stage.core > 0 and 0 <= place[name] != stage.core
    ]
    by_hand = sum(1_400_000 + size / 6.25e9 * 1e12 for size in handed)
    assert handed and abs(found.hand_offs - by_hand) <= len(handed)
    assert found.launches == 100_000_000


def test_weights_that_fit_on_chip_are_not_loaded_in_every_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = compiled(MODELS["perceptron"], "--neuroncore-pipeline-cores 2")
    file, target = read_serial(Container.open(path)), load_target("inf1.xlarge")
    kept = serial_time(file, target)
    # 128 partitions of 8 bytes hold 1 KiB, either core has 17 KiB or more
    loaded = serial_time(file, altered(target, {"sbuf_bytes_per_partition": 8}))
    assert all(a < b for a, b in zip(kept.cores, loaded.cores, strict=True))
    assert (kept.hand_offs, kept.launches) == (loaded.hand_offs, loaded.launches)
    capsys.readouterr()
    assert main(["neff", "run", str(path), "--time"]) == 0
    assert "weights of 2 of 2 cores stay on chip" in capsys.readouterr().err


def test_a_pipeline_needs_a_machine_with_as_many_cores(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--target inf1.6xlarge --neuroncore-pipeline-cores 6"
    path = compiled(MODELS["convolutions"], words)
    model = MODELS["convolutions"]
    assert off(run_neff(path, [model.argument])[0], model.expected) < ROUNDINGS * EPSILON["bf16"]
    capsys.readouterr()
    assert main(["neff", "run", str(path), "--time", "--target", "inf1.xlarge"]) == 72
    assert "SW_LOAD_CORES" in capsys.readouterr().err
    assert main(["neff", "run", str(path), "--time"]) == 0
    # From chip to chip, tensors cross a link of 8 GB/s, and its 0.7 us of wire.
    assert "through 6 cores of inf1.6xlarge" in capsys.readouterr().err


def test_jobs_on_the_machine_are_refused_with_what_does_it(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert main(["plan", "--model", "gpt-tiny", "--target", "inf1.xlarge"]) == 2
    shown = capsys.readouterr().err
    assert "NCC_EARG001" in shown and "shardwright compile MODEL --target inf1.xlarge" in shown
