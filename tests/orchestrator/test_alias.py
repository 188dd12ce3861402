"""The vendor's commands by their names: what a script that calls them gets."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.orchestrator.cli import main
from tests.support.model_files import meta_of, write_model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["alias", "bin"]) == 0
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True)


def test_neuronx_cc_compiles(folder: Path) -> None:
    write_model(folder / "m.hlo.pb", jnp.tanh, [np.zeros((4, 6), np.float32)])
    line = "neuronx-cc --target=trn1 compile m.hlo.pb --framework XLA --output g.neff"
    done = run(*shlex.split(line))
    assert done.returncode == 0 and done.stdout.endswith("Compiler status PASS\n"), done.stderr
    assert meta_of(folder / "g.neff")["source_form"] == "hlo proto"


def test_what_neuronx_cc_does_not_have_is_no_verb_of_it(folder: Path) -> None:
    done = run("neuronx-cc", "plan", "--model", "llama2-7b")
    assert (done.returncode, done.stdout) == (2, "") and "list-operators" in done.stderr


def test_neuron_parallel_compile_is_parallel_compile(folder: Path) -> None:
    """Of another Python, which prints what it is asked."""
    script = folder / "bin" / "neuron_parallel_compile"
    script.write_text(script.read_text().replace(sys.executable, "echo"))
    done = run("neuron_parallel_compile", "--command", "collect", "python", "a b.py")
    assert done.stdout == "-m shardwright parallel-compile --command collect python a b.py\n"


def test_tools_are_their_verbs_and_withdrawn_ones_say_so(folder: Path) -> None:
    done = run("neuron-ls", "--target", "inf1", "--json-output")
    assert done.returncode == 0 and '"nc_count": 4' in done.stdout, done.stderr
    done = run("neuron-gatherinfo", "-i", "-o", "/tmp")
    assert done.returncode == 2 and "SW_WITHDRAWN" in done.stderr


def test_it_is_told_how_a_shell_finds_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["alias", str(tmp_path / "here")]) == 0
    wrote, export = capsys.readouterr().out.splitlines()
    assert wrote.startswith("wrote neuronx-cc, neuron_parallel_compile, nccom-test, neuron-ls, ")
    assert wrote.endswith(f" to {tmp_path / 'here'}")
    shell = f"{export}; command -v neuronx-cc"
    assert run("sh", "-c", shell).stdout == f"{tmp_path}/here/neuronx-cc\n"


def test_a_folder_that_cannot_be_made_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert main(["alias", str(tmp_path / "file" / "bin")]) == 2
