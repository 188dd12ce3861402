"""Traced modules: values of torch, parts that stay on the CPU, files, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

import shardwright.torch as native  # noqa: E402
from shardwright.compiler.diagnostics import DiagnosticError, LoadError, UsageError  # noqa: E402

BOUND = 1e-5


class Net(torch.nn.Module):
    """A module with a norm, dropout, a buffer that counts calls, and results under keys."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.drop = torch.nn.Dropout()
        self.tied = self.first.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any, flag: bool = True, *, scale: Any, shift: Any = None) -> Any:
        self.calls.add_(1)
        y = self.drop(self.norm(torch.nn.functional.gelu(self.first(x))))
        z = y @ self.tied * scale
        z = z if shift is None else z + shift
        return {"pair": (y, z + self.calls), "none": None, "three": 3, "x": x}


class Mixed(torch.nn.Module):
    """A module with operators that have no row, and with shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.before = torch.nn.Linear(6, 6)
        self.after = torch.nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.before(x)) + 1
        spectrum = torch.fft.fft(y).abs()
        large = y[y > 1.5]
        z = torch.tanh(self.after(spectrum)) * 2
        inverse = torch.linalg.inv(z.T @ z + 3 * torch.eye(6))
        return z, large, inverse @ inverse + 1


def held(found: Any, wanted: Any, bound: float = BOUND) -> None:
    """That two structures of tensors are equal, types and shapes included."""
    from torch.utils import _pytree

    rows, shape = _pytree.tree_flatten(found)
    others, other_shape = _pytree.tree_flatten(wanted)
    assert shape == other_shape and type(found) is type(wanted)
    assert any(isinstance(each, torch.Tensor) for each in others)
    for one, other in zip(rows, others, strict=True):
        if not isinstance(other, torch.Tensor):
            assert one == other
            continue
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert torch.allclose(one.double(), other.double(), rtol=bound, atol=bound)


def in_torch(module: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return module(*args, **kwargs)


@pytest.fixture(scope="module")
def net() -> Any:
    torch.manual_seed(0)
    module = Net()
    module.norm.running_mean.uniform_(-1, 1)
    return module


@pytest.fixture(scope="module")
def mixed() -> Any:
    torch.manual_seed(1)
    return Mixed()


@pytest.mark.parametrize("inline", [True, False])
def test_values_structures_and_buffers_are_torchs(net: Any, inline: bool, tmp_path: Path) -> None:
    x, scale = torch.randn(4, 6), torch.tensor(2.0)
    net.train()
    net.calls.zero_()
    traced = native.trace(
        net, (x, False), example_kwarg_inputs={"scale": scale}, inline_weights_to_neff=inline
    )
    assert net.training and net.calls == 0
    report = traced.report()
    assert [part.where for part in report.parts] == ["neuron"] and not report.kept
    assert report.compiled == report.operators > 5
    weights = report.parts[0].weight_bytes
    assert bool(traced.parts[0].weights) is not inline and weights >= 4 * 6 * 8
    net.eval()
    for _ in range(2):
        x = torch.randn(4, 6)
        held(traced(x, False, scale=scale), in_torch(net, x, False, scale=scale))
    traced.save(tmp_path / "net.pt")
    again = native.load(tmp_path / "net.pt")
    wanted = in_torch(net, x, False, scale=scale)
    assert again.report() == report and wanted["pair"][1].isfinite().all()
    held(again(x, False, scale=scale), wanted)
    assert torch.equal(again.tensors["b_calls"], net.calls)


def test_keywords_in_any_order_and_mappings(net: Any) -> None:
    kwargs = {"x": torch.randn(3, 6), "scale": torch.tensor(2.0), "shift": torch.ones(6)}
    traced = native.trace(net, kwargs)
    turned = dict(reversed(kwargs.items()))
    net.eval()
    net.calls.zero_()
    found = traced(**turned)
    net.calls.copy_(traced.tensors["b_calls"] - 1)
    held(found, in_torch(net, **kwargs))


def test_bf16_by_the_compilers_flag(net: Any) -> None:
    x, scale = torch.randn(4, 6), torch.tensor(2.0)
    flags = "--auto-cast all --auto-cast-type bf16"
    traced = native.trace(
        net, x, example_kwarg_inputs={"scale": scale}, compiler_args=flags, target="trn2"
    )
    assert traced.made_by["target"].startswith("trn2")
    net.eval()
    net.calls.zero_()
    found = traced(x, scale=scale)["pair"][0]
    wanted = in_torch(net, x, scale=scale)["pair"][0]
    assert found.dtype is torch.float32
    error = (found - wanted).abs().max() / wanted.abs().max()
    assert 1e-5 < error < 2e-2


def test_types_of_torch_are_kept() -> None:
    def function(x: Any, n: Any, b: Any) -> Any:
        return x.double() + 1, n * 2, n.argmax(), b.half(), x.bfloat16(), ~b

    given = torch.randn(3), torch.tensor([3, 2**30 - 1, -5]), torch.tensor([True, False, True])
    held(native.trace(function, given)(*given), function(*given))


def test_arguments_that_a_module_changes_are_changed() -> None:
    def function(x: Any) -> Any:
        x.mul_(2)
        return x + 1

    x = torch.ones(3)
    traced = native.trace(function, torch.ones(3))
    assert torch.equal(traced(x), torch.full((3,), 3.0)) and torch.equal(x, torch.full((3,), 2.0))


def test_what_has_no_row_stays_on_the_cpu(mixed: Any, tmp_path: Path) -> None:
    traced = native.trace(mixed, torch.randn(4, 6))
    report = traced.report()
    assert [part.where for part in report.parts] == ["neuron", "cpu"] * 2 + ["neuron"]
    assert native.analyze(mixed, torch.randn(4, 6)) == report
    kept = {row.operator: row for row in report.kept}
    assert kept["aten._fft_r2c.default"].reason == "no row"
    assert kept["aten.index.Tensor"].reason == "its shape depends on values"
    lines = Path(__file__).read_text().splitlines()
    place, _, line = kept["aten._fft_r2c.default"].line.rpartition(":")
    assert place.endswith("test_torch_trace.py") and "torch.fft.fft" in lines[int(line) - 1]
    first = report.parts[0]
    assert first.operators["aten.relu.default"] == 1
    assert first.bytes_in == 4 * 4 * 6 and first.weight_bytes == 4 * (36 + 6)
    crossed = [(p.bytes_in, p.bytes_out) for p in report.parts if p.where == "neuron"]
    assert report.bytes_crossed == sum(map(sum, crossed)) > 0
    assert f"{report.compiled} of {report.operators} operators compiled" in repr(traced)
    traced.save(tmp_path / "mixed.pt")
    loaded = native.load(tmp_path / "mixed.pt")
    for _ in range(3):  # rows that a mask selects are as many as there are
        x = torch.randn(4, 6) * 3
        held(traced(x), in_torch(mixed, x))
        held(loaded(x), traced(x))


def test_what_is_made_on_the_way_stays_where_it_is_asked_for(mixed: Any, tmp_path: Path) -> None:
    from shardwright.orchestrator.cli import main

    traced = native.trace(mixed, torch.randn(4, 6), compiler_workdir=tmp_path / "work")
    names = {path.name for path in (tmp_path / "work").iterdir()}
    assert {f"part-{n}.{form}" for n in range(3) for form in ("neff", "stablehlo")} < names
    assert main(["neff", "run", str(tmp_path / "work/part-0.neff"), "--time"]) == 0
    assert json.loads(json.dumps(traced.report().as_dict()))["compiled"] > 5


def test_copies_and_pickles_are_files(mixed: Any) -> None:
    import copy
    import pickle

    x = torch.randn(4, 6)
    traced = native.trace(mixed, x)
    for each in (copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))):
        held(each(x), traced(x), 0)
        assert repr(each) == repr(traced)


def test_small_parts_stay_on_the_cpu_as_asked(mixed: Any) -> None:
    many = native.analyze(mixed, torch.randn(4, 6), min_operators=5)
    sizes = [part.count for part in many.parts if part.where == "neuron"]
    assert sizes and min(sizes) >= 5
    assert len(sizes) < 3 and any("fewer operators" in row.reason for row in many.kept)
    x = torch.randn(4, 6)
    held(native.trace(mixed, x, min_operators=5)(x), in_torch(mixed, x))


def test_a_branch_of_the_host_and_one_of_the_machine() -> None:
    def function(x: Any) -> Any:
        made = torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
        spectrum = torch.cond(
            x.sum() > 0, lambda x: torch.fft.fft(x).abs(), lambda x: x - 1, (made * 2,)
        )
        return spectrum * 2 + made

    traced = native.trace(function, torch.ones(4))
    assert [part.where for part in traced.report().parts] == ["neuron", "cpu", "neuron"]
    for x in (torch.arange(4.0), -torch.arange(4.0)):
        held(traced(x), function(x))


def test_random_operators_are_torchs() -> None:
    traced = native.trace(lambda x: torch.bernoulli(x.sigmoid() * 0.9) * 2 + x, torch.zeros(500))
    (row,) = [row for row in traced.report().kept if "bernoulli" in row.operator]
    assert "SW_TORCH_RANDOM" in row.reason
    found = traced(torch.zeros(500))
    assert set(found.tolist()) == {0.0, 2.0} and 0.7 < found.mean() < 1.1


def test_a_part_that_the_compiler_refuses_is_divided_again(monkeypatch: Any) -> None:
    from shardwright.compiler.diagnostics import CompileError
    from shardwright.orchestrator.compile import part_files

    compiled = part_files.compiled

    def refusing(file: Any, data: bytes, *rest: Any) -> bytes:
        from shardwright.compiler.frontend.detect import import_file

        graph, _ = import_file(data)
        for op in graph.walk():
            if op.name == "sine":
                raise CompileError("NCC_EHCA005", "sine is refused", op.loc)
        return compiled(file, data, *rest)

    monkeypatch.setattr(part_files, "compiled", refusing)

    def waves(x: Any, *, more: float = 1.0) -> Any:
        y = torch.exp(x) + more
        y = torch.sin(y)
        return torch.exp(-y) * 3

    traced = native.trace(waves, torch.ones(4))
    assert [part.where for part in traced.report().parts] == ["neuron", "cpu", "neuron"]
    (row,) = traced.report().kept
    assert (row.operator, row.reason) == ("aten.sin.default", "sine is refused [NCC_EHCA005]")
    held(traced(torch.ones(4)), waves(torch.ones(4)))


def test_outputs_of_transformers_in_a_fresh_process(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    batch = {"input_ids": torch.randint(64, (2, 8)), "attention_mask": torch.ones(2, 8).long()}
    batch["attention_mask"][0, 5:] = 0
    traced = native.trace(model, batch)
    assert not traced.report().kept
    found = traced(**batch)
    held(found, in_torch(model, **batch))
    traced.save(tmp_path / "gpt2.pt")
    torch.save({"batch": batch, "logits": found.logits}, tmp_path / "wanted.pt")
    code = (
        "import torch, transformers, shardwright.torch;"
        "wanted = torch.load('wanted.pt');"
        "found = shardwright.torch.load('gpt2.pt')(**wanted['batch']);"
        "print(type(found).__name__, torch.equal(found.logits, wanted['logits']))"
    )
    environment = {**__import__("os").environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert out.stdout.split() == [type(found).__name__, "True"], out.stderr


REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "branch on values": (
        lambda: native.trace(lambda x: x if x.sum() > 0 else -x, torch.ones(3)),
        "SW_TORCH_VALUES",
        "test_torch_trace.py",
    ),
    "a cache": (
        lambda: native.trace(lambda x: _cache(x), torch.ones(1, 1, 2, 2)),
        "SW_TASK_RAISED",
        "use_cache = False",
    ),
    "integers of 64 bits": (
        lambda: native.trace(lambda x: x + 1, torch.ones(3).long())(torch.full((3,), 1 << 40)),
        "SW_TORCH_INPUT",
        f"got {1 << 40}",
    ),
    "no module": (lambda: native.trace(3, torch.ones(3)), "SW_TORCH_INPUT", "got int"),
    "no flag": (
        lambda: native.trace(torch.nn.ReLU(), torch.ones(3), compiler_args="--nothing"),
        "SW_USAGE",
        "--nothing",
    ),
    "no machine": (
        lambda: native.trace(torch.nn.ReLU(), torch.ones(3), target="trn9"),
        "NCC_EARG001",
        "trn9",
    ),
    "nothing compiles": (
        lambda: native.trace(lambda x: torch.linalg.eigvals(x), torch.eye(3)),
        "SW_TORCH_OPERATOR",
        "nothing is left for a NEFF",
    ),
    "all names": (
        lambda: native.trace(Mixed(), torch.ones(4, 6), allow_partition=False),
        "SW_TORCH_OPERATOR",
        "aten.linalg_inv_ex.default",
    ),
    "one sample more": (
        lambda: native.trace(torch.nn.ReLU(), torch.ones(3))(torch.ones(4)),
        "SW_TORCH_INPUT",
        "requires float32[3] as argument 0 (input), got float32[4]",
    ),
    "another type": (
        lambda: native.trace(torch.nn.ReLU(), torch.ones(3))(torch.ones(3).long()),
        "SW_TORCH_INPUT",
        "got int64[3]",
    ),
    "another structure": (
        lambda: native.trace(torch.nn.ReLU(), torch.ones(3))(torch.ones(3), torch.ones(3)),
        "SW_TORCH_INPUT",
        "structure",
    ),
    "another constant": (
        lambda: native.trace(lambda x, n: x * n, (torch.ones(3), 2))(torch.ones(3), 3),
        "SW_TORCH_INPUT",
        "requires 2 as argument 1",
    ),
    "large constants": (
        lambda: native.trace(_vast(), torch.ones(1, 2)),
        "SW_TORCH_INLINE",
        "inline_weights_to_neff=False",
    ),
}


def _cache(x: Any) -> Any:
    """A cache of transformers."""
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    found = transformers.DynamicCache()
    found.update(x, x, 0)
    return found


def _vast() -> Any:
    """A module with more weights than a NEFF takes as constants, of one element each."""
    from shardwright.orchestrator.traced import trace

    module = torch.nn.Linear(2, 3)
    assert trace.MOST_INLINE_BYTES > 0
    trace.MOST_INLINE_BYTES = 8
    return module


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_have_a_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright.orchestrator.traced import trace

    monkeypatch.setattr(trace, "MOST_INLINE_BYTES", trace.MOST_INLINE_BYTES)
    call, code, said = REFUSED[name]
    with pytest.raises(DiagnosticError) as caught:
        call()
    assert caught.value.code == code and said in str(caught.value)


def test_an_output_without_a_name_in_files_is_traced_and_not_saved(tmp_path: Path) -> None:
    from collections import namedtuple

    pair = namedtuple("pair", "one other")
    traced = native.trace(lambda x: pair(x + 1, x * 2), torch.ones(3))
    assert traced(torch.ones(3)).other.tolist() == [2, 2, 2]
    with pytest.raises(UsageError, match="SW_TORCH_INPUT"):
        traced.save(tmp_path / "pair.pt")


@pytest.fixture(scope="module")
def saved(mixed: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traced") / "mixed.pt"
    native.trace(mixed, torch.randn(4, 6)).save(path)
    return path


def rewritten(path: Path, changed: Callable[[Any], None]) -> bytes:
    """The file with another description of what it is."""
    import io

    stream = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name == "traced.json":
                about = json.loads(data)
                changed(about)
                data = json.dumps(about).encode()
            new.writestr(name, data)
    return stream.getvalue()


def _host_rows(about: Any) -> list[Any]:
    rows: list[Any] = next(part["host"] for part in about["parts"] if "host" in part)[1]
    return rows


DAMAGE: dict[str, Callable[[Any], None]] = {
    "another format": lambda about: about.update(format=2),
    "no parts": lambda about: about.update(parts=[]),
    "parts of nothing": lambda about: about.update(parts=3),
    "an unknown operator": lambda about: _host_rows(about)[0].__setitem__(1, "aten.none.default"),
    "a call of Python": lambda about: _host_rows(about)[0].__setitem__(1, "python.eval"),
    "an argument of nobody": lambda about: _host_rows(about)[0].__setitem__(2, [{"a": 1, "b": 2}]),
    "a type that is none": lambda about: _host_rows(about)[0].__setitem__(2, [{"dtype": "load"}]),
    "a file": lambda about: _host_rows(about)[0].__setitem__(1, "aten.from_file.default"),
    "a private name": lambda about: _host_rows(about)[0].__setitem__(1, "__class__.mro"),
    "a value of nobody": lambda about: _host_rows(about)[0].__setitem__(2, [{"value": "nobody"}]),
    "a large tensor": lambda about: about["tensors"].append(["t", [1 << 40], "float32"]),
    "a type of nobody": lambda about: about.update(tensors=[["t", [0], "nn"]]),
    "an unknown class": lambda about: about["signature"].update(
        result='[1, {"type": "os.system", "context": null, "children_spec": []}]'
    ),
    "fewer results": lambda about: about["signature"]["outputs"].pop(),
    "a changed value of nobody": lambda about: about["signature"].update(changed=[["args_0", "y"]]),
    "other arguments": lambda about: about["parts"][0].update(inputs=[]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_files_that_were_changed_are_refused(name: str, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "changed.pt"
    path.write_bytes(rewritten(saved, lambda about: None))
    native.load(path)
    path.write_bytes(rewritten(saved, DAMAGE[name]))
    with pytest.raises(LoadError, match="SW_TORCH_FILE"):
        native.load(path)


def test_damaged_bytes_end_in_a_code(saved: Path, tmp_path: Path) -> None:
    import random

    data, draw, path = saved.read_bytes(), random.Random(0), tmp_path / "damaged.pt"
    refused = 0
    for _ in range(60):
        made = bytearray(data[: draw.choice((len(data), draw.randrange(len(data))))])
        for _ in range(draw.randrange(1, 4)):
            made[draw.randrange(len(made))] = draw.randrange(256)
        path.write_bytes(bytes(made))
        try:
            native.load(path)
        except LoadError:
            refused += 1
    assert refused > 40
    with pytest.raises(LoadError, match="SW_TORCH_FILE"):
        native.load(tmp_path / "nothing.pt")
