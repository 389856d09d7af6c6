"""Networks that are not rankbench's own: tiny random models of the transformers library, torch's own modules, and
networks written here. tests/rewrites.py writes each of them in other ways.

Shapes: B sequence, N token, D width, H head, K head width.
"""

import inspect
import math
import os
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

B, N, D, H = 5, 7, 16, 2
LENGTHS = (7, 4, 7, 6, 5)
LETTERS = 50

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Network:
    """A network, and the forms in which its own source can be built besides.

    module(): the network, in float64. inputs(): its arguments by name; the first tensor is (B, N), (B, N, D) or images.
    mask: the argument that tells padding, and whether it is true for present tokens; None without padding. forms:
    builders of the same network in another form, by name.
    """

    module: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    mask: tuple[str, bool] | None = None
    forms: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)

    @property
    def name_of_mask(self) -> str | None:
        return None if self.mask is None else self.mask[0]


def random(name: str, *shape: int) -> Tensor:
    """Normal numbers that belong to a name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def drawn(module: nn.Module, scale: float = 0.2) -> nn.Module:
    """The module in float64, frozen, with random numbers added to every parameter: no bias is 0, no norm's scale 1.

    The numbers of a parameter depend on its name and shape alone, so that two forms of a network are equal.
    """
    module = module.double().eval().requires_grad_(False)
    for name, parameter in module.named_parameters():
        fan_in = parameter.shape[-1] if parameter.dim() > 1 else 1
        centre = 1.0 if parameter.dim() == 1 and "weight" in name else 0.0
        parameter.copy_(centre + (fan_in**-0.5 if fan_in > 1 else scale) * random(name, *parameter.shape))
    return module


def states(name: str = "states", tokens: int = N) -> Tensor:
    """A batch of states (B, N, D)."""
    return random(name, B, tokens, D)


def letters(tokens: int = N, name: str = "letters") -> Tensor:
    """A batch of token ids (B, N); ids 0 to 2 and the last are left to the libraries' special tokens."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(3, LETTERS - 1, (B, tokens), generator=generator)


def present() -> Tensor:
    """Which tokens of the padded batch are there, (B, N) bool."""
    return torch.arange(N) < torch.tensor(LENGTHS)[:, None]


# --- the transformers library ----------------------------------------------------------------------------------------


class InDouble(TorchFunctionMode):
    """Leave out the library's casts to float32, whose rounding hides differences below 1e-7."""

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func is torch.Tensor.to and torch.float32 in (*args, kwargs.get("dtype")):
                return args[0]
            if kwargs.get("dtype") == torch.float32 and func.__name__ in ("softmax", "sum", "mean", "cumsum"):
                del kwargs["dtype"]
        return func(*args, **kwargs)


def within(module: nn.Module, *modes: TorchFunctionMode) -> nn.Module:
    """The module, whose forward pass runs within these modes besides those it has; the last one sees a call first."""
    module.modes = [*getattr(module, "modes", ()), *modes]
    module.forward = MethodType(_forward_within_modes, module)
    return module


