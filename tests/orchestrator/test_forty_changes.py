"""Forty changes around a step: twenty have another answer, twenty the stored one, in a notebook's
cells, in one process, and from command to command.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pytest

from shardwright.orchestrator import api

ROOT = Path(__file__).resolve().parents[2]
PARTS = """
SCALE = 1.0


def squared(x):
    return (SCALE * x) ** 2


def unused(x):
    return x
"""
STEP = """
import functools
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import {parts} as parts

from shardwright.compiler.frontend.task import TrainTask

WIDTH = 64
RATE = 0.1
LAYERS = [64]
CONFIG = {{"bias": False}}
DTYPE = jnp.float32
UNUSED = 1
FOLDER = Path({folder!r})


class Sizes:
    batch = 64


def activation(x):
    return x


def project(x, w, power=1):
    return x @ w * power


def decayed(rate, by):
    return rate * by


schedule = functools.partial(decayed, by=1.0)


def make():
    width = WIDTH
    depth = json.loads((FOLDER / "sizes.json").read_text())["depth"]
    scale = float(os.environ.get("CHANGES_SCALE", 1))

    def loss(params, batch):
        h = batch["x"]
        for _ in range(depth):
            h = activation(project(h, params["w"]))
        if CONFIG["bias"]:
            h = h + 1
        kept = jax.random.bernoulli(jax.random.key(0), 0.5, (width,))
        return jnp.mean(parts.squared(h * kept * scale)) * len(LAYERS)

    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        rate = schedule(RATE)
        new = jax.tree.map(lambda p, g: p - rate * g, params, grads)
        return new, opt_state, {{"loss": value}}

    return TrainTask(
        step=step,
        state=({{"w": jax.ShapeDtypeStruct((width, width), DTYPE)}}, {{}}),
        batch=lambda n: {{"x": jax.ShapeDtypeStruct((n, width), DTYPE)}},
    )
