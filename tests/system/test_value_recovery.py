"""Value runs that are interrupted: a lost host, a killed process, damaged checkpoints. What comes
out is what a calm run gives."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.diagnostics import DiagnosticError, ExecutionError, LoadError
from compiler.neff.bundle import Bundle
from compiler.neff.reader import Container
from compiler.neff.writer import pack
from orchestrator.cli import main
from orchestrator.values.checkpoint import Checkpoint, steps_in
from orchestrator.values.process_hosts import ProcessHosts
from orchestrator.values.value_run import Values
from sim_cluster.rank_host import RankHost
from sim_cluster.run_values import HostLostError, LocalHosts, Reply, ValueRun
from tests.support.small_job import write_job
from tests.support.value_training import (
    SOURCE,
    Told,
    packed,
    process_hosts,
    training,
)

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4


@pytest.fixture(scope="module")
def calm(small_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> tuple[Values, Path]:
    """A run in one process, and its checkpoints."""
    folder = tmp_path_factory.mktemp("calm")
    return training(small_bundle, folder, STEPS), folder


def same(found: Values, calm: Values) -> None:
    assert found.losses == calm.losses
    assert {n: a.tobytes() for n, a in found.after_one.items()} == {
        n: a.tobytes() for n, a in calm.after_one.items()
    }


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class Killing:
    """Kills a host's process after a step was saved, so that it is lost in the next."""

    def __init__(self, hosts: ProcessHosts, after: list[int]) -> None:
        self.hosts, self.after = hosts, after

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        if event == "checkpoint.saved" and self.after and fields["step"] == self.after[0]:
            self.after.pop(0)
            pid = int(self.hosts.labels()[-1].rpartition(":")[2])
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("every", [1, 3])
def test_the_ranks_of_a_lost_host_come_back_elsewhere(
    small_bundle: Bundle, calm: tuple[Values, Path], tmp_path: Path, every: int
) -> None:
    hosts = process_hosts(small_bundle)
    told = Told(Killing(hosts, [1, 3]))
    found = training(small_bundle, tmp_path, STEPS, hosts=hosts, every=every, told=told)
    assert told.events.count("host.lost") == 2
    same(found, calm[0])
    last = steps_in(tmp_path)[0].name
    assert tree(tmp_path / last) == tree(calm[1] / last)


def test_without_checkpoints_a_lost_host_costs_the_steps_so_far(
    small_bundle: Bundle, calm: tuple[Values, Path], tmp_path: Path
) -> None:
    hosts = process_hosts(small_bundle)
    pids = [int(label.rpartition(":")[2]) for label in hosts.labels()]
    for pid in pids:  # both at once
        os.kill(pid, signal.SIGKILL)
    told = Told()
    same(training(small_bundle, tmp_path, 2, hosts=hosts, every=0, told=told), _first(calm[0], 2))
    assert 1 <= told.events.count("host.lost") <= 2
    assert not steps_in(tmp_path)


def _first(values: Values, steps: int) -> Values:
    return Values(values.losses[:steps], values.after_one, values.l0)


def test_hosts_that_are_lost_again_and_again_end_the_run(
    small_bundle: Bundle, tmp_path: Path
) -> None:
    spans, _ = packed(small_bundle)
    broken = ProcessHosts(spans, [b"no host", b"no host"])
    with pytest.raises(ExecutionError, match=r"ranks 0-1") as caught:
        training(small_bundle, tmp_path, 1, hosts=broken)
    assert caught.value.code == "SW_HOST_LOST"


def test_a_killed_run_is_resumed(
    small_bundle: Bundle, calm: tuple[Values, Path], tmp_path: Path
) -> None:
    """kill -9 of the process that drives; its hosts end by themselves."""
    command = [sys.executable, "-m", "tests.support.value_training"]
    running = subprocess.Popen(
        [*command, str(small_bundle.path), str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},  # as in these tests
        start_new_session=True,
    )
    while not steps_in(tmp_path):
        assert running.poll() is None
        time.sleep(0.05)
    running.kill()
    running.wait()
    (tmp_path / ".step-00000099.half").mkdir()  # as an interrupt leaves it
    done = Checkpoint(steps_in(tmp_path)[0]).head.step
    told = Told()
    steps = max(STEPS, done + 1)
    found = training(small_bundle, tmp_path, steps, resume=True, told=told)
    assert told.events[0] == "values.resumed"
    assert found.losses[:STEPS] == calm[0].losses
    same(_first(found, STEPS), calm[0])
    assert not list(tmp_path.glob(".step-*"))


