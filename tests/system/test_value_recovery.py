"""Value runs that are interrupted: a lost host, a killed process, damaged checkpoints. What comes
out is what a calm run gives."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from shardwright.compiler.diagnostics import DiagnosticError, ExecutionError, LoadError
from shardwright.compiler.neff.bundle import Bundle
from shardwright.compiler.neff.reader import Container
from shardwright.compiler.neff.writer import pack
from shardwright.orchestrator.cli import main
from shardwright.orchestrator.values.checkpoint import Checkpoint, kept_buffers, steps_in
from shardwright.orchestrator.values.process_hosts import ProcessHosts
from shardwright.orchestrator.values.value_run import Checkpoints, Values
from shardwright.sim_cluster.values.rank_host import RankHost
from shardwright.sim_cluster.values.run_values import (
    HostLostError,
    Hosts,
    LocalHosts,
    Reply,
    ValueRun,
)
from tests.support.cells import long_in_matrix
from tests.support.small_job import write_job
from tests.support.value_training import (
    IDENTITY,
    SOURCE,
    Told,
    packed,
    pids_of,
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
            pid = pids_of(self.hosts)[-1]
            os.kill(pid, signal.SIGKILL)


class Stopping:
    """Stops a host's process after the first step was saved: it lives, and never answers again.
    `shorten` is given the limit until it is found."""

    SHORT_S = 2.0

    def __init__(self, hosts: Hosts, shorten: Callable[[float], None]) -> None:
        self.hosts, self.shorten = hosts, shorten
        self.why: list[str] = []
        self.pid = 0

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        if event == "checkpoint.saved" and fields["step"] == 1 and not self.pid:
            self.pid = pids_of(self.hosts)[-1]
            os.kill(self.pid, signal.SIGSTOP)
            self.shorten(self.SHORT_S)
        if event == "host.lost":
            self.why.append(fields["why"])
            self.shorten(600.0)  # a new host takes a while to start


@pytest.mark.matrix
def test_a_host_that_hangs_is_lost(
    small_bundle: Bundle, calm: tuple[Values, Path], tmp_path: Path
) -> None:
    hosts = ProcessHosts(*packed(small_bundle), 600.0)
    stopping = Stopping(hosts, lambda limit_s: setattr(hosts.watch, "limit_s", limit_s))
    found = training(small_bundle, tmp_path, STEPS, hosts=hosts, told=Told(stopping))
    assert stopping.why == ["no answer within run.host_timeout_s = 2 s"]
    same(found, calm[0])


def test_a_host_that_takes_no_requests_is_lost(small_bundle: Bundle) -> None:
    """What is larger than a socket holds cannot be written to one that does not read."""
    hosts = ProcessHosts(*packed(small_bundle), 600.0)
    hosts.ask(1, "indices").answer()
    os.kill(pids_of(hosts)[1], signal.SIGSTOP)
    hosts.watch.limit_s = Stopping.SHORT_S
    with pytest.raises(HostLostError, match=r"host 1: no answer within run\.host_timeout_s"):
        hosts.ask(1, "digests", [bytes(2**24)]).answer()
    hosts.close()


def test_a_host_that_has_answered_is_not_late(small_bundle: Bundle) -> None:
    """However long we do not look."""
    hosts = ProcessHosts(*packed(small_bundle), 600.0)
    reply, late = hosts.ask(0, "indices"), threading.Event()
    (worker, *_) = hosts._workers
    worker.connection.poll(None)
    with hosts.watch.waiting(worker):
        hosts.watch.limit_s = 0.01
        late.wait(2.0)
    assert reply.answer() == []
    hosts.close()


@pytest.mark.parametrize("every", long_in_matrix((1, 3), (3,)))
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
    pids = pids_of(hosts)
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
    half = tmp_path / "step-00000099"  # as an interrupt leaves it
    half.mkdir()
    (half / "rank-00000-0123456789abcdef.neff").touch()
    done = Checkpoint(steps_in(tmp_path)[0]).head.step
    told = Told()
    steps = max(STEPS, done + 1)
    found = training(small_bundle, tmp_path, steps, resume=True, told=told)
    assert told.events[0] == "values.resumed"
    assert found.losses[:STEPS] == calm[0].losses
    same(_first(found, STEPS), calm[0])
    assert not half.exists()


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


@pytest.mark.matrix
def test_without_the_comparison_no_more_than_a_part_is_drawn_at_a_time(
    small_bundle: Bundle, calm: tuple[Values, Path], tmp_path: Path
) -> None:
    """Nearly the same state, in parts; and, on two hosts, the same bits as on one."""
    whole = next(SOURCE.state({}))
    names, sizes = list(whole), {name: leaf.nbytes for name, leaf in whole.items()}
    largest = max(sizes.values())
    source = replace(SOURCE, compare=False, part_bytes=largest)
    pair = [name for name in names if sizes[name] == largest][:2]
    parts = [set(part) for part in source.state({"pair": pair})]
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert set(pair) in parts and max(map(len, parts)) > 1 and len(parts) < len(names)
    assert all(sum(sizes[n] for n in part) <= largest for part in parts if part != set(pair))
    alone = training(small_bundle, tmp_path / "1", 2, source=source)
    hosts = process_hosts(small_bundle)
    apart = training(small_bundle, tmp_path / "2", 2, source=source, hosts=hosts)
    assert alone.losses == apart.losses == pytest.approx(calm[0].losses[:2], rel=1e-5)
    assert not alone.after_one and not apart.after_one
    last = steps_in(tmp_path / "1")[0].name
    assert tree(tmp_path / "1" / last) == tree(tmp_path / "2" / last)


def blas_threads() -> set[int]:
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


@pytest.mark.matrix
def test_a_job_without_the_comparison_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And multiplies on one thread, however many BLAS had before and has again."""
    had: list[set[int]] = []
    step = ValueRun.step
    monkeypatch.setattr(ValueRun, "step", lambda *a: had.append(blas_threads()) or step(*a))
    job = write_job(tmp_path, run={"steps": 1})
    words = ["run", str(job), "--no-compare", "--hosts", "2", "--executor", "inline"]
    with threadpool_limits(2, "blas"):
        assert main([*words, "--progress", "quiet", "--out", str(tmp_path / "out")]) == 0
        assert (had, blas_threads()) == ([{1}], {2})
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


