"""Programs that TensorFlow traced, kept in tests/fixtures/tensorflow_models: read, computed and
trained without it, with the values of its own step."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

from shardwright.compiler.diagnostics import ImportRuleError, UsageError
from shardwright.compiler.frontend.capture import artifact_of
from shardwright.compiler.frontend.detect import import_file
from shardwright.compiler.frontend.graphs.types import narrowed
from shardwright.compiler.frontend.reference import batch_leaves, initial_state, task_batches
from shardwright.compiler.frontend.stablehlo import import_module
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.frontend.tensorflow import training
from shardwright.compiler.frontend.tensorflow.asking import Asked, Tracer
from shardwright.compiler.frontend.tensorflow.philox import philox
from shardwright.compiler.frontend.tensorflow.places import place_of, with_places
from shardwright.compiler.frontend.tensorflow.program import UPDATE, Program
from shardwright.compiler.frontend.tensorflow.start import MAGIC, imports_it, split_name
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.passes.integers import downcasts
from shardwright.compiler.passes.pipeline import step_passes
from shardwright.compiler.rewriting.driver import run
from shardwright.orchestrator.cli import main
from shardwright.sharding.partition.mesh import make_mesh
from tests.fixtures.tensorflow_models import MODELS, SAMPLES, stored
from tests.support.compiled import run_levels
from tests.support.reference_ranks import ReferenceRanks
from tests.support.road import fsdp_plan, split_batch
from tests.test_error_triggers import InProcess

CORES, BOUND = 32, 1e-5


@cache
def content(name: str) -> bytes:
    return stored(name).path.read_bytes()


class Kept(Tracer):
    """Answers with what is kept, and traces nothing."""

    def traced(self, asked: Asked) -> bytes:
        assert asked.samples in (0, SAMPLES) and asked.training
        return content(Path(asked.model).stem)


@pytest.fixture(autouse=True)
def _read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "Reader", InProcess)


def task(name: str) -> TrainTask:
    return training.train_task(f"{name}.py", "", optax.sgd(1e-2), "", Kept())


def check_equal(found: Any, wanted: np.ndarray, of: str) -> None:
    """Within the bound of the largest value, or of 1: a bias in front of a norm has none."""
    bound = BOUND * max(1.0, float(np.abs(wanted).max(initial=0)))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=bound, err_msg=of)


@pytest.mark.parametrize("name", MODELS)
def test_values_of_a_step(name: str) -> None:
    program, kept = Program.read(content(name)), stored(name)
    graph, module = import_file(content(name))
    assert module.form == "tensorflow"
    given = {**program.values, **program.example}
    arrays = [narrowed(np.asarray(given[argument])) for argument in module.arguments]
    found = dict(zip(module.results, evaluate(graph, arrays), strict=True))
    assert abs(float(found.pop("loss")) - kept.loss) < BOUND
    assert len(found) == len(program.of(UPDATE)) > 4
    for key, value in found.items():
        of = key.removesuffix("_new")
        check_equal(value, kept.variables[of].astype(value.dtype), of)


def test_instructions_have_the_lines_of_the_model() -> None:
    graph, _ = import_file(content("convnet"))
    files = {op.loc.file for op in graph.ops if op.loc.line}
    assert "tests/fixtures/tensorflow_models.py" in files
    assert not [file for file in files if "site-packages" in file or file.startswith("/")]
    assert any("conv2d" in op.loc.scope for op in graph.ops)


def test_what_variables_are_follows_from_the_loss() -> None:
    made = task("recurrent")
    assert made.state_names == ("params", "opt_state") and made.samples == SAMPLES
    roles = {path: role for path, role in made.roles.items() if path.startswith("params/")}
    assert set(roles.values()) == {"parameter"} and len(roles) == 8
    others = {path for path in made.roles if path not in roles}
    assert {"opt_state/adam/iteration", "opt_state/adam/learning_rate"} <= others
    statistics = {path for path in task("convnet").roles if "moving" in path}
    assert len(statistics) == 2 and all(path.startswith("opt_state/") for path in statistics)


@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
def test_a_step_on_thirty_two_cores(name: str) -> None:
    """What TensorFlow's own step has, of weights that lie in 32 parts (FSDP)."""
    made, kept = task(name), stored(name)
    plan = fsdp_plan(made, make_mesh({"dp_shard": CORES}), 1).step
    ranks = ReferenceRanks(plan, initial_state(made, 0))
    batch = next(task_batches(made, 0, CORES))
    ranks.run_step(split_batch(batch_leaves(batch), CORES))
    assert abs(float(ranks.gather("metrics/loss")) - kept.loss) < BOUND
    for path in made.roles:
        wanted = kept.variables[path.partition("/")[2]]
        found = ranks.gather(path)
        check_equal(found, wanted.astype(found.dtype), path)


def test_a_batch_is_the_example_again_and_again() -> None:
    made = task("transformer")
    assert made.batches is not None
    batches = made.batches(0, SAMPLES, None)
    first, second = next(batches), next(batches)
    assert first["x"].shape == (SAMPLES, 6) and np.array_equal(first["x"], second["x"])


def test_a_step_of_so_many_samples_takes_no_others() -> None:
    class Other(Kept):
        def traced(self, asked: Asked) -> bytes:
            return content("convnet")

    made = training.train_task("convnet.py", "", optax.sgd(1e-2), "", Other())
    with pytest.raises(UsageError, match="SW_BATCH"):
        made.batch(8)


@pytest.mark.parametrize("part", [0, 1, 40, 4000])
def test_damaged_programs_are_refused(part: int) -> None:
    data = MAGIC + content("convnet")[len(MAGIC) :][:part]
    with pytest.raises(ImportRuleError, match="SW_TF_MODEL"):
        import_file(data)


