"""`neff dump|diff|export` and the checks a machine makes before it takes a file."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardwright.compiler.diagnostics import LoadError
from shardwright.compiler.driver import compile_graph
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.build import Builder
from shardwright.compiler.isa.limits import walk
from shardwright.compiler.isa.program import Program
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.neff.bundle import Bundle, program_bytes, read_program
from shardwright.compiler.neff.format import FEATURE_ROW_SUMS
from shardwright.compiler.neff.reader import Container
from shardwright.compiler.options import CompileOptions
from shardwright.compiler.program import StepProgram
from shardwright.orchestrator.cli import main
from shardwright.sim_cluster.values.load_checks import check_loadable
from tests.support.model_files import compile_line
from tests.support.small_job import build_on, bundle_of, small_llama

TARGET = "trn1n.32xlarge"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    path = tmp_path_factory.mktemp("alone")
    road = build_on(small_llama(), {"dp_shard": 1}, num_microbatches=1, micro_batch=2)
    return bundle_of(road, path / "bundle")


def program(scale: float = 2.0, lnc: int = 1) -> Program:
    b = Builder()
    x, y = b.input((96, 40)), b.input((40, 24))
    z = b.op("tanh", b.dot(x, y))
    graph = b.finish(b.op("multiply", z, b.constant(np.full((96, 24), scale), DType.F32)))
    step = StepProgram(name="main", graph=graph, inputs=("x", "y"), outputs=("z",))
    return compile_graph(step, TARGET, CompileOptions(lnc=lnc))


def write(path: Path, made: Program) -> Path:
    meta = {"compiler_version": "test", "lnc": made.lnc, "hypothetical": made.lnc > 1}
    path.write_bytes(program_bytes(made, meta))
    return path


def printed(capsys: pytest.CaptureFixture[str], *command: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(["neff", *command]) == code
    return capsys.readouterr().out


def test_a_constant_that_repeats_one_value_is_stored_as_one(tmp_path: Path) -> None:
    """Written out element by element in the model; only one that differs is in the file."""
    sizes = {}
    for name, values in (("same", np.full(4096, 1.5)), ("other", np.arange(4096))):
        data = values.astype(np.float32).tobytes().hex().upper()
        (tmp_path / f"{name}.mlir").write_text(f"""
        func.func @main(%a: tensor<4096xf32>) -> tensor<4096xf32> {{
          %c = stablehlo.constant dense<"0x{data}"> : tensor<4096xf32>
          %r = stablehlo.multiply %a, %c : tensor<4096xf32>
          return %r : tensor<4096xf32>
        }}""")
        line = f"neuronx-cc compile {tmp_path / name}.mlir --target trn1 --output"
        flags = f"--enable-fast-loading-neuron-binaries --logfile {tmp_path / 'log.txt'}"
        assert compile_line(f"{line} {tmp_path / name}.neff {flags}") == 0
        sizes[name] = (tmp_path / f"{name}.neff").stat().st_size
    assert sizes["other"] > 4 * 4096 > sizes["same"]


@pytest.mark.parametrize("lnc", [1, 2])
def test_unpack_has_every_instruction_in_the_file_of_its_engine(
    lnc: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = program(lnc=lnc)
    file = write(tmp_path / "one.neff", made)
    paths = [
        Path(line) for line in printed(capsys, "unpack", str(file), str(tmp_path / "parts")).split()
    ]
    names = sorted(str(path.relative_to(tmp_path / "parts")) for path in paths)
    assert names[0] == "neff.json" and f"sg{lnc - 1:02d}/def.json" in names
    for core in range(lnc):
        folder = tmp_path / "parts" / f"sg{core:02d}"
        given = json.loads((folder / "def.json").read_text())
        assert {name: row["size"] for name, row in given["var"].items()} == {
            buffer.name: buffer.num_bytes for buffer in made.buffers
        }
        assert given["var"]["x"]["type"] == "input" and given["var"]["z"]["type"] == "output"
        for engine in given["engines"]:
            kernels = [k for f in made.functions for k in f.subgraphs[core]]
            code = [i for k in kernels for i in walk(k.body) if i.engine.value == engine]
            stream = json.loads((folder / f"{engine}.json").read_text())["functions"]
            lines = [line.split()[0] for one in stream.values() for line in one]
            assert lines.count(engine) == len(code) > 0


def test_dump_shows_every_instruction_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = program()
    text = printed(capsys, "dump", str(write(tmp_path / "a.neff", made)))
    kernels = [k for f in made.functions for k in f.kernels]
    instrs = [i for k in kernels for i in walk(k.body)]
    engines = "tensor|vector|scalar|gpsimd|sync|dma_in|dma_out"
    assert len(re.findall(rf"^ {{4,}}(?:{engines}) +\w", text, re.M)) == len(instrs)
    assert "matmul" in text and "activation" in text and "program main for trn1n" in text
    one = printed(capsys, "dump", str(tmp_path / "a.neff"), "--engine", "tensor")
    assert "matmul" in one and "activation" not in one and "dma" not in one


def test_second_destinations_are_kept_and_need_a_reader_that_knows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = Builder()
    x = b.input((128, 1024))
    y = b.op("exponential", x)
    graph = b.finish(y, b.reduce(y, "add", (1,)))
    step = StepProgram(name="main", graph=graph, inputs=("x",), outputs=("y", "z"))
    made = compile_graph(step, TARGET, CompileOptions())
    code = [i for f in made.functions for k in f.kernels for i in walk(k.body)]
    assert any(i.row_sum for i in code)
    container = Container(program_bytes(made, {}), "sums")
    assert read_program(container) == made
    assert container.header.features & FEATURE_ROW_SUMS
    assert not Container(program_bytes(program(), {}), "none").header.features & FEATURE_ROW_SUMS
    text = printed(capsys, "dump", str(write(tmp_path / "sums.neff", made)))
    lines = [line for line in text.splitlines() if "activation_reduce" in line]
    assert lines and all(line.split("<-")[0].count("sbuf") == 2 for line in lines)


def test_diff_is_silent_for_equal_programs_and_shows_one_changed_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = write(tmp_path / "a.neff", program()), write(tmp_path / "b.neff", program())
    assert "do the same" in printed(capsys, "diff", str(a), str(b))
    c = write(tmp_path / "c.neff", program(scale=3.0))
    text = printed(capsys, "diff", str(a), str(c), code=1)
    removed = [line for line in text.splitlines() if line.startswith("-") and "2.0" in line]
    added = [line for line in text.splitlines() if line.startswith("+") and "3.0" in line]
    assert removed and len(removed) == len(added)


def test_an_exported_core_runs_from_anywhere(
    alone: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    single, core = tmp_path / "core.neff", alone.path / "cores" / "core-00000.neff"
    text = printed(capsys, "export", str(alone.path), "--core", "0", "--output", str(single))
    assert "forward" in text and "update" in text
    assert "sound" in printed(capsys, "verify", str(single))
    assert "programs" in printed(capsys, "info", str(single))
    whole = alone.path / "programs" / f"{alone.manifest.programs['update']}.neff"
    inputs = tmp_path / "in.npz"
    np.savez(inputs, **_arguments(alone.programs["update"]))
    results = []
    for file, extra in ((whole, []), (core, ["update"]), (single, ["update"])):
        outputs = tmp_path / "out.npz"
        flags = [part for name in extra for part in ("--program", name)]
        printed(capsys, "run", str(file), f"--inputs={inputs}", f"--outputs={outputs}", *flags)
        with np.load(outputs) as data:
            results.append({k: data[k] for k in data})
    for other in results[1:]:
        assert all(np.array_equal(results[0][k], other[k]) for k in results[0])
    printed(capsys, "diff", str(core), str(single), "--program", "forward")
    assert main(["neff", "dump", str(single)]) == 2, "the program has to be named"
    assert "--program" in capsys.readouterr().err


def _arguments(made: Program) -> dict[str, np.ndarray]:
    named = {b.name: b for b in made.buffers if b.kind == "named"}
    rng = np.random.default_rng(0)
    return {
        f"arg{k}": np.abs(rng.normal(size=named[n].shape)).astype(named[n].dtype.numpy)
        for k, n in enumerate(made.inputs)
    }


def test_an_exported_file_is_checked_byte_by_byte(
    alone: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    single = tmp_path / "core.neff"
    printed(capsys, "export", str(alone.path), "--output", str(single))
    data = bytearray(single.read_bytes())
    for at in range(0, len(data), max(1, len(data) // 40)):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        single.write_bytes(damaged)
        code = main(["neff", "verify", str(single)])
        out = capsys.readouterr()
        assert code == 72 or _is_padding(data, at), (at, out)


def _is_padding(data: bytes, at: int) -> bool:
    return data[at] == 0


@pytest.mark.parametrize(
    ("generation", "environment", "refused"),
    [
        ("v2", {}, False),
        ("v3", {}, True),
        ("v3", {"NEURON_RT_ALLOW_LEGACY_NEFF": "1"}, False),
        ("v1", {"NEURON_RT_ALLOW_LEGACY_NEFF": "1"}, True),
    ],
)
def test_architecture_is_checked_at_load(
    generation: str, environment: dict[str, str], refused: bool
) -> None:
    here = load_target(TARGET)
    machine = replace(here, name="other", core=replace(here.core, generation=generation))
    if not refused:
        check_loadable(program(), {}, machine, environment)
        return
    with pytest.raises(LoadError, match="SW_LOAD_ARCHITECTURE"):
        check_loadable(program(), {}, machine, environment)


def test_logical_core_size_and_memory_are_checked_at_load() -> None:
    machine, made, pair = load_target(TARGET), program(), program(lnc=2)
    assert (made.lnc, pair.lnc) == (1, 2)
    hypothetical = {"lnc": 2, "hypothetical": True}
    check_loadable(pair, hypothetical, machine, {"NEURON_LOGICAL_NC_CONFIG": "2"})
    with pytest.raises(LoadError, match=r"SW_LOAD_LNC.*logical NeuronCores of 1.*set to 2"):
        check_loadable(made, {"lnc": 1}, machine, {"NEURON_LOGICAL_NC_CONFIG": "2"})
    with pytest.raises(LoadError, match=r"SW_LOAD_LNC.*Cores of 2, trn1n.32xlarge has those of 1"):
        check_loadable(pair, {"lnc": 2}, machine, {})
    with pytest.raises(LoadError, match=r"SW_LOAD_LNC.*subgraphs for 1 physical cores.*says 2"):
        check_loadable(made, hypothetical, machine, {})
    small = replace(machine, hbm_bytes_per_core=machine.reserve_bytes_per_core)
    with pytest.raises(LoadError, match=r"SW_LOAD_MEMORY.*tensors .* scratchpad"):
        check_loadable(made, {}, small, {})


def test_stochastic_rounding_by_flag_and_by_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    b = Builder()
    x, y = b.input((1, 128), DType.F16), b.input((1, 128), DType.F16)
    step = StepProgram(
        name="main", graph=b.finish(b.op("add", x, y)), inputs=("x", "y"), outputs=("z",)
    )
    file = write(tmp_path / "add.neff", compile_graph(step, TARGET))
    inputs, outputs = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(inputs, arg0=np.full((1, 128), 1024, "f2"), arg1=np.full((1, 128), 0.5, "f2"))

    def result(*flags: str) -> np.ndarray:
        printed(capsys, "run", str(file), f"--inputs={inputs}", f"--outputs={outputs}", *flags)
        with np.load(outputs) as data:
            return data["out0"]

    assert (result() == 1024).all()
    drawn = result("--stochastic-rounding", "7")
    assert set(np.unique(drawn)) == {1024, 1025} and np.array_equal(
        drawn, result("--stochastic-rounding", "7")
    )
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1")
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_SEED", "7")
    assert np.array_equal(drawn, result())