"""
JOB = """
[model]
entry = "{entry}"
[cluster]
target = "trn1.2xlarge"
[mesh]
dp_shard = 2
[strategy]
global_batch = 8
[run]
tries = 0
executor = "inline"
[cache]
dir = "{folder}/cache"
"""


@dataclass
class World:
    """A job of the step, its files and what a process knows of them."""

    folder: Path
    module: str
    parts: str

    @property
    def job(self) -> Path:
        return self.folder / "job.toml"

    def text(self) -> str:
        return STEP.format(parts=self.parts, folder=str(self.folder))

    def write(self, entry: str) -> None:
        (self.folder / f"{self.parts}.py").write_text(PARTS)
        (self.folder / f"{self.module}.py").write_text(self.text())
        (self.folder / "sizes.json").write_text('{"depth": 1, "name": "small"}')
        (self.folder / "beside.py").write_text("A = 1\n")
        self.job.write_text(JOB.format(entry=entry, folder=self.folder))


Undo = Callable[[], object]


def edited(path: Path, old: str, new: str) -> Undo:
    """A file with one place changed; undone with its old time of change."""
    before, times = path.read_text(), path.stat()
    assert before.count(old) == 1, (path, old)
    path.write_text(before.replace(old, new))

    def undo() -> None:
        path.write_text(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    return undo


def variable(name: str, value: str | None) -> Undo:
    before = os.environ.get(name)
    patch = pytest.MonkeyPatch()
    patch.setenv(name, value) if value is not None else patch.delenv(name, raising=False)
    assert os.environ.get(name) != before
    return patch.undo


def setting(name: str, value: object) -> Undo:
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    return lambda: jax.config.update(name, before)


JOB_CHANGES = {
    "mesh": ("dp_shard = 2", "dp_replicate = 2"),
    "global batch": ("global_batch = 8", "global_batch = 16"),
    "machine": ("trn1.2xlarge", "inf2.xlarge"),
    "optimization": ("[run]", "[compiler]\noptlevel = 1\n[run]"),
    "cast": ("[run]", '[compiler]\nauto_cast = "all"\nauto_cast_type = "bf16"\n[run]'),
    "strategy": ("global_batch = 8", 'global_batch = 8\nname = "llm-training"'),
    "micro batch": ("global_batch = 8", "global_batch = 8\nmicro_batch = 2"),
    "when gradients are reduced": (
        "global_batch = 8",
        'global_batch = 8\nreduce_gradients = "last"',
    ),
}
"""Lines of the job that have another answer."""
JOB_WORDS = {
    "comment": ("[mesh]", "# of two cores\n[mesh]"),
    "order of sections": (
        "[mesh]\ndp_shard = 2\n[strategy]\nglobal_batch = 8",
        "[strategy]\nglobal_batch = 8\n[mesh]\ndp_shard = 2",
    ),
    "default that is written": ("global_batch = 8", 'global_batch = 8\nname = "fsdp"'),
    "spaces": ("dp_shard = 2", "dp_shard   =   2"),
    "steps of a run": ("tries = 0", "tries = 0\nsteps = 7"),
}
"""Lines that have the stored one."""

# Changes of files and environment, seen by the next command
FILE_CHANGES = {
    "constant": ("WIDTH = 64", "WIDTH = 96"),
    "rate": ("RATE = 0.1", "RATE = 0.2"),
    "list": ("LAYERS = [64]", "LAYERS = [64, 64]"),
    "dict": ('"bias": False', '"bias": True'),
    "type": ("DTYPE = jnp.float32", "DTYPE = jnp.bfloat16"),
    "function": ("    return x\n\n\ndef project", "    return jnp.tanh(x)\n\n\ndef project"),
    "default argument": ("power=1", "power=2"),
    "partial": ("by=1.0", "by=0.5"),
}


def command_changes(world: World) -> Iterator[tuple[str, bool, Callable[[], Undo]]]:
    """(name, whether the answer is another, what makes it)."""
    model, parts = world.folder / f"{world.module}.py", world.folder / f"{world.parts}.py"
    for name, pair in JOB_CHANGES.items():
        yield f"job: {name}", True, lambda pair=pair: edited(world.job, *pair)
    for name, pair in FILE_CHANGES.items():
        yield f"module: {name}", True, lambda pair=pair: edited(model, *pair)
    yield "imported module", True, lambda: edited(parts, "SCALE = 1.0", "SCALE = 2.0")
    sizes = world.folder / "sizes.json"
    yield "data that is read", True, lambda: edited(sizes, '"depth": 1', '"depth": 2')
    yield "variable that is read", True, lambda: variable("CHANGES_SCALE", "2")
    yield "JAX's variable", True, lambda: variable("JAX_DEFAULT_PRNG_IMPL", "rbg")

    for name, pair in JOB_WORDS.items():
        yield f"job: {name}", False, lambda pair=pair: edited(world.job, *pair)
    yield "file beside", False, lambda: edited(world.folder / "beside.py", "A = 1", "A = 2")
    for name, value in (
        ("UNRELATED", "1"),
        ("COLUMNS", "100"),
        ("LC_ALL", "C.UTF-8"),
        ("TZ", "Asia/Tokyo"),
        ("PYTHONHASHSEED", "7"),
        ("NO_COLOR", "1"),
        ("TERM", "dumb"),
        ("OMP_NUM_THREADS", "2"),
    ):
        yield f"variable {name}", False, lambda name=name, v=value: variable(name, v)
    yield "times of files", False, lambda: touched(model, parts, sizes)
    yield "new file", False, lambda: created(world.folder / "more.py")
    yield "new folder", False, lambda: created(world.folder / "data" / "x.json")
    yield "no compiled modules", False, lambda: lambda: None
    yield "another folder to start in", False, lambda: moved_to(world.folder)
    yield "a copy of the job", False, lambda: created(world.folder / "copy.toml")


def touched(*paths: Path) -> Undo:
    for path in paths:
        os.utime(path, (1_000_000_000, 1_000_000_000))
    return lambda: None


def created(path: Path) -> Undo:
    path.parent.mkdir(exist_ok=True)
    path.write_text("1\n")
    return path.unlink


def moved_to(folder: Path) -> Undo:
    before = Path.cwd()
    os.chdir(folder)
    return lambda: os.chdir(before)


# Changes inside a process: its variables, settings, and cells
# that keep every line in its place: where an operation comes from is part of the answer
NEW_CELL = {
    "comment in a cell": ("    width = WIDTH\n", "    width = WIDTH  # of all matrices\n"),
    "name in a cell": ("    width = WIDTH\n    depth", "    depth = width = WIDTH\n    depth"),
    "docstring": ("    return x\n\n\ndef project", '    "As it is."; return x\n\n\ndef project'),
    "equal expression": ("    return x @ w * power", "    return (x @ w) * power"),
    "unused variable": ("UNUSED = 1", "UNUSED = 2"),
    "unused function": ("UNUSED = 1", "UNUSED = lambda x: x"),
    "equal constant": ("WIDTH = 64", "WIDTH = 8 * 8"),
}


def held(where: Any, key: Any, value: object) -> Undo:
    before = where[key]
    where[key] = value
    return lambda: where.__setitem__(key, before)


def assigned(owner: Any, name: str, value: object) -> Undo:
    patch = pytest.MonkeyPatch()
    patch.setattr(owner, name, value)
    return patch.undo


def process_changes(
    world: World, names: dict[str, Any], run: Callable[[str], object], settings: dict[str, Any]
) -> Iterator[tuple[str, bool, Callable[[], Undo]]]:
    """`names` are the step's globals, `run` a cell in them, `settings` go to each plan."""

    def cell(old: str, new: str) -> Undo:
        text = world.text()
        assert text.count(old) >= 1, old
        run(text.replace(old, new, 1))
        return lambda: run(text)

    def given(name: str, value: object) -> Undo:
        settings[name] = value
        return lambda: settings.pop(name)

    parts = names["parts"].__dict__
    yield "variable", True, lambda: held(names, "WIDTH", 112)
    yield "rate", True, lambda: held(names, "RATE", 0.7)
    yield "list", True, lambda: held(names, "LAYERS", [1, 2, 3])
    yield "dict", True, lambda: held(names["CONFIG"], "bias", True)
    yield "type", True, lambda: held(names, "DTYPE", jax.numpy.bfloat16)
    yield "function", True, lambda: held(names, "activation", jax.numpy.sin)
    yield "lambda", True, lambda: held(names, "schedule", lambda rate: rate / 2)
    yield "of another module", True, lambda: held(parts, "SCALE", 3.0)
    yield "function of another", True, lambda: held(parts, "squared", abs)
    for name in ("constant", "rate", "list", "function"):
        yield f"cell: {name}", True, lambda pair=FILE_CHANGES[name]: cell(*pair)
    yield "cell: default", True, lambda: cell("power=1", "power=3")
    yield "variable that is read", True, lambda: variable("CHANGES_SCALE", "2")
    sizes = world.folder / "sizes.json"
    yield "data that is read", True, lambda: edited(sizes, '"depth": 1', '"depth": 2')
    yield "random numbers", True, lambda: setting("jax_default_prng_impl", "rbg")
    yield "partitionable", True, lambda: setting("jax_threefry_partitionable", False)
    yield "setting", True, lambda: given("compiler__optlevel", 1)
    yield "another setting", True, lambda: given("strategy__micro_batch", 2)

    for name, pair in NEW_CELL.items():
        yield name, False, lambda pair=pair: cell(*pair)
    yield "class nobody asks", False, lambda: assigned(names["Sizes"], "batch", 3)
    yield "unused", False, lambda: held(names, "UNUSED", 5)
    yield "equal variable", False, lambda: held(names, "WIDTH", int("64"))
    yield "equal list", False, lambda: held(names, "LAYERS", [65])
    yield "function nobody calls", False, lambda: held(parts, "unused", abs)
    yield "unrelated variable", False, lambda: variable("UNRELATED", "1")
    words = '"name": "small"', '"name": "tiny"'
    yield "what data say else", False, lambda: edited(sizes, *words)
    yield "new file", False, lambda: created(world.folder / "new.json")
    yield "folder", False, lambda: moved_to(world.folder)
    yield "no change", False, lambda: lambda: None
    yield "default that is said", False, lambda: given("strategy__name", "fsdp")
    yield "spaces of the job", False, lambda: edited(world.job, "dp_shard = 2", "dp_shard =  2")
    yield "caches of jax", False, lambda: jax.clear_caches() or (lambda: None)


