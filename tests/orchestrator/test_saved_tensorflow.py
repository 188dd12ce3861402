"""SavedModels of TensorFlow saved with their supported parts as NEFF files, and run by TensorFlow.
All of it needs TensorFlow, but for what is refused without it."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwright.saved
from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.orchestrator.cli import main

needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow"
)
RNG = np.random.default_rng(5)
X = RNG.normal(size=(4, 6)).astype(np.float32)
IMAGE = RNG.normal(size=(2, 8, 8, 3)).astype(np.float32)
TOKENS = RNG.integers(0, 50, (2, 7))
CASES = {
    "mlp": ({"x": X}, "batch=4", ()),
    "detector": ({"image": IMAGE}, "", ("NonMaxSuppressionV3",)),
    "encoder": ({"tokens": TOKENS}, "tokens=2x7", ()),
}
"""Model -> (inputs, sizes of open dims, operators that stay in TensorFlow)."""


def weights(tf: Any, *shape: int) -> Any:
    values = np.random.default_rng(sum(shape)).normal(size=shape) / 3
    return tf.Variable(values.astype(np.float32))


def mlp(tf: Any, module: Any) -> Any:
    """Texts, and rows whose number depends on values, behind products."""
    module.w, module.v = weights(tf, 6, 9), weights(tf, 9, 4)

    def call(x: Any) -> Any:
        t = tf.tanh(x @ module.w)
        y = tf.nn.softmax(t @ module.v)
        found, _ = tf.unique(tf.reshape(tf.cast(t > 0, tf.int32), [-1]))
        _, places = tf.math.top_k(y, 2)
        return {"y": y, "names": tf.strings.as_string(places), "found": found, "places": places}

    return call, [tf.TensorSpec((None, 6), tf.float32, name="x")]


def detector(tf: Any, module: Any) -> Any:
    """A determinant, for which XLA has no code, between two parts; chosen boxes behind them."""
    shapes = ((3, 3, 3, 8), (3, 3, 8, 4), (8, 8), (8, 5))
    module.first, module.boxes, module.wide, module.last = (weights(tf, *s) for s in shapes)

    def call(image: Any) -> Any:
        r = tf.nn.relu(tf.nn.conv2d(image, module.first, 1, "SAME"))
        pooled = tf.reduce_mean(r, [1, 2])
        d = tf.linalg.det(tf.reshape(pooled @ module.wide, [2, 2, 2, 2]))
        scores = tf.nn.softmax((pooled * d[:, :1]) @ module.last)
        edges = tf.reshape(tf.nn.conv2d(r, module.boxes, 1, "SAME"), [2, 64, 4])[0]
        low, high = (f(edges[:, :2], edges[:, 2:]) for f in (tf.minimum, tf.maximum))
        boxes = tf.concat([low, high], 1)
        chosen = tf.image.non_max_suppression(boxes, tf.reduce_sum(edges, 1), 5, 0.3)
        return {"scores": scores, "chosen": chosen, "best": tf.gather(boxes, chosen)}

    return call, [tf.TensorSpec((2, 8, 8, 3), tf.float32, name="image")]


def encoder(tf: Any, module: Any) -> Any:
    """Two blocks of attention over tokens, of sizes that the model leaves open."""
    module.table = weights(tf, 50, 16)
    module.square = [weights(tf, 16, 16) for _ in range(4)]
    module.wide, module.narrow = weights(tf, 16, 32), weights(tf, 32, 16)

    def heads(t: Any) -> Any:
        sizes = tf.shape(t)
        return tf.transpose(tf.reshape(t, [sizes[0], sizes[1], 4, 4]), [0, 2, 1, 3])

    def call(tokens: Any) -> Any:
        x = tf.gather(module.table, tokens)
        for _ in range(2):
            q, k, v = (heads(x @ w) for w in module.square[:3])
            a = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / 2.0) @ v
            x += tf.reshape(tf.transpose(a, [0, 2, 1, 3]), tf.shape(x)) @ module.square[3]
            mean, variance = tf.nn.moments(x, [-1], keepdims=True)
            x = (x - mean) * tf.math.rsqrt(variance + 1e-5)
            x += tf.nn.gelu(x @ module.wide) @ module.narrow
        return {"y": x}

    return call, [tf.TensorSpec((None, None), tf.int64, name="tokens")]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a SavedModel, as TensorFlow writes it."""
    root = tmp_path_factory.mktemp("originals")

    def written(name: str) -> Path:
        import tensorflow as tf

        path = root / name
        if not path.exists():
            module = tf.Module()
            call, signature = {"mlp": mlp, "detector": detector, "encoder": encoder}[name](
                tf, module
            )
            function = tf.function(call, input_signature=signature)
            tf.saved_model.save(module, str(path), signatures=function)
        return path

    return written


