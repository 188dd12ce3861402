"""The parts a transformer is made of, as values: attention, norms, MLPs, experts, positions, and
the layers that are equal to each other.

`decoder.py` computes them; `family_table.py` makes them of a `config.json`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.models.rope import Rope


class Activation(StrEnum):
    """Of MLPs; GELU by the normal distribution or in the tanh form."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"
    RELU = "relu"


@dataclass(frozen=True, slots=True)
class Norm:
    """`rms`; `rms1`, whose scale is one plus its weight (Gemma); or `layer`, with mean and bias."""

    kind: str
    eps: float


@dataclass(frozen=True, slots=True)
class Relative:
    """What is added to scores by the distance of two positions (T5), learned per head: half of the
    `buckets` hold one distance each, the others ever more of them, the last all from `most` on."""

    buckets: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    causal: bool = True
    """Whether a position sees none behind it."""
    rope: Rope | None = None
    relative: Relative | None = None
    bias: bool = False
    """Of queries, keys and values."""
    out_bias: bool = False
    head_norm: Norm | None = None
    """Of queries and keys, over the elements of a head."""
    window: int = 0
    """How many positions a token sees, itself and those before it; 0: all."""
    softcap: float = 0.0
    sinks: bool = False
    """Whether each head has a learned score besides those of positions, with nothing behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Causal attention whose keys and values are products of one narrow vector per position, beside
    which a rotated part of the keys is common to all heads (DeepSeek-AI 2024, "DeepSeek-V2",
    section 2.1)."""

    heads: int
    query_rank: int
    """Width of the vector that queries are products of; 0: they are read from the residual."""
    rank: int
    """Width of that of keys and values."""
    plain_dim: int
    """Of queries and keys, without positions."""
    turned_dim: int
    """Of queries and keys, behind the plain elements, with rotary positions."""
    value_dim: int
    scale: float
    rope: Rope
    norm: Norm
    """Of the narrow vectors."""
    bias: bool = False
    """Of what makes the narrow vectors, and of the output."""
    window: ClassVar[int] = 0
    causal: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """A feed-forward block: two matrices, or three where a gate multiplies."""

    width: int
    activation: Activation
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Feed-forward blocks of which every row visits the `chosen` best.

    Raises UsageError for a choice that cannot be made.
    """

    count: int
    chosen: int
    width: int
    router: str = "softmax, top-k, normalised"
    """One of `ROUTERS`."""
    bias: bool = False
    """Of the router and the experts."""
    limit: float = 0.0
    """Where gate and value are clamped (gpt-oss); 0: nowhere, SwiGLU."""
    groups: int = 1
    """Experts lie in so many groups, of which a row sees the `groups_chosen` with the best pair."""
    groups_chosen: int = 1
    corrected: bool = False
    """Whether a number per expert, which no gradient trains, is added to scores where experts are
    chosen, and not to their weights (DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2)."""
    scale: float = 1.0
    """Of the weights of the chosen."""
    shared: int = 0
    """Width of a block that every row visits besides; 0: there is none."""
    routing: str = "blocks"
    """How rows go to experts (`experts.py`), one of `ROUTINGS`."""
    block: int = 256
    """Rows of a block of one expert: what takes as long as reading its matrices does (trn1: 95
    TFLOP/s over 410 GB/s)."""
    capacity_factor: float = 1.25
    """Of an expert's even share of a sequence, which is as many rows as it takes of one; "blocks"
    and "grouped" take all."""

    def __post_init__(self) -> None:
        room = self.capacity_factor > 0 and self.routing in ROUTINGS and self.router in ROUTERS
        if not 1 <= self.chosen <= self.count or not room:
            raise UsageError(
                "SW_MODEL_CONFIG",
                "experts require 1 <= chosen <= count, room, and a routing of"
                f" {', '.join(ROUTINGS)}, got {self}",
            )

    def seated(self, factor: float = 0.0) -> Experts:
        """The same with seats for what `factor` says of the even share; 0: for every row, which is
        how experts that lie on several cores drop none."""
        factor = factor or self.count / self.chosen
        return replace(self, routing="sorted", capacity_factor=factor)


ROUTERS = (
    *("softmax, top-k, normalised", "softmax, top-k", "top-k, softmax"),
    *("sigmoid, top-k, normalised", "sigmoid, top-k"),
)
ROUTINGS = ("blocks", "products", "sorted", "grouped", "first")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Attention and feed-forward, each added to the residual behind a norm (`pre`), between two
    (`sandwich`), before one (`post`), or both of the same input (`parallel`)."""

    attention: Attention | LatentAttention
    feed: Mlp | Experts
    crossed: Attention | None = None
    """Attention to what the encoder made, between the two."""
    placement: str = "pre"