class EndedError(BaseException):
    """What a kill is to a process: nothing after it is done, cleaning up neither."""


@contextmanager
def ended_at(number: int) -> Iterator[list[str]]:
    """Inside, the first so many changes of the disk are made, and nothing after them."""
    done: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def change(*args: Any, **kwargs: Any) -> Any:
            if len(done) >= number:
                raise EndedError
            done.append(name)
            return real(*args, **kwargs)

        return change

    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "unlink", "mkdir", "rmdir"):
            patch.setattr(os, name, counted(name))
        yield done


def test_a_run_that_is_ended_while_it_saves_leaves_its_checkpoint_or_the_one_before(
    small_bundle: Bundle, calm: tuple[Values, Path], tmp_path: Path
) -> None:
    """A second run in the place of a first one that it does not go on from, ended after every
    change it makes to the disk: one of the two can always go on."""
    run = ValueRun(small_bundle.programs, small_bundle.manifest, check_l0=False)
    (state,) = SOURCE.state({})
    run.load(state)
    run.step(next(iter(SOURCE.batches(0))))
    seen = set()
    for number in count():
        folder = Path(shutil.copytree(calm[1], tmp_path / str(number)))
        second = Checkpoints(folder, 1, {"test": 2})
        with suppress(EndedError), ended_at(number) as done:
            second.save(run, 1, [7.0])
        left = {}
        for name, run_of in (("first", Checkpoints(folder, 1, IDENTITY)), ("second", second)):
            with suppress(LoadError):
                found = run_of.last()
                assert found is not None
                for _, _ in found.leaves():  # all files are there
                    pass
                run_of.first_state()
                left[name] = found.head.step
        assert left in ({"first": STEPS}, {"second": 1}), (number, done)
        seen |= left.keys()
        if len(done) < number:
            break
    assert seen == {"first", "second"} and number > 10
    assert [p.name for p in steps_in(folder)] == ["step-00000001"]


