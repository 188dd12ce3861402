"""Which ranks a collective of a module is over: every mode of the specification, on grids of
replicas and partitions, against a model of the specification in NumPy and against XLA."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jaxlib import _hlo, _jax

from shardwright.collectives.ops import ReplicaGroups, group_index
from shardwright.compiler.diagnostics import ImportRuleError
from shardwright.compiler.frontend.detect import import_file
from shardwright.compiler.frontend.stablehlo import (
    import_module,
    import_partition,
    import_with_shardings,
)
from shardwright.compiler.ir.reference import steps
from shardwright.compiler.ir.types import Graph
from tests.support.reference_ranks import run_collective
from tests.support.xla import run_ranks

GRIDS = [(1, 4), (4, 1), (2, 2)]  # replicas, partitions
PLAIN, CHANNEL, GLOBAL = "", "channel", "global"  # as an op says its mode
MODES = {PLAIN: "cross_replica", CHANNEL: "both", GLOBAL: "flattened_ids"}
PAIRWISE = {PLAIN: "cross_replica", CHANNEL: "cross_partition"}
X = "tensor<8x2xf32>"
SUM = """({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
  })"""
Groups = list[list[int]]


@dataclass(frozen=True)
class Line:
    """One collective of the module, and the process groups the specification gives it."""

    op: str
    said: str
    ids: Groups
    processes: Groups

    @property
    def size(self) -> int:
        return len(self.processes[0])

    @property
    def shape(self) -> tuple[int, int]:
        sizes = {"all_gather": (8, 2 * self.size), "all_to_all": (8 // self.size, 2 * self.size)}
        sizes["reduce_scatter"] = (8 // self.size, 2)
        return sizes.get(self.op, (8, 2))

    def text(self, number: int) -> str:
        handle = f"channel_handle = #stablehlo.channel_handle<handle = {number + 1}, type = 1>"
        said = {PLAIN: "", CHANNEL: f", {handle}", GLOBAL: f", {handle}, use_global_device_ids"}
        name = "source_target_pairs" if self.op == "collective_permute" else "replica_groups"
        shape = f"{len(self.ids)}x{len(self.ids[0])}" if self.ids else "0x0"
        given = {
            "all_gather": ", all_gather_dim = 1 : i64",
            "reduce_scatter": ", scatter_dimension = 0 : i64",
            "all_to_all": ", split_dimension = 0 : i64, concat_dimension = 1 : i64,"
            f" split_count = {self.size} : i64",
        }.get(self.op, "")
        body = SUM if self.op in ("all_reduce", "reduce_scatter") else ""
        dense = f"dense<{self.ids or ''}> : tensor<{shape}xi64>"
        out = "x".join(map(str, self.shape))
        return (
            f'"stablehlo.{self.op}"(%x) <{{{name} = {dense}{given}{said[self.said]}}}> {body}'
            f' : ({X}) -> tensor<{out}xf32> loc("net.py":{number + 1}:1)'
        )

    def model(self, parts: np.ndarray) -> np.ndarray:
        """What every rank has afterwards, [ranks, ...]."""
        found = np.zeros((len(parts), *self.shape), np.float32)
        for group in self.processes:
            shards = [parts[rank] for rank in group]
            if self.op == "collective_permute":
                found[group[1]] = parts[group[0]]
                continue
            for position, rank in enumerate(group):
                found[rank] = self._of_group(shards, position)
        return found

    def _of_group(self, shards: Sequence[np.ndarray], position: int) -> np.ndarray:
        if self.op == "all_gather":
            return np.concatenate(shards, axis=1)
        if self.op == "all_to_all":
            return np.concatenate([np.split(s, self.size)[position] for s in shards], axis=1)
        total = np.sum(shards, axis=0)
        return np.split(total, self.size)[position] if self.op == "reduce_scatter" else total


def processes_of(mode: str, ids: Groups, replicas: int, partitions: int) -> Groups:
    """The process groups of the specification; in mode "both", in the order XLA executes."""
    everyone = range(replicas), range(partitions)
    counts = {"cross_partition": partitions, "flattened_ids": replicas * partitions}
    ids = ids or [[*range(counts.get(mode, replicas))]]
    if mode == "flattened_ids":
        return ids
    if mode == "cross_replica":
        return [[r * partitions + p for r in group] for group in ids for p in everyone[1]]
    if mode == "cross_partition":
        return [[r * partitions + p for p in group] for group in ids for r in everyone[0]]
    return [[r * partitions + p for r in group for p in everyone[1]] for group in ids]


def lines_of(replicas: int, partitions: int) -> Iterator[Line]:
    """Every op in every mode, over all, over none, over both digits of the ids."""
    count = replicas * partitions
    for said, mode in MODES.items():
        many = count if said == GLOBAL else replicas
        for ids in [*splits(many), *([] if said == GLOBAL else [[]])]:
            processes = processes_of(mode, ids, replicas, partitions)
            for op in ("all_gather", "all_reduce", "reduce_scatter"):
                yield Line(op, said, ids, processes)
    for said, mode in PAIRWISE.items():
        many = partitions if said == CHANNEL else replicas
        for ids in splits(many):  # not [[]]: the verifier of jaxlib divides by their size
            processes = processes_of(mode, ids, replicas, partitions)
            yield Line("all_to_all", said, ids, processes)
        alone = [[n] for n in range(many)]
        processes = processes_of(mode, alone, replicas, partitions)
        yield Line("collective_broadcast", said, alone, processes)
        for ids in ([[n, (n + 1) % many] for n in range(many)], [[many - 1, 0]]):
            processes = processes_of(mode, ids, replicas, partitions)
            yield Line("collective_permute", said, ids, processes)


def splits(many: int) -> list[Groups]:
    """Ids 0 to `many` in one group, in one each, and for four over each of their two digits."""
    found = [[[*range(many)]], [[n] for n in range(many)]]
    return found + ([[[0, 1], [2, 3]], [[0, 2], [1, 3]]] if many == 4 else [])


def module(lines: Sequence[str], results: Sequence[str], grid: tuple[int, int] | None) -> str:
    """A module of a function of %x, whose lines make %y0, %y1, ..."""
    said = ""
    if grid:
        said = (
            f"attributes {{mhlo.num_replicas = {grid[0]} : i32, mhlo.num_partitions = {grid[1]} :"
            " i32}"
        )
    own = '{mhlo.sharding = "{manual}"}'  # XLA: values are those of one partition
    values = ", ".join(f"%y{n}" for n in range(len(lines)))
    body = "\n".join(f"    %y{n} = {line}" for n, line in enumerate(lines))
    return f"""module @m {said} {{
  func.func @main(%x: {X} {own}) -> ({", ".join(f"{r} {own}" for r in results)}) {{
{body}
    return {values} : {", ".join(results)}
  }}
}}"""


def of_lines(lines: Sequence[Line], grid: tuple[int, int] | None) -> str:
    results = ["tensor<" + "x".join(map(str, line.shape)) + "xf32>" for line in lines]
    return module([line.text(n) for n, line in enumerate(lines)], results, grid)


def on_ranks(graph: Graph, axes: Sequence[tuple[str, int]], parts: np.ndarray) -> list[np.ndarray]:
    """Every rank's outputs, [ranks, ...] each, by the references of the ops."""
    runs = [steps(graph, [part]) for part in parts]
    mesh, requests, found = dict(axes), [], []

    def advance(run, results) -> None:
        try:
            requests.append(run.send(results))
        except StopIteration as done:
            found.append(done.value)

    for run in runs:
        advance(run, None)
    while requests:
        ops, args = zip(*requests, strict=True)
        answers = _answers(ops[0], [a[0] if a else None for a in args], mesh)
        requests.clear()
        for run, answer in zip(runs, answers, strict=True):
            advance(run, [answer])
    return [np.stack(outputs) for outputs in zip(*found, strict=True)]


