"""A script's module, batch, loss and optimizer: planned, and run in values, from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

import shardwright.torch as native  # noqa: E402
from shardwright.compiler.diagnostics import DiagnosticError, UsageError  # noqa: E402


def script() -> tuple[Any, Any, Any, Any]:
    """What a script has at hand; its class is nowhere that another process could import it from."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(16, 32), torch.nn.Linear(32, 8)

        def forward(self, x: Any) -> Any:
            return self.last(torch.relu(self.first(x)))

    torch.manual_seed(0)
    module = Net()
    batch = torch.randn(8, 16), torch.randint(8, (8,))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    return module, batch, torch.nn.functional.cross_entropy, optimizer


def test_a_module_is_planned_over_a_mesh() -> None:
    module, batch, loss, optimizer = script()
    mesh = {"dp_shard": 4, "tp": 8}
    report = native.plan(module, batch, loss, optimizer, mesh=mesh)
    assert report.fits and report.step_time_s > 0
    assert report.data["graph"]["trained"] == sum(p.numel() for p in module.parameters())
    one = native.plan(
        module, batch, loss, optimizer, mesh={"dp_shard": 2}, cluster__target="trn1.2xlarge"
    )
    assert one.peak_bytes > report.peak_bytes


def test_a_module_is_run_in_values_by_processes_that_cannot_import_it(tmp_path: Path) -> None:
    module, batch, loss, optimizer = script()
    report = native.run(
        module,
        batch,
        loss,
        optimizer,
        mesh={"dp_shard": 2},
        cluster__target="trn1.2xlarge",
        run__steps=2,
        output__dir=str(tmp_path),
    )
    assert report.exit_code == 0
    with torch.no_grad():
        first = float(loss(module(batch[0]), batch[1]))
    assert report.losses[0] == pytest.approx(first, abs=1e-5)
    assert report.losses[1] < report.losses[0]


def test_what_no_process_can_be_given_is_refused() -> None:
    module, batch, loss, optimizer = script()
    module.lock = __import__("threading").Lock()
    with pytest.raises(UsageError, match="SW_TORCH_SHARED"):
        native.run(module, batch, loss, optimizer)


def test_an_axis_that_is_none_is_refused() -> None:
    module, batch, loss, optimizer = script()
    with pytest.raises(DiagnosticError, match="SW_"):
        native.plan(module, batch, loss, optimizer, mesh={"rows": 2})
    with pytest.raises(UsageError, match="SW_TORCH_MESH"):
        native.plan(module, batch, loss, optimizer, mesh=_Mesh(("rows",), (2,)))


class _Mesh:
    """What is read of a DeviceMesh, which needs a process group."""

    def __init__(self, names: tuple[str, ...], shape: tuple[int, ...]) -> None:
        self.mesh_dim_names, self.shape = names, shape


def test_dims_of_a_device_mesh_are_axes() -> None:
    module, batch, loss, optimizer = script()
    report = native.plan(module, batch, loss, optimizer, mesh=_Mesh(("fsdp", "tp"), (8, 4)))
    sizes = {axis: size for axis, size in report.data["mesh"].items() if size > 1}
    assert sizes == {"dp_shard": 8, "tp": 4}
