"""`parallel-compile`: a user's script leaves its graphs, which compile together."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.diagnostics import ExecutionError
from shardwright.compiler.neff.bundle import read_program
from shardwright.compiler.neff.reader import Container
from shardwright.orchestrator import api
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.service import executor
from tests.support.model_files import run_neff

SCRIPT = '''
"""Two steps, one of them for two sizes of batch, called several times."""
import sys
import jax
import jax.numpy as jnp
from shardwright.orchestrator.api import capture


@capture
@jax.jit
def train_step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * grad, loss


@capture(name="eval/loss")
def evaluate(w, x, key):
    return {"loss": jnp.sum(x @ w), "key": key}


w = jnp.ones((32, 32)) / 32
for size in (8, 8, 16, 16):
    w, loss = train_step(w, jnp.ones((size, 32)))
out = evaluate(w, jnp.ones((8, 32)), jax.random.key(3))
print("loss", float(loss), float(out["loss"]), jax.random.uniform(out["key"]).shape)
sys.exit(int(sys.argv[1]))
'''
FLAGS = "--target trn1"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))
    for name in ("NEURON_CC_FLAGS", "SHARDWRIGHT_GRAPHS_DIR", "NEURON_EXTRACT_GRAPHS_ONLY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def parallel(*words: str) -> int:
    return main(["parallel-compile", "--executor", "inline", "--cc-flags", FLAGS, *words])


def collect(code: str = "0", *words: str) -> int:
    return parallel(*words, sys.executable, "train.py", code)


def summary(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "graphs" / "compile.json").read_text())
    return found


COUNTS = ("total", "succeeded", "failed", "cached")


def test_collect_and_compile(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert collect() == 0
    told = capfd.readouterr()
    assert "loss 0.0 0.0 ()" in told.out, "nothing is executed: results are zeros"
    assert "3 graphs, 3 of them new" in told.err
    assert "3 graphs in " in told.out and "3 succeeded (0 cached), 0 failed" in told.out
    first = summary(folder)
    assert [first[name] for name in COUNTS] == [3, 3, 0, 0]

    check_values(first["graphs"], folder / "copy.neff")
    capfd.readouterr()
    assert parallel("--command", "compile", "--json") == 0
    again = json.loads(capfd.readouterr().out)
    assert [again[name] for name in COUNTS] == [3, 3, 0, 3]
    assert again == summary(folder)

    (folder / "graphs" / "mine").mkdir()
    assert parallel("--command", "clean") == 0
    assert os.listdir(folder / "graphs") == ["mine"]
    assert parallel("--command", "clear-locks") == 0
    assert "removed" in capfd.readouterr().out
    assert parallel("--command", "compile") == 2
    assert "SW_GRAPH" in capfd.readouterr().err


def test_the_flags_name_the_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As NEURON_CC_FLAGS does, which they beat; `--cache-dir` beats both."""
    assert collect("0", "--command", "collect") == 0
    monkeypatch.setenv("NEURON_CC_FLAGS", "--cache_dir=environment")

    def compiled(flags: str, *words: str) -> set[str]:
        line = ["parallel-compile", "--command", "compile", "--executor", "inline", *words]
        assert main([*line, "--cc-flags", f"--target trn1 {flags}"]) == 0
        places = ("cache", "environment", "flags", "given", "python")
        return {name for name in places if (folder / name / "compile").exists()}

    assert compiled("--cache_dir=unused --cache-dir flags") == {"flags"}
    assert summary(folder)["cached"] == 0
    assert compiled("--cache_dir flags", "--cache-dir", "given") == {"flags", "given"}
    api.compile_graphs("graphs", ["--target", "trn1", "--cache_dir=python"], run__progress="quiet")
    assert (folder / "python" / "compile").exists()
    assert compiled("") == {"flags", "given", "python", "environment"}
    assert not (folder / "unused").exists()

    words = ["parallel-compile", "--command", "clear-locks"]
    capsys.readouterr()
    assert main([*words, "--cc-flags=--cache_dir flags"]) == 0
    assert "locks of flags" in capsys.readouterr().out
    for flags, told in (
        ("--cache_dir=http://host", "SW_CACHE_URL]: --cache_dir of --cc-flags requires"),
        ("--cache_dir='open", "--cc-flags requires closed quotes"),
        ("model.hlo", "unrecognized arguments: model.hlo"),
    ):
        assert main([*words, f"--cc-flags={flags}"]) == 2
        assert told in capsys.readouterr().err


