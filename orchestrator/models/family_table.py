"""The architecture of a `config.json` of any family in the table (`family_rows.py`): one reader for
all rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from shardwright.orchestrator.models import config_file
from shardwright.orchestrator.models.architecture import (
    Architecture,
    Attention,
    Experts,
    LatentAttention,
    Layer,
    Mlp,
    Norm,
    Patches,
    Relative,
)
from shardwright.orchestrator.models.config_fields import LABELS, PLAIN, Fields
from shardwright.orchestrator.models.config_file import Config
from shardwright.orchestrator.models.family_rows import FAMILIES, ExpertKeys, Row
from shardwright.orchestrator.models.rope import Yarn


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
    if row.inner:
        return read(_inside(config, row, *row.inner))
    fields = Fields({**row.usual, **config}, row.names)
    fields.plain({**PLAIN, **row.plain})
    made = _architecture(fields, row)
    fields.same(row.twice)
    fields.refuse_others((*row.without_effect, *LABELS))
    return made, fields


def left_out(config: Config) -> str:
    """What of a config is not built, in words; empty where all of it is."""
    row = FAMILIES[config.get("model_type", "llama")]
    if not row.inner or not config.get("vision_config"):
        return ""
    return f"the text model of {config['model_type']} is built, without its vision tower"


def _inside(config: Config, row: Row, key: str, family: str) -> Config:
    """The config inside another that is built."""
    outer = Fields(config, {})
    found = outer.nested(key)
    outer.plain(PLAIN)
    outer.refuse_others((*row.without_effect, *LABELS, "tie_word_embeddings"))
    tied = {k: config[k] for k in ("tie_word_embeddings",) if k in config}
    config_file.refuse_features(found, {"model_type": (family,)})
    return {**tied, **found, "model_type": family}


_ALWAYS = ("hidden_size", "num_hidden_layers", "num_attention_heads")


def _architecture(f: Fields, row: Row) -> Architecture:
    vocab = () if row.patches else ("vocab_size",)
    config_file.sizes(f.config, map(f.key, (*_ALWAYS, *vocab)))  # all that are missing at once
    hidden, norm = f.size("hidden_size"), Norm(row.norm, f.number("rms_norm_eps", row.eps))
    patches = _patches(f) if row.patches else None
    positions = patches.count + 1 if patches else f.size("max_position_embeddings", row.positions)
    dropouts = row.dropouts or ("attention_dropout",)
    shares = {f.share(key, row.dropout) for key in dropouts}
    if len(shares) > 1:
        given = ", ".join(f"{share:g}" for share in sorted(shares))
        raise config_file.refused(f"equal {', '.join(row.dropouts)}", given)
    encoder, layers = _stacks(f, row, hidden, norm, positions)
    tied = not patches and f.flag("tie_word_embeddings", row.tied)
    return Architecture(
        vocab=f.classes() if patches else f.size("vocab_size"),
        hidden=hidden,
        encoder=encoder,
        layers=layers,
        norm=norm,
        positions=positions,
        learned_positions=row.learned_positions,
        patches=patches,
        segments=f.size("type_vocab_size", 2) if row.masked else 0,
        embed_norm=row.masked,
        final_norm=not row.masked,
        transform=f.choice("hidden_act", row.activations, row.activation) if row.masked else None,
        tied=tied,
        embed_scale=hidden**0.5 if row.embed_root else _multiplier(f, row, "embedding_multiplier"),
        residual_scale=_multiplier(f, row, "residual_multiplier"),
        logit_divisor=hidden**0.5
        if row.encodes and tied
        else _multiplier(f, row, "logits_scaling"),
        logit_softcap=f.cap("final_logit_softcapping", row.softcaps[1]) if row.softcaps else 0.0,
        dropout=shares.pop(),
        drops_states=bool(row.dropouts),
    )


def _multiplier(f: Fields, row: Row, key: str) -> float:
    return f.number(key, 1.0) if row.multipliers else 1.0


def _patches(f: Fields) -> Patches:
    size, patch = f.size("image_size", 224), f.size("patch_size", 16)
    if size % patch:
        raise config_file.refused(f"image_size as a multiple of patch_size {patch}", str(size))
    return Patches(patch * patch * f.size("num_channels", 3), (size // patch) ** 2)


def _stacks(
    f: Fields, row: Row, hidden: int, norm: Norm, positions: int
) -> tuple[tuple[Layer, ...], tuple[Layer, ...]]:
    """The layers of the encoder, if there is one, and those behind it."""
    layers = _layers(f, row, hidden, norm, positions)
    if not row.encodes:
        return (), layers
    (one,), own = set(layers), layers[0].attention
    assert isinstance(own, Attention)
    around, across = replace(own, causal=False), replace(own, causal=False, relative=None)
    behind = replace(one, crossed=across)
    count = f.size("num_decoder_layers", len(layers))
    return (replace(one, attention=around),) * len(layers), (behind,) * count


def _layers(f: Fields, row: Row, hidden: int, norm: Norm, positions: int) -> tuple[Layer, ...]:
    count = f.size("num_hidden_layers")
    windows = _windows(f, row, count)
    of_window = partial(_attention, f, row, hidden, norm, positions)
    full: Attention | LatentAttention = (
        _latent(f, row, norm, positions) if row.latent else of_window(0)
    )
    seen = {window: of_window(window) if window else full for window in windows}
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
        period = (
            f.size(f.one_of(*rule.period_keys), rule.period) if rule.period_keys else rule.period
        )
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
    if row.kv_heads in ("required", "usual"):
        kv_heads = f.size("num_key_value_heads", heads if row.kv_heads == "usual" else 0)
    if row.kv_heads != "none":
        head_dim = f.size("head_dim", head_dim)
    if heads % kv_heads or head_dim % 2:
        raise config_file.refused(
            "num_key_value_heads to divide num_attention_heads and an even head dim",
            f"{kv_heads}, {heads} and {head_dim}",
        )
    share = f.turned(row.rotary_key, row.rotary_share) if row.rotary_key else 1.0
    dim = int(head_dim * share)
    local = row.local_rope and window > 0
    scale = f.number(row.scale_key, 1.0) if row.scale_key else head_dim**-0.5
    if row.scale_dim:
        scale = f.number(row.scale_dim, 256) ** -0.5
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=1.0 if row.relative else scale,
        causal=row.causal,
        relative=_relative(f) if row.relative else None,
        rope=f.rope(dim, positions, row.theta, local) if row.rotary else None,
        bias=row.bias.read(f),
        out_bias=row.out_bias.read(f),
        head_norm=Norm(row.head_norm, norm.eps) if row.head_norm else None,
        window=window,
        softcap=f.cap("attn_logit_softcapping", row.softcaps[0]) if row.softcaps else 0.0,
        sinks=row.sinks,
    )


def _relative(f: Fields) -> Relative:
    buckets = f.size("relative_attention_num_buckets", 32)
    return Relative(buckets, f.size("relative_attention_max_distance", 128))


def _latent(f: Fields, row: Row, norm: Norm, positions: int) -> LatentAttention:
    heads = f.size("num_attention_heads")
    if f.size("num_key_value_heads", heads) != heads:
        raise config_file.refused(
            f"num_key_value_heads of {heads}, as latent attention has",
            str(f.config["num_key_value_heads"]),
        )
    plain, turned = f.size("qk_nope_head_dim", 128), f.size("qk_rope_head_dim", 64)
    rope = replace(
        f.rope(turned, positions, row.theta), interleaved=f.flag("rope_interleave", True)
    )
    stretch = rope.scaling.score_factor if isinstance(rope.scaling, Yarn) else 1.0
    return LatentAttention(
        heads=heads,
        query_rank=f.rank("q_lora_rank", 1536),
        rank=f.size("kv_lora_rank", 512),
        plain_dim=plain,
        turned_dim=turned,
        value_dim=f.size("v_head_dim", 128),
        scale=(plain + turned) ** -0.5 * stretch,
        rope=rope,
        norm=Norm(norm.kind, 1e-6),  # whatever `rms_norm_eps` says
        bias=row.bias.read(f),
    )


def _feeds(f: Fields, row: Row, hidden: int, count: int) -> list[Mlp | Experts]:
    """The feed-forward part of every layer."""
    gated, keys = row.gated, row.experts
    if row.encodes:
        gated, activation = f.projection("feed_forward_proj", row.activations)
    else:
        activation = f.choice("hidden_act", row.activations, row.activation)
    usual = 0 if row.names.get("intermediate_size") is None else 4 * hidden
    dense = Mlp(
        width=f.size("intermediate_size", usual),
        activation=activation,
        gated=gated,
        bias=row.mlp_bias.read(f),
    )
    if keys is None:
        return [dense] * count
    routed = _experts(f, keys)
    start = f.number(keys.dense, 3) if keys.dense and f.config.get(keys.dense) != 0 else 0
    if not keys.sparse:
        return [dense if i < start else routed for i in range(count)]
    step, only = f.size("decoder_sparse_step", 1), f.numbered("mlp_only_layers")
    return [dense if i in only or (i + 1) % step else routed for i in range(count)]


def _experts(f: Fields, keys: ExpertKeys) -> Experts:
    f.plain(keys.plain)
    count = f.size(f.one_of(keys.count, "num_local_experts"))
    chosen = f.size("num_experts_per_tok")
    if chosen > count:
        raise config_file.refused(f"num_experts_per_tok of at most {count}", str(chosen))
    normalised, width = keys.normalised.read(f), f.size(keys.width)
    made = Experts(
        count=count,
        chosen=chosen,
        width=width,
        router=keys.router if normalised else keys.router.removesuffix(", normalised"),
        bias=keys.bias,
        limit=f.number(keys.limit, 7.0) if keys.limit else 0.0,
    )
    if not keys.grouped:
        return made
    groups, seen = f.size("n_group", 8), f.size("topk_group", 4)
    if count % groups or seen > groups or chosen > seen * (count // groups):
        raise config_file.refused(
            f"n_group that divides {count} experts, and topk_group of them with {chosen} experts",
            f"{groups} and {seen}",
        )
    return replace(
        made,
        groups=groups,
        groups_chosen=seen,
        corrected=True,
        scale=f.number("routed_scaling_factor", 2.5),
        shared=f.size("n_shared_experts", 1) * width,
    )
