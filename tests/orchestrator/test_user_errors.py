"""Whatever the user's code raises, and whatever we do, ends in one coded message, never in a
traceback."""

from __future__ import annotations

import json
import pickle
import tomllib
from pathlib import Path

import pytest

from shardwright.compiler.diagnostics import InternalError, UsageError
from shardwright.compiler.frontend.user_code import EXTRAS, told
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.whatif import advised

ROOT = Path(__file__).resolve().parents[2]
RAISING = {
    "unknown_package": ("import nowhere_to_be_found\n", "SW_NEEDS_PACKAGE", 1),
    "inside": ("def make():\n    return {}['a']\n", "SW_TASK_RAISED", 2),
    "syntax": ("\ndef make(:\n", "SW_TASK_RAISED", 2),
    "leaves": ("import sys\nsys.exit(3)\n", "SW_TASK_RAISED", 2),
    "imported": ("import json\njson.loads('{')\n", "SW_TASK_RAISED", 2),
}


@pytest.mark.parametrize("name", RAISING)
def test_what_a_model_file_raises_is_told_at_its_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, code, line = RAISING[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "job.toml").write_text(f'[model]\nentry = "{name}:make"\n[run]\ntries = 0\n')
    assert main(["plan", "job.toml", "--executor", "inline"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"{name}.py:{line}: error[{code}]: "), shown
    assert "Traceback" not in shown


STEP = """
import jax, jax.numpy as jnp
from shardwright.compiler.frontend.task import TrainTask

def step(params, batch):
    turns = jnp.array([1 + 2j, 3j], dtype=jnp.complex64)
    return params, jnp.mean((batch @ params) ** 2) + jnp.abs(jnp.sum(turns))  # line 7

def make():
    sizes = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    batch = lambda n: jax.ShapeDtypeStruct((n, 8), jnp.float32)
    return TrainTask(step=step, batch=batch, state=(sizes,), state_names=("params",))
"""


def test_a_complex_constant_is_refused_where_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "turning.py").write_text(STEP)
    (tmp_path / "job.toml").write_text('[model]\nentry = "turning:make"\n[run]\ntries = 0\n')
    assert main(["plan", "job.toml", "--executor", "inline"]) == 70
    assert capsys.readouterr().err.startswith("turning.py:7: error[NCC_EVRF004]: ")


@pytest.fixture
def defect(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(advised, "with_tries", fails)


@pytest.mark.usefixtures("defect")
def test_a_defect_is_one_message_and_its_traceback_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "--model", "llama-tiny"]
    assert main(words) == 70
    shown = capsys.readouterr().err
    assert "error[SW_INTERNAL]: KeyError: 'a defect'" in shown and "Traceback" not in shown
    assert "shardwright --debug VERB" in shown
    assert main([*words, "--json"]) == 70
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "SW_INTERNAL"
    assert main(["--debug", *words]) == 70
    shown = capsys.readouterr().err
    assert "Traceback" in shown and "error[SW_INTERNAL]" in shown


def test_a_missing_package_is_named_with_the_extra_that_brings_it() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package, extra in EXTRAS.items():
        named = extras["optional-dependencies"][extra]
        brought = {"keras": "tensorflow"}.get(package, package)  # one requires the other
        assert any(text.startswith(brought) for text in named), package
    error = told(ModuleNotFoundError("No module named 'torch'", name="torch.nn"))
    assert isinstance(error, UsageError) and error.code == "SW_NEEDS_PACKAGE"
    assert "pip install -e '.[torch]'" in error.diagnostic.hint


def test_no_text_of_ours_installs_our_name_from_an_index() -> None:
    places = ("collectives", "compiler", "sharding", "sim_cluster", "orchestrator")
    files = [f for place in (*places, "docs", "examples") for f in (ROOT / place).rglob("*.*")]
    texts = {f: f.read_text() for f in files if f.suffix in (".py", ".md", ".toml")}
    wrong = [f for f, text in texts.items() if "shardwright[" in text]
    wrong += [f for f, text in texts.items() if "pip install shardwright" in text]
    assert not wrong


def test_a_traceback_crosses_processes() -> None:
    error = InternalError.of(KeyError("a"), "the traceback")
    again = pickle.loads(pickle.dumps(error))
    assert again.__notes__ == ["the traceback"] and again.diagnostic == error.diagnostic
