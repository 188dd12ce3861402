"""ONNX models saved with their supported parts as NEFF files: values, bytes, what stays as it was,
what is refused. No package is needed, but where the text says so."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwright.saved
from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.onnx.hosting import Host
from shardwright.compiler.frontend.onnx.model import read_model
from shardwright.compiler.frontend.onnx.schema import MODEL, SCHEMA
from shardwright.compiler.frontend.onnx.wire import fields, read
from shardwright.compiler.frontend.onnx.writing import encoded, sized
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.triton.served import open_served
from tests.fixtures.onnx_models import stored
from tests.support.onnx_bytes import INT, attribute, graph, model, node, tensor, value

RNG = np.random.default_rng(7)
W, V = ((RNG.normal(size=shape) / 3).astype(np.float32) for shape in ((6, 9), (1, 9)))
X = RNG.normal(size=(4, 6)).astype(np.float32)
TEXT = b"made by hand"
DOUBLE = 11


def named(name: str, *row: Any, **attributes: Any) -> dict[str, Any]:
    return {**node(*row, **attributes), "name": name}


def in_the_middle() -> bytes:
    """Det, which nothing compiles, between two parts; NonZero, whose shape is one of values, behind
    them. With texts that the schema does not know."""
    nodes = [
        named("first", "MatMul", "x w", "a"),
        named("bend", "Tanh", "a", "t"),
        named("square", "Reshape", "t s", "q"),
        named("middle", "Det", "q", "d"),
        named("again", "Unsqueeze", "d axes", "u"),
        named("second", "MatMul", "u v", "e"),
        named("sum", "Add", "e t", "y"),
        named("places", "NonZero", "y", "z"),
    ]
    made = graph(
        nodes,
        [value("x", "batch", 6)],
        [value("y", "batch", 9), value("z", 2, "count", dtype=INT)],
        w=W,
        v=V,
        s=np.asarray([-1, 3, 3]),
        axes=np.asarray([1]),
    )
    made["declared"] = [value("d", "batch")]
    return encoded(model(made)) + sized(6, TEXT)


def wanted(x: np.ndarray) -> dict[str, np.ndarray]:
    t = np.tanh(x @ W)
    y = np.linalg.det(t.reshape(-1, 3, 3))[:, None] @ V + t
    return {"y": y, "z": np.asarray(np.nonzero(y))}


def check(
    found: Mapping[str, np.ndarray], expected: Mapping[str, Any], bound: float = 1e-5
) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        array = np.asarray(array)
        most = 1e-5 * np.abs(array).max() if array.dtype.kind == "f" else 0
        np.testing.assert_allclose(found[name], array, rtol=0, atol=most)


@cache
def saved_bytes() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return saved(Path(folder)).read_bytes()


def saved(folder: Path, data: bytes = b"", shape: str = "batch=4", **asked: Any) -> Path:
    """A model, saved."""
    (folder / "m.onnx").write_bytes(data or in_the_middle())
    asked = {"target": "trn1", "input_shape": shape, **asked}
    shardwright.saved.compile(folder / "m.onnx", folder / "saved.onnx", **asked)
    return folder / "saved.onnx"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """The model in the middle, saved with one set of flags for all tests that only read it."""
    path = tmp_path / "saved.onnx"
    path.write_bytes(saved_bytes())
    return path


def test_parts_have_the_values_of_the_model(made: Path) -> None:
    loaded = shardwright.saved.load(made)
    found = loaded(x=X)
    check(found, wanted(X))
    assert [found[name].dtype for name in "yz"] == [np.float32, np.int64]
    report = loaded.report()
    assert report is not None
    assert [(part.where, part.count) for part in report.parts] == [
        *(("neuron", 3), ("cpu", 1), ("neuron", 3), ("cpu", 1))
    ]
    assert [(row.operator, row.module, row.line) for row in report.kept] == [
        ("Det", "middle", "m.onnx:4"),
        ("NonZero", "places", "m.onnx:8"),
    ]


def node_bytes(data: bytes) -> list[bytes]:
    """The messages of a model's nodes."""
    whole = next(content for number, _, content in fields(data) if number == 7)
    return [content for number, _, content in fields(whole) if number == 1]


