"""Public checkpoints as networks of this package: their weights as views, never as copies.

checkpoint = load_checkpoint("folder or name on the hub", initialised_seed=0)
network = as_network(checkpoint.trained)
"""

from rankbench.model.pretrained.checkpoint import BESIDE, Checkpoint, load_checkpoint, load_tokenizer
from rankbench.model.pretrained.families import FAMILIES, PretrainedNetwork, as_network

__all__ = ["BESIDE", "FAMILIES", "Checkpoint", "PretrainedNetwork", "as_network", "load_checkpoint", "load_tokenizer"]
