"""What a user may choose about distribution: the `[strategy]` table.

One frozen object goes from the job to the recipe and to the cut. Values are checked where text is
read (`orchestrator/config/`); what a strategy cannot do with them is refused by the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.compiler.options import choice
from shardwright.compiler.support.quantities import TOKENS, amount
from shardwright.compiler.surface.flags import OLD_STRATEGIES

AUTO = -1
OFFLOAD = "offload"
"""The `remat` that keeps residuals in the memory of the host."""
DISTRIBUTED_OPTIMIZER, WEIGHTS = 1, 3
"""The ZeRO stages that spread the optimizer state, and weights; 2 spreads gradients."""
MANUAL = "manual"
"""The strategy that reads the step's own shardings, on the mesh they name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What a strategy takes where a job does not say."""

    zero: int = 0  # ZeRO stage
    tensor: int = 1  # cores along `tp` of a job without a mesh (our choice)


STRATEGIES: Mapping[str, Defaults] = {
    "fsdp": Defaults(zero=WEIGHTS),
    "generic": Defaults(),
    "llm-training": Defaults(zero=DISTRIBUTED_OPTIMIZER, tensor=8),
    MANUAL: Defaults(),
}
"""Every strategy; `strategies/registry.py` has what it does."""

MAX_SHIFT = 16
"""Layers a collective may move: its queue is laid out layer by layer (our choice)."""


MAX_GROUP = 16
"""Layers of a group: their code is one function, compiled as a whole (our choice)."""


MOST = 10**6
"""Of samples, tokens and instances, so that a slip of the hand is refused (our choice)."""


