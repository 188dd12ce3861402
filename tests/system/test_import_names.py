"""A project whose modules are called like our folders runs: from the command and from a script of
its own, from an editable installation and from installed files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shardwright
from shardwright.orchestrator import api
from tests.support.cells import long_in_matrix

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    *("sharding", "compiler", "collectives", "orchestrator", "sim_cluster"),
    *("models", "tests", "config"),
)
KINDS = ("modules", "packages", "folders")
STEP = f"""
import jax, optax
import jax.numpy as jnp
from shardwright import TrainTask
{"".join(f"import {name}{chr(10)}" for name in NAMES)}
SGD = optax.sgd(0.1)


def loss_of(params, batch):
    return jnp.mean((batch["x"] @ params["w"]) ** 2)


def step(params, state, batch):
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, state = SGD.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, {{"loss": loss}}


def init(key):
    params = {{"w": jax.random.normal(key, (32, 32))}}
    return params, SGD.init(params)


def make():
    assert [m.MINE for m in ({", ".join(NAMES)})] == {list(NAMES)!r}
    return TrainTask(
        step=step, init=init, batch=lambda n: {{"x": jax.ShapeDtypeStruct((n, 32), jnp.float32)}}
    )
"""
JOB = """
[model]
entry = "step.py:make"
[mesh]
dp_shard = 2
[cluster]
target = "trn1.2xlarge"
[run]
tries = 0
"""
SCRIPT = f"""
import json, sys
import step
{"".join(f"import {name}{chr(10)}" for name in NAMES)}
from shardwright import TrainTask, plan

if __name__ == "__main__":
    found = plan("job.toml", cache__dir=sys.argv[1])
    named = [m.MINE for m in ({", ".join(NAMES)})]
    print(json.dumps([named, found.fits, found.step_time_s]))
"""


@pytest.fixture(params=long_in_matrix(KINDS, KINDS[1:]))
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A project with modules of our names, with packages, and with folders that are none."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in NAMES:
        text = f"MINE = {name!r}\n"
        if request.param == "modules":
            (folder / f"{name}.py").write_text(text)
        else:
            (folder / name).mkdir()
            (folder / name / "inner.py").write_text(text)
            if request.param == "packages":
                (folder / name / "__init__.py").write_text(text)
    own = STEP, SCRIPT
    if request.param == "folders":
        imports = {f"import {n}\n": f"import {n}.inner\nimport {n}\n" for n in NAMES}
        for line, inner in imports.items():
            own = tuple(text.replace(line, inner) for text in own)
        own = tuple(text.replace("m.MINE", "m.inner.MINE") for text in own)
    (folder / "step.py").write_text(own[0])
    (folder / "train.py").write_text(own[1])
    (folder / "job.toml").write_text(JOB)
    return folder


def answers(project: Path, environment: dict[str, str]) -> list[float]:
    """Step times of the command and of the script."""
    words = ["plan", "job.toml", "--json", "--fresh", "--set", f"cache.dir={project}/one"]
    found = []
    for command in (["-m", "shardwright", *words], ["train.py", str(project / "two")]):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    report, (named, fits, step_time_s) = found
    assert named == list(NAMES) and fits
    return [report["timing"]["step_time_s"], step_time_s]


def test_a_project_with_our_names_runs(project: Path) -> None:
    """As `pip install -e` has installed it."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    first, second = answers(project, environment)
    assert first == second > 0


@pytest.mark.parametrize("project", long_in_matrix(KINDS, KINDS[:1], KINDS[1:]), indirect=True)
def test_it_runs_beside_installed_files(project: Path, tmp_path: Path) -> None:
    """The wheel's files: below `shardwright`, and none of them a link."""
    shutil.copytree(ROOT / "shardwright", tmp_path / "site" / "shardwright")
    assert not any(path.is_symlink() for path in (tmp_path / "site").rglob("*"))
    first, second = answers(project, {**os.environ, "PYTHONPATH": str(tmp_path / "site")})
    assert first == second > 0


def test_public_names_are_those_of_the_api_and_nothing_heavy_is_loaded() -> None:
    code = (
        "import sys, shardwright; assert 'plan' in dir(shardwright);"
        "assert not {'jax', 'numpy', 'ray'} & set(sys.modules);"
        "print(all(hasattr(shardwright, name) for name in shardwright.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr
    assert not hasattr(shardwright, "nothing")
    assert all(getattr(shardwright, name) is getattr(api, name) for name in shardwright.__all__)
    made = {
        name
        for name, value in vars(api).items()
        if getattr(value, "__module__", "") == api.__name__
    }
    assert {name for name in made if name[0] != "_"} < set(shardwright.__all__)