def _forward_within_modes(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with ExitStack() as entered:
        for mode in self.modes:
            entered.enter_context(mode)
        return type(self).forward(self, *args, **kwargs)


def of_library(name: str, sizes: dict[str, Any], casts: bool = False, **how: str) -> nn.Module:
    """A random model of the transformers library by the name of its class; casts: with its own casts to float32."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    kind = name.removesuffix("Model").removesuffix("Encoder")
    settings = getattr(transformers, f"{kind}Config")(**sizes)
    settings.use_cache = False
    module = drawn(getattr(transformers, name)._from_config(settings, **how))
    return module if casts else within(module, InDouble())


def text_inputs() -> Inputs:
    return {"input_ids": letters(), "attention_mask": present().long()}


def text_pair() -> Inputs:
    return text_inputs() | {"decoder_input_ids": letters(6, "target")}


def image_inputs() -> Inputs:
    return {"pixel_values": random("images", B, 3, 8, 8)}


SIZES = {"hidden_size": D, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": H}
TEXT = {**SIZES, "vocab_size": LETTERS, "max_position_embeddings": 40, "pad_token_id": 0}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
LLAMA = {**TEXT, "num_key_value_heads": 1, "head_dim": 8}
GPT = {"n_embd": D, "n_layer": 2, "n_head": H, "vocab_size": LETTERS, "n_positions": 32}
GPT |= {"bos_token_id": 1, "eos_token_id": 2}
T5 = {"d_model": D, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": H, "vocab_size": LETTERS}
BART = {"d_model": D, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": LETTERS, "max_position_embeddings": 32}
BART |= {f"{part}_attention_heads": H for part in ("encoder", "decoder")}
BART |= {f"{part}_ffn_dim": 24 for part in ("encoder", "decoder")}
IMAGE = {**SIZES, "image_size": 8, "patch_size": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}

# by name of the class: sizes, and whether the library has a fused implementation
LIBRARY: dict[str, tuple[dict[str, Any], bool]] = {
    "BertModel": (TEXT, True),
    "DistilBertModel": ({"dim": D, "hidden_dim": 24, "n_layers": 2, "n_heads": H, "vocab_size": LETTERS}, True),
    "AlbertModel": ({**TEXT, "embedding_size": 12}, True),
    "DebertaV2Model": (
        {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
        False,
    ),
    "ModernBertModel": ({**TEXT, "global_attn_every_n_layers": 2, "local_attention": 4}, True),
    "RoFormerModel": ({**TEXT, "embedding_size": D}, False),
    "XLNetModel": ({"d_model": D, "n_layer": 2, "n_head": H, "d_inner": 24, "vocab_size": LETTERS}, False),
    "FNetModel": (TEXT, False),
    "T5EncoderModel": (T5, True),
    "T5Model": (T5, True),
    "BartModel": (BART, True),
    "GPT2Model": (GPT, True),
    "GPTNeoModel": (
        {**TEXT, "num_layers": 2, "num_heads": H, "attention_types": [[["global", "local"], 1]], "window_size": 4},
        False,
    ),
    "GPTNeoXModel": (TEXT, True),
    "GPTJModel": ({**GPT, "rotary_dim": 4}, False),
    "OPTModel": ({**TEXT, "ffn_dim": 24, "word_embed_proj_dim": D}, True),
    "BloomModel": ({"hidden_size": D, "n_layer": 2, "n_head": H, "vocab_size": LETTERS}, False),
    "FalconModel": ({**TEXT, "multi_query": True}, True),
    "MptModel": ({"d_model": D, "n_heads": H, "n_layers": 2, "vocab_size": LETTERS, "max_seq_len": 32}, False),
    "LlamaModel": (LLAMA, True),
    "MistralModel": ({**LLAMA, "sliding_window": 4}, True),
    "Qwen3Model": (LLAMA, True),
    "Gemma2Model": ({**LLAMA, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}, False),
    "Olmo2Model": (LLAMA, True),
    "DiffLlamaModel": ({**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}, True),
    "MixtralModel": ({**LLAMA, **EXPERTS}, True),
    "GptOssModel": ({**LLAMA, **EXPERTS, **WINDOWS}, False),
    "MambaModel": ({"hidden_size": D, "num_hidden_layers": 2, "vocab_size": LETTERS, "state_size": 4}, False),
    "RecurrentGemmaModel": (
        {**LLAMA, "block_types": ["recurrent", "attention"], "lru_width": D, "attention_window_size": 8},
        False,
    ),
    "ViTModel": (IMAGE, True),
    "Dinov2Model": (IMAGE, True),
    "CLIPTextModel": ({**TEXT, "eos_token_id": 49}, True),
    "SiglipVisionModel": (IMAGE, True),
}


def _library_network(name: str) -> Network:
    sizes, has_fused = LIBRARY[name]
    how = {"experts_implementation": "eager"} if name in ("MixtralModel", "GptOssModel") else {}
    build = partial(of_library, name, sizes, **how)
    first, other = ("sdpa", "eager") if has_fused else ("eager", None)
    forms = {"library's casts": partial(build, attn_implementation=first, casts=True)}
    if other is not None:
        forms["other implementation"] = partial(build, attn_implementation=other)
    module = partial(build, attn_implementation=first)
    if sizes is IMAGE:
        return Network(module, image_inputs, forms=forms)
    if name == "FNetModel":
        return Network(module, lambda: {"input_ids": letters()}, forms=forms)
    inputs = text_pair if name in ("T5Model", "BartModel") else text_inputs
    return Network(module, inputs, ("attention_mask", True), forms)


# --- torch's own modules ---------------------------------------------------------------------------------------------


class SequenceFirst(nn.Module):
    """A module that reads and returns (N, B, D), called with (B, N, D)."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args: Tensor, **kwargs: Any) -> Tensor:
        turned = {name: x.transpose(0, 1) if x.dim() == 3 else x for name, x in kwargs.items()}
        return self.inner(*(x.transpose(0, 1) for x in args), **turned).transpose(0, 1)


class SelfAttention(nn.Module):
    """nn.MultiheadAttention of a sequence to itself, without a skip."""

    def __init__(self, batch_first: bool = True, need_weights: bool = False):
        super().__init__()
        self.attention, self.need_weights = nn.MultiheadAttention(D, H, batch_first=batch_first), need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


class Sequence(nn.Module):
    """Modules one after the other, with skips around each and a norm in front."""

    def __init__(self, *parts: nn.Module):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in parts)

    def forward(self, x: Tensor) -> Tensor:
        for norm, part in zip(self.norms, self.parts, strict=True):
            x = x + part(norm(x))
        return x


