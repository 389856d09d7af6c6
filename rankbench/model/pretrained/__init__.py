"""Public checkpoints as networks of this package: their weights as views, never as copies.

network = as_network(module)
"""

from rankbench.model.pretrained.families import FAMILIES, PretrainedNetwork, as_network

__all__ = ["FAMILIES", "PretrainedNetwork", "as_network"]
