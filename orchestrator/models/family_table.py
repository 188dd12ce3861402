"""Model families of Hugging Face as rows of a table: which parts each is made of, and which keys of
its `config.json` mean what. One reader makes the architecture of all.

Sources: the configuration and modeling files of transformers 5, and those models' own pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from shardwright.orchestrator.models import config_file
from shardwright.orchestrator.models.architecture import (
    Activation,
    Architecture,
    Attention,
    Experts,
    Layer,
    Mlp,
    Norm,
)
from shardwright.orchestrator.models.config_fields import PLAIN, Fields
from shardwright.orchestrator.models.config_file import Config

_ACTIVATIONS = {each.value: each for each in Activation}
_ACTIVATIONS |= dict.fromkeys(("gelu_new", "gelu_fast"), Activation.GELU_TANH)
_GATES = {Activation.SILU.value: Activation.SILU, "swish": Activation.SILU}


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """What a key of true or false says, and what holds where it is missing; no key: always."""

    default: bool
    key: str = ""

    def read(self, fields: Fields) -> bool:
        """Whether it is on."""
        return fields.flag(self.key, self.default) if self.key else self.default


OFF, ON = Switch(default=False), Switch(default=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Which layers see a window: `all`; those from `max_window_layers` on (`late`); or all but
    every `period`-th. `layer_types` of a config goes before. `switch` says whether any does."""

    kind: str
    period: int = 0
    period_key: str = ""
    switch: Switch = ON
    default: int = 0
    """The window where none is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKeys:
    """Which keys say how many experts there are, how wide, and how they are chosen."""

    count: str
    width: str = "intermediate_size"
    router: str = "softmax, top-k, normalised"
    normalised: Switch = ON
    """Whether the weights of the chosen add up to one."""
    sparse: bool = False
    """Whether `decoder_sparse_step` and `mlp_only_layers` leave some layers dense."""
    bias: bool = False
    limit: str = ""
    plain: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A family."""

    what: str
    names: Mapping[str, str] = field(default_factory=dict)
    """Our keys, which are Llama's -> the family's, where it spells them otherwise."""
    norm: str = "rms"
    eps: float = 1e-6
    """Where the config does not say."""
    activations: Mapping[str, Activation] = field(default_factory=lambda: _GATES)
    activation: str = "silu"
    gated: bool = True
    mlp_bias: Switch = OFF
    bias: Switch = OFF
    """Of queries, keys and values."""
    out_bias: Switch = OFF
    head_norm: str = ""
    head_dim: int = 0
    """Where the config does not say; 0: the width divided by the heads."""
    kv_heads: str = "required"
    """Whether the config has to say how many heads of keys and values there are, or has as many as
    of queries where it does not (`usual`) or always (`none`)."""
    rotary: bool = True
    theta: float = 10000.0
    """Where the config does not say."""
    rotary_share: float = 1.0
    rotary_key: str = ""
    local_rope: bool = False
    """Whether layers with a window have rotary positions of their own."""
    learned_positions: bool = False
    windows: Windows | None = None
    sinks: bool = False
    softcaps: tuple[float, float] | None = None
    """Of scores and logits, where the config does not say; null means none."""
    scale_key: str = ""
    """A number that scores are multiplied by."""
    scale_dim: str = ""
    """A size in whose place the head dim's root divides scores."""
    embed_root: bool = False
    """Whether embeddings are multiplied by the root of the width."""
    multipliers: bool = False
    """Granite's, of embeddings, residual and logits."""
    placement: str = "pre"
    parallel: Switch = OFF
    experts: ExpertKeys | None = None
    tied: bool = False
    """Where the config does not say."""
    positions: int = 2048
    """Where the config does not say."""
    dropouts: tuple[str, ...] = ()
    """Shares of embeddings, attention and residual that are dropped, which have to be equal; none:
    `attention_dropout` alone."""
    dropout: float = 0.0
    """Where the config does not say."""
    plain: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys whose other values are not built."""
    without_effect: tuple[str, ...] = ()


_LLAMA: dict[str, tuple[Any, ...]] = {"pretraining_tp": (1,)}
_BALANCE: dict[str, tuple[Any, ...]] = {"output_router_logits": (False,)}
_AUXILIARY = ("router_aux_loss_coef",)  # of a loss that output_router_logits adds
_IF_SAID = Switch(key="use_sliding_window", default=False)
_QWEN_WINDOWS = Windows(kind="late", switch=_IF_SAID, default=4096)
_ATTENTION_BIAS = Switch(key="attention_bias", default=False)
_GEMMA = Row(
    what="Gemma 2",
    norm="rms1",
    activations={"gelu_pytorch_tanh": Activation.GELU_TANH},
    activation="gelu_pytorch_tanh",
    names={"hidden_act": "hidden_activation"},
    windows=Windows(kind="periodic", period=2, default=4096),
    scale_dim="query_pre_attn_scalar",
    head_dim=256,
    softcaps=(50.0, 30.0),
    embed_root=True,
    placement="sandwich",
    tied=True,
    bias=_ATTENTION_BIAS,
    out_bias=_ATTENTION_BIAS,
    plain={"use_bidirectional_attention": (False,)},
    positions=8192,
    without_effect=("hidden_act",),  # `hidden_activation` is what is obeyed
)

FAMILIES: MappingProxyType[str, Row] = MappingProxyType(
    {
        "llama": Row(
            what="Llama 1 to 3.3",
            eps=1e-5,  # as all since Llama 2 say; the library's own default is 1e-6
            kv_heads="usual",
            mlp_bias=Switch(key="mlp_bias", default=False),
            plain=_LLAMA,
            bias=_ATTENTION_BIAS,
            out_bias=_ATTENTION_BIAS,
        ),
        "mistral": Row(
            what="Mistral 7B and its kin",
            eps=1e-5,  # as all of them say; the library's own default is 1e-6
            windows=Windows(kind="all", default=4096),
            positions=131072,
        ),
        "qwen2": Row(
            what="Qwen 1.5 to 2.5",
            bias=ON,
            windows=_QWEN_WINDOWS,
            positions=32768,
        ),
        "qwen3": Row(
            what="Qwen 3",
            head_norm="rms",
            head_dim=128,
            windows=_QWEN_WINDOWS,
            positions=32768,
            bias=_ATTENTION_BIAS,
            out_bias=_ATTENTION_BIAS,
        ),
        "mixtral": Row(
            what="Mixtral of experts",
            theta=1e6,
            windows=Windows(kind="all"),
            eps=1e-5,
            experts=ExpertKeys(
                count="num_local_experts", plain={"router_jitter_noise": (0,), **_BALANCE}
            ),
            without_effect=_AUXILIARY,
            positions=131072,
        ),
        "qwen3_moe": Row(
            what="Qwen 3 with experts",
            head_norm="rms",
            windows=Windows(kind="all", switch=_IF_SAID, default=4096),
            experts=ExpertKeys(
                count="num_experts",
                width="moe_intermediate_size",
                normalised=Switch(key="norm_topk_prob", default=False),
                sparse=True,
                plain=_BALANCE,
            ),
            without_effect=(*_AUXILIARY, "max_window_layers"),
            positions=32768,
            bias=_ATTENTION_BIAS,
            out_bias=_ATTENTION_BIAS,
        ),
        "gemma2": _GEMMA,
        "gemma3_text": replace(
            _GEMMA,
            what="Gemma 3, its text model",
            theta=1e6,
            softcaps=(0.0, 0.0),
            head_norm="rms1",
            windows=Windows(
                kind="periodic", period=6, period_key="sliding_window_pattern", default=4096
            ),
            local_rope=True,
            positions=131072,
        ),
        "granite": Row(
            what="Granite 3",
            kv_heads="usual",
            scale_key="attention_multiplier",
            multipliers=True,
            mlp_bias=Switch(key="mlp_bias", default=False),
            plain=_LLAMA,
            bias=_ATTENTION_BIAS,
            out_bias=_ATTENTION_BIAS,
        ),
        "phi3": Row(
            what="Phi 3 to 4",
            kv_heads="usual",
            rotary_key="partial_rotary_factor",
            windows=Windows(kind="all"),
            eps=1e-5,
            plain=_LLAMA | {"resid_pdrop": (0,), "embd_pdrop": (0,), "attention_bias": (False,)},
            without_effect=("original_max_position_embeddings",),  # read with rope_scaling
            positions=4096,
        ),
        "gpt2": Row(
            what="GPT-2",
            names={
                "hidden_size": "n_embd",
                "num_hidden_layers": "n_layer",
                "num_attention_heads": "n_head",
                "intermediate_size": "n_inner",
                "max_position_embeddings": "n_positions",
                "rms_norm_eps": "layer_norm_epsilon",
                "hidden_act": "activation_function",
            },
            norm="layer",
            eps=1e-5,
            activations=_ACTIVATIONS,
            activation="gelu_new",
            gated=False,
            mlp_bias=ON,
            bias=ON,
            out_bias=ON,
            kv_heads="none",
            rotary=False,
            learned_positions=True,
            tied=True,
            positions=1024,
            dropouts=("embd_pdrop", "attn_pdrop", "resid_pdrop"),
            dropout=0.1,
            plain={
                "scale_attn_weights": (True,),
                "scale_attn_by_inverse_layer_idx": (False,),
                "reorder_and_upcast_attn": (False,),
            },
            without_effect=(
                *("n_ctx", "summary_activation", "summary_first_dropout"),
                *("summary_proj_to_labels", "summary_type", "summary_use_proj"),
            ),
        ),
        "gpt_neox": Row(
            what="GPT-NeoX and Pythia",
            names={"rms_norm_eps": "layer_norm_eps", "rope_theta": "rotary_emb_base"},
            norm="layer",
            eps=1e-5,
            activations=_ACTIVATIONS,
            activation="gelu",
            gated=False,
            mlp_bias=ON,
            bias=Switch(key="attention_bias", default=True),
            out_bias=Switch(key="attention_bias", default=True),
            kv_heads="none",
            rotary_share=0.25,
            rotary_key="rotary_pct",
            parallel=Switch(key="use_parallel_residual", default=True),
            dropouts=("attention_dropout", "hidden_dropout"),
        ),
        "gpt_oss": Row(
            what="gpt-oss",
            theta=150000.0,
            eps=1e-5,
            head_dim=64,
            bias=Switch(key="attention_bias", default=True),
            out_bias=Switch(key="attention_bias", default=True),
            windows=Windows(kind="periodic", period=2, default=128),
            sinks=True,
            experts=ExpertKeys(
                count="num_local_experts",
                router="top-k, softmax",
                bias=True,
                limit="swiglu_limit",
                plain=_BALANCE,
            ),
            without_effect=(
                *_AUXILIARY,
                *("experts_per_token", "initial_context_length"),  # said twice in the files
                "quantization_config",  # how the published weights are stored
            ),
            positions=131072,
        ),
    }
)


def architecture_of(config: Config) -> Architecture:
    """The architecture of a config.

    Raises UsageError (SW_MODEL_CONFIG) for a family without a row, and for a key that is missing,
    wrong, not built, or unknown, by its name.
    """
    return read(config)[0]


def read(config: Config) -> tuple[Architecture, Fields]:
    """The architecture, and which keys were read. Raises UsageError as `architecture_of`."""
    config_file.refuse_features(config, {"model_type": tuple(FAMILIES)})
    row = FAMILIES[config.get("model_type", "llama")]
    fields = Fields(config, row.names)
    fields.plain({**PLAIN, **row.plain})
    made = _architecture(fields, row)
    fields.refuse_others(row.without_effect)
    return made, fields


_ALWAYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def _architecture(f: Fields, row: Row) -> Architecture:
    config_file.sizes(f.config, map(f.key, _ALWAYS))  # all that are missing at once
    hidden, norm = f.size("hidden_size"), Norm(row.norm, f.number("rms_norm_eps", row.eps))
    positions = f.size("max_position_embeddings", row.positions)
    dropouts = row.dropouts or ("attention_dropout",)
    shares = {f.share(key, row.dropout) for key in dropouts}
    if len(shares) > 1:
        given = ", ".join(f"{share:g}" for share in sorted(shares))
        raise config_file.refused(f"equal {', '.join(row.dropouts)}", given)
    return Architecture(
        vocab=f.size("vocab_size"),
        hidden=hidden,
        layers=_layers(f, row, hidden, norm, positions),
        norm=norm,
        positions=positions,
        learned_positions=row.learned_positions,
        tied=f.flag("tie_word_embeddings", row.tied),
        embed_scale=hidden**0.5 if row.embed_root else _multiplier(f, row, "embedding_multiplier"),
        residual_scale=_multiplier(f, row, "residual_multiplier"),
        logit_divisor=_multiplier(f, row, "logits_scaling"),
        logit_softcap=f.cap("final_logit_softcapping", row.softcaps[1]) if row.softcaps else 0.0,
        dropout=shares.pop(),
        drops_states=bool(row.dropouts),
    )


def _multiplier(f: Fields, row: Row, key: str) -> float:
    return f.number(key, 1.0) if row.multipliers else 1.0


def _layers(f: Fields, row: Row, hidden: int, norm: Norm, positions: int) -> tuple[Layer, ...]:
    count = f.size("num_hidden_layers")
    windows = _windows(f, row, count)
    full = _attention(f, row, hidden, norm, positions, 0)
    seen = {w: full if not w else _attention(f, row, hidden, norm, positions, w) for w in windows}
    placement = "parallel" if row.parallel.read(f) else row.placement
    feeds = _feeds(f, row, hidden, count)
    return tuple(
        Layer(attention=seen[window], feed=feed, placement=placement)
        for window, feed in zip(windows, feeds, strict=True)
    )


def _windows(f: Fields, row: Row, count: int) -> list[int]:
    """The window of every layer, or 0."""
    if row.windows is None:
        return [0] * count
    rule = row.windows
    is_on, window = rule.switch.read(f), f.window("sliding_window", rule.default)
    kinds = None
    if rule.kind != "all":
        kinds = f.kinds(count, {"sliding_attention": True, "full_attention": False})
    if rule.kind == "late":
        start = f.size("max_window_layers", 28) if f.config.get("max_window_layers") != 0 else 0
        usual = [i >= start for i in range(count)]
    elif rule.kind == "periodic":
        period = f.size(rule.period_key, rule.period) if rule.period_key else rule.period
        usual = [(i + 1) % period != 0 for i in range(count)]
    else:
        usual = [True] * count
    seen = kinds if kinds is not None else usual
    return [window if is_on and seen[i] else 0 for i in range(count)]


def _attention(
    f: Fields, row: Row, hidden: int, norm: Norm, positions: int, window: int
) -> Attention:
    heads = f.size("num_attention_heads")
    kv_heads, head_dim = heads, row.head_dim or max(1, hidden // heads)
    if row.kv_heads != "none":
        kv_heads = f.size("num_key_value_heads", heads if row.kv_heads == "usual" else 0)
        head_dim = f.size("head_dim", head_dim)
    if heads % kv_heads or head_dim % 2:
        raise config_file.refused(
            "num_key_value_heads to divide num_attention_heads and an even head dim",
            f"{kv_heads}, {heads} and {head_dim}",
        )
    share = f.number(row.rotary_key, row.rotary_share) if row.rotary_key else 1.0
    dim = int(head_dim * share)
    local = row.local_rope and window > 0
    scale = f.number(row.scale_key, 1.0) if row.scale_key else head_dim**-0.5
    if row.scale_dim:
        scale = f.number(row.scale_dim, 256) ** -0.5
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=scale,
        rope=f.rope(dim, positions, row.theta, local) if row.rotary else None,
        bias=row.bias.read(f),
        out_bias=row.out_bias.read(f),
        head_norm=Norm(row.head_norm, norm.eps) if row.head_norm else None,
        window=window,
        softcap=f.cap("attn_logit_softcapping", row.softcaps[0]) if row.softcaps else 0.0,
        sinks=row.sinks,
    )


def _feeds(f: Fields, row: Row, hidden: int, count: int) -> list[Mlp | Experts]:
    """The feed-forward part of every layer."""
    activation = f.choice("hidden_act", row.activations, row.activation)
    keys = row.experts
    usual = 0 if row.names.get("intermediate_size") is None else 4 * hidden
    dense = Mlp(
        width=f.size("intermediate_size", usual),
        activation=activation,
        gated=row.gated,
        bias=row.mlp_bias.read(f),
    )
    if keys is None:
        return [dense] * count
    routed = _experts(f, keys)
    if not keys.sparse:
        return [routed] * count
    step, only = f.size("decoder_sparse_step", 1), f.numbered("mlp_only_layers")
    return [dense if i in only or (i + 1) % step else routed for i in range(count)]


def _experts(f: Fields, keys: ExpertKeys) -> Experts:
    f.plain(keys.plain)
    count, chosen = f.size(keys.count), f.size("num_experts_per_tok")
    if chosen > count:
        raise config_file.refused(f"num_experts_per_tok of at most {count}", str(chosen))
    normalised = keys.normalised.read(f)
    return Experts(
        count=count,
        chosen=chosen,
        width=f.size(keys.width),
        router=keys.router if normalised else "softmax, top-k",
        bias=keys.bias,
        limit=f.number(keys.limit, 7.0) if keys.limit else 0.0,
    )