def test_what_is_not_compiled_is_what_it_was(made: Path) -> None:
    before, after = in_the_middle(), made.read_bytes()
    assert sized(6, TEXT) in after

    kept = [each for each in node_bytes(before) if each in node_bytes(after)]
    assert [read(each, "node", SCHEMA)["operator"] for each in kept] == ["Det", "NonZero"]
    found = read(after, MODEL, SCHEMA)["graph"]
    assert not found["initializers"]
    assert [each["operator"] for each in found["nodes"]] == ["Neff", "Det", "Neff", "NonZero"]
    assert [d["size"] for d in found["inputs"][0]["type"]["tensor"]["shape"]["dims"]] == [4, 6]


def test_bytes_and_values_are_the_same_in_another_folder(tmp_path: Path) -> None:
    here, there, moved = (tmp_path / name for name in ("here", "over/there", "moved"))
    flags: dict[str, Any] = {"beside": True, "extract_weights": True}
    for folder in (here, there):
        folder.mkdir(parents=True)
        saved(folder, **flags)
    files = {
        path.relative_to(here): path.read_bytes() for path in here.rglob("*.*") if path.is_file()
    }
    assert set(map(str, files)) == {
        *("m.onnx", "saved.onnx", "saved.neffs/neff-0.neff", "saved.neffs/neff-1.neff")
    }
    assert all((there / name).read_bytes() == data for name, data in files.items())
    first = shardwright.saved.load(here / "saved.onnx")(x=X)
    check(first, wanted(X))
    here.rename(moved)
    again = shardwright.saved.load(moved / "saved.onnx")(x=X)
    assert all(again[name].tobytes() == first[name].tobytes() for name in first)


@pytest.mark.matrix
def test_another_process_has_the_same_bytes(made: Path) -> None:
    code = (
        "import sys, numpy, shardwright.saved as s;"
        "found = s.load(sys.argv[1])(x=numpy.load(sys.argv[2]));"
        "numpy.savez(sys.argv[3], **found)"
    )
    given, results = made.with_name("x.npy"), made.with_name("r.npz")
    np.save(given, X)
    subprocess.run([sys.executable, "-c", code, made, given, results], check=True)
    here = shardwright.saved.load(made)(x=X)
    assert {n: a.tobytes() for n, a in np.load(results).items()} == {
        n: a.tobytes() for n, a in here.items()
    }


def test_two_calls_at_the_same_time(made: Path) -> None:
    loaded = shardwright.saved.load(made)
    inputs = [X * scale for scale in (0.5, 1.0, 2.0, -1.0)]
    with ThreadPoolExecutor(4) as pool:
        for x, found in zip(inputs, pool.map(lambda x: loaded(x=x), inputs), strict=True):
            check(found, wanted(x))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "shape"), [("convnet", "batch=4"), ("transformer", ""), ("quantized", "")]
)
def test_the_values_of_the_stored_models(name: str, shape: str, tmp_path: Path) -> None:
    """A network of convolutions, a block of attention, a quantized LSTM with weights beside it."""
    case = stored(name)
    sizes = shape or ",".join(f"{n}={'x'.join(map(str, a.shape))}" for n, a in case.inputs.items())
    path = tmp_path / "saved.onnx"
    shardwright.saved.compile(case.path, path, target="trn1", input_shape=sizes)
    check(shardwright.saved.load(path)(case.inputs), case.results)


def branches() -> bytes:
    """An `If` that reads what is around it."""
    then = graph([node("Add", "r r", "p")], [], [value("p", 2, 3)])
    other = graph([node("Neg", "r", "n")], [], [value("n", 2, 3)])
    nodes = [
        node("Relu", "x", "r"),
        node("ReduceMax", "r", "m", keepdims=0),
        node("Greater", "m limit", "c"),
        node("If", "c", "b", then_branch=then, else_branch=other),
        node("Exp", "b", "e"),
        node("Neg", "e", "y"),
    ]
    inputs, results = [value("x", 2, 3)], [value("y", 2, 3)]
    return encoded(model(graph(nodes, inputs, results, limit=np.float32(1))))


def test_a_branch_on_the_host_reads_what_a_part_made(tmp_path: Path) -> None:
    path = saved(tmp_path, branches(), "", no_fuse_ops=["If"])
    loaded = shardwright.saved.load(path)
    for scale in (0.5, 2.0):
        x = np.linspace(-scale, scale, 6, dtype=np.float32).reshape(2, 3)
        r = np.maximum(x, 0)
        check(loaded(x=x), {"y": -np.exp(2 * r if r.max() > 1 else -r)})
    report = loaded.report()
    assert report is not None
    assert [row.reason for row in report.kept] == ["it is to stay on the CPU"]