def test_only_places_are_written_anew() -> None:
    """Fields by hand: a module with a name and a computation of one instruction, whose metadata
    has an operator, a file and a line; aliases of buffers are left out."""

    def field(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2, len(data)]) + data

    def module(metadata: bytes, aliases: bytes = b"") -> bytes:
        instruction = field(1, b"add.1") + field(7, metadata) + b"\x40\x07"
        return field(1, b"main") + field(3, field(2, instruction)) + aliases

    name = field(1, b"AddV2") + field(2, b"Call/dense/add;other")
    before = name + field(3, b"ops.py") + b"\x20\x85\x09"
    after = name + field(3, b"model.py") + b"\x20\x07"
    found = with_places(module(before, field(8, b"alias")), {"dense/add": ("model.py", 7)})
    assert found == module(after)
    assert with_places(module(before), {}) == module(name)
    assert place_of("unknown/add", {"dense/add": ("model.py", 7)}) is None


def test_philox_is_that_of_salmon_and_others() -> None:
    """Known answers of Philox-4x32-10: `kat_vectors` of Random123."""
    import jax

    full, pi = 2**64 - 1, (0x299F31D0A4093822, 0x85A308D3243F6A88, 0x0370734413198A2E)
    answers = {
        (0, 0, 0): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        (full, full, full): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        pi: (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    }
    with jax.enable_x64(True):
        for state, wanted in answers.items():
            after, found = philox(np.array(state, np.uint64), (4,))
            assert tuple(map(int, found)) == wanted
            count = (state[2] << 64 | state[1]) + 1 & 2**128 - 1
            assert tuple(map(int, after)) == (state[0], count & full, count >> 64)


def test_philox_on_a_core_of_32_bits() -> None:
    """Of a key that is packed into 64 bits, as TensorFlow's are: every round's words come out of
    products of 64 bits, at both levels as on the host."""
    import jax
    import jax.numpy as jnp

    def draw(words: Any) -> Any:
        wide = words.astype(jnp.uint64)
        key = wide[0] * np.uint64(0xD2511F53) ^ wide[1] << np.uint64(32)
        after, found = philox(jnp.stack([key, wide[2], key + wide[3]]), (10,))
        return found, (after >> np.uint64(32)).astype(jnp.uint32), after.astype(jnp.uint32)

    words = np.random.default_rng(0).integers(2**31, 2**32, 4).astype(np.uint32)
    with jax.enable_x64(True):
        graph = import_module(artifact_of(jax.jit(draw).trace(words)))
        wanted = [np.asarray(x) for x in jax.jit(draw)(words)]
    made = run(graph, step_passes())
    assert downcasts(graph) and not downcasts(made)
    for found in run_levels(made, [words]):
        for have, want in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(have, want)


@pytest.mark.matrix
def test_a_step_that_drops_on_one_core() -> None:
    """Instructions and kernels drop what TensorFlow does."""
    program, kept = Program.read(content("dropped")), stored("dropped")
    graph, module = import_file(content("dropped"))
    given = {**program.values, **program.example}
    arrays = [narrowed(np.asarray(given[argument])) for argument in module.arguments]
    for level in run_levels(run(graph, step_passes()), arrays):
        found = dict(zip(module.results, level, strict=True))
        assert abs(float(found.pop("loss")) - kept.loss) < BOUND
        for key, value in found.items():
            of = key.removesuffix("_new")
            check_equal(value, kept.variables[of].astype(value.dtype), of)


def make_dropped() -> TrainTask:
    """For a job: what was kept of a step that drops."""
    return task("dropped")


@pytest.mark.exhaustive
def test_a_run_that_drops_on_thirty_two_cores(tmp_path: Path) -> None:
    """Two steps on the road of `run`, the second with the seeds of the first, are within 1e-5 of
    the unsharded ones; and no wider bound was asked for, which would hide another mask."""
    (tmp_path / "job.toml").write_text(
        f"""
        [model]
        entry = "{__name__}:make_dropped"
        [cluster]
        target = "trn1.32xlarge"
        [mesh]
        dp_shard = {CORES}
        [strategy]
        global_batch = {SAMPLES}
        [run]
        steps = 2
        executor = "inline"
        """
    )
    code = main(["run", str(tmp_path / "job.toml"), "--out", str(tmp_path / "out")])
    found = json.loads((tmp_path / "out" / "report.json").read_text())["numerics"]
    assert code == 0 and found["passed"] and found["rounding"] is None
    assert abs(found["losses"][0] - stored("dropped").loss) < BOUND
    assert found["worst_loss"]["error"] < BOUND == found["worst_loss"]["allowed"]


def test_paths_and_what_stands_behind_them() -> None:
    assert split_name("folder:serving_default") == ("folder", "serving_default")
    assert split_name("a/model.py:make") == ("a/model.py", "make")
    assert split_name("folder") == ("folder", "") and split_name("C:/x") == ("C:/x", "")


def test_python_that_imports_tensorflow_is_told_by_its_text(tmp_path: Path) -> None:
    texts = {
        "direct": "import tensorflow as tf",
        "deep": "def make():\n    from keras import layers\n",
        "beside": "import direct",
        "of_jax": 'import os\nos.environ["KERAS_BACKEND"] = "jax"\nimport keras',
        "other": "import jax",
        "no_python": "import tensorflow as",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    found = {name for name in texts if imports_it(tmp_path / f"{name}.py")}
    assert found == {"direct", "deep", "beside"}
