"""Machines as data: one JSON file per instance type, one per NeuronCore generation, every figure
with status and source.

Files keep data-sheet units in their keys (`_ghz`, `_gb_per_s`, `_gib`); `load_target` converts once
into bytes, hertz and picoseconds. The compiler's tile choices always use these nominal figures;
profiles and what-ifs change runs only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from shardwright.compiler.diagnostics import UsageError, did_you_mean
from shardwright.compiler.machine.custom_target import check_together, read_custom

_DIRECTORY = Path(__file__).parent / "targets"
PRODUCT_TRANSPOSES = ("v1", "v2")
"""Generations that transpose by a product with the identity, in which infinities become NaN:
those whose compilers have an option that clamps them (documented)."""
PS_PER_US = 10**6
PS_PER_S = 10**12
FIRST_TARGET = "trn1n.32xlarge"
HYPOTHETICAL_LNC = (1, 2)
NEURONX_CC, NEURON_CC = "neuronx-cc", "neuron-cc"
COMPILERS = (NEURONX_CC, NEURON_CC)
"""The vendor's compilers, whose command lines and rules a machine may have."""
_ENGINES = ("tensor", "vector", "scalar", "gpsimd")
_STAND_IN = "vector"
_PRICES = {
    "on-demand": "price_usd_per_hour_on_demand",
    "capacity-block": "price_usd_per_hour_capacity_block",
}
PRICE_KINDS = tuple(_PRICES)
"""How an instance may be paid for, of what is published."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One figure of a machine, in data-sheet units. `status` is documented, inferred, unknown (the
    value is a default), or given: by the user's own file. A price has the day of its list and the
    region, where the source names one; a default has the range in which the figure lies.
    """

    value: Any
    status: str
    source: str
    date: str = ""
    region: str = ""
    range: Sequence[float] = ()


