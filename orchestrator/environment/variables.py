"""The vendor's environment variables that mean something here, as one table.

A row says what a value has to look like, who reads it, and which key of a job it sets, if any. What
a command prints, the page docs/environment.md and the checks all come from these rows. A variable
that has none is not looked at.

Sources are pages of the aws-neuron-sdk documentation (2026-08): runtime configuration, compute and
communication overlap, PyTorch and JAX environment variables, persistent cache, parallel
compilation, explorer environment variables, device memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from shardwright.sharding.settings import MAX_SHIFT


class Form(StrEnum):
    """What a value has to be."""

    SWITCH = "0 or 1"
    WHOLE = "a whole number"
    NUMBER = "a number"
    WORD = "a word"
    TEXT = "text"
    WHOLES = "whole numbers, with commas between them"
    CORES = "a core (3) or an inclusive range of them (0-3)"
    ADDRESS = "host:port"


class Reader(StrEnum):
    """Who reads a variable."""

    JOB = "jobs"
    COMPILE = "compile, and jobs"
    RUN = "neff run"
    CACHE = "the cache"
    COLLECT = "parallel-compile"
    SCRIPT = "captured scripts"
    NOBODY = "nobody"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One variable. `key` is what it sets of a job, `means` what a value is there where that is
    another; `usual` is the vendor's default, `older` are names that it had before. `unit` is that
    of the value; `least` and `most` are its limits."""

    name: str
    text: str
    reader: Reader
    source: str
    form: Form = Form.SWITCH
    key: str = ""
    means: Mapping[Any, Any] = field(default_factory=dict)
    unit: str = ""
    least: float = 0
    most: float = 2**31 - 1
    step: int = 1
    words: tuple[str, ...] = ()
    usual: str = ""
    older: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, the one of today first."""
        return (self.name, *self.older)

    @property
    def required(self) -> str:
        """What a value has to be, for errors and for the page."""
        if self.form is Form.WORD:
            return f"one of {', '.join(self.words)}"
        unit = f" of {self.unit}" if self.unit else ""
        if self.form not in (Form.WHOLE, Form.NUMBER):
            return f"{self.form}{unit}"
        upper = f" to {self.most:g}" if self.most < 2**31 - 1 else " up"
        stepped = f", a multiple of {self.step}" if self.step > 1 else ""
        return f"{self.form}{unit} from {self.least:g}{upper}{stepped}"


_RTC = "runtime configuration page"
_OVL = "compute and communication overlap page"
_ENVT = "page on PyTorch's environment variables"
_ENVJ = "page on JAX's environment variables"
_CACHE = "persistent cache page"
_PC = "parallel compilation page"
_EXV = "explorer's environment variables"
_MEM = "device memory page"
_ROUNDING = "rounding modes page"
_NANS = "release notes of the runtime, SDK 2.25"

_OF_COMPILE = (
    Variable(
        name="NEURON_CC_FLAGS",
        form=Form.TEXT,
        reader=Reader.COMPILE,
        text="flags of the compiler, in front of those of the command line",
        source=_ENVT,
    ),
    Variable(
        name="NEURON_PLATFORM_TARGET_OVERRIDE",
        form=Form.TEXT,
        reader=Reader.COMPILE,
        key="cluster.target",
        text="the machine to compile for: trn1 or gen2, trn2 or gen3, trn3 or gen4",
        source=_ENVJ,
    ),
    Variable(
        name="NEURON_FRAMEWORK_DEBUG",
        reader=Reader.COMPILE,
        text="stages as text in the folder framework-debug, where --dump-dir names no other",
        usual="0",
        source=_ENVT,
    ),
    Variable(
        name="NEURON_FUSE_SOFTMAX",
        reader=Reader.JOB,
        key="compiler.attention",
        means={True: "fused", False: "unfused"},
        text="softmax is one pass over stored scores, else every operator of it passes through HBM;"
        " without the variable scores stay on chip",
        source=f"{_ENVT}; scripts of neuronx-nemo-megatron set it",
    ),
    Variable(
        name="NEURON_CUSTOM_SILU",
        reader=Reader.NOBODY,
        text="without effect: silu and its gradient are fused with what stands around them",
        source=_ENVT,
    ),
    Variable(
        name="NEURON_EXTRACT_GRAPHS_ONLY",
        reader=Reader.SCRIPT,
        text="captured steps leave their graphs and give zeros",
        usual="0",
        source=_PC,
    ),
    Variable(
        name="NEURON_PARALLEL_COMPILE_MAX_RETRIES",
        form=Form.WHOLE,
        most=100,
        reader=Reader.COLLECT,
        text="how often a graph that failed is compiled again; a refusal stays one",
        usual="0",
        source=_PC,
    ),
    Variable(
        name="NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE",
        reader=Reader.COLLECT,
        text="graphs of a script that failed are compiled all the same",
        usual="0",
        source=_PC,
    ),
)
_OF_CACHE = (
    Variable(
        name="NEURON_COMPILE_CACHE_URL",
        form=Form.TEXT,
        reader=Reader.CACHE,
        text="the folder or s3://bucket of the cache; --cache_dir in NEURON_CC_FLAGS beats it",
        usual="/var/tmp/neuron-compile-cache",
        source=_CACHE,
    ),
    Variable(
        name="VLLM_NEURON_DISABLE_WARMUP_COMPILE",
        reader=Reader.JOB,
        key="cache.miss",
        means={True: "refuse", False: "compile"},
        text="what the cache does not have is refused (SW_CACHE_MISS), not compiled",
        usual="0",
        source="compilation cache page of vllm-neuron",
    ),
)
_OF_STEPS = (
    Variable(
        name="NEURON_FSDP",
        reader=Reader.JOB,
        key="strategy.dependency_tokens",
        text="collectives of FSDP start behind those that a layer waits for itself",
        usual="0",
        source=_OVL,
    ),
    Variable(
        name="NEURON_FSDP_CC_MULTISTREAM",
        reader=Reader.JOB,
        key="strategy.cc_streams",
        means={True: 2, False: 1},
        text="collectives of FSDP on a stream of their own",
        usual="0",
        older=("NEURON_NXD_FSDP_CC_MULTISTREAM",),
        source=_OVL,
    ),
    Variable(
        name="NEURON_FSDP_NUM_LAYER_EARLY_AG_SHIFT",
        form=Form.WHOLE,
        unit="layers",
        most=MAX_SHIFT,
        reader=Reader.JOB,
        key="strategy.early_all_gather_shift",
        text="layers by which weights are gathered early",
        source=_OVL,
    ),
    Variable(
        name="NEURON_FSDP_NUM_LAYER_LATE_RS_SHIFT",
        form=Form.WHOLE,
        unit="layers",
        most=MAX_SHIFT,
        reader=Reader.JOB,
        key="strategy.late_reduce_scatter_shift",
        text="layers by which gradients are reduced late",
        source=_OVL,
    ),
    Variable(
        name="NEURON_RT_DBG_DMA_PACKETIZATION_SIZE",
        form=Form.WHOLE,
        unit="bytes",
        least=4096,
        most=65536,
        reader=Reader.JOB,
        key="strategy.compute_packet_bytes",
        text="DMA packets of compute, which only grow",
        usual="4096",
        source=_OVL,
    ),
    Variable(
        name="NEURON_RT_DBG_CC_DMA_PACKET_SIZE",
        form=Form.WHOLES,
        unit="bytes",
        least=4096,
        most=65536,
        reader=Reader.JOB,
        key="strategy.collective_packet_bytes",
        text="DMA packets of collectives, one per stream, which only shrink",
        usual="65536",
        source=_OVL,
    ),
    Variable(
        name="ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB",
        form=Form.WHOLE,
        unit="MB",
        most=4096,
        reader=Reader.JOB,
        key="strategy.bucket_mb",
        text="gradients that are ready together become one collective up to this size",
        usual="50",
        older=("BUCKET_CAP_MB",),
        source=_ENVT,
    ),
    Variable(
        name="NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS",
        form=Form.WHOLE,
        unit="executions",
        most=64,
        reader=Reader.JOB,
        key="cluster.inflight_requests",
        text="executions that the host may queue ahead, so that cores wait for it only where it"
        " takes longer than they",
        usual="0",
        source=_RTC,
    ),
    Variable(
        name="NEURON_PJRT_PROCESSES_NUM_DEVICES",
        form=Form.WHOLES,
        unit="devices",
        least=1,
        most=4096,
        reader=Reader.JOB,
        key="cluster.instances",
        text="devices of every process, one process per instance: so many instances",
        source=_ENVJ,
    ),
    Variable(
        name="NEURON_PJRT_PROCESS_INDEX",
        form=Form.WHOLE,
        most=65535,
        reader=Reader.JOB,
        text="one of the processes; all of them are simulated by one command",
        source=_ENVJ,
    ),
    Variable(
        name="NEURON_RT_ROOT_COMM_ID",
        form=Form.ADDRESS,
        reader=Reader.JOB,
        text="where processes meet; simulated cores need no such place, so it is checked alone",
        source=_ENVT,
    ),
)
_OF_RUNS = (
    Variable(
        name="NEURON_LOGICAL_NC_CONFIG",
        form=Form.WHOLE,
        unit="physical cores",
        least=1,
        most=2,
        reader=Reader.RUN,
        key="cluster.lnc",
        text="physical cores per logical NeuronCore, of jobs too; a file has to be compiled for it",
        older=("NEURON_RT_VIRTUAL_CORE_SIZE",),
        source="logical NeuronCore configuration page",
    ),
    Variable(
        name="NEURON_RT_VISIBLE_CORES",
        form=Form.CORES,
        reader=Reader.RUN,
        text="cores of this host's simulated machine that the process holds until it ends",
        source=_RTC,
    ),
    Variable(
        name="NEURON_RT_NUM_CORES",
        form=Form.WHOLE,
        unit="cores",
        least=1,
        most=4096,
        reader=Reader.RUN,
        text="how many free cores the process holds; NEURON_RT_VISIBLE_CORES beats it",
        source=_RTC,
    ),
    Variable(
        name="NEURON_RT_EXEC_TIMEOUT",
        form=Form.NUMBER,
        unit="seconds",
        least=0,
        reader=Reader.RUN,
        text="an execution of more simulated seconds ends with NRT_TIMEOUT (5); 0: none does",
        usual="30 (2 in the prose of the same page); here it counts where it is set",
        source=_RTC,
    ),
    Variable(
        name="NEURON_SCRATCHPAD_PAGE_SIZE",
        form=Form.WHOLE,
        unit="MB",
        least=512,
        most=3584,
        step=512,
        reader=Reader.RUN,
        text="the page size that a file has to be compiled for (--hbm-scratchpad-page-size)",
        usual="512",
        source=_MEM,
    ),
    Variable(
        name="NEURON_RT_ALLOW_LEGACY_NEFF",
        reader=Reader.RUN,
        text="a file for an older machine is tried",
        usual="0",
        source=_RTC,
    ),
    Variable(
        name="NEURON_RT_VALIDATE_HASH",
        reader=Reader.NOBODY,
        text="without effect: checksums of a file are always compared",
        usual="0",
        source=_RTC,
    ),
    Variable(
        name="NEURON_RT_STOCHASTIC_ROUNDING_EN",
        reader=Reader.RUN,
        text="values are rounded stochastically",
        usual="0",
        source=_ROUNDING,
    ),
    Variable(
        name="NEURON_RT_STOCHASTIC_ROUNDING_SEED",
        form=Form.WHOLE,
        reader=Reader.RUN,
        text="the seed of that",
        usual="0",
        source=_ROUNDING,
    ),
    Variable(
        name="XLA_USE_BF16",
        reader=Reader.RUN,
        text="values are rounded stochastically where the runtime's own variable says nothing",
        usual="0",
        source=_ROUNDING,
    ),
    Variable(
        name="XLA_DOWNCAST_BF16",
        reader=Reader.RUN,
        text="the same",
        usual="0",
        source=_ROUNDING,
    ),
    Variable(
        name="NEURON_FAIL_ON_NAN",
        reader=Reader.RUN,
        text="a NaN among the results ends a run with status 1003",
        usual="0",
        source=_NANS,
    ),
    Variable(
        name="NEURON_RT_NUMERICAL_ERRORS_VERBOSITY",
        form=Form.WORD,
        words=("none", "warning", "critical"),
        reader=Reader.RUN,
        text="critical: a NaN among the results ends a run with status 1003",
        usual="none",
        source=_NANS,
    ),
    Variable(
        name="NEURON_RT_DBG_DUMP_INPUTS_ON_ERR",
        form=Form.WHOLE,
        reader=Reader.RUN,
        text="a run that ends with this status leaves its inputs in the working directory",
        source="runtime troubleshooting page",
    ),
    Variable(
        name="NEURON_PROCESS_TAG",
        form=Form.TEXT,
        reader=Reader.RUN,
        text="what neuron-monitor calls the process",
        source="neuron-monitor user guide",
    ),
    Variable(
        name="NEURON_RT_LOG_LEVEL",
        form=Form.WORD,
        words=("ERROR", "WARN", "WARNING", "INFO", "DEBUG", "TRACE"),
        reader=Reader.RUN,
        text="from INFO on the memory of a program is told when it is loaded, and the end of its"
        " execution",
        usual="ERROR",
        source=_RTC,
    ),
    Variable(
        name="NEURON_RT_INSPECT_ENABLE",
        reader=Reader.RUN,
        text="every execution leaves a profile, and profile buffers count as memory",
        usual="0",
        source=_EXV,
    ),
    Variable(
        name="NEURON_RT_INSPECT_OUTPUT_DIR",
        form=Form.TEXT,
        reader=Reader.RUN,
        text="the folder of these profiles",
        usual="./output",
        source=_EXV,
    ),
)
VARIABLES: Mapping[str, Variable] = {
    row.name: row for row in (*_OF_COMPILE, *_OF_CACHE, *_OF_STEPS, *_OF_RUNS)
}
"""Every variable by the name it has today."""
