"""The sum of every path of a tiny network, one by one: a brute force that knows nothing of the tape.

A module runs once; then again with everything that depends on the data held at the values of that pass, and with some
of its heads switched off. What is left is affine in the input and in every head by itself, so that inclusion and
exclusion over the switches gives the path through each set of heads.

Shapes: B sequence, N token, D width, H head, K head width.
"""

from itertools import product

import torch
from networks_of_others import B, H, N
from torch.overrides import TorchFunctionMode

# Float64: eps = 2.2e-16. The sum of a length is a difference of 64 outputs, of which it may be a thousandth.
ROUNDING = 1e-10
# of the output: a set of heads that no path passes, such as two of one layer, has a sum of rounding
NO_PATH = 1e-13

# what depends on the data, by function: its result is held, or its result over its argument
VALUES = ("softmax", "sigmoid", "tanh", "silu", "softplus", "exp", "elu", "topk", "rsqrt")
RATIOS = ("gelu", "relu")


class Held(TorchFunctionMode):
    """Passes of a module: the first keeps what depends on the data; later ones use it, with some heads switched off.

    p: the function whose results (B, H, N, N), or one column wider with sinks, are attention weights. maps: modules
    whose results are held, too.
    """

    def __init__(self, p, maps=()):
        super().__init__()
        self.p, self.maps = p, [module.weight for module in maps]
        self.kept, self.numbers, self.num_heads, self.switches = [], None, 0, None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.__name__.strip("_").removeprefix("true")
        if name == "scaled_dot_product_attention":
            q, k, v = args
            assert not any(value is not None for value in kwargs.values())
            return self.weights(lambda: (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)) @ v
        if name == "layer_norm":
            x, centred = args[0], args[0] - args[0].mean(-1, keepdim=True)
            scale = self.held(lambda: (x.var(-1, keepdim=True, correction=0) + kwargs["eps"]).rsqrt())
            return scale * centred * kwargs["weight"] + kwargs["bias"]
        if name == self.p and args[0].shape[:3] == (B, H, N):
            return self.weights(lambda: func(*args, **kwargs))
        if name in VALUES or (name == "linear" and any(args[1] is weight for weight in self.maps)):
            return self.held(lambda: func(*args, **kwargs))
        if name in RATIOS:
            return args[0] * self.held(lambda: func(*args, **kwargs) / args[0])
        return func(*args, **kwargs)

    def held(self, make):
        if self.numbers is None:
            self.kept.append(make())
            return self.kept[-1]
        return self.kept[next(self.numbers)]

    def weights(self, make):
        p_BHNM, first = self.held(make), self.num_heads
        self.num_heads += H
        if self.switches is None:
            return p_BHNM
        return p_BHNM * p_BHNM.new_tensor(self.switches[first : first + H])[:, None, None]

    def run(self, module, inputs, switches=None):
        self.num_heads, self.switches = 0, switches
        self.numbers = None if switches is None else iter(range(len(self.kept)))
        with self:
            return module(**inputs)


def every_path(module, inputs, p="softmax", maps=()):
    """The sum of the paths through each set of heads, (2, .., 2, B, N, D): an axis for each head, 1 if it is passed."""
    held = Held(p, maps)
    whole = held.run(module, inputs)
    num_heads = held.num_heads
    sums = torch.stack([held.run(module, inputs, switches) for switches in product((0, 1), repeat=num_heads)])
    sums = sums.unflatten(0, (2,) * num_heads)
    torch.testing.assert_close(sums[(1,) * num_heads], whole, rtol=0, atol=1e-13 * whole.abs().max().item())
    for head in range(num_heads):
        off, on = sums.unbind(head)
        sums = torch.stack([off, on - off], head)
    return sums


def by_length(sums):
    """The sum of all paths of each length, and their number."""
    num_heads = sums.dim() - 3
    whole = sums.sum(tuple(range(num_heads))).norm()
    parts, counts = sums.new_zeros(num_heads + 1, *sums.shape[-3:]), [0] * (num_heads + 1)
    for passed in product((0, 1), repeat=num_heads):
        parts[sum(passed)] += sums[passed]
        counts[sum(passed)] += bool(sums[passed].norm() > NO_PATH * whole)
    longest = max(length for length, count in enumerate(counts) if count)
    return parts[: longest + 1], counts[: longest + 1]
