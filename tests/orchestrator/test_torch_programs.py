"""Programs of torch.export as model files: compiled, run in values, planned, damaged."""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from shardwright import plan  # noqa: E402
from shardwright.compiler.diagnostics import DiagnosticError, UsageError  # noqa: E402
from shardwright.compiler.frontend.detect import Asked, import_file, read_module  # noqa: E402
from shardwright.orchestrator.cli import main  # noqa: E402

BOUND = 1e-5


class Loss(torch.nn.Module):
    """A convolution, norms, attention and an embedding; parameters, buffers of both kinds, a tensor
    of the code's own, and one loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 4, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(4)
        self.table = torch.nn.Embedding(7, 4)
        self.after = torch.nn.LayerNorm(4)
        self.register_buffer("scale", torch.full((4,), 1.5))
        self.register_buffer("shift", torch.full((4,), 0.5), persistent=False)

    def forward(self, x: Any, i: Any) -> Any:
        y = torch.nn.functional.gelu(self.norm(self.conv(x)))
        y = torch.nn.functional.max_pool2d(y, 2).flatten(2).transpose(1, 2)[:, None]
        e = self.after(self.table(i))[:, None]
        z = torch.nn.functional.scaled_dot_product_attention(e, y, y) * self.scale + self.shift
        z = (z + torch.tensor([1.0, 2.0, 3.0, 4.0])).squeeze(1)
        return torch.nn.functional.cross_entropy(z.flatten(0, 1), i.flatten() % 4)


def example() -> tuple[Any, Any]:
    torch.manual_seed(2)
    return torch.randn(2, 2, 6, 6), torch.randint(0, 7, (2, 5))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the forward graph, the joint one, the module's tensors and a batch."""
    folder = tmp_path_factory.mktemp("programs")
    torch.manual_seed(0)
    module = Loss().train()
    program = torch.export.export(module, example(), strict=False)
    torch.export.save(program, folder / "loss.pt2")
    from torch.export import experimental  # joint graphs have no public name yet

    torch.export.save(experimental._export_forward_backward(program), folder / "joint.pt2")
    state = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    np.savez(folder / "weights.npz", **state)
    x, i = example()
    np.savez(folder / "batch.npz", x=x.numpy(), i=i.numpy())
    loss = module(x, i)
    loss.backward()
    wanted = {f"grad/{name}": p.grad.numpy() for name, p in module.named_parameters()}
    wanted |= {"loss": loss.detach().numpy(), "out0": loss.detach().numpy()}
    wanted |= {f"next/{name}": tensor.numpy() for name, tensor in module.named_buffers()}
    np.savez(folder / "wanted.npz", **wanted)
    return folder


def run_file(folder: Path, name: str, framework: str) -> dict[str, np.ndarray]:
    """Results of a compiled file by the names that its program gives them."""
    from shardwright.compiler.neff.arrays import read_arrays

    neff, out = folder / f"{name}.neff", folder / f"{name}.npz"
    words = ["compile", str(folder / f"{name}.pt2"), "--framework", framework, "--target", "trn1"]
    assert main([*words, "--output", str(neff), "--logfile", str(folder / "log.txt")]) == 0
    inputs = [word for n in ("weights", "batch") for word in ("--inputs", str(folder / f"{n}.npz"))]
    assert main(["neff", "run", str(neff), *inputs, "--outputs", str(out)]) == 0
    return {each.name: each.array for each in read_arrays(out).values()}


@pytest.mark.parametrize(
    ("name", "framework", "counts"), [("loss", "XLA", (1, 3, 0)), ("joint", "PYTORCH", (1, 3, 7))]
)
def test_values_by_the_programs_own_names(
    files: Path, name: str, framework: str, counts: tuple[int, int, int]
) -> None:
    found = run_file(files, name, framework)
    wanted = np.load(files / "wanted.npz")
    starts = ("loss" if name == "joint" else "out", "next/", "grad/")
    assert tuple(sum(n.startswith(s) for n in found) for s in starts) == counts
    for each, array in found.items():
        np.testing.assert_allclose(array, wanted[each], rtol=BOUND, atol=BOUND, err_msg=each)