class Residual(nn.Sequential):
    """Modules one after the other, with skips around each."""

    def forward(self, x: Tensor) -> Tensor:
        for part in self:
            x = x + part(x)
        return x


def encoder(batch_first: bool = True, **how: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, H, 24, 0.0, batch_first=batch_first, **how)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def decoder(batch_first: bool = True, **how: Any) -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(D, H, 24, 0.0, batch_first=batch_first, **how), 2)


def whole(batch_first: bool = True, **how: Any) -> nn.Module:
    return nn.Transformer(D, H, 2, 2, 24, 0.0, batch_first=batch_first, **how)


def renamed_parameters(module: nn.Module, inner: nn.Module) -> nn.Module:
    """The module, drawn as `inner` alone would be, so that a wrapper changes no number."""
    drawn(inner)
    return module.double().eval().requires_grad_(False)


def _torch_network(
    make: Callable[..., nn.Module], inputs: Callable[[], Inputs], mask: str | None = None, **forms: Callable
) -> Network:
    def sequence_first() -> nn.Module:
        inner = make(batch_first=False)
        return renamed_parameters(SequenceFirst(inner), inner)

    others = {name.replace("_", " "): lambda form=form: drawn(form()) for name, form in forms.items()}
    forms = {"sequence first inside": sequence_first, **others}
    return Network(lambda: drawn(make()), inputs, None if mask is None else (mask, False), forms)


def source_and_target(source: str, target: str, mask: str | None = None) -> Inputs:
    inputs = {source: states("source"), target: states("target", 6)}
    if source == "memory":
        inputs = {target: inputs[target], source: inputs[source]}
    return inputs if mask is None else inputs | {mask: ~present()}


def _encoder_inputs(mask: bool = False) -> Inputs:
    return {"src": states()} | ({"src_key_padding_mask": ~present()} if mask else {})


TORCH = {
    "nn.MultiheadAttention": _torch_network(
        lambda batch_first=True: Sequence(*(SelfAttention(batch_first) for _ in range(2))),
        lambda: {"x": states()},
        other_implementation=lambda: Sequence(*(SelfAttention(need_weights=True) for _ in range(2))),
    ),
    "nn.TransformerEncoder": _torch_network(encoder, _encoder_inputs),
    "nn.TransformerEncoder, pre-norm, padded": _torch_network(
        partial(encoder, norm_first=True, activation="gelu"),
        lambda: _encoder_inputs(mask=True),
        "src_key_padding_mask",
    ),
    "nn.TransformerDecoder": _torch_network(decoder, lambda: source_and_target("memory", "tgt")),
    "nn.TransformerDecoder, padded memory": _torch_network(
        partial(decoder, norm_first=True),
        lambda: source_and_target("memory", "tgt", "memory_key_padding_mask"),
        "memory_key_padding_mask",
    ),
    "nn.Transformer": _torch_network(whole, lambda: source_and_target("src", "tgt")),
}


# --- networks of our own ---------------------------------------------------------------------------------------------


def heads_of(x_BND: Tensor, heads: int = H) -> Tensor:
    return x_BND.unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, H, N, K)