def test_a_run_goes_on_from_its_own_checkpoint_beside_another_runs(
    small_bundle: Bundle, calm: tuple[Values, Path], tmp_path: Path
) -> None:
    """As a kill leaves them: those of a first run, and the first of a second one."""
    folder, told = Path(shutil.copytree(calm[1], tmp_path / "both")), Told()
    one = training(small_bundle, tmp_path / "one", 1, identity={"test": 2})
    shutil.rmtree(folder / "step-00000001")
    shutil.copytree(tmp_path / "one" / "step-00000001", folder / "step-00000001")
    found = training(small_bundle, folder, 2, resume=True, identity={"test": 2}, told=told)
    assert told.events == ["values.resumed", "checkpoint.saved"]
    assert found.losses[:1] == one.losses and found.losses == calm[0].losses[:2]
    assert [p.name for p in steps_in(folder)] == ["step-00000002", "step-00000001"]


HOSTILE_NAMES = (
    "../../../tmp/x",
    "/etc/passwd",
    "a/../b",
    "a//b",
    "",
    "C:evil",
    "\\\\host\\share",
    "a\\b",
    "a\0b",
    "a\x1b[2Jb",
    "a\u202eb",
    "x" * 5000,
)


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_forged_name_of_a_leaf_is_no_name_in_an_archive(
    calm: tuple[Values, Path], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(calm[1] / "step-00000004", tmp_path / "step-00000004"))
    head = Checkpoint(path).head
    leaf = next(b.name for b in kept_buffers(head.manifest) if b.initial == "given")
    rewritten(path, lambda meta: renamed(meta, leaf, name))
    out = tmp_path / "s.npz"
    assert main(["checkpoint", "gather", str(path), "--out", str(out)]) == 72
    err = capsys.readouterr().err
    assert "SW_NEFF_CONTENT" in err and "no name of an array" in err
    assert not {"\x1b", "\0", "\u202e"} & set(err)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def renamed(meta: dict[str, Any], leaf: str, name: str) -> None:
    """A buffer as the whole of a leaf with another name."""
    for row in meta["manifest"]["buffers"]:
        if row[0] == leaf:
            row[8] = [name, 0, 0]


def file_of(path: Path, rank: int) -> Path:
    (file,) = path.glob(f"rank-{rank:05d}-*.neff")
    return file


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
    shutil.copy(file_of(path.parent, 1), path)


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
    file = file_of(folder / "step-00000004", 0)
    damage(file)
    with pytest.raises(LoadError, match=file.name):
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


def digest_of_another_place(meta: dict[str, Any]) -> None:
    """Digests become names of files."""
    meta["files"][0][1] = "../../../" + meta["files"][0][1][9:]


def no_stages(meta: dict[str, Any]) -> None:
    meta["manifest"]["schedules"] = []


def endless_mesh(meta: dict[str, Any]) -> None:
    """More ranks than can be counted through."""
    meta["manifest"]["mesh"] = [[name, 2**24] for name in ("a", "b", "c")]


def rows_of_nothing(meta: dict[str, Any]) -> None:
    """A stack of more leaves than it has rows."""
    row = next(r for r in meta["manifest"]["buffers"] if r[6] == "given" and r[1] != "batch")
    row[8] = None
    meta["manifest"]["stacks"] = [[row[0], [f"leaf{n}" for n in range(10**4)]]]


def part_beyond_the_dims(meta: dict[str, Any]) -> None:
    row = next(r for r in meta["manifest"]["buffers"] if r[6] == "given" and r[1] != "batch")
    row[8] = [row[0], 9, 0]