def test_a_run_that_is_done_gives_its_values_again(
    small_bundle: Bundle, calm: tuple[Values, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(calm[1], tmp_path / "done"))
    before = tree(folder)
    same(training(small_bundle, folder, STEPS, resume=True), calm[0])
    assert tree(folder) == before
    assert [p.name for p in steps_in(folder)] == [f"step-{n:08d}" for n in (4, 3, 1)]


def test_gather_gives_the_state_of_the_run(
    small_bundle: Bundle, calm: tuple[Values, Path], tmp_path: Path
) -> None:
    run = ValueRun(small_bundle.programs, small_bundle.manifest, check_l0=False)
    (state,) = SOURCE.state({})
    run.load(state)
    for _, batch in zip(range(STEPS), SOURCE.batches(0), strict=False):
        run.step(batch)
    assert main(["checkpoint", "gather", str(calm[1]), "--out", str(tmp_path / "s.npz")]) == 0
    expected = run.gather(state)
    with np.load(tmp_path / "s.npz", allow_pickle=False) as found:
        assert set(found.files) == set(state)
        for name in state:
            assert found[name].tobytes() == expected[name].tobytes()
            assert found[name].shape == state[name].shape
    first = ["checkpoint", "gather", str(calm[1] / "step-00000001"), "--out"]
    assert main([*first, str(tmp_path / "one.npz")]) == 0
    with np.load(tmp_path / "one.npz", allow_pickle=False) as found:
        assert {n: found[n].tobytes() for n in found.files} == {
            n: a.tobytes() for n, a in calm[0].after_one.items()
        }


def test_without_the_comparison_no_more_than_a_leaf_is_drawn_at_a_time(
    small_bundle: Bundle, calm: tuple[Values, Path], tmp_path: Path
) -> None:
    """Nearly the same state, in parts; and, on two hosts, the same bits as on one."""
    source = replace(SOURCE, compare=False)
    names = list(next(SOURCE.state({})))
    parts = [list(part) for part in source.state({"pair": names[1:3]})]
    assert sorted(map(len, parts)) == [1] * (len(names) - 2) + [2]
    assert names[1:3] in parts
    alone = training(small_bundle, tmp_path / "1", 2, source=source)
    hosts = process_hosts(small_bundle)
    apart = training(small_bundle, tmp_path / "2", 2, source=source, hosts=hosts)
    assert alone.losses == apart.losses == pytest.approx(calm[0].losses[:2], rel=1e-5)
    assert not alone.after_one and not apart.after_one
    last = steps_in(tmp_path / "1")[0].name
    assert tree(tmp_path / "1" / last) == tree(tmp_path / "2" / last)


def test_a_job_without_the_comparison_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, run={"steps": 1})
    words = ["run", str(job), "--no-compare", "--hosts", "2", "--executor", "inline"]
    assert main([*words, "--progress", "quiet", "--out", str(tmp_path / "out")]) == 0
    assert "not compared with the unsharded step" in capsys.readouterr().out
    numerics = json.loads((tmp_path / "out" / "report.json").read_text())["numerics"]
    assert numerics["passed"] and numerics["worst_param_error"] is None
    assert set(numerics["l0"]) == {"forward", "backward", "update"}