def saved(path: Path, name: str, output: Path, **asked: Any) -> Path:
    """A model, saved."""
    _, shape, kept = CASES[name]
    asked = {"target": "trn1", "input_shape": shape, "no_fuse_ops": kept, **asked}
    shardwright.saved.compile(path, output, **asked)
    return output


def wanted(path: Path, given: Mapping[str, Any]) -> dict[str, np.ndarray]:
    import tensorflow as tf

    signature = tf.saved_model.load(str(path)).signatures["serving_default"]
    found = signature(**{name: tf.constant(array) for name, array in given.items()})
    return {name: tensor.numpy() for name, tensor in found.items()}


def check(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        if array.dtype.kind == "f":
            most = 1e-5 * np.abs(array).max()
            np.testing.assert_allclose(found[name], array, rtol=0, atol=most)
        else:
            np.testing.assert_array_equal(found[name], array)


@needs_tensorflow
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("mlp", ["neuron", "cpu"]),
        ("detector", ["neuron", "cpu", "neuron"]),
        ("encoder", ["neuron"]),
    ],
)
def test_parts_have_the_values_of_the_model(
    name: str, parts: list[str], originals: Callable[[str], Path], tmp_path: Path
) -> None:
    path, given = originals(name), CASES[name][0]
    output = saved(path, name, tmp_path / "saved")
    loaded = shardwright.saved.load(output)
    check(loaded(given), wanted(path, given))
    assert refusal(lambda: saved(output, name, tmp_path / "again")) == "SW_USAGE"
    report = loaded.report()
    assert report is not None
    assert [part.where for part in report.parts] == parts
    kept = {row.operator: row.reason for row in report.kept}
    if name == "detector":
        assert kept["MatrixDeterminant"] == "XLA has no code for MatrixDeterminant"
        assert kept["NonMaxSuppressionV3"] == "it is to stay on the CPU"
    with pytest.raises(DiagnosticError) as refused:
        loaded(dict.fromkeys(given, np.zeros((1, 1), np.float32)))
    assert refused.value.code == "SW_SAVED_INPUT"


@needs_tensorflow
def test_bytes_and_values_are_the_same_in_another_folder_and_process(
    originals: Callable[[str], Path], tmp_path: Path
) -> None:
    """TensorFlow alone loads and runs it there, once shardwright.tensorflow is imported."""
    path = originals("mlp")
    copied = tmp_path / "copy"
    shutil.copytree(path, copied)
    here, there = saved(path, "mlp", tmp_path / "here"), saved(copied, "mlp", tmp_path / "there")
    files = {p.relative_to(here): p.read_bytes() for p in here.rglob("*") if p.is_file()}
    assert files.keys() == {Path("saved_model.pb"), Path("assets.extra/shardwright.json")}
    assert (there / "saved_model.pb").read_bytes() == files[Path("saved_model.pb")]
    first = shardwright.saved.load(here)(x=X)
    moved = tmp_path / "moved"
    here.rename(moved)
    code = (
        "import sys, numpy, tensorflow as tf, shardwright.tensorflow;"
        "run = tf.saved_model.load(sys.argv[1]).signatures['serving_default'];"
        "found = run(x=tf.constant(numpy.load(sys.argv[2])));"
        "numpy.savez(sys.argv[3], **{n: t.numpy() for n, t in found.items() if n != 'names'})"
    )
    given, results = tmp_path / "x.npy", tmp_path / "r.npz"
    np.save(given, X)
    subprocess.run([sys.executable, "-c", code, moved, given, results], check=True)
    again = np.load(results)
    assert {n: again[n].tobytes() for n in again} == {
        n: a.tobytes() for n, a in first.items() if n != "names"
    }
    without = code.replace(", shardwright.tensorflow", "")
    done = subprocess.run(
        [sys.executable, "-c", without, moved, given, results], capture_output=True, text=True
    )
    assert done.returncode and "key=shardwright.neff" in done.stderr