def _answers(op, sources, mesh) -> list[np.ndarray]:
    """What every rank gets for its request."""
    if op.name == "axis_index":
        indices = (group_index(mesh, op.attrs.axes, rank) for rank in range(len(sources)))
        return [np.array(index, np.int32) for index in indices]
    answers = list(sources)
    for group in ReplicaGroups.from_axes(mesh, op.attrs.axes).groups:
        results = run_collective(op, [sources[rank] for rank in group])
        for rank, result in zip(group, results, strict=True):
            answers[rank] = result
    return answers


def hlo_of(text: str) -> _hlo.HloModule:
    """The module as HLO, which has no place for its grid."""
    with mlir.make_ir_context():
        code = io.BytesIO()
        ir.Module.parse(text).operation.write_bytecode(code)
    proto = _jax.mlir.mlir_module_to_xla_computation(
        code.getvalue()
    ).as_serialized_hlo_module_proto()
    return _hlo.HloModule.from_serialized_hlo_module_proto(proto)


PARTS = np.random.default_rng(0).normal(size=(4, 8, 2)).astype(np.float32)


@pytest.mark.parametrize("form", ["stablehlo", "hlo text", "hlo proto"])
@pytest.mark.parametrize("grid", GRIDS)
def test_every_mode_is_that_of_the_specification(grid: tuple[int, int], form: str) -> None:
    lines = list(lines_of(*grid))
    data = of_lines(lines, grid).encode()
    if form != "stablehlo":
        hlo = hlo_of(data.decode())
        data = hlo.as_serialized_hlo_module_proto()
        if form == "hlo text":
            name, rest = hlo.to_string().split(",", 1)
            counts = f"replica_count={grid[0]}, num_partitions={grid[1]}"
            data = f"{name}, {counts},{rest}".encode()
    graph, found = import_file(data)
    have = on_ranks(graph, found.facts.mesh, PARTS)
    for line, value in zip(lines, have, strict=True):
        np.testing.assert_allclose(
            value, line.model(PARTS), rtol=1e-6, atol=1e-6, err_msg=f"{line}"
        )