def test_types_of_64_bits_come_back(tmp_path: Path) -> None:
    """Places of a TopK, and doubles of a node that stays on the host."""
    nodes = [
        node("MatMul", "x w", "a"),
        node("TopK", "a k", "t i"),
        node("Cast", "t", "wide", to=DOUBLE),
        node("Add", "wide small", "y"),
    ]
    results = [value("i", 4, 2, dtype=INT), value("y", 4, 2, dtype=DOUBLE)]
    small = np.float64(1e-12)
    made = graph(nodes, [value("x", 4, 6)], results, w=W, k=np.asarray([2]), small=small)
    loaded = shardwright.saved.load(
        saved(tmp_path, encoded(model(made)), "", no_fuse_ops=["Add", "Cast"])
    )
    a = X @ W
    order = np.argsort(-a, axis=1, kind="stable")[:, :2]
    found = loaded(x=X)
    assert (found["i"].dtype, found["y"].dtype) == (np.int64, np.float64)
    np.testing.assert_array_equal(found["i"], order)
    top = np.take_along_axis(a, order, 1)
    assert np.abs(found["y"] - top - small).max() < 1e-6
    n, y = (value(name, 3, dtype=INT) for name in "ny")
    ints = graph([node("Add", "n n", "t"), node("Neg", "t", "y")], [n], [y])
    loaded = shardwright.saved.load(saved(tmp_path, encoded(model(ints)), ""))
    check(loaded(n=np.asarray([1, -2, 3])), {"y": np.asarray([-2, 4, -6])})
    assert refusal(lambda: loaded(n=np.asarray([1, 2**40, 3]))) == "SW_SAVED_INPUT"


def refusal(call: Callable[[], Any]) -> str:
    """The code of what a call raises; everything of ours says what to do next."""
    with pytest.raises(DiagnosticError) as caught:
        call()
    assert caught.value.diagnostic.message
    return caught.value.code


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"x": X, "other": X},
        {"x": X[:3]},
        {"x": X.astype(np.float64)},
        {"x": X[None]},
    ],
)
def test_inputs_that_are_not_taken(made: Path, given: dict[str, Any]) -> None:
    assert refusal(lambda: shardwright.saved.load(made)(given)) == "SW_SAVED_INPUT"


def test_a_damaged_neff_inside_of_a_model_is_told(made: Path) -> None:
    data = bytearray(made.read_bytes())
    executable = read_model(bytes(data), is_tolerant=True).graph.nodes[0].attributes["executable"]
    place = bytes(data).index(executable.tobytes())
    for offset in (0, executable.size // 3, executable.size // 2, executable.size - 1):
        harmed = bytearray(data)
        harmed[place + offset] ^= 1
        made.write_bytes(harmed)
        assert refusal(lambda: shardwright.saved.load(made)).startswith("SW_NEFF")
    made.write_bytes(data[: len(data) // 2])
    assert refusal(lambda: shardwright.saved.load(made)) == "SW_MODEL_FILE"
    made.write_bytes(b"")
    assert refusal(lambda: shardwright.saved.load(made)) == "SW_SAVED_FILE"
    assert refusal(lambda: shardwright.saved.load(made.with_name("none"))) == "SW_SAVED_FILE"


def test_a_neff_that_is_not_beside_its_model(tmp_path: Path) -> None:
    path = saved(tmp_path, beside=True)
    (tmp_path / "saved.neffs" / "neff-1.neff").unlink()
    assert refusal(lambda: shardwright.saved.load(path)) == "SW_MODEL_FILE"


def test_a_node_without_its_attributes(tmp_path: Path) -> None:
    bare = {**node("Neff", "x", "y"), "domain": "shardwright"}
    path = tmp_path / "m.onnx"
    path.write_bytes(encoded(model(graph([bare], [value("x", 3)], [value("y", 3)]))))
    assert refusal(lambda: shardwright.saved.load(path)) == "SW_SAVED_FILE"


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"target": ""}, "SW_USAGE"),
        ({"target": "trn9"}, "NCC_EARG001"),
        ({"shape": ""}, "NCC_EMOD025"),
        ({"no_fuse_ops": ["nobody"]}, "SW_USAGE"),
        ({"minimum_segment_size": 0}, "SW_USAGE"),
        ({"minimum_segment_size": 4}, "SW_NO_OPERATORS"),
        ({"compiler_args": "--nonsense"}, "SW_USAGE"),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, asked: dict[str, Any], code: str) -> None:
    assert refusal(lambda: saved(tmp_path, **asked)) == code