def is_stored(report: Any) -> bool:
    return "cached plan" in report["provenance"]["stages_s"]


def check(
    changes: Iterator[tuple[str, bool, Callable[[], Undo]]], ask: Callable[[], Any]
) -> dict[str, str]:
    """What was wrong, by change."""
    first, wrong, seen = ask(), {}, [0, 0]
    assert not is_stored(first)
    assert is_stored(ask())
    for name, other, make in changes:
        undo = make()
        try:
            now = ask()
        finally:
            undo()
        seen[other] += 1
        if other and is_stored(now):
            wrong[name] = "stale"
        if not other and not is_stored(now):
            wrong[name] = "computed for nothing"
        if not is_stored(ask()):
            wrong[f"{name}, undone"] = "computed for nothing"
    assert seen == [20, 20]
    return wrong


@contextlib.contextmanager
def importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


@pytest.mark.matrix
def test_from_command_to_command(tmp_path: Path) -> None:
    world = World(tmp_path, "step_of_commands", "parts_of_commands")
    world.write("step_of_commands:make")

    def ask() -> Any:
        words = [sys.executable, "-m", "shardwright", "plan", str(world.job), "--json"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
        return json.loads(done.stdout)

    assert check(command_changes(world), ask) == {}


@pytest.mark.exhaustive
def test_in_one_process(tmp_path: Path) -> None:
    world = World(tmp_path, "step_of_process", "parts_of_process")
    world.write("step_of_process:make")
    with importable(tmp_path):
        module, settings = importlib.import_module(world.module), dict[str, Any]()

        def run(text: str) -> None:
            path = tmp_path / f"{world.module}.py"
            path.write_text(text)
            os.utime(path, (run.time, run.time))
            run.time += 10
            importlib.reload(module)

        run.time = 1_000_000_000
        changes = process_changes(world, module.__dict__, run, settings)
        assert check(changes, lambda: api.plan(world.job, **settings).data) == {}


@pytest.mark.matrix
def test_in_the_cells_of_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, "step_of_cells", "parts_of_cells")
    world.write("__main__:make")
    main, settings = sys.modules["__main__"], dict[str, Any]()
    names: dict[str, Any] = {"__name__": "__main__"}

    def run(text: str) -> None:
        # As IPython names cells: by process and text.
        file = f"/tmp/ipykernel_{os.getpid()}/{zlib.crc32(text.encode())}.py"
        exec(compile(text, file, "exec"), names)
        monkeypatch.setattr(main, "make", names["make"], raising=False)

    with importable(tmp_path):
        run(world.text())
        changes = process_changes(world, names, run, settings)
        assert check(changes, lambda: api.plan(world.job, **settings).data) == {}
