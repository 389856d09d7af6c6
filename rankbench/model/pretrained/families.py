"""Hugging Face models as networks: one short function per family, which knows where the library keeps each part.

A network computes what the library's module computes in eval mode, with token types 0. A head that classifies a whole
text or image is left out, because a read-out reads each token.

Scores of T5 and XLNet contain terms of positions, and scores of Llama depend on positions through rotations. Results
for scores that are products of two tokens' maps (bounds, Lipschitz constants, residual coordinates) do not hold there.

Shapes: B batch, N token, D width.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from rankbench.config.keys import ConfigError
from rankbench.model.kinds import NO_KINDS, Kinds
from rankbench.model.linear import LinearMap, ReadOut
from rankbench.model.network import Network
from rankbench.model.pretrained.parts import (
    BiasedAttention,
    GatedMlp,
    PretrainedAttention,
    PretrainedMlp,
    PretrainedNorm,
    RelativeAttention,
    RotaryAttention,
    Transposed,
)
from rankbench.model.sublayers import AnySublayer, AttentionSublayer, MlpSublayer
from rankbench.model.transformer import FirstCoordinates


class CheckpointParts(NamedTuple):
    """The parts of a module, as a family's function finds them.

    embed: maps token ids or pixels to the states that enter the first layer. num_tokens: the most tokens of a text
    (None: any number), or the number of tokens of every image.
    """

    sublayers: list[AnySublayer]
    embed: nn.Module
    num_tokens: int | None
    last_norm: PretrainedNorm | None = None
    read_out: ReadOut | None = None


def _layer(
    number: int,
    place: str,
    attention: PretrainedAttention,
    attention_norm: nn.Module,
    mlp: PretrainedMlp,
    mlp_norm: nn.Module,
) -> list[AnySublayer]:
    """Layer `number`, from 1, with the norms of its attention and of its MLP."""
    return [
        AttentionSublayer(number, attention, PretrainedNorm(attention_norm), place, skip=1.0, branch=1.0),
        MlpSublayer(number, mlp, PretrainedNorm(mlp_norm), place, skip=1.0, branch=1.0),
    ]


def _mask(config: Any, is_decoder: bool = True) -> str:
    """Which keys a decoder's queries see: as in the library, all of them if the config has is_causal=false."""
    return "causal" if is_decoder and getattr(config, "is_causal", True) else "none"


def _bert(model: Any, base: Any) -> CheckpointParts:
    """BERT and RoBERTa."""
    config, sublayers = model.config, list[AnySublayer]()
    for number, layer in enumerate(base.encoder.layer, 1):
        its, out = layer.attention.self, layer.attention.output
        maps = (its.query, its.key, its.value, out.dense)
        mask = _mask(config, config.is_decoder)
        attention = PretrainedAttention(its.num_attention_heads, *maps, its.scaling, mask)
        mlp = PretrainedMlp(layer.intermediate.dense, layer.output.dense, config.hidden_act)
        sublayers += _layer(number, "post", attention, out.LayerNorm, mlp, layer.output.LayerNorm)
    head = getattr(getattr(model, "cls", None), "predictions", None) or getattr(model, "lm_head", None)
    # RoBERTa counts positions from the one after the padding's
    first = getattr(base.embeddings, "padding_idx", -1) + 1
    num_tokens = config.max_position_embeddings - first
    return CheckpointParts(sublayers, base.embeddings, num_tokens, read_out=head and Head(head, head.decoder))


def _distilbert(model: Any, base: Any) -> CheckpointParts:
    config, sublayers = model.config, list[AnySublayer]()
    for number, layer in enumerate(base.transformer.layer, 1):
        its = layer.attention
        attention = PretrainedAttention(its.n_heads, its.q_lin, its.k_lin, its.v_lin, its.out_lin, its.scaling)
        mlp = PretrainedMlp(layer.ffn.lin1, layer.ffn.lin2, config.activation)
        sublayers += _layer(number, "post", attention, layer.sa_layer_norm, mlp, layer.output_layer_norm)
    head = None
    if hasattr(model, "vocab_projector"):
        in_turn = (model.vocab_transform, model.activation, model.vocab_layer_norm, model.vocab_projector)
        head = Head(nn.Sequential(*in_turn), model.vocab_projector)
    return CheckpointParts(sublayers, base.embeddings, config.max_position_embeddings, read_out=head)


