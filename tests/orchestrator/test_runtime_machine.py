"""The simulated machine that processes share: cores that are held, banks, limits, how runs end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.diagnostics import LoadError, SimulationError, UsageError
from shardwright.compiler.machine.target import load_target, logical, reserve_of
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.runtime.machine import Loading, Machine
from shardwright.orchestrator.runtime.memory_table import COLUMNS, cells, report
from shardwright.orchestrator.runtime.status import Status, status_of, with_status
from tests.support.model_files import compile_line, write_model

TRN1, TRN2 = load_target("trn1.32xlarge"), load_target("trn2.48xlarge")
GIB = 2**30
VISIBLE, NUMBER = "NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWRIGHT_MACHINE", str(tmp_path / "machine"))
    for name in list(os.environ):
        if name.startswith("NEURON_"):
            monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A product of 128 x 128, with its inputs, and the same for pages of 1024 MB."""
    folder = tmp_path_factory.mktemp("made")
    model = folder / "m.mlir"
    write_model(model, lambda x: jnp.tanh(x @ x), [np.zeros((128, 128), np.float32)])
    for name, words in (("m", ""), ("p", "--hbm-scratchpad-page-size 1024")):
        line = f"neuronx-cc compile {model} --target trn1 --output {folder}/{name}.neff {words}"
        assert compile_line(f"{line} --logfile {folder}/log.txt") == 0
    np.savez(folder / "in.npz", arg0=np.ones((128, 128), np.float32))
    return folder


@pytest.fixture
def neff(folder: Path, made: Path) -> Path:
    for path in made.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder / "m.neff"


def loading(ranks: int = 1, gib: float = 1.0) -> Loading:
    return Loading(model="m", uuid="0", ranks=ranks, memory={"tensors": round(gib * GIB)})


def machine(folder: Path, lnc: int = 1, **said: str) -> Machine:
    target = logical(TRN2, lnc) if lnc == 2 or said.pop("trn2", "") else TRN1
    return Machine(target, {"SHARDWRIGHT_MACHINE": str(folder / "machine"), **said})


def test_a_core_belongs_to_one_process_until_it_ends(folder: Path) -> None:
    first, second = machine(folder, **{VISIBLE: "2-3"}), machine(folder, **{VISIBLE: "3"})
    with first.held(loading()) as cores:
        assert cores == (2,)
        assert [holder.core for holder in second.holders()] == [2]
        with (
            pytest.raises(
                LoadError, match=r"SW_LOAD_CORES.*30 of 32 that are free; core 3 is held"
            ),
            second.held(loading()),
        ):
            pass
        with machine(folder, **{NUMBER: "2"}).held(loading(ranks=2)) as free:
            assert free == (0, 1)
            with machine(folder, **{NUMBER: "2"}).held(loading(ranks=2)) as next_to:
                assert next_to == (4, 5)
    with second.held(loading()) as cores:
        assert cores == (3,)
    assert not second.holders()