def test_a_damaged_head_costs_one_checkpoint(
    small_bundle: Bundle, calm: tuple[Values, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(calm[1], tmp_path / "damaged"))
    head = folder / "step-00000004" / "checkpoint.neff"
    data = bytearray(head.read_bytes())
    data[len(data) // 2] ^= 1
    head.write_bytes(data)
    told = Told()
    found = training(small_bundle, folder, STEPS, resume=True, told=told)
    assert told.events == ["values.resumed", "checkpoint.saved"]
    same(found, calm[0])
    assert [f.code for f in found.findings] == ["SW_CHECKPOINT"]


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


def linked(path: Path) -> None:
    other = path.with_name("elsewhere")
    path.rename(other)
    path.symlink_to(other)


def shorter(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def another(path: Path) -> None:
    shutil.copy(path.with_name("rank-00001.neff"), path)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE = (flipped, linked, shorter, another, empty, pipe, Path.unlink)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_of_a_rank_is_refused(
    small_bundle: Bundle, calm: tuple[Values, Path], tmp_path: Path, damage: Any
) -> None:
    folder = Path(shutil.copytree(calm[1], tmp_path / "damaged"))
    damage(folder / "step-00000004" / "rank-00000.neff")
    with pytest.raises(LoadError, match=r"rank-00000\.neff"):
        training(small_bundle, folder, STEPS + 1, resume=True)


def rewritten(path: Path, change: Any) -> None:
    """The head with other contents, and right checksums."""
    meta = Container.open(path / "checkpoint.neff", "checkpoint").meta
    change(meta)
    (path / "checkpoint.neff").write_bytes(pack("checkpoint", meta, {}))


def other_identity(meta: dict[str, Any]) -> None:
    meta["identity"] = {"test": 2}


def missing_rank(meta: dict[str, Any]) -> None:
    meta["holders"][0][1].pop()


def unlisted_file(meta: dict[str, Any]) -> None:
    meta["files"].pop()


def no_steps(meta: dict[str, Any]) -> None:
    meta["losses"] = []


def not_a_list(meta: dict[str, Any]) -> None:
    meta["files"] = 7


def huge_buffer(meta: dict[str, Any]) -> None:
    """What the manifest says of sizes is held against the files, not allocated."""
    for buffer in meta["manifest"]["buffers"]:
        buffer[3] = [2**40, *buffer[3]]


FORGED = (other_identity, missing_rank, unlisted_file, no_steps, not_a_list, huge_buffer)


@pytest.mark.parametrize("change", FORGED)
def test_a_forged_head_is_refused(
    small_bundle: Bundle, calm: tuple[Values, Path], tmp_path: Path, change: Any
) -> None:
    path = tmp_path / "step-00000004"
    shutil.copytree(calm[1] / path.name, path)
    rewritten(path, change)
    if change is other_identity:
        with pytest.raises(LoadError, match="requires test 2, got 1") as caught:
            training(small_bundle, tmp_path, STEPS + 1, resume=True)
        assert caught.value.code == "SW_CHECKPOINT"
        return
    with pytest.raises(DiagnosticError):
        dict(Checkpoint(path).leaves())


@pytest.mark.ray
def test_actors_give_the_same_bits_and_are_replaced(
    small_bundle: Bundle, calm: tuple[Values, Path], tmp_path: Path
) -> None:
    from orchestrator.values.ray_hosts import RayHosts

    hosts = RayHosts(*packed(small_bundle))
    told = Told(Killing(hosts, [2]))
    found = training(small_bundle, tmp_path, STEPS, hosts=hosts, told=told)
    assert told.events.count("host.lost") == 1
    same(found, calm[0])
    last = steps_in(tmp_path)[0].name
    assert tree(tmp_path / last) == tree(calm[1] / last)


def test_a_lost_process_says_which(small_bundle: Bundle) -> None:
    hosts = process_hosts(small_bundle)
    os.kill(int(hosts.labels()[1].rpartition(":")[2]), signal.SIGKILL)
    hosts.ask(0, "indices").answer()
    with pytest.raises(HostLostError) as caught:
        hosts.ask(1, "indices").answer()
    assert caught.value.host == 1
    hosts.close()


class Losing(LocalHosts):
    """Hosts in this process, of which the last is lost when it is asked for `method`, or to begin
    the program of that name, if `when` says so of the number of the call."""

    def __init__(
        self,
        spans: Sequence[range],
        packed: Sequence[bytes],
        method: str,
        when: Callable[[int], bool] = lambda call: call == 1,
    ) -> None:
        super().__init__([RankHost.unpacked(data) for data in packed])
        self.packed, self.method, self.when, self.calls = packed, method, when, 0

    def ask(self, host: int, method: str, *args: object, incoming: Any = None) -> Reply:
        if host == len(self.hosts) - 1 and self.method in (method, *args[1:2]):
            self.calls += 1
            if self.when(self.calls):
                raise HostLostError(host)
        return super().ask(host, method, *args, incoming=incoming)

    def replace(self, host: int) -> None:
        self.hosts = [*self.hosts[:host], RankHost.unpacked(self.packed[host])]


@pytest.mark.parametrize("every", [0, 1])
def test_what_a_half_made_step_has_added_up_is_forgotten(
    small_bundle: Bundle, calm: tuple[Values, Path], tmp_path: Path, every: int
) -> None:
    """Hosts that live on have the accumulators of the step in which another was lost."""
    hosts = Losing(*packed(small_bundle), "update")
    told = Told()
    found = training(small_bundle, tmp_path, 2, hosts=hosts, every=every, told=told)
    assert told.events.count("host.lost") == 1
    same(found, _first(calm[0], 2))


def test_a_host_that_is_lost_in_the_same_step_each_time_ends_the_run(
    small_bundle: Bundle, tmp_path: Path
) -> None:
    """Steps that are made again are no progress."""
    hosts = Losing(*packed(small_bundle), "update", lambda call: call % 2 == 0)
    with pytest.raises(ExecutionError, match="3th time without a new step"):
        training(small_bundle, tmp_path, STEPS, hosts=hosts, every=0)


@pytest.mark.parametrize("method", ["put_bytes", "indices"])
def test_a_host_that_is_lost_before_or_after_the_steps_is_replaced(
    small_bundle: Bundle, calm: tuple[Values, Path], tmp_path: Path, method: str
) -> None:
    """While a checkpoint is put back, and when all steps are made."""
    folder = Path(shutil.copytree(calm[1], tmp_path / "done"))
    hosts, told = Losing(*packed(small_bundle), method), Told()
    found = training(small_bundle, folder, STEPS, resume=True, hosts=hosts, told=told)
    assert told.events.count("host.lost") == 1
    same(found, calm[0])


def test_a_run_of_fewer_steps_than_are_there_is_refused(
    small_bundle: Bundle, calm: tuple[Values, Path]
) -> None:
    with pytest.raises(LoadError, match=f"requires run.steps {STEPS} or more, got 2") as caught:
        training(small_bundle, calm[1], 2, resume=True)
    assert caught.value.code == "SW_CHECKPOINT"
