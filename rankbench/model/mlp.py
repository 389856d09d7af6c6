"""The MLP of a layer, and the interface of every map of each token by itself.

Shapes: B batch, N token, D width, F hidden width.
"""

from torch import Tensor, nn

from rankbench.config.model import ModelConfig
from rankbench.model.activations import ACTIVATIONS, GATES
from rankbench.model.linear import LinearMap, linear


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