@pytest.mark.parametrize("name", ["loss", "joint"])
def test_training_graphs_are_planned(files: Path, name: str) -> None:
    report = plan(str(_job(files, name)), cluster__target="trn1.2xlarge", strategy__micro_batch=1)
    assert report.fits and report.step_time_s > 0
    parameters = sum(p.numel() for p in Loss().parameters())
    assert report.data["graph"]["trained"] == parameters


def _job(folder: Path, name: str) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(f'[model]\nhlo = "{name}.pt2"\n[strategy]\nname = "fsdp"\n')
    return path


def saved(module: Any, *args: Any, **kwargs: Any) -> bytes:
    stream = io.BytesIO()
    torch.export.save(torch.export.export(module, args, strict=False, **kwargs), stream)
    return stream.getvalue()


def test_results_under_keys_have_their_names() -> None:
    class Named(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return {"logits": x + 1, "hidden": (x * 2, x * 3), "none": None}

    module = read_module(saved(Named(), torch.ones(3)))
    assert module.form == "torch.export"
    assert module.arguments == ("x",)
    assert module.results == ("logits", "hidden_1", "hidden_2")


def test_a_step_requires_a_loss(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="SW_TORCH_LOSS"):
        read_module(saved(torch.nn.Linear(2, 3), torch.ones(1, 2)), Asked(as_step=True))


REFUSED = {
    "SW_TORCH_TYPE": lambda: saved(_Called(lambda x: torch.fft.fft(x).abs()), torch.ones(4)),
    "NCC_EMOD025": lambda: saved(
        torch.nn.ReLU(), torch.ones(4, 2), dynamic_shapes=({0: torch.export.Dim("n", min=2)},)
    ),
}


class _Called(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


@pytest.mark.parametrize("code", REFUSED)
def test_programs_that_cannot_be_compiled_have_a_code(code: str) -> None:
    with pytest.raises(DiagnosticError, match=code):
        import_file(REFUSED[code]())


def test_pickled_objects_are_not_run(tmp_path: Path) -> None:
    """torch would unpickle example inputs of any kind, with what they run."""
    place = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (place,))

    stream = io.BytesIO()
    torch.save(Evil(), stream)
    data, made = io.BytesIO(), saved(torch.nn.ReLU(), torch.ones(3))
    replaced = 0
    with zipfile.ZipFile(io.BytesIO(made)) as old, zipfile.ZipFile(data, "w") as new:
        for name in old.namelist():
            is_inputs = "sample_inputs" in name
            new.writestr(name, stream.getvalue() if is_inputs else old.read(name))
            replaced += is_inputs
    assert replaced
    with pytest.raises(DiagnosticError, match="SW_TORCH_FILE"):
        read_module(data.getvalue())
    assert not place.exists()


def test_damaged_files_end_in_a_code(files: Path) -> None:
    data, draw = (files / "loss.pt2").read_bytes(), random.Random(1)
    refused = 0
    for _ in range(25):
        made = bytearray(data[: draw.choice((len(data), draw.randrange(4, len(data))))])
        for _ in range(draw.randrange(1, 20)):
            made[draw.randrange(4, len(made))] = draw.randrange(256)
        try:
            read_module(bytes(made))
        except DiagnosticError as error:
            assert error.code.startswith(("SW_", "NCC_")) and error.code != "SW_INTERNAL"
            refused += 1
    assert refused > 5


def test_files_of_older_releases_are_read() -> None:
    """Before 2.9 a file was a zip of these entries, which torch still reads."""
    from torch._export.serde import schema, serialize  # what torch.export.save called

    program = torch.export.export(torch.nn.Linear(2, 3), (torch.ones(1, 2),), strict=False)
    made, stream = serialize.serialize(program), io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("version", ".".join(map(str, schema.SCHEMA_VERSION)))
        archive.writestr("serialized_exported_program.json", made.exported_program)
        for name in ("state_dict", "constants", "example_inputs"):
            archive.writestr(f"serialized_{name}.pt", getattr(made, name))
    module = read_module(stream.getvalue())
    assert module.arguments == ("weight", "bias", "input")
