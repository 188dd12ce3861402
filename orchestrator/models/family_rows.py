"""Model families of Hugging Face as rows of a table: which parts each is made of, and which keys of
its `config.json` mean what. `family_table.py` reads configs by them.

Sources: the configuration and modeling files of transformers 5, and those models' own pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from shardwright.orchestrator.models.architecture import Activation
from shardwright.orchestrator.models.config_fields import Fields

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
    period_keys: tuple[str, ...] = ()
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
    dense: str = ""
    """How many layers at the start are dense."""
    grouped: bool = False
    """Whether experts are in groups, corrected, scaled, and beside shared ones (DeepSeek-V3)."""
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
    of queries where it does not (`usual`) or always (`equal`), and does not say how wide a head is
    (`none`)."""
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
    latent: bool = False
    """Whether keys and values come of one narrow vector (`LatentAttention`)."""
    causal: bool = True
    relative: bool = False
    """Whether scores have parts by distance, and no scale (T5)."""
    encodes: bool = False
    """Whether there is an encoder, and `num_decoder_layers` behind it."""
    patches: bool = False
    """Whether images of `image_size` are read as patches, and `id2label` has their classes."""
    masked: bool = False
    """Whether the own token is told, as BERT does: kinds of text, norms of embeddings and before
    the output projection, none behind the layers."""
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
    usual: Mapping[str, Any] = field(default_factory=dict)
    """What holds where the config, as published ones, leaves it out."""
    twice: Mapping[str, str] = field(default_factory=dict)
    """Keys that published configs have beside another for the same, and that other."""
    without_effect: tuple[str, ...] = ()
    inner: tuple[str, str] | None = None
    """The key of a config inside that is built alone, and its family; what is beside it are
    `without_effect`."""


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
    plain={"use_bidirectional_attention": (False, None)},
    positions=8192,
    without_effect=("hidden_act",),  # `hidden_activation` is what is obeyed
    twice={"sliding_window_size": "sliding_window"},
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
            usual={"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4},
            windows=Windows(
                kind="periodic",
                period=6,
                period_keys=("sliding_window_pattern", "_sliding_window_pattern"),
                default=4096,
            ),
            local_rope=True,
            positions=131072,
        ),
        "gemma3": Row(
            what="Gemma 3, whose text model alone is built",
            inner=("text_config", "gemma3_text"),
            without_effect=(
                *("vision_config", "mm_tokens_per_image"),
                *("boi_token_index", "eoi_token_index", "image_token_index"),
            ),
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
            activation=Activation.GELU,
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
                plain={**_BALANCE, "swiglu_alpha": (1.702,)},
            ),
            without_effect=(*_AUXILIARY, "initial_context_length"),  # read with rope_scaling
            twice={"experts_per_token": "num_experts_per_tok"},
            positions=131072,
        ),
        "deepseek_v3": Row(
            what="DeepSeek V3 and R1",
            latent=True,
            kv_heads="usual",
            bias=_ATTENTION_BIAS,
            experts=ExpertKeys(
                count="n_routed_experts",
                width="moe_intermediate_size",
                router="sigmoid, top-k, normalised",
                normalised=Switch(key="norm_topk_prob", default=True),
                dense="first_k_dense_replace",
                grouped=True,
                plain={
                    **_BALANCE,
                    "scoring_func": ("sigmoid",),
                    "topk_method": ("noaux_tc",),
                    "moe_layer_freq": (1,),
                },
            ),
            plain=_LLAMA,
            without_effect=(
                *("num_nextn_predict_layers", "num_mtp_layers"),  # heads the library leaves out
                *("ep_size", "head_dim", "qk_head_dim"),  # what follows of others
                *("aux_loss_alpha", "seq_aux"),  # of a loss that noaux_tc is without
            ),
            positions=4096,
        ),
        "bert": Row(
            what="BERT as a masked language model",
            names={"rms_norm_eps": "layer_norm_eps"},
            norm="layer",
            eps=1e-12,
            activations=_ACTIVATIONS,
            activation=Activation.GELU,
            gated=False,
            mlp_bias=ON,
            bias=ON,
            out_bias=ON,
            kv_heads="none",
            rotary=False,
            learned_positions=True,
            causal=False,
            masked=True,
            placement="post",
            tied=True,
            positions=512,
            dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob"),
            dropout=0.1,
            plain={"position_embedding_type": ("absolute",)},
            without_effect=(
                *("directionality", "pooler_fc_size", "pooler_num_attention_heads"),
                *("pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"),
            ),
        ),
        "t5": Row(
            what="T5, T5 1.1 and FLAN",
            names={
                "hidden_size": "d_model",
                "head_dim": "d_kv",
                "intermediate_size": "d_ff",
                "num_hidden_layers": "num_layers",
                "num_attention_heads": "num_heads",
                "rms_norm_eps": "layer_norm_epsilon",
                "max_position_embeddings": "n_positions",
            },
            eps=1e-6,
            activations=_ACTIVATIONS,
            activation=Activation.RELU,
            kv_heads="equal",
            rotary=False,
            relative=True,
            encodes=True,
            tied=True,
            positions=512,
            dropouts=("dropout_rate",),
            dropout=0.1,
            plain={"is_encoder_decoder": (True,)},
            without_effect=(
                *("initializer_factor", "output_past"),
                *("dense_act_fn", "is_gated_act", "scale_decoder_outputs"),  # what follows
            ),
        ),
        "vit": Row(
            what="Vision transformers that classify",
            names={"rms_norm_eps": "layer_norm_eps"},
            norm="layer",
            eps=1e-12,
            activations=_ACTIVATIONS,
            activation=Activation.GELU,
            gated=False,
            mlp_bias=ON,
            bias=Switch(key="qkv_bias", default=True),
            out_bias=ON,
            kv_heads="none",
            rotary=False,
            learned_positions=True,
            causal=False,
            patches=True,
            dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob"),
            without_effect=("encoder_stride", "pooler_act", "pooler_output_size"),
        ),
    }
)
