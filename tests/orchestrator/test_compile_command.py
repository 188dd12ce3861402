"""`compile` as scripts for neuronx-cc use it: forms of models, real command lines, streams, exit
codes, and what the file then says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.orchestrator.compile import through_cache
from shardwright.orchestrator.service import process_backend
from tests.support.model_files import (
    FORMS,
    compile_line,
    info_of,
    meta_of,
    run_neff,
    write_model,
)


def layers(x: Any, w: Any) -> Any:
    """A loop, a matmul, a reduction, an output that is an input."""

    def body(c: Any, _: Any) -> Any:
        return jnp.tanh(c @ w), c.sum()

    y, sums = jax.lax.scan(body, x, None, length=3)
    return y, sums, x


RNG = np.random.default_rng(3)
ARGUMENTS = [RNG.normal(size=(4, 6)).astype(np.float32), RNG.normal(size=(6, 6)).astype(np.float32)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("form", FORMS)
def test_every_form_compiles_to_a_file_that_computes_the_function(form: str, folder: Path) -> None:
    write_model(folder / f"m.{form}", layers, ARGUMENTS)
    assert compile_line(f"neuronx-cc compile m.{form} --framework XLA --target trn1") == 0
    expected = layers(*ARGUMENTS)
    for level in ("L0", "L1"):
        found = run_neff(folder / "file.neff", ARGUMENTS, level)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_the_form_is_found_by_content_not_by_name(folder: Path) -> None:
    write_model(folder / "m.export", layers, ARGUMENTS).rename(folder / "m.hlo.pb")
    assert compile_line("shardwright compile m.hlo.pb --target trn1") == 0
    assert meta_of(folder / "file.neff")["source_form"] == "jax.export"


COMMAND_LINES: list[tuple[str, str, dict[str, Any], tuple[str, ...]]] = [
    (
        "neuronx-cc compile --framework=XLA --target=trn1 m.hlo.pb --output g.neff"
        " --model-type=transformer --distribution-strategy=llm-training --verbose=35",
        "trn1.32xlarge",
        {"model_type": "transformer", "distribution_strategy": "llm-training"},
        (),
    ),
    (
        "neuronx-cc --target=trn1 compile --framework XLA m.hlo.pb --output g.neff"
        " --auto-cast none -O1",
        "trn1.32xlarge",
        {"auto_cast": "none", "optlevel": 1},
        (),
    ),
    (
        "neuronx-cc compile m.hlo.pb --framework XLA --target inf2 --output g.neff"
        " --auto_cast=matmult --auto_cast_type=BF16 --enable-fast-loading-neuron-binaries",
        "inf2.48xlarge",
        {"auto_cast": "matmult", "enable_fast_loading_neuron_binaries": True},
        (),
    ),
    (
        "neuronx-cc compile --framework XLA m.hlo.pb --target trn2 --lnc=1 -O 2"
        " --internal-hlo2tensorizer-options=--verify-hlo=false"
        " --tensorizer-options '--disable-dma-cast --skip-pass=Foo' --output g.neff",
        "trn2.48xlarge",
        {
            "optlevel": 2,
            "recorded": {
                "internal-hlo2tensorizer-options": "--verify-hlo=false",
                "tensorizer-options": "--disable-dma-cast --skip-pass=Foo",
            },
        },
        ("recorded in the file, without effect here: --internal-hlo2tensorizer-options",),
    ),
    (
        "neuronx-cc compile --framework XLA m.hlo.pb --target trn3 --lnc 1 --output g.neff",
        "trn3-gen1-ultraserver",
        {"optlevel": 2},
        (),
    ),
    (
        "neuronx-cc compile --target trn1n --framework XLA --distribution_strategy NEMO"
        " --enable-experimental-O1 --num-parallel-jobs 8 m.hlo.pb --output g.neff"
        " --pipeline compile SaveTemps --logfile my.log",
        "trn1n.32xlarge",
        {"optlevel": 1, "distribution_strategy": "llm-training"},
        ("nemo is deprecated, it means llm-training", "use --optlevel 1"),
    ),
    (
        "neuronx-cc compile --framework XLA m.hlo.pb --target trn1 --optlevel=3 --optlevel 1"
        " --disable-mixed-precision-accumulation --enable-mixed-precision-accumulation"
        " --enable-saturate-infinity --hbm-scratchpad-page-size 1024 --output g.neff"
        " --auto-cast-type fp16 --verbose debug",
        "trn1.32xlarge",
        {
            "optlevel": 1,
            "mixed_precision_accumulation": True,
            "saturate_infinity": True,
            "hbm_scratchpad_page_size": 1024,
        },
        ("--auto-cast-type has no effect",),
    ),
]


@pytest.mark.parametrize(("line", "target", "options", "warnings"), COMMAND_LINES)
def test_command_lines_of_neuronx_cc_work_with_the_name_changed(
    line: str,
    target: str,
    options: dict[str, Any],
    warnings: tuple[str, ...],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_model(folder / "m.hlo.pb", layers, ARGUMENTS)
    assert compile_line(line) == 0
    out, err = capsys.readouterr()
    assert out.rstrip().endswith("Compiler status PASS")
    for text in warnings:
        assert text in err
    if not warnings:
        assert not err
    found = info_of(folder / "g.neff", capsys)
    assert found["target"] == target
    assert {key: found["options"][key] for key in options} == options
    assert [row["name"] for row in found["inputs"]] == ["arg0", "arg1"]
    bound = 2e-2 if found["options"]["auto_cast"] != "none" else 1e-5
    np.testing.assert_allclose(
        run_neff(folder / "g.neff", ARGUMENTS)[0], layers(*ARGUMENTS)[0], rtol=bound, atol=bound
    )


def test_in_a_shell_the_streams_and_the_exit_code_are_those_of_a_compiler(folder: Path) -> None:
    write_model(folder / "m.hlo.pb", layers, ARGUMENTS)
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "shardwright", "compile", "m.hlo.pb", "--target", "trn1"]
    done = subprocess.run(
        [*command, "--verbose", "info", "--no_cache", "--log_level", "INFO"],
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "INFO: Running import" in done.stdout and "read by the caching wrapper" in done.stdout
    assert done.stdout.endswith("Compiler status PASS\n")
    assert "estimated instruction count" in (folder / "log-neuron-cc.txt").read_text()


SCRIPT = """#!/bin/sh
set -eu
neuronx-cc --version
neuronx-cc list-operators --framework XLA | grep -qx DotGeneral
neuronx-cc compile model.hlo.pb --framework XLA --target trn1 --model-type transformer -O1 \\
    --auto-cast=none --output f.neff --verbose 35