@dataclass(frozen=True, slots=True)
class Stack:
    """How layers repeat: some first, a period so many times, and the last ones."""

    first: tuple[Layer, ...]
    period: tuple[Layer, ...]
    times: int
    last: tuple[Layer, ...]


@dataclass(frozen=True, slots=True)
class Patches:
    """Images cut into patches: numbers of each, and how many there are of one image."""

    pixels: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A transformer: a decoder, an encoder, or both."""

    vocab: int
    """Tokens, or classes of images."""
    hidden: int
    layers: tuple[Layer, ...]
    encoder: tuple[Layer, ...] = ()
    """Layers that read a sequence of their own; `layers` attend to what they make."""
    norm: Norm
    positions: int
    """The longest sequence."""
    learned_positions: bool = False
    tied: bool = False
    """Whether the output projection is the embedding."""
    patches: Patches | None = None
    """What is read instead of tokens, behind a vector that is learned, from which the image's class
    is told."""
    segments: int = 0
    """Kinds of text that a position may be of (BERT)."""
    embed_norm: bool = False
    final_norm: bool = True
    transform: Activation | None = None
    """Of a product and a norm before the output projection, which has a bias (BERT)."""
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    logit_softcap: float = 0.0
    dropout: float = 0.0
    """Of attention weights and, with `drops_states`, of embeddings and what is added to the
    residual."""
    drops_states: bool = True
    fused: bool = False
    """Whether projections that read the same input are one matrix (Megatron-LM, NxD)."""

    def fed_by(self, feed: Mlp | Experts) -> Architecture:
        """The same with another feed-forward part in every layer."""
        return replace(self, layers=tuple(replace(layer, feed=feed) for layer in self.layers))

    def with_experts(self, changed: Callable[[Experts], Experts]) -> Architecture:
        """The same with other experts in every layer that has some."""

        def other(layer: Layer) -> Layer:
            feed = layer.feed
            return replace(layer, feed=changed(feed)) if isinstance(feed, Experts) else layer

        return replace(self, layers=tuple(map(other, self.layers)))

    @property
    def windows(self) -> tuple[int, ...]:
        """Windows of layers that have one."""
        return tuple(w for w in (layer.attention.window for layer in self.layers) if w)


LONGEST_PERIOD = 16


def stacked(layers: tuple[Layer, ...]) -> Stack:
    """The layers as first, period and last, with as few as possible that are written out."""
    numbers: dict[Layer, int] = {}
    kinds = [numbers.setdefault(layer, len(numbers)) for layer in layers]
    ways = (
        (start + size + len(kinds) - _end(kinds, start, size), size, start)
        for size in range(1, min(len(kinds), LONGEST_PERIOD) + 1)
        for start in range(len(kinds) - size + 1)
    )
    _, size, start = min(ways)
    end = _end(kinds, start, size)
    times = (end - start) // size
    return Stack(layers[:start], layers[start : start + size], times, layers[end:])


def _end(kinds: list[int], start: int, size: int) -> int:
    """Where the repetitions of those `size` from `start` on end."""
    end = start + size
    while kinds[end : end + size] == kinds[start : start + size]:
        end += size
    return end
