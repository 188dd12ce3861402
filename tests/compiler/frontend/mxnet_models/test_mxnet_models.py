"""The models of tests/fixtures/mxnet_models: MXNet's values, without its package, on one core, and
forward and in training on thirty-two under FSDP."""

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
from shardwright.compiler.frontend.reference import batch_leaves, initial_state, task_batches
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.neff.bundle import read_program
from shardwright.compiler.neff.reader import Container
from shardwright.orchestrator.config import config
from shardwright.orchestrator.config.job_flags import _model_key
from shardwright.orchestrator.config.model import model_key, resolve_task, source_files
from shardwright.sharding.partition.mesh import make_mesh
from tests.fixtures.mxnet_models import MODELS, RATE, SAMPLES, stored
from tests.support.compiled import levels_of, link
from tests.support.model_files import compile_line
from tests.support.mxnet_json import operator, symbol, variable
from tests.support.reference_ranks import ReferenceRanks
from tests.support.road import fsdp_plan, split_batch
from tests.test_error_triggers import InProcess

CORES, BOUND = 32, 1e-5
LABEL = "softmax_label"
SAMPLE, SOME, MOST = ("bert",), pytest.mark.matrix, pytest.mark.exhaustive
STEPS = [pytest.param(name, marks=() if name in SAMPLE else SOME) for name in MODELS]
ON_CORES = [pytest.param(name, marks=SOME if name in SAMPLE else MOST) for name in MODELS]


def check_equal(found: Any, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=BOUND * np.abs(wanted).max())


@cache
def program(name: str) -> Program:
    path = stored(name).path
    return Program.read(path.read_bytes(), str(path))


def inputs(name: str) -> dict[str, np.ndarray]:
    return {key: array for key, array in stored(name).inputs.items() if key != LABEL}


def shapes(name: str, samples: str) -> str:
    dims = {key: [samples, *array.shape[1:]] for key, array in inputs(name).items()}
    return ",".join(f"{key}={'x'.join(map(str, shape))}" for key, shape in dims.items())


@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
def test_values_of_the_compiled_program(name: str) -> None:
    """As `compile` imports the file, and runs it on one core."""
    model = stored(name)
    asked = Asked(file=str(model.path), input_shape=shapes(name, str(SAMPLES)))
    graph, module = import_file(model.path.read_bytes(), asked=asked)
    weights = program(name).weights
    assert module.form == "mxnet" and module.results == ("softmax_output",)
    assert module.arguments == (*weights, *inputs(name))
    given = [*weights.values(), *inputs(name).values()]
    ((found,),) = levels_of(link(graph), given, ("L1",))
    check_equal(found, model.results["softmax_output"])


def task(name: str, loss: str = "") -> TrainTask:
    path = stored(name).path
    return train_task(path, path.read_bytes(), loss, optax.sgd(RATE), shapes(name, "?"))


def samples_of(name: str, folder: Path) -> str:
    """A file with the model's samples, again and again."""
    rows = np.arange(CORES) % SAMPLES
    path = folder / "samples.npz"
    np.savez(path, **{key: array[rows] for key, array in stored(name).inputs.items()})
    return str(path)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_that_of_mxnet(name: str, tmp_path: Path) -> None:
    """All parameters after a step of SGD, statistics of batch norm among them."""
    made = task(name)
    assert made.init is not None and made.batches is not None
    batch = next(made.batches(0, SAMPLES, samples_of(name, tmp_path)))
    params, buffers, _, metrics = jax.jit(made.step)(*made.init(None), batch)
    after, found = stored(name).after, {**params, **buffers}
    assert set(found) == set(after) and float(metrics["loss"]) > 0
    for key, right in after.items():
        check_equal(found[key], right)


@pytest.mark.parametrize("name", ON_CORES)
def test_a_step_on_thirty_two_cores_is_that_of_mxnet(name: str, tmp_path: Path) -> None:
    """Under FSDP, of eight times the same four samples: their mean and statistics are theirs."""
    made = task(name)
    plan = fsdp_plan(made, make_mesh({"dp_shard": CORES}), 1).step
    ranks = ReferenceRanks(plan, initial_state(made, 0))
    batch = next(task_batches(made, 0, CORES, samples_of(name, tmp_path)))
    ranks.run_step(split_batch(batch_leaves(batch), CORES))
    for key, right in stored(name).after.items():
        part = "buffers" if key in made.state[1] else "params"
        check_equal(ranks.gather(f"{part}/{key}"), right)


def test_another_loss_is_of_the_first_result() -> None:
    """As of an ONNX model, and a symbol without losses asks for one."""
    made = task("bert", "cross_entropy")
    assert set(made.batch(8)) == {"data", "length", "target"}
    with pytest.raises(UsageError, match=r"SW_MODEL_LOSS.*got mean"):
        task("bert", "mean")


def test_states_take_any_number_of_samples() -> None:
    """As unrolled cells write them: zeros of a dim that is not said."""
    rows = (
        variable("data"),
        operator("_zeros", "begin", shape="(0, 3)"),
        operator("elemwise_add", "both", 0, 1),
    )
    made = Program.read(symbol(*rows).encode())
    given = np.ones((5, 3), np.float32)
    np.testing.assert_array_equal(made({}, {"data": given})["both_output"], given)


def test_samples_are_indices_and_classes_that_there_are() -> None:
    made = task("language")
    assert made.batches is not None
    batch = next(made.batches(0, 64, None))
    assert {key: leaf.shape for key, leaf in batch.items()} == {"data": (64, 6), LABEL: (64, 6)}
    for leaf in batch.values():
        assert set(np.unique(leaf)) == set(range(32))


def test_compile_takes_a_model_as_users_call_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A NEFF with the names of the file; sizes that are open are asked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(isolated, "Reader", InProcess)
    folder = stored("bert").path.parent
    for name in ("bert-symbol.json", "bert-0000.params"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    command = "neuronx-cc compile bert-symbol.json --framework MXNET --target trn1 --output q.neff"
    assert compile_line(command) == 70
    assert "--input-shape data=1" in capsys.readouterr().err
    assert compile_line(f"{command} --input-shape data=4x6,length=4") == 0
    found = read_program(Container((tmp_path / "q.neff").read_bytes()))
    assert found.inputs == (*program("bert").weights, "data", "length")
    assert found.outputs == ("softmax_output",)


def test_a_job_names_a_symbol(tmp_path: Path) -> None:
    """By its own key, or by `--model`; its answers depend on the parameters beside it."""
    folder = stored("bert").path.parent
    for name in ("bert-symbol.json", "bert-0000.params"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    path = tmp_path / "bert-symbol.json"
    assert _model_key(str(path)) == ("mxnet", str(path))
    sizes = f"model.input_shape={shapes('bert', '?')}"
    said = [f"model.mxnet={path}", sizes, "model.optimizer=sgd", "model.clip=0"]
    job = config.load(None, said)
    assert [each.name for each in source_files(job)] == ["bert-symbol.json", "bert-0000.params"]
    found, before = resolve_task(job), model_key(job)
    assert set(found.batch(4)) == {"data", "length", LABEL}
    (tmp_path / "bert-0000.params").rename(tmp_path / "bert-0012.params")
    assert model_key(job) != before
    with pytest.raises(UsageError, match=r"SW_MODEL_SETTING.*which is an MXNet model"):
        resolve_task(config.load(None, [*said, "model.dtype=bfloat16"]))
