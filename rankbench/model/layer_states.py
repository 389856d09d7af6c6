"""A network of ours as a module that also returns the state after each layer, for what measures any torch module.

Shapes: B batch, N token, D width, C classes or output dimensions.
"""

from typing import Any

from torch import Tensor, nn

from rankbench.model.network import Network


class WithLayerStates(nn.Module):
    """Returns the network's output (B, N, C) and the states after its layers, (B, N, D) each."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor, kernel: str = "table") -> dict[str, Any]:
        network = self.network
        states = list(network.states_after_layers(inputs, kernel))
        return {"output": network.read_out(network.finish(states[-1])), "layers": states}