@pytest.mark.parametrize("grid", GRIDS)
def test_the_model_is_xla(grid: tuple[int, int]) -> None:
    lines = [line for line in lines_of(*grid) if line.op != "collective_broadcast"]
    ranks = run_ranks(of_lines(lines, grid), [[part] for part in PARTS], grid)
    for line, value in zip(lines, map(np.stack, zip(*ranks, strict=True)), strict=True):
        np.testing.assert_allclose(
            value, line.model(PARTS), rtol=1e-6, atol=1e-6, err_msg=f"{line}"
        )


@pytest.mark.parametrize("grid", GRIDS)
def test_the_ids_of_a_rank_are_those_of_its_place_on_the_grid(grid: tuple[int, int]) -> None:
    lines = [f"stablehlo.{kind}_id : tensor<ui32>" for kind in ("replica", "partition")]
    graph, facts = import_partition(module(lines, ["tensor<ui32>"] * 2, grid))
    replicas, partitions = on_ranks(graph, facts.mesh, PARTS)
    assert (replicas * grid[1] + partitions).tolist() == [0, 1, 2, 3]
    assert partitions.max() + 1 == grid[1]


GLOBALLY = Line("all_reduce", GLOBAL, [[0, 1, 2, 3]], [[0, 1, 2, 3]])
RING = Line("collective_permute", CHANNEL, [[0, 1], [1, 0]], [[0, 1], [1, 0]])


@pytest.mark.parametrize(
    ("asked", "line", "ids"),
    [
        (["partition"], GLOBALLY, [[0, 1, 2, 3]]),
        (["replica"], GLOBALLY, [[0, 1, 2, 3]]),
        (["replica", "partition"], GLOBALLY, [[0, 0, 0, 0], [0, 1, 2, 3]]),
        (["replica", "partition"], RING, [[0, 0], [0, 1]]),
    ],
)
def test_without_counts_the_ids_say_how_many_ranks(
    asked: list[str], line: Line, ids: list[list[int]]
) -> None:
    lines = [line.text(0), *(f"stablehlo.{kind}_id : tensor<ui32>" for kind in asked)]
    text = module(lines, [X, *["tensor<ui32>"] * len(asked)], None)
    graph, facts = import_partition(text)
    _, *found = on_ranks(graph, facts.mesh, PARTS[: len(ids[0])])
    assert [row.tolist() for row in found] == ids


