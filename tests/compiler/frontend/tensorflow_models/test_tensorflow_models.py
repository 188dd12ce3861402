"""Models of TensorFlow as users bring them, where it is installed: its own step's values of twenty
models, saved ones, and what is refused, at the user's line."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.frontend.detect import import_file
from shardwright.compiler.frontend.graphs.types import narrowed
from shardwright.compiler.frontend.tensorflow.asking import Asked, Tracer
from shardwright.compiler.frontend.tensorflow.program import Program
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.neff.bundle import read_program
from shardwright.compiler.neff.reader import Container
from tests.fixtures.tensorflow_models import ALL, stored
from tests.support.model_files import compile_line

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(1200),  # models are built by one process, in front of the first test
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow") is None, reason="needs shardwright[tensorflow]"
    ),
]
BOUND = 1e-5
SOURCE = """
import numpy as np, tensorflow as tf, keras
weight = tf.Variable(np.full((8, 4), 0.5, np.float32), name="weight")
tables = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), 0)
many = tf.constant(np.arange(32.0, dtype=np.float32).reshape(8, 4))
sizes = tf.constant([8, 4])


@tf.function(input_signature=[tf.TensorSpec((None, 8), tf.float32, name="features")])
def forward(x):
    return {"scores": x @ (weight + tf.reshape(many, sizes))}


@tf.function
def strings(x):
    y = x + 1.0
    return tf.strings.as_string(y)


@tf.function
def inner_strings(x):
    text = tf.strings.as_string(x)
    return tf.strings.to_number(text)


@tf.function
def python(x):
    return tf.py_function(lambda y: y, [x], tf.float32)


@tf.function
def looked_up(x):
    return tables.lookup(tf.cast(x, tf.int32))


@tf.function
def masked(x):
    return tf.boolean_mask(x, x[:, 0] > 0)


@tf.function
def masked_inside(x):
    return tf.reduce_sum(tf.unique(x[:, 0])[0])


@tf.function
def wrong(x):
    return x @ tf.zeros((3, 3))


def divides(x):
    return x / (1 // 0)


def unbuilt():
    return keras.Sequential([keras.layers.Dense(4)])


def junk():
    return 7


def other_keys():
    return {"net": 1}


def raises():
    raise ValueError("no such data")


def dense():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])


def shown():
    return keras.Sequential([keras.layers.Dense(4)]), np.zeros((32, 8), np.float32)


@tf.function
def complex_numbers(x):
    return tf.complex(x, x)


@tf.function(input_signature=[tf.RaggedTensorSpec((4, None), tf.float32)])
def ragged(x):
    return x * 2.0
