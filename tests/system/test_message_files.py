"""Files of one rank whose rows go in runs of any length, whose operand goes to a whole group, or
that send and receive: compiled, and run on all ranks, equal to XLA, or to NumPy where XLA:CPU has
no such op."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.compiler.diagnostics import ImportRuleError
from shardwright.compiler.frontend.hlo import hlo_to_stablehlo
from shardwright.compiler.frontend.stablehlo import import_partition
from tests.support.model_files import run_neff
from tests.system.test_partitioned_files import compiled

RANKS, ROWS, ROOM, WIDTH, RUNS = 4, 6, 16, 3, 2  # runs for each rank of a group
GROUPS = [[0, 1], [2, 3]]
ROW, OUT = f"tensor<{ROWS}x{WIDTH}xf32>", f"tensor<{ROOM}x{WIDTH}xf32>"
Numbers = np.ndarray  # [ranks, ranks of a group, runs]


def numbers(group: int, seed: int) -> tuple[Numbers, ...]:
    """Where runs start, how long they are, where they go, and how long those are that arrive."""
    rng = np.random.default_rng(seed)
    shape = (RANKS, group, RUNS)
    starts = rng.integers(0, ROWS, shape)
    sizes = np.minimum(rng.integers(0, 4, shape), ROWS - starts)
    got = np.empty_like(sizes)
    places = np.empty_like(sizes)
    for rank in range(RANKS):
        base, here = rank - rank % group, rank % group
        got[rank] = [sizes[base + source, here] for source in range(group)]
        order = rng.permutation(group * RUNS)  # runs lie in any order, with gaps
        ends = np.cumsum(got[rank].reshape(-1)[order])
        at = np.empty(group * RUNS, np.int64)
        at[order] = ends - got[rank].reshape(-1)[order] + 1
        for source in range(group):
            places[base + source, here] = at.reshape(group, RUNS)[source]
    flat = (n.reshape(RANKS, -1).astype(np.int32) for n in (starts, sizes, places, got))
    return tuple(flat)


def sent(rows: np.ndarray, output: np.ndarray, group: int, *given: np.ndarray) -> np.ndarray:
    """What the documentation of jax says that arrives."""
    starts, sizes, places, _ = given
    result = output.copy()
    for rank in range(RANKS):
        for n in range(starts.shape[1]):
            target = rank - rank % group + n // RUNS
            run = rows[rank, starts[rank, n] : starts[rank, n] + sizes[rank, n]]
            result[target, places[rank, n] : places[rank, n] + len(run)] = run
    return result


def arrays(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows, output = (rng.normal(size=(RANKS, n, WIDTH)).astype(np.float32) for n in (ROWS, ROOM))
    return rows, output


def ragged(groups: list[list[int]], sizes: str = "%b", channel: str = "") -> str:
    count = RUNS * len(groups[0])
    vector = f"tensor<{count}xi32>"
    shape = f"{len(groups)}x{len(groups[0])}"
    said = f"{channel}replica_groups = dense<{groups}> : tensor<{shape}xi64>"
    constant = f"%k = stablehlo.constant dense<1> : {vector}\n" if sizes == "%k" else ""
    return f"""module @m attributes {{mhlo.num_partitions = {RANKS} : i32}} {{
  func.func @main(%o: {ROW}, %out: {OUT}, %a: {vector}, %b: {vector}, %c: {vector},
                  %d: {vector}) -> {OUT} {{
    {constant}%0 = stablehlo.custom_call @ragged_all_to_all(%o, %out, %a, {sizes}, %c, %d)
      {{api_version = 4 : i32, backend_config = {{{said}}}}}
      : ({ROW}, {OUT}, {vector}, {vector}, {vector}, {vector}) -> {OUT} loc("net.py":7:1)
    return %0 : {OUT}
  }}
}}"""


CHANNEL = "channel_id = 1 : i64, "


@pytest.mark.parametrize("groups", [GROUPS, [[*range(RANKS)]]], ids=["pairs", "all"])
def test_rows_arrive_where_their_senders_say(
    groups: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    neff = compiled(tmp_path, "rows.mlir", ragged(groups, channel=CHANNEL))
    rows, output = arrays(0)
    for seed in range(2):
        given = numbers(len(groups[0]), seed)
        wanted = sent(rows, output, len(groups[0]), *given)
        assert not np.array_equal(wanted, output)
        for level in ("L1", "L0"):
            (have,) = run_neff(neff, [rows, output, *given], level)
            np.testing.assert_array_equal(have, wanted, err_msg=level)


def test_sizes_that_are_known_bound_what_is_sent() -> None:
    """Chunks of one row each, instead of as many as the buffer holds."""

    def traffic(sizes: str) -> list[int]:
        graph, _ = import_partition(ragged(GROUPS, sizes, CHANNEL))
        found = [op for op in graph.ops if op.name == "all_to_all"]
        return sorted(op.operands[0].type.num_elements for op in found)

    runs = RUNS * 2
    assert traffic("%k") == [runs, runs * WIDTH]
    assert traffic("%b") == [runs, runs * ROWS * WIDTH]


@pytest.mark.matrix
def test_hlo_has_the_exchange_as_an_instruction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row, out, vector = f"f32[{ROWS},{WIDTH}]", f"f32[{ROOM},{WIDTH}]", f"s32[{RUNS * RANKS}]"
    names = [f"%p{n}" for n in range(6)]
    types = [row, out, *[vector] * 4]
    lines = [
        f"  {n} = {t} parameter({k})" for k, (n, t) in enumerate(zip(names, types, strict=True))
    ]
    call = f"ragged-all-to-all({', '.join(names)}), replica_groups={{{{0,1,2,3}}}}"
    text = "\n".join(
        [
            f"HloModule rows, replica_count={RANKS}",
            "ENTRY %main {",
            *lines,
            f"  ROOT %r = {out} {call}",
            "}",
        ]
    )
    rows, output = arrays(1)
    given = numbers(RANKS, 5)
    (have,) = run_neff(compiled(tmp_path, "rows.hlo", text), [rows, output, *given])
    np.testing.assert_array_equal(have, sent(rows, output, RANKS, *given))


@pytest.mark.matrix
def test_a_region_of_jax_has_the_exchange_as_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    over = PartitionSpec("x")

    def exchange(*operands: jax.Array) -> jax.Array:
        return lax.ragged_all_to_all(*operands, axis_name="x") * jnp.float32(2)

    mesh = Mesh(np.array(jax.devices("cpu")[:RANKS]), ("x",))
    fn = jax.shard_map(exchange, mesh=mesh, in_specs=over, out_specs=over)
    rows, output = arrays(2)
    given = [rows, output, *numbers(RANKS, 7)]
    whole = [a.reshape(-1, *a.shape[2:]) for a in given]
    everywhere = NamedSharding(mesh, PartitionSpec())
    step = jax.jit(fn, in_shardings=everywhere, out_shardings=everywhere)
    neff = compiled(tmp_path, "region.mlir", step.lower(*whole).as_text())
    every = [np.stack([a] * RANKS) for a in whole]
    (have,) = run_neff(neff, every)
    wanted = 2 * sent(*given[:2], RANKS, *given[2:])
    np.testing.assert_array_equal(have[0], wanted.reshape(-1, WIDTH))


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (f"tensor<{2 * RUNS}xi32>", "tensor<3xi32>", "3 runs"),
        ("%c, %d)", "%c)", "got 5"),
        (f"tensor<{2 * RUNS}xi32>", f"tensor<{2 * RUNS}xf32>", "vectors of integers"),
        (f"{ROOM}x{WIDTH}xf32", f"{ROOM}x{WIDTH + 1}xf32", "rows alike"),
    ],
    ids=["runs per rank", "operands", "integers", "rows"],
)
def test_what_is_no_exchange_is_refused_at_its_line(before: str, after: str, says: str) -> None:
    text = ragged(GROUPS, channel=CHANNEL).replace(before, after)
    if before == "%c, %d)":
        vector = f"tensor<{2 * RUNS}xi32>"
        text = text.replace(
            f"{vector}, {vector}, {vector}, {vector}) ->", ", ".join([vector] * 3) + ") ->"
        )
    with pytest.raises(ImportRuleError, match=says) as caught:
        import_partition(text)
    assert caught.value.code == "NCC_EVRF064"
    assert caught.value.loc is not None and caught.value.loc.line == 7


X = "tensor<4x6xf32>"


def test_one_operand_goes_to_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = f"""module @m attributes {{mhlo.num_replicas = {RANKS} : i32}} {{
  func.func @main(%x: {X}) -> {X} {{
    %0 = "stablehlo.collective_broadcast"(%x)
      {{replica_groups = dense<[[0, 2], [1, 3]]> : tensor<2x2xi64>}} : ({X}) -> {X}
    return %0 : {X}
  }}
}}"""
    neff = compiled(tmp_path, "all.mlir", text)
    x = np.random.default_rng(3).normal(size=(RANKS, 4, 6)).astype(np.float32)
    for level in ("L1", "L0"):
        (have,) = run_neff(neff, [x], level)
        np.testing.assert_array_equal(have, x[[0, 1, 0, 1]], err_msg=level)
    kinds = [op.name for op in import_partition(text)[0].ops]
    assert kinds.count("all_gather") == 1 and "all_reduce" not in kinds


PAIRS = ' {mhlo.frontend_attributes = {_xla_send_recv_source_target_pairs = "{{0,1},{1,2},{2,3}}"}}'
HANDLE = "channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>"
SEND = f'"stablehlo.send"(%y, %t) <{{{HANDLE}, is_host_transfer = false}}>{PAIRS}'
RECV = f'"stablehlo.recv"(%t) <{{{HANDLE}, is_host_transfer = false}}>{PAIRS}'
TOKEN = "!stablehlo.token"


def messages(*lines: str) -> str:
    body = "\n".join(f'    {line} loc("net.py":{n + 1}:1)' for n, line in enumerate(lines))
    return f"""module @m attributes {{mhlo.num_partitions = {RANKS} : i32}} {{
  func.func @main(%x: {X}) -> {X} {{
{body}
    return %r : {X}
  }}
}}"""


START = f"%t = stablehlo.create_token : {TOKEN}"
DOUBLE = f"%y = stablehlo.add %x, %x : {X}"
SENT = f"%s = {SEND} : ({X}, {TOKEN}) -> {TOKEN}"
RECEIVED = f"%r:2 = {RECV} : ({TOKEN}) -> ({X}, {TOKEN})"
USED = f"%u = stablehlo.multiply %r#0, %x : {X}"


@pytest.mark.parametrize(
    "lines",
    [
        (START, DOUBLE, SENT, RECEIVED),
        (START, RECEIVED, DOUBLE, SENT),
        (START, DOUBLE, RECEIVED, SENT),
    ],
    ids=["sent first", "received first", "ready first"],
)
def test_both_ends_of_a_message_are_a_permute(
    lines: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = messages(*lines, USED).replace("return %r", "return %u")
    x = np.random.default_rng(4).normal(size=(RANKS, 4, 6)).astype(np.float32)
    wanted = np.concatenate([np.zeros_like(x[:1]), 2 * x[:-1]]) * x
    neff = compiled(tmp_path, "message.mlir", text)
    for level in ("L1", "L0"):
        (have,) = run_neff(neff, [x], level)
        np.testing.assert_array_equal(have, wanted, err_msg=level)


HLO = """HloModule m, num_partitions=4
ENTRY %main {
 %x = f32[4,6] parameter(0)
 %t = token[] after-all()
 %r = (f32[4,6], u32[], token[]) recv(%t), channel_id=1, frontend_attributes={PAIRS}
 %s = (f32[4,6], u32[], token[]) send(%x, %t), channel_id=1, frontend_attributes={PAIRS}
 %rd = (f32[4,6], token[]) recv-done(%r), channel_id=1, frontend_attributes={PAIRS}
 %sd = token[] send-done(%s), channel_id=1, frontend_attributes={PAIRS}
 ROOT %y = f32[4,6] get-tuple-element(%rd), index=0
}""".replace("PAIRS", '_xla_send_recv_source_target_pairs="{{0,3},{3,0},{1,2},{2,1}}"')


def test_messages_of_hlo_are_started_and_awaited() -> None:
    graph, facts = import_partition(hlo_to_stablehlo(HLO))
    (move,) = (op for op in graph.ops if op.name == "collective_permute")
    assert sorted(move.attrs.pairs) == [(0, 3), (1, 2), (2, 1), (3, 0)]
    assert facts.mesh == (("rank", RANKS),)


@pytest.mark.parametrize(
    "lines",
    [
        (START, RECEIVED),
        (START, DOUBLE, SENT, RECEIVED.replace("{1,2},", "")),
        (START, DOUBLE, SENT.replace(PAIRS, ""), RECEIVED.replace(PAIRS, "")),
        (START, RECEIVED, USED.replace("%u", "%y"), SENT),
        (START, DOUBLE, SENT, RECEIVED.replace("handle = 1,", "handle = 2,")),
    ],
    ids=["no send", "other pairs", "no pairs", "sends what arrives", "other channel"],
)
def test_an_end_without_the_other_is_refused_at_its_line(lines: tuple[str, ...]) -> None:
    with pytest.raises(ImportRuleError, match="requires the other end") as caught:
        import_partition(messages(*lines).replace("return %r", "return %r#0"))
    assert caught.value.code == "NCC_EVRF001"
    assert caught.value.loc is not None and caught.value.loc.file == "net.py"