HALVES = [[0, 1], [2, 3]]
REFUSED = {
    "partitions named without a channel": ((1, 4), "all_reduce", PLAIN, HALVES, "each of 1 rep"),
    "gathered without a channel": ((1, 4), "all_gather", PLAIN, HALVES, "each of 1 replicas once"),
    "replicas named with a channel": ((4, 1), "all_to_all", CHANNEL, HALVES, "each of 1 partit"),
    "too few replicas": ((4, 1), "all_reduce", CHANNEL, [[0, 1]], "each of 4 replicas once"),
    "too few ranks": ((2, 2), "all_reduce", GLOBAL, [[0, 1]], "each of 4 ranks once"),
    "sent between partitions": ((1, 4), "collective_permute", PLAIN, [[0, 1]], "replicas below 1"),
    "sent too far": ((2, 2), "collective_permute", CHANNEL, [[0, 2]], "partitions below 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_ids_that_the_grid_does_not_have_are_refused_at_their_line(case: str) -> None:
    grid, op, said, ids, why = REFUSED[case]
    with pytest.raises(ImportRuleError, match=why) as caught:
        import_partition(of_lines([Line(op, said, ids, ids)], grid))
    assert caught.value.code == "SW_REPLICA_GROUPS"
    assert caught.value.loc is not None and caught.value.loc.file == "net.py"


def test_global_ids_without_a_channel_are_refused() -> None:
    line = Line("all_gather", PLAIN, [[0, 1, 2, 3]], [[0, 1, 2, 3]]).text(0)
    text = module([line.replace("}>", ", use_global_device_ids}>")], ["tensor<8x8xf32>"], (1, 4))
    with pytest.raises(ImportRuleError, match="channel id above 0") as caught:
        import_partition(text)
    assert caught.value.code == "SW_REPLICA_GROUPS"


def test_the_counts_of_hlo_text_are_those_of_its_header_alone() -> None:
    lines = [Line("all_reduce", PLAIN, HALVES, HALVES)]
    name, rest = hlo_of(of_lines(lines, None)).to_string().split(",", 1)
    told = f'{name}, frontend_attributes={{told="replica_count=4"}}, num_partitions=4,{rest}'
    _, found = import_file(told.replace("num_partitions=4", "replica_count=4").encode())
    assert found.facts.mesh == (("rank_0", 2), ("rank_1", 2))
    with pytest.raises(ImportRuleError, match="each of 1 replicas once"):
        import_file(told.encode())


def test_a_whole_step_has_one_replica_and_no_other_partitions_to_name() -> None:
    alone = Line("all_reduce", PLAIN, [], [[0]])
    graph = import_module(of_lines([alone], (1, 4)))
    assert [op.name for op in graph.ops] == []
    everyone = Line("all_reduce", CHANNEL, [[0]], [[0]])
    with pytest.raises(ImportRuleError, match="groups of one rank, got 4"):
        import_module(of_lines([everyone], (1, 4)))


COUNTS = ["= 0 : i32", "= -4 : i32", '= "4"', "= 4.5 : f32", "= true", "= [4]", ""]


@pytest.mark.parametrize("said", COUNTS)
@pytest.mark.parametrize("name", ["num_replicas", "num_partitions"])
@pytest.mark.parametrize("read", [import_partition, import_module, import_with_shardings])
def test_counts_are_whole_numbers_from_one_on(
    read: Callable[[str], object], name: str, said: str
) -> None:
    """In modules with collectives and without; JAX gives only what is inside a place."""
    for line in ("stablehlo.tanh %x : " + X, GLOBALLY.text(0)):
        text = f"""module attributes {{mhlo.{name} {said}}} {{
          func.func @main(%x: {X}) -> {X} {{
            %y = {line}
            return %y : {X}
          }} loc("net.py":7:1)
        }} loc(unknown)"""
        with pytest.raises(ImportRuleError, match=f"{name} requires an integer") as caught:
            read(text)
        assert caught.value.code == "SW_REPLICA_GROUPS"
        assert (caught.value.loc.file, caught.value.loc.line) == ("net.py", 7)


@pytest.mark.parametrize("count", ["0", "-1"])
@pytest.mark.parametrize("name", ["replica_count", "num_partitions"])
def test_counts_of_hlo_text_are_whole_numbers_from_one_on(name: str, count: str) -> None:
    text = f"HloModule m, {name}={count}\n\nENTRY e {{\n  ROOT r = u32[] partition-id()\n}}\n"
    with pytest.raises(ImportRuleError, match=f"at least 1, got {count} ") as caught:
        import_file(text.encode())
    assert caught.value.code == "SW_REPLICA_GROUPS"


@pytest.mark.parametrize("read", [import_module, import_with_shardings])
def test_a_whole_step_on_several_ranks_does_not_ask_for_its_own(
    read: Callable[[str], object],
) -> None:
    """A number that is 0 on every rank is known."""
    for kind, alone in (("partition", (3, 1)), ("replica", (1, 4))):
        line = f'stablehlo.{kind}_id : tensor<ui32> loc("net.py":3:1)'
        read(module([line], ["tensor<ui32>"], alone))
        with pytest.raises(
            ImportRuleError, match=f"{kind}_id requires one rank, got [34]"
        ) as caught:
            read(module([line], ["tensor<ui32>"], (3, 4)))
        assert caught.value.code == "NCC_EVRF001"
        assert caught.value.loc is not None and caught.value.loc.line == 3