def check_values(graphs: list[dict[str, str]], copy: Path) -> None:
    """The step of 16 samples gives what jax gives."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - 0.1 * grad, loss

    given = [np.linspace(-1, 1, 1024, dtype="f4").reshape(32, 32), np.ones((16, 32), "f4")]
    neffs = [Path(row["neff"]) for row in graphs if row["name"] == "train_step"]
    (large,) = [p for p in neffs if (16, 32) in _shapes(p)]
    copy.write_bytes(large.read_bytes())  # what is beside a NEFF when it runs is no graph
    for found, wanted in zip(run_neff(copy, given), jax.jit(step)(*given), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-6)


def _shapes(neff: Path) -> set[tuple[int, ...]]:
    program = read_program(Container.open(neff))
    return {tuple(buffer.shape) for buffer in program.buffers}


def test_a_script_that_fails_stops_unless_told_otherwise(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert collect("3") == 70
    err = capfd.readouterr().err
    assert "SW_SCRIPT" in err and "exit code 3" in err and "train.py 3" in err
    assert not (folder / "graphs" / "compile.json").exists()
    monkeypatch.setenv("NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE", "1")
    assert collect("3", "--command", "collect") == 0
    assert "0 of them new" in capfd.readouterr().err
    assert parallel("no-such-command") == 2
    assert parallel("--command", "collect") == 2


def test_a_graph_that_is_refused_leaves_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEURON_EXTRACT_GRAPHS_ONLY", "1")
    x = jnp.ones((8, 8))
    good = api.capture(jax.jit(lambda x: jnp.tanh(x @ x)), name="good")
    bad = api.capture(jax.jit(lambda x: jnp.fft.fft(x).real), name="bad")
    spoiled = api.capture(jax.jit(lambda x: x + 1), name="spoiled")
    for step in (good, bad, spoiled):
        assert not np.asarray(step(x)).any()
    (artifact,) = folder.glob("graphs/spoiled-*/graph.stablehlo")
    artifact.write_bytes(artifact.read_bytes()[:-1] + b"?")
    found = api.compile_graphs(folder / "graphs", FLAGS.split(), run__executor="inline")
    assert (found.total, found.succeeded, found.failed, found.exit_code) == (3, 1, 2, 70)
    rows = {row.name: row for row in found.graphs}
    assert rows["bad"].error is not None and rows["bad"].error.code.startswith("NCC_")
    assert rows["spoiled"].error is not None and rows["spoiled"].error.code == "SW_GRAPH"
    assert Path(rows["good"].neff).exists() and not rows["bad"].neff
    log = (Path(rows["bad"].folder) / "log-neuron-cc.txt").read_text()
    assert rows["bad"].error.code in log


def test_a_graph_that_was_lost_is_compiled_again_and_a_refused_one_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Workers die under every unit's first try; a refusal is the same at every one."""
    monkeypatch.setenv("NEURON_EXTRACT_GRAPHS_ONLY", "1")
    x = jnp.ones((8, 8))
    api.capture(jax.jit(lambda x: jnp.tanh(x @ x) + 2), name="good")(x)
    api.capture(jax.jit(lambda x: jnp.fft.fft(x).real), name="bad")(x)
    whole, tried = executor.run_unit, list[bytes]()

    def dies_once(kind: str, payload: bytes) -> bytes:
        tried.append(payload)
        if tried.count(payload) > 1:
            return whole(kind, payload)
        raise ExecutionError("SW_UNIT_LOST", "its worker died")

    monkeypatch.setattr(executor, "run_unit", dies_once)
    monkeypatch.setenv("NEURON_PARALLEL_COMPILE_MAX_RETRIES", "0")
    monkeypatch.delenv("NEURON_EXTRACT_GRAPHS_ONLY")
    assert parallel("--command", "compile") == 70
    assert summary(folder)["succeeded"] == 0
    tried.clear()
    monkeypatch.setenv("NEURON_PARALLEL_COMPILE_MAX_RETRIES", "2")
    assert parallel("--command", "compile") == 70
    found = summary(folder)
    rows = {row["name"]: row for row in found["graphs"]}  # type: ignore[attr-defined]
    assert (found["succeeded"], rows["good"]["retries"], rows["bad"]["retries"]) == (1, 1, 0)


def test_a_hooked_step_inside_another_is_a_part_of_its_graph(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_EXTRACT_GRAPHS_ONLY", "1")
    inner = api.capture(jax.jit(lambda x: jnp.tanh(x)), name="inner")
    outer = api.capture(jax.jit(lambda x: inner(x @ x)), name="outer")
    outer(jnp.ones((8, 8)))
    (graph,) = (folder / "graphs").iterdir()
    assert graph.name.startswith("outer-")
    found = api.compile_graphs(folder / "graphs", FLAGS.split(), run__executor="inline")
    given = np.linspace(-1, 1, 64, dtype="f4").reshape(8, 8)
    (out,) = run_neff(Path(found.graphs[0].neff), [given])
    np.testing.assert_allclose(out, np.tanh(given @ given), rtol=2e-5, atol=1e-6)


def test_a_hooked_step_is_the_step(folder: Path) -> None:
    @api.capture
    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        """Doubles."""
        return 2 * x

    assert float(step(jnp.float32(3))) == 6
    assert (step.__name__, step.__doc__) == ("step", "Doubles.")
    assert step.lower(jnp.float32(3)).out_info.shape == ()
    assert not (folder / "graphs").exists()
