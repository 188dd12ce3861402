"""The models of tests/fixtures/onnx_models: values of ONNX's own reference, without its package, on
one core, and forward and in training on thirty-two under FSDP."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend import isolated
from shardwright.compiler.frontend.detect import Asked, import_file
from shardwright.compiler.frontend.graphs.program import Program
from shardwright.compiler.frontend.graphs.training import train_task
from shardwright.compiler.frontend.onnx.beside import files_beside
from shardwright.compiler.frontend.onnx.writing import encoded
from shardwright.compiler.frontend.reference import (
    batch_leaves,
    initial_state,
    task_batches,
)
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.neff.bundle import read_program
from shardwright.compiler.neff.reader import Container
from shardwright.orchestrator.config import config
from shardwright.orchestrator.config.model import model_key, resolve_task, source_files
from shardwright.sharding.partition.mesh import make_mesh
from tests.compiler.frontend.onnx_models import promised
from tests.fixtures.onnx_models import MODELS, SAMPLES, stored
from tests.support.compiled import levels_of, link
from tests.support.model_files import compile_line
from tests.support.onnx_bytes import graph, model, node, tensor, value
from tests.support.reference_ranks import ReferenceRanks
from tests.support.road import fsdp_plan, run_and_compare, split_batch
from tests.test_error_triggers import InProcess

CORES, BOUND = 32, 1e-5
SIZES = {"convnet": "", "transformer": "seq=12", "quantized": ""}


def test_the_models_are_those_that_were_promised() -> None:
    assert set(MODELS) == set(promised.MODELS)


def check_equal(found: Any, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=BOUND * np.abs(wanted).max())


@cache
def program(name: str) -> Program:
    path = stored(name).path
    return Program.read(path.read_bytes(), str(path))


@pytest.mark.parametrize("name", MODELS)
def test_values_of_the_compiled_program(name: str) -> None:
    """As `compile` imports the file, and runs it on one core."""
    model = stored(name)
    shapes = ",".join(
        f"{key}={'x'.join(map(str, array.shape))}" for key, array in model.inputs.items()
    )
    asked = Asked(file=str(model.path), input_shape=shapes)
    graph, module = import_file(model.path.read_bytes(), asked=asked)
    weights = program(name).weights
    assert module.arguments == (*weights, *model.inputs) and module.results == ("logits",)
    narrow = [
        array.astype(np.int32) if array.dtype == np.int64 else array
        for array in model.inputs.values()
    ]
    ((found,),) = levels_of(link(graph), [*weights.values(), *narrow], ("L1",))
    check_equal(found, model.results["logits"])


def task(name: str, loss: str) -> TrainTask:
    path = stored(name).path
    return train_task(path, path.read_bytes(), loss, optax.sgd(1e-2), SIZES[name])


def samples_of(name: str, folder: Path) -> str:
    """A file with the model's inputs, and its results as targets, again and again."""
    model = stored(name)
    arrays = {**model.inputs, "target": model.results["logits"]}
    rows = np.arange(CORES) % SAMPLES
    path = folder / "samples.npz"
    np.savez(path, **{key: array[rows] for key, array in arrays.items()})
    return str(path)