@needs_tensorflow
def test_operators_that_stay_are_what_they_were(
    originals: Callable[[str], Path], tmp_path: Path
) -> None:
    from tensorflow.core.protobuf import saved_model_pb2

    from shardwright.compiler.frontend.graphs.sizes import Sizes
    from shardwright.compiler.frontend.tensorflow.splitting import open_saved

    path = originals("detector")
    output = saved(path, "detector", tmp_path / "saved")
    before = open_saved(path, "", Sizes()).message
    after = saved_model_pb2.SavedModel.FromString((output / "saved_model.pb").read_bytes())
    nodes = {node.name: node for node in after.meta_graphs[0].graph_def.node}
    kept = [n for n in before.node if n.op in ("MatrixDeterminant", "NonMaxSuppressionV3")]
    assert len(kept) == 2
    for node in kept:
        assert nodes[node.name].SerializeToString() == node.SerializeToString()
    kinds = [node.op for node in nodes.values()]
    assert kinds.count("PyFunc") == 2
    assert not {"Conv2D", "MatMul", "Softmax"} & set(kinds)


@needs_tensorflow
def test_calls_at_the_same_time(originals: Callable[[str], Path], tmp_path: Path) -> None:
    path = originals("mlp")
    loaded = shardwright.saved.load(saved(path, "mlp", tmp_path / "saved"))
    inputs = [X * scale for scale in (0.5, 1.0, 2.0)]
    with ThreadPoolExecutor(3) as pool:
        for x, found in zip(inputs, pool.map(lambda x: loaded(x=x), inputs), strict=True):
            check(found, wanted(path, {"x": x}))


@needs_tensorflow
def test_a_damaged_neff_inside_of_a_model_is_told(
    originals: Callable[[str], Path], tmp_path: Path
) -> None:
    from shardwright.compiler.frontend.tensorflow.saved_form import neff_ops

    output = saved(originals("mlp"), "mlp", tmp_path / "saved")
    file = output / "saved_model.pb"
    data = file.read_bytes()
    neff = next(neff_ops(output)).executable
    place = data.index(neff)
    for offset in (0, len(neff) // 2):
        harmed = bytearray(data)
        harmed[place + offset] ^= 1
        file.write_bytes(harmed)
        assert refusal(lambda: shardwright.saved.load(output)).startswith("SW_NEFF")
    file.write_bytes(data[: len(data) // 2])
    assert refusal(lambda: shardwright.saved.load(output)) == "SW_SAVED_FILE"
    file.write_bytes(data)
    (output / "assets.extra" / "shardwright.json").write_text("{}")
    assert refusal(lambda: shardwright.saved.load(output)) == "SW_SAVED_FILE"
    assert refusal(lambda: shardwright.saved.load(output, target="inf1")) == "SW_LOAD_ARCHITECTURE"


@needs_tensorflow
@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"target": ""}, "SW_USAGE"),
        ({"input_shape": ""}, "NCC_EMOD025"),
        ({"input_shape": "batch=4,y=3"}, "SW_MODEL_SHAPE"),
        ({"signature": "training"}, "SW_USAGE"),
        ({"no_fuse_ops": ["Nobody"]}, "SW_USAGE"),
        ({"minimum_segment_size": 40}, "SW_NO_OPERATORS"),
        ({"beside": True}, "SW_USAGE"),
        ({"extract_weights": True}, "SW_USAGE"),
    ],
)
def test_what_cannot_be_saved(
    asked: dict[str, Any], code: str, originals: Callable[[str], Path], tmp_path: Path
) -> None:
    path = originals("mlp")
    assert refusal(lambda: saved(path, "mlp", tmp_path / "saved", **asked)) == code
    assert not (tmp_path / "saved").exists()