def huge_buffer(meta: dict[str, Any]) -> None:
    """What the manifest says of sizes is held against the files, not allocated."""
    for buffer in meta["manifest"]["buffers"]:
        buffer[3] = [2**40, *buffer[3]]


FORGED = (
    other_identity,
    missing_rank,
    unlisted_file,
    no_steps,
    not_a_list,
    digest_of_another_place,
    no_stages,
    endless_mesh,
    rows_of_nothing,
    part_beyond_the_dims,
    huge_buffer,
)


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
    with pytest.raises(LoadError):
        dict(Checkpoint(path).leaves())


JUNK: tuple[Any, ...] = (None, -1, 0, 2**40, 0.5, True, "", "x", [], [[]], [0], {}, {"a": 1}, b"x")


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container inside of plain data, with each of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


@pytest.mark.parametrize("seed", long_in_matrix(range(4), (0,), (1, 2, 3)))
def test_a_head_with_anything_in_it_is_read_or_refused(
    small_bundle: Bundle, calm: tuple[Values, Path], tmp_path: Path, seed: int
) -> None:
    """Whatever stands at any place of it: no other error than those of files, and no state of
    others' making without one."""
    path = tmp_path / "step-00000004"
    shutil.copytree(calm[1] / path.name, path)
    before = (path / "checkpoint.neff").read_bytes()
    draw, refused = random.Random(seed), 0
    for _ in range(100):
        (path / "checkpoint.neff").write_bytes(before)

        def change(meta: dict[str, Any]) -> None:
            # Tables as often as what is in them.
            table = draw.choice(
                [meta, meta["manifest"], meta["manifest"]["buffers"], meta["holders"]]
            )
            holder, key = draw.choice(list(places(table)))
            holder[key] = draw.choice(JUNK)

        rewritten(path, change)
        run = ValueRun(small_bundle.programs, small_bundle.manifest, check_l0=False)
        saved = Checkpoints(tmp_path, 1, IDENTITY)
        try:
            found = Checkpoint(path)
            for leaf, array in found.leaves():
                assert isinstance(leaf, str) and isinstance(array, np.ndarray | np.generic)
            saved.restore(run, found)
        except DiagnosticError:
            refused += 1
    assert refused > 20


@pytest.mark.matrix
@pytest.mark.ray
def test_actors_give_the_same_bits_and_are_replaced(
    small_bundle: Bundle, calm: tuple[Values, Path], tmp_path: Path
) -> None:
    from shardwright.orchestrator.values.ray_hosts import RayHosts

    hosts = RayHosts(*packed(small_bundle))
    told = Told(Killing(hosts, [2]))
    found = training(small_bundle, tmp_path, STEPS, hosts=hosts, told=told)
    assert told.events.count("host.lost") == 1
    same(found, calm[0])
    last = steps_in(tmp_path)[0].name
    assert tree(tmp_path / last) == tree(calm[1] / last)


@pytest.mark.ray
@pytest.mark.exhaustive
def test_an_actor_that_hangs_is_lost(
    small_bundle: Bundle, calm: tuple[Values, Path], tmp_path: Path
) -> None:
    from shardwright.orchestrator.values.ray_hosts import RayHosts

    hosts = RayHosts(*packed(small_bundle), 600.0)
    stopping = Stopping(hosts, lambda limit_s: setattr(hosts, "timeout_s", limit_s))
    found = training(small_bundle, tmp_path, STEPS, hosts=hosts, told=Told(stopping))
    assert stopping.why == ["no answer within run.host_timeout_s = 2 s"]
    same(found, calm[0])
    assert not Path(f"/proc/{stopping.pid}/exe").exists()


def test_a_lost_process_says_which(small_bundle: Bundle) -> None:
    hosts = process_hosts(small_bundle)
    os.kill(pids_of(hosts)[1], signal.SIGKILL)
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


@pytest.mark.matrix
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