def _fact(name: str = "", factor: float = 1, otherwise: Any = None) -> Any:
    """A field that is a fact of the data files, the one of its name unless given, times `factor`,
    which makes its unit ours; `otherwise` where a file does not have the fact.
    """
    return field(metadata={"fact": (name, factor, otherwise)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a NeuronCore accepts of code.

    Units: `_bytes` are bytes per partition, `_max` are elements per partition unless the name says
    otherwise. Sources: `targets/neuroncore-*.json`.
    """

    generation: str
    partitions: int = _fact("sbuf_partitions")
    contraction_max: int = _fact("tensor_contraction_max")
    stationary_max: int = _fact("tensor_stationary_max")
    moving_max: int = _fact("tensor_moving_max")
    transpose_max: int = _fact("tensor_transpose_max")
    psum_bytes: int = _fact("psum_bytes_per_partition")
    psum_bank_bytes: int = _fact("psum_bank_bytes_per_partition")
    sbuf_bytes: int = _fact("sbuf_bytes_per_partition")
    free_dims: int = _fact("access_free_dims")
    dim_size_max: int = _fact("access_dim_size_max")
    dim_stride_max: int = _fact("access_dim_stride_max")
    free_elements_sbuf: int = _fact("access_elements_sbuf")
    free_elements_psum: int = _fact("access_elements_psum")
    semaphores: int = _fact()
    engines: tuple[str, ...] = _ENGINES
    """Compute engines that the core has: those with a clock."""

    def issuer(self, engine: str) -> str:
        """The engine that does what code names `engine` for: itself, or Vector in its place."""
        return _STAND_IN if engine in _ENGINES and engine not in self.engines else engine

    @property
    def psum_banks(self) -> int:
        """Banks of PSUM, each the target of one accumulation at a time."""
        return self.psum_bytes // self.psum_bank_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreModel:
    """One physical NeuronCore: clocks, limits, DMA rates.

    Sources: `targets/<name>.json`.
    """

    name: str
    generation: str
    clock_hz: Mapping[str, int]  # engine value (tensor, vector, scalar, gpsimd) -> Hz
    limits: Limits
    dma_engines: int = _fact()
    dma_engine_bytes_per_s: float = _fact("dma_engine_sustained_gb_per_s", 1e9)
    dma_fixed_ps: int = _fact("dma_fixed_ns", 1e3)
    # A what-if may ask for parts of a byte, or of a cycle.
    dma_descriptor_min_bytes: float = _fact()
    dma_descriptor_extra_bytes: float = _fact()
    dma_descriptor_max_bytes: int = _fact()
    dma_partitions_per_engine: int = _fact()
    compute_latency_cycles: float = _fact()
    wide_stride_factor: float = _fact()
    semaphore_ps: int = _fact("cross_engine_semaphore_ns", 1e3)
    program_start_ps: int = _fact("program_start_us", 1e6)
    hbm_bank_cores: int = _fact("physical_cores_per_hbm_bank", otherwise=1)
    """Physical cores that share the bandwidth of an HBM bank."""
    peak_bf16_flops_per_s: float = _fact("tensor_bf16_tflops", 1e12)
    compiler: str = _fact("compiler", otherwise=NEURONX_CC)
    """The vendor's compiler for it, of `COMPILERS`."""
    refused_types: Sequence[str] = _fact("refused_types", otherwise=())
    """Element types that this compiler does not take."""
    refused_io_types: Sequence[str] = _fact("refused_io_types", otherwise=())
    """Element types of inputs and outputs, besides."""
    stall_recovery: float = 0.0
    """Share of the time in which a kernel waits, while none of its engines is the bottleneck, that
    neighbouring kernels fill. Of runs only: code is chosen at `evaluate.ORACLE_RECOVERY`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFacts:
    """What the collectives of a NeuronCore generation cost and which algorithms its runtime has.

    Sources: `targets/neuroncore-*.json`. Thresholds are bytes of the larger of source and target; 0
    turns an algorithm off.
    """

    launch_ps: int = _fact("collective_launch_us", 1e6)
    wire_ps: int = _fact("neuronlink_wire_us", 1e6)
    """Of one NeuronLink, besides the DMA transfer that uses it."""
    efa_hop_ps: int = _fact("efa_hop_us", 1e6)
    mesh: str = _fact("collective_mesh")
    """flat: every pair of ranks; grouped: between chips, then inside."""
    mesh_max_bytes: int = _fact()
    rdh_max_bytes: int = _fact()
    kangaring: bool = _fact()
    flat_ring_min_bytes: int = _fact()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One instance type, seen as logical NeuronCores of `lnc` physical ones (`logical`).

    A core here is a logical one; `core` and the rate of HBM are those of each physical core.
    """

    name: str
    core: CoreModel
    chips: int = _fact("chips_per_instance")
    cores_per_chip: int
    allowed_lnc: tuple[int, ...]
    hbm_bytes_per_core: int
    hbm_bytes_per_s_per_core: float  # of a physical core
    reserve_bytes_per_core: int
    published_flops_per_s_per_core: float  # bf16; the denominator of MFU
    topology: str = _fact()  # torus, ring, line, switch, or none for a chip alone
    shape: tuple[int, ...]  # chips along each side; domains of a switch, from the smallest
    link_bytes_per_s: tuple[float, ...]  # one direction of a link, per side or domain
    efa_bytes_per_s: float = _fact("efa_gbps", 1e9 / 8)  # whole instance
    efa_devices: int = _fact()
    collectives: CollectiveFacts
    host_memory_bytes: int  # of an instance; 0: not known
    host_link_bytes_per_s: float = _fact("host_link_gb_per_s", 1e9, otherwise=0)
    """Of a chip, each way; 0: not known."""
    prices: Mapping[str, Fact]  # USD per hour by kind (PRICE_KINDS), those that are published
    digest: str  # of the data files
    lnc: int = 1  # physical cores per logical core
    code_bytes_per_core: int = 0  # of the reserve: micro-code

    @property
    def cores(self) -> int:
        """Cores per instance."""
        return self.chips * self.cores_per_chip

    @property
    def limit_bytes(self) -> int:
        """HBM a core may use for a step: its share less the runtime's reserve (code, DMA rings)."""
        return self.hbm_bytes_per_core - self.reserve_bytes_per_core

    @property
    def cores_per_bank(self) -> int:
        """Cores that share the bandwidth of an HBM bank."""
        return max(1, self.core.hbm_bank_cores // self.lnc)

    @property
    def cores_per_stack(self) -> int:
        """Cores that share the bytes of an HBM bank: from NeuronCore-v3 on two physical ones have
        one of 24 GiB (documented, device memory page); before, each has its own (driver v2 address
        map, inferred)."""
        return 1 if self.core.generation in ("v1", "v2") else self.cores_per_bank

    @property
    def trains(self) -> bool:
        """Whether training steps are compiled for it: neuron-cc compiles inference alone."""
        return self.core.compiler == NEURONX_CC

    @property
    def is_hypothetical(self) -> bool:
        """Whether no such machine can be configured."""
        return self.lnc not in self.allowed_lnc


def logical(target: Target, lnc: int = 0, hypothetical: bool = False, key: str = "lnc") -> Target:
    """`target` with its physical cores grouped into logical NeuronCores of `lnc`; 0 takes the
    machine's default, which is 2 where it is allowed.

    A logical core has the memory, the reserve and the published rate of all its physical cores.
    `hypothetical` groups them on machines that cannot.
    Raises: UsageError NCC_EARG001, where `key` is what the user set.
    Source: documented, logical NeuronCore configuration page and error page EARG001.
    """
    count = lnc or max(target.allowed_lnc)
    allowed = HYPOTHETICAL_LNC if hypothetical else target.allowed_lnc
    if count not in allowed or target.cores_per_chip % count:
        raise UsageError(
            "NCC_EARG001",
            f"{key} on {target.name} requires {' or '.join(map(str, allowed))}, got {count}",
            hint=f"use {key} 1, or a target of the trn2 or trn3 family; --hypothetical shows what"
            " the machine would do if it could",
        )
    return replace(
        target,
        cores_per_chip=target.cores_per_chip // count,
        hbm_bytes_per_core=target.hbm_bytes_per_core * count,
        reserve_bytes_per_core=target.reserve_bytes_per_core * count,
        code_bytes_per_core=target.code_bytes_per_core * count,
        published_flops_per_s_per_core=target.published_flops_per_s_per_core * count,
        lnc=count,
    )


def reserve_of(target: Target) -> dict[str, int]:
    """What of a core's HBM the runtime keeps, in bytes: micro-code of its physical cores (96 MB
    each, documented), and DMA rings. The sum is `reserve_bytes_per_core`."""
    code = min(target.code_bytes_per_core, target.reserve_bytes_per_core)
    return {"model code": code, "DMA rings": target.reserve_bytes_per_core - code}


PROFILE_BUFFERS_BYTES = 2 * 10**9
"""Buffers of a core that is profiled (documented, device memory page: 64 to 128 MB each, about 2 GB
in all); they are there while it is, and not else."""


def hypothetical_text(target: Target) -> str:
    """What every report on a machine says that cannot be configured like that."""
    return (
        f"hypothetical: no {target.name} has logical NeuronCores of {target.lnc} physical ones;"
        f" shown as {target.cores} cores of {target.hbm_bytes_per_core / 2**30:g} GiB per instance"
    )


def target_names() -> list[str]:
    """Names `load_target` knows."""
    return sorted(p.stem for p in _DIRECTORY.glob("*.json") if not p.stem.startswith("neuroncore"))


def models_digest() -> str:
    """The digest of all data files: equal where every machine has the same figures."""
    data = b"".join(path.read_bytes() for path in sorted(_DIRECTORY.glob("*.json")))
    return hashlib.sha256(data).hexdigest()


@cache
def families() -> Mapping[str, str]:
    """Instance family, as neuronx-cc's `--target` names it -> the machine that stands for it: the
    one whose file says `family`.
    """
    named = ((_read(name)[0].get("family"), name) for name in target_names())
    return {family: name for family, name in named if family}


def machine_name(text: str) -> str:
    """The machine that a user's word means: an instance type in any case, a family for the machine
    that stands for it (`trn1` for `trn1.32xlarge`); a file, and what is unknown, as it is."""
    word = text.strip()
    lower = families().get(word.lower(), word.lower())
    return lower if lower in target_names() else word


def family_of(name: str) -> str:
    """The family of a machine by its name (`trn1n` of `trn1n.32xlarge`); empty for a user's own."""
    return "" if name.endswith(".json") else re.split(r"[.-]", name)[0]


def load_target(name: str) -> Target:
    """The target called `name`, or the machine a user's JSON file describes (`custom_target`).

    Raises UsageError: NCC_EARG001 for an unknown name, SW_TARGET for a file that is no machine.
    """
    return _load(str(Path(name).resolve()) if name.endswith(".json") else name)


@cache
def _load(name: str) -> Target:
    return _target(name, *_described(name))


def facts_of(target: Target) -> dict[str, Fact]:
    """All figures of a machine and its NeuronCore, as its files give them."""
    return _described(target.name)[1]


def undocumented_clocks(target: Target) -> list[str]:
    """The engines whose clock has no source: times of such a machine are hypothetical."""
    facts = facts_of(target)
    return [e for e in target.core.limits.engines if facts[f"{e}_clock_ghz"].status == "unknown"]


def altered(target: Target, values: Mapping[str, Any]) -> Target:
    """`target` with other values of some of its facts: a what-if for runs, never for compiling."""
    core, facts, _ = _described(target.name)
    moved = {key: replace(facts[key], value=value) for key, value in values.items()}
    other = _target(target.name, core, facts | moved, target.digest)
    return logical(other, target.lnc, hypothetical=target.is_hypothetical)


def _described(name: str) -> tuple[Mapping[str, Any], dict[str, Fact], str]:
    """(file of the core, facts, digest) of a known machine, or of the one a user's file describes:
    the facts of its base, except for those the file gives.
    """
    if not name.endswith(".json"):
        return _known(name)
    path = Path(name)
    base, own = read_custom(path, target_names())
    core, facts, digest = _known(base)
    facts |= {key: Fact(value, "given", name) for key, value in own.items()}
    check_together(path, _values(facts))
    digest = hashlib.sha256((digest + json.dumps(own, sort_keys=True)).encode()).hexdigest()
    return core, facts, digest


def _known(name: str) -> tuple[Mapping[str, Any], dict[str, Fact], str]:
    known = target_names()
    if name not in known:
        raise UsageError(
            "NCC_EARG001",
            f"target requires one of {', '.join(known)}, or a JSON file, got {name!r}",
            hint=did_you_mean(name, known),
        )
    data, digest = _read(name)
    core_data, core_digest = _read(data["neuroncore"])
    digest = hashlib.sha256((digest + core_digest).encode()).hexdigest()
    given = core_data["facts"] | data["facts"]
    named = {f.name for f in fields(Fact)}
    facts = {
        key: Fact(**{name: value for name, value in fact.items() if name in named})
        for key, fact in given.items()
    }
    return core_data, facts, digest


def _read(name: str) -> tuple[dict[str, Any], str]:
    raw = (_DIRECTORY / f"{name}.json").read_bytes()
    return json.loads(raw), hashlib.sha256(raw).hexdigest()


def _values(facts: Mapping[str, Fact]) -> dict[str, Any]:
    return {key: fact.value for key, fact in facts.items()}


def _prices_of(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    prices = {kind: facts.get(key) for kind, key in _PRICES.items()}
    return {kind: fact for kind, fact in prices.items() if fact and fact.value is not None}


Made = TypeVar("Made", Limits, CoreModel, CollectiveFacts, Target)


def _made(kind: type[Made], f: Mapping[str, Any], **others: Any) -> Made:
    """A `kind` of what its fields say they are, and of `others`."""
    found = {}
    for one in fields(kind):
        if one.metadata:
            fact, factor, otherwise = one.metadata["fact"]
            value = f.get(fact, otherwise) if otherwise is not None else f[fact or one.name]
            scaled = value if factor == 1 else value * factor
            found[one.name] = round(scaled) if one.type == "int" and factor != 1 else scaled
    return kind(**found, **others)


def _core(data: Mapping[str, Any], f: Mapping[str, Any]) -> CoreModel:
    generation = data["name"]
    clock_hz = {e: round(f[f"{e}_clock_ghz"] * 1e9) for e in _ENGINES}
    engines = tuple(e for e, hz in clock_hz.items() if hz)
    return _made(
        CoreModel,
        f,
        name=generation,
        generation=data["generation"],
        clock_hz=clock_hz,
        limits=_made(Limits, f, generation=generation, engines=engines),
    )


def _target(name: str, core: Mapping[str, Any], facts: Mapping[str, Fact], digest: str) -> Target:
    f = _values(facts)
    cores_per_chip = f["physical_cores_per_chip"]
    reserve_mb = f["model_code_overhead_mb_per_physical_core"] + f["dma_ring_reserve_mb_per_core"]
    return _made(
        Target,
        f,
        name=name,
        core=_core(core, f),
        cores_per_chip=cores_per_chip,
        allowed_lnc=tuple(f["allowed_lnc"]),
        hbm_bytes_per_core=int(f["hbm_gib_per_chip"] * 2**30) // cores_per_chip,
        hbm_bytes_per_s_per_core=f["hbm_gb_per_s_per_chip"] * 1e9 / cores_per_chip,
        reserve_bytes_per_core=reserve_mb * 10**6,
        published_flops_per_s_per_core=f["chip_bf16_tflops_published"] * 1e12 / cores_per_chip,
        shape=tuple(f["shape"]),
        link_bytes_per_s=_link_rates(f),
        collectives=_made(CollectiveFacts, f),
        host_memory_bytes=int(f.get("host_memory_gib", 0) * 2**30),
        prices=_prices_of(facts),
        digest=digest,
        code_bytes_per_core=f["model_code_overhead_mb_per_physical_core"] * 10**6,
    )


def _link_rates(f: Mapping[str, Any]) -> tuple[float, ...]:
    """Bytes per second of a link, one per side or domain."""
    given = f["neuronlink_gb_per_s_per_link_per_direction"]
    rates = given if isinstance(given, list) else [given] * len(f["shape"])
    return tuple(rate * 1e9 for rate in rates)
