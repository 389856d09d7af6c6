"""The keys of a model, in five groups, with their defaults. compatibility says which of their values go together."""

from dataclasses import dataclass
from typing import Any

from rankbench.config.keys import FACTOR, GAIN, POSITIVE, RATE, SHARE, SIZE, key

# Kinds of attention, and kinds of models. Importing a plug-in adds its own.
ATTENTIONS = ["dot", "l2", "contractive_l2", "cosine", "gated", "sigmoid", "relu", "differential", "kernel", "sparse"]
KINDS = ["transformer", "lstm"]

AS_MLP: Any = "${model.mlp}"  # a reference, which Hydra follows, and without Hydra ModelConfig


@dataclass
class ModelSize:
    """Size of the model: the architecture, and the number and width of its layers and heads."""

    name: str = key("Name of this variant in tables and figures.", default="transformer")
    kind: str = key("Architecture. lstm: `layers` layers of `width` cells.", default="transformer", choices=KINDS)
    layers: int = key("Number of layers.", default=6, between=(1, 1024))
    shared_layers: bool = key(
        "Whether all layers are a single one, used again and again with the same weights, as in ALBERT.", default=False
    )
    heads: int = key("Number of attention heads in each layer.", default=2, between=SIZE)
    width: int = key("Width of a token's state.", default=48, between=SIZE)
    head_width: int | None = key("Width of a head's queries and keys. null: width / heads.", default=None, between=SIZE)
    value_width: int | None = key("Width of a head's values. null: head_width.", default=None, between=SIZE)
    kv_groups: int | None = key(
        "Number of groups of heads that share keys and values. null: heads.", default=None, between=SIZE
    )
    latent_width: int | None = key(
        "Width of the latent that keys and values come from. null: no latent.", default=None, between=SIZE
    )


@dataclass
class ModelAttention:
    """Attention of the model: what a query sees, how it scores keys, and what is done with the values."""

    attention: str = key(
        "Kind of attention: the scores, or how weights are made from them. l2: -||q - k||^2, with values through A_h; "
        "contractive_l2: l2 scaled to a Lipschitz constant; cosine: queries, keys and values divided by their norms; "
        "gated: dot, and a sigmoid of the query multiplies what it has read; sigmoid, relu: no softmax; differential: "
        "the difference of two softmaxes; kernel: of a rank of at most head_width, without a softmax; sparse: softmax "
        "over a random quarter of the keys, the same in every sequence.",
        default="dot",
        choices=ATTENTIONS,
    )
    contraction: float | None = key(
        "Lipschitz constant (p = inf) to which contractive_l2 scales l2.", default=None, between=POSITIVE
    )
    contraction_keys: int | None = key(
        "Number of keys that the bound assumes. null: the sequence's length; language models need a number.",
        default=None,
        between=(1, 10**6),
    )
    tied_qk: bool = key("Whether W_Q = W_K.", default=False)
    temperature: float = key("Attention scores are divided by it before the softmax.", default=1.0, between=POSITIVE)
    mix_attention: float = key(
        "a in a P + b I + c U, the matrix that multiplies the values: P is attention, U averages the tokens seen.",
        default=1.0,
        between=FACTOR,
    )
    mix_identity: float = key("b in the same sum, the share of the identity.", default=0.0, between=FACTOR)
    mix_uniform: float = key(
        "c in the same sum, the share of the average. -1 removes the mean.", default=0.0, between=FACTOR
    )
    exclusive: bool = key(
        "Whether to remove from each head's output its part along the token's own value.", default=False
    )
    head_reduction: str = key(
        "How heads are combined. mean: their sum divided by heads * head_width / width, if that is above 1.",
        default="sum",
        choices=("sum", "mean"),
    )
    mask: str = key(
        "Tokens a query sees. others: all except its own.",
        default="none",
        choices=("none", "causal", "window", "others"),
    )
    window: int | None = key(
        "Number of tokens that mask=window shows on either side.", default=None, between=(0, 10**6)
    )