test -s f.neff && echo "compiled with status $?"
if neuronx-cc compile model.hlo.pb --framework XLA --target trn1 --lnc 2; then exit 1; fi
"""


def test_a_script_for_neuronx_cc_runs_when_the_name_is_changed(folder: Path) -> None:
    write_model(folder / "model.hlo.pb", layers, ARGUMENTS)
    root, tool = Path(__file__).resolve().parents[2], folder / "bin" / "shardwright"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m shardwright "$@"\n')
    tool.chmod(0o755)
    (folder / "build.sh").write_text(SCRIPT.replace("neuronx-cc", "shardwright"))
    done = subprocess.run(
        ["sh", "build.sh"],
        env={"PYTHONPATH": str(root), "PATH": f"{tool.parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "compiled with status 0" in done.stdout and "Compiler status PASS" in done.stdout
    assert "NCC_EARG001" in done.stderr
    np.testing.assert_allclose(
        run_neff(folder / "f.neff", ARGUMENTS)[0], layers(*ARGUMENTS)[0], rtol=1e-5, atol=1e-5
    )


def test_levels_choose_the_stream_and_the_file_gets_everything(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(folder / "m.hlo.pb", layers, ARGUMENTS)
    flags = "--target trn1 --disable-dge --auto-cast-type fp16"
    seen = {}
    for level in ("debug", "20", "warning", "error", "critical"):
        line = f"shardwright compile m.hlo.pb {flags} --verbose {level} --logfile log.{level}"
        assert compile_line(line) == 0
        seen[level] = capsys.readouterr()
        assert "INFO import finished" in (folder / f"log.{level}").read_text()
    for level, (shown, warned) in {
        "debug": (True, True),
        "20": (True, True),
        "warning": (False, True),
        "error": (False, False),
    }.items():
        assert ("INFO: --disable-dge" in seen[level].out) is shown
        for told in ("option optlevel = 2", "operators imported: ", " kernel 0 "):
            lines = [line for line in seen[level].out.splitlines() if told in line]
            assert bool(lines) is (level == "debug")
            assert all(line.startswith("DEBUG: ") for line in lines)
        assert ("WARNING: --auto-cast-type" in seen[level].err) is warned


def test_a_refused_model_gets_a_banner_with_code_place_and_command(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(folder / "m.mlir", lambda x: jnp.linalg.cholesky(x), [np.eye(4, dtype=np.float32)])
    assert compile_line("shardwright compile m.mlir --target trn1 --output g.neff") == 70
    err = capsys.readouterr().err
    for text in (
        "[NCC_",
        f"Error location: {Path(__file__)}:",
        "shardwright compile m.mlir --target trn1",
        "Version: Shardwright compiler",
        "Log file: log-neuron-cc.txt",
        "Exit code: 70",
    ):
        assert text in " ".join(err.split())
    assert not (folder / "g.neff").exists()
    assert "the compilation failed" in (folder / "log-neuron-cc.txt").read_text()


@pytest.mark.parametrize(
    ("flags", "code", "named"),
    [
        ("--target trn1 --frobnicate", "SW_USAGE", "--frobnicate"),
        ("--target trn1 --optlevel 4", "SW_USAGE", "one of 1, 2, 3"),
        ("--target trn1 --auto-cast some", "SW_USAGE", "none, matmult, all"),
        ("--target trn1 --lnc 2", "NCC_EARG001", "got 2"),
        ("--target trn1n --logical-nc-config=2", "NCC_EARG001", "trn1n.32xlarge"),
        ("--target inf2 -lnc 2", "NCC_EARG001", "inf2.48xlarge"),
        ("--target trn2 --lnc 3", "SW_USAGE", "one of 1, 2"),
        ("--target gpu", "NCC_EARG001", "trn1, trn1n"),
        ("", "SW_USAGE", "requires --target"),
        ("--framework TENSORFLOW --target trn1", "SW_TF_MODEL", "a SavedModel's folder"),
        ("--target trn1 --hbm-scratchpad-page-size 700", "SW_USAGE", "multiple of 512"),
        ("--target trn1 --hbm-scratchpad-page-size 4096", "SW_USAGE", "below 4096"),
        ("--target trn1 --verbose loud", "SW_USAGE", "critical"),
        ("--target trn1 --num-parallel-jobs=abc", "SW_USAGE", "a whole number, got 'abc'"),
        ("--target trn1 --num-parallel-jobs=0", "SW_USAGE", "1 to 64, got 0"),
        ("--target trn1 --execute-repetition x", "SW_USAGE", "a whole number"),
        ("--target trn1 --implicit-integer-downcast dot,all", "SW_USAGE", "comma list"),
        ("--target trn1 --logfile /no/such/folder/log", "SW_OUTPUT", "can be written"),
        ("--target trn1 --compiler-version-profile 3.0", "SW_USAGE", "2.1.0.76"),
        ("--target trn1 --compiler-version-profile new", "SW_USAGE", "a version like"),
        ("--target trn1 --compiler-version-profile 2.9.0.16 -O1", "SW_USAGE", "2.10.0.34"),
        ("--target trn1 --output", "SW_USAGE", "expected one argument"),
        ("m.hlo.pb --target trn1 --output g.neff", "SW_USAGE", "directory"),
    ],
)
def test_what_was_typed_wrong_is_a_usage_error(
    flags: str, code: str, named: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(folder / "m.hlo.pb", layers, ARGUMENTS)
    assert compile_line(f"shardwright compile m.hlo.pb {flags}") == 2
    err = capsys.readouterr().err
    assert f"[{code}]" in err and named in err


def test_a_missing_model_is_a_usage_error_and_a_damaged_one_a_compile_failure(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compile_line("shardwright compile absent.pb --target trn1") == 2
    assert "Exit code: 2" in " ".join(capsys.readouterr().err.split())
    for content, code in (
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "SW_MODEL_FORM"),
        (b"", "SW_MODEL_FORM"),
        (b"hello world", "SW_MODEL_FORM"),
        (b"HloModule broken\nENTRY { what }", "SW_HLO_PARSE"),
        (b"\n\x05hello\x12\xff", "SW_HLO_PARSE"),
        (b"module { func.func @main( }", "SW_STABLEHLO_PARSE"),
    ):
        (folder / "bad").write_bytes(content)
        assert compile_line("shardwright compile bad --target trn1") == 70
        err = capsys.readouterr().err
        assert f"error[{code}]" in err and "Exit code: 70" in " ".join(err.split())


def test_info_tells_a_reader_what_made_the_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(folder / "m.hlo.pb", layers, ARGUMENTS)
    flags = "--auto-cast all -O1 --compiler-version-profile 2.20.9961"
    assert compile_line(f"shardwright compile m.hlo.pb --target trn1n {flags}") == 0
    capsys.readouterr()
    assert compile_line("shardwright neff info file.neff") == 0
    out = capsys.readouterr().out
    for text in (
        "trn1n.32xlarge",
        "auto_cast = all",
        "optlevel = 1",
        "version_profile  2.20.9961",
        "graph_digest",
        "compiler ",
        "hlo proto",
        "arg1 f32[6, 6]",
        "out1 f32[3]",
    ):
        assert text in out


def test_several_models_are_several_files(folder: Path) -> None:
    for name in ("a.hlo.pb", "b.mlir"):
        write_model(folder / name, layers, ARGUMENTS)
    assert compile_line("shardwright compile a.hlo.pb b.mlir --target trn1 --output made") == 0
    assert sorted(p.name for p in (folder / "made").iterdir()) == ["a.neff", "b.neff"]


def test_the_file_depends_on_model_and_options_only(folder: Path) -> None:
    write_model(folder / "m.hlo.pb", layers, ARGUMENTS)
    line = "shardwright compile m.hlo.pb --target trn1 --output"
    for name in ("one", "two"):
        assert compile_line(f"{line} {name}.neff --logfile {name}.log") == 0
    assert (folder / "one.neff").read_bytes() == (folder / "two.neff").read_bytes()


def test_fast_loading_files_are_larger_and_hold_raw_sections(folder: Path) -> None:
    write_model(folder / "m.hlo.pb", layers, ARGUMENTS)
    line = "shardwright compile m.hlo.pb --target trn1 --output"
    assert compile_line(f"{line} small.neff") == 0
    assert compile_line(f"{line} fast.neff --enable-fast-loading-neuron-binaries") == 0
    small, fast = folder / "small.neff", folder / "fast.neff"
    assert fast.stat().st_size > small.stat().st_size
    np.testing.assert_array_equal(run_neff(small, ARGUMENTS)[0], run_neff(fast, ARGUMENTS)[0])


def test_save_temps_keeps_module_graphs_and_unit_graphs(folder: Path) -> None:
    write_model(folder / "m.hlo.pb", layers, ARGUMENTS)
    line = "shardwright compile m.hlo.pb --target trn1 --output g.neff --pipeline compile SaveTemps"
    assert compile_line(line) == 0
    kept = [p.relative_to(folder / "g.temps").as_posix() for p in folder.glob("g.temps/**/*.*")]
    assert {"README.txt", "00-captured.mlir", "01-imported.txt"} <= {*kept}
    assert any(name.endswith("-tiling.txt") and "functions/m.loop/" in name for name in kept)


def test_fast_context_switch_moves_constants_to_the_start_of_an_execution(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    w = RNG.normal(size=(256, 256)).astype(np.float32)
    x = np.zeros((8, 256), np.float32)
    write_model(folder / "m.hlo.pb", lambda x: x @ w, [x])
    np.savez(folder / "in.npz", arg0=x)
    times = []
    for flags in ("", "--enable-fast-context-switch"):
        assert compile_line(f"shardwright compile m.hlo.pb --target trn1 {flags}") == 0
        capsys.readouterr()
        run = "shardwright neff run file.neff --inputs in.npz --outputs out.npz --time"
        assert compile_line(run) == 0
        times.append(float(capsys.readouterr().err.split()[2]))
    rate = 16 * 17e9  # all DMA engines of a NeuronCore-v2
    assert times[1] - times[0] == pytest.approx(w.nbytes / rate, rel=1e-2)


@pytest.mark.parametrize("form", FORMS)
def test_donated_inputs_and_their_outputs_share_memory(
    form: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(state: Any, grads: Any) -> Any:
        return {"p": state["p"] - 0.1 * grads, "m": state["p"] * 0.9 + state["m"]}, grads.sum()

    rng = np.random.default_rng(5)
    state = {n: rng.normal(size=(40, 50)).astype(np.float32) for n in ("m", "p")}
    grads = rng.normal(size=(40, 50)).astype(np.float32)

    def flat(m: Any, p: Any, g: Any) -> Any:
        new, total = step({"m": m, "p": p}, g)
        return new["m"], new["p"], total

    arguments = [state["m"], state["p"], grads]
    write_model(folder / f"m.{form}", flat, arguments, donate=(0, 1))
    assert compile_line(f"shardwright compile m.{form} --target trn1") == 0
    info = info_of(folder / "file.neff", capsys)
    assert [row["name"] for row in info["outputs"]] == ["arg0", "arg1", "out2"]
    assert info["memory_bytes"]["io"] == 3 * grads.nbytes + 4
    for level in ("L0", "L1"):
        found = run_neff(folder / "file.neff", arguments, level)
        for a, b in zip(found, flat(*arguments), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_release_changes_the_numbers_of_the_same_command(folder: Path) -> None:
    x = RNG.normal(size=(32, 64)).astype(np.float32)
    write_model(folder / "m.hlo.pb", lambda x: x @ x.T, [x])
    errors = {}
    for version in ("2.21.18209", "2.22.12471", "own"):
        line = "neuronx-cc compile m.hlo.pb --target trn1 --compiler-version-profile"
        assert compile_line(f"{line} {version}") == 0
        (found,) = run_neff(folder / "file.neff", [x])
        errors[version] = float(np.abs(found - x @ x.T).max())
        assert meta_of(folder / "file.neff")["version_profile"] == version
    assert errors["2.21.18209"] > 1e-2  # matmul in bf16 by default
    assert errors["2.22.12471"] == errors["own"] < 1e-4


def found_in_cache(folder: Path) -> list[str]:
    """What the log says the cache had."""
    lines = (folder / "log-neuron-cc.txt").read_text().splitlines()
    return [line.partition(" INFO ")[2].split(",")[0] for line in lines if "from the cache" in line]


def test_a_file_that_was_compiled_before_is_taken_from_the_cache(folder: Path) -> None:
    write_model(folder / "m.mlir", layers, ARGUMENTS)
    line = "neuronx-cc compile m.mlir --target trn1 --cache_dir=kept"
    made = {}
    for words, hits in (("", 0), ("", 1), ("--retry_failed_compilation", 1), ("--no_cache", None)):
        assert compile_line(f"{line} {words}") == 0
        shown = [] if hits is None else [found_in_cache(folder)[0].partition(" of ")[0]]
        assert shown == ([] if hits is None else ["0" if not hits else shown[0]])
        assert hits != 1 or int(shown[0]) >= 1
        made[words, hits] = (folder / "file.neff").read_bytes()
    assert len(set(made.values())) == 1, "a stored function is the one that would be made"
    assert (folder / "kept").is_dir()
    assert compile_line(f"{line} --dump-dir stages") == 0 and not found_in_cache(folder)
    assert (folder / "stages").is_dir()


def test_functions_are_compiled_by_as_many_processes_as_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at a time make the file that one makes."""
    write_model(folder / "m.mlir", layers, ARGUMENTS)
    started, usual = list[int](), process_backend.AutoExecutor

    def noted(workers: int) -> process_backend.AutoExecutor:
        started.append(workers)
        return usual(workers)

    monkeypatch.setattr(process_backend, "AutoExecutor", noted)
    monkeypatch.setattr(through_cache, "num_cpus", lambda: 2)
    made = []
    for jobs in (1, 8):
        words = f"--cache_dir=kept{jobs} --num-parallel-jobs {jobs}"
        assert compile_line(f"neuronx-cc compile m.mlir --target trn1 {words}") == 0
        made.append((folder / "file.neff").read_bytes())
    assert started == [2] and made[0] == made[1]


def test_a_cache_that_is_no_place_is_a_usage_error(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(folder / "m.mlir", layers, ARGUMENTS)
    assert compile_line("neuronx-cc compile m.mlir --target trn1 --cache_dir ftp://x/y") == 2
    assert "--cache_dir requires a directory" in capsys.readouterr().err


def test_recorded_flags_are_told_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(folder / "m.mlir", layers, ARGUMENTS)
    flags = "--disable-dge --tensorizer-options=--x"
    assert compile_line(f"neuronx-cc compile m.mlir --target trn1 {flags}") == 0
    told = "--disable-dge, --tensorizer-options --x"
    text = f"WARNING: recorded in the file, without effect here: {told}\n"
    assert capsys.readouterr().err == text
