"""`shardwright triton`: what it writes, and the model that Triton loads, called as Triton calls
it."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest

from shardwright.compiler.diagnostics import SimulationError
from shardwright.compiler.dtypes import DType
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.triton import backend, simulator
from shardwright.orchestrator.triton.backend import ServedModel
from shardwright.orchestrator.triton.interface import (
    TYPES,
    Interface,
    Limits,
    TensorSpec,
    config_text,
)
from shardwright.orchestrator.triton.served import open_served
from tests.support.triton import pbtxt
from tests.support.triton.backend import triton_python_backend_utils as pb_utils
from tests.support.triton.models import AFFINE, SUMMED, TWICE, TWICE_TYPED, run_direct, write_neff

X = np.arange(32, dtype=np.float32).reshape(4, 8) / 7
W = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def affine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_neff(tmp_path_factory.mktemp("affine") / "a.neff", AFFINE)


def written(neff: Path, repository: Path, *flags: str, name: str = "m") -> Path:
    """The folder of the model."""
    assert main(["triton", str(neff), str(repository), "--name", name, *flags]) == 0
    return repository / name


def config_of(model: Path) -> dict[str, Any]:
    return pbtxt.read((model / "config.pbtxt").read_text())


class Here:
    """A simulator without a process of its own, for what is not about processes."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.served = open_served(folder, limits.level)

    def interface(self) -> Interface:
        return self.served.interface

    def run(self, arrays: Mapping[str, np.ndarray], _: object) -> dict[str, np.ndarray]:
        return self.served.run(arrays)

    def end(self) -> None:
        pass


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "Simulator", Here)


class Loaded:
    """A version folder as a stub process has it."""

    def __init__(self, model: Path, **changed: Any) -> None:
        self.config = config_of(model) | changed
        folder = model / "1"
        self.model = type(
            "TritonPythonModel", (ServedModel,), {"folder": folder, "utils": pb_utils}
        )()
        self.model.initialize({"model_config": json.dumps(self.config)})

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, *_: object) -> None:
        self.model.finalize()

    def ask(self, arrays: Mapping[str, Any], outputs: tuple[str, ...] = ()) -> Any:
        return self.model.execute([request(arrays, outputs)])[0]


def request(arrays: Mapping[str, Any], outputs: tuple[str, ...] = ()) -> Any:
    def tensor(name: str, array: Any) -> Any:
        if array.dtype == BF16:
            return pb_utils.Tensor.of_type(name, array.view(np.uint16), pb_utils.BF16)
        return pb_utils.Tensor(name, array)

    return pb_utils.InferenceRequest([tensor(n, np.asarray(a)) for n, a in arrays.items()], outputs)


def arrays_of(response: Any) -> dict[str, np.ndarray]:
    assert not response.has_error(), response.error().message()
    return {
        t.name(): t.bits().view(BF16) if t.triton_dtype() == pb_utils.BF16 else t.as_numpy()
        for t in response.output_tensors()
    }


def refused(response: Any) -> tuple[int, str]:
    assert response.has_error() and response.output_tensors() == []
    return response.error().code(), response.error().message()


# --- what is written


def test_a_repository(affine: Path, tmp_path: Path) -> None:
    model = written(affine, tmp_path, "--instances", "2", "--queue", "5", "--timeout", "7")
    assert sorted(p.relative_to(model).as_posix() for p in model.rglob("*")) == [
        *("1", "1/model.neff", "1/model.py", "config.pbtxt")
    ]
    assert (model / "1/model.neff").read_bytes() == affine.read_bytes()
    assert config_of(model) == {
        "name": "m",
        "backend": "python",
        "max_batch_size": 0,
        "input": [
            {"name": "arg0", "data_type": "TYPE_FP32", "dims": [4, 8]},
            {"name": "arg1", "data_type": "TYPE_FP32", "dims": [8, 3]},
        ],
        "output": [
            {"name": "out0", "data_type": "TYPE_FP32", "dims": [4, 3]},
            {"name": "out1", "data_type": "TYPE_FP32", "dims": [1], "reshape": {"shape": []}},
        ],
        "instance_group": [{"count": 2, "kind": "KIND_CPU"}],
        "dynamic_batching": {
            "default_queue_policy": {
                "timeout_action": "REJECT",
                "default_timeout_microseconds": 60_000_000,
                "allow_timeout_override": True,
                "max_queue_size": 5,
            }
        },
        "parameters": {
            "request_timeout_s": {"string_value": "7"},
            "load_timeout_s": {"string_value": "120"},
            "level": {"string_value": "L1"},
        },
    }