def _albert(model: Any, base: Any) -> CheckpointParts:
    """ALBERT: few layers, each used several times."""
    config, sublayers, groups = model.config, list[AnySublayer](), base.encoder.albert_layer_groups
    for index in range(config.num_hidden_layers):
        for layer in groups[int(index / (config.num_hidden_layers / config.num_hidden_groups))].albert_layers:
            its, number = layer.attention, len(sublayers) // 2 + 1
            maps = (its.query, its.key, its.value, its.dense)
            attention = PretrainedAttention(its.num_attention_heads, *maps, its.scaling)
            mlp = PretrainedMlp(layer.ffn, layer.ffn_output, config.hidden_act)
            sublayers += _layer(number, "post", attention, its.LayerNorm, mlp, layer.full_layer_layer_norm)
    head = getattr(model, "predictions", None)
    return CheckpointParts(
        sublayers,
        nn.Sequential(base.embeddings, base.encoder.embedding_hidden_mapping_in),
        config.max_position_embeddings,
        read_out=head and Head(head, head.decoder),
    )


def _gpt2(model: Any, base: Any) -> CheckpointParts:
    config, sublayers = model.config, list[AnySublayer]()
    for number, layer in enumerate(base.h, 1):
        its, width = layer.attn, config.hidden_size
        query, key, value = (Transposed(its.c_attn, slice(begin, begin + width)) for begin in (0, width, 2 * width))
        maps = (query, key, value, Transposed(its.c_proj))
        attention = PretrainedAttention(its.num_heads, *maps, its.scaling, _mask(config))
        mlp = PretrainedMlp(Transposed(layer.mlp.c_fc), Transposed(layer.mlp.c_proj), config.activation_function)
        sublayers += _layer(number, "pre", attention, layer.ln_1, mlp, layer.ln_2)
    return CheckpointParts(
        sublayers,
        TokensAndPositions(base.wte, base.wpe),
        config.max_position_embeddings,
        PretrainedNorm(base.ln_f),
        getattr(model, "lm_head", None),
    )


class TokensAndPositions(nn.Module):
    """The sum of two tables: of token ids and of positions."""

    def __init__(self, tokens: nn.Embedding, positions: nn.Embedding) -> None:
        super().__init__()
        self.tokens, self.positions = tokens, positions

    def forward(self, ids_BN: Tensor) -> Tensor:
        return self.tokens(ids_BN) + self.positions.weight[: ids_BN.shape[1]]


def _vit(model: Any, base: Any) -> CheckpointParts:
    """ViT and DeiT: a class token, in DeiT also a distillation token, then the patches."""
    config, sublayers = model.config, list[AnySublayer]()
    for number, layer in enumerate(base.layers, 1):
        its = layer.attention
        maps = (its.q_proj, its.k_proj, its.v_proj, its.o_proj)
        attention = PretrainedAttention(its.num_attention_heads, *maps, its.scaling)
        mlp = PretrainedMlp(layer.mlp.fc1, layer.mlp.fc2, config.hidden_act)
        sublayers += _layer(number, "pre", attention, layer.layernorm_before, mlp, layer.layernorm_after)
    num_tokens = base.embeddings.position_embeddings.shape[1]
    return CheckpointParts(sublayers, base.embeddings, num_tokens, PretrainedNorm(base.layernorm))