@needs_tensorflow
def test_the_command(
    originals: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["save", str(originals("mlp")), "--target", "trn1", "--input-shape", "batch=4", "-o"]
    assert main([*words, str(tmp_path / "saved"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["operators"], told["compiled"]) == (10, 8)
    assert main([*words, str(tmp_path / "saved")]) == 2  # a folder that is not empty


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(DiagnosticError) as caught:
        call()
    return caught.value.code


def test_a_folder_that_is_no_model_and_a_process_without_tensorflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(lambda: shardwright.saved.load(tmp_path)) == "SW_SAVED_FILE"
    assert (
        refusal(lambda: shardwright.saved.compile(tmp_path, tmp_path / "s", target="trn1"))
        == "SW_SAVED_FILE"
    )
    (tmp_path / "saved_model.pb").write_bytes(b"")
    for name in [each for each in sys.modules if each.partition(".")[0] == "tensorflow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    for call in (
        lambda: shardwright.saved.load(tmp_path),
        lambda: shardwright.saved.compile(tmp_path, tmp_path / "s", target="trn1"),
    ):
        assert refusal(call) == "SW_NEEDS_PACKAGE"


@needs_tensorflow
def test_what_waits_for_a_compiled_operator_still_waits(tmp_path: Path) -> None:
    """A check with a state, which runs behind a product, and a result that waits for it."""
    import tensorflow as tf

    module = tf.Module()
    module.w = weights(tf, 6, 9)

    def call(x: Any) -> Any:
        y = tf.nn.relu(x @ module.w)
        with tf.control_dependencies([y]):
            none = tf.group()
        with tf.control_dependencies([none, tf.debugging.assert_less(tf.reduce_sum(y), 1e3)]):
            return {"y": tf.identity(y) + 1}

    signature = [tf.TensorSpec((4, 6), tf.float32, name="x")]
    function = tf.function(call, input_signature=signature)
    path = tmp_path / "original"
    tf.saved_model.save(module, str(path), signatures=function)
    shardwright.saved.compile(path, tmp_path / "saved", target="trn1")
    loaded = shardwright.saved.load(tmp_path / "saved")
    check(loaded(x=X), wanted(path, {"x": X}))
    with pytest.raises(DiagnosticError) as refused:
        loaded(x=X * 1e6)
    assert refused.value.code == "SW_SAVED_HOST"


@needs_tensorflow
@pytest.mark.parametrize("kind", ["table", "variable"])
def test_a_state_that_changes_is_refused(kind: str, tmp_path: Path) -> None:
    import tensorflow as tf

    module = tf.Module()
    module.w = tf.Variable(np.ones((3, 3), np.float32))
    pairs = tf.lookup.KeyValueTensorInitializer(["a"], [1.0])
    module.table = tf.lookup.StaticHashTable(pairs, 0.0)

    def call(x: Any) -> Any:
        if kind == "variable":
            module.w.assign_add(x)
            return {"y": x @ module.w}
        return {"y": x @ module.w + module.table.lookup(tf.constant("a"))}

    signature = [tf.TensorSpec((3, 3), tf.float32, name="x")]
    function = tf.function(call, input_signature=signature)
    path = tmp_path / "original"
    tf.saved_model.save(module, str(path), signatures=function)
    found = refusal(lambda: shardwright.saved.compile(path, tmp_path / "saved", target="trn1"))
    assert found == "SW_SAVED_STATE"