def test_it_is_the_same_wherever_it_is_written(affine: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", arg1=W)
    flags = ("--weights", str(tmp_path / "w.npz"))
    first, second = (written(affine, tmp_path / place, *flags) for place in ("a", "b/c"))
    files = [p.relative_to(first) for p in first.rglob("*") if p.is_file()]
    assert len(files) == 4
    for file in files:
        data = (first / file).read_bytes()
        assert data == (second / file).read_bytes()
        assert str(tmp_path).encode() not in data


def test_every_type_has_its_name_in_triton() -> None:
    """model_config.proto: DataType."""
    specs = tuple(TensorSpec(dtype.value, dtype, (2,)) for dtype in TYPES)
    limits = dict(max_batch=0, instances=1, queue=1, queue_timeout_s=1.0)
    text = config_text("types", Interface(specs, specs[:1], ""), Limits(), **limits)
    found = {row["name"]: row["data_type"] for row in pbtxt.read(text)["input"]}
    spelled = "i1=BOOL i8=INT8 i16=INT16 i32=INT32 i64=INT64 ui8=UINT8 ui16=UINT16 "
    spelled += "ui32=UINT32 ui64=UINT64 f16=FP16 bf16=BF16 tf32=FP32 f32=FP32 f64=FP64"
    assert found == {k: f"TYPE_{v}" for k, v in (pair.split("=") for pair in spelled.split())}


@pytest.mark.parametrize("name", ["w['a']", 'say "x"', "back\\slash", "tab\tnew\n", "größe"])
def test_names_survive_the_text(name: str) -> None:
    interface = Interface((TensorSpec(name, DType.F32, (2,)),), (), "")
    limits = dict(max_batch=0, instances=1, queue=1, queue_timeout_s=1.0)
    text = config_text("m", interface, Limits(), **limits)
    assert text.isascii() and pbtxt.read(text)["input"][0]["name"] == name


@pytest.mark.parametrize(
    "text",
    [
        'name "m"',
        'name: "m" name: "n"',
        'name: "a\nb"',
        "max_batch_size: four",
        "input [ { dims: [ 1 2 ] } ]",
        "output { data_type: FP32 }",
        "nome: 3",
        "input { dims: [ 1 ]",
    ],
)
def test_the_reader_of_these_tests_refuses_what_protobuf_does(text: str) -> None:
    with pytest.raises(ValueError):
        pbtxt.read(text)


def test_a_second_version_lies_beside_the_first(affine: Path, tmp_path: Path) -> None:
    model = written(affine, tmp_path)
    before = (model / "config.pbtxt").read_bytes()
    written(affine, tmp_path, "--version", "2")
    written(affine, tmp_path, "--version", "2")  # in its place
    assert sorted(p.name for p in model.iterdir()) == ["1", "2", "config.pbtxt"]
    assert (model / "config.pbtxt").read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("--name ../m", "SW_USAGE"),
        ("--instances 0", "SW_USAGE"),
        ("--queue 0", "SW_USAGE"),
        ("--timeout 0", "SW_USAGE"),
        ("--queue-timeout nan", "SW_USAGE"),
        ("--max-batch 4", "SW_TRITON_MODEL"),
        ("--weights none.npz", "SW_NEFF_INPUTS"),
        ("--weights other.npz", "SW_USAGE"),
        ("--program step2", "SW_USAGE"),
    ],
)
def test_what_cannot_be_served_so_leaves_nothing(
    flags: str,
    code: str,
    affine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("other.npz", something=W)
    repository = tmp_path / "repository"
    assert main(["triton", str(affine), str(repository), "--name", "m", *flags.split()]) == 2
    assert f"[{code}]" in capsys.readouterr().err
    assert not list(repository.glob("*"))


def test_a_type_that_triton_does_not_have_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    neff = write_neff(tmp_path / "f8.neff", TWICE_TYPED.format("f8E4M3", "add"))
    assert main(["triton", str(neff), str(tmp_path / "r"), "--name", "m"]) == 2
    assert "arg0 requires a type that Triton has, got f8E4M3" in capsys.readouterr().err


def test_other_versions_keep_their_configuration(
    affine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = written(affine, tmp_path)
    other = write_neff(tmp_path / "twice.neff", TWICE)
    before = {p: p.read_bytes() for p in model.rglob("*") if p.is_file()}
    assert main(["triton", str(other), str(tmp_path), "--name", "m", "--version", "2"]) == 72
    assert "[SW_TRITON_CONFIG]" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in model.rglob("*") if p.is_file()} == before


# --- what is loaded


@pytest.mark.parametrize("level", ["L0", "L1"])
def test_values_are_those_of_the_neff(level: str, affine: Path, tmp_path: Path) -> None:
    """After a move to another folder."""
    model = written(affine, tmp_path / "here", "--level", level)
    moved = Path(shutil.move(model, tmp_path / "there"))
    expected = run_direct(affine, {"arg0": X, "arg1": W}, level)
    with Loaded(moved) as loaded:
        found = arrays_of(loaded.ask({"arg1": W, "arg0": X}))
        one = arrays_of(loaded.ask({"arg0": X, "arg1": W}, ("out1",)))
    assert list(found) == ["out0", "out1"] and list(one) == ["out1"]
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
    np.testing.assert_allclose(found["out0"], X @ W, rtol=1e-5)
    assert one["out1"] == found["out1"]


def test_requests_that_are_wrong_are_refused_and_nothing_else(affine: Path, tmp_path: Path) -> None:
    good, nan = {"arg0": X, "arg1": W}, np.full((8, 3), np.nan, np.float32)
    wrong = {
        "got arg0": {"arg0": X},
        "got arg0, arg1, arg2": {**good, "arg2": X},
        "got arg0, argl": {"arg0": X, "argl": W},
        "arg0 of shape [4, 8], got [8, 4]": {**good, "arg0": X.T.copy()},
        "arg0 of shape [4, 8], got [32]": {**good, "arg0": X.reshape(-1)},
        "arg1 of TYPE_FP32, got float64": {**good, "arg1": W.astype(np.float64)},
        "arg1 of TYPE_FP32, got bf16": {**good, "arg1": W.astype(BF16)},
    }
    with Loaded(written(affine, tmp_path)) as loaded:
        cancelled = request(good)
        cancelled.cancelled.set()
        batch = [*map(request, wrong.values()), request(good, ("out7",)), cancelled]
        batch += [request({**good, "arg1": nan}), request(good)]
        *bad, unknown, gone, nans, last = loaded.model.execute(batch)
    errors = pb_utils.TritonError
    for response, said in zip(bad, wrong, strict=True):
        code, message = refused(response)
        assert code == errors.INVALID_ARG and "[SW_TRITON_INPUT]" in message and said in message
    assert refused(unknown)[0] == errors.INVALID_ARG and "did you mean out" in refused(unknown)[1]
    assert refused(gone)[0] == errors.CANCELLED
    assert np.isnan(arrays_of(nans)["out0"]).all()
    np.testing.assert_allclose(arrays_of(last)["out0"], X @ W, rtol=1e-5)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("dtype", "op", "values", "expected"),
    [
        ("bf16", "add", np.array([1.5, -256], BF16), np.array([3, -512], BF16)),
        ("f16", "add", np.array([1.5, -3], np.float16), np.array([3, -6], np.float16)),
        ("i32", "add", np.array([2**30 - 1, -5], np.int32), np.array([2**31 - 2, -10], np.int32)),
        ("ui8", "add", np.array([3, 100], np.uint8), np.array([6, 200], np.uint8)),
        ("i1", "and", np.array([True, False]), np.array([True, False])),
    ],
)
def test_types_cross_whole(
    dtype: str, op: str, values: np.ndarray, expected: np.ndarray, tmp_path: Path
) -> None:
    neff = write_neff(tmp_path / "t.neff", TWICE_TYPED.format(dtype, op))
    with Loaded(written(neff, tmp_path)) as loaded:
        found = arrays_of(loaded.ask({"arg0": values}))["out0"]
        code, message = refused(loaded.ask({"arg0": values.astype(np.float32)}))
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
    assert code == pb_utils.TritonError.INVALID_ARG and f"TYPE_{TYPES[DType(dtype)]}" in message