def test_a_saved_model_is_not_saved_again(made: Path) -> None:
    data = made.read_bytes()
    assert refusal(lambda: saved(made.parent, data, "", no_fuse_ops=["Det"])) == "SW_USAGE"


def test_another_machine_refuses(made: Path) -> None:
    assert refusal(lambda: shardwright.saved.load(made, target="inf1")) == "SW_LOAD_ARCHITECTURE"


def test_a_part_that_the_compiler_refuses_at_a_node_is_divided_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwright.compiler.diagnostics import CompileError, Loc
    from shardwright.orchestrator.saved import making

    asked: list[tuple[str, ...]] = []
    whole = making.part_neff

    def refusing(artifact: bytes, name: str, resolved: Any, folder: Path, reader: Any) -> bytes:
        asked.append(reader.results)
        if len(asked) == 1:
            raise CompileError("NCC_EVRF001", "no", Loc("m.onnx", 2))
        return whole(artifact, name, resolved, folder, reader)

    monkeypatch.setattr(making, "part_neff", refusing)
    loaded = shardwright.saved.load(saved(tmp_path, minimum_segment_size=1))
    check(loaded(x=X), wanted(X))
    report = loaded.report()
    assert report is not None
    assert [row.operator for row in report.kept] == ["Tanh", "Det", "NonZero"]
    assert asked[0] == ("t", "q") and asked[1] == ("a",)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(in_the_middle())
    words = ["save", str(path), "--target", "trn1", "--input-shape", "batch=4", "-o"]
    out = tmp_path / "saved.onnx"
    assert main([*words, str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["operators"], told["compiled"]) == (8, 6)
    assert out.read_bytes() == saved_bytes()
    assert main([*words, str(path)]) == 2


def test_operators_are_counted_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(in_the_middle())
    words = ["save", str(path), "--target", "trn1", "--input-shape", "batch=4", "--analyze"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[:8]]
    assert rows[0] == ["operator", "instances", "compiled"]
    assert ["Det", "1", "no"] in rows and ["MatMul", "2", "yes"] in rows
    assert lines[8].startswith("6 of 8 operators compiled (75.0%)")
    assert main([*words, "--no-fuse-ops", "second", "--minimum-segment-size", "3"]) == 0
    assert ["MatMul", "2", "1"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert main([*words, "-o", str(tmp_path / "s.onnx")]) == 2
    report = shardwright.saved.analyze(
        path, target="trn1", input_shape="batch=4", minimum_segment_size=9
    )
    assert (report.operators, report.compiled) == (8, 0)
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]


NODES = 30


def random_graph(seed: int) -> tuple[bytes, list[str], dict[str, np.ndarray], dict[str, Any]]:
    """(a model, nodes that are to stay on the host, inputs, results in double precision)."""
    rng = np.random.default_rng(seed)
    unary: dict[str, Callable[..., Any]] = {"Tanh": np.tanh, "Neg": np.negative, "Abs": np.abs}
    binary: dict[str, Callable[..., Any]] = {"Add": np.add, "Sub": np.subtract, "Max": np.maximum}
    given = {name: rng.normal(size=(3, 4)).astype(np.float32) for name in ("x", "y")}
    values: dict[str, Any] = {name: array.astype(np.float64) for name, array in given.items()}
    nodes = []
    for number in range(NODES):
        table = unary if rng.random() < 0.5 else binary
        operator = list(table)[rng.integers(3)]
        read = [list(values)[k] for k in rng.integers(len(values), size=1 + (table is binary))]
        values[f"v{number}"] = table[operator](*(values[name] for name in read))
        nodes.append(named(f"n{number}", operator, " ".join(read), f"v{number}"))
    results = [f"v{k}" for k in sorted(set(rng.integers(NODES, size=6).tolist()) | {NODES - 1})]
    kept = [f"n{k}" for k in range(NODES) if rng.random() < 0.3]
    inputs = [value(name, 3, 4) for name in given]
    made = graph(nodes, inputs, [value(name, 3, 4) for name in results])
    return encoded(model(made)), kept, given, {name: values[name] for name in results}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 40))]
)
def test_random_graphs_with_random_nodes_on_the_host(seed: int, tmp_path: Path) -> None:
    data, kept, given, expected = random_graph(seed)
    path = saved(tmp_path, data, "", no_fuse_ops=kept, minimum_segment_size=1 + seed % 2)
    loaded = shardwright.saved.load(path)
    check(loaded(given), expected)
    report = loaded.report()
    assert report is not None
    stay = {row.module for row in report.kept}
    live = {read(each, "node", SCHEMA)["name"] for each in node_bytes(path.read_bytes())}
    assert stay == live - {name for name in live if name.startswith("neff")}
    assert stay <= {f"n{k}" for k in range(NODES)} and set(kept) & stay == set(kept) & live