@dataclass
class ModelSublayers:
    """Skips, norms, MLP.

    A sub-layer f of the input x gives norm(a x + b f(x)) or a x + b f(norm(x)).
    """

    skips: bool | None = key("Sets skip and mlp_skip together. null: leave them.", default=None)
    skip: bool = key("Whether attention has a skip. Without one, a = 0.", default=True)
    skip_scale: float = key("Factor a of the skip in a x + b f(x).", default=1.0, between=FACTOR)
    branch_scale: float = key(
        "Factor b of the sub-layer in a x + b f(x). 1 / sqrt(layers) is common.", default=1.0, between=FACTOR
    )
    mlp: bool = key("Whether each layer has an MLP.", default=True)
    mlp_ratio: float = key("Hidden width of the MLP over the model's width.", default=1.0, between=(1e-3, 1e3))
    mlp_skip: bool = key("Whether the MLP has a skip.", default=AS_MLP)
    activation: str = key("Activation of the MLP.", default="gelu", choices=("relu", "gelu"))
    norm: str = key(
        "Place of the norm. pre: before a sub-layer; post: after its sum with the skip; peri: before and after its "
        "branch; ngpt: after its branch and after the sum.",
        default="post",
        choices=("none", "pre", "post", "peri", "ngpt"),
    )
    norm_kind: str = key(
        "Kind of norm. l2norm: x / ||x|| times a number.",
        default="layernorm",
        choices=("layernorm", "rmsnorm", "l2norm"),
    )
    norm_affine: bool = key("Whether norms have a learned scale and shift.", default=True)
    norm_scale: str = key(
        "Factor of the norms around the sub-layers. depth: 1/sqrt(l) in layer l (LayerNorm scaling).",
        default="none",
        choices=("none", "depth"),
    )
    bias: bool = key("Whether the linear maps of the layers have biases.", default=True)
    value_residual: float = key("Weight of layer 1's values in every later layer's values.", default=0.0, between=SHARE)
    embedding_skip: float = key(
        "Factor of the embedding that is added to the input of each layer.", default=0.0, between=FACTOR
    )
    hyper_connections: str = key(
        "Kind of the learned matrices that mix the streams of hyper-connections. none: no such streams.",
        default="none",
        choices=("none", "free", "doubly_stochastic"),
    )
    streams: int = key("Number of states that hyper-connections keep for each token.", default=4, between=(2, 64))
    stream_deviation: float = key(
        "Standard deviation of the noise on the initial hyper-connections. 0: they begin as plain skips.",
        default=0.0,
        between=RATE,
    )
    dropout: float = key("Share of entries that dropout sets to zero.", default=0.0, between=(0.0, 0.99))


@dataclass
class ModelEnds:
    """Ends of the model: from the task's inputs to the first state, and from the last state to the outputs."""

    positions: str = key(
        "Position embeddings. concatenated: learned, in the part of the width that coordinates leave free.",
        default="learned",
        choices=("none", "learned", "sinusoidal", "concatenated"),
    )
    embedding_norm: bool = key(
        "Whether a norm of norm_kind follows the read-in and its positions, as in BERT.", default=False
    )
    read_in: str = key(
        "How inputs become states. mlp: two linear maps and the activation; identity: inputs are states.",
        default="linear",
        choices=("linear", "mlp", "identity"),
    )
    read_out: str = key(
        "How states become outputs. identity: the first coordinates are the output.",
        default="linear",
        choices=("linear", "identity"),
    )


@dataclass
class ModelWeights:
    """Weights of the model: how they are initialised and parametrised."""

    init: str = key("Scheme of initialisation.", default="pytorch", choices=("pytorch", "glorot", "bert", "scaled"))
    attention_init: float | None = key(
        "s: attention's matrices are drawn from U(-s/sqrt(width), s/sqrt(width)). null: as init says.",
        default=None,
        between=POSITIVE,
    )
    init_gain: float = key("Multiplies every matrix of the layers at initialisation.", default=1.0, between=GAIN)
    mlp_gain: float = key(
        "Multiplies the MLPs' matrices again at initialisation, and so their Lipschitz constant by its square.",
        default=1.0,
        between=GAIN,
    )
    query_gains: list[float] = key(
        "Factors of W_Q and its bias at initialisation: temperatures of networks that train side by side. Seed s has "
        "factor number s modulo their number, so means over seeds are means over the factors, too.",
        default=[1.0],
        between=GAIN,
        nonempty=True,
    )
    values: str = key(
        "W_V and W_O at the start. free: as init says; uniform: as init=pytorch does.",
        default="free",
        choices=("free", "orthogonal", "uniform", "zero"),
    )
    weight_norm: str = key(
        "sigma: matrices are gamma W / ||W||_2, with gamma learned.", default="none", choices=("none", "sigma")
    )


@dataclass
class ModelConfig(ModelWeights, ModelEnds, ModelSublayers, ModelAttention, ModelSize):
    """One network."""

    def __post_init__(self) -> None:
        if self.mlp_skip == AS_MLP:
            self.mlp_skip = self.mlp
        if self.skips is not None:
            self.skip, self.mlp_skip = self.skips, self.skips and self.mlp
