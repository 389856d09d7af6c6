"""The MLP of a layer, and its activations, each with its gate act(z)/z (act'(0) at z = 0); a frozen gate makes an MLP
linear.

Shapes: B batch, N token, D width, F hidden width.
"""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankbench.config.model import ModelConfig
from rankbench.model.linear import LinearMap, linear

TANH_RATE, TANH_CUBE = 2 * math.sqrt(2 / math.pi), 0.044715  # of gelu_new, z sigmoid(TANH_RATE (z + TANH_CUBE z^3))
QUICK_RATE = 1.702  # of quick_gelu, z sigmoid(QUICK_RATE z)

# relu and gelu are the choices of rankbench's own networks; gelu_new is the approximation of gelu by tanh.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": functools.partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda z: z * torch.sigmoid(QUICK_RATE * z),
    "silu": F.silu,
}

# These formulas need no division, so they also hold at z = 0.
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda z: (z > 0).to(z.dtype),
    "gelu": lambda z: 0.5 * torch.erfc(-z * math.sqrt(0.5)),
    "gelu_new": lambda z: torch.sigmoid(TANH_RATE * (z + TANH_CUBE * z**3)),
    "quick_gelu": lambda z: torch.sigmoid(QUICK_RATE * z),
    "silu": torch.sigmoid,
}


class MLP(nn.Module):
    """Two linear maps and an activation, token by token."""

    up: LinearMap
    down: LinearMap

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        hidden = round(cfg.mlp_ratio * cfg.width)
        self.activation_name, self.activation = cfg.activation, ACTIVATIONS[cfg.activation]
        self.up = linear(cfg, cfg.width, hidden)
        self.down = linear(cfg, hidden, cfg.width)

    def gate(self, z_BNF: Tensor) -> Tensor:
        """activation(z)/z elementwise, and the derivative at z = 0; with this factor frozen the MLP is linear."""
        return GATES[self.activation_name](z_BNF)

    def forward(self, x_BND: Tensor) -> Tensor:
        return self.from_hidden(self.hidden(x_BND))

    def hidden(self, x_BND: Tensor) -> Tensor:
        """Input of the activation, (B, N, F)."""
        return self.up(x_BND)

    def from_hidden(self, z_BNF: Tensor) -> Tensor:
        """Output of the MLP from the input of the activation."""
        return self.down(self.activation(z_BNF))

    def observe(self, x_BND: Tensor, present_BN: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """The output, and by name the input of the activation."""
        hidden_BNF = self.hidden(x_BND)
        return self.from_hidden(hidden_BNF), {"hidden_BNF": hidden_BNF}