@pytest.mark.parametrize("name", MODELS)
def test_forward_and_training_on_thirty_two_cores(name: str, tmp_path: Path) -> None:
    """A step whose targets are the reference's results has a loss of 0: what its own are apart from
    them, squared. One with random targets ends where one core does."""
    made = task(name, "mse")
    plan = fsdp_plan(made, make_mesh({"dp_shard": CORES}), 1).step
    ranks = ReferenceRanks(plan, initial_state(made, 0))
    batch = next(task_batches(made, 0, CORES, samples_of(name, tmp_path)))
    ranks.run_step(split_batch(batch_leaves(batch), CORES))
    apart = float(ranks.gather("metrics/loss")) ** 0.5
    assert apart < BOUND * np.abs(stored(name).results["logits"]).max()
    errors, after = run_and_compare(plan, made)
    assert float(after.gather("metrics/loss")) > 0.1
    parameters = {key for key in errors if key.startswith("params/")}
    assert len(parameters) == len(program(name).trained)
    assert max(errors.values()) < BOUND


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_is_trained(name: str) -> None:
    """Random batches: parameters change, statistics and scales do not, and the loss falls."""
    made = task(name, "cross_entropy")
    step = jax.jit(made.step)
    batch = next(made.batches(0, 8, None))
    assert made.init is not None
    first = state = made.init(None)
    losses = []
    for _ in range(5):
        *state, metrics = step(*state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    same = [
        np.array_equal(a, b)
        for a, b in zip(*map(jax.tree.leaves, (first[1], state[1])), strict=True)
    ]
    assert all(same) and len(same) == len(program(name).weights) - len(program(name).trained)
    changed = [not np.array_equal(first[0][key], state[0][key]) for key in first[0]]
    assert sum(changed) >= 1


def test_a_training_step_asks_for_a_loss() -> None:
    for loss, words in (("", "got none and logits"), ("mean", "got mean and logits")):
        with pytest.raises(UsageError, match="SW_MODEL_LOSS") as caught:
            task("convnet", loss)
        assert words in caught.value.diagnostic.message


def test_a_graph_of_so_many_samples_takes_no_others() -> None:
    path = stored("convnet").path
    fixed = train_task(path, path.read_bytes(), "mse", optax.sgd(1e-2), "batch=4")
    assert fixed.samples == 4 and fixed.batch(4)["target"].shape == (4, 10)
    with pytest.raises(UsageError, match="SW_BATCH"):
        fixed.batch(8)


def test_the_samples_of_a_file_have_its_names(tmp_path: Path) -> None:
    path = str(tmp_path / "samples.npz")
    np.savez(path, x=np.zeros((4, 3, 8, 8), np.float32))
    with pytest.raises(UsageError, match=r"SW_DATA.*target \[n, 10\]"):
        next(task("convnet", "mse").batches(0, 8, path))
    with pytest.raises(UsageError, match="SW_DATA"):
        next(task("convnet", "mse").batches(0, 8, str(tmp_path / "none.npz")))


def test_compile_takes_a_model_as_users_call_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A NEFF with the names of the file; what is wrong with a file is told at its node."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(isolated, "Reader", InProcess)
    folder = stored("quantized").path.parent
    for name in ("quantized.onnx", "quantized.weights"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    command = "neuronx-cc compile quantized.onnx --framework ONNX --target trn1 --output q.neff"
    assert compile_line(command) == 70
    assert "--input-shape batch=1" in capsys.readouterr().err
    assert compile_line(f"{command} --input-shape batch=4") == 0
    found = read_program(Container((tmp_path / "q.neff").read_bytes()))
    assert found.inputs == (*program("quantized").weights, "x") and found.outputs == ("logits",)
    Path("wrong.onnx").write_bytes(encoded(WRONG))
    assert compile_line("neuronx-cc compile wrong.onnx --framework onnx --target trn1") == 70
    told = " ".join(capsys.readouterr().err.split())
    assert "SW_MODEL_NODE" in told and "wrong.onnx:2" in told
    Path("fp8.onnx").write_bytes(encoded(FP8))
    assert compile_line("neuronx-cc compile fp8.onnx --framework onnx --target trn1") == 70
    told = " ".join(capsys.readouterr().err.split())  # a later stage
    assert "NCC_EVRF051" in told and "location: fp8.onnx:2" in told


WRONG = model(
    graph(
        [node("Relu", "x", "a"), node("MatMul", "a w", "y")],
        [value("x", 2, 3)],
        [value("y", 2, 3)],
        w=np.ones((4, 3), np.float32),
    )
)


def test_what_is_said_of_later_stages_names_the_node() -> None:
    found, _ = import_file(encoded(GOOD))
    places = {str(op.loc) for op in found.ops if op.loc.file}
    assert places == {"<module>:1", "<module>:2"}
    assert any("the_MatMul" in op.loc.scope for op in found.ops)


FP8 = model(
    graph(
        [node("Relu", "x", "a"), node("Cast", "a", "y", to=17)],
        [value("x", 2, 3)],
        [value("y", 2, 3, dtype=17)],
    )
)
GOOD = {
    **WRONG,
    "graph": {**WRONG["graph"], "initializers": [tensor("w", np.eye(3, dtype=np.float32))]},
}


def test_answers_depend_on_the_weights_beside_a_model(tmp_path: Path) -> None:
    folder = stored("quantized").path.parent
    for file in ("quantized.onnx", "quantized.weights"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    job = config.load(None, [f"model.onnx={tmp_path}/quantized.onnx", "model.loss=mse"])
    assert [path.name for path in source_files(job)] == ["quantized.onnx", "quantized.weights"]
    before = model_key(job)
    assert model_key(job) == before
    (tmp_path / "quantized.weights").write_bytes(bytes(9040))
    assert model_key(job) != before
    assert files_beside(b"\x08\xff", tmp_path) == ()


def test_a_job_says_what_a_model_is_trained_for() -> None:
    path = stored("convnet").path
    said = [f"model.onnx={path}", "model.loss=mse", "model.optimizer=sgd", "model.clip=0"]
    found = resolve_task(config.load(None, said))
    assert found.name == "convnet" and set(found.batch(4)) == {"x", "target"}
    with pytest.raises(UsageError, match=r"SW_MODEL_SETTING.*which is an ONNX model"):
        resolve_task(config.load(None, [*said, "model.dtype=bfloat16"]))
    with pytest.raises(UsageError, match=r"SW_MODEL.*cannot read"):
        resolve_task(config.load(None, [f"model.onnx={path}.gone", "model.loss=mse"]))