def _t5(model: Any, base: Any) -> CheckpointParts:
    """The encoder of T5, on its own or as part of the whole model."""
    config, encoder, sublayers = model.config, base.encoder, list[AnySublayer]()
    for number, block in enumerate(encoder.block, 1):
        (of_attention, of_mlp), holder = block.layer, encoder.block[0].layer[0].SelfAttention
        its, feed = of_attention.SelfAttention, of_mlp.DenseReluDense
        attention = BiasedAttention(its.n_heads, its.q, its.k, its.v, its.o, its.scaling, holder=holder)
        if config.is_gated_act:
            mlp: PretrainedMlp = GatedMlp(feed.wi_0, feed.wi_1, feed.wo, config.dense_act_fn)
        else:
            mlp = PretrainedMlp(feed.wi, feed.wo, config.dense_act_fn)
        sublayers += _layer(number, "pre", attention, of_attention.layer_norm, mlp, of_mlp.layer_norm)
    return CheckpointParts(sublayers, encoder.embed_tokens, None, PretrainedNorm(encoder.final_layer_norm))


def _llama(model: Any, base: Any) -> CheckpointParts:
    """Llama and models built like it. Texts may not be longer than a sliding window, so that it hides nothing."""
    config, sublayers = model.config, list[AnySublayer]()
    for number, layer in enumerate(base.layers, 1):
        its, feed = layer.self_attn, layer.mlp
        maps = (its.q_proj, its.k_proj, its.v_proj, its.o_proj)
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        attention = RotaryAttention(heads, *maps, its.scaling, _mask(config), groups, rotary=base.rotary_emb)
        mlp = GatedMlp(feed.gate_proj, feed.up_proj, feed.down_proj, config.hidden_act)
        sublayers += _layer(number, "pre", attention, layer.input_layernorm, mlp, layer.post_attention_layernorm)
    window = getattr(config, "sliding_window", None) or config.max_position_embeddings
    longest, head = min(config.max_position_embeddings, window), getattr(model, "lm_head", None)
    return CheckpointParts(sublayers, base.embed_tokens, longest, PretrainedNorm(base.norm), head)


def _xlnet(model: Any, base: Any) -> CheckpointParts:
    config, sublayers = model.config, list[AnySublayer]()
    if config.bi_data:
        raise ConfigError(
            "xlnet with bi_data=true: half of each batch runs backwards; set bi_data=false in config.json"
        )
    if config.same_length and config.attn_type == "uni":
        raise ConfigError(
            "xlnet with same_length=true: without the memory of texts before, every token sees itself alone; set "
            "same_length=false in config.json"
        )
    for number, layer in enumerate(base.layer, 1):
        its, feed = layer.rel_attn, layer.ff
        attention = RelativeAttention(its, base, "causal" if config.attn_type == "uni" else "none")
        mlp = PretrainedMlp(feed.layer_1, feed.layer_2, config.ff_activation)
        sublayers += _layer(number, "post", attention, its.layer_norm, mlp, feed.layer_norm)
    return CheckpointParts(sublayers, base.word_embedding, None, read_out=getattr(model, "lm_loss", None))


# By the library's model_type.
TEXT: dict[str, Callable[[Any, Any], CheckpointParts]] = {
    "bert": _bert,
    "roberta": _bert,
    "distilbert": _distilbert,
    "albert": _albert,
    "gpt2": _gpt2,
    "t5": _t5,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "xlnet": _xlnet,
}
IMAGES = {"vit": _vit, "deit": _vit}
FAMILIES = TEXT | IMAGES


def as_network(module: nn.Module, kinds: Kinds = NO_KINDS) -> "PretrainedNetwork":
    """A Hugging Face module as a network, which shares its weights. Inputs are token ids (B, N), or pixels.

    kinds: of tokens, some of which count in no measurement, such as those that mark a text's beginning and end.
    ConfigError for a family that is not covered, and for a module in training mode.
    """
    family = getattr(getattr(module, "config", None), "model_type", type(module).__name__)
    if family not in FAMILIES:
        raise ConfigError(
            f"{family}: no adapter for this family; covered: {', '.join(FAMILIES)}; "
            "for path sums and attention rankbench.tape takes any module as it is"
        )
    if module.training:
        raise ConfigError(f"{type(module).__name__}: in training mode, where dropout is on; call eval() first")
    parts = FAMILIES[family](module, module.base_model)
    return (PretrainedText if family in TEXT else PretrainedVision)(module, parts, kinds)