@pytest.mark.parametrize("operator", ["NonMaxSuppression", "Unique", "Det"])
def test_nodes_in_numpy_are_those_of_the_reference(operator: str) -> None:
    """Held against ONNX's own reference, which needs onnx."""
    reference = pytest.importorskip("onnx.reference")
    for seed in range(6):
        made, given = host_case(operator, np.random.default_rng(seed), seed)
        data = encoded(made)
        parsed = read_model(data)
        only = parsed.graph.nodes[0]
        found = Host(data, parsed, [only]).run(only, given)
        expected = reference.ReferenceEvaluator(data).run(None, given)
        for name, array in zip(only.outputs, expected, strict=True):
            np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6)
            assert found[name].dtype == array.dtype


@pytest.mark.parametrize(
    ("x", "said", "expected"),
    [
        (
            [[1, 0, 0], [1, 0, 0], [2, 3, 4]],
            {"axis": 0},
            [[[1, 0, 0], [2, 3, 4]], [0, 2], [0, 0, 1], [2, 1]],
        ),
        (
            [2, 1, 1, 3, 4, 3],
            {"sorted": 0},
            [[2, 1, 3, 4], [0, 1, 3, 4], [0, 1, 1, 2, 3, 2], [1, 2, 2, 1]],
        ),
    ],
)
def test_unique_along_an_axis_and_in_order(
    x: list[Any], said: dict[str, int], expected: list[Any]
) -> None:
    """The examples of ONNX's page, in forms that its reference fails at (onnx 1.23)."""
    array = np.asarray(x, np.float32)
    results = [value("y", "n"), *(value(n, "n", dtype=INT) for n in "abc")]
    made = graph([node("Unique", "x", "y a b c", **said)], [value("x", *array.shape)], results)
    data = encoded(model(made))
    parsed = read_model(data)
    found = Host(data, parsed, parsed.graph.nodes).run(parsed.graph.nodes[0], {"x": array})
    assert [found[name].tolist() for name in ("y", *"abc")] == expected


def host_case(operator: str, rng: Any, seed: int) -> tuple[Any, dict[str, np.ndarray]]:
    if operator == "Det":
        given = {"x": rng.normal(size=(3, 4, 4)).astype(np.float32)}
        return model(graph([node("Det", "x", "y")], [value("x", 3, 4, 4)], [value("y", 3)])), given
    if operator == "Unique":
        given = {"x": rng.integers(0, 3, (6, 2)).astype(np.float32)}
        results = [value("y", "n", dtype=1), *(value(n, "n", dtype=INT) for n in "abc")]
        made = node("Unique", "x", "y a b c")
        return model(graph([made], [value("x", 6, 2)], results)), given
    boxes = np.sort(rng.uniform(size=(2, 12, 2, 2)), axis=2).reshape(2, 12, 4)
    given = {
        "boxes": boxes.astype(np.float32),
        "scores": rng.uniform(size=(2, 3, 12)).astype(np.float32),
        "most": np.asarray([1 + seed]),
        "overlap": np.asarray([0.2], np.float32),
        "least": np.asarray([0.3], np.float32),
    }
    inputs = [value("boxes", 2, 12, 4), value("scores", 2, 3, 12), value("most", 1, dtype=INT)]
    inputs += [value("overlap", 1), value("least", 1)]
    made = node("NonMaxSuppression", " ".join(given), "y", center_point_box=0)
    return model(graph([made], inputs, [value("y", "n", 3, dtype=INT)])), given