"""
BROKEN = {"unknown_module": "import tensorflow, no_such_module", "syntax": "import tensorflow\ndef"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tensorflow")
    (found / "model.py").write_text(SOURCE)
    for name, text in BROKEN.items():
        (found / f"{name}.py").write_text(text)
    save = (
        "import sys; sys.path.insert(0, '.')\n"
        "import tensorflow as tf, model\n"
        "tf.saved_model.save(model.dense(), 'plain')\n"
        "model.dense().export('exported')\n"
        "model.dense().save('dense.keras')\n"
        "module = tf.Module(); module.weight = model.weight; module.forward = model.forward\n"
        "tf.saved_model.save(module, 'named', signatures={'scores': model.forward})\n"
        "tf.saved_model.save(tf.Module(), 'unsigned')\n"
    )
    subprocess.run([sys.executable, "-c", save], cwd=found, check=True, capture_output=True)
    for name, file, content in DAMAGE:
        copy = found / name
        subprocess.run(["cp", "-r", str(found / "exported"), str(copy)], check=True)
        for path in copy.glob(file):
            path.write_bytes(content(path.read_bytes())) if content else path.unlink()
    whole = (found / "dense.keras").read_bytes()
    (found / "cut.keras").write_bytes(whole[: len(whole) // 2])
    (found / "empty.keras").write_bytes(b"")
    return found


DAMAGE = (
    ("cut_graph", "saved_model.pb", lambda data: data[: len(data) // 2]),
    ("empty_graph", "saved_model.pb", lambda data: b""),
    ("other_bytes", "saved_model.pb", lambda data: b"\xff" * 400),
    ("flipped", "saved_model.pb", lambda data: data[:40] + b"\xff\xff\xff\xff" + data[44:]),
    ("no_variables", "variables/variables.data*", None),
    ("no_index", "variables/variables.index", None),
    ("cut_variables", "variables/variables.data*", lambda data: data[:8]),
)
REFUSED = {
    "model.py:strings": ("SW_TF_OPERATOR", "AsString", "model.py:17"),
    "model.py:inner_strings": ("SW_TF_OPERATOR", "AsString", "model.py:22"),
    "model.py:python": ("SW_TF_OPERATOR", "EagerPyFunc", "model.py:28"),
    "model.py:looked_up": ("SW_TF_OPERATOR", "a table", "model.py"),
    "model.py:masked": ("NCC_EMOD025", "shape", "model.py:38"),
    "model.py:wrong": ("SW_TASK_RAISED", "Dimensions must be equal", "model.py:48"),
    "model.py:divides": ("SW_TASK_RAISED", "ZeroDivisionError", "model.py:52"),
    "model.py:unbuilt": ("SW_TF_ENTRY", "knows its inputs", "model.py"),
    "model.py:junk": ("SW_TF_ENTRY", "got int", "model.py"),
    "model.py:other_keys": ("SW_TF_ENTRY", "got net", "model.py"),
    "model.py:raises": ("SW_TASK_RAISED", "no such data", "model.py:68"),
    "model.py:nothing": ("SW_ENTRY", "a model nothing", "model.py"),
    "unknown_module.py:make": ("SW_NEEDS_PACKAGE", "no_such_module", "unknown_module.py:1"),
    "syntax.py:make": ("SW_TASK_RAISED", "SyntaxError", "syntax.py:2"),
    "model.py:ragged": ("SW_TF_ENTRY", "RaggedTensorSpec", "model.py"),
    "named:other": ("SW_TF_SIGNATURE", "got scores", "named"),
    "unsigned": ("SW_TF_SIGNATURE", "got none", "unsigned"),
    "cut.keras": ("SW_TF_MODEL", "", "cut.keras"),
    "empty.keras": ("SW_TF_MODEL", "", "empty.keras"),
    **{name: ("SW_TF_MODEL", "", name) for name, _, _ in DAMAGE},
}


@pytest.fixture(scope="module")
def tracer() -> Iterator[Tracer]:
    made = Tracer(timeout_s=120.0)
    yield made
    made.stop()


@pytest.mark.parametrize("model", REFUSED)
def test_what_is_refused_and_where(model: str, folder: Path, tracer: Tracer) -> None:
    code, words, place = REFUSED[model]
    with pytest.raises(DiagnosticError) as caught:
        tracer.traced(Asked(model=str(folder / model), sizes="x=4x8" if ".py" in model else ""))
    d = caught.value.diagnostic
    assert d.code == code and words in d.message and "Traceback" not in d.message
    assert d.loc is not None and str(d.loc).endswith(place)


def test_later_stages_refuse_the_others(folder: Path, tracer: Tracer) -> None:
    for name, code in (("masked_inside", "NCC_"), ("complex_numbers", "NCC_")):
        data = tracer.traced(Asked(model=f"{folder / 'model.py'}:{name}", sizes="x=4x8"))
        with pytest.raises(DiagnosticError, match=code):
            import_file(data)


@pytest.mark.parametrize("model", ["model.py:dense", "plain", "exported", "dense.keras"])
def test_a_model_is_taken_in_every_form(model: str, folder: Path, tracer: Tracer) -> None:
    program = Program.read(
        tracer.traced(Asked(model=str(folder / model), sizes="batch=4", values=True))
    )
    shapes = [(port.shape, port.is_trained) for port in program.variables]
    assert shapes == [((8, 4), True), ((4,), True)]
    assert [port.shape for port in program.inputs] == [(4, 8)] and program.samples == 4
    graph, module = import_file(program.written())
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    weights = [program.values[port.name] for port in program.variables]
    (found,) = evaluate(graph, [*weights, x])
    np.testing.assert_allclose(found, x @ weights[0] + weights[1], rtol=0, atol=BOUND)
    assert module.arguments[:2] == tuple(port.name for port in program.variables)


def test_compile_takes_a_signature_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    command = "neuronx-cc compile named:scores --target trn1 --output named.neff"
    assert compile_line(command) == 70
    assert compile_line(f"{command} --framework TENSORFLOW --input-shape batch=4") == 0
    found = read_program(Container(Path("named.neff").read_bytes()))
    assert found.inputs == ("weight", "features") and found.outputs == ("scores",)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("steps")
    words = ("-m", "tests.fixtures.tensorflow_models", str(found), *ALL)
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return found


@pytest.mark.parametrize("name", ALL)
def test_a_step_has_the_values_of_tensorflow(name: str, steps: Path) -> None:
    kept = stored(name, steps)
    program = Program.read(kept.path.read_bytes())
    graph, module = import_file(kept.path.read_bytes())
    given = {**program.values, **program.example}
    arrays = [narrowed(np.asarray(given[argument])) for argument in module.arguments]
    results = dict(zip(module.results, evaluate(graph, arrays), strict=True))
    loss = next(value for value in results.values() if not value.shape)
    assert abs(float(loss) - kept.loss) < BOUND * max(1.0, abs(kept.loss))
    for key, value in results.items():
        wanted = kept.variables.get(key.removesuffix("_new"))
        if key.endswith("_new") and wanted is not None:
            bound = BOUND * max(1.0, float(np.abs(wanted).max(initial=0)))
            np.testing.assert_allclose(value, wanted, rtol=0, atol=bound, err_msg=key)