def test_a_core_of_a_process_that_was_killed_is_free(folder: Path) -> None:
    environment = {"SHARDWRIGHT_MACHINE": str(folder / "machine"), VISIBLE: "5"}
    code = (
        "import time\n"
        "from shardwright.compiler.machine.target import load_target\n"
        "from shardwright.orchestrator.runtime.machine import Loading, Machine\n"
        f"m = Machine(load_target({TRN1.name!r}), {environment})\n"
        "with m.held(Loading(model='m', uuid='0', ranks=1, memory={})):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "held\n"
    other = machine(folder, **{VISIBLE: "5"})
    assert [holder.pid for holder in other.holders()] == [child.pid]
    with pytest.raises(LoadError, match=rf"held by process {child.pid}"), other.held(loading()):
        pass
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not other.holders()
    with other.held(loading()) as cores:
        assert cores == (5,)


@pytest.mark.parametrize(
    ("said", "ranks", "cores"),
    [
        ({VISIBLE: "0-31"}, 32, tuple(range(32))),
        ({VISIBLE: "8-15"}, 8, tuple(range(8, 16))),
        ({VISIBLE: "3-6"}, 2, (4, 5)),
        ({VISIBLE: "4", NUMBER: "9"}, 1, (4,)),  # the first of the two beats the second
        ({VISIBLE: "4-11"}, 8, None),
        ({VISIBLE: "0-3"}, 4, None),
        ({NUMBER: "33"}, 1, None),
        ({NUMBER: "1"}, 2, None),
        ({VISIBLE: "30-32"}, 1, None),
    ],
)
def test_collectives_of_trn1_lie_on_multiples_of_their_number(
    said: Mapping[str, str], ranks: int, cores: tuple[int, ...] | None, folder: Path
) -> None:
    if cores is None:
        with pytest.raises(LoadError) as told, machine(folder, **said).held(loading(ranks)):
            pass
        assert status_of(told.value) is Status.NRT_LOAD_NOT_ENOUGH_NC
        return
    with machine(folder, **said).held(loading(ranks)) as found:
        assert found == cores


def test_neighbours_share_a_bank_at_logical_cores_of_1(folder: Path) -> None:
    """24 GiB for cores 0 and 1; at logical cores of 2 each core has a bank for itself."""
    first = machine(folder, trn2="1", **{VISIBLE: "0"})
    neighbour, far = (machine(folder, trn2="1", **{VISIBLE: core}) for core in ("1", "2"))
    assert (first.bank_bytes, first.bank_of(1)) == (24 * GIB, (0, range(2)))
    with first.held(loading(gib=20)):
        with (
            pytest.raises(LoadError, match=r"SW_LOAD_MEMORY.*bank 0 .* has 4.00 of 24.00") as told,
            neighbour.held(loading(gib=5)),
        ):
            pass
        assert "NC 0: m" in told.value.diagnostic.message and "Tensors" in str(told.value)
        with neighbour.held(loading(gib=4)), far.held(loading(gib=20)):
            assert len(first.holders()) == 3
    wide = machine(folder, lnc=2)
    assert (wide.bank_bytes, wide.bank_of(1)) == (24 * GIB, (1, range(1, 2)))


def test_the_reserve_is_micro_code_and_rings() -> None:
    assert reserve_of(TRN1) == {"model code": 96 * 10**6, "DMA rings": 64 * 10**6}
    assert reserve_of(logical(TRN2, 2))["model code"] == 2 * 96 * 10**6
    assert sum(reserve_of(TRN2).values()) == TRN2.reserve_bytes_per_core


def test_the_table_has_the_columns_of_the_runtime() -> None:
    found = cells({"tensors": 3, "model code": 4, "shared scratchpad": 5})
    assert tuple(found) == COLUMNS and found["TOTAL"] == 12 and found["Tensors"] == 3
    text = report({"a": {"tensors": 2 * GIB}, "b": {"tensors": 2**20, "model constants": 12}})
    assert text.splitlines()[0].split() == ["TOTAL", "Model", "Constants", "Tensors"]
    assert text.splitlines()[2].split() == ["b", "1.000MB", "12B", "1.000MB"]


def test_statuses_are_those_of_the_runtime() -> None:
    assert {int(Status.NRT_EXEC_BAD_INPUT), int(Status.NRT_NETWORK_PROXY_FAILURE)} == {1002, 1206}
    made = with_status(SimulationError("SW_SIM_INDEX", "outside"))
    assert made.diagnostic.message == "outside; NRT_EXEC_OOB (1006)"
    assert isinstance(made, SimulationError) and with_status(made) is made
    typed = UsageError("SW_NETWORK", "too many ranks")
    assert with_status(typed) is typed
    assert status_of(LoadError("SW_NEFF_MAGIC", "")) is Status.NRT_INVALID
    assert status_of(SimulationError("SW_L1_KERNEL", "")) is Status.NRT_EXEC_COMPLETED_WITH_ERR


def test_a_run_holds_cores_and_leaves_what_it_did(
    neff: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["neff", "run", str(neff), "--inputs", "in.npz", "--outputs", "out.npz"]
    assert main(words) == 0 and not Path("machine").exists()  # a machine of its own
    monkeypatch.setenv(VISIBLE, "4")
    monkeypatch.setenv("NEURON_RT_LOG_LEVEL", "INFO")
    monkeypatch.setenv("NEURON_RT_INSPECT_ENABLE", "1")
    assert main(words) == 0
    told = capsys.readouterr().err
    assert "holds core 4 of this host's trn1.32xlarge" in told and "NRT_SUCCESS (0)" in told
    assert "Profiler Buffers" in told and "1.863GB" in told  # 2 GB
    (profile,) = Path("output").glob("*.ntff")
    assert json.loads(profile.read_text())["is_simulation"] is True
    monkeypatch.setenv("NEURON_RT_EXEC_TIMEOUT", "0.000001")
    assert main(words) == 72
    assert "NRT_TIMEOUT (5)" in capsys.readouterr().err
    monkeypatch.setenv("NEURON_RT_EXEC_TIMEOUT", "30")
    np.savez("bad.npz", arg0=np.ones((2, 2), np.float32))
    assert main([*words[:4], "bad.npz", *words[5:]]) == 72
    assert "NRT_EXEC_BAD_INPUT (1002)" in capsys.readouterr().err
    ran = Machine(TRN1).executions()
    assert [one.status for one in ran] == [0, 5, 1002] and ran[0].cores == [4]
    assert ran[0].flops == 2 * 128**3 and ran[0].latency_s > 1e-4


def test_the_page_of_the_scratchpad_is_that_of_the_file(
    neff: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_SCRATCHPAD_PAGE_SIZE", "1024")
    assert main(["neff", "run", "p.neff", "--time"]) == 0
    monkeypatch.setenv("NEURON_SCRATCHPAD_PAGE_SIZE", "512")
    assert main(["neff", "run", "p.neff", "--time"]) == 72
    assert main(["neff", "run", "m.neff", "--time"]) == 0  # which was laid out for none


def test_a_value_that_is_none_ends_a_run(neff: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_SEED", "x")
    assert main(["neff", "run", str(neff), "--time"]) == UsageError.exit_code
