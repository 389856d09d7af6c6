"""The parts of a Hugging Face layer, with the interfaces of rankbench.model.network.

Each holds the library's own modules and reads their weights whenever it is called. Nothing is copied, so a change of
those weights is a change here too.

Shapes: B batch, N query token, M key token, D width, H head, K head width, F hidden width of the MLP; of a linear map,
I input, O output; R distance of two tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankbench.config.keys import ConfigError
from rankbench.model.attention import Heads
from rankbench.model.linear import HeadMaps, LinearMap
from rankbench.model.mlp import ACTIVATIONS, MLP
from rankbench.model.norm import Norm
from rankbench.model.weightings import Factors, Softmax, dot_scores

# The library's name of each activation, and rankbench's. gelu_fast rounds a constant of gelu_new to ten digits.
ACTIVATION_NAMES = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_new",
    "gelu_accurate": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_python_tanh": "gelu_new",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
}


class Transposed(nn.Module):
    """A linear map from `columns` of a module whose weight is stored as (I, O), as in GPT-2's Conv1D."""

    module: Any  # the library's, as everywhere here

    def __init__(self, module: nn.Module, columns: slice = slice(None)) -> None:
        super().__init__()
        self.module, self.columns = module, columns

    @property
    def weight(self) -> Tensor:
        """(O, I), as in nn.Linear."""
        return self.module.weight[:, self.columns].T

    @property
    def bias(self) -> Tensor:
        return self.module.bias[self.columns]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class OfHeads(nn.Module):
    """A linear map from the width to the heads side by side, or back; `holder` stores it as (D, H, K) under `name`."""

    bias = None

    def __init__(self, holder: nn.Module, name: str, back: bool = False) -> None:
        super().__init__()
        self.holder, self.name, self.back = holder, name, back

    @property
    def weight(self) -> Tensor:
        """(O, I), as in nn.Linear."""
        weight_DI = getattr(self.holder, self.name).flatten(1)
        return weight_DI if self.back else weight_DI.T

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class PretrainedAttention(Heads):
    """Dot-product attention with linear maps to the queries, keys and values of all heads side by side.

    scaling: factor of the products q_i k_j. groups: number of heads of keys and values, if query heads share them.
    """

    inputs: Any  # three linear maps, in a ModuleList

    def __init__(
        self,
        heads: int,
        query: Any,
        key: Any,
        value: Any,
        out: LinearMap,
        scaling: float,
        mask: str = "none",
        groups: int | None = None,
    ) -> None:
        super().__init__()
        self.inputs, self.out = nn.ModuleList([query, key, value]), out
        self.heads, self.groups, self.mask = heads, groups or heads, mask
        self.head_width, self.value_width = len(query.weight) // heads, len(value.weight) // self.groups
        self.temperature = self.head_width**-0.5 / scaling

    def queries_keys_values(self, x_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_BHNK, k_BHNK, v_BHNK = (self._by_head(linear(x_BND), -1).transpose(-3, -2) for linear in self.inputs)
        return q_BHNK, k_BHNK, v_BHNK

    def maps(self) -> HeadMaps:
        w_q_HDK, w_k_HDK, w_v_HDK = (self._by_head(linear.weight, 0).mT for linear in self.inputs)
        b_q_HK, b_k_HK, b_v_HK = (self._by_head(bias_of(linear), 0) for linear in self.inputs)
        w_o_HKD = self.out.weight.T.unflatten(0, (self.heads, -1))
        return HeadMaps(w_q_HDK, w_k_HDK, w_v_HDK, w_o_HKD, b_q_HK, b_k_HK, b_v_HK, bias_of(self.out))

    def _by_head(self, x: Tensor, dim: int) -> Tensor:
        """Split `dim` into the heads that lie side by side there; a head that several share is repeated for each."""
        heads = x.shape[dim] // self.head_width
        x = x.unflatten(dim, (heads, -1))
        return x if heads == self.heads else x.repeat_interleave(self.heads // heads, dim - (dim < 0))


class BiasedAttention(PretrainedAttention):
    """T5's attention: a number for each head and distance is added to the scores.

    holder: the first layer's module, which computes these numbers for all layers.
    """

    score_name, weighting = "dot with a bias of positions", Softmax(fusible=False, by_head=False)

    holder: Any

    def __init__(self, *args: Any, holder: nn.Module) -> None:
        super().__init__(*args)
        self.holder = holder

    def score_bias(self, q_BHNK: Tensor) -> Tensor:
        num_tokens = q_BHNK.shape[-2]
        return self.holder.compute_bias(num_tokens, num_tokens)


class RotaryAttention(PretrainedAttention):
    """Attention whose queries and keys are rotated by angles of their positions (Su et al. 2021), given by `rotary`."""

    score_name, weighting = "rotary", Softmax(by_head=False)

    has_score_maps = False
    rotary: Any

    def __init__(self, *args: Any, rotary: nn.Module) -> None:
        super().__init__(*args)
        self.rotary = rotary

    def factors(self, q_BHNK: Tensor, k_BHMK: Tensor) -> Factors:
        positions_1N = torch.arange(q_BHNK.shape[-2], device=q_BHNK.device)[None]
        cos_1NK, sin_1NK = self.rotary(q_BHNK, positions_1N)
        return dot_scores(*(x * cos_1NK + _turned(x) * sin_1NK for x in (q_BHNK, k_BHMK)))


class RelativeAttention(PretrainedAttention):
    """XLNet's attention (Yang et al. 2019), content stream without segments; scores (q + b_w) k + (q + b_r) r.

    r comes from the embedding of the tokens' distance, which the model `base` computes.
    """

    score_name, weighting = "relative", Softmax(fusible=False, by_head=False)

    has_score_maps = False
    module: Any
    base: Any

    def __init__(self, module: Any, base: nn.Module, mask: str) -> None:
        query, key, value = (OfHeads(module, name) for name in "qkv")
        super().__init__(module.n_head, query, key, value, OfHeads(module, "o", back=True), module.scale, mask)
        self.module, self.base = module, base

    def factors(self, q_BHNK: Tensor, k_BHMK: Tensor) -> Factors:
        return dot_scores(q_BHNK + self.module.r_w_bias[:, None], k_BHMK)

    def score_bias(self, q_BHNK: Tensor) -> Tensor:
        num_tokens = q_BHNK.shape[-2]
        distances_RD = self.base.relative_positional_encoding(num_tokens, num_tokens)[:, 0].to(q_BHNK)
        r_RHK = torch.einsum("rd,dhk->rhk", distances_RD, self.module.r)
        scores_BHNR = torch.einsum("bhnk,rhk->bhnr", q_BHNK + self.module.r_r_bias[:, None], r_RHK)
        return self.module.scale * self.module.rel_shift_bnij(scores_BHNR, klen=num_tokens)


def _turned(x: Tensor) -> Tensor:
    """Rotate by a quarter turn in the planes of coordinates k and K/2 + k."""
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def bias_of(linear: LinearMap) -> Tensor:
    """The bias of a linear map, zeros for one without."""
    return linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias


class PretrainedMlp(MLP):
    """Two linear maps and an activation, given by the library's name for it."""

    def __init__(self, up: LinearMap, down: LinearMap, activation: str) -> None:
        nn.Module.__init__(self)
        if activation not in ACTIVATION_NAMES:
            raise ConfigError(
                f"activation {activation}: its gate act(z)/z is not covered; covered: {', '.join(ACTIVATION_NAMES)}; "
                "rankbench.tape takes the module as it is"
            )
        self.up, self.down, self.activation_name = up, down, ACTIVATION_NAMES[activation]
        self.activation = ACTIVATIONS[self.activation_name]


class GatedMlp(PretrainedMlp):
    """(act(z) u) W + b, with z = x W_gate + b_gate and u = x W_up + b_up. Its hidden is z and u side by side."""

    def __init__(self, gate: LinearMap, up: LinearMap, down: LinearMap, activation: str) -> None:
        super().__init__(up, down, activation)
        self.gate_map, self.activation_name = gate, f"gated {self.activation_name}"

    def gate(self, z_BNF: Tensor) -> Tensor:
        """Activation act(z) of the gate's half."""
        return self.activation(z_BNF.chunk(2, -1)[0])

    def hidden(self, x_BND: Tensor) -> Tensor:
        """z and u, (B, N, 2 F)."""
        return torch.cat([self.gate_map(x_BND), self.up(x_BND)], -1)

    def from_hidden(self, z_BNF: Tensor) -> Tensor:
        """Output of the MLP, from z and u."""
        return self.down(self.gate(z_BNF) * z_BNF.chunk(2, -1)[1])


class PretrainedNorm(Norm):
    """A LayerNorm or RMSNorm of the library, with its own epsilon. It computes in the tokens' dtype, although some of
    the library's norms compute in float32."""

    module: Any

    def __init__(self, module: Any) -> None:
        nn.Module.__init__(self)
        self.module, self.width = module, len(module.weight)
        is_layernorm = isinstance(module, nn.LayerNorm)
        self.kind, self.epsilon = ("layernorm", module.eps) if is_layernorm else ("rmsnorm", module.variance_epsilon)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # a parameter, which nn.Module does not let be read-only
        return self.module.weight

    @property
    def shift(self) -> Tensor | None:  # type: ignore[override]  # as above
        return self.module.bias if self.kind == "layernorm" else None