@pytest.mark.usefixtures("here")
def test_weights_are_no_part_of_a_request(affine: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", arg1=W)
    model = written(affine, tmp_path, "--weights", str(tmp_path / "w.npz"))
    assert [row["name"] for row in config_of(model)["input"]] == ["arg0"]
    with Loaded(model) as loaded:
        found = arrays_of(loaded.ask({"arg0": X}))
        code, _ = refused(loaded.ask({"arg0": X, "arg1": W}))
    np.testing.assert_array_equal(found["out0"], run_direct(affine, {"arg0": X, "arg1": W})["out0"])
    assert code == pb_utils.TritonError.INVALID_ARG


@pytest.mark.usefixtures("here")
def test_samples_of_several_requests_are_one_run(tmp_path: Path) -> None:
    """Four samples at most: 3 and 1 are a run, 2 another."""
    neff = write_neff(tmp_path / "t.neff", TWICE)
    model = written(neff, tmp_path, "--max-batch", "4")
    assert config_of(model)["input"] == [{"name": "arg0", "data_type": "TYPE_FP32", "dims": [2]}]
    parts = [np.full((rows, 2), rows, np.float32) for rows in (3, 1, 2)]
    with Loaded(model) as loaded:
        runs: list[Any] = []
        run = loaded.model._simulator.run
        loaded.model._simulator.run = lambda arrays, wanted: (
            runs.append(arrays) or run(arrays, wanted)
        )
        responses = loaded.model.execute([request({"arg0": part}) for part in parts])
        code, message = refused(loaded.ask({"arg0": np.ones((5, 2), np.float32)}))
    assert [r["arg0"].tolist() for r in runs] == [
        [[3, 3], [3, 3], [3, 3], [1, 1]],
        [[2, 2], [2, 2], [0, 0], [0, 0]],
    ]
    for part, response in zip(parts, responses, strict=True):
        np.testing.assert_array_equal(arrays_of(response)["out0"], 2 * part)
    assert code == pb_utils.TritonError.INVALID_ARG and "at most 4 of [2]" in message


@pytest.mark.usefixtures("here")
def test_one_of_a_run_is_cancelled_while_it_runs(tmp_path: Path) -> None:
    """The others want the results still: the simulator goes on."""
    neff = write_neff(tmp_path / "t.neff", TWICE)
    requests = [request({"arg0": np.full((1, 2), k, np.float32)}) for k in range(3)]
    with Loaded(written(neff, tmp_path, "--max-batch", "4")) as loaded:
        run = loaded.model._simulator.run

        def cancelling(arrays: Mapping[str, np.ndarray], is_wanted: Callable[[], bool]) -> Any:
            assert is_wanted()
            requests[1].cancelled.set()
            assert is_wanted()
            return run(arrays, is_wanted)

        loaded.model._simulator.run = cancelling
        first, gone, last = loaded.model.execute(requests)
    assert refused(gone)[0] == pb_utils.TritonError.CANCELLED
    assert arrays_of(first)["out0"].tolist() == [[0, 0]]
    assert arrays_of(last)["out0"].tolist() == [[4, 4]]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("SW_SIM_SHAPE", "INTERNAL"),
        ("SW_TRITON_TIMEOUT", "UNAVAILABLE"),
        ("SW_TRITON_ENDED", "UNAVAILABLE"),
        ("SW_TRITON_CHANGED", "UNAVAILABLE"),
        ("SW_TRITON_CANCELLED", "CANCELLED"),
    ],
)
def test_what_the_simulator_refuses_is_an_error(code: str, status: str, model: Path) -> None:
    with Loaded(model) as loaded:
        good = loaded.model._simulator

        def refusing(*_: object) -> Any:
            raise SimulationError(code, "no more", hint="ask later")

        good.run = refusing
        found, message = refused(loaded.ask({"arg0": X, "arg1": W}))
        del good.run
        arrays_of(loaded.ask({"arg0": X, "arg1": W}))
    assert found == getattr(pb_utils.TritonError, status)
    assert message == f"error[{code}]: no more help: ask later"


