"""What a machine's figures come to, one row each: instructions and transfers on a core, kernels and
a small step under every profile, collectives on each network it has, memory, rates and price.

Between them the rows depend on every figure of a machine's files (`test_golden_constants.py`), so
that none can change unnoticed. Jobs are in `cells.py`; these rows need no compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.costs import instr_interval_ps
from shardwright.compiler.isa.kernel import Affine, KernelProgram, Tensor
from shardwright.compiler.isa.program import (
    AccessPattern,
    Call,
    CollectiveCall,
    Engine,
    Function,
    Instr,
    Kernel,
    Program,
    Space,
    Tile,
)
from shardwright.compiler.machine.target import Target
from shardwright.compiler.timing.evaluate import Shares, instr_costs, kernel_times
from shardwright.sim_cluster.network.network import Network
from shardwright.sim_cluster.profiles import NAMES
from shardwright.sim_cluster.timing.step_time import Step, time_step
from tests.golden.record import Rows

F32 = DType.F32
TENSORS = [Tensor(name, (5_000_000,), F32, "input") for name in "ab"]
TILES = [Tile("t", Space.SBUF, 128, 8192, F32), Tile("p", Space.PSUM, 128, 512, F32)]


def _on_chip(*dims: tuple[int, int], tile: int = 0) -> AccessPattern:
    return AccessPattern(TILES[tile].space, tile, Affine(), dims)


def _in_hbm(*dims: tuple[int, int], tensor: int = 0) -> AccessPattern:
    return AccessPattern(Space.HBM, tensor, Affine(), dims)


HELD = _on_chip((1, 128), (1, 1024))
PRODUCT = _on_chip((1, 128), (1, 512), tile=1)
CODE = {
    "product": Instr("matmul", Engine.TENSOR, PRODUCT, (HELD, _on_chip((1, 128), (1, 512)))),
    "addition": Instr("tensor_tensor", Engine.VECTOR, HELD, (HELD, HELD), {"op": "add"}),
    "addition with strides": Instr(
        "tensor_tensor", Engine.VECTOR, HELD, (HELD, _on_chip((1, 128), (8, 1024))), {"op": "add"}
    ),
    "activation": Instr("activation", Engine.SCALAR, HELD, (HELD,), {"func": "identity"}),
    "numbers": Instr("iota", Engine.GPSIMD, HELD, (), {}),
    "load of rows": Instr("dma", Engine.DMA_IN, HELD, (_in_hbm((1024, 128), (1, 1024)),)),
    "load of elements": Instr("dma", Engine.DMA_IN, HELD, (_in_hbm((1, 128), (128, 1024)),)),
    "store of few rows": Instr(
        "dma", Engine.DMA_OUT, _in_hbm((1024, 9), (1, 1024)), (_on_chip((1, 9), (1, 1024)),)
    ),
    "copy": Instr(
        "dma", Engine.DMA_IN, _in_hbm((1, 5_000_000), tensor=1), (_in_hbm((1, 5_000_000)),)
    ),
}
SIZES = (4_096, 1_100_000, 60_000_000, 70_000_000)
"""Bytes: below every threshold of an algorithm, and close behind each."""
NEAR, FAR = 16, 4


def stages(target: Target) -> Iterator[tuple[str, Rows]]:
    """All rows of a machine, those that take longest last."""
    yield "limits", _limits(target)
    yield "code", dict(_code(target))
    yield "kernels", _kernels(target)
    if target.trains:
        yield "steps", _steps(target)
    yield "collectives", dict(_collectives(target, 1, ("near",), ("rest",), ("far",)))
    if target.efa_devices:
        yield "across", dict(_collectives(target, 2, ("dp", "near"), ("dp",), *_whole(target)))


def _whole(target: Target) -> list[tuple[str, ...]]:
    """All cores of two instances, where they are few: a flat ring is for many."""
    return [("dp", "far", "rest", "near")] if target.cores <= 64 else []


def _limits(target: Target) -> Rows:
    """What fits, and what a report divides by."""
    core = target.core
    memory = {"limit_bytes": target.limit_bytes, "reserve_bytes": target.reserve_bytes_per_core}
    rates = {
        "published_flops_per_s": target.published_flops_per_s_per_core * target.cores,
        "peak_flops_per_s": core.peak_bf16_flops_per_s,
    }
    return {
        "memory": memory,
        "rates": rates,
        "on chip": {k: v for k, v in asdict(core.limits).items() if k != "engines"},
        "cores": {"all": target.cores, "chips": target.chips, "of a bank": core.hbm_bank_cores},
        "logical cores": {"allowed": list(target.allowed_lnc), "physical": target.lnc},
        "host": {"memory_bytes": target.host_memory_bytes, "transfer_ps": _transfer_ps(target)},
        "price": {kind: fact.value for kind, fact in target.prices.items()},
    }


def _transfer_ps(target: Target) -> list[int]:
    """A transfer to the host of two cores beside each other, under every profile; none where no
    link is known.
    """
    if not target.host_link_bytes_per_s:
        return []
    call = CollectiveCall("host_store", (), F32, (1, 2**20, 1))
    return [Network(target, 1, {"dp": 2}, name).duration(call).duration_ps for name in NAMES]


def _code(target: Target) -> Iterator[tuple[str, Any]]:
    """Every instruction: how long its engine has it, and when others see that it is done."""
    kernel = Kernel(KernelProgram("compute", "r"), TILES, [])
    for name, instr in CODE.items():
        if target.core.clock_hz.get(instr.engine.value, 1):
            ((interval, latency),) = instr_costs([instr], kernel, TENSORS, target)
            alone = instr_interval_ps(instr, TILES, TENSORS, target.core)
            yield name, {"interval_ps": interval, "latency_ps": latency, "engines_ps": alone}


def _kernel() -> Kernel:
    """Load, add, store, each behind the other."""
    load = replace(CODE["load of rows"], signals=(0,))
    add = replace(CODE["addition"], waits=(0,), signals=(1,))
    store = Instr("dma", Engine.DMA_OUT, _in_hbm((1024, 128), (1, 1024)), (HELD,), waits=(1,))
    return Kernel(KernelProgram("compute", "r"), TILES, [load, add, store], tokens=(0, 0))


def _kernels(target: Target) -> Rows:
    """A kernel with all of what it shares, and with half of each."""
    points = (Shares(), Shares(dma=0.5), Shares(hbm=0.5))
    found = kernel_times(_kernel(), TENSORS, target, points)
    names = ("whole", "half of the engines", "half of HBM")
    return {name: {"ps": time.duration_ps} for name, time in zip(names, found, strict=True)}


def _collectives(
    target: Target, instances: int, *groups: tuple[str, ...]
) -> Iterator[tuple[str, Any]]:
    """Collectives of cores beside each other, and of such as lie far apart."""
    near = min(NEAR, target.cores)
    far = min(FAR, target.cores // near)
    mesh = {"dp": instances, "far": far, "rest": target.cores // far // near, "near": near}
    for profile in NAMES:
        network = Network(target, instances, mesh, profile)
        for axes in groups:
            for size in SIZES if profile == "nominal" else SIZES[-1:]:
                elements = size // 4
                call = CollectiveCall("all_reduce", axes, F32, (1, elements, 1))
                found = network.duration(call)
                name = f"all_reduce of {'+'.join(axes)}, {size} B, {profile}"
                busy = float(f"{sum(share for _, share in found.demand.wires):.12g}")
                yield name, {"algorithm": found.algorithm, "ps": found.duration_ps, "wires": busy}


def _steps(target: Target) -> Rows:
    """A launch, a kernel, a gather beside another one, under every profile."""
    rows: Rows = {}
    for profile in NAMES:
        timing = time_step(_step(target), profile)
        rows[profile] = {"ps": timing.step_time_ps, "breakdown_ps": dict(timing.breakdown_ps)}
    return rows


def _step(target: Target) -> Step:
    events = [
        Kernel(KernelProgram(f"collective_{kind}", kind, attrs={"collective": 0}))
        for kind in ("start", "wait")
    ]
    kernels = [_kernel(), events[0], _kernel(), events[1]]
    gather = CollectiveCall("all_gather", ("dp",), F32, (1, 16_384, 1))
    both = list(kernels) if target.lnc == 2 else None
    function = Function("f", TENSORS, (), (), (), 0, kernels, [gather], partner=both)
    program = Program("p", target.name, [function], [], (), (), (Call(0, (), ()),), 0)
    mesh = {"rest": target.cores // 2, "dp": 2}
    return Step(
        programs={"p": program},
        schedules=(((("p",), 1),),),
        mesh=mesh,
        target=target,
        instances=1,
    )