class PretrainedNetwork(Network, nn.Module):
    """A module of the library as a network, sub-layer by sub-layer."""

    module: Any

    def __init__(self, module: nn.Module, parts: CheckpointParts, kinds: Kinds) -> None:
        super().__init__()
        self.module, self.kinds = module, kinds
        # in tables and figures: the last part of the path that it was loaded from, or its family
        self.name = Path(self.module.config.name_or_path or self.module.config.model_type).name
        self.sublayers, self.last_norm = tuple(parts.sublayers), parts.last_norm
        self.width = self.module.config.hidden_size
        self.norm_kind = next(norm.kind for sublayer in self.sublayers if (norm := sublayer.norm) is not None)
        self.read_out = FirstCoordinates(self, self.width) if parts.read_out is None else parts.read_out
        self._embed, self._num_tokens = parts.embed, parts.num_tokens

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs of the read-out for each token; without a read-out, the last states."""
        return self.read_out(self.state(inputs))


def padding_of(config: Any) -> int | None:
    """The token that a checkpoint's config names for padding; None for what is no token, as -1."""
    padding = getattr(config, "pad_token_id", None)
    return padding if padding in range(getattr(config, "vocab_size", 0)) else None


def tokens_of(ids_BN: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Masks (B, N) of the tokens that are neither absent nor padding, and of all up to the last one of their text."""
    padding = padding_of(config)
    is_token_BN = ids_BN >= 0 if padding is None else (ids_BN >= 0) & (ids_BN != padding)
    return is_token_BN, is_token_BN.flip(-1).cumsum(-1).flip(-1) > 0


class PretrainedText(PretrainedNetwork):
    """A network of token ids.

    Sequences of one batch may end in absent tokens: -1 as in all of this package, or the model's own padding. A padding
    token that also marks a text's beginning or end is absent only after the last other token.
    """

    def embed(self, inputs: Tensor) -> Tensor:
        longest, letters = self._num_tokens, self.module.config.vocab_size
        if longest is not None and inputs.shape[1] > longest:
            raise ConfigError(f"{self.name}: texts of {inputs.shape[1]} tokens; it has positions for {longest}")
        if (largest := int(inputs.max())) >= letters:
            raise ConfigError(f"{self.name}: token id {largest}; its vocabulary ends with {letters - 1}")
        return self._embed(inputs.masked_fill(inputs < 0, padding_of(self.module.config) or 0))

    def present(self, inputs: Tensor) -> Tensor | None:
        """Mask of the present tokens, (B, N) bool; None if all are present. ConfigError for padding on the left."""
        padding = padding_of(self.module.config)
        is_token_BN, present_BN = tokens_of(inputs, self.module.config)
        inside_BN = present_BN & ~is_token_BN
        if padding in (getattr(self.module.config, name, None) for name in ("bos_token_id", "eos_token_id")):
            inside_BN = inside_BN & (inputs < 0)
        if inside_BN.any() or not present_BN.any(-1).all():
            raise ConfigError(
                f"{self.name}: padding before a token, or a text without tokens; absent tokens (-1 or {padding}) must "
                "be the last ones of their text: let the tokenizer pad on the right"
            )
        return None if present_BN.all() else present_BN


class PretrainedVision(PretrainedNetwork):
    """A network of images, (B, C, height, width)."""

    def embed(self, inputs: Tensor) -> Tensor:
        return self._embed(inputs.to(self.read_out.weight.dtype))

    def present(self, inputs: Tensor) -> None:
        """None: all tokens are present."""

    def num_tokens(self, inputs: Tensor) -> int:
        assert self._num_tokens is not None  # of images it is known
        return self._num_tokens


class Head(nn.Module):
    """A read-out of several steps. `weight` is that of the last linear map, used only for its dtype and device."""

    def __init__(self, module: nn.Module, last: LinearMap) -> None:
        super().__init__()
        self.module, self.last = module, last

    @property
    def weight(self) -> Tensor:
        return self.last.weight

    def forward(self, x_BND: Tensor) -> Tensor:
        return self.module(x_BND)
