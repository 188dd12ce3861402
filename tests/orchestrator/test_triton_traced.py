"""A traced PyTorch module as a model of a Triton repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

import shardwright.torch as native  # noqa: E402
from shardwright.orchestrator.cli import main  # noqa: E402
from shardwright.orchestrator.triton.served import open_served  # noqa: E402
from tests.support.triton import pbtxt  # noqa: E402


class Mixed(torch.nn.Module):
    """A product on the machine, in bf16 too, and rows that are found on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 3)

    def forward(self, x: Any, ids: Any) -> Any:
        y = self.linear(x).tanh()
        return {"y": y, "half": y.to(torch.bfloat16), "ids": ids + 1, "found": torch.nonzero(ids)}


class Counting(torch.nn.Module):
    """Changes a buffer from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x.tanh() * self.calls


def test_values_and_types_are_those_of_the_traced_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, ids = torch.randn(4, 8), torch.tensor([0, 3, 0, 5])
    traced = native.trace(Mixed().eval(), (x, ids), compiler_workdir=str(tmp_path / "w"))
    file = tmp_path / "m.traced"
    traced.save(file)
    assert main(["triton", str(file), str(tmp_path / "r"), "--name", "m"]) == 0
    folder = tmp_path / "r" / "m"
    config = pbtxt.read((folder / "config.pbtxt").read_text())
    assert [(row["name"], row["data_type"], row["dims"]) for row in config["input"]] == [
        ("x", "TYPE_FP32", [4, 8]),
        ("ids", "TYPE_INT64", [4]),
    ]
    kinds = [row["data_type"] for row in config["output"]]
    assert kinds == ["TYPE_FP32", "TYPE_BF16", "TYPE_INT64", "TYPE_INT64"]
    assert [row["dims"] for row in config["output"]] == [[4, 3], [4, 3], [4], [-1, 1]]
    assert (folder / "1" / "module.traced").read_bytes() == file.read_bytes()

    served = open_served(folder / "1", "L1")
    found = served.run({"x": x.numpy(), "ids": ids.numpy()})
    expected = traced(x, ids)
    for array, tensor in zip(found.values(), expected.values(), strict=True):
        plain = tensor.float().numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
        np.testing.assert_array_equal(array.astype(plain.dtype), plain)
    assert found["out3"].tolist() == [[1], [3]]


def test_a_module_that_changes_a_buffer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traced = native.trace(Counting(), torch.ones(4), compiler_workdir=str(tmp_path / "w"))
    traced.save(tmp_path / "m.traced")
    arguments = ["triton", str(tmp_path / "m.traced"), str(tmp_path / "r"), "--name", "m"]
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert "[SW_TRITON_MODEL]" in shown and "calls" in shown
