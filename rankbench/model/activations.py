"""The activations of MLPs, each with its gate act(z)/z (act'(0) at z = 0); a frozen gate makes an MLP linear."""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

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