def joined(x_BHNK: Tensor) -> Tensor:
    return x_BHNK.transpose(1, 2).flatten(-2)


def hidden_pairs(present_BN: Tensor | None, causal: bool, tokens: int) -> Tensor | None:
    """Which keys a query does not see, broadcast to (B, H, N, M); None if it sees all."""
    above = torch.ones(tokens, tokens, dtype=torch.bool).triu(1) if causal else None
    absent = None if present_BN is None else ~present_BN[:, None, None, :]
    return above if absent is None else absent if above is None else above | absent


class Attention(nn.Module):
    """Attention with maps for queries, keys, values and the way out; `mix` makes its result from q, k, v and what is
    hidden, (B, H, N, K) each."""

    def __init__(self, mix: Callable[..., Tensor], heads: int = H, groups: int | None = None, causal: bool = False):
        super().__init__()
        self.mix, self.heads, self.groups, self.causal = mix, heads, groups or heads, causal
        width = D // heads * self.groups
        self.q, self.out = nn.Linear(D, D), nn.Linear(D, D)
        self.k, self.v = nn.Linear(D, width), nn.Linear(D, width)

    def forward(self, x: Tensor, memory: Tensor | None = None, present_BN: Tensor | None = None) -> Tensor:
        read = x if memory is None else memory
        q, k, v = (
            heads_of(self.q(x), self.heads),
            heads_of(self.k(read), self.groups),
            heads_of(self.v(read), self.groups),
        )
        hidden = hidden_pairs(present_BN, self.causal, x.shape[1])
        return self.out(joined(self.mix(q, k, v, hidden)))


