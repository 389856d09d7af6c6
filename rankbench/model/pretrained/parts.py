"""The parts of a Hugging Face layer, as those of rankbench.model.network.

Each holds the library's own modules and reads their weights whenever it is called: nothing is copied, and what changes
there changes here.

Shapes: B batch, N token, D width, H head, K head width, I input, O output of a linear map.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from rankbench.keys import ConfigError
from rankbench.model.activations import ACTIVATIONS
from rankbench.model.attention import Heads
from rankbench.model.network import HeadMaps
from rankbench.model.transformer import MLP, Norm

# The library's names of an activation, and ours. gelu_fast rounds a constant of gelu_new to ten digits.
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
    """A linear map from `columns` of a module whose weight is stored as (I, O), as GPT-2's Conv1D has it."""

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


class PretrainedAttention(Heads):
    """Dot-product attention of linear maps to the queries, keys and values of all heads side by side.

    scaling: what multiplies the products q_i k_j.
    """

    def __init__(
        self,
        heads: int,
        query: nn.Module,
        key: nn.Module,
        value: nn.Module,
        out: nn.Module,
        scaling: float,
        mask: str = "none",
    ) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = query, key, value, out
        self.heads, self.mask = heads, mask
        self.head_width, self.value_width = len(query.weight) // heads, len(value.weight) // heads
        self.temperature = self.head_width**-0.5 / scaling

    def queries_keys_values(self, x_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        of_all_heads = (linear(x_BND) for linear in (self.query, self.key, self.value))
        return tuple(part.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for part in of_all_heads)

    def maps(self) -> HeadMaps:
        inputs = (self.query, self.key, self.value)
        w_HDK = (linear.weight.unflatten(0, (self.heads, -1)).mT for linear in inputs)
        b_HK = (bias_of(linear).unflatten(0, (self.heads, -1)) for linear in inputs)
        w_o_HKD = self.out.weight.T.unflatten(0, (self.heads, -1))
        return HeadMaps(*w_HDK, w_o_HKD, *b_HK, bias_of(self.out))


def bias_of(linear: nn.Module) -> Tensor:
    """The bias of a linear map, zeros for one without."""
    return linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias


class PretrainedMlp(MLP):
    """Two linear maps and an activation, by the library's name of it."""

    def __init__(self, up: nn.Module, down: nn.Module, activation: str) -> None:
        nn.Module.__init__(self)
        if activation not in ACTIVATION_NAMES:
            raise ConfigError(
                f"activation {activation}: its gate act(z)/z is not covered; covered: {', '.join(ACTIVATION_NAMES)}; "
                "rankbench.model.tape takes the module as it is"
            )
        self.up, self.down, self.activation_name = up, down, ACTIVATION_NAMES[activation]
        self.activation = ACTIVATIONS[self.activation_name]


class PretrainedNorm(Norm):
    """A LayerNorm of the library, with its own epsilon."""

    def __init__(self, module: nn.LayerNorm) -> None:
        nn.Module.__init__(self)
        self.module, self.epsilon = module, module.eps
        self.kind, (self.width,) = "layernorm", module.normalized_shape

    @property
    def weight(self) -> Tensor:
        return self.module.weight

    @property
    def shift(self) -> Tensor:
        return self.module.bias