@pytest.mark.parametrize("level", ["L0", "L1"])
def test_a_program_of_two_ranks_has_a_first_size_of_ranks(level: str, tmp_path: Path) -> None:
    neff = write_neff(tmp_path / "s.neff", SUMMED, tp=2)
    model = written(neff, tmp_path, "--level", level)
    assert [row["dims"] for row in config_of(model)["input"]] == [[2, 2, 3]]
    given = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    with Loaded(model) as loaded:
        found = arrays_of(loaded.ask({"arg0": given}))["out0"]
    np.testing.assert_array_equal(found, np.stack([given.sum(0)] * 2))
    np.testing.assert_array_equal(found, run_direct(neff, {"arg0": given}, level)["out0"])


@pytest.fixture(scope="module")
def model(affine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield written(affine, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"input": []}, "SW_TRITON_CONFIG"),
        ({"max_batch_size": 2}, "SW_TRITON_MODEL"),
        ({"parameters": {"level": {"string_value": "L7"}}}, "SW_TRITON_CONFIG"),
        ({"parameters": {"request_timeout_s": {"string_value": "soon"}}}, "SW_TRITON_CONFIG"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_configuration_that_is_another_fails_the_load(
    changed: dict[str, Any], code: str, model: Path
) -> None:
    with pytest.raises(pb_utils.TritonModelException, match=code):
        Loaded(model, **changed)


@pytest.mark.usefixtures("here")
def test_a_configuration_is_completed(model: Path) -> None:
    kind = type("TritonPythonModel", (ServedModel,), {"folder": model / "1", "utils": pb_utils})
    bare = {"name": "m", "max_batch_size": 0, "input": [], "output": []}
    found = kind.auto_complete_config(pb_utils.ModelConfig(bare)).as_dict()
    assert [row["dims"] for row in found["input"]] == [[4, 8], [8, 3]]
    other = bare | {"input": [{"name": "arg0", "data_type": "TYPE_FP16", "dims": [4, 8]}]}
    with pytest.raises(pb_utils.TritonModelException, match="another input arg0"):
        kind.auto_complete_config(pb_utils.ModelConfig(other))


def damaged(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


def of_another_release(data: bytes) -> bytes:
    """The major number of the format stands behind the magic."""
    return data[:8] + (99).to_bytes(2, "little") + data[10:]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (damaged, "SW_NEFF_CHECKSUM"),
        (of_another_release, "SW_NEFF_VERSION"),
        (lambda data: data[:100], "SW_NEFF_(TRUNCATED|CHECKSUM)"),
        (lambda _: b"", "SW_NEFF_TRUNCATED"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_neff_that_is_no_good_fails_the_load(
    change: Callable[[bytes], bytes], code: str, affine: Path, tmp_path: Path
) -> None:
    model = written(affine, tmp_path)
    (model / "1" / "model.neff").write_bytes(change(affine.read_bytes()))
    with pytest.raises(pb_utils.TritonModelException, match=code):
        Loaded(model)
    (model / "1" / "model.neff").unlink()
    with pytest.raises(pb_utils.TritonModelException, match="SW_TRITON_MODEL"):
        Loaded(model)


def test_a_load_that_takes_too_long_fails(model: Path) -> None:
    with pytest.raises(pb_utils.TritonModelException, match="SW_TRITON_TIMEOUT"):
        Loaded(model, parameters={"load_timeout_s": {"string_value": "1e-6"}})


def test_a_host_without_room_for_a_process_is_an_error(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Loaded(model) as loaded:
        loaded.model._simulator.end()
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", Mock(side_effect=BlockingIOError(11, "no room")))
            code, message = refused(loaded.ask({"arg0": X, "arg1": W}))
        arrays_of(loaded.ask({"arg0": X, "arg1": W}))
    assert code == pb_utils.TritonError.UNAVAILABLE and "cannot start: [Errno 11]" in message


def test_the_interpreter_is_found_where_python_is_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert simulator._python() == sys.executable
    for embedded in ("/opt/tritonserver/backends/python/triton_python_backend_stub", ""):
        monkeypatch.setattr(sys, "executable", embedded)
        assert Path(simulator._python()).resolve().name.startswith("python")
        assert Path(simulator._python()).exists()


def test_the_file_that_triton_loads(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", pb_utils)
    found = runpy.run_path(str(model / "1" / "model.py"))["TritonPythonModel"]
    assert issubclass(found, ServedModel) and found.folder == model / "1"
    monkeypatch.setitem(sys.modules, "shardwright.orchestrator.triton.backend", None)
    with pytest.raises(pb_utils.TritonModelException, match="Shardwright is required"):
        runpy.run_path(str(model / "1" / "model.py"))


@pytest.mark.usefixtures("here")
def test_samples_without_sizes_and_types_that_cannot_be_had(tmp_path: Path) -> None:
    neff = write_neff(tmp_path / "t.neff", TWICE_TYPED.format("bf16", "add"))
    with Loaded(written(neff, tmp_path, "--max-batch", "2")) as loaded:
        for array, said in (
            (np.float32(1).astype(BF16).reshape(()), "at most 2 of [], got []"),
            (np.zeros((0,), BF16), "got [0]"),
            (np.array(["a"], object), "TYPE_BF16"),
        ):
            made = pb_utils.Tensor("arg0", np.zeros(1, np.float32))
            made._array, made._type = array, pb_utils.BF16 if array.dtype == BF16 else "TYPE_STRING"
            if array.dtype == BF16:
                made._array = array.view(np.uint16)
            code, message = refused(loaded.model.execute([pb_utils.InferenceRequest([made])])[0])
            assert code == pb_utils.TritonError.INVALID_ARG and said in message, message