def limited(default: float, low: float, high: float) -> Any:
    """A number from `low` to `high`."""
    return field(default=default, metadata={"range": (low, high)})


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySettings:
    """How the step is distributed."""

    name: str = choice("fsdp", *STRATEGIES, old_names=OLD_STRATEGIES)
    micro_batch: int = field(default=1, metadata={"words": {"auto": AUTO}, "range": (1, MOST)})
    """Samples per data-parallel rank and micro-batch. auto: the most with which the step fits, at
    the same samples per step (docs/design/0063-auto.md).
    """
    global_batch: int = limited(0, 0, 100 * MOST)
    """Samples per optimizer step; 0 means one micro-batch per rank."""
    global_batch_tokens: int = amount(TOKENS, MOST * 10**6)
    """The same in tokens, `4Mi`; 0: in samples, or not said."""

    remat: str = choice("full", "auto", "none", "selective", "full", OFFLOAD)
    """Recomputation of layer activations in the backward pass (presets and configs), from the least
    to the most; "selective" keeps the products with weights, "offload" the same in the memory of
    the host. auto: the least with which the step fits, without offload.
    """

    zero: int = field(default=AUTO, metadata={"words": {"auto": AUTO}})
    """What data-parallel ranks share: 0 nothing, 1 optimizer state, 2 and gradients, 3 and weights
    (Rajbhandari et al. 2020). auto: 3 for fsdp, 0 for generic, 1 for llm-training.
    """

    sequence_parallel: bool = True
    """Split what lies between tensor-parallel blocks along the sequence, over `tp` (Korthikanti et
    al. 2022). Needs `mesh.tp` above 1 to matter.
    """

    context: str = choice("gather", "gather", "ring")
    """How attention sees a sequence that is split over `cp`: every core gathers keys and values, or
    blocks of them go around the ring (Liu et al. 2023). Needs `mesh.cp` above 1 to matter.
    """

    schedule: str = choice("1f1b", "gpipe", "1f1b", "interleaved")
    """The order of micro-batches in the stages of a pipeline. Needs `mesh.pp` above 1 to matter."""

    stage_parts: int = 2
    """Parts of the model per stage under the interleaved schedule."""

    stage_balance: str = choice("cost", "cost", "layers")
    """How layers are shared out over stages: so that the longest stage is shortest by what layers,
    embedding, head and loss cost, or equally many."""

    stage_layers: str = ""
    """Layers of every part of a pipeline in order, `8, 8, 9, 7` (cut points of one's own), a last
    `*` for what is left; empty: as `stage_balance` says."""

    tensor_plan: str = ""
    """Weights and the dim of each that `mesh.tp` splits, `layers.*.wq.weight:0,
    layers.*.wo.weight:1` (a plan of PyTorch's parallelize_module). Names are parts with `*`, dims
    those of one layer's weight. What it does not name is split as the strategy finds best."""

    pad_uneven: bool = True
    """Pad indices that `tp` does not divide (a vocabulary, heads); else such weights are split less
    or stay whole.
    """

    reshard_after_forward: bool = True
    """Gather weights again in the backward pass instead of keeping them."""

    reshard_root: bool = True
    """The same for weights outside of layers (embedding, last norm, head): false keeps them alone
    gathered, which PyTorch's fully_shard does with the root."""

    param_dtype: str = choice("auto", "auto", "bfloat16")
    """Type of weights where they are gathered and used; contractions with samples take it for all
    their operands. auto: as the model says. Stored weights keep their type (PyTorch's
    MixedPrecisionPolicy, as the next two).
    """

    reduce_dtype: str = choice("auto", "auto", "float32", "bfloat16")
    """Type in which gradients are reduced over data-parallel ranks. auto: the one they have."""

    output_dtype: str = choice("auto", "auto", "bfloat16")
    """Type that what a layer hands on is rounded to, both ways. auto: as the model says."""

    layers_per_group: int = limited(0, 0, MAX_GROUP)
    """Layers that are one unit of FSDP (PyTorch's fully_shard of a block, or of a list of blocks):
    one gather of all their weights, one reduction of all their gradients, as far as `bucket_mb`
    allows; what is left over is a smaller unit. Shifts then count units. 0: every weight alone.
    """

    root_unit: str = choice("each", "each", "ends", "all")
    """Units of weights outside of layers, beside `layers_per_group`: every weight alone, one in
    front of the layers and one behind them, or all as one (fully_shard of the model behind that of
    its blocks)."""

    early_all_gather_shift: int = limited(0, 0, MAX_SHIFT)
    """Layers by which weights are gathered before the layer that uses them
    (NEURON_FSDP_NUM_LAYER_EARLY_AG_SHIFT). Each costs the memory of one gathered layer.
    """

    late_reduce_scatter_shift: int = limited(0, 0, MAX_SHIFT)
    """Layers by which gradients are reduced after the layer that made them
    (NEURON_FSDP_NUM_LAYER_LATE_RS_SHIFT). Each costs the memory of one layer's unreduced gradients.
    """

    reduce_gradients: str = choice("auto", "auto", "each", "last", "after")
    """When the gradients of several micro-batches are reduced: in the backward pass of each; once,
    layer by layer in that of the last (PyTorch's no_sync); or once after it, beside nothing
    (Megatron's overlap_grad_reduce = false). Once is less traffic, and accumulators as large as the
    weights a core computes with. auto: last for zero = 1, whose gradients are whole until then,
    else each.
    """

    bucket_mb: int = limited(0, 0, 4096)
    """MiB up to which gathers of weights, or reductions of gradients, that are ready together
    become one collective (ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB, PyTorch's bucket_cap_mb); 0: each
    alone.
    """

    accumulate_dtype: str = choice("float32", "auto", "float32")
    """Type in which gradients of several micro-batches are added up. auto: the one they have, as
    frameworks do that add to the gradient in place; half the bytes for bf16, and its rounding.
    """

    gradient_accumulation_fusion: bool = True
    """Add a layer's gradient to the sum over micro-batches where it is made, in the epilogue of its
    product; else every gradient is stored first and added by an operator of its own (Megatron's
    name, whose kernels fuse it; autograd of PyTorch does not). The same numbers in the same order.
    What a backward pass reduces is always added there first.
    """

    dependency_tokens: bool = False
    """Gathers of weights and reductions of gradients start behind collectives that a layer waits
    for itself, not in front of them (NEURON_FSDP). Needs such, for example of `mesh.tp`.
    """

    cc_streams: int = limited(1, 1, 4)
    """Streams that run collectives beside each other (NEURON_FSDP_CC_MULTISTREAM is 2): what layers
    wait for on stream 0; gathers of weights, reductions of gradients, sums over copies behind it.
    """

    compute_packet_bytes: int = limited(4096, 4096, 65536)
    """DMA packet of compute (NEURON_RT_DBG_DMA_PACKETIZATION_SIZE): rings of an engine get
    bandwidth by the size of their packets."""

    collective_packet_bytes: str = ""
    """DMA packets of the streams, comma-separated, at most 65536, the default
    (NEURON_RT_DBG_CC_DMA_PACKET_SIZE)."""

    @property
    def open_keys(self) -> tuple[str, ...]:
        """The keys that are `auto` because the memory decides about them."""
        said = {"micro_batch": self.micro_batch == AUTO, "remat": self.remat == "auto"}
        return tuple(f"strategy.{name}" for name, is_open in said.items() if is_open)

    @property
    def smallest_micro_batch(self) -> int:
        """`micro_batch`; 1 where it is to be chosen."""
        return 1 if self.micro_batch == AUTO else self.micro_batch

    @property
    def frugal(self) -> StrategySettings:
        """With what takes the least memory where the memory is to decide."""
        remat = REMATS[-1] if self.remat == "auto" else self.remat
        return replace(self, micro_batch=self.smallest_micro_batch, remat=remat)

    @property
    def rounds(self) -> bool:
        """True when the policy makes some type shorter than the model's own may be."""
        return "bfloat16" in (self.param_dtype, self.reduce_dtype, self.output_dtype)

    @property
    def gradient_reduction(self) -> str:
        """`reduce_gradients`, with what auto stands for."""
        if self.reduce_gradients != "auto":
            return self.reduce_gradients
        return "last" if self.zero_stage == DISTRIBUTED_OPTIMIZER else "each"

    @property
    def zero_stage(self) -> int:
        """`zero`, with what auto stands for."""
        return STRATEGIES[self.name].zero if self.zero == AUTO else self.zero


DEFAULTS = StrategySettings()
REMATS = tuple(
    word
    for word in StrategySettings.__dataclass_fields__["remat"].metadata["choices"]
    if word not in ("auto", OFFLOAD)
)
"""Ways to recompute that need nothing of the host, from the least to the most."""