def written_out(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ v


def by_kernel(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, **how: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=None if hidden is None else ~hidden, **how)


def by_einsum(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    """With the heads behind the tokens, as in many networks that use einsum."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.einsum("bnhk,bmhk->bhnm", q, k) * q.shape[-1] ** -0.5
    scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
    return torch.einsum("bhnm,bmhk->bnhk", scores.softmax(-1), v).transpose(1, 2)


def flattened(q: Tensor, k: Tensor, v: Tensor, hidden: None) -> Tensor:
    """With the heads beside the sequences in one axis, and unscaled."""
    shape, (q, k, v) = q.shape, (x.flatten(0, 1) for x in (q, k, v))
    return (torch.bmm(q, k.mT).softmax(-1) @ v).unflatten(0, shape[:2])


def with_soft_cap(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    scores = 2.0 * torch.tanh(q @ k.mT / math.sqrt(q.shape[-1]) / 2.0)
    scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
    return F.dropout(scores.softmax(-1), 0.1, training=False).to(v.dtype) @ v


def with_slopes(q: Tensor, k: Tensor, v: Tensor, hidden: None) -> Tensor:
    """By baddbmm with position biases, heads flattened into the batch, as ALiBi is often written."""
    sequences, (q, k, v) = len(q), (x.flatten(0, 1) for x in (q, k, v))
    slopes = torch.tensor([0.5, 0.25], dtype=q.dtype).repeat(sequences)[:, None, None]
    bias = slopes * torch.arange(k.shape[1], dtype=q.dtype)
    p = torch.baddbmm(bias, q, k.mT, alpha=q.shape[-1] ** -0.5).softmax(-1)
    return torch.bmm(p, v).unflatten(0, (sequences, -1))


def of_feature_maps(q: Tensor, k: Tensor, v: Tensor, hidden: None) -> Tensor:
    """Linear attention: feature maps of queries and keys, multiplied before the values."""
    weights = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
    return (weights / weights.sum(-1, keepdim=True)) @ v


def with_a_sink(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    """A further logit 0 takes a share of each row."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
    with_sink = torch.cat([scores, torch.zeros_like(scores[..., :1])], dim=-1)
    return with_sink.softmax(-1)[..., :-1] @ v


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 24), nn.Linear(24, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Of(nn.Module):
    """A function, or a module, as a module of its own."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Along(Of):
    """The same of (B, D, N), for states (B, N, D)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x.mT).mT


class Block(nn.Module):
    """Attention and MLP with skips. place: pre, post or parallel; in_place: the skips are added in place."""

    def __init__(self, attention: nn.Module, place: str = "pre", in_place: bool = False):
        super().__init__()
        self.attention, self.mlp = attention, MLP()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.place, self.in_place = place, in_place

    def forward(self, x: Tensor, **how: Any) -> Tensor:
        if self.place == "parallel":
            read = self.norm1(x)
            return x + self.attention(read, **how) + self.mlp(read)
        if self.place == "post":
            x = self.norm1(x + self.attention(x, **how))
            return self.norm2(x + self.mlp(x))
        if self.in_place:
            x += self.attention(self.norm1(x), **how)
            x += self.mlp(self.norm2(x))
            return x
        x = x + self.attention(self.norm1(x), **how)
        return x + self.mlp(self.norm2(x))


class Text(nn.Module):
    """Token ids to states: an embedding, positions, blocks, a last norm. turned: the blocks read (N, B, D)."""

    def __init__(self, *blocks: nn.Module, turned: bool = False, repeats: int = 1):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(LETTERS, D), nn.Parameter(torch.zeros(N, D))
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(D)
        self.turned, self.repeats = turned, repeats

    def forward(self, ids: Tensor, present: Tensor | None = None) -> Tensor:
        how = {} if present is None else {"present_BN": present}
        x = self.embedding(ids) + self.positions[: ids.shape[1]]
        x = x.transpose(0, 1) if self.turned else x
        for block in [*self.blocks] * self.repeats:
            x = block(x, **how)
        return self.norm(x.transpose(0, 1) if self.turned else x)


class TurnedAttention(nn.Module):
    """`Attention`, of a block that reads (N, B, D): heads are flattened into the batch, as in fairseq."""

    def __init__(self, turned: bool = True):
        super().__init__()
        self.turned = turned
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        if not self.turned:
            return self.out(joined(written_out(*(heads_of(part(x)) for part in (self.q, self.k, self.v)), None)))
        tokens, batch, _ = x.shape
        q, k, v = (
            part(x).reshape(tokens, batch * H, D // H).transpose(0, 1) for part in (self.q, self.k, self.v)
        )  # (B H, N, K)
        p = torch.bmm(q / math.sqrt(D // H), k.transpose(1, 2)).softmax(-1)
        return self.out(torch.bmm(p, v).transpose(0, 1).reshape(tokens, batch, D))


class SharedValues(nn.Module):
    """Two layers of attention, of which the second takes the values of the first."""

    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleDict({name: nn.Linear(D, D) for name in ("q1", "k1", "v", "q2", "k2", "out1", "out2")})

    def forward(self, x: Tensor) -> Tensor:
        v = heads_of(self.maps["v"](x))
        for layer in "12":
            q, k = (heads_of(self.maps[f"{name}{layer}"](x)) for name in "qk")
            x = x + self.maps[f"out{layer}"](joined(by_kernel(q, k, v, None)))
        return x


class EncoderDecoder(nn.Module):
    """A padded source is read by an encoder; a decoder of the target attends to it."""

    def __init__(self, mix: Callable[..., Tensor]):
        super().__init__()
        self.encoder = nn.ModuleList(Block(Attention(mix)) for _ in range(2))
        self.decoder = nn.ModuleList(Block(Attention(mix, causal=True)) for _ in range(2))
        self.cross = nn.ModuleList(Attention(mix) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))

    def forward(self, source: Tensor, target: Tensor, present: Tensor | None = None) -> Tensor:
        for block in self.encoder:
            source = block(source, present_BN=present)
        for block, cross, norm in zip(self.decoder, self.cross, self.norms, strict=True):
            target = target + cross(norm(target), source, present)
            target = block(target)
        return target


class MaskedAttention(nn.Module):
    """Four heads of width 4, whose mask is an argument. It keeps P, the logits and the values; fill: of hidden keys;
    None: torch's own attention, which takes the mask; "weights": the mask is applied to the weights."""

    def __init__(self, fill: float | str | None):
        super().__init__()
        self.fill, self.qkv, self.out = fill, nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, sees: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        self.logits, self.values = q @ k.mT / 2, v
        self.p = self.logits.masked_fill(~sees, -math.inf).softmax(-1)
        if self.fill is None:
            heads = F.scaled_dot_product_attention(q, k, v, attn_mask=sees)
        elif self.fill == "weights":
            p = self.logits.softmax(-1) * sees
            heads = p / p.sum(-1, keepdim=True) @ v
        else:
            heads = (self.logits + torch.zeros(()).masked_fill(~sees, self.fill)).softmax(-1) @ v
        return x + self.out(heads.transpose(1, 2).flatten(2))


class GatedHeads(nn.Module):
    """Attention whose heads are gated, token by token, by a sigmoid of the state."""

    def __init__(self):
        super().__init__()
        self.qkv, self.gate, self.out = nn.Linear(D, 3 * D), nn.Linear(D, H), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(part) for part in self.qkv(x).chunk(3, dim=-1))
        gate = torch.sigmoid(self.gate(x)).transpose(1, 2)[..., None]  # (B, H, N, 1)
        return self.out(joined(by_kernel(q, k, v, None) * gate))


class TalkingHeads(nn.Module):
    """Attention whose weights are mixed between heads."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.between = nn.Parameter(torch.zeros(H, H))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(part) for part in self.qkv(x).chunk(3, dim=-1))
        p = (q @ k.mT / math.sqrt(D // H)).softmax(-1)
        return self.out(joined(torch.einsum("gh,bhnm->bgnm", self.between, p) @ v))


class DifferentialAttention(nn.Module):
    """The difference of two heads' attention to the same values. halves: each half of the values in its own call."""

    def __init__(self, halves: bool):
        super().__init__()
        self.halves = halves
        self.qk, self.v, self.out = nn.Linear(D, 2 * D), nn.Linear(D, D // 2), nn.Linear(D // 2, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (heads_of(part) for part in self.qk(x).chunk(2, dim=-1))
        v = self.v(x)[:, None].expand(-1, H, -1, -1)
        parts = v.chunk(2, dim=-1) if self.halves else [v]
        positive, negative = torch.cat([by_kernel(q, k, part, None) for part in parts], dim=-1).unbind(1)
        return self.out(positive - 0.5 * negative)


class Streams(nn.Module):
    """Three residual streams, mixed by a softmax matrix of the state before each block."""

    def __init__(self, streams: int = 3):
        super().__init__()
        self.streams = streams
        self.attention = nn.ModuleList(Attention(by_kernel) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.mixing = nn.ModuleList(nn.Linear(D, streams * streams) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x_BNSD = x[:, :, None].expand(-1, -1, self.streams, -1)
        for attention, norm, mixing in zip(self.attention, self.norms, self.mixing, strict=True):
            weights = mixing(x_BNSD.mean(2)).unflatten(-1, (self.streams, -1)).softmax(-1)
            x_BNSD = torch.matmul(weights, x_BNSD)
            read = x_BNSD.mean(2)
            x_BNSD = x_BNSD + attention(norm(read))[:, :, None]
        return x_BNSD.mean(2)


class Experts(nn.Module):
    """A softmax router over four experts, all of which run; their results are joined by a product."""

    def __init__(self, experts: int = 4):
        super().__init__()
        self.router = nn.Linear(D, experts)
        self.up, self.down = nn.Parameter(torch.zeros(experts, D, 24)), nn.Parameter(torch.zeros(experts, 24, D))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)  # (B, N, E)
        hidden = F.gelu(torch.einsum("bnd,edf->bnef", x, self.up))
        results = torch.einsum("bnef,efd->bned", hidden, self.down)
        return torch.matmul(weights[..., None, :], results)[..., 0, :]


class Latents(nn.Module):
    """A few learned latents attend to the tokens, then to themselves, and the tokens to them, as in Perceiver IO."""

    def __init__(self, latents: int = 4):
        super().__init__()
        self.latents = nn.Parameter(torch.zeros(latents, D))
        self.reading, self.answer = Attention(by_kernel), Attention(by_kernel)
        self.block = Block(Attention(by_kernel))

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latents.expand(len(x), -1, -1)
        latents = self.block(latents + self.reading(latents, x))
        return x + self.answer(x, latents)


class Image(nn.Module):
    """Patches by a convolution, a class token, blocks."""

    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, D, 4, stride=4), nn.Parameter(torch.zeros(1, 1, D))
        self.positions, self.blocks = nn.Parameter(torch.zeros(1, 7, D)), nn.ModuleList(blocks)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return x


class Mixer(nn.Module):
    """Tokens mixed by fixed weights: no attention at all."""

    def __init__(self):
        super().__init__()
        self.tokens, self.mlp, self.norm = nn.Linear(N, N), MLP(), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm(x).mT).mT
        return x + self.mlp(x)


def _stack(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: drawn(nn.Sequential(*(make() for _ in range(2))))


def _text(make: Callable[[], nn.Module], **how: Any) -> Callable[[], nn.Module]:
    return lambda: drawn(Text(*(make() for _ in range(2)), **how))


def _of_states(build: Callable[[], nn.Module], **forms: Callable[[], nn.Module]) -> Network:
    def inputs() -> Inputs:
        return {next(iter(inspect.signature(build().forward).parameters)): states()}

    return Network(build, inputs, forms={name.replace("_", " "): form for name, form in forms.items()})


def _padded_letters() -> Inputs:
    return {"ids": letters(), "present": present()}


def _turned(turned: bool, tokens: int) -> Network:
    """Blocks of (N, B, D) or of (B, N, D), in a network of token ids."""

    def build(turned: bool) -> nn.Module:
        return drawn(Text(*(Block(TurnedAttention(turned)) for _ in range(3)), turned=turned))

    forms = {"sequence first inside": partial(build, not turned)}
    return Network(partial(build, turned), lambda: {"ids": letters(tokens)}, forms=forms)


OWN = {
    "pre-norm, written out, padded": Network(
        _text(lambda: Block(Attention(written_out))), _padded_letters, ("present", True)
    ),
    "post-norm, kernel, causal": _of_states(
        _stack(lambda: Block(Attention(by_kernel, causal=True), "post")),
        other_implementation=_stack(lambda: Block(Attention(written_out, causal=True), "post")),
    ),
    "einsum, padded": Network(_text(lambda: Block(Attention(by_einsum))), _padded_letters, ("present", True)),
    "additions in place": Network(
        _text(lambda: Block(Attention(by_kernel), in_place=True)), lambda: {"ids": letters()}
    ),
    "attention beside the MLP": _of_states(_stack(lambda: Block(Attention(by_kernel), "parallel"))),
    "shared keys and values": _of_states(
        _stack(lambda: Block(Attention(partial(by_kernel, enable_gqa=True), 4, groups=2)))
    ),
    "sequence first inside": _turned(True, N),
    "sequence first inside, B = N": _turned(True, B),
    "values of an earlier layer": _of_states(lambda: drawn(SharedValues())),
    "encoder and decoder, padded": Network(
        lambda: drawn(EncoderDecoder(by_kernel)),
        lambda: {"source": states(), "target": states("target", 6), "present": present()},
        ("present", True),
    ),
    "gated heads": _of_states(_stack(lambda: Block(GatedHeads()))),
    "talking heads": _of_states(_stack(lambda: Block(TalkingHeads()))),
    "one block three times": Network(
        lambda: drawn(Text(Block(Attention(written_out)), repeats=3)), lambda: {"ids": letters()}
    ),
    "image with a class token": Network(
        lambda: drawn(Image(*(Block(Attention(by_kernel)) for _ in range(2)))),
        lambda: {"pixels": random("pixels", B, 3, 8, 12)},
    ),
    "differential attention": _of_states(
        _stack(lambda: Block(DifferentialAttention(halves=True))),
        other_implementation=_stack(lambda: Block(DifferentialAttention(halves=False))),
    ),
    "slopes by baddbmm": _of_states(_stack(lambda: Block(Attention(with_slopes)))),
    "residual streams": _of_states(lambda: drawn(Streams())),
    "router of experts": _of_states(lambda: drawn(_with_experts())),
    "linear attention": _of_states(_stack(lambda: Block(Attention(of_feature_maps)))),
    "latents": _of_states(lambda: drawn(Latents())),
    "soft-capped logits": _of_states(_stack(lambda: Block(Attention(with_soft_cap, causal=True)))),
    "sinks": _of_states(_stack(lambda: Block(Attention(with_a_sink)))),
    "no attention": _of_states(lambda: drawn(Mixer())),
}


def _with_experts() -> nn.Module:
    blocks = [Block(Attention(by_kernel)) for _ in range(2)]
    for block in blocks:
        block.mlp = Experts()
    return nn.Sequential(*blocks)


NETWORKS: dict[str, Network] = {**{name: _library_network(name) for name in LIBRARY}, **TORCH, **OWN}