def test_onnx_takes_the_file_and_its_evaluator_runs_it(tmp_path: Path) -> None:
    """Needs onnx."""
    onnx = pytest.importorskip("onnx")
    reference = pytest.importorskip("onnx.reference")
    for number, flags in enumerate(({}, {"beside": True, "extract_weights": True})):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = saved(folder, **flags)
        onnx.checker.check_model(str(path), full_check=True)
        shutil.copytree(folder, folder.with_name(f"moved{number}"))
        moved = onnx.load(folder.with_name(f"moved{number}") / "saved.onnx")
        run = reference.ReferenceEvaluator(moved, new_ops=shardwright.saved.reference_ops())
        check(dict(zip("yz", run.run(None, {"x": X}), strict=True)), wanted(X))


def texts() -> bytes:
    said = [{"name": "case_change_action", "type": 3, "s": b"LOWER"}]
    words = {**value("words", 3, dtype=8)}
    nodes = [
        {**node("StringNormalizer", "words", "low"), "attributes": said},
        node("MatMul", "x w", "a"),
        node("Relu", "a", "y"),
    ]
    results = [value("low", 3, dtype=8), value("y", 4, 9)]
    return encoded(model(graph(nodes, [words, value("x", 4, 6)], results, w=W)))


def test_texts_stay_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs with onnx; without it, the package is asked for when the model is loaded."""
    path = saved(tmp_path, texts(), "")
    with monkeypatch.context() as without:
        without.setattr("importlib.util.find_spec", lambda name: None)
        assert refusal(lambda: shardwright.saved.load(path)) == "SW_NEEDS_PACKAGE"
    pytest.importorskip("onnx")
    found = shardwright.saved.load(path)(words=np.asarray(["A", "Bc", "d"], object), x=X)
    assert found["low"].tolist() == ["a", "bc", "d"]
    check({"y": found["y"]}, {"y": np.maximum(X @ W, 0)})


def test_weights_of_branches_beside_the_model_are_copied(tmp_path: Path) -> None:
    """Constants of a branch that lie in a file beside the original."""
    held = {**tensor("far", np.full((2, 3), 3, np.float32)), "raw": None, "location": 1}
    held["external"] = [{"key": "location", "value": "weights.bin"}]
    then = {**graph([node("Add", "r far", "p")], [], [value("p", 2, 3)]), "initializers": [held]}
    other = graph([node("Neg", "r", "n")], [], [value("n", 2, 3)])
    nodes = [
        node("Relu", "x", "q"),
        node("Exp", "q", "r"),
        {
            **node("If", "c", "y"),
            "attributes": [attribute("then_branch", then), attribute("else_branch", other)],
        },
    ]
    made = graph(nodes, [value("x", 2, 3), value("c", dtype=9)], [value("y", 2, 3)])
    source, folder = tmp_path / "from", tmp_path / "to"
    source.mkdir()
    (source / "weights.bin").write_bytes(np.full((2, 3), 3, np.float32).tobytes())
    (source / "m.onnx").write_bytes(encoded(model(made)))
    shardwright.saved.compile(
        source / "m.onnx", folder / "saved.onnx", target="trn1", no_fuse_ops=["If"]
    )
    x = np.ones((2, 3), np.float32)
    found = shardwright.saved.load(folder / "saved.onnx")(x=x, c=np.asarray(True))
    check(found, {"y": np.exp(x) + 3})


@pytest.mark.parametrize("beside", [False, True])
def test_triton_serves_a_saved_model(beside: bool, tmp_path: Path) -> None:
    path = saved(tmp_path, beside=beside)
    repository = tmp_path / "repository"
    assert main(["triton", str(path), str(repository), "--name", "m"]) == 0
    moved = repository.rename(tmp_path / "elsewhere")
    served = open_served(moved / "m" / "1", "L1")
    rows = [
        (s.name, s.dtype, s.shape) for s in (*served.interface.inputs, *served.interface.outputs)
    ]
    assert rows == [
        ("x", DType.F32, (4, 6)),
        ("y", DType.F32, (4, 9)),
        ("z", DType.I64, (2, -1)),
    ]
    check(served.run({"x": X}), wanted(X))
    assert main(["triton", str(path), str(repository), "--name", "m", "--level", "L0"]) == 2
    text = saved(tmp_path, texts(), "")
    assert main(["triton", str(text), str(repository), "--name", "t"]) != 0
